"""Test the study of masking: the rows and gradients of its treatments, its other checks, and the command."""

import json
import shutil
from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from exact_norms import exact_norms, off
from stored_cases import stored
from torch import Tensor
from train_cases import single_threaded

from thresher.bench.studies import mask
from thresher.bench.studies.mask import (
    PER_ROW,
    TREATMENTS,
    Subject,
    compare,
    compare_parts,
    gradient,
    head_loss,
    poison_changes_nothing,
    removal,
    retrieved_rows,
    run_step,
    stretched,
    treat,
    without_retrieved,
)
from thresher.bench.studies.runs import ModelRecipe
from thresher.cli import main as cli
from thresher.common.records import write_records
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.sections import GrpoSection
from thresher.engine.config.tables import from_dict
from thresher.engine.protocol.trajectory import Segment, Trajectory
from thresher.engine.training.train import train
from thresher.kernels.objective import LossResult
from thresher.policy.model import Policy
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.questions import Question
from thresher.rewards.reward import Source

OUTSIDE = 300  # ids from here on occur in retrieved segments only
VOCABULARY = 380
ROUNDING = 64 * 2**-24  # relative; the policy computes in float32, as it trains
# nats between log-probs of forwards in different batches: each rounds logits of up to 10 in 30 sums, 2^-24 10 sqrt(30)
TWO_FORWARDS = 1e-5


def make_trajectories(count: int = 6) -> list[Trajectory]:
    """Make trajectories of different lengths: a prompt, then policy turns with passages or feedback between them."""
    draw = Random(5)

    def ids(low: int, high: int, most: int) -> list[int]:
        return [draw.randrange(low, high) for _ in range(draw.randrange(1, most))]

    trajectories = []
    for number in range(count):
        segments = [Segment(Source.PROMPT, ids(0, OUTSIDE, 9)), Segment(Source.POLICY, ids(0, OUTSIDE, 9))]
        for _ in range(number % 3):
            segments.append(Segment(Source.RETRIEVED, ids(OUTSIDE, VOCABULARY, 20)))
            segments.append(Segment(Source.POLICY, ids(0, OUTSIDE, 9)))
        if number == 4:
            segments += [Segment(Source.FEEDBACK, ids(0, OUTSIDE, 5)), Segment(Source.POLICY, ids(0, OUTSIDE, 5))]
        trajectories.append(Trajectory(f"q{number}", number // 2, number % 2, segments))
    return trajectories


@pytest.fixture
def subject(make_tiny_policy: Callable[..., Policy]) -> Subject:
    """Return six trajectories in small batches; one has no advantage, two have no retrieved segment."""
    trajectories = make_trajectories()
    made = Subject(
        name="a test",
        policy=make_tiny_policy().requires_grad_(True),
        vocab_size=VOCABULARY,
        trajectories=trajectories,
        advantages=[1.0, -1.0, 0.5, -0.5, 0.7, 0.0],
        grpo=GrpoSection(),
        temperature=0.7,
        micro_batch_tokens=90,
    )
    assert all(made.count(source) > 0 for source in Source)  # otherwise the tests would show little
    return made


def sources(trajectory: Trajectory) -> list[Source]:
    return [segment.source for segment in trajectory.segments for _ in segment.ids]


def expected_rows(trajectories: list[Trajectory], wanted: set[Source]) -> Counter[tuple[tuple[int, ...], int]]:
    """Count (all ids before it, id) of every target token, token by token."""
    found: Counter[tuple[tuple[int, ...], int]] = Counter()
    for trajectory in trajectories:
        ids = trajectory.ids()
        for at, source in enumerate(sources(trajectory)):
            if source in wanted:
                found[tuple(ids[:at]), ids[at]] += 1
    return found


# the rows of a treatment


@pytest.mark.parametrize("name", TREATMENTS)
def test_a_treatment_has_the_rows_it_should_have(subject: Subject, name: str) -> None:
    trajectories = subject.trajectories
    if name == "removed":
        kept = [[n for n, source in enumerate(sources(t)) if source is not Source.RETRIEVED] for t in trajectories]
        trajectories = [
            replace(t, segments=[Segment(sources(t)[n], [t.ids()[n]]) for n in places])
            for t, places in zip(trajectories, kept, strict=True)
        ]
    outside = {Source.RETRIEVED} if name in ("in_loss", "zeroed") else set()
    treated = treat(name, subject)
    assert len(treated.batches) > 1
    found: Counter[tuple[tuple[int, ...], int]] = Counter()
    for batch, sampled_R in zip(treated.batches, treated.sampled, strict=True):
        starts = [0, *torch.tensor(batch.layout.lengths).cumsum(0).tolist()]
        for row, target, sampled in zip(batch.rows_R.tolist(), batch.targets_R.tolist(), sampled_R, strict=True):
            start = max(s for s in starts if s <= row)
            found[tuple(batch.ids_T[start : row + 1].tolist()), target] += 1
            assert bool(sampled) == (target < OUTSIDE)
    assert found == expected_rows(trajectories, {Source.POLICY} | outside)
    assert treated.rows == sum(found.values())
    assert treated.tokens == sum(len(t) - 1 for t in trajectories)
    if name == "removed":
        assert all(int(batch.ids_T.max()) < OUTSIDE for batch in treated.batches)


def shortened_logprobs(subject: Subject, policy: Policy) -> list[Tensor]:
    """Compute, in plain torch, the log-probs of the sampled tokens of the sequences without their passages."""
    found = []
    for trajectory in map(without_retrieved, subject.trajectories):
        ids, rows = trajectory.ids(), trajectory.policy_positions()
        logits_TV = policy.logits(torch.tensor(ids))[:, :VOCABULARY] / subject.temperature
        found.append(logits_TV.log_softmax(-1)[[row - 1 for row in rows], [ids[row] for row in rows]])
    return found


def test_old_logprobs_are_the_policy_s_own(subject: Subject) -> None:
    """Two forwards of one batch may differ by four times the root mean square error of plain torch's log-probs."""
    with exact_norms(), torch.no_grad():
        reference_R = torch.cat(shortened_logprobs(subject, subject.policy))
        truth_R = torch.cat(shortened_logprobs(subject, deepcopy(subject.policy).double()))
    limit = 4 * (reference_R - truth_R).square().mean().sqrt()
    for name in TREATMENTS:
        ratios_R = torch.cat([result.ratios for result in run_step(subject, treat(name, subject).batches)])
        assert (ratios_R - 1).square().mean().sqrt() <= limit


# gradients


def difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return compare(one, other)["difference"]


def test_zeroed_does_the_work_of_in_the_loss_and_has_the_gradient_of_masked(subject: Subject) -> None:
    in_loss, zeroed, masked = (treat(name, subject) for name in ("in_loss", "zeroed", "masked"))
    assert zeroed.rows == in_loss.rows > masked.rows
    for batch in zeroed.batches:  # the kernel drops a row of weight 0
        assert bool((batch.weights_R > 0).all())
    assert difference(gradient(subject, zeroed.batches), gradient(subject, masked.batches)) < ROUNDING


def test_in_the_loss_differs_from_masked_by_the_retrieved_rows_gradient(subject: Subject) -> None:
    in_loss, masked = treat("in_loss", subject), treat("masked", subject)
    polluted, clean = gradient(subject, in_loss.batches), gradient(subject, masked.batches)
    alone = gradient(subject, in_loss.weighted(retrieved=1.0, sampled=0.0).batches)
    assert difference(polluted, clean) > 0.01
    assert difference({name: polluted[name] - clean[name] for name in clean}, alone) < ROUNDING


def test_removed_is_the_gradient_of_the_shortened_trajectories(subject: Subject) -> None:
    """The reference is the gradient of the sum of w A log p over the sampled tokens, by plain torch in float64.

    The bound is four times the error of plain torch in float32, and 16 roundings.
    """

    def plain(policy: Policy) -> dict[str, Tensor]:
        policy.zero_grad(set_to_none=True)
        pairs = zip(subject.advantages, shortened_logprobs(subject, policy), strict=True)
        torch.stack([-advantage * logprobs.mean() for advantage, logprobs in pairs]).mean().backward()
        return {name: value.grad for name, value in policy.named_parameters() if value.grad is not None}

    with exact_norms():
        truth = plain(deepcopy(subject.policy).double())
    reference = off(plain(subject.policy), truth)
    found = gradient(subject, treat("removed", subject).batches)
    assert off(found, truth) <= 4 * reference + 2**-20
    assert difference(found, gradient(subject, treat("masked", subject).batches)) > 0.01


def test_parts_are_the_whole(subject: Subject) -> None:
    grads = gradient(subject, treat("masked", subject).batches)
    parts = compare_parts(grads, grads)
    assert list(parts) == ["embedding, head", *(f"layer {n} {part}" for n in (0, 1) for part in ("attention", "mlp"))]
    whole = compare(grads, grads)
    assert whole["norm"] ** 2 == pytest.approx(sum(part["norm"] ** 2 for part in parts.values()))
    assert whole["norm"] == pytest.approx(sum(float(g.square().sum()) for g in grads.values()) ** 0.5)
    assert (whole["cosine"], whole["difference"]) == (pytest.approx(1.0), 0.0)


# other checks and figures


def multiplied(subject: Subject, rows_RH: Tensor, batch: Any, chunk_rows: int | None = None) -> LossResult:
    """Compute a loss as it is often masked: every row is computed, and its result is multiplied by its weight."""
    head_VH = subject.policy.head_VH
    logits_RV = rows_RH @ head_VH[: subject.vocab_size].detach().T
    targets_R = batch.targets_R.clamp(0)
    logprobs_R = logits_RV.log_softmax(-1).gather(1, targets_R[:, None])[:, 0]
    loss = -(batch.weights_R * (logprobs_R - batch.old_logprobs_R).exp() * batch.advantages_R).sum()
    loss.backward()
    result = head_loss(subject, rows_RH[:0], replace(batch, **{f: getattr(batch, f)[:0] for f in PER_ROW}))
    return replace(result, loss=loss.detach(), hidden_grad_TH=rows_RH.grad)


def test_poisoned_masked_rows_change_nothing(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> None:
    treated = treat("in_loss", subject)
    assert poison_changes_nothing(subject, treated)
    monkeypatch.setattr(mask, "head_loss", multiplied)
    assert not poison_changes_nothing(subject, treated)


def test_removal_of_what_nobody_reads_moves_no_logprob(subject: Subject) -> None:
    def figures() -> dict[str, float]:
        return removal(treat("masked", subject), treat("removed", subject), 0.2, 0.2)

    moved = figures()
    assert moved["logprob_gap"] > 0.01
    assert 0 < moved["outside_clip"] < 1  # bound: a share
    passage = Segment(Source.RETRIEVED, [OUTSIDE] * 40)
    for number, trajectory in enumerate(subject.trajectories):
        # Passages after the last sampled token; they change the lengths, and so the order of packing.
        behind = [passage] * (number % 2)
        subject.trajectories[number] = replace(
            without_retrieved(trajectory), segments=without_retrieved(trajectory).segments + behind
        )
    assert figures() == {"logprob_gap": pytest.approx(0.0, abs=TWO_FORWARDS), "outside_clip": 0.0}


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_passages_are_cut_or_repeated_to_a_share(share: float) -> None:
    whole = make_trajectories(9)
    resized = stretched(whole, share)
    retrieved, sampled = (sum(t.count(s) for t in resized) for s in (Source.RETRIEVED, Source.POLICY))
    assert retrieved / (retrieved + sampled) == pytest.approx(share, abs=0.05)
    for before, after in zip(whole, resized, strict=True):
        assert without_retrieved(after) == without_retrieved(before)
        for one, other in zip(before.segments, after.segments, strict=True):
            assert all(token == one.ids[n % len(one.ids)] for n, token in enumerate(other.ids))


def test_retrieved_rows_are_the_retrieved_positions() -> None:
    for trajectory in make_trajectories():
        places = [n for n, source in enumerate(sources(trajectory)) if source is Source.RETRIEVED]
        assert retrieved_rows(trajectory) == places
    assert retrieved_rows(Trajectory("q", 0, 0, [Segment(Source.RETRIEVED, [1, 2])])) == [1]


def test_steps_are_timed_in_all_their_parts(subject: Subject) -> None:
    treated = {name: treat(name, subject) for name in ("masked", "removed")}
    ticks: list[int] = []
    clocks = mask.timed(subject, treated, 2, lambda: ticks.append(1))
    assert len(ticks) == 6
    assert [[len(times) for times in clock.values()] for clock in clocks.values()] == [[2, 2, 2]] * 2


# the command: on a scripted batch, on a run, and on runs that cannot be studied


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduce the sweep to two points and one repeat."""
    monkeypatch.setattr(mask, "SHARES", (0.4, 0.8))
    monkeypatch.setattr(mask, "SWEEP_REPEATS", 1)


def check_folder(out: Path) -> dict[str, Any]:
    assert sorted(path.name for path in out.iterdir()) == ["mask.json", "mask.png"]
    assert (out / "mask.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    figures: dict[str, Any] = json.loads((out / "mask.json").read_text())
    treatments = figures["treatments"]
    assert list(treatments) == list(TREATMENTS)
    tokens = figures["batch"]["tokens"]
    assert treatments["masked"]["rows"] == treatments["removed"]["rows"] == tokens["policy"]
    assert treatments["in_loss"]["rows"] == treatments["zeroed"]["rows"] == tokens["policy"] + tokens["retrieved"]
    assert treatments["masked"]["tokens"] - treatments["removed"]["tokens"] == tokens["retrieved"]
    assert treatments["zeroed"]["gradient"]["cosine"] == pytest.approx(1.0, abs=1e-6)
    assert treatments["in_loss"]["head_at_once_mib"] > treatments["masked"]["head_at_once_mib"] > 0
    assert treatments["masked"]["step_mib"] > treatments["masked"]["head_mib"] > 0
    assert treatments["in_loss"]["kinds"]["retrieved"]["push"] > 0.01
    assert figures["poison_changes_nothing"] is True
    assert [round(point["retrieved_share"], 1) for point in figures["sweep"]] == [0.4, 0.8]
    return figures


@pytest.mark.usefixtures("quick")
@pytest.mark.slow
def test_the_command_on_a_scripted_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["study", "mask", "--limit", "6", "--repeats", "1", "--seed", "3", "--out", str(tmp_path / "out")]
    assert cli.run(arguments) == 0
    check_folder(tmp_path / "out")
    printed = capsys.readouterr().out
    assert "rows at the head" in printed and "keep every bit" in printed
    assert cli.run(arguments) == 2
    refusal = f"thresher: {tmp_path / 'out'}: exists already; choose another folder with --out\n"
    assert capsys.readouterr().err == refusal


@pytest.mark.slow
def test_a_scripted_batch_is_a_function_of_its_seed() -> None:
    one, again, other = (mask.scripted(seed, 4, "cpu") for seed in (1, 1, 2))
    assert one.trajectories == again.trajectories != other.trajectories
    assert torch.equal(one.policy.embed_VH, again.policy.embed_VH)
    assert one.advantages == [-1.0, 1.0, -1.0, 1.0]


@pytest.fixture(scope="module")
def run_folder(
    tmp_path_factory: pytest.TempPathFactory,
    make_tiny_policy: Callable[..., Policy],
    tiny_tokenizer: Tokenizer,
    tiny_index_folder: Path,
    tiny_questions: list[Question],
) -> Path:
    """Train two steps, and write advantages into every other group of the last, since its samples may earn none."""
    folder = tmp_path_factory.mktemp("study")
    make_tiny_policy().save(folder / "model")
    tiny_tokenizer.save(folder / "model")
    (folder / "prompt.txt").write_text("<search> or <answer>: {question}\n")
    records = [
        {"id": q.id, "question": q.question, "golden_answers": ["Anna Bell", "Eva Frost"]} for q in tiny_questions
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    lengths = {"max_turns": 3, "max_turn_tokens": 40, "max_context": 240, "max_passage_tokens": 40}
    tables = {
        "model": {"path": str(folder / "model")},
        "data": {"train": str(folder / "train.jsonl")},
        "retrieval": {"index": str(tiny_index_folder), "k": 2, "passage_format": "{text}"},
        "system": {"name": "eval_rar", "template": str(folder / "prompt.txt")},
        "rollout": {"group_size": 4, "questions_per_step": 6, **lengths},
        "grpo": {"beta": 0.0, "drop_zero_advantage": True},
        "optim": {"lr": 1e-3, "micro_batch_tokens": 800},
        "run": {"steps": 2, "save_every": 2},
    }
    train(from_dict(Recipe, tables, "test"), folder / "grpo")
    path = folder / "grpo/trajectories/step_000002.jsonl"
    records = stored(path)
    for record in records:
        record["advantage"] = record["group"] % 2 * (record["sample"] - 1.5)
    write_records(path, records)
    return folder


@pytest.mark.usefixtures("quick")
@pytest.mark.slow
def test_the_command_on_a_run(run_folder: Path, tmp_path: Path) -> None:
    """The run is given by the folder around it, as `thresher demo` leaves it."""
    common = ["study", "mask", "--limit", "10", "--repeats", "1", "--run"]
    assert cli.run([*common, str(run_folder), "--out", str(tmp_path / "a")]) == 0
    figures = check_folder(tmp_path / "a")
    assert figures["batch"]["trajectories"] == 10
    assert figures["batch"]["from"] == f"step 2 of {run_folder / 'grpo'}, weights of step 2"


def test_a_run_s_trajectories_come_with_their_signal_first(run_folder: Path) -> None:
    lines = stored(run_folder / "grpo/trajectories/step_000002.jsonl")
    subject = mask.stored(run_folder / "grpo", 1000, "cpu")
    assert len(subject.trajectories) == len(lines) == 24
    by_place = {(line["group"], line["sample"]): line for line in lines}
    signal = []
    for trajectory, advantage in zip(subject.trajectories, subject.advantages, strict=True):
        line = by_place[trajectory.group, trajectory.sample]
        assert trajectory.ids() == [token for part in line["segments"] for token in part["ids"]]
        assert advantage == line["advantage"]
        signal.append(any(other["advantage"] for other in lines if other["group"] == trajectory.group))
    assert signal == [True] * 12 + [False] * 12


def rewrite(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Return a function that changes every stored trajectory of a run's last step."""

    def apply(run: Path) -> None:
        path = run / "trajectories" / "step_000002.jsonl"
        records = stored(path)
        for record in records:
            change(record)
        write_records(path, records)

    return apply


def remove(pattern: str) -> Callable[[Path], None]:
    def apply(run: Path) -> None:
        for path in sorted(run.glob(pattern), reverse=True):
            path.unlink()

    return apply


def keep_no_passage(record: dict[str, Any]) -> None:
    record["segments"] = [part for part in record["segments"] if part["source"] != "retrieved"]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (remove("recipe.toml"), "is not a run folder (it has no recipe.toml)"),
        (remove("checkpoints/*/state.json"), "checkpoints: holds no checkpoint"),
        (remove("trajectories/*"), "trajectories: holds no trajectories; train with run.keep_trajectories=1"),
        (rewrite(lambda record: record.pop("advantage")), "step_000002.jsonl:1: expected a trajectory as training"),
        (rewrite(lambda record: record.update(advantage=0.0)), "no trajectory has an advantage"),
        (rewrite(lambda record: record["segments"].pop(0)), "step_000002.jsonl:1: expected ids below"),
        (rewrite(lambda record: record["segments"][0]["ids"].append(10**6)), "jsonl:1: expected ids below"),
        (rewrite(keep_no_passage), "nothing in it was retrieved"),
    ],
)
@pytest.mark.filterwarnings("ignore:checkpoint skipped")
def test_a_run_that_cannot_be_studied(
    run_folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    damage: Callable[[Path], None],
    sentence: str,
) -> None:
    run = tmp_path / "run"
    shutil.copytree(run_folder / "grpo", run)
    damage(run)
    capsys.readouterr()
    assert cli.run(["study", "mask", "--run", str(run), "--out", str(tmp_path / "out")]) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"thresher: {run}") and sentence in message and message.count("\n") == 1
    assert not (tmp_path / "out").exists()


# a recipe that samples the batch


@pytest.mark.usefixtures("quick")
@pytest.mark.slow
def test_the_command_on_a_recipe(make_recipe: Callable[..., Recipe], tmp_path: Path) -> None:
    make_recipe(optim={"micro_batch_tokens": 4000}).write(tmp_path / "recipe.toml")
    command = ["study", "mask", "--recipe", str(tmp_path / "recipe.toml"), "--repeats", "1", "--limit", "10"]
    assert cli.run([*command, "--out", str(tmp_path / "out")]) == 0
    figures = check_folder(tmp_path / "out")
    assert figures["batch"]["trajectories"] == 10 and str(tmp_path / "recipe.toml") in figures["batch"]["from"]


@pytest.mark.slow
def test_what_a_recipe_samples_is_the_first_step_of_its_training(
    uninterrupted: Path, make_recipe: Callable[..., Recipe], tmp_path: Path
) -> None:
    make_recipe().write(tmp_path / "recipe.toml")
    with single_threaded():
        subject = mask.sampled(ModelRecipe(str(tmp_path / "recipe.toml")), 1000, "cpu")
    lines = stored(uninterrupted / "trajectories/step_000001.jsonl")
    assert len(subject.trajectories) == len(lines)
    by_place = {(line["group"], line["sample"]): line for line in lines}
    for trajectory, advantage in zip(subject.trajectories, subject.advantages, strict=True):
        line = by_place[trajectory.group, trajectory.sample]
        assert trajectory.ids() == [token for part in line["segments"] for token in part["ids"]]
        assert advantage == line["advantage"]
    assert all(value.requires_grad for value in subject.policy.parameters())


@pytest.mark.parametrize(
    ("changes", "words", "wrong"),
    [
        ({"system": {"name": "reading"}}, "", "system reading retrieves nothing between its turns"),
        ({"lora": {"rank": 2}}, "", "leave [lora] out"),
        ({}, "--set model.dtype=bfloat16", "the study itself sets model.dtype"),
        ({"rollout": {"max_turns": 1}}, "", "nothing in it was retrieved"),
    ],
)
def test_a_recipe_that_cannot_be_studied(
    make_recipe: Callable[..., Recipe],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, dict[str, Any]],
    words: str,
    wrong: str,
) -> None:
    make_recipe(**changes).write(tmp_path / "recipe.toml")
    command = ["study", "mask", "--recipe", str(tmp_path / "recipe.toml"), "--out", str(tmp_path / "out")]
    assert cli.run([*command, *words.split()]) == 2
    message = capsys.readouterr().err
    assert wrong in message and message.startswith("thresher: ") and message.count("\n") == 1
    assert not (tmp_path / "out").exists()
