"""Attention of few new rows per sequence to a cache in blocks: keys are read once, and in parts.

    z_ij = (log2 e / sqrt(D)) q_i . k_j                    so that softmax is 2^z / sum 2^z
    part p of the keys gives    e_p = log2 sum_{j in p} 2^z_ij,   o_p = sum_{j in p} 2^(z_ij - e_p) v_j
    o_i = sum_p 2^(e_p - e) o_p,   e = log2 sum_p 2^e_p    (cascade_triton.py, in a fixed order)

Within a part, keys are read in blocks of `KEYS`, with a running maximum and a rescaled sum (Milakov & Gimelshein 2018,
algorithm 3; Dao et al. 2022, algorithm 1); merging parts is the flash decoding of Dao et al. 2023. A program computes
one part of one sequence's keys for all query rows of one KV head: row i of its tile is new row i // R of head i % R.
With one part the program writes the output itself. A part without keys has e = -inf, and its o is not read.

Axes: B sequences, Q rows, N query heads, K KV heads, R query heads of a KV head, D head dimension, P blocks, S slots
(docs/notation.md).
"""

# Kernels are typed by their launches.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from thresher.kernels.attention.rows import KEYS, DecodeRows
from thresher.kernels.registry import Specialisation

INTERPRETED = bool(triton.knobs.runtime.interpret)
LOG2_E = math.log2(math.e)
# Qwen2.5-0.5B, 1.5B, 3B, 7B, Llama-3.1-8B and Qwen3.5-0.8B: head dimension, query heads of a KV head, KV heads.
MODELS = ((64, 7, 2), (128, 6, 2), (128, 8, 2), (128, 7, 4), (128, 4, 8), (256, 4, 2))
MODEL_SLOTS = 64


@dataclass(frozen=True, slots=True)
class KeyTiling:
    """Tile of a program: its query rows, and the keys that it reads at a time."""

    rows: int
    keys: int
    num_warps: int
    num_stages: int

    def options(self) -> dict[str, int]:
        """Return the options of a launch."""
        return {"ROWS": self.rows, "KEYS": self.keys, "num_warps": self.num_warps, "num_stages": self.num_stages}


# Exact products need registers and time; this is the largest that fits D 128 on both GPUs. Not for speed.
FLOAT32 = KeyTiling(rows=16, keys=32, num_warps=8, num_stages=2)
# Prefill and shared prefixes with heads of 256: with more keys or stages they do not fit on an A100 (by compilation).
DEEP = KeyTiling(rows=64, keys=32, num_warps=8, num_stages=2)


def decode_tiling(exact: bool, queries: int, dim: int) -> KeyTiling:
    """Return the tiling for `queries` rows of one KV head, in one tile up to 64. exact: float32.

    With two stages mma has one buffer, refilled after each step: programs that start together would wait for memory
    together, and then compute together while it idles. A third stage lets both overlap. The tilings of up to 16 rows
    are the fastest of 31 on an H200 (docs/internals/log.md)."""
    if exact:
        return FLOAT32
    if queries <= 16:
        return KeyTiling(rows=16, keys=KEYS if dim <= 64 else KEYS // 2, num_warps=2, num_stages=3)
    return KeyTiling(
        rows=32 if queries <= 32 else 64, keys=KEYS if dim <= 128 else KEYS // 2, num_warps=4, num_stages=3
    )


@triton.jit
def _find_block(
    table_ptr,  # [P] int32
    position,  # of the first key
    high,  # keys from here on do not exist
    SLOTS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Return the blocks of the next KEYS keys: one number if one block holds them all, else one per key."""
    key = position if SLOTS % KEYS == 0 else position + tl.arange(0, KEYS)
    return tl.load(table_ptr + key // SLOTS, mask=key < high, other=0)


@triton.jit
def attend_keys(
    q,  # [ROWS, WIDTH]
    highest,  # [ROWS] fp32: the largest z so far, -inf for none
    total,  # [ROWS] fp32: sum 2^(z - highest)
    o,  # [ROWS, WIDTH] fp32: sum 2^(z - highest) v
    last,  # [ROWS] the last key that a row sees, if MASKED
    low,  # if SLOTS is divisible by KEYS, so is low
    high,
    table_ptr,  # [P] int32
    k_ptr,  # [P, SLOTS, D] of one KV head
    v_ptr,  # the same
    k_stride,  # from block to block
    v_stride,
    scale,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,  # False: every row sees all these keys, and they are a multiple of KEYS
    UPCAST: tl.constexpr,
):
    """Return (highest, total, o) updated with the keys low .. high - 1."""
    slot = tl.arange(0, KEYS)
    depth = tl.arange(0, WIDTH)
    block = _find_block(table_ptr, low, high, SLOTS, KEYS)
    for position in range(low, high, KEYS):
        # Loaded one step ahead: otherwise the pipeline's stages would be spent on it and not on the keys.
        following = _find_block(table_ptr, position + KEYS, high, SLOTS, KEYS)
        key = position + slot
        there = key < high if MASKED else tl.full((KEYS,), True, tl.int1)
        k_there, v_there = there[None, :], there[:, None]
        if WIDTH != D:
            k_there, v_there = k_there & (depth < D)[:, None], v_there & (depth < D)[None, :]
        if SLOTS % KEYS == 0:  # contiguous keys: one pointer and constant offsets
            place = (position % SLOTS + slot) * D
            k_ptrs = k_ptr + block.to(tl.int64) * k_stride + (place[None, :] + depth[:, None])
            v_ptrs = v_ptr + block.to(tl.int64) * v_stride + (place[:, None] + depth[None, :])
        else:
            place = key % SLOTS * D
            k_ptrs = k_ptr + (block.to(tl.int64) * k_stride + place)[None, :] + depth[:, None]
            v_ptrs = v_ptr + (block.to(tl.int64) * v_stride + place)[:, None] + depth[None, :]
        k = tl.load(k_ptrs, mask=k_there, other=0.0)
        if UPCAST:
            k = k.to(tl.float32)
        z = tl.dot(q, k, input_precision="ieee")
        if MASKED:
            z = tl.where(key[None, :] <= last[:, None], z, float("-inf"))
        higher = tl.maximum(highest, tl.max(z, 1) * scale)
        # For a row that has seen no key yet: its exponentials are 2^-inf, and no -inf is subtracted from another.
        shift = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        shrink = tl.exp2(highest - shift)
        e = tl.exp2(z * scale - shift[:, None])
        v = tl.load(v_ptrs, mask=v_there, other=0.0)
        if UPCAST:
            v = v.to(tl.float32)
        o = tl.dot(e.to(v.dtype), v, o * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(e, 1)
        highest = higher
        block = following
    return highest, total, o


@triton.jit
def no_keys(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Return (highest, total, o) of `attend_keys` before the first key."""
    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    return highest, tl.zeros((ROWS,), tl.float32), tl.zeros((ROWS, WIDTH), tl.float32)


@triton.jit
def leave_part(
    o_ptr,  # [.., rows, D] fp32
    lse_ptr,  # [.., rows] fp32
    highest,
    total,
    o,
    first_at,  # of the rows of one KV head, int64
    i,  # [ROWS] places among them
    rows,
    some,  # whether the part has keys
    D: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Store a part's e_p and o_p in the tile's order, which needs only one pointer and constant offsets."""
    depth = tl.arange(0, WIDTH)
    used = i < rows
    tl.store(lse_ptr + first_at + i, highest + tl.log2(tl.maximum(total, 1e-30)), mask=used)
    if some:
        o = o / tl.maximum(total, 1e-30)[:, None]
        there = used[:, None] & (depth < D)[None, :]
        tl.store(o_ptr + first_at * D + (i[:, None] * D + depth[None, :]), o, mask=there)


# Lengths must not cause a recompilation, neither by their value nor by the alignment of a slice of that length.
_SIZES = ["sequences", "queries", "table_stride", "splits"]
_DECODE_NARROW = ["table_ptr", "start_ptr", "count_ptr", "first_ptr", "lse_ptr", "place_ptr"]


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_DECODE_NARROW)
def _decode_kernel(
    q_ptr,  # [B, Q, N, D] bf16 or fp32
    k_ptr,  # [P, K, S, D] the same, a block dense
    v_ptr,  # [P, K, S, D] the same
    table_ptr,  # [B, P] int32
    start_ptr,  # [B] int32
    count_ptr,  # [B] int32
    first_ptr,  # [B] int32, read if FIRST
    o_ptr,  # [splits, B, K, Q x R, D] fp32; if DIRECT [B, Q, N, D] q's dtype
    lse_ptr,  # [splits, B, K, Q x R] fp32: e_p; if not DIRECT
    place_ptr,  # [B] int32, written if PREFIX: -1, until the prefix pass overwrites it
    sequences,  # B
    queries,  # Q
    table_stride,
    splits,
    q_stride_b,
    q_stride_q,
    q_stride_n,
    k_stride,
    v_stride,
    scale,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    SLOTS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PER_KV: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    FIRST: tl.constexpr,
    DIRECT: tl.constexpr,
    PREFIX: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # Tiles that read the same keys are neighbours, so the second finds them in the cache.
    tiles = tl.cdiv(queries * PER_KV, ROWS)
    b = tl.program_id(0) // tiles
    kv = tl.program_id(1)
    split = tl.program_id(2)
    i = tl.program_id(0) % tiles * ROWS + tl.arange(0, ROWS)
    row = i // PER_KV
    head = kv * PER_KV + i % PER_KV
    depth = tl.arange(0, WIDTH)

    start = tl.load(start_ptr + b)
    count = tl.load(count_ptr + b)
    first = 0
    if FIRST:
        first = tl.load(first_ptr + b)
    end = tl.where(count > 0, start + count, first)
    part = tl.cdiv(tl.cdiv(end - first, KEYS), splits) * KEYS
    low = first + split * part
    high = tl.minimum(low + part, end)

    present = (row < count) & (row < queries)
    across = (depth < D)[None, :]
    q_at = (row * q_stride_q + head * q_stride_n)[:, None] + depth[None, :]
    q = tl.load(q_ptr + b.to(tl.int64) * q_stride_b + q_at, mask=present[:, None] & across, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    highest, total, o = no_keys(ROWS, WIDTH)
    table = table_ptr + b.to(tl.int64) * table_stride
    highest, total, o = attend_keys(
        q, highest, total, o, start + row, low, high, table, k_ptr + kv * SLOTS * D, v_ptr + kv * SLOTS * D,
        k_stride, v_stride, scale, D, WIDTH, SLOTS, KEYS, True, UPCAST,
    )  # fmt: skip
    if DIRECT:
        o = o / tl.maximum(total, 1e-30)[:, None]
        o = tl.where(present[:, None], o, 0.0).to(o_ptr.dtype.element_ty)
        at = row * (KV_HEADS * PER_KV) + head
        first_at = b.to(tl.int64) * queries * (KV_HEADS * PER_KV * D)
        o_ptrs = o_ptr + first_at + (at[:, None] * D + depth[None, :])
        tl.store(o_ptrs, o, mask=(row < queries)[:, None] & across)
    else:
        first_at = ((split * sequences + b).to(tl.int64) * KV_HEADS + kv) * (queries * PER_KV)
        leave_part(o_ptr, lse_ptr, highest, total, o, first_at, i, queries * PER_KV, low < high, D, WIDTH)
        if PREFIX:  # noqa: SIM102, a constant beside a value
            if (kv == 0) & (split == 0) & (tl.program_id(0) % tiles == 0):
                tl.store(place_ptr + b, -1)


def launch_decode(
    q_BQND: Tensor,
    k_PKSD: Tensor,
    v_PKSD: Tensor,
    rows: DecodeRows,
    splits: int,
    o: Tensor,
    lse: Tensor | None,
    place_B: Tensor | None,
) -> None:
    """Launch `_decode_kernel`. lse None: o is the output itself. place_B None: no sequence has a prefix."""
    (B, Q, N, D), K = q_BQND.shape, k_PKSD.shape[1]
    tiling = decode_tiling(is_exact(q_BQND), Q * N // K, D)
    # An argument that is neither read nor written may be any pointer.
    first_B = rows.start_B if rows.first_B is None else rows.first_B
    _decode_kernel[(B * triton.cdiv(Q * N // K, tiling.rows), K, splits)](
        q_BQND,
        k_PKSD,
        v_PKSD,
        rows.table_BP,
        rows.start_B,
        rows.count_B,
        first_B,
        o,
        o if lse is None else lse,
        rows.count_B if place_B is None else place_B,
        B,
        Q,
        rows.table_BP.stride(0),
        splits,
        *strides(q_BQND, k_PKSD, v_PKSD),
        **options(q_BQND, k_PKSD, tiling),
        FIRST=rows.first_B is not None,
        DIRECT=lse is None,
        PREFIX=place_B is not None,
    )


def is_exact(q: Tensor) -> bool:
    """Return whether products use float32 arithmetic. The interpreter uses bfloat16's tilings, to test them."""
    return q.dtype == torch.float32 and not INTERPRETED


@cache
def gpu(device: torch.device) -> tuple[int, int]:
    """Return (multiprocessors, capability: 80, 90 ..); for the interpreter, one Hopper multiprocessor."""
    if device.type != "cuda":
        return 1, 90
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, 10 * properties.major + properties.minor


def strides(q: Tensor, k_PKSD: Tensor, v_PKSD: Tensor) -> tuple[int, ...]:
    """Return the strides of a launch: those of q, [.., N, D], except the last, and those between blocks."""
    return *q.stride()[:-1], k_PKSD.stride(0), v_PKSD.stride(0)


def options(q: Tensor, k_PKSD: Tensor, tiling: KeyTiling) -> dict[str, Any]:
    """Return the options common to every launch that reads keys. q: [.., N, D]."""
    (N, D), (K, S) = q.shape[-2:], k_PKSD.shape[1:3]
    return {"scale": LOG2_E * D**-0.5, "UPCAST": INTERPRETED, **model_constants(N, K, D, S), **tiling.options()}


def model_constants(heads: int, kv_heads: int, dim: int, slots: int) -> dict[str, int]:
    """Return the constants that a model and its cache give to every kernel that reads keys."""
    width = max(16, triton.next_power_of_2(dim))
    return {"D": dim, "WIDTH": width, "SLOTS": slots, "KV_HEADS": kv_heads, "PER_KV": heads // kv_heads}


STRIDES = ("q_stride_b", "q_stride_q", "q_stride_n", "k_stride", "v_stride")


def specialisations() -> tuple[Specialisation, ...]:
    """Return the specialisations that `launch_decode` requests at the models' shapes.

    These are one new row per sequence, and one with 2, 4 and 8 drafts, as far as their tiles differ. Three cases occur
    once each: the output written directly, blocks shorter than KEYS, float32."""
    models = [_specialisation(*model, queries) for model in MODELS for queries in (1, 3, 5, 9)]
    return (
        *{one.name: one for one in models}.values(),
        _specialisation(128, 6, 2, 1, direct=True),
        _specialisation(128, 6, 2, 1, slots=16),
        _specialisation(128, 6, 2, 1, dtype="fp32"),
    )


def _specialisation(
    dim: int,
    per_kv: int,
    kv_heads: int,
    queries: int,
    slots: int = MODEL_SLOTS,
    direct: bool = False,
    dtype: str = "bf16",
) -> Specialisation:
    tiling = decode_tiling(dtype == "fp32", queries * per_kv, dim)
    results = dict.fromkeys(("o_ptr", "lse_ptr"), f"*{dtype}" if direct else "*fp32")
    integers = dict.fromkeys(("table_ptr", "start_ptr", "count_ptr", "first_ptr", "place_ptr"), "*i32")
    kind = f"{' direct' if direct else ''}{f' S {slots}' if slots != MODEL_SLOTS else ''}"
    return key_specialisation(
        f"decode {dtype} D {dim} {per_kv} x {kv_heads} rows {tiling.rows}{kind}",
        _decode_kernel,
        tiling,
        dtype,
        others=results | integers | dict.fromkeys(_SIZES, "i32"),
        constants=model_constants(per_kv * kv_heads, kv_heads, dim, slots)
        | {"FIRST": not direct, "DIRECT": direct, "PREFIX": not direct},
        wgmma=tiling.rows >= 64,
    )


def key_specialisation(
    name: str,
    kernel: Any,
    tiling: KeyTiling,
    dtype: str,
    *,
    others: dict[str, str],
    constants: dict[str, Any],
    strides: tuple[str, ...] = STRIDES,
    **more: Any,
) -> Specialisation:
    """Return the specialisation of a kernel that reads keys. others: types of the remaining arguments and `o_ptr`."""
    operands = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), f"*{dtype}")
    return Specialisation(
        name=name,
        kernel=kernel,
        signature=operands | others | dict.fromkeys(strides, "i32") | {"scale": "fp32"},
        constants=constants | {"ROWS": tiling.rows, "KEYS": tiling.keys, "UPCAST": False},
        aligned=(*operands, "o_ptr", *strides),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
        tensor_cores=dtype == "bf16",
        **more,
    )
