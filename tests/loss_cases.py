"""Shared by several test files: inputs of the loss, a float64 reference of it, and comparisons of the two."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from thresher.kernels import grpo_loss
from thresher.kernels.objective import ESTIMATORS

MATMULS = {"aten.mm.default", "aten.mm.out", "aten.addmm.default", "aten.addmm_.default"}


@dataclass(frozen=True)
class Case:
    """Inputs of a call, in the order of its positional arguments, and the reference log-probs."""

    hidden: Tensor
    head: Tensor
    targets: Tensor
    old: Tensor
    advantages: Tensor
    weights: Tensor
    ref: Tensor

    def to(self, dtype: torch.dtype) -> "Case":
        floats = {name: getattr(self, name).to(dtype) for name in self.__dict__ if name != "targets"}
        return replace(self, **floats)

    @property
    def arguments(self) -> tuple[Tensor, ...]:
        return (self.hidden, self.head, self.targets, self.old, self.advantages, self.weights)


def make_case(T: int, H: int = 16, V: int = 50, seed: int = 0, scale: float = 0.5, spread: float = 0.4) -> Case:
    """Return random float64 inputs: old and reference log-probs around the true ones; a fifth of the advantages and of
    the weights is zero."""
    noise = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise, dtype=torch.float64)

    hidden, head = normal(T, H), normal(V, H) * scale
    targets = torch.randint(0, V, (T,), generator=noise)
    logp = torch.log_softmax(hidden @ head.t(), 1).gather(1, targets[:, None])[:, 0]
    advantages = torch.where(torch.rand(T, generator=noise) < 0.2, 0.0, normal(T))
    weights = torch.where(torch.rand(T, generator=noise) < 0.2, 0.0, normal(T).abs())
    return Case(hidden, head, targets, logp + spread * normal(T), advantages, weights, logp + spread * normal(T))


def on_grid(case: Case) -> Case:
    """Return the case with rows and head rounded to multiples of 1/8, so that a logit is exact in any order of its sum.
    Triton's interpreter multiplies with NumPy's BLAS, which may give a row other last bits at another place of its
    tile; the compiled kernels do not."""
    return replace(case, hidden=(case.hidden * 8).round() / 8, head=(case.head * 8).round() / 8)


UNIT = 2.0**-24  # the largest relative error of a rounding to float32
DRAWS = 16
# Standard deviations. The loss is one number, and a norm may be that of one row: of normal errors in all the tests,
# CPUs and seeds, many exceed three, one in 5e8 exceeds six.
SLACK = 6.0


class Rounding:
    """Adds normal noise of given standard deviations, in units of UNIT, where float32 would round; none without a seed.

    A sum of n terms in float32 is off by UNIT sqrt(n) sqrt(sum of squared terms), as a standard deviation and in the
    worst order, one after the other (Higham 2002, section 4.2, with independent roundings); in blocks or a tree by
    less. An exponential of x is off by UNIT (1 + |x|) of itself.
    """

    def __init__(self, seed: int | None) -> None:
        self.generator = None if seed is None else torch.Generator().manual_seed(seed)

    def __call__(self, x: Tensor, deviation: Tensor) -> Tensor:
        if self.generator is None:
            return x
        return x + UNIT * deviation.detach() * torch.randn(x.shape, generator=self.generator, dtype=x.dtype)

    def product(self, out: Tensor, one: Tensor, other: Tensor) -> Tensor:
        """Return out = one @ other, with the rounding of its sums."""
        if self.generator is None:
            return out
        return self(out, (one.detach().square() @ other.detach().square() * one.shape[1]).sqrt())


def brute(
    case: Case,
    upstream: float = 1.0,
    dtype: torch.dtype = torch.float64,
    rounding: int | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Compute the loss in the given dtype with autograd through log_softmax, and its gradients. `rounding`: the seed of
    noise where float32 would round, in inputs, sums and exponentials; see `float32_budget`."""
    rounded = Rounding(rounding)
    o = {"temperature": 1.0, "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "kl_value": "k3"}
    o |= {"kl_gradient": None, "beta": 0.0, "entropy_coef": 0.0, "vocab_size": None} | options
    hidden = case.hidden.detach().to(dtype).requires_grad_()
    head = case.head.detach().to(dtype).requires_grad_()
    rows = case.weights != 0
    old, ref = case.old[rows].to(dtype), case.ref[rows].to(dtype)
    advantages, weights = case.advantages[rows].to(dtype), case.weights[rows].to(dtype)
    old, ref, advantages, weights = (rounded(x, x.abs()) for x in (old, ref, advantages, weights))
    picked, columns = hidden[rows], head[: o["vocab_size"]].t() / o["temperature"]
    logits = rounded.product(picked @ columns, picked, columns)
    if rounding is not None and logits.numel():
        # the logit itself and, before an exponential, its distance to the largest
        logits = rounded(logits, 2 + logits.abs() + (logits.amax(1, keepdim=True) - logits).clamp(max=100))
        logits.retain_grad()
    logp_all = torch.log_softmax(logits, 1)
    logp = logp_all[torch.arange(len(old)), case.targets[rows]]
    logp = rounded(logp, 2 + logp.abs())
    terms = logp_all.exp() * logp_all
    # 1, for the part that a total probability of 1 loses
    entropy = rounded(-terms.sum(1), 1 + (terms.square().sum(1) * terms.shape[1]).sqrt())
    ratio, d = (logp - old).exp(), logp - ref
    objective = torch.min(ratio * advantages, ratio.clamp(1 - o["clip_low"], 1 + o["clip_high"]) * advantages)
    if o["dual_clip"]:
        bounded = torch.max(objective, o["dual_clip"] * advantages)
        objective = torch.where(advantages < 0, bounded, objective)
    k3 = (-d).exp() + d - 1
    kl = {"k1": d, "k2": d**2 / 2, "k3": k3, "k3_ratio": ratio * k3, "none": d * 0}
    surrogate = kl[o["kl_gradient"] or o["kl_value"]]
    penalty = kl[o["kl_value"]].detach() + surrogate - surrogate.detach()
    losses = weights * (-objective + o["beta"] * penalty - o["entropy_coef"] * entropy)
    loss = rounded(losses.sum(), (losses.square().sum() * len(losses)).sqrt())
    (loss * upstream).backward()
    if rounding is not None and logits.numel():
        dlogits = logits.grad
        hidden.grad[rows] = rounded.product(hidden.grad[rows], dlogits, columns.t())
        used = slice(o["vocab_size"])
        head.grad[used] = rounded.product(head.grad[used], dlogits.t(), picked / o["temperature"])

    def spread(values: Tensor) -> Tensor:
        return torch.zeros(len(rows), dtype=dtype).masked_scatter(rows, values.detach())

    found = {
        "loss": loss.detach(),
        "logprobs": spread(logp),
        "ratios": spread(ratio),
        "entropy": spread(entropy),
    }
    found |= {"hidden_grad": hidden.grad, "head_grad": head.grad}
    return found | {name: spread(kl[name]) for name in ESTIMATORS}


def float32_budget(case: Case, **options: Any) -> dict[str, float]:
    """Return the norm of float32's allowed error of each result, in any order of its sums: `brute` in float64 with
    noise where float32 rounds, the root mean square over several draws, times SLACK. It depends on the case alone, not
    on another implementation's luck on this machine."""
    truth = brute(case, **options)
    noisy = [brute(case, rounding=seed, **options) for seed in range(DRAWS)]
    return {
        name: SLACK * float(sum((found[name] - value).square().sum() for found in noisy) / DRAWS) ** 0.5
        for name, value in truth.items()
    }


def bfloat16_budget(case: Case, **options: Any) -> dict[str, float]:
    """Return the norm of the allowed error of gradients, if they and the operands of their products are rounded to
    bfloat16: three deviations, 2^-8 / sqrt(3) for one rounding, of independent errors."""
    hidden, head, truth = case.hidden.double(), case.head.double(), brute(case, **options)
    # With the logits themselves as rows, the gradient of the rows is the logits' gradient.
    logits = replace(case, hidden=hidden @ head.t(), head=torch.eye(len(head)))
    squares = brute(logits, **options)["hidden_grad"].square()
    products = {"hidden_grad": squares @ head.square(), "head_grad": squares.t() @ hidden.square()}
    return {
        name: 3**0.5 * 2**-8 * float(2 * product.sum() + truth[name].square().sum()) ** 0.5
        for name, product in products.items()
    }


def run(case: Case, upstream: float = 1.0, with_ref: bool = True, **options: Any) -> dict[str, Any]:
    """Call grpo_loss on fresh leaves; return results and gradients in the form of `brute`."""
    hidden, head = (t.detach().clone().requires_grad_() for t in (case.hidden, case.head))
    result = grpo_loss(hidden, head, *case.arguments[2:], ref_logprobs_T=case.ref if with_ref else None, **options)
    (result.loss * upstream).backward()
    found = {
        "loss": result.loss.detach(),
        "hidden_grad": hidden.grad,
        "head_grad": head.grad,
        "result": result,
    }
    found |= {"logprobs": result.logprobs, "ratios": result.ratios, "entropy": result.entropy}
    return found | result.kl


def assert_close(found: dict[str, Any], truth: dict[str, Any], tolerance: float = 1e-10) -> None:
    for name, expected in truth.items():
        torch.testing.assert_close(
            found[name], expected, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_same_bits(found: dict[str, Any], other: dict[str, Any]) -> None:
    for name, expected in other.items():
        if name != "result":
            assert torch.equal(found[name], expected), name


class Operations(TorchDispatchMode):
    """Records a call's operations: the count of each, and the largest tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.counts[str(func)] = self.counts.get(str(func), 0) + 1
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.numel())
        return out

    def matmuls(self) -> int:
        return sum(count for name, count in self.counts.items() if name in MATMULS)
