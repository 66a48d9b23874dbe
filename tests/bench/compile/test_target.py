"""How many blocks a multiprocessor holds, by registers, threads and shared memory."""

import pytest

from thresher.bench.compile.target import TARGETS, blocks_per_sm


@pytest.mark.parametrize(
    ("registers", "threads", "kib", "on_80", "on_90"),
    [
        (32, 256, 0, 8, 8),  # as many threads as there may be
        (16, 32, 0, 32, 32),  # as many blocks
        (128, 256, 0, 2, 2),
        (129, 256, 0, 1, 1),  # 136 are allocated
        (168, 128, 0, 3, 3),  # 12 warps, and not the 65,536 // 21,504 of a file without quarters
        (216, 32, 0, 8, 8),  # 2 a scheduler; 9 would fit an undivided file
        (255, 128, 0, 2, 2),
        (32, 128, 64, 2, 3),
        (32, 128, 81, 2, 2),  # with the driver's KiB exactly half of 164
        (32, 128, 113, 1, 2),  # and of 228
        (32, 128, 114, 1, 1),
        (32, 128, 163, 1, 1),
        (32, 128, 164, 0, 1),
        (32, 128, 227, 0, 1),
        (32, 128, 227.5, 0, 0),
    ],
)
def test_blocks_per_multiprocessor(registers: int, threads: int, kib: float, on_80: int, on_90: int) -> None:
    shared = int(kib * 1024)
    assert [blocks_per_sm(registers, threads, shared, TARGETS[name]) for name in ("sm_80", "sm_90")] == [on_80, on_90]
