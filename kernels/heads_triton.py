"""`norm_heads` of layers.py in Triton, forward and backward: the norm of every query head and every key head of a row.

    n = r s,  r = 1 / sqrt(mean_D(s^2) + eps)                 (Zhang and Sennrich 2019, equation 4), s: one head
    y = w n,  w: the queries' or the keys'                    in float32 up to n, which is rounded to the dtype, unless
                                                              w is float32 and the dtype is not
    y = s                                                     of a value head
    ds = r (g - n mean_D(g n)),  g = w dy;  of a value head dy
    dw = sum dy n, over rows and the heads that w belongs to

Only s and the weights are saved for backward. A program of the backward iterates over rows and sums dy n in float32;
the programs' sums are added in a fixed order, and their number depends only on the shape, so dw has the same bits each
time.

Axes: T tokens, N query heads, K key/value heads, M = N + 2K, D head dimension (docs/notation.md).
"""

# Kernels are typed by their launches.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return, no-untyped-call"

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from thresher.kernels.norm_triton import SUM_COLUMNS, SUM_ROWS, _sum_parts_kernel, weight_dtype
from thresher.kernels.operands import check_dense, check_dtype, on_device
from thresher.kernels.registry import Specialisation

HEADS = 16  # of a program: with D 128 two vectors of 16 bytes in bfloat16 for each thread of 4 warps
PER_THREAD = 16  # elements of a tile that a thread holds
BACKWARD_WARPS = 1536  # of all programs together, as norm_triton.py's
FEWEST_ROWS = 4  # that a program of the backward processes, if there are that many


@triton.jit
def _norm_heads_kernel(
    qkv_ptr,  # [T, N + 2K, D] bf16 or fp32, dense
    q_weight_ptr,  # [D] the same, or fp32
    k_weight_ptr,  # [D] as q_weight
    y_ptr,  # [T, N + 2K, D] the same, written
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    # Neighbouring programs have neighbouring heads of a row, followed by those of the next row.
    row = (tl.program_id(0) // tl.cdiv(N + 2 * K, HEADS)).to(tl.int64)
    head = (tl.program_id(0) % tl.cdiv(N + 2 * K, HEADS) * HEADS + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = (head < N + 2 * K) & (column < D)
    at = row * ((N + 2 * K) * D) + head * D + column
    s = tl.load(qkv_ptr + at, mask=inside, other=0.0).to(tl.float32)
    # A weight for each head of the tile: a load as wide as the tile's, from the cache.
    weight = tl.load(tl.where(head < N, q_weight_ptr, k_weight_ptr) + column, mask=inside, other=0.0).to(tl.float32)
    r = tl.rsqrt(tl.sum(s * s, 1) / D + eps)[:, None]
    normed = s * r
    if q_weight_ptr.dtype.element_ty == y_ptr.dtype.element_ty:
        normed = normed.to(y_ptr.dtype.element_ty).to(tl.float32)
    y = tl.where(head < N + K, weight * normed, s)
    tl.store(y_ptr + at, y.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _norm_heads_backward_kernel(
    qkv_ptr,  # [T, N + 2K, D] bf16 or fp32, dense
    q_weight_ptr,  # [D] the same, or fp32
    k_weight_ptr,  # [D] as q_weight
    grad_y_ptr,  # [T, N + 2K, D] the same
    grad_ptr,  # [T, N + 2K, D] the same, written
    parts_ptr,  # [programs, 2, D] fp32, written if HAS_PARTS: for the queries' weight, and for the keys'
    count,  # T
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HAS_PARTS: tl.constexpr,
):
    program = tl.program_id(0)
    groups = tl.cdiv(N + 2 * K, HEADS)
    head = (program % groups * HEADS + tl.arange(0, HEADS))[:, None]
    column = tl.arange(0, WIDTH)[None, :]
    inside = (head < N + 2 * K) & (column < D)
    weights = tl.where(head < N, q_weight_ptr, k_weight_ptr) + column
    total = tl.zeros((HEADS, WIDTH), tl.float32)
    start = (program // groups).to(tl.int64) * ((N + 2 * K) * D)
    for _ in range(program // groups, count, tl.num_programs(0) // groups):
        at = start + head * D + column
        s = tl.load(qkv_ptr + at, mask=inside, other=0.0).to(tl.float32)
        grad_y = tl.load(grad_y_ptr + at, mask=inside, other=0.0).to(tl.float32)
        r = tl.rsqrt(tl.sum(s * s, 1) / D + eps)[:, None]
        normed = s * r
        g = tl.load(weights, mask=inside, other=0.0).to(tl.float32) * grad_y  # from the cache, row by row
        grad = r * (g - normed * (tl.sum(g * normed, 1) / D)[:, None])
        tl.store(grad_ptr + at, tl.where(head < N + K, grad, grad_y).to(grad_ptr.dtype.element_ty), mask=inside)
        if HAS_PARTS:
            total += grad_y * normed
        start += (tl.num_programs(0) // groups).to(tl.int64) * ((N + 2 * K) * D)
    if HAS_PARTS:
        part = parts_ptr + program.to(tl.int64) * (2 * D) + tl.arange(0, WIDTH)
        tl.store(part, tl.sum(tl.where(head < N, total, 0.0), 0), mask=tl.arange(0, WIDTH) < D)
        of_keys = (head >= N) & (head < N + K)
        tl.store(part + D, tl.sum(tl.where(of_keys, total, 0.0), 0), mask=tl.arange(0, WIDTH) < D)


@dataclass(frozen=True, slots=True)
class _HeadShape:
    """The shape that the kernels are compiled for: query heads, key/value heads, head dimension."""

    N: int
    K: int
    D: int

    def constants(self) -> dict[str, int]:
        heads = min(HEADS, triton.next_power_of_2(self.N + 2 * self.K))
        return {"N": self.N, "K": self.K, "D": self.D, "HEADS": heads, "WIDTH": triton.next_power_of_2(self.D)}

    def programs_of_a_row(self) -> int:
        return -(-(self.N + 2 * self.K) // self.constants()["HEADS"])

    def warps(self) -> int:
        constants = self.constants()
        return min(8, max(1, constants["HEADS"] * constants["WIDTH"] // (32 * PER_THREAD)))

    def backward_programs(self, count: int) -> int:
        """Return the programs of the backward for `count` rows, a function of the shape only (dw's bits need that)."""
        most = max(1, BACKWARD_WARPS // self.warps() // self.programs_of_a_row())
        return self.programs_of_a_row() * min(triton.cdiv(count, FEWEST_ROWS), most)


def fused_norm_heads(qkv_TMD: Tensor, q_weight_D: Tensor, k_weight_D: Tensor, kv_heads: int, eps: float) -> Tensor:
    """Compute `norm_heads` of layers.py, with its arguments, differentiable once.

    On a GPU (or interpreted, on a CPU), all bfloat16 or all float32, or only the weights float32. Raises ValueError for
    other dtypes and shapes."""
    check_dtype("qkv_TMD", qkv_TMD)
    if qkv_TMD.dim() != 3 or kv_heads < 1 or 2 * kv_heads >= qkv_TMD.shape[1]:
        raise ValueError(
            f"qkv_TMD has shape {tuple(qkv_TMD.shape)} for {kv_heads} key/value heads; expected [T, N + 2K, D] with N "
            "and K of at least 1"
        )
    for name, weight_D in (("q_weight_D", q_weight_D), ("k_weight_D", k_weight_D)):
        check_dense(name, weight_D, qkv_TMD.shape[2:], weight_dtype(q_weight_D, qkv_TMD), qkv_TMD.device)
    found: Tensor = _NormHeads.apply(qkv_TMD.contiguous(), q_weight_D, k_weight_D, kv_heads, eps)
    return found


class _NormHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv_TMD: Tensor, q_weight_D: Tensor, k_weight_D: Tensor, kv_heads: int, eps: float) -> Tensor:
        T, M, D = qkv_TMD.shape
        heads = _HeadShape(M - 2 * kv_heads, kv_heads, D)
        y_TMD = torch.empty_like(qkv_TMD)
        if T:
            with on_device(qkv_TMD):
                _norm_heads_kernel[(T * heads.programs_of_a_row(),)](
                    qkv_TMD, q_weight_D, k_weight_D, y_TMD, eps, **heads.constants(), num_warps=heads.warps()
                )
        ctx.save_for_backward(qkv_TMD, q_weight_D, k_weight_D)
        ctx.heads, ctx.eps = heads, eps
        return y_TMD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y_TMD: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None, None, None]:
        qkv_TMD, q_weight_D, k_weight_D = ctx.saved_tensors
        heads, of_weights = ctx.heads, ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        programs = heads.backward_programs(len(qkv_TMD))
        grad_TMD = torch.empty_like(qkv_TMD)
        # An argument that is not written may be any pointer.
        parts = grad_TMD
        if of_weights:
            parts = torch.empty((programs, 2 * heads.D), dtype=torch.float32, device=qkv_TMD.device)
        grad_2D = q_weight_D.new_empty(2 * heads.D) if of_weights else None
        with on_device(qkv_TMD):
            if programs:
                _norm_heads_backward_kernel[(programs,)](
                    qkv_TMD,
                    q_weight_D,
                    k_weight_D,
                    grad_y_TMD.contiguous(),
                    grad_TMD,
                    parts,
                    len(qkv_TMD),
                    ctx.eps,
                    **heads.constants(),
                    HAS_PARTS=of_weights,
                    num_warps=heads.warps(),
                )
            if grad_2D is not None:
                _sum_parts_kernel[(triton.cdiv(2 * heads.D, SUM_COLUMNS),)](
                    parts, grad_2D, programs, H=2 * heads.D, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS
                )
        grad_q, grad_k = (None, None) if grad_2D is None else grad_2D.chunk(2)
        return grad_TMD, grad_q, grad_k, None, None


def specialisations() -> tuple[Specialisation, ...]:
    """Return the heads of Qwen3 0.6B and 1.7B, 4B and 8B, 14B, 32B in bfloat16.

    In addition the first in float32 and with frozen weights, and those of Qwen3.5 0.8B with weights in float32."""
    shapes = [_HeadShape(16, 8, 128), _HeadShape(32, 8, 128), _HeadShape(40, 8, 128), _HeadShape(64, 8, 128)]
    listed = [_forward_specialisation("*bf16", heads) for heads in shapes]
    listed += [_backward_specialisation("*bf16", heads, True) for heads in shapes]
    listed += [
        _backward_specialisation("*bf16", shapes[0], False),
        _forward_specialisation("*fp32", shapes[0]),
        _backward_specialisation("*fp32", shapes[0], True),
        _forward_specialisation("*bf16", _HeadShape(8, 2, 256), "*fp32"),
        _backward_specialisation("*bf16", _HeadShape(8, 2, 256), True, "*fp32"),
    ]
    return tuple(listed)


def _forward_specialisation(pointer: str, heads: _HeadShape, weight: str = "") -> Specialisation:
    pointers = ("qkv_ptr", "q_weight_ptr", "k_weight_ptr", "y_ptr")
    return Specialisation(
        name=f"heads' norm {pointer[1:]} heads {heads.N}/{heads.K} D {heads.D}" + (weight and ", w fp32"),
        kernel=_norm_heads_kernel,
        signature=dict.fromkeys(pointers, pointer) | dict.fromkeys(pointers[1:3], weight or pointer) | {"eps": "fp32"},
        constants=heads.constants(),
        aligned=pointers,
        num_warps=heads.warps(),
    )


def _backward_specialisation(pointer: str, heads: _HeadShape, has_parts: bool, weight: str = "") -> Specialisation:
    pointers = ("qkv_ptr", "q_weight_ptr", "k_weight_ptr", "grad_y_ptr", "grad_ptr")
    parts = "*fp32" if has_parts else pointer
    return Specialisation(
        name=f"heads' norm's gradient {pointer[1:]} heads {heads.N}/{heads.K} D {heads.D}"
        + ("" if has_parts else ", no dw")
        + (weight and ", w fp32"),
        kernel=_norm_heads_backward_kernel,
        signature=dict.fromkeys(pointers, pointer)
        | dict.fromkeys(pointers[1:3], weight or pointer)
        | {"parts_ptr": parts, "count": "i32", "eps": "fp32"},
        constants=heads.constants() | {"HAS_PARTS": has_parts},
        aligned=(*pointers, "parts_ptr"),
        num_warps=heads.warps(),
    )
