"""Tests of intervals and paired tests, against figures worked out by hand and direct computations."""

import itertools
import math
import random
from statistics import NormalDist

import pytest

from thresher.rewards import statistics
from thresher.rewards.statistics import (
    T_800,
    T_975,
    compare_paired,
    compare_seeds,
    holm,
    intervals,
    least_p,
    minimum_detectable_effect,
    overlap,
    seed_interval,
    sign_flip_test,
    two_way_interval,
    wilson,
)


def test_an_interval_is_where_the_normal_one_is_for_many_questions() -> None:
    """Limit: nine standard errors of a quantile of the draws, the root of p (1 - p) / draws over the density there."""
    rng = random.Random(1)
    values = [rng.random() for _ in range(200)]
    found = intervals({"f1": values}, resamples=40_000)["f1"]
    mean = sum(values) / 200
    spread = math.sqrt(sum((value - mean) ** 2 for value in values)) / 200
    error = math.sqrt(0.025 * 0.975 / 40_000) / NormalDist().pdf(1.96) * spread
    assert found.mean == pytest.approx(mean, abs=1e-12) and found.count == 200
    assert found.low == pytest.approx(mean - 1.96 * spread, abs=9 * error)
    assert found.high == pytest.approx(mean + 1.96 * spread, abs=9 * error)


def test_a_small_bootstrap_has_the_quantiles_of_all_its_draws() -> None:
    values = [0.0, 1.0, 5.0]
    every = sorted(sum(draw) / 3 for draw in itertools.product(values, repeat=3))
    found = intervals({"x": values})["x"]
    # 27 draws of equal probability: 2.5% is below the first (3.7%) and 97.5% above the last but one (96.3%).
    assert (found.low, found.high) == (every[0], every[-1]) == (0.0, 5.0)
    # 5.5 and 21.5 of 27 are in the middle of the three draws that sum to 2, and of those that sum to 10.
    inner = intervals({"x": values}, level=16 / 27)["x"]
    assert (inner.low, inner.high) == pytest.approx((every[5], every[21]))


def test_a_share_has_wilsons_interval_whatever_it_is() -> None:
    """The figures are Wilson's for 0 of 8 and for 3 of 10; a share that is not yes or no gets a bootstrap."""
    columns = {"em": [0.0] * 8 + [None] * 2, "f1": [0.5, 1.0] * 5, "reward": [0.0] * 10, "half": [1.0] * 3 + [0.0] * 7}
    found = intervals(columns, shares=["em", "f1", "half"])
    assert (found["em"].low, found["em"].high) == pytest.approx((0.0, 0.3244), abs=1e-4)
    assert (found["half"].low, found["half"].high) == pytest.approx((0.1078, 0.6032), abs=1e-4)
    assert (found["f1"].low, found["f1"].high) == (0.6, 0.9)
    assert found["reward"].low is None and found["reward"].high is None  # its range is unknown
    assert wilson(1.0, 8) == pytest.approx((1 - 0.3244, 1.0), abs=1e-4)


def test_missing_values_are_left_out_of_their_column_alone() -> None:
    columns = {"cr": [4.0, None, 8.0, None], "em": [1.0, 0.0, 1.0, 1.0], "none": [None] * 4}
    found = intervals(columns, resamples=2000)
    assert set(found) == {"cr", "em"}
    assert (found["cr"].mean, found["cr"].count) == (6.0, 2) and (found["em"].mean, found["em"].count) == (0.75, 4)
    assert 4.0 <= found["cr"].low <= found["cr"].high <= 8.0
    assert intervals({}) == {} == intervals({"none": []})


def test_intervals_depend_on_the_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(2).random
    values = [draw() for _ in range(40)]
    once = intervals({"x": values, "y": values})
    assert once["x"] == once["y"]
    alone = intervals({"y": values})["y"]  # other columns affect only the last bit of a sum
    assert (alone.low, alone.high) == pytest.approx((once["y"].low, once["y"].high), rel=1e-12)
    assert intervals({"x": values}, seed=1)["x"] != once["x"]
    monkeypatch.setattr(statistics, "_CELLS", 1000)  # 25 draws at a time, 400 times
    parts = intervals({"x": values})["x"]
    assert (parts.low, parts.high) == pytest.approx((once["x"].low, once["x"].high), rel=1e-12)


def test_columns_of_unequal_length_are_a_mistake() -> None:
    with pytest.raises(ValueError):
        intervals({"x": [1.0, 2.0], "y": [1.0]})
    with pytest.raises(ValueError):
        compare_paired([1.0], [1.0, 0.0])
    with pytest.raises(ValueError):
        overlap([True], [])


@pytest.mark.parametrize(
    ("better", "worse", "equal", "p"),
    [
        (0, 0, 5, 1.0),
        (5, 0, 0, 2 / 2**5),
        (1, 8, 90, 2 * (1 + 9) / 2**9),
        (10, 2, 0, 2 * (1 + 12 + 66) / 2**12),
    ],
)
def test_the_sign_test_by_hand(better: int, worse: int, equal: int, p: float) -> None:
    differences = [1.0] * better + [-1.0] * worse + [0.0] * equal
    assert sign_flip_test(differences) == (pytest.approx(p), "exact sign test")


def test_the_sign_test_of_thousands_of_questions_neither_overflows_nor_vanishes() -> None:
    p, _ = sign_flip_test([1.0] * 5200 + [-1.0] * 4800)
    z = (400 - 1) / 100  # with the correction for continuity
    assert p == pytest.approx(math.erfc(z / math.sqrt(2)), rel=0.01)
    assert sign_flip_test([1.0] * 2000)[0] == 0.0  # 2^-1999, too small for a float
    # .1 + .2 is not .3 in floats; the patterns (+, +, -) and (-, -, +) both sum to 0, like the observed one.
    assert sign_flip_test([0.1, 0.2, -0.3])[0] == 1.0


def test_few_differences_are_counted_and_many_are_drawn() -> None:
    differences = [0.5, 1.0, 0.25, -0.125, 0.0]
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in itertools.product((1, -1), repeat=5)
    ]
    exact = sum(value >= abs(sum(differences)) for value in sums) / len(sums)
    assert sign_flip_test(differences) == (pytest.approx(exact), "exact sign flip test")
    many = [1.0, 2.0] * 19 + [-1.0, -2.0] * 11
    p, name = sign_flip_test(many)
    assert name == "sign flip test, 10,000 draws"
    far = [math.comb(30, i) * math.comb(30, j) for i in range(31) for j in range(31) if abs(2 * i + 4 * j - 90) >= 24]
    exact = sum(far) / 2**60  # i of the ones and j of the twos are positive; about 6%
    error = math.sqrt(exact * (1 - exact) / 10_000)
    assert p == pytest.approx(exact, abs=9 * error)  # nine standard errors
    assert sign_flip_test(many, seed=0)[0] == p
    assert sign_flip_test([5.0 + d / 100 for d in many])[0] == 1 / 10_001  # never 0: the observed pattern counts


def test_two_runs_compared() -> None:
    first, second = [0.0, 0.0, 1.0, 0.0, None, 1.0], [1.0, 0.0, 1.0, 1.0, 1.0, None]
    found = compare_paired(first, second)
    assert found is not None
    assert (found.first, found.second, found.difference, found.count) == (0.25, 0.75, 0.5, 4)
    assert (found.low, found.high) == (0.0, 1.0) and (found.p, found.test) == (0.5, "exact sign test")
    turned = compare_paired(second, first)
    assert turned is not None and (turned.difference, turned.p) == (-0.5, 0.5)
    assert compare_paired([None, 1.0], [1.0, None]) is None


def test_recalled_by_only_one() -> None:
    found = overlap([True, True, False, False, True], [True, False, True, False, False])
    assert found is not None
    assert (found.both, found.only_first, found.only_second, found.neither) == (0.2, 0.4, 0.2, 0.2)
    assert found.count == 5 and overlap([], []) is None


def test_means_over_seeds_have_students_interval() -> None:
    found = seed_interval([0.5, 0.6, 0.7])
    assert (found.mean, found.count) == (pytest.approx(0.6), 3) and found.half == pytest.approx(4.303 * 0.1 / 3**0.5)
    assert str(found) == "0.600 ± 0.248" and str(seed_interval([0.5])) == "0.500"
    assert seed_interval([0.1, 0.9] * 8).half == pytest.approx(2.262 * (16 * 0.16 / 15) ** 0.5 / 4), (
        "more than the table has"
    )
    assert minimum_detectable_effect([0.1, 0.2, 0.3]) == pytest.approx((4.303 + 1.061) * 0.1 / 3**0.5)


def test_seeds_are_compared_as_single_values() -> None:
    """Of 2^n patterns of n signs two have equal signs, so that three agreeing seeds give .25."""
    found = compare_seeds([0.5, 0.6, 0.7], [0.9, 0.9, 0.9])
    assert (found.first, found.second, found.difference) == pytest.approx((0.6, 0.9, 0.3)) and found.count == 3
    half = 4.303 * 0.1 / 3**0.5  # Student's, two degrees of freedom
    assert (found.low, found.high) == pytest.approx((0.3 - half, 0.3 + half))
    assert (found.p, found.test) == (0.25, "exact sign flip test over seeds")
    # Sums of the patterns of .23, .01 and .72 are .96, .94, .50 and .48, each of two signs; .48 is the observed one.
    assert compare_seeds([0.0, 0.0, 0.0], [0.23, 0.01, -0.72]).p == 1.0
    assert compare_seeds([0.0, 0.0, 0.0], [0.3, 0.2, -0.1]).p == 0.5  # .4: +++, ++- and their opposites
    one = compare_seeds([0.5], [0.9])
    assert (one.low, one.high, one.p) == (None, None, 1.0)
    with pytest.raises(ValueError):
        compare_seeds([0.5], [0.9, 0.8])


@pytest.mark.parametrize("seeds", range(1, 12))
def test_the_least_p_value_is_that_of_seeds_that_agree(seeds: int) -> None:
    agree = compare_seeds([0.0] * seeds, [0.1 * (1 + n) for n in range(seeds)])
    assert least_p(seeds) == agree.p == 2 / 2**seeds
    assert (least_p(seeds) < 0.05) == (seeds > 5)


@pytest.mark.parametrize(("table", "probability"), [(T_975, 0.975), (T_800, 0.8)])
def test_students_quantiles(table: tuple[float, ...], probability: float) -> None:
    """Integrate Student's density up to each quantile of the table, by the trapezoid rule."""
    for degrees, quantile in enumerate(table, 1):
        factor = math.gamma((degrees + 1) / 2) / (math.sqrt(degrees * math.pi) * math.gamma(degrees / 2))
        at = [quantile * step / 20_000 for step in range(20_001)]
        density = [factor * (1 + t * t / degrees) ** (-(degrees + 1) / 2) for t in at]
        area = (sum(density) - (density[0] + density[-1]) / 2) * quantile / 20_000
        assert 0.5 + area == pytest.approx(probability, abs=2e-4), "to half a digit of the table"


def test_holms_correction_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.4, 0.6]) == pytest.approx([0.8, 0.8]) and holm([0.2]) == [0.2] and holm([]) == []


def test_a_two_way_interval_has_the_quantiles_of_all_draws() -> None:
    """Covers two seeds that differ in all questions, two questions that differ on all seeds, and no difference."""
    assert two_way_interval([[0.0, 0.0], [1.0, 1.0]]) == two_way_interval([[0.0, 1.0], [0.0, 1.0]]) == (0.0, 1.0)
    assert two_way_interval([[0.3, 0.3], [0.3, 0.3]]) == pytest.approx((0.3, 0.3))
    values = [[0.0, 1.0, 4.0], [2.0, 0.0, 0.0], [3.0, 3.0, 1.0]]
    draws = list(itertools.product(range(3), repeat=3))
    means = sorted(sum(values[s][q] for s in seeds for q in questions) / 9 for seeds in draws for questions in draws)
    low, high = two_way_interval(values, resamples=200_000)
    # Each quantile is where the share of draws below it is .025 or .975, to five standard errors of that share.
    error = 5 * math.sqrt(0.025 * 0.975 / 200_000)
    for share, quantile in ((0.025, low), (0.975, high)):
        below = sum(mean < quantile - 1e-9 for mean in means) / len(means)
        up_to = sum(mean <= quantile + 1e-9 for mean in means) / len(means)
        assert below - error <= share <= up_to + error
