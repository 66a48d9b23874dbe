"""The processes that train one model, started by torchrun. Each is a rank; only rank 0 writes files and prints.

    with joined() as ranks:                # from WORLD_SIZE, RANK and LOCAL_RANK; SINGLE without torchrun
        ranks.all_reduce_sum(3, 5)         # sums of integers over all ranks
        ranks.gather(record)               # a list of all ranks' records on rank 0, None elsewhere
        ranks.broadcast(lambda: decide())  # called on rank 0; returned on every rank
        with ranks.interruptible(): ..     # a signal to any rank ends this block on all ranks
        ranks.part(2)                      # the first two ranks, or the others: the part that contains this rank

These values are small and on the CPU: counts, records, decisions. Weights are in sharded_weights.py.

A rank that fails ends the run. It writes a note into the store. A rank that fails as a consequence finds the note, and
prints nothing. If there is no note, for example because a signal ended the other rank, it waits a moment and reports
the loss. The timeout of collectives is long, because a rank may compute for long while the others wait; torchrun ends
the others at once when a process has died.

Deliberately absent: ranks that join or are replaced during a run. Resume it with another number of ranks instead.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from thresher.common.console import console
from thresher.common.errors import UserError
from thresher.common.signals import Interrupted, allow_signals, noted

PATIENCE = timedelta(hours=6)
_NOTE = "thresher/failed"  # key in the store, for the rank that failed first
_LAST_WORDS = 5.0  # seconds that ranks which fail later wait, so that the first one can print its error

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """One of `count` processes. local: its number on this machine, also the number of its GPU. on_machine: number of
    processes on this machine. group: the process group of these ranks; None: all processes."""

    rank: int = 0
    count: int = 1
    local: int = 0
    on_machine: int = 1
    group: dist.ProcessGroup | None = field(default=None, kw_only=True)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_distributed(self) -> bool:
        return self.count > 1

    def share(self, total: int) -> range:
        """Return this rank's part of range(total), which is divided as evenly as possible."""
        return range(self.rank * total // self.count, (self.rank + 1) * total // self.count)

    def part(self, first: int) -> "Ranks":
        """Return this rank's part of the ranks, counted from 0: the first `first` ranks, or the others. All ranks call
        it together."""
        groups = [dist.new_group(list(part), PATIENCE) for part in (range(first), range(first, self.count))]
        if self.rank < first:
            return replace(self, count=first, group=groups[0])
        return replace(self, rank=self.rank - first, count=self.count - first, group=groups[1])

    def gather(self, value: T) -> list[T] | None:
        """Return the values of all ranks in order, on rank 0; None elsewhere. The value must be picklable."""
        if not self.is_distributed:
            return [value]
        values: list[T] | None = [value] * self.count if self.is_main else None
        dist.gather_object(value, values, group=self.group, group_dst=0)
        return values

    def broadcast(self, decide: Callable[[], T]) -> T:
        """Return on every rank what `decide` returns on rank 0; only rank 0 calls it."""
        if not self.is_distributed:
            return decide()
        values = [decide() if self.is_main else None]
        dist.broadcast_object_list(values, group=self.group, group_src=0)
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
        """Let a signal end a block whose work may be lost and which has no collectives. When all ranks have left the
        block, `Interrupted` is raised on every rank, so that none continues alone. In a part of the ranks a signal does
        not end it."""
        if self.group is not None:
            yield
            return
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
        dist.all_reduce(values, operation, group=self.group)
        result: list[int] = values.tolist()
        return result


SINGLE = Ranks()


def trainers_of(count: int) -> int:
    """Return how many of `count` ranks train while the others sample (run.async): the first half, at least one."""
    return max(count // 2, 1)


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the processes that torchrun started, and leave them when the block ends. Yield this process's `Ranks`.

    Collectives use gloo on a CPU, NCCL between GPUs. Ranks other than 0 print nothing. An error in the block is raised
    on the rank that failed first; ranks that fail after it raise SystemExit. UserError for an environment that torchrun
    does not create, and for ranks that cannot connect.
    """
    ranks = _from_environment()
    if not ranks.is_distributed:
        yield SINGLE
        return
    gpus = torch.cuda.device_count()
    if ranks.local < gpus:
        torch.cuda.set_device(ranks.local)
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if gpus else "gloo", timeout=PATIENCE)
    except RuntimeError as error:
        if not _is_lost_connection(error):
            raise
        _wait_for_torchrun()
        apart = UserError(_not_met(error))
        _record(apart)
        raise apart from None
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
            _wait_for_torchrun()
            raise SystemExit(1) from None
        reason = error
        if _is_lost_connection(error):
            _wait_for_torchrun()
            reason = UserError(_lost(error))
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


def _wait_for_torchrun() -> None:
    """Give the rank that failed first time to print its error; torchrun ends the remaining ranks."""
    with suppress(KeyboardInterrupt):
        time.sleep(_LAST_WORDS)


def _fails_first(store: Any, ranks: Ranks) -> bool:
    """Note that this rank fails; return False if another rank failed before. A missing store means that rank 0 did."""
    try:
        return bool(store.compare_set(_NOTE, "", str(ranks.rank)) == str(ranks.rank).encode())
    except RuntimeError:
        return False


def _is_lost_connection(error: Exception) -> bool:
    """Return whether `error` means that a collective failed, because a rank died without a note."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(name in str(error) for name in ("gloo", "NCCL"))


def _lost(error: Exception) -> str:
    return (
        f"another rank has ended without a message, as a killed process does ({_first_line(error)}); continue with "
        "--resume"
    )


def _not_met(error: Exception) -> str:
    address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
    return (
        f"the ranks did not meet at {address} ({_first_line(error)}): one of them has ended, or cannot reach that "
        "address; start all of them again with torchrun"
    )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _record(error: Exception) -> None:
    """Write the reason to where torchrun looks for it when it reports which rank failed."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if os.environ.get("TORCHELASTIC_ERROR_FILE"):
        get_error_handler().record_exception(error)
