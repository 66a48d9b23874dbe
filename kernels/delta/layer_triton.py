"""The operations of layer.py around the rule in Triton: convolution and lengths, gated norm; two launches forward,
three more backward.

    heads     y_t = sum_j w_j mixed[j steps before t], x = silu(y), of queries and keys x / |x|: q, k and v in one pass
    slopes    dy from the gradients of q, k and v, with y and x recomputed; each block's sums for dw
    back      dmixed_t = sum of w_j dy_s over the rows s that see t j steps before them
    norm      w n silu(z), n = o / rms(o)
    and its gradients of o and z; each block's sums for dw

Everything is float32 between a read and a write, and so is dy. The filter has w_j at W - 1 - j, as in the model.

`before[t]` is the row that row t follows, -1 for none. Following it W - 1 times finds a window. `back` needs the
reverse, the rows s that see t. Row t + j sees t if each of the rows t + 1 .. t + j follows the row stored just before
it. All other pairs of s and t occur where a segment is not stored directly after its parent. They are in a list, in the
order of t.

Axes: T tokens, C channels of the convolution, W tokens that it sees, X entries of the list, K query and key heads, V
value heads, D dimension of a key, E of a value; blocks of ROWS rows.
"""

# Kernels are typed by their launches.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return, no-untyped-call"

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from thresher.kernels.operands import check_dense, dense_rows, on_device
from thresher.kernels.registry import Specialisation

ROWS = 32  # of a program
COLUMNS = 128  # of a program of the kernel that reads slopes
BACKWARD_WARPS = 8  # of the norm's gradient, which with 4 needs 208 registers on sm_80


@triton.jit
def channels_of(head, K: tl.constexpr, D: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr):
    """Return (the channels of a head [WIDTH], which of them exist). Heads: K of queries, K of keys, then of values."""
    column = tl.arange(0, WIDTH)
    first = tl.where(head < 2 * K, head * D, 2 * K * D + (head - 2 * K) * E)
    return first + column, column < tl.where(head < 2 * K, D, E)


@triton.jit
def _load_rows(x_ptr, at, channel, there, stride):
    """Load rows [ROWS, WIDTH] in float32, with zeros for -1."""
    offsets = (at.to(tl.int64) * stride)[:, None] + channel[None, :]
    return tl.load(x_ptr + offsets, mask=(at >= 0)[:, None] & there[None, :], other=0.0).to(tl.float32)


@triton.jit
def _rows(block, count, ROWS: tl.constexpr):
    """Return the rows of a block, -1 after the last."""
    row = block * ROWS + tl.arange(0, ROWS)
    return tl.where(row < count, row, -1)


@triton.jit
def _convolved(mixed_ptr, before_ptr, filter_ptr, row, channel, there, stride, C: tl.constexpr, W: tl.constexpr):
    """Compute y [ROWS, WIDTH]."""
    total = tl.zeros((row.shape[0], channel.shape[0]), tl.float32)
    at = row
    for back in tl.static_range(W):
        weight = tl.load(filter_ptr + (W - 1 - back) * C + channel, mask=there, other=0.0).to(tl.float32)
        total += weight[None, :] * _load_rows(mixed_ptr, at, channel, there, stride)
        if back < W - 1:
            at = tl.load(before_ptr + at, mask=at >= 0, other=-1)
    return total


@triton.jit(do_not_specialize=["count"])
def _conv_heads_kernel(
    mixed_ptr,  # [T, C] bf16 or fp32
    before_ptr,  # [T] int32
    filter_ptr,  # [W, C] mixed's dtype
    x_ptr,  # [T, C] the same, written
    stride,  # of mixed's rows
    count,  # T
    eps,
    C: tl.constexpr,
    W: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    head = tl.program_id(0)
    channel, there = channels_of(head, K, D, E, WIDTH)
    row = _rows(tl.program_id(1), count, ROWS)
    y = _convolved(mixed_ptr, before_ptr, filter_ptr, row, channel, there, stride, C, W)
    x = y / (1.0 + tl.exp(-y))
    if head < 2 * K:
        x *= tl.rsqrt(tl.sum(x * x, 1) + eps)[:, None]
    into = x_ptr + (row.to(tl.int64) * C)[:, None] + channel[None, :]
    tl.store(into, x.to(x_ptr.dtype.element_ty), mask=(row >= 0)[:, None] & there[None, :])


@triton.jit(do_not_specialize=["count"])
def _conv_slopes_kernel(
    mixed_ptr,  # [T, C] bf16 or fp32
    before_ptr,  # [T] int32
    filter_ptr,  # [W, C] mixed's dtype
    dq_ptr,  # [T, K, D] the same
    dk_ptr,  # [T, K, D] the same
    dv_ptr,  # [T, V, E] the same
    slope_ptr,  # [T, C] fp32, written: dy
    parts_ptr,  # [blocks, W, C] fp32, written if HAS_PARTS
    stride,  # of mixed's rows
    count,  # T
    eps,
    C: tl.constexpr,
    W: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_PARTS: tl.constexpr,
):
    head, block = tl.program_id(0), tl.program_id(1)
    channel, there = channels_of(head, K, D, E, WIDTH)
    row = _rows(block, count, ROWS)
    y = _convolved(mixed_ptr, before_ptr, filter_ptr, row, channel, there, stride, C, W)
    share = 1.0 / (1.0 + tl.exp(-y))
    if head < 2 * K:
        x = y * share
        if head < K:
            grad = _load_rows(dq_ptr, row, channel, there, K * D)
        else:
            grad = _load_rows(dk_ptr, row, channel - K * D, there, K * D)
        factor = tl.rsqrt(tl.sum(x * x, 1) + eps)
        along = factor * factor * tl.sum(x * grad, 1)
        grad = factor[:, None] * (grad - x * along[:, None])
    else:
        grad = _load_rows(dv_ptr, row, channel - 2 * K * D, there, C - 2 * K * D)
    slope = grad * (share * (1.0 + y * (1.0 - share)))
    into = slope_ptr + (row.to(tl.int64) * C)[:, None] + channel[None, :]
    tl.store(into, slope, mask=(row >= 0)[:, None] & there[None, :])
    if HAS_PARTS:
        at = row
        part = parts_ptr + block.to(tl.int64) * (W * C) + channel
        for back in tl.static_range(W):
            total = tl.sum(slope * _load_rows(mixed_ptr, at, channel, there, stride), 0)
            tl.store(part + (W - 1 - back) * C, total, mask=there)
            if back < W - 1:
                at = tl.load(before_ptr + at, mask=at >= 0, other=-1)


@triton.jit(do_not_specialize=["count"])
def _conv_back_kernel(
    slope_ptr,  # [T, C] fp32: dy
    before_ptr,  # [T] int32
    filter_ptr,  # [W, C] bf16 or fp32
    begin_ptr,  # [T + 1] int32: where each row's entries begin in the list
    reader_ptr,  # [X] int32: W s + j of a row s that sees it j steps later, but is not j rows after it
    grad_ptr,  # [T, C] filter's dtype, written
    count,  # T
    C: tl.constexpr,
    W: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    there = channel < C
    block = tl.program_id(1)
    row = _rows(block, count, ROWS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    sees = row >= 0
    for ahead in tl.static_range(W):
        if ahead > 0:
            sees &= row + ahead < count
            sees &= tl.load(before_ptr + row + ahead, mask=sees, other=-1) == row + ahead - 1
        weight = tl.load(filter_ptr + (W - 1 - ahead) * C + channel, mask=there, other=0.0).to(tl.float32)
        total += weight[None, :] * _load_rows(slope_ptr, tl.where(sees, row + ahead, -1), channel, there, C)
    begin = tl.load(begin_ptr + row, mask=row >= 0, other=0)
    end = tl.load(begin_ptr + row + 1, mask=row >= 0, other=0)
    for first in range(tl.load(begin_ptr + block * ROWS), tl.max(end, 0), ROWS):
        entry = first + tl.arange(0, ROWS)
        of_row = (entry[None, :] >= begin[:, None]) & (entry[None, :] < end[:, None])
        live = entry < tl.max(end, 0)
        reader = tl.load(reader_ptr + entry, mask=live, other=0)
        taps = filter_ptr + ((W - 1 - reader % W) * C)[:, None] + channel[None, :]
        tap = tl.load(taps, mask=live[:, None] & there[None, :], other=0.0).to(tl.float32)
        terms = tap * _load_rows(slope_ptr, tl.where(live, reader // W, -1), channel, there, C)
        total = tl.dot(of_row.to(tl.float32), terms, total, input_precision="ieee")
    into = grad_ptr + (row.to(tl.int64) * C)[:, None] + channel[None, :]
    tl.store(into, total.to(grad_ptr.dtype.element_ty), mask=(row >= 0)[:, None] & there[None, :])


@triton.jit
def _heads_of(x_ptr, row, stride, V: tl.constexpr, E: tl.constexpr, WIDTH: tl.constexpr):
    """Load heads [ROWS, WIDTH] of a tensor [T, V, E], whose tokens are `stride` apart, in float32; zeros for -1.

    row: numbers of heads, V per token."""
    column = tl.arange(0, WIDTH)
    offsets = (row // V).to(tl.int64) * stride + row % V * E
    there = (row >= 0)[:, None] & (column < E)[None, :]
    return tl.load(x_ptr + offsets[:, None] + column[None, :], mask=there, other=0.0).to(tl.float32)


@triton.jit
def _put_heads(x_ptr, x, row, E: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    there = (row >= 0)[:, None] & (column < E)[None, :]
    into = x_ptr + (row.to(tl.int64) * E)[:, None] + column[None, :]
    tl.store(into, x.to(x_ptr.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["count"])
def _gated_norm_kernel(
    o_ptr,  # [T, V, E] bf16 or fp32, dense
    z_ptr,  # [T, V, E] the same, any stride of T
    weight_ptr,  # [E] the same, or fp32
    y_ptr,  # [T, V, E] the same, written, dense
    z_stride,
    count,  # T V
    eps,
    V: tl.constexpr,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = _rows(tl.program_id(0), count, ROWS)
    column = tl.arange(0, WIDTH)
    o = _heads_of(o_ptr, row, V * E, V, E, WIDTH)
    z = _heads_of(z_ptr, row, z_stride, V, E, WIDTH)
    weight = tl.load(weight_ptr + column, mask=column < E, other=0.0).to(tl.float32)
    normed = o * tl.rsqrt(tl.sum(o * o, 1) / E + eps)[:, None]
    _put_heads(y_ptr, weight[None, :] * normed * (z / (1.0 + tl.exp(-z))), row, E, WIDTH)


@triton.jit(do_not_specialize=["count"])
def _gated_norm_backward_kernel(
    o_ptr,  # [T, V, E] bf16 or fp32, dense
    z_ptr,  # [T, V, E] the same, any stride of T
    weight_ptr,  # [E] the same, or fp32
    dy_ptr,  # [T, V, E] the same, dense
    do_ptr,  # [T, V, E] the same, written
    dz_ptr,  # [T, V, E] the same, written
    parts_ptr,  # [blocks, E] fp32, written if HAS_PARTS
    z_stride,
    count,  # T V
    eps,
    V: tl.constexpr,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_PARTS: tl.constexpr,
):
    row = _rows(tl.program_id(0), count, ROWS)
    column = tl.arange(0, WIDTH)
    o = _heads_of(o_ptr, row, V * E, V, E, WIDTH)
    z = _heads_of(z_ptr, row, z_stride, V, E, WIDTH)
    dy = _heads_of(dy_ptr, row, V * E, V, E, WIDTH)
    weight = tl.load(weight_ptr + column, mask=column < E, other=0.0).to(tl.float32)
    factor = tl.rsqrt(tl.sum(o * o, 1) / E + eps)[:, None]
    normed, share = o * factor, 1.0 / (1.0 + tl.exp(-z))
    through = dy * (z * share)  # the gradient of w n
    if HAS_PARTS:
        part = parts_ptr + tl.program_id(0).to(tl.int64) * E + column
        tl.store(part, tl.sum(through * normed, 0), mask=column < E)
    through *= weight[None, :]
    along = tl.sum(through * normed, 1) / E
    _put_heads(do_ptr, factor * (through - normed * along[:, None]), row, E, WIDTH)
    _put_heads(dz_ptr, dy * (weight[None, :] * normed) * (share * (1.0 + z * (1.0 - share))), row, E, WIDTH)


# --- Launches


def fused_heads(
    mixed_TC: Tensor,
    conv_CW: Tensor,
    before_T: Tensor,
    readers: Callable[[], tuple[Tensor, Tensor]],
    heads: tuple[int, int],
    key_dim: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute q [T, K, D], k [T, K, D] and v [T, V, E] of the convolution over segments, differentiable once.

    mixed and conv: both bfloat16 or both float32, on one GPU (or interpreted, on a CPU). before, and the result of
    readers for the gradient: of layer.py's `Spans`. heads: K and V. eps: added to the square of a length.
    """
    q_TKD, k_TKD, v_TVE = _ConvolvedHeads.apply(mixed_TC, conv_CW, before_T, readers, heads, key_dim, eps)
    return q_TKD, k_TKD, v_TVE


def fused_gated_norm(o_TVE: Tensor, z_TVE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """Compute the norm of each head times silu(z), [T, V, E], differentiable once.

    o and z: both bfloat16 or both float32, on one GPU (or interpreted, on a CPU); the weight the same, or float32.
    ValueError if o and z differ.
    """
    o_TVE = o_TVE.contiguous()
    check_dense("o_TVE", o_TVE, z_TVE.shape, z_TVE.dtype, z_TVE.device)
    y_TVE: Tensor = _GatedNorm.apply(o_TVE, z_TVE, weight_E, eps)
    return y_TVE


class _ConvolvedHeads(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        mixed_TC: Tensor,
        conv_CW: Tensor,
        before_T: Tensor,
        readers: Callable[[], tuple[Tensor, Tensor]],
        heads: tuple[int, int],
        key_dim: int,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        mixed_TC = mixed_TC if mixed_TC.stride(1) == 1 else mixed_TC.contiguous()
        filter_WC = conv_CW.T.contiguous()
        rows, channels = mixed_TC.shape
        keys, values = heads
        sizes = _sizes(keys, values, key_dim, channels, len(filter_WC))
        x_TC = torch.empty((rows, channels), dtype=mixed_TC.dtype, device=mixed_TC.device)
        if rows:
            with on_device(mixed_TC):
                _conv_heads_kernel[(2 * keys + values, triton.cdiv(rows, ROWS))](
                    mixed_TC, before_T, filter_WC, x_TC, mixed_TC.stride(0), rows, eps, **sizes
                )
        ctx.save_for_backward(mixed_TC, filter_WC, before_T)
        ctx.readers, ctx.sizes, ctx.heads, ctx.eps = readers, sizes, 2 * keys + values, eps
        q_TX, k_TX, v_TX = x_TC.split([keys * key_dim, keys * key_dim, values * sizes["E"]], 1)
        return *(x.unflatten(1, (keys, -1)) for x in (q_TX, k_TX)), v_TX.unflatten(1, (values, -1))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        mixed_TC, filter_WC, before_T = ctx.saved_tensors
        (rows, channels), width, of_filter = mixed_TC.shape, len(filter_WC), ctx.needs_input_grad[1]
        slope_TC = torch.empty((rows, channels), dtype=torch.float32, device=mixed_TC.device)
        blocks = triton.cdiv(rows, ROWS)
        of_blocks = (blocks, width, channels) if of_filter else 0
        parts = torch.empty(of_blocks, dtype=torch.float32, device=mixed_TC.device)
        grad_TC = torch.empty((rows, channels), dtype=mixed_TC.dtype, device=mixed_TC.device)
        if rows:
            with on_device(mixed_TC):
                _conv_slopes_kernel[(ctx.heads, blocks)](
                    mixed_TC,
                    before_T,
                    filter_WC,
                    *(grad.contiguous() for grad in grads),
                    slope_TC,
                    parts,
                    mixed_TC.stride(0),
                    rows,
                    ctx.eps,
                    **ctx.sizes,
                    HAS_PARTS=of_filter,
                )
                _conv_back_kernel[(triton.cdiv(channels, COLUMNS), blocks)](
                    slope_TC,
                    before_T,
                    filter_WC,
                    *ctx.readers(),
                    grad_TC,
                    rows,
                    C=channels,
                    W=width,
                    COLUMNS=COLUMNS,
                    ROWS=ROWS,
                )
        found = grad_TC, parts.sum(0).T.to(filter_WC.dtype) if of_filter else None
        return *found, None, None, None, None, None


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, o_TVE: Tensor, z_TVE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        (rows, heads, width), y_TVE = o_TVE.shape, torch.empty_like(o_TVE)
        z_TVE = dense_rows(z_TVE)
        if rows:
            with on_device(o_TVE):
                _gated_norm_kernel[(triton.cdiv(rows * heads, ROWS),)](
                    o_TVE, z_TVE, weight_E, y_TVE, z_TVE.stride(0), rows * heads, eps, **_head_sizes(heads, width)
                )
        ctx.save_for_backward(o_TVE, z_TVE, weight_E)
        ctx.eps = eps
        return y_TVE

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_TVE: Tensor) -> tuple[Tensor | None, ...]:
        o_TVE, z_TVE, weight_E = ctx.saved_tensors
        (rows, heads, width), of_weight = o_TVE.shape, ctx.needs_input_grad[2]
        blocks = triton.cdiv(rows * heads, ROWS)
        do_TVE, dz_TVE = torch.empty_like(o_TVE), torch.empty_like(o_TVE)
        parts = torch.empty((blocks, width) if of_weight else 0, dtype=torch.float32, device=o_TVE.device)
        if rows:
            with on_device(o_TVE):
                _gated_norm_backward_kernel[(blocks,)](
                    o_TVE,
                    z_TVE,
                    weight_E,
                    dy_TVE.contiguous(),
                    do_TVE,
                    dz_TVE,
                    parts,
                    z_TVE.stride(0),
                    rows * heads,
                    ctx.eps,
                    **_head_sizes(heads, width),
                    HAS_PARTS=of_weight,
                    num_warps=BACKWARD_WARPS,
                )
        return do_TVE, dz_TVE, parts.sum(0).to(weight_E.dtype) if of_weight else None, None


def _sizes(key_heads: int, heads: int, key_dim: int, channels: int, width: int) -> dict[str, int]:
    value_dim = (channels - 2 * key_heads * key_dim) // heads
    head = triton.next_power_of_2(max(key_dim, value_dim))
    constants = {"C": channels, "W": width, "K": key_heads, "D": key_dim, "E": value_dim}
    return constants | {"WIDTH": head, "ROWS": ROWS}


def _head_sizes(heads: int, width: int) -> dict[str, int]:
    return {"V": heads, "E": width, "WIDTH": triton.next_power_of_2(width), "ROWS": ROWS}


# --- Specialisations


def specialisations() -> tuple[Specialisation, ...]:
    """Return the specialisations that the launchers request for Qwen3.5 0.8B's and 27B's heads in bfloat16.

    For the first also in float32, with only the norm's weight in float32, and without gradients of weights."""
    listed = [*_specialised("bf16", 16), *_specialised("bf16", 48), *_specialised("fp32", 16)]
    listed += [one for one in _specialised("bf16", 16, weight="fp32") if "norm" in one.name]
    listed += [one for one in _specialised("bf16", 16, trained=False) if "HAS_PARTS" in one.constants]
    return tuple(listed)


def _specialised(dtype: str, heads: int, weight: str | None = None, trained: bool = True) -> list[Specialisation]:
    channels = (2 * 16 + heads) * 128
    sizes, of_heads = _sizes(16, heads, 128, channels, 4), _head_sizes(heads, 128)
    columns = {"C": channels, "W": 4, "COLUMNS": COLUMNS, "ROWS": ROWS}
    flag = {"HAS_PARTS": trained}
    made = []
    for name, kernel, constants, warps in (
        ("heads", _conv_heads_kernel, sizes, 4),
        ("slopes", _conv_slopes_kernel, sizes | flag, 4),
        ("back", _conv_back_kernel, columns, 4),
        ("norm", _gated_norm_kernel, of_heads, 4),
        ("norm's gradient", _gated_norm_backward_kernel, of_heads | flag, BACKWARD_WARPS),
    ):
        types = dict.fromkeys(("before", "begin", "reader"), "i32") | dict.fromkeys(("slope", "parts"), "fp32")
        types |= {"weight": weight or dtype}
        signature = {
            x: "*" + types.get(x.removesuffix("_ptr"), dtype) if x.endswith("_ptr") else "i32"
            for x in kernel.arg_names
            if x not in constants
        }
        signature |= {"eps": "fp32"} if "eps" in signature else {}
        made.append(
            Specialisation(
                name=f"delta {name} {dtype}, {heads} heads"
                + ("" if trained else ", no weights' gradient")
                + (f", w {weight}" if weight else ""),
                kernel=kernel,
                signature=signature,
                constants=constants,
                aligned=tuple(x for x in signature if x.endswith(("_ptr", "stride"))),
                num_warps=warps,
            )
        )
    return made
