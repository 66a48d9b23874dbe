"""Fixtures of the attention kernels' tests."""

from collections.abc import Iterator

import pytest
from interpreter import poisoned_memory


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill memory that torch returns uninitialised with NaN, or with the largest integer."""
    with poisoned_memory():
        yield
