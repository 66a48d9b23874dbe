"""Which checkpoint a run goes on from: the newest, every bit of it verified, or an earlier one that a person named.

A run never goes back by itself: what was trained since would be lost without a word. A damaged checkpoint ends in a
sentence that names the file and the newest checkpoint that is whole; `--resume-from STEP` goes back to that one, and
cuts what was recorded behind it (`RunFolder.truncate_after`).

Nor does a run go on from records that were lost (`RunFolder.check_metrics`): metrics.jsonl must hold what it held when
the checkpoint was saved. What was measured then cannot be computed again.

Deliberately absent: repair of a damaged checkpoint.
"""

from pathlib import Path

from thresher.common.errors import UserError
from thresher.engine.store.checkpoint import Checkpoint, read_checkpoint, step_folders
from thresher.engine.store.run_folder import step_name, step_of


def checkpoint_to_resume(folder: str | Path, from_step: int | None = None, verify: bool = True) -> Checkpoint | None:
    """The checkpoint of `from_step` in a run's checkpoints folder, of the highest step where that is None; None where
    there is none, and for step 0, the run's beginning.

    verify: its files are held against their hashes, as `read_checkpoint` has it. UserError where it is damaged, and for
    a step that has no checkpoint; both name what there is to go back to.
    """
    paths = step_folders(Path(folder))
    if from_step is not None:
        if from_step == 0:
            return None
        if not any(step_of(path.name) == from_step for path in paths):
            steps = ", ".join(str(step_of(path.name)) for path in paths) or "none"
            raise UserError(f"{folder}: no checkpoint of step {from_step}; there are {steps}; 0 is the run's beginning")
        paths = [path for path in paths if (step_of(path.name) or 0) <= from_step]
    if not paths:
        return None
    *earlier, path = paths
    try:
        return read_checkpoint(path, verify)
    except UserError as error:
        raise UserError(f"{error}. {_way_back(earlier, verify)}") from None


def _way_back(paths: list[Path], verify: bool) -> str:
    for path in reversed(paths):
        try:
            step = read_checkpoint(path, verify).step
        except UserError:
            continue
        return f"The newest whole checkpoint is {step_name(step)}: go back to it by --resume --resume-from {step}"
    return "No earlier checkpoint is whole: begin again by --resume --resume-from 0"
