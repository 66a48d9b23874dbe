"""Fixtures of attention's kernels."""

from collections.abc import Iterator

import pytest
from interpreter import poisoned_memory


@pytest.fixture
def poisoned() -> Iterator[None]:
    """What torch hands out unwritten is NaN, or the largest integer."""
    with poisoned_memory():
        yield
