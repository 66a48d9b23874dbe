"""Evaluation inside a training run, in memory: every question once, scored, and summarised as means.

The command `thresher eval` is run.py.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from thresher.engine.evaluation.metrics import means, measures_of, parts_of
from thresher.engine.rollout.rollout import Rollout
from thresher.engine.rollout.samples import Job
from thresher.engine.scoring.score import Judges, Scored, score
from thresher.retrieval.questions import Question


def evaluate(
    rollout: Rollout,
    questions: Sequence[Question],
    temperature: float = 0.0,
    seed: int = 0,
    on_progress: Callable[[int], None] | None = None,
    judges: Judges | None = None,
) -> list[Scored]:
    """One trajectory per question. Greedy (temperature 0) is the same for every seed, shuffled passages included."""
    trajectories = rollout.run(jobs_of(questions, temperature, seed), temperature, on_progress)
    return score(questions, trajectories, rollout.system, rollout.tokenizer, judges)


def jobs_of(questions: Sequence[Question], temperature: float, seed: int, first: int = 0) -> list[Job]:
    """A job for each question, of which questions[0] is number `first` of an evaluation: its noise is the same in
    whichever part of it the question is asked."""
    start = seed if temperature else 0
    return [Job(question, number, 0, start + number) for number, question in enumerate(questions, first)]


def summarise(scored: Sequence[Scored], tags: Sequence[str] = ()) -> dict[str, Any]:
    """Means over trajectories: the shared metrics (metrics.py), the parts of the system's own reward, and how many
    trajectories ended for which reason. tags: the system's, for the metrics of what it writes between them."""
    return {
        "questions": len(scored),
        **means([measures_of(entry, tags) for entry in scored]),
        "parts": means([parts_of(entry) for entry in scored]),
        "reasons": dict(sorted(Counter(entry.trajectory.reason for entry in scored).items())),
    }
