"""Tests of attention over a forest of segments, for each implementation of its parts: values and gradients against a
softmax over all pairs under the mask that `end_T` defines, and against `varlen_attention` of every path."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thresher.kernels.attention import parts
from thresher.kernels.attention.parts import (
    AttentionWithLSE,
    FlashCpuAttention,
    MatmulAttention,
    SegmentPairs,
    cpu_attention,
)
from thresher.kernels.attention.prefix import PrefixForest, prefix_attention
from thresher.kernels.attention.varlen import Varlen, varlen_attention

Forest = tuple[list[int], list[int]]
HAND: Forest = ([4, 2, 3, 1, 5], [-1, 0, 1, 0, -1])  # abcd, then ef with ghi below it, or j; and klmno
CHAIN: Forest = ([3, 2, 1, 70], [-1, 0, 1, 2])


class ByLevel(MatmulAttention):
    """Attention called as on CUDA: all segments of a depth at once."""

    by_level = True


IMPLEMENTATIONS = [FlashCpuAttention(), MatmulAttention(), ByLevel()]


@st.composite
def forests(draw: st.DrawFn) -> Forest:
    """Draw any parents in preorder: a segment's parent is on the path to the previous segment."""
    lengths: list[int] = []
    parents: list[int] = []
    path: list[int] = []
    for s in range(draw(st.integers(1, 9))):
        del path[draw(st.integers(0, len(path))) :]
        parents.append(path[-1] if path else -1)
        lengths.append(draw(st.integers(1, 12)))
        path.append(s)
    return lengths, parents


def given_tensors(count: int, dtype: torch.dtype, heads: tuple[int, int, int] = (4, 2, 8)) -> list[Tensor]:
    """Return q, k and v as views of one projection, and the output's gradient."""
    noise = torch.Generator().manual_seed(count)
    n, kv, dim = heads
    qkv = torch.randn(count, n + 2 * kv, dim, generator=noise, dtype=torch.float64).mul(1.5).to(dtype)
    grad = torch.randn(count, n, dim, generator=noise, dtype=torch.float64).to(dtype)
    return [*qkv.split([n, kv, kv], 1), grad]


def masked(q: Tensor, k: Tensor, v: Tensor, layout: PrefixForest) -> Tensor:
    """Return attention with a softmax over all keys j with j <= i < end[j], differentiated by autograd."""
    group = q.shape[1] // k.shape[1]
    place = torch.arange(len(q))
    seen = (place <= place[:, None]) & (place[:, None] < layout.end_T)
    scores = torch.einsum("ind,jnd->nij", q, k.repeat_interleave(group, 1)) * q.shape[2] ** -0.5
    probs = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    return torch.einsum("nij,jnd->ind", probs, v.repeat_interleave(group, 1))


def results(attend: object, dtype: torch.dtype, layout: PrefixForest, heads: tuple[int, int, int]) -> list[Tensor]:
    *leaves, grad = given_tensors(len(layout.positions_T), dtype, heads)
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = attend(*leaves, layout)  # type: ignore[operator]
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("attention", IMPLEMENTATIONS, ids=lambda one: type(one).__name__)
@given(forest=forests(), heads=st.sampled_from([(4, 2, 8), (1, 1, 4), (6, 2, 16)]))
@settings(max_examples=60, derandomize=True, deadline=None)
@pytest.mark.fast_cases(1)
def test_a_forest_is_a_mask(attention: AttentionWithLSE, forest: Forest, heads: tuple[int, int, int]) -> None:
    layout = PrefixForest(*forest, attention=attention)
    truth = results(masked, torch.float64, layout, heads)
    for got, expected in zip(results(prefix_attention, torch.float64, layout, heads), truth, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)  # at most 108 terms of order 1
    own, found = (results(attend, torch.float32, layout, heads) for attend in (masked, prefix_attention))
    for got, plain, expected in zip(found, own, truth, strict=True):
        # Four times the mask's own error. With one key that error may be 0, where the shared path subtracts two
        # products of 16 terms, up to 4 x 4 each: root mean square, 64 roundings of the largest value.
        floor = 64 * 2**-24 * max(float(expected.abs().max()), 1.0) * expected.numel() ** 0.5
        assert float((got - expected).norm()) <= 4 * float((plain - expected).norm()) + floor


@pytest.mark.parametrize("forest", [HAND, CHAIN, ([7], [-1]), ([1, 1, 1], [-1, 0, 0])], ids=str)
@pytest.mark.parametrize("attention", IMPLEMENTATIONS, ids=lambda one: type(one).__name__)
def test_a_path_is_a_sequence(attention: AttentionWithLSE, forest: Forest) -> None:
    layout = PrefixForest(*forest, attention=attention)
    starts = list(accumulate(layout.lengths, initial=0))
    q, k, v, _ = given_tensors(starts[-1], torch.float64)
    out = prefix_attention(q, k, v, layout)
    for leaf in set(range(len(layout.lengths))) - set(layout.parents):
        path = [leaf]
        while layout.parents[path[0]] >= 0:
            path.insert(0, layout.parents[path[0]])
        rows = torch.cat([torch.arange(starts[s], starts[s + 1]) for s in path])
        alone = varlen_attention(q[rows], k[rows], v[rows], Varlen([len(rows)]))
        torch.testing.assert_close(out[rows], alone, rtol=0, atol=1e-13)
        assert layout.positions_T[rows].tolist() == list(range(len(rows)))


def test_a_layout_by_hand() -> None:
    layout = PrefixForest(*HAND)
    assert layout.positions_T.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 4, 0, 1, 2, 3, 4]
    assert layout.end_T.tolist() == [10] * 4 + [9] * 5 + [10] + [15] * 5
    assert [(part.rows, part.keys, part.causal) for part in layout.parts] == [
        (slice(0, 15), slice(0, 15), True),
        (slice(4, 10), slice(0, 4), False),
        (slice(6, 9), slice(4, 6), False),
    ]
    two = PrefixForest([2, 1, 1, 3, 1], [-1, 0, 0, -1, 3], attention=ByLevel())
    own, above = two.parts
    assert isinstance(above.rows, Tensor) and isinstance(above.keys, Tensor)
    assert above.rows.tolist() == [2, 3, 7] and above.keys.tolist() == [0, 1, 4, 5, 6]
    assert above.cu_q.tolist() == [0, 2, 3] and above.cu_k.tolist() == [0, 2, 5] and above.cu_q.dtype == torch.int32
    assert own.cu_q.tolist() == own.cu_k.tolist() == [0, 2, 3, 4, 7, 8]


@pytest.mark.parametrize(
    "forest", [([2, 0], [-1, 0]), ([1, 1], [1, -1]), ([1], [-2]), ([1, 1, 1], [-1, -1, 0])], ids=str
)
def test_what_is_no_forest_is_refused(forest: Forest) -> None:
    with pytest.raises(ValueError, match="expected one of at least 1, in preorder"):
        PrefixForest(*forest)


def test_large_scores_and_faint_parts() -> None:
    """A part whose scores are e^400 times smaller must neither produce NaN nor contribute."""
    layout = PrefixForest([3, 2, 2], [-1, 0, 0])
    q, k, v, grad = given_tensors(7, torch.float32)
    k = k.clone()
    k[:3] *= 300
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    found = prefix_attention(*leaves, layout)
    expected = masked(*(x.double() for x in (q, k, v)), layout)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-3)  # scores of about 1,000: 2^-14 each
    assert all(x.isfinite().all() for x in torch.autograd.grad(found, leaves, grad))


def test_products_hold_few_scores_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = PrefixForest(*HAND, attention=MatmulAttention())
    whole = results(prefix_attention, torch.float64, layout, (4, 2, 8))
    monkeypatch.setattr(parts, "SCORES", 40)
    blocks = results(prefix_attention, torch.float64, layout, (4, 2, 8))
    for a, b in zip(whole, blocks, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-13)


@pytest.mark.parametrize("attention", IMPLEMENTATIONS, ids=lambda one: type(one).__name__)
def test_in_bfloat16_parts_and_their_merge_cost_a_few_roundings(attention: AttentionWithLSE) -> None:
    """The error is at most five times that of rounding q, k and v. Scores are about 16, so that a log-sum-exp in
    bfloat16 would exceed seven times that."""
    layout = PrefixForest([60, 30, 30, 20], [-1, 0, 0, 2], attention=attention)
    *exact, grad = given_tensors(140, torch.float64, (4, 2, 16))
    for x in exact[:2]:
        x[..., 0] = 8.0
    low = [x.bfloat16() for x in exact]
    found = []
    for attend, inputs in ((prefix_attention, low), (masked, [x.double() for x in low]), (masked, exact)):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = attend(*leaves, layout)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, grad.bfloat16().to(out.dtype))])
    for got, expected, unrounded in zip(*found, strict=True):
        assert got.dtype == torch.bfloat16
        assert (got.double() - expected).norm() <= 5 * (unrounded - expected).norm()


def test_torchs_private_operators_are_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(cpu_attention(), FlashCpuAttention)  # in the torch version that the tests run on

    def other_signature(self: object, q: Tensor, k: Tensor, v: Tensor, part: SegmentPairs) -> None:
        raise TypeError("takes 3 positional arguments but 5 were given")

    for broken in (other_signature, lambda self, q, k, v, part: (q + 1, q.sum(-1))):
        cpu_attention.cache_clear()
        with monkeypatch.context() as patch:
            patch.setattr(FlashCpuAttention, "forward", broken)
            assert isinstance(cpu_attention(), MatmulAttention)
    cpu_attention.cache_clear()


def test_a_layout_first_used_in_inference_may_be_trained_with() -> None:
    layout = PrefixForest([3, 2, 2], [-1, 0, 0])
    q, k, v, grad = given_tensors(7, torch.float32)
    with torch.inference_mode():
        prefix_attention(q, k, v, layout)
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    assert all(x.isfinite().all() for x in torch.autograd.grad(prefix_attention(*leaves, layout), leaves, grad))
