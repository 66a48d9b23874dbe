"""Evaluation inside a training run, in memory: every question once, and scored (metrics.py summarises).

The command `thresher eval` is run.py.
"""

from collections.abc import Callable, Sequence

from thresher.engine.parallel.first import judging
from thresher.engine.parallel.ranks import ALONE, Ranks
from thresher.engine.rollout.rollout import Job, Rollout, seed_of
from thresher.engine.scoring.score import Judges, Scored, score
from thresher.retrieval.questions import Question


def evaluate(
    rollout: Rollout,
    questions: Sequence[Question],
    temperature: float = 0.0,
    seed: int = 0,
    on_progress: Callable[[int], None] | None = None,
    judges: Judges | None = None,
    first: int = 0,
    ranks: Ranks = ALONE,
) -> list[Scored]:
    """One trajectory per question, of which questions[0] is number `first` of the evaluation. Greedy (temperature 0) is
    the same for every seed, shuffled passages included."""
    with ranks.interruptible():
        trajectories = rollout.run(jobs_of(questions, temperature, seed, first), temperature, on_progress, recall=True)
    judges = judges or Judges()
    with judging(judges, ranks):
        return score(questions, trajectories, rollout.system, rollout.tokenizer, judges)


def jobs_of(questions: Sequence[Question], temperature: float = 0.0, seed: int = 0, first: int = 0) -> list[Job]:
    """A job for each question, of which questions[0] is number `first` of an evaluation.

    A sample's noise is a function of (seed, question id, sample): the same in whichever part of an evaluation the
    question is asked, and another for every seed. Greedy decoding has no noise; there the seed, which still orders
    shuffled passages, is the question's number, whatever `seed` is."""
    return [
        Job(question, number, 0, seed_of("eval", seed, question.id, 0) if temperature else number)
        for number, question in enumerate(questions, first)
    ]
