"""Row multiples of attention's batched products with which a row's bits do not depend on the other rows.

A BLAS uses different routines for few rows and for many, and these round differently. A multiple of 8 rows is enough on
every CPU that was tried; some need only pairs, which saves products with zeros. The products of a cache's sizes are
therefore tried once, and the smallest multiple that changes no bit is used.

Axes: X matrices, M rows, D head dimension, S slots of a block.
"""

from functools import cache

import torch

ROW_TILE = 8  # if no smaller one works, and, without a trial, on CUDA and in low precision
SMALLER = 2, 4
MOST_ROWS = 128  # compared with all multiples up to half of it
MATRICES = 2, 37


def row_tile(dim: int, slots: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the multiple for products of rows [M, D] with keys [D, S], and of weights [M, S] with values [S, D].

    It holds for torch's present number of threads."""
    if device.type != "cpu" or dtype != torch.float32:
        return ROW_TILE
    return _smallest(dim, slots, torch.get_num_threads())


@cache
def _smallest(dim: int, slots: int, threads: int) -> int:
    """Return the smallest multiple. threads: those of torch, on which the result may depend."""
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
