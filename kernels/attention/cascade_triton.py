"""Decoding in passes: a common prefix is read once for all sequences that share it, then all parts are merged.

    o_i = sum_p 2^(e_p - e) o_p,   e = log2 sum_p 2^e_p        p over a row's parts, e_p and o_p as in decode_triton.py

`_prefix_kernel` computes the parts of a common prefix for the rows of all members of a group together (Juravsky et al.
2024, hydragen; Ye et al. 2025, cascade inference of FlashInfer): row i of its tile is row i // R % Q, of head i % R,
of member i // (R Q). `_merge_kernel` computes a row of the output from its own parts in order, then the prefix's, found
by `place` (-1: no group). Grids and workspace depend only on shapes. A sequence is in at most one group.

Axes: B sequences, Q rows, N query heads, K KV heads, R query heads of a KV head, D head dimension, P blocks, S slots, G
groups, M members (docs/notation.md).
"""

# Kernels are typed by their launches.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from thresher.kernels.attention.decode_triton import (
    DEEP,
    FLOAT32,
    MODEL_SLOTS,
    MODELS,
    KeyTiling,
    attend_keys,
    gpu,
    is_exact,
    key_specialisation,
    launch_decode,
    leave_part,
    model_constants,
    no_keys,
    options,
    strides,
)
from thresher.kernels.attention.rows import KEYS, DecodeRows, SharedPrefix, decode_splits, prefix_splits
from thresher.kernels.registry import Specialisation

PREFIX = KeyTiling(rows=64, keys=KEYS, num_warps=4, num_stages=3)
MERGED = 16  # parts that the merging kernel reads at a time, at most


_PREFIX_NARROW = ["table_ptr", "length_ptr", "members_ptr", "count_ptr", "lse_ptr", "place_ptr"]
_PREFIX_SIZES = ["groups", "members", "queries", "table_stride", "members_stride", "splits"]


@triton.jit(do_not_specialize=_PREFIX_SIZES, do_not_specialize_on_alignment=_PREFIX_NARROW)
def _prefix_kernel(
    q_ptr,  # [B, Q, N, D] bf16 or fp32
    k_ptr,  # [P, K, S, D] the same, a block dense
    v_ptr,  # [P, K, S, D] the same
    table_ptr,  # [G, P] int32
    length_ptr,  # [G] int32
    members_ptr,  # [G, M] int32
    count_ptr,  # [B] int32
    o_ptr,  # [splits, G, K, M x Q x R, D] fp32
    lse_ptr,  # [splits, G, K, M x Q x R] fp32
    place_ptr,  # [B] int32, written: group x M + member
    groups,  # G
    members,  # M
    queries,  # Q
    table_stride,
    members_stride,
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
    UPCAST: tl.constexpr,
):
    # Groups that exist come first: their programs start first, and those without work end after them.
    tiles = tl.cdiv(members * queries * PER_KV, ROWS)
    g = (tl.program_id(2) // tiles).to(tl.int64)
    kv = tl.program_id(1)
    split = tl.program_id(0)
    length = tl.load(length_ptr + g)
    if length == 0:
        return
    part = tl.cdiv(tl.cdiv(length, KEYS), splits) * KEYS
    low = split * part
    high = tl.minimum(low + part, length)
    i = tl.program_id(2) % tiles * ROWS + tl.arange(0, ROWS)
    row = i // PER_KV % queries
    head = kv * PER_KV + i % PER_KV
    member = i // (PER_KV * queries)
    b = tl.load(members_ptr + g * members_stride + member, mask=member < members, other=-1)
    present = row < tl.load(count_ptr + b, mask=b >= 0, other=0)
    if (kv == 0) & (split == 0):
        tl.store(place_ptr + b, g.to(tl.int32) * members + member, mask=(b >= 0) & (i % (PER_KV * queries) == 0))
    if tl.max(present.to(tl.int32), 0) == 0:  # with 16 places for members, a group of 8 fills one tile of two
        return

    depth = tl.arange(0, WIDTH)
    across = (depth < D)[None, :]
    q_at = b.to(tl.int64) * q_stride_b + row * q_stride_q + head * q_stride_n
    q = tl.load(q_ptr + q_at[:, None] + depth[None, :], mask=present[:, None] & across, other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    highest, total, o = no_keys(ROWS, WIDTH)
    last = tl.full((ROWS,), 0, tl.int32) + (length - 1)
    whole: tl.constexpr = SLOTS % KEYS == 0  # a prefix is whole blocks
    highest, total, o = attend_keys(
        q, highest, total, o, last, low, high, table_ptr + g * table_stride, k_ptr + kv * SLOTS * D,
        v_ptr + kv * SLOTS * D, k_stride, v_stride, scale, D, WIDTH, SLOTS, KEYS, not whole, UPCAST,
    )  # fmt: skip
    rows = members * queries * PER_KV
    first_at = ((split * groups + g) * KV_HEADS + kv) * rows
    leave_part(o_ptr, lse_ptr, highest, total, o, first_at, i, rows, low < high, D, WIDTH)


@triton.jit
def _add_parts(
    highest,  # of all e_p so far, -inf for none
    total,  # sum 2^(e_p - highest)
    o,  # [WIDTH] fp32: sum 2^(e_p - highest) o_p
    o_ptr,  # [parts, rows, D] fp32
    lse_ptr,  # [parts, rows] fp32
    at,  # the row
    rows,
    parts,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Return (highest, total, o) updated with these parts, PARTS at a time."""
    depth = tl.arange(0, WIDTH)
    for start in range(0, parts, PARTS):
        part = start + tl.arange(0, PARTS)
        place = part.to(tl.int64) * rows + at
        lse = tl.load(lse_ptr + place, mask=part < parts, other=float("-inf"))
        there = (lse > float("-inf"))[:, None] & (depth < D)[None, :]
        o_part = tl.load(o_ptr + place[:, None] * D + depth[None, :], mask=there, other=0.0)
        higher = tl.maximum(highest, tl.max(lse, 0))  # finite: a row sees the first key of its first part
        shrink = tl.exp2(highest - higher)
        weight = tl.exp2(lse - higher)
        o = o * shrink + tl.sum(o_part * weight[:, None], 0)
        total = total * shrink + tl.sum(weight, 0)
        highest = higher
    return highest, total, o


_MERGE_NARROW = ["lse_ptr", "prefix_lse_ptr", "place_ptr", "count_ptr"]
_MERGE_SIZES = ["sequences", "queries", "parts", "groups", "members", "prefix_parts"]


@triton.jit(do_not_specialize=_MERGE_SIZES, do_not_specialize_on_alignment=_MERGE_NARROW)
def _merge_kernel(
    o_ptr,  # [parts, B, K, Q x R, D] fp32
    lse_ptr,  # [parts, B, K, Q x R] fp32
    prefix_o_ptr,  # [prefix parts, G, K, M x Q x R, D] fp32, read if PREFIX
    prefix_lse_ptr,  # [prefix parts, G, K, M x Q x R] fp32
    place_ptr,  # [B] int32: group x M + member, -1 for none
    count_ptr,  # [B] int32
    out_ptr,  # [B, Q, N, D] bf16 or fp32
    sequences,  # B
    queries,  # Q
    parts,
    groups,  # G
    members,  # M
    prefix_parts,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    KV_HEADS: tl.constexpr,
    PER_KV: tl.constexpr,
    PARTS: tl.constexpr,
    PREFIX: tl.constexpr,
):
    at = tl.program_id(0)
    head = at % (KV_HEADS * PER_KV)
    row = at // (KV_HEADS * PER_KV) % queries
    b = at // (KV_HEADS * PER_KV) // queries
    depth = tl.arange(0, WIDTH)
    highest = float("-inf")
    total = 0.0
    o = tl.zeros((WIDTH,), tl.float32)
    if row < tl.load(count_ptr + b):
        kv = head // PER_KV
        tile = queries * PER_KV
        i = row * PER_KV + head % PER_KV
        rows = sequences * KV_HEADS * tile
        own = (b * KV_HEADS + kv) * tile + i
        highest, total, o = _add_parts(highest, total, o, o_ptr, lse_ptr, own, rows, parts, D, WIDTH, PARTS)
        if PREFIX:
            place = tl.load(place_ptr + b)
            if place >= 0:
                rows = groups * KV_HEADS * members * tile
                own = ((place // members * KV_HEADS + kv) * members + place % members) * tile + i
                highest, total, o = _add_parts(
                    highest, total, o, prefix_o_ptr, prefix_lse_ptr, own, rows, prefix_parts, D, WIDTH, PARTS
                )
    o = o / tl.maximum(total, 1e-30)
    tl.store(out_ptr + at.to(tl.int64) * D + depth, o.to(out_ptr.dtype.element_ty), mask=depth < D)


@dataclass(frozen=True, slots=True)
class PassParts:
    """Parts of one pass, not merged: o [splits, .., D] fp32, and lse, the same without D."""

    o: Tensor
    lse: Tensor


def triton_decode(q_BQND: Tensor, k_PKSD: Tensor, v_PKSD: Tensor, rows: DecodeRows, splits: int | None) -> Tensor:
    """Compute `decode_attention` of paged_cuda.py, which has checked the arguments."""
    (B, Q, N, D), (K, S) = q_BQND.shape, k_PKSD.shape[1:3]
    (sms, _), prefix = gpu(q_BQND.device), rows.prefix
    own_splits = splits or decode_splits(B, K, rows.table_BP.shape[1] * S, sms)
    out_BQND = q_BQND.new_empty(B, Q, N, D)
    if prefix is not None and not prefix.members_GM.numel() * prefix.table_GP.numel():
        prefix = None
    if own_splits == 1 and prefix is None:
        launch_decode(q_BQND, k_PKSD, v_PKSD, rows, 1, out_BQND, None, None)
        return out_BQND
    own = _new_parts(q_BQND, own_splits, B, K, Q * N // K)
    if prefix is None:
        launch_decode(q_BQND, k_PKSD, v_PKSD, rows, own_splits, own.o, own.lse, None)
        _launch_merge(own, None, rows, out_BQND)
        return out_BQND
    G, M = prefix.members_GM.shape
    shared_splits = splits or prefix_splits(B, K, prefix.table_GP.shape[1] * S, sms)
    shared = _new_parts(q_BQND, shared_splits, G, K, M * Q * N // K)
    place_B = torch.empty_like(rows.count_B)
    launch_decode(q_BQND, k_PKSD, v_PKSD, rows, own_splits, own.o, own.lse, place_B)
    _launch_prefix(q_BQND, k_PKSD, v_PKSD, rows, prefix, shared, place_B)
    _launch_merge(own, (shared, place_B, M), rows, out_BQND)
    return out_BQND


def _new_parts(q_BQND: Tensor, *shape: int) -> PassParts:
    o = q_BQND.new_empty(*shape, q_BQND.shape[3], dtype=torch.float32)
    return PassParts(o, o.new_empty(shape))


def prefix_tiling(exact: bool, dim: int) -> KeyTiling:
    if exact:
        return FLOAT32
    return PREFIX if dim <= 128 else DEEP


def _launch_prefix(
    q_BQND: Tensor,
    k_PKSD: Tensor,
    v_PKSD: Tensor,
    rows: DecodeRows,
    prefix: SharedPrefix,
    parts: PassParts,
    place_B: Tensor,
) -> None:
    """Launch `_prefix_kernel`, after `launch_decode`, which sets the place of every sequence to -1."""
    Q, K, (G, M) = q_BQND.shape[1], k_PKSD.shape[1], prefix.members_GM.shape
    splits, rows_of_group = parts.o.shape[0], parts.o.shape[3]
    tiling = prefix_tiling(is_exact(q_BQND), q_BQND.shape[3])
    _prefix_kernel[(splits, K, G * triton.cdiv(rows_of_group, tiling.rows))](
        q_BQND,
        k_PKSD,
        v_PKSD,
        prefix.table_GP,
        prefix.length_G,
        prefix.members_GM,
        rows.count_B,
        parts.o,
        parts.lse,
        place_B,
        G,
        M,
        Q,
        prefix.table_GP.stride(0),
        prefix.members_GM.stride(0),
        splits,
        *strides(q_BQND, k_PKSD, v_PKSD),
        **options(q_BQND, k_PKSD, tiling),
    )


def _launch_merge(
    own: PassParts, shared: tuple[PassParts, Tensor, int] | None, rows: DecodeRows, out_BQND: Tensor
) -> None:
    """Launch `_merge_kernel`. shared: a prefix pass's parts, places, and members of a group."""
    (B, Q, N, D), (splits, _, K, _, _) = out_BQND.shape, own.o.shape
    # Without a prefix, its arguments are not read; any pointer will do.
    prefix, place_B, members = (own, rows.count_B, 1) if shared is None else shared
    constants = model_constants(N, K, D, MODEL_SLOTS)
    at_once = min(MERGED, triton.next_power_of_2(max(splits, prefix.o.shape[0])))
    _merge_kernel[(B * Q * N,)](
        own.o,
        own.lse,
        prefix.o,
        prefix.lse,
        place_B,
        rows.count_B,
        out_BQND,
        B,
        Q,
        splits,
        prefix.o.shape[1],
        members,
        prefix.o.shape[0],
        D=D,
        WIDTH=constants["WIDTH"],
        KV_HEADS=K,
        PER_KV=N // K,
        PARTS=at_once,
        PREFIX=shared is not None,
        num_warps=_merge_warps(at_once, constants["WIDTH"]),
    )


def _merge_warps(parts: int, width: int) -> int:
    """Return the number of warps, 1 to 4; with more than 1, a thread loads at least 16 numbers at a time."""
    return max(1, min(4, parts * width // 512))


def specialisations() -> tuple[Specialisation, ...]:
    """Return the specialisations that the launchers above request at the models' shapes."""
    prefix = [_prefix_specialisation(*model) for model in MODELS]
    merge = [_merge_specialisation(*model, parts) for model, parts in ((MODELS[0], 2), (MODELS[1], 2), (MODELS[1], 16))]
    return (*prefix, _prefix_specialisation(128, 6, 2, "fp32"), *merge)


def _prefix_specialisation(dim: int, per_kv: int, kv_heads: int, dtype: str = "bf16") -> Specialisation:
    integers = dict.fromkeys(("table_ptr", "length_ptr", "members_ptr", "count_ptr", "place_ptr"), "*i32")
    return key_specialisation(
        f"prefix {dtype} D {dim} {per_kv} x {kv_heads}",
        _prefix_kernel,
        prefix_tiling(dtype == "fp32", dim),
        dtype,
        others=dict.fromkeys(("o_ptr", "lse_ptr"), "*fp32") | integers | dict.fromkeys(_PREFIX_SIZES, "i32"),
        constants=model_constants(per_kv * kv_heads, kv_heads, dim, MODEL_SLOTS),
    )


def _merge_specialisation(dim: int, per_kv: int, kv_heads: int, parts: int) -> Specialisation:
    pointers = dict.fromkeys(("o_ptr", "lse_ptr", "prefix_o_ptr", "prefix_lse_ptr"), "*fp32")
    pointers |= {"place_ptr": "*i32", "count_ptr": "*i32", "out_ptr": "*bf16"}
    heads = {"KV_HEADS": kv_heads, "PER_KV": per_kv}
    return Specialisation(
        name=f"merge D {dim} {per_kv} x {kv_heads} by {parts}",
        kernel=_merge_kernel,
        signature=pointers | dict.fromkeys(_MERGE_SIZES, "i32"),
        constants={"D": dim, "WIDTH": dim, "PARTS": parts, "PREFIX": True} | heads,
        aligned=("o_ptr", "prefix_o_ptr", "out_ptr"),
        num_warps=_merge_warps(parts, dim),
    )
