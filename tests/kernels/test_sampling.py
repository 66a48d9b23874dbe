"""Tests that noise is a function of (seed, position, token), uniform and independent, and that draws follow softmax.

Nothing here is random: the hash gives the same figures everywhere, so that a limit of one in a thousand is fixed.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from batch_invariance import using_threads
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from thresher.kernels.noise import uniform_noise
from thresher.kernels.sampling import SamplingTensors, sample

LOGITS = torch.tensor([1.2, -0.3, 2.0, 0.0, -4.0, 0.7, 0.7, -1.0, 1.9, -2.0, 0.1, -0.5])
DRAWS = 20_000

# Ways in which draws differ: by seed alone, by position alone, by distant seeds, by both.
STREAMS: list[tuple[str, Callable[[int], tuple[int, int]]]] = [
    ("seeds in a row", lambda n: (n, 17)),
    ("positions in a row", lambda n: (3, n)),
    ("seeds of 63 bits", lambda n: (n * 0x5DEECE66D1234567 % 2**63, 4000)),
    ("seeds that differ in high bits", lambda n: (n << 40, 0)),
    ("a batch", lambda n: (n % 140, n // 140)),
]


def chi_square(counts: Tensor, expected: Tensor) -> float:
    """Return chi-square as a normal deviate (Wilson and Hilferty 1931): 3.09 is exceeded once in a thousand."""
    freedom = len(expected) - 1
    value = float(((counts - expected).square() / expected).sum())
    spread = 2 / (9 * freedom)
    return ((value / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def noises(seeds: Iterable[int], positions: Iterable[int], width: int) -> Tensor:
    return uniform_noise(torch.tensor(list(seeds)), torch.tensor(list(positions)), width)


def noise(seed: int, position: int, width: int = 64) -> Tensor:
    return noises([seed], [position], width)[0]


def draw(
    logits_BV: Tensor, seeds: Iterable[int], positions: Iterable[int], temperature: float
) -> tuple[Tensor, Tensor]:
    rules = SamplingTensors.uniform(temperature, len(logits_BV))
    return sample(logits_BV, torch.tensor(list(seeds)), torch.tensor(list(positions)), rules)


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    pairs = [(5, 0), (5, 1), (6, 0), (0, 5), (2**63 - 1, 9), (0, 0), (1, 2**20)]
    batch = noises([seed for seed, _ in pairs], [position for _, position in pairs], 1000)
    for (seed, position), u_V in zip(pairs, batch, strict=True):
        assert torch.equal(noise(seed, position, 1000), u_V)
        assert torch.equal(noise(seed, position, 37), u_V[:37]), "the width of the vocabulary matters"
    for row in range(len(pairs)):
        for other in range(row):
            assert (batch[row] == batch[other]).float().mean() < 0.01
    torch.manual_seed(0)
    state = torch.get_rng_state()
    noise(1, 1)
    assert torch.equal(torch.get_rng_state(), state)


def test_noise_is_what_it_was() -> None:
    """A recorded run can be repeated only as long as these numbers do not change."""
    assert noise(42, 7, 4).mul(2**24).tolist() == [12_751_441, 1_756_897, 8_263_305, 14_960_857]


@pytest.mark.parametrize("stream", [stream for _, stream in STREAMS], ids=[name for name, _ in STREAMS])
def test_noise_is_uniform_and_independent(stream: Callable[[int], tuple[int, int]]) -> None:
    seeds, positions = zip(*map(stream, range(DRAWS)), strict=True)
    u_NV = noises(seeds, positions, 16).double()
    bins = torch.histc(u_NV.flatten(), 64, 0, 1)
    assert chi_square(bins, torch.full((64,), u_NV.numel() / 64)) < 3.09
    for token in (0, 1, 15):  # each column by itself as well
        assert chi_square(torch.histc(u_NV[:, token], 20, 0, 1), torch.full((20,), DRAWS / 20)) < 3.09
    limit = 4 / math.sqrt(DRAWS)
    neighbours = [(u_NV[:, 0], u_NV[:, 1]), (u_NV[:, 3], u_NV[:, 11]), (u_NV[:-1, 2], u_NV[1:, 2])]
    for a, b in [*neighbours, (u_NV[:-7, 5], u_NV[7:, 5]), (u_NV[:-1, 0], u_NV[1:, 1])]:
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < limit  # bound: fixed numbers, the same on any CPU
        # Independent, and not merely uncorrelated: all cells of a 4 x 4 table are equally frequent.
        cells = torch.bincount((a * 4).long() * 4 + (b * 4).long(), minlength=16).double()
        assert chi_square(cells, torch.full((16,), len(a) / 16)) < 3.09


def test_noise_stays_inside_its_interval() -> None:
    """Over 39 million draws, which reach both ends: a 0 or a 1 would make an infinite sample."""
    lowest, highest = 1.0, 0.0
    for step in range(16):
        u_BV = noises(range(16), [step] * 16, 151_936)
        lowest, highest = min(lowest, float(u_BV.min())), max(highest, float(u_BV.max()))
    assert (lowest, highest) == (2.0**-24, 1 - 2.0**-24)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
@pytest.mark.parametrize("stream", [stream for _, stream in STREAMS], ids=[name for name, _ in STREAMS])
def test_what_is_drawn_follows_softmax(stream: Callable[[int], tuple[int, int]], temperature: float) -> None:
    seeds, positions = zip(*map(stream, range(DRAWS)), strict=True)
    ids_B, _ = draw(LOGITS.expand(DRAWS, -1), seeds, positions, temperature)
    expected = torch.softmax(LOGITS.double() / temperature, 0) * DRAWS
    counts = torch.bincount(ids_B, minlength=len(LOGITS)).double()
    common = expected >= 5  # the condition of the chi-square test; the rest is one class
    rest = torch.stack([counts[~common].sum(), expected[~common].sum()])
    counts, expected = counts[common], expected[common]
    if rest[1] > 0:
        counts, expected = torch.cat([counts, rest[:1]]), torch.cat([expected, rest[1:]])
    assert chi_square(counts, expected) < 3.09  # bound: fixed numbers; a rounding may move a draw of the 20,000


@pytest.mark.slow
def test_a_large_vocabulary_is_drawn_evenly() -> None:
    """With flat logits over Qwen's vocabulary the drawn ids are uniform and rarely repeat."""
    ids = torch.cat([draw(torch.zeros(16, 151_936), range(16), [step] * 16, 1.0)[0] for step in range(64)])
    assert chi_square(torch.histc(ids.double(), 16, 0, 151_936), torch.full((16,), 64.0)) < 3.09
    assert len(ids.unique()) > 1010


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
def test_log_probs_against_float64(temperature: float) -> None:
    logits_BV = torch.randn(50, 999, generator=torch.Generator().manual_seed(0)) * 6
    kept = logits_BV.clone()
    ids_B, logprobs_B = draw(logits_BV, range(50), range(50), temperature)
    truth_BV = torch.log_softmax(logits_BV.double() / (temperature or 1.0), -1)
    assert ids_B.dtype == torch.int64 and logprobs_B.dtype == torch.float32
    # Quotients, their difference and the result are about eight roundings of numbers of that size; a sum has 999 terms.
    off = 2.0**-24 * (8 * float(logits_BV.abs().max()) / (temperature or 1.0) + 999**0.5)
    torch.testing.assert_close(logprobs_B.double(), truth_BV.gather(1, ids_B[:, None])[:, 0], rtol=0, atol=off)
    assert torch.equal(logits_BV, kept), "the caller's logits were changed"


def test_greedy_takes_the_largest_whatever_the_seed() -> None:
    logits_BV = torch.randn(40, 300, generator=torch.Generator().manual_seed(1))
    for start in (0, 1000):
        ids_B, _ = draw(logits_BV, range(start, start + 40), [start] * 40, 0.0)
        assert torch.equal(ids_B, logits_BV.argmax(-1))


def test_a_low_temperature_approaches_greedy_and_a_high_one_does_not() -> None:
    logits_BV = torch.randn(400, 50, generator=torch.Generator().manual_seed(2))
    largest = logits_BV.argmax(-1)
    share = {}
    for temperature in (1e-6, 1.0, 10.0):
        ids_B, _ = draw(logits_BV, range(400), [0] * 400, temperature)
        share[temperature] = float((ids_B == largest).float().mean())
    assert share[1e-6] == 1 and 0.5 > share[1.0] > share[10.0]


def test_extreme_logits() -> None:
    logits_BV = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [float("-inf"), 0.0, float("-inf")]])
    for temperature in (0.0, 1.0):
        ids_B, logprobs_B = draw(logits_BV, [1, 2, 3], [4, 5, 6], temperature)
        assert ids_B[0] == 0 and ids_B[2] == 1
        torch.testing.assert_close(logprobs_B, torch.tensor([0.0, -math.log(3), 0.0]), rtol=0, atol=5e-4)


def test_a_draw_is_independent_of_batch_composition() -> None:
    logits_BV = torch.randn(65, 755, generator=torch.Generator().manual_seed(3)) * 3
    seeds, positions = [n * 7919 for n in range(65)], [n % 9 for n in range(65)]
    ids_B, logprobs_B = draw(logits_BV, seeds, positions, 0.7)
    for row in range(65):
        alone = draw(logits_BV[row : row + 1].clone(), [seeds[row]], [positions[row]], 0.7)
        assert alone[0][0] == ids_B[row] and alone[1][0] == logprobs_B[row]


# --- Rows with different sampling rules

RULES = [  # (temperature, top_k, top_p, min_p)
    (0.0, 0, 1.0, 0.0),
    (1.0, 0, 1.0, 0.0),
    (0.7, 0, 1.0, 0.0),
    (0.7, 5, 1.0, 0.0),
    (1.3, 0, 0.8, 0.0),
    (1.0, 0, 1.0, 0.05),
    (2.0, 40, 0.9, 0.01),
    (0.0, 3, 0.5, 0.5),
    (1.0, 1, 1.0, 0.0),
]


def rules_of(rows: list[tuple[float, int, float, float]]) -> SamplingTensors:
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    return SamplingTensors.of(torch.tensor(temperature), torch.tensor(top_k), torch.tensor(top_p), torch.tensor(min_p))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("width", "count"), [(755, 45), (40_000, 18)])
def test_a_row_draws_alike_alone_and_beside_any_other(width: int, count: int, threads: int) -> None:
    """Bits are equal; rows without a filter also equal those drawn by uniform rules."""
    logits_BV = torch.randn(count, width, generator=torch.Generator().manual_seed(4)) * 3
    rules = rules_of([RULES[row % len(RULES)] for row in range(count)])
    seeds_B, positions_B = torch.arange(count) * 7919, torch.arange(count) % 9
    with using_threads(threads):
        ids_B, logprobs_B = sample(logits_BV, seeds_B, positions_B, rules)
        for row in range(count):
            at = torch.tensor([row])
            temperature, *filters = RULES[row % len(RULES)]
            alone = SamplingTensors.uniform(temperature, 1) if filters == [0, 1.0, 0.0] else rules.take(at)
            found = sample(logits_BV[at], seeds_B[at], positions_B[at], alone)
            assert torch.equal(found[0], ids_B[at]) and torch.equal(found[1], logprobs_B[at])
        some = torch.tensor([4, 4, 0, 17, 3])
        found = sample(logits_BV[some], seeds_B[some], positions_B[some], rules.take(some))
        assert torch.equal(found[0], ids_B[some]) and torch.equal(found[1], logprobs_B[some])


@pytest.mark.parametrize("width", [30, 5000])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.fast_cases(9)
def test_what_filters_leave_is_drawn_from_with_the_same_noise(
    rule: tuple[float, int, float, float], width: int
) -> None:
    """Scores and log-probs in float64 over the kept columns, which test_rules.py compares with a reference."""
    count, (temperature, top_k, top_p, min_p) = 200, rule
    logits_BV = torch.randn(count, width, generator=torch.Generator().manual_seed(5)) * 2
    at_B = torch.arange(count)
    ids_B, logprobs_B = sample(logits_BV, at_B, at_B + 3, rules_of([rule] * count))
    z_BV = (logits_BV / (temperature or 1.0)).double()
    if temperature == 0:
        top_k, top_p, min_p = 0, 1.0, 0.0
    sorted_BV = z_BV.sort(1, descending=True).values
    if top_k:
        z_BV = z_BV.masked_fill(z_BV < sorted_BV[:, [min(top_k, width) - 1]], -torch.inf)
    p_BV, order_BV = z_BV.softmax(1).sort(1, descending=True)
    before_BV = p_BV.cumsum(1) - p_BV
    dropped_BV = (before_BV >= top_p) if top_p < 1 else torch.zeros_like(p_BV, dtype=torch.bool)
    dropped_BV |= p_BV < min_p * p_BV[:, :1]
    z_BV = z_BV.masked_fill(torch.zeros_like(dropped_BV).scatter(1, order_BV, dropped_BV), -torch.inf)
    noise_BV = -(-uniform_noise(at_B, at_B + 3, width).double().log()).log()
    scores_BV = z_BV + (noise_BV if temperature else 0.0)
    best_B = scores_BV.gather(1, ids_B[:, None])[:, 0]
    assert ((scores_BV.amax(1) - best_B) < 1e-5).all()
    assert (ids_B == scores_BV.argmax(1)).float().mean() > 0.99
    expected_B = z_BV.log_softmax(1).gather(1, ids_B[:, None])[:, 0]
    torch.testing.assert_close(logprobs_B.double(), expected_B, rtol=0, atol=2e-5)
    if top_k == 1:
        assert torch.equal(ids_B, logits_BV.argmax(1)) and not logprobs_B.any()


def test_filtered_draws_follow_the_renormalised_distribution() -> None:
    rule = (0.8, 6, 0.9, 0.1)
    at_B = torch.arange(DRAWS)
    ids_B, logprobs_B = sample(LOGITS.expand(DRAWS, -1), at_B, at_B % 11, rules_of([rule] * DRAWS))
    counts = torch.bincount(ids_B, minlength=len(LOGITS)).double()
    kept = counts > 0
    assert 2 < kept.sum() <= 6
    expected = torch.softmax((LOGITS.double() / 0.8).masked_fill(~kept, -torch.inf), 0)
    assert chi_square(counts[kept], expected[kept] * DRAWS) < 3.09
    torch.testing.assert_close(logprobs_B.double(), expected.log()[ids_B], rtol=0, atol=1e-6)


def test_float64_logits_stay_in_float64() -> None:
    logits_BV = torch.randn(20, 50, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    rules, at_B = rules_of([RULES[row % len(RULES)] for row in range(20)]), torch.arange(20)
    ids_B, logprobs_B = sample(logits_BV, at_B, at_B, rules)
    assert logprobs_B.dtype == torch.float64
    low_ids_B, low_logprobs_B = sample(logits_BV.float(), at_B, at_B, rules)
    assert torch.equal(ids_B, low_ids_B)
    torch.testing.assert_close(logprobs_B, low_logprobs_B.double(), rtol=0, atol=1e-5)


# --- Operations that a draw must not run


class Operations(TorchDispatchMode):
    """The names of the operations that torch is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name().partition(".")[0])
        return func(*args, **(kwargs or {}))


# Reads of a value, or of a value-dependent shape, by the host; tensors made outside torch (also views of an array).
READ_BACK = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero"}
MADE_OUTSIDE = "aten::lift_fresh"


def operations(count: int, temperature: float) -> list[str]:
    logits_BV, at_B = torch.randn(count, 300), torch.arange(count)
    with Operations() as seen:
        sample(logits_BV, at_B, at_B, SamplingTensors.uniform(temperature, count))
    return seen.names


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
def test_a_uniform_draw_makes_no_tensor_of_a_list_and_reads_nothing_back(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("tensor", "as_tensor", "asarray"):
        monkeypatch.setattr(torch, name, None)
    names = operations(16, temperature)
    assert names and not READ_BACK.intersection(names)
    assert operations(160, temperature) == names, "something is done row by row"


def test_the_test_of_operations_can_tell() -> None:
    with Operations() as seen:
        torch.tensor([1, 2]).sum().item()
        torch.ones(3).nonzero()
    assert {MADE_OUTSIDE, "aten::_local_scalar_dense", "aten::nonzero"} <= set(seen.names)


@pytest.mark.parametrize(
    "rows", [RULES[:1], RULES[1:2], RULES[:3], RULES], ids=["greedy", "plain", "mixed", "filtered"]
)
def test_off_the_cpu_no_value_is_needed(rows: list[tuple[float, int, float, float]]) -> None:
    """On the meta device, reading a value or making a shape from one is an error."""
    host = rules_of(rows)
    on_cpu = (host.temperature_B, host.top_k_B, host.top_p_B, host.min_p_B)
    rules = SamplingTensors.of(*(x.to("meta") for x in on_cpu), host=[x.numpy() for x in on_cpu])
    at_B = torch.empty(len(rows), dtype=torch.int64, device="meta")
    with Operations() as seen:
        ids_B, logprobs_B = sample(torch.empty(len(rows), 50, device="meta"), at_B, at_B, rules.take(at_B))
    assert ids_B.shape == logprobs_B.shape == (len(rows),)
    assert not {MADE_OUTSIDE, *READ_BACK}.intersection(seen.names)
    with pytest.raises((RuntimeError, NotImplementedError)):
        ids_B.sum().item()


def test_no_rows() -> None:
    for temperature in (0.0, 1.0):
        none_B = torch.zeros(0, dtype=torch.int64)
        ids_B, logprobs_B = sample(torch.zeros(0, 7), none_B, none_B, SamplingTensors.uniform(temperature, 0))
        assert ids_B.shape == logprobs_B.shape == (0,) and ids_B.dtype == torch.int64


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"logits": torch.zeros(3)}, r"logits are \[B, V\]"),
        ({"logits": torch.zeros(3, 0)}, "with a column at least"),
        ({"logits": torch.zeros(3, 5, dtype=torch.bfloat16)}, "bfloat16"),
        ({"seeds": torch.zeros(2, dtype=torch.int64)}, r"seeds are \(3,\)"),
        ({"seeds": torch.zeros(3, dtype=torch.int32)}, "seeds are .*int32"),
        ({"positions": torch.zeros(3, 1, dtype=torch.int64)}, "positions are"),
        ({"positions": torch.zeros(3, dtype=torch.int64, device="meta")}, "positions are .* on meta"),
        ({"rules": SamplingTensors.uniform(1.0, 4)}, "rules are for 3 rows on cpu, as the logits, not for 4"),
        ({"rules": SamplingTensors.uniform(1.0, 3, "meta")}, "on meta"),
    ],
)
def test_what_is_refused(arguments: dict[str, Any], message: str) -> None:
    at_B = torch.arange(3)
    given = {"logits": torch.zeros(3, 5), "seeds": at_B, "positions": at_B, "rules": SamplingTensors.uniform(1.0, 3)}
    with pytest.raises(ValueError, match=message):
        sample(*{**given, **arguments}.values())
