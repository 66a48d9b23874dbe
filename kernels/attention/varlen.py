"""Causal attention over whole sequences of unequal length, packed one after the other, differentiable.

    o[i] = sum_{j <= i} softmax_j(q[i] . k[j] / sqrt(D)) v[j]         (Vaswani et al. 2017, equation 1)

Query heads share key/value heads in groups of N / K. `varlen_attention` is the reference, and runs on a CPU; on CUDA a
library with the same signature, `TrainingAttention`, replaces it (backends/).

Axes: T packed tokens, B sequences, Q positions of a sequence, N query heads, K key/value heads, D head dimension
(docs/notation.md).
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from thresher.kernels.delta.layer import DeltaInputs, Spans, delta_attention
from thresher.kernels.layers import rotated_heads

T = TypeVar("T")


class _Spread(torch.autograd.Function):
    """Scatters rows of x [T, ...] into a zero tensor [n, ...]; its backward gathers instead of adding."""

    @staticmethod
    def forward(ctx: Any, x_T: Tensor, index_T: Tensor, n: int) -> Tensor:
        ctx.save_for_backward(index_T)
        return x_T.new_zeros(n, *x_T.shape[1:]).index_copy_(0, index_T, x_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (index_T,) = ctx.saved_tensors
        return grads[0].index_select(0, index_T), None, None


class _Collect(torch.autograd.Function):
    """Gathers rows `index_T` of x [n, ...] (all different); its backward copies instead of adding."""

    @staticmethod
    def forward(ctx: Any, x_n: Tensor, index_T: Tensor) -> Tensor:
        ctx.save_for_backward(index_T)
        ctx.n = x_n.shape[0]
        return x_n.index_select(0, index_T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index_T,) = ctx.saved_tensors
        grad = grads[0]
        return grad.new_zeros(ctx.n, *grad.shape[1:]).index_copy_(0, index_T, grad), None


class TrainingAttention(Protocol):
    """Causal attention within each packed sequence, differentiable, by any backend."""

    def __call__(self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, layout: "Varlen", /) -> Tensor:
        """Compute [T, N, D] from q [T, N, D], k and v [T, K, D], of one dtype and with a contiguous last dimension."""
        ...


class Varlen:
    """Layout of the packed sequences, made once per forward from their lengths (in order, sum T).

    It computes the attention of every layer with `attention` (None: `varlen_attention`).
    longest: tokens of the longest sequence. positions_T [T] int64: of each token in its own sequence. cu_seqlens [B +
    1] int32: where each sequence begins, and T. index_T [T] int64: each token's place if the sequences are padded to
    the longest.
    """

    def __init__(
        self, lengths: Sequence[int], device: torch.device | str = "cpu", attention: TrainingAttention | None = None
    ) -> None:
        self.lengths = list(lengths)
        self.longest = max(self.lengths)
        self.device = torch.device(device)
        self.attention = attention or varlen_attention
        self.positions_T = torch.cat([torch.arange(n) for n in self.lengths]).to(device)
        self.cu_seqlens = torch.tensor([0, *self.lengths]).cumsum(0).to(self.device, torch.int32)
        self._made: dict[str, Any] = {}

    @cached_property
    def index_T(self) -> Tensor:
        starts = [row * self.longest for row in range(len(self.lengths))]
        with torch.inference_mode(False):  # it outlives the first forward that uses it, and backward saves it
            places = [torch.arange(start, start + n) for start, n in zip(starts, self.lengths, strict=True)]
            return torch.cat(places).to(self.device)

    def once(self, name: str, make: Callable[[], T]) -> T:
        """Return the result of `make` for `name`. The first layer calls `make`; later ones get the same object."""
        if name not in self._made:
            with torch.inference_mode(False):
                self._made[name] = make()
        made: T = self._made[name]
        return made

    def __call__(self, layer: int, qkv_TMD: Tensor, rope: Tensor, kv_heads: int) -> Tensor:
        return self.attention(*rotated_heads(qkv_TMD, rope, kv_heads), self)

    @cached_property
    def spans(self) -> Spans:
        return Spans(self.lengths, [-1] * len(self.lengths), self.device)

    def delta(self, layer: int, inputs: DeltaInputs) -> Tensor:
        return delta_attention(inputs, self.spans)


def varlen_attention(q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, layout: Varlen) -> Tensor:
    """Compute causal attention within each packed sequence, differentiable; q [T, N, D], k, v [T, K, D] -> [T, N, D].

    Sequences are padded on the right to the longest one; causality alone excludes the padding from every real row. The
    padding is small if the sequences of a call have similar lengths.
    """
    n = len(layout.lengths)

    def padded(x: Tensor) -> Tensor:
        spread: Tensor = _Spread.apply(x, layout.index_T, n * layout.longest)
        return spread.view(n, layout.longest, *x.shape[1:]).transpose(1, 2)

    o_BNQD = F.scaled_dot_product_attention(
        padded(q_TND), padded(k_TKD), padded(v_TKD), is_causal=True, enable_gqa=q_TND.shape[1] != k_TKD.shape[1]
    )
    rows = o_BNQD.transpose(1, 2).reshape(n * layout.longest, *q_TND.shape[1:])
    out_TND: Tensor = _Collect.apply(rows, layout.index_T)
    return out_TND
