"""Several ranks train as one rank does: processes over gloo, each with one thread, on a small model.

All runs that need processes are made once, by `runs`, because starting processes takes longer than the runs. How far
weights may differ follows from their update: at lr = eps = 0.01 a weight moves by g / (|g| + eps) hundredths, so that a
gradient's rounding error reaches it no larger than it is, while the step itself is thousands of times larger.

"parts" has 8-bit moments and four optimiser steps. There a rounding error may tip a moment into the neighbouring code:
only very few, and by one code's width, .9 / 64 of the largest magnitude in its block, at most (adamw.py).
"""

import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from batch_invariance import needs_invariant_policy
from folding_cases import OWN
from rank_cases import ENVIRONMENT, LR, WORKER, apart, play, small
from rank_worker import copy_until_step_1
from safetensors.torch import load_file
from shipped_cases import RECIPES, make_world, shortened
from train_cases import metrics, sampled, single_threaded, steps_of, untimed

from thresher.common.errors import UserError
from thresher.common.records import read_records
from thresher.engine.config.recipe import Recipe, load_recipe
from thresher.engine.optim.adamw import dequantise
from thresher.engine.training.train import train
from thresher.policy.model import Policy, hf_views, load_policy
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.questions import Question

TOLERANCE = 1e-6
# Which samples share a forward, and what they can share, depends on their number on a rank.
BY_RANK = {"prefilled_tokens", "shared_tokens", "preemptions"}
PARTIAL = ["rollout.partial=true", "rollout.max_num_seqs=4", "rollout.max_staleness=1"]
OF_PROCESS = {"threads", "wait_policy"}  # of the test process, or of a worker


@dataclass
class Runs:
    """The folder that holds all runs by name, and the recipe of most of them."""

    folder: Path
    recipe: Recipe

    def weights(self, name: str, step: int, file: str = "model.safetensors") -> dict[str, torch.Tensor]:
        return load_file(self.folder / name / "checkpoints" / f"step_{step:06d}" / file)

    def error(self, name: str, rank: int) -> str:
        return (self.folder / f"{name}.{rank}.error").read_text()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with single_threaded():
        yield


def untied(folder: Path, source: Path) -> Path:
    """Save the model of `source` with an untied head, which begins as a copy of the embedding; return its folder."""
    tied = load_policy(source)
    policy = Policy(tied.config.replace(tie_word_embeddings=False))
    for name, view in hf_views(policy).items():
        view.copy_(hf_views(tied)["model.embed_tokens.weight" if name == "lm_head.weight" else name])
    policy.save(folder)
    (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    return folder


@pytest.fixture(scope="module")
def pair(once: Callable[..., Path], base: dict[str, dict[str, Any]]) -> Runs:
    """Play the quick runs of two ranks. "two" takes one step, as "one" does; "interrupted" gets a signal in its second
    step; "other-recipe" does not begin."""
    recipe = small(base, run={"steps": 1})

    def make(folder: Path) -> None:
        recipe.write(folder / "plain.toml")
        small(base, run={"save_every": 9}).write(folder / "rarely.toml")
        train(recipe, folder / "one")
        folding = small(base, run={"steps": 1}, system={"name": "mem1"})
        folding.write(folder / "folding.toml")
        train(folding, folder / "one-folding")
        (folder / "own.py").write_text(OWN)  # its branch has rewards of its own
        system = {"name": str(folder / "own.py"), "template": None}
        batch = small(base, run={"steps": 1}, grpo={"baseline": "batch", "scale": "batch"}, system=system)
        batch.write(folder / "batch.toml")
        train(batch, folder / "one-batch")

        def scenario(name: str, recipe: str = "plain", **more: Any) -> dict[str, Any]:
            return {"ranks": 2, "out": str(folder / name), "recipe": str(folder / f"{recipe}.toml"), **more}

        other = {"1": ["grpo.beta=0.5"]}
        partial = {"mine": {str(rank): PARTIAL for rank in range(2)}}
        play(
            folder,
            [
                scenario("two"),
                scenario("two-folding", "folding"),
                scenario("two-batch", "batch"),
                scenario("interrupted", "rarely", interrupted=1),
                scenario("other-recipe", mine=other),
                scenario("partial", "rarely", **partial),
                scenario("partial-interrupted", "rarely", interrupted=1, **partial),
                scenario("partial-resumed", "rarely", resume=True, copied="partial-interrupted", **partial),
            ],
        )

    return Runs(once("pair", make), recipe)


def test_two_ranks_take_the_step_of_one(pair: Runs) -> None:
    needs_invariant_policy(load_policy(pair.recipe.model.path))
    assert sampled(pair.folder / "one", 1) == sampled(pair.folder / "two", 1)
    first, second = pair.weights("one", 1), pair.weights("two", 1)
    assert apart(first, load_file(Path(pair.recipe.model.path) / "model.safetensors")) > 100 * TOLERANCE
    assert apart(first, second) < TOLERANCE
    assert_same_token_statistics(pair.folder / "one", pair.folder / "two")


def test_two_ranks_train_the_contexts_of_one(pair: Runs) -> None:
    """MEM1 folds its context after each search: the sums over tokens are over all contexts on all ranks."""
    needs_invariant_policy(load_policy(pair.recipe.model.path))
    one, two = (sampled(pair.folder / f"{name}-folding", 1) for name in ("one", "two"))
    assert one == two
    assert any([part["source"] for part in entry["segments"]].count("prompt") > 1 for entry in one)
    (first,), (second,) = (steps_of(pair.folder / f"{name}-folding") for name in ("one", "two"))
    assert first["loss_tokens"] == second["loss_tokens"] == first["sampled_tokens"]
    assert apart(*(pair.weights(f"{name}-folding", 1) for name in ("one", "two"))) < TOLERANCE


def test_two_ranks_take_mean_and_deviation_of_one_batch(pair: Runs) -> None:
    needs_invariant_policy(load_policy(pair.recipe.model.path))
    one, two = (sampled(pair.folder / f"{name}-batch", 1) for name in ("one", "two"))
    assert one == two and len({entry["advantage"] for entry in one}) > 1
    assert math.fsum(entry["advantage"] for entry in two) == pytest.approx(0, abs=1e-9)
    stats = (pair.folder / f"{name}-batch" / "trajectories" / "step_000001.safetensors" for name in ("one", "two"))
    tokens, gathered = (load_file(file)["advantage_P"] for file in stats)
    assert torch.equal(tokens, gathered) and len(tokens.unique()) > len({entry["advantage"] for entry in one})
    assert apart(*(pair.weights(f"{name}-batch", 1) for name in ("one", "two"))) < TOLERANCE


def test_rank_0_alone_changes_the_run_folder(pair: Runs) -> None:
    """This holds too if a signal ends the run: both ranks save, and rank 0 writes."""
    for name, step in (("two", 1), ("interrupted", 1)):
        first, second = ((pair.folder / f"{name}.{rank}.changed").read_text() for rank in range(2))
        assert second == ""
        written = {str(path) for path in (pair.folder / name).rglob("*.jsonl")}
        assert written and written <= set(first.splitlines()) and f"/checkpoints/step_{step:06d}" in first


def test_a_signal_to_one_of_two_ranks_ends_both_with_the_step_that_was_learned(pair: Runs) -> None:
    """Rank 1 leaves its rollout of step 2, and rank 0 ends its own; no save was due yet."""
    assert [pair.error("interrupted", rank) for rank in range(2)] == ["Interrupted: SIGTERM", "SystemExit: 143"]
    out = pair.folder / "interrupted"
    assert (pair.folder / "interrupted.kept").read_text() == f"{out} is saved up to step 1"
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step_000001"]
    assert [record["step"] for record in metrics(out)] == [0, 1]
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert apart(pair.weights("two", 1, file), pair.weights("interrupted", 1, file)) == 0


def test_each_of_two_ranks_has_a_queue_that_outlives_a_signal(pair: Runs) -> None:
    """Rank 1 leaves its rollout of step 2. The groups that it had begun end with the bits of an uninterrupted run."""
    interrupted, whole, resumed = (pair.folder / f"partial{end}" for end in ("-interrupted", "", "-resumed"))
    lines = [line for _, line in read_records(interrupted / "checkpoints/step_000001/unfinished.jsonl")]
    queues = {rank: [line.get("group", line.get("next")) for line in lines if line["rank"] == rank] for rank in (0, 1)}
    assert queues == {0: [2, 2, 3], 1: [2, 2, 3]}  # the next number, and each group's number
    assert lines[1]["log"] != lines[4]["log"]
    assert [sampled(whole, step) for step in (1, 2)] == [sampled(resumed, step) for step in (1, 2)]
    assert steps_of(whole)[1]["staleness_tokens"] == steps_of(resumed)[1]["staleness_tokens"]
    assert len(steps_of(whole)[1]["staleness_tokens"]) == 2
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert apart(pair.weights("partial", 2, file), pair.weights("partial-resumed", 2, file)) == 0
    recipe = load_recipe(pair.folder / "rarely.toml", PARTIAL)
    with pytest.raises(UserError, match=r"unfinished.jsonl: was saved by 2 ranks, and now there are 1; with rollout"):
        train(recipe, interrupted, resume=True)


def test_two_ranks_with_other_recipes_do_not_begin(pair: Runs) -> None:
    first, second = (pair.error("other-recipe", rank) for rank in range(2))
    said = "rank 1 has another run than rank 0: the recipe's grpo.beta is 0.5 there, 0.02 on rank 0; give every"
    assert {first, second} > {"SystemExit: 1"} and f"UserError: {said}" in first + second
    assert not (pair.folder / "other-recipe").exists()


@pytest.fixture(scope="module")
def runs(
    tmp_path_factory: pytest.TempPathFactory,
    base: dict[str, dict[str, Any]],
    tiny_tokenizer: Tokenizer,
    tiny_index_folder: Path,
    tiny_questions: list[Question],
) -> Runs:
    folder = tmp_path_factory.mktemp("ranks")

    def make(name: str, **changes: dict[str, Any]) -> Recipe:
        recipe = small(base, **changes)
        recipe.write(folder / f"{name}.toml")
        return recipe

    plain = make("plain")
    model = untied(folder / "untied-model", Path(plain.model.path))
    short = {"steps": 1, "eval_questions": 1}
    others = {
        "adapters": make("adapters", run=short, lora={"rank": 3, "alpha": 6.0}),
        "parts": make(
            "parts",
            run={"eval_questions": 1},
            model={"path": str(model)},
            optim={"optimizer_state_dtype": "8bit"},
            grpo={
                "updates_per_batch": 2,
                "shuffle_rewards": True,
                "aggregation": "token",
                "drop_zero_advantage": True,
                "refill": True,
                "old_logprobs": "recomputed",
                "tis_level": "token",
            },
        ),
    }
    world = make_world(folder, tiny_tokenizer, tiny_index_folder, tiny_questions)
    lear = shortened(next(path for path in RECIPES if path.match("lear/qwen*")), world, url="")
    replace(lear, run=replace(lear.run, steps=1)).write(folder / "lear.toml")
    make("kept-rarely", run={"save_every": 9})
    train(plain, folder / "plain-1")
    for name, recipe in others.items():
        train(recipe, folder / f"{name}-1")

    def scenario(ranks: int, name: str, recipe: str = "plain", **more: Any) -> dict[str, Any]:
        return {"ranks": ranks, "out": str(folder / name), "recipe": str(folder / f"{recipe}.toml"), **more}

    def all_have(ranks: int, *changes: str) -> dict[str, Any]:
        return {"mine": {str(rank): changes for rank in range(ranks)}}

    # Where tensors are stored, and whether activations are kept, changes no result, so these vary between the runs.
    away = all_have(2, "optim.offload=masters", "grpo.reference=cpu")
    scenarios = [
        scenario(2, "plain-2"),
        scenario(4, "plain-4", **all_have(4, "optim.checkpoint_activations=on", "grpo.reference=cpu")),
        scenario(4, "resumed-4", **{"from": str(folder / "plain-2"), "resume": True}),
        scenario(2, "interrupted-2", "kept-rarely", interrupted=1),
        scenario(2, "interrupted-2", "kept-rarely", resume=True),
        scenario(2, "adapters-2", "adapters", **all_have(2, "optim.offload=moments")),
        scenario(2, "parts-2", "parts"),
        scenario(2, "lear-2", "lear"),
        scenario(2, "away-2", "lear", **away),
        scenario(2, "other-recipe", mine={"1": ["grpo.beta=0.5"]}),
        scenario(4, "other-folder", mine={"2": [f"data.dev={plain.need(type(plain.data)).train}"]}),
        scenario(4, "indivisible", mine={str(rank): ["rollout.questions_per_step=6"] for rank in range(4)}),
    ]
    play(folder, scenarios)
    for source, out, recipe in (("plain-2", "resumed-1", plain), ("parts-2", "parts-resumed-1", others["parts"])):
        copy_until_step_1(folder / source, folder / out)
        train(recipe, folder / out, resume=True)
    return Runs(folder, plain)


def assert_same_token_statistics(one: Path, several: Path) -> None:
    """Compare statistics of the first step, gathered from the ranks in the order of a single rank."""
    kept, gathered = (load_file(run / "trajectories" / "step_000001.safetensors") for run in (one, several))
    assert [part.pop("branches_B").shape for part in (kept, gathered)] == [(0,), (0,)]
    assert kept.keys() == {
        "counts_N",
        "sampled_P",
        "recomputed_P",
        "reference_P",
        "entropy_P",
        "clipped_P",
        "gradient_P",
    }
    assert torch.equal(kept["counts_N"], gathered["counts_N"])
    assert torch.equal(kept["sampled_P"], gathered["sampled_P"])
    assert apart(kept, gathered) < 4e-3  # an ulp of float16, for the entropy; a misplaced value differs by more


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.slow
def test_tokens_of_the_first_step_are_those_of_one_rank(runs: Runs, count: int) -> None:
    needs_invariant_policy(load_policy(runs.recipe.model.path))
    one, several = (runs.folder / f"plain-{ranks}" for ranks in (1, count))
    assert sampled(one, 1) == sampled(several, 1)
    evaluation = Path("evaluations") / "step_000000.jsonl"
    assert (one / evaluation).read_bytes() == (several / evaluation).read_bytes()
    assert_same_token_statistics(one, several)


@pytest.mark.parametrize(
    ("one", "several"), [("plain-1", "plain-2"), ("plain-1", "plain-4"), ("adapters-1", "adapters-2")]
)
@pytest.mark.slow
def test_weights_and_moments_after_a_step_are_those_of_one_rank(runs: Runs, one: str, several: str) -> None:
    start = load_file(runs.folder / "untied-model" / "model.safetensors")  # of the tied model, and its head
    first = runs.weights(one, 1)
    moved = max(float((first[name] - start[name]).abs().max()) for name in first)
    assert moved > 100 * TOLERANCE
    assert apart(first, runs.weights(several, 1)) < TOLERANCE
    state = "optimizer.safetensors"
    trained = runs.weights(one, 1, state)
    assert any(".adapters." in name for name in trained) is (one == "adapters-1")
    assert apart(trained, runs.weights(several, 1, state)) < TOLERANCE


def moments(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the values of an optimiser's 8-bit state, each divided by the largest of its matrix."""
    found = {}
    for name, scale in state.items():
        if name.endswith("_scale"):
            codes = name.removesuffix("_scale")
            values = dequantise(state[codes], scale, signed=codes.endswith("exp_avg"))
            found[codes] = values / values.abs().max()
    return found


@pytest.mark.parametrize(("one", "other", "step"), [("parts-1", "parts-2", 1), ("parts-2", "parts-resumed-1", 2)])
@pytest.mark.slow
def test_8_bit_moments_are_those_of_one_rank_but_for_few_codes(runs: Runs, one: str, other: str, step: int) -> None:
    """Resuming with another number of ranks works too. There are two successive steps, so at most two codes' widths."""
    needs_invariant_policy(load_policy(runs.recipe.model.path))
    first, second = (runs.weights(name, step) for name in (one, other))
    far = total = 0
    for name, weight in first.items():
        difference = (weight - second[name]).abs()
        far, total = far + int((difference > TOLERANCE).sum()), total + difference.numel()
        assert float(difference.max()) < LR / 10, name  # a step is at most LR
    assert far < total / 1000
    states = [runs.weights(name, step, "optimizer.safetensors") for name in (one, other)]
    assert states[0].keys() == states[1].keys() and states[0]["untied_head_VH.exp_avg"].dtype == torch.uint8
    for ours, theirs in zip(moments(states[0]).values(), moments(states[1]).values(), strict=True):
        difference = (ours - theirs).abs()
        assert float(difference.max()) <= 2 * 0.9 / 64
        assert int((difference > 1e-4).sum()) <= difference.numel() / 100


@pytest.mark.slow
def test_masters_and_reference_in_cpu_memory_change_no_bit(runs: Runs) -> None:
    """In bfloat16, with a shipped recipe whose layers and lengths are reduced."""
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert apart(runs.weights("lear-2", 1, file), runs.weights("away-2", 1, file)) == 0
    assert load_recipe(runs.folder / "lear.toml").model.dtype == "bfloat16"
    start = load_file(Path(load_recipe(runs.folder / "lear.toml").model.path) / "model.safetensors")
    assert apart(start, runs.weights("away-2", 1)) > 100 * TOLERANCE
    assert sampled(runs.folder / "lear-2", 1) == sampled(runs.folder / "away-2", 1)


@pytest.mark.slow
def test_recomputed_log_probs_have_the_statistics_of_one_rank(runs: Runs) -> None:
    one, other = (metrics(runs.folder / name)[1] for name in ("parts-1", "parts-2"))
    names = {"importance_mean", "importance_max", "importance_bounded", "importance_effective"}
    assert names < one.keys() == other.keys()
    for name in (*names, "logprob_gap", "logprob_gap_max"):
        assert other[name] == pytest.approx(one[name], abs=1e-5), name
    assert one["recompute_seconds"] > 0 < one["logprob_gap"]


@pytest.mark.parametrize("several", ["plain-2", "plain-4"])
@pytest.mark.slow
def test_metrics_of_a_step_are_those_of_one_rank(runs: Runs, several: str) -> None:
    """Counts and means over trajectories are equal to the bit, metrics of the update up to rounding."""
    (before, one), (before_several, other) = (
        [untimed(record) for record in metrics(runs.folder / name)[:2]] for name in ("plain-1", several)
    )
    assert before == before_several and before["eval"]["questions"] == 5
    assert one.keys() == other.keys()
    of_update = {"loss", "grad_norm", "entropy", "ratio", "logprob_gap", "logprob_gap_max"}
    kept = {key for key in one if key not in of_update | BY_RANK | OF_PROCESS and not key.startswith("kl_")}
    assert {"reward", "em", "zero_advantage_groups", "sampled_tokens", "train_tokens", "loss_tokens"} <= kept
    assert {key: one[key] for key in kept} == {key: other[key] for key in kept}
    for key in ("grad_norm", "entropy", "ratio"):
        assert other[key] == pytest.approx(one[key], rel=1e-5)
    assert other["loss"] == pytest.approx(one["loss"], abs=1e-6)


@pytest.mark.parametrize("resumed", ["resumed-1", "resumed-4"])
@pytest.mark.slow
def test_a_checkpoint_of_two_ranks_goes_on_with_another_number(runs: Runs, resumed: str) -> None:
    needs_invariant_policy(load_policy(runs.recipe.model.path))
    assert [record["step"] for record in metrics(runs.folder / resumed)] == [0, 1, 2, 2]
    assert sampled(runs.folder / resumed, 2) == sampled(runs.folder / "plain-2", 2)
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert apart(runs.weights("plain-2", 2, file), runs.weights(resumed, 2, file)) < TOLERANCE
    assert apart(runs.weights("plain-2", 1), runs.weights("plain-2", 2)) > 100 * TOLERANCE


@pytest.mark.slow
def test_a_signal_to_one_rank_ends_all_behind_the_same_step(runs: Runs) -> None:
    """Rank 1 leaves its rollout of step 2, rank 0 ends its own; both save step 1, for which no save was due."""
    assert [runs.error("interrupted-2", rank) for rank in range(2)] == ["Interrupted: SIGTERM", "SystemExit: 143"]
    kept = (runs.folder / "interrupted-2.kept").read_text()
    assert kept == f"{runs.folder / 'interrupted-2'} is saved up to step 1"
    assert [record["step"] for record in metrics(runs.folder / "interrupted-2")] == [0, 1, 2, 2]
    assert [path.name for path in (runs.folder / "interrupted-2" / "checkpoints").iterdir()] == ["step_000002"]
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert apart(runs.weights("plain-2", 2, file), runs.weights("interrupted-2", 2, file)) == 0


@pytest.mark.slow
def test_ranks_that_do_not_do_the_same_are_refused_before_there_is_a_folder(runs: Runs) -> None:
    """All ranks find the same difference; the first one reports it, the others print nothing."""
    said = {}
    for name, ranks in (("other-recipe", 2), ("other-folder", 4), ("indivisible", 4)):
        *others, said[name] = sorted(runs.error(name, rank) for rank in range(ranks))
        assert others == ["SystemExit: 1"] * (ranks - 1)
        assert not (runs.folder / name).exists()
    assert said["other-recipe"] == (
        "UserError: rank 1 has another run than rank 0: the recipe's grpo.beta is 0.5 there, 0.02 on rank 0; "
        "give every rank the same recipe, files and folders"
    )
    assert "rank 2 has another run than rank 0: the recipe's data.dev is " in said["other-folder"]
    assert said["indivisible"] == (
        "UserError: rollout.questions_per_step is 6; expected a multiple of 4 ranks, because a group is not split"
    )


@pytest.mark.parametrize("what", ["killed", "wrong"])
@pytest.mark.slow
def test_a_rank_that_dies_ends_all_and_the_run_goes_on_from_its_checkpoint(
    runs: Runs, tmp_path: Path, what: str
) -> None:
    """Started by torchrun, as a user does: the reason is printed once, and step 1 is kept."""
    command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(WORKER), what, "train", str(runs.folder / "plain.toml"), "--out", str(tmp_path / "run")]
    ended = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT, timeout=300)
    assert ended.returncode != 0
    assert "train: 2 steps of 4 questions x 3 samples, k2 with beta 0.02" in ended.stdout
    assert ended.stdout.count("on 2 ranks") == 1
    if what == "killed":
        assert "Signal 9 (SIGKILL) received" in ended.stderr
    else:
        said = [line for line in ended.stderr.splitlines() if line.startswith("thresher: ")]
        reason = "thresher: questions.jsonl: line 7 is on fire; put it out"
        assert said.count(reason) == 1
        # Rank 0, which torchrun ends, may still print what is kept.
        assert all(line.startswith("thresher: interrupted; ") for line in said if line != reason)
        assert "local_rank: 1" in ended.stderr  # torchrun's own report names the rank
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000001"]
    if what == "killed":
        train(runs.recipe, tmp_path / "run", resume=True)
        weights = load_file(tmp_path / "run" / "checkpoints" / "step_000002" / "model.safetensors")
        assert apart(weights, runs.weights("plain-2", 2)) < TOLERANCE
