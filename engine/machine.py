"""The memory of the machine that this process runs on, or of the container that it runs in."""

import os
from pathlib import Path

# Of a container: version 2's file and version 1's.
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
MEMINFO = Path("/proc/meminfo")


def installed_memory() -> int:
    """Bytes of RAM."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cpu_memory() -> tuple[int, int]:
    """(bytes that this process may ever have, bytes available now)."""
    total = installed_memory()
    for path in map(Path, LIMITS):
        text = path.read_text().strip() if path.is_file() else ""
        if text.isdigit():  # else "max"
            total = min(total, int(text))
    lines = MEMINFO.read_text().splitlines() if MEMINFO.is_file() else []
    available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), total)
    return total, min(available, total)
