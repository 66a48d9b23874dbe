"""A disk that is full, by a limit on the size of each file."""

import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Writes beyond `size` bytes of a file fail, as on a disk that is full (EFBIG in ENOSPC's place)."""
    before, compiled = resource.getrlimit(resource.RLIMIT_FSIZE), sys.dont_write_bytecode
    sys.dont_write_bytecode = True  # Python would keep the first `size` bytes of a module that it compiles
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        sys.dont_write_bytecode = compiled
