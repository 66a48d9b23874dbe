"""Settings of a process before torch is loaded, and its exit. Other programs may call `prepare_process` too.

    GOMP_SPINCOUNT=1000          OpenMP threads of torch and FAISS spin for about 20 us and then sleep
    OPENBLAS_THREAD_TIMEOUT=4    NumPy's threads spin for 2^4 cycles
    PYTORCH_ALLOC_CONF=expandable_segments:True   GPU memory that was freed in pieces can hold a larger tensor
    mallopt                      glibc keeps freed memory, and does not mmap blocks under 1 GiB

A spinning thread occupies the core that the thread it waits for needs: next to a busy process, a step takes tens of
times as long with long spinning, such as libgomp's default. A thread that sleeps at once has to be woken for each
operation of a layer, which doubled the time of a rollout on an idle machine. Memory that is returned to the system is
mapped again for the next step, page fault by page fault. The cache of a rollout and the activations of an update use
the same GPU memory in turn. Variables that are already set (also GLIBC_TUNABLES and MALLOC_*) are not changed.
"""

import os
import sys
from collections.abc import Mapping
from typing import NoReturn

from thresher.common.background import still_busy
from thresher.common.machine import KEEP_MEMORY, set_malloc

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # any of them sets how OpenMP threads wait
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # any of them configures torch's allocator of GPU memory


def prepare_process() -> None:
    """Set the variables that the environment does not. Threads that torch has started already keep their policy."""
    os.environ.update(settings(os.environ))
    set_malloc(*KEEP_MEMORY)


def leave(status: int) -> NoReturn:
    """Exit with `status`, without Python's teardown if there are several ranks or a background call is running. torch's
    DTensor caches keep gloo's threads alive. A thread that returns from torch, or frees a tensor, while Python
    finalises aborts the process."""
    if os.environ.get("WORLD_SIZE", "1") == "1" and not still_busy():
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add."""
    added = {} if any(name in environment for name in WAITING) else {"GOMP_SPINCOUNT": "1000"}
    if "OPENBLAS_THREAD_TIMEOUT" not in environment:
        added["OPENBLAS_THREAD_TIMEOUT"] = "4"
    if not any(name in environment for name in ALLOCATOR):
        added["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return added
