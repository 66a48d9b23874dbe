"""The types of what a run stores, for readers of its records. A record with a checksum has them; one of an earlier
version, or one that is read unverified, may hold anything.

A shape is a kind of value, or a list of one shape, or a dict of shapes by key, with "*" for all other keys. A key may
be absent or null, but for a record's step.
"""

from collections.abc import Callable, Mapping
from typing import Any

from thresher.common.errors import UserError
from thresher.common.jsonl import json_kind

Kind = tuple[str, Callable[[Any], bool]]

NUMBER: Kind = ("a number", lambda value: isinstance(value, int | float) and -1e300 < value < 1e300)
WHOLE: Kind = ("a whole number", lambda value: type(value) is int and abs(value) < 2**63)
TEXT: Kind = ("a string", lambda value: isinstance(value, str))
NAME: Kind = ("a string or a whole number", lambda value: isinstance(value, str) or WHOLE[1](value))
ANYTHING: Kind = ("anything", lambda value: True)

NUMBERS = {"*": NUMBER}
MEASURES = {"*": NUMBER, "parts": NUMBERS, "reasons": NUMBERS, "wait_policy": TEXT, "by_epoch": [NUMBERS]}
SEGMENTS = [{"*": ANYTHING, "source": TEXT, "text": TEXT, "ids": [WHOLE]}]

METRICS = {**MEASURES, "step": WHOLE, "eval": MEASURES}
START = {"*": ANYTHING, "step": WHOLE}
SUMMARY = {"*": NUMBER, "metrics": {"*": ANYTHING}}
TRAJECTORY = {
    "*": ANYTHING,
    "id": NAME,
    **dict.fromkeys(("question", "reason", "answer"), TEXT),
    **dict.fromkeys(("group", "sample"), WHOLE),
    **dict.fromkeys(("reward", "advantage"), NUMBER),
    "golden_answers": [TEXT],
    "parts": NUMBERS,
    "segments": SEGMENTS,
    "branches": {"*": SEGMENTS},
    "passages": [{"*": ANYTHING, "text": TEXT}],
    "searches": [{"*": ANYTHING, "query": TEXT, "passages": [ANYTHING]}],
}


def check_shape(value: Any, shape: Any, where: str) -> None:
    """UserError, starting with `where` and naming the key, where a value is not of its shape."""
    if isinstance(shape, tuple):
        expected, fits = shape[0], shape[1](value)
    else:
        expected = "a list" if isinstance(shape, list) else "an object"
        fits = isinstance(value, type(shape))
    if not fits:
        found = json_kind(value) if not isinstance(value, int | float) else str(value)[:40]
        raise UserError(f"{where}: expected {expected}, found {found}; put a copy back, or remove the file")
    if isinstance(shape, list):
        for number, part in enumerate(value, 1):
            check_shape(part, shape[0], f"{where}, item {number}")
    elif isinstance(shape, Mapping):
        for key, part in value.items():
            if part is not None or key == "step":
                check_shape(part, shape.get(key, shape["*"]), f"{where}: {key}")
