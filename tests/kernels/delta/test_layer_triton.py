"""Tests of the kernels around the gated delta rule in a layer: results and gradients against layer.py in float64, over
forests; written memory, and the tensors that autograd keeps.

On a CUDA device the compiled kernels run, otherwise Triton's interpreter.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from interpreter import DEVICE, GuardedMemory, drawn, saved_tensors
from torch import Tensor

pytest.importorskip("triton")

from thresher.kernels.delta.layer import UNIT_EPS, DeltaInputs, Spans, convolved_heads, gated_norm
from thresher.kernels.delta.layer_triton import ROWS, fused_gated_norm, fused_heads

pytestmark = pytest.mark.usefixtures("rounds_to_nearest")

K, W = 2, 4
Forest = tuple[list[int], list[int]]
# A root of one token; its child over two blocks; another child of one token, with two children; a second root.
FOREST: Forest = [1, ROWS + 8, 1, 2, 5, 3], [-1, 0, 0, 2, 2, -1]
# One prefix, whose last rows are seen by more rows than a program processes at a time.
MANY: Forest = [5, *[3] * 24], [-1, *[0] * 24]
Results = list[Tensor]


def fused(
    mixed_TC: Tensor, conv_CW: Tensor, forest: Forest, heads: int, key_dim: int = 8
) -> tuple[Tensor, Tensor, Tensor]:
    spans = Spans(*forest, mixed_TC.device)
    return fused_heads(mixed_TC, conv_CW, spans.before_T, lambda: spans.readers(W), (K, heads), key_dim, UNIT_EPS)


def results(function: Callable[..., Sequence[Tensor]], given: Sequence[Tensor]) -> Results:
    """Return results and gradients."""
    leaves = [x.detach().requires_grad_() for x in given]
    found = function(*leaves)
    grads = [drawn(*x.shape, seed=9 + n, dtype=torch.bfloat16).to(x) for n, x in enumerate(found)]
    return [x.detach() for x in found] + list(torch.autograd.grad(found, leaves, grads))


def assert_near(found: Results, exact: Results) -> None:
    """Compare whole tensors: each element may be off by a rounding to its dtype and by float32's of its terms."""
    for ours, true in zip(found, exact, strict=True):
        limit = torch.finfo(ours.dtype).eps / 2 + 32 * 2.0**-24
        assert float((ours.double().cpu() - true).norm()) <= limit * float(true.norm())


def check_heads(forest: Forest, heads: int, value_dim: int, dtype: torch.dtype, key_dim: int = 8) -> None:
    rows, channels = sum(forest[0]), 2 * K * key_dim + heads * value_dim
    wider, conv = drawn(rows, channels + 3, seed=1, dtype=dtype), drawn(channels, W, seed=2, dtype=dtype)
    given = wider[:, :channels], conv

    def exactly(mixed: Tensor, conv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gates = torch.zeros(rows, heads)
        return convolved_heads(DeltaInputs(mixed, conv, gates, gates, K, key_dim), Spans(*forest, torch.device("cpu")))

    exact = results(exactly, [x.double().cpu() for x in given])
    assert_near(results(lambda mixed, conv: fused(mixed, conv, forest, heads, key_dim), given), exact)


def check_norm(rows: int, heads: int, width: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    o, wider = drawn(rows, heads, width, seed=1, dtype=dtype), drawn(rows, heads * width + 5, seed=2, dtype=dtype)
    weight, z = drawn(width, seed=3, dtype=weight_dtype), wider[:, 5:].unflatten(1, (heads, width))
    exact = results(lambda *x: [gated_norm(*x, 1e-6)], [x.double().cpu() for x in (o, z, weight)])
    assert_near(results(lambda *x: [fused_gated_norm(*x, 1e-6)], (o, z, weight)), exact)


def small_launches() -> dict[str, Callable[[], None]]:
    def both() -> None:
        check_heads(FOREST, 2, 8, torch.bfloat16)
        check_norm(7, 5, 6, torch.bfloat16, torch.float32)

    return {
        "wider than a program": lambda: check_heads(([2, 1], [-1, 0]), 3, 24, torch.float32, key_dim=40),
        "many that see a row": lambda: check_heads(MANY, 1, 6, torch.float32),
        "a forest and the norm": both,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "forest",
    [([2 * ROWS + 1], [-1]), ([3, 40], [-1, -1]), FOREST, MANY, ([1, 1, 1, 1, 1, 1], [-1, 0, 1, 2, 2, 0])],
)
def test_convolution_and_lengths(forest: Forest, dtype: torch.dtype) -> None:
    check_heads(forest, 4, 6, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "heads", "width"), [(1, 1, 4), (3, 2, 5), (ROWS, 3, 16)])
def test_the_gated_norm(rows: int, heads: int, width: int, dtype: torch.dtype) -> None:
    check_norm(rows, heads, width, dtype, torch.float32)
    check_norm(rows, heads, width, dtype, dtype)


def test_more_channels_than_a_program_has() -> None:
    check_heads(([3, 2, 4], [-1, 0, 0]), 3, 24, torch.float32, key_dim=40)


@pytest.mark.skipif(DEVICE == "cpu", reason="a model's widths, which the interpreter takes minutes for")
@pytest.mark.parametrize("heads", [16, 48])
def test_a_model_s_heads(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "K", 16)
    check_heads(([100, 60, 1, 50], [-1, 0, 0, 2]), heads, 128, torch.bfloat16, key_dim=128)
    check_norm(200, heads, 128, torch.bfloat16, torch.bfloat16)


def test_nothing_at_all() -> None:
    check_heads(([], []), 2, 8, torch.float32)
    check_norm(0, 2, 8, torch.float32, torch.float32)


def test_weights_that_are_frozen_get_no_gradient() -> None:
    """The other results are unchanged: bit for bit in the interpreter, up to rounding by another binary on a GPU."""
    mixed, conv = drawn(3, 38, seed=1, dtype=torch.float32), drawn(38, W, seed=2, dtype=torch.float32)
    weight = drawn(6, seed=3, dtype=torch.float32)

    def gradient(trained: bool) -> Tensor:
        leaf, filter_CW, w = (x.clone().requires_grad_(n == 0 or trained) for n, x in enumerate((mixed, conv, weight)))
        q, k, v = fused(leaf, filter_CW, ([3], [-1]), 1)
        (q.sum() + k.sum() + fused_gated_norm(v, 2 * v, w, 1e-6).sum()).backward()
        assert leaf.grad is not None and (filter_CW.grad is not None) == (w.grad is not None) == trained
        return leaf.grad

    beside, alone = gradient(True), gradient(False)
    assert (
        torch.equal(beside, alone) if DEVICE == "cpu" else float((beside - alone).norm()) <= 1e-6 * float(alone.norm())
    )


def test_all_that_is_made_is_written_and_nothing_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = GuardedMemory(monkeypatch)
    check_heads(FOREST, 2, 8, torch.float32)
    check_norm(3, 2, 5, torch.float32, torch.float32)
    memory.check()
    assert len(memory.taken) == 8  # q, k and v in one, dy, its parts, dx; y, its parts, do, dz


def test_the_inputs_alone_are_kept() -> None:
    """Only the transposed filter is kept in addition; neither q, k and v nor their intermediates."""
    mixed, conv = (drawn(*shape, seed=1, dtype=torch.float32).requires_grad_() for shape in ((3, 38), (38, W)))
    with saved_tensors() as saved:
        _, _, v = fused(mixed, conv, ([3], [-1]), 1)
    assert saved[0] == mixed.data_ptr() and len(saved) == 3
    o, weight = v.detach().contiguous().requires_grad_(), drawn(6, seed=3, dtype=torch.float32).requires_grad_()
    with saved_tensors() as saved:
        fused_gated_norm(o, o, weight, 1e-6)
    assert saved == [o.data_ptr(), o.data_ptr(), weight.data_ptr()]
