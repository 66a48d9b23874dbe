"""Tests of attention over a forest in Triton: output, log-sum-exp and gradients against float64 products under the mask
that `end_T` defines; and its lists of tiles against that mask.

Limits are the errors of float32 sums, plus roundings to bfloat16 where they occur: of p and ds, and of results.
"""

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

from thresher.kernels.attention import forest_triton
from thresher.kernels.attention.decode_triton import LOG2_E, KeyTiling
from thresher.kernels.attention.forest_triton import Tilings, TritonForest, forest_forward, make_lists
from thresher.kernels.attention.parts import MatmulAttention
from thresher.kernels.attention.prefix import PrefixForest, prefix_attention

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # NumPy, on masked lanes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Forest = tuple[list[int], list[int]]
HAND: Forest = ([4, 2, 3, 1, 5], [-1, 0, 1, 0, -1])  # abcd, then ef with ghi below it, or j; and klmno
FORESTS: dict[str, Forest] = {
    "hand": HAND,
    "single": ([70], [-1]),
    "one token": ([1], [-1]),
    "lengths of 1": ([1, 1, 1, 1], [-1, 0, 0, 2]),
    "deep": ([19, 2, 33, 1, 40], [-1, 0, 1, 2, 3]),
    "wide": ([45, 20, 3, 17, 30], [-1, 0, 0, 0, 0]),
    "multiples of tiles": ([64, 32, 32], [-1, 0, 0]),
    "apart": ([31, 1, 33], [-1, -1, -1]),
}
# Tilings for small forests, with different numbers of rows and keys.
SMALL = Tilings(KeyTiling(32, 16, 4, 2), KeyTiling(16, 32, 4, 2), KeyTiling(32, 16, 4, 2))


@st.composite
def forests(draw: st.DrawFn) -> Forest:
    """Draw any parents in preorder: a segment's parent is on the path to the previous segment."""
    lengths: list[int] = []
    parents: list[int] = []
    path: list[int] = []
    for s in range(draw(st.integers(1, 9))):
        del path[draw(st.integers(0, len(path))) :]
        parents.append(path[-1] if path else -1)
        lengths.append(draw(st.integers(1, 40)))
        path.append(s)
    return lengths, parents


def given_tensors(count: int, heads: tuple[int, int, int], dtype: torch.dtype) -> list[Tensor]:
    """Return q, k and v as views of one projection, and the output's gradient."""
    noise = torch.Generator().manual_seed(count)
    n, kv, dim = heads
    qkv = torch.randn(count, n + 2 * kv, dim, generator=noise).mul(1.5).to(DEVICE, dtype)
    grad = torch.randn(count, n, dim, generator=noise).to(DEVICE, dtype)
    return [*qkv.split([n, kv, kv], 1), grad]


def products(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, end_T: Tensor) -> tuple[list[Tensor], list[float]]:
    """Return (o, e, dq, dk, dv) in float64, head by head, and the error of o, dq, dk and dv, norms in roundings, from
    rounding o before do . o: do . v - do . o may be small while both terms are not."""
    dim, group = q.shape[2], q.shape[1] // k.shape[1]
    place = torch.arange(len(q), device=q.device)
    seen = (place <= place[:, None]) & (place[:, None] < end_T)
    q, k, v, grad = (x.double() for x in (q, k, v, grad))
    out, lse, dq = torch.empty_like(q), torch.empty_like(q[..., 0]), torch.empty_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    off_q = off_k = 0.0
    for head in range(q.shape[1]):
        keys, values = k[:, head // group], v[:, head // group]
        scores = (q[:, head] @ keys.T * dim**-0.5).masked_fill_(~seen, -torch.inf)
        lse[:, head] = scores.logsumexp(1) * LOG2_E
        probs = scores.softmax(1)
        out[:, head] = probs @ values
        dv[:, head // group] += probs.T @ grad[:, head]
        ds = probs * (grad[:, head] @ values.T - (grad[:, head] * out[:, head]).sum(1, keepdim=True)) * dim**-0.5
        dq[:, head] = ds @ keys
        dk[:, head // group] += ds.T @ q[:, head]
        delta = (grad[:, head] * out[:, head]).square().sum(1, keepdim=True) * dim**-1.0
        off_q += float((delta * (probs @ keys).square()).sum())
        off_k += float((probs.square().T @ (delta * q[:, head].square())).sum())
    return [out, lse, dq, dk, dv], [0.0, off_q**0.5, off_k**0.5, 0.0]


def found_by(inputs: Sequence[Tensor], layout: PrefixForest) -> list[Tensor]:
    *leaves, grad = inputs
    leaves = [x.detach().requires_grad_() for x in leaves]
    out = prefix_attention(leaves[0], leaves[1], leaves[2], layout)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def check(forest: Forest, heads: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> None:
    """Compare output, log-sum-exp and gradients with float64."""
    layout = PrefixForest(*forest, DEVICE, TritonForest())
    inputs = given_tensors(len(layout.positions_T), heads, dtype)
    (out, lse, *gradients), more = products(*inputs, layout.end_T)
    holds(found_by(inputs, layout), [out, *gradients], more, heads[2])
    ((tilings, lists),) = layout.lists.items()
    assert tilings == lists.tilings
    _, lse_NT = forest_forward(*inputs[:3], lists)
    assert lse_NT.dtype == torch.float32
    # A score has D terms of order 1.5^2, some standard deviations out; e is of that order, and a sum of T terms.
    torch.testing.assert_close(lse_NT.T.double(), lse, rtol=2**-20, atol=2**-24 * heads[2] * 1.5**2 * 4)


def holds(found: Sequence[Tensor], right: Sequence[Tensor], more: Sequence[float], dim: int) -> None:
    """Compare errors with limits. float32: scores, of size 10 here, are off by about 2^-24 D^1/2, so are exponentials,
    relatively; a gradient subtracts two. bfloat16: o, p, ds and results are rounded once; the interpreter truncates."""
    unit = 2.0**-8 if found[0].dtype == torch.bfloat16 else 2.0**-24 * dim**0.5
    for got, expected, extra in zip(found, right, more, strict=True):
        assert got.dtype == found[0].dtype
        floor = 64 * 2.0**-24 * (dim * expected.numel()) ** 0.5  # where do . v - do . o is nothing, as with one key
        assert float((got.double() - expected).norm()) <= 3 * unit * (float(expected.norm()) + extra) + floor


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forest_triton, "forest_tilings", lambda *_: SMALL)


@pytest.mark.parametrize("forest", FORESTS.values(), ids=FORESTS.keys())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.fast_cases(2, gpu=6)
def test_any_forest_is_right(forest: Forest, dtype: torch.dtype, small_tiles: None, poisoned: None) -> None:
    check(forest, (4, 2, 16), dtype)


@pytest.mark.parametrize("heads", [(1, 1, 16), (6, 2, 24), (7, 1, 64), (3, 3, 96), (2, 1, 128), (2, 1, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.fast_cases(4)
def test_any_heads_are_right(heads: tuple[int, int, int], dtype: torch.dtype, poisoned: None) -> None:
    """Each shape runs with its own tilings."""
    check(FORESTS["wide"], heads, dtype)


@pytest.mark.slow
@given(forest=forests())
@settings(max_examples=25, derandomize=True, deadline=None)
def test_random_forests_are_right(forest: Forest) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forest_triton, "forest_tilings", lambda *_: SMALL)
        check(forest, (2, 1, 16))


@pytest.mark.fast_cases(0, gpu=1)
@given(forest=forests(), rows=st.sampled_from([1, 4, 16, 64]), keys=st.sampled_from([1, 4, 16, 64]))
@settings(max_examples=200, derandomize=True, deadline=None)
def test_lists_are_the_mask(forest: Forest, rows: int, keys: int) -> None:
    """Each pair of tiles with visible keys is listed once, and marked as whole if all are visible."""
    layout = PrefixForest(*forest)
    end_T, T = layout.end_T.numpy().astype(np.int32), len(layout.end_T)
    place = np.arange(T)
    seen = (place <= place[:, None]) & (place[:, None] < end_T)
    tiling = KeyTiling(rows, keys, 4, 1)
    spans, tiles = forest_triton.key_lists(end_T, tiling)
    listed = {
        (int(row), int(tiles[at])): at < whole for row, low, whole, high in spans for at in range(int(low), int(high))
    }
    assert sorted(spans[:, 0]) == list(range(-(-T // rows))) and len(listed) == len(tiles)
    by_keys: dict[tuple[int, int], bool] = {}
    for tile, low, whole, after, high in forest_triton.row_spans(end_T, tiling):
        assert low <= whole <= after <= high
        by_keys |= {(row, int(tile)): bool(whole <= row < after) for row in range(int(low), int(high))}
    for row, tile in product(range(-(-T // rows)), range(-(-T // keys))):
        block = seen[row * rows : (row + 1) * rows, tile * keys : (tile + 1) * keys]
        assert ((row, tile) in listed) == ((row, tile) in by_keys) == bool(block.any())
        if block.any():
            assert listed[row, tile] == bool(block.all() and block.shape[1] == keys)
            assert by_keys[row, tile] == bool(block.all() and block.shape == (rows, keys))


def test_lists_are_made_once_for_all_layers(small_tiles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(forest_triton, "make_lists", lambda *given: made.append(given) or make_lists(*given))
    layout = PrefixForest(*HAND, DEVICE, TritonForest())
    assert layout.parts == []
    inputs = given_tensors(15, (2, 1, 16), torch.float32)
    with torch.inference_mode():
        prefix_attention(inputs[0], inputs[1], inputs[2], layout)
    first, second = found_by(inputs, layout), found_by(inputs, layout)
    assert len(made) == 1 and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.fast_cases(0, gpu=1)
def test_it_agrees_with_the_parts(small_tiles: None) -> None:
    inputs = given_tensors(sum(FORESTS["deep"][0]), (4, 2, 16), torch.float32)
    found, parts = (
        found_by(inputs, PrefixForest(*FORESTS["deep"], DEVICE, by)) for by in (TritonForest(), MatmulAttention())
    )
    holds(found, [x.double() for x in parts], [0.0] * 4, 16)


def test_any_strides_are_read(small_tiles: None) -> None:
    """A last axis that is not dense is copied, as is an expanded scalar gradient."""
    layout = PrefixForest(*HAND, DEVICE, TritonForest())
    inputs = given_tensors(15, (4, 2, 16), torch.float32)
    turned = [x.transpose(0, 2).contiguous().transpose(0, 2) for x in inputs]
    turned[3] = torch.ones((), device=DEVICE).expand(15, 4, 16)
    inputs[3] = torch.ones_like(inputs[3])
    for a, b in zip(found_by(turned, layout), found_by(inputs, layout), strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif(DEVICE == "cpu", reason="as large as a GPU's")
@pytest.mark.parametrize("heads", [(14, 2, 64), (12, 2, 128)], ids=str)
def test_sixteen_thousand_tokens(heads: tuple[int, int, int]) -> None:
    """Trees do not see each other: the first and the last are compared with float64 separately. Bits repeat."""
    shapes = [1000, 300, 307, 314, 129, 64, 321, 328, 335, 342, 349]
    lengths, parents = [], []
    for tree in range(4):
        parents += [-1] + [11 * tree + (3 if n in (4, 5) else 0) for n in range(1, 11)]
        lengths += [shapes[0] + tree, *shapes[1:]]
    layout = PrefixForest(lengths, parents, DEVICE, TritonForest())
    inputs = given_tensors(sum(lengths), heads, torch.bfloat16)
    found = found_by(inputs, layout)
    for a, b in zip(found_by(inputs, layout), found, strict=True):
        assert torch.equal(a, b)
    for first, stop in ((0, sum(lengths[:11])), (sum(lengths[:33]), sum(lengths))):
        rows, end_T = slice(first, stop), layout.end_T[first:stop] - first
        (out, _, *gradients), more = products(*(x[rows] for x in inputs), end_T)
        holds([x[rows] for x in found], [out, *gradients], more, heads[2])


def small_launches() -> dict[str, Callable[[], None]]:
    def small(forest: Forest, heads: tuple[int, int, int]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forest_triton, "forest_tilings", lambda *_: SMALL)
            check(forest, heads)

    return {
        "a chain": lambda: small(([19, 2, 13], [-1, 0, 1]), (2, 2, 24)),
        "a ragged tree": lambda: small(([33, 9, 6], [-1, 0, 0]), (4, 2, 16)),
    }
