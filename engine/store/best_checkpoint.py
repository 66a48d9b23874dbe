"""The best checkpoint of a run: of those that are kept, the one with the highest exact match on the dev split.

The evaluations that a run stores as it goes decide, so that choosing costs no further pass and looks at nothing but the
dev split. Of equal exact match the higher F1 wins, then the earlier step, which has moved less far from its reference.

Deliberately absent: an average of checkpoints, and any measure to choose by but these.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thresher.common.errors import UserError
from thresher.engine.config.recipe import load_recipe
from thresher.engine.store.run_folder import RunFolder, read_metrics, step_name


@dataclass(frozen=True, slots=True)
class Best:
    """A model folder, its step, and its exact match on the dev split. lost: the step that was better still and whose
    checkpoint is not kept, None if there is none."""

    path: Path
    step: int
    em: float
    lost: int | None


def steps_by_dev(records: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """(step, exact match) of every evaluation among a run's metrics, the best first."""
    return [(record["step"], record["eval"]["em"]) for record in evaluations_by_dev(records)]


def evaluations_by_dev(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The records of evaluations that have an exact match, the best first."""
    known = [record for record in records if record.get("eval") and record["eval"].get("em") is not None]
    return sorted(known, key=lambda r: (-r["eval"]["em"], -(r["eval"].get("f1") or 0.0), r["step"]))


def best_checkpoint(path: str | Path) -> Best:
    """The best kept checkpoint of a run folder; step 0 is the model that the run started from.

    UserError for a folder that is no run, for a run without an evaluation, and where no evaluated step is kept.
    """
    run = RunFolder.existing(path)
    ranked = steps_by_dev(read_metrics(run.metrics_file))
    if not ranked:
        raise UserError(f"{path}: the run has no evaluation to choose by; give it data.dev, or name a --model")
    for step, em in ranked:
        folder = run.checkpoints / step_name(step) if step else Path(load_recipe(run.recipe_file).model.path)
        if folder.is_dir():
            return Best(folder, step, em, None if step == ranked[0][0] else ranked[0][0])
    raise UserError(
        f"{path}: no checkpoint of an evaluated step is kept (the best was step {ranked[0][0]}); "
        "let run.save_every divide run.eval_every, and raise run.keep_checkpoints"
    )
