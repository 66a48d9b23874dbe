"""xformers' memory_efficient_attention: packed sequences behind a BlockDiagonalCausalMask, float32 among its dtypes.

Groups of query heads are a fifth dimension, [1, T, K, N / K, D], with keys and values expanded, not copied; no kernel
of xformers has a backward for that, so with gradients the key/value heads are repeated, and there are four.

Axes: T packed tokens, N query heads, K key/value heads, D head dimension (docs/notation.md).
"""

import torch

from thresher.kernels.attention.backends.adapter import load_part, repeat_heads
from thresher.kernels.attention.varlen import TrainingAttention, Varlen

GET = "pip install xformers"
LIBRARY = "the package xformers"


def load_xformers() -> TrainingAttention:
    """xformers' own choice among its kernels; Unserved without the package."""
    attend = load_part(LIBRARY, GET, "xformers.ops", "memory_efficient_attention")
    causal_mask = load_part(LIBRARY, GET, "xformers.ops.fmha.attn_bias", "BlockDiagonalCausalMask")

    def xformers_attention(
        q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layout: Varlen
    ) -> torch.Tensor:
        mask = layout.once("xformers", lambda: causal_mask.from_seqlens(layout.lengths, device=layout.device))
        count, heads, dim = q_TND.shape
        kv_heads = k_TKD.shape[1]
        if heads == kv_heads or any(x.requires_grad for x in (q_TND, k_TKD, v_TKD)):
            q, k, v = q_TND, repeat_heads(k_TKD, heads), repeat_heads(v_TKD, heads)
        else:
            grouped = (count, kv_heads, heads // kv_heads, dim)
            q, k, v = q_TND.view(grouped), k_TKD[:, :, None].expand(grouped), v_TKD[:, :, None].expand(grouped)
        out: torch.Tensor = attend(q[None], k[None], v[None], attn_bias=mask)
        return out.reshape(count, heads, dim)

    return xformers_attention
