"""Arithmetic as a GPU does it, where the interpreter's is more exact or less.

bfloat16 is rounded to nearest, ties to even, where the interpreter truncates. Exponentials, logarithms, quotients and
roots of float32 have the errors that a GPU's may have (PTX ISA, "Floating Point Instructions": ex2.approx and
lg2.approx 2^-22, div.full 2 ulp, rsqrt.approx 2^-22.9, sqrt.approx 2^-23), each scaled by a factor that follows from
the operand's bits. A tolerance can therefore be tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np


@contextmanager
def bfloat16_to_nearest() -> Iterator[None]:
    """Convert float32 to the nearest bfloat16, ties to even."""
    from triton import language as tl
    from triton.runtime import interpreter

    cut = interpreter._convert_float

    def convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if (source, target) != (tl.float32, tl.bfloat16):
            return cut(data, source, target, rounding)
        bits = np.ascontiguousarray(data, np.float32).view(np.uint32).astype(np.uint64)
        nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.where(np.isnan(data), 0x7FC0, nearest).astype(np.uint16).reshape(data.shape)

    with patch.object(interpreter, "_convert_float", convert):
        yield


def _noise(x: np.ndarray) -> np.ndarray:
    """Return values between -1 and 1, a function of the bits of x."""
    bits = np.ascontiguousarray(x).view(np.uint32).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return ((bits >> np.uint64(40)).astype(np.float64) / 2**23 - 1).reshape(x.shape)


_LOG2_E, _LN_2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)


def _exp2(x: np.ndarray) -> np.ndarray:
    return (np.exp2(x.astype(np.float64)) * (1 + _noise(x) * 2.0**-22)).astype(np.float32)


def _log2(x: np.ndarray) -> np.ndarray:
    exact = np.log2(x.astype(np.float64))
    near = (x > 0.5) & (x < 2)
    return np.where(x == 1, 0.0, exact + _noise(x) * 2.0**-22 * np.where(near, 1.0, np.abs(exact))).astype(np.float32)


def _relative(function: Callable[[np.ndarray], np.ndarray], bound: float) -> Callable[[np.ndarray], np.ndarray]:
    return lambda x: (function(x.astype(np.float64)) * (1 + _noise(x) * bound)).astype(np.float32)


_APPROXIMATE: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "create_exp": lambda x: _exp2(x * _LOG2_E),  # as in Triton's compiler: the product is rounded
    "create_exp2": _exp2,
    "create_log": lambda x: _log2(x) * _LN_2,
    "create_log2": _log2,
    "create_sqrt": _relative(np.sqrt, 2.0**-23),
    "create_rsqrt": _relative(lambda x: 1 / np.sqrt(x), 2.0**-22.9),
}


@contextmanager
def approximate_functions() -> Iterator[None]:
    """Give float32 exp, exp2, log, log2, sqrt, rsqrt and / the errors of a GPU's; fma rounds once."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    def replaced(name: str) -> Callable[[Any, Any], Any]:
        exact, approximation = getattr(Builder, name), _APPROXIMATE[name]

        def run(self: Any, arg: Any) -> Any:
            if arg.data.dtype != np.float32:
                return exact(self, arg)
            with np.errstate(all="ignore"):
                return self.unary_op(arg, approximation)

        return run

    divide = Builder.create_fdiv

    def fdiv(self: Any, lhs: Any, rhs: Any) -> Any:
        if lhs.data.dtype != np.float32:
            return divide(self, lhs, rhs)
        with np.errstate(all="ignore"):
            quotient = lhs.data.astype(np.float64) / rhs.data.astype(np.float64)
            rounded = (quotient * (1 + _noise(quotient.astype(np.float32)) * 2.0**-23)).astype(np.float32)
        return type(lhs)(rounded, lhs.dtype.scalar)

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        with np.errstate(all="ignore"):
            exact = x.data.astype(np.float64) * y.data + z.data
        return type(z)(exact.astype(z.data.dtype), z.dtype.scalar)

    with ExitStack() as stack:
        for name in _APPROXIMATE:
            stack.enter_context(patch.object(Builder, name, replaced(name)))
        stack.enter_context(patch.object(Builder, "create_fdiv", fdiv))
        stack.enter_context(patch.object(Builder, "create_fma", fma))
        yield
