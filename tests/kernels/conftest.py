"""Fixtures of the kernels' tests."""

from collections.abc import Iterator

import pytest
from interpreter import bfloat16_to_nearest


@pytest.fixture
def rounds_to_nearest() -> Iterator[None]:
    """Round casts to bfloat16 as a GPU does."""
    pytest.importorskip("triton")
    with bfloat16_to_nearest():
        yield
