"""What a benchmark's row must say besides its figures: which code ran, on what machine, with which libraries."""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from thresher.common.machine import origin


def facts(packages: Sequence[str] = ()) -> dict[str, Any]:
    """The head of a row: where it comes from, torch's threads, and `packages` (None for one that is absent)."""
    found = origin(cuda=True)
    del found["host"]  # rows are published
    return {
        **found,
        "threads": torch.get_num_threads(),
        **{package: package_version(package) for package in packages},
    }


def package_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
