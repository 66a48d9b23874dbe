"""Memory that reveals wrong reads and writes: poison in fresh tensors, and NaN on both sides of a tensor.

Also works on a CUDA device, where kernels are compiled.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GUARD = 64  # elements of NaN before and after a tensor


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
    """Fill a tensor with improbable values: NaN, the largest integer or the lowest one, True."""
    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(math.nan)
    elif tensor.dtype == torch.bool:
        tensor.fill_(True)
    else:
        limits = torch.iinfo(tensor.dtype)
        tensor.fill_(limits.min if lowest else limits.max)


@contextmanager
def poisoned_memory(*, lowest: bool = False) -> Iterator[None]:
    """Poison fresh memory that Python code requests from torch, but not what torch allocates for its own results."""
    with _Poison(lowest):
        yield


class GuardedMemory:
    """Replacement of torch.empty that returns NaN between guards of NaN and records each tensor. Floats only."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: list[tuple[Tensor, Tensor]] = []  # each returned tensor, and the memory around it
        monkeypatch.setattr(torch, "empty", self.empty)
        monkeypatch.setattr(torch, "empty_like", lambda x: self.empty(x.shape, dtype=x.dtype, device=x.device))

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: Any = None) -> Tensor:
        given, memory = _guarded(shape, dtype, device)
        self.taken.append((given, memory))
        return given

    def check(self) -> None:
        """Check that every returned tensor has been written, and nothing around it."""
        assert self.taken
        for given, memory in self.taken:
            assert not given.isnan().any()
            assert memory[:GUARD].isnan().all() and memory[-GUARD:].isnan().all()


def _guarded(shape: Sequence[int], dtype: torch.dtype, device: Any) -> tuple[Tensor, Tensor]:
    """Return a dense tensor of NaN, and the memory of NaN that contains it in the middle."""
    count = math.prod(shape)
    memory = torch.full((count + 2 * GUARD,), math.nan, dtype=dtype, device=device)
    return memory[GUARD : GUARD + count].view(*shape), memory


def between_nans(values: Tensor) -> Tensor:
    """Return a dense copy of `values` on the device, with NaN before and after it in memory."""
    return _guarded(values.shape, values.dtype, DEVICE)[0].copy_(values)


def drawn(*shape: int, seed: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Return normal values of a seed, times `scale`, rounded to `dtype`, with NaN before and after them in memory."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return between_nans((values * scale).to(dtype))


@contextmanager
def saved_tensors() -> Iterator[list[int]]:
    """Yield the addresses of the tensors that autograd saves inside."""
    saved: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield saved
