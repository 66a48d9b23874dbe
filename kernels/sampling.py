"""Sampling by the Gumbel-max trick, with noise that is a function and not a stream.

    token = argmax_v ( z[v] / temperature + g(seed, position, v) )        g = -log(-log u),  u uniform in (0, 1)

`u` is a hash of (seed, position, token), so a sample depends on nothing else: not on the batch it was drawn in, nor on
how often anything was drawn before it. Greedy decoding is temperature 0. The logits come from `head_logits`.

Axes: B sequences that draw a token, M the same filled up, H hidden, V vocabulary (docs/notation.md).
"""

import torch

from thresher.kernels.matmul import compute_dtype, fill_rows, logits_product

_MASK = 0xFFFFFFFF


def _mix(x: int) -> int:
    """A 64-bit finaliser (multiply and xor-shift), for folding (seed, position) into one key of 64 bits."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & (1 << 64) - 1
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & (1 << 64) - 1
    return x ^ (x >> 31)


def _signed(x: int) -> int:
    return x - (1 << 32) if x >= 1 << 31 else x


def uniform_noise(seeds: list[int], positions: list[int], vocab_size: int, device: torch.device | str) -> torch.Tensor:
    """u [B, V] float32 in (0, 1), 23 bits each (24 and the half would round to 1), from each row's seed and
    position (Python ints) and the token id."""
    keys = [
        _mix(_mix(seed & (1 << 64) - 1) ^ (position + 1) * 0x9E3779B97F4A7C15)
        for seed, position in zip(seeds, positions, strict=True)
    ]
    low = torch.tensor([_signed(key & _MASK) for key in keys], dtype=torch.int32, device=device)[:, None]
    high = torch.tensor([_signed(key >> 32 & _MASK) for key in keys], dtype=torch.int32, device=device)[:, None]
    token_V = torch.arange(vocab_size, dtype=torch.int32, device=device) * _signed(0x9E3779B1)
    x = low ^ token_V
    # 32-bit multiply and xor-shift rounds in wrapping int32; `>>` keeps the sign there, hence the masks.
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = x.bitwise_xor_(x.bitwise_right_shift(shift).bitwise_and_((1 << 32 - shift) - 1)).mul_(_signed(factor))
        x = x.add_(high)
    x = x.bitwise_xor_(x.bitwise_right_shift(16).bitwise_and_(0xFFFF))
    return x.bitwise_right_shift_(9).bitwise_and_(0x7FFFFF).float().add_(0.5).mul_(2.0**-23)


def head_logits(hidden_BH: torch.Tensor, lm_head_VH: torch.Tensor) -> torch.Tensor:
    """Logits [B, V] of the rows that draw a token, float32 (float64 for float64): the very numbers that the log-prob's
    torch backend starts from, and up to the order of a float32 sum those of its Triton backend.

    lm_head_VH: [V, H], the columns that may be drawn.
    """
    rows_MH = fill_rows(hidden_BH, lm_head_VH)
    logits_MV = rows_MH.new_empty((len(rows_MH), len(lm_head_VH)), dtype=compute_dtype(lm_head_VH))
    logits_product(rows_MH, lm_head_VH, logits_MV)
    return logits_MV[: len(hidden_BH)]


def sample(
    logits_BV: torch.Tensor, seeds: list[int], positions: list[int], temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw one token a row; logits [B, V] float32 (only columns that may be drawn). Temperature 0 takes the largest.

    Returns ids [B] int64 and their log-probabilities [B] float32 under the distribution drawn from, softmax of
    logits / temperature (temperature 1 where greedy).
    """
    if temperature == 0:
        ids_B = logits_BV.argmax(-1)
    else:
        logits_BV = logits_BV / temperature
        u_BV = uniform_noise(seeds, positions, logits_BV.shape[1], logits_BV.device)
        ids_B = u_BV.log_().neg_().log_().neg_().add_(logits_BV).argmax(-1)
    target_B = logits_BV.gather(1, ids_B[:, None])[:, 0]
    return ids_B, target_B - logits_BV.logsumexp(-1)
