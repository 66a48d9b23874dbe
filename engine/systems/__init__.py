"""One file per paper. A system module has `Options` (a frozen dataclass of its switches) and `system(options) ->
System`."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from thresher.engine.episode import System
from thresher.engine.tables import from_dict
from thresher.rewards.errors import UserError

NAMES = ("eval_rar", "search_r1")


def load_system(name: str, options: Mapping[str, Any]) -> System:
    """The system of that name with its switches set; an unknown name or switch is a UserError."""
    if name not in NAMES:
        raise UserError(f"system {name!r} is unknown; choose one of {', '.join(NAMES)}")
    module = import_module(f"thresher.engine.systems.{name}")
    made: System = module.system(from_dict(module.Options, dict(options), "[system.options]"))
    return made
