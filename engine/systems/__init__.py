"""Trained systems, one file per paper with its protocol and switches; prompt and preset are next to it.

A new paper is a file with `Options` (a frozen dataclass of its switches) and `system(options) -> System`. Every file
here whose name does not begin with an underscore is a system of that name; VARIANTS lists further ones.
docs/add/paper.md has the steps. A user's own system is such a file in any other place, named by its path
(_own_file.py).
"""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from thresher.common.errors import UserError
from thresher.engine.config.sections import SystemSection
from thresher.engine.config.tables import from_dict
from thresher.engine.episode import System, read_preset
from thresher.engine.systems._own_file import (
    is_path,
    load_functions,
    load_own_function,
    load_own_system,
    own_digest,
)

__all__ = [
    "NAMES",
    "PLAIN",
    "built_in",
    "is_path",
    "load_functions",
    "load_own_function",
    "load_system",
    "own_digest",
    "own_files",
    "preset_of",
]

# Systems defined in the file of another: the file, and its names in place of `Options` and `system`.
VARIANTS = {
    "evinote_code": ("evinote", "CodeOptions", "code_system"),
    "lear": ("eviomni", "Options", "lear"),
    "r1": ("naive_grpo", "R1Options", "r1"),
}
PLAIN = "plain"  # system of a user's own reward functions, which it requires; _plain.py
NAMES = tuple(sorted([*VARIANTS, *(path.stem for path in Path(__file__).parent.glob("[!_]*.py"))]))


def load_system(name: str, options: Mapping[str, Any]) -> System:
    """Return the system of that name, or of the Python file at that path, with its switches set.

    A name that contains a slash or ends in .py is a path. UserError for an unknown name or switch, and for a file that
    cannot be imported or makes no System.
    """
    if is_path(name):
        return load_own_system(Path(name), options)
    if name not in (*NAMES, PLAIN):
        near = get_close_matches(name, NAMES, n=1)
        hint = (
            f"did you mean {near[0]}?" if near else f"choose one of {', '.join(NAMES)}, or give a file, path/to/it.py"
        )
        raise UserError(f"system {name!r} is unknown; {hint}")
    kind, make = built_in(name)
    return make(from_dict(kind, dict(options), "[system.options]"))


def preset_of(name: str) -> dict[str, dict[str, Any]]:
    """Return a system's values for unset recipe keys, independent of switches. UserError as in `load_system`."""
    if name == PLAIN:
        return read_preset(Path(__file__).with_name("_plain.toml"))
    return load_system(name, {}).preset


def own_files(section: SystemSection) -> list[str]:
    """Return the paths of the user's own files in a recipe's [system]: of the system, or of its rewards."""
    if section.name != PLAIN:
        return [section.name] if is_path(section.name) else []
    files = (name.rpartition(":")[0] for name in section.options.get("rewards", ()))
    return [file for file in files if is_path(file)]


def built_in(name: str) -> tuple[type, Callable[[Any], System]]:
    """Return the options class of a built-in system, and the function that makes the system."""
    file, kind, make = VARIANTS.get(name, ("_plain" if name == PLAIN else name, "Options", "system"))
    module = import_module(f"thresher.engine.systems.{file}")
    return getattr(module, kind), getattr(module, make)
