"""Byte-by-byte record of the accesses of a launch's programs: none outside the given tensors, and no race.

Triton 3.6 and 3.7 pass every access to the same four methods of the interpreter's builder.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np


class ProofError(AssertionError):
    """A forbidden action of a kernel."""


@dataclass
class _Touched:
    """The accesses of one instruction of one program: addresses of elements, each once, and the bytes of an element."""

    addresses: np.ndarray
    itemsize: int
    program: int

    def bytes_in(self, sorted_bytes: np.ndarray) -> np.ndarray:
        """Return the touched bytes that are in a sorted array of bytes."""
        if not len(sorted_bytes):
            return np.empty(0, np.int64)
        at = np.searchsorted(sorted_bytes, self.addresses).clip(max=len(sorted_bytes) - 1)
        found = sorted_bytes[at]
        near = self.addresses[(found >= self.addresses) & (found < self.addresses + self.itemsize)]
        spread = _spread(near, self.itemsize)
        return spread[np.isin(spread, sorted_bytes)]


@dataclass
class Accesses:
    """The accesses of one launch. inside: first byte, and last + 1, of each stretch of memory that it may touch."""

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
        """Return descriptions of the forbidden accesses of two programs to one byte."""
        found = []
        none = np.empty(0, np.int64)
        writes = np.concatenate([none, *(bytes_ for bytes_, _, _ in self.writes)])
        writers = np.concatenate([none, *(np.full(len(bytes_), program) for bytes_, _, program in self.writes)])
        values = np.concatenate([np.empty(0, np.uint8), *(value for _, value, _ in self.writes)])
        order = np.lexsort((values, writes))
        same = np.diff(writes[order]) == 0
        differing = writes[order][1:][same & (values[order][1:] != values[order][:-1])]
        # A program may overwrite its own writes: a race needs two programs.
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
    """Return the bytes of elements at these addresses."""
    return (addresses[:, None] + np.arange(itemsize)).ravel()


def _bytes_of(touched: Sequence[_Touched]) -> tuple[np.ndarray, np.ndarray]:
    """Return (bytes, programs) of all of them."""
    spread = [_spread(one.addresses, one.itemsize) for one in touched]
    programs = [np.full(len(bytes_), one.program) for one, bytes_ in zip(touched, spread, strict=True)]
    none = np.empty(0, np.int64)
    return np.concatenate([none, *spread]), np.concatenate([none, *programs])


def _of_several(addresses: np.ndarray, programs: np.ndarray) -> np.ndarray:
    """Return the addresses that more than one program touches."""
    order = np.lexsort((programs, addresses))
    addresses, programs = addresses[order], programs[order]
    return np.unique(addresses[1:][(np.diff(addresses) == 0) & (np.diff(programs) != 0)])


@contextmanager
def recorded(accesses: Accesses) -> Iterator[Accesses]:
    """Check and record each access of a launch before it is made."""
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
