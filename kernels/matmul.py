"""The three products of a loss with its head, each from float32 accumulators.

    logits = rows @ head.T        dX = dlogits @ head        dW += dlogits.T @ rows

bfloat16 operands are multiplied as they are on CUDA, where the tensor cores add in float32 and the result leaves as
float32. Elsewhere operands are brought to float32 first, the head a slab at a time, for a whole copy of it would not
fit beside it. float16 is brought to float32 too: a logit's gradient, weighted by 1/T, leaves its range.

Axes: R rows of a chunk, M a chunk filled up, H hidden width, V vocabulary (columns that exist), U columns of a slab
(docs/notation.md).
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

MIB = 2**20
# A CPU's float32 matmul takes another kernel for odd rows, and for fewer than 16. Filled up to a multiple of 16 rows it
# is batch-invariant (a row's bits depend neither on its place nor on its neighbours) with MKL on AVX-512 and with MKL's
# strict reproducibility (MKL_CBWR=AUTO,STRICT), but not with MKL on AVX2 nor for wide heads on several threads:
# docs/design.md, "Rollout", has the list. (Nor for under 16 columns with H no multiple of 4.)
ROW_MULTIPLE = 16
# Exponentials are stored up to a multiple of so many columns, 128 bytes of bfloat16: their rows begin on a line of the
# cache, and both the stores and the matmuls move whole vectors of 16 bytes.
COLUMN_MULTIPLE = 64
# What a part of a low-precision head, or of its gradient, may take in float32.
SLAB_BYTES = 64 * MIB


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype of logits, sums and log-probs: float64 for float64 inputs (tests), float32 for all others."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def mixed_matmul(tensor: Tensor) -> bool:
    """Whether operands are multiplied as they are, into float32."""
    return tensor.is_cuda and tensor.dtype == torch.bfloat16


def stored_columns(columns: int) -> int:
    """Columns of the stored exponentials: `columns`, or so many more that they are a multiple of COLUMN_MULTIPLE."""
    return -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def blas_ready(lm_head_VH: Tensor) -> Tensor:
    """The head as a matmul takes it: copied here if neither axis is dense, or every chunk would copy it."""
    return lm_head_VH if 1 in lm_head_VH.stride() else lm_head_VH.contiguous()


def head_slabs(lm_head_VH: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """The head in `dtype`: whole where it is that already, else a slab of columns at a time, copied."""
    columns, width = lm_head_VH.shape
    if lm_head_VH.dtype == dtype:
        return iter([(slice(0, columns), lm_head_VH)])
    step = max(SLAB_BYTES // (4 * max(width, 1)), 1)
    slabs = (slice(start, min(start + step, columns)) for start in range(0, columns, step))
    return ((slab, lm_head_VH[slab].to(dtype)) for slab in slabs)


def fill_rows(rows_RH: Tensor, lm_head_VH: Tensor) -> Tensor:
    """A chunk as the head's left operand: dense, in the dtype of the matmul, filled up with rows of zeros."""
    dtype = rows_RH.dtype if mixed_matmul(lm_head_VH) else compute_dtype(lm_head_VH)
    return F.pad(rows_RH.to(dtype), (0, 0, 0, -rows_RH.shape[0] % ROW_MULTIPLE)).contiguous()


def logits_product(rows_MH: Tensor, lm_head_VH: Tensor, logits_MV: Tensor) -> None:
    """logits = rows @ head.T, into a buffer of the compute dtype. rows_MH: from `fill_rows`."""
    if mixed_matmul(lm_head_VH):
        torch.mm(rows_MH, lm_head_VH.t(), out_dtype=logits_MV.dtype, out=logits_MV)
    else:
        for slab, head_UH in head_slabs(lm_head_VH, logits_MV.dtype):
            torch.mm(rows_MH, head_UH.t(), out=logits_MV[:, slab])


def hidden_product(dlogits_RV: Tensor, lm_head_VH: Tensor) -> Tensor:
    """dlogits @ head, [R, H] of the compute dtype. dlogits_RV: the compute dtype or the head's."""
    dtype = compute_dtype(lm_head_VH)
    if mixed_matmul(lm_head_VH):
        return torch.mm(dlogits_RV.to(lm_head_VH.dtype), lm_head_VH, out_dtype=dtype)
    grad_RH = dlogits_RV.new_empty((dlogits_RV.shape[0], lm_head_VH.shape[1]), dtype=dtype)
    for slab, head_UH in head_slabs(lm_head_VH, dtype):
        # beta 0 overwrites: the first slab finds uninitialised memory
        grad_RH.addmm_(dlogits_RV[:, slab].to(dtype), head_UH, beta=0 if slab.start == 0 else 1)
    return grad_RH


def scale_rows(rows_RH: Tensor, factor_R: Tensor | None) -> Tensor:
    """rows * factor, row by row, in the dtype in which `add_head_product` multiplies; None is a factor of 1."""
    if factor_R is None:
        return rows_RH
    scaled_RH = rows_RH * factor_R[:, None]
    return scaled_RH.to(rows_RH.dtype) if mixed_matmul(rows_RH) else scaled_RH


def add_head_product(grad_VH: Tensor, dlogits_RV: Tensor, rows_RH: Tensor, keep: bool) -> None:
    """grad += dlogits.T @ rows, in grad's float32 and in its place: there is no second [V, H]. Where `keep` is False,
    what grad held before is overwritten, unread."""
    beta = 1 if keep else 0
    if mixed_matmul(rows_RH):
        low_RV = dlogits_RV.to(rows_RH.dtype)
        torch.addmm(grad_VH, low_RV.t(), rows_RH, out_dtype=grad_VH.dtype, beta=beta, out=grad_VH)
    else:
        grad_VH.addmm_(dlogits_RV.to(grad_VH.dtype).t(), rows_RH.to(grad_VH.dtype), beta=beta)
