"""Optimiser states in 8 bits: blocks of 256 values, each a code of a fixed table times the block's largest magnitude.

    x[r, c] = table[code[r, c]] * scale[r, c // 256],   scale = max |x| of the block (float32)

A block lies within one row of its matrix, and the last of a row may have fewer values. So some rows of a matrix have
the codes and scales that they have in the whole, and several ranks that hold some rows each (engine/parallel) quantise
as one does.

The table is that of dynamic quantisation (Dettmers et al. 2021, "8-bit Optimizers via Block-wise Quantization",
arXiv:2110.02861, sections 1.3 and 2.2): seven decades below 1, the higher ones in more steps. With a sign, for the
first moment, decade e (1 the lowest) has 2^(e - 1) values of either sign, the middles of as many equal parts of
[.1, 1] 10^(e - 7); without, for the second moment, twice as many. An error is at most half a part: .9 / 128 of the
block's largest magnitude with a sign and .9 / 256 without, and of a value in decade e the larger part of it that the
decade's fewer steps leave.

Departures from the paper: blocks of 256 values, not 2,048, which cost 1.6% in scales; blocks that end with their row;
and a second moment's table without 0, for a moment rounded to 0 would leave eps alone in the denominator, and a step of
m / eps.
Axes: R rows of C values, B blocks of a row.
"""

from functools import cache

import torch
from torch import Tensor

BLOCK = 256  # values to a scale
DECADES = 7


@cache
def code_table(signed: bool) -> Tensor:
    """The values of the codes, ascending, float32: 256 in [-1, 1] with a sign, 255 in (0, 1] without."""
    values = [torch.ones(1, dtype=torch.float64)]
    for decade in range(DECADES):
        parts = 2 ** (decade if signed else decade + 1)
        edges = torch.linspace(0.1, 1.0, parts + 1, dtype=torch.float64)
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - DECADES + 1)
        values += [middles, -middles] if signed else [middles]
    if signed:
        values.append(torch.zeros(1, dtype=torch.float64))
    return torch.cat(values).sort().values.float()


@cache
def _on(device: torch.device, signed: bool) -> tuple[Tensor, Tensor, Tensor]:
    """The table; the values at which one code ends and the next begins, with an inf behind them; and, for the upper 17
    bits of every float32 (sign, exponent, 8 of the mantissa), how many of these lie below all that begin so."""
    table = code_table(signed)
    edges = (table[1:] + table[:-1]) / 2
    bits = torch.arange(1 << 17, dtype=torch.int64) << 15
    ends = torch.stack([bits, bits + 0x7FFF])
    ends = torch.where(ends < 1 << 31, ends, ends - (1 << 32)).to(torch.int32).view(torch.float32)
    below = torch.bucketize(ends.nan_to_num(0.0).amin(0), edges, out_int32=True)
    return table.to(device), torch.cat([edges, torch.tensor([torch.inf])]).to(device), below.to(device)


def blocks_of(columns: int) -> int:
    """Return the number of scales of a row of `columns` values."""
    return -(-columns // BLOCK)


def quantise(x_RC: Tensor, signed: bool) -> tuple[Tensor, Tensor]:
    """x [R, C] float32, not negative unless `signed` -> codes [R, C] uint8 and scales [R, blocks_of(C)] float32. Takes
    a few times the memory of x."""
    rows, columns = x_RC.shape
    width = min(BLOCK, columns)
    missing = -columns % width
    padded = torch.nn.functional.pad(x_RC, (0, missing)) if missing else x_RC
    blocks = padded.view(rows, -1, width)
    scale_RB = blocks.abs().amax(2)
    _, edges, below = _on(x_RC.device, signed)
    # A block of zeros has the scale 0, with which every code means 0.
    parts = (blocks / scale_RB.clamp(min=torch.finfo(torch.float32).tiny)[..., None]).view(-1)
    # Numbers whose upper 17 bits agree are .4% apart and edges .7%, so at most one edge lies among them. A search
    # would take several times as long.
    codes = below.index_select(0, (parts.view(torch.int32) >> 15) & 0x1FFFF)
    codes += parts > edges.index_select(0, codes)
    return codes.view(rows, -1)[:, :columns].to(torch.uint8), scale_RB


def dequantise(codes_RC: Tensor, scale_RB: Tensor, signed: bool) -> Tensor:
    """codes [R, C] uint8, scales [R, blocks_of(C)] -> [R, C] float32."""
    table, _, _ = _on(codes_RC.device, signed)
    columns = codes_RC.shape[1]
    values = table.index_select(0, codes_RC.reshape(-1).int()).view(codes_RC.shape)
    return values * scale_RB.repeat_interleave(min(BLOCK, columns), 1)[:, :columns]
