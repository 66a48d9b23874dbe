"""For several test files: inputs of the loss, the loss written out again in float64, and what compares the two."""

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
    """Random float64 inputs: old and reference log-probs around the true ones; of the advantages and of the
    weights a fifth is zero."""
    noise = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=noise, dtype=torch.float64)

    hidden, head = normal(T, H), normal(V, H) * scale
    targets = torch.randint(0, V, (T,), generator=noise)
    logp = torch.log_softmax(hidden @ head.t(), 1).gather(1, targets[:, None])[:, 0]
    advantages = torch.where(torch.rand(T, generator=noise) < 0.2, 0.0, normal(T))
    weights = torch.where(torch.rand(T, generator=noise) < 0.2, 0.0, normal(T).abs())
    return Case(hidden, head, targets, logp + spread * normal(T), advantages, weights, logp + spread * normal(T))


def brute(case: Case, upstream: float = 1.0, dtype: torch.dtype = torch.float64, **options: Any) -> dict[str, Any]:
    """The loss, written out again in the given dtype with autograd through log_softmax, and its gradients."""
    o = {"temperature": 1.0, "clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "kl_value": "k3"}
    o |= {"kl_gradient": None, "beta": 0.0, "entropy_coef": 0.0, "vocab_size": None} | options
    hidden = case.hidden.detach().to(dtype).requires_grad_()
    head = case.head.detach().to(dtype).requires_grad_()
    rows = case.weights != 0
    old, ref = case.old[rows].to(dtype), case.ref[rows].to(dtype)
    advantages, weights = case.advantages[rows].to(dtype), case.weights[rows].to(dtype)
    logits = hidden[rows] @ head[: o["vocab_size"]].t() / o["temperature"]
    logp_all = torch.log_softmax(logits, 1)
    logp = logp_all[torch.arange(len(old)), case.targets[rows]]
    entropy = -(logp_all.exp() * logp_all).sum(1)
    ratio, d = (logp - old).exp(), logp - ref
    objective = torch.min(ratio * advantages, ratio.clamp(1 - o["clip_low"], 1 + o["clip_high"]) * advantages)
    if o["dual_clip"]:
        bounded = torch.max(objective, o["dual_clip"] * advantages)
        objective = torch.where(advantages < 0, bounded, objective)
    k3 = (-d).exp() + d - 1
    kl = {"k1": d, "k2": d**2 / 2, "k3": k3, "k3_ratio": ratio * k3, "none": d * 0}
    surrogate = kl[o["kl_gradient"] or o["kl_value"]]
    penalty = kl[o["kl_value"]].detach() + surrogate - surrogate.detach()
    loss = (weights * (-objective + o["beta"] * penalty - o["entropy_coef"] * entropy)).sum()
    (loss * upstream).backward()

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


def run(case: Case, upstream: float = 1.0, with_ref: bool = True, **options: Any) -> dict[str, Any]:
    """grpo_loss on fresh leaves, with its gradients, in the form of `brute`."""
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
    """Records what a call does: how many times each operation runs, and the largest tensor it makes."""

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
