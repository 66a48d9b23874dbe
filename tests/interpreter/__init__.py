"""What Triton's interpreter can prove of a kernel where there is no GPU, beyond the results of one launch.

    with proved() as seen:            # whatever launches kernels, inside: a launcher, a whole loss, a test
        launch()
    assert "_head_kernel" in seen.launches

Inside, each launch
    is run three times from the same memory, its programs forwards, backwards and shuffled, and has to leave the same
        bytes every time: on a GPU nobody says in which order programs run;
    reads and writes nothing outside the storages of the tensors that it was given, and is stopped before it does;
    has no race between its programs: no byte is written by two of them with different values, or twice with different
        values by one store, and none is written by one program and read by another. Atomic operations race with
        plain accesses, and not with each other. Stores of equal values by several programs (a flag that is set) are no
        race;
casts to bfloat16 round to nearest, ties to even, as a GPU's do, where the interpreter cuts off; and fresh memory
(`torch.empty`, `new_empty`, `empty_like`, `empty_strided`) is poisoned: NaN, or the largest integer.
A kernel that reads what nobody wrote gives NaN, or leaves its tensors. With `approximate=True` float32 has the errors
that a GPU's functions may have.

    memory.py       poison, and memory between guards
    orders.py       orders of programs
    accesses.py     what a launch touches, and races
    arithmetic.py   rounding to bfloat16, and functions as approximate as a GPU's
    launches.py     three runs of every launch

What a test needs of this by itself is there by itself: `program_order`, `poisoned_memory`, `bfloat16_to_nearest`,
memory between guards. On a CUDA device kernels are compiled: memory is poisoned and guarded there too, and what
concerns the interpreter changes nothing.

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
    """Skips where there is no Triton, or where kernels are compiled, for what is here looks into the interpreter."""
    triton = pytest.importorskip("triton")
    if not triton.knobs.runtime.interpret:
        pytest.skip("kernels are compiled here, not interpreted")


@contextmanager
def proved(*, approximate: bool = False) -> Iterator[Seen]:
    """See the top of the file. Raises ProofError inside, at the launch that is at fault."""
    seen = Seen()
    with ExitStack() as stack:
        stack.enter_context(poisoned_memory())
        stack.enter_context(bfloat16_to_nearest())
        stack.enter_context(checked_launches(seen))
        if approximate:
            stack.enter_context(approximate_functions())
        yield seen
