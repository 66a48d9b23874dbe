"""The ranges of the sampling parameters, for the Python API, the recipe and the command line.

Kernels divide by the temperature, or multiply by its reciprocal, in float32, so both must be normal numbers. The bounds
here are narrower: at LOWEST, logits of up to 3e8 have a finite quotient.
"""

from dataclasses import dataclass

from thresher.common.errors import LARGEST_INT, UserError, as_number, as_whole, shown

LOWEST, HIGHEST = 1e-30, 1e30
MOST_SAMPLES = 65_536  # limit, because samples are allocated in advance


@dataclass(frozen=True, slots=True)
class ParameterRange:
    """Range of a parameter: a number from `low` to `high`, whole if `whole`, or 0 if `zero`."""

    low: float
    high: float
    words: str
    whole: bool = False
    zero: bool = False

    def admits(self, value: float) -> bool:
        return self.low <= value <= self.high or (self.zero and value == 0)


BOUNDS = {
    "temperature": ParameterRange(LOWEST, HIGHEST, "0, or a number from 1e-30 to 1e30", zero=True),
    "top_k": ParameterRange(0, LARGEST_INT, "a whole number from 0 to 2^63 - 1", whole=True),
    "top_p": ParameterRange(LOWEST, 1, "a number from 1e-30 to 1"),
    "min_p": ParameterRange(0, 1, "a number from 0 to 1"),
    "n": ParameterRange(1, MOST_SAMPLES, f"a whole number from 1 to {MOST_SAMPLES:,}", whole=True),
    "max_new_tokens": ParameterRange(1, LARGEST_INT, "a whole number from 1 to 2^63 - 1", whole=True),
    "seed": ParameterRange(0, LARGEST_INT, "a whole number from 0 to 2^63 - 1", whole=True),
}


def checked(where: str, name: str, value: object) -> float:
    """Return the value as an int (whole parameters) or a float. UserError, starting with `where`, for others."""
    bounds = BOUNDS[name]
    number = as_whole(value) if bounds.whole else as_number(value)
    if number is None or not bounds.admits(number):
        raise UserError(f"{where}: {name} is {shown(value)}; expected {bounds.words}")
    return number
