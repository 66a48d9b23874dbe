"""Moments in 8 bits: the values of the table, rounding to the nearest of them, and its error."""

import pytest
import torch

from thresher.engine.optim.adamw import BLOCK, blocks_of, code_table, dequantise, quantise

LENGTHS = (1, 63, BLOCK, 1025)


def values(count: int, signed: bool, seed: int = 0) -> torch.Tensor:
    """Return values over ten decades, as moments have."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, generator=generator) * 10.0 ** (-10 * torch.rand(count, generator=generator))
    return x if signed else x.abs()


def test_the_tables_are_dynamic_quantisations() -> None:
    signed, unsigned = code_table(True), code_table(False)
    assert len(signed) == 256 and len(unsigned) == 255
    for table in (signed, unsigned):
        assert bool((table[1:] > table[:-1]).all()) and table[-1] == 1
    # Both signs of 127 values, 0 and 1; the second moment has no 0.
    assert torch.equal(signed[:127], -signed[128:255].flip(0)) and signed[127] == 0
    assert unsigned[0] == pytest.approx(0.325e-6)
    for table, low in ((signed, 1), (unsigned, 2)):
        counts = [int(((table > 10.0 ** (e - 7)) & (table < 10.0 ** (e - 6))).sum()) for e in range(7)]
        assert counts == [low * 2**e for e in range(7)]
    assert torch.allclose(signed[191:255].diff(), torch.tensor(0.9 / 64), atol=1e-6)
    assert torch.allclose(unsigned[126:254].diff(), torch.tensor(0.9 / 128), atol=1e-6)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("count", LENGTHS)
def test_a_value_becomes_the_nearest_of_its_blocks(count: int, signed: bool) -> None:
    """Rows of `count` values are quantised independently."""
    x_RC = values(3 * count, signed).view(3, count)
    codes_RC, scale_RB = quantise(x_RC, signed)
    assert codes_RC.dtype == torch.uint8 and scale_RB.dtype == torch.float32
    assert codes_RC.shape == x_RC.shape and scale_RB.shape == (3, blocks_of(count))
    for row in range(3):
        alone = quantise(x_RC[row : row + 1], signed)
        assert torch.equal(alone[0][0], codes_RC[row]) and torch.equal(alone[1][0], scale_RB[row])
    x, found = x_RC[1], dequantise(codes_RC, scale_RB, signed)[1]
    for start in range(0, count, BLOCK):
        part, largest = x[start : start + BLOCK].double(), x[start : start + BLOCK].abs().max()
        distances = (part[:, None] - (code_table(signed).double() * largest.double())[None]).abs()
        error = (found[start : start + BLOCK].double() - part).abs()
        assert bool((error <= distances.min(1).values + 1e-7 * largest).all())  # bound: the nearest
        half = 0.45 / 64 if signed else 0.45 / 128
        assert bool((error <= half * largest * (1 + 1e-4)).all())  # bound: and float32's rounding of the table
        assert found[start : start + BLOCK].abs().max() == largest or signed  # negative: at most .993 of it
    again = quantise(found[None], signed)
    assert signed or torch.equal(again[0][0], codes_RC[1])


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_a_search(signed: bool) -> None:
    """At every edge, just above and below it, and everywhere else."""
    table = code_table(signed)
    edges = (table[1:] + table[:-1]) / 2
    above, beneath = (edges.nextafter(torch.tensor(end)) for end in (2.0, -2.0))
    x = torch.cat([edges, above, beneath, table, values(20_000, signed).clamp(-1, 1)])
    x = torch.nn.functional.pad(x, (0, -len(x) % (BLOCK - 1))).view(-1, BLOCK - 1)
    x = torch.nn.functional.pad(x, (0, 1), value=1.0)  # a scale of 1
    codes, scale = quantise(x, signed)
    assert bool((scale == 1).all()) and torch.equal(codes.int(), torch.bucketize(x, edges, out_int32=True))


def test_a_block_of_zeros_stays_zero_and_a_second_moment_never_becomes_one() -> None:
    x = torch.zeros(2 * BLOCK)
    x[BLOCK], x[BLOCK + 1] = 5.0, 1e-30
    for signed in (True, False):
        found = dequantise(*quantise(x[None], signed), signed)[0]
        assert not found[:BLOCK].any() and found[BLOCK] == 5
        assert found[BLOCK + 1] == 0 if signed else 0 < found[BLOCK + 1] < 2e-6
