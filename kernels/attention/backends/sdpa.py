"""torch's scaled_dot_product_attention on CUDA: sequences padded to the longest, the kernels that may serve named.

Left to itself, SDPA takes its math kernel where no other fits, which holds the scores of all pairs of positions,
N Q^2 of a sequence, and twice in backward. With key/value heads that are shared, float32 always falls to it: the
memory-efficient kernel, the only other one with float32, knows no groups. So key/value heads are repeated here, and
the math kernel runs only where it was asked for.

Axes: T packed tokens, Q positions of a sequence, N query heads, K key/value heads, D head dimension
(docs/notation.md).
"""

from collections.abc import Sequence

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from thresher.kernels.attention.backends.adapter import repeat_heads
from thresher.kernels.attention.varlen import TrainingAttention, Varlen, varlen_attention

FUSED = (SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION)
MATH = (SDPBackend.MATH,)


def load_sdpa(kernels: Sequence[SDPBackend] = FUSED) -> TrainingAttention:
    """Padded SDPA by one of these kernels; RuntimeError at a call that none of them serves."""
    allowed = list(kernels)

    def sdpa_attention(q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layout: Varlen) -> torch.Tensor:
        heads = q_TND.shape[1]
        with sdpa_kernel(allowed):
            return varlen_attention(q_TND, repeat_heads(k_TKD, heads), repeat_heads(v_TKD, heads), layout)

    return sdpa_attention
