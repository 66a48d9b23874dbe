"""What a training run writes, held against the disk before anything is loaded: a run that would end in its second
checkpoint, hours after its first, ends here. Every checkpoint asks again before it is written (store/checkpoint.py).

    a checkpoint   float32 weights, adapters where there are some, and the moments of what is trained
    at a time      run.keep_checkpoints, that of best dev exact match, and the one that is being written

Deliberately absent: records and trajectories, small beside them.
"""

from pathlib import Path

from thresher.common.files import need_room, show_bytes
from thresher.engine.config.recipe import Recipe
from thresher.engine.planning.demand import MOMENT_BYTES, trained_weights_of
from thresher.engine.planning.setting import read_setting
from thresher.engine.planning.sizes import FP32, all_weights
from thresher.engine.store.run_folder import RunFolder
from thresher.policy.config import ModelConfig, read_config


def checkpoint_bytes(config: ModelConfig, recipe: Recipe) -> int:
    """Of one checkpoint's tensors."""
    setting = read_setting(recipe)
    trained = trained_weights_of(config, setting)
    adapters = 0 if setting.adapters is None else FP32 * trained
    return FP32 * all_weights(config) + adapters + int(MOMENT_BYTES[setting.moments] * trained)


def checkpoints_at_a_time(recipe: Recipe) -> int:
    """The most that ever lie there, the one being written among them."""
    run = recipe.run
    saved = -(-run.steps // run.save_every)
    judged = recipe.data is not None and recipe.data.dev is not None
    evaluated = (-(-run.steps // run.eval_every) if run.eval_every else 1) if judged else 0
    return min(run.keep_checkpoints + judged + 1, saved + evaluated)


def check_disk(recipe: Recipe, folder: str | Path, out: str | Path) -> None:
    """UserError where the disk of the run folder `out` has no room for the checkpoints of the model in `folder`. What
    lies there already is not counted again."""
    checkpoints = RunFolder(Path(out)).checkpoints
    present = sum(file.stat().st_size for file in checkpoints.rglob("*") if file.is_file())
    each, count = checkpoint_bytes(read_config(folder), recipe), checkpoints_at_a_time(recipe)
    several = f"{count} checkpoints at a time" if count > 1 else "a checkpoint"
    need_room(
        Path(out),
        count * each - present,
        f"a run with {several} of {show_bytes(each)} (run.keep_checkpoints = {recipe.run.keep_checkpoints})",
    )
