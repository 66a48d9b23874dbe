"""Joint operations of the ranks of a run: check that they do the same run, write one run folder, call one judge.

Ranks may run on several machines, each with its own files. Without these checks, a rank that reads other questions or
other weights would go unnoticed.
"""

import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from thresher.common.errors import UserError
from thresher.common.files import check_file
from thresher.engine.config.recipe import Recipe
from thresher.engine.parallel.ranks import Ranks, trainers_of
from thresher.engine.scoring.score import Judges, VerdictJudge
from thresher.engine.store.run_folder import RunFolder
from thresher.engine.systems import own_digest, own_files


def check_config_sync(recipe: Recipe, ranks: Ranks, out: str | Path, checkpoint: Path | None) -> None:
    """Raise UserError, on every rank, if the work cannot be divided evenly or a rank differs from rank 0. Recipe,
    questions, model, run folder and the checkpoint to resume from are compared."""
    if not ranks.is_distributed:
        return
    of_ranks = ranks.gather(dict(_what_counts(recipe, out, checkpoint)))
    parts = [("ranks", ranks.count)]
    if recipe.run.async_:
        trainers = trainers_of(ranks.count)
        parts = [("ranks that train", trainers), ("ranks that sample", ranks.count - trainers)]
    problem = ranks.broadcast(lambda: _indivisible(recipe, parts) or _difference(of_ranks or ()))
    if problem is not None:
        raise UserError(problem)
    if recipe.model.device == "cuda" and ranks.local >= torch.cuda.device_count() > 0:
        raise UserError(
            f"rank {ranks.rank} is process {ranks.local + 1} of its machine, which has {torch.cuda.device_count()} "
            "GPUs; start torchrun with a lower --nproc-per-node"
        )


def _indivisible(recipe: Recipe, parts: Sequence[tuple[str, int]]) -> str | None:
    groups, updates = recipe.rollout.questions_per_step, recipe.grpo.updates_per_batch
    steps = "" if updates == 1 else f" x grpo.updates_per_batch = {updates}"
    for name, count in parts:
        if groups % (count * updates):
            return (
                f"rollout.questions_per_step is {groups}; expected a multiple of {count} {name}{steps}, because a "
                "group is not split"
            )
    name, count = parts[-1]  # those that sample
    if recipe.rollout.in_flight % count:
        return f"rollout.groups_in_flight is {recipe.rollout.in_flight}; expected a multiple of {count} {name}"
    return None


def _what_counts(recipe: Recipe, out: str | Path, checkpoint: Path | None) -> Iterator[tuple[str, Any]]:
    """Yield the values that must be equal on all ranks, each with the name under which it is reported."""
    yield from ((f"the recipe's {key}", value) for key, value in recipe.keys().items())
    yield "--out", str(Path(out).resolve())
    yield "the checkpoint to resume from", None if checkpoint is None else checkpoint.name
    yield from ((f"the content of {path}", digest) for path, digest in file_digests(recipe).items())
    for name, folder in (("model.path", Path(recipe.model.path)), ("the checkpoint", checkpoint)):
        if folder is not None:
            yield f"config.json of {name}", _digest(folder / "config.json")
            yield f"the files of {name}", sorted((f.name, f.stat().st_size) for f in folder.glob("*.safetensors"))
    yield "torch's version", torch.__version__


def file_digests(recipe: Recipe) -> dict[str, str]:
    """Return the SHA-256, in hex, of each file that decides what a run samples and learns, by its path. The files are
    questions, templates, and the user's Python files, with those that they import from the same folder."""
    system, tools, tables = recipe.system, (recipe.tools or {}).values(), []
    named = own_files(system) if system is not None else []
    named.append(recipe.grpo.objective.rpartition(":")[0])
    if recipe.data is not None:
        tables += [recipe.data.train, recipe.data.dev]
    if system is not None:
        tables.append(system.template)
    if recipe.rollout.tools_replay is None:  # else no tool is called
        named += [tool.function.rpartition(":")[0] for tool in tools if tool.function is not None]
        tables += [tool.template for tool in tools]
    found = {path: _digest(path) for path in tables if path is not None}
    return found | {path: digest for path in named if (digest := own_digest(path)) is not None}


def _digest(path: str | Path) -> str:
    check_file(Path(path), sys.maxsize)  # a table of any size, which is not held in memory
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _difference(of_ranks: Sequence[Mapping[str, Any]]) -> str | None:
    """Describe the first value in which a rank differs from rank 0; None if there is none."""
    for rank, theirs in enumerate(of_ranks):
        for name in {**of_ranks[0], **theirs}:
            ours, other = of_ranks[0].get(name), theirs.get(name)
            if ours != other:
                return (
                    f"rank {rank} has another run than rank 0: {name} is {_shown(other)} there, {_shown(ours)} on "
                    "rank 0; give every rank the same recipe, files and folders"
                )
    return None


def _shown(value: Any) -> str:
    return "absent" if value is None else str(value) if len(str(value)) <= 80 else f"{str(value)[:77]}..."


def open_run(out: str | Path, recipe: Recipe, resume: bool, ranks: Ranks, unverified: bool = False) -> RunFolder:
    """Return the run folder, which only rank 0 locks and writes; errors as in `RunFolder.create` and `resume`."""
    if not ranks.is_main:
        return RunFolder(Path(out))
    return RunFolder.resume(out, recipe, unverified) if resume else RunFolder.create(out, recipe)


class MainRankJudge:
    """Judge of rank 0 for the cases of all ranks. So there is one file of replies, and no more concurrent requests than
    the recipe allows."""

    def __init__(self, judge: VerdictJudge, ranks: Ranks) -> None:
        self.judge, self.ranks, self.name = judge, ranks, judge.name

    def rate(self, cases: Sequence[tuple[Sequence[str], str]]) -> list[bool]:
        gathered = self.ranks.gather(list(cases))
        with self.ranks.interruptible():
            asked = [case for of_rank in gathered or () for case in of_rank]
            verdicts = iter(self.judge.rate(asked) if self.ranks.is_main else ())
        by_rank = self.ranks.broadcast(lambda: [[next(verdicts) for _ in of_rank] for of_rank in gathered or ()])
        return by_rank[self.ranks.rank]


def judges_of(judges: Judges, recipe: Recipe, ranks: Ranks) -> Judges:
    """Return the judges of a run on these ranks: rank 0's verdict judge, and each rank's own entailment judge.
    UserError if ranks would have to ask for a verdict in the middle of their rollouts."""
    if judges.verdict is None or not ranks.is_distributed:
        return judges
    if recipe.grpo.refill and (recipe.rollout.partial or recipe.run.async_):
        mode = "rollout.partial" if recipe.rollout.partial else "run.async"
        raise UserError(
            f"grpo.refill: with {mode} and a judge of answers, expected one process that samples, got {ranks.count}: "
            "they ask the judge together, and their groups are complete at different times; set grpo.refill = false"
        )
    return replace(judges, verdict=MainRankJudge(judges.verdict, ranks))


def judging(judges: Judges, ranks: Ranks) -> AbstractContextManager[None]:
    """Return a context in which a signal ends `score`: here, or in `MainRankJudge.rate`, which all ranks enter."""
    return nullcontext() if isinstance(judges.verdict, MainRankJudge) else ranks.interruptible()
