"""Test that a run asks its disk for the room of all its checkpoints, and when."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from thresher.common.errors import UserError
from thresher.engine.config.recipe import Recipe
from thresher.engine.planning.memory import check_disk, checkpoints_at_a_time
from thresher.engine.training.train import train


def test_a_run_is_refused_before_anything_is_loaded(
    tmp_path: Path, make_recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Newest, best and the one before are kept while a fourth is written; of each, weights and two moments."""
    recipe, out = make_recipe(run={"keep_checkpoints": 2, "save_every": 1}), tmp_path / "run"
    weights = load_file(Path(recipe.model.path) / "model.safetensors")
    needed = 4 * 3 * sum(4 * value.size for value in weights.values())
    real, free = shutil.disk_usage, needed - 1
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=free))
    monkeypatch.setattr("thresher.engine.training.train.load_run_context", lambda *_: pytest.fail("loaded"))
    with pytest.raises(UserError, match=r"run: cannot be written \(a run with 4 checkpoints at a time of .* needs"):
        train(recipe, out)
    assert not out.exists()
    free = needed
    check_disk(recipe, recipe.model.path, out)
    # What a resumed run finds there is not asked for again.
    (out / "checkpoints" / "step_000001").mkdir(parents=True)
    (out / "checkpoints" / "step_000001" / "model.safetensors").write_bytes(bytes(1000))
    free = needed - 1000
    check_disk(recipe, recipe.model.path, out)
    free -= 1
    with pytest.raises(UserError, match="make room for it"):
        check_disk(recipe, recipe.model.path, out)


@pytest.mark.parametrize(
    ("changes", "most"),
    [
        ({"run": {"steps": 2, "save_every": 9}, "data": {"dev": None}}, 1),
        ({"run": {"steps": 9, "save_every": 3, "keep_checkpoints": 1, "eval_every": 1}}, 3),
        ({"run": {"steps": 9, "save_every": 3, "keep_checkpoints": 1}, "data": {"dev": None}}, 2),
        ({"run": {"steps": 9, "save_every": 3, "keep_checkpoints": 9}, "data": {"dev": None}}, 3),
    ],
)
def test_checkpoints_that_lie_there_at_a_time(
    make_recipe: Callable[..., Recipe], changes: dict[str, Any], most: int
) -> None:
    assert checkpoints_at_a_time(make_recipe(**changes)) == most
