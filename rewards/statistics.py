"""Statistics over questions and over seeds: intervals of means, and comparisons of two runs or two methods.

    interval     of a share of questions, Wilson's; of another mean the percentile bootstrap: questions drawn with
                 replacement, the mean of each draw, its 2.5% and 97.5%
    difference   second - first, question by question, with the interval of its mean and the p-value of a sign flip
                 test: under the null hypothesis every difference could as well have the other sign, so the p-value is
                 the share of sign patterns whose sum is at least as far from 0 as the observed one

If all differences that are not 0 have the same size (exact match), this test is the exact sign test, also known as
McNemar's. If the differences are few, all patterns are enumerated; otherwise some are drawn, and the observed one is
included.

None marks a question without a value (a compression ratio without evidence): it is drawn with the others and left out
of the mean of its draw. Only `holm` corrects for multiple comparisons.

A comparison over questions is between two given models. It says nothing about another training seed, which may shift
the results of all questions at once. With several seeds the seed is the unit: `compare_seeds` takes one mean per seed,
and `least_p` is the smallest possible p-value.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Values = Sequence[float | None]

RESAMPLES = 10_000
LEVEL = 0.95
ENUMERATED = 14  # limit on differences whose sign patterns (16,384) are all enumerated
_CELLS = 4_000_000  # limit on the size of a matrix in memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean over `count` questions and its interval; None if all values are equal."""

    mean: float
    low: float | None
    high: float | None
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Means of two runs over the `count` questions with a value in both, or of two methods over `count` seeds. second -
    first has an interval (None for one seed, and over questions if all differences are equal) and the p-value of
    `test`."""

    first: float
    second: float
    difference: float
    low: float | None
    high: float | None
    p: float
    test: str
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Shares of `count` questions recalled by both texts, by only one of them, or by neither."""

    both: float
    only_first: float
    only_second: float
    neither: float
    count: int


# Student's t at 97.5% and at 80%, with 1, 2, .. degrees of freedom.
T_975 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
T_800 = (1.376, 1.061, 0.978, 0.941, 0.920, 0.906, 0.896, 0.889, 0.883)
MOST_SEEDS = len(T_975) + 1  # with more seeds intervals are slightly too wide


@dataclass(frozen=True, slots=True)
class SeedMean:
    """A mean over `count` seeds, and half the width of its 95% interval; None for one seed."""

    mean: float
    half: float | None
    count: int

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + ("" if self.half is None else f" ± {self.half:.3f}")


def seed_interval(values: Sequence[float]) -> SeedMean:
    """Return the mean over runs with different seeds and Student's interval: mean +- t s / sqrt(n)."""
    half = T_975[min(len(values), MOST_SEEDS) - 2] * _standard_error(values) if len(values) > 1 else None
    return SeedMean(fmean(values), half, len(values))


def compare_seeds(first: Sequence[float], second: Sequence[float]) -> Difference:
    """Compare two methods by the means of their runs, paired by seed. The result has Student's 95% interval of second -
    first and the p-value of a sign flip test. first, second: one mean per seed, of equal length, not empty."""
    differences = [b - a for a, b in zip(first, second, strict=True)]
    found = seed_interval(differences)
    p, test = sign_flip_test(differences)
    return Difference(
        first=fmean(first),
        second=fmean(second),
        difference=found.mean,
        low=None if found.half is None else found.mean - found.half,
        high=None if found.half is None else found.mean + found.half,
        p=p,
        test=f"{test} over seeds",
        count=found.count,
    )


def least_p(seeds: int) -> float:
    """Return the smallest two-sided p-value of a sign flip test over `seeds` seeds. It is reached if all differences
    have the same sign: 2 of 2^seeds patterns. It is 0.25 for three seeds, and below 0.05 from six on."""
    return 2.0 ** (1 - seeds)


def minimum_detectable_effect(gaps: Sequence[float]) -> float:
    """Return the minimum detectable effect of a paired t-test with the number and spread of `gaps`. It is at 5% with a
    power of about .8 (.73 with two, .77 with three): (t_.975 + t_.8) s / sqrt(n). gaps: one per seed, two or more."""
    return (T_975[min(len(gaps), MOST_SEEDS) - 2] + T_800[min(len(gaps), MOST_SEEDS) - 2]) * _standard_error(gaps)


def holm(p_values: Sequence[float]) -> list[float]:
    """Return the p-values of several tests after Holm's correction, in the given order. The i-th smallest of m becomes
    (m - i + 1) times itself, at least the one before, at most 1. The chance that any of them is wrongly at or below a
    level is at most that level."""
    found, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[place]))
        found[place] = largest
    return found


def two_way_interval(values_SQ: Sequence[Sequence[float]], *, resamples: int = RESAMPLES) -> tuple[float, float]:
    """Return the 95% two-way bootstrap interval of a mean over seeds and questions. All seeds have the same questions;
    seeds and questions are both drawn with replacement, and each draw's mean is over the drawn pairs.

    It is too narrow for few seeds: if only seeds vary, its width is .39, .61, .76 and .81 of Student's with 3, 5, 8 and
    10 seeds. Questions are treated as independent."""
    values = np.array(values_SQ, np.float64)
    seeds, questions = values.shape
    generator = np.random.default_rng(0)
    chance_S, chance_Q = np.full(seeds, 1 / seeds), np.full(questions, 1 / questions)
    times_RS = generator.multinomial(seeds, chance_S, resamples)
    times_RQ = generator.multinomial(questions, chance_Q, resamples)
    means_R = ((times_RS @ values) * times_RQ).sum(1) / (seeds * questions)
    low, high = np.quantile(means_R, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _standard_error(values: Sequence[float]) -> float:
    return stdev(values) / math.sqrt(len(values))


def wilson(share: float, count: int, level: float = LEVEL) -> tuple[float, float]:
    """Return Wilson's interval of a share of `count` questions; for 0 of 8 it is 0 to 32%."""
    z = NormalDist().inv_cdf((1 + level) / 2)
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return max(middle - half, 0.0), min(middle + half, 1.0)


def intervals(
    columns: Mapping[str, Values],
    *,
    shares: Collection[str] = (),
    resamples: int = RESAMPLES,
    seed: int = 0,
    level: float = LEVEL,
) -> dict[str, Interval]:
    """Return the interval of each column's mean; a column without any value has none.

    columns: name -> values [Q], one per question and in the same order. shares: columns of values between 0 and 1,
    whose interval is Wilson's if all are 0 or 1. The draws depend on `seed` and are the same for all columns.
    """
    names = [name for name, values in columns.items() if any(value is not None for value in values)]
    if not names:
        return {}
    values_QM = np.array([[np.nan if v is None else v for v in columns[name]] for name in names], np.float64).T
    known_QM = np.isfinite(values_QM)
    drawn_RM = _bootstrap_means(np.where(known_QM, values_QM, 0.0), known_QM.astype(np.float64), resamples, seed)
    tail = (1 - level) / 2
    low_M, high_M = np.nanquantile(drawn_RM, [tail, 1 - tail], axis=0)
    found = {}
    for column, name in enumerate(names):
        known_K = values_QM[known_QM[:, column], column]
        mean, count = float(known_K.mean()), len(known_K)
        low: float | None = float(low_M[column])
        high: float | None = float(high_M[column])
        if name in shares and np.isin(known_K, (0, 1)).all():
            low, high = wilson(mean, count, level)
        elif (known_K == known_K[0]).all():
            low = high = None
        found[name] = Interval(mean=mean, low=low, high=high, count=count)
    return found


def compare_paired(first: Values, second: Values) -> Difference | None:
    """Compare two runs on the same questions, in the same order; None if no question has a value in both."""
    pairs = [(a, b) for a, b in zip(first, second, strict=True) if a is not None and b is not None]
    if not pairs:
        return None
    differences = [b - a for a, b in pairs]
    found = intervals({"": differences})[""]
    p, test = sign_flip_test(differences)
    return Difference(
        first=sum(a for a, _ in pairs) / len(pairs),
        second=sum(b for _, b in pairs) / len(pairs),
        difference=found.mean,
        low=found.low,
        high=found.high,
        p=p,
        test=test,
        count=len(pairs),
    )


def sign_flip_test(differences: Sequence[float], *, draws: int = RESAMPLES, seed: int = 0) -> tuple[float, str]:
    """Return the two-sided p-value of a mean difference of 0, and the name of the test (see the top of this file)."""
    sizes_N = np.array([abs(d) for d in differences if d], np.float64)
    if not len(sizes_N):
        return 1.0, "exact sign test"
    if sizes_N.min() == sizes_N.max():
        return _sign_test(sum(d > 0 for d in differences), len(sizes_N)), "exact sign test"
    # Sums of the same numbers in another order differ in their last bits, but must count as equal.
    found = abs(math.fsum(differences)) - 1e-12 * float(sizes_N.sum())
    if len(sizes_N) <= ENUMERATED:
        bits_SN = np.arange(2 ** len(sizes_N))[:, None] >> np.arange(len(sizes_N)) & 1
        return float((np.abs((2 * bits_SN - 1) @ sizes_N) >= found).mean()), "exact sign flip test"
    generator = np.random.default_rng(seed)
    extreme, done = 0, 0
    while done < draws:
        rows = min(draws - done, max(1, _CELLS // len(sizes_N)))
        signs_SN = 2.0 * generator.integers(0, 2, (rows, len(sizes_N))) - 1.0
        extreme += int((np.abs(signs_SN @ sizes_N) >= found).sum())
        done += rows
    return (1 + extreme) / (1 + draws), f"sign flip test, {draws:,} draws"


def overlap(first: Sequence[bool], second: Sequence[bool]) -> Overlap | None:
    """Return the shares of questions whose gold answers two texts recall; None without questions."""
    pairs = list(zip(first, second, strict=True))
    if not pairs:
        return None
    outcomes = ((True, True), (True, False), (False, True), (False, False))
    both, only_first, only_second, neither = (pairs.count(pair) / len(pairs) for pair in outcomes)
    return Overlap(both=both, only_first=only_first, only_second=only_second, neither=neither, count=len(pairs))


def _bootstrap_means(values_QM: Floats, known_QM: Floats, resamples: int, seed: int) -> Floats:
    """Return [R, M]: the mean of each column over the known values of a draw of Q questions; nan if none are known."""
    generator = np.random.default_rng(seed)
    questions = len(values_QM)
    means = []
    while resamples > 0:
        rows = min(resamples, max(1, _CELLS // questions))
        drawn_RQ = generator.integers(0, questions, (rows, questions)) + questions * np.arange(rows)[:, None]
        times_RQ = np.bincount(drawn_RQ.ravel(), minlength=rows * questions).reshape(rows, questions).astype(np.float64)
        counts_RM = times_RQ @ known_QM
        means.append(np.where(counts_RM > 0, times_RQ @ values_QM / np.maximum(counts_RM, 1), np.nan))
        resamples -= rows
    return np.concatenate(means)


def _sign_test(positive: int, count: int) -> float:
    """Return the two-sided p-value: twice the chance of as few of the rarer sign in `count` fair coins, at most 1."""
    patterns, term = 0, 1  # term: count choose i
    for i in range(min(positive, count - positive) + 1):
        patterns += term
        term = term * (count - i) // (i + 1)
    return min(1.0, patterns / (1 << (count - 1)))
