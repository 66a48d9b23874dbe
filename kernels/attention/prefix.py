"""Causal attention over sequences that share prefixes: a forest of segments, each packed once, differentiable.

A row sees the rows of its own segment up to itself and all rows of its ancestors' segments. In preorder that is one
integer per key: row i sees key j if j <= i < end[j], where end[j] is the end of the subtree of j's segment. The softmax
over all of a row's keys is combined from parts with a softmax each (Dao et al. 2022, arXiv:2205.14135, section 3.1):

    lse = log sum_p e^lse[p]        o = sum_p e^(lse[p] - lse) o[p]        p: the own segment, and each ancestor

Backward merges nothing. With the merged o and lse, p[i, j] = e^(s[i, j] - lse[i]) is that of the whole softmax, and so
is ds = p (do . v[j] - do . o). Each part therefore gives its share of dq and its own dk, dv.

A part is a `SegmentPairs`, computed by an `AttentionWithLSE`: torch on a CPU (parts.py), a library on CUDA
(backends/parts.py). `ForestKernels` need no parts: forest_triton.py, the first choice on CUDA.

Axes: T packed tokens, N query heads, K key/value heads, D head dimension (docs/notation.md).
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from thresher.kernels.attention.parts import AttentionWithLSE, Run, SegmentPairs, cpu_attention
from thresher.kernels.delta.layer import DeltaInputs, Spans, delta_attention
from thresher.kernels.layers import rotated_heads


class PrefixForest:
    """Segments in preorder, each once; made once per forward, whose attention it computes in every layer.

    lengths[s] >= 1, T in total. parents[s] < s, or -1 of a root; ValueError if that is no preorder. positions_T [T]
    int64: of each token in a sequence that contains it. end_T [T] int64: row i sees key j if j <= i < end_T[j].
    """

    def __init__(
        self,
        lengths: Sequence[int],
        parents: Sequence[int],
        device: torch.device | str = "cpu",
        attention: "AttentionWithLSE | ForestKernels | None" = None,
    ) -> None:
        self.lengths, self.parents = list(lengths), list(parents)
        self.device = torch.device(device)
        self.attention = attention or cpu_attention()
        self.lists: dict[Any, Any] = {}  # of `ForestKernels`, which make them in the first layer
        starts = [0, *accumulate(self.lengths)]
        before: list[int] = []  # tokens before the segment
        level: list[int] = []  # ancestors
        self.ends = starts[1:]
        path = [-1]  # to the segment before
        for length, parent in zip(self.lengths, self.parents, strict=True):
            if length < 1 or parent not in path:
                raise ValueError(
                    f"a segment of {length} tokens below {parent}; expected one of at least 1, in preorder"
                )
            path = [*path[: path.index(parent) + 1], len(before)]
            before.append(0 if parent < 0 else before[parent] + self.lengths[parent])
            level.append(0 if parent < 0 else level[parent] + 1)
        for s in reversed(range(len(before))):
            if self.parents[s] >= 0:
                self.ends[self.parents[s]] = max(self.ends[self.parents[s]], self.ends[s])
        self.positions_T = torch.cat([torch.arange(at, at + n) for at, n in zip(before, self.lengths, strict=True)]).to(
            self.device
        )
        self.parts = (
            []
            if isinstance(self.attention, ForestKernels)
            else list(self._parts(list(pairwise(starts)), level, self.attention.by_level))
        )

    def _parts(self, own: list[Run], level: list[int], by_level: bool) -> Iterator[SegmentPairs]:
        """Yield the parts, first the causal one, which covers every row."""
        yield SegmentPairs(own, own, True, self.device)
        inner = [s for s, (_, stop) in enumerate(own) if self.ends[s] > stop]
        of_level: dict[int, list[int]] = {}
        for s in inner:
            of_level.setdefault(level[s] if by_level else s, []).append(s)
        for group in of_level.values():
            yield SegmentPairs([(own[s][1], self.ends[s]) for s in group], [own[s] for s in group], False, self.device)

    @cached_property
    def end_T(self) -> Tensor:
        return torch.tensor(self.ends).repeat_interleave(torch.tensor(self.lengths)).to(self.device)

    def __call__(self, layer: int, qkv_TMD: Tensor, rope: Tensor, kv_heads: int) -> Tensor:
        return prefix_attention(*rotated_heads(qkv_TMD, rope, kv_heads), self)

    @cached_property
    def spans(self) -> Spans:
        return Spans(self.lengths, self.parents, self.device)

    def delta(self, layer: int, inputs: DeltaInputs) -> Tensor:
        return delta_attention(inputs, self.spans)


class ForestKernels(ABC):
    """Attention over a whole forest at once."""

    @abstractmethod
    def attend(self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, layout: PrefixForest) -> Tensor:
        """Compute `prefix_attention`."""


def prefix_attention(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, layout: PrefixForest) -> Tensor:
    """Compute causal attention along each path of the forest, differentiable.

    q [T, N, D], k and v [T, K, D] -> [T, N, D]."""
    if isinstance(layout.attention, ForestKernels):
        return layout.attention.attend(q_TND, k_TKD, v_TKD, layout)
    out_TND: Tensor = _PrefixAttention.apply(q_TND, k_TKD, v_TKD, layout)
    return out_TND


class _PrefixAttention(torch.autograd.Function):
    """Attention in parts. Each part's output has the queries' dtype; sums are in float32 or wider, then rounded."""

    @staticmethod
    def forward(ctx: Any, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, layout: Any) -> Tensor:
        attend: AttentionWithLSE = layout.attention
        own, *above = layout.parts
        out_TND, lse_TN = attend.forward(q_TND, k_TKD, v_TKD, own)
        if above:
            out_TND = out_TND.to(lse_TN.dtype)
        for part in above:
            out_nND, lse_nN = attend.forward(q_TND[part.rows], k_TKD[part.keys], v_TKD[part.keys], part)
            _merge(out_TND, lse_TN, out_nND, lse_nN, part.rows)
        out_TND = out_TND.to(q_TND.dtype)
        ctx.save_for_backward(q_TND, k_TKD, v_TKD, out_TND, lse_TN)
        ctx.layout = layout
        return out_TND

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q_TND, k_TKD, v_TKD, out_TND, lse_TN = ctx.saved_tensors
        grad_TND = grads[0].contiguous()
        attend: AttentionWithLSE = ctx.layout.attention
        own, *above = ctx.layout.parts
        sums = attend.backward(grad_TND, q_TND, k_TKD, v_TKD, out_TND, lse_TN, own)
        if above:
            dq_TND, dk_TKD, dv_TKD = sums
            sums = dq_TND.to(lse_TN.dtype), dk_TKD.to(lse_TN.dtype), dv_TKD.to(lse_TN.dtype)
        for part in above:
            rows, keys = part.rows, part.keys
            shares = attend.backward(
                grad_TND[rows], q_TND[rows], k_TKD[keys], v_TKD[keys], out_TND[rows], lse_TN[rows], part
            )
            for into, share, place in zip(sums, shares, (rows, keys, keys), strict=True):
                _add(into, share, place)
        dq_TND, dk_TKD, dv_TKD = (x.to(q_TND.dtype) for x in sums)
        return dq_TND, dk_TKD, dv_TKD, None


def _merge(out_TND: Tensor, lse_TN: Tensor, out_nND: Tensor, lse_nN: Tensor, rows: slice | Tensor) -> None:
    """Merge another part's output and log-sum-exp into those of `rows`, in place."""
    before_nN = lse_TN[rows]
    share_nN1 = torch.sigmoid(lse_nN - before_nN)[..., None]  # e^new / (e^new + e^before)
    after_nN = torch.logaddexp(before_nN, lse_nN)
    if isinstance(rows, slice):
        out_TND[rows].lerp_(out_nND.to(out_TND.dtype), share_nN1)
        before_nN.copy_(after_nN)
    else:
        out_TND.index_copy_(0, rows, out_TND[rows].lerp_(out_nND.to(out_TND.dtype), share_nN1))
        lse_TN.index_copy_(0, rows, after_nN)


def _add(into: Tensor, share: Tensor, place: slice | Tensor) -> None:
    """Add a share in place. No row occurs twice in `place`, so the sum has a fixed order."""
    if isinstance(place, slice):
        into[place] += share
    else:
        into.index_add_(0, place, share.to(into.dtype))
