"""Triton's interpreter, for tests: rounding as a GPU rounds, programs in another order, memory with guards.

The interpreter cuts float32 down to bfloat16, where a GPU rounds to nearest; `round_to_nearest` mends that. On a CUDA
device there is no interpreter, and what concerns it does nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GUARD = 64  # elements of NaN before and behind


def round_to_nearest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Casts from float32 to bfloat16 round to nearest, ties to even, as on a GPU."""
    from triton.language import bfloat16, float32
    from triton.runtime import interpreter

    before = interpreter._convert_float

    def convert(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (float32, bfloat16):
            return before(data, source, target, mode)
        values = torch.from_numpy(np.array(data, dtype=np.float32))
        return values.bfloat16().view(torch.int16).numpy().view(np.uint16)

    monkeypatch.setattr(interpreter, "_convert_float", convert)


def shuffle_programs(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The interpreter's programs run in another order from here on; seed 0: from the last to the first."""
    from triton.runtime import interpreter

    def shuffled(*bounds: int) -> Iterable[int]:
        numbers = list(range(*bounds))
        if len(bounds) > 1:  # the grid's loops have one bound
            return numbers
        if seed:
            Random(seed).shuffle(numbers)
        return numbers if seed else numbers[::-1]

    monkeypatch.setattr(interpreter, "range", shuffled, raising=False)


class GuardedMemory:
    """What torch.empty gives is NaN from here on, between guards of NaN, and is remembered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.taken: list[tuple[torch.Tensor, torch.Tensor]] = []  # what was given, and the memory around it
        monkeypatch.setattr(torch, "empty", self.empty)
        monkeypatch.setattr(torch, "empty_like", lambda x: self.empty(x.shape, dtype=x.dtype, device=x.device))

    def empty(self, shape: tuple[int, ...], *, dtype: torch.dtype, device: Any = None) -> torch.Tensor:
        count = math.prod(shape)
        memory = torch.full((count + 2 * GUARD,), math.nan, dtype=dtype, device=device)
        given = memory[GUARD : GUARD + count].view(*shape)
        self.taken.append((given, memory))
        return given

    def check(self) -> None:
        """All that was given has been written, and nothing beside it."""
        assert self.taken
        for given, memory in self.taken:
            assert not given.isnan().any()
            assert memory[:GUARD].isnan().all() and memory[-GUARD:].isnan().all()


def between_nans(values: torch.Tensor) -> torch.Tensor:
    """A copy of `values` on the device, dense, with NaN before and behind it in memory."""
    memory = torch.full((values.numel() + 2 * GUARD,), math.nan, dtype=values.dtype, device=DEVICE)
    placed = memory[GUARD : GUARD + values.numel()].view(values.shape)
    return placed.copy_(values)
