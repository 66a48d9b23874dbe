"""Checks of a kernel with Triton's interpreter where there is no GPU, beyond the results of one launch.

    with proved() as seen:            # anything that launches kernels: a launcher, a whole loss, a test
        launch()
    assert "_head_kernel" in seen.launches

Inside, each launch
    is run three times from the same memory, its programs forwards, backwards and shuffled, and must leave the same
        bytes every time, because a GPU does not define the order of programs;
    may read and write only the storages of the tensors that it was given, and is stopped before any other access;
    must have no race between its programs: no byte is written by two of them with different values, or twice with
        different values by one store, and none is written by one program and read by another. Atomic operations race
        with plain accesses, and not with each other. Stores of equal values by several programs (a flag that is set)
        are no race;
casts to bfloat16 round to nearest, ties to even, as a GPU's do, where the interpreter truncates; and fresh memory
(`torch.empty`, `new_empty`, `empty_like`, `empty_strided`) is poisoned: NaN, or the largest integer.
A kernel that reads uninitialised memory gives NaN, or accesses memory outside its tensors. With `approximate=True`
float32 has the errors that a GPU's functions may have.

    memory.py       poison, and memory between guards
    orders.py       orders of programs
    accesses.py     accesses of a launch, and races
    arithmetic.py   rounding to bfloat16, and functions as approximate as a GPU's
    launches.py     three runs of every launch

Parts can be used alone: `program_order`, `poisoned_memory`, `bfloat16_to_nearest`, memory between guards. On a CUDA
device kernels are compiled: memory is poisoned and guarded there too, and the interpreter's parts change nothing.

Works with Triton 3.6 and 3.7.

Deliberately absent: races inside a program (its threads' barriers are the compiler's), shared memory and its limits,
TF32.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from interpreter.accesses import ProofError
from interpreter.arithmetic import approximate_functions, bfloat16_to_nearest
from interpreter.launches import Seen, checked_launches
from interpreter.memory import DEVICE, GuardedMemory, between_nans, drawn, poison, poisoned_memory, saved_tensors
from interpreter.orders import ORDERS, backwards, forwards, program_order, shuffled

__all__ = [
    "DEVICE",
    "ORDERS",
    "GuardedMemory",
    "ProofError",
    "Seen",
    "approximate_functions",
    "backwards",
    "between_nans",
    "bfloat16_to_nearest",
    "drawn",
    "forwards",
    "poison",
    "poisoned_memory",
    "program_order",
    "proved",
    "saved_tensors",
    "shuffled",
    "skip_unless_interpreted",
]


def skip_unless_interpreted() -> None:
    """Skip the test without Triton or where kernels are compiled, because these checks patch the interpreter."""
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("kernels are compiled here, not interpreted")


@contextmanager
def proved(*, approximate: bool = False) -> Iterator[Seen]:
    """Check every launch inside, as the module docstring says. Raises ProofError at the launch that is at fault."""
    seen = Seen()
    with ExitStack() as stack:
        stack.enter_context(poisoned_memory())
        stack.enter_context(bfloat16_to_nearest())
        stack.enter_context(checked_launches(seen))
        if approximate:
            stack.enter_context(approximate_functions())
        yield seen
