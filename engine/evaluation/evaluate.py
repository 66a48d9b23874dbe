"""Generate and score one trajectory per question, and generate in batches for a file that grows."""

from collections.abc import Callable, Sequence

from thresher.common import console
from thresher.engine.parallel.ranks import SINGLE, Ranks
from thresher.engine.parallel.sync import judging
from thresher.engine.protocol.trajectory import Trajectory
from thresher.engine.rollout.rollout import EpisodeRunner, Job, Rollout, seed_of
from thresher.engine.scoring.score import Judges, Scored, score
from thresher.retrieval.questions import Question

BATCH = 2  # x max_num_seqs: at most this much is lost by a kill. Smaller batches leave more slots empty.


def evaluate(
    rollout: Rollout,
    questions: Sequence[Question],
    judges: Judges | None = None,
    first: int = 0,
    ranks: Ranks = SINGLE,
) -> list[Scored]:
    """Generate and score one greedy trajectory per question. questions[0] is number `first` of the evaluation."""
    with ranks.interruptible():
        trajectories = rollout.run(jobs_of(questions, first=first), 0.0, recall=True)
    judges = judges or Judges()
    with judging(judges, ranks):
        return score(questions, trajectories, rollout.system, rollout.tokenizer, judges)


def jobs_of(questions: Sequence[Question], temperature: float = 0.0, seed: int = 0, first: int = 0) -> list[Job]:
    """Return a job for each question; questions[0] is number `first` of the evaluation.

    The noise of a sample is a function of (seed, question id, sample), independent of the batch. Greedy decoding has no
    noise; its seed, which orders shuffled passages, is the number of the question.
    """
    return [
        Job(question, number, 0, seed_of("eval", seed, question.id, 0) if temperature else number)
        for number, question in enumerate(questions, first)
    ]


def generate_in_batches(
    rollout: EpisodeRunner,
    jobs: Sequence[Job],
    temperature: float,
    done: int,
    label: str,
    keep: Callable[[Sequence[Job], list[Trajectory]], None],
) -> None:
    """Generate `jobs` except the first `done`; pass each batch to `keep` and show the progress."""
    size = BATCH * rollout.limits.max_num_seqs
    with console.progress_line(label, len(jobs)) as line, console.polling(rollout.stage):
        ended = done

        def progress(more: int) -> None:
            nonlocal ended
            ended += more
            line.to(ended, "")

        if done:
            line.from_before(done)
        for start in range(done, len(jobs), size):
            batch = jobs[start : start + size]
            keep(batch, rollout.run(batch, temperature, progress, recall=True))
