"""Shared by the tests of both forms of attention: inputs, the formula in plain loops, and float32's error budget."""

from collections.abc import Sequence

import torch

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_qkv(heads: int, kv_heads: int, dim: int, count: int, seed: int = 0) -> QKV:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(count, heads, dim), (count, kv_heads, dim), (count, kv_heads, dim)]
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q * 2, k, v  # sharper than uniform, so that the visible keys matter


def brute(q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """Compute the formula row by row and head by head, in the dtype of its arguments."""
    out, start = [], 0
    shared = q_TND.shape[1] // k_TKD.shape[1]
    for length in lengths:
        for row in range(start, start + length):
            heads = []
            for head in range(q_TND.shape[1]):
                k, v = k_TKD[start : row + 1, head // shared], v_TKD[start : row + 1, head // shared]
                heads.append(torch.softmax(k @ q_TND[row, head] / q_TND.shape[2] ** 0.5, 0) @ v)
            out.append(torch.stack(heads))
        start += length
    return torch.stack(out)


def budget(qkv: QKV, lengths: Sequence[int], dtype: torch.dtype = torch.float32) -> float:
    """Return the norm of float32's allowed error, for any order of sums, with probabilities and results rounded to
    `dtype`: a sum of n terms is off by 2^-24 sqrt(n) times the root of its squared terms (a standard deviation, in the
    worst order), an exponential of x by 2^-24 (1 + |x|) of itself. Three such deviations."""
    return 3 * float(torch.cat(variances(qkv, lengths, dtype)).sum()) ** 0.5


def variances(qkv: QKV, lengths: Sequence[int], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return the square of one such deviation for every row of each sequence."""
    unit, low = 2.0**-24, torch.finfo(dtype).eps / 2 if dtype != torch.float32 else 0.0
    q_THD, k_TKD, v_TKD = (x.double() for x in qkv)
    shared = q_THD.shape[1] // k_TKD.shape[1]
    dim, squares = q_THD.shape[2], []
    for q, k, v in zip(*(x.split(list(lengths)) for x in (q_THD, k_TKD, v_TKD)), strict=True):
        q_HLD, k_HLD, v_HLD = (x.transpose(0, 1) for x in (q, *(x.repeat_interleave(shared, 1) for x in (k, v))))
        length = len(q)
        unseen_LL = torch.ones(length, length).triu(1).bool()
        s_HLL = (q_HLD @ k_HLD.transpose(1, 2) * dim**-0.5).masked_fill(unseen_LL, -torch.inf)
        p_HLL = torch.softmax(s_HLL, -1)
        terms_HLL = (q_HLD.square() @ k_HLD.square().transpose(1, 2)).sqrt() * dim**-0.5
        far_HLL = (s_HLL.amax(-1, keepdim=True) - s_HLL).masked_fill(unseen_LL, 0)
        size_HLL = s_HLL.masked_fill(unseen_LL, 0).abs()
        off_HLL = unit * (dim**0.5 * terms_HLL + size_HLL + far_HLL + 2) + low
        o_HLD, weight_HLL = p_HLL @ v_HLD, (p_HLL * off_HLL).square()
        # sum_j w_j (v_j - o)^2, multiplied out
        moved_HLD = weight_HLL @ v_HLD.square() - 2 * o_HLD * (weight_HLL @ v_HLD)
        moved_HLD += o_HLD.square() * weight_HLL.sum(-1, keepdim=True)
        summed_HLD = unit**2 * length * (p_HLL.square() @ v_HLD.square())
        squares.append((moved_HLD.clamp(min=0) + summed_HLD + ((unit + low) * o_HLD).square()).sum((0, 2)))
    return squares
