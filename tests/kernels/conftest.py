"""Fixtures of the layers' kernels."""

from collections.abc import Iterator

import pytest
from interpreter import bfloat16_to_nearest


@pytest.fixture
def rounds_to_nearest() -> Iterator[None]:
    """Casts to bfloat16 round as a GPU's do."""
    pytest.importorskip("triton")
    with bfloat16_to_nearest():
        yield
