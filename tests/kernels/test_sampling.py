"""Noise is a function of (seed, position, token), uniform and independent; what is drawn follows softmax.

Nothing here is random: the hash gives the same figures everywhere, so a limit of one in a thousand is a fixed bar.
"""

import math
from collections.abc import Callable

import pytest
import torch

from thresher.kernels.sampling import sample, uniform_noise

LOGITS = torch.tensor([1.2, -0.3, 2.0, 0.0, -4.0, 0.7, 0.7, -1.0, 1.9, -2.0, 0.1, -0.5])
DRAWS = 20_000

# How draws are made to differ: by seed alone, by position alone, by seeds far apart, by both.
STREAMS: list[tuple[str, Callable[[int], tuple[int, int]]]] = [
    ("seeds in a row", lambda n: (n, 17)),
    ("positions in a row", lambda n: (3, n)),
    ("seeds of 63 bits", lambda n: (n * 0x5DEECE66D1234567 % 2**63, 4000)),
    ("seeds that differ in high bits", lambda n: (n << 40, 0)),
    ("a batch", lambda n: (n % 140, n // 140)),
]


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """As a standard normal deviate (Wilson and Hilferty 1931): 3.09 is exceeded once in a thousand."""
    freedom = len(expected) - 1
    value = float(((counts - expected).square() / expected).sum())
    spread = 2 / (9 * freedom)
    return ((value / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread)


def noise(seed: int, position: int, width: int = 64) -> torch.Tensor:
    return uniform_noise([seed], [position], width, "cpu")[0]


def test_noise_depends_on_seed_position_and_token_alone() -> None:
    pairs = [(5, 0), (5, 1), (6, 0), (0, 5), (2**63 - 1, 9), (0, 0), (1, 2**20)]
    batch = uniform_noise([seed for seed, _ in pairs], [position for _, position in pairs], 1000, "cpu")
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
    """A recorded run is repeated only as long as these numbers stay."""
    assert noise(42, 7, 4).mul(2**24).tolist() == [12_751_441, 1_756_897, 8_263_305, 14_960_857]


@pytest.mark.parametrize("stream", [stream for _, stream in STREAMS], ids=[name for name, _ in STREAMS])
def test_noise_is_uniform_and_independent(stream: Callable[[int], tuple[int, int]]) -> None:
    seeds, positions = zip(*map(stream, range(DRAWS)), strict=True)
    u_NV = uniform_noise(list(seeds), list(positions), 16, "cpu").double()
    bins = torch.histc(u_NV.flatten(), 64, 0, 1)
    assert chi_square(bins, torch.full((64,), u_NV.numel() / 64)) < 3.09
    for token in (0, 1, 15):  # each column by itself, too
        assert chi_square(torch.histc(u_NV[:, token], 20, 0, 1), torch.full((20,), DRAWS / 20)) < 3.09
    limit = 4 / math.sqrt(DRAWS)
    neighbours = [(u_NV[:, 0], u_NV[:, 1]), (u_NV[:, 3], u_NV[:, 11]), (u_NV[:-1, 2], u_NV[1:, 2])]
    for a, b in [*neighbours, (u_NV[:-7, 5], u_NV[7:, 5]), (u_NV[:-1, 0], u_NV[1:, 1])]:
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < limit
        # Independent, and not merely uncorrelated: all cells of a 4 x 4 table are alike.
        cells = torch.bincount((a * 4).long() * 4 + (b * 4).long(), minlength=16).double()
        assert chi_square(cells, torch.full((16,), len(a) / 16)) < 3.09


def test_noise_stays_inside_its_interval() -> None:
    """Over 39 million draws, which hit both ends: a 0 or a 1 would make an infinite sample."""
    lowest, highest = 1.0, 0.0
    for step in range(16):
        u_BV = uniform_noise(list(range(16)), [step] * 16, 151_936, "cpu")
        lowest, highest = min(lowest, float(u_BV.min())), max(highest, float(u_BV.max()))
    assert (lowest, highest) == (2.0**-24, 1 - 2.0**-24)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 1.7])
@pytest.mark.parametrize("stream", [stream for _, stream in STREAMS], ids=[name for name, _ in STREAMS])
def test_what_is_drawn_follows_softmax(stream: Callable[[int], tuple[int, int]], temperature: float) -> None:
    seeds, positions = zip(*map(stream, range(DRAWS)), strict=True)
    ids_B, _ = sample(LOGITS.expand(DRAWS, -1), list(seeds), list(positions), temperature)
    expected = torch.softmax(LOGITS.double() / temperature, 0) * DRAWS
    counts = torch.bincount(ids_B, minlength=len(LOGITS)).double()
    common = expected >= 5  # the test's own condition; the rest is one class
    rest = torch.stack([counts[~common].sum(), expected[~common].sum()])
    counts, expected = counts[common], expected[common]
    if rest[1] > 0:
        counts, expected = torch.cat([counts, rest[:1]]), torch.cat([expected, rest[1:]])
    assert chi_square(counts, expected) < 3.09


def test_a_large_vocabulary_is_drawn_evenly() -> None:
    """Flat logits over Qwen's width: the ids that come out are uniform, and rarely the same one twice."""
    ids = torch.cat([sample(torch.zeros(16, 151_936), list(range(16)), [step] * 16, 1.0)[0] for step in range(64)])
    assert chi_square(torch.histc(ids.double(), 16, 0, 151_936), torch.full((16,), 64.0)) < 3.09
    assert len(ids.unique()) > 1010


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 2.0])
def test_log_probs_against_float64(temperature: float) -> None:
    logits_BV = torch.randn(50, 999, generator=torch.Generator().manual_seed(0)) * 6
    kept = logits_BV.clone()
    ids_B, logprobs_B = sample(logits_BV, list(range(50)), list(range(50)), temperature)
    truth_BV = torch.log_softmax(logits_BV.double() / (temperature or 1.0), -1)
    assert ids_B.dtype == torch.int64 and logprobs_B.dtype == torch.float32
    torch.testing.assert_close(logprobs_B.double(), truth_BV.gather(1, ids_B[:, None])[:, 0], rtol=0, atol=2e-5)
    assert torch.equal(logits_BV, kept), "the caller's logits were changed"


def test_greedy_takes_the_largest_whatever_the_seed() -> None:
    logits_BV = torch.randn(40, 300, generator=torch.Generator().manual_seed(1))
    for start in (0, 1000):
        ids_B, _ = sample(logits_BV, list(range(start, start + 40)), [start] * 40, 0.0)
        assert torch.equal(ids_B, logits_BV.argmax(-1))


def test_a_low_temperature_approaches_greedy_and_a_high_one_does_not() -> None:
    logits_BV = torch.randn(400, 50, generator=torch.Generator().manual_seed(2))
    largest = logits_BV.argmax(-1)
    share = {}
    for temperature in (1e-3, 1.0, 10.0):
        ids_B, _ = sample(logits_BV, list(range(400)), [0] * 400, temperature)
        share[temperature] = float((ids_B == largest).float().mean())
    assert share[1e-3] > 0.98 > 0.4 > share[1.0] > share[10.0]


def test_extreme_logits() -> None:
    logits_BV = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [float("-inf"), 0.0, float("-inf")]])
    for temperature in (0.0, 1.0):
        ids_B, logprobs_B = sample(logits_BV, [1, 2, 3], [4, 5, 6], temperature)
        assert ids_B[0] == 0 and ids_B[2] == 1
        torch.testing.assert_close(logprobs_B, torch.tensor([0.0, -math.log(3), 0.0]), rtol=0, atol=5e-4)


def test_a_draw_is_independent_of_batch_composition() -> None:
    logits_BV = torch.randn(65, 755, generator=torch.Generator().manual_seed(3)) * 3
    seeds, positions = [n * 7919 for n in range(65)], [n % 9 for n in range(65)]
    ids_B, logprobs_B = sample(logits_BV, seeds, positions, 0.7)
    for row in range(65):
        alone = sample(logits_BV[row : row + 1].clone(), [seeds[row]], [positions[row]], 0.7)
        assert alone[0][0] == ids_B[row] and alone[1][0] == logprobs_B[row]
