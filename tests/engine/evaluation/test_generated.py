"""Test what an interrupted evaluation continues with: whole parts only, and no damaged record without a checksum, as an
earlier version wrote it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from thresher.common.errors import UserError
from thresher.engine.evaluation.run import (
    REMEDY,
    EvalFolder,
    Generated,
    _generate,
    check_generated,
    read_generated,
    write_generated,
)
from thresher.engine.protocol.trajectory import Segment, Trajectory
from thresher.engine.rollout.rollout import Job
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.questions import Question
from thresher.retrieval.retriever import Unanswered
from thresher.rewards.reward import Source

TAGS = ("<search>", "</search>", "<information>", "</information>")
CONTEXT = 200


def generated(tokenizer: Tokenizer) -> Generated:
    """Return a trajectory with a search and its result, and a branch."""
    ids = tokenizer.encode("<search>Anna Bell</search>")
    segments = [
        Segment(Source.PROMPT, tokenizer.encode("Who?")),
        Segment(Source.POLICY, ids, [-0.5] * len(ids), "</search>"),
        Segment(Source.RETRIEVED, tokenizer.encode("<information>Anna Bell.</information>")),
    ]
    branch = Trajectory("q1", 0, 0, [Segment(Source.PROMPT, ids)], "ended")
    searches = [{"query": "Anna Bell", "passages": ["p0"]}]
    branches = {"full": branch, "read": replace(branch, trained=True)}
    return Generated(Trajectory("q1", 0, 0, segments, "turns", searches, branches, forked=(1, 1)), 0.25, [True])


def put(value: Any, *path: str | int) -> Callable[[dict[str, Any]], object]:
    """Return a damage that puts this value at this place."""

    def damage(record: Any) -> None:
        for key in path[:-1]:
            record = record[key]
        record[path[-1]] = value

    return damage


TURN = ("trajectory", "segments", 1)
DAMAGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no trajectory": lambda record: record.pop("trajectory"),
    "no source": lambda record: record["trajectory"]["segments"][1].pop("source"),
    "an unknown key": put(1, *TURN, "x"),
    "another source": put("nobody", *TURN, "source"),
    "a prompt in its middle": put("prompt", *TURN, "source"),
    "a retrieved turn": put("retrieved", *TURN, "source"),
    "ids of text": put("abc", *TURN, "ids"),
    "an id of text": put(["a"], *TURN, "ids"),
    "an id that is a truth": put([True], *TURN, "ids"),
    "an id below 0": put([-7], *TURN, "ids"),
    "an id outside of the tokenizer": put([10**6], "trajectory", "segments", 0, "ids"),
    "a huge id": put([10**30], "trajectory", "segments", 0, "ids"),
    "more ids than a context": put([5] * CONTEXT, "trajectory", "segments", 0, "ids"),
    "a lost id": lambda record: record["trajectory"]["segments"][1]["ids"].pop(),
    "a lost log-prob": lambda record: record["trajectory"]["segments"][1]["logprobs"].pop(),
    "a log-prob of text": put("x", *TURN, "logprobs", 0),
    "a log-prob above 0": put(0.5, *TURN, "logprobs", 0),
    "another stop": put("</answer>", *TURN, "stop"),
    "a stop that has no bytes": put("\ud800", *TURN, "stop"),
    "an empty stop": put("", *TURN, "stop"),
    "bytes behind the stop": put(1, *TURN, "trailing"),
    "an empty turn that stopped": lambda record: record["trajectory"]["segments"][1].update(
        ids=[], logprobs=[], stop=">"
    ),
    "a question of no text": put(None, "trajectory", "question_id"),
    "a search without a query": put([{}], "trajectory", "searches"),
    "searches that are none": put("x", "trajectory", "searches"),
    "a branch that is none": put([], "trajectory", "branches", "full"),
    "a branch without its prompt": put([], "trajectory", "branches", "full", "segments"),
    "a branch that is trained by number": put(1, "trajectory", "branches", "full", "trained"),
    "a fork of one number": put([1], "trajectory", "forked"),
    "a fork of texts": put(["1", "1"], "trajectory", "forked"),
    "no number of seconds": put("1", "seconds"),
    "seconds below 0": put(-1.0, "seconds"),
    "endless seconds": put(float("inf"), "seconds"),
    "relevance of text": put(["yes"], "relevant"),
}


def read(record: dict[str, Any], tokenizer: Tokenizer) -> Generated:
    found = read_generated(record, "generated.jsonl:1")
    check_generated([found], fake_rollout(tokenizer), Path("generated.jsonl"))
    return found


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_no_trajectory_as_it_was_written_is_refused(tiny_tokenizer: Tokenizer, name: str) -> None:
    text = json.dumps(write_generated(generated(tiny_tokenizer)))
    assert read(json.loads(text), tiny_tokenizer) == generated(tiny_tokenizer)
    record = json.loads(text)
    DAMAGES[name](record)
    with pytest.raises(UserError) as refused:
        read(record, tiny_tokenizer)
    message = str(refused.value)
    assert message.startswith("generated.jsonl:1: ") and message.endswith(REMEDY) and "\n" not in message


def test_an_evaluation_that_cannot_go_on_is_kept(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    entry, out = generated(tiny_tokenizer), tmp_path / "out"
    with EvalFolder.open(out, {"seed": 1}) as folder:
        folder.append([entry, entry])
    kept = out / "generated.jsonl"
    whole = kept.read_text()
    kept.write_text(whole[::-1].replace('"sdi"', '"xdi"', 1)[::-1])
    with (
        pytest.raises(UserError, match=rf"^{kept}:2: does not follow from .*; {REMEDY}$"),
        EvalFolder.open(out, {"seed": 1}) as folder,
    ):
        folder.generated()
    assert kept.exists()
    records = [json.loads(line) for line in whole.splitlines()]
    for record in records:
        del record["checksum"]
    records[1]["trajectory"]["segments"][1]["ids"] = None
    kept.write_text("".join(json.dumps(record) + "\n" for record in records))
    with (
        pytest.raises(UserError, match=rf"^{kept}:2: expected a trajectory as it was written .*; {REMEDY}$"),
        EvalFolder.open(out, {"seed": 1}) as folder,
    ):
        folder.generated()
    # As the message says; and as an earlier version wrote it, with a digest of its own.
    kept.write_text("".join(json.dumps(record | {"check": "0123456789abcdef"}) + "\n" for record in records[:1]))
    with EvalFolder.open(out, {"seed": 1}) as folder:
        assert folder.generated() == [entry]


def fake_rollout(tokenizer: Tokenizer, run: Callable[..., list[Trajectory]] | None = None) -> Any:
    """Return a rollout with only what `_generate` reads, for parts of two questions."""
    return SimpleNamespace(
        tokenizer=tokenizer,
        system=SimpleNamespace(tags=TAGS, given_passages=False),
        limits=SimpleNamespace(max_context=CONTEXT, max_num_seqs=1),
        retriever=None,
        clock=SimpleNamespace(total=1.0, branches_without_room=0),
        run=run,
        stage=lambda: None,
    )


def test_an_evaluation_looks_at_all_that_it_goes_on_with(tiny_tokenizer: Tokenizer, tmp_path: Path) -> None:
    entry = generated(tiny_tokenizer)
    entry.trajectory.segments[1].logprobs.pop()
    with EvalFolder.open(tmp_path / "out", {}) as folder:
        folder.append([entry])
        with pytest.raises(
            UserError, match=rf"generated\.jsonl:1: segment 1 \(policy\) has .* log-probs .*; {REMEDY}$"
        ):
            _generate(fake_rollout(tiny_tokenizer), [Question("q1", "Who?", ("Anna",))], [], 0.0, 0, folder)


def test_an_evaluation_that_a_server_left_goes_on_with_the_part_that_was_under_way(
    tiny_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    questions = [Question(f"q{number}", "Who?", ("Anna",)) for number in range(5)]
    asked: list[list[str]] = []

    def run(jobs: Sequence[Job], *_: Any, **__: Any) -> list[Trajectory]:
        asked.append([job.question.id for job in jobs])
        if len(asked) == 2:
            raise Unanswered("http://index: no answer for 120 s")
        prompt = Segment(Source.PROMPT, tiny_tokenizer.encode("Who?"))
        return [Trajectory(job.question.id, 0, 0, [prompt], "ended") for job in jobs]

    rollout = fake_rollout(tiny_tokenizer, run)
    with pytest.raises(Unanswered), EvalFolder.open(tmp_path / "out", {}) as folder:
        _generate(rollout, questions, [], 0.0, 0, folder)
    with EvalFolder.open(tmp_path / "out", {}) as folder:
        done = _generate(rollout, questions, [], 0.0, 0, folder)
        assert done == folder.generated()
    assert [entry.trajectory.question_id for entry in done] == [question.id for question in questions]
    assert asked == [["q0", "q1"], ["q2", "q3"], ["q2", "q3"], ["q4"]]
