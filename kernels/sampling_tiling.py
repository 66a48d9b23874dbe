"""Tilings of sampling_triton.py, by the number of rows, dtype and kind of GPU.

Deliberately absent: a table per shape, and timing at run time. The tiling decides how a row's logits are added up, so
one that changed with the load would change last bits, and a CUDA graph needs the same grid every time.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawTiling:
    """A program makes logits of [rows, columns], `width` of the hidden axis at a time, and draws from `parts` of the
    columns one after the other. maxnreg: registers that a thread may have, None for as many as there are."""

    rows: int
    columns: int
    width: int
    num_warps: int
    num_stages: int
    parts: int = 1
    maxnreg: int | None = None

    @property
    def column_axis(self) -> int:
        """Return the axis of the columns in a tile. Hopper's instruction wants 64 rows of its left operand. With few
        sequences the left operand is the head. With many it is the hidden states: a thread then sees two or four rows
        of the tile, and need not hold a key and a maximum for each."""
        return 1 if self.rows >= 64 else 0


# By dtype and kind of GPU: the smallest that holds the batch, else the last. Chosen by registers, shared memory and
# bytes in flight: with Triton 3.6 and 3.7 nothing spills, and two blocks at least share a multiprocessor, so that one
# multiplies while the other draws (`thresher bench compile`). Not measured on a GPU yet.
AMPERE = (
    DrawTiling(rows=16, columns=128, width=64, num_warps=4, num_stages=4),
    DrawTiling(rows=32, columns=128, width=64, num_warps=4, num_stages=4),
    DrawTiling(rows=64, columns=128, width=64, num_warps=8, num_stages=3, parts=2),
    DrawTiling(rows=128, columns=128, width=32, num_warps=4, num_stages=4, parts=2),
)
HOPPER = (
    *AMPERE[:2],
    DrawTiling(rows=64, columns=128, width=64, num_warps=4, num_stages=4, parts=4),
    DrawTiling(rows=128, columns=128, width=64, num_warps=8, num_stages=3, parts=4, maxnreg=128),
)
FLOAT32 = tuple(DrawTiling(rows=rows, columns=64, width=32, num_warps=4, num_stages=2) for rows in (16, 64))


def draw_tilings(dtype: torch.dtype, capability: int) -> tuple[DrawTiling, ...]:
    """For bfloat16 or float32 operands; capability: 80 for sm_80 and so on."""
    if dtype == torch.float32:
        return FLOAT32
    return HOPPER if 90 <= capability < 100 else AMPERE


def draw_tiling(dtype: torch.dtype, device: torch.device, count: int) -> DrawTiling:
    """For `count` rows on `device`, which is a CPU in Triton's interpreter and then taken for sm_80."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
    tilings = draw_tilings(dtype, 10 * major + minor)
    return next((one for one in tilings if one.rows >= count), tilings[-1])
