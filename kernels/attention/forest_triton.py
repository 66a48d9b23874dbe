"""Attention over a forest of segments (prefix.py) in Triton: forward in one launch, backward in two.

    z_ij = (log2 e / sqrt(D)) q_i . k_j        p_ij = 2^(z_ij - e_i) where j <= i < end[j], else 0
    e_i = log2 sum_j 2^z_ij                    o_i = sum_j p_ij v_j

    ds_ij = p_ij (do_i . v_j - do_i . o_i)     dq_i = sum_j ds_ij k_j / sqrt(D)
    dv_j = sum_i p_ij do_i                     dk_j = sum_i ds_ij q_i / sqrt(D)

The softmax is computed one tile of keys at a time, and its backward from e alone (Dao et al. 2022, algorithms 1 and
4). A program of the forward and of dq has a tile of rows of one query head, and a list of the key tiles that they see:
first those that all its rows see whole, which need no mask, then the others. A program of dk and dv has a tile of keys
of one KV head. Its rows are contiguous, from its first key to the largest end, for all heads of the group. Sums have a
fixed order, without atomics. Lists are made on the host once per forest and copied to the device in one transfer; the
longest programs start first.

Axes: T packed tokens, N query heads, K KV heads, D head dimension (docs/notation.md).
"""

# Kernels are typed by their launches.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from thresher.kernels.attention.decode_triton import FLOAT32, INTERPRETED, LOG2_E, KeyTiling, is_exact, no_keys
from thresher.kernels.attention.prefix import ForestKernels, PrefixForest
from thresher.kernels.operands import on_device
from thresher.kernels.registry import Specialisation

Ints = NDArray[np.int32]
MOST_DIM = 256


# --- Lists


@dataclass(frozen=True, slots=True)
class Tilings:
    """Tilings of the three kernels."""

    forward: KeyTiling
    dq: KeyTiling
    dkv: KeyTiling


@dataclass(frozen=True, slots=True)
class ForestLists:
    """Lists of one forest for one `Tilings`, on the device, int32.

    end_T: row i sees key j if j <= i < end_T[j]. forward and dq: for each tile of rows (its number, and where in
    `*_tiles` its list begins, its whole tiles end, all end), and the numbers of key tiles. dkv: for each tile of keys
    (its number; tiles of rows: the first, the whole ones' first and last + 1, the last + 1).
    """

    tilings: Tilings
    end_T: Tensor
    forward: Tensor  # [row tiles, 4]
    forward_tiles: Tensor
    dq: Tensor  # [row tiles, 4]
    dq_tiles: Tensor
    dkv: Tensor  # [key tiles, 5]


def make_lists(lengths: Sequence[int], ends: Sequence[int], tilings: Tilings, device: torch.device) -> ForestLists:
    """Make the lists of a forest. lengths and ends: of its segments."""
    end_T = np.repeat(np.array(ends, np.int32), lengths)
    of_forward = key_lists(end_T, tilings.forward)
    of_dq = of_forward
    if (tilings.dq.rows, tilings.dq.keys) != (tilings.forward.rows, tilings.forward.keys):
        of_dq = key_lists(end_T, tilings.dq)
    given = [end_T, *of_forward, *of_dq, row_spans(end_T, tilings.dkv)]
    joined = torch.from_numpy(np.concatenate([x.reshape(-1) for x in given]))
    if device.type == "cuda":
        joined = joined.pin_memory().to(device, non_blocking=True)
    sent = [x.view(like.shape) for x, like in zip(joined.split([x.size for x in given]), given, strict=True)]
    return ForestLists(tilings, *sent)


def key_lists(end_T: Ints, tiling: KeyTiling) -> tuple[Ints, Ints]:
    """Return (spans of each tile of rows, numbers of key tiles).

    A span is the tile's number, and where in the second its key tiles begin, the whole ones end, and all end."""
    T, rows = len(end_T), tiling.rows
    first_key, lowest, highest = _key_tiles(end_T, tiling.keys)
    # The rows that see any of some adjacent keys are contiguous, because each key is seen by its own row.
    first, stop = first_key // rows, -(-highest // rows)
    seen = stop - first
    key_tile = np.repeat(np.arange(len(seen)), seen)
    row_tile = np.arange(len(key_tile)) - np.repeat(np.cumsum(seen) - seen - first, seen)
    behind = first_key[key_tile] + tiling.keys - 1 <= row_tile * rows
    whole = behind & (np.minimum((row_tile + 1) * rows, T) <= lowest[key_tile])
    tiles = key_tile[np.argsort(2 * row_tile + np.logical_not(whole), kind="stable")]
    counts = np.bincount(row_tile, minlength=-(-T // rows))
    wholes = np.bincount(row_tile[whole], minlength=-(-T // rows))
    begin = np.cumsum(counts) - counts
    spans = np.stack([np.arange(len(counts)), begin, begin + wholes, begin + counts], 1)
    return spans[np.argsort(-counts, kind="stable")].astype(np.int32), tiles.astype(np.int32)


def row_spans(end_T: Ints, tiling: KeyTiling) -> Ints:
    """Return for each tile of keys its number and the range of tiles of rows that see any of it.

    The range is the first, the first and the last + 1 of those that see it whole, and the last + 1."""
    key, lowest, highest = _key_tiles(end_T, tiling.keys)
    first, stop = key // tiling.rows, -(-highest // tiling.rows)
    whole, whole_stop = -(-(key + tiling.keys - 1) // tiling.rows), lowest // tiling.rows
    whole = np.minimum(whole, stop)
    whole_stop = np.maximum(whole_stop, whole)
    spans = np.stack([np.arange(len(key)), first, whole, whole_stop, stop], 1)
    return spans[np.argsort(first - stop, kind="stable")].astype(np.int32)


def _key_tiles(end_T: Ints, keys: int) -> tuple[NDArray[np.int64], Ints, Ints]:
    """Return (first key, least end, largest end) of each tile; least end 0 if T cuts it: no row sees it whole."""
    key = np.arange(0, len(end_T), keys)
    lowest, highest = np.minimum.reduceat(end_T, key), np.maximum.reduceat(end_T, key)
    if len(end_T) % keys:
        lowest[-1] = 0
    return key, lowest, highest


# --- Kernels

_LISTS = ["end_ptr", "spans_ptr", "tiles_ptr"]


@triton.jit
def _load_rows(
    x_ptr,  # [T, D] of one head
    first,  # row
    stride,
    T,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    CUT: tl.constexpr,  # whether rows may be beyond T
    UPCAST: tl.constexpr,
):
    """Load [ROWS, WIDTH], with zeros out of range."""
    row = tl.arange(0, ROWS)
    depth = tl.arange(0, WIDTH)
    x_ptrs = x_ptr + first.to(tl.int64) * stride + (row[:, None] * stride + depth[None, :])
    if CUT and WIDTH != D:
        x = tl.load(x_ptrs, mask=(first + row < T)[:, None] & (depth < D)[None, :], other=0.0)
    elif CUT:
        x = tl.load(x_ptrs, mask=(first + row < T)[:, None], other=0.0)
    elif WIDTH != D:
        x = tl.load(x_ptrs, mask=(depth < D)[None, :], other=0.0)
    else:
        x = tl.load(x_ptrs)
    if UPCAST:
        x = x.to(tl.float32)
    return x


@triton.jit
def _store_rows(
    x_ptr,  # [T, D] of one head
    x,  # [ROWS, WIDTH]
    first,
    stride,
    T,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.arange(0, ROWS)
    depth = tl.arange(0, WIDTH)
    x_ptrs = x_ptr + first.to(tl.int64) * stride + (row[:, None] * stride + depth[None, :])
    tl.store(x_ptrs, x.to(x_ptr.dtype.element_ty), mask=(first + row < T)[:, None] & (depth < D)[None, :])


@triton.jit
def _attend(
    q,  # [ROWS, WIDTH]
    highest,  # [ROWS] fp32: the largest z so far, -inf for none
    total,  # [ROWS] fp32: sum 2^(z - highest)
    o,  # [ROWS, WIDTH] fp32: sum 2^(z - highest) v
    row,  # [ROWS]
    low,  # of the list
    high,
    tiles_ptr,
    end_ptr,
    k_ptr,
    v_ptr,
    k_stride_t,
    v_stride_t,
    scale,
    T,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return (highest, total, o) updated with the keys of these tiles."""
    tile = tl.load(tiles_ptr + low, mask=low < high, other=0)
    for at in range(low, high):
        # Loaded one step ahead: otherwise the pipeline's stages would be spent on it and not on the keys.
        following = tl.load(tiles_ptr + at + 1, mask=at + 1 < high, other=0)
        k = _load_rows(k_ptr, tile * KEYS, k_stride_t, T, D, WIDTH, KEYS, MASKED, UPCAST)
        z = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            key = tile * KEYS + tl.arange(0, KEYS)
            end = tl.load(end_ptr + key, mask=key < T, other=0)
            z = tl.where((key[None, :] <= row[:, None]) & (row[:, None] < end[None, :]), z, float("-inf"))
        higher = tl.maximum(highest, tl.max(z, 1) * scale)
        # For a row that has seen no key yet: its exponentials are 2^-inf, and no -inf is subtracted from another.
        shift = tl.where(higher == float("-inf"), 0.0, higher) if MASKED else higher
        shrink = tl.exp2(highest - shift)
        e = tl.exp2(z * scale - shift[:, None])
        v = _load_rows(v_ptr, tile * KEYS, v_stride_t, T, D, WIDTH, KEYS, MASKED, UPCAST)
        o = tl.dot(e.to(v.dtype), v, o * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(e, 1)
        highest = higher
        tile = following
    return highest, total, o


@triton.jit(do_not_specialize=["T", "per_kv"], do_not_specialize_on_alignment=_LISTS)
def _forest_forward_kernel(
    q_ptr,  # [T, N, D] bf16 or fp32
    k_ptr,  # [T, K, D] the same
    v_ptr,  # [T, K, D] the same
    end_ptr,  # [T] int32
    spans_ptr,  # [row tiles, 4] int32
    tiles_ptr,  # int32
    o_ptr,  # [T, N, D] q's dtype, dense
    lse_ptr,  # [N, T] fp32: e
    T,
    per_kv,  # query heads of a KV head
    q_stride_t,
    q_stride_n,
    k_stride_t,
    k_stride_n,
    v_stride_t,
    v_stride_n,
    scale,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    # Heads of a group are neighbours, so the second finds its keys in the cache.
    head = tl.program_id(0)
    kv = head // per_kv
    span = spans_ptr + tl.program_id(1) * 4
    first = tl.load(span) * ROWS
    low, whole, high = tl.load(span + 1), tl.load(span + 2), tl.load(span + 3)
    row = first + tl.arange(0, ROWS)
    q = _load_rows(q_ptr + head * q_stride_n, first, q_stride_t, T, D, WIDTH, ROWS, True, UPCAST)
    k_head, v_head = k_ptr + kv * k_stride_n, v_ptr + kv * v_stride_n
    highest, total, o = no_keys(ROWS, WIDTH)
    highest, total, o = _attend(
        q, highest, total, o, row, low, whole, tiles_ptr, end_ptr, k_head, v_head, k_stride_t, v_stride_t, scale, T,
        D, WIDTH, KEYS, False, UPCAST,
    )  # fmt: skip
    highest, total, o = _attend(
        q, highest, total, o, row, whole, high, tiles_ptr, end_ptr, k_head, v_head, k_stride_t, v_stride_t, scale, T,
        D, WIDTH, KEYS, True, UPCAST,
    )  # fmt: skip
    total = tl.maximum(total, 1e-30)  # for rows beyond T; every other row sees at least its own key
    _store_rows(o_ptr + head * D, o / total[:, None], first, tl.num_programs(0) * D, T, D, WIDTH, ROWS)
    tl.store(lse_ptr + head.to(tl.int64) * T + row, highest + tl.log2(total), mask=row < T)


@triton.jit
def _add_dq(
    dq,  # [ROWS, WIDTH] fp32
    q,
    do,
    lse,  # [ROWS]
    delta,  # [ROWS]
    row,
    low,
    high,
    tiles_ptr,
    end_ptr,
    k_ptr,
    v_ptr,
    k_stride_t,
    v_stride_t,
    scale,
    T,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    KEYS: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return dq, before it is scaled, updated with the keys of these tiles."""
    tile = tl.load(tiles_ptr + low, mask=low < high, other=0)
    for at in range(low, high):
        following = tl.load(tiles_ptr + at + 1, mask=at + 1 < high, other=0)
        k = _load_rows(k_ptr, tile * KEYS, k_stride_t, T, D, WIDTH, KEYS, MASKED, UPCAST)
        v = _load_rows(v_ptr, tile * KEYS, v_stride_t, T, D, WIDTH, KEYS, MASKED, UPCAST)
        z = tl.dot(q, tl.trans(k), input_precision="ieee") * scale - lse[:, None]
        if MASKED:
            key = tile * KEYS + tl.arange(0, KEYS)
            end = tl.load(end_ptr + key, mask=key < T, other=0)
            z = tl.where((key[None, :] <= row[:, None]) & (row[:, None] < end[None, :]), z, float("-inf"))
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = tl.exp2(z) * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
        tile = following
    return dq


@triton.jit(do_not_specialize=["T", "per_kv"], do_not_specialize_on_alignment=_LISTS)
def _forest_dq_kernel(
    q_ptr,  # [T, N, D] bf16 or fp32
    k_ptr,  # [T, K, D] the same
    v_ptr,  # [T, K, D] the same
    o_ptr,  # [T, N, D] the same, dense
    do_ptr,  # [T, N, D] the same
    lse_ptr,  # [N, T] fp32
    end_ptr,  # [T] int32
    spans_ptr,  # [row tiles, 4] int32
    tiles_ptr,  # int32
    dq_ptr,  # [T, N, D] q's dtype, dense
    delta_ptr,  # [N, T] fp32, written: do . o
    T,
    per_kv,  # query heads of a KV head
    q_stride_t,
    q_stride_n,
    k_stride_t,
    k_stride_n,
    v_stride_t,
    v_stride_n,
    do_stride_t,
    do_stride_n,
    scale,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    head = tl.program_id(0)
    kv = head // per_kv
    span = spans_ptr + tl.program_id(1) * 4
    first = tl.load(span) * ROWS
    low, whole, high = tl.load(span + 1), tl.load(span + 2), tl.load(span + 3)
    row = first + tl.arange(0, ROWS)
    o = _load_rows(o_ptr + head * D, first, tl.num_programs(0) * D, T, D, WIDTH, ROWS, True, UPCAST)
    do = _load_rows(do_ptr + head * do_stride_n, first, do_stride_t, T, D, WIDTH, ROWS, True, UPCAST)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    row_at = head.to(tl.int64) * T + row
    tl.store(delta_ptr + row_at, delta, mask=row < T)
    lse = tl.load(lse_ptr + row_at, mask=row < T, other=0.0)
    q = _load_rows(q_ptr + head * q_stride_n, first, q_stride_t, T, D, WIDTH, ROWS, True, UPCAST)
    k_head, v_head = k_ptr + kv * k_stride_n, v_ptr + kv * v_stride_n
    dq = tl.zeros((ROWS, WIDTH), tl.float32)
    dq = _add_dq(
        dq, q, do, lse, delta, row, low, whole, tiles_ptr, end_ptr, k_head, v_head, k_stride_t, v_stride_t, scale, T,
        D, WIDTH, KEYS, False, UPCAST,
    )  # fmt: skip
    dq = _add_dq(
        dq, q, do, lse, delta, row, whole, high, tiles_ptr, end_ptr, k_head, v_head, k_stride_t, v_stride_t, scale, T,
        D, WIDTH, KEYS, True, UPCAST,
    )  # fmt: skip
    _store_rows(dq_ptr + head * D, dq * (scale * 0.6931471805599453), first, tl.num_programs(0) * D, T, D, WIDTH, ROWS)


@triton.jit
def _add_dkv(
    dk,  # [KEYS, WIDTH] fp32
    dv,  # [KEYS, WIDTH] fp32
    k,
    v,
    key,  # [KEYS]
    end,  # [KEYS]
    low,  # tiles of rows low .. gap - 1 and after .. high - 1
    gap,
    after,
    high,
    q_ptr,  # of the group's first head
    do_ptr,
    lse_ptr,
    delta_ptr,
    q_stride_t,
    q_stride_n,
    do_stride_t,
    do_stride_n,
    scale,
    T,
    per_kv,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    MASKED: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Return dk, before it is scaled, and dv, updated with these rows of all heads of the group."""
    count = gap - low + high - after
    for step in range(count * per_kv):
        head = step // count
        place = step - head * count
        tile = tl.where(place < gap - low, low + place, after + place - (gap - low))
        first = tile * ROWS
        row = first + tl.arange(0, ROWS)
        q = _load_rows(q_ptr + head * q_stride_n, first, q_stride_t, T, D, WIDTH, ROWS, MASKED, UPCAST)
        do = _load_rows(do_ptr + head * do_stride_n, first, do_stride_t, T, D, WIDTH, ROWS, MASKED, UPCAST)
        row_at = head.to(tl.int64) * T + row
        if MASKED:
            lse = tl.load(lse_ptr + row_at, mask=row < T, other=0.0)
            delta = tl.load(delta_ptr + row_at, mask=row < T, other=0.0)
        else:
            lse = tl.load(lse_ptr + row_at)
            delta = tl.load(delta_ptr + row_at)
        z = tl.dot(k, tl.trans(q), input_precision="ieee") * scale - lse[None, :]
        if MASKED:
            z = tl.where((key[:, None] <= row[None, :]) & (row[None, :] < end[:, None]), z, float("-inf"))
        p = tl.exp2(z)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
        dp = tl.dot(v, tl.trans(do), input_precision="ieee")
        ds = p * (dp - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit(do_not_specialize=["T", "per_kv"], do_not_specialize_on_alignment=_LISTS)
def _forest_dkv_kernel(
    q_ptr,  # [T, N, D] bf16 or fp32
    k_ptr,  # [T, K, D] the same
    v_ptr,  # [T, K, D] the same
    do_ptr,  # [T, N, D] the same
    lse_ptr,  # [N, T] fp32
    delta_ptr,  # [N, T] fp32
    end_ptr,  # [T] int32
    spans_ptr,  # [key tiles, 5] int32
    dk_ptr,  # [T, K, D] q's dtype, dense
    dv_ptr,  # [T, K, D] the same
    T,
    per_kv,  # query heads of a KV head
    q_stride_t,
    q_stride_n,
    k_stride_t,
    k_stride_n,
    v_stride_t,
    v_stride_n,
    do_stride_t,
    do_stride_n,
    scale,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    kv = tl.program_id(0)
    span = spans_ptr + tl.program_id(1) * 5
    first = tl.load(span) * KEYS
    low, whole, after, high = tl.load(span + 1), tl.load(span + 2), tl.load(span + 3), tl.load(span + 4)
    key = first + tl.arange(0, KEYS)
    end = tl.load(end_ptr + key, mask=key < T, other=0)
    k = _load_rows(k_ptr + kv * k_stride_n, first, k_stride_t, T, D, WIDTH, KEYS, True, UPCAST)
    v = _load_rows(v_ptr + kv * v_stride_n, first, v_stride_t, T, D, WIDTH, KEYS, True, UPCAST)
    q_head, do_head = q_ptr + kv * per_kv * q_stride_n, do_ptr + kv * per_kv * do_stride_n
    heads_at = kv.to(tl.int64) * per_kv * T
    dk, dv = tl.zeros((KEYS, WIDTH), tl.float32), tl.zeros((KEYS, WIDTH), tl.float32)
    # First the tiles of rows whole .. after - 1, which see all of the keys and need no mask; then those on either side.
    dk, dv = _add_dkv(
        dk, dv, k, v, key, end, whole, after, after, after, q_head, do_head, lse_ptr + heads_at, delta_ptr + heads_at,
        q_stride_t, q_stride_n, do_stride_t, do_stride_n, scale, T, per_kv, D, WIDTH, ROWS, False, UPCAST,
    )  # fmt: skip
    dk, dv = _add_dkv(
        dk, dv, k, v, key, end, low, whole, after, high, q_head, do_head, lse_ptr + heads_at, delta_ptr + heads_at,
        q_stride_t, q_stride_n, do_stride_t, do_stride_n, scale, T, per_kv, D, WIDTH, ROWS, True, UPCAST,
    )  # fmt: skip
    kv_stride = tl.num_programs(0) * D
    # log 2: scale has a factor of log2 e.
    _store_rows(dk_ptr + kv * D, dk * (scale * 0.6931471805599453), first, kv_stride, T, D, WIDTH, KEYS)
    _store_rows(dv_ptr + kv * D, dv, first, kv_stride, T, D, WIDTH, KEYS)


# --- Launches


def forest_forward(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, lists: ForestLists) -> tuple[Tensor, Tensor]:
    """Compute (output like q, dense; e [N, T] float32: log2 sum 2^z, the log-sum-exp times log2 e).

    The last axes of the inputs are dense."""
    T, N, D = q_TND.shape
    out_TND = torch.empty((T, N, D), dtype=q_TND.dtype, device=q_TND.device)
    lse_NT = torch.empty((N, T), dtype=torch.float32, device=q_TND.device)
    with on_device(q_TND):
        _forest_forward_kernel[(N, len(lists.forward))](
            q_TND,
            k_TKD,
            v_TKD,
            lists.end_T,
            lists.forward,
            lists.forward_tiles,
            out_TND,
            lse_NT,
            T,
            q_TND.shape[1] // k_TKD.shape[1],
            *_strides(q_TND, k_TKD, v_TKD),
            **_options(q_TND, lists.tilings.forward),
        )
    return out_TND, lse_NT


class TritonForest(ForestKernels):
    """Attention of a `PrefixForest` in Triton: bfloat16 and float32, head dimensions up to MOST_DIM."""

    def attend(self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, layout: PrefixForest) -> Tensor:
        tilings = forest_tilings(is_exact(q_TND), _width(q_TND.shape[2]))
        if tilings not in layout.lists:
            with torch.inference_mode(False):
                layout.lists[tilings] = make_lists(layout.lengths, layout.ends, tilings, layout.device)
        out_TND: Tensor = _ForestAttention.apply(q_TND, k_TKD, v_TKD, layout.lists[tilings])
        return out_TND


class _ForestAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, lists: ForestLists) -> Tensor:
        q_TND, k_TKD, v_TKD = map(_dense_last, (q_TND, k_TKD, v_TKD))
        out_TND, lse_NT = forest_forward(q_TND, k_TKD, v_TKD, lists)
        ctx.save_for_backward(q_TND, k_TKD, v_TKD, out_TND, lse_NT)
        ctx.lists = lists
        return out_TND

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_TND, k_TKD, v_TKD, out_TND, lse_NT = ctx.saved_tensors
        grad_TND, lists = _dense_last(grads[0]), ctx.lists
        (T, N, D), K = q_TND.shape, k_TKD.shape[1]
        dq_TND = torch.empty((T, N, D), dtype=q_TND.dtype, device=q_TND.device)
        dk_TKD, dv_TKD = (torch.empty((T, K, D), dtype=k_TKD.dtype, device=k_TKD.device) for _ in range(2))
        delta_NT = torch.empty_like(lse_NT)  # do . o
        strides = _strides(q_TND, k_TKD, v_TKD, grad_TND)
        with on_device(q_TND):
            _forest_dq_kernel[(N, len(lists.dq))](
                q_TND,
                k_TKD,
                v_TKD,
                out_TND,
                grad_TND,
                lse_NT,
                lists.end_T,
                lists.dq,
                lists.dq_tiles,
                dq_TND,
                delta_NT,
                T,
                N // K,
                *strides,
                **_options(q_TND, lists.tilings.dq),
            )
            _forest_dkv_kernel[(K, len(lists.dkv))](
                q_TND,
                k_TKD,
                v_TKD,
                grad_TND,
                lse_NT,
                delta_NT,
                lists.end_T,
                lists.dkv,
                dk_TKD,
                dv_TKD,
                T,
                N // K,
                *strides,
                **_options(q_TND, lists.tilings.dkv),
            )
        return dq_TND, dk_TKD, dv_TKD, None


def _dense_last(x_TND: Tensor) -> Tensor:
    return x_TND if x_TND.stride(2) == 1 else x_TND.contiguous()


def is_served(dtype: torch.dtype, dim: int) -> bool:
    return dtype in (torch.bfloat16, torch.float32) and dim <= MOST_DIM


def forest_tilings(exact: bool, width: int) -> Tilings:
    """Return tilings by head dimension: the fastest on an H200 up to 128; above, without spills. exact: float32."""
    if exact:
        return Tilings(FLOAT32, FLOAT32, FLOAT32)
    if width > 128:
        return Tilings(
            KeyTiling(rows=64, keys=32, num_warps=8, num_stages=1),
            KeyTiling(rows=32, keys=32, num_warps=8, num_stages=2),
            KeyTiling(rows=32, keys=32, num_warps=8, num_stages=1),
        )
    if width > 64:
        return Tilings(
            KeyTiling(rows=64, keys=64, num_warps=4, num_stages=3),
            KeyTiling(rows=64, keys=32, num_warps=4, num_stages=3),
            # On Hopper it reads 7 spilled registers per step, and is faster than all tilings that do not spill.
            KeyTiling(rows=32, keys=64, num_warps=4, num_stages=3),
        )
    return Tilings(
        KeyTiling(rows=128, keys=64, num_warps=4, num_stages=3),
        KeyTiling(rows=64, keys=32, num_warps=4, num_stages=3),
        KeyTiling(rows=64, keys=64, num_warps=4, num_stages=3),
    )


def _width(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


def _strides(*tensors: Tensor) -> list[int]:
    """Return the strides of rows and heads."""
    return [stride for x in tensors for stride in x.stride()[:2]]


def _options(q_TND: Tensor, tiling: KeyTiling) -> dict[str, Any]:
    D = q_TND.shape[2]
    return {"scale": LOG2_E * D**-0.5, "D": D, "WIDTH": _width(D), "UPCAST": INTERPRETED, **tiling.options()}


# --- Specialisations


def specialisations() -> tuple[Specialisation, ...]:
    """Return the specialisations that the launchers request.

    They cover the models' head dimensions, one that is no power of two, the largest, and float32."""
    asked = [(dim, "bf16") for dim in (64, 96, 128, 256)] + [(128, "fp32")]
    return tuple(one for of in asked for one in _specialised(*of))


def _specialised(dim: int, dtype: str) -> list[Specialisation]:
    tilings = forest_tilings(dtype == "fp32", _width(dim))
    operands = {
        "forward": (_forest_forward_kernel, tilings.forward, ("q", "k", "v", "o"), ("q", "k", "v")),
        "dq": (_forest_dq_kernel, tilings.dq, ("q", "k", "v", "o", "do", "dq"), ("q", "k", "v", "do")),
        "dkv": (_forest_dkv_kernel, tilings.dkv, ("q", "k", "v", "do", "dk", "dv"), ("q", "k", "v", "do")),
    }
    made = []
    for name, (kernel, tiling, tensors, strided) in operands.items():
        pointers = [f"{x}_ptr" for x in tensors]
        strides = [f"{x}_stride_{axis}" for x in strided for axis in "tn"]
        numbers = ["lse_ptr"] if name == "forward" else ["lse_ptr", "delta_ptr"]
        integers = ["end_ptr", "spans_ptr"] if name == "dkv" else _LISTS
        made.append(
            Specialisation(
                name=f"forest {name} {dtype} D {dim}",
                kernel=kernel,
                signature=dict.fromkeys(pointers, f"*{dtype}")
                | dict.fromkeys(numbers, "*fp32")
                | dict.fromkeys(integers, "*i32")
                | {"T": "i32", "per_kv": "i32"}
                | dict.fromkeys(strides, "i32")
                | {"scale": "fp32"},
                constants={"D": dim, "WIDTH": _width(dim)}
                | {"ROWS": tiling.rows, "KEYS": tiling.keys, "UPCAST": False},
                aligned=(*pointers, *numbers, *strides),
                num_warps=tiling.num_warps,
                num_stages=tiling.num_stages,
                tensor_cores=dtype == "bf16",
                wgmma=(tiling.keys if name == "dkv" else tiling.rows) >= 64,  # the products' rows
            )
        )
    return made
