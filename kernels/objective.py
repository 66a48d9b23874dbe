"""The objective of a row: surrogate, KL and entropy, and what its logits' gradient is made of.

The loss's maths stands at the top of loss.py; this file is its part after the vocabulary, on [R] vectors, shared by
every backend. Nothing here sees a logit, and nothing here sees a masked row.

KL of one token, the value and the gradient chosen apart: d = log pi - log pi_ref, r = pi / pi_old; c multiplies
grad log pi where the estimator stands in the loss.

    k1        d                   c = 1             expectation 0 on policy: no gradient signal
    k2        d * d / 2           c = d             the exact reverse-KL gradient, on policy
    k3        exp(-d) + d - 1     c = 1 - exp(-d)   the gradient of KL(ref || pi); unbounded for pi << ref
    k3_ratio  r * k3              c = r * d         exact on and off policy: r*k3 + r*(1 - exp(-d)) = r*d

surrogates.py has the surrogate of ratio and advantage. An exponent is capped at 80, and the gradient keeps the capped
value instead of dropping to zero, so an explosion is seen and never becomes NaN. k3_ratio multiplies two such
exponentials, so the product is bounded by exp(80) as well.

k1, k2, k3: Schulman, "Approximating KL Divergence" (2020). Deliberately absent: sequence-level estimators of the KL.

Axes: R unmasked rows (or a chunk of them), T tokens, V vocabulary (docs/notation.md).
"""

import math
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from thresher.kernels.operands import check_scalar, check_temperature
from thresher.kernels.surrogates import (
    EXP_CAP,
    OF_ROWS,
    SURROGATES,
    Objective,
    capped,
    capped_exp,
    log_ratios,
    slopes,
    surrogate_of,
)

# exp(80) is 5.5e34: inside float32, with four decades left for what it is multiplied with.
BOUND = math.exp(EXP_CAP)
ESTIMATORS = ("k1", "k2", "k3", "k3_ratio")
CHOICES = (*ESTIMATORS, "none")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The scalars of the loss, as `grpo_loss` documents them; refuses what makes no sense."""

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
    divergence: float = 0.2

    def __post_init__(self) -> None:
        check_temperature(self.temperature)
        check_scalar("clip_low", self.clip_low, 0.0)
        check_scalar("clip_high", self.clip_high, 0.0)
        check_scalar("beta", self.beta, 0.0)
        check_scalar("entropy_coef", self.entropy_coef)
        if self.dual_clip is not None:
            check_scalar("dual_clip", self.dual_clip, 1.0, strict=True)
        if isinstance(self.surrogate, str) and self.surrogate not in SURROGATES:
            raise ValueError(f"surrogate is {self.surrogate!r}; expected one of {', '.join(SURROGATES)}, or a function")
        for name in ("tau_positive", "tau_negative"):
            check_scalar(name, getattr(self, name), 0.0, strict=True)
        check_scalar("divergence", self.divergence, 0.0)
        for name, choice in (("kl_value", self.kl_value), ("kl_gradient", self.kl_gradient or self.kl_value)):
            if choice not in CHOICES:
                raise ValueError(f"{name} is {choice!r}; expected one of {', '.join(CHOICES)}")

    @property
    def gradient_estimator(self) -> str:
        """The estimator whose gradient is taken; "none" when beta leaves it without effect."""
        return (self.kl_gradient or self.kl_value) if self.beta else "none"

    @property
    def of_rows(self) -> bool:
        """Whether the surrogate of a row needs no other row of its sequence."""
        return self.surrogate in OF_ROWS

    @property
    def every_row_has_gradient(self) -> bool:
        """False when a row of advantage 0 has no gradient, whatever its log-prob turns out to be."""
        own = not isinstance(self.surrogate, str)
        return self.gradient_estimator != "none" or self.entropy_coef != 0.0 or own


@dataclass(frozen=True, slots=True, eq=False)
class LossRows:
    """The unmasked rows, in the order they are worked on; floating vectors in the compute dtype."""

    index_R: Tensor | None  # int64, where the row stands in the inputs; None: all rows, as they stand there
    targets_R: Tensor  # int64
    old_R: Tensor | None  # None: the log-probs of this very forward, so that every ratio is 1
    advantages_R: Tensor
    weights_R: Tensor
    ref_R: Tensor | None
    sequence_R: Tensor | None = None  # int64, the number of each row's sequence, from 0
    slopes_R: Tensor | None = None  # of the surrogate by the log-prob, once they are known for all rows

    def __len__(self) -> int:
        return len(self.targets_R)

    def part(self, rows: slice) -> "LossRows":
        vectors = {field.name: getattr(self, field.name) for field in fields(self)}
        cut: dict[str, Any] = {name: None if x_R is None else x_R[rows] for name, x_R in vectors.items()}
        return LossRows(**cut)


@dataclass(frozen=True, slots=True, eq=False)
class LossResult:
    """Result of `grpo_loss`. Per-token tensors are [T], detached, float32 (float64 for float64 inputs), in nats; a row
    of weight 0 holds 0 (False) everywhere."""

    loss: Tensor  # 0-d, the sum over rows
    logprobs: Tensor
    ratios: Tensor  # pi / pi_old, its exponent capped at 80
    kl: dict[str, Tensor]  # by estimator: k1, k2, k3, k3_ratio; empty without reference log-probs
    entropy: Tensor
    clipped: Tensor  # bool: A != 0 and the clip, or dual clip, leaves the policy-gradient term no gradient
    capped: Tensor  # 0-d int64: unmasked rows with log-ratio > 80, or d < -80, whose exponent was capped
    hidden_grad_TH: Tensor | None = None  # hidden's dtype; only when the call was given lm_head_grad_VH
    kl_coefficients: Tensor | None = None  # dKL/dlogp of the gradient's estimator; None without reference log-probs


class LogitGradient(NamedTuple):
    """A backend's result for a chunk: dloss/d(hidden @ head.T) is dlogits_RV times factor_R, row by row."""

    logprobs_R: Tensor
    entropy_R: Tensor
    dlogits_RV: Tensor  # a view of the backend's workspace, reused by the next chunk; may end in columns of zeros
    factor_R: Tensor | None  # None: all 1


class LossBackend(Protocol):
    """An implementation of the loss, for the chunks of a call: TorchLoss in loss.py, TritonLoss in
    coefficients_triton.py. Each is a HeadBackend (logprob.py) that can do more."""

    def logprobs(self, rows_RH: Tensor, targets_R: Tensor) -> tuple[Tensor, Tensor]:
        """As HeadBackend has it."""

    def gradient(self, rows_RH: Tensor, part: LossRows) -> LogitGradient:
        """The same with dloss/dlogits. rows_RH: the hidden states of `part`, dense."""


def kl_values(log_ref_ratio_R: Tensor, ratio_R: Tensor) -> dict[str, Tensor]:
    """Every estimator of every row, by name.

    log_ref_ratio_R: d, [R] float32 or float64. ratio_R: r, [R], already capped. Returns ESTIMATORS -> [R], in
    nats. Differentiable: the reference gets its gradient here, and so checks `kl_coefficient`.
    """
    d = log_ref_ratio_R
    # expm1 and not exp(-d) - 1: at |d| = 1e-3 the latter has lost a tenth of k3 in float32.
    k3 = torch.expm1(capped(-d)) + d
    return {"k1": d, "k2": 0.5 * d * d, "k3": k3, "k3_ratio": (ratio_R * k3).clamp(max=BOUND)}


def kl_coefficient(name: str, log_ref_ratio_R: Tensor, ratio_R: Tensor) -> Tensor:
    """c of the table above: dKL/dlogp of estimator `name` for every row, [R]."""
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
    """Return dloss/dlogp of each row, entropy and weight aside, [R]: the surrogate's and the KL's."""
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
    """Return the coefficients of the logits' gradient (on_target, on_probs, on_plogp), 1/temperature included, all [R]:
    dz = on_target * [v = y] + on_probs * p + on_plogp * p log p."""
    on_target_R = target_coefficients(logprobs_R, rows, settings)
    scale_R = rows.weights_R / settings.temperature
    # Bounded, for an infinite coefficient times a probability of 0 would be NaN.
    on_target_R = (on_target_R * scale_R).clamp_(-BOUND, BOUND)
    if not settings.entropy_coef:
        return on_target_R, -on_target_R, None
    on_plogp_R = settings.entropy_coef * scale_R
    return on_target_R, on_plogp_R * entropy_R - on_target_R, on_plogp_R


def assemble(logprobs_R: Tensor, entropy_R: Tensor, rows: LossRows, settings: LossSettings, length: int) -> LossResult:
    """Loss and metrics from log-probs and entropies of the unmasked rows; autograd may pass to the loss."""
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
        # Worth 0: the value above, this one's gradient. Only the reference, which has a graph, comes here.
        loss_R = loss_R + settings.beta * (kl_R[estimator] - kl_R[estimator].detach())
    if settings.entropy_coef:
        loss_R = loss_R - settings.entropy_coef * entropy_R

    def spread(values_R: Tensor) -> Tensor:
        if rows.index_R is None:
            return values_R.detach()
        return values_R.new_zeros(length).index_copy_(0, rows.index_R, values_R.detach())

    return LossResult(
        loss=(rows.weights_R * loss_R).sum(),
        logprobs=spread(logprobs_R),
        ratios=spread(ratios_R),
        kl={name: spread(values_R) for name, values_R in kl_R.items()},
        entropy=spread(entropy_R),
        clipped=spread(clipped_R),
        capped=capped_R.sum(),
        kl_coefficients=None if coefficients_R is None else spread(coefficients_R),
    )
