"""Tests of the fused residual sum and norm: values and gradients against float64; written memory and saved tensors.

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

from thresher.kernels.layers import add_norm

pytest.importorskip("triton")

from thresher.kernels import norm_triton
from thresher.kernels.norm_triton import MAX_WIDTH, backward_programs, fused_add_norm

pytestmark = [
    pytest.mark.usefixtures("rounds_to_nearest"),
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),  # NumPy, on masked lanes
]

EPS = 1e-6
SHAPES = [(1, 8), (1, 896), (5, 33), (3, 1536), (70, 24)]
DTYPES = [torch.float32, torch.bfloat16]
UNIT32 = 2.0**-24


def unit(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


@contextmanager
def few_programs() -> Iterator[None]:
    """Make small shapes take the path of large ones: more than a program's fewest rows, a sum in two passes."""
    with patch.object(norm_triton, "BACKWARD_WARPS", 11), patch.object(norm_triton, "SUM_ROWS", 8):
        assert [backward_programs(T, 24) for T in (0, 1, 9, 44, 70)] == [0, 1, 3, 11, 11]
        yield


@pytest.fixture
def _few_programs() -> Iterator[None]:
    with few_programs():
        yield


def arguments(
    T: int, H: int, dtype: torch.dtype, scale: float = 1.0, of_weight: torch.dtype | None = None
) -> tuple[Tensor, ...]:
    """Return x, more and w, and the gradients of both outputs."""
    x_TH, addend_TH = drawn(T, H, seed=1, dtype=dtype, scale=scale), drawn(T, H, seed=2, dtype=dtype, scale=scale)
    weight_H = (1 + 0.5 * drawn(H, seed=3, dtype=torch.float32)).to(of_weight or dtype)
    return x_TH, addend_TH, weight_H, drawn(T, H, seed=4, dtype=dtype), drawn(T, H, seed=5, dtype=dtype)


def gradients(function: Any, inputs: list[Any], grads: tuple[Any, ...]) -> list[Tensor]:
    """Return the outputs of function(*inputs, EPS), then the gradients of the inputs that are not None. A gradient of
    None: that output is unused."""
    leaves = [None if x is None else x.detach().clone().requires_grad_() for x in inputs]
    outputs = function(*leaves, EPS)
    used = [(output, grad) for output, grad in zip(outputs, grads, strict=True) if grad is not None]
    wanted = [leaf for leaf in leaves if leaf is not None]
    found = torch.autograd.grad([o for o, _ in used], wanted, [g for _, g in used], allow_unused=True)
    return [*(output.detach() for output in outputs), *found]


def budgets(s: Tensor, w: Tensor, ds: Tensor, dy: Tensor, dtype: torch.dtype) -> Any:
    """Return the budgets of sum, y, dx and dw, element by element, from their terms in float64."""
    u = unit(dtype)
    r = (s.square().mean(-1, keepdim=True) + EPS).rsqrt()
    n, g = s * r, w * dy
    spread = r * (g.abs() + n.abs() * (g * n).abs().mean(-1, keepdim=True))
    true_dx = ds + r * (g - n * (g * n).mean(-1, keepdim=True))
    # s is rounded first: 1 u of it, of r, and therefore 6 u of dx's terms; a sum has 26 steps, 14 follow it
    return {
        "sum": u * s.abs(),
        "y": (4 * u + 20 * UNIT32) * (w * n).abs(),
        "dx": (6 * u + 40 * UNIT32) * spread + UNIT32 * ds.abs() + u * true_dx.abs(),
        "dw": (2 * u + (len(s) + 30) * UNIT32) * (dy * n).abs().sum(0) + u * (dy * n).sum(0).abs(),
    }


def check(
    T: int, H: int, dtype: torch.dtype, found: list[Tensor] | None = None, of_weight: torch.dtype | None = None
) -> None:
    """Check outputs and gradients of `arguments(T, H, dtype)`, computed unless given, element by element."""
    x, more, w, ds, dy = arguments(T, H, dtype, of_weight=of_weight)
    truth = gradients(add_norm, [t.double().cpu() for t in (x, more, w)], (ds.double().cpu(), dy.double().cpu()))
    budget = budgets(truth[0], w.double().cpu(), ds.double().cpu(), dy.double().cpu(), dtype)
    found = found or gradients(fused_add_norm, [x, more, w], (ds, dy))
    assert torch.equal(found[2], found[3])
    for name, ours, true in zip(("sum", "y", "dx", "dw"), (*found[:3], found[4]), (*truth[:3], truth[4]), strict=True):
        assert ours is not None and ours.dtype == (of_weight or dtype if name == "dw" else dtype)
        error = (ours.double().cpu() - true).abs()
        assert (error <= 1.01 * budget[name] + 1e-40).all(), name  # bound: roundings, counted


def small_launches() -> dict[str, Callable[[], None]]:
    def ragged(T: int, H: int, dtype: torch.dtype) -> None:
        with few_programs():
            check(T, H, dtype)

    return {
        "one row": lambda: ragged(1, 8, torch.float32),
        "bfloat16": lambda: ragged(5, 33, torch.bfloat16),
        "a weight in float32": lambda: check(5, 33, torch.bfloat16, of_weight=torch.float32),
        "several rows a program": lambda: ragged(50, 12, torch.float32),
    }


@pytest.mark.usefixtures("_few_programs")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("T", "H"), SHAPES)
@pytest.mark.fast_cases(5)
def test_values_and_gradients(T: int, H: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    x, more, w, ds, dy = arguments(T, H, dtype)
    with monkeypatch.context() as patched:
        memory = GuardedMemory(patched)
        found = gradients(fused_add_norm, [x, more, w], (ds, dy))
    memory.check()
    check(T, H, dtype, found)


def test_in_bfloat16_it_rounds_where_qwen2_does() -> None:
    """Except for a root on the border between two bfloat16s; without the rounding before w a quarter would differ."""
    x, more, w, _, _ = arguments(9, 500, torch.bfloat16)
    total, y = fused_add_norm(x, more, w, EPS)
    theirs_TH, theirs_y_TH = add_norm(x.cpu(), more.cpu(), w.cpu(), EPS)
    assert torch.equal(total.cpu(), theirs_TH) and (y.cpu() != theirs_y_TH).double().mean() < 0.01


@pytest.mark.parametrize("used", ["both", "sum", "y"])
@pytest.mark.parametrize("has_more", [True, False])
def test_what_is_left_out_changes_nothing(has_more: bool, used: str) -> None:
    """With None for more, unused outputs or broadcast gradients, results are those of torch in float64."""
    x, more, w, _, _ = arguments(9, 40, torch.float32)
    ds, dy = (drawn(1, 40, seed=seed, dtype=torch.float32).expand(9, 40) for seed in (6, 7))
    grads = (None if used == "y" else ds, None if used == "sum" else dy)
    inputs = [x, more if has_more else None, w]
    truth = gradients(
        add_norm,
        [None if t is None else t.double() for t in inputs],
        tuple(None if grad is None else grad.double() for grad in grads),
    )
    found = gradients(fused_add_norm, inputs, grads)
    assert len(found) == len(truth) == 4 + has_more
    for ours, true in zip(found, truth, strict=True):
        assert (ours is None) == (true is None)
        if true is not None:
            torch.testing.assert_close(ours.double(), true, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e4])
def test_rows_of_any_size(scale: float) -> None:
    x, more, w, _, dy = arguments(4, 33, torch.float32, scale)
    truth = gradients(add_norm, [t.double() for t in (x, more, w)], (dy.double(), dy.double()))
    found = gradients(fused_add_norm, [x, more, w], (dy, dy))
    for ours, true in zip(found, truth, strict=True):
        torch.testing.assert_close(ours.double(), true, rtol=1e-5, atol=1e-5 * max(1.0, true.abs().max().item()))


def test_a_weight_in_float32_takes_what_was_not_rounded() -> None:
    """As in torch: the bits of layers.py's `rms_norm`, except that the mean is summed in another order."""
    check(9, 100, torch.bfloat16, of_weight=torch.float32)
    x, more, w, _, _ = arguments(9, 100, torch.bfloat16, of_weight=torch.float32)
    ours, theirs = fused_add_norm(x, more, w, EPS)[1].cpu(), add_norm(x.cpu(), more.cpu(), w.cpu(), EPS)[1]
    assert (ours != theirs).double().mean() < 0.01
    rounded = add_norm(x.cpu(), more.cpu(), w.cpu().bfloat16(), EPS)[1]
    assert (rounded != theirs).double().mean() > 0.1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_has_its_own_bits(dtype: torch.dtype) -> None:
    """Neither the number of rows nor the contents of other rows matter."""
    x, more, w, ds, dy = arguments(11, 100, dtype)
    with torch.no_grad():
        x[4] = torch.nan
    together = gradients(fused_add_norm, [x, more, w], (ds, dy))
    for row in (0, 3, 5, 10):
        # Copies, because torch aligns an allocated tensor as it does the whole, and Triton compiles for that.
        one_x, one_more, one_ds, one_dy = (tensor[row : row + 1].clone() for tensor in (x, more, ds, dy))
        alone = gradients(fused_add_norm, [one_x, one_more, w], (one_ds, one_dy))
        for ours, single in zip(together[:4], alone[:4], strict=True):
            assert torch.equal(ours[row], single[0]) and single.isfinite().all()
    assert together[1][4].isnan().all()


def test_nothing_is_saved_but_the_sum_and_the_weight() -> None:
    x, more, w, _, _ = arguments(3, 20, torch.float32)
    x.requires_grad_()
    with saved_tensors() as saved:
        total, _ = fused_add_norm(x, more, w, EPS)
        assert saved == [total.data_ptr(), w.data_ptr()]
        with torch.no_grad():
            outputs = fused_add_norm(x, more, w, EPS)
    assert len(saved) == 2 and not any(output.requires_grad for output in outputs)


def test_a_frozen_weight_has_no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    x, more, w, ds, dy = arguments(6, 20, torch.float32)
    full = gradients(fused_add_norm, [x, more, w], (ds, dy))
    x.requires_grad_()
    outputs = fused_add_norm(x, more, w, EPS)
    memory = GuardedMemory(monkeypatch)
    torch.autograd.backward(outputs, (ds, dy))
    assert [tuple(given.shape) for given, _ in memory.taken] == [(6, 20)]
    assert x.grad is not None and w.grad is None
    torch.testing.assert_close(x.grad, full[2], rtol=1e-6, atol=1e-6)  # another binary


def test_no_rows() -> None:
    w = torch.ones(8, device=DEVICE, requires_grad=True)
    x = torch.zeros(0, 8, device=DEVICE, requires_grad=True)
    total, y = fused_add_norm(x, x, w, EPS)
    (total.sum() + y.sum()).backward()
    assert y.shape == (0, 8) and w.grad is not None and torch.equal(w.grad, torch.zeros_like(w))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"x_TH": torch.ones(3, 4, dtype=torch.float16)}, "x_TH has dtype torch.float16; expected bfloat16 or float32"),
        ({"x_TH": torch.ones(3)}, r"x_TH has shape \(3,\); expected \[T, H\] with H from 1 to 8,192"),
        ({"x_TH": torch.ones(1, MAX_WIDTH + 1)}, r"x_TH has shape \(1, 8193\); expected \[T, H\]"),
        ({"addend_TH": torch.ones(2, 4)}, r"addend_TH has shape \(2, 4\) .*; expected dense \(3, 4\)"),
        ({"weight_H": torch.ones(3)}, r"weight_H has shape \(3,\) .*; expected dense \(4,\)"),
        ({"weight_H": torch.ones(4).bfloat16()}, "weight_H is torch.bfloat16 on .*; expected torch.float32 on"),
    ],
)
def test_refusals(change: dict[str, Tensor], complaint: str) -> None:
    fine = {"x_TH": torch.ones(3, 4), "addend_TH": torch.ones(3, 4), "weight_H": torch.ones(4)}
    with pytest.raises(ValueError, match=complaint):
        fused_add_norm(**{name: tensor.to(DEVICE) for name, tensor in {**fine, **change}.items()}, eps=EPS)
