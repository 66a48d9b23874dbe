"""Work of rank 0 for all ranks: writing the run folder, and asking the chat model whose replies are paid for."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from thresher.engine.config.recipe import Recipe
from thresher.engine.parallel.ranks import Ranks
from thresher.engine.scoring.score import Judges, VerdictJudge
from thresher.engine.store.run_folder import RunFolder, step_name


class UnwrittenFolder(RunFolder):
    """The run's folder on a rank that leaves the writing to rank 0: every write does nothing."""

    def append_start(self, record: Mapping[str, Any]) -> None: ...

    def append_metrics(self, record: Mapping[str, Any]) -> None: ...

    def write_trajectories(self, step: int, trajectories: Iterable[Mapping[str, Any]]) -> Path:
        return self.trajectories / f"{step_name(step)}.jsonl"

    def write_evaluation(self, step: int, trajectories: Iterable[Mapping[str, Any]]) -> Path:
        return self.evaluations / f"{step_name(step)}.jsonl"

    def write_summary(self, summary: Mapping[str, Any]) -> None: ...

    def truncate_after(self, step: int) -> None: ...


def open_run(out: str | Path, recipe: Recipe, resume: bool, ranks: Ranks, unverified: bool = False) -> RunFolder:
    """The run folder, locked by rank 0; errors, and `unverified`, are those of `RunFolder.create` and `resume`."""
    if not ranks.first:
        return UnwrittenFolder(Path(out))
    return RunFolder.resume(out, recipe, unverified) if resume else RunFolder.create(out, recipe)


class VerdictsOfFirst:
    """The verdicts of rank 0's judge on the cases of all ranks, which ask together: one file of replies, and no more
    requests at a time than the recipe allows."""

    def __init__(self, judge: VerdictJudge, ranks: Ranks) -> None:
        self.judge, self.ranks, self.name = judge, ranks, judge.name

    def rate(self, cases: Sequence[tuple[Sequence[str], str]]) -> list[bool]:
        gathered = self.ranks.gather(list(cases))
        with self.ranks.interruptible():
            asked = [case for part in gathered or () for case in part]
            verdicts = iter(self.judge.rate(asked) if self.ranks.first else ())
        by_rank = self.ranks.from_first(lambda: [[next(verdicts) for _ in part] for part in gathered or ()])
        return by_rank[self.ranks.rank]


def judges_of(judges: Judges, ranks: Ranks) -> Judges:
    """The judges of a run on these ranks. Entailment is each rank's own."""
    if judges.verdict is None or not ranks.several:
        return judges
    return replace(judges, verdict=VerdictsOfFirst(judges.verdict, ranks))


def judging(judges: Judges, ranks: Ranks) -> AbstractContextManager[None]:
    """Within it an interrupt ends `score`: here, or in `VerdictsOfFirst`, which all ranks enter together."""
    return nullcontext() if isinstance(judges.verdict, VerdictsOfFirst) else ranks.interruptible()
