"""Training adapters: the gradient of a dense computation, a reference that is the base to the bit without a second
model, batch-invariant samples, and checkpoints that are ordinary models. A killed run is in test_fitting.py."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_invariance import needs_invariant_policy, using_threads
from rollout_cases import assert_logprobs_match
from safetensors.torch import load_file
from train_cases import Make
from update_cases import ADVANTAGES, brute_force, logprobs, make_updater, spoken, update

from thresher.common.errors import UserError
from thresher.engine import assemble
from thresher.engine.config.sections import GrpoSection
from thresher.engine.packing import build_train_sequences
from thresher.engine.protocol.trajectory import Trajectory
from thresher.engine.rollout.rollout import Job
from thresher.engine.training import update as update_module
from thresher.engine.training import weights as weights_module
from thresher.engine.training.train import train
from thresher.policy.lora import FOLDER, MODULES, adapters, add_lora, load_adapters, merged_weights
from thresher.policy.model import Policy, hf_views, init_policy, load_policy
from thresher.retrieval.questions import Question

TARGETS = ("q", "v", "up", "down")


@torch.no_grad()
def adapted(policy: Policy, rank: int = 3, spread: float = 0.2, **settings: Any) -> Policy:
    """Return the policy with adapters whose B is normal with deviation `spread`."""
    add_lora(policy, rank=rank, alpha=2.0 * rank, **settings)
    generator = torch.Generator().manual_seed(rank)
    for _, adapter in adapters(policy):
        adapter.b_OR.copy_(spread * torch.randn(adapter.b_OR.shape, generator=generator))
    return policy


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Record per call of the loss: the reference's log-probs, whether the head is trained, its gradient buffer."""
    calls: list[tuple[Any, ...]] = []
    wanted = update_module.grpo_loss

    def spy(*arguments: Any, **options: Any) -> Any:
        calls.append((options["ref_logprobs_T"], arguments[1].requires_grad, options["lm_head_grad_VH"]))
        return wanted(*arguments, **options)

    monkeypatch.setattr(update_module, "grpo_loss", spy)
    return calls


def test_the_gradient_is_that_of_a_dense_computation(
    make_tiny_policy: Callable[..., Policy], gradients: dict[str, torch.Tensor]
) -> None:
    """The reference is autograd on merged float64 weights W + s B A, with gradient G: dB = s G A^T, dA = s B^T G."""
    base = make_tiny_policy().double()
    policy = adapted(deepcopy(base))
    dense = deepcopy(base).requires_grad_(True)
    with torch.no_grad():
        for name, weight in merged_weights(policy, hf_views(policy)).items():
            hf_views(dense)[name].copy_(weight)
    grpo, trajectories = GrpoSection(beta=0.3, clip_low=0.1), spoken(policy, 0, 0.3)
    loss, whole = brute_force(dense, base, trajectories, ADVANTAGES, grpo)
    stats = update(policy, policy, trajectories, ADVANTAGES, grpo, micro_batch_tokens=1)
    assert stats.loss == pytest.approx(float(loss), rel=1e-12, abs=1e-12)  # it may be hundreds
    assert set(gradients) == {name for name, _ in policy.named_parameters() if ".adapters." in name}
    slopes = deepcopy(base)
    for name, parameter in slopes.named_parameters():
        parameter.data = whole[name]
    name_of = {id(parameter): name for name, parameter in policy.named_parameters()}
    for name, adapter in adapters(policy):
        slope_OI = hf_views(slopes)[f"{name}.weight"]
        for parameter, expected in (
            (adapter.b_OR, 2 * slope_OI @ adapter.a_RI.detach().T),
            (adapter.a_RI, 2 * adapter.b_OR.detach().T @ slope_OI),
        ):
            # Ten thousand roundings of float64, for some thousand products and sums per row.
            assert (gradients[name_of[id(parameter)]] - expected).norm() <= 1e-12 * expected.norm(), name


def test_with_its_adapters_off_the_policy_is_its_own_reference_bit_for_bit(
    make_tiny_policy: Callable[..., Policy], losses: list[tuple[Any, ...]]
) -> None:
    """Checked at step 0 and after steps, against a run whose reference is a separate model."""
    base = make_tiny_policy()
    before = deepcopy(base.state_dict())
    grpo = GrpoSection(beta=0.3, kl_value="k2")
    trajectories = spoken(base, 0, 0.3)
    own, other = (adapted(deepcopy(base), spread=0.0) for _ in range(2))
    for policy, reference in ((own, own), (other, base)):
        updater = make_updater(policy, reference, grpo, lr=0.05)
        sequences = build_train_sequences(trajectories, ADVANTAGES, grpo)
        stats = [updater.update(sequences, step, 1.0) for step in range(4)]
        assert stats[0].sums["kl_k2"] == 0 < stats[-1].sums["kl_k2"]  # type: ignore[union-attr]
    assert len(losses) == 8 and all(torch.equal(one[0], two[0]) for one, two in zip(losses, losses[4:], strict=False))
    for (name, one), (_, two) in zip(own.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(one, two), name
        assert one.grad is None  # including the frozen head's, which the loss would make on request
    assert all(torch.equal(own.state_dict()[name], value) for name, value in before.items())
    for trajectory in trajectories:
        with own.adapters_off():
            assert torch.equal(logprobs(own, trajectory), logprobs(base, trajectory))
        assert (logprobs(own, trajectory) - logprobs(base, trajectory)).abs().max() > 1e-3


def test_only_adapters_are_in_the_optimizer_and_the_frozen_head_costs_nothing(
    make_tiny_policy: Callable[..., Policy], losses: list[tuple[Any, ...]]
) -> None:
    policy, grpo = adapted(make_tiny_policy(), rank=2, targets=("q", "down")), GrpoSection(beta=0.0)
    updater = make_updater(policy, None, grpo)
    held = [parameter for group in updater.optimizer.param_groups for parameter in group["params"]]
    assert sum(parameter.numel() for parameter in held) == 2 * 2 * (32 + 32 + 48 + 32)
    updater.update(build_train_sequences(spoken(policy, 0, 0.3), ADVANTAGES, grpo), 0, 1.0)
    assert losses == [(None, False, None)] and len(updater.optimizer.state) == 8


# --- Rollout


def record(trajectory: Trajectory) -> tuple[Any, ...]:
    segments = [(s.source, s.ids, [x.hex() for x in s.logprobs], s.stop, s.trailing) for s in trajectory.segments]
    return trajectory.question_id, trajectory.reason, trajectory.searches, segments


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "width", "threads"), [(8, 32, 1), (3, 24, 3)])
def test_samples_with_adapters_are_batch_invariant(
    rank: int,
    width: int,
    threads: int,
    make_tiny_policy: Callable[..., Policy],
    tiny_rollout: Callable[..., Any],
    tiny_questions: list[Question],
) -> None:
    """Rank 3 on three threads is a case where an unpadded product is not batch-invariant."""
    taught = make_tiny_policy()
    policy = taught if width == 32 else init_policy(taught.config.replace(hidden_size=width), 0)
    adapted(policy, rank=rank, spread=0.05)
    needs_invariant_policy(policy, threads)
    jobs = [Job(question, group, 0, 1000 * group) for group, question in enumerate(tiny_questions[:24])]
    with using_threads(threads):
        batch = tiny_rollout(policy=policy).run(jobs, 1.0)
        assert len({len(trajectory) for trajectory in batch}) > 5
        single = tiny_rollout(policy=policy, max_num_seqs=1)
        for job, together in list(zip(jobs, batch, strict=True))[::3]:
            assert record(single.run([job], 1.0)[0]) == record(together)
    assert_logprobs_match(single, batch, 1.0)  # the update will compute the recorded log-probs


# --- Whole runs


LORA = {"rank": 4, "alpha": 8, "targets": list(TARGETS), "seed": 3}
SHORT: dict[str, dict[str, Any]] = {"lora": LORA, "optim": {"lr": 1e-2}, "run": {"steps": 1, "eval_every": None}}


def test_a_checkpoint_is_an_ordinary_model_of_base_and_adapters(
    make_recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []

    def load(path: Any, *rest: Any, **more: Any) -> Policy:
        loaded.append(str(path))
        return load_policy(path, *rest, **more)

    for module in (assemble, weights_module):
        monkeypatch.setattr(module, "load_policy", load)
    recipe = make_recipe(**SHORT)
    train(recipe, tmp_path / "run")
    assert loaded == [recipe.model.path], "with beta > 0 there was a second model"
    folder = tmp_path / "run" / "checkpoints" / "step_000001"
    merged, base, again = (load_policy(path) for path in (folder, recipe.model.path, recipe.model.path))
    add_lora(again, rank=4, alpha=8, targets=TARGETS)
    load_adapters(again, folder / FOLDER)
    ids = torch.arange(5, 40)
    torch.testing.assert_close(merged.logits(ids), again.logits(ids), rtol=0, atol=1e-4)
    assert (merged.logits(ids) - base.logits(ids)).abs().max() > 1e-2
    untouched = load_file(folder / "model.safetensors")
    assert torch.equal(untouched["model.embed_tokens.weight"], hf_views(base)["model.embed_tokens.weight"])
    moments = load_file(folder / "optimizer.safetensors")
    assert moments and all(".adapters." in name for name in moments)
    for changes, message in (
        ({"rank": 5}, r"r is 4, the recipe's \[lora\] says 5"),
        ({"seed": 5}, "lora.seed is 3, not 5"),
    ):
        with pytest.raises(UserError, match=message):
            train(make_recipe(**SHORT | {"lora": LORA | changes}), tmp_path / "run", resume=True)


def test_on_a_bfloat16_base_there_are_no_masters(make_recipe: Make, tmp_path: Path) -> None:
    recipe = make_recipe(model={"dtype": "bfloat16"}, **SHORT)
    train(recipe, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "step_000001"
    stored = load_file(folder / FOLDER / "adapter_model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float32}
    start, end = load_policy(recipe.model.path), load_policy(folder)
    rounded = {name: view.bfloat16().float() for name, view in hf_views(start).items()}
    moved = {name for name, view in hf_views(end).items() if not torch.equal(view, rounded[name])}
    assert moved == {f"model.layers.{layer}.{MODULES[target]}.weight" for layer in (0, 1) for target in TARGETS}
