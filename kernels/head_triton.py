"""LM head, log-prob and entropy in Triton: a matmul whose logits never reach memory.

    z = x W^T / (temperature ln 2): logits in units of ln 2, so that e^logit = 2^z is one instruction.
    A tile of [rows, columns] of x W^T stores, for each row, m = max z,  s = sum 2^(z - m),
    u = sum 2^(z - m) (z - m),  and y = z_y - m if it contains the target's column.
    M = max m,  S = sum 2^(m - M) s,  U = sum 2^(m - M) (u + (m - M) s)        over the row's tiles, in a fixed order
    logp = ln 2 (y + m_y - M - log2 S),  H = ln 2 (log2 S - U / S)             m_y: the maximum of the target's tile
    e_v = 2^(z_v - offset), for the loss: p_v = e_v / sum e                    stored in the operands' dtype

The offset has to be near log2(sum 2^z). It is guessed from the old log-prob; if the guess is more than `SLACK` off,
the row's tiles are computed again with the true one. z - m is one fused multiply-add, and every sum is relative to the
stored m, so the rounding error of m cancels. Columns up to the next multiple of COLUMN_MULTIPLE are stored with e = 0.
One binary serves loss and log-prob, so that equal rows give equal bits. float16 and float64: the torch backend.

Axes: R rows of a chunk, V vocabulary (columns that exist), H hidden width (docs/notation.md).
"""

# Kernels are typed by their launches.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

import math
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from thresher.common.files import Unwritable
from thresher.kernels.autotune_cache import FOLDER, candidates, record, tiling_for
from thresher.kernels.head_tiling import BFLOAT16, FLOAT32, HOPPER, Tiling, again_tiling, processors
from thresher.kernels.operands import COLUMN_MULTIPLE, stored_columns
from thresher.kernels.registry import Specialisation

INTERPRETED = bool(triton.knobs.runtime.interpret)
_MULTIPLE = tl.constexpr(COLUMN_MULTIPLE)
LOG2_E = 1 / math.log(2.0)
SLACK = 30.0  # nats, 13 decades; bfloat16 and float32 have 38 on either side of 1
REDUCE_ROWS, REDUCE_TILES = 16, 64
_LN2 = tl.constexpr(math.log(2.0))

# A length must not cause a recompilation, neither by its value nor by the alignment of a slice of that length.
LENGTHS, NARROW = ["count", "store", "parts_stride"], ["targets_ptr", "offsets_ptr", "below_target_ptr"]
REDUCE_NARROW = [
    f"{name}_ptr" for name in ("targets", "below_target", "offsets", "again", "logprobs", "entropy", "log_normaliser")
]


@triton.jit
def _exp2(x, INTERPRETED: tl.constexpr):
    """Compute 2^x, with 0 for results under 2^-126, which saves three instructions around the one that computes it."""
    if INTERPRETED:
        return tl.exp2(x)
    return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _logits(
    rows_ptr,
    head_ptr,
    row_tile,
    column_tile,
    count,
    head_stride_v,
    head_stride_h,
    V: tl.constexpr,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Compute one tile of x W^T, fp32. Indices out of range are clamped, so the loop needs no masks."""
    row = tl.minimum(row_tile * ROWS + tl.arange(0, ROWS), count - 1).to(tl.int64)
    column = tl.minimum(column_tile * COLUMNS + tl.arange(0, COLUMNS), V - 1).to(tl.int64)
    depth = tl.arange(0, WIDTH)
    row_ptrs = rows_ptr + row[:, None] * H + depth[None, :]
    head_ptrs = head_ptr + column[None, :] * head_stride_v + depth[:, None] * head_stride_h
    logits = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, H, WIDTH):
        if H % WIDTH == 0:
            x = tl.load(row_ptrs)
            w = tl.load(head_ptrs)
        else:
            x = tl.load(row_ptrs, mask=depth[None, :] < H - start, other=0.0)
            w = tl.load(head_ptrs, mask=depth[:, None] < H - start, other=0.0)
        if INTERPRETED:
            x, w = x.to(tl.float32), w.to(tl.float32)
        logits = tl.dot(x, w, logits, input_precision="ieee")
        row_ptrs += WIDTH
        head_ptrs += WIDTH * head_stride_h
    return logits


@triton.jit
def _store_exps(exps_ptr, e, row, column, present, exps_stride_r, V: tl.constexpr):
    # The mask is constant over eight columns; otherwise the stores would be of single numbers.
    exps = exps_ptr + row.to(tl.int64)[:, None] * exps_stride_r + column[None, :]
    stored = column < (V + _MULTIPLE - 1) // _MULTIPLE * _MULTIPLE
    tl.store(exps, e.to(exps_ptr.dtype.element_ty), mask=present[:, None] & stored[None, :])


@triton.jit
def _leave_columns(
    logits,
    m,
    shift,
    row,
    first,
    target,
    below_target_ptr,
    exps_ptr,
    count,
    store,
    scale,
    exps_stride_r,
    V: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Return (s, u) of the columns from `first` on; store their exps, and y of the targets among them."""
    lane = tl.arange(0, COLUMNS)
    below = tl.fma(logits, scale, -m[:, None])
    if first + COLUMNS > V:
        tl.debug_barrier()  # keeps this a branch, which one tile of a row takes, instead of a select in all of them
        below = tl.where((lane < V - first)[None, :], below, -1000.0)  # 2^-1000 is 0, and so is 0 times -1000
    here = (target >= first) & (target < first + COLUMNS)
    # Few blocks of columns contain a target.
    if tl.max(here.to(tl.int32), 0) > 0:
        y = tl.sum(tl.where(lane[None, :] == (target - first)[:, None], below, 0.0), 1)
        tl.store(below_target_ptr + row, y, mask=here)
    e = _exp2(below, INTERPRETED)
    s = tl.sum(e, 1)
    u = tl.sum(e * below, 1)
    if store:
        _store_exps(exps_ptr, e * shift[:, None], row, first + lane, row < count, exps_stride_r, V)
    return s, u


@triton.jit
def _halves(tile):
    """Split a tile into left and right columns; a thread processes one half, and keeps only logits of the other."""
    rows: tl.constexpr = tile.shape[0]
    columns: tl.constexpr = tile.shape[1]
    return tl.split(tl.permute(tl.reshape(tile, (rows, 2, columns // 2)), (0, 2, 1)))


@triton.jit
def leave_tile(
    logits,
    row_tile,
    column_tile,
    targets_ptr,
    offsets_ptr,
    below_target_ptr,
    parts_ptr,
    exps_ptr,
    count,
    store,
    parts_stride,
    scale,
    exps_stride_r,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Store the partial results of a tile of x W^T.

    Columns beyond V may have any value that does not exceed the row's maximum over the other columns."""
    row = row_tile * ROWS + tl.arange(0, ROWS)
    first = column_tile * COLUMNS
    present = row < count
    target = tl.load(targets_ptr + row, mask=present, other=-1).to(tl.int32)
    m = tl.max(logits, 1) * scale
    shift = tl.zeros((ROWS,), tl.float32)
    if store:
        shift = tl.exp2(m - tl.load(offsets_ptr + row, mask=present, other=0.0))
    if COLUMNS > 128:
        left, right = _halves(logits)
        s, u = _leave_columns(
            left, m, shift, row, first, target, below_target_ptr, exps_ptr, count, store, scale, exps_stride_r,
            V, COLUMNS // 2, INTERPRETED,
        )  # fmt: skip
        more_s, more_u = _leave_columns(
            right, m, shift, row, first + COLUMNS // 2, target, below_target_ptr, exps_ptr, count, store, scale,
            exps_stride_r, V, COLUMNS // 2, INTERPRETED,
        )  # fmt: skip
        s += more_s
        u += more_u
    else:
        s, u = _leave_columns(
            logits, m, shift, row, first, target, below_target_ptr, exps_ptr, count, store, scale, exps_stride_r,
            V, COLUMNS, INTERPRETED,
        )  # fmt: skip
    parts = parts_ptr + column_tile.to(tl.int64) * count + row
    tl.store(parts, m, mask=present)
    tl.store(parts + parts_stride.to(tl.int64), s, mask=present)
    tl.store(parts + 2 * parts_stride.to(tl.int64), u, mask=present)


@triton.jit(do_not_specialize=LENGTHS, do_not_specialize_on_alignment=NARROW)
def _head_kernel(
    rows_ptr,  # [R, H] bf16 or fp32, dense
    head_ptr,  # [V, H] the same
    targets_ptr,  # [R] int64
    offsets_ptr,  # [R] fp32, read if store
    below_target_ptr,  # [R] fp32: y
    parts_ptr,  # [3, column tiles, R] fp32: m, s, u
    exps_ptr,  # [R, V] the rows' dtype, columns padded; written if store
    count,  # R
    store,  # 0 or 1
    parts_stride,  # column tiles x R
    scale,  # 1 / (temperature ln 2)
    head_stride_v,
    head_stride_h,
    exps_stride_r,
    V: tl.constexpr,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    # Neighbouring programs share their columns: the head is read once, the chunk's rows stay in the cache.
    row_tiles = tl.cdiv(count, ROWS)
    row_tile = tl.program_id(0) % row_tiles
    column_tile = tl.program_id(0) // row_tiles
    logits = _logits(
        rows_ptr, head_ptr, row_tile, column_tile, count, head_stride_v, head_stride_h,
        V, H, ROWS, COLUMNS, WIDTH, INTERPRETED,
    )  # fmt: skip
    leave_tile(
        logits, row_tile, column_tile, targets_ptr, offsets_ptr, below_target_ptr, parts_ptr, exps_ptr, count, store,
        parts_stride, scale, exps_stride_r, V, ROWS, COLUMNS, INTERPRETED,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["wanted_ptr", "offsets_ptr"])
def _again_kernel(
    rows_ptr,  # [R, H] bf16 or fp32, dense
    head_ptr,  # [V, H] the same
    wanted_ptr,  # [row tiles] int32, 0: skip
    offsets_ptr,  # [R] fp32
    exps_ptr,  # [R, V] the rows' dtype, columns padded
    count,  # R
    scale,
    head_stride_v,
    head_stride_h,
    exps_stride_r,
    V: tl.constexpr,
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    for row_tile in range(tl.cdiv(count, ROWS)):
        if tl.load(wanted_ptr + row_tile) != 0:
            row = row_tile * ROWS + tl.arange(0, ROWS)
            offset = tl.load(offsets_ptr + row, mask=row < count, other=0.0)
            for column_tile in range(tl.program_id(0), tl.cdiv(V, COLUMNS), tl.num_programs(0)):
                logits = _logits(
                    rows_ptr, head_ptr, row_tile, column_tile, count, head_stride_v, head_stride_h,
                    V, H, ROWS, COLUMNS, WIDTH, INTERPRETED,
                )  # fmt: skip
                column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
                e = _exp2(tl.fma(logits, scale, -offset[:, None]), INTERPRETED)
                e = tl.where((column < V)[None, :], e, 0.0)
                _store_exps(exps_ptr, e, row, column, row < count, exps_stride_r, V)


@triton.jit(do_not_specialize=["count", "tiles", "store", "parts_stride"], do_not_specialize_on_alignment=REDUCE_NARROW)
def _reduce_kernel(
    parts_ptr,  # [3, tiles, R] fp32
    targets_ptr,  # [R] int64
    below_target_ptr,  # [R] fp32
    offsets_ptr,  # [R] fp32: read, and corrected if it was off; if store
    again_ptr,  # [tiles of AGAIN_ROWS rows] int32: set to 1 if an offset was corrected
    logprobs_ptr,  # [R] fp32
    entropy_ptr,  # [R] fp32
    log_normaliser_ptr,  # [R] fp32: log(sum e), written if store
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
        # The negation also catches a guess that is NaN.
        off = present & ~(tl.abs(log_normaliser) <= SLACK)
        # The true offset, rounded: its rounding error stays in the normaliser.
        corrected = highest + log_total
        rest = ((highest - corrected) + log_total) * _LN2
        tl.store(offsets_ptr + row, corrected, mask=off)
        tl.store(log_normaliser_ptr + row, tl.where(off, rest, log_normaliser), mask=present)
        tl.store(again_ptr + tl.program_id(0) * ROWS // AGAIN_ROWS, 1, mask=tl.max(off.to(tl.int32), 0) == 1)


def launch_head(
    rows_RH: Tensor,
    lm_head_VH: Tensor,
    targets_R: Tensor,
    offsets_R: Tensor,
    below_target_R: Tensor,
    parts: Tensor,
    exps_RV: Tensor,
    exps_stride: int,
    store: bool,
    scale: float,
    tiling: Tiling,
) -> None:
    """Launch `_head_kernel`.

    exps_stride does not depend on whether anything is stored, so that log-prob and loss run the same binary."""
    count, columns = rows_RH.shape[0], lm_head_VH.shape[0]
    _head_kernel[(triton.cdiv(count, tiling.rows) * triton.cdiv(columns, tiling.columns),)](
        rows_RH,
        lm_head_VH,
        targets_R,
        offsets_R,
        below_target_R,
        parts,
        exps_RV,
        count,
        int(store),
        triton.cdiv(columns, tiling.columns) * count,
        scale,
        *lm_head_VH.stride(),
        exps_stride,
        **tile_constants(tiling, *lm_head_VH.shape),
        **tiling.launch,
    )


def launch_again(
    rows_RH: Tensor, lm_head_VH: Tensor, wanted: Tensor, offsets_R: Tensor, exps_RV: Tensor, scale: float
) -> None:
    """Launch `_again_kernel`, one program per multiprocessor. wanted: [tiles of `again_tiling`] int32."""
    tiling = again_tiling(lm_head_VH.dtype)
    _again_kernel[(processors(rows_RH.device),)](
        rows_RH,
        lm_head_VH,
        wanted,
        offsets_R,
        exps_RV,
        rows_RH.shape[0],
        scale,
        *lm_head_VH.stride(),
        exps_RV.stride(0),
        **tile_constants(tiling, *lm_head_VH.shape),
        **tiling.launch,
    )


def tile_constants(tiling: Tiling, columns: int, width: int) -> dict[str, int | None]:
    """Return the `tl.constexpr` arguments of a kernel that computes tiles of the head."""
    return {
        "V": columns,
        "H": width,
        "ROWS": tiling.rows,
        "COLUMNS": tiling.columns,
        "WIDTH": tiling.width,
        "INTERPRETED": INTERPRETED,
    }


def launch_reduce(
    parts: Tensor,
    targets_R: Tensor,
    below_target_R: Tensor,
    offsets_R: Tensor,
    again: Tensor,
    results: tuple[Tensor, Tensor, Tensor],
    column_tiles: int,
    store: bool,
    head_columns: int,
    again_rows: int,
) -> None:
    """Launch `_reduce_kernel`. again: int32, zeros. results: log-probs, entropies, log-normalisers."""
    count = len(targets_R)
    sizes = (count, column_tiles, int(store), column_tiles * count)
    tile = {"HEAD_COLUMNS": head_columns, "AGAIN_ROWS": again_rows, "ROWS": REDUCE_ROWS, "TILES": REDUCE_TILES}
    grid = (triton.cdiv(count, REDUCE_ROWS),)
    _reduce_kernel[grid](parts, targets_R, below_target_R, offsets_R, again, *results, *sizes, SLACK=SLACK, **tile)


@dataclass(frozen=True, slots=True, eq=False)
class Exps:
    """Exponentials of a chunk, which the loss needs with the log-probs: p = exps / e^log_normaliser, row by row."""

    exps_RV: Tensor  # the operands' dtype; all stored columns, those from V on are 0
    log_normaliser_R: Tensor  # fp32


class TritonHead:
    """The kernels of one call and their workspace, for chunks of up to `rows` rows.

    lm_head_VH: [V, H] bf16 or fp32, the columns that exist, any strides.
    """

    def __init__(self, lm_head_VH: Tensor, temperature: float, rows: int) -> None:
        self.lm_head_VH = lm_head_VH
        self.scale = LOG2_E / temperature
        self.tiling = tiling_for(lm_head_VH)
        self.column_tiles = triton.cdiv(lm_head_VH.shape[0], self.tiling.columns)
        self.parts = lm_head_VH.new_empty(3 * self.column_tiles * rows, dtype=torch.float32)
        self.rows, self.again_rows = rows, again_tiling(lm_head_VH.dtype).rows
        self.exps_stride = stored_columns(lm_head_VH.shape[0])
        self.exps_MV: Tensor | None = None

    def logprobs(self, rows_RH: Tensor, targets_R: Tensor) -> tuple[Tensor, Tensor]:
        """Return (log-prob of the target, entropy) of each row, fp32. rows_RH: dense. targets_R: int64."""
        logprobs_R, entropy_R, _ = self._run(rows_RH, targets_R, None)
        return logprobs_R, entropy_R

    def exps(self, rows_RH: Tensor, targets_R: Tensor, guess_R: Tensor | None) -> tuple[Tensor, Tensor, Exps]:
        """Compute `logprobs` and the exps, which are valid until the next chunk.

        guess_R: an estimate of the log-probs, None for none; it changes at most the last bits of a result."""
        if self.exps_MV is None:
            self.exps_MV = self.lm_head_VH.new_empty((self.rows, self.exps_stride))
        z_target_R = torch.linalg.vecdot(rows_RH, self.lm_head_VH.index_select(0, targets_R)).float() * self.scale
        offsets_R = z_target_R if guess_R is None else z_target_R - guess_R * LOG2_E
        logprobs_R, entropy_R, exps = self._run(rows_RH, targets_R, offsets_R)
        assert exps is not None
        return logprobs_R, entropy_R, exps

    def _run(self, rows_RH: Tensor, targets_R: Tensor, offsets_R: Tensor | None) -> tuple[Tensor, Tensor, Exps | None]:
        count, store = rows_RH.shape[0], offsets_R is not None
        logprobs_R, entropy_R, below_target_R, log_normaliser_R = self.parts.new_empty((4, count))
        again = torch.zeros(triton.cdiv(count, self.again_rows), dtype=torch.int32, device=rows_RH.device)
        # If nothing is stored, the kernels access neither offsets nor exps; any pointer will do.
        offsets_R = log_normaliser_R if offsets_R is None else offsets_R
        exps_RV = rows_RH if self.exps_MV is None else self.exps_MV[:count]
        head_VH, stride, tiling = self.lm_head_VH, self.exps_stride, self.tiling
        tile_results = (below_target_R, self.parts, exps_RV, stride, store)
        launch_head(rows_RH, head_VH, targets_R, offsets_R, *tile_results, self.scale, tiling)
        results = (logprobs_R, entropy_R, log_normaliser_R)
        sizes = (self.column_tiles, store, tiling.columns, self.again_rows)
        launch_reduce(self.parts, targets_R, below_target_R, offsets_R, again, results, *sizes)
        if not store:
            return logprobs_R, entropy_R, None
        # This launch almost never has work to do, but checking that on the host would cost more.
        launch_again(rows_RH, self.lm_head_VH, again, offsets_R, exps_RV, self.scale)
        return logprobs_R, entropy_R, Exps(exps_RV, log_normaliser_R)


def measure_tilings(lm_head_VH: Tensor, rows: int) -> None:
    """Time the candidates for this head with chunks of `rows` rows, print the times, and store the fastest."""
    columns, width = lm_head_VH.shape
    times = {tiling: _time(lm_head_VH, rows, tiling) for tiling in candidates(lm_head_VH)}
    for tiling, milliseconds in times.items():
        print(f"head kernel, {rows} rows, head [{columns}, {width}]: {milliseconds:8.3f} ms  {tiling}", flush=True)
    try:
        print(f"stored the fastest in {record(lm_head_VH, rows, times)}", flush=True)
    except (Unwritable, ValueError) as error:  # a system folder, for example; the call itself can go on
        print(
            f"the fastest is kept for this process only ({error}); set {FOLDER} to a folder to store it in", flush=True
        )


def _time(lm_head_VH: Tensor, rows: int, tiling: Tiling) -> float:
    """Return the median milliseconds of one launch that stores, on random rows; infinity if the tiling does not fit."""
    columns, width = lm_head_VH.shape
    rows_RH = torch.randn(rows, width, device=lm_head_VH.device).to(lm_head_VH.dtype)
    targets_R = torch.randint(columns, (rows,), device=lm_head_VH.device)
    offsets_R, below_target_R = rows_RH.new_zeros((2, rows), dtype=torch.float32)
    parts = rows_RH.new_empty(3 * triton.cdiv(columns, tiling.columns) * rows, dtype=torch.float32)
    exps_RV = rows_RH.new_empty((rows, stored_columns(columns)))

    def call() -> None:
        stride = exps_RV.stride(0)
        tile_results = (below_target_R, parts, exps_RV, stride, True)
        launch_head(rows_RH, lm_head_VH, targets_R, offsets_R, *tile_results, LOG2_E, tiling)

    try:
        return float(triton.testing.do_bench(call, warmup=5, rep=50, return_mode="median"))
    except (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError):
        return math.inf


def specialisations() -> tuple[Specialisation, ...]:
    """Return the specialisations that the launchers above request.

    They cover the trainer's vocabulary, Qwen2.5's head as it is stored, Qwen3.5's, and an odd width."""
    heads = [
        _head_specialisation(dtype, tiling, columns, width, capabilities)
        for dtype, tiling, columns, width, capabilities in (
            (torch.bfloat16, BFLOAT16, 151_665, 1536, (80,)),
            (torch.bfloat16, HOPPER, 151_665, 1536, (90,)),
            (torch.bfloat16, BFLOAT16, 151_936, 896, (80,)),
            (torch.bfloat16, HOPPER, 151_936, 896, (90,)),
            (torch.bfloat16, BFLOAT16, 248_320, 1024, (80,)),
            (torch.bfloat16, HOPPER, 248_320, 1024, (90,)),
            (torch.bfloat16, BFLOAT16, 151_665, 900, (80, 90)),
            (torch.float32, FLOAT32, 151_665, 896, (80, 90)),
            (torch.float32, FLOAT32, 151_665, 900, (80, 90)),
        )
    ]
    again = [_again_specialisation(dtype, 151_665, 1536) for dtype in (torch.bfloat16, torch.float32)]
    return (*heads, *again, _reduce_specialisation())


# Types of a tile's results and of its scalar arguments.
TILE_TYPES = {
    "targets_ptr": "*i64",
    "offsets_ptr": "*fp32",
    "below_target_ptr": "*fp32",
    "parts_ptr": "*fp32",
    "count": "i32",
    "store": "i32",
    "parts_stride": "i32",
    "scale": "fp32",
    "exps_stride_r": "i32",
}


def _head_specialisation(
    dtype: torch.dtype, tiling: Tiling, columns: int, width: int, capabilities: tuple[int, ...]
) -> Specialisation:
    pointer = "*bf16" if dtype == torch.bfloat16 else "*fp32"
    stride = ("head_stride_v",) if width % 16 == 0 else ()
    return Specialisation(
        name=f"head {pointer[1:]} V {columns:,} H {width:,}",
        kernel=_head_kernel,
        signature=TILE_TYPES | {"head_stride_v": "i32"} | dict.fromkeys(("rows_ptr", "head_ptr", "exps_ptr"), pointer),
        constants={"head_stride_h": 1, **tile_constants(tiling, columns, width), "INTERPRETED": False},
        aligned=("rows_ptr", "head_ptr", "parts_ptr", "exps_ptr", "exps_stride_r", *stride),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        tensor_cores=dtype == torch.bfloat16,
        capabilities=capabilities,
    )


def _again_specialisation(dtype: torch.dtype, columns: int, width: int) -> Specialisation:
    like = _head_specialisation(dtype, again_tiling(dtype), columns, width, (80, 90))
    absent = ("targets_ptr", "below_target_ptr", "parts_ptr", "store", "parts_stride")
    return replace(
        like,
        name=like.name.replace("head", "again", 1),
        kernel=_again_kernel,
        signature={name: kind for name, kind in like.signature.items() if name not in absent} | {"wanted_ptr": "*i32"},
        aligned=tuple(name for name in like.aligned if name != "parts_ptr"),
    )


def _reduce_specialisation() -> Specialisation:
    """Return the specialisation of `_reduce_kernel`, whose code does not depend on the head's tiling."""
    types = {"targets_ptr": "*i64", "again_ptr": "*i32"}
    return Specialisation(
        name="reduce",
        kernel=_reduce_kernel,
        signature=dict.fromkeys(("parts_ptr", *REDUCE_NARROW), "*fp32")
        | types
        | dict.fromkeys(("count", "tiles", "store", "parts_stride"), "i32"),
        constants={
            "SLACK": SLACK,
            "AGAIN_ROWS": BFLOAT16.rows,
            "HEAD_COLUMNS": BFLOAT16.columns,
            "ROWS": REDUCE_ROWS,
            "TILES": REDUCE_TILES,
        },
        aligned=("parts_ptr",),
    )
