"""What surrounds the gated delta rule in a layer: results and gradients against layer.py in float64, over forests; what
is written, and what autograd keeps.

On a CUDA device the compiled kernels run, elsewhere Triton's interpreter.
"""

from collections.abc import Callable, Sequence

import pytest
import torch
from interpreter import GuardedMemory, drawn, saved_tensors
from torch import Tensor

pytest.importorskip("triton")

from thresher.kernels.delta.layer import UNIT_EPS, DeltaInputs, Spans, convolved_heads, gated_norm
from thresher.kernels.delta.layer_triton import ROWS, fused_gated_norm, fused_heads

pytestmark = pytest.mark.usefixtures("rounds_to_nearest")

K, D, W = 2, 8, 4
Forest = tuple[list[int], list[int]]
# A root of one token; a child right behind it, over two blocks; another of one token, with two of its own; a root.
FOREST: Forest = [1, ROWS + 8, 1, 2, 5, 3], [-1, 0, 0, 2, 2, -1]
Results = list[Tensor]


def fused(mixed_TC: Tensor, conv_CW: Tensor, forest: Forest, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    spans = Spans(*forest, mixed_TC.device)
    return fused_heads(mixed_TC, conv_CW, spans.before_T, lambda: spans.readers(W), (K, heads), D, UNIT_EPS)


def results(function: Callable[..., Sequence[Tensor]], given: Sequence[Tensor]) -> Results:
    """Results and gradients."""
    leaves = [x.detach().requires_grad_() for x in given]
    found = function(*leaves)
    grads = [drawn(*x.shape, seed=9 + n, dtype=torch.bfloat16).to(x) for n, x in enumerate(found)]
    return [x.detach() for x in found] + list(torch.autograd.grad(found, leaves, grads))


def assert_near(found: Results, exact: Results) -> None:
    """By whole tensors: a rounding of each element to its dtype, and float32's of its terms."""
    for ours, true in zip(found, exact, strict=True):
        limit = torch.finfo(ours.dtype).eps / 2 + 32 * 2.0**-24
        assert float((ours.double().cpu() - true).norm()) <= limit * float(true.norm())


def check_heads(forest: Forest, heads: int, value_dim: int, dtype: torch.dtype) -> None:
    rows, channels = sum(forest[0]), 2 * K * D + heads * value_dim
    wider, conv = drawn(rows, channels + 3, seed=1, dtype=dtype), drawn(channels, W, seed=2, dtype=dtype)
    given = wider[:, :channels], conv

    def exactly(mixed: Tensor, conv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gates = torch.zeros(rows, heads)
        return convolved_heads(DeltaInputs(mixed, conv, gates, gates, K, D), Spans(*forest, torch.device("cpu")))

    exact = results(exactly, [x.double().cpu() for x in given])
    assert_near(results(lambda mixed, conv: fused(mixed, conv, forest, heads), given), exact)


def check_norm(rows: int, heads: int, width: int, dtype: torch.dtype, weight_dtype: torch.dtype) -> None:
    o, wider = drawn(rows, heads, width, seed=1, dtype=dtype), drawn(rows, heads * width + 5, seed=2, dtype=dtype)
    weight, z = drawn(width, seed=3, dtype=weight_dtype), wider[:, 5:].unflatten(1, (heads, width))
    exact = results(lambda *x: [gated_norm(*x, 1e-6)], [x.double().cpu() for x in (o, z, weight)])
    assert_near(results(lambda *x: [fused_gated_norm(*x, 1e-6)], (o, z, weight)), exact)


def small_launches() -> dict[str, Callable[[], None]]:
    return {
        "heads in float32": lambda: check_heads(([2, 1], [-1, 0]), 3, 6, torch.float32),
        "a forest and the norm": lambda: (
            check_heads(FOREST, 2, 8, torch.bfloat16),
            check_norm(7, 5, 6, torch.bfloat16, torch.float32),
        )[0],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "forest",
    [([1], [-1]), ([2 * ROWS + 1], [-1]), ([3, 40], [-1, -1]), FOREST, ([1, 1, 1, 1, 1, 1], [-1, 0, 1, 2, 2, 0])],
)
def test_convolution_and_lengths(forest: Forest, dtype: torch.dtype) -> None:
    check_heads(forest, 4, 6, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "heads", "width"), [(1, 1, 4), (3, 2, 5), (ROWS, 3, 16)])
def test_the_gated_norm(rows: int, heads: int, width: int, dtype: torch.dtype) -> None:
    check_norm(rows, heads, width, dtype, torch.float32)
    check_norm(rows, heads, width, dtype, dtype)


def test_nothing_at_all() -> None:
    check_heads(([], []), 2, 8, torch.float32)
    check_norm(0, 2, 8, torch.float32, torch.float32)


def test_weights_that_are_frozen_get_no_gradient() -> None:
    mixed, conv = drawn(3, 38, seed=1, dtype=torch.float32), drawn(38, W, seed=2, dtype=torch.float32)
    leaf = mixed.requires_grad_()
    q, k, v = fused(leaf, conv, ([3], [-1]), 1)
    y = fused_gated_norm(v, v, drawn(6, seed=3, dtype=torch.float32), 1e-6)
    (q.sum() + k.sum() + y.sum()).backward()
    assert leaf.grad is not None and conv.grad is None


def test_all_that_is_made_is_written_and_nothing_beside(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = GuardedMemory(monkeypatch)
    check_heads(FOREST, 2, 8, torch.float32)
    check_norm(3, 2, 5, torch.float32, torch.float32)
    memory.check()
    assert len(memory.taken) == 8  # q, k and v in one, dy, its parts, dx; y, its parts, do, dz


def test_the_inputs_alone_are_kept() -> None:
    """The filter turned round; neither q, k or v nor what they are made by."""
    mixed, conv = (drawn(*shape, seed=1, dtype=torch.float32).requires_grad_() for shape in ((3, 38), (38, W)))
    with saved_tensors() as saved:
        _, _, v = fused(mixed, conv, ([3], [-1]), 1)
    assert saved[0] == mixed.data_ptr() and len(saved) == 3
    o, weight = v.detach().contiguous().requires_grad_(), drawn(6, seed=3, dtype=torch.float32).requires_grad_()
    with saved_tensors() as saved:
        fused_gated_norm(o, o, weight, 1e-6)
    assert saved == [o.data_ptr(), o.data_ptr(), weight.data_ptr()]
