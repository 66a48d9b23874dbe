"""The processes that train one model, as torchrun starts them: each is a rank, and rank 0 alone writes and speaks.

    with joined() as ranks:            # of WORLD_SIZE, RANK and LOCAL_RANK; without torchrun it is SINGLE
        ranks.all_reduce_sum(3, 5)              # a sum over all ranks, of integers
        ranks.gather(record)           # a list of all ranks' on rank 0, None elsewhere
        ranks.broadcast(lambda: decide())  # decided on rank 0, known everywhere
        with ranks.interruptible(): ..      # what a signal to any of them ends on all

What goes through here is small and lies on the CPU: counts, records, decisions. sharded_weights.py has weights.

A rank that fails ends the run. It writes a note before it ends; those that fail because it is gone find the note, and
print nothing. A rank may compute for long while the others wait, so the timeout is long: torchrun notices that a
process has died, and ends the others at once.

Deliberately absent: a rank that joins or is replaced during a run; to go on with another number, resume.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from thresher.common.console import console
from thresher.common.errors import UserError
from thresher.common.signals import Interrupted, allow_signals, noted

PATIENCE = timedelta(hours=6)
_NOTE = "thresher/failed"  # key of the store: the rank that failed first
_LAST_WORDS = 5.0  # seconds that a rank which failed later waits for the one that failed first

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among `count`. local: its place on this machine, which is its GPU's number; on_machine: how many
    there are."""

    rank: int = 0
    count: int = 1
    local: int = 0
    on_machine: int = 1

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        return self.count > 1

    def share(self, total: int) -> range:
        """Return this rank's range of `total` things, shared out as evenly as possible."""
        return range(self.rank * total // self.count, (self.rank + 1) * total // self.count)

    def gather(self, value: T) -> list[T] | None:
        """Return all ranks' values, in their order, on rank 0; None elsewhere. The value must pickle."""
        if not self.is_distributed:
            return [value]
        values: list[T] | None = [value] * self.count if self.is_main else None
        dist.gather_object(value, values)
        return values

    def broadcast(self, decide: Callable[[], T]) -> T:
        """Return on every rank what `decide` returns on rank 0; only rank 0 calls it."""
        if not self.is_distributed:
            return decide()
        values = [decide() if self.is_main else None]
        dist.broadcast_object_list(values)
        value: T = values[0]  # type: ignore[assignment]
        return value

    def all_reduce_sum(self, *numbers: int) -> list[int]:
        """Return the sum of each number over the ranks."""
        return self._reduced(numbers, dist.ReduceOp.SUM) if self.is_distributed else list(numbers)

    def all_reduce_max(self, number: int) -> int:
        """Return the largest of the ranks' numbers."""
        return self._reduced((number,), dist.ReduceOp.MAX)[0] if self.is_distributed else number

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let a signal end work that keeps nothing and has no collectives. When all ranks have left it, `Interrupted`
        is raised on every one, so that none goes on alone."""
        try:
            with allow_signals():
                yield
        except Interrupted:
            if not self.is_distributed:
                raise
        if self.is_distributed and (number := self.all_reduce_max(noted() or 0)):
            raise Interrupted(number)

    def _reduced(self, numbers: tuple[int, ...], operation: dist.ReduceOp.RedOpType) -> list[int]:
        values = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(values, operation)
        result: list[int] = values.tolist()
        return result


SINGLE = Ranks()


@contextmanager
def joined() -> Iterator[Ranks]:
    """This process's place among those that torchrun started, joined to them until the block ends.

    Collectives go over gloo on a CPU, over NCCL between GPUs. Ranks other than 0 print nothing. What a block raises is
    raised on the rank that failed first; on those that fail after it, SystemExit. UserError for an environment that is
    not torchrun's.
    """
    ranks = _from_environment()
    if not ranks.is_distributed:
        yield SINGLE
        return
    gpus = torch.cuda.device_count()
    if ranks.local < gpus:
        torch.cuda.set_device(ranks.local)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=PATIENCE)
    store = dist.distributed_c10d._get_default_store()
    console.quiet = not ranks.is_main
    try:
        yield ranks
    except KeyboardInterrupt as error:
        if ranks.is_main:
            raise
        raise SystemExit(error.status if isinstance(error, Interrupted) else 130) from None
    except Exception as error:
        if not _fails_first(store, ranks):
            with suppress(KeyboardInterrupt):  # torchrun ends those that are left
                time.sleep(_LAST_WORDS)
            raise SystemExit(1) from None
        reason = UserError(_lost(error)) if _is_lost_connection(error) else error
        _record(reason)
        raise reason from None if isinstance(reason, UserError) else error.__cause__
    dist.destroy_process_group()


def _from_environment() -> Ranks:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    given = {name: os.environ[name] for name in names if name in os.environ}
    if given.get("WORLD_SIZE", "1") == "1":
        return SINGLE
    try:
        return Ranks(*(int(given[name]) for name in names))
    except (KeyError, ValueError):
        raise UserError(
            f"the environment says {given}; expected numbers in {', '.join(names)}, as torchrun sets them, or none"
        ) from None


def _fails_first(store: Any, ranks: Ranks) -> bool:
    """Note that this rank fails; whether no other did before. Where the store is gone, its rank did."""
    try:
        return bool(store.compare_set(_NOTE, "", str(ranks.rank)) == str(ranks.rank).encode())
    except RuntimeError:
        return False


def _is_lost_connection(error: Exception) -> bool:
    """Return whether `error` means that a collective failed, on the first rank to notice, where the dead rank left no
    note."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(name in str(error) for name in ("gloo", "NCCL"))


def _lost(error: Exception) -> str:
    detail = str(error).strip().splitlines()[0]
    return f"another rank has ended without a word, as a process does that is killed ({detail}); go on with --resume"


def _record(error: Exception) -> None:
    """Put the reason where torchrun looks for it when it reports which rank failed."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        get_error_handler().record_exception(error)
