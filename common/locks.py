"""Locks of the operating system, with which only one process at a time writes to a folder or a file. They are released
when a process is killed."""

import errno
import fcntl
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from thresher.common.errors import UserError
from thresher.common.files import Unwritable

T = TypeVar("T")
WAIT = 2.0  # seconds


class Held(UserError):
    """Error for a lock that another process holds."""


def lock_folder(folder: Path) -> int:
    """Lock a folder and return the descriptor; closing it, or exit, releases the lock. The lock file remains."""
    return _lock(folder / ".lock", folder, "folder")


def share_work(todo: Sequence[T], attempt: Callable[[T], bool]) -> None:
    """Call `attempt` for each item of `todo` until it has returned True for all. It returns False for an item on which
    another process works, or that waits for such an item; if it does so for all that are left, sleep WAIT seconds."""
    while todo:
        left = [one for one in todo if not attempt(one)]
        if len(left) == len(todo):
            time.sleep(WAIT)
        todo = left


@contextmanager
def locked_file(path: Path, kind: str = "file") -> Iterator[None]:
    """Lock the file, which need not exist yet, for writing by this process. Held if another process has the lock."""
    lock = path.with_name(f".{path.name}.lock")
    try:
        descriptor = _lock(lock, path, kind)
        while not _lies_at(descriptor, lock):  # its previous holder deleted it
            os.close(descriptor)
            descriptor = _lock(lock, path, kind)
    except OSError as error:
        raise Unwritable(path, error) from None
    try:
        yield
    finally:
        lock.unlink(missing_ok=True)
        os.close(descriptor)


@contextmanager
def locked_in_turn(path: Path) -> Iterator[None]:
    """Lock the file as `locked_file` does, after every other process that has the lock."""
    with ExitStack() as stack:
        while True:
            try:
                stack.enter_context(locked_file(path))
                break
            except Held:
                time.sleep(0.01)
        yield


def _lies_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _lock(lock: Path, written: Path, kind: str) -> int:
    descriptor = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip() or "another"
        os.close(descriptor)
        raise Held(f"{written}: process {holder} is writing to this {kind}; wait for it to end") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            os.close(descriptor)
            raise
        warnings.warn(f"{written}: this file system has no locks; do not start a second process on it", stacklevel=4)
    try:
        os.truncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()}\n".encode())
    except OSError:
        os.close(descriptor)  # else this process would later find its own lock
        raise
    return descriptor
