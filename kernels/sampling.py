"""Sampling by the Gumbel-max trick, with noise that is a function and not a stream.

    token = argmax_v ( z[v] + g(seed, position, v) )        z = logits / temperature, where the filters keep v
    g = -log(-log u),  u uniform in (0, 1)

`u` is a hash of (seed, position, token), so a sample depends on nothing else: not on the batch it was drawn in, nor on
how often anything was drawn before it; and a filter does not change the noise of what it keeps. Greedy decoding is
temperature 0.

Two ways lead from hidden states to a token (`draw_from_head`). On CUDA, rows without filters are drawn as the head's
product goes by, and [B, V] is never stored (drawing/head_draw_triton.py); tokens are the same wherever the two best
scores are further apart than rounding. Everywhere else, and where any row has a filter, logits are stored
(`head_logits`) and drawn from (`sample`): a filter has to see a row whole before it leaves anything out.

Below, in kernels/drawing: rules.py (temperature and filters), noise.py (the hash), head_draw_triton.py, and blocks.py,
which is how a CPU draws: the same tokens, bit for bit, from fewer passes than `draw_dense`.

Axes: B sequences that draw a token, M the same filled up, H hidden, V vocabulary (docs/notation.md).
"""

from importlib.util import find_spec

import torch
from torch import Tensor

from thresher.kernels.checks import resolve_backend
from thresher.kernels.drawing.blocks import draw_in_blocks
from thresher.kernels.drawing.noise import minus_gumbel_, uniform_noise
from thresher.kernels.drawing.rules import DrawRules, cutoffs
from thresher.kernels.launch.dispatch import on_device
from thresher.kernels.matmul import compute_dtype, fill_rows, logits_product

__all__ = ["DrawRules", "draw_from_head", "head_logits", "sample"]

FUSED_WIDTH = 16  # the hidden width is a multiple of it where a GPU's matrix instructions are to have whole steps


def draw_from_head(
    hidden_BH: Tensor,
    lm_head_VH: Tensor,
    seeds_B: Tensor,
    positions_B: Tensor,
    rules: DrawRules,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Draw one token a row from its hidden state: ids [B] int64, log-probabilities [B] float32, as `sample` has them.

    lm_head_VH: [V, H], the columns that may be drawn. backend: "torch", `sample(head_logits(..))`; "triton", on CUDA or
    in its interpreter, bfloat16 or float32; "auto", Triton on CUDA where it is installed and the head suits it (those
    dtypes, H a multiple of 16, dense rows). Rows with filters are drawn from stored logits in any case. No host sync;
    launches and memory follow from shapes and from what `rules` knows on the host, so a CUDA graph may hold it.
    """
    if not rules.filtered and _draws_fused(backend, hidden_BH, lm_head_VH):
        from thresher.kernels.drawing.head_draw_triton import draw_fused

        with on_device(hidden_BH):
            return draw_fused(hidden_BH, lm_head_VH, seeds_B, positions_B, rules.temperature_B)
    return sample(head_logits(hidden_BH, lm_head_VH), seeds_B, positions_B, rules)


def _draws_fused(backend: str, hidden_BH: Tensor, lm_head_VH: Tensor) -> bool:
    if backend != "auto":
        return resolve_backend(backend, hidden_BH) == "triton"
    dtype, width = hidden_BH.dtype, hidden_BH.shape[-1]
    suits = dtype in (torch.bfloat16, torch.float32) and width % FUSED_WIDTH == 0 and lm_head_VH.stride(-1) == 1
    return hidden_BH.is_cuda and suits and find_spec("triton") is not None


def head_logits(hidden_BH: Tensor, lm_head_VH: Tensor) -> Tensor:
    """Logits [B, V] of the rows that draw a token, float32 (float64 for float64): the very numbers that the log-prob's
    torch backend starts from, and up to the order of a float32 sum those of its Triton backend.

    lm_head_VH: [V, H], the columns that may be drawn.
    """
    rows_MH = fill_rows(hidden_BH, lm_head_VH)
    logits_MV = rows_MH.new_empty((len(rows_MH), len(lm_head_VH)), dtype=compute_dtype(lm_head_VH))
    logits_product(rows_MH, lm_head_VH, logits_MV)
    return logits_MV[: len(hidden_BH)]


def sample(logits_BV: Tensor, seeds_B: Tensor, positions_B: Tensor, rules: DrawRules) -> tuple[Tensor, Tensor]:
    """Draw one token a row; logits [B, V] float32 (only columns that may be drawn), seeds and positions [B] int64.

    Returns ids [B] int64 and their log-probabilities [B] float32 under the distribution drawn from: softmax of
    logits / temperature over what the row's filters keep. A greedy row takes its largest logit, which no filter would
    remove, and its log-probability is that of all columns at temperature 1. Of equal scores the lowest id wins.
    float64 logits, for tests, give float64 log-probabilities.
    """
    _check(logits_BV, seeds_B, positions_B, rules)
    logits_BV = logits_BV.detach()
    if logits_BV.device.type == "cpu" and logits_BV.dtype == torch.float32:
        drawn = draw_in_blocks(logits_BV, seeds_B, positions_B, rules)
        if drawn is not None:
            return drawn
    return draw_dense(logits_BV, seeds_B, positions_B, rules)


def draw_dense(z_BV: Tensor, seeds_B: Tensor, positions_B: Tensor, rules: DrawRules) -> tuple[Tensor, Tensor]:
    """As `sample`, with the noise of every column, and nothing that the host would have to wait for."""
    divisor_B = rules.divisor_B
    if divisor_B is not None:
        z_BV = z_BV / divisor_B[:, None].to(z_BV.dtype)
    if rules.temperature == 0:
        ids_B = z_BV.argmax(1)
    else:
        if rules.filtered:
            cut_B = torch.where(rules.filtered_B, cutoffs(z_BV, rules), -torch.inf)
            z_BV = z_BV.masked_fill(z_BV < cut_B[:, None], -torch.inf)
        minus_g_BV = minus_gumbel_(uniform_noise(seeds_B, positions_B, z_BV.shape[1]))
        if rules.temperature is None:
            minus_g_BV.mul_(rules.temperature_B[:, None] > 0)
        ids_B = torch.sub(z_BV, minus_g_BV, out=minus_g_BV).argmax(1)
    return ids_B, z_BV.gather(1, ids_B[:, None])[:, 0] - z_BV.logsumexp(1)


def _check(logits_BV: Tensor, seeds_B: Tensor, positions_B: Tensor, rules: DrawRules) -> None:
    shape, dtype, device = logits_BV.shape, logits_BV.dtype, logits_BV.device
    if len(shape) != 2 or shape[1] == 0 or dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"logits are [B, V] of float32 or float64, with a column at least, not {tuple(shape)} of {dtype}"
        )
    for name, vector in (("seeds", seeds_B), ("positions", positions_B)):
        if vector.shape != shape[:1] or vector.dtype != torch.int64 or vector.device != device:
            found = f"{tuple(vector.shape)} of {vector.dtype} on {vector.device}"
            raise ValueError(f"{name} are ({shape[0]},) of torch.int64 on {device}, as the logits, not {found}")
    if len(rules) != shape[0] or rules.temperature_B.device != device:
        found = f"{len(rules)} on {rules.temperature_B.device}"
        raise ValueError(f"rules are for {shape[0]} rows on {device}, as the logits, not for {found}")
