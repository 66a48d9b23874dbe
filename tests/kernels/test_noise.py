"""Tests that the hash has the recorded bits, in torch and in NumPy, and that its noise stays within its bound."""

import numpy as np
import pytest
import torch
from batch_invariance import using_threads
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from thresher.kernels.noise import (
    LARGEST_NOISE,
    HashBuffers,
    all_token_words,
    host_keys,
    minus_gumbel_,
    minus_noise,
    minus_noise_at,
    row_keys,
    uniform_noise,
)

ALL_BITS = 2**23
SEEDS = [0, 1, 5, 2**31, 2**32 - 1, 2**40 + 3, 2**63 - 1, 0x5DEECE66D1234567]
POSITIONS = [0, 1, 6, 7, 2**20, 2**31 - 2, 4000, 17]


def mixed(x: int) -> int:
    """Return the hash of recorded noise: Python integers, not cut to 64 bits before the first xor-shift."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & (1 << 64) - 1
    return x ^ (x >> 31)


def key_of(seed: int, position: int) -> int:
    return mixed(mixed(seed) ^ (position + 1) * 0x9E3779B97F4A7C15)


def every_u() -> Tensor:
    return torch.arange(ALL_BITS, dtype=torch.int32).float().add_(0.5).mul_(2.0**-23)


@given(st.lists(st.tuples(st.integers(0, 2**63 - 1), st.integers(0, 2**31 - 2)), min_size=1, max_size=30))
@settings(max_examples=100, deadline=None)
def test_keys_are_those_of_python_integers(pairs: list[tuple[int, int]]) -> None:
    pairs += list(zip(SEEDS, POSITIONS, strict=True))
    seeds_B, positions_B = (torch.tensor(column) for column in zip(*pairs, strict=True))
    expected = [key_of(seed, position) for seed, position in pairs]
    assert [key % 2**64 for key in row_keys(seeds_B, positions_B).tolist()] == expected
    assert [key % 2**64 for key in row_keys(seeds_B.numpy(), positions_B.numpy()).tolist()] == expected


@pytest.mark.parametrize("width", [1, 2, 15, 16, 17, 755, 4097])
@pytest.mark.parametrize("count", [1, 2, 8])
def test_numpy_makes_the_same_noise_as_torch(count: int, width: int) -> None:
    seeds_B, positions_B = torch.tensor(SEEDS[:count]), torch.tensor(POSITIONS[:count])
    expected_BV = minus_gumbel_(uniform_noise(seeds_B, positions_B, width))
    keys = host_keys(seeds_B, positions_B)
    buffers = HashBuffers(*torch.full((2, count, width), torch.nan))
    found_BV = minus_noise(keys.low_B[:, None], keys.high_B[:, None], all_token_words(width), buffers)
    assert torch.equal(found_BV, expected_BV)
    rows_E, ids_E = np.divmod(np.arange(count * width)[:: 1 + width // 40], width)
    assert np.array_equal(minus_noise_at(keys, rows_E, ids_E), expected_BV.numpy()[rows_E, ids_E])


def test_u_is_the_hash_in_the_middle_of_its_step() -> None:
    """All 23 bits occur evenly, and the float of given bits is (bits + 1/2) / 2^23 exactly."""
    u_V = uniform_noise(torch.tensor([3]), torch.tensor([4]), 100_000)[0]
    bits_V = (u_V.double() * ALL_BITS - 0.5).long()
    assert torch.equal(every_u()[bits_V], u_V)
    for bit in range(23):
        assert 0.48 < float((bits_V >> bit & 1).double().mean()) < 0.52


def test_the_largest_noise_is_what_the_bound_says() -> None:
    """Over all possible u. Otherwise a column that would win could be dropped."""
    minus_g = minus_gumbel_(every_u())
    assert float(minus_g.min()) == -LARGEST_NOISE
    assert int(minus_g.argmin()) == ALL_BITS - 1


@pytest.mark.bits
@pytest.mark.parametrize("threads", [1, 2])
def test_the_logarithm_depends_on_nothing_but_its_number(threads: int) -> None:
    """Place, length, alignment and threads do not matter: noise of single columns has the bits of whole rows."""
    with using_threads(threads):
        u = every_u()
        whole = minus_gumbel_(u.clone())
        for turned in (lambda x: x.flip(0), lambda x: x.view(2**11, -1).t().reshape(-1)):
            assert torch.equal(minus_gumbel_(turned(u)), turned(whole))
        memory = torch.empty(4096)
        for length in [*range(1, 40), 63, 64, 65, 757, 2049]:
            for offset in (0, 1, 3, 7, 16):
                for start in range(length, ALL_BITS - length, ALL_BITS // 7):
                    part = memory[offset : offset + length].copy_(u[start : start + length])
                    assert torch.equal(minus_gumbel_(part), whole[start : start + length]), (length, offset, start)
