"""Tilings of the head's kernels: rows of a chunk, and the tiles of their matmul by kind of GPU. Needs no Triton.

This file has one tiling per kind of GPU; autotune_cache.py has those measured on a GPU.

Axes: V vocabulary, H hidden width (docs/notation.md).
"""

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from thresher.kernels.operands import stored_columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """Tile of a program: [rows, columns] logits, computed over `width` of the hidden axis at a time.

    maxnreg: registers that a thread may have, None for as many as the compiler uses.
    """

    rows: int
    columns: int
    width: int
    num_warps: int
    num_stages: int
    maxnreg: int | None = None

    @property
    def launch(self) -> dict[str, int | None]:
        """Return Triton's options of a launch."""
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.maxnreg}


# Chosen by registers, shared memory and arithmetic per byte: none of them spills on the GPUs for which `choose_tiling`
# returns it (`thresher bench compile`). autotune_cache.py measures them.
FLOAT32 = Tiling(rows=64, columns=64, width=32, num_warps=4, num_stages=2)
BFLOAT16 = Tiling(rows=128, columns=128, width=32, num_warps=8, num_stages=4)
# Three quarters of the cache traffic for the same product; uses the registers that wgmma leaves free.
HOPPER = Tiling(rows=128, columns=256, width=64, num_warps=8, num_stages=3)


def choose_tiling(lm_head_VH: Tensor) -> Tiling:
    """Return the tiling for a head [V, H], float32 or bfloat16, by dtype, width and GPU, if none was measured."""
    if lm_head_VH.dtype == torch.float32:
        return FLOAT32
    wide = 90 <= capability(lm_head_VH.device) < 100 and lm_head_VH.shape[1] % HOPPER.width == 0
    return HOPPER if wide else BFLOAT16


def again_tiling(dtype: torch.dtype) -> Tiling:
    """Return the tiling that recomputes rows whose offset was wrong; this is rare, so one serves all GPUs."""
    return FLOAT32 if dtype == torch.float32 else BFLOAT16


def even_rows(lm_head_VH: Tensor, tiling: Tiling, budget: int, count: int) -> int:
    """Return the rows of a chunk: `count` rows in the fewest chunks with a workspace of at most `budget` bytes.

    Chunks have about equal sizes. A row needs its exps, its tiles' parts, and its narrow copies: the gathered row, the
    scaled row, and dX or the scaled row in float32. Every further chunk reads and writes the head's float32 gradient
    once more, 8VH bytes.
    """
    (columns, width), itemsize = lm_head_VH.shape, lm_head_VH.element_size()
    parts = 12 * _cdiv(columns, tiling.columns)
    row_bytes = itemsize * stored_columns(columns) + parts + (8 + 2 * itemsize) * width
    most = max(budget // row_bytes // tiling.rows, 1) * tiling.rows
    chunks = max(_cdiv(count, most), 1)
    return max(min(_cdiv(_cdiv(count, chunks), tiling.rows) * tiling.rows, count), 1)


def _cdiv(number: int, unit: int) -> int:
    return -(-number // unit)


@cache
def capability(device: torch.device) -> int:
    """Return the capability of a GPU, 80 for sm_80 and so on; elsewhere, in the interpreter, that of sm_80."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
    return 10 * major + minor


@cache
def processors(device: torch.device) -> int:
    """Return the multiprocessors of a GPU; elsewhere, in the interpreter, a number that divides few others."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3
