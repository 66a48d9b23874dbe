"""Settings of a process before torch is loaded (how threads wait, what becomes of freed memory), and its end.

    OMP_WAIT_POLICY=passive      threads of torch and of FAISS, each with an OpenMP of its own, sleep while they wait
    OPENBLAS_THREAD_TIMEOUT=4    so do NumPy's, after 2^4 cycles
    mallopt                      glibc keeps up to `KEPT` bytes of freed memory at the end of its heap, and gives no
                                 tensor below that a mapping of its own

A thread that waits busily holds the core on which the one that it waits for should run: beside a busy process a step
takes tens of times as long. And a tensor over 32 MiB is otherwise mapped anew each time, its pages cleared one fault
after the other. What keeping it costs is memory: a process stays as large as it once was, until it ends.

Whoever set one of the variables, GLIBC_TUNABLES or MALLOC_*, meant it, and is left alone. `thresher` calls this first.
Other programs may too, before they import torch:

    from thresher.cli.process import prepare_process
    prepare_process()

Deliberately absent: the number of threads, which is a recipe's (engine/threads.py), and allocators to be preloaded.
"""

import ctypes
import os
import sys
from collections.abc import Mapping
from typing import NoReturn

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # any of them says how OpenMP's threads wait
KEPT = 2**30  # bytes
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


def prepare_process() -> None:
    """Set what the environment leaves open. Once torch is loaded, its own threads keep the policy that they have."""
    os.environ.update(waiting(os.environ))
    keep_memory(os.environ)


def leave(status: int) -> NoReturn:
    """Exit with `status`; of several ranks, without Python's teardown.

    torch's caches of DTensor keep a process group, and with it gloo's threads, beyond `destroy_process_group`. A thread
    that releases its last tensor while Python finalises is ended inside a destructor, which aborts the process.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def waiting(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables to add, so that threads sleep while they wait."""
    added = {} if any(name in environment for name in WAITING) else {"OMP_WAIT_POLICY": "passive"}
    if "OPENBLAS_THREAD_TIMEOUT" not in environment:
        added["OPENBLAS_THREAD_TIMEOUT"] = "4"
    return added


def keep_memory(environment: Mapping[str, str]) -> bool:
    """Have glibc keep freed memory; whether it does now. Not where the environment has settings for it, nor where the C
    library is another."""
    chosen = any(name.startswith("MALLOC_") for name in environment)
    if chosen or "malloc" in environment.get("GLIBC_TUNABLES", "") or not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    library.mallopt.argtypes, library.mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return bool(library.mallopt(M_MMAP_THRESHOLD, KEPT)) and bool(library.mallopt(M_TRIM_THRESHOLD, KEPT))
