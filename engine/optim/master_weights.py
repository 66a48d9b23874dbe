"""The weights that an update trains, those of one process (a policy's own, or its master weights), and their optimiser.

A policy that computes in bfloat16 is not trained itself, for at lr 1e-6 none of its weights would move. Beside it lie
master weights, a float32 copy, which the optimiser steps:

    gradients    policy's dtype, on its device   ->  added up in float32 beside the masters, micro-batch by micro-batch
    weights      masters, float32                ->  the policy's, in its own dtype, after every step

Masters may lie in CPU memory (`optim.offload = "masters"`): then both go in stretches through two pinned buffers, of
which one is copied while the host works on the other, and no gradient stays on the device but the head's, to which the
loss adds in float32 there. Where the policy computes in float32 it is its own master, and nothing is copied.

Several ranks hold rows of the weights each, and do the same with them: engine/parallel/sharded_weights.py. Where the
weights lie is decided in training/weights.py.

    optimizer_state_dtype
                   offload         weights that are trained    moments                       stepped
    float32        none            on the device               on the device                 there, by torch's AdamW
    float32        moments         on the device               in CPU memory, pinned         there, some rows at a time
    float32        masters         in CPU memory               in CPU memory                 there, by torch's AdamW
    8bit           any of them     as above                    as above, in 8 bits           where the weights are
"""

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

from thresher.engine.config.sections import OptimSection
from thresher.engine.optim.adamw import PartwiseAdamW
from thresher.policy.model import Policy

STRETCH = 1 << 24  # values that go over at a time


class TrainedWeights:
    """Weights that an update trains, with the calls of an update in their order: here those of a policy that is its own
    master, in one process.

    policy: its forward and backward are run by the update. rollout_policy: a whole policy that samples; its device and
    dtype are those in which both compute. module: the optimiser steps its parameters.
    """

    def __init__(self, policy: Policy, rollout_policy: Policy, module: nn.Module) -> None:
        self.policy, self.rollout_policy, self.module = policy, rollout_policy, module

    def rolling_out(self) -> AbstractContextManager[None]:
        """Give `rollout_policy` the trained weights within it."""
        return nullcontext()

    def max_over_ranks(self, count: int) -> int:
        """Return the largest `count` of all ranks."""
        return count

    def head_gradient(self) -> Tensor | None:
        """Return the tensor to which the loss adds the head's gradient, [V, H] float32 on the policy's device; None:
        the head is not trained."""
        raise NotImplementedError

    def add_gradients(self) -> None:
        """Add the policy's gradients of a micro-batch, which are used up, to those of the trained weights."""

    def complete(self) -> None:
        """Put every gradient where the optimiser looks for it, after the last micro-batch."""

    def clip(self, largest: float) -> float:
        """Scale all gradients so that their norm is `largest` at most; return the norm before that."""
        raise NotImplementedError

    def refresh(self) -> None:
        """Copy the trained weights to the policy, after a step."""

    def whole(self, optimizer: torch.optim.Optimizer) -> tuple[Policy, torch.optim.Optimizer] | None:
        """Return the trained weights and the optimiser's state, on the process that saves them; None elsewhere."""
        raise NotImplementedError

    def rows_here(self, name: str, state: Tensor) -> Tensor:
        """Return the rows of a whole parameter's saved optimiser state that belong to the parameter in `module`."""
        return state

    def buffers(self) -> list[Tensor]:
        """Return the tensors held beside parameters and their gradients."""
        return []


class MasterWeights(TrainedWeights):
    """`master` beside `policy`, parameter by parameter the same; None: the policy is its own, as where it computes in
    float32, or where its adapters alone are trained. apart: they lie in two memories; with both on a CPU the
    same copies are made, and the bits are the same. The rollout samples with `policy` itself."""

    def __init__(self, policy: Policy, master: Policy | None = None, apart: bool = False) -> None:
        self.master = policy if master is None else master
        super().__init__(policy, policy, self.master)
        self.head_VH = self.master.head_VH
        self.apart = apart and self.master is not policy
        self._head_grad: Tensor | None = None
        self._pinned = policy.device.type == "cuda"
        size = STRETCH if self.apart else 0
        self._buffers = [torch.empty(size, dtype=policy.dtype, pin_memory=self._pinned) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]  # from or to a buffer

    def head_gradient(self) -> Tensor | None:
        head_VH = self.head_VH
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
    def add_gradients(self) -> None:
        apart: list[tuple[Tensor, Tensor, bool]] = []
        for parameter, trained in self._pairs():
            grad, parameter.grad = parameter.grad, None
            if grad is None:
                continue
            if trained is self.head_VH and self._head_grad is not None:
                self._head_grad.add_(grad)  # a tied embedding's share
            elif not self.apart:
                trained.grad = grad.float() if trained.grad is None else trained.grad.add_(grad)
            else:
                first = trained.grad is None
                if trained.grad is None:
                    trained.grad = torch.empty_like(trained)
                apart.append((grad, trained.grad, first))
        self._add_apart(apart)

    def complete(self) -> None:
        if self._head_grad is not None:
            self.head_VH.grad = self._head_grad.to(self.master.device)
            self._head_grad = None

    def clip(self, largest: float) -> float:
        return float(torch.nn.utils.clip_grad_norm_(self.master.parameters(), largest))

    @torch.no_grad()
    def refresh(self) -> None:
        if self.apart:
            self._copy_apart((trained, parameter) for parameter, trained in self._pairs())
            return
        for parameter, trained in self._pairs():
            parameter.copy_(trained)

    def whole(self, optimizer: torch.optim.Optimizer) -> tuple[Policy, torch.optim.Optimizer] | None:
        return self.master, optimizer

    def buffers(self) -> list[Tensor]:
        return self._buffers if self._head_grad is None else [*self._buffers, self._head_grad]

    def _pairs(self) -> Iterable[tuple[nn.Parameter, nn.Parameter]]:
        """Pair the policy's parameters with their masters, where they are two."""
        if self.master is self.policy:
            return ()
        return zip(self.policy.parameters(), self.master.parameters(), strict=True)

    def _add_apart(self, grads: Iterable[tuple[Tensor, Tensor, bool]]) -> None:
        """Add each gradient on the device to a sum in CPU memory, or write it there if it is the first. While the host
        adds a stretch, the next is copied."""
        stretches = [
            (sent, kept, first)
            for grad, total, first in grads
            for sent, kept in zip(grad.reshape(-1).split(STRETCH), total.view(-1).split(STRETCH), strict=True)
        ]

        def copy(number: int) -> None:
            for sent, _, _ in stretches[number : number + 1]:
                self._buffer(number, sent).copy_(sent, non_blocking=True)
                self._note_copy(number)

        copy(0)
        for number, (_, kept, first) in enumerate(stretches):
            copy(number + 1)
            buffer = self._free_buffer(number, kept)
            if first:
                kept.copy_(buffer)
            else:
                kept.add_(buffer)

    def _copy_apart(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy each tensor in CPU memory to one on the device. While a stretch is copied, the host rounds the next."""
        stretches = (
            both
            for trained, parameter in pairs
            for both in zip(trained.view(-1).split(STRETCH), parameter.view(-1).split(STRETCH), strict=True)
        )
        for number, (trained, parameter) in enumerate(stretches):
            buffer = self._free_buffer(number, trained)
            buffer.copy_(trained)
            parameter.copy_(buffer, non_blocking=True)
            self._note_copy(number)

    def _buffer(self, number: int, like: Tensor) -> Tensor:
        """Return the buffer of a stretch, as long as that."""
        return self._buffers[number % 2][: len(like)]

    def _note_copy(self, number: int) -> None:
        if self._pinned:
            self._copied[number % 2] = torch.cuda.current_stream(self.policy.device).record_event()

    def _free_buffer(self, number: int, like: Tensor) -> Tensor:
        """Return the buffer of a stretch once no copy from or to it is under way, for the host to use."""
        copied = self._copied[number % 2]
        if copied is not None:
            copied.synchronize()
        return self._buffer(number, like)


def make_optimizer(trained: nn.Module, optim: OptimSection, lr: float) -> torch.optim.Optimizer:
    """AdamW over all weights that are trained; norms and biases are not decayed."""
    learning = [p for p in trained.parameters() if p.requires_grad]
    decayed = [p for p in learning if p.dim() > 1]
    other = [p for p in learning if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": other, "weight_decay": 0.0}]
    there = optim.offload == "moments"  # masters in CPU memory have theirs beside them
    if optim.optimizer_state_dtype == "float32" and not there:
        return torch.optim.AdamW(groups, lr=lr, betas=optim.betas, eps=optim.eps, fused=True)
    storage = torch.device("cpu") if there else None
    return PartwiseAdamW(
        groups, lr, optim.betas, optim.eps, eight_bit=optim.optimizer_state_dtype == "8bit", storage=storage
    )


def step_optimizer(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Step at `lr` on the gradients that there are, and give them up."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # Fused AdamW writes in place without it. `DeviceDecoder._versions` tells by it that there was an update.
            torch.autograd.graph.increment_version(parameter)
    optimizer.zero_grad(set_to_none=True)


def scheduled_lr(lr: float, schedule: str, warmup_ratio: float, step: int, total_steps: int) -> float:
    """Linear warm-up over `warmup_ratio` of the steps, then constant, or linear or cosine down to 0 after the last.
    Steps are the optimiser's, counted from 0."""
    warmup = math.ceil(round(warmup_ratio * total_steps, 9))  # .07 of 100 steps are 7, and in float64 a little more
    if step < warmup:
        return lr * (step + 1) / warmup
    done = (step - warmup) / max(total_steps - warmup, 1)
    if schedule == "linear":
        return lr * max(0.0, 1.0 - done)
    if schedule == "cosine":
        return lr * 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))
    return lr
