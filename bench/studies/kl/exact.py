"""What each KL estimator is, without sampling: its curves, and its expected gradient by enumeration in float64.

Curves: value and coefficient c = dKL/dlogp of one token, over d = log pi - log pi_ref (kernels/objective.py).

Enumeration: pi = softmax(z) over V outcomes. Every outcome y is one row of the product's own loss, of weight
pi_old(y), so that the loss is an expectation over samples of pi_old and its gradient in z the expected gradient:

    sum_y pi_old(y) KL_y            against  KL(pi || ref) = sum_y pi(y) (log pi(y) - log ref(y))
    sum_y pi_old(y) c_y dlog pi(y)  against  its gradient by autograd, and that of KL(ref || pi)

A token's logits are hidden @ head.T; with a hidden state of one 1, the head's only column is z. Advantages are 0 and
beta is 1: what is left of the loss is the KL. Deliberately absent: formulas of an estimator, which are the kernel's.

Axes: V outcomes, X points of a curve (docs/notation.md).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from thresher.kernels import grpo_loss
from thresher.kernels.objective import ESTIMATORS, kl_coefficient, kl_values

REACH = 12.0  # of the curves, in nats to either side: a probability of 6e-6 where the reference has 1
POINTS = 481
# (value, gradient). The last puts an exact value beside an exact gradient, on policy, without a ratio.
CHOICES = (("k1", "k1"), ("k2", "k2"), ("k3", "k3"), ("k3_ratio", "k3_ratio"), ("k3", "k2"))
DRAWS, OUTCOMES, SPREAD = 100, 7, 1.5  # random policies, and the standard deviation of their logits
EXACT = 1e-10


@dataclass(frozen=True, slots=True)
class EstimatorCurve:
    """One estimator over d: all [X] float64, in nats (d, value) or without unit (coefficient)."""

    name: str
    ratio: float  # pi / pi_old, which only k3_ratio looks at
    d_X: Tensor
    value_X: Tensor
    coefficient_X: Tensor


def curve(name: str, ratio: float = 1.0, points: Sequence[float] | None = None) -> EstimatorCurve:
    """An estimator's curve at the given values of d, by default from -REACH to REACH."""
    grid_X = torch.linspace(-REACH, REACH, POINTS, dtype=torch.float64)
    d_X = grid_X if points is None else torch.tensor(points, dtype=torch.float64)
    ratio_X = torch.full_like(d_X, ratio)
    return EstimatorCurve(name, ratio, d_X, kl_values(d_X, ratio_X)[name], kl_coefficient(name, d_X, ratio_X))


def curves() -> list[EstimatorCurve]:
    """What the study draws: every estimator on policy, and k3_ratio where pi is half or twice pi_old too."""
    return [*(curve(name) for name in ESTIMATORS), *(curve("k3_ratio", ratio) for ratio in (0.5, 2.0))]


def expectation(name: str, gradient: str, logits_V: Tensor, old_V: Tensor, ref_V: Tensor) -> tuple[float, Tensor]:
    """(expected value, expected gradient [V]) of an estimator in the loss, over samples of `old_V`.

    logits_V: of pi, float64. old_V, ref_V: probabilities, float64.
    """
    head_VH = logits_V.detach()[:, None].clone().requires_grad_(True)
    outcomes = len(logits_V)
    result = grpo_loss(
        logits_V.new_ones(outcomes, 1),
        head_VH,
        torch.arange(outcomes),
        old_V.log(),
        torch.zeros_like(old_V),
        old_V,
        ref_logprobs_T=ref_V.log(),
        kl_value=name,
        kl_gradient=gradient,
        beta=1.0,
    )
    result.loss.backward()
    assert head_VH.grad is not None
    return float(result.loss.detach()), head_VH.grad[:, 0]


def exact(logits_V: Tensor, ref_V: Tensor) -> dict[str, tuple[float, Tensor]]:
    """By direction, "reverse" KL(pi || ref) and "forward" KL(ref || pi): (value, gradient [V] in pi's logits)."""
    result = {}
    for direction in ("reverse", "forward"):
        z_V = logits_V.detach().clone().requires_grad_(True)
        logp_V, log_ref_V = torch.log_softmax(z_V, 0), ref_V.log()
        terms_V = logp_V.exp() * (logp_V - log_ref_V) if direction == "reverse" else ref_V * (log_ref_V - logp_V)
        terms_V.sum().backward()
        assert z_V.grad is not None
        result[direction] = (float(terms_V.detach().sum()), z_V.grad)
    return result


def enumerate_all(draws: int = DRAWS, seed: int = 0) -> list[dict[str, Any]]:
    """A row for each sampling distribution and choice of estimators, over `draws` random (pi, pi_old, pi_ref).

    "value_error": |expected value - KL| / KL; "reverse_error", "forward_error": distance of the expected gradient
    from that of KL(pi || ref), KL(ref || pi), as a share of its length; "length": of the expected gradient, as a
    share of the reverse KL's; "cosine" with the reverse KL's gradient, null where there is no gradient. Each is
    {"smallest", "median", "largest"} over the draws. "finding": what the gradient therefore is:
    "exact", "zero", "forward" (exact for KL(ref || pi)) or "biased".
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (draws, 3, OUTCOMES)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64) * SPREAD
    rows = []
    for policy in ("on policy", "off policy"):
        for value, gradient in CHOICES:
            errors = [
                _errors(value, gradient, pi_V, pi_V if policy == "on policy" else old_V, ref_V)
                for pi_V, old_V, ref_V in logits
            ]
            measured = {key: _over_draws([error[key] for error in errors]) for key in errors[0]}
            rows.append(
                {"sampled": policy, "value": value, "gradient": gradient, **measured, "finding": _finding(measured)}
            )
    return rows


def _errors(value: str, gradient: str, pi_V: Tensor, old_V: Tensor, ref_V: Tensor) -> dict[str, float | None]:
    """One draw, all three given as logits."""
    ref_V = torch.softmax(ref_V, 0)
    expected, expected_V = expectation(value, gradient, pi_V, torch.softmax(old_V, 0), ref_V)
    kl = exact(pi_V, ref_V)
    reverse, reverse_V = kl["reverse"]
    forward_V = kl["forward"][1]
    length = float(expected_V.norm() / reverse_V.norm())
    return {
        "value_error": abs(expected - reverse) / reverse,
        "reverse_error": float((expected_V - reverse_V).norm() / reverse_V.norm()),
        "forward_error": float((expected_V - forward_V).norm() / forward_V.norm()),
        "length": length,
        "cosine": float(torch.cosine_similarity(expected_V, reverse_V, 0)) if length > EXACT else None,
    }


def _over_draws(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    return {"smallest": min(known), "median": median(known), "largest": max(known)} if known else None


def _finding(measured: Mapping[str, dict[str, float] | None]) -> str:
    def vanishes(key: str) -> bool:
        entry = measured[key]
        return entry is not None and entry["largest"] < EXACT

    if vanishes("length"):
        return "zero"
    if vanishes("reverse_error"):
        return "exact"
    return "forward" if vanishes("forward_error") else "biased"
