"""The machine that this process runs on: code, processor and libraries for the origin of a figure, and memory of the
machine or of the container."""

import ctypes
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

# Of a container: version 2's file and version 1's.
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
MEMINFO = Path("/proc/meminfo")
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
KEEP_MEMORY, RETURN_MEMORY = (2**30, -1), (2**20, 2**30)  # arguments of set_malloc


def checkout() -> Path | None:
    """Return the root of the git checkout that this code runs from; None for an installed wheel."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / ".git").exists() else None


def origin(cuda: bool) -> dict[str, Any]:
    """Return time, commit, machine, host and versions. cuda: of the GPU too, which initialises CUDA."""
    import torch

    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "host": platform.node(),
        "machine": machine(),
        "gpu": gpu() if cuda else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def machine() -> str:
    """Return cores, processor and memory in words."""
    return f"{os.cpu_count()} x {cpu_name()}, {installed_memory() / 2**30:.0f} GiB"


@cache
def commit() -> str | None:
    """Return the checkout's commit, with "+" where tracked files differ from it; None without a checkout or git. It is
    read once: what is imported by then is what computes."""
    root = checkout()
    if root is None:
        return None
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")


def _cpu_info(key: str) -> str:
    """Return what Linux says of the first processor, "" where it says nothing."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def cpu_name() -> str:
    """Return the processor as the system names it."""
    return _cpu_info("model name") or platform.processor() or platform.machine()


def is_amd() -> bool:
    """Return whether the processor is AMD's."""
    return _cpu_info("vendor_id") == "AuthenticAMD"


def cpu_dtype() -> str:
    """Return the dtype in which this processor multiplies fastest: bfloat16 where it has instructions for it, or
    float32."""
    import torch

    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bfloat16" if native else "float32"


def installed_memory() -> int:
    """Return the bytes of RAM."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpu_memory() -> tuple[int, int]:
    """Return (bytes that this process may ever have, bytes available now)."""
    total = installed_memory()
    for path in map(Path, LIMITS):
        text = path.read_text().strip() if path.is_file() else ""
        if text.isdigit():  # else "max"
            total = min(total, int(text))
    lines = MEMINFO.read_text().splitlines() if MEMINFO.is_file() else []
    available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), total)
    return total, min(available, total)


def set_malloc(mapped_from: int, kept: int) -> bool:
    """Have glibc map blocks of `mapped_from` bytes and more by themselves, which returns them when they are freed, and
    keep up to `kept` free bytes at the end of its heap (-1: all). Return whether it does: it does not where MALLOC_* or
    GLIBC_TUNABLES have settings of the user's, nor where the C library is another."""
    chosen = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    library = None if chosen else _glibc()
    if library is None:
        return False
    library.mallopt.argtypes, library.mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return bool(library.mallopt(M_MMAP_THRESHOLD, mapped_from)) and bool(library.mallopt(M_TRIM_THRESHOLD, kept))


def return_free_memory() -> bool:
    """Have glibc return what is free in its heap, holes too, where more than half of the memory is in use. Return
    whether it did. What it keeps (`KEEP_MEMORY`) grows with holes that no later block fits into."""
    total, available = cpu_memory()
    library = _glibc() if 2 * available < total else None
    return library is not None and bool(library.malloc_trim(0))


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    return library if hasattr(library, "gnu_get_libc_version") else None


def gpu() -> str | None:
    """Describe the current CUDA device: name, memory, the driver's version and the CUDA version torch was built for."""
    import torch

    if not torch.cuda.is_available():
        return None
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    return f"{device.name}, {device.total_memory / 2**30:.0f} GiB, driver {driver}, CUDA {torch.version.cuda}"


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()
