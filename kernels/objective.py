"""The objective of a row: surrogate, KL and entropy, and the coefficients of its logits' gradient.

The maths of the loss is at the top of loss.py. This file is its part after the vocabulary, on [R] vectors, shared by
every backend. It sees neither logits nor masked rows.

Surrogates: J is maximised. l = log pi, r = exp(l - old), A the advantage; [x] passes no gradient; clip(r) lies in
[1 - low, 1 + high]; means are over a sequence's rows in the loss.

    clip       min(r A, clip(r) A); with a dual clip c, where A < 0: max(min(..), c A)     PPO: GRPO, Dr. GRPO, DAPO
    reinforce  A l                                                                         REINFORCE
    cispo      [clip(r)] A l                                                               MiniMax-M1, 2506.13585
    sapo       4/tau sigmoid(tau (r - 1)) A, tau by the sign of A                          SAPO, 2511.20347
    dppo_tv    r A, no gradient where D > delta and A (r - 1) > 0; D = |pi - pi_old|       DPPO, 2602.04879
    dppo_kl    the same, D the KL of pi_old from pi, of "this token" and "another"         DPPO
    gspo       min(s A, clip(s) A), s = exp([mean(l - old)] + l - [l])                     GSPO-token, 2507.18071
    gmpo       A exp([mean(c)] + c - [c]), c = l - old, bounded where clip's clip binds    GMPO, 2507.20673
    guard      J - lambda max(0, old - l) for rows of A >= 0, in a turn whose sum of old - l over these rows is above 0:
               a likelihood that falls though the answer was right                         LLDS, 2512.04220, eq. 4
               (guard_zero=False: only rows of A > 0; a row whose turn is -1 is not guarded)

The first six need one row at a time. Their slopes dJ/dl are computed chunk by chunk, before the logits' gradient.
gspo, gmpo, the guard and a user's own need all rows of a call. For these the log-probs are computed first, in a pass of
the head without a gradient (2THV in addition to the 6THV of the rest), then the slopes. A row's slope contains the
row's own advantage, so advantages may differ within a sequence.

A user's own surrogate is a function

    objective(logprobs, old, ref, advantages, mask, sequence) -> loss

of vectors [R], one value per row that is in the loss: log-probs (differentiable), old log-probs, the reference's (None
without one), advantages, mask (bool: the row is in the loss; all True, because masked rows were dropped), and sequence
(int64: the number of the row's sequence, from 0). It returns the loss of each row, [R], which is multiplied by the
row's weight (the aggregation) and summed. Its gradient is that of autograd; detached terms have none.

KL of one token; value and gradient are chosen separately. d = log pi - log pi_ref, r = pi / pi_old; c multiplies
grad log pi if the estimator is in the loss.

    k1        d                   c = 1             expectation 0 on policy: no gradient signal
    k2        d * d / 2           c = d             the exact reverse-KL gradient, on policy
    k3        exp(-d) + d - 1     c = 1 - exp(-d)   the gradient of KL(ref || pi); unbounded for pi << ref
    k3_ratio  r * k3              c = r * d         exact on and off policy: r*k3 + r*(1 - exp(-d)) = r*d

Exponents are capped at 80. The gradient keeps the capped value instead of dropping to zero, so an explosion stays
visible and never becomes NaN. k3_ratio multiplies two such exponentials; the product is bounded by exp(80) as well.

k1, k2, k3: Schulman, "Approximating KL Divergence" (2020). Deliberately absent: sequence-level estimators of the KL.

Axes: R unmasked rows (or a chunk of them), T tokens, V vocabulary (docs/notation.md).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from thresher.kernels.logprob import HeadBackend
from thresher.kernels.operands import check_scalar, check_temperature

EXP_CAP = 80.0
Objective = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor], Tensor]
PER_TOKEN = ("clip", "reinforce", "cispo", "sapo", "dppo_tv", "dppo_kl")
PER_SEQUENCE = ("gspo", "gmpo")
SURROGATES = (*PER_TOKEN, *PER_SEQUENCE)
DUAL_CLIPPED = ("clip", "gspo")
# exp(80) is 5.5e34: within float32, with four decades left for the numbers that it is multiplied by.
BOUND = math.exp(EXP_CAP)
ESTIMATORS = ("k1", "k2", "k3", "k3_ratio")
CHOICES = (*ESTIMATORS, "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The scalars of the loss, as `grpo_loss` documents them. ValueError if one is out of range or unknown."""

    temperature: float = 1.0
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    kl_value: str = "k3"
    kl_gradient: str | None = None
    beta: float = 0.0
    entropy_coef: float = 0.0
    surrogate: str | Objective = "clip"
    tau_positive: float = 1.0
    tau_negative: float = 1.05
    divergence: float = 0.15
    guard: float = 0.0
    guard_zero: bool = True

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        check_scalar("clip_low", self.clip_low, 0.0)
        check_scalar("clip_high", self.clip_high, 0.0)
        check_scalar("beta", self.beta, 0.0)
        check_scalar("entropy_coef", self.entropy_coef)
        if self.dual_clip is not None:
            check_scalar("dual_clip", self.dual_clip, 1.0, strict=True)
            if self.surrogate not in DUAL_CLIPPED:
                with_it = f"dual_clip is {self.dual_clip} with surrogate = {self.surrogate!r}"
                raise ValueError(f"{with_it}; only {' and '.join(DUAL_CLIPPED)} use it, expected None")
        if isinstance(self.surrogate, str) and self.surrogate not in SURROGATES:
            raise ValueError(f"surrogate is {self.surrogate!r}; expected one of {', '.join(SURROGATES)}, or a function")
        for name in ("tau_positive", "tau_negative"):
            check_scalar(name, getattr(self, name), 0.0, strict=True)
        check_scalar("divergence", self.divergence, 0.0)
        check_scalar("guard", self.guard, 0.0)
        for name, choice in (("kl_value", self.kl_value), ("kl_gradient", self.kl_gradient or self.kl_value)):
            if choice not in CHOICES:
                raise ValueError(f"{name} is {choice!r}; expected one of {', '.join(CHOICES)}")

    @property
    def gradient_estimator(self) -> str:
        """Return the estimator whose gradient is taken; "none" if beta is 0."""
        return (self.kl_gradient or self.kl_value) if self.beta else "none"

    @property
    def per_token(self) -> bool:
        """Return whether the surrogate of a row needs no other row."""
        return self.surrogate in PER_TOKEN and not self.guard

    @property
    def every_row_has_gradient(self) -> bool:
        """Return False if a row of advantage 0 has no gradient, whatever its log-prob is."""
        whatever = not isinstance(self.surrogate, str) or self.guard > 0
        return self.gradient_estimator != "none" or self.entropy_coef != 0.0 or whatever


@dataclass(frozen=True, slots=True, eq=False)
class LossRows:
    """The unmasked rows, in the order in which they are processed; floating vectors in the compute dtype."""

    index_R: Tensor | None  # int64, the row's index in the inputs; None: all rows, in the order of the inputs
    targets_R: Tensor  # int64
    old_R: Tensor | None  # None: the log-probs of the same forward, so that every ratio is 1
    advantages_R: Tensor
    weights_R: Tensor
    ref_R: Tensor | None
    sequence_R: Tensor | None = None  # int64, the number of each row's sequence, from 0
    turn_R: Tensor | None = None  # int64, the number of each row's turn, from 0, of all sequences; -1: not guarded
    length: int | None = None  # T of the call, above every sequence and turn number; None: R
    slopes_R: Tensor | None = None  # dJ/dl of the surrogate, once computed for all rows

    def __len__(self) -> int:
        return len(self.targets_R)

    @property
    def total(self) -> int:
        return len(self) if self.length is None else self.length

    def part(self, rows: slice) -> "LossRows":
        vectors = {field.name: getattr(self, field.name) for field in fields(self)}
        cut: dict[str, Any] = {name: x_R[rows] if isinstance(x_R, Tensor) else x_R for name, x_R in vectors.items()}
        return LossRows(**cut)


@dataclass(frozen=True, slots=True, eq=False)
class LossResult:
    """Result of `grpo_loss`.

    Per-token tensors are [T], detached, float32 (float64 for float64 inputs), in nats; 0 (False) at rows of weight 0.
    """

    loss: Tensor  # 0-d, the sum over rows
    logprobs: Tensor
    ratios: Tensor  # pi / pi_old, its exponent capped at 80
    kl: dict[str, Tensor]  # by estimator: k1, k2, k3, k3_ratio; empty without reference log-probs
    entropy: Tensor
    clipped: Tensor  # bool: A != 0 and the clip, or dual clip, removes the gradient of the policy-gradient term
    capped: Tensor  # 0-d int64: unmasked rows with log-ratio > 80, or d < -80, whose exponent was capped
    hidden_grad_TH: Tensor | None = None  # hidden's dtype; only if the call was given lm_head_grad_VH
    kl_coefficients: Tensor | None = None  # dKL/dlogp of the gradient's estimator; None without reference log-probs
    logit_gradients: Tensor | None = None  # dloss/d(hidden @ head.T)[target]; None if the call computed no gradient


class LogitGradient(NamedTuple):
    """A backend's result for a chunk: dloss/d(hidden @ head.T) is dlogits_RV times factor_R, row by row."""

    logprobs_R: Tensor
    entropy_R: Tensor
    dlogits_RV: Tensor  # a view of the backend's workspace, reused by the next chunk; may end in columns of zeros
    factor_R: Tensor | None  # None: all 1


class LossBackend(HeadBackend, Protocol):
    """An implementation of the loss for chunks: TorchLoss in loss.py, TritonLoss in coefficients_triton.py."""

    def gradient(self, rows_RH: Tensor, part: LossRows) -> LogitGradient:
        """Compute `logprobs` and dloss/dlogits. rows_RH: the hidden states of `part`, dense."""


def capped(exponent_R: Tensor) -> Tensor:
    """Return min(exponent, 80), with a derivative that stays 1 above the cap."""
    return exponent_R.clamp(max=EXP_CAP).detach() + (exponent_R - exponent_R.detach())


def capped_exp(exponent_R: Tensor) -> Tensor:
    """Return exp(min(exponent, 80)), elementwise. For autograd its derivative is its own value, capped or not."""
    return torch.exp(capped(exponent_R))


def log_ratios(logprobs_R: Tensor, rows: LossRows) -> Tensor:
    """Return log(pi / pi_old) of each row; only pi has a gradient."""
    return logprobs_R - (logprobs_R.detach() if rows.old_R is None else rows.old_R)


class WrongObjective(ValueError):
    """A user's objective did not return a loss."""


def group_means(values_R: Tensor, group_R: Tensor, groups: int) -> Tensor:
    """Return for each row the mean over the rows of its group, a number below `groups`, without a gradient.

    Sums are in float64. On CUDA their order is not fixed, so that rounding of 1e-16 may differ between calls."""
    totals = values_R.new_zeros(groups, dtype=torch.float64)
    rows = torch.zeros_like(totals).index_add_(0, group_R, torch.ones_like(values_R, dtype=torch.float64))
    totals.index_add_(0, group_R, values_R.detach().double())
    return (totals / rows)[group_R].to(values_R.dtype)


def surrogate_of(logprobs_R: Tensor, rows: LossRows, settings: LossSettings) -> tuple[Tensor, Tensor, Tensor]:
    """Return (ratio, J, clipped) of each row; J is differentiable. clipped: no gradient, though A is not 0."""
    ratio_R = capped_exp(log_ratios(logprobs_R, rows))
    surrogate_R, clipped_R = _surrogate(logprobs_R, ratio_R, rows, settings)
    if settings.guard:
        assert rows.turn_R is not None
        held_R = rows.advantages_R >= 0 if settings.guard_zero else rows.advantages_R > 0
        fallen_R = -log_ratios(logprobs_R, rows) * (held_R & (rows.turn_R >= 0))
        fallen_R = fallen_R * (group_means(fallen_R, rows.turn_R.clamp(min=0), rows.total) > 0)
        surrogate_R = surrogate_R - settings.guard * fallen_R.clamp(min=0.0)
    return ratio_R, surrogate_R, clipped_R


def _surrogate(logprobs_R: Tensor, ratio_R: Tensor, rows: LossRows, settings: LossSettings) -> tuple[Tensor, Tensor]:
    A_R, name = rows.advantages_R, settings.surrogate
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    free_R = torch.zeros_like(A_R, dtype=torch.bool)
    if not isinstance(name, str):
        return -_own_loss(name, logprobs_R, rows), free_R
    if name == "clip":
        return _clipped(ratio_R, A_R, low, high, settings.dual_clip)
    if name == "reinforce":
        return A_R * logprobs_R, free_R
    if name == "cispo":
        return ratio_R.detach().clamp(low, high) * A_R * logprobs_R, free_R
    if name == "sapo":
        tau_R = torch.full_like(A_R, settings.tau_negative).masked_fill_(A_R > 0, settings.tau_positive)
        return 4.0 / tau_R * torch.sigmoid(tau_R * (ratio_R - 1.0)) * A_R, free_R
    if name in ("dppo_tv", "dppo_kl"):
        far_R = _divergence(name, logprobs_R.detach(), rows) > settings.divergence
        stopped_R = far_R & (A_R * (ratio_R - 1.0) > 0)
        return torch.where(stopped_R, ratio_R.detach(), ratio_R) * A_R, stopped_R
    assert rows.sequence_R is not None
    log_R = log_ratios(logprobs_R, rows)
    if name == "gspo":
        ratio_R = capped_exp(group_means(log_R, rows.sequence_R, rows.total) + log_R - log_R.detach())
        return _clipped(ratio_R, A_R, low, high, settings.dual_clip)
    binds_R = torch.where(A_R > 0, ratio_R > high, (ratio_R < low) & (A_R < 0))
    bound_R = torch.where(binds_R, log_R.detach().clamp(math.log(low) if low > 0 else -math.inf, math.log(high)), log_R)
    means_R = group_means(bound_R, rows.sequence_R, rows.total)
    return capped_exp(means_R + bound_R - bound_R.detach()) * A_R, binds_R


def _clipped(ratio_R: Tensor, A_R: Tensor, low: float, high: float, dual: float | None) -> tuple[Tensor, Tensor]:
    surrogate_R = torch.minimum(ratio_R * A_R, ratio_R.clamp(low, high) * A_R)
    clipped_R = torch.where(A_R > 0, ratio_R > high, (ratio_R < low) & (A_R < 0))
    if dual is not None:
        negative_R = A_R < 0
        surrogate_R = torch.where(negative_R, torch.maximum(surrogate_R, dual * A_R), surrogate_R)
        clipped_R = clipped_R | (negative_R & (ratio_R > dual))
    return surrogate_R, clipped_R


def _divergence(name: str, logprobs_R: Tensor, rows: LossRows) -> Tensor:
    """Return the divergence of pi and pi_old as distributions over "this token" and "another"."""
    old_R = logprobs_R if rows.old_R is None else rows.old_R
    new, old = (x_R.double().clamp(max=0.0).exp() for x_R in (logprobs_R, old_R))
    if name == "dppo_tv":
        return (new - old).abs()
    found: Tensor = torch.special.xlogy(old, old / new) + torch.special.xlogy(1.0 - old, (1.0 - old) / (1.0 - new))
    return found


def _own_loss(objective: Objective, logprobs_R: Tensor, rows: LossRows) -> Tensor:
    """Return a user's loss of each row. WrongObjective if it has another shape or is not finite.

    Without rows it is not called: ranks that have fewer micro-batches than others fill up with empty ones."""
    assert rows.sequence_R is not None
    if not len(rows):
        return logprobs_R
    old_R = logprobs_R.detach() if rows.old_R is None else rows.old_R
    loss_R = objective(logprobs_R, old_R, rows.ref_R, rows.advantages_R, rows.weights_R != 0, rows.sequence_R)
    name = getattr(objective, "__name__", "objective")
    if not isinstance(loss_R, Tensor) or loss_R.shape != logprobs_R.shape:
        found = f"a tensor of shape {list(loss_R.shape)}" if isinstance(loss_R, Tensor) else repr(type(loss_R).__name__)
        expected = f"the loss of each row, of shape {list(logprobs_R.shape)}"
        raise WrongObjective(f"{name} returned {found}; expected {expected}")
    if not bool(loss_R.isfinite().all()):
        row = int((~loss_R.isfinite()).nonzero()[0])
        raise WrongObjective(f"{name} returned {loss_R[row].item()} for row {row}; expected finite numbers")
    return loss_R


def slopes(logprobs_R: Tensor, rows: LossRows, settings: LossSettings) -> Tensor:
    """Return d(sum_t w_t J_t)/dl_t / w_t of each row, w its weight: for surrogates of one row dJ/dl."""
    with torch.enable_grad():
        leaf_R = logprobs_R.detach().requires_grad_(True)
        _, surrogate_R, _ = surrogate_of(leaf_R, rows, settings)
        if isinstance(settings.surrogate, str):  # the weights of other rows are not in a row's slope
            (slope_R,) = torch.autograd.grad(surrogate_R.sum(), leaf_R)
            return slope_R
        total = (surrogate_R * rows.weights_R).sum()
        if not total.requires_grad:
            raise WrongObjective("the objective does not depend on the log-probs; return what is computed from them")
        (slope_R,) = torch.autograd.grad(total, leaf_R)
    if not bool(slope_R.isfinite().all()):
        raise WrongObjective("the objective's gradient is not finite")
    return slope_R / rows.weights_R


def kl_values(log_ref_ratio_R: Tensor, ratio_R: Tensor) -> dict[str, Tensor]:
    """Compute every estimator for every row, by name.

    log_ref_ratio_R: d, [R] float32 or float64. ratio_R: r, [R], already capped. Returns ESTIMATORS -> [R], in
    nats. Differentiable: the reference loss takes its gradient from here, which checks `kl_coefficient` (but for
    k3_ratio at its bound, where this gradient is 0).
    """
    d = log_ref_ratio_R
    # expm1 and not exp(-d) - 1: at |d| = 1e-3 the latter loses a tenth of k3 in float32.
    k3 = torch.expm1(capped(-d)) + d
    return {"k1": d, "k2": 0.5 * d * d, "k3": k3, "k3_ratio": (ratio_R * k3).clamp(max=BOUND)}


def kl_coefficient(name: str, log_ref_ratio_R: Tensor, ratio_R: Tensor) -> Tensor:
    """Return c of the table above: dKL/dlogp of estimator `name` for every row, [R]."""
    d = log_ref_ratio_R
    if name == "k1":
        return torch.ones_like(d)
    if name == "k2":
        return d
    if name == "k3":
        return -torch.expm1((-d).clamp(max=EXP_CAP))
    if name == "k3_ratio":
        return (ratio_R * d).clamp(-BOUND, BOUND)
    return torch.zeros_like(d)


def target_coefficients(logprobs_R: Tensor, rows: LossRows, settings: LossSettings) -> Tensor:
    """Return dloss/dlogp of each row, [R], of surrogate and KL, without entropy and weight."""
    if rows.slopes_R is not None:
        coefficient_R = -rows.slopes_R
    elif settings.surrogate == "clip":
        ratios_R, _, clipped_R = surrogate_of(logprobs_R, rows, settings)
        coefficient_R = -(ratios_R * rows.advantages_R).masked_fill_(clipped_R, 0.0)
    else:
        coefficient_R = -slopes(logprobs_R, rows, settings)
    if settings.gradient_estimator != "none":
        assert rows.ref_R is not None
        ratios_R = capped_exp(log_ratios(logprobs_R, rows))
        kl_R = kl_coefficient(settings.gradient_estimator, logprobs_R - rows.ref_R, ratios_R)
        coefficient_R = coefficient_R + settings.beta * kl_R
    return coefficient_R


def logit_coefficients(
    logprobs_R: Tensor, entropy_R: Tensor, rows: LossRows, settings: LossSettings
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the coefficients (on_target, on_probs, on_plogp) of the logits' gradient, all [R].

    dz = on_target * [v = y] + on_probs * p + on_plogp * p log p, with 1/temperature included."""
    on_target_R = target_coefficients(logprobs_R, rows, settings)
    scale_R = rows.weights_R / settings.temperature
    # Bounded, because an infinite coefficient times a probability of 0 would be NaN.
    on_target_R = (on_target_R * scale_R).clamp_(-BOUND, BOUND)
    if not settings.entropy_coef:
        return on_target_R, -on_target_R, None
    on_plogp_R = settings.entropy_coef * scale_R
    return on_target_R, on_plogp_R * entropy_R - on_target_R, on_plogp_R


def assemble(
    logprobs_R: Tensor,
    entropy_R: Tensor,
    rows: LossRows,
    settings: LossSettings,
    logit_gradients_R: Tensor | None = None,
) -> LossResult:
    """Compute loss and metrics from log-probs and entropies of the unmasked rows; the loss is differentiable."""
    ratios_R, objective_R, clipped_R = surrogate_of(logprobs_R, rows, settings)
    capped_R = log_ratios(logprobs_R, rows) > EXP_CAP
    kl_R: dict[str, Tensor] = {}
    coefficients_R = None
    if rows.ref_R is not None:
        log_ref_ratio_R = logprobs_R - rows.ref_R
        capped_R = capped_R | (log_ref_ratio_R < -EXP_CAP)
        kl_R = kl_values(log_ref_ratio_R, ratios_R)
        coefficients_R = kl_coefficient(settings.kl_gradient or settings.kl_value, log_ref_ratio_R, ratios_R)
    loss_R = -objective_R
    if settings.beta and settings.kl_value != "none":
        loss_R = loss_R + settings.beta * kl_R[settings.kl_value].detach()
    estimator = settings.gradient_estimator
    if estimator != "none" and kl_R[estimator].requires_grad:
        # Adds 0 to the value, and this estimator's gradient. Only the reference, which has a graph, runs this.
        loss_R = loss_R + settings.beta * (kl_R[estimator] - kl_R[estimator].detach())
    if settings.entropy_coef:
        loss_R = loss_R - settings.entropy_coef * entropy_R

    def spread(values_R: Tensor) -> Tensor:
        if rows.index_R is None:
            return values_R.detach()
        return values_R.new_zeros(rows.total).index_copy_(0, rows.index_R, values_R.detach())

    return LossResult(
        loss=(rows.weights_R * loss_R).sum(),
        logprobs=spread(logprobs_R),
        ratios=spread(ratios_R),
        kl={name: spread(values_R) for name, values_R in kl_R.items()},
        entropy=spread(entropy_R),
        clipped=spread(clipped_R),
        capped=capped_R.sum(),
        kl_coefficients=None if coefficients_R is None else spread(coefficients_R),
        logit_gradients=None if logit_gradients_R is None else spread(logit_gradients_R),
    )
