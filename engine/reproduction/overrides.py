"""Overrides of a recipe, `section.key=value`: as words of a command, and which files the recipe reads with them."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from thresher.common.errors import UserError
from thresher.engine.assemble import read_run_recipe
from thresher.engine.reproduction.manifest import Method
from thresher.engine.systems import load_system


def sets_of(*texts: str) -> list[str]:
    return [word for text in texts for word in ("--set", text)]


def switches_of(method: Method) -> list[str]:
    """The method's system and options, as overrides."""
    named = [] if method.system is None else [f"system.name={method.system}"]
    return [*named, *(f"system.options.{name}={_toml(value)}" for name, value in method.options.items())]


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@lru_cache(maxsize=1024)
def files_of(recipe: str, overrides: Sequence[str] = ()) -> tuple[str, ...]:
    """What a recipe reads with these overrides: the model, the questions, the index, and the classifier of entailment
    where its system asks one. overrides: a tuple. Nothing where they contradict each other, which its command says."""
    try:
        found = read_run_recipe(recipe, list(overrides))
    except UserError:
        return ()
    asked = found.system is not None and load_system(found.system.name, found.system.options).claims is not None
    paths = (
        found.model.path,
        found.data and found.data.train,
        found.data and found.data.dev,
        found.sft and found.sft.data,
        found.retrieval and not found.retrieval.url and found.retrieval.index,
        asked and found.judge and found.judge.entailment,
    )
    return tuple(str(path) for path in paths if path)
