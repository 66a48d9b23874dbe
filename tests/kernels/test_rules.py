"""Tests of filters against a plain reference in float64, and of the host's knowledge of a batch's rules."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from thresher.kernels.sampling import SamplingTensors, cutoffs

INFINITY = math.inf


def rules_of(*rows: tuple[float, int, float, float]) -> SamplingTensors:
    """Return rules from (temperature, top_k, top_p, min_p) of each row."""
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    return SamplingTensors.of(torch.tensor(temperature), torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p))


def reference_kept(z: Sequence[float], top_k: int, top_p: float, min_p: float) -> tuple[set[int], float]:
    """Return the columns that the filters keep, applied in sequence, and the margin of the closest decision."""
    order = sorted(range(len(z)), key=lambda v: -z[v])
    kept = [v for v in order if not top_k or z[v] >= z[order[min(top_k, len(z)) - 1]]]
    weight = {v: math.exp(z[v] - z[order[0]]) for v in kept}
    total, mass, close = sum(weight.values()), 0.0, 1.0
    if top_p < 1:
        smallest = []
        for v in kept:
            if smallest:
                close = min(close, abs(mass / total - top_p))
            if mass < top_p * total or z[v] == z[smallest[-1]]:
                smallest.append(v)
            mass += weight[v]
        kept = smallest
    if min_p:
        close = min([close, *(abs(weight[v] - min_p) for v in kept)])
        kept = [v for v in kept if weight[v] >= min_p]
    return set(kept), close


def kept_by(z: Sequence[float], rule: tuple[float, int, float, float]) -> set[int]:
    z_BV = torch.tensor([z])
    return set((z_BV >= cutoffs(z_BV, rules_of(rule))[:, None])[0].nonzero()[:, 0].tolist())


LOGITS = [math.log(p) for p in (0.4, 0.3, 0.15, 0.1, 0.05)]


@pytest.mark.parametrize(
    ("z", "top_k", "top_p", "min_p", "kept"),
    [
        (LOGITS, 2, 1.0, 0.0, {0, 1}),
        (LOGITS, 99, 1.0, 0.0, {0, 1, 2, 3, 4}),
        (LOGITS, 0, 0.5, 0.0, {0, 1}),
        (LOGITS, 0, 0.39, 0.0, {0}),
        (LOGITS, 0, 1e-9, 0.0, {0}),
        (LOGITS, 2, 0.56, 0.0, {0}),  # .4 is four sevenths of what top-k kept
        (LOGITS, 2, 0.58, 0.0, {0, 1}),
        (LOGITS, 0, 1.0, 0.3, {0, 1, 2}),
        (LOGITS, 0, 0.5, 0.9, {0}),
        (LOGITS[::-1], 2, 1.0, 0.0, {3, 4}),
        ([1.0, 2.0, 2.0, 2.0, 0.0], 1, 1.0, 0.0, {1, 2, 3}),  # equal logits are kept or dropped together
        ([1.0, 2.0, 2.0, 2.0, 0.0], 0, 0.1, 0.0, {1, 2, 3}),
        ([0.0] * 4, 3, 0.3, 0.5, {0, 1, 2, 3}),
        ([0.0, -INFINITY, 1.0, -INFINITY], 3, 1.0, 0.0, {0, 1, 2, 3}),  # the third largest is -inf
        ([0.0, -INFINITY, 1.0, -INFINITY], 0, 0.999, 0.0, {0, 2}),
        ([-200.0, 0.0, -300.0], 0, 1.0, 0.0, {0, 1, 2}),  # off: also if a probability is 0 in float32
        ([-200.0, 0.0, -300.0], 0, 1.0, 1e-9, {1}),
        ([5.0], 1, 0.1, 1.0, {0}),
    ],
)
def test_what_filters_keep(z: list[float], top_k: int, top_p: float, min_p: float, kept: set[int]) -> None:
    assert kept_by(z, (1.0, top_k, top_p, min_p)) == kept
    assert reference_kept(z, top_k, float(np.float32(top_p)), float(np.float32(min_p)))[0] == kept


@given(
    z=st.lists(st.integers(-12, 12), min_size=1, max_size=24),
    grain=st.sampled_from([0.37, 1.9]),
    top_k=st.integers(0, 9),
    top_p=st.sampled_from([0.05, 0.3, 0.51, 0.7, 0.93, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 0.77, 1.0]),
)
@settings(max_examples=300, deadline=None)
def test_filters_against_the_reference(z: list[int], grain: float, top_k: int, top_p: float, min_p: float) -> None:
    logits = torch.tensor([value * grain for value in z]).tolist()  # as rounded to float32
    expected, close = reference_kept(logits, top_k, float(np.float32(top_p)), float(np.float32(min_p)))
    assume(close > 1e-9 or min_p == 1.0)
    assert kept_by(logits, (1.0, top_k, top_p, min_p)) == expected


def test_a_cutoff_depends_on_its_own_row_alone() -> None:
    z_BV = torch.randn(40, 333, generator=torch.Generator().manual_seed(0)) * 4
    rows = [(1.0, n % 7 * 5, (1.0, 0.9, 0.5)[n % 3], (0.0, 0.02)[n % 2]) for n in range(40)]
    together = cutoffs(z_BV, rules_of(*rows))
    for row in range(40):
        assert torch.equal(cutoffs(z_BV[row : row + 1], rules_of(rows[row])), together[row : row + 1])


@pytest.mark.parametrize(
    ("rows", "temperature", "filtered"),
    [
        ([(1.0, 0, 1.0, 0.0)] * 3, 1.0, False),
        ([(0.0, 0, 1.0, 0.0)] * 2, 0.0, False),
        ([(0.5, 0, 1.0, 0.0), (1.0, 0, 1.0, 0.0)], None, False),
        ([(0.5, 0, 1.0, 0.0), (0.5, 3, 1.0, 0.0)], 0.5, True),
        ([(0.5, 0, 0.9, 0.0), (0.0, 0, 1.0, 0.0)], None, True),
        ([(1.0, 0, 1.0, 0.1)], 1.0, True),
    ],
)
def test_what_the_host_knows(rows: list[Any], temperature: float | None, filtered: bool) -> None:
    rules = rules_of(*rows)
    assert (rules.temperature, rules.filtered, len(rules)) == (temperature, filtered, len(rows))
    index_B = torch.tensor([len(rows) - 1, 0, 0])
    taken = rules.take(index_B)
    assert (taken.temperature, taken.filtered, len(taken)) == (temperature, filtered, 3)
    for name in ("temperature_B", "top_k_B", "top_p_B", "min_p_B", "filtered_B"):
        assert torch.equal(getattr(taken, name), getattr(rules, name)[index_B])


def test_uniform_rules() -> None:
    rules = SamplingTensors.uniform(0.7, 4)
    assert (rules.temperature, rules.filtered, len(rules)) == (0.7, False, 4)
    assert torch.equal(rules.temperature_B, torch.full((4,), 0.7)) and not rules.filtered_B.any()
    assert len(rules.take(torch.tensor([3, 3, 0, 1, 2]))) == 5
    assert len(SamplingTensors.uniform(1.0, 0)) == len(rules.take(torch.tensor([], dtype=torch.int64))) == 0


def test_greedy_rows_have_no_filter_that_matters() -> None:
    rules = rules_of((0.0, 5, 0.5, 0.5), (1.0, 5, 1.0, 0.0), (1.0, 0, 1.0, 0.0))
    assert rules.filtered_B.tolist() == [False, True, False]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ((-0.1, 0, 1.0, 0.0), "temperature is -0.1"),
        ((INFINITY, 0, 1.0, 0.0), "temperature is inf"),
        ((math.nan, 0, 1.0, 0.0), "temperature is nan"),
        # 0, subnormal or infinite in float32, itself or its reciprocal
        *(((value, 0, 1.0, 0.0), "temperature is ") for value in (1e-45, 1e-40, 1.1e-38, 1e38, 1e300)),
        ((1.0, -1, 1.0, 0.0), "top_k is -1; it has to be 0 or more"),
        ((1.0, 0, 0.0, 0.0), "top_p is 0.0"),
        ((1.0, 0, 1.5, 0.0), "top_p is 1.5; it has to be above 0 in float32 and at most 1"),
        ((1.0, 0, 1.0, 1.5), "min_p is 1.5"),
        ((1.0, 0, 1.0, math.nan), "min_p is nan"),
    ],
)
def test_values_that_are_refused(row: tuple[float, int, float, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rules_of((1.0, 0, 1.0, 0.0), row)
    if row[0] != 1.0:
        with pytest.raises(ValueError, match=message):
            SamplingTensors.uniform(row[0], 2)


def test_shapes_and_dtypes_that_are_refused() -> None:
    one_B, k_B = torch.ones(2), torch.zeros(2, dtype=torch.int64)
    host = [x.numpy() for x in (one_B, k_B, one_B, one_B)]
    with pytest.raises(ValueError, match=r"rules are .*float32, torch\.int64"):
        SamplingTensors.of(one_B, one_B, one_B, one_B)
    with pytest.raises(ValueError, match="one length"):
        SamplingTensors.of(one_B, k_B[:1], one_B, one_B)
    with pytest.raises(ValueError, match="need `host`"):
        SamplingTensors.of(*(x.to("meta") for x in (one_B, k_B, one_B, one_B)))
    with pytest.raises(ValueError, match="`host` has shapes"):
        SamplingTensors.of(one_B, k_B, one_B, one_B, host=[*host[:3], host[3][:1]])
    assert SamplingTensors.of(*(x.to("meta") for x in (one_B, k_B, one_B, one_B)), host=host).filtered
