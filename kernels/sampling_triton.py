"""Sampling from hidden states in Triton: neither logits nor noise are written to memory, the head is read once.

    z = x W^T / T, a tile of [rows, columns] at a time, in float32 accumulators;    m = max z,  s = sum e^(z - m)
    argmax_v z[v] + g[v],  g = -log t,  t = -log u      =      argmax_v e^(z[v] - m) / t[v]
    logp = z[token] - M - log S,    M = max m,  S = sum e^(m - M) s       over a row's tiles, in a fixed order

Within a tile z and m are in units of ln 2, z log2(e), so that e^(z - m) is a multiply-add and one instruction.

A tile stores, for each row: its best score z + g (of a greedy row: z), that column, its z - m, m and s; a second kernel
reduces them. The second line is Gumbel-max (Maddison, Tarlow and Minka 2014) as a race. u has the bits of noise.py, so
the token is that of the torch path whenever the two best scores differ by more than rounding; of equal scores the
lowest id wins. The log-prob of a row with a logit that is not finite is NaN. sampling.py draws rows with filters.

Axes: B sequences that draw a token, H hidden width, V vocabulary (docs/notation.md).
"""

# Kernels are typed by their launches.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from dataclasses import dataclass
from math import gcd, log

import torch
import triton
import triton.language as tl
from torch import Tensor

from thresher.kernels.noise import DOWN, FACTORS_32, FACTORS_64, GOLDEN_32, GOLDEN_64, GOLDEN_LOWER, GOLDEN_UPPER, ONE
from thresher.kernels.registry import Specialisation

INTERPRETED = bool(triton.knobs.runtime.interpret)
REDUCE_ROWS, REDUCE_TILES, REDUCE_WARPS = 8, 256, 8
VOCABULARY = 151_665  # columns that Qwen2.5's tokenizer knows
QWEN35_VOCABULARY = 248_320


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawTiling:
    """Tile of a program: logits [rows, columns], computed over `width` of the hidden axis at a time.

    It draws from `parts` of the columns in turn. maxnreg: registers that a thread may have, None for no limit."""

    rows: int
    columns: int
    width: int
    num_warps: int
    num_stages: int
    parts: int = 1
    maxnreg: int | None = None

    @property
    def column_axis(self) -> int:
        """Return the axis of the columns in a tile.

        Hopper's instruction needs 64 rows in its left operand. With few sequences that is the head. With many it is the
        hidden states: a thread then has two or four rows of the tile, and need not keep a key and a maximum of each."""
        return 1 if self.rows >= 64 else 0


# By dtype and kind of GPU: the smallest that fits the batch, else the last. Hopper's largest is the fastest of 12 on
# an H200 (docs/internals/log.md). The others were chosen by registers, shared memory and bytes in flight: at least two
# blocks share a multiprocessor, so that one multiplies while the other draws (`thresher bench compile`).
AMPERE = (
    DrawTiling(rows=16, columns=128, width=64, num_warps=4, num_stages=4),
    DrawTiling(rows=32, columns=128, width=64, num_warps=4, num_stages=4),
    DrawTiling(rows=64, columns=128, width=64, num_warps=8, num_stages=3, parts=2),
    DrawTiling(rows=128, columns=128, width=32, num_warps=4, num_stages=4, parts=4),
)
HOPPER = (
    *AMPERE[:2],
    DrawTiling(rows=64, columns=128, width=64, num_warps=4, num_stages=4, parts=4),
    DrawTiling(rows=128, columns=256, width=64, num_warps=8, num_stages=3, parts=8),
)
FLOAT32 = tuple(DrawTiling(rows=rows, columns=64, width=32, num_warps=4, num_stages=2) for rows in (16, 64))


def draw_tilings(dtype: torch.dtype, capability: int) -> tuple[DrawTiling, ...]:
    """Return the tilings for bfloat16 or float32 operands; capability: 80 for sm_80 and so on."""
    if dtype == torch.float32:
        return FLOAT32
    return HOPPER if 90 <= capability < 100 else AMPERE


def draw_tiling(dtype: torch.dtype, device: torch.device, count: int) -> DrawTiling:
    """Return the tiling for `count` rows on `device`; a CPU (in Triton's interpreter) counts as sm_80."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
    tilings = draw_tilings(dtype, 10 * major + minor)
    return next((one for one in tilings if one.rows >= count), tilings[-1])


# noise.py's constants, unsigned.
_G32, _F32_0, _F32_1 = (tl.constexpr(x % 2**32) for x in (GOLDEN_32, *FACTORS_32))
_G64, _F64_0, _F64_1 = (tl.constexpr(x % 2**64) for x in (GOLDEN_64, *FACTORS_64))
_G_UPPER, _G_LOWER = tl.constexpr(GOLDEN_UPPER), tl.constexpr(GOLDEN_LOWER)
_ONE, _DOWN = tl.constexpr(ONE), tl.constexpr(DOWN)
_NO_COLUMN = tl.constexpr(2**31 - 1)
_LN2, _LOG2_E = tl.constexpr(log(2.0)), tl.constexpr(1 / log(2.0))


@triton.jit
def _mix(x):  # uint64
    x = x * _F64_0
    x = (x ^ (x >> 27)) * _F64_1
    return x ^ (x >> 31)


@triton.jit
def _row_words(seed, position):
    """Compute the two words of noise.py's `row_keys`, uint32, from int64; the low word after its first xor-shift."""
    step = (position + 1).to(tl.uint64, bitcast=True)
    seed = seed.to(tl.uint64, bitcast=True)
    upper = (step * _G_UPPER + ((step * _G_LOWER) >> 32)) >> 32
    x = _mix(seed ^ (seed >> 30)) ^ (step * _G64)
    key = _mix(x ^ (x >> 30) ^ (upper << 34))
    low = key.to(tl.uint32)
    return low ^ (low >> 16), (key >> 32).to(tl.uint32)


@triton.jit
def _token_word(token):
    word = token.to(tl.uint32) * _G32
    return word ^ (word >> 16)


@triton.jit
def _uniform(low, high, word):
    """Compute u of noise.py's `uniform_noise`, bit for bit."""
    x = (low ^ word) * _F32_0 + high
    x = (x ^ (x >> 15)) * _F32_1 + high
    # The upper 23 bits of x ^ (x >> 16), with one operation less.
    return (((x >> 9) ^ (x >> 25)) | _ONE).to(tl.float32, bitcast=True) - _DOWN


@triton.jit
def _minus_log(u):
    """Compute -log u of a positive normal number to about one ulp, also near 1, without a library's branches.

    u = 2^k (1 + f), |f| <= 1/3;  log(1 + f) = f + f^2 P(f), P of degree 7 with the least relative error, 2.6e-8."""
    bits = u.to(tl.int32, bitcast=True)
    power = (bits - 0x3F2AAAAB) & -0x800000  # 2/3 has the bits 0x3F2AAAAB
    f = (bits - power).to(tl.float32, bitcast=True) - 1.0
    p = f * 0.1402612 - 0.15388519
    p = p * f + 0.13995861
    p = p * f - 0.16415965
    p = p * f + 0.20011165
    p = p * f - 0.25007819
    p = p * f + 0.33333198
    p = p * f - 0.49999936
    return -((f * f) * p + f) - power.to(tl.float32) * 8.262958294867817e-08  # log(2) / 2^23


@triton.jit
def _approximate(x, NAME: tl.constexpr, INTERPRETED: tl.constexpr):
    """Compute 2^x, log2 x or 1 / x in one instruction, to about 2^-22; denormal numbers are 0."""
    if INTERPRETED:
        return tl.exp2(x) if NAME == "ex2" else (tl.log2(x) if NAME == "lg2" else 1.0 / x)
    code: tl.constexpr = NAME + ".approx.ftz.f32 $0, $1;"
    return tl.inline_asm_elementwise(code, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _inverse_minus_log(u, INTERPRETED: tl.constexpr):
    """Compute 1 / -log u to a relative error of 3e-7.

    From .7 on it is 1 / d - G(d), d = 1 - u without rounding, G of degree 4; below, it uses the one-instruction log."""
    d = 1.0 - u
    g = d * 0.04039845 + 0.01800123
    g = g * d + 0.04303373
    g = g * d + 0.08323880
    g = g * d + 0.50000209
    t = _approximate(u, "lg2", INTERPRETED) * -_LN2
    near = u >= 0.7
    return _approximate(tl.where(near, d, t), "rcp", INTERPRETED) - tl.where(near, g, 0.0)


@triton.jit
def _race(z, scale, m, noisy, low, high, column, AXIS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return of a tile of logits x W^T: sum of e = 2^(z scale - m), the best value (e / t; greedy: z), its column."""
    e = _approximate(tl.fma(z, tl.expand_dims(scale, AXIS), -tl.expand_dims(m, AXIS)), "ex2", INTERPRETED)
    u = _uniform(tl.expand_dims(low, AXIS), tl.expand_dims(high, AXIS), tl.expand_dims(_token_word(column), 1 - AXIS))
    value = tl.where(tl.expand_dims(noisy, AXIS), e * _inverse_minus_log(u, INTERPRETED), z)
    best = tl.max(value, AXIS)
    wins = value == tl.expand_dims(best, AXIS)
    return tl.sum(e, AXIS), best, tl.min(tl.where(wins, tl.expand_dims(column, 1 - AXIS), _NO_COLUMN), AXIS)


@triton.jit
def _race_in_parts(
    z, scale, m, noisy, low, high, first, COLUMNS: tl.constexpr, PARTS: tl.constexpr, INTERPRETED: tl.constexpr
):
    """Compute `_race` for [rows, COLUMNS], a part of the columns at a time; first: the tile's first column.

    Only the values of one part are then in registers, not those of the whole tile."""
    if PARTS == 1:
        s, best, chosen = _race(z, scale, m, noisy, low, high, first + tl.arange(0, COLUMNS), 1, INTERPRETED)
    else:
        HALF: tl.constexpr = COLUMNS // 2
        left, right = tl.split(tl.permute(tl.reshape(z, (z.shape[0], 2, HALF)), (0, 2, 1)))
        s, best, chosen = _race_in_parts(left, scale, m, noisy, low, high, first, HALF, PARTS // 2, INTERPRETED)
        right_s, right_best, right_chosen = _race_in_parts(
            right, scale, m, noisy, low, high, first + HALF, HALF, PARTS // 2, INTERPRETED
        )
        s += right_s
        chosen = tl.where(right_best > best, right_chosen, chosen)
        best = tl.maximum(best, right_best)
    return s, best, chosen


# A length must not cause a recompilation, neither by its value nor by the alignment of a slice of that length.
_NARROW = ["seeds_ptr", "positions_ptr", "temperature_ptr"]


@triton.jit(do_not_specialize=["count", "temperature_stride"], do_not_specialize_on_alignment=_NARROW)
def _draw_kernel(
    hidden_ptr,  # [B, H] bf16 or fp32, dense
    head_ptr,  # [V, H] the same, its rows dense
    seeds_ptr,  # [B] int64
    positions_ptr,  # [B] int64
    temperature_ptr,  # [B] fp32
    parts_ptr,  # [4, column tiles, row tiles x ROWS] fp32: best score, its z - m, m, s
    columns_ptr,  # [column tiles, row tiles x ROWS] int32: the best score's
    count,  # B
    temperature_stride,  # 0 if all rows share one temperature
    head_stride_v,
    H,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    AXIS: tl.constexpr,  # of the columns in a tile of logits
    PARTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    # Neighbouring programs share their columns: the head is read once, the hidden states stay in the cache.
    row_tiles = tl.cdiv(count, ROWS)
    row_tile = tl.program_id(0) % row_tiles
    column_tile = tl.program_id(0) // row_tiles
    row = row_tile * ROWS + tl.arange(0, ROWS)
    column = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    # Indices out of range are clamped, so the loop needs no masks. Such columns are excluded below; such rows have
    # their own places in the workspace, which are never read.
    row_inside = tl.minimum(row, count - 1).to(tl.int64)
    column_inside = tl.minimum(column, V - 1).to(tl.int64)
    depth = tl.arange(0, WIDTH)
    across = tl.expand_dims(column, 1 - AXIS)
    hidden_ptrs = hidden_ptr + tl.expand_dims(row_inside * H, AXIS) + tl.expand_dims(depth, 1 - AXIS)
    head_ptrs = head_ptr + tl.expand_dims(column_inside * head_stride_v, 1 - AXIS) + tl.expand_dims(depth, AXIS)
    z = tl.zeros((COLUMNS, ROWS), tl.float32) if AXIS == 0 else tl.zeros((ROWS, COLUMNS), tl.float32)
    for _ in range(0, H, WIDTH):
        w, x = tl.load(head_ptrs), tl.load(hidden_ptrs)
        if INTERPRETED:
            w, x = w.to(tl.float32), x.to(tl.float32)
        z = tl.dot(w, x, z, input_precision="ieee") if AXIS == 0 else tl.dot(x, w, z, input_precision="ieee")
        head_ptrs += WIDTH
        hidden_ptrs += WIDTH

    temperature = tl.load(temperature_ptr + row_inside * temperature_stride)
    noisy = temperature > 0
    scale = _LOG2_E / tl.where(noisy, temperature, 1.0)
    if V % COLUMNS != 0:
        z = tl.where(across < V, z, float("-inf"))
    m = tl.max(z, AXIS) * scale
    level = tl.where(m == float("-inf"), 0.0, m)
    low, high = _row_words(tl.load(seeds_ptr + row_inside), tl.load(positions_ptr + row_inside))
    if AXIS == 0:
        s, best, chosen = _race(z, scale, level, noisy, low, high, column, 0, INTERPRETED)
    else:
        first = column_tile * COLUMNS
        s, best, chosen = _race_in_parts(z, scale, level, noisy, low, high, first, COLUMNS, PARTS, INTERPRETED)
    # The chosen z is derived from its value: finding it in z would keep two tiles in registers. It is stored relative
    # to m: at a logit of 60 the sum m + log2 would be rounded to 4e-6, and a log-prob could exceed 0 by that much.
    t = _minus_log(_uniform(low, high, _token_word(chosen)))
    score = tl.where(noisy, m + tl.log2(best), best)  # greedy rows compare z itself
    below = tl.where(noisy, tl.log2(best * t), tl.fma(best, scale, -level))
    row_stride = tl.cast(row_tiles * ROWS, tl.int64)
    plane = row_stride * tl.cdiv(V, COLUMNS)
    parts = parts_ptr + column_tile * row_stride + row
    tl.store(parts, score)
    tl.store(parts + plane, below)
    tl.store(parts + 2 * plane, m)
    tl.store(parts + 3 * plane, s)
    tl.store(columns_ptr + column_tile * row_stride + row, chosen)


@triton.jit(do_not_specialize=["count"])
def _reduce_draw_kernel(
    parts_ptr,  # [4, column tiles, row_stride] fp32: best score, its z - m, m, s
    columns_ptr,  # [column tiles, row_stride] int32
    ids_ptr,  # [B] int64
    logprobs_ptr,  # [B] fp32
    count,  # B
    row_stride,  # B rounded up to row tiles
    V: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    part = tl.arange(0, TILES)
    tiles = tl.cdiv(V, COLUMNS)
    plane = tl.cast(row_stride, tl.int64) * tiles
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    best_column = tl.full((ROWS,), _NO_COLUMN, tl.int32)
    best_below = tl.zeros((ROWS,), tl.float32)
    best_m = tl.zeros((ROWS,), tl.float32)
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for start in range(0, tiles, TILES):
        tile = start + part
        inside = (tile < tiles)[:, None]
        at = tile.to(tl.int64)[:, None] * row_stride + row[None, :]
        score = tl.load(parts_ptr + at, mask=inside, other=float("-inf"))
        below = tl.load(parts_ptr + plane + at, mask=inside, other=0.0)
        m = tl.load(parts_ptr + 2 * plane + at, mask=inside, other=float("-inf"))
        s = tl.load(parts_ptr + 3 * plane + at, mask=inside, other=0.0)
        column = tl.load(columns_ptr + at, mask=inside, other=_NO_COLUMN)
        top = tl.max(score, 0)
        first = tl.min(tl.where(score == top[None, :], column, _NO_COLUMN), 0)
        # Not if they are equal, because the earlier columns are lower.
        better = (top > best) | (best_column == _NO_COLUMN)
        wins = column == first[None, :]
        best_below = tl.where(better, tl.sum(tl.where(wins, below, 0.0), 0), best_below)
        best_m = tl.where(better, tl.sum(tl.where(wins, m, 0.0), 0), best_m)
        best_column = tl.where(better, first, best_column)
        best = tl.where(better, top, best)
        rise = tl.maximum(highest, tl.max(m, 0))
        level = tl.where(rise == float("-inf"), 0.0, rise)
        total = total * tl.exp2(highest - level) + tl.sum(tl.exp2(m - level[None, :]) * s, 0)
        highest = rise
    tl.store(ids_ptr + row, tl.minimum(best_column, V - 1).to(tl.int64), mask=row < count)
    # The chosen column's share of the total was computed a second time and may exceed the total by 1e-6.
    logprob = (best_below + (best_m - highest) - tl.log2(total)) * _LN2
    tl.store(logprobs_ptr + row, tl.where(logprob > 0.0, 0.0, logprob), mask=row < count)  # NaN stays NaN


def draw_fused(
    hidden_BH: Tensor, lm_head_VH: Tensor, seeds_B: Tensor, positions_B: Tensor, temperature_B: Tensor
) -> tuple[Tensor, Tensor]:
    """Draw ids [B] int64 with log-probs [B] float32, as `sample` of kernels/sampling.py does without filters.

    hidden_BH: bf16 or fp32 on CUDA (on a CPU in Triton's interpreter), H a multiple of 16. lm_head_VH: the same, a row
    for each column that may be drawn, rows dense. seeds_B, positions_B: int64. temperature_B: float32, any
    stride; 0 is greedy. Two launches, and a workspace of 5 numbers per row and tile. ValueError for anything else.
    """
    _check_operands(hidden_BH, lm_head_VH, seeds_B, positions_B, temperature_B)
    count, (columns, width) = len(hidden_BH), lm_head_VH.shape
    ids_B, logprobs_B = seeds_B.new_empty(count), temperature_B.new_empty(count)
    if not count:
        return ids_B, logprobs_B
    tiling = draw_tiling(hidden_BH.dtype, hidden_BH.device, count)
    row_tiles, column_tiles = triton.cdiv(count, tiling.rows), triton.cdiv(columns, tiling.columns)
    row_stride = row_tiles * tiling.rows
    parts = temperature_B.new_empty((4, column_tiles, row_stride))
    part_columns = seeds_B.new_empty((column_tiles, row_stride), dtype=torch.int32)
    _draw_kernel[(row_tiles * column_tiles,)](
        hidden_BH.contiguous(),
        lm_head_VH,
        seeds_B.contiguous(),
        positions_B.contiguous(),
        temperature_B,
        parts,
        part_columns,
        count,
        temperature_B.stride(0),
        lm_head_VH.stride(0),
        width,
        INTERPRETED=INTERPRETED,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        maxnreg=tiling.maxnreg,
        **_tile_constants(columns, tiling, gcd(width, tiling.width)),
    )
    _reduce_draw_kernel[(row_stride // REDUCE_ROWS,)](
        parts,
        part_columns,
        ids_B,
        logprobs_B,
        count,
        row_stride,
        V=columns,
        COLUMNS=tiling.columns,
        ROWS=REDUCE_ROWS,
        TILES=REDUCE_TILES,
        num_warps=REDUCE_WARPS,
    )
    return ids_B, logprobs_B


def _check_operands(
    hidden_BH: Tensor, lm_head_VH: Tensor, seeds_B: Tensor, positions_B: Tensor, temperature_B: Tensor
) -> None:
    if hidden_BH.dim() != 2 or hidden_BH.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(
            f"hidden states are [B, H] of bfloat16 or float32, not {tuple(hidden_BH.shape)} of {hidden_BH.dtype}"
        )
    (count, width), device = hidden_BH.shape, hidden_BH.device
    found = f"{tuple(lm_head_VH.shape)} of {lm_head_VH.dtype} with strides {lm_head_VH.stride()} on {lm_head_VH.device}"
    if width % 16 or not width:
        raise ValueError(f"the hidden width is a multiple of 16, not {width}")
    fits = lm_head_VH.dim() == 2 and len(lm_head_VH) > 0 and lm_head_VH.shape[1] == width
    if not fits or lm_head_VH.stride(1) != 1 or lm_head_VH.dtype != hidden_BH.dtype or lm_head_VH.device != device:
        raise ValueError(f"the head is [V, {width}] of {hidden_BH.dtype} with dense rows on {device}, not {found}")
    for name, vector, dtype in (
        ("seeds", seeds_B, torch.int64),
        ("positions", positions_B, torch.int64),
        ("temperatures", temperature_B, torch.float32),
    ):
        if vector.shape != (count,) or vector.dtype != dtype or vector.device != device:
            found = f"{tuple(vector.shape)} of {vector.dtype} on {vector.device}"
            raise ValueError(f"{name} are ({count},) of {dtype} on {device}, as the hidden states, not {found}")


def _tile_constants(columns: int, tiling: DrawTiling, width: int) -> dict[str, int]:
    return {
        "V": columns,
        "ROWS": tiling.rows,
        "COLUMNS": tiling.columns,
        "WIDTH": width,
        "AXIS": tiling.column_axis,
        "PARTS": tiling.parts,
    }


def specialisations() -> tuple[Specialisation, ...]:
    """Return the specialisations that the launcher requests, with the columns of Qwen2.5's tokenizer.

    One binary serves all widths that are multiples of the tile's. The largest tile has one more for each smaller
    width, for multiples of only 32 or 16, and one for Qwen3.5's columns."""
    bfloat16 = torch.bfloat16
    cases: list[tuple[torch.dtype, DrawTiling, int, tuple[int, ...]]] = [
        (bfloat16, tiling, width, (capability,))
        for capability in (80, 90)
        for tiling in draw_tilings(bfloat16, capability)
        for width in (64, 32, 16)
        if width == tiling.width or (tiling.rows == 128 and width < tiling.width)
    ]
    cases += [(torch.float32, tiling, tiling.width, (80, 90)) for tiling in FLOAT32]
    reduces = (_reduce_specialisation(columns) for columns in (AMPERE[0].columns, FLOAT32[0].columns))
    longest = (
        _draw_specialisation(dtype, tiling, width, capabilities, QWEN35_VOCABULARY)
        for dtype, tiling, width, capabilities in cases
        if dtype == bfloat16 and tiling.rows == 128 and width == tiling.width
    )
    return (*(_draw_specialisation(*case) for case in cases), *longest, *reduces)


def _draw_specialisation(
    dtype: torch.dtype, tiling: DrawTiling, width: int, capabilities: tuple[int, ...], vocabulary: int = VOCABULARY
) -> Specialisation:
    pointer = "*bf16" if dtype == torch.bfloat16 else "*fp32"
    types = {"hidden": pointer, "head": pointer, "seeds": "*i64", "positions": "*i64", "temperature": "*fp32"}
    return Specialisation(
        name=f"draw {pointer[1:]} {tiling.rows} rows by {width}"
        + ("" if vocabulary == VOCABULARY else f", V {vocabulary:,}"),
        kernel=_draw_kernel,
        signature={f"{name}_ptr": kind for name, kind in {**types, "parts": "*fp32", "columns": "*i32"}.items()}
        | dict.fromkeys(("count", "temperature_stride", "head_stride_v", "H"), "i32"),
        constants={**_tile_constants(vocabulary, tiling, width), "INTERPRETED": False},
        aligned=("hidden_ptr", "head_ptr", "parts_ptr", "columns_ptr", "head_stride_v", "H"),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        maxnreg=tiling.maxnreg,
        tensor_cores=dtype == torch.bfloat16,
        capabilities=capabilities,
    )


def _reduce_specialisation(columns: int) -> Specialisation:
    types = {"parts_ptr": "*fp32", "columns_ptr": "*i32", "ids_ptr": "*i64", "logprobs_ptr": "*fp32"}
    return Specialisation(
        name=f"draw reduce, {columns} columns",
        kernel=_reduce_draw_kernel,
        signature={**types, "count": "i32", "row_stride": "i32"},
        constants={"V": VOCABULARY, "COLUMNS": columns, "ROWS": REDUCE_ROWS, "TILES": REDUCE_TILES},
        aligned=(*types, "row_stride"),
        num_warps=REDUCE_WARPS,
    )
