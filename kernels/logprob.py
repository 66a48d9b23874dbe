"""LM head, log-prob and entropy of each token, without gradients: for old and reference policies.

    z = hidden @ lm_head.T / temperature, [T, V];  logp_t = z[t, target_t] - logsumexp(z[t])
    H_t = -sum_v p[t, v] log p[t, v],  p = softmax(z)

Logits are made a chunk of rows at a time, from float32 accumulators, so memory is bounded by the chunk: one
matmul, 2THV. The loss runs the same row function, `token_rows`, so its forward gives these very bits. Chunks
are filled up to a multiple of 16 rows: a CPU's float32 matmul takes another kernel for the odd rows, and for
fewer than 16; once filled up a row's bits depend neither on its place nor on its neighbours (MKL, float32;
not for under 16 columns with H no multiple of 4).

Deliberately absent: top-p or top-k log-probs (the sampler owns those) and a Triton face, which will stand
beside `_torch_logprobs`.

Legend: T tokens, N rows of a chunk, M a chunk filled up, H hidden width, V vocabulary (columns that exist),
B columns of a block.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from thresher.kernels.checks import (
    any_bad,
    check_head,
    check_scalar,
    compute_dtype,
    head_checks,
    raise_first,
    resolve_backend,
)

ROW_MULTIPLE = 16
MIB = 2**20
# Both buffers of a chunk. CPU: what a laptop can spare; CUDA: what the loss kernels may use at most.
WORKSPACE_BYTES = {"cpu": 256 * MIB, "cuda": 600 * MIB}
# A chunk costs some 40 small operations, and is fastest while its logits stay in the last cache. Loss and
# gradients of T 8192, H 96, V 600 on one core of an EPYC (Turin), in ms by rows: 64: 47, 128: 41, 256: 37,
# 512 and 1024: 35, 2048: 36, 4096: 38, 8192: 54; the three matmuls alone take 26.
MOST_ROWS = 1024
# What a part of a low-precision head, or of its gradient, may take in float32.
BLOCK_BYTES = 64 * MIB


class TokenRows(NamedTuple):
    """A chunk after the row function. The last two are views of the workspace: the next chunk reuses it."""

    logprobs_N: Tensor
    entropy_N: Tensor
    probs_NV: Tensor
    plogp_NV: Tensor  # p * log p


def reference_token_logprobs(
    hidden_TH: Tensor,
    lm_head_VH: Tensor,
    targets_T: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The same in plain torch, differentiable, materialising [T, V]; float64 inputs stay in float64."""
    dtype = compute_dtype(hidden_TH)
    logits_TV = hidden_TH.to(dtype) @ lm_head_VH[:vocab_size].to(dtype).t() / temperature
    logp_TV = torch.log_softmax(logits_TV, 1)
    return logp_TV.gather(1, targets_T[:, None])[:, 0], -(logp_TV.exp() * logp_TV).sum(1)


def default_chunk_rows(device: torch.device, columns: int, itemsize: int) -> int:
    """Rows of a chunk when the caller names none: as many as the workspace holds, from 16 to MOST_ROWS."""
    budget = WORKSPACE_BYTES.get(device.type, WORKSPACE_BYTES["cpu"])
    rows = min(budget // (2 * itemsize * columns), MOST_ROWS)
    return max(rows // ROW_MULTIPLE, 1) * ROW_MULTIPLE


def new_workspace(lm_head_VH: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Two buffers [M, V] of the compute dtype for chunks of up to `rows` rows, uninitialised."""
    shape = (-(-rows // ROW_MULTIPLE) * ROW_MULTIPLE, lm_head_VH.shape[0])
    dtype = compute_dtype(lm_head_VH)
    return lm_head_VH.new_empty(shape, dtype=dtype), lm_head_VH.new_empty(shape, dtype=dtype)


def blas_ready(lm_head_VH: Tensor) -> Tensor:
    """The head as a matmul takes it: copied here if neither axis is dense, or every chunk would copy it."""
    return lm_head_VH if 1 in lm_head_VH.stride() else lm_head_VH.contiguous()


def mixed_matmul(tensor: Tensor) -> bool:
    """Whether operands are multiplied as they are into float32: bfloat16 on CUDA. Others are brought to
    float32 first, float16 too: a logit's gradient, weighted by 1/T, leaves its range."""
    return tensor.is_cuda and tensor.dtype == torch.bfloat16


def column_blocks(matrix_VH: Tensor) -> Iterator[slice]:
    """Stretches of vocabulary whose [B, H] in float32 is small enough to stand beside the matrix."""
    columns, width = matrix_VH.shape
    step = max(BLOCK_BYTES // (4 * max(width, 1)), 1)
    return (slice(start, min(start + step, columns)) for start in range(0, columns, step))


def head_blocks(lm_head_VH: Tensor, dtype: torch.dtype) -> Iterator[tuple[slice, Tensor]]:
    """The head in `dtype`: whole where it is that already, else a block at a time, copied."""
    if lm_head_VH.dtype == dtype:
        return iter([(slice(0, lm_head_VH.shape[0]), lm_head_VH)])
    return ((block, lm_head_VH[block].to(dtype)) for block in column_blocks(lm_head_VH))


def fill_rows(rows_NH: Tensor, lm_head_VH: Tensor) -> Tensor:
    """A chunk as the head's left operand: dense, in the dtype of the matmul, filled up with rows of zeros."""
    dtype = rows_NH.dtype if mixed_matmul(lm_head_VH) else compute_dtype(lm_head_VH)
    return F.pad(rows_NH.to(dtype), (0, 0, 0, -rows_NH.shape[0] % ROW_MULTIPLE)).contiguous()


def _head_matmul(rows_MH: Tensor, lm_head_VH: Tensor, logits_MV: Tensor) -> None:
    """logits = rows @ head.T from float32 accumulators, into a buffer of the compute dtype."""
    if mixed_matmul(lm_head_VH):
        torch.mm(rows_MH, lm_head_VH.t(), out_dtype=logits_MV.dtype, out=logits_MV)
    else:
        for block, head_BH in head_blocks(lm_head_VH, logits_MV.dtype):
            torch.mm(rows_MH, head_BH.t(), out=logits_MV[:, block])


def head_logits(hidden_NH: Tensor, lm_head_VH: Tensor) -> Tensor:
    """Logits [N, V] for sampling, float32 (float64 for float64): the very numbers that the log-probs are made from."""
    rows_MH = fill_rows(hidden_NH, lm_head_VH)
    logits_MV = rows_MH.new_empty((len(rows_MH), len(lm_head_VH)), dtype=compute_dtype(lm_head_VH))
    _head_matmul(rows_MH, lm_head_VH, logits_MV)
    return logits_MV[: len(hidden_NH)]


def token_rows(
    rows_MH: Tensor,
    lm_head_VH: Tensor,
    targets_N: Tensor,
    temperature: float,
    workspace: tuple[Tensor, Tensor],
) -> TokenRows:
    """Head, log-prob and entropy of one chunk: one matmul and four passes over its logits.

    rows_MH: from `fill_rows`. lm_head_VH: [V, H], the columns that exist only. targets_N: int64, N <= M.
    """
    count, filled = targets_N.shape[0], rows_MH.shape[0]
    logits_MV, logp_MV = workspace[0][:filled], workspace[1][:filled]
    _head_matmul(rows_MH, lm_head_VH, logits_MV)
    if temperature != 1.0:
        logits_MV.div_(temperature)
    torch.log_softmax(logits_MV, 1, out=logp_MV)
    logprobs_N = logp_MV[:count].gather(1, targets_N[:, None])[:, 0]
    probs_MV = torch.exp(logp_MV, out=logits_MV)
    plogp_MV = logp_MV.mul_(probs_MV)
    # The sum runs over the filled rows, so that never a lone row is summed by another algorithm.
    entropy_M = plogp_MV.sum(1).neg_()
    return TokenRows(logprobs_N, entropy_M[:count], probs_MV[:count], plogp_MV[:count])


def _torch_logprobs(
    hidden_TH: Tensor, lm_head_VH: Tensor, targets_T: Tensor, temperature: float, chunk_rows: int
) -> tuple[Tensor, Tensor]:
    workspace = new_workspace(lm_head_VH, min(chunk_rows, len(targets_T)))
    logprobs_T = workspace[0].new_empty(len(targets_T))
    entropy_T = torch.empty_like(logprobs_T)
    for start in range(0, len(targets_T), chunk_rows):
        chunk = slice(start, start + chunk_rows)
        rows_MH = fill_rows(hidden_TH[chunk], lm_head_VH)
        done = token_rows(rows_MH, lm_head_VH, targets_T[chunk], temperature, workspace)
        logprobs_T[chunk] = done.logprobs_N
        entropy_T[chunk] = done.entropy_N
    return logprobs_T, entropy_T


def token_logprobs(
    hidden_TH: Tensor,
    lm_head_VH: Tensor,
    targets_T: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    chunk_rows: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of each distribution, in nats, without gradients.

    hidden_TH: [T, H], float32, bfloat16, float16 or float64, any strides; every row counts.
    lm_head_VH: [V, H], same dtype and device. targets_T: [T] int64 or int32.
    temperature: divides the logits.
    vocab_size: columns from there on do not exist; their rows of the head are never read.
    chunk_rows: rows whose logits exist at a time; None: what fits in 256 MiB on a CPU, at most 1,024.
    backend: "auto" and "torch" are the torch face; "triton" raises NotImplementedError until it is there.

    Returns (logprobs_T, entropy_T), [T] float32 (float64 for float64 inputs), detached.
    Raises ValueError naming the argument, and the first offending index: shapes, dtypes or devices that do
    not fit, a target outside the vocabulary, hidden states that are not finite.
    """
    resolve_backend(backend)
    columns = check_head(hidden_TH, lm_head_VH, targets_T, vocab_size, chunk_rows)
    check_scalar("temperature", temperature, 0.0, strict=True)
    with torch.no_grad(), torch.autocast(hidden_TH.device.type, enabled=False):
        checks = head_checks(hidden_TH, targets_T, columns)
        if any_bad(checks):
            raise_first(checks)
        head_VH = blas_ready(lm_head_VH[:columns])
        rows = chunk_rows or default_chunk_rows(hidden_TH.device, columns, compute_dtype(hidden_TH).itemsize)
        return _torch_logprobs(hidden_TH, head_VH, targets_T.long(), temperature, rows)
