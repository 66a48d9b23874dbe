"""The plan, checked when a run starts, before a weight is loaded.

On CUDA the plan must fit what is free: a run that would end in its first update, hours after its index was loaded, ends
here. A CPU's memory is shared, swapped and reclaimed, so there a run is refused only where the plan exceeds all that
the machine (or the container) has, and one that exceeds what is available now is warned of.
"""

import os
from pathlib import Path

import torch

from thresher.engine.config.recipe import Recipe
from thresher.engine.console import console
from thresher.engine.planning.plan import GB, Plan, plan
from thresher.policy.config import read_config
from thresher.rewards.errors import UserError

# Of a container: version 2's file and version 1's.
LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
MEMINFO = Path("/proc/meminfo")


def check_memory(recipe: Recipe, folder: str | Path, ranks: int = 1) -> None:
    """UserError where a GRPO run of the model in `folder` on so many ranks cannot fit; a warning where it may not."""
    config = read_config(folder)
    if recipe.model.device == "cuda":
        if torch.cuda.is_available():
            free = int(torch.cuda.mem_get_info()[0])
            found = plan(config, recipe, ranks, memory_bytes=free)
            if not found.fits:
                raise UserError(_sentence(found, f"the GPU has {free / GB:.1f} free"))
        return
    total, available = (size // ranks for size in cpu_memory())
    found = plan(config, recipe, ranks, memory_bytes=total)
    if not found.fits:
        raise UserError(_sentence(found, f"there are {total / GB:.1f}"))
    if found.total_bytes > available:
        needed = f"{found.total_bytes / GB:.1f} GB"
        console.print(
            f"train: the run may take {needed} of memory, and {available / GB:.1f} are available now", soft_wrap=True
        )


def _sentence(found: Plan, there: str) -> str:
    return (
        f"the run needs {found.total_bytes / GB:.1f} GB at its {found.peak} ({found.sentence()}), and {there}; "
        f"{found.advice[0]} (thresher plan has the rest)"
    )


def cpu_memory() -> tuple[int, int]:
    """(bytes that this process may ever have, bytes available now) of the machine, or of the container it runs in."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in map(Path, LIMITS):
        text = path.read_text().strip() if path.is_file() else ""
        if text.isdigit():  # else "max"
            total = min(total, int(text))
    lines = MEMINFO.read_text().splitlines() if MEMINFO.is_file() else []
    available = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), total)
    return total, min(available, total)
