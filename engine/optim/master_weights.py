"""The weights that an update trains in one process (a policy's own, or its master weights), and their optimiser.

A policy that computes in bfloat16 is not trained itself, because at lr 1e-6 none of its weights would move. The
optimiser steps its master weights instead, a float32 copy:

    gradients    policy's dtype, on its device   ->  added up in float32 next to the masters, after each micro-batch
    weights      masters, float32                ->  the policy's, in its own dtype, after every step

Masters may be in CPU memory (`optim.offload = "masters"`). Gradients and weights are then copied in stretches through
two pinned buffers: one is copied while the host works on the other. No gradient stays on the device except the head's,
to which the loss adds in float32 there. A float32 policy is its own master, and nothing is copied.

Several ranks each hold rows of the weights, and do the same with them: engine/parallel/sharded_weights.py.
training/weights.py decides where the weights are stored.

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

COPY_CHUNK = 1 << 24  # values copied at a time


class TrainedWeights:
    """Weights that an update trains, with its calls in their order. The defaults are for a policy that is its own
    master, in one process.

    policy: the update runs its forward and backward. rollout_policy: a whole policy that samples; both compute on its
    device and in its dtype. module: the optimiser steps its parameters.
    """

    def __init__(self, policy: Policy, rollout_policy: Policy, module: nn.Module) -> None:
        self.policy, self.rollout_policy, self.module = policy, rollout_policy, module

    def rolling_out(self) -> AbstractContextManager[None]:
        """Return a context in which `rollout_policy` has the trained weights."""
        return nullcontext()

    def max_over_ranks(self, count: int) -> int:
        """Return the largest `count` of all ranks."""
        return count

    def head_gradient(self) -> Tensor | None:
        """Return the tensor to which the loss adds the head's gradient; None: the head is not trained. It is [V, H]
        float32 on the policy's device."""
        raise NotImplementedError

    def add_gradients(self) -> None:
        """Add the policy's gradients of a micro-batch to those of the trained weights, and clear them."""

    def complete(self) -> None:
        """Put every gradient where the optimiser reads it, after the last micro-batch."""

    def clip(self, largest: float) -> float:
        """Scale all gradients so that their norm is at most `largest`; return the norm before scaling."""
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
        """Return the tensors held in addition to parameters and their gradients."""
        return []


class MasterWeights(TrainedWeights):
    """Master weights of `policy`, which itself samples in the rollout.

    master: a policy with the same parameters; None: `policy` is its own master, because it computes in float32 or only
    its adapters are trained. Then autograd and the loss write the gradients of `policy` itself, and `add_gradients`,
    `complete` and `refresh` do nothing. offloaded: the two are in different memories; with both on a CPU the same
    copies are made, and the bits are the same.
    """

    def __init__(self, policy: Policy, master: Policy | None = None, offloaded: bool = False) -> None:
        self.master = policy if master is None else master
        super().__init__(policy, policy, self.master)
        self.head_VH = self.master.head_VH
        self.offloaded = offloaded and self.master is not policy
        self._head_grad: Tensor | None = None
        self._pinned = policy.device.type == "cuda"
        size = COPY_CHUNK if self.offloaded else 0
        self._buffers = [torch.empty(size, dtype=policy.dtype, pin_memory=self._pinned) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]  # last copy from or to each buffer

    def head_gradient(self) -> Tensor | None:
        head_VH = self.head_VH
        if not head_VH.requires_grad:
            return None
        if self.offloaded:
            if self._head_grad is None:
                self._head_grad = torch.zeros_like(head_VH, device=self.policy.device)
            return self._head_grad
        if head_VH.grad is None:
            head_VH.grad = torch.zeros_like(head_VH)
        return head_VH.grad

    @torch.no_grad()
    def add_gradients(self) -> None:
        copied: list[tuple[Tensor, Tensor, bool]] = []
        for parameter, trained in self._pairs():
            grad, parameter.grad = parameter.grad, None
            if grad is None:
                continue
            if trained is self.head_VH and self._head_grad is not None:
                self._head_grad.add_(grad)  # a tied embedding's share
            elif not self.offloaded:
                trained.grad = grad.float() if trained.grad is None else trained.grad.add_(grad)
            else:
                first = trained.grad is None
                if trained.grad is None:
                    trained.grad = torch.empty_like(trained)
                copied.append((grad, trained.grad, first))
        self._add_offloaded(copied)

    def complete(self) -> None:
        if self._head_grad is not None:
            self.head_VH.grad = self._head_grad.to(self.master.device)
            self._head_grad = None

    def clip(self, largest: float) -> float:
        return float(torch.nn.utils.clip_grad_norm_(self.master.parameters(), largest))

    @torch.no_grad()
    def refresh(self) -> None:
        if self.offloaded:
            self._copy_offloaded((trained, parameter) for parameter, trained in self._pairs())
            return
        for parameter, trained in self._pairs():
            parameter.copy_(trained)

    def whole(self, optimizer: torch.optim.Optimizer) -> tuple[Policy, torch.optim.Optimizer] | None:
        return self.master, optimizer

    def buffers(self) -> list[Tensor]:
        return self._buffers if self._head_grad is None else [*self._buffers, self._head_grad]

    def _pairs(self) -> Iterable[tuple[nn.Parameter, nn.Parameter]]:
        """Return the pairs of the policy's parameters and their masters; none if the policy is its own master."""
        if self.master is self.policy:
            return ()
        return zip(self.policy.parameters(), self.master.parameters(), strict=True)

    def _add_offloaded(self, grads: Iterable[tuple[Tensor, Tensor, bool]]) -> None:
        """Add each gradient on the device to its sum in CPU memory, or write it there if it is the first. While the
        host adds a stretch, the next is copied."""
        stretches = [
            (sent, kept, first)
            for grad, total, first in grads
            for sent, kept in zip(grad.reshape(-1).split(COPY_CHUNK), total.view(-1).split(COPY_CHUNK), strict=True)
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

    def _copy_offloaded(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copy each tensor in CPU memory to one on the device. While a stretch is copied, the host rounds the next."""
        stretches = (
            both
            for trained, parameter in pairs
            for both in zip(trained.view(-1).split(COPY_CHUNK), parameter.view(-1).split(COPY_CHUNK), strict=True)
        )
        for number, (trained, parameter) in enumerate(stretches):
            buffer = self._free_buffer(number, trained)
            buffer.copy_(trained)
            parameter.copy_(buffer, non_blocking=True)
            self._note_copy(number)

    def _buffer(self, number: int, like: Tensor) -> Tensor:
        """Return the buffer of a stretch, cut to the stretch's length."""
        return self._buffers[number % 2][: len(like)]

    def _note_copy(self, number: int) -> None:
        if self._pinned:
            self._copied[number % 2] = torch.cuda.current_stream(self.policy.device).record_event()

    def _free_buffer(self, number: int, like: Tensor) -> Tensor:
        """Return the buffer of a stretch for use by the host, once no copy from or to it is in progress."""
        copied = self._copied[number % 2]
        if copied is not None:
            copied.synchronize()
        return self._buffer(number, like)


def make_optimizer(trained: nn.Module, optim: OptimSection, lr: float) -> torch.optim.Optimizer:
    """Return AdamW over all trained weights; norms and biases are not decayed."""
    learning = [p for p in trained.parameters() if p.requires_grad]
    decayed = [p for p in learning if p.dim() > 1]
    other = [p for p in learning if p.dim() <= 1]
    groups = [{"params": decayed, "weight_decay": optim.weight_decay}, {"params": other, "weight_decay": 0.0}]
    there = optim.offload == "moments"  # masters in CPU memory have their moments next to them
    if optim.optimizer_state_dtype == "float32" and not there:
        return torch.optim.AdamW(groups, lr=lr, betas=optim.betas, eps=optim.eps, fused=True)
    storage = torch.device("cpu") if there else None
    return PartwiseAdamW(
        groups, lr, optim.betas, optim.eps, eight_bit=optim.optimizer_state_dtype == "8bit", storage=storage
    )


def step_optimizer(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Step the weights at `lr`, and free their gradients."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            # Fused AdamW writes in place without this. `DeviceDecoder._versions` detects an update by it.
            torch.autograd.graph.increment_version(parameter)
    optimizer.zero_grad(set_to_none=True)


def scheduled_lr(lr: float, schedule: str, warmup_ratio: float, step: int, total_steps: int) -> float:
    """Return the learning rate of an optimiser step, counted from 0. It rises linearly over `warmup_ratio` of the
    steps, and then is constant, or falls linearly or by a cosine to 0 after the last."""
    warmup = math.ceil(round(warmup_ratio * total_steps, 9))  # .07 of 100 steps are 7, and in float64 a little more
    if step < warmup:
        return lr * (step + 1) / warmup
    done = (step - warmup) / max(total_steps - warmup, 1)
    if schedule == "linear":
        return lr * max(0.0, 1.0 - done)
    if schedule == "cosine":
        return lr * 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))
    return lr
