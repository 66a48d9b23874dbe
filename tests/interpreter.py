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
A kernel that reads what nobody wrote gives NaN, or leaves its tensors.

With `approximate=True` exponentials, logarithms, quotients and roots of float32 are off by what a GPU's may be (PTX
ISA, "Floating Point Instructions": ex2.approx and lg2.approx 2^-22, div.full 2 ulp, rsqrt.approx 2^-22.9, sqrt.approx
2^-23), each by a share that follows from the operand's bits. So a tolerance can be tried before a GPU tries it.

What a test needs of this by itself is here by itself: `program_order`, `poisoned_memory`, `bfloat16_to_nearest`, and
memory between guards. On a CUDA device kernels are compiled: memory is poisoned and guarded there too, and what
concerns the interpreter changes nothing.

Works with Triton 3.6 and 3.7, whose interpreters hand every access to the same four methods of a builder.

Deliberately absent: races inside a program (its threads' barriers are the compiler's), shared memory and its limits,
TF32.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GUARD = 64  # elements of NaN before and behind

Order = Callable[[int], Sequence[int]]


def forwards(count: int) -> Sequence[int]:
    return range(count)


def backwards(count: int) -> Sequence[int]:
    return range(count)[::-1]


@cache  # asked for by every program
def shuffled(count: int) -> Sequence[int]:
    places = list(range(count))
    random.Random(count).shuffle(places)
    return places


ORDERS: dict[str, Order] = {"forwards": forwards, "backwards": backwards, "shuffled": shuffled}


class ProofError(AssertionError):
    """What a kernel does that no kernel may."""


@dataclass
class Seen:
    """launches: kernel -> how often it was launched (the runs in other orders do not count)."""

    launches: Counter[str] = field(default_factory=Counter)


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
        stack.enter_context(_checked_launches(seen))
        if approximate:
            stack.enter_context(approximate_functions())
        yield seen


# Memory


class _Poison(TorchDispatchMode):
    FRESH = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")

    def __init__(self, lowest: bool) -> None:
        super().__init__()
        self.lowest = lowest

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in self.FRESH and isinstance(found, Tensor):
            poison(found, self.lowest)
        return found


def poison(tensor: Tensor, lowest: bool = False) -> None:
    """Fill a tensor with what nobody would compute: NaN, the largest integer or the lowest one, True."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(math.nan)
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        limits = torch.iinfo(tensor.dtype)
        tensor.fill_(limits.min if lowest else limits.max)


@contextmanager
def poisoned_memory(*, lowest: bool = False) -> Iterator[None]:
    """Fresh memory that Python code asks torch for is poisoned. What torch allocates for its own results is not."""
    with _Poison(lowest):
        yield


class GuardedMemory:
    """What torch.empty gives is NaN from here on, between guards of NaN, and is remembered. Floats only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: list[tuple[Tensor, Tensor]] = []  # what was given, and the memory around it
        monkeypatch.setattr(torch, "empty", self.empty)
        monkeypatch.setattr(torch, "empty_like", lambda x: self.empty(x.shape, dtype=x.dtype, device=x.device))

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: Any = None) -> Tensor:
        given, memory = _guarded(shape, dtype, device)
        self.taken.append((given, memory))
        return given

    def check(self) -> None:
        """All that was given has been written, and nothing beside it."""
        assert self.taken
        for given, memory in self.taken:
            assert not given.isnan().any()
            assert memory[:GUARD].isnan().all() and memory[-GUARD:].isnan().all()


def _guarded(shape: Sequence[int], dtype: torch.dtype, device: Any) -> tuple[Tensor, Tensor]:
    """A dense tensor of NaN, and the memory of NaN that it lies in the middle of."""
    count = math.prod(shape)
    memory = torch.full((count + 2 * GUARD,), math.nan, dtype=dtype, device=device)
    return memory[GUARD : GUARD + count].view(*shape), memory


def between_nans(values: Tensor) -> Tensor:
    """A copy of `values` on the device, dense, with NaN before and behind it in memory."""
    return _guarded(values.shape, values.dtype, DEVICE)[0].copy_(values)


# The order of programs


@contextmanager
def program_order(order: Order) -> Iterator[None]:
    """Programs run in another order than by their numbers: the n-th to run is order(count)[n]."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    natural = Builder.set_grid_idx

    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        dims = self.grid_dim
        places = order(dims[0] * dims[1] * dims[2])
        turn, z = divmod(places[(x * dims[1] + y) * dims[2] + z], dims[2])
        natural(self, *divmod(turn, dims[1]), z)

    with patch.object(Builder, "set_grid_idx", set_grid_idx):
        yield


# Accesses


@dataclass
class _Touched:
    """What one instruction of one program touched: addresses of elements, each once, and the bytes of an element."""

    addresses: np.ndarray
    itemsize: int
    program: int

    def bytes_in(self, sorted_bytes: np.ndarray) -> np.ndarray:
        """Of the bytes touched those that are in a sorted array of bytes."""
        if not len(sorted_bytes):
            return np.empty(0, np.int64)
        at = np.searchsorted(sorted_bytes, self.addresses).clip(max=len(sorted_bytes) - 1)
        found = sorted_bytes[at]
        near = self.addresses[(found >= self.addresses) & (found < self.addresses + self.itemsize)]
        spread = _spread(near, self.itemsize)
        return spread[np.isin(spread, sorted_bytes)]


@dataclass
class _Accesses:
    """Of one launch. inside: first byte, and last + 1, of each stretch of memory that it may touch."""

    inside: list[tuple[int, int]]
    keep: bool
    reads: list[_Touched] = field(default_factory=list)
    writes: list[tuple[np.ndarray, np.ndarray, int]] = field(default_factory=list)  # bytes, their values, program
    atomics: list[_Touched] = field(default_factory=list)

    def add(self, what: str, program: int, pointers: Any, mask: Any, itemsize: int, values: Any = None) -> None:
        addresses = np.asarray(pointers.data)
        live = np.broadcast_to(np.asarray(mask.data), addresses.shape).astype(bool)
        chosen = addresses[live].astype(np.int64)
        self._require_inside(what, chosen, itemsize)
        if not self.keep or not len(chosen):
            return
        if values is None:
            (self.reads if what == "read" else self.atomics).append(_Touched(np.unique(chosen), itemsize, program))
            return
        data = np.ascontiguousarray(np.broadcast_to(np.asarray(values.data), addresses.shape)[live])
        spread, written = _spread(chosen, itemsize), data.view(np.uint8).reshape(-1)
        order = np.argsort(spread, kind="stable")
        spread, written = spread[order], written[order]
        again = np.diff(spread) == 0
        if (again & (written[1:] != written[:-1])).any():
            raise ProofError("one store writes a byte twice, with different values")
        first = np.concatenate([[True], ~again])
        self.writes.append((spread[first], written[first], program))

    def _require_inside(self, what: str, addresses: np.ndarray, itemsize: int) -> None:
        allowed = np.zeros(len(addresses), bool)
        for first, end in self.inside:
            allowed |= (addresses >= first) & (addresses + itemsize <= end)
        if not allowed.all():
            raise ProofError(f"a {what} outside of every tensor that the launch was given")

    def races(self) -> list[str]:
        """What two programs do to one byte that they must not."""
        found = []
        none = np.empty(0, np.int64)
        writes = np.concatenate([none, *(bytes_ for bytes_, _, _ in self.writes)])
        writers = np.concatenate([none, *(np.full(len(bytes_), program) for bytes_, _, program in self.writes)])
        values = np.concatenate([np.empty(0, np.uint8), *(value for _, value, _ in self.writes)])
        order = np.lexsort((values, writes))
        same = np.diff(writes[order]) == 0
        differing = writes[order][1:][same & (values[order][1:] != values[order][:-1])]
        # A program may well overwrite what it wrote itself: two programs are needed.
        if count := len(np.intersect1d(differing, _of_several(writes, writers))):
            found.append(f"{count} bytes written by several programs, with different values")
        changed, changers = _bytes_of(self.atomics)
        for one, programs, others, said in (
            (writes, writers, self.reads, "written by one program and read by another"),
            (writes, writers, self.atomics, "written by one program and changed atomically by another"),
            (changed, changers, self.reads, "changed atomically by one program and read by another"),
        ):
            unique = np.unique(one)
            meeting = [(touched.bytes_in(unique), touched.program) for touched in others]
            places = np.concatenate([none, *(bytes_ for bytes_, _ in meeting)])
            by = np.concatenate([none, *(np.full(len(bytes_), program) for bytes_, program in meeting)])
            both = np.isin(one, places)
            together = _of_several(np.concatenate([one[both], places]), np.concatenate([programs[both], by]))
            if len(together):
                found.append(f"{len(together)} bytes {said}")
        return found


def _spread(addresses: np.ndarray, itemsize: int) -> np.ndarray:
    """The bytes of elements at these addresses."""
    return (addresses[:, None] + np.arange(itemsize)).ravel()


def _bytes_of(touched: Sequence[_Touched]) -> tuple[np.ndarray, np.ndarray]:
    """(bytes, programs) of all of them."""
    spread = [_spread(one.addresses, one.itemsize) for one in touched]
    programs = [np.full(len(bytes_), one.program) for one, bytes_ in zip(touched, spread, strict=True)]
    none = np.empty(0, np.int64)
    return np.concatenate([none, *spread]), np.concatenate([none, *programs])


def _of_several(addresses: np.ndarray, programs: np.ndarray) -> np.ndarray:
    """The addresses that more than one program touches."""
    order = np.lexsort((programs, addresses))
    addresses, programs = addresses[order], programs[order]
    return np.unique(addresses[1:][(np.diff(addresses) == 0) & (np.diff(programs) != 0)])


@contextmanager
def _recorded(accesses: _Accesses) -> Iterator[_Accesses]:
    """Each access of a launch is checked and noted before it is made."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    load, store = Builder.create_masked_load, Builder.create_masked_store
    rmw, cas = Builder.create_atomic_rmw, Builder.create_atomic_cas

    def program(builder: Any) -> int:
        (x, y, z), dims = builder.grid_idx, builder.grid_dim
        return int((x * dims[1] + y) * dims[2] + z)

    def size(pointers: Any) -> int:
        return max(1, pointers.get_element_ty().primitive_bitwidth // 8)

    def masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        accesses.add("read", program(self), ptrs, mask, size(ptrs))
        return load(self, ptrs, mask, *rest, **more)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        accesses.add("write", program(self), ptrs, mask, value.data.itemsize, value)
        return store(self, ptrs, value, mask, *rest, **more)

    def atomic_rmw(self: Any, op: Any, ptr: Any, val: Any, mask: Any, *rest: Any) -> Any:
        accesses.add("atomic", program(self), ptr, mask, size(ptr))
        return rmw(self, op, ptr, val, mask, *rest)

    def atomic_cas(self: Any, ptr: Any, *rest: Any) -> Any:
        accesses.add("atomic", program(self), ptr, np.ones(ptr.data.shape, bool), size(ptr))
        return cas(self, ptr, *rest)

    with (
        patch.object(Builder, "create_masked_load", masked_load),
        patch.object(Builder, "create_masked_store", masked_store),
        patch.object(Builder, "create_atomic_rmw", atomic_rmw),
        patch.object(Builder, "create_atomic_cas", atomic_cas),
    ):
        yield accesses


# Launches


def _storages(arguments: Any) -> dict[int, torch.UntypedStorage]:
    """Address -> storage of every tensor among the arguments, those of tuples and tensor descriptors too."""
    found = {}
    for argument in arguments:
        if isinstance(argument, tuple):
            found |= _storages(argument)
        elif hasattr(argument, "base") and hasattr(argument, "block_shape"):
            found |= _storages((argument.base,))
        elif isinstance(argument, Tensor):
            storage = argument.untyped_storage()
            found[storage.data_ptr()] = storage
    return found


@contextmanager
def _checked_launches(seen: Seen) -> Iterator[None]:
    from triton.runtime.errors import InterpreterError
    from triton.runtime.interpreter import GridExecutor

    launch = GridExecutor.__call__

    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        name = self.fn.__name__
        seen.launches[name] += 1
        storages = _storages((*args, *kwargs.values()))
        before = {at: storage.clone() for at, storage in storages.items()}
        inside = [(at, at + storage.nbytes()) for at, storage in storages.items()]
        races: list[str] = []
        left: dict[str, list[bytes]] = {}
        for order_name, order in reversed(ORDERS.items()):  # the natural one last, for its results stay
            for at, storage in storages.items():
                storage.copy_(before[at])
            with ExitStack() as stack:
                stack.enter_context(program_order(order))
                # Which bytes are touched may depend on the order only where there is a race in this one.
                accesses = stack.enter_context(_recorded(_Accesses(inside, keep=order is forwards)))
                try:
                    launch(self, *args, **kwargs)
                except InterpreterError as error:
                    if isinstance(cause := _first_cause(error), ProofError):
                        raise ProofError(f"{name}: {cause}") from error
                    raise
            left[order_name] = [_bytes(storage) for storage in storages.values()]
            races += accesses.races()
        if races:
            raise ProofError(f"{name}: {'; '.join(races)}")
        for order_name, found in left.items():
            if found != left["forwards"]:
                raise ProofError(f"{name}: other bytes with its programs {order_name} than forwards")

    with patch.object(GridExecutor, "__call__", checked):
        yield


def _first_cause(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _bytes(storage: torch.UntypedStorage) -> bytes:
    return torch.tensor([], dtype=torch.uint8).set_(storage).numpy().tobytes()  # type: ignore[call-overload]


# Arithmetic as a GPU does it


@contextmanager
def bfloat16_to_nearest() -> Iterator[None]:
    """float32 becomes the nearest bfloat16, of two the even one."""
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
    """Between -1 and 1, a function of the bits of x."""
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
    "create_exp": lambda x: _exp2(x * _LOG2_E),  # as Triton's compiler has it: the product is rounded
    "create_exp2": _exp2,
    "create_log": lambda x: _log2(x) * _LN_2,
    "create_log2": _log2,
    "create_sqrt": _relative(np.sqrt, 2.0**-23),
    "create_rsqrt": _relative(lambda x: 1 / np.sqrt(x), 2.0**-22.9),
}


@contextmanager
def approximate_functions() -> Iterator[None]:
    """float32 exp, exp2, log, log2, sqrt, rsqrt and / with the errors that a GPU's may have."""
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

    with ExitStack() as stack:
        for name in _APPROXIMATE:
            stack.enter_context(patch.object(Builder, name, replaced(name)))
        stack.enter_context(patch.object(Builder, "create_fdiv", fdiv))
        yield
