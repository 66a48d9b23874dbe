"""Reduction of the head's tiles: log-prob, entropy, and how far off each row's guessed offset was.

    M = max m,  S = sum 2^(m - M) s,  U = sum 2^(m - M) (u + (m - M) s)        over the row's tiles, in a fixed order
    logp = ln 2 (y + m_y - M - log2 S),  H = ln 2 (log2 S - U / S)             m_y: the maximum of the target's tile

The letters are those of head_triton.py: m, s and u of a tile, y of the row's target, in powers of two.

Axes: R rows of a chunk (docs/notation.md).
"""

# Kernels are typed by their launches.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

import math

import triton
import triton.language as tl
from torch import Tensor

from thresher.kernels.head_tiling import BFLOAT16
from thresher.kernels.registry import Specialisation

SLACK = 30.0  # nats, 13 decades; bfloat16 and float32 have 38 on either side of 1
ROWS, TILES = 16, 64
_LN2 = tl.constexpr(math.log(2.0))
_NARROW = [
    f"{name}_ptr" for name in ("targets", "below_target", "offsets", "again", "logprobs", "entropy", "log_normaliser")
]


@triton.jit(do_not_specialize=["count", "tiles", "store", "parts_stride"], do_not_specialize_on_alignment=_NARROW)
def _reduce_kernel(
    parts_ptr,  # [3, tiles, R] fp32
    targets_ptr,  # [R] int64
    below_target_ptr,  # [R] fp32
    offsets_ptr,  # [R] fp32: read, and corrected where it was off; where store
    again_ptr,  # [tiles of AGAIN_ROWS rows] int32: set to 1 where an offset was corrected
    logprobs_ptr,  # [R] fp32
    entropy_ptr,  # [R] fp32
    log_normaliser_ptr,  # [R] fp32: log(sum e), written where store
    count,  # R
    tiles,
    store,  # 0 or 1
    parts_stride,  # tiles x R
    SLACK: tl.constexpr,
    AGAIN_ROWS: tl.constexpr,
    HEAD_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    present = row < count
    part = tl.arange(0, TILES)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    for start in range(0, tiles, TILES):
        tile = start + part
        inside = (tile < tiles)[:, None] & present[None, :]
        m = tl.load(parts_ptr + tile.to(tl.int64)[:, None] * count + row[None, :], mask=inside, other=float("-inf"))
        highest = tl.maximum(highest, tl.max(m, 0))
    total = tl.zeros((ROWS,), tl.float32)
    moment = tl.zeros((ROWS,), tl.float32)
    for start in range(0, tiles, TILES):
        tile = start + part
        inside = (tile < tiles)[:, None] & present[None, :]
        ptrs = parts_ptr + tile.to(tl.int64)[:, None] * count + row[None, :]
        below = tl.where(inside, tl.load(ptrs, mask=inside, other=0.0) - highest[None, :], 0.0)
        s = tl.load(ptrs + parts_stride.to(tl.int64), mask=inside, other=0.0)
        u = tl.load(ptrs + 2 * parts_stride.to(tl.int64), mask=inside, other=0.0)
        share = tl.exp2(below)
        total += tl.sum(share * s, 0)
        moment += tl.sum(share * (u + below * s), 0)
    log_total = tl.log2(total)
    target_tile = tl.load(targets_ptr + row, mask=present, other=0) // HEAD_COLUMNS
    m_target = tl.load(parts_ptr + target_tile * count + row, mask=present, other=0.0)
    y = tl.load(below_target_ptr + row, mask=present, other=0.0) + (m_target - highest)
    tl.store(logprobs_ptr + row, (y - log_total) * _LN2, mask=present)
    tl.store(entropy_ptr + row, (log_total - moment / total) * _LN2, mask=present)
    if store:
        offset = tl.load(offsets_ptr + row, mask=present, other=0.0)
        log_normaliser = ((highest - offset) + log_total) * _LN2
        # The negation catches a guess that is not a number, too.
        off = present & ~(tl.abs(log_normaliser) <= SLACK)
        # The true one, rounded: what rounding took from it stays in the normaliser.
        corrected = highest + log_total
        rest = ((highest - corrected) + log_total) * _LN2
        tl.store(offsets_ptr + row, corrected, mask=off)
        tl.store(log_normaliser_ptr + row, tl.where(off, rest, log_normaliser), mask=present)
        tl.store(again_ptr + tl.program_id(0) * ROWS // AGAIN_ROWS, 1, mask=tl.max(off.to(tl.int32), 0) == 1)


def launch_reduce(
    parts: Tensor,
    targets_R: Tensor,
    below_target_R: Tensor,
    offsets_R: Tensor,
    again: Tensor,
    logprobs_R: Tensor,
    entropy_R: Tensor,
    log_normaliser_R: Tensor,
    column_tiles: int,
    store: bool,
    head_columns: int,
    again_rows: int,
) -> None:
    """One launch of `_reduce_kernel`; its arguments are described there. again: int32, zeros. head_columns,
    again_rows: of a tile of the head, and of one that is worked on again."""
    count = len(targets_R)
    _reduce_kernel[(triton.cdiv(count, ROWS),)](
        parts,
        targets_R,
        below_target_R,
        offsets_R,
        again,
        logprobs_R,
        entropy_R,
        log_normaliser_R,
        count,
        column_tiles,
        int(store),
        column_tiles * count,
        SLACK=SLACK,
        AGAIN_ROWS=again_rows,
        HEAD_COLUMNS=head_columns,
        ROWS=ROWS,
        TILES=TILES,
    )


def specialisations() -> tuple[Specialisation, ...]:
    """Return the specialisations that the launcher asks for; the head's tiling makes no difference to the code."""
    types = {"targets_ptr": "*i64", "again_ptr": "*i32"}
    return (
        Specialisation(
            name="reduce",
            kernel=_reduce_kernel,
            signature=dict.fromkeys(("parts_ptr", *_NARROW), "*fp32")
            | types
            | dict.fromkeys(("count", "tiles", "store", "parts_stride"), "i32"),
            constants={
                "SLACK": SLACK,
                "AGAIN_ROWS": BFLOAT16.rows,
                "HEAD_COLUMNS": BFLOAT16.columns,
                "ROWS": ROWS,
                "TILES": TILES,
            },
            aligned=("parts_ptr",),
        ),
    )
