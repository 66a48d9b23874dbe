"""The update against a float64 brute force of the equation at the top of update.py, and its parts."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_fakes import install
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import make_config
from train_cases import Make
from update_cases import (
    ADVANTAGES,
    BRANCH,
    FOLDED,
    POLICY,
    PROMPT,
    RETRIEVED,
    SHAPES,
    VOCAB,
    brute_force,
    entropies,
    logits,
    logprobs,
    make_updater,
    rounded,
    spoken,
    update,
)

from thresher.common.errors import UserError
from thresher.engine.config.sections import GrpoSection, OptimSection, SftSection
from thresher.engine.optim.master_weights import MasterWeights, make_optimizer, scheduled_lr, step_optimizer
from thresher.engine.packing import LossNormalizer, build_train_sequences, grpo_advantages
from thresher.engine.protocol.trajectory import Segment, Trajectory
from thresher.engine.store.token_stats import TokenRecorder
from thresher.engine.training import update as update_module
from thresher.engine.training.sft import SftTrainer, Transcript
from thresher.engine.training.train import train
from thresher.engine.training.update import choose_attention
from thresher.kernels.attention.backends.choice import load_attention
from thresher.kernels.attention.varlen import Varlen, varlen_attention
from thresher.policy.model import Policy, init_policy
from thresher.rewards.advantages import group_advantages

COLUMNS = 37  # of the head, which is wider than the tokenizer
Gradients = dict[str, torch.Tensor]


def make_policy(seed: int = 0, tied: bool = False) -> Policy:
    """Return a float64 policy of two layers with random weights."""
    config = make_config(
        vocab_size=COLUMNS, hidden_size=24, intermediate_size=40, tie_word_embeddings=tied, initializer_range=0.3
    )
    return init_policy(config, seed).double().requires_grad_(True)


@pytest.mark.parametrize(
    ("grpo", "temperature", "spread", "tied"),
    [
        *[(GrpoSection(kl_value=kl, beta=0.3), 1.0, 0.3, False) for kl in ("k1", "k2", "k3")],
        (GrpoSection(beta=0.0), 1.0, 0.3, False),
        (GrpoSection(kl_value="k3", kl_gradient="k2", beta=0.5), 0.7, 0.3, False),
        (GrpoSection(beta=0.1, clip_low=0.05, clip_high=0.4, entropy_coef=0.02), 1.3, 0.5, False),
        (GrpoSection(beta=0.1, dual_clip=1.5), 1.0, 1.0, False),
        (GrpoSection(beta=0.1, aggregation="token"), 1.0, 0.3, False),
        (GrpoSection(beta=0.1, aggregation="constant", aggregation_constant=64.0), 1.0, 0.3, False),
        (GrpoSection(beta=0.1), 1.0, 0.3, True),
    ],
)
def test_the_gradient_is_that_of_the_equation(
    gradients: Gradients, grpo: GrpoSection, temperature: float, spread: float, tied: bool
) -> None:
    policy = make_policy(0, tied)
    reference = make_policy(1, tied).requires_grad_(False) if grpo.beta else None
    trajectories = spoken(policy, 0, spread, temperature)
    arguments = (policy, reference, trajectories, ADVANTAGES, grpo, temperature)
    loss, expected = brute_force(*arguments)
    for budget in (1, 10_000):  # one forward per trajectory, and one for all
        stats = update(*arguments, micro_batch_tokens=budget)
        # Ten thousand roundings of float64, for some thousand products and sums per row.
        assert stats.loss == pytest.approx(float(loss), rel=1e-12, abs=1e-12)
        for name, wanted in expected.items():
            assert (gradients[name] - wanted).norm() <= 1e-12 * wanted.norm(), name
        assert stats.rows == 8 + 3 + 9 and stats.tokens == 17 + 11 + 15
        assert stats.sums["clipped"] > 0
    # Columns that the tokenizer does not have are not part of the softmax.
    assert not gradients["embed_VH" if tied else "untied_head_VH"][VOCAB:].any()


@pytest.mark.parametrize("aggregation", ["trajectory", "token"])
def test_a_folded_trajectory_is_trained_as_its_contexts_apart(gradients: Gradients, aggregation: str) -> None:
    """Two contexts, an empty third and a trained branch equal the hand-written loss of each context by itself. Its
    weight is that of one token in eleven of one trajectory in two; the branch has its own advantage."""
    policy, reference = make_policy(0), make_policy(1).requires_grad_(False)
    grpo = GrpoSection(beta=0.1, clip_low=0.05, aggregation=aggregation)
    shapes = [FOLDED[:3], FOLDED[3:7], FOLDED[7:], BRANCH, SHAPES[0]]
    first, second, third, branch, other = apart = spoken(policy, 0, 0.3, shapes=shapes)
    folded = replace(first, segments=[*first.segments, *second.segments, *third.segments])
    folded.branches = {"unseen": replace(other), "told": replace(branch, trained=True)}
    count = 3 + 6 + 2
    # brute_force divides by its own number of trajectories and the tokens of each; the constant compensates for it.
    wanted, grads = torch.zeros((), dtype=torch.float64), dict[str, torch.Tensor]()
    for context, advantage in zip(apart, (1.3, 1.3, 0.0, -0.7, -0.9), strict=True):
        tokens = len(context.policy_positions())
        if not tokens:
            continue
        constant = 2.0 * count if context is not other else 2.0 * tokens
        constant = float(count + 8) if aggregation == "token" else constant
        by_hand = replace(grpo, aggregation="constant", aggregation_constant=constant)
        loss, found = brute_force(policy, reference, [context], [advantage], by_hand)
        wanted = wanted + loss
        grads = {name: grads.get(name, 0) + value for name, value in found.items()}
    advantages: list[float | list[float]] = [[1.3] * 9 + [-0.7] * 2, -0.9]
    for budget in (1, 10_000):
        sequences = build_train_sequences([folded, other], advantages, grpo)
        stats = make_updater(policy, reference, grpo, micro_batch_tokens=budget).update(sequences, 0, 1.0)
        assert stats is not None and stats.rows == count + 8
        assert stats.loss == pytest.approx(float(wanted), rel=1e-12, abs=1e-12)
        for name, value in grads.items():
            assert (gradients[name] - value).norm() <= 1e-12 * value.norm(), name


def test_the_gradient_in_float32(gradients: Gradients) -> None:
    """Over all weights and six rollout batches, no further from float64 than four times the error of autograd. Autograd
    uses the same forward in float32."""
    grpo, error, plain_error = GrpoSection(beta=0.2), 0.0, 0.0
    for seed in range(6):
        policy, reference = make_policy(0), make_policy(1).requires_grad_(False)
        trajectories = spoken(policy, 1000 * seed, 0.3)
        _, expected = brute_force(policy, reference, trajectories, ADVANTAGES, grpo)
        update(policy.float(), reference.float(), trajectories, ADVANTAGES, grpo)
        _, plain = brute_force(policy, reference, trajectories, ADVANTAGES, grpo)
        for name, gradient in gradients.items():
            assert gradient.dtype == torch.float32
            size = expected[name].norm()
            error += float((gradient - expected[name]).norm() / size) ** 2
            plain_error += float((plain[name] - expected[name]).norm() / size) ** 2
    assert error**0.5 <= 4 * plain_error**0.5


def test_statistics_are_sums_and_largest_values_over_the_rows() -> None:
    policy, reference = make_policy(0), make_policy(1).requires_grad_(False)
    trajectories = spoken(policy, 0, 0.3)
    own = torch.cat([logprobs(policy, trajectory) for trajectory in trajectories]).detach()
    old = torch.tensor([value for trajectory in trajectories for value in trajectory.policy_logprobs()])
    d = own - torch.cat([logprobs(reference, trajectory) for trajectory in trajectories]).detach()
    ratio, k3 = (own - old).exp(), (-d).exp() + d - 1
    values = {"k1": d, "k2": d * d / 2, "k3": k3, "k3_ratio": ratio * k3}
    sums = {
        "entropy": sum(entropies(policy, trajectory).detach().sum() for trajectory in trajectories),
        "clipped": torch.zeros(()),  # an advantage of 0 has nothing to clip
        "ratio": ratio.sum(),
        "logprob_gap": (own - old).abs().sum(),
        **{f"kl_{name}": values[name].sum() for name in ("k1", "k2", "k3")},
    }
    coefficients = {"k1": torch.ones(1), "k2": d, "k3": 1 - (-d).exp(), "k3_ratio": ratio * d, "none": torch.zeros(1)}
    for value, gradient in (*((name, None) for name in values), ("k3", "k2"), ("none", "k3"), ("k2", "none")):
        same = make_policy(0)  # an update moves the policy
        grpo = GrpoSection(beta=0.1, kl_value=value, kl_gradient=gradient)
        # Over all micro-batches, here one per trajectory.
        stats = update(same, reference, trajectories, [0.0] * 3, grpo, micro_batch_tokens=20)
        assert stats.sums == {name: pytest.approx(float(number), rel=1e-6) for name, number in sums.items()}
        expected = {"kl_coefficient_largest": coefficients[gradient or value], "logprob_gap_max": ratio.log()}
        expected |= {} if value == "none" else {"kl_largest": values[value]}
        assert stats.largest == {
            name: pytest.approx(float(numbers.abs().max()), rel=1e-6) for name, numbers in expected.items()
        }
    without = update(make_policy(0), None, trajectories, [1.0, 0.0, 0.0], GrpoSection(beta=0.0))
    assert without.largest.keys() == {"logprob_gap_max"}


def test_the_losss_workspace_is_the_recipes(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, reference = make_policy(0), make_policy(1).requires_grad_(False)
    seen: list[int | None] = []
    for name in ("grpo_loss", "token_logprobs"):
        real = getattr(update_module, name)

        def spy(*arguments: Any, real: Any = real, **options: Any) -> Any:
            seen.append(options["workspace_bytes"])
            return real(*arguments, **options)

        monkeypatch.setattr(update_module, name, spy)
    for size in (None, 10**6):
        update(policy, reference, spoken(policy, 0, 0.3), ADVANTAGES, GrpoSection(beta=0.1), loss_workspace_bytes=size)
    assert seen == [None, None, 10**6, 10**6]


def test_what_follows_the_last_policy_token_changes_no_bit(gradients: Gradients) -> None:
    policy = make_policy(0)
    trajectories = spoken(policy, 0, 0.3)
    update(policy, None, trajectories, ADVANTAGES, GrpoSection(beta=0))
    first = dict(gradients)
    last = trajectories[1].segments[-1]
    assert last.source is RETRIEVED
    last.ids = [(token + 7) % VOCAB for token in last.ids]
    update(policy, None, trajectories, ADVANTAGES, GrpoSection(beta=0))
    assert all(torch.equal(gradients[name], first[name]) for name in first)
    # The same ids from the policy would be trained.
    last.source, last.logprobs = POLICY, [-3.0] * len(last.ids)
    update(policy, None, trajectories, ADVANTAGES, GrpoSection(beta=0))
    assert not torch.equal(gradients["norm"], first["norm"])


def test_dropping_changes_no_gradient_where_there_is_no_kl(gradients: Gradients) -> None:
    policy = make_policy(0)
    trajectories = spoken(policy, 0, 0.2)
    all_of_them = update(policy, None, trajectories, [0.7, 0.0, -0.7], GrpoSection(beta=0))
    first = dict(gradients)
    fewer = update(policy, None, trajectories, [0.7, 0.0, -0.7], GrpoSection(beta=0, drop_zero_advantage=True))
    assert (all_of_them.rows, fewer.rows) == (20, 17) and fewer.tokens < all_of_them.tokens
    for name in first:
        torch.testing.assert_close(gradients[name], first[name], rtol=1e-10, atol=1e-12)


def test_an_old_log_prob_that_is_no_number_is_refused() -> None:
    policy = make_policy(0)
    trajectories = spoken(policy, 0, 0.1)
    trajectories[2].segments[1].logprobs[4] = math.nan
    with pytest.raises(ValueError, match=r"old_logprobs_T\[4\] is nan, not a finite number"):
        update(policy, None, trajectories, ADVANTAGES, GrpoSection(beta=0), micro_batch_tokens=1)


def test_an_update_moves_the_policy_towards_what_was_rewarded() -> None:
    policy = make_policy(0).float()
    trajectories, grpo = spoken(policy, 0, 0.0), GrpoSection(beta=0)
    before = [float(logprobs(policy, trajectory).detach().sum()) for trajectory in trajectories]
    items = build_train_sequences(trajectories, [1.0, -1.0, 0.0], grpo)
    stats = make_updater(policy, None, grpo, lr=1e-3, warmup_ratio=0.5).update(items, 1, 1.0)
    assert stats is not None and stats.lr == pytest.approx(1e-3 * 2 / 5) and stats.grad_norm > 0 and stats.seconds > 0
    after = [float(logprobs(policy, trajectory).detach().sum()) for trajectory in trajectories]
    assert after[0] > before[0] and after[1] < before[1]


def test_the_optimiser_steps_on_the_gradient_clipped_to_the_recipes_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """AdamW's first step is nearly the same for a gradient of any size, so the weights alone would not show it."""
    policy = make_policy(0)
    trajectories, found, norms = spoken(policy, 0, 0.2), [], []

    def catch(optimizer: torch.optim.Optimizer, _: float) -> None:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        found.append(torch.cat([parameter.grad.flatten() for parameter in parameters]))
        optimizer.zero_grad()

    monkeypatch.setattr(update_module, "step_optimizer", catch)
    for largest in (math.inf, 0.01):
        stats = update(policy, None, trajectories, ADVANTAGES, GrpoSection(beta=0), max_grad_norm=largest)
        norms.append(stats.grad_norm)
    whole, clipped = found
    assert norms == pytest.approx([float(whole.norm())] * 2) and norms[0] > 0.1
    torch.testing.assert_close(clipped, whole * (0.01 / norms[0]), rtol=1e-4, atol=0)


def test_bfloat16_is_a_copy_of_float32_weights_that_are_trained() -> None:
    master, policy, grpo = make_policy(0).float(), make_policy(0).bfloat16(), GrpoSection(beta=0)
    before = {name: value.clone() for name, value in master.state_dict().items()}
    # A step of 1e-6 is lost on a bfloat16 weight of .3, and must not be lost on the float32 one.
    updater = make_updater(policy, None, grpo, master=master, lr=1e-6)
    updater.update(build_train_sequences(spoken(policy, 0, 0.0), ADVANTAGES, grpo), 0, 1.0)
    for (name, trained), used in zip(master.named_parameters(), policy.parameters(), strict=True):
        assert trained.dtype == torch.float32 and used.dtype == torch.bfloat16
        assert torch.equal(used.data, trained.data.bfloat16())
        assert used.grad is None and trained.grad is None
        assert 0 < float((trained.data - before[name]).abs().max()) < 2e-6, name


def test_recording_changes_no_bit_and_finds_what_the_loss_found(gradients: Gradients) -> None:
    policy, reference = make_policy(0), make_policy(1)
    trajectories = spoken(policy, 3, 0.0, 0.7)
    for trajectory in trajectories:
        for segment in trajectory.segments:
            # Ratios alternate between about .67 and 1.49, so that every trajectory has clipped and unclipped tokens.
            segment.logprobs = [rounded(value + (0.4, -0.4)[n % 2]) for n, value in enumerate(segment.logprobs)]
    grpo = GrpoSection(beta=0.1, tis_level="token", old_logprobs="recomputed", drop_zero_advantage=True)
    items = build_train_sequences(trajectories, [1.3, 0.0, -0.4], grpo)
    items[1] = replace(items[1], importance=[0.5] * 9)
    found, recorders = [], [TokenRecorder(), TokenRecorder()]
    # One item per micro-batch, and both in one. They are packed longest first, so an item's place is not its own.
    for budget, used in ((1, None), (1, recorders[0]), (10_000, recorders[1])):
        make_updater(policy, reference, grpo, micro_batch_tokens=budget).update(items[::-1], 0, 0.7, used)
        found.append(dict(gradients))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    alone, together = (recorder.found() for recorder in recorders)
    assert set(alone) == set(together) == {(0, 0), (0, 2)}
    for sample, values in itertools.product((0, 2), (alone, together)):
        trajectory, recorded = trajectories[sample], values[0, sample]
        own, ref = (logprobs(model, trajectory, 0.7).detach() for model in (policy, reference))
        ratio = torch.exp(own - torch.tensor(trajectory.policy_logprobs(), dtype=torch.float64))
        clipped = ratio > 1.2 if sample == 0 else ratio < 0.8
        entropy = entropies(policy, trajectory, 0.7).detach()
        assert recorded["recomputed"] == pytest.approx(own.numpy(), rel=2**-24)  # bound: rounded to float32
        assert recorded["reference"] == pytest.approx(ref.numpy(), rel=2**-24)  # bound: rounded to float32
        assert recorded["entropy"] == pytest.approx(entropy.numpy(), rel=2**-11)  # bound: rounded to float16
        assert recorded["clipped"].tolist() == clipped.tolist() and 0 < clipped.sum() < len(clipped)
        advantage = 1.3 if sample == 0 else -0.2
        assert recorded["advantage"] == pytest.approx([advantage] * len(own))
        # Minus autograd's derivative of the loss by each token's own logit, before the temperature.
        logits_RV = (logits(policy, trajectory, 0.7).detach() * 0.7).requires_grad_()
        targets_R1 = torch.tensor(trajectory.ids())[trajectory.policy_positions()][:, None]
        log_R = (logits_RV / 0.7).log_softmax(-1).gather(1, targets_R1)[:, 0]
        pull_R = torch.where(clipped, 0.0, torch.exp(log_R - log_R.detach()) * ratio * rounded(advantage))
        loss = rounded(1 / (3 * len(own))) * (0.1 * (torch.exp(ref - log_R) + log_R - ref) - pull_R).sum()
        (exact_RV,) = torch.autograd.grad(loss, logits_RV)
        exact_R = exact_RV.gather(1, targets_R1)[:, 0]
        assert recorded["gradient"] == pytest.approx(-exact_R.numpy(), rel=2**-24)  # bound: rounded to float32


# --- Advantages, and the weight of each token


def bare(rows: int, sample: int = 0) -> Trajectory:
    return Trajectory("q", 0, sample, [Segment(PROMPT, [1, 2]), Segment(POLICY, [3] * rows, [-1.0] * rows)])


CONSTANT = GrpoSection(aggregation="constant", aggregation_constant=50.0)
OF_TEN = LossNormalizer(trajectories=10, tokens=40)  # an optimiser step with further trajectories on other ranks


@pytest.mark.parametrize(
    ("grpo", "rows", "totals", "expected"),
    [
        (GrpoSection(), [3, 1, 8], None, [1 / 9, 1 / 3, 1 / 24]),
        (GrpoSection(), [2, 0, 4], None, [1 / 6, 1 / 12]),  # one without tokens counts in the mean, but trains nothing
        (GrpoSection(aggregation="token"), [3, 1, 8], None, [1 / 12, 1 / 12, 1 / 12]),
        (CONSTANT, [3, 1, 8], None, [1 / 150, 1 / 150, 1 / 150]),
        (GrpoSection(), [3, 5], OF_TEN, [1 / 30, 1 / 50]),
        (GrpoSection(aggregation="token"), [3, 5], OF_TEN, [1 / 40, 1 / 40]),
        (CONSTANT, [3, 5], OF_TEN, [1 / 500, 1 / 500]),
    ],
)
def test_weights_of_the_aggregations(
    grpo: GrpoSection, rows: list[int], totals: LossNormalizer | None, expected: list[float]
) -> None:
    sequences = build_train_sequences([bare(count) for count in rows], [1.0] * len(rows), grpo, totals)
    assert [one.weight for one in sequences] == pytest.approx(expected)
    assert [len(one.positions) for one in sequences] == [count for count in rows if count]


def test_dropping_groups_without_a_signal_leaves_the_weights_of_the_others() -> None:
    trajectories = [bare(2), bare(3), bare(4)]
    kept = build_train_sequences(trajectories, [0.0, 0.5, -0.5], GrpoSection(drop_zero_advantage=True))
    assert kept == build_train_sequences(trajectories, [0.0, 0.5, -0.5], GrpoSection())[1:]
    assert build_train_sequences(trajectories, [0.0] * 3, GrpoSection(drop_zero_advantage=True)) == []


@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.1, 0.5, 1.0])), min_size=1, max_size=20))
@settings(max_examples=200, derandomize=True, deadline=None)
def test_advantages_are_those_of_the_recipe_within_groups_however_scattered(entries: list[tuple[int, float]]) -> None:
    groups, rewards = [group for group, _ in entries], [reward for _, reward in entries]
    for grpo in (GrpoSection(), GrpoSection(std_floor=0.3, sample_std=True, std_eps=0.1)):
        found = grpo_advantages(rewards, groups, grpo)
        for group in set(groups):
            mine = [reward for number, reward in zip(groups, rewards, strict=True) if number == group]
            expected = group_advantages(mine, std_floor=grpo.std_floor, sample_std=grpo.sample_std, eps=grpo.std_eps)
            assert [a for number, a in zip(groups, found, strict=True) if number == group] == expected


# --- Optimiser and schedule


@pytest.mark.parametrize(
    ("schedule", "warmup_ratio", "expected"),
    [
        ("constant", 0.0, [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("constant", 0.25, [1 / 3, 2 / 3, 1, 1, 1, 1, 1, 1, 1, 1]),  # 2.5 steps are rounded to three
        ("linear", 0.0, [1, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1]),
        ("linear", 0.2, [0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
        ("cosine", 0.0, [(1 + math.cos(math.pi * step / 10)) / 2 for step in range(10)]),
        ("cosine", 0.6, [1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1, 1, 0.8535534, 0.5, 0.1464466]),
    ],
)
def test_schedules(schedule: str, warmup_ratio: float, expected: list[float]) -> None:
    found = [scheduled_lr(3e-4, schedule, warmup_ratio, step, 10) for step in range(10)]
    assert found == pytest.approx([3e-4 * share for share in expected])
    assert scheduled_lr(1.0, "constant", 0.07, 6, 100) == 1.0, "7 steps are 7, though .07 * 100 is a little more"
    beyond = [scheduled_lr(1.0, schedule, warmup_ratio, step, 10) for step in (10, 11, 100)]
    assert beyond == pytest.approx([1.0 if schedule == "constant" else 0.0] * 3)


def test_a_step_clips_by_the_norm_of_all_and_reports_it_unclipped(make_tiny_policy: Callable[..., Policy]) -> None:
    policy = make_tiny_policy().requires_grad_(True)
    weights = MasterWeights(policy)
    parameters = list(policy.parameters())
    before = [parameter.detach().clone() for parameter in parameters]
    optimizer = torch.optim.SGD(parameters, lr=99.0)
    norm, moved = 3 * math.sqrt(sum(parameter.numel() for parameter in parameters)), 0.0
    for largest, lr in ((1.0, 0.5), (math.inf, 0.1)):
        for parameter in parameters:
            parameter.grad = torch.full_like(parameter, 3.0)
        assert weights.clip(largest) == pytest.approx(norm)
        step_optimizer(optimizer, lr)
        moved += lr * 3.0 * min(1.0, largest / norm)
        for parameter, start in zip(parameters, before, strict=True):
            torch.testing.assert_close(parameter.data, start - moved)
            assert parameter.grad is None
        assert optimizer.param_groups[0]["lr"] == lr


def test_norms_and_biases_are_not_decayed() -> None:
    policy = make_policy()
    optim = OptimSection(weight_decay=0.1, betas=(0.8, 0.9), eps=1e-5)
    groups = make_optimizer(policy, optim, 0.01).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert groups[0]["betas"] == (0.8, 0.9) and groups[0]["eps"] == 1e-5
    name_of = {id(parameter): name for name, parameter in policy.named_parameters()}
    decayed, other = ({name_of[id(parameter)].split(".")[-1] for parameter in group["params"]} for group in groups)
    assert decayed == {"embed_VH", "untied_head_VH", "qkv_weight", "o_weight", "gate_up_weight", "down_weight"}
    assert other == {"norm", "input_norm", "post_norm", "qkv_bias"}
    assert sum(len(group["params"]) for group in groups) == len(name_of)


# --- Attention: chosen when the run is set up, called in every layer, or refused


@pytest.mark.parametrize("name", ["varlen_212", "flash2", "xformers"])
def test_every_layer_of_a_step_is_computed_by_the_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = init_policy(make_config(vocab_size=COLUMNS), 1).requires_grad_(False)
    plain, other = (init_policy(make_config(vocab_size=COLUMNS), 0) for _ in range(2))
    trajectories, grpo = spoken(plain, 0, 0.2), GrpoSection(beta=0.1)
    expected = update(plain, reference, trajectories, ADVANTAGES, grpo)
    install(monkeypatch, name)
    library, calls = load_attention(name.removesuffix("_212")), []  # type: ignore[arg-type]

    def counted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Varlen) -> torch.Tensor:
        calls.append(q.requires_grad)
        return library(q, k, v, layout)

    monkeypatch.setattr(update_module, "choose_attention", lambda optim, policy: (counted, "torch"))
    stats = update(other, reference, trajectories, ADVANTAGES, grpo, share_prefix=False)
    layers = plain.config.num_hidden_layers
    assert calls == [False] * layers + [True] * layers  # the reference's forward, then the policy's
    assert stats.loss == pytest.approx(expected.loss, abs=1e-5)
    assert stats.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)


def test_on_a_cpu_it_is_the_reference_itself() -> None:
    for name in ("auto", "torch"):
        assert choose_attention(OptimSection(attention=name), make_policy()) == (varlen_attention, "torch")
    assert Varlen([1]).attention is varlen_attention


@pytest.mark.parametrize(("name", "why"), [("triton", "serves rollouts and has no backward"), ("flash", "needs CUDA")])
def test_an_attention_that_does_not_serve_is_refused_before_there_is_a_folder(
    name: str, why: str, tmp_path: Path, make_recipe: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(UserError, match=f'^optim.attention is "{name}", which {why}'):
        train(make_recipe(optim={"attention": name}), tmp_path / "run")
    with pytest.raises(UserError, match=f'^rollout.attention is "{name}", which needs CUDA'):
        train(make_recipe(rollout={"attention": name}), tmp_path / "run")
    transcripts, section = [Transcript([1, 2], [1], [])], SftSection(data="d")
    with pytest.raises(UserError, match=f'^optim.attention is "{name}", which {why}'):
        weights = MasterWeights(make_policy().float())
        SftTrainer(weights, transcripts, section, OptimSection(attention=name), 5, 0)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
