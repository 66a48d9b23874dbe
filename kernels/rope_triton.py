"""layers.py's `rotate_and_store` in Triton: what a fused projection becomes before attention reads it, in one launch.

    y = (a cos - b sin, b cos + a sin)    a, b = halves of a query or key   (Su et al. 2021, equation 34; half-split)
    q -> a dense tensor,  k, v of row t -> the cache at (block_T[t], every head, slot_T[t])

Each product is rounded to the dtype, and then their sum, as torch does it: in bfloat16 the result has the bits of
layers.py's `rotate`, so that what a rollout caches is what the update computes. It has no gradient.

Axes: T tokens, N query heads, K key/value heads, M = N + 2K, D head dimension, P blocks of the cache, S slots of a
block (docs/notation.md).
"""

# Kernels are typed by their launches.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-any-return"

import torch
import triton
import triton.language as tl
from torch import Tensor

from thresher.kernels.operands import check_dense, check_dtype, on_device
from thresher.kernels.registry import Specialisation

HEADS = 16  # of a program: with D 128 two vectors of 16 bytes in bfloat16 for each thread of 4 warps


@triton.jit
def _rounded(x, like):
    return x.to(like.dtype.element_ty).to(tl.float32)


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["block_ptr", "slot_ptr"])
def _rotate_and_store_kernel(
    qkv_ptr,  # [T, N + 2K, D] bf16 or fp32, dense
    rope_ptr,  # [2, T, 1, D/2] the same: cos, sin
    block_ptr,  # [T] int32; below 0: nothing is stored
    slot_ptr,  # [T] int32
    q_ptr,  # [T, N, D] as qkv, written
    k_ptr,  # [P, K, S, D] the same, written; blocks lie k_stride_p apart
    v_ptr,  # [P, K, S, D] the same
    count,  # T
    k_stride_p,
    v_stride_p,
    N: tl.constexpr,
    K: tl.constexpr,
    D: tl.constexpr,
    S: tl.constexpr,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
):
    # Neighbouring programs take neighbouring heads of a row, and go on with the next row.
    row = (tl.program_id(0) // tl.cdiv(N + 2 * K, HEADS)).to(tl.int64)
    head = (tl.program_id(0) % tl.cdiv(N + 2 * K, HEADS) * HEADS + tl.arange(0, HEADS))[:, None]
    half = tl.arange(0, HALF)[None, :]
    block = tl.load(block_ptr + row).to(tl.int64)
    slot = tl.load(slot_ptr + row).to(tl.int64)
    inside = (head < N + 2 * K) & (half < D // 2)
    at = qkv_ptr + row * ((N + 2 * K) * D) + head * D + half
    a = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(at + D // 2, mask=inside, other=0.0).to(tl.float32)
    cos = tl.load(rope_ptr + row * (D // 2) + half, mask=half < D // 2, other=0.0).to(tl.float32)
    sin = tl.load(rope_ptr + (count + row) * (D // 2) + half, mask=half < D // 2, other=0.0).to(tl.float32)
    turned = head < N + K
    left = tl.where(turned, _rounded(a * cos, q_ptr) - _rounded(b * sin, q_ptr), a).to(q_ptr.dtype.element_ty)
    right = tl.where(turned, _rounded(b * cos, q_ptr) + _rounded(a * sin, q_ptr), b).to(q_ptr.dtype.element_ty)

    q_at = q_ptr + row * (N * D) + head * D + half
    tl.store(q_at, left, mask=inside & (head < N))
    tl.store(q_at + D // 2, right, mask=inside & (head < N))
    stored = inside & (block >= 0)
    k_at = k_ptr + block * k_stride_p + slot * D + (head - N) * (S * D) + half
    tl.store(k_at, left, mask=stored & (head >= N) & turned)
    tl.store(k_at + D // 2, right, mask=stored & (head >= N) & turned)
    v_at = v_ptr + block * v_stride_p + slot * D + (head - (N + K)) * (S * D) + half
    tl.store(v_at, left, mask=stored & (head >= N + K))
    tl.store(v_at + D // 2, right, mask=stored & (head >= N + K))


def _constants(heads: int, kv_heads: int, dim: int, slots: int) -> dict[str, int]:
    """Return the constants of a launch: query heads, key/value heads, head dimension, slots of a block, the tile."""
    tile = min(HEADS, triton.next_power_of_2(heads + 2 * kv_heads))
    return {"N": heads, "K": kv_heads, "D": dim, "S": slots, "HEADS": tile, "HALF": triton.next_power_of_2(dim // 2)}


def _warps(constants: dict[str, int]) -> int:
    return min(8, max(1, constants["HALF"] // 16))


def fused_rotate_and_store(
    qkv_TMD: Tensor, rope: Tensor, kv_heads: int, k_PKSD: Tensor, v_PKSD: Tensor, block_T: Tensor, slot_T: Tensor
) -> Tensor:
    """Compute layers.py's `rotate_and_store`, which has the arguments, on a GPU (or interpreted, on a CPU); all
    bfloat16 or all float32. Raises ValueError for other dtypes, shapes and strides; where block_T
    and slot_T point is not checked."""
    check_dtype("qkv_TMD", qkv_TMD)
    T, M, D = qkv_TMD.shape if qkv_TMD.dim() == 3 else (0, 0, 0)
    if 2 * kv_heads >= M or kv_heads < 1 or D % 2:
        raise ValueError(
            f"qkv_TMD has shape {tuple(qkv_TMD.shape)} for {kv_heads} key/value heads; expected [T, N + 2K, D] with N "
            "and K of at least 1 and D even"
        )
    dtype, device = qkv_TMD.dtype, qkv_TMD.device
    check_dense("qkv_TMD", qkv_TMD, (T, M, D), dtype, device)
    check_dense("rope", rope, (2, T, 1, D // 2), dtype, device)
    check_dense("block_T", block_T, (T,), torch.int32, device)
    check_dense("slot_T", slot_T, (T,), torch.int32, device)
    slots = k_PKSD.shape[2] if k_PKSD.dim() == 4 else 0
    for name, cache in (("k_PKSD", k_PKSD), ("v_PKSD", v_PKSD)):
        check_dense(f"a block of {name}", cache[:1], (min(1, len(cache)), kv_heads, slots, D), dtype, device)
    constants = _constants(M - 2 * kv_heads, kv_heads, D, slots)
    q_TND = torch.empty((T, constants["N"], D), dtype=qkv_TMD.dtype, device=qkv_TMD.device)
    places, strides = (block_T, slot_T), (k_PKSD.stride(0), v_PKSD.stride(0))
    if T:
        grid = (T * triton.cdiv(M, constants["HEADS"]),)
        with on_device(qkv_TMD):
            # Without fusion: LLVM would narrow products and sums to bfloat16 and fuse them, one rounding in place of two.
            options = {"num_warps": _warps(constants), "enable_fp_fusion": False}
            _rotate_and_store_kernel[grid](
                qkv_TMD, rope, *places, q_TND, k_PKSD, v_PKSD, T, *strides, **constants, **options
            )
    return q_TND


def specialisations() -> tuple[Specialisation, ...]:
    """The heads of Qwen2.5 0.5B, 1.5B, 3B and 7B in bfloat16, with blocks of 16 slots, the first in float32, too."""
    shapes = [
        ("*bf16", _constants(14, 2, 64, 16)),
        ("*bf16", _constants(12, 2, 128, 16)),
        ("*bf16", _constants(16, 2, 128, 16)),
        ("*bf16", _constants(28, 4, 128, 16)),
        ("*fp32", _constants(14, 2, 64, 16)),
    ]
    floats, places = ("qkv_ptr", "rope_ptr", "q_ptr", "k_ptr", "v_ptr"), ("block_ptr", "slot_ptr")
    strides = ("k_stride_p", "v_stride_p")
    return tuple(
        Specialisation(
            name=f"rope {pointer[1:]} heads {heads['N']}/{heads['K']} D {heads['D']}",
            kernel=_rotate_and_store_kernel,
            signature=dict.fromkeys(floats, pointer)
            | dict.fromkeys(places, "*i32")
            | dict.fromkeys(("count", *strides), "i32"),
            constants=heads,
            aligned=(*floats, *strides),
            num_warps=_warps(heads),
            enable_fp_fusion=False,
        )
        for pointer, heads in shapes
    )
