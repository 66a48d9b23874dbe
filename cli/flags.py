"""Numbers on the command line: one converter for every kind, named after what it lets through.

Each is a `type` of argparse, which puts its sentence behind the flag's name and ends with status 2; what is no number
at all gets the same sentence. Deliberately absent: bounds that only one command has, which stand beside its flags.
"""

import math
from argparse import ArgumentTypeError
from collections.abc import Callable
from typing import TypeVar

Number = TypeVar("Number", int, float)


def checked(kind: Callable[[str], Number], expected: str, fits: Callable[[Number], bool]) -> Callable[[str], Number]:
    """A converter: `kind` reads the text, `fits` bounds what it read, `expected` is what to say otherwise."""

    def convert(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not fits(value):
            raise ArgumentTypeError(f"expected {expected}, got {text}")
        return value

    return convert


count = checked(int, "a whole number of at least 1", lambda value: 1 <= value < 2**63)
natural = checked(int, "a whole number of at least 0", lambda value: 0 <= value < 2**63)
seed = checked(int, "a whole number from 0 to 2^63 - 1", lambda value: 0 <= value < 2**63)
percent = checked(int, "a whole number from 1 to 100", lambda value: 1 <= value <= 100)
share = checked(float, "a number from 0 to 1", lambda value: 0 <= value <= 1)
seconds = checked(float, "a number of at least 0", lambda value: value >= 0)  # inf: without end
positive = checked(float, "a number above 0", lambda value: 0 < value < math.inf)
temperature = checked(float, "a number of at least 0", lambda value: 0 <= value < math.inf)
