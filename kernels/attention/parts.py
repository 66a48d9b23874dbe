"""Attention of some query rows to some of their keys: output and log-sum-exp, and their share of the gradients.

    o = sum_j e^(s[i, j] - lse[i]) v[j]     lse[i] = log sum_j e^s[i, j]     s = q k / sqrt(D)     j: keys of the part

prefix.py combines parts. Its backward gives each part the merged output and lse, with which p = e^(s - lse) and
ds = p (do . v[j] - do . o) are those of the whole softmax. This file computes parts on a CPU in two ways: by torch's
flash attention, and by products, which run anywhere and are its oracle. On CUDA a library does (backends/parts.py).

Axes: T packed tokens, B sequences of one length, Q their positions, N query heads, K key/value heads, D head dimension
(docs/notation.md).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

V = TypeVar("V")
Run = tuple[int, int]  # rows [start, stop) of the packed tokens
PADDED_AT_MOST = 0.75  # runs are padded to one length if the shortest is at least this share of it
SCORES = 1 << 20  # scores that the products hold at once


class SegmentPairs:
    """Runs of query rows, each against one run of keys: causal, if both are the same run, or every key.

    lengths_q, lengths_k: of the runs, in the order packed. rows, keys: their indices among T packed tokens, a slice
    if they are contiguous, else [n] int64.
    """

    def __init__(self, queries: Sequence[Run], keys: Sequence[Run], causal: bool, device: torch.device) -> None:
        self.causal, self.device = causal, device
        self.lengths_q, self.lengths_k = ([stop - start for start, stop in runs] for runs in (queries, keys))
        self.rows, self.keys = _place(queries, device), _place(keys, device)
        self._made: dict[str, Any] = {}

    def once(self, name: str, make: Callable[[], V]) -> V:
        """Return the result of `make` for `name`. The first layer calls `make`; later ones get the same object."""
        if name not in self._made:
            with torch.inference_mode(False):
                self._made[name] = make()
        made: V = self._made[name]
        return made

    @property
    def cu_q(self) -> Tensor:
        """Return where each run of queries begins, and their number: [B + 1] int32."""
        return self.once("cu_q", lambda: _cumulated(self.lengths_q, self.device))

    @property
    def cu_k(self) -> Tensor:
        return self.once("cu_k", lambda: _cumulated(self.lengths_k, self.device))


class AttentionWithLSE(Protocol):
    """Attention of the query rows of a part to its keys, and its backward if these are only some of the keys."""

    by_level: bool  # one call for all segments with as many ancestors, else one for each

    def forward(self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, part: SegmentPairs, /) -> tuple[Tensor, Tensor]:
        """Compute a part's output, like q, and lse [T, N], float32 or wider, from its rows of q, keys and values."""
        ...

    def backward(
        self,
        grad_TND: Tensor,
        q_TND: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        out_TND: Tensor,
        lse_TN: Tensor,
        part: SegmentPairs,
        /,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute (dq, dk, dv) of this part; out and lse are the merged ones."""
        ...


class MatmulAttention:
    """Parts by plain products, at most SCORES scores at once, in float32 or wider, for any device and dtype."""

    by_level = False

    def forward(self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, part: SegmentPairs) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(q_TND.dtype, torch.float32)
        out_TND = torch.empty_like(q_TND)
        lse_TN = q_TND.new_empty(q_TND.shape[:2], dtype=wide)
        for rows, keys in self._blocks(q_TND, k_TKD, part):
            q, k, v = _grouped(q_TND[rows], k_TKD.shape[1], wide), _heads(k_TKD[keys], wide), _heads(v_TKD[keys], wide)
            scores = self._scores(q, k, part, rows, keys)
            lse = scores.logsumexp(-1, keepdim=True)
            out_TND[rows] = _ungrouped((scores - lse).exp_() @ v, q_TND[rows])
            lse_TN[rows] = _ungrouped(lse, lse_TN[rows])[..., 0]
        return out_TND, lse_TN

    def backward(
        self,
        grad_TND: Tensor,
        q_TND: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        out_TND: Tensor,
        lse_TN: Tensor,
        part: SegmentPairs,
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide, heads = lse_TN.dtype, k_TKD.shape[1]
        dq_TND = torch.empty_like(q_TND, dtype=wide)
        dk_TKD, dv_TKD = (torch.zeros_like(x, dtype=wide) for x in (k_TKD, v_TKD))
        for rows, keys in self._blocks(q_TND, k_TKD, part):
            q, grad, out = (_grouped(x[rows], heads, wide) for x in (q_TND, grad_TND, out_TND))
            k, v = _heads(k_TKD[keys], wide), _heads(v_TKD[keys], wide)
            lse = _grouped(lse_TN[rows][..., None], heads, wide)
            probs = self._scores(q, k, part, rows, keys).sub_(lse).exp_()
            dscores = (grad @ v.mT).sub_((grad * out).sum(-1, keepdim=True)).mul_(probs).mul_(q.shape[-1] ** -0.5)
            dq_TND[rows] = _ungrouped(dscores @ k, dq_TND[rows])
            dk_TKD[keys] += (dscores.mT @ q).transpose(0, 1)
            dv_TKD[keys] += (probs.mT @ grad).transpose(0, 1)
        return dq_TND, dk_TKD, dv_TKD

    def _blocks(self, q_TND: Tensor, k_TKD: Tensor, part: SegmentPairs) -> Iterator[tuple[slice, slice]]:
        """Yield some rows of a pair, and the keys that they see."""
        at_q = at_k = 0
        for count, keys in zip(part.lengths_q, part.lengths_k, strict=True):
            rows = max(1, SCORES // (q_TND.shape[1] * keys))
            for start in range(0, count, rows):
                stop = min(start + rows, count)
                yield slice(at_q + start, at_q + stop), slice(at_k, at_k + (stop if part.causal else keys))
            at_q, at_k = at_q + count, at_k + keys

    def _scores(self, q: Tensor, k: Tensor, part: SegmentPairs, rows: slice, keys: slice) -> Tensor:
        """Compute [K, rows of all its query heads, keys]; queries and keys of a causal pair are the same runs."""
        scores = (q @ k.mT).mul_(q.shape[-1] ** -0.5)
        if part.causal:
            place_q = torch.arange(rows.start, rows.stop, device=q.device).repeat(
                q.shape[1] // (rows.stop - rows.start)
            )
            place_k = torch.arange(keys.start, keys.stop, device=q.device)
            scores.masked_fill_(place_k > place_q[:, None], -torch.inf)
        return scores


def _grouped(x_TND: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """Reshape [T, N, D] to [K, N / K * T, D], all queries of one head of keys together."""
    count, heads, dim = x_TND.shape
    x = x_TND.to(dtype).view(count, kv_heads, heads // kv_heads, dim)
    return x.permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)


def _ungrouped(x: Tensor, like: Tensor) -> Tensor:
    """Undo `_grouped`, with rows, heads and dtype of `like`; the last dimension of x may have any size."""
    count, heads = like.shape[:2]
    kv_heads = x.shape[0]
    return x.view(kv_heads, heads // kv_heads, count, -1).permute(2, 0, 1, 3).reshape(count, heads, -1).to(like.dtype)


def _heads(x_TKD: Tensor, dtype: torch.dtype) -> Tensor:
    return x_TKD.to(dtype).transpose(0, 1)


class FlashCpuAttention:
    """Parts by torch's flash attention for a CPU, which returns its log-sum-exp, and whose backward takes one.

    These operators are private to torch: `cpu_attention` tries them before they are used.
    """

    by_level = False

    def __init__(self) -> None:
        self._forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        self._backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

    def forward(self, q_TND: Tensor, k_TKD: Tensor, v_TKD: Tensor, part: SegmentPairs) -> tuple[Tensor, Tensor]:
        if not part.causal:
            out, lse = self._forward(_one(q_TND), _one(k_TKD), _one(v_TKD), 0.0, False)
            return _packed(out), _packed(lse)
        out_TND, lse_TN = torch.empty(q_TND.shape, dtype=q_TND.dtype), None
        for bucket in part.once("buckets", lambda: _buckets(part)):
            out, lse = self._forward(*(bucket.padded(x) for x in (q_TND, k_TKD, v_TKD)), 0.0, True)
            if lse_TN is None:
                lse_TN = torch.empty(q_TND.shape[:2], dtype=lse.dtype)
            bucket.store(out_TND, out)
            bucket.store(lse_TN, lse)
        assert lse_TN is not None
        return out_TND, lse_TN

    def backward(
        self,
        grad_TND: Tensor,
        q_TND: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        out_TND: Tensor,
        lse_TN: Tensor,
        part: SegmentPairs,
    ) -> tuple[Tensor, Tensor, Tensor]:
        given = (grad_TND, q_TND, k_TKD, v_TKD, out_TND)
        if not part.causal:
            dq, dk, dv = self._backward(*map(_one, given), _one(lse_TN), 0.0, False)
            return _packed(dq), _packed(dk), _packed(dv)
        sums = (torch.empty_like(q_TND), torch.empty_like(k_TKD), torch.empty_like(v_TKD))
        for bucket in part.once("buckets", lambda: _buckets(part)):
            shares = self._backward(*map(bucket.padded, given), bucket.padded_lse(lse_TN), 0.0, True)
            for into, share in zip(sums, shares, strict=True):
                bucket.store(into, share)
        return sums


class _Bucket:
    """Causal runs of similar length, padded on the right to the longest; causality excludes the padding."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.longest = max(stop - start for start, stop in runs)
        self.count = len(runs)
        self.start = runs[0][0]
        self.rows_T = torch.cat([torch.arange(start, stop) for start, stop in runs])
        self.places_T = torch.cat(
            [torch.arange(n * self.longest, n * self.longest + stop - start) for n, (start, stop) in enumerate(runs)]
        )
        self.from_BQ = torch.cat([torch.arange(self.longest).clamp_(max=b - a - 1) + a for a, b in runs])

    def padded(self, x_TND: Tensor) -> Tensor:
        """Pad [T, N, D] to [B, N, Q, D] with a run's last row."""
        if self.count == 1:
            return _one(x_TND[self.start : self.start + self.longest])
        return x_TND.index_select(0, self.from_BQ).view(self.count, self.longest, *x_TND.shape[1:]).transpose(1, 2)

    def padded_lse(self, lse_TN: Tensor) -> Tensor:
        """Pad [T, N] to [B, N, Q] with infinity, so that padding rows have no probabilities and no gradient."""
        if self.count == 1:
            return self.padded(lse_TN)
        padded = lse_TN.new_full((self.count * self.longest, lse_TN.shape[1]), torch.inf)
        padded.index_copy_(0, self.places_T, lse_TN.index_select(0, self.rows_T))
        return padded.view(self.count, self.longest, -1).transpose(1, 2)

    def store(self, into_T: Tensor, x: Tensor) -> None:
        """Write the rows of `x`, in the layout of `padded`, back to their places in `into_T`."""
        x_BQ = x.transpose(1, 2)
        if self.count == 1:
            into_T[self.start : self.start + self.longest] = x_BQ[0]
        else:
            rows = x_BQ.reshape(self.count * self.longest, *into_T.shape[1:]).index_select(0, self.places_T)
            into_T.index_copy_(0, self.rows_T, rows)


def _buckets(part: SegmentPairs) -> list[_Bucket]:
    runs = sorted(pairwise(accumulate(part.lengths_q, initial=0)), key=lambda run: (run[0] - run[1], run))
    found: list[list[Run]] = []
    for start, stop in runs:
        if found and stop - start >= PADDED_AT_MOST * (found[-1][0][1] - found[-1][0][0]):
            found[-1].append((start, stop))
        else:
            found.append([(start, stop)])
    return [_Bucket(bucket) for bucket in found]


def _one(x_TND: Tensor) -> Tensor:
    """View [T, N, ..] as a batch of one, [1, N, T, ..]."""
    return x_TND.transpose(0, 1)[None]


def _packed(x: Tensor) -> Tensor:
    """Undo `_one`."""
    return x[0].transpose(0, 1)


@lru_cache
def cpu_attention() -> AttentionWithLSE:
    """Return torch's flash attention if it agrees with `MatmulAttention` on a small part, else the latter."""
    flash, plain = FlashCpuAttention(), MatmulAttention()
    with torch.inference_mode(False), torch.no_grad():
        noise = torch.Generator().manual_seed(0)
        q_TND, k_TKD, v_TKD = (torch.randn(5, heads, 8, generator=noise) for heads in (4, 2, 2))
        lse_TN = torch.full((5, 4), 3.0)
        for causal in (True, False):
            part = SegmentPairs([(0, 5)], [(0, 5)], causal, torch.device("cpu"))
            given = (q_TND, k_TKD, v_TKD)
            try:
                tried = *flash.forward(*given, part), *flash.backward(q_TND, *given, q_TND, lse_TN, part)
            except (AttributeError, RuntimeError, TypeError, ValueError):
                return plain
            known = *plain.forward(*given, part), *plain.backward(q_TND, *given, q_TND, lse_TN, part)
            if not all(torch.allclose(x, y, atol=1e-4) for x, y in zip(tried, known, strict=True)):
                return plain
    return flash


def _place(runs: Sequence[Run], device: torch.device) -> slice | Tensor:
    if all(a[1] == b[0] for a, b in pairwise(runs)):
        return slice(runs[0][0], runs[-1][1])
    return torch.cat([torch.arange(start, stop) for start, stop in runs]).to(device)


def _cumulated(lengths: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
