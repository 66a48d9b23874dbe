"""Row multiples of attention's batched products, such that a row has the same bits whatever other rows there are.

A BLAS uses different routines for few rows and for many, and these round differently. A multiple of 8 rows is enough on
every CPU that was tried; some need only pairs, which spares products with zeros. So the products of a cache's sizes are
tried once, and the smallest multiple is taken that changes no bit.

Axes: X matrices, M rows, D head dimension, S slots of a block.
"""

from functools import cache

import torch

ROW_TILE = 8  # where nothing smaller holds, or need not be asked: on CUDA, and in low precision
SMALLER = 2, 4
MOST_ROWS = 128  # held against all multiples up to half of it
MATRICES = 2, 37


def row_tile(dim: int, slots: int, dtype: torch.dtype, device: torch.device) -> int:
    """The multiple for products of rows [M, D] with keys [D, S], and of weights [M, S] with values [S, D], at the
    number of threads that torch has now."""
    if device.type != "cpu" or dtype != torch.float32:
        return ROW_TILE
    return _smallest(dim, slots, torch.get_num_threads())


@cache
def _smallest(dim: int, slots: int, threads: int) -> int:
    """threads: torch's, which the answer may depend on."""
    return next((tile for tile in SMALLER if _holds(tile, dim, slots) and _holds(tile, slots, dim)), ROW_TILE)


def _holds(tile: int, inner: int, outer: int) -> bool:
    """Return whether a row has the same bits among any multiple of `tile` rows."""
    generator = torch.Generator().manual_seed(0)
    with torch.inference_mode(False):
        left_XMI = torch.randn(max(MATRICES), MOST_ROWS, inner, generator=generator)
        right_XIO = torch.randn(max(MATRICES), inner, outer, generator=generator)
    whole_XMO = torch.bmm(left_XMI, right_XIO)
    tried = ((matrices, rows) for matrices in MATRICES for rows in range(tile, MOST_ROWS // 2 + 1, tile))
    return all(
        torch.equal(torch.bmm(left_XMI[:x, :m].contiguous(), right_XIO[:x]), whole_XMO[:x, :m]) for x, m in tried
    )
