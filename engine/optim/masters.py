"""The float32 weights that are trained beside a policy that computes in less, and the way between the two.

    gradients    policy's dtype, on its device   ->  added up in float32 beside the masters, micro-batch by micro-batch
    weights      masters, float32                ->  the policy's, in its own dtype, after every step

Masters may lie in CPU memory (`optim.offload = "masters"`): then both go in parts through one pinned buffer, and no
gradient stays on the device but the head's, to which the loss adds in float32 there. Where the policy computes in
float32 it is its own master, and there is no way to go.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from thresher.policy.model import Policy

PART = 1 << 24  # values that go over at a time


class TrainedWeights(Protocol):
    """What an update asks of whoever holds the weights that are trained."""

    def held(self) -> list[Tensor]:
        """What is held beside the parameters and their gradients."""
        ...

    def head_gradient(self) -> Tensor | None:
        """Where the loss adds the head's gradient, [V, H] float32 on the policy's device; None: it is not trained."""
        ...

    def collect(self) -> None:
        """After a micro-batch: add the policy's gradients, which are used up, to the trained weights'."""
        ...

    def complete(self) -> None:
        """Before a step: the head's gradient joins the others."""
        ...

    def refresh(self) -> None:
        """After a step: the policy's weights are the trained ones again."""
        ...


class Masters:
    """`master` beside `policy`, parameter by parameter the same; it may be the policy itself. apart: they lie in two
    memories. With both on a CPU the way is the same, and so are the bits."""

    def __init__(self, policy: Policy, master: Policy, apart: bool) -> None:
        self.policy, self.master = policy, master
        self.apart = apart and master is not policy
        self._head_grad: Tensor | None = None
        pinned = policy.device.type == "cuda"
        self._buffer = torch.empty(PART if self.apart else 0, dtype=policy.dtype, pin_memory=pinned)

    def held(self) -> list[Tensor]:
        """What is held beside the parameters and their gradients."""
        return [self._buffer] if self._head_grad is None else [self._buffer, self._head_grad]

    def head_gradient(self) -> Tensor | None:
        """Where the loss adds the head's gradient, [V, H] float32 on the policy's device; None: it is not trained."""
        head_VH = self.master.head_VH
        if not head_VH.requires_grad:
            return None
        if self.apart:
            if self._head_grad is None:
                self._head_grad = torch.zeros_like(head_VH, device=self.policy.device)
            return self._head_grad
        if head_VH.grad is None:
            head_VH.grad = torch.zeros_like(head_VH)
        return head_VH.grad

    @torch.no_grad()
    def collect(self) -> None:
        """Add the policy's gradients, which are used up, to the masters'."""
        if self.master is self.policy:
            return
        for parameter, trained in zip(self.policy.parameters(), self.master.parameters(), strict=True):
            grad, parameter.grad = parameter.grad, None
            if grad is None:
                continue
            if trained is self.master.head_VH and self._head_grad is not None:
                self._head_grad.add_(grad)  # a tied embedding's share
            elif self.apart:
                first = trained.grad is None
                if trained.grad is None:
                    trained.grad = torch.empty_like(trained)
                for sent, kept in self._parts(grad, trained.grad):
                    self._through(sent, kept, first)
            else:
                trained.grad = grad.float() if trained.grad is None else trained.grad.add_(grad.float())

    def complete(self) -> None:
        """Before a step: the head's gradient joins the others."""
        if self._head_grad is not None:
            self.master.head_VH.grad = self._head_grad.to(self.master.device)
            self._head_grad = None

    @torch.no_grad()
    def refresh(self) -> None:
        """After a step: the policy's weights are the masters' again."""
        if self.master is self.policy:
            return
        for parameter, trained in zip(self.policy.parameters(), self.master.parameters(), strict=True):
            if not self.apart:
                parameter.copy_(trained)
                continue
            for sent, kept in self._parts(trained.data, parameter.data):
                buffer = self._buffer[: len(sent)]
                buffer.copy_(sent)
                kept.copy_(buffer)

    def _through(self, sent: Tensor, kept: Tensor, first: bool) -> None:
        buffer = self._buffer[: len(sent)]
        buffer.copy_(sent)
        if first:
            kept.copy_(buffer)
        else:
            kept.add_(buffer)

    @staticmethod
    def _parts(one: Tensor, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        return zip(one.reshape(-1).split(PART), other.view(-1).split(PART), strict=True)
