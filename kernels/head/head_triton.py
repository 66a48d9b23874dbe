"""LM head, log-prob and entropy in Triton: a matmul whose logits never reach memory.

    z = scale x W^T, one tile of [rows, columns] at a time, in float32 accumulators; a tile leaves behind, for each row,
    m = max z,  s = sum e^(z - m),  u = sum e^(z - m) (z - m),  and z_y where the target's column is its own
    M = max m,  S = sum e^(m - M) s,  U = sum e^(m - M) (u + (m - M) s)        over the row's tiles, in a fixed order
    logp = z_y - M - log S,  H = log S - U / S

The loss needs every p_v as well. It could be had from stored logits in a second pass; instead the tile stores, in the
operands' dtype, e_v = e^(z_v - offset), with an offset a row that only has to lie near log(sum e^z), since
p_v = e_v / sum e. It is guessed beforehand: log-sum-exp = z_y - logp, and the old log-prob is close to logp. Where the
guess turns out more than `SLACK` off, the row's tiles are computed again with the true one. So what is stored has the
precision of a probability and not of a logit, there is no elementwise pass over [rows, V], and the division by the
sum, being one number a row, goes to the narrow sides of the two matmuls that follow (loss.py).

One compiled kernel serves the loss and the log-prob alike, so that equal rows give equal bits: whether a tile is
stored, and whether it is wanted at all, are values and not constants.

Deliberately absent: float16 (a gradient's range is not its) and float64; both are the torch backend's.

Axes: R rows of a chunk, V vocabulary (columns that exist), H hidden width (docs/notation.md).
"""

# Kernels are typed by their launches.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from thresher.kernels.head.tiling import BFLOAT16, FLOAT32, HOPPER, Tiling, tiling_for
from thresher.kernels.launch.registry import Specialisation

INTERPRETED = bool(triton.knobs.runtime.interpret)
SLACK = 30.0  # nats, 13 decades; bfloat16 and float32 have 38 on either side of 1
REDUCE_ROWS, REDUCE_TILES = 16, 64


# A length must not make a kernel be compiled anew: neither its value nor the alignment that it gives a slice.
_HEAD_NARROW = ["targets_ptr", "wanted_ptr", "offsets_ptr", "target_logits_ptr"]
_REDUCE_NARROW = ["target_logits_ptr", "offsets_ptr", "again_ptr", "logprobs_ptr", "entropy_ptr", "log_normaliser_ptr"]


@triton.jit(do_not_specialize=["count", "store", "parts_stride"], do_not_specialize_on_alignment=_HEAD_NARROW)
def _head_kernel(
    rows_ptr,  # [R, H] bf16 or fp32, dense
    head_ptr,  # [V, H] the same
    targets_ptr,  # [R] int64
    wanted_ptr,  # [row tiles] int32, 0: skip
    offsets_ptr,  # [R] fp32, read where store
    target_logits_ptr,  # [R] fp32
    parts_ptr,  # [3, column tiles, R] fp32: m, s, u
    exps_ptr,  # [R, V] the rows' dtype, written where store
    count,  # R
    store,  # 0 or 1
    parts_stride,  # column tiles x R
    scale,  # 1 / temperature
    head_stride_v,
    head_stride_h,
    exps_stride_r,
    V: tl.constexpr,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # Neighbouring programs share their columns: the head streams through once, the chunk's rows stay in the cache.
    row_tiles = tl.cdiv(count, ROWS)
    row_tile = tl.program_id(0) % row_tiles
    column_tile = tl.program_id(0) // row_tiles
    if tl.load(wanted_ptr + row_tile) == 0:
        return
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    # What lies outside is read as the last that lies inside, and left out below: no masks in the loop.
    row_inside = tl.minimum(row, count - 1).to(tl.int64)
    column_inside = tl.minimum(column, V - 1).to(tl.int64)
    depth = tl.arange(0, WIDTH)
    row_ptrs = rows_ptr + row_inside[:, None] * H + depth[None, :]
    head_ptrs = head_ptr + column_inside[None, :] * head_stride_v + depth[:, None] * head_stride_h
    logits = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, H, WIDTH):
        if H % WIDTH == 0:
            x = tl.load(row_ptrs)
            w = tl.load(head_ptrs)
        else:
            x = tl.load(row_ptrs, mask=depth[None, :] < H - start, other=0.0)
            w = tl.load(head_ptrs, mask=depth[:, None] < H - start, other=0.0)
        if UPCAST:
            x, w = x.to(tl.float32), w.to(tl.float32)
        logits = tl.dot(x, w, logits, input_precision="ieee")
        row_ptrs += WIDTH
        head_ptrs += WIDTH * head_stride_h

    # The second condition always holds; with it ptxas finds a schedule of 178 registers for sm_90 instead of 255.
    present = (row < count) & (column_tile * COLUMNS < V)
    exists = (column < V)[None, :]
    z = tl.where(exists, logits * scale, float("-inf"))
    m = tl.max(z, 1)
    target = tl.load(targets_ptr + row, mask=present, other=-1).to(tl.int32)
    here = (target >= column_tile * COLUMNS) & (target < (column_tile + 1) * COLUMNS)
    tl.store(target_logits_ptr + row, tl.sum(tl.where(column[None, :] == target[:, None], z, 0.0), 1), mask=here)
    below = z - m[:, None]
    e = tl.exp(below)
    parts = parts_ptr + column_tile.to(tl.int64) * count + row
    tl.store(parts, m, mask=present)
    tl.store(parts + parts_stride.to(tl.int64), tl.sum(e, 1), mask=present)
    tl.store(parts + 2 * parts_stride.to(tl.int64), tl.sum(tl.where(exists, e * below, 0.0), 1), mask=present)
    if store:
        shift = tl.exp(m - tl.load(offsets_ptr + row, mask=present, other=0.0))
        exps = exps_ptr + row.to(tl.int64)[:, None] * exps_stride_r + column[None, :]
        tl.store(exps, (e * shift[:, None]).to(exps_ptr.dtype.element_ty), mask=present[:, None] & exists)


@triton.jit(
    do_not_specialize=["count", "tiles", "store", "parts_stride"], do_not_specialize_on_alignment=_REDUCE_NARROW
)
def _reduce_kernel(
    parts_ptr,  # [3, tiles, R] fp32
    target_logits_ptr,  # [R] fp32
    offsets_ptr,  # [R] fp32: read, and corrected where it was off; where store
    again_ptr,  # [row tiles of the head kernel] int32: set to 1 where an offset was corrected
    logprobs_ptr,  # [R] fp32
    entropy_ptr,  # [R] fp32
    log_normaliser_ptr,  # [R] fp32: log(sum e), written where store
    count,  # R
    tiles,
    store,  # 0 or 1
    parts_stride,  # tiles x R
    SLACK: tl.constexpr,
    HEAD_ROWS: tl.constexpr,
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
        share = tl.exp(below)
        total += tl.sum(share * s, 0)
        moment += tl.sum(share * (u + below * s), 0)
    log_total = tl.log(total)
    z_target = tl.load(target_logits_ptr + row, mask=present, other=0.0)
    tl.store(logprobs_ptr + row, (z_target - highest) - log_total, mask=present)
    tl.store(entropy_ptr + row, log_total - moment / total, mask=present)
    if store:
        offset = tl.load(offsets_ptr + row, mask=present, other=0.0)
        log_normaliser = (highest - offset) + log_total
        # The negation catches a guess that is not a number, too.
        off = present & ~(tl.abs(log_normaliser) <= SLACK)
        # The true one, rounded: what rounding took from it stays in the normaliser.
        corrected = highest + log_total
        tl.store(offsets_ptr + row, corrected, mask=off)
        tl.store(
            log_normaliser_ptr + row, tl.where(off, (highest - corrected) + log_total, log_normaliser), mask=present
        )
        tl.store(again_ptr + tl.program_id(0) * ROWS // HEAD_ROWS, 1, mask=tl.max(off.to(tl.int32), 0) == 1)


@dataclass(frozen=True, slots=True, eq=False)
class Exps:
    """What the loss needs of a chunk beyond its log-probs: p = exps / e^log_normaliser, row by row."""

    exps_RV: Tensor  # the operands' dtype; rows padded, so that stride(0) is a multiple of 64 elements
    log_normaliser_R: Tensor  # fp32


class TritonHead:
    """The kernels of one call with their workspace, for chunks of up to `rows` rows.

    lm_head_VH: [V, H] bf16 or fp32, the columns that exist, any strides.
    """

    def __init__(self, lm_head_VH: Tensor, temperature: float, rows: int) -> None:
        self.lm_head_VH = lm_head_VH
        self.scale = 1.0 / temperature
        self.tiling = tiling_for(lm_head_VH, lambda tiling: _time(lm_head_VH, rows, tiling))
        self.column_tiles = triton.cdiv(lm_head_VH.shape[0], self.tiling.columns)
        self.parts = lm_head_VH.new_empty(3 * self.column_tiles * rows, dtype=torch.float32)
        self.rows = rows
        self.exps_stride = triton.cdiv(lm_head_VH.shape[0], 64) * 64
        self.exps_MV: Tensor | None = None

    def logprobs(self, rows_RH: Tensor, targets_R: Tensor) -> tuple[Tensor, Tensor]:
        """(log-prob of the target, entropy) of each row, fp32. rows_RH: dense. targets_R: int64."""
        logprobs_R, entropy_R, _ = self._run(rows_RH, targets_R, None)
        return logprobs_R, entropy_R

    def exps(self, rows_RH: Tensor, targets_R: Tensor, guess_R: Tensor | None) -> tuple[Tensor, Tensor, Exps]:
        """`logprobs`, and exps. guess_R: about what the log-probs will be, None for no idea; it decides no result
        beyond its last bits. The exps are valid until the next chunk."""
        if self.exps_MV is None:
            exps_MV = self.lm_head_VH.new_empty((self.rows, self.exps_stride))
            self.exps_MV = exps_MV[:, : len(self.lm_head_VH)]
        z_target_R = torch.linalg.vecdot(rows_RH, self.lm_head_VH.index_select(0, targets_R)).float() * self.scale
        offsets_R = z_target_R if guess_R is None else z_target_R - guess_R
        logprobs_R, entropy_R, exps = self._run(rows_RH, targets_R, offsets_R)
        assert exps is not None
        return logprobs_R, entropy_R, exps

    def _run(self, rows_RH: Tensor, targets_R: Tensor, offsets_R: Tensor | None) -> tuple[Tensor, Tensor, Exps | None]:
        count, tiling, store = rows_RH.shape[0], self.tiling, offsets_R is not None
        row_tiles = triton.cdiv(count, tiling.rows)
        vectors_4R = self.parts.new_empty((4, count))
        logprobs_R, entropy_R, target_logits_R, log_normaliser_R = vectors_4R
        wanted = torch.ones(row_tiles, dtype=torch.int32, device=rows_RH.device)
        again = torch.zeros_like(wanted)
        # Where nothing is stored the kernels read neither offsets nor exps; any pointer does.
        offsets_R = log_normaliser_R if offsets_R is None else offsets_R
        exps_RV = rows_RH if self.exps_MV is None else self.exps_MV[:count]

        def multiply(row_tiles_wanted: Tensor) -> None:
            launch_head(
                rows_RH,
                self.lm_head_VH,
                targets_R,
                row_tiles_wanted,
                offsets_R,
                target_logits_R,
                self.parts,
                exps_RV,
                self.exps_stride,
                store,
                self.scale,
                tiling,
            )

        multiply(wanted)
        _reduce_kernel[(triton.cdiv(count, REDUCE_ROWS),)](
            self.parts,
            target_logits_R,
            offsets_R,
            again,
            logprobs_R,
            entropy_R,
            log_normaliser_R,
            count,
            self.column_tiles,
            int(store),
            self.column_tiles * count,
            SLACK=SLACK,
            HEAD_ROWS=tiling.rows,
            ROWS=REDUCE_ROWS,
            TILES=REDUCE_TILES,
        )
        if not store:
            return logprobs_R, entropy_R, None
        # Nearly always a launch that finds nothing to do; asking the GPU whether there is would cost more.
        multiply(again)
        return logprobs_R, entropy_R, Exps(exps_RV, log_normaliser_R)


def launch_head(
    rows_RH: Tensor,
    lm_head_VH: Tensor,
    targets_R: Tensor,
    wanted: Tensor,
    offsets_R: Tensor,
    target_logits_R: Tensor,
    parts: Tensor,
    exps_RV: Tensor,
    exps_stride: int,
    store: bool,
    scale: float,
    tiling: Tiling,
) -> None:
    """One launch of `_head_kernel`; its arguments are described there. exps_stride does not depend on whether anything
    is stored, so that the log-prob and the loss run the same binary."""
    assert rows_RH.is_contiguous() and targets_R.is_contiguous() and offsets_R.is_contiguous()
    count, (columns, width) = rows_RH.shape[0], lm_head_VH.shape
    grid = (triton.cdiv(count, tiling.rows) * triton.cdiv(columns, tiling.columns),)
    _head_kernel[grid](
        rows_RH,
        lm_head_VH,
        targets_R,
        wanted,
        offsets_R,
        target_logits_R,
        parts,
        exps_RV,
        count,
        int(store),
        triton.cdiv(columns, tiling.columns) * count,
        scale,
        lm_head_VH.stride(0),
        lm_head_VH.stride(1),
        exps_stride,
        V=columns,
        H=width,
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        WIDTH=tiling.width,
        UPCAST=INTERPRETED,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )


def _time(lm_head_VH: Tensor, rows: int, tiling: Tiling) -> float:
    """Median milliseconds of one launch that stores, on random rows; infinity where the tiling does not fit."""
    columns, width = lm_head_VH.shape
    rows_RH = torch.randn(rows, width, device=lm_head_VH.device).to(lm_head_VH.dtype)
    targets_R = torch.zeros(rows, dtype=torch.int64, device=lm_head_VH.device)
    vectors_2R = torch.zeros(2, rows, device=lm_head_VH.device)
    parts = vectors_2R.new_empty(3 * triton.cdiv(columns, tiling.columns) * rows)
    exps_RV = rows_RH.new_empty(rows, triton.cdiv(columns, 64) * 64)
    wanted = torch.ones(triton.cdiv(rows, tiling.rows), dtype=torch.int32, device=lm_head_VH.device)

    def launch() -> None:
        launch_head(
            rows_RH,
            lm_head_VH,
            targets_R,
            wanted,
            vectors_2R[0],
            vectors_2R[1],
            parts,
            exps_RV,
            exps_RV.stride(0),
            True,
            1.0,
            tiling,
        )

    try:
        return float(triton.testing.do_bench(launch, warmup=5, rep=50, return_mode="median"))
    except triton.runtime.errors.OutOfResources:
        return float("inf")


def specialisations() -> tuple[Specialisation, ...]:
    """What the launchers above ask for, at Qwen2.5-0.5B's shape, and once with an odd width and vocabulary."""
    heads = [
        _head_specialisation(dtype, tiling, columns, width, capabilities)
        for dtype, tiling, columns, width, capabilities in (
            (torch.bfloat16, BFLOAT16, 151_936, 896, (80,)),
            (torch.bfloat16, HOPPER, 151_936, 896, (90,)),
            (torch.bfloat16, BFLOAT16, 151_665, 900, (80, 90)),
            (torch.float32, FLOAT32, 151_936, 896, (80, 90)),
            (torch.float32, FLOAT32, 151_665, 900, (80, 90)),
        )
    ]
    return (*heads, _reduce_specialisation())


def _head_specialisation(
    dtype: torch.dtype, tiling: Tiling, columns: int, width: int, capabilities: tuple[int, ...]
) -> Specialisation:
    strides = ("exps_stride_r", "head_stride_v") if width % 16 == 0 else ("exps_stride_r",)
    pointer = "*bf16" if dtype == torch.bfloat16 else "*fp32"
    signature = {
        "rows_ptr": pointer,
        "head_ptr": pointer,
        "targets_ptr": "*i64",
        "wanted_ptr": "*i32",
        "offsets_ptr": "*fp32",
        "target_logits_ptr": "*fp32",
        "parts_ptr": "*fp32",
        "exps_ptr": pointer,
        "count": "i32",
        "store": "i32",
        "parts_stride": "i32",
        "scale": "fp32",
        "head_stride_v": "i32",
        "exps_stride_r": "i32",
    }
    constants = {
        "head_stride_h": 1,
        "V": columns,
        "H": width,
        "ROWS": tiling.rows,
        "COLUMNS": tiling.columns,
        "WIDTH": tiling.width,
        "UPCAST": False,
    }
    return Specialisation(
        name=f"head {pointer[1:]} V {columns:,} H {width:,}",
        kernel=_head_kernel,
        signature=signature,
        constants=constants,
        aligned=("rows_ptr", "head_ptr", "parts_ptr", "exps_ptr", *strides),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        tensor_cores=dtype == torch.bfloat16,
        capabilities=capabilities,
    )


def _reduce_specialisation() -> Specialisation:
    signature = dict.fromkeys(("parts_ptr", *_REDUCE_NARROW), "*fp32") | {"again_ptr": "*i32"}
    return Specialisation(
        name="reduce",
        kernel=_reduce_kernel,
        signature=signature | dict.fromkeys(("count", "tiles", "store", "parts_stride"), "i32"),
        constants={"SLACK": SLACK, "HEAD_ROWS": BFLOAT16.rows, "ROWS": REDUCE_ROWS, "TILES": REDUCE_TILES},
        aligned=("parts_ptr",),
    )
