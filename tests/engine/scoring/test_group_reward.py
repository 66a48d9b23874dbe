"""`System.reward_group`, a reward of a whole group: in a step, an evaluation, `score` and a user's file."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from thresher.common.errors import UserError
from thresher.engine.episode import System
from thresher.engine.evaluation.evaluate import evaluate
from thresher.engine.rollout.rollout import Job, Rollout
from thresher.engine.scoring.score import score
from thresher.engine.scoring.transcripts import score_file
from thresher.engine.systems import load_system
from thresher.retrieval.questions import Question
from thresher.rewards.reward import RewardInput, RewardResult, Source, TextSegment, reward_all

# A reward that depends on the group: the rank of an attempt's length, and the size of the group.
RANKED = """from dataclasses import dataclass

from thresher.engine.episode import System, answer_once
from thresher.rewards.reward import RewardResult


@dataclass(frozen=True)
class Options:
    pass


def reward_group(attempts):
    lengths = [len(attempt.text) for attempt in attempts]
    parts = {"em": 0, "f1": 0, "answered": 0, "size": len(attempts)}
    return [RewardResult(sum(other < own for other in lengths), parts) for own in lengths]


def system(options):
    return System("ranked", ("<answer>", "</answer>"), answer_once, reward_group=reward_group, needs_golds=False)
"""
CALL = "reward_group=reward_group"


@pytest.fixture
def ranked(tmp_path: Path) -> Path:
    path = tmp_path / "ranked.py"
    path.write_text(RANKED)
    return path


def test_each_group_is_rewarded_once_and_whole(
    ranked: Path, tiny_rollout: Callable[..., Rollout], tiny_questions: list[Question]
) -> None:
    system = load_system(str(ranked), {})
    run = tiny_rollout(system, template="{question}\n<answer>")
    calls: list[int] = []

    def counted(attempts: Sequence[RewardInput]) -> Sequence[RewardResult]:
        assert len({attempt.question for attempt in attempts}) == 1
        calls.append(len(attempts))
        assert system.reward_group is not None
        return system.reward_group(attempts)

    # Groups of different sizes, whose samples are not adjacent.
    jobs = [Job(tiny_questions[g], g, sample, 10 * g + sample) for sample in range(3) for g in (4, 0, 7)[: 3 - sample]]
    asked, trajectories = [job.question for job in jobs], run.run(jobs, 1.0)
    scored = score(asked, trajectories, replace(system, reward_group=counted), run.tokenizer)
    assert calls == [3, 2, 1]
    for entry in scored:
        group = [one for one in scored if one.trajectory.group == entry.trajectory.group]
        shorter = sum(len(one.attempt.text) < len(entry.attempt.text) for one in group)
        assert (entry.result.reward, entry.result.parts["size"]) == (shorter, len(group))
    assert {entry.result.reward for entry in scored} > {0}
    assert [one.result.parts["size"] for one in evaluate(run, tiny_questions[:4])] == [1] * 4


def transcript(text: str, **more: Any) -> dict[str, Any]:
    return {"id": "a", "golden_answers": [], "segments": [{"source": "policy", "text": text}]} | more


def scores(tmp_path: Path, system: Path, *records: dict[str, Any]) -> list[tuple[float, int]]:
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    score_file(str(system), {}, tmp_path / "in.jsonl", tmp_path / "out.jsonl")
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["id"] for line in lines] == [record["id"] for record in records]
    return [(line["reward"], line["parts"]["size"]) for line in lines]


def test_transcripts_are_rewarded_by_group_or_by_id(tmp_path: Path, ranked: Path) -> None:
    texts = ("xx", "x", "xxx", "")
    by_id = [transcript(text, id=id_) for text, id_ in zip(texts, ("a", "b", "a", 0), strict=True)]
    assert scores(tmp_path, ranked, *by_id) == [(0, 2), (0, 1), (1, 2), (0, 1)]
    places = zip(texts, (0, 1, 1, 1), (0, 0, 1, 2), strict=True)
    by_group = [transcript(text, group=group, sample=sample) for text, group, sample in places]
    assert scores(tmp_path, ranked, *by_group) == [(0, 1), (1, 3), (2, 3), (0, 3)]
    with pytest.raises(UserError, match=r"in.jsonl:5: another record is sample 0 of group 1 already; score the rec"):
        scores(tmp_path, ranked, *by_group, by_group[1])


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("return attempts[1] and []", "raised IndexError (list index out of range) at line 13"),
        ("return [RewardResult(1.0)]", "returned 1 results for a group of 2; expected a list with a RewardResult for"),
        ("return RewardResult(1.0)", "returned RewardResult for a group of 1; expected a list with a RewardResult for"),
        ("return [1.0] * len(attempts)", "returned for attempt 1 of 1 float; it should return a RewardResult"),
        (
            "return [RewardResult(float('inf' if n else 0)) for n in range(len(attempts))]",
            "returned for attempt 2 of 2 reward = inf, which is not a finite number",
        ),
    ],
)
def test_a_group_reward_that_no_step_could_use_is_refused_at_once(ranked: Path, body: str, problem: str) -> None:
    at = RANKED.index("    lengths = "), RANKED.index("\n\n\ndef system")
    ranked.write_text(f"{RANKED[: at[0]]}    {body}{RANKED[at[1] :]}")
    with pytest.raises(UserError) as error:
        load_system(str(ranked), {})
    assert str(error.value).startswith(f"{ranked}: reward_group(attempts) {problem}")
    assert str(error.value).endswith("; fix the file")


def test_a_system_has_a_reward(ranked: Path) -> None:
    with pytest.raises(TypeError, match="the System ours has neither reward nor reward_group; give it one"):
        System("ours", (), lambda question, config: iter(()))  # type: ignore[arg-type,return-value]
    ranked.write_text(RANKED.replace(f", {CALL}", ""))
    with pytest.raises(UserError, match=r"ranked.py: system\(options\) raised TypeError \(the System ranked has nei"):
        load_system(str(ranked), {})
    # It replaces a reward of single attempts that is given too.
    ranked.write_text(RANKED.replace(CALL, f"reward=lambda attempt: 1 / 0, {CALL}"))
    attempts = [RewardInput(pieces=[TextSegment(Source.POLICY, text)], golds=()) for text in (b"xx", b"x")]
    system = load_system(str(ranked), {})
    assert [one.reward for one in reward_all(system.reward, system.reward_group, attempts, [0, 0])] == [1, 0]
