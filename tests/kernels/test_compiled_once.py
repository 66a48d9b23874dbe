"""Test that a kernel is not recompiled for each length: one binary of every kernel serves six lengths."""

from pathlib import Path

import pytest
from compiling import said

pytest.importorskip("triton")


@pytest.mark.slow
def test_all_lengths_share_one_binary(tmp_path: Path) -> None:
    """A count of 0 means that counted_lengths.py does not launch the kernel: add a launch there."""
    found = said((str(Path(__file__).with_name("counted_lengths.py")),), tmp_path)
    assert found.pop("_coefficients_kernel") == 2  # with an entropy bonus and without
    assert found.pop("_sum_parts_kernel") == 2  # the widths of its two users
    assert found.pop("_rotated_heads_kernel") == 2  # forward and backward
    assert found.pop("_delta_scan_kernel") == 2  # from zeros and from states
    assert found == dict.fromkeys(found, 1) and len(found) > 12
