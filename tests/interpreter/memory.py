"""Memory that shows what should not have been read or written: poison in fresh tensors, and NaN on both sides of one.

On a CUDA device too, where kernels are compiled.
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
GUARD = 64  # elements of NaN before and behind


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


def drawn(*shape: int, seed: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    """Normal values of a seed, `scale` times, rounded to `dtype`, with NaN before and behind them in memory."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return between_nans((values * scale).to(dtype))


@contextmanager
def saved_tensors() -> Iterator[list[int]]:
    """Yield the addresses of what autograd saves inside."""
    saved: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield saved
