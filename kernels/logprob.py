"""LM head, log-prob and entropy of each token, without gradients: for the reference policy, recomputed old log-probs
and scored texts.

    z = hidden @ lm_head.T / temperature, [T, V];  logp_t = z[t, target_t] - logsumexp(z[t])
    H_t = -sum_v p[t, v] log p[t, v],  p = softmax(z)

Logits are computed for a chunk of rows at a time, from float32 accumulators, so the chunk bounds the memory: one
matmul, 2THV. The loss runs the same rows through the same backend, `TorchHead` here or `TritonHead` of head_triton.py,
so its forward gives the same bits (in torch only for chunks of equal size, unless the BLAS is batch-invariant: cuBLAS
is not, a CPU's often is, see ROW_MULTIPLE).

Deliberately absent: top-p or top-k log-probs, and logits to sample from (sampling.py).

Axes: T tokens, R rows of a chunk, M a padded chunk, H hidden width, V vocabulary (columns that exist);
docs/notation.md.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from thresher.kernels.autotune_cache import tiling_for, wants_measuring
from thresher.kernels.head_tiling import even_rows
from thresher.kernels.operands import (
    MIB,
    ROW_MULTIPLE,
    RowCheck,
    any_bad,
    blas_ready,
    check_head,
    check_temperature,
    compute_dtype,
    fill_rows,
    head_checks,
    logits_product,
    mixed_matmul,
    on_device,
    raise_first,
    resolve_backend,
)

# A chunk's buffers. CPU: a size that fits on a laptop; CUDA: within 600 MiB, of which cuBLAS takes 32.
WORKSPACE_BYTES = {"cpu": 256 * MIB, "cuda": 560 * MIB}
# A chunk costs some 40 small operations, and is fastest while its logits stay in the last-level cache. Loss and
# gradients of T 8192, H 96, V 600 on one core of an EPYC (Turin), in ms by rows: 64: 47, 128: 41, 256: 37,
# 512 and 1024: 35, 2048: 36, 4096: 38, 8192: 54; the three matmuls alone take 26.
MOST_ROWS = 1024
# With a large vocabulary no chunk fits into a CPU's cache. One thread, in ms, at 64, 128, 208, 384, 512 and 1024 rows:
# T 2048, H 64, V 20,000: 291, 279, 286, 310, 310, 341; H 256: 977, 829, 818, 823, 813, 840; T 1024, H 128, V 151,936:
# 2097, 1843, 1876, 1886, 1971, 2262. Few rows read and write dW often; many fault in the pages of a large buffer.
PREFERRED_BYTES, PREFERRED_ROWS = 64 * MIB, 208


class HeadBackend(Protocol):
    """An implementation of this file's maths, for the chunks of a call."""

    def logprobs(self, rows_RH: Tensor, targets_R: Tensor) -> tuple[Tensor, Tensor]:
        """Return (log-prob of the target, entropy) of each row, [R] of the compute dtype. targets_R: int64."""


class TokenRows(NamedTuple):
    """A chunk's result: log p = (z - m) - log_sum, with m the row's largest logit.

    probs_RV and pz_RV are views of the workspace, which the next chunk reuses."""

    logprobs_R: Tensor
    entropy_R: Tensor
    log_sum_R: Tensor  # log(sum e^(z - m))
    probs_RV: Tensor
    pz_RV: Tensor  # p * (z - m)


def reference_token_logprobs(
    hidden_TH: Tensor, lm_head_VH: Tensor, targets_T: Tensor, *, temperature: float = 1.0, vocab_size: int | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `token_logprobs` in plain torch, differentiable, materialising [T, V]; float64 inputs stay float64."""
    dtype = compute_dtype(hidden_TH)
    logits_TV = hidden_TH.to(dtype) @ lm_head_VH[:vocab_size].to(dtype).t() / temperature
    logp_TV = torch.log_softmax(logits_TV, 1)
    return logp_TV.gather(1, targets_T[:, None])[:, 0], -(logp_TV.exp() * logp_TV).sum(1)


def default_chunk_rows(budget: int, columns: int, element_bytes: int) -> int:
    """Return the rows of the torch backend's chunk on a CPU, from 16 to MOST_ROWS.

    At most as many as fit in `budget` bytes; of these as many as fit in PREFERRED_BYTES, or else PREFERRED_ROWS.
    """
    row_bytes = element_bytes * columns
    rows = min(max(PREFERRED_BYTES // row_bytes, PREFERRED_ROWS), budget // row_bytes, MOST_ROWS)
    return max(rows // ROW_MULTIPLE, 1) * ROW_MULTIPLE


class TorchHead:
    """The torch backend, with two buffers [M, V] of the compute dtype for chunks of up to `rows` rows.

    lm_head_VH: [V, H], only the rows of token ids that exist, from `blas_ready`.
    """

    def __init__(self, lm_head_VH: Tensor, temperature: float, rows: int) -> None:
        self.lm_head_VH, self.temperature = lm_head_VH, temperature
        shape = (2, -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE, lm_head_VH.shape[0])
        self.workspace_2MV = lm_head_VH.new_empty(shape, dtype=compute_dtype(lm_head_VH))

    def logprobs(self, rows_RH: Tensor, targets_R: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `HeadBackend.logprobs` describes."""
        done = self.token_rows(fill_rows(rows_RH, self.lm_head_VH), targets_R)
        return done.logprobs_R, done.entropy_R

    def token_rows(self, rows_MH: Tensor, targets_R: Tensor) -> TokenRows:
        """Compute a chunk with one matmul, one exponential per element, and four cheaper passes.

        rows_MH: from `fill_rows`. targets_R: int64, R <= M."""
        count, filled = targets_R.shape[0], rows_MH.shape[0]
        logits_MV, probs_MV = self.workspace_2MV[:, :filled]
        logits_product(rows_MH, self.lm_head_VH, logits_MV)
        if self.temperature != 1.0:
            logits_MV.div_(self.temperature)
        # Before any product: at logits of 1e4, z p and log-sum-exp p would cancel completely.
        logits_MV.sub_(logits_MV.amax(1, keepdim=True))
        torch.softmax(logits_MV, 1, out=probs_MV)
        # The most likely token's probability is e^0 / sum.
        log_sum_R = probs_MV.amax(1)[:count].log().neg_()
        logprobs_R = logits_MV[:count].gather(1, targets_R[:, None])[:, 0] - log_sum_R
        pz_MV = logits_MV.mul_(probs_MV)
        # The sum includes the padding rows, because torch sums a single row by another algorithm.
        entropy_R = log_sum_R - pz_MV.sum(1)[:count]
        return TokenRows(logprobs_R, entropy_R, log_sum_R, probs_MV[:count], pz_MV[:count])


def chunk_size(
    chunk_rows: int | None, workspace_bytes: int | None, backend: str, lm_head_VH: Tensor, count: int
) -> int:
    """Return the rows of a chunk for `count` rows, at least 1: the caller's choice, else what fits in the workspace.

    The least chunk is 16 rows on a CPU and a tile of 128 or 256 with Triton, even if the workspace is smaller."""
    if chunk_rows is not None and workspace_bytes is not None:
        raise ValueError(
            f"chunk_rows is {chunk_rows} and workspace_bytes is {workspace_bytes}; expected one of the two"
        )
    if workspace_bytes is not None and workspace_bytes < 1:
        raise ValueError(f"workspace_bytes is {workspace_bytes}; expected at least 1, or None")
    budget = workspace_bytes or WORKSPACE_BYTES.get(lm_head_VH.device.type, WORKSPACE_BYTES["cpu"])
    if backend == "triton" and count and wants_measuring(lm_head_VH):
        from thresher.kernels.head_triton import measure_tilings  # triton is not installed everywhere

        usual = even_rows(lm_head_VH, tiling_for(lm_head_VH), budget, count)
        measure_tilings(lm_head_VH, min(chunk_rows or usual, count))
    if chunk_rows is not None:
        return max(min(chunk_rows, count), 1)
    if backend == "triton":
        return even_rows(lm_head_VH, tiling_for(lm_head_VH), budget, count)
    element_bytes = 2 * compute_dtype(lm_head_VH).itemsize
    if lm_head_VH.is_cuda:
        # Two buffers, and another copy of the logits' gradient if it is multiplied in low precision.
        row_bytes = (element_bytes + (2 if mixed_matmul(lm_head_VH) else 0)) * len(lm_head_VH)
        rows = min(budget // row_bytes, MOST_ROWS)
    else:
        rows = default_chunk_rows(budget, len(lm_head_VH), element_bytes)
    return max(min(rows, count), 1)


def token_logprobs(
    hidden_TH: Tensor,
    lm_head_VH: Tensor,
    targets_T: Tensor,
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    chunk_rows: int | None = None,
    workspace_bytes: int | None = None,
    backend: str = "auto",
    defer_checks_to: list[list[RowCheck]] | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the log-prob of each target and the entropy of each distribution, in nats, without gradients.

    hidden_TH: [T, H], float32, bfloat16, float16 or float64, any strides; no row is masked.
    lm_head_VH: [V, H], same dtype and device. targets_T: [T] int64 or int32.
    temperature: divides the logits.
    vocab_size: token ids from there on do not exist; their rows of the head are never read.
    chunk_rows: rows that are processed at a time; None: at most what fits in workspace_bytes.
    workspace_bytes: of a chunk's buffers; None: 256 MiB on a CPU, 560 on CUDA.
    backend: "torch"; "triton" for bfloat16 or float32 on CUDA; "auto": Triton for bfloat16 on CUDA, else torch.
    defer_checks_to: a list to which the checks of the data are appended; the call does not wait for the device. The
    caller raises their errors (`operands.raise_deferred`, or `deferred_checks` of `grpo_loss`) before it uses a result.

    Returns (logprobs_T, entropy_T), [T] float32 (float64 for float64 inputs), detached.
    Raises ValueError naming the argument, and the first offending index: shapes, dtypes or devices that do
    not fit, a target outside the vocabulary, hidden states that are not finite.
    """
    columns = check_head(hidden_TH, lm_head_VH, targets_T, vocab_size, chunk_rows)
    backend = resolve_backend(backend, hidden_TH)
    check_temperature(temperature)
    with torch.no_grad(), torch.autocast(hidden_TH.device.type, enabled=False), on_device(hidden_TH):
        checks = head_checks(hidden_TH, targets_T, columns)
        if defer_checks_to is not None:
            defer_checks_to.append(checks)
            targets_T = targets_T.clamp(0, columns - 1)  # a kernel would read out of bounds otherwise
        elif any_bad(checks):
            raise_first(checks)
        head_VH = blas_ready(lm_head_VH[:columns])
        rows = chunk_size(chunk_rows, workspace_bytes, backend, head_VH, len(targets_T))
        head = _make_head(backend, head_VH, temperature, rows)
        dtype = compute_dtype(hidden_TH)
        logprobs_T, entropy_T = hidden_TH.new_empty((2, len(targets_T)), dtype=dtype)
        for start in range(0, len(targets_T), rows):
            chunk = slice(start, start + rows)
            logprobs_T[chunk], entropy_T[chunk] = head.logprobs(
                hidden_TH[chunk].contiguous(), targets_T[chunk].long().contiguous()
            )
        return logprobs_T, entropy_T


def _make_head(backend: str, lm_head_VH: Tensor, temperature: float, rows: int) -> HeadBackend:
    if backend == "triton":
        from thresher.kernels.head_triton import TritonHead  # triton is not installed everywhere

        return TritonHead(lm_head_VH, temperature, rows)
    return TorchHead(lm_head_VH, temperature, rows)
