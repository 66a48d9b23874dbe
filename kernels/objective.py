"""The per-token surrogate objective: ratio, clip, KL and entropy of a row, and what its logits' gradient is made of.

The loss's maths stands at the top of loss.py; this file is its part after the vocabulary, on [N] vectors, shared by
every backend. Nothing here sees a logit, and nothing here sees a masked row.

KL of one token, the value and the gradient chosen apart: d = log pi - log pi_ref, r = pi / pi_old; c multiplies
grad log pi where the estimator stands in the loss.

    k1        d                   c = 1             expectation 0 on policy: no gradient signal
    k2        d * d / 2           c = d             the exact reverse-KL gradient, on policy
    k3        exp(-d) + d - 1     c = 1 - exp(-d)   the gradient of KL(ref || pi); unbounded for pi << ref
    k3_ratio  r * k3              c = r * d         exact on and off policy: r*k3 + r*(1 - exp(-d)) = r*d

An exponent is capped at 80, and the gradient keeps the capped value instead of dropping to zero, so an explosion is
seen and never becomes NaN. k3_ratio multiplies two such exponentials, so the product is bounded by exp(80) as well.

k1, k2, k3: Schulman, "Approximating KL Divergence" (2020). Deliberately absent: sequence-level estimators.

Legend: N rows that count (or a chunk of them), T tokens.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from thresher.kernels.checks import check_scalar

EXP_CAP = 80.0
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

    def __post_init__(self) -> None:
        check_scalar("temperature", self.temperature, 0.0, strict=True)
        check_scalar("clip_low", self.clip_low, 0.0)
        check_scalar("clip_high", self.clip_high, 0.0)
        check_scalar("beta", self.beta, 0.0)
        check_scalar("entropy_coef", self.entropy_coef)
        if self.dual_clip is not None:
            check_scalar("dual_clip", self.dual_clip, 1.0, strict=True)
        for name, choice in (("kl_value", self.kl_value), ("kl_gradient", self.kl_gradient or self.kl_value)):
            if choice not in CHOICES:
                raise ValueError(f"{name} is {choice!r}; expected one of {', '.join(CHOICES)}")

    @property
    def gradient_estimator(self) -> str:
        """The estimator whose gradient is taken; "none" when beta leaves it without effect."""
        return (self.kl_gradient or self.kl_value) if self.beta else "none"

    @property
    def every_row_has_gradient(self) -> bool:
        """False when a row of advantage 0 has no gradient, whatever its log-prob turns out to be."""
        return self.gradient_estimator != "none" or self.entropy_coef != 0.0


@dataclass(frozen=True, slots=True, eq=False)
class LossRows:
    """The rows that count, in the order they are worked on; floating vectors in the compute dtype."""

    index_N: Tensor | None  # int64, where the row stands in the inputs; None: all rows, as they stand there
    targets_N: Tensor  # int64
    old_N: Tensor | None  # None: the log-probs of this very forward, so that every ratio is 1
    advantages_N: Tensor
    weights_N: Tensor
    ref_N: Tensor | None

    def __len__(self) -> int:
        return len(self.targets_N)

    def part(self, rows: slice) -> "LossRows":
        index_N = None if self.index_N is None else self.index_N[rows]
        old_N = None if self.old_N is None else self.old_N[rows]
        ref_N = None if self.ref_N is None else self.ref_N[rows]
        return LossRows(
            index_N,
            self.targets_N[rows],
            old_N,
            self.advantages_N[rows],
            self.weights_N[rows],
            ref_N,
        )


@dataclass(frozen=True, slots=True, eq=False)
class LossResult:
    """What `grpo_loss` returns. Per-token tensors are [T], detached, float32 (float64 for float64 inputs), in
    nats; a row of weight 0 holds 0 (False) everywhere."""

    loss: Tensor  # 0-d, the sum over rows
    logprobs: Tensor
    ratios: Tensor  # pi / pi_old, its exponent capped at 80
    kl: dict[str, Tensor]  # by estimator: k1, k2, k3, k3_ratio; empty without reference log-probs
    entropy: Tensor
    clipped: Tensor  # bool: A != 0 and the clip, or dual clip, leaves the policy-gradient term no gradient
    capped: Tensor  # 0-d int64: rows that count with log-ratio > 80, or d < -80, whose exponent was capped
    hidden_grad_TH: Tensor | None = None  # hidden's dtype; only when the call was given lm_head_grad_VH


class LogitGradient(NamedTuple):
    """What a face makes of a chunk: dloss/d(hidden @ head.T) is dlogits_NV times factor_N, row by row."""

    logprobs_N: Tensor
    entropy_N: Tensor
    dlogits_NV: Tensor  # a view of the face's workspace: the next chunk reuses it
    factor_N: Tensor | None  # None: all 1


class LossFace(Protocol):
    """A face of the loss, for the chunks of a call: TorchLoss in loss.py, TritonLoss in coefficients.py. Each is a face
    of the head (HeadFace in logprob.py) that can do more."""

    def logprobs(self, rows_NH: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        """As HeadFace has it."""

    def gradient(self, rows_NH: Tensor, part: LossRows) -> LogitGradient:
        """The same with dloss/dlogits. rows_NH: the hidden states of `part`, dense."""


def _capped(exponent_N: Tensor) -> Tensor:
    """min(exponent, 80) whose derivative stays 1 above the cap."""
    return exponent_N.clamp(max=EXP_CAP).detach() + (exponent_N - exponent_N.detach())


def capped_exp(exponent_N: Tensor) -> Tensor:
    """exp(min(exponent, 80)), elementwise. For autograd its derivative is its own value, capped or not."""
    return torch.exp(_capped(exponent_N))


def kl_values(log_ref_ratio_N: Tensor, ratio_N: Tensor) -> dict[str, Tensor]:
    """Every estimator of every row, by name.

    log_ref_ratio_N: d, [N] float32 or float64. ratio_N: r, [N], already capped. Returns ESTIMATORS -> [N], in
    nats. Differentiable: the reference gets its gradient here, and so checks `kl_coefficient`.
    """
    d = log_ref_ratio_N
    # expm1 and not exp(-d) - 1: at |d| = 1e-3 the latter has lost a tenth of k3 in float32.
    k3 = torch.expm1(_capped(-d)) + d
    return {"k1": d, "k2": 0.5 * d * d, "k3": k3, "k3_ratio": (ratio_N * k3).clamp(max=BOUND)}


def kl_coefficient(name: str, log_ref_ratio_N: Tensor, ratio_N: Tensor) -> Tensor:
    """c of the table above: dKL/dlogp of estimator `name` for every row, [N]."""
    d = log_ref_ratio_N
    if name == "k1":
        return torch.ones_like(d)
    if name == "k2":
        return d
    if name == "k3":
        return -torch.expm1((-d).clamp(max=EXP_CAP))
    if name == "k3_ratio":
        return (ratio_N * d).clamp(-BOUND, BOUND)
    return torch.zeros_like(d)


def log_ratios(logprobs_N: Tensor, rows: LossRows) -> Tensor:
    """log(pi / pi_old) of each row; autograd passes to pi alone."""
    return logprobs_N - (logprobs_N.detach() if rows.old_N is None else rows.old_N)


def clipped_objective(logprobs_N: Tensor, rows: LossRows, settings: LossSettings) -> tuple[Tensor, Tensor, Tensor]:
    """(ratio, objective, clipped) of each row; autograd may pass through."""
    advantages_N = rows.advantages_N
    ratios_N = capped_exp(log_ratios(logprobs_N, rows))
    low, high = 1.0 - settings.clip_low, 1.0 + settings.clip_high
    objective_N = torch.minimum(ratios_N * advantages_N, ratios_N.clamp(low, high) * advantages_N)
    clipped_N = torch.where(advantages_N > 0, ratios_N > high, (ratios_N < low) & (advantages_N < 0))
    if settings.dual_clip is not None:
        floor_N = settings.dual_clip * advantages_N
        negative_N = advantages_N < 0
        objective_N = torch.where(negative_N, torch.maximum(objective_N, floor_N), objective_N)
        clipped_N = clipped_N | (negative_N & (ratios_N > settings.dual_clip))
    return ratios_N, objective_N, clipped_N


def logit_coefficients(
    logprobs_N: Tensor, entropy_N: Tensor, rows: LossRows, settings: LossSettings
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What the logits' gradient is made of, 1/temperature included, all [N]:
    dz = on_target * [v = y] + on_probs * p + on_plogp * p log p."""
    ratios_N, _, clipped_N = clipped_objective(logprobs_N, rows, settings)
    on_target_N = -(ratios_N * rows.advantages_N).masked_fill_(clipped_N, 0.0)
    if settings.gradient_estimator != "none":
        assert rows.ref_N is not None
        kl_N = kl_coefficient(settings.gradient_estimator, logprobs_N - rows.ref_N, ratios_N)
        on_target_N = on_target_N + settings.beta * kl_N
    scale_N = rows.weights_N / settings.temperature
    # Bounded, for an infinite coefficient times a probability of 0 would be NaN.
    on_target_N = (on_target_N * scale_N).clamp_(-BOUND, BOUND)
    if not settings.entropy_coef:
        return on_target_N, -on_target_N, None
    on_plogp_N = settings.entropy_coef * scale_N
    return on_target_N, on_plogp_N * entropy_N - on_target_N, on_plogp_N


def assemble(logprobs_N: Tensor, entropy_N: Tensor, rows: LossRows, settings: LossSettings, length: int) -> LossResult:
    """Loss and metrics from log-probs and entropies of the rows that count; autograd may pass to the loss."""
    ratios_N, objective_N, clipped_N = clipped_objective(logprobs_N, rows, settings)
    capped_N = log_ratios(logprobs_N, rows) > EXP_CAP
    kl_N: dict[str, Tensor] = {}
    if rows.ref_N is not None:
        log_ref_ratio_N = logprobs_N - rows.ref_N
        capped_N = capped_N | (log_ref_ratio_N < -EXP_CAP)
        kl_N = kl_values(log_ref_ratio_N, ratios_N)
    loss_N = -objective_N
    if settings.beta and settings.kl_value != "none":
        loss_N = loss_N + settings.beta * kl_N[settings.kl_value].detach()
    estimator = settings.gradient_estimator
    if estimator != "none" and kl_N[estimator].requires_grad:
        # Worth 0: the value above, this one's gradient. Only the reference, which has a graph, comes here.
        loss_N = loss_N + settings.beta * (kl_N[estimator] - kl_N[estimator].detach())
    if settings.entropy_coef:
        loss_N = loss_N - settings.entropy_coef * entropy_N

    def spread(values_N: Tensor) -> Tensor:
        if rows.index_N is None:
            return values_N.detach()
        return values_N.new_zeros(length).index_copy_(0, rows.index_N, values_N.detach())

    return LossResult(
        loss=(rows.weights_N * loss_N).sum(),
        logprobs=spread(logprobs_N),
        ratios=spread(ratios_N),
        kl={name: spread(values_N) for name, values_N in kl_N.items()},
        entropy=spread(entropy_N),
        clipped=spread(clipped_N),
        capped=capped_N.sum(),
    )
