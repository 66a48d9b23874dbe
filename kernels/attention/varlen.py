"""Causal attention over whole sequences of unequal length, packed one after the other, differentiable.

    o[i] = sum_{j <= i} softmax_j(q[i] . k[j] / sqrt(D)) v[j]         (Vaswani et al. 2017, equation 1)

Query heads share key/value heads in groups of N / K (grouped-query attention). What generates, new rows against keys
and values that lie in the blocks of a cache, is paged.py's.

Axes: T packed tokens, B sequences, Q positions of a sequence, N query heads, K key/value heads, D head dimension
(docs/notation.md).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from thresher.kernels.elementwise.layers import rotated_heads


class _Spread(torch.autograd.Function):
    """Rows of x [T, ...] to places of a zero tensor [n, ...]; its backward gathers instead of adding."""

    @staticmethod
    def forward(ctx: Any, x_T: torch.Tensor, index_T: torch.Tensor, n: int) -> torch.Tensor:
        ctx.save_for_backward(index_T)
        return x_T.new_zeros(n, *x_T.shape[1:]).index_copy_(0, index_T, x_T)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (index_T,) = ctx.saved_tensors
        return grads[0].index_select(0, index_T), None, None


class _Collect(torch.autograd.Function):
    """The reverse: rows `index_T` of x [n, ...] (all different); its backward copies instead of adding."""

    @staticmethod
    def forward(ctx: Any, x_n: torch.Tensor, index_T: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(index_T)
        ctx.n = x_n.shape[0]
        return x_n.index_select(0, index_T)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (index_T,) = ctx.saved_tensors
        grad = grads[0]
        return grad.new_zeros(ctx.n, *grad.shape[1:]).index_copy_(0, index_T, grad), None


class Varlen:
    """Where each packed sequence lies; made once a forward from the sequences' lengths (in order, sum T)."""

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.lengths = list(lengths)
        self.longest = max(self.lengths)
        starts = [row * self.longest for row in range(len(self.lengths))]
        self.index_T = torch.cat(
            [torch.arange(start, start + n) for start, n in zip(starts, self.lengths, strict=True)]
        ).to(device)
        self.positions_T = torch.cat([torch.arange(n) for n in self.lengths]).to(device)

    def __call__(self, layer: int, qkv_TMD: torch.Tensor, rope: torch.Tensor, kv_heads: int) -> torch.Tensor:
        return varlen_attention(*rotated_heads(qkv_TMD, rope, kv_heads), self)


def varlen_attention(q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, layout: Varlen) -> torch.Tensor:
    """Causal attention within each packed sequence; q [T, N, D], k and v [T, K, D] -> [T, N, D], differentiable.

    Sequences are padded on the right to the longest one, where causality alone keeps the padding out of every real
    row; sort them by length beforehand and little is wasted.
    """
    n = len(layout.lengths)

    def padded(x: torch.Tensor) -> torch.Tensor:
        spread: torch.Tensor = _Spread.apply(x, layout.index_T, n * layout.longest)
        return spread.view(n, layout.longest, *x.shape[1:]).transpose(1, 2)

    o_BNQD = F.scaled_dot_product_attention(
        padded(q_TND),
        padded(k_TKD),
        padded(v_TKD),
        is_causal=True,
        enable_gqa=q_TND.shape[1] != k_TKD.shape[1],
    )
    rows = o_BNQD.transpose(1, 2).reshape(n * layout.longest, *q_TND.shape[1:])
    out_TND: torch.Tensor = _Collect.apply(rows, layout.index_T)
    return out_TND
