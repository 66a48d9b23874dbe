"""The exception for mistakes that the user can fix, and conversions of values for checks and error messages.

A whole number is anything that Python accepts as an index (int, integers of NumPy and torch), but not a bool: 1.5 is
refused and not truncated. A number is anything that Python converts to a float, but not a bool or a string.
"""

import math
from operator import index


class UserError(ValueError):
    """A mistake in the input. Its message is one sentence that names the file, line or key, what was expected and what
    to do. The command line prints it and exits with status 2."""


LARGEST_INT = 2**63 - 1


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can encode the text; undecodable bytes of a command line are lone surrogates, which fail."""
    return not any("\ud800" <= char <= "\udfff" for char in text)


def shown(value: object) -> str:
    """Return a value for an error message, shortened."""
    try:
        text = repr(value)
    except ValueError:  # Python converts at most 4,300 digits
        text = "a huge number"
    return text if len(text) <= 80 else text[:77] + "..."


def as_whole(value: object) -> int | None:
    """Return the value as an int; None if it is not a whole number."""
    try:
        return None if isinstance(value, bool) else index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def as_number(value: object) -> float | None:
    """Return the value as a float; None if it is not a finite real number."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # an array or a tensor of several numbers
        return None
    return number if math.isfinite(number) else None
