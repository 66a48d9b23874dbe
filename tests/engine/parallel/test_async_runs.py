"""Runs with run.async: two processes over gloo against the same schedule in one, and the state after a kill or a
signal."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from batch_invariance import needs_invariant_policy
from rank_cases import apart, play, small
from safetensors.torch import load_file
from train_cases import assert_same_run, metrics, sampled, single_threaded, steps_of, steps_saved, untimed

from thresher.common.errors import UserError
from thresher.engine.assemble import load_questions, load_retrieval, load_run_context
from thresher.engine.config.recipe import Recipe
from thresher.engine.parallel.ranks import SINGLE, Ranks, trainers_of
from thresher.engine.parallel.sync import MainRankJudge, judges_of
from thresher.engine.planning.plan import check_memory
from thresher.engine.protocol.prompts import PromptBatch
from thresher.engine.rollout.rollout import RolloutClock
from thresher.engine.scoring.score import Judges
from thresher.engine.training.asynchronous import AsyncGrpoStep, parallel_clock, wait_record
from thresher.engine.training.metrics import rank_step, step_record
from thresher.engine.training.step import GrpoStep, Sampled
from thresher.engine.training.train import train
from thresher.engine.training.weights import load_updater, starting_weights
from thresher.policy.model import hf_views, load_policy

STEPS = 4
OF_PROCESS = {"threads", "wait_policy"}  # of the test process, or of a worker
TWO = {"ranks": 2}
PARTIAL: dict[str, Any] = {"partial": True, "max_staleness": 1, "max_num_seqs": 6}


@dataclass
class Expected:
    """A step of the oracle: its stored trajectories, its record, and the weights after it."""

    lines: list[dict[str, Any]]
    record: dict[str, Any]
    weights: dict[str, torch.Tensor]


@dataclass
class Runs:
    folder: Path
    recipes: dict[str, Recipe]

    def error(self, name: str, rank: int) -> str:
        return (self.folder / f"{name}.{rank}.error").read_text()

    def weights(self, name: str, step: int) -> dict[str, torch.Tensor]:
        return load_file(self.folder / name / f"checkpoints/step_{step:06d}/model.safetensors")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with single_threaded():
        yield


def asynchronous(base: dict[str, dict[str, Any]], **changes: dict[str, Any]) -> Recipe:
    run = {"steps": STEPS, "async": True, "eval_every": 2, "eval_questions": 3, "keep_checkpoints": 9}
    return small(base, run=run | changes.pop("run", {}), **changes)


def loaded(recipe: Recipe, folder: Path) -> GrpoStep:
    """Return a step in this process, with the weights of a folder."""
    context = load_run_context(recipe, folder)
    decided, _ = check_memory(recipe, folder)
    retriever = load_retrieval(recipe, context.system)
    return GrpoStep(
        context=context,
        questions=load_questions(recipe, context.system)[0],
        rollout=context.rollout(retriever),
        judges=Judges(),
        updater=load_updater(decided, context, None, SINGLE),
    )


def oracle(recipe: Recipe) -> list[Expected]:
    """Run the same schedule sequentially: the next groups are sampled before this step's groups are learned."""
    step, found = loaded(recipe, starting_weights(recipe, None)), []
    ahead = step.sample(1)
    for number in range(1, STEPS + 1):
        step.queue = ahead.queue
        result = step.prepare(number, ahead)
        ahead = step.sample(number + 1)
        step.learn(result)
        lines = [
            {**entry.to_dict(step.context.tokenizer), "advantage": value}
            for entry, value in zip(result.scored, result.advantages, strict=True)
        ]
        record = step_record(number, [rank_step(result, step.context.system.tags)], recipe.grpo.refill)
        weights = {name: view.clone() for name, view in hf_views(step.context.policy).items()}
        found.append(Expected(lines, record, weights))
    return found


@pytest.fixture(scope="module")
def runs(once: Callable[..., Path], base: dict[str, dict[str, Any]]) -> Runs:
    """Play the runs. "two" and "partial" are not interrupted; "interrupted" gets a signal in its third step and is
    resumed."""
    recipes = {
        "two": asynchronous(base),
        "partial": asynchronous(base, rollout=PARTIAL),
        "rarely": asynchronous(base, run={"save_every": 9}),
    }

    def make(folder: Path) -> None:
        def scenario(name: str, recipe: str, **more: Any) -> dict[str, Any]:
            return {"out": str(folder / name), "recipe": str(folder / f"{recipe}.toml"), **TWO, **more}

        for name, recipe in recipes.items():
            recipe.write(folder / f"{name}.toml")
        play(
            folder,
            [
                scenario("two", "two"),
                scenario("partial", "partial"),
                scenario("interrupted", "rarely", struck=[1, "sample", 4, "SIGTERM"]),
                scenario("interrupted", "rarely", resume=True),
            ],
        )

    return Runs(once("async", make), recipes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two", "partial"])
def test_two_ranks_have_the_bits_of_the_schedule_in_one_process(runs: Runs, name: str) -> None:
    expected = assert_as_in_one_process(runs.recipes[name], runs.folder / name)
    for number, step in enumerate(expected, start=1):
        assert apart(step.weights, runs.weights(name, number)) == 0
    assert all("trainer_wait_seconds" in record for record in steps_of(runs.folder / name))


def assert_as_in_one_process(recipe: Recipe, run: Path) -> list[Expected]:
    """Check that the run has the trajectories and metrics of the oracle, and return the oracle. Times are ignored, and
    the gap of log-probs, which is not measured where all happens in one process."""
    needs_invariant_policy(load_policy(recipe.model.path))
    expected, gaps = oracle(recipe), {"logprob_gap", "logprob_gap_max"}
    for number, (step, record) in enumerate(zip(expected, steps_of(run), strict=True), start=1):
        assert sampled(run, number) == step.lines
        first, second = (
            {key: value for key, value in untimed(one).items() if key not in gaps | OF_PROCESS}
            for one in (record, step.record)
        )
        assert first == second
        assert 0 < record["logprob_gap"] <= record["logprob_gap_max"] < (1e-3 if recipe.model.dtype == "float32" else 1)
    return expected


CASES: dict[str, dict[str, Any]] = {
    "adapters": {"lora": {"rank": 3, "alpha": 6.0}},
    "bfloat16": {"model": {"dtype": "bfloat16"}},
    "refilled": {
        "grpo": {
            "refill": True,
            "refill_rounds": 3,
            "updates_per_batch": 2,
            "epochs_per_batch": 2,
            "old_logprobs": "recomputed",
            "tis_level": "token",
        },
        "rollout": {"group_size": 2},
    },
    "stale": {"rollout": PARTIAL | {"stale_cache": True}},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_with_more_parts_and_killed(base: dict[str, dict[str, Any]], tmp_path: Path, case: str) -> None:
    recipe = asynchronous(base, **CASES[case])
    recipe.write(tmp_path / "recipe.toml")
    run = {"out": str(tmp_path / "run"), "recipe": str(tmp_path / "recipe.toml"), **TWO}
    play(tmp_path, [{**run, "out": str(tmp_path / "whole")}, {**run, "struck": [1, "sample", 4, "SIGKILL"]}], killed=1)
    play(tmp_path, [{**run, "resume": True}])
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    if case != "stale":  # its cache is dropped at a checkpoint
        assert_as_in_one_process(recipe, tmp_path / "whole")


@pytest.mark.slow
def test_every_step_is_drawn_by_the_weights_two_steps_before(runs: Runs) -> None:
    """The reference is a rollout in one process with the weights that the run saved."""
    recipe = runs.recipes["two"]
    needs_invariant_policy(load_policy(recipe.model.path))
    alone = replace(recipe, run=replace(recipe.run, async_=False))
    for number in range(1, STEPS + 1):
        version = max(number - 2, 0)
        folder = runs.folder / f"two/checkpoints/step_{version:06d}" if version else Path(recipe.model.path)
        scored = [entry for group in loaded(alone, folder).sample(number).scored.values() for entry in group]
        records = sampled(runs.folder / "two", number)
        for record, entry in zip(records, scored, strict=True):
            turns = [part for part in record["segments"] if part["source"] == "policy"]
            assert [run for turn in turns for run in turn["versions"]] == [[version, len(t["ids"])] for t in turns]
            assert [turn["ids"] for turn in turns] == [
                part.ids for part in entry.trajectory.segments if part.source == "policy"
            ]
            assert record["reward"] == entry.result.reward
        tokens = sum(len(turn["ids"]) for one in records for turn in one["segments"] if turn["source"] == "policy")
        late = number - 1 - version
        assert steps_of(runs.folder / "two")[number - 1]["staleness_tokens"] == [0] * late + [tokens]


@pytest.mark.slow
def test_unfinished_groups_go_on_beside_the_update(runs: Runs) -> None:
    """With rollout.partial too, a token is at most max_staleness + 1 updates old."""
    staleness = [record["staleness_tokens"] for record in steps_of(runs.folder / "partial")]
    assert max(len(counts) for counts in staleness) == 3
    assert any(sum(count > 0 for count in counts) > 1 for counts in staleness)


@pytest.mark.slow
def test_rank_0_alone_changes_the_run_folder(runs: Runs) -> None:
    first, second = ((runs.folder / f"two.{rank}.changed").read_text() for rank in range(2))
    assert first and second == ""


@pytest.mark.slow
def test_a_signal_to_the_rank_that_samples_ends_both_behind_the_step_and_no_bit_is_lost(runs: Runs) -> None:
    assert [runs.error("interrupted", rank) for rank in range(2)] == ["Interrupted: SIGTERM", "SystemExit: 143"]
    assert (runs.folder / "interrupted.kept").read_text() == f"{runs.folder / 'interrupted'} is saved up to step 3"
    rows = [[untimed(record) for record in metrics(runs.folder / name)] for name in ("two", "interrupted")]
    assert rows[0] == rows[1]
    assert apart(runs.weights("two", STEPS), runs.weights("interrupted", STEPS)) == 0
    assert steps_saved(runs.folder / "interrupted")[-1] == STEPS


def test_one_process_is_refused(base: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"run.async: expected false in one process, .* with torchrun, or set rollout.par"
    ):
        train(asynchronous(base), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_each_half_waits_from_its_last_rank_on() -> None:
    sampled = Sampled(scored={}, shown=PromptBatch([], 0, 0, 0), clock=RolloutClock(), scoring_seconds=0.0)
    waited = wait_record([(2.5, None), (2.0, None), (0.5, sampled), (0.1, sampled), (0.2, sampled)])
    assert waited == {"trainer_wait_seconds": 2.0, "sampler_wait_seconds": 0.1}


@pytest.mark.parametrize(("count", "judge", "at_once"), [(2, True, True), (3, False, True), (3, True, False)])
def test_ranks_that_ask_one_judge_together_are_not_cut_off(count: int, judge: bool, at_once: bool) -> None:
    parts: dict[str, Any] = dict.fromkeys(("context", "questions", "rollout", "updater"))
    judges = Judges(verdict=cast(Any, object()) if judge else None)
    step = AsyncGrpoStep(**parts, judges=judges, ranks=SINGLE, everyone=Ranks(0, count), trains=True)
    assert isinstance(step.together(), nullcontext) is not at_once


def test_ranks_that_would_ask_one_judge_at_times_of_their_own_are_refused(base: dict[str, dict[str, Any]]) -> None:
    judges = Judges(verdict=cast(Any, SimpleNamespace(name="a chat model")))
    refilled = asynchronous(base, grpo={"refill": True})
    with pytest.raises(UserError, match=r"grpo.refill: with run.async and a judge of answers, .* got 2: they ask"):
        judges_of(judges, refilled, Ranks(0, 2))
    assert judges_of(judges, refilled, Ranks(0, 1)) is judges
    assert isinstance(judges_of(judges, asynchronous(base), Ranks(0, 2)).verdict, MainRankJudge)


def test_no_run_is_replayed_whose_last_groups_are_not_stored(base: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--replay: expected run.async = false"):
        train(asynchronous(base), tmp_path / "run", ranks=Ranks(0, 2), replay=tmp_path / "other")
    with pytest.raises(UserError, match=r"tools_replay: expected none with run.async = true"):
        asynchronous(base, rollout={"tools_replay": "runs/other"})


def test_who_trains() -> None:
    assert [trainers_of(count) for count in (2, 3, 4, 7, 8)] == [1, 1, 2, 3, 4]


def test_a_clock_of_rollouts_side_by_side() -> None:
    clocks = [RolloutClock(total=2.0, decode=1.5, sampled_tokens=3), RolloutClock(total=3.0, decode=0.5, forwards=4)]
    assert parallel_clock(clocks) == RolloutClock(total=3.0, decode=0.5, sampled_tokens=3, forwards=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two", "partial"])
def test_a_run_that_is_killed_three_times_has_the_bits_of_one_that_was_not(
    runs: Runs, tmp_path: Path, name: str
) -> None:
    """Killed in an update, in a rollout next to one, and in a checkpoint, of which the other rank is not told."""
    run = {"out": str(tmp_path / "run"), "recipe": str(runs.folder / f"{name}.toml"), **TWO}
    for number, struck in enumerate(([0, "learn", 2], [1, "sample", 3], [0, "save", 1])):
        play(tmp_path, [{**run, "resume": number > 0, "struck": [*struck, "SIGKILL"]}], killed=struck[0])
    assert steps_saved(tmp_path / "run") == [1, 2]
    play(tmp_path, [{**run, "resume": True}])
    assert_same_run(tmp_path / "run", runs.folder / name)


@pytest.mark.slow
def test_a_signal_in_an_evaluation_ends_it_at_once(runs: Runs, tmp_path: Path) -> None:
    run = {"out": str(tmp_path / "run"), "recipe": str(runs.folder / "rarely.toml"), **TWO}
    play(tmp_path, [{**run, "struck": [1, "evaluate", 2, "SIGTERM"]}, {**run, "resume": True}])
    assert (tmp_path / "run.0.error").read_text() == "Interrupted: SIGTERM"
    assert (tmp_path / "run.kept").read_text() == f"{tmp_path / 'run'} is saved up to step 2"
    rows = [[untimed(record) for record in metrics(folder)] for folder in (tmp_path / "run", runs.folder / "two")]
    assert rows[0] == rows[1]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 4])
def test_more_ranks_sample_the_same_and_train_the_same(runs: Runs, tmp_path: Path, ranks: int) -> None:
    """Of three ranks one trains. Of four two train, which share the weights; their gradients are sums in another
    order."""
    needs_invariant_policy(load_policy(runs.recipes["two"].model.path))
    run = {"out": str(tmp_path / "run"), "recipe": str(runs.folder / "two.toml"), "ranks": ranks}
    play(tmp_path, [{**run, "struck": [ranks - 1, "sample", 3, "SIGTERM"]}, {**run, "resume": True}])
    assert sampled(tmp_path / "run", 1) == sampled(runs.folder / "two", 1)
    trained = [
        load_file(folder / "checkpoints/step_000001/model.safetensors")
        for folder in (tmp_path / "run", runs.folder / "two")
    ]
    if ranks == 3:
        assert all(
            sampled(tmp_path / "run", step) == sampled(runs.folder / "two", step) for step in range(1, STEPS + 1)
        )
    assert apart(*trained) <= (0 if ranks == 3 else 1e-6)
    counts = ("sampled_tokens", "search_queries", "loss_tokens", "questions")
    first, second = (steps_of(folder)[0] for folder in (tmp_path / "run", runs.folder / "two"))
    assert [first[key] for key in counts] == [second[key] for key in counts]


@pytest.mark.slow
def test_a_run_that_is_given_more_steps_has_the_bits_of_one_that_had_them(runs: Runs, tmp_path: Path) -> None:
    short = {"out": str(tmp_path / "run"), "recipe": str(tmp_path / "short.toml"), **TWO}
    recipe = runs.recipes["two"]
    replace(recipe, run=replace(recipe.run, steps=2)).write(tmp_path / "short.toml")
    play(tmp_path, [short, {**short, "recipe": str(runs.folder / "two.toml"), "resume": True}])
    assert_same_run(tmp_path / "run", runs.folder / "two")


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_other_with_its_sentence(runs: Runs, tmp_path: Path) -> None:
    run = {"out": str(tmp_path / "run"), "recipe": str(runs.folder / "two.toml"), **TWO}
    play(tmp_path, [{**run, "struck": [1, "sample", 3, "error"]}])
    assert [(tmp_path / f"run.{rank}.error").read_text() for rank in range(2)] == [
        "SystemExit: 1",
        "UserError: questions.jsonl: line 7 is on fire; put it out",
    ]
