"""Tests of the fused norm of heads: values and gradients against float64; written memory and saved tensors.

The limit of an error counts roundings: a unit roundoff of the dtype for each rounding to it, and of float32 for each
step of a sum. On a CUDA device the compiled kernels run, otherwise Triton's interpreter.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from interpreter import DEVICE, GuardedMemory, drawn, saved_tensors
from torch import Tensor

from thresher.kernels.layers import norm_heads

pytest.importorskip("triton")

from thresher.kernels import heads_triton
from thresher.kernels.heads_triton import _HeadShape, fused_norm_heads

pytestmark = [
    pytest.mark.usefixtures("rounds_to_nearest"),
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),  # NumPy, on masked lanes
]

EPS = 1e-6
SHAPES = [(1, 1, 1, 4), (3, 4, 2, 16), (2, 16, 8, 128), (19, 5, 1, 10), (5, 14, 2, 24)]  # T, N, K, D
DTYPES = [torch.float32, torch.bfloat16]
UNIT32 = 2.0**-24


@contextmanager
def few_programs() -> Iterator[None]:
    """Make small shapes take the path of large ones: a program processes more than its fewest rows, and a sum of parts
    takes two passes."""
    with patch.object(heads_triton, "BACKWARD_WARPS", 3), patch.object(heads_triton, "SUM_ROWS", 2):
        assert [_HeadShape(5, 1, 10).backward_programs(T) for T in (0, 1, 9, 19)] == [0, 1, 3, 3]
        assert _HeadShape(14, 2, 24).programs_of_a_row() == 2 and _HeadShape(14, 2, 24).backward_programs(5) == 2
        yield


@pytest.fixture
def _few_programs() -> Iterator[None]:
    with few_programs():
        yield


def arguments(
    T: int, N: int, K: int, D: int, dtype: torch.dtype, scale: float = 1.0, of_weight: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """Return qkv, the weights of queries and keys, and the gradient of the output."""
    weights = ((1 + 0.5 * drawn(D, seed=seed, dtype=torch.float32)).to(of_weight or dtype) for seed in (3, 4))
    return (
        drawn(T, N + 2 * K, D, seed=1, dtype=dtype, scale=scale),
        *weights,
        drawn(T, N + 2 * K, D, seed=5, dtype=dtype),
    )


def gradients(function: Any, inputs: tuple[Tensor, ...], kv_heads: int) -> list[Tensor]:
    """Return y, then the gradients of qkv and of both weights. inputs: those of `arguments`."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
    y_TMD = function(*leaves, kv_heads, EPS)
    return [y_TMD.detach(), *torch.autograd.grad(y_TMD, leaves, inputs[3])]


def exact(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, kv_heads: int, eps: float) -> Tensor:
    """Compute the formula in the dtype of its arguments."""
    K, N = kv_heads, qkv.shape[1] - 2 * kv_heads
    weight_MD = torch.cat([q_weight.expand(N, -1), k_weight.expand(K, -1)])
    heads = qkv[:, : N + K]
    return torch.cat([weight_MD * heads / (heads.square().mean(-1, keepdim=True) + eps).sqrt(), qkv[:, N + K :]], 1)


def check(
    T: int, N: int, K: int, D: int, dtype: torch.dtype, found: list[Tensor], weights: torch.dtype | None = None
) -> None:
    """Check y and gradients of `arguments(..)`: each element within a budget that its float64 terms determine."""
    qkv, wq, wk, dy = (x.double().cpu() for x in arguments(T, N, K, D, dtype, of_weight=weights))
    truth = gradients(exact, (qkv, wq, wk, dy), K)
    u = torch.finfo(dtype).eps / 2
    r = (qkv.square().mean(-1, keepdim=True) + EPS).rsqrt()
    n = qkv * r
    w = torch.cat([wq.expand(N, -1), wk.expand(K, -1), torch.ones(K, D).double()])
    g = w * dy
    spread = r * (g.abs() + n.abs() * (g * n).abs().mean(-1, keepdim=True))
    of_weight = (2 * u + (T * N + 30) * UNIT32) * (dy * n).abs()
    budgets = [
        (3 * u + 20 * UNIT32) * truth[0].abs(),
        (2 * u + 40 * UNIT32) * spread + u * truth[1].abs(),
        of_weight[:, :N].sum((0, 1)) + u * truth[2].abs(),
        of_weight[:, N : N + K].sum((0, 1)) + u * truth[3].abs(),
    ]
    for name, ours, true, budget in zip(("y", "dqkv", "dwq", "dwk"), found, truth, budgets, strict=True):
        assert ours.dtype == (weights or dtype if name in ("dwq", "dwk") else dtype) and ours.shape == true.shape
        error = (ours.double().cpu() - true).abs()
        assert (error <= budget + 1e-40).all(), name  # bound: roundings, counted


def small_launches() -> dict[str, Callable[[], None]]:
    def ragged(T: int, N: int, K: int, D: int, dtype: torch.dtype) -> None:
        with few_programs():
            check(T, N, K, D, dtype, gradients(fused_norm_heads, arguments(T, N, K, D, dtype), K))

    def weights_in_float32() -> None:
        given = arguments(5, 14, 2, 24, torch.bfloat16, of_weight=torch.float32)
        check(5, 14, 2, 24, torch.bfloat16, gradients(fused_norm_heads, given, 2), torch.float32)

    return {
        "one row": lambda: ragged(1, 1, 1, 4, torch.float32),
        "weights in float32": weights_in_float32,
        "bfloat16, two programs a row": lambda: ragged(5, 14, 2, 24, torch.bfloat16),
        "several rows a program": lambda: ragged(19, 5, 1, 10, torch.float32),
    }


@pytest.mark.usefixtures("_few_programs")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("T", "N", "K", "D"), SHAPES)
@pytest.mark.fast_cases(5)
def test_values_and_gradients(
    T: int, N: int, K: int, D: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = arguments(T, N, K, D, dtype)
    with monkeypatch.context() as patched:
        memory = GuardedMemory(patched)
        found = gradients(fused_norm_heads, inputs, K)
    memory.check()
    check(T, N, K, D, dtype, found)
    assert torch.equal(found[0][:, N + K :], inputs[0][:, N + K :]), "values are left as they are"
    assert torch.equal(found[1][:, N + K :], inputs[3][:, N + K :])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torchs_own_is_within_the_same_budget(dtype: torch.dtype) -> None:
    """The norm that a CPU runs is compared with the formula as well."""
    inputs = tuple(x.cpu() for x in arguments(19, 5, 1, 10, dtype))
    check(19, 5, 1, 10, dtype, gradients(norm_heads, inputs, 1))


def test_it_rounds_where_qwen3_does() -> None:
    """On a CPU the bits are those of transformers' norm; fused, too, except for roots between two bfloat16s."""
    modeling = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    qkv, wq, wk, _ = (x.cpu() for x in arguments(9, 6, 2, 128, torch.bfloat16))
    theirs = []
    for weight, heads in ((wq, qkv[:, :6]), (wk, qkv[:, 6:8])):
        norm = modeling.Qwen3RMSNorm(128, eps=EPS)
        norm.weight.data = weight
        theirs.append(norm(heads).detach())
    theirs_TMD = torch.cat([*theirs, qkv[:, 8:]], 1)
    assert torch.equal(norm_heads(qkv, wq, wk, 2, EPS), theirs_TMD)
    y_TMD = fused_norm_heads(*(x.to(DEVICE) for x in (qkv, wq, wk)), 2, EPS)
    assert (y_TMD.cpu() != theirs_TMD).double().mean() < 0.01


@pytest.mark.usefixtures("_few_programs")
def test_a_row_has_its_own_bits() -> None:
    qkv, wq, wk, dy = arguments(11, 20, 3, 8, torch.float32)
    with torch.no_grad():
        qkv[4, 7] = torch.nan
    together = gradients(fused_norm_heads, (qkv, wq, wk, dy), 3)
    assert together[0][4, 7].isnan().all() and together[0].isnan().sum() == 8
    for row in (0, 3, 5, 10):
        alone = gradients(fused_norm_heads, (qkv[row : row + 1].clone(), wq, wk, dy[row : row + 1].clone()), 3)
        assert torch.equal(together[0][row], alone[0][0]) and torch.equal(together[1][row], alone[1][0])


def test_weights_gradients_are_sums_of_several_programs() -> None:
    """Three programs of three rows each are added in two passes."""
    inputs = arguments(9, 5, 1, 10, torch.bfloat16)
    with few_programs():
        check(9, 5, 1, 10, torch.bfloat16, gradients(fused_norm_heads, inputs, 1))


def test_what_is_saved_and_what_frozen_weights_save(monkeypatch: pytest.MonkeyPatch) -> None:
    qkv, wq, wk, dy = arguments(6, 4, 2, 8, torch.float32)
    full = gradients(fused_norm_heads, (qkv, wq, wk, dy), 2)
    qkv.requires_grad_()
    with saved_tensors() as saved:
        y_TMD = fused_norm_heads(qkv, wq, wk, 2, EPS)
    assert saved == [x.data_ptr() for x in (qkv, wq, wk)]
    memory = GuardedMemory(monkeypatch)
    y_TMD.backward(dy)
    assert [tuple(given.shape) for given, _ in memory.taken] == [(6, 8, 8)]
    assert qkv.grad is not None and wq.grad is None
    torch.testing.assert_close(qkv.grad, full[1], rtol=1e-6, atol=1e-6)  # another binary


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e4])
def test_heads_of_any_size(scale: float) -> None:
    inputs = arguments(3, 4, 2, 8, torch.float32, scale)
    truth = gradients(exact, tuple(x.double() for x in inputs), 2)
    for ours, true in zip(gradients(fused_norm_heads, inputs, 2), truth, strict=True):
        torch.testing.assert_close(ours.double(), true, rtol=1e-5, atol=1e-5 * true.abs().max().item())


def test_no_rows() -> None:
    w = torch.ones(8, device=DEVICE, requires_grad=True)
    y_TMD = fused_norm_heads(torch.zeros(0, 4, 8, device=DEVICE, requires_grad=True), w, w.detach(), 1, EPS)
    y_TMD.sum().backward()
    assert y_TMD.shape == (0, 4, 8) and w.grad is not None and torch.equal(w.grad, torch.zeros_like(w))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"qkv_TMD": torch.ones(3, 4, 8, dtype=torch.float16)}, "qkv_TMD has dtype torch.float16; expected bfloat16"),
        ({"qkv_TMD": torch.ones(3, 2, 8)}, r"qkv_TMD has shape \(3, 2, 8\) for 1 key/value heads; expected \[T, N"),
        ({"qkv_TMD": torch.ones(3, 32)}, r"qkv_TMD has shape \(3, 32\) for"),
        ({"kv_heads": 0}, r"for 0 key/value heads"),
        ({"q_weight_D": torch.ones(7)}, r"q_weight_D has shape \(7,\) .*; expected dense \(8,\)"),
        ({"k_weight_D": torch.ones(8).bfloat16()}, "k_weight_D is torch.bfloat16 on .*; expected torch.float32 on"),
    ],
)
def test_refusals(change: dict[str, Any], complaint: str) -> None:
    fine = {"qkv_TMD": torch.ones(3, 4, 8), "q_weight_D": torch.ones(8), "k_weight_D": torch.ones(8), "kv_heads": 1}
    given = {name: x.to(DEVICE) if isinstance(x, Tensor) else x for name, x in {**fine, **change}.items()}
    with pytest.raises(ValueError, match=complaint):
        fused_norm_heads(**given, eps=EPS)
