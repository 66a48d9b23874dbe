"""Vectors in a NumPy file: written batch by batch, resumed after a kill, memory-mapped for reading.

The header is written first, with the final shape. While the file grows, `<name>.rows` has the number of rows on disk;
it is renamed into place after the rows were flushed. Building maps a slice at a time, so that a process has only a
slice and not the file in memory; an exact search maps all of it.
"""

import os
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text, writing
from thresher.common.hashes import Blocks

Array = npt.NDArray[Any]
# Bytes mapped or copied at a time while an index is built.
SLICE_BYTES = 64 * 2**20
HEADER_BYTES = 128
# Threads that read single rows, and the minimum number of rows for each thread.
READERS, READ_FEWEST = 4, 128


class VectorFile:
    """`rows` x `dim` numbers of `dtype` in the file `path`, which need not exist yet. `blocks`: the file's hashes, by
    which rows are verified when first read; a caller of `open` calls `verify` itself."""

    def __init__(self, path: Path, rows: int, dim: int, dtype: str = "float32", blocks: Blocks | None = None) -> None:
        self._blocks = blocks
        self.path, self.rows, self.dim, self.dtype = path, rows, dim, np.dtype(dtype)
        self._counted = path.with_name(f"{path.name}.rows")
        self._row_bytes = dim * self.dtype.itemsize

    @property
    def size(self) -> int:
        """Return the bytes of the whole file."""
        return HEADER_BYTES + self.rows * self._row_bytes

    def done(self) -> int:
        """Return the number of rows that were flushed to disk."""
        if not self.path.is_file():
            return 0
        if not self._counted.is_file():
            return self.rows if self.path.stat().st_size == self.size else 0
        counted = self._counted.read_text("ascii")
        rows = int(counted) if counted.isdecimal() else 0
        return rows if self.path.stat().st_size >= HEADER_BYTES + rows * self._row_bytes else 0

    def append(self, values_ND: Array) -> None:
        """Write the next rows, [n, dim], after those that are `done`. The last ones finish the file."""
        start = self.done()
        with writing(self.path):
            if start == 0:
                self._counted.unlink(missing_ok=True)
                self.path.write_bytes(self._header())
            with self.path.open("r+b") as file:
                file.seek(HEADER_BYTES + start * self._row_bytes)
                file.write(np.ascontiguousarray(values_ND, self.dtype).data)
                file.truncate()
                file.flush()
                os.fsync(file.fileno())
        if start + len(values_ND) < self.rows:
            atomic_write_text(self._counted, str(start + len(values_ND)))
        else:
            # The file is complete, which its size shows.
            self._counted.unlink(missing_ok=True)

    def slices(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, Array]]:
        """Yield (first row, [n, dim] mapped) from `start` on, one slice at a time."""
        stop = self.rows if stop is None else stop
        step = max(1, SLICE_BYTES // self._row_bytes)
        for first in range(start, stop, step):
            yield first, self.read(first, min(step, stop - first))

    def read(self, first: int, count: int) -> Array:
        """Return rows first .. first + count - 1, in a separate map."""
        self.verify(first, first + count)
        offset = HEADER_BYTES + first * self._row_bytes
        return np.asarray(np.memmap(self.path, self.dtype, "r", offset, (count, self.dim)))

    def rows_at(self, row_S: npt.NDArray[np.int64]) -> Array:
        """Return the rows `row_S`, ascending, copied: [len(row_S), dim]."""
        taken_SD = np.empty((len(row_S), self.dim), self.dtype)
        for first, part_ND in self.slices():
            here = slice(*np.searchsorted(row_S, (first, first + len(part_ND))))
            taken_SD[here] = part_ND[row_S[here] - first]
        return taken_SD

    def take(self, row_S: npt.NDArray[np.int64]) -> Array:
        """Return the rows `row_S`, in any order, [len(row_S), dim]. Each is read from the file, because a map would
        take 64 kB of memory per access. Many rows are read by several threads, because a read waits."""
        self._verify_rows(row_S)
        taken_SD = np.empty((len(row_S), self.dim), self.dtype)
        read = partial(self._read_into, self._descriptor)
        if len(row_S) < 2 * READ_FEWEST:
            read(taken_SD, row_S)
        else:
            parts = min(READERS, len(row_S) // READ_FEWEST)
            # Consumed, so that an error of a thread is raised here.
            list(_readers().map(read, np.array_split(taken_SD, parts), np.array_split(row_S, parts)))
        return taken_SD

    def verify(self, first: int, stop: int) -> None:
        """Compare the rows first .. stop - 1 with the file's hashes, if any. Raises Damaged if they differ."""
        if self._blocks is not None and first < stop:
            offset = HEADER_BYTES
            self._blocks.touch(offset + first * self._row_bytes, offset + stop * self._row_bytes)

    def _verify_rows(self, row_S: npt.NDArray[np.int64]) -> None:
        """Verify scattered rows by their blocks; see `verify`."""
        if self._blocks is None or self._blocks.whole or not len(row_S):
            return
        first_S = HEADER_BYTES + row_S * self._row_bytes
        borders = np.concatenate([first_S, first_S + self._row_bytes - 1])
        self._blocks.check(np.unique(borders // self._blocks.block).tolist())

    def _read_into(self, descriptor: int, taken_SD: Array, row_S: npt.NDArray[np.int64]) -> None:
        offset = HEADER_BYTES
        for row_D, row in zip(taken_SD, row_S.tolist(), strict=True):
            if os.preadv(descriptor, [row_D.data], offset + row * self._row_bytes) != self._row_bytes:
                raise UserError(f"{self.path}: ends before row {row}; build the index again")

    @cached_property
    def _descriptor(self) -> int:
        descriptor = os.open(self.path, os.O_RDONLY)
        weakref.finalize(self, os.close, descriptor)
        return descriptor

    def open(self) -> Array:
        """Map the whole file, [rows, dim], without verifying it. UserError for another size, shape or dtype."""
        size = self.path.stat().st_size if self.path.is_file() else 0
        if size != self.size:
            raise UserError(f"{self.path}: expected {self.size} bytes, found {size}; build the index again")
        try:
            mapped = np.load(self.path, mmap_mode="r", allow_pickle=False)
        except ValueError:
            raise UserError(f"{self.path}: NumPy cannot read it; build the index again") from None
        if mapped.shape != (self.rows, self.dim) or mapped.dtype != self.dtype:
            raise UserError(
                f"{self.path}: holds {' x '.join(map(str, mapped.shape))} vectors in {mapped.dtype}, expected "
                f"{self.rows} x {self.dim} in {self.dtype}; build the index again"
            )
        return np.asarray(mapped)

    def remove(self) -> None:
        """Delete the file, finished or not."""
        self._counted.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)

    def _header(self) -> bytes:
        described = f"{{'descr': '{self.dtype.str}', 'fortran_order': False, 'shape': ({self.rows}, {self.dim}), }}"
        # Version 1.0 of the format: magic, version, length of the text, the text, padded.
        text = described.ljust(HEADER_BYTES - 11) + "\n"
        return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode("ascii")


def sample_rows(rows: int, count: int, seed: int) -> npt.NDArray[np.int64]:
    """Return `count` distinct rows of `rows`, ascending; the same for the same arguments."""
    chosen: npt.NDArray[np.int64] = np.sort(np.random.default_rng(seed).choice(rows, count, replace=False))
    return chosen


@cache
def _readers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(READERS, "vectors")


# A forked process has the pool but not its threads.
os.register_at_fork(after_in_child=_readers.cache_clear)
