"""`thresher reproduce --list`: every row, its stages, and what its training takes, as planned.

A plan needs the shape of the model and no weights: its config.json. Where that is absent, so is the plan, and the
record says which file it wants. Time is that of the longest steps, every trajectory at its limits
(engine/planning/seconds.py).
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from thresher.engine.assemble import read_run_recipe
from thresher.engine.planning.chips import GB, Chip
from thresher.engine.planning.plan import plan
from thresher.engine.reproduction.commands import columns_of, rows_in_world
from thresher.engine.reproduction.manifest import Method, PaperManifest, TableRow
from thresher.engine.reproduction.overrides import switches_of
from thresher.engine.synthetic.shared_base import RECIPES
from thresher.policy.config import read_config

HOUR = 3600.0


def listing(
    manifest: PaperManifest, chip: Chip, tables: Sequence[str] = (), overrides: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """A record for every row of the tables (of every one, where none is named): its columns, whether the invented world
    has it, its stages, the recipe that trains it, what that recipe says it needs, and its plan on this chip, with these
    overrides of every training (None without a training). UserError for a table that the manifest has not."""
    records: list[dict[str, Any]] = []
    plans: dict[tuple[str, str], dict[str, Any] | None] = {}
    for name, table in manifest.named(tables).items():
        invented = rows_in_world(manifest, table)
        for row in table.rows:
            key = manifest.trains(row), row.model
            trained = manifest.methods[manifest.trains(row)]
            if key not in plans:
                plans[key] = planned(manifest, trained, row, chip, overrides)
            records.append(
                {
                    "paper": manifest.name,
                    "table": name,
                    "row": manifest.label(row),
                    "columns": list(table.columns),
                    "world": columns_of(manifest, table, True) if row in invented else [],
                    "model": manifest.models[row.model].paper,
                    "stages": list(_stages(manifest, row, asked=table.columns != ())),
                    "trained_by": trained.recipe,
                    "needs": _stated(trained.recipe, manifest.models[row.model].paper),
                    "planned": plans[key],
                }
            )
    return records


def planned(
    manifest: PaperManifest, method: Method, row: TableRow, chip: Chip, overrides: Sequence[str]
) -> dict[str, Any] | None:
    """Of a training on one GPU: bytes, whether they fit, seconds of a step and of all. {"absent": path, "get": how}
    where the model's config.json is not there; None for a method that is not trained."""
    if method.recipe is None:
        return None
    model = manifest.models[row.model]
    if not (config := Path(model.paper) / "config.json").is_file():
        return {"absent": str(config), "get": model.get}
    switches = [f"model.path={model.paper}", *switches_of(method), *method.overrides, *overrides]
    recipe = read_run_recipe(RECIPES / method.recipe, switches)
    found = plan(read_config(model.paper), recipe, memory_bytes=int(chip.memory), rates=chip)
    assert found.seconds_per_step is not None
    seconds = found.seconds_per_step * recipe.run.steps
    step = {"seconds_per_step": found.seconds_per_step, "steps": recipe.run.steps, "seconds": seconds}
    return {"chip": chip.name, "bytes": found.total_bytes, "fits": found.fits} | step


def plan_in_words(found: dict[str, Any] | None, stated: str | None) -> str:
    """Where there is no plan, what the recipe states."""
    if found is None:
        return "no training"
    if "absent" in found:
        return f"{stated or ''} (no plan without {found['absent']})".strip()
    fits = "" if found["fits"] else ", which does not fit"
    return f"{found['bytes'] / GB:.1f} GB{fits}, {found['seconds'] / HOUR:.0f} h at most"


def _size(model: str) -> str:
    """Qwen2.5-3B of a base and of its instruct form."""
    return Path(model).name.removesuffix("-Instruct")


def _stages(manifest: PaperManifest, row: TableRow, asked: bool) -> Iterator[str]:
    """The chain of a row, in words; of one that is asked nothing up to its training."""
    method = manifest.methods[row.method]
    trained = manifest.methods[manifest.trains(row)]
    if trained.warmup is not None:
        yield f"sft {manifest.tunings[trained.warmup].recipe}"
    if trained.recipe is not None:
        yield f"train {trained.recipe}"
    if not asked:
        return
    if method.extract:
        yield "extract" if method.agent is None else "extract for an agent"
    if method.generator is not None:
        yield f"sft {manifest.tunings[method.generator].recipe}"
    if method.generator is not None or not method.extract:
        yield "eval"


def _stated(recipe: str | None, model: str) -> str | None:
    """What a recipe's head says of its memory, where it is of a model of this size."""
    if recipe is None or _size(read_run_recipe(RECIPES / recipe, []).model.path) != _size(model):
        return None
    head = (RECIPES / recipe).read_text(encoding="utf-8").partition("\n\n")[0]
    lines = [line.removeprefix("# ") for line in head.splitlines()]
    return " ".join(lines).partition("Memory, by thresher plan: ")[2] or None
