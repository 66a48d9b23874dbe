"""Checks and messages of a training and a fine-tuning that go on from a checkpoint."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from thresher.common import console
from thresher.common.errors import UserError
from thresher.common.machine import origin
from thresher.engine.config.recipe import Recipe
from thresher.engine.store.checkpoint import Checkpoint
from thresher.engine.store.run_folder import RunFolder, step_of


def check_resumed(
    command: str,
    folder: Path,
    checkpoint: Checkpoint | None,
    steps: int,
    told: bool,
    period: Callable[[Recipe], int] = lambda recipe: recipe.run.save_every,
    also: str = "",
) -> None:
    """Say from where a run goes on. UserError where checkpoints or records are lost.

    steps: of the whole run. told: by --resume-from, which step it is to be. period: the steps between checkpoints.
    also: what is said behind it.
    """
    step = checkpoint.step if checkpoint else 0
    if not told:
        RunFolder(folder).check_checkpoints(step, period)
        RunFolder(folder).check_metrics(step, checkpoint.state.get("metrics") if checkpoint else None)
    where = checkpoint.path if checkpoint else "its beginning, for it has no checkpoint"
    console.announce(f"{command}: goes on behind step {step} of {steps}, from {where}{also}")


def check_newest(run: RunFolder, checkpoint: Checkpoint | None) -> None:
    """UserError where another process has saved a checkpoint since ours was chosen, before the folder was locked."""
    newest = max((step for path in run.checkpoints.iterdir() if (step := step_of(path.name)) is not None), default=0)
    if newest > (checkpoint.step if checkpoint else 0):
        raise UserError(f"{run.path}: another process has just saved step {newest}; run the same command again")


def start_record(run: RunFolder, checkpoint: Checkpoint | None, cuda: bool, told: bool) -> dict[str, Any]:
    """The line of starts.jsonl for a run that starts, or goes on, now. told: by --resume-from, so that the records
    that are left are accepted."""
    start = {"step": checkpoint.step if checkpoint else 0, **origin(cuda)}
    if told:
        start["metrics"] = run.metrics_mark()
    return start
