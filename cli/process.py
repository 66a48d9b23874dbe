"""Settings of a process before torch is loaded, and its end. Other programs may call `prepare_process` too.

    GOMP_SPINCOUNT=1000          OpenMP threads of torch and FAISS wait busily for some 20 us, and then sleep
    OPENBLAS_THREAD_TIMEOUT=4    NumPy's do, after 2^4 cycles
    PYTORCH_ALLOC_CONF=expandable_segments:True   a GPU's memory that was freed in pieces serves a larger tensor
    mallopt                      glibc keeps freed memory, and maps no block under 1 GiB by itself

A thread that waits busily holds the core that the awaited one needs: beside a busy process a step takes tens of times
as long where it waits for long, as libgomp's own do. One that sleeps at once has to be woken for each of a layer's
operations, which doubled the time of a rollout on an idle machine. Memory that is returned is mapped anew for the next
step, page fault by page fault. The cache of a rollout and the activations of an update take turns in a GPU's memory.
Variables that are set already (GLIBC_TUNABLES and MALLOC_* too) are left alone.
"""

import os
import sys
from collections.abc import Mapping
from typing import NoReturn

from thresher.common.background import still_busy
from thresher.common.machine import KEEP_MEMORY, set_malloc

WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")  # any of them says how OpenMP's threads wait
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # and these what torch does with a GPU's memory


def prepare_process() -> None:
    """Set what the environment leaves open. Once torch is loaded, its own threads keep the policy that they have."""
    os.environ.update(settings(os.environ))
    set_malloc(*KEEP_MEMORY)


def leave(status: int) -> NoReturn:
    """Exit with `status`; of several ranks, and beside a call in the background, without Python's teardown. torch's
    caches of DTensor keep gloo's threads, and a thread that comes back from torch while Python finalises, or releases
    a tensor then, aborts the process."""
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
