"""Old names that a user's file may import: they work, with a DeprecationWarning that gives the new name."""

import sys
import warnings
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any


def renamed(module: str, names: Mapping[str, Any]) -> Callable[[str], Any]:
    """Return a module's `__getattr__`. names: old name -> object, whose `__name__` is the new name."""

    def getattr_(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        found = names[name]
        warnings.warn(f"{module}.{name} is now {found.__module__}.{found.__name__}", DeprecationWarning, stacklevel=2)
        return found

    return getattr_


def moved_module(old: str, names: Mapping[str, Any]) -> None:
    """Make the module `old` importable, with `names` as in `renamed`."""
    module = ModuleType(old)
    vars(module)["__getattr__"] = renamed(old, names)
    sys.modules[old] = module
