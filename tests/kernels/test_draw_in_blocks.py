"""Tests that a CPU's draw in blocks gives the token of the dense draw, bit for bit, for any distribution and cuts."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from batch_invariance import using_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thresher.kernels import sampling as blocks
from thresher.kernels.noise import LARGEST_NOISE, minus_gumbel_, uniform_noise
from thresher.kernels.sampling import SamplingTensors, draw_dense, sample

INFINITY = torch.inf
# Shapes of the logits. Each makes [B, V] from a generator.
SHAPES: dict[str, Callable[[int, int, torch.Generator], Tensor]] = {
    "flat": lambda b, v, g: torch.randn(b, v, generator=g),
    "spread": lambda b, v, g: torch.randn(b, v, generator=g) * 8,
    "equal": lambda b, v, g: torch.zeros(b, v),
    "in steps": lambda b, v, g: torch.randint(-2, 3, (b, v), generator=g).float() * 5,
    "two alike": lambda b, v, g: torch.randint(0, 2, (b, v), generator=g).float() * 1e4,
    "large": lambda b, v, g: torch.randn(b, v, generator=g) + 1e7,
    "very large": lambda b, v, g: torch.randn(b, v, generator=g) * 1e30,
    "tiny": lambda b, v, g: torch.randn(b, v, generator=g) * 1e-30,
    "holes": lambda b, v, g: torch.randn(b, v, generator=g).masked_fill(torch.rand(b, v, generator=g) < 0.7, -INFINITY),
    "peaked": lambda b, v, g: torch.randn(b, v, generator=g).index_fill(1, torch.tensor([v // 3, v // 2]), 25.0),
    "mixed": lambda b, v, g: torch.randn(b, v, generator=g) * torch.linspace(0, 12, b)[:, None],
    "no number": lambda b, v, g: torch.randn(b, v, generator=g).index_fill(1, torch.tensor([v // 2]), torch.nan),
    "infinite": lambda b, v, g: torch.randn(b, v, generator=g).index_fill(1, torch.tensor([v // 2]), INFINITY),
    "nothing": lambda b, v, g: torch.full((b, v), -INFINITY),
}


def as_dense(logits_BV: Tensor, seeds_B: Tensor, positions_B: Tensor, rules: SamplingTensors) -> None:
    with using_threads(1):
        ids_B, logprobs_B = draw_dense(logits_BV, seeds_B, positions_B, rules)
    found = sample(logits_BV, seeds_B, positions_B, rules)
    assert torch.equal(found[0], ids_B)
    assert torch.equal(found[1].view(torch.int32), logprobs_B.view(torch.int32)) or (
        torch.equal(found[1].isnan(), logprobs_B.isnan())
        and torch.equal(found[1][~found[1].isnan()], logprobs_B[~logprobs_B.isnan()])
    )


@pytest.mark.parametrize("share", [0.0, 1 / 8, 1.0], ids=["never pruned", "pruned if few", "always pruned"])
@pytest.mark.parametrize("name", SHAPES)
@given(
    count=st.integers(1, 9),
    width=st.sampled_from([1, 2, 3, 15, 16, 17, 40, 755]),
    block=st.sampled_from([1, 100, 1 << 17]),
    seed=st.integers(0, 2**63 - 1),
    temperature=st.sampled_from([1.0, 0.3, 1.7, 0.0, None]),
)
@settings(max_examples=25, deadline=None)
@pytest.mark.fast_cases(14)
def test_as_dense(
    name: str, share: float, count: int, width: int, block: int, seed: int, temperature: float | None
) -> None:
    generator = torch.Generator().manual_seed(seed % 2**31)
    logits_BV = SHAPES[name](count, width, generator)
    seeds_B, positions_B = seed - torch.arange(count) * 977, torch.arange(count) + seed % 1000
    rules = SamplingTensors.uniform(temperature or 0.0, count)
    if temperature is None:
        off_B = torch.zeros(count)
        rules = SamplingTensors.of(torch.arange(count) % 3 * 0.6, off_B.long(), torch.ones(count), off_B)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "PRUNED_FROM", 1)
        patch.setattr(blocks, "PRUNED_SHARE", share)
        patch.setattr(blocks, "BLOCK", block)
        as_dense(logits_BV, seeds_B, positions_B, rules)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["flat", "peaked", "spread", "in steps"])
def test_as_dense_with_a_large_vocabulary(name: str, threads: int) -> None:
    logits_BV = SHAPES[name](3, 151_936, torch.Generator().manual_seed(1))
    with using_threads(threads):
        for temperature in (1.0, 0.7):
            as_dense(
                logits_BV,
                torch.tensor([1, 2**62, 77]),
                torch.tensor([5, 6, 2**20]),
                SamplingTensors.uniform(temperature, 3),
            )


def test_noise_is_computed_for_few_columns_where_few_can_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """For logits without a peak it is computed for all columns."""
    computed: list[int] = []
    for name in ("minus_noise", "minus_noise_at"):
        real = getattr(blocks, name)

        def count(*arguments: object, real: Callable[..., Tensor] = real) -> Tensor:
            computed.append(len(real(*arguments).reshape(-1)))
            return real(*arguments)

        monkeypatch.setattr(blocks, name, count)
    for shape, most, least in (("peaked", 0.02, 0.0), ("flat", 1.01, 1.0)):
        logits_BV = SHAPES[shape](5, 20_000, torch.Generator().manual_seed(2))
        computed.clear()
        sample(logits_BV, torch.arange(5), torch.arange(5), SamplingTensors.uniform(1.0, 5))
        assert least <= sum(computed) / logits_BV.numel() <= most


# (seed, position, token) whose u is the largest possible value.
LUCKIEST = [(13, 9, 2774), (10, 14, 85_197), (8, 15, 106_766)]


@pytest.mark.parametrize(("seed", "position", "token"), LUCKIEST)
@pytest.mark.parametrize("height", [0.0, 3.3, -700.0, 1e5, 2.0**17 + 8])  # the last: z is rounded finer than the score
@pytest.mark.parametrize("away", [-50, 50], ids=["a tie goes to the other", "a tie goes to it"])
@pytest.mark.fast_cases(6)
def test_a_column_at_the_bound_itself(seed: int, position: int, token: int, height: float, away: int) -> None:
    """The column with the largest noise, from a few roundings below the logit that it needs to win to a few above."""
    width, top = token + 3000, token + away
    seeds_B, positions_B = torch.tensor([seed]), torch.tensor([position])
    minus_g_V = minus_gumbel_(uniform_noise(seeds_B, positions_B, width))[0]
    assert minus_g_V[token] == -LARGEST_NOISE
    z = torch.tensor(height) - minus_g_V[top] - LARGEST_NOISE
    for _ in range(20):
        z = torch.nextafter(z, torch.tensor(-INFINITY))
    drawn = []
    for _ in range(40):
        logits_BV = torch.full((1, width), -INFINITY)
        logits_BV[0, top], logits_BV[0, token] = height, z
        as_dense(logits_BV, seeds_B, positions_B, SamplingTensors.uniform(1.0, 1))
        drawn.append(int(sample(logits_BV, seeds_B, positions_B, SamplingTensors.uniform(1.0, 1))[0]))
        z = torch.nextafter(z, torch.tensor(INFINITY))
    assert drawn[0] == top and drawn[-1] == token, "the bound was not crossed"


def test_of_equal_scores_the_lowest_id_wins() -> None:
    """The logits are so large that rounding loses the noise; each of several rows has its own candidates."""
    logits_BV = torch.full((4, 9000), -1e30)
    for row, columns in enumerate(([8000, 17, 400], [8999], [5, 4], [1, 0, 2])):
        logits_BV[row, columns] = 1e30
    ids_B, _ = sample(logits_BV, torch.arange(4), torch.arange(4), SamplingTensors.uniform(1.0, 4))
    assert ids_B.tolist() == [17, 8999, 4, 0]


def test_threads_of_a_program_do_not_share_scratch() -> None:
    logits = [torch.randn(16, 755, generator=torch.Generator().manual_seed(n)) for n in range(24)]

    def draw(logits_BV: Tensor) -> tuple[Tensor, Tensor]:
        return sample(logits_BV, torch.arange(16), torch.arange(16), SamplingTensors.uniform(0.9, 16))

    alone = list(map(draw, logits))
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for found, expected in zip(pool.map(draw, logits), alone, strict=True):
                assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_scratch_made_under_inference_mode_serves_outside_it() -> None:
    logits_BV, at_B = torch.randn(3, 421, generator=torch.Generator().manual_seed(0)), torch.arange(3)
    rules = SamplingTensors.uniform(0.5, 3)
    with torch.inference_mode():
        inside = sample(logits_BV, at_B, at_B, rules)
    outside = sample(logits_BV.requires_grad_(), at_B, at_B, rules)
    assert torch.equal(inside[0], outside[0]) and torch.equal(inside[1], outside[1])
    assert not outside[1].requires_grad
