"""How the work of head_triton.py is cut up: rows of a chunk, and the tiles of its matmul on which GPU.

No Triton is needed here: the number of rows in a chunk is asked for where none is installed, too.

Deliberately absent: a table per shape. One tiling a kind of GPU stands here, beside what it was chosen by; an
environment variable measures instead.

Axes: V vocabulary, H hidden width (docs/notation.md).
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """A program makes [rows, columns] logits, `width` of the hidden axis at a time."""

    rows: int
    columns: int
    width: int
    num_warps: int
    num_stages: int


# Chosen by registers, shared memory and arithmetic per byte: none of them spills where `choose_tiling` sends it, with
# Triton 3.6, 3.7 and 3.9 (`thresher bench compile`). Not measured on a GPU yet; THRESHER_AUTOTUNE=1 times the
# candidates at the first call of each head shape, with that call's rows, prints the times and takes the fastest for as
# long as the process lives. Two runs may then differ in their last bits.
FLOAT32 = Tiling(rows=64, columns=64, width=32, num_warps=4, num_stages=2)
BFLOAT16 = Tiling(rows=128, columns=128, width=32, num_warps=8, num_stages=4)
# Three quarters of the traffic from the cache for the same product; takes the registers that wgmma leaves free.
HOPPER = Tiling(rows=128, columns=256, width=64, num_warps=8, num_stages=3)
CANDIDATES = (
    BFLOAT16,
    HOPPER,
    Tiling(rows=128, columns=128, width=64, num_warps=8, num_stages=3),
    Tiling(rows=128, columns=128, width=64, num_warps=4, num_stages=3),
    Tiling(rows=128, columns=256, width=64, num_warps=8, num_stages=4),
    Tiling(rows=256, columns=128, width=64, num_warps=8, num_stages=3),
    Tiling(rows=128, columns=256, width=32, num_warps=8, num_stages=4),
    Tiling(rows=128, columns=64, width=32, num_warps=4, num_stages=4),
)


def choose_tiling(lm_head_VH: Tensor) -> Tiling:
    """The tiling for a head [V, H], float32 or bfloat16, by its dtype, width and GPU."""
    if lm_head_VH.dtype == torch.float32:
        return FLOAT32
    wide = 90 <= _capability(lm_head_VH.device) < 100 and lm_head_VH.shape[1] % HOPPER.width == 0
    return HOPPER if wide else BFLOAT16


def even_rows(lm_head_VH: Tensor, budget: int, count: int) -> int:
    """Rows of a chunk: `count` in the fewest chunks whose workspace stays under `budget` bytes, all of about a size.

    A row takes its exps, its tiles' parts, and its narrow copies: the gathered row and the scaled one, and dX or the
    scaled row in float32. Every further chunk reads and writes the head's float32 gradient once more, 8VH bytes.
    """
    (columns, width), itemsize = lm_head_VH.shape, lm_head_VH.element_size()
    tiling = choose_tiling(lm_head_VH)
    row_bytes = itemsize * (columns + 64) + 12 * _cdiv(columns, tiling.columns) + (8 + 2 * itemsize) * width
    most = max(budget // row_bytes // tiling.rows, 1) * tiling.rows
    chunks = max(_cdiv(count, most), 1)
    return max(min(_cdiv(_cdiv(count, chunks), tiling.rows) * tiling.rows, count), 1)


def _cdiv(number: int, unit: int) -> int:
    return -(-number // unit)


@cache
def _capability(device: torch.device) -> int:
    """Of a GPU, 80 for sm_80 and so on; elsewhere, in the interpreter, that of sm_80."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
    return 10 * major + minor


_measured: dict[tuple[int, int, torch.device], Tiling] = {}


def tiling_for(lm_head_VH: Tensor, time: Callable[[Tiling], float]) -> Tiling:
    """`choose_tiling`, or with THRESHER_AUTOTUNE=1 the candidate of the least `time`, in milliseconds, once a shape."""
    if os.environ.get("THRESHER_AUTOTUNE") != "1" or not lm_head_VH.is_cuda or lm_head_VH.dtype != torch.bfloat16:
        return choose_tiling(lm_head_VH)
    columns, width = lm_head_VH.shape
    key = (columns, width, lm_head_VH.device)
    if key not in _measured:
        times = {tiling: time(tiling) for tiling in CANDIDATES}
        _measured[key] = min(CANDIDATES, key=times.__getitem__)
        for tiling, milliseconds in times.items():
            print(f"head kernel, head [{columns}, {width}]: {milliseconds:8.3f} ms  {tiling}", flush=True)
    return _measured[key]
