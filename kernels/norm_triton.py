"""`add_norm` of layers.py in Triton, forward and backward: a row is read once and written once.

    s = x + more                          rounded to the dtype
    n = r s,  r = 1 / sqrt(mean_H(s^2) + eps)                 (Zhang and Sennrich 2019, equation 4)
    y = w n                               in float32 from s to n, which is rounded to the dtype before w, as in Qwen2,
                                          unless w is float32 and the dtype is not, as in Qwen3.5
    ds' = ds + r (g - n mean_H(g n)),  g = w dy               the gradient both of x and of more
    dw = sum_T dy n

Only s, which is an output, and w are saved for backward. A program of the backward sums dw over its rows in float32;
the programs' sums are added in a fixed order, and their number depends only on the shape, so dw has the same bits.

Axes: T tokens, H hidden width (docs/notation.md).
"""

# Kernels are typed by their launches.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return, no-untyped-call"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from thresher.kernels.operands import check_dense, check_dtype, on_device
from thresher.kernels.registry import Specialisation

MAX_WIDTH = 8192
PER_THREAD = 16  # elements of a row that a thread holds, two vectors of 16 bytes in bfloat16
BACKWARD_WARPS = 1536  # of all programs together: at up to 107 registers an A100 runs 1,728 at once, an H100 2,112
FEWEST_ROWS = 4  # that a program of the backward processes, if there are that many
SUM_ROWS, SUM_COLUMNS = 128, 32


@triton.jit
def _add_norm_kernel(
    x_ptr,  # [T, H] bf16 or fp32, dense
    more_ptr,  # [T, H] the same, read if HAS_MORE
    weight_ptr,  # [H] the same, or fp32
    sum_ptr,  # [T, H] the same, written if HAS_MORE
    y_ptr,  # [T, H] the same, written
    eps,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_MORE: tl.constexpr,
):
    column = tl.arange(0, WIDTH)
    inside = column < H
    at = tl.program_id(0).to(tl.int64) * H + column
    s = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if HAS_MORE:
        rounded = (s + tl.load(more_ptr + at, mask=inside, other=0.0).to(tl.float32)).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + at, rounded, mask=inside)
        s = rounded.to(tl.float32)
    normed = s * tl.rsqrt(tl.sum(s * s, 0) / H + eps)
    if weight_ptr.dtype.element_ty == y_ptr.dtype.element_ty:
        normed = normed.to(y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + at, (weight * normed).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _add_norm_backward_kernel(
    sum_ptr,  # [T, H] bf16 or fp32, dense
    weight_ptr,  # [H] the same, or fp32
    grad_y_ptr,  # [T, H] the same
    grad_sum_ptr,  # [T, H] the same, read if HAS_SUM
    grad_ptr,  # [T, H] the same, written: the gradient of x and of more
    parts_ptr,  # [programs, H] fp32, written if HAS_PARTS
    count,  # T
    eps,
    H: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_SUM: tl.constexpr,
    HAS_PARTS: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.arange(0, WIDTH)
    inside = column < H
    total = tl.zeros((WIDTH,), tl.float32)
    start = program.to(tl.int64) * H
    for _ in range(program, count, tl.num_programs(0)):
        at = start + column
        s = tl.load(sum_ptr + at, mask=inside, other=0.0).to(tl.float32)
        grad_y = tl.load(grad_y_ptr + at, mask=inside, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(s * s, 0) / H + eps)
        normed = s * r
        g = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32) * grad_y  # from the cache, row by row
        grad = r * (g - normed * (r * (tl.sum(g * s, 0) / H)))
        if HAS_SUM:
            grad += tl.load(grad_sum_ptr + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(grad_ptr + at, grad.to(grad_ptr.dtype.element_ty), mask=inside)
        if HAS_PARTS:
            total += grad_y * normed
        start += tl.num_programs(0).to(tl.int64) * H
    if HAS_PARTS:
        tl.store(parts_ptr + program.to(tl.int64) * H + column, total, mask=inside)


@triton.jit(do_not_specialize=["count"])
def _sum_parts_kernel(
    parts_ptr,  # [programs, H] fp32
    grad_ptr,  # [H] bf16 or fp32, written
    count,  # programs
    H: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, count, ROWS):
        row = (start + tl.arange(0, ROWS))[:, None]
        inside = (row < count) & (column < H)[None, :]
        total += tl.load(parts_ptr + row * H + column[None, :], mask=inside, other=0.0)
    tl.store(grad_ptr + column, tl.sum(total, 0).to(grad_ptr.dtype.element_ty), mask=column < H)


def fused_add_norm(x_TH: Tensor, addend_TH: Tensor | None, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute (x + more, its RMSNorm times `weight_H`), both [T, H], differentiable once; None adds nothing.

    All bfloat16 or all float32, or only the weight float32, on one GPU (or interpreted, on a CPU); H up to 8,192.
    Raises ValueError for other inputs.
    """
    check_dtype("x_TH", x_TH)
    if x_TH.dim() != 2 or not 0 < x_TH.shape[1] <= MAX_WIDTH:
        raise ValueError(f"x_TH has shape {tuple(x_TH.shape)}; expected [T, H] with H from 1 to {MAX_WIDTH:,}")
    addend_TH = None if addend_TH is None else addend_TH.contiguous()
    if addend_TH is not None:
        check_dense("addend_TH", addend_TH, x_TH.shape, x_TH.dtype, x_TH.device)
    check_dense("weight_H", weight_H, x_TH.shape[1:], weight_dtype(weight_H, x_TH), x_TH.device)
    sum_TH, y_TH = _AddNorm.apply(x_TH.contiguous(), addend_TH, weight_H, eps)
    return sum_TH, y_TH


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, addend_TH: Tensor | None, weight_H: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        sum_TH = x_TH if addend_TH is None else torch.empty_like(x_TH)
        y_TH = torch.empty_like(x_TH)
        width, warps = tile(x_TH.shape[1])
        if len(x_TH):
            with on_device(x_TH):
                _add_norm_kernel[(len(x_TH),)](
                    x_TH,
                    x_TH if addend_TH is None else addend_TH,
                    weight_H,
                    sum_TH,
                    y_TH,
                    eps,
                    H=x_TH.shape[1],
                    WIDTH=width,
                    HAS_MORE=addend_TH is not None,
                    num_warps=warps,
                )
        ctx.save_for_backward(sum_TH, weight_H)
        ctx.eps = eps
        ctx.set_materialize_grads(False)
        return sum_TH, y_TH

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_sum_TH: Tensor | None, grad_y_TH: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        if grad_y_TH is None:
            return grad_sum_TH, grad_sum_TH if ctx.needs_input_grad[1] else None, None, None
        sum_TH, weight_H = ctx.saved_tensors
        count, columns = sum_TH.shape
        width, warps = tile(columns)
        programs = backward_programs(count, columns)
        grad_y_TH = grad_y_TH.contiguous()
        of_weight = ctx.needs_input_grad[2]
        grad_TH, grad_H = torch.empty_like(sum_TH), torch.empty_like(weight_H) if of_weight else None
        # An argument that is neither read nor written may be any pointer.
        parts = torch.empty((programs, columns), dtype=torch.float32, device=sum_TH.device) if of_weight else sum_TH
        with on_device(sum_TH):
            if programs:
                _add_norm_backward_kernel[(programs,)](
                    sum_TH,
                    weight_H,
                    grad_y_TH,
                    grad_y_TH if grad_sum_TH is None else grad_sum_TH.contiguous(),
                    grad_TH,
                    parts,
                    count,
                    ctx.eps,
                    H=columns,
                    WIDTH=width,
                    HAS_SUM=grad_sum_TH is not None,
                    HAS_PARTS=of_weight,
                    num_warps=warps,
                )
            if of_weight:
                _sum_parts_kernel[(triton.cdiv(columns, SUM_COLUMNS),)](
                    parts, grad_H, programs, H=columns, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS
                )
        return grad_TH, grad_TH if ctx.needs_input_grad[1] else None, grad_H, None


def weight_dtype(weight: Tensor, x: Tensor) -> torch.dtype:
    """Return the dtype that the kernels expect of a weight: x's, or float32."""
    return torch.float32 if weight.dtype == torch.float32 else x.dtype


def tile(columns: int) -> tuple[int, int]:
    """Return (columns of a row's tile, a power of two; warps, with PER_THREAD elements per thread)."""
    width = triton.next_power_of_2(columns)
    return width, max(1, width // (32 * PER_THREAD))


def backward_programs(count: int, columns: int) -> int:
    """Return the programs of the backward for `count` rows, a function of the shape only (dw's bits need that)."""
    return min(triton.cdiv(count, FEWEST_ROWS), BACKWARD_WARPS // tile(columns)[1])


def specialisations() -> tuple[Specialisation, ...]:
    """Return the widths of Qwen2.5 0.5B, 1.5B, 3B, 7B and 72B in bfloat16, also without the optional arguments.

    In addition one width in float32, and that of Qwen3.5 0.8B with a weight in float32. The 256 of the sum are the two
    weights of heads_triton.py."""
    widths = (896, 1536, 2048, 3584, 8192)
    listed = [_forward_specialisation("*bf16", width, True) for width in widths]
    listed += [_backward_specialisation("*bf16", width, True, True) for width in widths]
    listed += [_sum_specialisation("*bf16", width) for width in (256, 896, 3584)]
    listed += [
        _forward_specialisation("*bf16", 896, False),
        _backward_specialisation("*bf16", 896, False, True),
        _backward_specialisation("*bf16", 3584, True, False),
        _forward_specialisation("*fp32", 3584, True),
        _backward_specialisation("*fp32", 3584, True, True),
        _forward_specialisation("*bf16", 1024, True, "*fp32"),
        _backward_specialisation("*bf16", 1024, True, True, "*fp32"),
    ]
    return tuple(listed)


def _forward_specialisation(pointer: str, columns: int, has_more: bool, weight: str = "") -> Specialisation:
    width, warps = tile(columns)
    pointers = ("x_ptr", "more_ptr", "weight_ptr", "sum_ptr", "y_ptr")
    return Specialisation(
        name=f"norm {pointer[1:]} H {columns:,}" + ("" if has_more else ", no sum") + (weight and ", w fp32"),
        kernel=_add_norm_kernel,
        signature=dict.fromkeys(pointers, pointer) | {"weight_ptr": weight or pointer, "eps": "fp32"},
        constants={"H": columns, "WIDTH": width, "HAS_MORE": has_more},
        aligned=pointers,
        num_warps=warps,
    )


def _backward_specialisation(
    pointer: str, columns: int, has_sum: bool, has_parts: bool, weight: str = ""
) -> Specialisation:
    width, warps = tile(columns)
    pointers = ("sum_ptr", "weight_ptr", "grad_y_ptr", "grad_sum_ptr", "grad_ptr")
    parts = "*fp32" if has_parts else pointer
    return Specialisation(
        name=f"norm's gradient {pointer[1:]} H {columns:,}"
        + ("" if has_sum else ", no sum")
        + ("" if has_parts else ", no dw")
        + (weight and ", w fp32"),
        kernel=_add_norm_backward_kernel,
        signature=dict.fromkeys(pointers, pointer)
        | {"weight_ptr": weight or pointer, "parts_ptr": parts, "count": "i32", "eps": "fp32"},
        constants={"H": columns, "WIDTH": width, "HAS_SUM": has_sum, "HAS_PARTS": has_parts},
        aligned=(*pointers, "parts_ptr"),
        num_warps=warps,
    )


def _sum_specialisation(pointer: str, columns: int) -> Specialisation:
    return Specialisation(
        name=f"norm's dw {pointer[1:]} H {columns:,}",
        kernel=_sum_parts_kernel,
        signature={"parts_ptr": "*fp32", "grad_ptr": pointer, "count": "i32"},
        constants={"H": columns, "ROWS": SUM_ROWS, "COLUMNS": SUM_COLUMNS},
        aligned=("parts_ptr", "grad_ptr"),
    )
