"""Training adapters: the gradient of a dense computation, a reference that is the base to the bit without a second
model, batch-invariant, and a killed run that goes on as if nothing had happened."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_invariance import needs_invariant_policy, using_threads
from exact_norms import exact_norms
from rollout_cases import assert_logprobs_match
from safetensors.torch import load_file
from stored_cases import stored

from thresher.common.errors import UserError
from thresher.engine import assemble
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.sections import GrpoSection, OptimSection, SftSection
from thresher.engine.config.tables import from_dict
from thresher.engine.optim.master_weights import MasterWeights
from thresher.engine.packing import TrainSequence, build_train_sequences
from thresher.engine.protocol.trajectory import Segment, Trajectory
from thresher.engine.rollout.rollout import Job
from thresher.engine.training import update as grpo_module
from thresher.engine.training import weights as trained
from thresher.engine.training.sft import SftTrainer, Transcript
from thresher.engine.training.train import Progress, train
from thresher.engine.training.update import Updater
from thresher.policy.config import ModelConfig
from thresher.policy.lora import FOLDER, MODULES, adapters, add_lora, load_adapters, merged_weights
from thresher.policy.model import Policy, hf_views, init_policy, load_policy
from thresher.retrieval.questions import Question
from thresher.rewards.reward import Source

VOCAB = 350
TARGETS = ("q", "v", "up", "down")
ADVANTAGES = [1.3, -0.9, -0.4]


@torch.no_grad()
def adapted(policy: Policy, rank: int = 3, spread: float = 0.2, **settings: Any) -> Policy:
    """The policy with adapters whose B is normal with deviation `spread`."""
    add_lora(policy, rank=rank, alpha=2.0 * rank, **settings)
    generator = torch.Generator().manual_seed(rank)
    for _, adapter in adapters(policy):
        adapter.b_OR.copy_(spread * torch.randn(adapter.b_OR.shape, generator=generator))
    return policy


def logprobs(policy: Policy, trajectory: Trajectory) -> torch.Tensor:
    rows = torch.tensor(trajectory.policy_positions())
    logits = policy.logits(torch.tensor(trajectory.ids()))[rows - 1, :VOCAB]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(trajectory.ids())[rows][:, None])[:, 0]


def spoken(policy: Policy, seed: int = 0) -> list[Trajectory]:
    """Three of unequal length with random ids; the old log-probs are near the policy's own."""
    generator = torch.Generator().manual_seed(seed)
    result = []
    for sample, (prompt, said) in enumerate(((4, 9), (6, 3), (5, 12))):
        ids = torch.randint(0, VOCAB, (prompt + said,), generator=generator).tolist()
        segments = [Segment(Source.PROMPT, ids[:prompt]), Segment(Source.POLICY, ids[prompt:])]
        trajectory = Trajectory("q", 0, sample, segments, "answered")
        noise = 0.3 * torch.randn(said, generator=generator)
        segments[1].logprobs = (logprobs(policy, trajectory).detach() + noise).float().tolist()
        result.append(trajectory)
    return result


def items_of(trajectories: list[Trajectory], grpo: GrpoSection) -> list[TrainSequence]:
    return build_train_sequences(trajectories, ADVANTAGES, grpo)


@exact_norms()
def test_the_gradient_is_that_of_a_dense_computation(
    make_tiny_policy: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The equation token by token, with autograd, on merged float64 weights W + s B A: dB = s G A^T, dA = s B^T G."""
    base = make_tiny_policy().double()
    policy = adapted(deepcopy(base))
    dense = deepcopy(base).requires_grad_(True)
    with torch.no_grad():
        for name, weight in merged_weights(policy, hf_views(policy)).items():
            hf_views(dense)[name].copy_(weight)
    grpo, trajectories = GrpoSection(beta=0.3, clip_low=0.1), spoken(policy)
    loss = torch.zeros((), dtype=torch.float64)
    for trajectory, advantage in zip(trajectories, ADVANTAGES, strict=True):
        own = logprobs(dense, trajectory)
        weight, a = torch.tensor([1 / 3 / len(own), advantage]).double()  # rounded to float32, as a batch has them
        ratio = torch.exp(own - torch.tensor(trajectory.policy_logprobs()))
        clipped = ratio.clamp(1 - grpo.clip_low, 1 + grpo.clip_high)
        d = own - logprobs(base, trajectory)
        terms = -torch.minimum(ratio * a, clipped * a) + grpo.beta * (torch.exp(-d) + d - 1)
        loss = loss + weight * terms.sum()
    loss.backward()

    found: dict[str, torch.Tensor] = {}

    def catch(weights: MasterWeights, _: float) -> float:
        found.update({name: p.grad for name, p in weights.module.named_parameters() if p.grad is not None})
        return 0.0

    monkeypatch.setattr(MasterWeights, "clip", catch)
    monkeypatch.setattr(grpo_module, "step_optimizer", lambda *_: None)  # which gives the gradients up
    stats = Updater(MasterWeights(policy), policy, OptimSection(micro_batch_tokens=1), grpo, VOCAB, 9).update(
        items_of(trajectories, grpo), 0, 1.0
    )
    assert stats.loss == pytest.approx(float(loss.detach()), rel=1e-12, abs=1e-12)  # it may be hundreds
    assert set(found) == {name for name, _ in policy.named_parameters() if ".adapters." in name}
    slopes = deepcopy(base)
    for name, parameter in slopes.named_parameters():
        parameter.data = dense.get_parameter(name).grad  # type: ignore[assignment]
    for name, adapter in adapters(policy):
        slope_OI = hf_views(slopes)[f"{name}.weight"]
        for grad, expected in (
            (adapter.b_OR.grad, 2 * slope_OI @ adapter.a_RI.detach().T),
            (adapter.a_RI.grad, 2 * adapter.b_OR.detach().T @ slope_OI),
        ):
            # Ten thousand roundings of float64, of some thousand products and sums a row.
            assert (grad - expected).norm() <= 1e-12 * expected.norm(), name


def test_with_its_adapters_off_the_policy_is_its_own_reference_bit_for_bit(
    make_tiny_policy: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """At step 0 and after steps, beside a run whose reference is a model of its own."""
    shown: list[torch.Tensor] = []
    wanted = grpo_module.grpo_loss

    def spy(*arguments: Any, **options: Any) -> Any:
        shown.append(options["ref_logprobs_T"])
        return wanted(*arguments, **options)

    monkeypatch.setattr(grpo_module, "grpo_loss", spy)
    base = make_tiny_policy()
    before = deepcopy(base.state_dict())
    grpo = GrpoSection(beta=0.3, kl_value="k2")
    trajectories = spoken(base)
    own, other = (adapted(deepcopy(base), spread=0.0) for _ in range(2))
    seen: list[list[torch.Tensor]] = []
    for policy, reference in ((own, own), (other, base)):
        shown.clear()
        updater = Updater(MasterWeights(policy), reference, OptimSection(lr=0.05), grpo, VOCAB, 9)
        stats = [updater.update(items_of(trajectories, grpo), step, 1.0) for step in range(4)]
        assert stats[0].sums["kl_k2"] == 0 < stats[-1].sums["kl_k2"]
        seen.append(list(shown))
    assert len(seen[0]) == 4 and all(map(torch.equal, *seen))
    for (name, one), (_, two) in zip(own.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(one, two), name
        assert one.grad is None  # the frozen head's included, which the loss would make if it were asked to
    assert all(torch.equal(own.state_dict()[name], value) for name, value in before.items())
    for trajectory in trajectories:
        with own.adapters_off():
            assert torch.equal(logprobs(own, trajectory), logprobs(base, trajectory))
        assert (logprobs(own, trajectory) - logprobs(base, trajectory)).abs().max() > 1e-3


def test_only_adapters_are_in_the_optimizer_and_the_frozen_head_costs_nothing(
    make_tiny_policy: Callable[..., Policy], monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    wanted = grpo_module.grpo_loss

    def spy(*arguments: Any, **options: Any) -> Any:
        given.append((arguments[1].requires_grad, options["lm_head_grad_VH"]))
        return wanted(*arguments, **options)

    monkeypatch.setattr(grpo_module, "grpo_loss", spy)
    policy = adapted(make_tiny_policy(), rank=2, targets=("q", "down"))
    updater = Updater(MasterWeights(policy), None, OptimSection(), GrpoSection(beta=0.0), VOCAB, 9)
    held = [parameter for group in updater.optimizer.param_groups for parameter in group["params"]]
    assert sum(parameter.numel() for parameter in held) == 2 * 2 * (32 + 32 + 48 + 32)
    updater.update(items_of(spoken(policy), GrpoSection()), 0, 1.0)
    assert given == [(False, None)] and len(updater.optimizer.state) == 8


# --- Rollout


def record(trajectory: Trajectory) -> tuple[Any, ...]:
    segments = [(s.source, s.ids, [x.hex() for x in s.logprobs], s.stop, s.trailing) for s in trajectory.segments]
    return trajectory.question_id, trajectory.reason, trajectory.searches, segments


@pytest.mark.parametrize(("rank", "width", "threads"), [(8, 32, 1), (3, 24, 3)])
@pytest.mark.fast_cases(1)
def test_samples_with_adapters_are_batch_invariant(
    rank: int,
    width: int,
    threads: int,
    make_tiny_policy: Callable[..., Policy],
    tiny_rollout: Callable[..., Any],
    tiny_questions: list[Question],
) -> None:
    """Rank 3 on three threads is where an unpadded product is not batch-invariant."""
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
    assert_logprobs_match(single, batch, 1.0)  # what was recorded is what the update will compute


# --- Whole runs


@pytest.fixture
def make_recipe(
    tiny_model_folder: Path, tiny_index_folder: Path, tiny_questions: list[Question], tmp_path: Path
) -> Callable[..., Recipe]:
    questions = [
        {"id": question.id, "question": question.question, "golden_answers": ["Anna Bell", "Gil Hart", "Mia Noor"]}
        for question in tiny_questions[:12]
    ]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in questions))
    (tmp_path / "prompt.txt").write_text("<search> or <answer>: {question}\n")
    tables: dict[str, dict[str, Any]] = {
        "model": {"path": str(tiny_model_folder)},
        "data": {"train": str(tmp_path / "questions.jsonl")},
        "retrieval": {"index": str(tiny_index_folder), "k": 1, "passage_format": "{text}"},
        "system": {"name": "eval_rar", "template": str(tmp_path / "prompt.txt")},
        "rollout": {
            "group_size": 4,
            "questions_per_step": 3,
            "max_turns": 2,
            "max_turn_tokens": 24,
            "max_context": 160,
            "max_num_seqs": 12,
        },
        "grpo": {"beta": 0.05, "entropy_coef": 0.05},
        "optim": {"lr": 1e-2},
        "run": {"steps": 4, "save_every": 2, "keep_checkpoints": 4},
        "lora": {"rank": 4, "alpha": 8, "targets": list(TARGETS), "seed": 3},
    }

    def make(**changes: dict[str, Any]) -> Recipe:
        return from_dict(Recipe, {name: tables[name] | changes.get(name, {}) for name in tables}, "test")

    return make


class Killed(BaseException):
    """Stands for a kill: no handler of the product catches it."""


def what_happened(run: Path) -> dict[str, Any]:
    timed = ("seconds", "per_s", "share")
    lines = stored(run / "metrics.jsonl")
    metrics = [{key: value for key, value in line.items() if not key.endswith(timed)} for line in lines]
    files = [*run.rglob("*.safetensors"), *run.glob("trajectories/*")]
    return {"metrics": metrics, **{str(path.relative_to(run)): path.read_bytes() for path in files}}


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_bits(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        train(make_recipe(), tmp_path / "whole")

        def die(progress: Progress) -> None:
            if progress.step == 3:
                raise Killed

        with pytest.raises(Killed):
            train(make_recipe(), tmp_path / "cut", watch=die)
        train(make_recipe(), tmp_path / "cut", resume=True)
    finally:
        torch.set_num_threads(before)
    whole, cut = what_happened(tmp_path / "whole"), what_happened(tmp_path / "cut")
    assert whole.keys() == cut.keys() and [key for key in whole if whole[key] != cut[key]] == []
    assert sum(name.endswith(f"{FOLDER}/adapter_model.safetensors") for name in whole) == 2
    records = [record for record in whole["metrics"] if "grad_norm" in record]
    assert records[0]["kl_k3"] == 0 < records[-1]["kl_k3"] and min(record["grad_norm"] for record in records) > 0


def test_a_checkpoint_is_an_ordinary_model_of_base_and_adapters(
    make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[str] = []
    for module in (assemble, trained):
        monkeypatch.setattr(
            module,
            "load_policy",
            lambda path, *rest, **more: loaded.append(str(path)) or load_policy(path, *rest, **more),
        )
    recipe = make_recipe(run={"steps": 2})
    train(recipe, tmp_path / "run")
    assert loaded == [recipe.model.path], "with beta > 0 there was a second model"
    folder = tmp_path / "run" / "checkpoints" / "step_000002"
    merged, base = load_policy(folder), load_policy(recipe.model.path)
    again = load_policy(recipe.model.path)
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
            train(make_recipe(lora=changes), tmp_path / "run", resume=True)


def test_on_a_bfloat16_base_there_are_no_masters(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    recipe = make_recipe(model={"dtype": "bfloat16"}, run={"steps": 1})
    train(recipe, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "step_000001"
    assert {tensor.dtype for tensor in load_file(folder / FOLDER / "adapter_model.safetensors").values()} == {
        torch.float32
    }
    start, end = load_policy(recipe.model.path), load_policy(folder)
    rounded = {name: view.bfloat16().float() for name, view in hf_views(start).items()}
    moved = {name for name, view in hf_views(end).items() if not torch.equal(view, rounded[name])}
    assert moved == {f"model.layers.{layer}.{MODULES[target]}.weight" for layer in (0, 1) for target in TARGETS}


# --- Supervised


COPIES = [Transcript([1, name, other, 2, name, other], [3, 4, 5], [4, 5]) for name in range(3, 9) for other in (9, 10)]


def test_sft_trains_adapters_and_a_restart_begins_with_the_same_ones(
    tiny_model_config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SftTrainer, "copying", lambda self: 0.0)
    policy = init_policy(tiny_model_config, 0)
    before = deepcopy(policy.state_dict())
    add_lora(policy, rank=8, alpha=16)
    settings = SftSection(
        transcripts="none", steps=2, batch_size=6, lr=0.02, held_out=0.5, stop_at_copy_accuracy=0.9, max_restarts=1
    )
    records: list[dict[str, Any]] = []
    SftTrainer(policy, COPIES, settings, OptimSection(), VOCAB, 0).run(records.append)
    first, second = ([record["loss"] for record in records if record["restart"] == restart] for restart in (0, 1))
    # A batch holds all that is trained on, so equal weights have equal losses, up to the order of summing.
    assert first[0] == pytest.approx(second[0], rel=1e-5) and first[1] != pytest.approx(first[0], rel=1e-4)
    assert all(adapter.b_OR.any() for _, adapter in adapters(policy))
    after = policy.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
