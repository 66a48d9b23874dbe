"""Questions into trajectories: part by part for a file that grows, or at once inside a training run."""

from collections.abc import Callable, Sequence

from thresher.common import console
from thresher.engine.parallel.first import judging
from thresher.engine.parallel.ranks import ALONE, Ranks
from thresher.engine.protocol.trajectory import Trajectory
from thresher.engine.rollout.rollout import EpisodeRunner, Job, Rollout, seed_of
from thresher.engine.scoring.score import Judges, Scored, score
from thresher.retrieval.questions import Question

PART = 2  # times max_num_seqs: so much a kill may lose; the fewer, the more often a batch runs empty


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
    """Draw and score one trajectory per question, of which questions[0] is number `first` of the evaluation. Greedy
    (temperature 0) is the same for every seed, shuffled passages included."""
    with ranks.interruptible():
        trajectories = rollout.run(jobs_of(questions, temperature, seed, first), temperature, on_progress, recall=True)
    judges = judges or Judges()
    with judging(judges, ranks):
        return score(questions, trajectories, rollout.system, rollout.tokenizer, judges)


def jobs_of(questions: Sequence[Question], temperature: float = 0.0, seed: int = 0, first: int = 0) -> list[Job]:
    """Return a job for each question, of which questions[0] is number `first` of an evaluation.

    A sample's noise is a function of (seed, question id, sample): the same in whichever part of an evaluation the
    question is asked, and another for every seed. Greedy decoding has no noise; there the seed, which still orders
    shuffled passages, is the question's number, whatever `seed` is."""
    return [
        Job(question, number, 0, seed_of("eval", seed, question.id, 0) if temperature else number)
        for number, question in enumerate(questions, first)
    ]


def draw_parts(
    rollout: EpisodeRunner,
    jobs: Sequence[Job],
    temperature: float,
    kept: int,
    label: str,
    keep: Callable[[Sequence[Job], list[Trajectory]], None],
) -> None:
    """Draw `jobs` but for the first `kept`, part by part, and hand each part to `keep`; a line shows how far it is."""
    size = PART * rollout.limits.max_num_seqs
    with console.progress_line(label, len(jobs)) as line, console.polling(rollout.stage):
        ended = kept

        def progress(more: int) -> None:
            nonlocal ended
            ended += more
            line.to(ended, "")

        if kept:
            line.from_before(kept)
        for start in range(kept, len(jobs), size):
            part = jobs[start : start + size]
            keep(part, rollout.run(part, temperature, progress, recall=True))
