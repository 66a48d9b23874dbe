"""torch.nn.attention.varlen.varlen_attn: FlashAttention over packed sequences that comes with torch (2.11 and later).

    window_size (-1, 0)   any position before, none after: causal
    enable_gqa            torch 2.12 and later; torch 2.11 has as many key/value heads as query heads

Axes: T packed tokens, N query heads, K key/value heads, D head dimension (docs/notation.md).
"""

from inspect import signature

import torch

from thresher.kernels.attention.backends.adapter import Unserved, load_part, repeat_heads
from thresher.kernels.attention.varlen import TrainingAttention, Varlen

GET = 'pip install "torch>=2.11"'


def load_torch_varlen() -> TrainingAttention:
    """torch's own; Unserved where this torch has none, or one without a causal window."""
    varlen_attn = load_part("torch's varlen_attn", GET, "torch.nn.attention.varlen", "varlen_attn")
    takes = signature(varlen_attn).parameters
    if "window_size" not in takes:
        raise Unserved(f"needs torch's varlen_attn with window_size, which torch {torch.__version__} lacks ({GET})")
    grouped = "enable_gqa" in takes

    def torch_varlen_attention(
        q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layout: Varlen
    ) -> torch.Tensor:
        heads, shared = q_TND.shape[1], q_TND.shape[1] != k_TKD.shape[1]
        if shared and not grouped:
            k_TKD, v_TKD = repeat_heads(k_TKD, heads), repeat_heads(v_TKD, heads)
        out_TND: torch.Tensor = varlen_attn(
            q_TND,
            k_TKD,
            v_TKD,
            layout.cu_seqlens,
            layout.cu_seqlens,
            layout.longest,
            layout.longest,
            window_size=(-1, 0),
            **({"enable_gqa": True} if shared and grouped else {}),
        )
        return out_TND

    return torch_varlen_attention
