"""The machine of this process: code, processor, libraries and memory. Measured figures are stored with the first
three; the memory is that of the machine or the container."""

import ctypes
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

# Memory limits of a container: files of cgroup versions 2 and 1.
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
MEMINFO = Path("/proc/meminfo")
WRITTEN = (":(exclude)bench/results", ":(exclude)docs/*.png")  # tracked files that benches write
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
KEEP_MEMORY, RETURN_MEMORY = (2**30, -1), (2**20, 2**30)  # arguments of set_malloc


def checkout() -> Path | None:
    """Return the root of the git checkout from which this code runs; None for an installed wheel."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / ".git").exists() else None


def origin(cuda: bool) -> dict[str, Any]:
    """Return time, commit, machine, host and versions. cuda: include the GPU, which initialises CUDA."""
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
    """Describe cores, processor and memory."""
    return f"{os.cpu_count()} x {cpu_name()}, {installed_memory() / 2**30:.0f} GiB"


@cache
def commit() -> str | None:
    """Return the checkout's commit, with "+" if tracked files differ from it; None without a checkout or git. Files
    that a bench writes do not count. It is read once, because the imported code does not change afterwards."""
    root = checkout()
    if root is None:
        return None
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no", "--", ".", *WRITTEN)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")


def _cpu_info(key: str) -> str:
    """Return the value of `key` that Linux reports for the first processor; "" if there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")


def cpu_name() -> str:
    """Return the system's name of the processor."""
    return _cpu_info("model name") or platform.processor() or platform.machine()


def is_amd() -> bool:
    """Return whether the processor is by AMD."""
    return _cpu_info("vendor_id") == "AuthenticAMD"


def cpu_dtype() -> str:
    """Return the dtype in which this processor multiplies fastest. It is bfloat16 if the processor has instructions for
    it, else float32."""
    import torch

    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bfloat16" if native else "float32"


def installed_memory() -> int:
    """Return the bytes of RAM."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpu_memory() -> tuple[int, int]:
    """Return (limit on the memory of this process, memory available now), in bytes."""
    total = installed_memory()
    for path in map(Path, LIMITS):
        text = path.read_text().strip() if path.is_file() else ""
        if text.isdigit():  # else "max"
            total = min(total, int(text))
    lines = MEMINFO.read_text().splitlines() if MEMINFO.is_file() else []
    available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), total)
    return total, min(available, total)


def set_malloc(mapped_from: int, kept: int) -> bool:
    """Set glibc's thresholds for mapping blocks and keeping free memory; return whether they were set.

    Blocks of `mapped_from` bytes or more are mapped separately and returned when freed; up to `kept` free bytes stay at
    the end of the heap (-1: all). Nothing is set over a user's MALLOC_* or GLIBC_TUNABLES, nor in another C library.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if chosen or not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    library.mallopt.argtypes, library.mallopt.restype = (ctypes.c_int, ctypes.c_int), ctypes.c_int
    return bool(library.mallopt(M_MMAP_THRESHOLD, mapped_from)) and bool(library.mallopt(M_TRIM_THRESHOLD, kept))


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
