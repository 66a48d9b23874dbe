"""What every page about a run begins with: the run folder, the steps that it stored, and the page's template."""

import itertools
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import jinja2

from thresher.common.console import shown as shown_number
from thresher.engine.config.recipe import Recipe, load_recipe
from thresher.engine.store.run_folder import RunFolder, step_of


def open_run(path: str | Path, unverified: bool = False) -> tuple[RunFolder, Recipe]:
    """A run folder to read, and its recipe. UserError if it is none. unverified: as `RunFolder` has it."""
    run = RunFolder.existing(path, unverified=unverified)
    return run, load_recipe(run.recipe_file)


def stored_steps(run: RunFolder) -> list[int]:
    """The steps whose trajectories are stored, in their order."""
    steps = (step_of(path.stem) for path in run.trajectories.glob("step_*.jsonl"))
    return sorted(step for step in steps if step is not None)


def steps_in_words(steps: Sequence[int]) -> str:
    """All where they are few, "10 to 800, every 10" where they are even; "" for none."""
    gaps = {after - before for before, after in itertools.pairwise(steps)}
    if len(steps) <= 8 or len(gaps) > 1:
        return ", ".join([*map(str, steps[:20]), *(["…"] if len(steps) > 21 else []), *map(str, steps[20:][-1:])])
    return f"{steps[0]} to {steps[-1]}" + (f", every {gap}" if (gap := gaps.pop()) > 1 else "")


def page_template(name: str) -> jinja2.Template:
    """A template of this folder: what is put into it is escaped, what is missing is an error."""
    environment = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(page_part),
    )
    environment.filters["number"] = shown_number
    return environment.get_template(name)


def page_part(name: str) -> str:
    """A file of this folder, as text."""
    return files("thresher.engine.reporting").joinpath(name).read_text(encoding="utf-8")
