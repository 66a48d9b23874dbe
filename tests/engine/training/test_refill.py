"""`grpo.refill`: other questions replace groups without a signal, the same in a resumed run, and all are counted."""

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_cases import Make, assert_same_run, metrics, sampled, steps_of, train_killed
from update_cases import rounded

from thresher.common.errors import UserError
from thresher.engine.assemble import load_questions, load_retrieval, load_run_context
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.sections import OptimSection
from thresher.engine.optim.master_weights import MasterWeights
from thresher.engine.packing import build_train_sequences
from thresher.engine.parallel.ranks import Ranks
from thresher.engine.protocol.prompts import PromptBatch
from thresher.engine.protocol.trajectory import Trajectory
from thresher.engine.rollout.rollout import Job, Rollout, RolloutClock
from thresher.engine.scoring.score import Judges
from thresher.engine.training.step import DistributedGrpoStep, GrpoStep, Sampled, questions_of_step, refill_questions
from thresher.engine.training.train import train
from thresher.engine.training.update import Updater
from thresher.retrieval.questions import Question
from thresher.rewards.reward import RewardInput, RewardResult, Source

COUNT, SIZE = 4, 2  # groups of two: half of them have no signal
REFILL: dict[str, Any] = {
    "rollout": {"questions_per_step": COUNT, "group_size": SIZE},
    "grpo": {"refill": True},
    "run": {"seed": 0},  # with this seed one of the first four groups has a signal
}
UPDATES = {**REFILL, "grpo": {"refill": True, "updates_per_batch": 2, "drop_zero_advantage": True, "beta": 0.0}}


@dataclass
class Rounds:
    """The jobs and trajectories of each call of a training rollout."""

    jobs: list[list[Job]] = field(default_factory=list)
    trajectories: list[list[Trajectory]] = field(default_factory=list)


@contextmanager
def recorded() -> Iterator[Rounds]:
    rounds, plain = Rounds(), Rollout.run

    def run(self: Rollout, jobs: Sequence[Job], temperature: float, *others: Any, **more: Any) -> list[Trajectory]:
        found = plain(self, jobs, temperature, *others, **more)
        if temperature:
            rounds.jobs.append(list(jobs))
            rounds.trajectories.append(found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rollout, "run", run)
        yield rounds


def test_rounds_have_other_questions_until_the_data_ends() -> None:
    questions = [Question(str(number), "?", ("a",)) for number in range(30)]

    def ids(seed: int, step: int) -> list[list[str]]:
        own = questions_of_step(questions, 4, seed, step)
        rounds = [refill_questions(questions, 4, seed, step, number) for number in range(2, 11)]
        return [[question.id for question in part] for part in (own, *rounds)]

    rounds = ids(7, 3)
    assert [len(part) for part in rounds] == [4, 4, 4, 4, 4, 4, 4, 2, 0, 0]
    assert sorted(itertools.chain(*rounds)) == sorted(question.id for question in questions)
    assert rounds == ids(7, 3) and rounds[1] not in (ids(7, 4)[1], ids(8, 3)[1])
    # Each step has its own order, not that of another step with other questions left out.
    left = [[[int(one) for one in part] for part in ids(7, step)[1:]] for step in (3, 4)]
    places = [[sorted(itertools.chain(*later)).index(one) for one in later[0]] for later in left]
    assert places[0] != places[1]
    # A step across the end of a pass, and a step without other questions.
    assert not {question.id for question in refill_questions(questions, 4, 7, 8, 2)} & set(ids(7, 8)[0])
    assert refill_questions(questions[:4], 4, 7, 1, 2) == []


@pytest.fixture(scope="module")
def rounds_of(make_recipe: Make, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Rounds]:
    out = tmp_path_factory.mktemp("refill") / "run"
    with recorded() as rounds:
        train(make_recipe(**UPDATES), out)
    return out, rounds


def test_a_step_samples_until_its_groups_have_a_signal(rounds_of: tuple[Path, Rounds]) -> None:
    out, rounds = rounds_of
    at = 0
    for record in steps_of(out):
        of_step = slice(at, at + record["refill_rounds"])
        at = of_step.stop
        jobs, trajectories = rounds.jobs[of_step], list(itertools.chain(*rounds.trajectories[of_step]))
        assert [job.group for job in jobs[0]] == [group for group in range(COUNT) for _ in range(SIZE)]
        for earlier, later in itertools.pairwise(jobs):  # a group with a signal is not sampled again
            assert {job.group for job in later} <= {job.group for job in earlier}
        asked = [job.question.id for part in jobs for job in part if job.sample == 0]
        assert len(set(asked)) == len(asked) == COUNT + record["refilled_groups"]
        every = list(itertools.chain(*jobs))
        assert len({job.seed for job in every}) == len(every)
        # The last trajectories of each group are stored and trained on; counts and times cover all.
        last = {(one.group, one.sample): one for one in trajectories}
        entries = sampled(out, record["step"])
        assert [(entry["group"], entry["sample"]) for entry in entries] == sorted(last)
        assert all(entry["id"] == last[entry["group"], entry["sample"]].question_id for entry in entries)
        signals = {entry["group"] for entry in entries if entry["advantage"]}
        assert record["zero_advantage_groups"] == COUNT - len(signals) == 0
        assert record["sampled_tokens"] == sum(len(one.policy_positions()) for one in trajectories)
        assert record["loss_tokens"] == sum(len(one.policy_positions()) for one in last.values())
        assert record["tokens_set_aside"] == record["sampled_tokens"] - record["loss_tokens"]
        assert record["search_queries"] >= sum(len(entry["searches"]) for entry in entries)
        phases = sum(record[f"{name}_seconds"] for name in ("decode", "prefill", "search", "host"))
        assert phases == pytest.approx(record["rollout_seconds"])
    assert at == len(rounds.jobs) and max(record["refill_rounds"] for record in steps_of(out)) > 2
    assert all(
        record["sampled_tokens"] > record["loss_tokens"] for record in steps_of(out) if record["refilled_groups"]
    )
    optimizer = load_file(out / "checkpoints" / "step_000004" / "optimizer.safetensors")
    assert {float(value) for name, value in optimizer.items() if name.endswith(".step")} == {8.0}  # two per step


def test_a_resumed_refill_has_the_same_bits(tmp_path: Path, make_recipe: Make, rounds_of: tuple[Path, Rounds]) -> None:
    train_killed(make_recipe(**UPDATES), tmp_path / "run", 3)
    train(make_recipe(**UPDATES), tmp_path / "run", resume=True)
    assert_same_run(rounds_of[0], tmp_path / "run")


def test_the_first_round_is_the_step_without_refill(
    tmp_path: Path, make_recipe: Make, rounds_of: tuple[Path, Rounds]
) -> None:
    grpo = UPDATES["grpo"] | {"refill": False}
    run = {"seed": 0, "steps": 1, "eval_every": None}
    with recorded() as plain:
        train(make_recipe(**{**UPDATES, "grpo": grpo, "run": run}), tmp_path / "run")
    out, rounds = rounds_of
    assert plain.jobs == rounds.jobs[:1] and plain.trajectories == rounds.trajectories[:1]
    (record,) = steps_of(tmp_path / "run")
    refilled = steps_of(out)[0]
    assert refilled.keys() - record.keys() == {"refill_rounds", "refilled_groups", "tokens_set_aside"}
    assert refilled["refilled_groups"] > 0
    assert record["zero_advantage_groups"] > 0 == refilled["zero_advantage_groups"]


def unanswerable(folder: Path, count: int) -> dict[str, Any]:
    asked = {"question": "What is the spouse of Mia Noor?", "golden_answers": ["no one can say this"]}
    (folder / "questions.jsonl").write_text("".join(json.dumps({"id": str(n), **asked}) + "\n" for n in range(count)))
    return {"train": str(folder / "questions.jsonl"), "dev": None}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("questions", "rounds", "replaced"), [(40, 3, 8), (10, 3, 6), (4, 1, 0)])
@pytest.mark.parametrize("more", [{}, {"old_logprobs": "recomputed"}], ids=["rollout", "recomputed"])
def test_without_any_signal_nothing_is_learned(
    tmp_path: Path,
    make_recipe: Make,
    base: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
    questions: int,
    rounds: int,
    replaced: int,
    more: dict[str, Any],
) -> None:
    """Of ten questions, four are the step's own, four are those of the second round, and two those of the third."""
    grpo = {"refill": True, "refill_rounds": 3, "updates_per_batch": 2, **more}
    data, run = unanswerable(tmp_path, questions), {"steps": 2, "eval_every": None}
    train(make_recipe(data=data, rollout=REFILL["rollout"], grpo=grpo, run=run), tmp_path / "run")
    for record in steps_of(tmp_path / "run"):
        assert (record["refill_rounds"], record["refilled_groups"]) == (rounds, replaced)
        assert (record["zero_advantage_groups"], record["loss_tokens"]) == (COUNT, 0) and "loss" not in record
    assert len(metrics(tmp_path / "run")) == 2
    printed = " ".join(capsys.readouterr().out.split())
    said = f"no group of step 1 has a signal, so it updates nothing; rounds of sampling: {rounds} (reported once"
    assert printed.count("has a signal, so it updates nothing") == printed.count(said) == 1
    start = load_file(Path(base["model"]["path"]) / "model.safetensors")
    end = load_file(tmp_path / "run" / "checkpoints" / "step_000002" / "model.safetensors")
    assert all(torch.equal(start[name], end[name]) for name in start)


def test_a_group_left_without_a_signal_is_not_trained_on_and_counts_in_n(make_recipe: Make) -> None:
    recipe = make_recipe(**{**REFILL, "grpo": {"refill": True, "refill_rounds": 1}})
    result = step_of(recipe).collect(1)
    without = {e.trajectory.group for e in result.scored} - {one.key[0] for one in result.sequences_by_update[0]}
    found = zip(result.scored, result.advantages, strict=True)
    assert without and all((e.trajectory.group in without) == (value == 0) for e, value in found)
    assert len(result.scored) == COUNT * SIZE
    for one in result.sequences_by_update[0]:
        assert one.weight == 1 / (COUNT * SIZE * len(one.positions))


@pytest.mark.parametrize("aggregation", ["trajectory", "token", "constant"])
@pytest.mark.parametrize("more", [{}, {"updates_per_batch": 2}, {"refill": True, "refill_rounds": 1}])
def test_without_counting_a_step_is_that_of_the_groups_with_a_signal(
    make_recipe: Make,
    gradients: dict[str, torch.Tensor],
    monkeypatch: pytest.MonkeyPatch,
    aggregation: str,
    more: dict[str, Any],
) -> None:
    """The gradient, in float64, is that of a loss over the other groups alone; ranks sum their counts."""
    constant = {"aggregation_constant": 50.0} if aggregation == "constant" else {}
    grpo = {"aggregation": aggregation, "count_zero_advantage_groups": False, **constant, **more}
    recipe = make_recipe(**{**REFILL, "grpo": grpo})
    step = step_of(recipe)
    result = step.collect(1)
    pairs = list(zip(result.scored, result.advantages, strict=True))
    alive = {entry.trajectory.group for entry, value in pairs if value}
    assert 0 < len(alive) < COUNT
    policy, vocab = deepcopy(step.context.policy).double().requires_grad_(True), step.context.vocab_size
    updates, seen = recipe.grpo.updates_per_batch, 0
    for number, sequences in enumerate(result.sequences_by_update):
        groups = alive & set(range(number * COUNT // updates, (number + 1) * COUNT // updates))
        kept = [(entry.trajectory, value) for entry, value in pairs if entry.trajectory.group in groups]
        alone = build_train_sequences([one for one, _ in kept], [value for _, value in kept], recipe.grpo)
        assert sequences == alone
        seen += len(sequences)
        if not kept:
            continue
        loss = torch.zeros((), dtype=torch.float64)
        for trajectory, value in kept:
            ids, rows = torch.tensor(trajectory.ids()), torch.tensor(trajectory.policy_positions())
            own = policy.logits(ids)[rows - 1, :vocab].log_softmax(-1).gather(1, ids[rows, None])[:, 0]
            ratios = (own - torch.tensor(trajectory.policy_logprobs()).double()).exp()
            tokens = sum(len(one.policy_positions()) for one, _ in kept)
            over = {"trajectory": len(kept) * len(rows), "token": tokens, "constant": len(kept) * 50.0}[aggregation]
            loss = loss - rounded(value) * rounded(1 / over) * ratios.sum()
        wanted = torch.autograd.grad(loss, list(policy.parameters()))
        settings = replace(recipe.grpo, beta=0.0)
        updater = Updater(MasterWeights(policy), None, OptimSection(), settings, vocab, 4)
        assert updater.update(sequences, 0, 1.0) is not None
        for gradient, expected in zip(gradients.values(), wanted, strict=True):
            # Ten thousand roundings of float64, for some thousand products and sums per row.
            assert (gradient - expected).norm() <= 1e-12 * expected.norm()
    assert seen == len(alive) * SIZE
    # If they are counted, the same tokens have smaller weights: N is the number of all groups, on every rank.
    counted = step_of(make_recipe(**{**REFILL, "grpo": grpo | {"count_zero_advantage_groups": True}})).collect(1)
    weights = {one.key: one.weight for part in counted.sequences_by_update for one in part}
    assert any(one.weight > weights[one.key] for part in result.sequences_by_update for one in part)
    summed: list[tuple[int, ...]] = []
    for rank in (0, 1) if "refill" not in more else ():
        part = step_of(recipe, rank)
        assert isinstance(part, DistributedGrpoStep)
        monkeypatch.setattr(Lockstep, "all_reduce_sum", lambda self, *numbers: summed.append(numbers) or list(numbers))
        part.collect(1)
    for kind, size in ((0, lambda one: 1), (1, lambda one: len(one.positions))) if summed else ():
        of_ranks = [sum(counts) for counts in zip(*summed[kind::2], strict=True)]
        assert of_ranks == [sum(size(one) for one in part) for part in result.sequences_by_update]


@pytest.mark.slow
def test_shuffled_rewards_are_those_of_the_refilled_groups(make_recipe: Make) -> None:
    plain, shuffled = (
        step_of(make_recipe(**{**REFILL, "grpo": {"refill": True, "shuffle_rewards": shuffle}})).collect(1)
        for shuffle in (False, True)
    )
    assert [one.trajectory for one in plain.scored] == [one.trajectory for one in shuffled.scored]
    pairs = [(sorted(each.advantages[at : at + SIZE]) for each in (plain, shuffled)) for at in range(0, 8, SIZE)]
    assert all(one == other for one, other in pairs) and plain.advantages != shuffled.advantages


def test_what_rounds_take_is_added_up() -> None:
    def sampled_by(group: int, name: str, seconds: float, tokens: int) -> Sampled:
        clock = RolloutClock(total=seconds, decode=seconds / 2, search=seconds / 4, sampled_tokens=tokens)
        shown = PromptBatch([Question(name, "?", ("a",))], tokens - 2, tokens - 1, 40)
        return Sampled(scored={group: [], 2: []}, shown=shown, clock=clock, scoring_seconds=seconds)

    whole = sampled_by(1, "one", 2.0, 3)
    whole.add_round(sampled_by(1, "other", 4.0, 5))
    assert (list(whole.scored), whole.rounds, whole.replaced, whole.scoring_seconds) == ([1, 2], 2, 2, 6.0)
    assert whole.clock == RolloutClock(total=6.0, decode=3.0, search=1.5, sampled_tokens=8) and whole.clock.rest == 1.5
    assert (len(whole.shown.questions), whole.shown.cut_questions, whole.shown.cut_passages) == (2, 4, 6)


class Lockstep(Ranks):
    """A rank next to others that always lack a group: each goes through all rounds, some without groups to sample."""

    def all_reduce_max(self, number: int) -> int:
        return max(number, 1)

    def all_reduce_sum(self, *numbers: int) -> list[int]:
        return list(numbers)

    def interruptible(self) -> Any:
        return nullcontext()


def step_of(recipe: Recipe, rank: int | None = None) -> GrpoStep:
    context = load_run_context(recipe)
    settings: dict[str, Any] = {
        "context": context,
        "questions": load_questions(recipe, context.system)[0],
        "rollout": context.rollout(load_retrieval(recipe, context.system)),
        "judges": Judges(),
        "updater": SimpleNamespace(weights=SimpleNamespace(rolling_out=nullcontext)),
    }
    return GrpoStep(**settings) if rank is None else DistributedGrpoStep(**settings, ranks=Lockstep(rank, 2))


@pytest.mark.slow
def test_ranks_refill_their_shares_in_equally_many_rounds(make_recipe: Make) -> None:
    recipe = make_recipe(**REFILL)
    whole, *parts = (step_of(recipe, rank).collect(1) for rank in (None, 0, 1))
    assert whole.sampled.replaced == sum(part.sampled.replaced for part in parts) > 0
    assert [part.sampled.rounds for part in parts] == [10, 10] and whole.sampled.rounds < 10
    assert [one.trajectory for one in whole.scored] == [one.trajectory for part in parts for one in part.scored]
    assert whole.advantages == [value for part in parts for value in part.advantages]


@pytest.mark.parametrize("rank", [None, 1])
def test_a_reward_of_groups_gets_whole_groups_in_each_round(make_recipe: Make, rank: int | None) -> None:
    recipe, sizes = make_recipe(**REFILL), []
    plain, grouped = step_of(recipe, rank).collect(1), step_of(recipe, rank)
    system = grouped.context.system

    def reward_group(attempts: Sequence[RewardInput]) -> list[RewardResult]:
        assert len({attempt.question for attempt in attempts}) == 1
        sizes.append(len(attempts))
        return [system.reward(attempt) for attempt in attempts]

    grouped.context = replace(grouped.context, system=replace(system, reward_group=reward_group))
    result = grouped.collect(1)
    assert result.advantages == plain.advantages and result.sampled.replaced > 0
    assert sizes == [SIZE] * (len(result.sampled.scored) + result.sampled.replaced)


def test_a_group_has_a_signal_if_any_of_its_tokens_has(make_recipe: Make) -> None:
    """All trajectories have the same reward, but turns differ: no group is set aside, and none is by the update."""
    finer = {"advantage": "turn", "baseline": "leave_one_out", "scale": "none"}
    step = step_of(make_recipe(**REFILL | {"grpo": {"refill": True, **finer}}))

    def reward(attempt: RewardInput) -> RewardResult:
        return RewardResult(0.5, turns=[attempt.chance for piece in attempt.pieces if piece.source is Source.POLICY])

    step.context = replace(step.context, system=replace(step.context.system, reward=reward))
    result = step.collect(1)
    assert len({attempt.attempt.chance for attempt in result.scored}) == COUNT * SIZE, "two samples are alike"
    assert result.sampled.replaced == 0 and all(any(values) for values in result.credit or ())


def test_a_replay_of_tools_is_not_refilled(make_recipe: Make) -> None:
    with pytest.raises(UserError, match=r"tools_replay: expected none with grpo.refill = true"):
        make_recipe(grpo={"refill": True}, rollout={"tools_replay": "runs/one"})
