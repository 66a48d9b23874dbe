"""KL estimators of one token, the value and the gradient chosen apart.

d = log pi - log pi_ref, r = pi / pi_old; c multiplies grad log pi when the estimator stands in the loss.

    k1        d                   c = 1             expectation 0 on policy: no gradient signal
    k2        d * d / 2           c = d             the exact reverse-KL gradient, on policy
    k3        exp(-d) + d - 1     c = 1 - exp(-d)   the gradient of KL(ref || pi); unbounded for pi << ref
    k3_ratio  r * k3              c = r * d         exact on and off policy: r*k3 + r*(1 - exp(-d)) = r*d

An exponent is capped at 80, and the gradient keeps the capped value instead of dropping to zero, so an
explosion is seen and never becomes NaN. k3_ratio multiplies two such exponentials, so the product is bounded
by exp(80) as well.

k1, k2, k3: Schulman, "Approximating KL Divergence" (2020). Deliberately absent: sequence-level estimators.

Legend: N rows (tokens).
"""

import math

import torch
from torch import Tensor

EXP_CAP = 80.0
# exp(80) is 5.5e34: inside float32, with four decades left for what it is multiplied with.
BOUND = math.exp(EXP_CAP)
ESTIMATORS = ("k1", "k2", "k3", "k3_ratio")
CHOICES = (*ESTIMATORS, "none")


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
