"""Noise as a function of (seed, position, token): the hash, and the Gumbel variable computed from it.

    g = -log(-log u),    u = (bits + 1/2) / 2^23 in (0, 1),    bits: 23 of a 32-bit hash of token and key

With 23 bits g is at most 16.6. A token of probability p against one that has the rest is drawn with .999 p at p = 1e-6,
.94 p at 1e-7 and .03 p at 1e-8, so tokens below 1e-8 are practically never drawn.

Seed and position are folded into a key of 64 bits, and its two words into the hash of each token. torch's int32
(`uniform_noise`, on any device) and NumPy's uint32 (`minus_noise`, on a CPU) give the same integers. uint32 shifts
without keeping a sign, which needs fewer passes.

Axes: B sequences that draw a token, V vocabulary, E single columns of several rows (docs/notation.md).
"""

from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# The noise of the largest u, 1 - 2^-24, as computed in float32.
LARGEST_NOISE = 16.63553237915039


def _signed(x: int, bits: int) -> int:
    return x - (1 << bits) if x >= 1 << bits - 1 else x


# Multipliers, as signed integers, which torch needs.
GOLDEN_32, GOLDEN_64 = _signed(0x9E3779B1, 32), _signed(0x9E3779B97F4A7C15, 64)
GOLDEN_UPPER, GOLDEN_LOWER = 0x9E3779B9, 0x7F4A7C15
FACTORS_32 = _signed(0x7FEB352D, 32), _signed(0x846CA68B, 32)
FACTORS_64 = _signed(0xBF58476D1CE4E5B9, 64), _signed(0x94D049BB133111EB, 64)
# The bits of 1.0. With 23 random bits below them they are a float in [1, 2); subtracting DOWN gives u without rounding.
ONE, DOWN = 0x3F800000, 1 - 2.0**-24

Ints = TypeVar("Ints", Tensor, npt.NDArray[np.int64])
Words = npt.NDArray[np.uint32]


def _shifted(x: Ints, bits: int) -> Ints:
    """Return x >> bits as for unsigned 64-bit integers; int64 would keep the sign."""
    return x >> bits & (1 << 64 - bits) - 1


def _mix(x: Ints) -> Ints:
    """Apply the rest of a 64-bit finaliser (multiply and xor-shift) after its first xor-shift."""
    x = x * FACTORS_64[0]
    x = (x ^ _shifted(x, 27)) * FACTORS_64[1]
    return x ^ _shifted(x, 31)


def row_keys(seeds_B: Ints, positions_B: Ints) -> Ints:
    """Combine (seed, position) into one key of 64 bits, int64. Positions from 0 to 2^31 - 2."""
    step_B = positions_B + 1
    # Recorded noise was computed with the whole product of position and constant, whose upper word int64 cannot hold.
    upper_B = (step_B * GOLDEN_UPPER + (step_B * GOLDEN_LOWER >> 32)) >> 32
    x_B = _mix(seeds_B ^ _shifted(seeds_B, 30)) ^ (step_B * GOLDEN_64)
    return _mix(x_B ^ _shifted(x_B, 30) ^ (upper_B << 34))


def uniform_noise(seeds_B: Tensor, positions_B: Tensor, vocab_size: int) -> Tensor:
    """Compute u [B, V] float32 in (0, 1) from each row's seed and position (int64) and the token id.

    u has 23 bits (24 and the half would round to 1). The result is on the seeds' device."""

    def shifted(x: Tensor, bits: int) -> Tensor:  # of 32 unsigned bits, in wrapping int32
        return x.bitwise_right_shift(bits).bitwise_and_((1 << 32 - bits) - 1)

    key_B = row_keys(seeds_B, positions_B)
    low_B1, high_B1 = (key_B << 32 >> 32).int()[:, None], (key_B >> 32).int()[:, None]
    token_V = torch.arange(vocab_size, dtype=torch.int32, device=seeds_B.device) * GOLDEN_32
    # The first xor-shift is linear, so it is applied to key and token before they are combined.
    x_BV = (low_B1 ^ shifted(low_B1, 16)) ^ (token_V ^ shifted(token_V, 16))
    x_BV.mul_(FACTORS_32[0]).add_(high_B1)
    x_BV.bitwise_xor_(shifted(x_BV, 15)).mul_(FACTORS_32[1]).add_(high_B1)
    x_BV.bitwise_xor_(shifted(x_BV, 16)).bitwise_right_shift_(9).bitwise_and_(0x7FFFFF)
    return x_BV.bitwise_or_(ONE).view(torch.float32).sub_(DOWN)


def minus_gumbel_(u: Tensor) -> Tensor:
    """Turn u into -g in place. (z - -g has the bits of z + g, and saves a pass.)"""
    return u.log_().neg_().log_()


class Keys(NamedTuple):
    """The two words of each row's key, the low word after its first xor-shift."""

    low_B: Words
    high_B: Words


def host_keys(seeds_B: Tensor, positions_B: Tensor) -> Keys:
    key_B = row_keys(seeds_B.numpy(), positions_B.numpy())
    low_B = key_B.astype(np.uint32)
    return Keys(low_B ^ low_B >> np.uint32(16), (key_B >> 32).astype(np.uint32))


def _token_words(tokens: Words) -> Words:
    words = tokens * np.uint32(GOLDEN_32 % 2**32)
    return words ^ words >> np.uint32(16)


@lru_cache(maxsize=2)
def all_token_words(columns: int) -> Words:
    """Return every token's part of the hash, after the first xor-shift."""
    words_V = _token_words(np.arange(columns, dtype=np.uint32))
    words_V.flags.writeable = False
    return words_V


class HashBuffers:
    """Buffers of `minus_noise`, float32 [..], with its views of the same memory. Both are overwritten."""

    def __init__(self, result: Tensor, spare: Tensor) -> None:
        self.result, self.whole = result, result.view(torch.int32)
        self.bits: Words = result.numpy().view(np.uint32)
        self.spare: Words = spare.numpy().view(np.uint32)


def minus_noise(low: Words, high: Words, words: Words, buffers: HashBuffers) -> Tensor:
    """Compute -g, float32 in the buffers' memory; the operands broadcast to its shape."""
    x, spare, whole = buffers.bits, buffers.spare, buffers.whole
    addend = torch.from_numpy(high.view(np.int32))
    np.bitwise_xor(low, words, out=x)
    for shift, factor in zip((15, 16), FACTORS_32, strict=True):
        torch.add(addend, whole, alpha=factor, out=whole)
        np.bitwise_xor(x, np.right_shift(x, np.uint32(shift), out=spare), out=x)
    np.right_shift(x, np.uint32(9), out=x)
    np.bitwise_or(x, np.uint32(ONE), out=x)
    return minus_gumbel_(buffers.result.sub_(DOWN))


def minus_noise_at(keys: Keys, rows_E: npt.NDArray[np.int64], ids_E: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
    """Compute -g [E] of single columns, with the same bits, because torch's logarithm depends only on the number."""
    buffers = HashBuffers(*torch.empty((2, len(rows_E))))
    return minus_noise(keys.low_B[rows_E], keys.high_B[rows_E], _token_words(ids_E.astype(np.uint32)), buffers).numpy()
