"""A simulated full disk, by a limit on the size of each file, and folder permissions that apply to root too."""

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Make writes beyond `size` bytes of a file fail, as on a full disk (EFBIG instead of ENOSPC)."""
    before, compiled = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # Python would keep the first `size` bytes of a module that it compiles
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = compiled


class CapabilityHead(ctypes.Structure):
    _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))


@contextmanager
def modes_that_hold() -> Iterator[None]:
    """Make file modes apply to root in this thread (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH, CAP_FOWNER)."""
    if os.geteuid() != 0:
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    # Effective, permitted and inheritable sets: their low words, then their high words.
    head, powers = CapabilityHead(0x20080522, 0), (ctypes.c_uint32 * 6)()

    def call(function: str) -> None:
        if getattr(libc, function)(ctypes.byref(head), powers) != 0:
            raise OSError(ctypes.get_errno(), function)

    call("capget")
    effective = powers[0]
    powers[0] &= ~0b1110
    call("capset")
    try:
        yield
    finally:
        powers[0] = effective
        call("capset")
