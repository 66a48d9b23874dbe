"""Baselines: methods by which an instruct model answers without training.

Each is a function from its options to a System, and a line of BASELINES. They share a reward, the exact match of the
final answer, and an option `examples`, a file of worked examples placed before the prompt. R1 of the papers' tables is
trained and therefore a system.
"""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from thresher.common.errors import UserError
from thresher.engine.baselines import reading, searching
from thresher.engine.baselines.common import Options
from thresher.engine.config.tables import from_dict
from thresher.engine.episode import System

BASELINES: dict[str, tuple[type[Options], Callable[[Any], System]]] = {
    "cot": (reading.CotOptions, reading.cot),
    "direct": (Options, reading.direct),
    "evidence": (reading.EvidenceOptions, reading.evidence),
    "extract_only": (Options, reading.extract_only),
    "full_passages": (Options, reading.full_passages),
    "ircot": (searching.IrcotOptions, searching.ircot),
    "iter_retgen": (searching.IterRetgenOptions, searching.iter_retgen),
    "naive_rag": (reading.NaiveRagOptions, reading.naive_rag),
    "released": (searching.ReleasedOptions, searching.released),
    "search_loop": (Options, searching.untrained_search_loop),
    "search_o1": (searching.SearchO1Options, searching.search_o1),
    "self_ask": (searching.SelfAskOptions, searching.self_ask),
    "sure": (reading.SureOptions, reading.sure),
}
NAMES = tuple(BASELINES)


def load_baseline(name: str, options: Mapping[str, Any]) -> System:
    """Return the baseline of that name with its switches set. UserError for an unknown name or switch."""
    if name not in BASELINES:
        near = get_close_matches(name, NAMES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"choose one of {', '.join(NAMES)}"
        raise UserError(f"baseline {name!r} is unknown; {hint}")
    kind, make = BASELINES[name]
    return make(from_dict(kind, dict(options), f"baseline {name}"))
