"""flash-attn, version 2 (package flash-attn) and version 3 (flash_attn_interface, built for Hopper).

Both have a `flash_attn_varlen_func` over packed sequences, with key/value heads in groups, head n's at n // (N / K),
and a backward. Early builds of version 3 return (output, log-sum-exp), later ones the output. Their backward adds in
no fixed order: two runs agree in mathematics, not in bits.

Axes: T packed tokens, N query heads, K key/value heads, D head dimension (docs/notation.md).
"""

from typing import Any

import torch

from thresher.kernels.attention.backends.adapter import load_part
from thresher.kernels.attention.varlen import TrainingAttention, Varlen

GET_2 = "pip install flash-attn --no-build-isolation, which builds it with nvcc"
GET_3 = "python setup.py install in the folder hopper of flash-attention's sources"


def load_flash2() -> TrainingAttention:
    """FlashAttention-2; Unserved without it."""
    return _adapter(load_part("the package flash-attn", GET_2, "flash_attn", "flash_attn_varlen_func"))


def load_flash3() -> TrainingAttention:
    """FlashAttention-3; Unserved without it."""
    return _adapter(load_part("FlashAttention-3", GET_3, "flash_attn_interface", "flash_attn_varlen_func"))


def _adapter(flash_attn_varlen_func: Any) -> TrainingAttention:
    def flash_attention(q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layout: Varlen) -> torch.Tensor:
        found = flash_attn_varlen_func(
            q_TND,
            k_TKD,
            v_TKD,
            cu_seqlens_q=layout.cu_seqlens,
            cu_seqlens_k=layout.cu_seqlens,
            max_seqlen_q=layout.longest,
            max_seqlen_k=layout.longest,
            causal=True,
        )
        out_TND: torch.Tensor = found[0] if isinstance(found, tuple) else found
        return out_TND

    return flash_attention
