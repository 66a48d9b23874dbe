"""Operations of a layer other than attention: linear map, norm, rotation, gate.

    RMSNorm   y = w * x / sqrt(mean_H(x^2) + eps)                         (Zhang and Sennrich 2019, equation 4)
    QK norm   the same over D of each query head and each key head        (Qwen3; Henry et al. 2020)
    RoPE      angle[t, i] = position[t] * theta^(-2i/D)   i in 0 .. D/2 - 1   (Su et al. 2021, equation 34)
              (a, b) = halves of x        y = (a cos - b sin, b cos + a sin), the half-split layout of Qwen2
              Llama 3.1 divides the angles of a pair that turns fewer than `low` times in its original context by
              `factor`, keeps those above `high` turns, and interpolates linearly, in turns, between the two
    SwiGLU    y = silu(g) * u             g, u = halves of the fused gate-and-up projection   (Shazeer 2020)

The mean of the norm is computed in float32 whatever the dtype of x, and the weight is applied after the cast back, as
in Qwen2. Angles are computed in float32; cos and sin are cast to x's dtype.

`add_norm`, `norm_heads`, `silu_gate`, `rotated_heads` and `rotate_and_store` are one kernel each where `uses_triton` is
true (norm_triton.py, heads_triton.py, gate_triton.py, rope_triton.py). The functions here are their reference, and the
only implementation on a CPU.

Axes: T tokens, H hidden, N heads (of queries, or of queries or keys), K key/value heads, M = N + 2K, D head dimension,
I intermediate, P blocks of the KV cache, S slots of a block (docs/notation.md).
"""

import math
from functools import cache, lru_cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from thresher.kernels.operands import ONEDNN_FROM, onednn_is_faster, onednn_product

TRITON_DTYPES = (torch.bfloat16, torch.float32)
UNCUT = 32_768  # elements; on a CPU, torch splits a longer elementwise loop among its threads, even inside a row


def uses_triton(tensor: Tensor) -> bool:
    """Return whether `tensor` goes to a Triton kernel: bfloat16 or float32 on a GPU, with Triton installed."""
    return tensor.is_cuda and tensor.dtype in TRITON_DTYPES and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def linear(x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Map each row of `x_TI` [T, I] by `weight_OI` [O, I] to [T, O], as F.linear does."""
    # oneDNN cannot compute a weight gradient from 0 rows.
    if weight_OI.numel() >= ONEDNN_FROM and onednn_is_faster(weight_OI) and len(x_TI):
        y_TO: Tensor = _OneDnnLinear.apply(x_TI, weight_OI, bias_O)
        return y_TO
    return F.linear(x_TI, weight_OI, bias_O)


class _OneDnnLinear(torch.autograd.Function):
    """Products by oneDNN: y = x @ W.T + b, dx = dy @ W, dW = dy.T @ x, computed as (x.T @ dy).T, which is faster."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_TI, weight_OI)
        return onednn_product(x_TI, weight_OI, bias_O)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy_TO: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x_TI, weight_OI = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        dx_TI = onednn_product(dy_TO, weight_OI.t()) if for_x else None
        dw_OI = onednn_product(x_TI.t(), dy_TO.t()).t() if for_weight else None
        return dx_TI, dw_OI, dy_TO.sum(0) if for_bias else None


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Normalise each row of `x_TH` [T, H] by its root mean square; returns [T, H] in x's dtype.

    A weight in a wider dtype is applied before the cast back."""
    if x_TH.dtype == torch.float32:
        return F.rms_norm(x_TH, weight_H.shape, weight_H, eps)
    x = x_TH.to(torch.promote_types(x_TH.dtype, torch.float32))
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return weight_H * x.to(x_TH.dtype) if weight_H.dtype == x_TH.dtype else (weight_H * x).to(x_TH.dtype)


# Llama 3.1's scaling: factor, low and high (turns), and the length of the context in which the turns are counted.
Scaling = tuple[float, float, float, float]


def rope_table(
    positions_T: Tensor, head_dim: int, theta: float, dtype: torch.dtype, scaling: Scaling | None = None
) -> Tensor:
    """Compute cos and sin of every angle: positions [T] int -> [2, T, 1, D/2] in `dtype`.

    It is computed once per forward and shared by the layers."""
    angle = positions_T.float()[:, None] / wavelengths(head_dim, theta, positions_T.device, scaling)
    return torch.stack([angle.cos(), angle.sin()])[:, :, None, :].to(dtype)


@lru_cache
def wavelengths(head_dim: int, theta: float, device: torch.device, scaling: Scaling | None = None) -> Tensor:
    """Return the positions per radian of every pair, [D/2] float32: theta^(2i/D), stretched by a scaling."""
    with torch.inference_mode(False):  # the cached tensor outlives the first caller
        plain = theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim)
        if scaling is None:
            return plain
        factor, low, high, context = scaling
        turns = context / (2 * math.pi * plain)
        kept = ((turns - low) / (high - low)).clamp(0, 1)  # the share of the angle that is not divided
        return plain / (kept + (1 - kept) / factor)


def rotate(x_TND: Tensor, table: Tensor) -> Tensor:
    """Rotate `x_TND` [T, N, D] by the angles of `table` (from `rope_table`); returns [T, N, D].

    A table of fewer than D / 2 angles rotates the first dimensions and leaves the others as they are."""
    cos, sin = table[0], table[1]
    half = cos.shape[-1]
    a, b, rest = x_TND.split([half, half, x_TND.shape[-1] - 2 * half], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def rotated_heads(qkv_TMD: Tensor, table: Tensor, kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rotated queries [T, N, D] and keys [T, K, D] and the values [T, K, D] of a fused projection.

    qkv_TMD: [T, N + 2K, D]. Queries and keys are adjacent, so one rotation serves both."""
    if uses_triton(qkv_TMD):
        from thresher.kernels.rope_triton import fused_rotated_heads

        return fused_rotated_heads(qkv_TMD, table, kv_heads)
    heads = qkv_TMD.shape[1] - 2 * kv_heads
    q_TND, k_TKD = rotate(qkv_TMD[:, : heads + kv_heads], table).split([heads, kv_heads], dim=1)
    return q_TND, k_TKD, qkv_TMD[:, heads + kv_heads :]


def rotate_and_store(
    qkv_TMD: Tensor, rope: Tensor, kv_heads: int, k_PKSD: Tensor, v_PKSD: Tensor, block_T: Tensor, offset_T: Tensor
) -> Tensor:
    """Rotate queries and keys of a fused projection [T, N + 2K, D], and store keys and values in the cache.

    Returns the queries [T, N, D], dense. Raises ValueError if qkv_TMD requires a gradient: there is none.
    rope: the table [2, T, 1, D/2] of `rope_table`. k_PKSD, v_PKSD: [P, K, S, D] in qkv's dtype, written in place; their
    inner three axes are dense, the stride of blocks is free. block_T, offset_T: int32, the block and the place in the
    block; row t is stored at k_PKSD[block_T[t], :, offset_T[t]], and the same of v. With block_T < 0 it is not stored,
    or stored in block 0, which is never read; its query is returned. No two other rows may have the same place.
    """
    if torch.is_grad_enabled() and qkv_TMD.requires_grad:
        raise ValueError("qkv_TMD requires a gradient, but cached keys and values have none; expected torch.no_grad()")
    if uses_triton(qkv_TMD):
        from thresher.kernels.rope_triton import fused_rotate_and_store

        return fused_rotate_and_store(qkv_TMD, rope, kv_heads, k_PKSD, v_PKSD, block_T, offset_T)
    q_TND, k_TKD, v_TKD = rotated_heads(qkv_TMD, rope, kv_heads)
    if qkv_TMD.is_cuda:
        # A graph may capture this, so no mask selects rows: those without a place go to block 0, which no sequence has.
        everywhere = block_T.clamp(min=0).long(), slice(None), offset_T.long()
        k_PKSD[everywhere], v_PKSD[everywhere] = k_TKD, v_TKD
        return q_TND.contiguous()
    stored = block_T >= 0
    places = block_T[stored].long(), slice(None), offset_T[stored].long()
    k_PKSD[places] = k_TKD[stored]
    v_PKSD[places] = v_TKD[stored]
    return q_TND.contiguous()


def add_norm(x_TH: Tensor, addend_TH: Tensor | None, weight_H: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (x + more, its `rms_norm`), both [T, H]; None adds nothing."""
    if uses_triton(x_TH):
        from thresher.kernels.norm_triton import fused_add_norm

        return fused_add_norm(x_TH, addend_TH, weight_H, eps)
    x_TH = x_TH if addend_TH is None else x_TH + addend_TH
    return x_TH, rms_norm(x_TH, weight_H, eps)


def norm_heads(qkv_TMD: Tensor, q_weight_D: Tensor, k_weight_D: Tensor, kv_heads: int, eps: float) -> Tensor:
    """Apply `rms_norm` to each query head (`q_weight_D`) and key head (`k_weight_D`) of a fused projection.

    qkv_TMD: [T, N + 2K, D]; the values stay as they are. Returns a new dense tensor."""
    if uses_triton(qkv_TMD):
        from thresher.kernels.heads_triton import fused_norm_heads

        return fused_norm_heads(qkv_TMD, q_weight_D, k_weight_D, kv_heads, eps)
    heads = qkv_TMD.shape[1] - 2 * kv_heads
    q_TND, k_TKD, v_TKD = qkv_TMD.split([heads, kv_heads, kv_heads], dim=1)
    return torch.cat([rms_norm(q_TND, q_weight_D, eps), rms_norm(k_TKD, k_weight_D, eps), v_TKD], dim=1)


def silu_gate(gate_up_T2I: Tensor) -> Tensor:
    """Compute silu of the first half times the second: `[T, 2I]` -> `[T, I]`.

    Without gradients a row's bits do not depend on T. A split inside a row would move elements from silu's vector loop
    to its scalar loop, which differ in the last bit. Long inputs are therefore processed a few whole rows at a time.
    """
    if uses_triton(gate_up_T2I):
        from thresher.kernels.gate_triton import fused_silu_gate

        return fused_silu_gate(gate_up_T2I)
    gate_TI, up_TI = gate_up_T2I.chunk(2, dim=-1)
    rows = max(1, UNCUT // gate_TI.shape[1])
    if len(gate_TI) <= rows or gate_TI.is_cuda or torch.is_grad_enabled():
        return F.silu(gate_TI) * up_TI
    out_TI = gate_TI.new_empty(gate_TI.shape)
    for part_RI, gate_RI, up_RI in zip(*(whole_TI.split(rows) for whole_TI in (out_TI, gate_TI, up_TI)), strict=True):
        torch.ops.aten.silu.out(gate_RI, out=part_RI).mul_(up_RI)
    return out_TI
