"""Evaluation: the measures of a set of trajectories, by hand."""

import pytest

from thresher.engine.evaluate import Judged, summarise
from thresher.engine.trajectory import Segment, Trajectory
from thresher.retrieval.questions import Question
from thresher.rewards.result import RewardResult
from thresher.rewards.transcript import Source


def judged(answer: str | None, searches: int, reward: float, policy: list[int], reason: str) -> Judged:
    parts = {"em": answer == "Paris", "f1": 0.5 if answer else 0.0}
    segments = [Segment(Source.PROMPT, [1] * 10), Segment(Source.RETRIEVED, [2] * 5), Segment(Source.POLICY, policy)]
    trajectory = Trajectory("q", 0, 0, segments, reason, [{"query": "x", "passages": []}] * searches)
    return Judged(Question("q", "?", ("Paris",)), trajectory, RewardResult(reward, parts, answer))


def test_summaries_by_hand() -> None:
    entries = [
        judged("Paris", 2, 1.0, [3] * 4, "answered"),
        judged("in Paris", 1, 0.1, [3] * 8, "answered"),
        judged(None, 3, 0.0, [3] * 12, "turns"),
        judged("London", 0, 0.1, [3] * 16, "answered"),
    ]
    assert summarise(entries) == {
        "questions": 4,
        "reward": pytest.approx(0.3),
        "em": 0.25,
        "f1": 0.375,
        "contains": 0.5,
        "answered": 0.75,
        "searches": 1.5,
        "response_tokens": 10,
        "tokens": 25,
        "reasons": {"answered": 3, "turns": 1},
    }
    assert summarise([])["em"] == 0
