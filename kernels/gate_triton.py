"""`silu_gate` of layers.py in Triton, forward and backward.

    y = silu(g) u,  silu(g) = g sigma(g),  sigma(g) = 1 / (1 + e^-g)        g, u: halves of a row (Shazeer 2020)
    dg = dy u sigma(g) (1 + g (1 - sigma(g))),  du = dy silu(g)

silu is rounded to the dtype before u, as in Qwen2; a gradient is rounded once. Only g and u are saved for backward.

Axes: T tokens, I intermediate width (docs/notation.md).
"""

# Kernels are typed by their launches.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return, no-untyped-call"

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from thresher.kernels.operands import check_dtype, on_device
from thresher.kernels.registry import Specialisation

COLUMNS = 1024  # of a program, all of one row: a vector of 16 bytes per thread in bfloat16


@triton.jit
def _silu_gate_kernel(
    gate_up_ptr,  # [T, 2 I] bf16 or fp32, dense
    y_ptr,  # [T, I] the same, written
    INNER: tl.constexpr,  # I
    COLUMNS: tl.constexpr,
):
    # Neighbouring programs have neighbouring parts of a row, followed by those of the next row.
    row = (tl.program_id(0) // tl.cdiv(INNER, COLUMNS)).to(tl.int64)
    column = tl.program_id(0) % tl.cdiv(INNER, COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < INNER
    at = row * (2 * INNER) + column
    gate = tl.load(gate_up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + INNER, mask=inside, other=0.0).to(tl.float32)
    silu = (gate / (1.0 + tl.exp(-gate))).to(y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + row * INNER + column, (silu * up).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _silu_gate_backward_kernel(
    gate_up_ptr,  # [T, 2 I] bf16 or fp32, dense
    grad_y_ptr,  # [T, I] the same
    grad_ptr,  # [T, 2 I] the same, written: dg and du concatenated
    INNER: tl.constexpr,  # I
    COLUMNS: tl.constexpr,
):
    row = (tl.program_id(0) // tl.cdiv(INNER, COLUMNS)).to(tl.int64)
    column = tl.program_id(0) % tl.cdiv(INNER, COLUMNS) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < INNER
    at = row * (2 * INNER) + column
    gate = tl.load(gate_up_ptr + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + at + INNER, mask=inside, other=0.0).to(tl.float32)
    grad_y = tl.load(grad_y_ptr + row * INNER + column, mask=inside, other=0.0).to(tl.float32)
    sigma = 1.0 / (1.0 + tl.exp(-gate))
    grad_gate = grad_y * up * (sigma * (1.0 + gate * (1.0 - sigma)))
    grad_up = grad_y * (gate * sigma)
    tl.store(grad_ptr + at, grad_gate.to(grad_ptr.dtype.element_ty), mask=inside)
    tl.store(grad_ptr + at + INNER, grad_up.to(grad_ptr.dtype.element_ty), mask=inside)


def fused_silu_gate(gate_up_T2I: Tensor) -> Tensor:
    """Compute silu of the first half times the second, `[T, 2I]` -> `[T, I]`, differentiable once.

    bfloat16 or float32, on a GPU (or interpreted, on a CPU). Raises ValueError for other inputs.
    """
    check_dtype("gate_up_T2I", gate_up_T2I)
    if gate_up_T2I.dim() != 2 or gate_up_T2I.shape[1] % 2 or not gate_up_T2I.shape[1]:
        raise ValueError(f"gate_up_T2I has shape {tuple(gate_up_T2I.shape)}; expected [T, 2I] with I of at least 1")
    y_TI: Tensor = _SiluGate.apply(gate_up_T2I.contiguous())
    return y_TI


class _SiluGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up_T2I: Tensor) -> Tensor:
        rows, inner = len(gate_up_T2I), gate_up_T2I.shape[1] // 2
        grid = (rows * triton.cdiv(inner, COLUMNS),)
        y_TI = torch.empty((rows, inner), dtype=gate_up_T2I.dtype, device=gate_up_T2I.device)
        if rows:
            with on_device(gate_up_T2I):
                _silu_gate_kernel[grid](gate_up_T2I, y_TI, INNER=inner, COLUMNS=COLUMNS)
        ctx.save_for_backward(gate_up_T2I)
        return y_TI

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_TI: Tensor) -> Tensor:
        (gate_up_T2I,) = ctx.saved_tensors
        rows, inner = grad_y_TI.shape
        grad_T2I = torch.empty_like(gate_up_T2I)
        if rows:
            with on_device(gate_up_T2I):
                _silu_gate_backward_kernel[(rows * triton.cdiv(inner, COLUMNS),)](
                    gate_up_T2I, grad_y_TI.contiguous(), grad_T2I, INNER=inner, COLUMNS=COLUMNS
                )
        return grad_T2I


def specialisations() -> tuple[Specialisation, ...]:
    """Return the inner widths of Qwen2.5 0.5B, 1.5B, 3B and 7B in bfloat16, and the first also in float32."""
    shapes = [("*bf16", inner) for inner in (4864, 8960, 11_008, 18_944)] + [("*fp32", 4864)]
    forward, backward = ("gate_up_ptr", "y_ptr"), ("gate_up_ptr", "grad_y_ptr", "grad_ptr")
    return tuple(
        Specialisation(
            name=f"{name} {pointer[1:]} I {inner:,}",
            kernel=kernel,
            signature=dict.fromkeys(pointers, pointer),
            constants={"INNER": inner, "COLUMNS": COLUMNS},
            aligned=pointers,
        )
        for name, kernel, pointers in (
            ("gate", _silu_gate_kernel, forward),
            ("gate's gradient", _silu_gate_backward_kernel, backward),
        )
        for pointer, inner in shapes
    )
