"""The surrogates of kernels/objective.py, each written again from its paper's formula for one sequence."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

LOW, HIGH, DELTA = 0.2, 0.28, 0.01


def clip(x: Tensor, low: float = 1 - LOW, high: float = 1 + HIGH) -> Tensor:
    return x.clamp(low, high)


def cispo(logp: Tensor, old: Tensor, A: Tensor) -> Tensor:
    return clip((logp - old).exp()).detach() * A * logp


def sapo(logp: Tensor, old: Tensor, A: Tensor) -> Tensor:
    tau = torch.tensor([1.0 if a > 0 else 1.05 for a in A.tolist()], dtype=A.dtype)
    return 4 / tau / (1 + (-tau * ((logp - old).exp() - 1)).exp()) * A


def dppo(logp: Tensor, old: Tensor, A: Tensor, kl: bool) -> Tensor:
    worth = []
    for new, before, a in zip(logp, old, A, strict=True):
        p, q = float(new.detach().exp()), min(math.exp(float(before)), 1.0)  # a random "old" may be above 0
        far = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)) if kl and q < 1 else abs(p - q)
        if kl and q == 1:
            far = -math.log(p)
        ratio = (new - before).exp()
        leads_away = (a > 0 and ratio > 1) or (a < 0 and ratio < 1)
        worth.append(a * (ratio.detach() if far > DELTA and leads_away else ratio))
    return torch.stack(worth)


def gspo(logp: Tensor, old: Tensor, A: Tensor) -> Tensor:
    s = (logp - old).mean().exp()
    s = s.detach() * (logp - logp.detach()).exp()
    return torch.minimum(s * A, clip(s) * A)


def gmpo(logp: Tensor, old: Tensor, A: Tensor) -> Tensor:
    """Return its product of ratios, clipped per token, to the power 1/n; the gradient has the token's own factor."""
    log = logp - old
    low, high = math.log(1 - LOW), math.log(1 + HIGH)
    bound = torch.where(A > 0, log.clamp(max=high), torch.where(A < 0, log.clamp(min=low), log))
    mean = math.prod(bound.detach().exp().tolist()) ** (1 / len(A))
    return mean * (bound - bound.detach()).exp() * A


BY_HAND: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "clip": lambda logp, old, A: torch.minimum((logp - old).exp() * A, clip((logp - old).exp()) * A),
    "reinforce": lambda logp, old, A: A * logp,
    "cispo": cispo,
    "sapo": sapo,
    "dppo_tv": lambda logp, old, A: dppo(logp, old, A, kl=False),
    "dppo_kl": lambda logp, old, A: dppo(logp, old, A, kl=True),
    "gspo": gspo,
    "gmpo": gmpo,
}
