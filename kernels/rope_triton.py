"""`rotate_and_store` and `rotated_heads` of layers.py in Triton, each in one launch, and the gradient of the second.

    y = (a cos - b sin, b cos + a sin)    a, b = halves of a query or key   (Su et al. 2021, equation 34; half-split),
                                          or of its first dimensions, two per angle of the table; the others stay
    da = dy[0] cos + dy[1] sin,  db = dy[1] cos - dy[0] sin
    rotate_and_store: q -> a dense tensor,  k, v of row t -> the cache at (block_T[t], every head, offset_T[t])
    rotated_heads: q, k, v -> a dense tensor each

Each product is rounded to the dtype, and then their sum, as in torch: in bfloat16 the results have the bits of
`rotate` of layers.py and its gradient, so that a rollout caches the same values that the update computes.

Axes: T tokens, N query heads, K key/value heads, M = N + 2K, D head dimension, P blocks of the cache, S slots of a
block (docs/notation.md).
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

HEADS = 16  # of a program: with D 128 two vectors of 16 bytes in bfloat16 for each thread of 4 warps


@triton.jit
def _rounded(x, like):
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit
def _pairs(half, D: tl.constexpr, ANGLES: tl.constexpr):
    """Return the places of the two elements of each pair in a head: pairs that are rotated, then the others."""
    if ANGLES == D // 2:
        first, second = half, half + D // 2
    else:
        wide: tl.constexpr = 8 if ANGLES % 8 == 0 and D % 16 == 0 else 1
        turned = half < ANGLES
        first = tl.max_contiguous(half + tl.where(turned, 0, ANGLES), [1, wide])
        second = tl.max_contiguous(half + tl.where(turned, ANGLES, D // 2), [1, wide])
        first, second = tl.multiple_of(first, [1, wide]), tl.multiple_of(second, [1, wide])
    return first, second


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["block_ptr", "slot_ptr"])
def _rotate_and_store_kernel(
    qkv_ptr,  # [T, N + 2K, D] bf16 or fp32, dense
    rope_ptr,  # [2, T, 1, ANGLES] the same: cos, sin
    block_ptr,  # [T] int32; below 0: nothing is stored
    slot_ptr,  # [T] int32
    q_ptr,  # [T, N, D] as qkv, written
    k_ptr,  # [P, K, S, D] the same, written; blocks are k_stride_p apart
    v_ptr,  # [P, K, S, D] the same
    count,  # T
    k_stride_p,
    v_stride_p,
    N: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    ANGLES: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    # Neighbouring programs have neighbouring heads of a row, followed by those of the next row.
    row = (tl.program_id(0) // tl.cdiv(N + 2 * K, HEADS)).to(tl.int64)
    head = (tl.program_id(0) % tl.cdiv(N + 2 * K, HEADS) * HEADS + tl.arange(0, HEADS))[:, None]
    half = tl.arange(0, HALF)[None, :]
    block = tl.load(block_ptr + row).to(tl.int64)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    inside = (head < N + 2 * K) & (half < D // 2)
    first, second = _pairs(half, D, ANGLES)
    at = qkv_ptr + row * ((N + 2 * K) * D) + head * D
    a = tl.load(at + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(at + second, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(rope_ptr + row * ANGLES + half, mask=half < ANGLES, other=0.0).to(tl.float32)
    sin = tl.load(rope_ptr + (count + row) * ANGLES + half, mask=half < ANGLES, other=0.0).to(tl.float32)
    turned = (head < N + K) & (half < ANGLES)
    left = tl.where(turned, _rounded(a * cos, q_ptr) - _rounded(b * sin, q_ptr), a).to(q_ptr.dtype.element_ty)
    right = tl.where(turned, _rounded(b * cos, q_ptr) + _rounded(a * sin, q_ptr), b).to(q_ptr.dtype.element_ty)

    q_at = q_ptr + row * (N * D) + head * D
    tl.store(q_at + first, left, mask=inside & (head < N))
    tl.store(q_at + second, right, mask=inside & (head < N))
    stored = inside & (block >= 0)
    k_at = k_ptr + block * k_stride_p + slot * D + (head - N) * (S * D)
    tl.store(k_at + first, left, mask=stored & (head >= N) & (head < N + K))
    tl.store(k_at + second, right, mask=stored & (head >= N) & (head < N + K))
    v_at = v_ptr + block * v_stride_p + slot * D + (head - (N + K)) * (S * D)
    tl.store(v_at + first, left, mask=stored & (head >= N + K))
    tl.store(v_at + second, right, mask=stored & (head >= N + K))


@triton.jit(do_not_specialize=["count"])
def _rotated_heads_kernel(
    qkv_ptr,  # [T, N + 2K, D] bf16 or fp32, dense; with BACK written: the gradient of the projection
    rope_ptr,  # [2, T, 1, ANGLES] the same: cos, sin
    q_ptr,  # [T, N, D] as qkv, dense, written; with BACK read: the gradient of the rotated queries
    k_ptr,  # [T, K, D] the same
    v_ptr,  # [T, K, D] the same
    count,  # T
    N: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    BACK: tl.constexpr,
    ANGLES: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    row = (tl.program_id(0) // tl.cdiv(N + 2 * K, HEADS)).to(tl.int64)
    head = (tl.program_id(0) % tl.cdiv(N + 2 * K, HEADS) * HEADS + tl.arange(0, HEADS))[:, None]
    half = tl.arange(0, HALF)[None, :]
    inside = (head < N + 2 * K) & (half < D // 2)
    first, second = _pairs(half, D, ANGLES)
    is_q, is_k = inside & (head < N), inside & (head >= N) & (head < N + K)
    is_v = inside & (head >= N + K)
    turned = (head < N + K) & (half < ANGLES)
    joined_at = qkv_ptr + row * ((N + 2 * K) * D) + head * D
    q_at = q_ptr + row * (N * D) + head * D
    k_at = k_ptr + row * (K * D) + (head - N) * D
    v_at = v_ptr + row * (K * D) + (head - (N + K)) * D
    cos = tl.load(rope_ptr + row * ANGLES + half, mask=half < ANGLES, other=0.0).to(tl.float32)
    sin = tl.load(rope_ptr + (count + row) * ANGLES + half, mask=half < ANGLES, other=0.0).to(tl.float32)
    if BACK:  # one of three loads has the value, the others give 0
        a = tl.load(q_at + first, mask=is_q, other=0.0) + tl.load(k_at + first, mask=is_k, other=0.0)
        b = tl.load(q_at + second, mask=is_q, other=0.0) + tl.load(k_at + second, mask=is_k, other=0.0)
        a = (a + tl.load(v_at + first, mask=is_v, other=0.0)).to(tl.float32)
        b = (b + tl.load(v_at + second, mask=is_v, other=0.0)).to(tl.float32)
        sin = -sin
    else:
        a = tl.load(joined_at + first, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(joined_at + second, mask=inside, other=0.0).to(tl.float32)
    left = tl.where(turned, _rounded(a * cos, q_ptr) - _rounded(b * sin, q_ptr), a).to(q_ptr.dtype.element_ty)
    right = tl.where(turned, _rounded(b * cos, q_ptr) + _rounded(a * sin, q_ptr), b).to(q_ptr.dtype.element_ty)
    if BACK:
        tl.store(joined_at + first, left, mask=inside)
        tl.store(joined_at + second, right, mask=inside)
    else:
        tl.store(q_at + first, left, mask=is_q)
        tl.store(q_at + second, right, mask=is_q)
        tl.store(k_at + first, left, mask=is_k)
        tl.store(k_at + second, right, mask=is_k)
        tl.store(v_at + first, left, mask=is_v)
        tl.store(v_at + second, right, mask=is_v)


def _constants(heads: int, kv_heads: int, dim: int, angles: int, **more: int) -> dict[str, int]:
    """Return the constants of a launch: query heads, key/value heads, head dimension, angles, the tile, and `more`."""
    tile = min(HEADS, triton.next_power_of_2(heads + 2 * kv_heads))
    shape = {"N": heads, "K": kv_heads, "D": dim, "ANGLES": angles}
    return {**shape, **more, "HEADS": tile, "HALF": triton.next_power_of_2(dim // 2)}


def _warps(constants: dict[str, int]) -> int:
    return min(8, max(1, constants["HALF"] // 16))


def fused_rotate_and_store(
    qkv_TMD: Tensor, rope: Tensor, kv_heads: int, k_PKSD: Tensor, v_PKSD: Tensor, block_T: Tensor, offset_T: Tensor
) -> Tensor:
    """Compute `rotate_and_store` of layers.py, with its arguments, on a GPU (or interpreted, on a CPU).

    All bfloat16 or all float32. Raises ValueError for other dtypes, shapes and strides; the values of block_T and
    offset_T are not checked."""
    T, M, D = _check_projection(qkv_TMD, rope, kv_heads)
    dtype, device = qkv_TMD.dtype, qkv_TMD.device
    check_dense("block_T", block_T, (T,), torch.int32, device)
    check_dense("offset_T", offset_T, (T,), torch.int32, device)
    slots = k_PKSD.shape[2] if k_PKSD.dim() == 4 else 0
    for name, cache in (("k_PKSD", k_PKSD), ("v_PKSD", v_PKSD)):
        check_dense(f"a block of {name}", cache[:1], (min(1, len(cache)), kv_heads, slots, D), dtype, device)
    constants = _constants(M - 2 * kv_heads, kv_heads, D, rope.shape[3], S=slots)
    q_TND = torch.empty((T, constants["N"], D), dtype=qkv_TMD.dtype, device=qkv_TMD.device)
    places, strides = (block_T, offset_T), (k_PKSD.stride(0), v_PKSD.stride(0))
    if T:
        grid = (T * triton.cdiv(M, constants["HEADS"]),)
        with on_device(qkv_TMD):
            # Otherwise LLVM narrows products and sums to bfloat16 and fuses them: one rounding instead of two.
            options = {"num_warps": _warps(constants), "enable_fp_fusion": False}
            _rotate_and_store_kernel[grid](
                qkv_TMD, rope, *places, q_TND, k_PKSD, v_PKSD, T, *strides, **constants, **options
            )
    return q_TND


def _check_projection(qkv_TMD: Tensor, rope: Tensor, kv_heads: int) -> tuple[int, int, int]:
    """Return T, M and D of a fused projection. ValueError if the kernels do not serve it."""
    check_dtype("qkv_TMD", qkv_TMD)
    T, M, D = qkv_TMD.shape if qkv_TMD.dim() == 3 else (0, 0, 0)
    if 2 * kv_heads >= M or kv_heads < 1 or D % 2:
        raise ValueError(
            f"qkv_TMD has shape {tuple(qkv_TMD.shape)} for {kv_heads} key/value heads; expected [T, N + 2K, D] with N "
            "and K of at least 1 and D even"
        )
    check_dense("qkv_TMD", qkv_TMD, (T, M, D), qkv_TMD.dtype, qkv_TMD.device)
    angles = min(rope.shape[-1], D // 2)  # for a part of the head, or for all of it
    check_dense("rope", rope, (2, T, 1, angles), qkv_TMD.dtype, qkv_TMD.device)
    return T, M, D


def fused_rotated_heads(qkv_TMD: Tensor, rope: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `rotated_heads` of layers.py, with its arguments, on a GPU (or interpreted, on a CPU).

    Differentiable once by the projection; bfloat16 or float32. The results are dense. Raises ValueError for other
    dtypes and shapes."""
    _check_projection(qkv_TMD, rope, kv_heads)
    q_TND, k_TKD, v_TKD = _RotatedHeads.apply(qkv_TMD, rope, kv_heads)
    return q_TND, k_TKD, v_TKD


class _RotatedHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv_TMD: Tensor, rope: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        T, M, D = qkv_TMD.shape
        heads = (M - 2 * kv_heads, kv_heads, kv_heads)
        q_TND, k_TKD, v_TKD = (torch.empty((T, n, D), dtype=qkv_TMD.dtype, device=qkv_TMD.device) for n in heads)
        _launch_rotated_heads(qkv_TMD, rope, q_TND, k_TKD, v_TKD, back=False)
        ctx.save_for_backward(rope)
        return q_TND, k_TKD, v_TKD

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (rope,) = ctx.saved_tensors
        grad_q_TND, grad_k_TKD, grad_v_TKD = (grad.contiguous() for grad in grads)
        T, N, D = grad_q_TND.shape
        grad_TMD = grad_q_TND.new_empty(T, N + 2 * grad_k_TKD.shape[1], D)
        _launch_rotated_heads(grad_TMD, rope, grad_q_TND, grad_k_TKD, grad_v_TKD, back=True)
        return grad_TMD, None, None


def _launch_rotated_heads(
    qkv_TMD: Tensor, rope: Tensor, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, back: bool
) -> None:
    T, M, D = qkv_TMD.shape
    constants = _constants(q_TND.shape[1], k_TKD.shape[1], D, rope.shape[3], BACK=back)
    if T:
        with on_device(qkv_TMD):
            _rotated_heads_kernel[(T * triton.cdiv(M, constants["HEADS"]),)](
                qkv_TMD, rope, q_TND, k_TKD, v_TKD, T, **constants, num_warps=_warps(constants), enable_fp_fusion=False
            )


def specialisations() -> tuple[Specialisation, ...]:
    """Return the heads of Qwen2.5 0.5B, 1.5B, 3B and 7B in bfloat16, with blocks of 16 slots.

    In addition the first in float32, the heads of 1.5B for training, and those of Qwen3.5 0.8B, of which a quarter is
    rotated."""
    shapes = [
        ("*bf16", _constants(14, 2, 64, 32, S=16)),
        ("*bf16", _constants(12, 2, 128, 64, S=16)),
        ("*bf16", _constants(16, 2, 128, 64, S=16)),
        ("*bf16", _constants(28, 4, 128, 64, S=16)),
        ("*fp32", _constants(14, 2, 64, 32, S=16)),
        ("*bf16", _constants(12, 2, 128, 64, BACK=False)),
        ("*bf16", _constants(12, 2, 128, 64, BACK=True)),
        ("*bf16", _constants(8, 2, 256, 32, S=16)),
        ("*bf16", _constants(8, 2, 256, 32, BACK=False)),
        ("*bf16", _constants(8, 2, 256, 32, BACK=True)),
    ]
    floats, places = ("qkv_ptr", "rope_ptr", "q_ptr", "k_ptr", "v_ptr"), ("block_ptr", "slot_ptr")
    strides = ("k_stride_p", "v_stride_p")

    def one(pointer: str, heads: dict[str, int]) -> Specialisation:
        stores = "S" in heads
        kind = "" if stores else " for training, its gradient" if heads["BACK"] else " for training"
        share = "" if 2 * heads["ANGLES"] == heads["D"] else f" of which {2 * heads['ANGLES']} turn"
        more = dict.fromkeys(places, "*i32") | dict.fromkeys(strides, "i32") if stores else {}
        return Specialisation(
            name=f"rope {pointer[1:]} heads {heads['N']}/{heads['K']} D {heads['D']}{share}{kind}",
            kernel=_rotate_and_store_kernel if stores else _rotated_heads_kernel,
            signature=dict.fromkeys(floats, pointer) | more | {"count": "i32"},
            constants=heads,
            aligned=(*floats, *strides) if stores else floats,
            num_warps=_warps(heads),
            enable_fp_fusion=False,
        )

    return tuple(one(*shape) for shape in shapes)
