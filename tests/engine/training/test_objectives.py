"""Objectives of a recipe: the presets of a name; an update's gradient is that of the objective, with and without shared
prefixes, in float64, and so is a recorder's; a user's function, the guard, overlong shaping."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from model_cases import make_config
from surrogate_cases import BY_HAND, DELTA, HIGH, LOW
from train_cases import Make, assert_same_run, steps_of, train_killed
from update_cases import ADVANTAGES, logits, logprobs, make_updater, spoken, update

from thresher.common.errors import UserError
from thresher.engine.config.objectives import OBJECTIVES
from thresher.engine.config.recipe import make_recipe
from thresher.engine.config.sections import GrpoSection, RolloutSection
from thresher.engine.packing import build_train_sequences
from thresher.engine.protocol.trajectory import Trajectory
from thresher.engine.store.token_stats import TokenRecorder
from thresher.engine.training.step import GrpoStep, overlong_penalty, weights_moved
from thresher.engine.training.train import train
from thresher.policy.model import Policy, init_policy
from thresher.rewards.reward import RewardResult

PRESET = {"grpo": {"beta": 0.5, "clip_high": 0.2, "kl_value": "k1", "dual_clip": 3.0}}


def policy_of(seed: int = 0) -> Policy:
    config = make_config(vocab_size=37, hidden_size=24, intermediate_size=40, initializer_range=0.3)
    return init_policy(config, seed).double().requires_grad_(True)


def expected(
    policy: Policy, trajectories: list[Trajectory], surrogate: str, weights: list[float]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return autograd's gradient by the weights and, for each trajectory, by its tokens' own logits."""
    loss, logits_RV, targets_R1 = torch.zeros((), dtype=torch.float64), [], []
    for trajectory, advantage, weight in zip(trajectories, ADVANTAGES, weights, strict=True):
        logits_RV.append(logits(policy, trajectory))
        targets_R1.append(torch.tensor(trajectory.ids())[trajectory.policy_positions()][:, None])
        own = logits_RV[-1].log_softmax(-1).gather(1, targets_R1[-1])[:, 0]
        old = torch.tensor(trajectory.policy_logprobs(), dtype=torch.float64)
        A = torch.full_like(own, torch.tensor(advantage, dtype=torch.float32).item()).detach()
        loss = loss - torch.tensor(weight, dtype=torch.float32).item() * BY_HAND[surrogate](own, old, A).sum()
    of_weights = torch.autograd.grad(loss, list(policy.parameters()), retain_graph=True)
    of_logits = torch.autograd.grad(loss, logits_RV)
    return list(of_weights), [x.gather(1, ids)[:, 0] for x, ids in zip(of_logits, targets_R1, strict=True)]


def found(policy: Policy, gradients: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [gradients[name] for name, _ in policy.named_parameters()]


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_update_has_the_objectives_gradient(objective: str, gradients: dict[str, torch.Tensor]) -> None:
    policy = policy_of()
    trajectories = spoken(policy, 0, 0.5)
    aggregation = OBJECTIVES[objective].grpo.get("aggregation", "trajectory")
    lengths = [len(trajectory.policy_positions()) for trajectory in trajectories]
    constant = 40.0 if aggregation == "constant" else None
    per_token = {"token": [1 / sum(lengths)] * 3, "constant": [1 / (3 * 40.0)] * 3}
    weights = per_token.get(aggregation, [1 / (3 * n) for n in lengths])
    wanted, of_logits = expected(policy, trajectories, OBJECTIVES[objective].surrogate, weights)
    grpo = GrpoSection(
        objective=objective,
        clip_low=LOW,
        clip_high=HIGH,
        divergence=DELTA,
        beta=0.0,
        aggregation=aggregation,
        aggregation_constant=constant,
    )
    for share in (True, False):
        recorder, sequences = TokenRecorder(), build_train_sequences(trajectories, ADVANTAGES, grpo)
        updater = make_updater(policy, None, grpo, share_prefix=share, micro_batch_tokens=10_000)
        updater.update(sequences, 0, 1.0, recorder)
        for gradient, exact in zip(found(policy, gradients), wanted, strict=True):
            assert float((gradient - exact).norm()) <= 1e-12 * float(exact.norm())
        for (_, values), exact in zip(sorted(recorder.found().items()), of_logits, strict=True):
            assert values["gradient"] == pytest.approx(-exact.numpy(), rel=2**-24)  # bound: rounded to float32


def test_an_objective_presets_keys_between_the_systems_and_ones_own() -> None:
    def grpo(**keys: Any) -> GrpoSection:
        tables = {"model": {"path": "m"}, "system": {"name": "s"}, "grpo": keys, "rollout": {"max_policy_tokens": 77}}
        return make_recipe(tables, "here", preset=lambda name: PRESET).grpo

    assert (grpo().objective, grpo().beta, grpo().clip_high, grpo().kl_value) == ("grpo", 0.5, 0.2, "k1")
    dapo = grpo(objective="dapo")
    assert (dapo.beta, dapo.clip_high, dapo.aggregation, dapo.kl_value) == (0.0, 0.28, "token", "k1")
    own = grpo(objective="dapo", beta=0.1, aggregation="trajectory")
    assert (own.beta, own.clip_high, own.aggregation) == (0.1, 0.28, "trajectory")
    assert [grpo(objective=name).dual_clip for name in ("grpo", "gspo", "cispo", "sapo")] == [3.0, 3.0, None, None]
    with pytest.raises(UserError, match=r'dual_clip: expected none with objective = "gmpo"; only grpo, dr_grpo, dapo'):
        grpo(objective="gmpo", dual_clip=3.0)
    dr = grpo(objective="dr_grpo")
    assert (dr.aggregation, dr.aggregation_constant, dr.scale) == ("constant", 77.0, "none")
    assert grpo(objective="dr_grpo", aggregation="token").aggregation_constant is None
    assert grpo(objective="dr_grpo", aggregation_constant=9.0).aggregation_constant == 9.0
    tables = {"model": {"path": "m"}, "grpo": {"objective": "dapo"}}
    assert make_recipe(tables, "here", ["grpo.objective=rloo"]).grpo.baseline == "leave_one_out"
    with pytest.raises(
        UserError, match=r'objective: expected the name of an objective, got "dappo"; did you mean dppo'
    ):
        grpo(objective="dappo")
    for keys, why in (
        ({"objective": "reinforce", "scale": "batch"}, r'scale: expected none with baseline = "none", got batch'),
        ({"guard": "llds"}, r'updates_per_batch: expected 2 or more with grpo.guard = "llds", which acts on'),
        ({"overlong_tokens": 78}, "overlong_tokens: expected at most the 77 tokens that a trajectory may have, got 78"),
        (
            {"old_logprobs": "recomputed", "tis_level": "token", "tis_rule": "mask", "tis_cap": 1.0},
            'tis_cap: expected more than 1 with tis_rule = "mask"',
        ),
    ):
        with pytest.raises(UserError, match=why):
            grpo(**keys)


def test_the_guard_sees_turns(gradients: dict[str, torch.Tensor]) -> None:
    """The turns of a trajectory, each a run of sampled tokens, are guarded one by one."""
    policy = policy_of()
    trajectories = spoken(policy, 3, 0.5)
    update(policy, None, trajectories, ADVANTAGES, GrpoSection(beta=0.0), share_prefix=False)
    without = [gradient.clone() for gradient in found(policy, gradients)]
    update(policy, None, trajectories, ADVANTAGES, GrpoSection(beta=0.0, guard="llds", guard_weight=0.7))
    penalty, held = torch.zeros((), dtype=torch.float64), 0
    for trajectory, advantage in zip(trajectories, ADVANTAGES, strict=True):
        own, start = logprobs(policy, trajectory), 0
        old = torch.tensor(trajectory.policy_logprobs(), dtype=torch.float64)
        for segment in trajectory.segments:
            if not segment.logprobs:
                continue
            fallen = (old - own)[start : start + len(segment.ids)]
            start += len(segment.ids)
            if advantage >= 0 and float(fallen.detach().sum()) > 0:
                weight = torch.tensor(1 / (3 * len(own)), dtype=torch.float32).item()
                penalty, held = penalty + 0.7 * weight * fallen.clamp(min=0).sum(), held + 1
    assert held == 1  # of the two turns with a right answer
    wanted = torch.autograd.grad(penalty, list(policy.parameters()))
    for gradient, before, exact in zip(found(policy, gradients), without, wanted, strict=True):
        assert float((gradient - before - exact).norm()) <= 1e-12 * float(gradient.norm())
    for guard in ("llds", "llds_positive"):  # only the first holds trajectories of advantage 0
        none = [0.0] * len(ADVANTAGES)
        update(policy, None, trajectories, none, GrpoSection(beta=0.0, guard=guard))
        assert any(gradient.any() for gradient in found(policy, gradients)) == (guard == "llds")


GUARDED: dict[str, dict[str, dict[str, Any]]] = {
    "from the rollout": {},
    "recomputed": {"grpo": {"old_logprobs": "recomputed"}},
    "by steps that moved nothing": {
        "grpo": {"updates_per_batch": 1},
        "rollout": {"partial": True, "groups_in_flight": 6, "max_num_seqs": 6, "max_staleness": 2},
    },
    # A weight that is moved by 1e-30 stays the same number, so guarded values differ at most by how they are packed.
    "recomputed, and taken for moved": {
        "grpo": {"old_logprobs": "recomputed"},
        "optim": {"lr": 1e-30, "weight_decay": 0.1, "micro_batch_tokens": 10_000},
        "rollout": {"questions_per_step": 6},
    },
}


@pytest.mark.parametrize("case", GUARDED)
def test_the_guard_takes_no_rounding_for_a_fall(make_recipe: Make, tmp_path: Path, case: str) -> None:
    """The guard's gradient is the only one, so no weight ever moves."""
    (tmp_path / "zero.py").write_text("def zero(logprobs, *others):\n    return 0 * logprobs\n")
    grpo = {"objective": f"{tmp_path / 'zero.py'}:zero", "guard": "llds", "beta": 0.0, "updates_per_batch": 2}
    tables: dict[str, dict[str, Any]] = {"grpo": grpo, "optim": {"lr": 1e-3}, "run": {"steps": 3, "eval_every": None}}
    for section, keys in GUARDED[case].items():
        tables[section] = tables.get(section, {}) | keys
    train(make_recipe(**tables), tmp_path / "run")
    steps = steps_of(tmp_path / "run")
    assert [step["grad_norm"] for step in steps] == [0, 0, 0] and all(step["loss_tokens"] for step in steps)
    assert case != "by steps that moved nothing" or any(step["staleness_mean"] for step in steps)


def test_the_last_step_that_moved_the_weights_is_told_from_the_records() -> None:
    def found(*norms: float | None, decay: float = 0.0) -> tuple[int, bool]:
        records = [
            {"step": n, "lr": 0.1} | ({} if norm is None else {"grad_norm": norm}) for n, norm in enumerate(norms, 1)
        ]
        return weights_moved([*records, {"step": 9, "eval": {}}], decay)

    assert found() == found(0.0) == found(None, 0.0) == (0, False)
    assert found(0.0, 0.5) == (2, True) and found(0.0, 0.5, 0.0) == (3, True), "moments move it further"
    assert found(0.0, 0.5, None) == (2, True) and found(0.0, 0.0, decay=0.1) == (2, False)


def test_a_guarded_run_that_was_killed_goes_on_to_the_same_bits(make_recipe: Make, tmp_path: Path) -> None:
    """The records tell whether the weights have moved."""
    recipe = make_recipe(grpo={"guard": "llds", "updates_per_batch": 2}, run={"steps": 3, "save_every": 1})
    train(recipe, tmp_path / "whole")
    train_killed(recipe, tmp_path / "killed", 2)
    train(recipe, tmp_path / "killed", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_the_guard_holds_what_earlier_weights_drew(gradients: dict[str, torch.Tensor]) -> None:
    """This holds in the first update of a batch with one stale trajectory."""
    policy, grpo = policy_of(), GrpoSection(beta=0.0, guard="llds")
    sequences = build_train_sequences(spoken(policy, 3, 0.5), [0.0] * 3, grpo)
    kept = []
    for moved, stale in ((True, [0, 0, 0]), (False, [0, 0, 0]), (False, [len(one.positions) for one in sequences])):
        chosen = [replace(one, stale=count) for one, count in zip(sequences, stale, strict=True)]
        make_updater(policy, None, grpo, micro_batch_tokens=10_000).update(chosen, 0, 1.0, None, moved)
        kept.append([gradient.clone() for gradient in found(policy, gradients)])
    whole, nothing, of_stale = kept
    assert any(gradient.any() for gradient in whole) and not any(gradient.any() for gradient in nothing)
    assert all(map(torch.equal, whole, of_stale))


def test_an_objective_of_ones_own(tmp_path: Path, gradients: dict[str, torch.Tensor]) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "def twice(logprobs, old, ref, advantages, mask, sequence):\n"
        "    return -2 * advantages * logprobs\n\n"
        "def short(logprobs, *others):\n    return logprobs[1:]\n\n"
        "def fails(logprobs, *others):\n    return logprobs.nonsense\n"
    )
    policy = policy_of()
    trajectories = spoken(policy, 0, 0.5)
    update(policy, None, trajectories, ADVANTAGES, GrpoSection(objective="reinforce", beta=0.0))
    once = [gradient.clone() for gradient in found(policy, gradients)]
    update(policy, None, trajectories, ADVANTAGES, GrpoSection(objective=f"{own}:twice", beta=0.0))
    for gradient, half in zip(found(policy, gradients), once, strict=True):
        assert float((gradient - 2 * half).norm()) <= 1e-12 * float(gradient.norm())
    for function, why in (
        (
            "short",
            r"own.py:short: short returned a tensor of shape \[19\]; expected the loss of each row, of shape",
        ),
        ("fails", r"own.py: fails\(..\) raised AttributeError .* at line 8; fix the file"),
        ("absent", r"grpo.objective: .*own.py has no function absent; add it, or name another"),
    ):
        with pytest.raises(UserError, match=why):
            update(policy, None, trajectories, ADVANTAGES, GrpoSection(objective=f"{own}:{function}", beta=0.0))


@pytest.mark.parametrize(
    ("turns", "most", "expected"), [(1, 2048, [1, 0.5, 0]), (2, 18, [1, 1, 0.6]), (9, 99, [1, 1, 1])]
)
def test_overlong_shaping_begins_below_what_all_turns_may_have(turns: int, most: int, expected: list[float]) -> None:
    """Samples of 2, 7 and 12 tokens; a turn may have 12, and the buffer has 10."""
    rollout = RolloutSection(max_turns=turns, max_turn_tokens=12, max_policy_tokens=most)
    context = SimpleNamespace(recipe=SimpleNamespace(grpo=GrpoSection(overlong_tokens=10), rollout=rollout))
    scored = [
        SimpleNamespace(result=RewardResult(1.0), trajectory=SimpleNamespace(count=lambda _, length=length: length))
        for length in (2, 7, 12)
    ]
    assert GrpoStep._rewards(cast(Any, SimpleNamespace(context=context)), cast(Any, scored)) == pytest.approx(expected)


def test_overlong_shaping_is_trls() -> None:
    """Expected values: TRL 1.16's get_soft_overlong_punishment(100, 20) for these lengths."""
    lengths = [10, 60, 79, 80, 81, 90, 99, 100, 101, 130]
    wanted = [0.0, 0.0, 0.0, 0.0, 0.05, 0.5, 0.95, 1.0, 1.0, 1.0]
    assert [overlong_penalty(length, 100, 20) for length in lengths] == pytest.approx(wanted)
