"""What a benchmark's row must say besides its figures: which code ran, on what machine, with which libraries."""

import os
import platform
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from thresher.engine.machine import installed_memory


def checkout() -> Path | None:
    """The root of the git checkout that this code runs from; None where it was installed as a wheel."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / ".git").exists() else None


def facts(packages: Sequence[str] = ()) -> dict[str, Any]:
    """The head of a row: time, commit, machine and GPU, torch and its threads, and `packages` (None for one that is
    absent)."""
    return {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": f"{os.cpu_count()} x {cpu_name()}, {installed_memory() / 2**30:.0f} GiB",
        "gpu": gpu(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        **{package: package_version(package) for package in packages},
    }


def commit() -> str | None:
    """The checkout's commit, with "+" where tracked files differ from it; None without a checkout or without git."""
    root = checkout()
    if root is None:
        return None
    try:
        head = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.CalledProcessError):
        return None
    return head + ("+" if changed else "")


def cpu_name() -> str:
    """The processor as the system names it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def gpu() -> str | None:
    """The current CUDA device: name, memory, the driver's version and the CUDA version torch was built for."""
    if not torch.cuda.is_available():
        return None
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    return f"{device.name}, {device.total_memory / 2**30:.0f} GiB, driver {driver}, CUDA {torch.version.cuda}"


def package_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()
