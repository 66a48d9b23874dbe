"""What a sampled token is worth by its ratio and advantage: the surrogates of `grpo_loss`, and a user's own.

J_t is maximised. l = log pi, r = exp(l - old), A the advantage; [x] passes no gradient; clip(r) lies in [1 - low,
1 + high]. n and mean are over a sequence's rows in the loss.

    clip       min(r A, clip(r) A); dual clip c, where A < 0: max(min(..), c A)          PPO; GRPO, Dr. GRPO, DAPO
    reinforce  A l                                                                        REINFORCE, RLOO
    cispo      [clip(r)] A l                                                              MiniMax-M1 (2025), eq. 4
    sapo       4/tau sigmoid(tau (r - 1)) A, tau by the sign of A                         SAPO (2025), eq. 5 and 6
    dppo_tv    r A, without gradient where |pi - pi_old| > delta and A (r - 1) > 0        DPPO (2026), the binary
    dppo_kl    the same with pi_old log(pi_old / pi) + (1 - pi_old) log((1 - pi_old) / (1 - pi)) > delta   divergences
    gspo       min(s A, clip(s) A), s = exp([mean(l - old)] + l - [l])                    GSPO (2025), eq. 15
    gmpo       A exp([mean(c)] + c - [c]), c the log-ratio, clipped to [log(1 - low), log(1 + high)] where the
               token's clip in PPO would bind                                             GMPO (2025), eq. 4

The first six see one row at a time. Their slopes dJ/dl are computed a chunk at a time, before its logits' gradient.
gspo, gmpo and a user's own see all rows of a call: the log-probs are computed first, in a pass of the head without a
gradient, 2THV beside the 6THV of the rest; then their slopes. In a per-token form as GSPO-token has it, a row's slope
has its own advantage, so that advantages may differ within a sequence.

A user's own is a function

    objective(logprobs, old, ref, advantages, mask, sequence) -> loss

of vectors [R], a value a row that is in the loss: log-probs (differentiable), those when sampled, the reference's (None
without one), advantages, mask (bool: the row is in the loss; all are, for the others were left out), and sequence
(int64: which sequence the row is of, from 0). It returns the loss of each row, [R], which is multiplied by the row's
weight (the aggregation) and added up. Its gradient is autograd's, so what it detaches is detached.

Axes: R rows in the loss.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from thresher.kernels.objective import LossRows, LossSettings

EXP_CAP = 80.0
Objective = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor], Tensor]
OF_ROWS = ("clip", "reinforce", "cispo", "sapo", "dppo_tv", "dppo_kl")
OF_SEQUENCES = ("gspo", "gmpo")
SURROGATES = (*OF_ROWS, *OF_SEQUENCES)


def capped(exponent_R: Tensor) -> Tensor:
    """min(exponent, 80) whose derivative stays 1 above the cap."""
    return exponent_R.clamp(max=EXP_CAP).detach() + (exponent_R - exponent_R.detach())


def capped_exp(exponent_R: Tensor) -> Tensor:
    """exp(min(exponent, 80)), elementwise. For autograd its derivative is its own value, capped or not."""
    return torch.exp(capped(exponent_R))


def log_ratios(logprobs_R: Tensor, rows: "LossRows") -> Tensor:
    """log(pi / pi_old) of each row; autograd passes to pi alone."""
    return logprobs_R - (logprobs_R.detach() if rows.old_R is None else rows.old_R)


def sequence_means(values_R: Tensor, sequence_R: Tensor) -> Tensor:
    """The mean over the rows of its sequence, for each row; without a gradient. Sums are in float64."""
    count = int(sequence_R.max()) + 1 if len(sequence_R) else 0
    totals = torch.zeros(count, dtype=torch.float64, device=values_R.device)
    rows = torch.zeros_like(totals).index_add_(0, sequence_R, torch.ones_like(values_R, dtype=torch.float64))
    totals.index_add_(0, sequence_R, values_R.detach().double())
    return (totals / rows)[sequence_R].to(values_R.dtype)


def surrogate_of(logprobs_R: Tensor, rows: "LossRows", settings: "LossSettings") -> tuple[Tensor, Tensor, Tensor]:
    """Return (ratio, J, clipped) of each row; autograd may pass through J. clipped: no gradient, though A is not 0."""
    A_R, name = rows.advantages_R, settings.surrogate
    log_R = log_ratios(logprobs_R, rows)
    ratio_R = capped_exp(log_R)
    free_R = torch.zeros_like(A_R, dtype=torch.bool)
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    if not isinstance(name, str):
        return ratio_R, -_own_loss(name, logprobs_R, rows), free_R
    if name == "reinforce":
        return ratio_R, A_R * logprobs_R, free_R
    if name == "cispo":
        return ratio_R, ratio_R.detach().clamp(low, high) * A_R * logprobs_R, free_R
    if name == "sapo":
        tau_R = torch.full_like(A_R, settings.tau_negative).masked_fill_(A_R > 0, settings.tau_positive)
        return ratio_R, 4.0 / tau_R * torch.sigmoid(tau_R * (ratio_R - 1.0)) * A_R, free_R
    if name in ("dppo_tv", "dppo_kl"):
        far_R = _divergence(name, logprobs_R.detach(), rows) > settings.divergence
        stopped_R = far_R & (A_R * (ratio_R - 1.0) > 0)
        return ratio_R, torch.where(stopped_R, ratio_R.detach(), ratio_R) * A_R, stopped_R
    if name in OF_SEQUENCES:
        assert rows.sequence_R is not None
        if name == "gspo":
            worth_R = capped_exp(sequence_means(log_R, rows.sequence_R) + log_R - log_R.detach())
            return ratio_R, *_clipped(worth_R, A_R, low, high, settings.dual_clip)
        binds_R = torch.where(A_R > 0, ratio_R > high, (ratio_R < low) & (A_R < 0))
        bound_R = torch.where(binds_R, log_R.detach().clamp(math.log(low) if low else -math.inf, math.log(high)), log_R)
        worth_R = capped_exp(sequence_means(bound_R, rows.sequence_R) + bound_R - bound_R.detach())
        return ratio_R, worth_R * A_R, binds_R
    return ratio_R, *_clipped(ratio_R, A_R, low, high, settings.dual_clip)


def _clipped(ratio_R: Tensor, A_R: Tensor, low: float, high: float, dual: float | None) -> tuple[Tensor, Tensor]:
    worth_R = torch.minimum(ratio_R * A_R, ratio_R.clamp(low, high) * A_R)
    clipped_R = torch.where(A_R > 0, ratio_R > high, (ratio_R < low) & (A_R < 0))
    if dual is not None:
        negative_R = A_R < 0
        worth_R = torch.where(negative_R, torch.maximum(worth_R, dual * A_R), worth_R)
        clipped_R = clipped_R | (negative_R & (ratio_R > dual))
    return worth_R, clipped_R


def _divergence(name: str, logprobs_R: Tensor, rows: "LossRows") -> Tensor:
    """Between pi and pi_old as distributions over "this token" and "another"."""
    old_R = logprobs_R if rows.old_R is None else rows.old_R
    new, old = (x_R.double().clamp(max=0.0).exp() for x_R in (logprobs_R, old_R))
    if name == "dppo_tv":
        return (new - old).abs()
    return torch.special.xlogy(old, old / new) + torch.special.xlogy(1.0 - old, (1.0 - old) / (1.0 - new))


def _own_loss(objective: Objective, logprobs_R: Tensor, rows: "LossRows") -> Tensor:
    """A user's loss of each row. ValueError for one of another shape, and one that is not finite."""
    assert rows.sequence_R is not None
    old_R = logprobs_R.detach() if rows.old_R is None else rows.old_R
    loss_R = objective(logprobs_R, old_R, rows.ref_R, rows.advantages_R, rows.weights_R != 0, rows.sequence_R)
    name = getattr(objective, "__name__", "objective")
    if not isinstance(loss_R, Tensor) or loss_R.shape != logprobs_R.shape:
        shape = f"a tensor of shape {list(loss_R.shape)}" if isinstance(loss_R, Tensor) else repr(type(loss_R).__name__)
        raise ValueError(f"{name} returned {shape}; expected the loss of each row, of shape {list(logprobs_R.shape)}")
    if not bool(loss_R.isfinite().all()):
        row = int((~loss_R.isfinite()).nonzero()[0])
        raise ValueError(f"{name} returned {loss_R[row].item()} for row {row}; expected finite numbers")
    return loss_R


def slopes(logprobs_R: Tensor, rows: "LossRows", settings: "LossSettings") -> Tensor:
    """Return d(sum_t w_t J_t)/dl_t / w_t of each row, w its weight: for surrogates of one row dJ/dl."""
    with torch.enable_grad():
        leaf_R = logprobs_R.detach().requires_grad_(True)
        _, worth_R, _ = surrogate_of(leaf_R, rows, settings)
        if isinstance(settings.surrogate, str):  # a row's slope has no other row's weight
            (slope_R,) = torch.autograd.grad(worth_R.sum(), leaf_R)
            return slope_R
        total = (worth_R * rows.weights_R).sum()
        if not total.requires_grad:
            raise ValueError("the objective does not depend on the log-probs; return what is computed from them")
        (slope_R,) = torch.autograd.grad(total, leaf_R)
    if not bool(slope_R.isfinite().all()):
        raise ValueError("the objective's gradient is not finite")
    return slope_R / rows.weights_R
