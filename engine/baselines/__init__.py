"""Baselines, which need no training: ways to get an answer out of any instruct model, one file each.

A new one may come in as a file like those of `thresher.engine.systems`, with `Options` (a frozen dataclass of its
switches) and `system(options) -> System`; every file here but common.py is a baseline, under the file's name. They
share a reward, the exact match of the final answer, and an option `examples`, a file of worked examples to be put
before the prompt.

R1 of the papers' tables (GRPO with nothing retrieved) is trained, and so a switch of naive_grpo, not one of these.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from thresher.common.errors import UserError
from thresher.engine.config.tables import from_dict
from thresher.engine.episode import System

NAMES = tuple(sorted(path.stem for path in Path(__file__).parent.glob("[!_]*.py") if path.stem != "common"))


def load_baseline(name: str, options: Mapping[str, Any]) -> System:
    """The baseline of that name with its switches set; an unknown name or switch is a UserError."""
    if name not in NAMES:
        near = get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(NAMES)}"
        raise UserError(f"baseline {name!r} is unknown; {hint}")
    module = import_module(f"thresher.engine.baselines.{name}")
    made: System = module.system(from_dict(module.Options, dict(options), f"baseline {name}"))
    return made
