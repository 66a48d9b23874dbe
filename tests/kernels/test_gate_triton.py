"""Tests of the fused gate: values and gradients against float64, element by element; written memory and saved tensors.

On a CUDA device the compiled kernels run, otherwise Triton's interpreter.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from interpreter import DEVICE, GuardedMemory, drawn, saved_tensors
from torch import Tensor

from thresher.kernels.layers import silu_gate

pytest.importorskip("triton")

from thresher.kernels.gate_triton import COLUMNS, fused_silu_gate

pytestmark = [
    pytest.mark.usefixtures("rounds_to_nearest"),
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),  # numpy: e^200 is infinity
]

UNIT32 = 2.0**-24
draw = partial(drawn, scale=3.0)
TINY = 1e-35  # times |u| and |dy u|: where e^-g overflows float32, silu is 0 instead of -88 e^-88


def both(gate_up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output of `fused_silu_gate` and the gradient of its input."""
    leaf = gate_up.detach().requires_grad_()
    y = fused_silu_gate(leaf)
    return y.detach(), torch.autograd.grad(y, leaf, grad)[0]


def assert_exact(gate_up: Tensor, grad: Tensor, y: Tensor, found: Tensor) -> None:
    """Check that each element is off by at most its own roundings: of the dtype, and for e^x, |x| of float32's."""
    u = torch.finfo(gate_up.dtype).eps / 2
    leaf = gate_up.detach().double().cpu().requires_grad_()
    true_y = silu_gate(leaf)
    dy = grad.double().cpu()
    (true_grad,) = torch.autograd.grad(true_y, leaf, dy)
    gate, up = leaf.detach().chunk(2, -1)
    sigma, steps = gate.sigmoid(), (gate.abs() + 12) * UNIT32
    budgets = [
        (y, true_y.detach(), (2.01 * u + steps) * true_y.detach().abs() + TINY * up.abs()),
        (
            found.chunk(2, -1)[0],
            true_grad.chunk(2, -1)[0],
            u * true_grad.chunk(2, -1)[0].abs() + (dy * up).abs() * (steps * sigma * (1 + gate.abs()) + TINY),
        ),
        (found.chunk(2, -1)[1], true_grad.chunk(2, -1)[1], (u + steps) * (dy * gate * sigma).abs() + TINY * dy.abs()),
    ]
    for ours, true, budget in budgets:
        assert ours.dtype == gate_up.dtype
        assert ((ours.double().cpu() - true).abs() <= budget + 1e-44).all()  # bound: roundings, counted


def small_launches() -> dict[str, Callable[[], None]]:
    def check(T: int, inner: int, dtype: torch.dtype) -> None:
        gate_up, grad = draw(T, 2 * inner, seed=1, dtype=dtype), draw(T, inner, seed=2, dtype=dtype)
        assert_exact(gate_up, grad, *both(gate_up, grad))

    return {
        "ragged": lambda: check(5, 33, torch.float32),
        "bfloat16": lambda: check(3, 8, torch.bfloat16),
        "two tiles": lambda: check(2, COLUMNS + 40, torch.float32),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("T", "inner"), [(1, 1), (1, 8), (5, 33), (7, COLUMNS), (3, 2 * COLUMNS + 40), (40, 24)])
def test_values_and_gradients(T: int, inner: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    gate_up, grad = draw(T, 2 * inner, seed=1, dtype=dtype), draw(T, inner, seed=2, dtype=dtype)
    memory = GuardedMemory(monkeypatch)
    y, found = both(gate_up, grad)
    memory.check()
    assert len(memory.taken) == 2
    assert_exact(gate_up, grad, y, found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_where_the_sigmoid_saturates(dtype: torch.dtype) -> None:
    gate = torch.tensor(
        [0.0, -0.0, 1e-30, -20.0, 20.0, -87.0, 87.0, -88.5, 88.5, -90.0, 90.0, -200.0, 200.0, -3e38, 3e38]
    )
    gate_up = torch.cat([gate, torch.full_like(gate, 0.75)])[None].to(DEVICE, dtype)
    grad = torch.full((1, len(gate)), -0.5, device=DEVICE, dtype=dtype)
    y, found = both(gate_up, grad)
    assert y.isfinite().all() and found.isfinite().all()
    ordinary = slice(0, 13)  # for +-3e38 the budget is useless; there the results are 0 and g itself
    kept = torch.cat([gate_up[:, ordinary], gate_up[:, 15:28]], 1)
    halves = [half[:, ordinary] for half in found.chunk(2, -1)]
    assert_exact(kept, grad[:, ordinary], y[:, ordinary], torch.cat(halves, 1))
    assert y[0, 13] == 0 and y[0, 14] == gate_up[0, 14] * 0.75
    assert found[0, 13] == 0 and found[0, 14] == -0.375


def test_in_bfloat16_it_rounds_where_qwen2_does() -> None:
    """Except for an e^x on the border between two bfloat16s; without silu's own rounding a quarter would differ."""
    gate_up = draw(9, 1000, seed=1, dtype=torch.bfloat16)
    y, _ = both(gate_up, draw(9, 500, seed=2, dtype=torch.bfloat16))
    assert (y.cpu() != silu_gate(gate_up.cpu())).double().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_its_own_bits(dtype: torch.dtype) -> None:
    gate_up, grad = draw(6, 90, seed=1, dtype=dtype), draw(6, 45, seed=2, dtype=dtype)
    gate_up[2] = torch.nan
    together = both(gate_up, grad)
    for row in (0, 1, 3, 5):
        alone = both(gate_up[row : row + 1], grad[row : row + 1])
        assert all(torch.equal(ours[row], single[0]) for ours, single in zip(together, alone, strict=True))
        assert alone[1].isfinite().all()


def test_strides_and_broadcast_gradients() -> None:
    wide, grad = draw(4, 60, seed=1, dtype=torch.float32), draw(1, 10, seed=2, dtype=torch.float32)
    part = wide[:, 7:27]
    assert not part.is_contiguous()
    for ours, plain in zip(both(part, grad.expand(4, 10)), both(part.clone(), grad.repeat(4, 1)), strict=True):
        assert torch.equal(ours, plain)


def test_only_the_projection_is_saved() -> None:
    gate_up = draw(3, 20, seed=1, dtype=torch.float32).requires_grad_()
    with saved_tensors() as saved:
        fused_silu_gate(gate_up)
        assert saved == [gate_up.data_ptr()]
        with torch.no_grad():
            assert not fused_silu_gate(gate_up).requires_grad
    assert len(saved) == 1


def test_no_rows() -> None:
    y, grad = both(torch.zeros(0, 8, device=DEVICE), torch.zeros(0, 4, device=DEVICE))
    assert y.shape == (0, 4) and grad.shape == (0, 8)


@pytest.mark.parametrize(
    ("gate_up", "complaint"),
    [
        (torch.ones(3, 4, dtype=torch.float64), "gate_up_T2I has dtype torch.float64; expected bfloat16 or float32"),
        (torch.ones(3, 5), r"gate_up_T2I has shape \(3, 5\); expected \[T, 2I\] with I of at least 1"),
        (torch.ones(3, 0), r"gate_up_T2I has shape \(3, 0\)"),
        (torch.ones(4), r"gate_up_T2I has shape \(4,\)"),
    ],
)
def test_refusals(gate_up: Tensor, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        fused_silu_gate(gate_up.to(DEVICE))
