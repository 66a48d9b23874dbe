"""What a step is given and what it is measured by: questions and seeds of a step, and the measures of trajectories."""

import pytest

from thresher.engine.evaluate import Judged, summarise
from thresher.engine.train import questions_of_step, seed_of
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


def test_questions_of_a_step_come_once_in_every_pass() -> None:
    questions = [Question(str(number), "?", ("a",)) for number in range(10)]
    asked = [q.id for step in range(1, 11) for q in questions_of_step(questions, 4, 7, step)]
    passes = [asked[at : at + 10] for at in range(0, 40, 10)]
    assert all(sorted(part) == sorted(q.id for q in questions) for part in passes)
    assert len({tuple(part) for part in passes}) == 4  # each in an order of its own
    again = [q.id for q in questions_of_step(questions, 4, 7, 3)]
    assert again == asked[8:12] != [q.id for q in questions_of_step(questions, 4, 8, 3)]
    assert [q.id for q in questions_of_step(questions[:2], 5, 0, 1)].count("0") in (2, 3)


def test_seeds_are_the_same_on_every_machine() -> None:
    assert seed_of(0, 1, 2, 3) == 3252311618909706447
    assert len({seed_of(*parts) for parts in ((1, 2), (2, 1), (12,), ("1", 2), (1, 2, 0))}) == 5
    assert all(0 <= seed_of(number) < 2**63 for number in range(100))
