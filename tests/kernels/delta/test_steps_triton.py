"""Tests of the gated delta rule's decode step: results, states and rows against steps.py in float64, over several
steps; memory that must stay unwritten.

On a CUDA device the compiled kernels run, otherwise Triton's interpreter.
"""

from collections.abc import Callable

import pytest
import torch
from interpreter import DEVICE
from torch import Tensor

pytest.importorskip("triton")

from thresher.kernels.delta.layer import DeltaInputs
from thresher.kernels.delta.steps import NextRows, Rings, delta_steps
from thresher.kernels.delta.steps_triton import fused_next

pytestmark = pytest.mark.usefixtures("rounds_to_nearest")

K, V, D, E, W = 2, 4, 8, 40, 4
CHANNELS = 2 * K * D + V * E
UNIT32 = 2.0**-24


def drawn(rows: int, seed: int, dtype: torch.dtype) -> DeltaInputs:
    noise = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=noise, dtype=torch.float64)

    wider = torch.cat([normal(rows, CHANNELS), torch.full((rows, 5), torch.nan, dtype=torch.float64)], 1)
    found = wider.to(DEVICE, dtype)[:, :CHANNELS], normal(CHANNELS, W).to(DEVICE, dtype)
    gates = (x.to(DEVICE, torch.float32) for x in (-normal(rows, V).exp() * 0.1, normal(rows, V).sigmoid()))
    return DeltaInputs(*found, *gates, K, D)


def rings(slots: int, ring: int, dtype: torch.dtype) -> Rings:
    noise = torch.Generator().manual_seed(9)
    state = torch.randn(slots, ring, V, D, E, generator=noise).to(DEVICE)
    return Rings(state, torch.randn(slots, ring + W - 1, CHANNELS, generator=noise).to(DEVICE, dtype))


def check(
    slots: list[int], starts: list[int], counts: list[int], ring: int, dtype: torch.dtype, steps: int = 1
) -> None:
    """Run `steps` consecutive steps with the kernel, and with steps.py in float64, and compare."""
    held = rings(max(slots) + 2, ring, dtype)
    before = Rings(*(x.clone() for x in held))
    exact = Rings(held.state_BRVDE.double(), held.rows_BMC.double())
    most, spare = max(counts), max(slots) + 1
    at, slot_N, count_N = (torch.tensor(x, device=DEVICE) for x in (starts, slots, counts))
    for step in range(steps):
        inputs = drawn(len(slots) * most, step, dtype)
        found = fused_next(inputs, *held, slot_N, at, count_N, most).view(len(slots), most, V, E)
        wide = DeltaInputs(*(x.double() for x in inputs[:4]), K, D)
        runs = NextRows(slot_N, at, count_N, spare, (ring, W), most).runs
        wanted = delta_steps(wide, exact, runs).view_as(found)
        assert found.dtype == dtype
        for n, count in enumerate(counts):
            # Each step sums D products of a state that was rounded in every step; q, k and v are rounded to the dtype.
            limit = (32 * (step + 1) * UNIT32 if dtype == torch.float32 else 0.02) * float(wanted[n, :count].norm())
            assert float((found[n, :count] - wanted[n, :count]).norm()) <= limit
            assert not found[n, count:].any()
        at = at + count_N
    # Rows are copies; slots of no sequence are unchanged.
    assert torch.equal(held.rows_BMC[:spare].double(), exact.rows_BMC[:spare])
    difference = (held.state_BRVDE[:spare] - exact.state_BRVDE[:spare]).norm()
    limit = 32 * steps * UNIT32 if dtype == torch.float32 else 0.02
    assert float(difference) <= limit * float(exact.state_BRVDE[:spare].norm())
    others = [n for n in range(spare + 1) if n not in slots]
    assert all(torch.equal(ours[others], theirs[others]) for ours, theirs in zip(held, before, strict=True))


def small_launches() -> dict[str, Callable[[], None]]:
    return {
        "drafts": lambda: check([2, 0], [5, 1], [3, 2], 4, torch.bfloat16),
        "a row each": lambda: check([1, 0], [0, 9], [1, 1], 2, torch.float32),
    }


@pytest.mark.fast_cases(1, gpu=9)
@pytest.mark.parametrize(
    ("ring", "dtype"), [(2, torch.bfloat16), pytest.param(1, torch.float32, marks=pytest.mark.slow)], ids=str
)
def test_rows_one_at_a_time(ring: int, dtype: torch.dtype) -> None:
    """Steps start at a sequence's beginning, with no rows before it, and wrap around the rings."""
    check([2, 0, 3], [0, 2, 17], [1, 1, 1], ring, dtype, steps=4)


def test_rows_of_drafts_and_a_place_of_nobody() -> None:
    """Each row leaves a state; one sequence has fewer rows than the step, one has none."""
    check([2, 0, 4, 1], [0, 7, 3, 2], [3, 1, 2, 0], 4, torch.float32, steps=2)


@pytest.mark.fast_cases(0, gpu=1)
def test_as_many_rows_as_states() -> None:
    """A step then writes the whole ring of states, and each row except those before it."""
    check([1, 0], [0, 6], [3, 2], 3, torch.float32, steps=2)


def test_a_sequence_has_its_own_bits() -> None:
    inputs, count_N = drawn(3, 1, torch.bfloat16), torch.ones(3, dtype=torch.int64, device=DEVICE)
    slot_N, start_N = torch.tensor([1, 0, 2], device=DEVICE), torch.tensor([4, 2, 6], device=DEVICE)
    together, alone = rings(4, 2, torch.bfloat16), rings(4, 2, torch.bfloat16)
    out = fused_next(inputs, *together, slot_N, start_N, count_N, 1)
    row = DeltaInputs(inputs.mixed_TC[1:2], inputs.conv_CW, inputs.decay_TV[1:2], inputs.beta_TV[1:2], K, D)
    assert torch.equal(out[1:2], fused_next(row, *alone, slot_N[1:2], start_N[1:2], count_N[1:2], 1))
    assert all(torch.equal(ours[0], theirs[0]) for ours, theirs in zip(together, alone, strict=True))
