"""Operands of the kernels: their checks, and the three products of a loss with its head, from float32 accumulators.

    logits = rows @ head.T        dX = dlogits @ head        dW += dlogits.T @ rows

Shapes, dtypes and devices are checked on the host. Bad data (a target outside the vocabulary, a NaN in an unmasked row)
sets a flag, which is read together with the row counts in the one host sync of a call, or later with the flags of other
calls (`raise_deferred`, or `grpo_loss`). On CUDA, bfloat16 operands are multiplied as they are, into float32.
Elsewhere, and in float16, operands are converted to float32 first, the head a slab at a time.

Axes: T tokens, R rows of a chunk, M a padded chunk, H hidden width, V vocabulary (columns that exist), U columns of
a slab (docs/notation.md).
"""

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from thresher.common.machine import is_amd

FLOAT32_MAX = float(np.finfo(np.float32).max)
TINY = np.finfo(np.float32).tiny  # the smallest normal number; its reciprocal is also normal
DTYPES = (torch.bfloat16, torch.float32)  # of a Triton kernel
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class NotFinite(ValueError):
    """A hidden state is not finite. The weights are at fault, not the caller."""


class RowCheck(NamedTuple):
    """One kind of bad data: the rows that have it, and text for the message. values_T None: rows of hidden states."""

    name: str
    bad_T: Tensor
    values_T: Tensor | None
    expected: str


def resolve_backend(backend: str, hidden_TH: Tensor) -> str:
    """Return the backend to run, "torch" or "triton". "auto": Triton for bfloat16 on CUDA, if it is installed."""
    if backend not in ("auto", "torch", "triton"):
        raise ValueError(f"backend is {backend!r}; expected 'auto', 'torch' or 'triton'")
    if backend == "auto":
        fits = hidden_TH.is_cuda and hidden_TH.dtype == torch.bfloat16 and find_spec("triton") is not None
        return "triton" if fits else "torch"
    if backend == "triton":
        if hidden_TH.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(
                f"hidden_TH has dtype {hidden_TH.dtype}; expected bfloat16 or float32 for backend 'triton'"
            )
        if find_spec("triton") is None:
            raise ValueError("backend is 'triton', which is not installed; expected 'torch' or 'auto' here")
        if not hidden_TH.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
            raise ValueError(f"hidden_TH is on {hidden_TH.device}; expected cuda for backend 'triton'")
    return backend


def check_scalar(name: str, value: float, low: float = -math.inf, strict: bool = False) -> None:
    """Raise ValueError for a number below `low` (or equal to it, if strict) or beyond float32, and for a non-number."""
    try:
        fits = not isinstance(value, bool | str | bytes) and abs(float(value)) <= FLOAT32_MAX
    except (TypeError, ValueError, OverflowError):
        fits = False
    if not fits or value < low or (strict and value == low):
        bound = "" if low == -math.inf else f" {'above' if strict else 'of at least'} {low:g}"
        raise ValueError(f"{name} is {value!r}; expected a finite number{bound}, within float32")


def check_temperature(value: float) -> None:
    """Raise ValueError for a temperature that is not `divides_in_float32`."""
    check_scalar("temperature", value, 0.0, strict=True)
    if not divides_in_float32(np.array([value])).all():
        raise ValueError(
            f"temperature is {value!r}; expected a finite number above 0 that, like its reciprocal, is a normal float32"
        )


def divides_in_float32(temperature: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return whether each temperature's float32 value and its reciprocal are normal numbers above 0.

    Logits divided by one near the smallest normal number, 1.2e-38, may still be infinite."""
    with np.errstate(over="ignore", under="ignore", divide="ignore", invalid="ignore"):
        rounded = temperature.astype(np.float32)
        fits: npt.NDArray[np.bool_] = (rounded >= TINY) & (1 / rounded >= TINY)
    return fits


def check_head(
    hidden_TH: Tensor, lm_head_VH: Tensor, targets_T: Tensor, vocab_size: int | None, chunk_rows: int | None
) -> int:
    """Check shapes, dtypes and devices, and return the number of token ids that exist: columns of logits."""
    for name, tensor in (("hidden_TH", hidden_TH), ("lm_head_VH", lm_head_VH)):
        if not isinstance(tensor, Tensor):
            raise ValueError(f"{name} is a {type(tensor).__name__}; expected a tensor")
        if tensor.dim() != 2:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected two axes, {name[-2:]}")
        if tensor.dtype not in FLOATS:
            raise ValueError(f"{name} has dtype {tensor.dtype}; expected a floating dtype")
    if lm_head_VH.dtype != hidden_TH.dtype:
        raise ValueError(f"lm_head_VH has dtype {lm_head_VH.dtype}; expected hidden_TH's {hidden_TH.dtype}")
    if lm_head_VH.device != hidden_TH.device:
        raise ValueError(f"lm_head_VH is on {lm_head_VH.device}; expected hidden_TH's {hidden_TH.device}")
    if lm_head_VH.shape[1] != hidden_TH.shape[1]:
        raise ValueError(f"lm_head_VH has width {lm_head_VH.shape[1]}; expected hidden_TH's {hidden_TH.shape[1]}")
    check_rows("targets_T", targets_T, hidden_TH, (torch.int64, torch.int32))
    columns = lm_head_VH.shape[0] if vocab_size is None else vocab_size
    if not 1 <= columns <= lm_head_VH.shape[0]:
        raise ValueError(f"vocab_size is {columns}; expected 1 to lm_head_VH's {lm_head_VH.shape[0]} rows")
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows is {chunk_rows}; expected at least 1, or None")
    return columns


def check_rows(name: str, values_T: Tensor, hidden_TH: Tensor, dtypes: tuple[torch.dtype, ...] = FLOATS) -> None:
    """Check that there is one number per row of hidden_TH, of an accepted dtype, on the same device."""
    if not isinstance(values_T, Tensor):
        raise ValueError(f"{name} is a {type(values_T).__name__}; expected a tensor")
    if values_T.shape != hidden_TH.shape[:1]:
        raise ValueError(f"{name} has shape {tuple(values_T.shape)}; expected ({hidden_TH.shape[0]},)")
    if values_T.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {values_T.dtype}; expected one of {', '.join(map(str, dtypes))}")
    if values_T.device != hidden_TH.device:
        raise ValueError(f"{name} is on {values_T.device}; expected hidden_TH's {hidden_TH.device}")


def head_checks(hidden_TH: Tensor, targets_T: Tensor, columns: int) -> list[RowCheck]:
    """Make the data checks of hidden states and targets. No host sync."""
    # One sum per row finds NaN and infinity in a single pass without a temporary of [T, H]. It also refuses
    # finite values near float32's limit, whose logits would not be finite either.
    sums_T = hidden_TH.detach().sum(1, dtype=compute_dtype(hidden_TH))
    outside_T = (targets_T < 0) | (targets_T >= columns)
    return [
        RowCheck("hidden_TH", ~sums_T.isfinite(), None, "values that are finite and have a finite sum"),
        RowCheck("targets_T", outside_T, targets_T, f"a token id from 0 to {columns - 1}"),
    ]


def any_bad(checks: list[RowCheck]) -> Tensor:
    """Return a flag on the device, 0-d bool: whether any check finds a bad row. No host sync."""
    bad_T = checks[0].bad_T
    for check in checks[1:]:
        bad_T = bad_T | check.bad_T
    return bad_T.any()


def raise_first(checks: list[RowCheck]) -> None:
    """Raise ValueError (NotFinite) for the first bad row of the first check that has one. Syncs."""
    for check in checks:
        index = check.bad_T.nonzero()
        if len(index):
            row = int(index[0])
            if check.values_T is None:
                raise NotFinite(f"{check.name}[{row}] is not {check.expected}")
            raise ValueError(f"{check.name}[{row}] is {check.values_T[row].item()}, not {check.expected}")


def raise_deferred(calls: Sequence[list[RowCheck]]) -> None:
    """Raise as `raise_first` for the first of several calls that found a bad row. One sync for all."""
    if calls:
        for checks, bad in zip(calls, torch.stack([any_bad(checks) for checks in calls]).tolist(), strict=True):
            if bad:
                raise_first(checks)


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Make a CUDA tensor's device the current device, on which Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def check_dtype(name: str, tensor: Tensor) -> None:
    """Raise ValueError unless `tensor` is bfloat16 or float32."""
    if tensor.dtype not in DTYPES:
        raise ValueError(f"{name} has dtype {tensor.dtype}; expected bfloat16 or float32")


def check_dense(name: str, tensor: Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> None:
    """Raise ValueError unless `tensor` is dense and has this shape, dtype and device."""
    if tensor.shape != torch.Size(shape) or not tensor.is_contiguous():
        raise ValueError(
            f"{name} has shape {tuple(tensor.shape)} and strides {tensor.stride()}; expected dense {tuple(shape)}"
        )
    if tensor.dtype != dtype or tensor.device != device:
        raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}; expected {dtype} on {device}")


def dense_rows(x: Tensor) -> Tensor:
    """Return x, copied if an x[n] is not dense."""
    return x if x.stride()[1:] == x[:1].contiguous().stride()[1:] else x.contiguous()


# --- Products with the head

MIB = 2**20
# A CPU's float32 matmul uses another kernel for odd rows, and for fewer than 16. Padded to a multiple of 16 rows it
# is batch-invariant (a row's bits depend neither on its place nor on the other rows) with MKL on AVX-512 and with MKL's
# strict reproducibility (MKL_CBWR=AUTO,STRICT), but not with MKL on AVX2 nor for wide heads on several threads:
# docs/design.md, "Rollout", has the list. (Nor for fewer than 16 columns with H no multiple of 4.)
ROW_MULTIPLE = 16
# Exponentials are stored up to a multiple of this many columns, 128 bytes of bfloat16: their rows begin on a cache
# line, and both the stores and the matmuls move whole vectors of 16 bytes.
COLUMN_MULTIPLE = 64
# A CPU's product of a few rows with the head is faster in parts of this many columns (the last may have up to twice as
# many): 64 rows with [49152, 576] took 1.5 times as long whole, 512 rows 1.3, with the same bits (MKL on AVX2).
COLUMNS_AT_A_TIME = 1024
# A product with a smaller matrix takes less time than oneDNN's call: 12 us for 64 rows of 64 by 64, where MKL takes 6.
ONEDNN_FROM = 2**18  # elements
# The largest part of a low-precision head, or of its gradient, in float32.
SLAB_BYTES = 64 * MIB


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """Return the dtype of logits, sums and log-probs: float64 for float64 inputs (tests), float32 for all others."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def mixed_matmul(tensor: Tensor) -> bool:
    """Return whether operands are multiplied as they are, into float32."""
    return tensor.is_cuda and tensor.dtype == torch.bfloat16


def onednn_is_faster(weight: Tensor) -> bool:
    """Return whether oneDNN multiplies by a matrix of ONEDNN_FROM elements faster than MKL, torch's default.

    It does in float32 on an AMD processor with AVX-512, where MKL runs its AVX2 kernels and oneDNN is 2.2 times as fast
    (Zen 5). The number of rows is ignored, because a row's bits must not depend on how many rows its product has."""
    on_cpu = weight.dtype == torch.float32 and weight.device.type == "cpu"
    return on_cpu and _mkl_lacks_avx512() and torch._C._get_mkldnn_enabled()


@cache
def _mkl_lacks_avx512() -> bool:
    libraries = torch.backends.mkldnn.is_available() and torch.backends.mkl.is_available()
    return libraries and is_amd() and torch.cpu._is_avx512_supported()


def onednn_product(left_MK: Tensor, right_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Compute left @ right.T + bias, [M, N], by oneDNN. Both may be transposed views."""
    product_MN: Tensor = torch.ops.mkldnn._linear_pointwise(left_MK, right_NK, bias_N, "none", [], "")
    return product_MN


def stored_columns(columns: int) -> int:
    """Return the columns of the stored exponentials: `columns`, rounded up to a multiple of COLUMN_MULTIPLE."""
    return -(-columns // COLUMN_MULTIPLE) * COLUMN_MULTIPLE


def blas_ready(lm_head_VH: Tensor) -> Tensor:
    """Return the head, copied if neither axis is dense, because the matmul of every chunk would copy it otherwise."""
    return lm_head_VH if 1 in lm_head_VH.stride() else lm_head_VH.contiguous()


def head_slabs(lm_head_VH: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """Yield the head in `dtype`: whole if it has that dtype, else copies of a slab of its rows at a time."""
    columns, width = lm_head_VH.shape
    if lm_head_VH.dtype == dtype:
        return iter([(slice(0, columns), lm_head_VH)])
    step = max(SLAB_BYTES // (4 * max(width, 1)), 1)
    slabs = (slice(start, min(start + step, columns)) for start in range(0, columns, step))
    return ((slab, lm_head_VH[slab].to(dtype)) for slab in slabs)


def fill_rows(rows_RH: Tensor, lm_head_VH: Tensor) -> Tensor:
    """Return a chunk as the head's left operand: dense, in the dtype of the matmul, padded with rows of zeros."""
    dtype = rows_RH.dtype if mixed_matmul(lm_head_VH) else compute_dtype(lm_head_VH)
    return F.pad(rows_RH.to(dtype), (0, 0, 0, -rows_RH.shape[0] % ROW_MULTIPLE)).contiguous()


def logits_product(rows_MH: Tensor, lm_head_VH: Tensor, logits_MV: Tensor) -> None:
    """Write logits = rows @ head.T into a buffer of the compute dtype. rows_MH: from `fill_rows`."""
    if mixed_matmul(lm_head_VH):
        torch.mm(rows_MH, lm_head_VH.t(), out_dtype=logits_MV.dtype, out=logits_MV)
    else:
        for slab, head_UH in head_slabs(lm_head_VH, logits_MV.dtype):
            step = len(head_UH) if logits_MV.is_cuda else COLUMNS_AT_A_TIME
            cuts = list(range(step, len(head_UH) - step + 1, step))
            parts = zip(head_UH.tensor_split(cuts), logits_MV[:, slab].tensor_split(cuts, dim=1), strict=True)
            for part_UH, logits_MU in parts:
                _multiply(logits_MU, rows_MH, part_UH.t())


def hidden_product(dlogits_RV: Tensor, lm_head_VH: Tensor) -> Tensor:
    """Compute dlogits @ head, [R, H] of the compute dtype. dlogits_RV: in the compute dtype or the head's."""
    dtype = compute_dtype(lm_head_VH)
    if mixed_matmul(lm_head_VH):
        return torch.mm(dlogits_RV.to(lm_head_VH.dtype), lm_head_VH, out_dtype=dtype)
    grad_RH = dlogits_RV.new_empty((dlogits_RV.shape[0], lm_head_VH.shape[1]), dtype=dtype)
    for slab, head_UH in head_slabs(lm_head_VH, dtype):
        _multiply(grad_RH, dlogits_RV[:, slab].to(dtype), head_UH, add=slab.start > 0)
    return grad_RH


def scale_rows(rows_RH: Tensor, factor_R: Tensor | None) -> Tensor:
    """Compute rows * factor, row by row, in the dtype in which `add_head_product` multiplies; None is a factor of 1."""
    if factor_R is None:
        return rows_RH
    scaled_RH = rows_RH * factor_R[:, None]
    return scaled_RH.to(rows_RH.dtype) if mixed_matmul(rows_RH) else scaled_RH


def add_head_product(grad_VH: Tensor, dlogits_RV: Tensor, rows_RH: Tensor, keep: bool) -> None:
    """Compute grad += dlogits.T @ rows in place, in grad's float32, without a second [V, H].

    If `keep` is False, grad is overwritten without being read."""
    if mixed_matmul(rows_RH):
        low_RV = dlogits_RV.to(rows_RH.dtype)
        torch.addmm(grad_VH, low_RV.t(), rows_RH, out_dtype=grad_VH.dtype, beta=int(keep), out=grad_VH)
    else:
        _multiply(grad_VH, dlogits_RV.to(grad_VH.dtype).t(), rows_RH.to(grad_VH.dtype), add=keep)


def _multiply(out_MN: Tensor, left_MK: Tensor, right_KN: Tensor, add: bool = False) -> None:
    """Write left @ right into `out`, which is not read, or add it to `out`.

    oneDNN's products go to a temporary tensor, a part of the rows at a time."""
    if right_KN.numel() < ONEDNN_FROM or not onednn_is_faster(right_KN):
        out_MN.addmm_(left_MK, right_KN, beta=int(add))
        return
    for out_LN, left_LK in zip(out_MN.split(COLUMNS_AT_A_TIME), left_MK.split(COLUMNS_AT_A_TIME), strict=True):
        product_LN = onednn_product(left_LK, right_KN.t())
        out_LN.add_(product_LN) if add else out_LN.copy_(product_LN)
