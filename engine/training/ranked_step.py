"""A GRPO step of several ranks: each samples its own groups, and what is summed or awaited is of all.

Ranks leave a rollout, a search or a judge together where a signal reaches any of them (`Ranks.interruptible`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from thresher.engine.packing import LossNormalizer, TrainSequence
from thresher.engine.parallel.first import judging
from thresher.engine.parallel.ranks import Ranks
from thresher.engine.protocol.prompts import PromptBatch
from thresher.engine.protocol.trajectory import Trajectory
from thresher.engine.rollout.rollout import Job
from thresher.engine.scoring.score import Scored
from thresher.engine.training.importance import Recomputed
from thresher.engine.training.step import GrpoStep, update_bounds
from thresher.retrieval.questions import Question


@dataclass(slots=True, kw_only=True)
class RankedStep(GrpoStep):
    """`GrpoStep` of one of several ranks; `questions` are all of them, its groups a share."""

    ranks: Ranks

    def _groups(self, count: int, updates: int) -> list[int]:
        return groups_of_rank(count, updates, self.ranks)

    def _show_passages(self, questions: Sequence[Question]) -> PromptBatch:
        with self.ranks.interruptible():
            return GrpoStep._show_passages(self, questions)

    def _roll_out(self, jobs: Sequence[Job]) -> list[Trajectory]:
        with self.updater.weights.rolling_out(), self.ranks.interruptible():
            return GrpoStep._roll_out(self, jobs)

    def _score(self, jobs: Sequence[Job], trajectories: Sequence[Trajectory]) -> list[Scored]:
        with judging(self.judges, self.ranks):
            return GrpoStep._score(self, jobs, trajectories)

    def _normalizers(self, own: list[LossNormalizer]) -> list[LossNormalizer]:
        counts = self.ranks.total(*(one.trajectories for one in own))
        tokens = self.ranks.total(*(one.tokens for one in own))
        return [LossNormalizer(*pair) for pair in zip(counts, tokens, strict=True)]

    def _recompute(self, batches: list[list[TrainSequence]]) -> tuple[list[list[TrainSequence]], Recomputed]:
        with self.ranks.interruptible():
            return GrpoStep._recompute(self, batches)


def groups_of_rank(groups: int, updates: int, ranks: Ranks) -> list[int]:
    """Return the numbers of this rank's groups: a stretch of those of each optimiser step, all ranks' equally long."""
    return [start + group for start, end in update_bounds(groups, 1, updates) for group in ranks.share(end - start)]
