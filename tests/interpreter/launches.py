"""Launches that run in three orders, with their accesses checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from interpreter.accesses import Accesses, ProofError, recorded
from interpreter.orders import ORDERS, forwards, program_order


@dataclass
class Seen:
    """The checked launches. launches: kernel -> number of launches (runs in other orders do not count)."""

    launches: Counter[str] = field(default_factory=Counter)


def _storages(arguments: Any) -> dict[int, torch.UntypedStorage]:
    """Return address -> storage of every tensor among the arguments, including tuples and tensor descriptors."""
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
def checked_launches(seen: Seen) -> Iterator[None]:
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
        for order_name, order in reversed(ORDERS.items()):  # the natural order last, because its results are kept
            for at, storage in storages.items():
                storage.copy_(before[at])
            with ExitStack() as stack:
                stack.enter_context(program_order(order))
                # The touched bytes may depend on the order only if this order has a race.
                accesses = stack.enter_context(recorded(Accesses(inside, keep=order is forwards)))
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
