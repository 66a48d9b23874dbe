"""Orders of a launch's programs other than by index, because a GPU does not define their order."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

Order = Callable[[int], Sequence[int]]


def forwards(count: int) -> Sequence[int]:
    return range(count)


def backwards(count: int) -> Sequence[int]:
    return range(count)[::-1]


@cache  # called by every program
def shuffled(count: int) -> Sequence[int]:
    places = list(range(count))
    random.Random(count).shuffle(places)
    return places


ORDERS: dict[str, Order] = {"forwards": forwards, "backwards": backwards, "shuffled": shuffled}


@contextmanager
def program_order(order: Order) -> Iterator[None]:
    """Run programs in another order than by index: the n-th to run is order(count)[n]."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder

    natural = Builder.set_grid_idx

    def set_grid_idx(self: Any, x: int, y: int, z: int) -> None:
        dims = self.grid_dim
        places = order(dims[0] * dims[1] * dims[2])
        turn, z = divmod(places[(x * dims[1] + y) * dims[2] + z], dims[2])
        natural(self, *divmod(turn, dims[1]), z)

    with patch.object(Builder, "set_grid_idx", set_grid_idx):
        yield
