"""Causal attention over sequences of unequal length, in two forms that share one mathematics.

    o[i] = sum_{j <= i} softmax_j(q[i] . k[j] / sqrt(D)) v[j]         (Vaswani et al. 2017, equation 1)

`varlen_attention` trains: whole sequences, packed one after the other, differentiable.
`paged_attention` generates: new rows against keys and values that lie in the blocks of a cache.

Query heads share key/value heads in groups of N / K (grouped-query attention).

Both are torch implementations. In the paged one every sequence's key length is padded to a multiple of `KEY_STEP` and
its rows to a multiple of `ROW_STEP`, by its own length alone, and only equals share a batched matmul: so on a CPU in
float32 the bits of a row are independent of batch composition. (Where D is a multiple of 4, as in every real model;
else the matrices of a batch lie at addresses that MKL treats differently.)

Axes: T packed tokens, B sequences, Q positions or new tokens of a sequence, J its keys, padded, N query heads, K
key/value heads, D head dimension, P blocks of the KV cache, S slots of a block (docs/notation.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

KEY_STEP = 64  # fewer, larger groups of equal key length; must be a multiple of the block size
ROW_STEP = 16  # rows of an append (a prompt, a passage); a decoded token is one row and needs no padding
SCORE_ELEMENTS = 1 << 26  # scores held at once by a paged group: 256 MiB of float32


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

    def __call__(self, layer: int, q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> torch.Tensor:
        return varlen_attention(q_TND, k_TKD, v_TKD, self)


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


@dataclass(frozen=True)
class PagedGroup:
    """Sequences of a step whose padded shapes agree.

    rows_BQ: int64, which of the step's rows are this sequence's new tokens; padding repeats the last one.
    positions_BQ: int64, each row's position in its sequence (number of keys before it).
    blocks_BJ: int64 [B, J / S], the sequence's KV blocks in order; padding repeats any block, and is masked.
    out_T, take_T: rows of the step's output, and which of this group's B * Q padded rows go there.
    """

    rows_BQ: torch.Tensor
    positions_BQ: torch.Tensor
    blocks_BJ: torch.Tensor
    out_T: torch.Tensor
    take_T: torch.Tensor


def paged_attention(
    q_TND: torch.Tensor, k_KPSD: torch.Tensor, v_KPSD: torch.Tensor, groups: Sequence[PagedGroup]
) -> torch.Tensor:
    """New rows q [T, N, D] against cached keys and values [K, P, S, D], already holding the new rows' own -> [T, N, D].

    A row at position p sees the first p + 1 keys of its own sequence, whatever the blocks hold beyond them (as long as
    it is finite).
    """
    out_TND = torch.zeros_like(q_TND)  # rows of no group pad the batch
    for group in groups:
        o_BQND = _paged_group(q_TND, k_KPSD, v_KPSD, group)
        out_TND[group.out_T] = o_BQND.reshape(-1, *q_TND.shape[1:])[group.take_T]
    return out_TND


def _paged_group(q_TND: torch.Tensor, k_KPSD: torch.Tensor, v_KPSD: torch.Tensor, group: PagedGroup) -> torch.Tensor:
    heads, dim = q_TND.shape[1:]
    kv_heads, _, block_size, _ = k_KPSD.shape
    n, rows = group.rows_BQ.shape
    length = group.blocks_BJ.shape[1] * block_size
    per_kv = heads // kv_heads
    at_once = max(1, SCORE_ELEMENTS // (heads * rows * length))
    if n > at_once:
        parts = [
            _paged_group(q_TND, k_KPSD, v_KPSD, PagedGroup(r, p, b, group.out_T, group.take_T))
            for r, p, b in zip(
                group.rows_BQ.split(at_once),
                group.positions_BQ.split(at_once),
                group.blocks_BJ.split(at_once),
                strict=True,
            )
        ]
        return torch.cat(parts)

    rows_BQ, positions_BQ, blocks_BJ = group.rows_BQ, group.positions_BQ, group.blocks_BJ
    if n * kv_heads == 1:
        # torch hands a lone matrix to another routine than a batch, with other last bits: give it a twin.
        rows_BQ, positions_BQ, blocks_BJ = (x.expand(2, -1) for x in (rows_BQ, positions_BQ, blocks_BJ))
        n = 2
    flat = blocks_BJ.reshape(-1)
    # Scores and weights in float32 whatever the cache holds, as the fused kernels of training keep them.
    dtype = torch.promote_types(q_TND.dtype, torch.float32)
    k = k_KPSD.index_select(1, flat).view(kv_heads * n, length, dim).to(dtype)
    v = v_KPSD.index_select(1, flat).view(kv_heads * n, length, dim).to(dtype)
    q = q_TND.to(dtype).index_select(0, rows_BQ.reshape(-1)).view(n, rows, kv_heads, per_kv, dim)
    q = q.permute(2, 0, 3, 1, 4).reshape(kv_heads * n, per_kv * rows, dim) * dim**-0.5

    scores = torch.bmm(q, k.transpose(1, 2)).view(kv_heads, n, per_kv, rows, length)
    unseen_BQJ = torch.arange(length, device=q.device) > positions_BQ[:, :, None]
    scores.masked_fill_(unseen_BQJ[:, None], float("-inf"))
    o = torch.bmm(torch.softmax(scores, -1).view(kv_heads * n, per_kv * rows, length), v)
    o_BQND = o.view(kv_heads, n, per_kv, rows, dim).permute(1, 3, 0, 2, 4).reshape(n, rows, heads, dim)
    return o_BQND[: len(group.rows_BQ)].to(q_TND.dtype)
