"""The chunked form of the gated delta rule (rule.py) in Triton: three kernels forward; backward runs two of them again
and four more.

    solve      T = (1 + A)^-1, u = T beta v, w = T beta exp(c) k
    scan       x = u - w S,  S <- exp(c_C) S + k^T exp(c_C - c) x
    out        o = exp(c) q S + P x
    within     P^T do
    back       dx = P^T do + exp(c_C - c) k dS,  dS <- exp(c_C) dS + q^T exp(c) do - w^T dx, from the last chunk on
    values     the gradient of v, and the parts of those of P and A that depend on the values
    keys       the gradients of q, k, decay and beta

The letters are those of rule.py; q is q / sqrt(D) in these formulas, and the kernels multiply by `scale`. A program has
one head of a chunk, or some columns of it; in scan and back, some columns of a head of a segment. These two are
launched once per depth of the forest: a segment reads the state that its parent stored, and in reverse a parent adds
the gradients that its children stored, in their order. No atomics.

T is computed in blocks of 16 tokens: F, the blocks on the diagonal of 1 + A, are inverted by substitution, all at once;
with N = F^-1 (A without them), N^4 = 0, so that T = (1 + N^2) (1 - N) F^-1.

Products have operands in the dtype of v, and add in float32; sums of decays are float64, states and everything else
float32. In bfloat16 the operand that a state is multiplied with is rounded to it, and so is the copy of the state for
the product, as in flash-linear-attention; the carried state is not.

Axes: T tokens, S segments, X chunks of at most C tokens, K query and key heads, V value heads, D dimension of a key, E
of a value.
"""

# Kernels are typed by their launches.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from thresher.kernels.operands import dense_rows, on_device
from thresher.kernels.registry import Specialisation

INTERPRETED = bool(triton.knobs.runtime.interpret)
# Dimensions of keys and values, both the same, with which results on an H200 are right (Triton 3.6.0). With others, 16
# or keys of 128 and values of 8, u and w come out wrong from an inverse that is right: apparently a fault of the
# compiler.
DIMS = (32, 64, 128)
BLOCK = 16  # tokens that are solved by substitution


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tokens of a chunk, columns of a state that a program has at a time, and warps of the kernels.

    precision: of the products that compute T, whose operands are float32."""

    chunk: int
    columns: int
    precision: str
    solve: int
    scan: int
    out: int
    values: int
    keys: int


# No spills inside a loop. T is rounded to bfloat16, which is less exact than tf32.
BFLOAT16 = Tiling(chunk=64, columns=32, precision="tf32", solve=4, scan=4, out=4, values=4, keys=8)
FLOAT32 = Tiling(chunk=16, columns=16, precision="ieee", solve=8, scan=8, out=8, values=8, keys=8)


# --- Lists


@dataclass(frozen=True, slots=True)
class SegmentLists:
    """Lists of a plan, on the device, int32; its segments that are not empty, by depth.

    chunk_X2: first row of a chunk, and the row after its last. segment_S4: a segment's first chunk, the chunk after its
    last, the state that it begins with (an initial or a stored one), and where its own is stored, -1 for nowhere.
    children_S2: the range of its children in child_S, which has them as places in segment_S4. depths: segments of each.
    left: number of stored states. sequence_S (int64): the number of each segment. empty_B (int64): those of empty ones;
    None for none.
    """

    chunk_X2: Tensor
    segment_S4: Tensor
    children_S2: Tensor
    child_S: Tensor
    depths: list[int]
    left: int
    sequence_S: Tensor
    empty_B: Tensor | None


def make_lists(bounds: Sequence[int], parents: Sequence[int] | None, chunk: int, device: torch.device) -> SegmentLists:
    """Make the lists; arguments as in `ChunkPlan`. Without parents every state is stored, at its sequence's number."""
    lengths = np.diff(np.array(bounds, np.int64))
    depth = np.zeros(len(lengths), np.int64)
    for n, parent in enumerate(parents or ()):
        depth[n] = 0 if parent < 0 else depth[parent] + 1
    order = np.lexsort((-lengths, depth))
    order = order[lengths[order] > 0]
    place = np.full(len(lengths) + 1, -1)  # the last entry is for no parent
    place[order] = np.arange(len(order))
    above = np.array(parents if parents is not None else np.full(len(lengths), -1), np.int64)
    has_children = np.isin(np.arange(len(lengths)), above)
    slot = np.where(has_children, np.cumsum(has_children) - 1, -1) if parents is not None else np.arange(len(lengths))
    counts = -(-lengths[order] // chunk)
    stop = np.cumsum(counts)
    source = order if parents is None else np.append(slot, -1)[above[order]]
    segments = np.stack([stop - counts, stop, source, slot[order]], 1)
    chunks = [
        (first, min(first + chunk, bounds[n + 1])) for n in order for first in range(bounds[n], bounds[n + 1], chunk)
    ]
    under = place[above[order]]  # in the order of the segments: the longest of a parent's children first
    child = np.argsort(under, kind="stable")[np.count_nonzero(under < 0) :]
    children = np.searchsorted(under[child], np.stack([np.arange(len(order)), np.arange(len(order)) + 1], 1))
    given = [np.array(chunks, np.int64).reshape(-1, 2), segments, children, child, order]
    joined = torch.from_numpy(np.concatenate([x.reshape(-1) for x in given]).astype(np.int32))
    if device.type == "cuda":
        joined = joined.pin_memory().to(device, non_blocking=True)
    parts = joined.split([x.size for x in given])
    chunk_X2, segment_S4, children_S2, child_S, sequence_S = (
        x.view(like.shape) for x, like in zip(parts, given, strict=True)
    )
    left = len(lengths) if parents is None else int(has_children.sum())
    depths = np.bincount(depth[order]).tolist() if len(order) else []
    empty = np.flatnonzero(lengths == 0)
    empty_B = torch.from_numpy(empty).to(device) if len(empty) else None
    return SegmentLists(chunk_X2, segment_S4, children_S2, child_S, depths, left, sequence_S.long(), empty_B)


# --- Kernels. Pointers are to the first of the heads that a launch computes; rows of a tensor are `stride` apart.


@triton.jit
def _tile(x_ptr, row, stop, stride, column, COUNT: tl.constexpr, UPCAST: tl.constexpr):
    """Load rows [C, columns] of one head, with zeros after the chunk's last token."""
    x = tl.load(
        x_ptr + (row.to(tl.int64) * stride)[:, None] + column[None, :],
        mask=(row < stop)[:, None] & (column < COUNT)[None, :],
        other=0.0,
    )
    if UPCAST:
        x = x.to(tl.float32)
    return x


@triton.jit
def _put(x_ptr, x, row, stop, stride, column, COUNT: tl.constexpr):
    tl.store(
        x_ptr + (row.to(tl.int64) * stride)[:, None] + column[None, :],
        x.to(x_ptr.dtype.element_ty),
        mask=(row < stop)[:, None] & (column < COUNT)[None, :],
    )


@triton.jit
def _state(column, depth, D: tl.constexpr, E: tl.constexpr):
    """Return (offsets of a state's columns [D, columns], which of them exist)."""
    return depth[:, None] * E + column[None, :], (depth < D)[:, None] & (column < E)[None, :]


@triton.jit
def _sums(decay_ptr, row, stop, stride):
    """Return (c [C], c_C), float64."""
    decay = tl.load(decay_ptr + row.to(tl.int64) * stride, mask=row < stop, other=0.0).to(tl.float64)
    return tl.cumsum(decay, 0), tl.sum(decay, 0)


@triton.jit
def _gaps(c, C: tl.constexpr):
    """Return G [C, C]."""
    i = tl.arange(0, C)
    gap = (c[:, None] - c[None, :]).to(tl.float32)
    return tl.exp(tl.where(i[:, None] >= i[None, :], gap, float("-inf")))


@triton.jit
def _inverse(system, C: tl.constexpr, BLOCK: tl.constexpr, PRECISION: tl.constexpr):
    """Compute (1 + A)^-1 [C, C] of A, which is 0 on and above the diagonal."""
    N: tl.constexpr = C // BLOCK
    n = tl.arange(0, N)
    i = tl.arange(0, BLOCK)
    own = (tl.arange(0, C) // BLOCK)[:, None, None] == n[None, :, None]  # [C, N, 1]: a token's own block
    blocks = tl.reshape(system, (C, N, BLOCK))
    on = tl.reshape(tl.sum(tl.where(own, blocks, 0.0), 1), (N, BLOCK, BLOCK))
    found = tl.where(i[None, :, None] == i[None, None, :], 1.0, 0.0) + tl.zeros_like(on)
    for r in range(1, BLOCK):
        here = (i == r)[None, :, None]
        factor = tl.sum(tl.where(here, on, 0.0), 1)
        row = tl.sum(factor[:, :, None] * found, 1)
        found = tl.where(here, found - row[:, None, :], found)
    found = tl.reshape(tl.where(own, tl.reshape(found, (C, BLOCK))[:, None, :], 0.0), (C, C))
    if C > BLOCK:
        off = tl.dot(found, tl.reshape(tl.where(own, 0.0, blocks), (C, C)), input_precision=PRECISION)
        found -= tl.dot(off, found, input_precision=PRECISION)
        if C > 2 * BLOCK:
            off = tl.dot(off, off, input_precision=PRECISION)
            found += tl.dot(off, found, input_precision=PRECISION)
    return found


_LISTS = ["chunk_ptr", "segment_ptr", "children_ptr", "child_ptr"]
# A slice of heads moves the gates' pointers by 4 bytes per head: no binary for each alignment.
_NARROW = [*_LISTS, "decay_ptr", "beta_ptr"]
_NUMBERS = ["per_key", "first"]


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_NARROW)
def _delta_solve_kernel(
    k_ptr,  # [T, K, D] bf16 or fp32
    v_ptr,  # [T, V, E] the same
    decay_ptr,  # [T, V] fp32
    beta_ptr,  # [T, V] fp32
    chunk_ptr,  # [X, 2] int32
    solve_ptr,  # [T, V, C] v's dtype, written: T
    u_ptr,  # [T, V, E] the same
    w_ptr,  # [T, V, D] the same
    k_stride,
    v_stride,
    gate_stride,
    per_key,  # value heads of a key head
    D: tl.constexpr,
    E: tl.constexpr,
    WIDTH_D: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):
    head, heads = tl.program_id(0), tl.num_programs(0)
    row = tl.load(chunk_ptr + 2 * tl.program_id(1)) + tl.arange(0, C)
    stop = tl.load(chunk_ptr + 2 * tl.program_id(1) + 1)
    depth = tl.arange(0, WIDTH_D)
    i = tl.arange(0, C)
    c, _ = _sums(decay_ptr + head, row, stop, gate_stride)
    beta = tl.load(beta_ptr + head + row.to(tl.int64) * gate_stride, mask=row < stop, other=0.0).to(tl.float32)
    k = _tile(k_ptr + head // per_key * D, row, stop, k_stride, depth, D, UPCAST)
    system = tl.dot(k, tl.trans(k), input_precision="ieee") * _gaps(c, C) * beta[:, None]
    solve = _inverse(tl.where(i[:, None] > i[None, :], system, 0.0), C, BLOCK, PRECISION).to(k.dtype)
    _put(solve_ptr + head * C, solve, row, stop, heads * C, i, C)
    read = ((beta * tl.exp(c.to(tl.float32)))[:, None] * k).to(k.dtype)
    _put(w_ptr + head * D, tl.dot(solve, read, input_precision="ieee"), row, stop, heads * D, depth, D)
    for first in range(0, E, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        v = _tile(v_ptr + head * E, row, stop, v_stride, column, E, UPCAST)
        u = tl.dot(solve, (beta[:, None] * v).to(v.dtype), input_precision="ieee")
        _put(u_ptr + head * E, u, row, stop, heads * E, column, E)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_NARROW)
def _delta_scan_kernel(
    k_ptr,  # [T, K, D] bf16 or fp32
    decay_ptr,  # [T, V] fp32
    u_ptr,  # [T, V, E] k's dtype
    w_ptr,  # [T, V, D] k's dtype
    chunk_ptr,  # [X, 2] int32
    segment_ptr,  # [S, 4] int32
    source_ptr,  # [.., V, D, E] fp32, read if HAS_SOURCE: the states that segments begin with
    x_ptr,  # [T, V, E] k's dtype, written
    before_ptr,  # [X, V, D, E] k's dtype, written: the state before each chunk
    left_ptr,  # [.., V, D, E] fp32, written
    k_stride,
    gate_stride,
    source_stride,  # of a state's heads together
    left_stride,
    per_key,
    first,  # segment
    D: tl.constexpr,
    E: tl.constexpr,
    WIDTH_D: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_SOURCE: tl.constexpr,
    UPCAST: tl.constexpr,
):
    head, heads = tl.program_id(1), tl.num_programs(1)
    segment = segment_ptr + 4 * (first + tl.program_id(2))
    depth = tl.arange(0, WIDTH_D)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at, there = _state(column, depth, D, E)
    state = tl.zeros((WIDTH_D, COLUMNS), tl.float32)
    if HAS_SOURCE:
        source = tl.load(segment + 2).to(tl.int64) * source_stride + head * (D * E)
        state += tl.load(source_ptr + source + at, mask=there, other=0.0)
    begin, end = tl.load(segment), tl.load(segment + 1)
    before = before_ptr + (begin.to(tl.int64) * heads + head) * (D * E)
    for chunk in range(begin, end):
        row = tl.load(chunk_ptr + 2 * chunk) + tl.arange(0, C)
        stop = tl.load(chunk_ptr + 2 * chunk + 1)
        tl.store(before + at, state.to(before_ptr.dtype.element_ty), mask=there)
        before += heads * (D * E)
        c, last = _sums(decay_ptr + head, row, stop, gate_stride)
        w = _tile(w_ptr + head * D, row, stop, heads * D, depth, D, UPCAST)
        u = _tile(u_ptr + head * E, row, stop, heads * E, column, E, UPCAST)
        x = u - tl.dot(w, state.to(w.dtype), input_precision="ieee")
        _put(x_ptr + head * E, x, row, stop, heads * E, column, E)
        k = _tile(k_ptr + head // per_key * D, row, stop, k_stride, depth, D, UPCAST)
        kept = (tl.exp((last - c).to(tl.float32))[:, None] * x).to(k.dtype)
        state = tl.dot(tl.trans(k), kept, tl.exp(last.to(tl.float32)) * state, input_precision="ieee")
    slot = tl.load(segment + 3)
    if slot >= 0:
        tl.store(left_ptr + slot.to(tl.int64) * left_stride + head * (D * E) + at, state, mask=there)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_NARROW)
def _delta_out_kernel(
    q_ptr,  # [T, K, D] bf16 or fp32
    k_ptr,  # [T, K, D] the same
    decay_ptr,  # [T, V] fp32
    x_ptr,  # [T, V, E] q's dtype
    before_ptr,  # [X, V, D, E] q's dtype
    chunk_ptr,  # [X, 2] int32
    o_ptr,  # [T, V, E] q's dtype, written
    q_stride,
    k_stride,
    gate_stride,
    o_stride,
    per_key,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDTH_D: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    head, heads = tl.program_id(1), tl.num_programs(1)
    chunk = tl.program_id(2)
    row = tl.load(chunk_ptr + 2 * chunk) + tl.arange(0, C)
    stop = tl.load(chunk_ptr + 2 * chunk + 1)
    depth = tl.arange(0, WIDTH_D)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at, there = _state(column, depth, D, E)
    c, _ = _sums(decay_ptr + head, row, stop, gate_stride)
    q = _tile(q_ptr + head // per_key * D, row, stop, q_stride, depth, D, UPCAST)
    k = _tile(k_ptr + head // per_key * D, row, stop, k_stride, depth, D, UPCAST)
    x = _tile(x_ptr + head * E, row, stop, heads * E, column, E, UPCAST)
    state = tl.load(before_ptr + (chunk.to(tl.int64) * heads + head) * (D * E) + at, mask=there, other=0.0)
    o = tl.dot(q, state.to(q.dtype), input_precision="ieee") * tl.exp(c.to(tl.float32))[:, None]
    within = (tl.dot(q, tl.trans(k), input_precision="ieee") * _gaps(c, C)).to(x.dtype)
    o = tl.dot(within, x, o, input_precision="ieee") * scale
    _put(o_ptr + head * E, o, row, stop, o_stride, column, E)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_NARROW)
def _delta_within_kernel(
    q_ptr,  # [T, K, D] bf16 or fp32
    k_ptr,  # [T, K, D] the same
    decay_ptr,  # [T, V] fp32
    do_ptr,  # [T, V, E] q's dtype
    chunk_ptr,  # [X, 2] int32
    dx_ptr,  # [T, V, E] fp32, written: P^T do
    q_stride,
    k_stride,
    gate_stride,
    do_stride,
    per_key,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDTH_D: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    head, heads = tl.program_id(1), tl.num_programs(1)
    row = tl.load(chunk_ptr + 2 * tl.program_id(2)) + tl.arange(0, C)
    stop = tl.load(chunk_ptr + 2 * tl.program_id(2) + 1)
    depth = tl.arange(0, WIDTH_D)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    c, _ = _sums(decay_ptr + head, row, stop, gate_stride)
    q = _tile(q_ptr + head // per_key * D, row, stop, q_stride, depth, D, UPCAST)
    k = _tile(k_ptr + head // per_key * D, row, stop, k_stride, depth, D, UPCAST)
    do = _tile(do_ptr + head * E, row, stop, do_stride, column, E, UPCAST)
    within = tl.dot(k, tl.trans(q), input_precision="ieee") * (tl.trans(_gaps(c, C)) * scale)
    _put(dx_ptr + head * E, tl.dot(within.to(do.dtype), do, input_precision="ieee"), row, stop, heads * E, column, E)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_NARROW)
def _delta_back_kernel(
    q_ptr,  # [T, K, D] bf16 or fp32
    k_ptr,  # [T, K, D] the same
    decay_ptr,  # [T, V] fp32
    w_ptr,  # [T, V, D] q's dtype
    do_ptr,  # [T, V, E] q's dtype
    chunk_ptr,  # [X, 2] int32
    segment_ptr,  # [S, 4] int32
    children_ptr,  # [S, 2] int32
    child_ptr,  # [S] int32
    d_left_ptr,  # [.., V, D, E] fp32, read if HAS_LEFT: the gradients of the stored states
    dx_ptr,  # [T, V, E] fp32, added to
    after_ptr,  # [X, V, D, E] q's dtype, written: the gradient of the state after each chunk
    d_begun_ptr,  # [S, V, D, E] fp32, written: those of the states that segments began with
    q_stride,
    k_stride,
    gate_stride,
    do_stride,
    d_left_stride,
    per_key,
    first,  # segment
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDTH_D: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    UPCAST: tl.constexpr,
):
    head, heads = tl.program_id(1), tl.num_programs(1)
    number = first + tl.program_id(2)
    segment = segment_ptr + 4 * number
    depth = tl.arange(0, WIDTH_D)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at, there = _state(column, depth, D, E)
    state = tl.zeros((WIDTH_D, COLUMNS), tl.float32)
    if HAS_LEFT:
        slot = tl.load(segment + 3).to(tl.int64)
        state += tl.load(d_left_ptr + slot * d_left_stride + head * (D * E) + at, mask=there, other=0.0)
    for n in range(tl.load(children_ptr + 2 * number), tl.load(children_ptr + 2 * number + 1)):
        child = (tl.load(child_ptr + n).to(tl.int64) * heads + head) * (D * E)
        state += tl.load(d_begun_ptr + child + at, mask=there, other=0.0)
    begin, end = tl.load(segment), tl.load(segment + 1)
    after = after_ptr + ((end - 1).to(tl.int64) * heads + head) * (D * E)
    for n in range(begin, end):
        chunk = begin + end - 1 - n
        row = tl.load(chunk_ptr + 2 * chunk) + tl.arange(0, C)
        stop = tl.load(chunk_ptr + 2 * chunk + 1)
        tl.store(after + at, state.to(after_ptr.dtype.element_ty), mask=there)
        after -= heads * (D * E)
        c, last = _sums(decay_ptr + head, row, stop, gate_stride)
        k = _tile(k_ptr + head // per_key * D, row, stop, k_stride, depth, D, UPCAST)
        dx = _tile(dx_ptr + head * E, row, stop, heads * E, column, E, UPCAST)
        dx += tl.dot(k, state.to(k.dtype), input_precision="ieee") * tl.exp((last - c).to(tl.float32))[:, None]
        _put(dx_ptr + head * E, dx, row, stop, heads * E, column, E)
        q = _tile(q_ptr + head // per_key * D, row, stop, q_stride, depth, D, UPCAST)
        do = _tile(do_ptr + head * E, row, stop, do_stride, column, E, UPCAST)
        seen = (do * (tl.exp(c.to(tl.float32)) * scale)[:, None]).to(q.dtype)
        state = tl.dot(tl.trans(q), seen, tl.exp(last.to(tl.float32)) * state, input_precision="ieee")
        w = _tile(w_ptr + head * D, row, stop, heads * D, depth, D, UPCAST)
        state -= tl.dot(tl.trans(w), dx.to(w.dtype), input_precision="ieee")
    tl.store(d_begun_ptr + (number.to(tl.int64) * heads + head) * (D * E) + at, state, mask=there)


@triton.jit
def _against_states(
    x_ptr,  # [T, E] of one head
    states_ptr,  # [D, E] of one chunk and head
    row,
    stop,
    stride,
    depth,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDTH_D: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """Compute x S^T [C, D]."""
    total = tl.zeros((C, WIDTH_D), tl.float32)
    for first in range(0, E, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        at, there = _state(column, depth, D, E)
        x = _tile(x_ptr, row, stop, stride, column, E, UPCAST)
        state = tl.load(states_ptr + at, mask=there, other=0.0)
        if UPCAST:
            state = state.to(tl.float32)
        total = tl.dot(x.to(state.dtype), tl.trans(state), total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_NARROW)
def _delta_values_kernel(
    v_ptr,  # [T, V, E] bf16 or fp32
    beta_ptr,  # [T, V] fp32
    solve_ptr,  # [T, V, C] v's dtype
    u_ptr,  # [T, V, E] the same
    x_ptr,  # [T, V, E] the same
    do_ptr,  # [T, V, E] the same
    dx_ptr,  # [T, V, E] fp32
    before_ptr,  # [X, V, D, E] v's dtype
    after_ptr,  # [X, V, D, E] the same
    chunk_ptr,  # [X, 2] int32
    dv_ptr,  # [T, V, E] v's dtype, written
    d_within_ptr,  # [T, V, C] fp32, written: do x^T
    d_system_ptr,  # [T, V, C] fp32, written: A's gradient by u
    d_beta_ptr,  # [T, V] fp32, written: beta's by u
    d_last_ptr,  # [X, V] fp32, written: that of exp(c_C)
    v_stride,
    gate_stride,
    do_stride,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDTH_D: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    head, heads = tl.program_id(0), tl.num_programs(0)
    chunk = tl.program_id(1)
    row = tl.load(chunk_ptr + 2 * chunk) + tl.arange(0, C)
    stop = tl.load(chunk_ptr + 2 * chunk + 1)
    states = (chunk.to(tl.int64) * heads + head) * (D * E)
    depth = tl.arange(0, WIDTH_D)
    i = tl.arange(0, C)
    beta = tl.load(beta_ptr + head + row.to(tl.int64) * gate_stride, mask=row < stop, other=0.0).to(tl.float32)
    solve = tl.trans(_tile(solve_ptr + head * C, row, stop, heads * C, i, C, UPCAST))
    d_within = tl.zeros((C, C), tl.float32)
    d_system = tl.zeros((C, C), tl.float32)
    d_beta = tl.zeros((C,), tl.float32)
    d_last = 0.0
    for first in range(0, E, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        x = _tile(x_ptr + head * E, row, stop, heads * E, column, E, UPCAST)
        do = _tile(do_ptr + head * E, row, stop, do_stride, column, E, UPCAST)
        d_within = tl.dot(do, tl.trans(x), d_within, input_precision="ieee")
        dx = _tile(dx_ptr + head * E, row, stop, heads * E, column, E, UPCAST)
        right = tl.dot(solve, dx.to(solve.dtype), input_precision="ieee")
        u = _tile(u_ptr + head * E, row, stop, heads * E, column, E, UPCAST)
        d_system -= tl.dot(right.to(u.dtype), tl.trans(u), input_precision="ieee")
        v = _tile(v_ptr + head * E, row, stop, v_stride, column, E, UPCAST)
        d_beta += tl.sum(right * v, 1)
        _put(dv_ptr + head * E, right * beta[:, None], row, stop, heads * E, column, E)
        at, there = _state(column, depth, D, E)
        before = tl.load(before_ptr + states + at, mask=there, other=0.0).to(tl.float32)
        d_last += tl.sum(before * tl.load(after_ptr + states + at, mask=there, other=0.0))
    _put(d_within_ptr + head * C, d_within, row, stop, heads * C, i, C)
    _put(d_system_ptr + head * C, d_system, row, stop, heads * C, i, C)
    tl.store(d_beta_ptr + row.to(tl.int64) * heads + head, d_beta, mask=row < stop)
    tl.store(d_last_ptr + chunk.to(tl.int64) * heads + head, d_last)


@triton.jit(do_not_specialize=_NUMBERS, do_not_specialize_on_alignment=_NARROW)
def _delta_keys_kernel(
    q_ptr,  # [T, K, D] bf16 or fp32
    k_ptr,  # [T, K, D] the same
    decay_ptr,  # [T, V] fp32
    beta_ptr,  # [T, V] fp32
    solve_ptr,  # [T, V, C] q's dtype
    w_ptr,  # [T, V, D] the same
    x_ptr,  # [T, V, E] the same
    do_ptr,  # [T, V, E] the same
    dx_ptr,  # [T, V, E] fp32
    before_ptr,  # [X, V, D, E] q's dtype
    after_ptr,  # [X, V, D, E] the same
    d_within_ptr,  # [T, V, C] fp32
    d_system_ptr,  # [T, V, C] fp32
    d_last_ptr,  # [X, V] fp32
    chunk_ptr,  # [X, 2] int32
    dq_ptr,  # [T, V, D] fp32 or q's dtype, written
    dk_ptr,  # [T, V, D] the same
    d_decay_ptr,  # [T, V] fp32, written
    d_beta_ptr,  # [T, V] fp32, added to
    q_stride,
    k_stride,
    gate_stride,
    do_stride,
    per_key,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDTH_D: tl.constexpr,
    C: tl.constexpr,
    COLUMNS: tl.constexpr,
    UPCAST: tl.constexpr,
):
    head, heads = tl.program_id(0), tl.num_programs(0)
    chunk = tl.program_id(1)
    row = tl.load(chunk_ptr + 2 * chunk) + tl.arange(0, C)
    stop = tl.load(chunk_ptr + 2 * chunk + 1)
    inside = row < stop
    states = (chunk.to(tl.int64) * heads + head) * (D * E)
    depth = tl.arange(0, WIDTH_D)
    i = tl.arange(0, C)
    c, last = _sums(decay_ptr + head, row, stop, gate_stride)
    since, left = tl.exp(c.to(tl.float32)), tl.exp((last - c).to(tl.float32))
    beta = tl.load(beta_ptr + head + row.to(tl.int64) * gate_stride, mask=inside, other=0.0).to(tl.float32)

    # w reads the states: its gradient, and through the solve that of k, and of A.
    k = _tile(k_ptr + head // per_key * D, row, stop, k_stride, depth, D, UPCAST)
    d_w = _against_states(
        dx_ptr + head * E, before_ptr + states, row, stop, heads * E, depth, D, E, WIDTH_D, C, COLUMNS, UPCAST
    )
    solve = tl.trans(_tile(solve_ptr + head * C, row, stop, heads * C, i, C, UPCAST))
    right = -tl.dot(solve, d_w.to(k.dtype), input_precision="ieee")
    w = _tile(w_ptr + head * D, row, stop, heads * D, depth, D, UPCAST)
    d_system = _tile(d_system_ptr + head * C, row, stop, heads * C, i, C, UPCAST)
    d_system -= tl.dot(right.to(k.dtype), tl.trans(w), input_precision="ieee")
    read = tl.sum(right * k, 1) * since
    d_beta = read
    d_sum = beta * read
    dk = right * (beta * since)[:, None]

    # A and its kk, then P and its qk. P's gradient is also read transposed, instead of a transpose in registers.
    gaps = _gaps(c, C)
    kk = tl.dot(k, tl.trans(k), input_precision="ieee")
    d_kk = tl.where(i[:, None] > i[None, :], d_system, 0.0) * gaps
    d_beta += tl.sum(d_kk * kk, 1)
    d_kk *= beta[:, None]
    dk = tl.dot((d_kk + tl.trans(d_kk)).to(k.dtype), k, dk, input_precision="ieee")
    q = _tile(q_ptr + head // per_key * D, row, stop, q_stride, depth, D, UPCAST)
    d_qk = _tile(d_within_ptr + head * C, row, stop, heads * C, i, C, UPCAST) * gaps * scale
    between = d_kk * kk + d_qk * tl.dot(q, tl.trans(k), input_precision="ieee")
    d_sum += tl.sum(between, 1) - tl.sum(between, 0)
    across = tl.load(
        d_within_ptr + head * C + (row.to(tl.int64) * (heads * C))[None, :] + i[:, None],
        mask=inside[None, :],
        other=0.0,
    )
    across *= tl.trans(gaps) * scale
    dk = tl.dot(across.to(k.dtype), q, dk, input_precision="ieee")

    # The products with the states that a chunk stores and reads.
    d_keys = _against_states(
        x_ptr + head * E, after_ptr + states, row, stop, heads * E, depth, D, E, WIDTH_D, C, COLUMNS, UPCAST
    )
    d_keys *= left[:, None]
    kept = tl.sum(d_keys * k, 1)
    _put(dk_ptr + head * D, dk + d_keys, row, stop, heads * D, depth, D)
    dq = _against_states(
        do_ptr + head * E, before_ptr + states, row, stop, do_stride, depth, D, E, WIDTH_D, C, COLUMNS, UPCAST
    )
    dq *= (since * scale)[:, None]
    d_sum += tl.sum(dq * q, 1) - kept
    _put(dq_ptr + head * D, tl.dot(d_qk.to(k.dtype), k, dq, input_precision="ieee"), row, stop, heads * D, depth, D)

    # A decay is in the sums of all tokens after it.
    d_sum = d_sum.to(tl.float64)
    d_last = tl.load(d_last_ptr + chunk.to(tl.int64) * heads + head)
    of_last = tl.sum(kept, 0) + tl.exp(last.to(tl.float32)) * d_last
    d_decay = tl.sum(d_sum, 0) + of_last - tl.cumsum(d_sum, 0) + d_sum
    at_gates = row.to(tl.int64) * heads + head
    tl.store(d_decay_ptr + at_gates, d_decay.to(tl.float32), mask=inside)
    d_beta += tl.load(d_beta_ptr + at_gates, mask=inside, other=0.0)
    tl.store(d_beta_ptr + at_gates, d_beta, mask=inside)


# --- Launches


class Given(NamedTuple):
    """Inputs of a launch, for some heads: dense rows with any stride; decay and beta have the same stride."""

    q_TKD: Tensor
    k_TKD: Tensor
    v_TVE: Tensor
    decay_TV: Tensor
    beta_TV: Tensor

    @property
    def tiling(self) -> Tiling:
        return tiling_of(self.v_TVE.dtype)

    def options(self) -> dict[str, Any]:
        D, E, tiling = self.k_TKD.shape[2], self.v_TVE.shape[2], self.tiling
        width = max(16, triton.next_power_of_2(D))
        return {"D": D, "E": E, "WIDTH_D": width, "C": tiling.chunk, "COLUMNS": tiling.columns, "UPCAST": INTERPRETED}

    def new(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.empty(shape, dtype=dtype or self.v_TVE.dtype, device=self.v_TVE.device)


class Scanned(NamedTuple):
    """Intermediate values of forward, which backward recomputes."""

    solve_TVC: Tensor
    u_TVE: Tensor
    w_TVD: Tensor
    x_TVE: Tensor
    before_XVDE: Tensor
    left_BVDE: Tensor


def is_served(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether these kernels serve the inputs. The interpreter computes any dimensions, to test them."""
    (D, E), dtypes = (k.shape[2], v.shape[2]), {q.dtype, k.dtype, v.dtype}
    alike = dtypes == {torch.bfloat16} or dtypes == {torch.float32}
    return alike and max(D, E) <= DIMS[-1] and (INTERPRETED or (D == E and D in DIMS))


def tiling_of(dtype: torch.dtype) -> Tiling:
    """Return the tiling of a dtype. The interpreter uses that of bfloat16, to test it."""
    return FLOAT32 if dtype == torch.float32 and not INTERPRETED else BFLOAT16


def workspace(k: Tensor, v: Tensor, lists: SegmentLists, backward: bool) -> int:
    """Return the bytes of a value head in forward or backward, without inputs, results and their gradients."""
    (T, _, D), E, item, chunk = k.shape, v.shape[2], v.element_size(), tiling_of(v.dtype).chunk
    chunks, segments, state = len(lists.chunk_X2), len(lists.segment_S4), D * E
    found = chunks * item * state + T * item * (chunk + 2 * E + D) + 4 * lists.left * state
    return found + chunks * item * state + 4 * segments * state + 4 * T * (E + 2 * D + 2 * chunk) if backward else found


def _given(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor) -> Given:
    decay, beta = decay.float(), beta.float()
    if decay.stride() != beta.stride() or beta.stride(1) != 1:
        decay, beta = decay.contiguous(), beta.contiguous()
    q, k, v = (dense_rows(x) for x in (q, k, v))
    return Given(q, k, v, decay, beta)


def scan(given: Given, initial_BVDE: Tensor | None, lists: SegmentLists) -> Scanned:
    """Run solve and scan. initial: for lists without parents, the states before the sequences; None: zeros.

    `left` of the result has the states that segments stored; its other entries are not written."""
    (T, V, E), (K, D) = given.v_TVE.shape, given.k_TKD.shape[1:]
    chunks, options = len(lists.chunk_X2), given.options()
    solve_TVC, u_TVE, w_TVD, x_TVE = (given.new(T, V, n) for n in (given.tiling.chunk, E, D, E))
    before_XVDE = given.new(chunks, V, D, E)
    left_BVDE = given.new(lists.left, V, D, E, dtype=torch.float32)
    if initial_BVDE is not None:
        initial_BVDE = dense_rows(initial_BVDE.float())
    numbers = {"per_key": V // K, "k_stride": given.k_TKD.stride(0), "gate_stride": given.decay_TV.stride(0)}
    with on_device(given.v_TVE):
        if chunks:
            _delta_solve_kernel[(V, chunks)](
                given.k_TKD,
                given.v_TVE,
                given.decay_TV,
                given.beta_TV,
                lists.chunk_X2,
                solve_TVC,
                u_TVE,
                w_TVD,
                v_stride=given.v_TVE.stride(0),
                **numbers,
                **options,
                BLOCK=BLOCK,
                PRECISION=given.tiling.precision,
                num_warps=given.tiling.solve,
            )
        for depth, (first, stop) in enumerate(_spans(lists.depths)):
            source = left_BVDE if depth else initial_BVDE
            _delta_scan_kernel[(triton.cdiv(E, options["COLUMNS"]), V, stop - first)](
                given.k_TKD,
                given.decay_TV,
                u_TVE,
                w_TVD,
                lists.chunk_X2,
                lists.segment_S4,
                left_BVDE if source is None else source,
                x_TVE,
                before_XVDE,
                left_BVDE,
                source_stride=0 if source is None else source.stride(0),
                left_stride=V * D * E,
                first=first,
                **numbers,
                **options,
                HAS_SOURCE=source is not None,
                num_warps=given.tiling.scan,
            )
    return Scanned(solve_TVC, u_TVE, w_TVD, x_TVE, before_XVDE, left_BVDE)


def forward(
    q_TKD: Tensor,
    k_TKD: Tensor,
    v_TVE: Tensor,
    decay_TV: Tensor,
    beta_TV: Tensor,
    initial_BVDE: Tensor | None,
    lists: SegmentLists,
) -> tuple[Tensor, Tensor]:
    """Return (o [T, V, E], the states after the sequences, or those that a forest's segments stored)."""
    given = _given(q_TKD, k_TKD, v_TVE, decay_TV, beta_TV)
    scanned = scan(given, initial_BVDE, lists)
    (T, V, E), D = given.v_TVE.shape, given.k_TKD.shape[2]
    out_TVE, options = given.new(T, V, E), given.options()
    if T:
        with on_device(given.v_TVE):
            _delta_out_kernel[(triton.cdiv(E, options["COLUMNS"]), V, len(lists.chunk_X2))](
                given.q_TKD,
                given.k_TKD,
                given.decay_TV,
                scanned.x_TVE,
                scanned.before_XVDE,
                lists.chunk_X2,
                out_TVE,
                q_stride=given.q_TKD.stride(0),
                k_stride=given.k_TKD.stride(0),
                gate_stride=given.decay_TV.stride(0),
                o_stride=V * E,
                per_key=V // given.k_TKD.shape[1],
                scale=D**-0.5,
                **options,
                num_warps=given.tiling.out,
            )
    if initial_BVDE is not None and lists.empty_B is not None:  # an empty sequence ends as it began
        scanned.left_BVDE[lists.empty_B] = initial_BVDE[lists.empty_B]
    return out_TVE, scanned.left_BVDE


def backward(
    q_TKD: Tensor,
    k_TKD: Tensor,
    v_TVE: Tensor,
    decay_TV: Tensor,
    beta_TV: Tensor,
    initial_BVDE: Tensor | None,
    d_out_TVE: Tensor,
    d_final_BVDE: Tensor,
    lists: SegmentLists,
) -> tuple[Tensor | None, ...]:
    """Return the gradients of the first six arguments.

    d_final: of the states after the sequences; not read for a forest."""
    given = _given(q_TKD, k_TKD, v_TVE, decay_TV, beta_TV)
    (T, V, E), (K, D) = given.v_TVE.shape, given.k_TKD.shape[1:]
    solve_TVC, u_TVE, w_TVD, x_TVE, before_XVDE, _ = scan(given, initial_BVDE, lists)
    do_TVE = dense_rows(d_out_TVE.to(given.v_TVE.dtype))
    options, chunks = given.options(), len(lists.chunk_X2)
    dx_TVE, after_XVDE = given.new(T, V, E, dtype=torch.float32), torch.empty_like(before_XVDE)
    d_begun_SVDE = given.new(len(lists.segment_S4), V, D, E, dtype=torch.float32)
    wide = given.v_TVE.dtype if V == K else torch.float32
    dq_TVD, dk_TVD, dv_TVE = given.new(T, V, D, dtype=wide), given.new(T, V, D, dtype=wide), given.new(T, V, E)
    d_decay_TV, d_beta_TV = (given.new(T, V, dtype=torch.float32) for _ in range(2))
    d_left_BVDE = None if initial_BVDE is None else dense_rows(d_final_BVDE.float())
    blocks = triton.cdiv(E, options["COLUMNS"])
    numbers = {
        "q_stride": given.q_TKD.stride(0),
        "k_stride": given.k_TKD.stride(0),
        "gate_stride": given.decay_TV.stride(0),
        "do_stride": do_TVE.stride(0),
        "per_key": V // K,
        "scale": D**-0.5,
    }
    if not chunks:
        return *(torch.zeros_like(x) for x in given), None if initial_BVDE is None else d_final_BVDE
    with on_device(given.v_TVE):
        _delta_within_kernel[(blocks, V, chunks)](
            given.q_TKD,
            given.k_TKD,
            given.decay_TV,
            do_TVE,
            lists.chunk_X2,
            dx_TVE,
            **numbers,
            **options,
            num_warps=given.tiling.out,
        )
        for first, stop in reversed(_spans(lists.depths)):
            _delta_back_kernel[(blocks, V, stop - first)](
                given.q_TKD,
                given.k_TKD,
                given.decay_TV,
                w_TVD,
                do_TVE,
                lists.chunk_X2,
                lists.segment_S4,
                lists.children_S2,
                lists.child_S,
                d_begun_SVDE if d_left_BVDE is None else d_left_BVDE,
                dx_TVE,
                after_XVDE,
                d_begun_SVDE,
                d_left_stride=0 if d_left_BVDE is None else d_left_BVDE.stride(0),
                first=first,
                **numbers,
                **options,
                HAS_LEFT=d_left_BVDE is not None,
                num_warps=given.tiling.scan,
            )
        d_within_TVC, d_system_TVC = (given.new(T, V, given.tiling.chunk, dtype=torch.float32) for _ in range(2))
        d_last_XV = given.new(chunks, V, dtype=torch.float32)
        strides = {"gate_stride": numbers["gate_stride"], "do_stride": numbers["do_stride"]}
        _delta_values_kernel[(V, chunks)](
            given.v_TVE,
            given.beta_TV,
            solve_TVC,
            u_TVE,
            x_TVE,
            do_TVE,
            dx_TVE,
            before_XVDE,
            after_XVDE,
            lists.chunk_X2,
            dv_TVE,
            d_within_TVC,
            d_system_TVC,
            d_beta_TV,
            d_last_XV,
            v_stride=given.v_TVE.stride(0),
            **strides,
            **options,
            num_warps=given.tiling.values,
        )
        _delta_keys_kernel[(V, chunks)](
            given.q_TKD,
            given.k_TKD,
            given.decay_TV,
            given.beta_TV,
            solve_TVC,
            w_TVD,
            x_TVE,
            do_TVE,
            dx_TVE,
            before_XVDE,
            after_XVDE,
            d_within_TVC,
            d_system_TVC,
            d_last_XV,
            lists.chunk_X2,
            dq_TVD,
            dk_TVD,
            d_decay_TV,
            d_beta_TV,
            **numbers,
            **options,
            num_warps=given.tiling.keys,
        )
    if V > K:
        dq_TVD, dk_TVD = (x.unflatten(1, (K, -1)).sum(2).to(given.v_TVE.dtype) for x in (dq_TVD, dk_TVD))
    d_initial_BVDE = None
    if initial_BVDE is not None:
        d_initial_BVDE = d_final_BVDE.clone()  # of empty sequences
        d_initial_BVDE[lists.sequence_S] = d_begun_SVDE.to(d_final_BVDE.dtype)
    return dq_TVD, dk_TVD, dv_TVE, d_decay_TV, d_beta_TV, d_initial_BVDE


def _spans(counts: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(np.cumsum([0, *counts]).tolist()))


# --- Specialisations


def specialisations() -> tuple[Specialisation, ...]:
    """Return the specialisations that the launchers request for Qwen3.5's heads, with and without given states."""
    return tuple(one for dtype in ("bf16", "fp32") for one in _specialised(dtype))


def _specialised(dtype: str) -> list[Specialisation]:
    tensors = {
        "solve": ("k", "v", "solve", "u", "w"),
        "scan": ("k", "u", "w", "x", "before"),
        "out": ("q", "k", "x", "before", "o"),
        "within": ("q", "k", "do"),
        "back": ("q", "k", "w", "do", "after"),
        "values": ("v", "solve", "u", "x", "do", "before", "after", "dv"),
        "keys": ("q", "k", "solve", "w", "x", "do", "before", "after", "dq", "dk"),
    }
    tiling = FLOAT32 if dtype == "fp32" else BFLOAT16
    made = []
    for name, kernel, warps in (
        ("solve", _delta_solve_kernel, tiling.solve),
        ("scan", _delta_scan_kernel, tiling.scan),
        ("out", _delta_out_kernel, tiling.out),
        ("within", _delta_within_kernel, tiling.out),
        ("back", _delta_back_kernel, tiling.scan),
        ("values", _delta_values_kernel, tiling.values),
        ("keys", _delta_keys_kernel, tiling.keys),
    ):
        constants: dict[str, Any] = {"D": 128, "E": 128, "WIDTH_D": 128, "C": tiling.chunk, "COLUMNS": tiling.columns}
        constants |= {"UPCAST": False}
        if name == "solve":
            constants |= {"BLOCK": BLOCK, "PRECISION": tiling.precision}
        flags = {"scan": "HAS_SOURCE", "back": "HAS_LEFT"}
        arguments = [x for x in kernel.arg_names if x not in constants and x != flags.get(name)]
        signature = {x: "*fp32" if x.endswith("_ptr") else "i32" for x in arguments}
        signature |= {f"{x}_ptr": f"*{dtype}" for x in tensors[name]} | {x: "*i32" for x in _LISTS if x in signature}
        signature |= {"scale": "fp32"} if "scale" in signature else {}
        aligned = tuple(x for x in signature if x.endswith(("_ptr", "_stride")) and x not in _NARROW)
        made += [
            Specialisation(
                name=f"delta {name} {dtype}" + ("" if flag is not False else ", no states"),
                kernel=kernel,
                signature=signature,
                constants=constants | ({} if flag is None else {flags[name]: flag}),
                aligned=aligned,
                num_warps=warps,
                tensor_cores=dtype == "bf16",
            )
            for flag in ((True, False) if name in flags else (None,))
        ]
    return made
