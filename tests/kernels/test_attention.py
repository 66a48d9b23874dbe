"""Tests of attention over packed whole sequences: values and gradients against loops in float64."""

import pytest
import torch
from attention_cases import brute, budget, make_qkv

from thresher.kernels.attention.varlen import Varlen, varlen_attention

# Query heads, key/value heads, head dimension: no sharing, one shared head, and the ratios of the Qwen2.5 models.
HEADS = [(1, 1, 8), (4, 4, 10), (4, 2, 24), (3, 1, 64), (14, 2, 64), (7, 1, 24)]
LENGTHS = [[1], [1, 1, 1], [63, 1, 100, 17], [5, 64, 65]]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.fast_cases(12)
def test_varlen_against_float64(heads: tuple[int, int, int], lengths: list[int]) -> None:
    qkv = make_qkv(*heads, sum(lengths))
    layout = Varlen(lengths)
    truth = brute(*(x.double() for x in qkv), lengths)
    torch.testing.assert_close(varlen_attention(*(x.double() for x in qkv), layout), truth, rtol=0, atol=1e-12)
    for dtype in (torch.float32, torch.bfloat16):
        low = tuple(x.to(dtype) for x in qkv)
        truth = brute(*(x.double() for x in low), lengths)
        assert (varlen_attention(*low, layout) - truth).norm() <= budget(low, lengths, dtype)


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_varlen_gradients(heads: tuple[int, int, int]) -> None:
    lengths = [7, 1, 20]
    qkv = make_qkv(*heads, sum(lengths))
    weights = torch.randn(qkv[0].shape, generator=torch.Generator().manual_seed(9)).double()
    grads = []
    for attend, dtype in ((brute, torch.float64), (varlen_attention, torch.float64), (varlen_attention, torch.float32)):
        leaves = [x.to(dtype).requires_grad_() for x in qkv]
        out = attend(*leaves, lengths if attend is brute else Varlen(lengths))  # type: ignore[arg-type]
        grads.append(torch.autograd.grad((out * weights.to(dtype)).sum(), leaves))
    for truth, double, single in zip(*grads, strict=True):
        torch.testing.assert_close(double, truth, rtol=0, atol=1e-10)
        # Each value is a sum of up to 20 x 64 terms: in the worst order off by the root of that many roundings, 36.
        assert (single.double() - truth).norm() <= 64 * 2**-24 * truth.norm()


def test_gradcheck_of_a_ragged_pack() -> None:
    leaves = [x.double().requires_grad_() for x in make_qkv(2, 1, 4, 6)]
    assert torch.autograd.gradcheck(lambda q, k, v: varlen_attention(q, k, v, Varlen([3, 1, 2])), leaves)


def test_layout_gives_places_and_positions() -> None:
    layout = Varlen([3, 1, 2])
    assert layout.positions_T.tolist() == [0, 1, 2, 0, 0, 1]
    assert layout.index_T.tolist() == [0, 1, 2, 3, 6, 7]


def test_a_pack_is_each_sequence_alone() -> None:
    """Other sequences' contents change nothing but rounding; a poisoned sequence affects only itself."""
    lengths = [9, 30, 1, 17]
    qkv = make_qkv(4, 2, 16, sum(lengths))
    packed = varlen_attention(*qkv, Varlen(lengths)).split(lengths)
    pieces = [x.split(lengths) for x in qkv]
    for number, length in enumerate(lengths):
        alone = varlen_attention(*(piece[number] for piece in pieces), Varlen([length]))
        own = [piece[number] for piece in pieces]
        assert (packed[number] - alone).norm() <= 2**0.5 * budget((own[0], own[1], own[2]), [length])
    for x in qkv:
        x.split(lengths)[1].fill_(float("nan"))
    poisoned = varlen_attention(*qkv, Varlen(lengths)).split(lengths)
    assert torch.isnan(poisoned[1]).all()
    assert all(torch.equal(poisoned[number], packed[number]) for number in (0, 2, 3))


def test_a_row_sees_nothing_after_it() -> None:
    q, k, v = make_qkv(4, 2, 16, 20)
    before = varlen_attention(q, k, v, Varlen([20]))[:12]
    k[12:], v[12:] = 1e4, -1e4
    assert torch.equal(varlen_attention(q, k, v, Varlen([20]))[:12], before)
