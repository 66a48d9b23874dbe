"""From rewarded trajectories to one optimiser step.

    A[i]  = (R[i] - mean_G R) / max(std_G R, floor)                       a group's samples, see rewards/advantages.py
    w[i]  = 1 / (N |y_i|)  |  1 / sum_i |y_i|  |  1 / (N c)               "trajectory" | "token" | "constant"
    loss  = sum_i w[i] sum_{t in y_i} ( -min(r A, clip(r) A) + beta KL )   y_i: the tokens that the policy sampled

N counts all trajectories of the optimiser step, those of groups without a signal included. The loss itself is
kernels/loss.py; this file makes its inputs, calls it once a micro-batch and steps the optimiser. There is no loss mask
to carry: rows come from the segments' sources (Trajectory.policy_positions).

Which rows there are, and how sequences are packed, is packing/batches.py's.
Axes: T packed tokens, R rows in the loss, H hidden, V vocabulary.
"""

import itertools
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from thresher.engine import console
from thresher.engine.config.sections import GrpoSection, OptimSection
from thresher.engine.optim.masters import Masters, TrainedWeights
from thresher.engine.optim.optimizer import make_optimizer, scheduled_lr, step_optimizer
from thresher.engine.packing.batches import Batch, Item, pack, pack_shared
from thresher.engine.parallel.ranks import ALONE, Ranks
from thresher.engine.protocol.trajectory import Trajectory
from thresher.engine.store.checkpoint import SavablePolicy, load_optimizer
from thresher.engine.store.token_stats import TokenRecorder
from thresher.kernels import grpo_loss, token_logprobs
from thresher.kernels.attention.backends.adapter import Unserved
from thresher.kernels.attention.backends.choice import load_attention, resolve_attention
from thresher.kernels.attention.backends.parts import load_partial_attention
from thresher.kernels.attention.parts import PartialAttention
from thresher.kernels.attention.varlen import TrainingAttention
from thresher.kernels.objective import kl_coefficient
from thresher.policy.model import Policy
from thresher.policy.streamed import StreamedPolicy
from thresher.rewards.advantages import group_advantages
from thresher.rewards.errors import UserError


def choose_attention(optim: OptimSection, policy: Policy) -> TrainingAttention:
    """What computes the attention of this policy's forwards and backwards. UserError where that does not serve here."""
    try:
        return load_attention(
            resolve_attention(optim.attention, policy.device, policy.dtype, policy.config.head_dim, "training")
        )
    except ValueError as error:
        raise UserError(f"optim.{error}") from None


def checkpoints_activations(optim: OptimSection) -> bool:
    """Whether the policy's forward keeps only what enters each layer. "auto" is the plan's to decide, before a GRPO run
    begins (engine/planning/check.py); without one, no."""
    return optim.checkpoint_activations == "on"


def choose_sharing(optim: OptimSection, policy: Policy) -> PartialAttention | None:
    """What computes attention in parts, for items that share what they begin with; None: each item is computed whole.
    Where that is not the recipe's choice, the reason is printed."""
    if not optim.share_prefix:
        return None
    place = (policy.device, policy.dtype, policy.config.head_dim)
    backend = resolve_attention(optim.attention, *place, "training")
    try:
        return load_partial_attention(backend, *place)
    except Unserved as error:
        console.console.print(
            f"optim.share_prefix has no effect: attention is computed by {backend}, which {error}", soft_wrap=True
        )
        return None


def advantages(rewards: Sequence[float], groups: Sequence[int], grpo: GrpoSection) -> list[float]:
    """Each trajectory's advantage within its group (members may lie anywhere in the sequence)."""
    members: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group, []).append(number)
    result = [0.0] * len(rewards)
    for numbers in members.values():
        values = group_advantages([rewards[n] for n in numbers], std_floor=grpo.std_floor, sample_std=grpo.sample_std)
        for n, value in zip(numbers, values, strict=True):
            result[n] = value
    return result


def make_items(
    trajectories: Sequence[Trajectory], advantage: Sequence[float], grpo: GrpoSection, ranks: Ranks = ALONE
) -> list[Item]:
    """Trajectories with their advantages and the weight of each of their tokens, as the aggregation has it over what
    all ranks make items of."""
    positions = [trajectory.policy_positions() for trajectory in trajectories]
    count, total = ranks.total(len(trajectories), sum(map(len, positions)))
    weights = {
        "trajectory": lambda n: 1.0 / (count * len(positions[n])),
        "token": lambda n: 1.0 / total,
        "constant": lambda n: 1.0 / (count * (grpo.aggregation_constant or 1.0)),
    }[grpo.aggregation]
    return [
        Item(
            ids=trajectory.ids(),
            positions=positions[n],
            old_logprobs=trajectory.policy_logprobs(),
            advantage=advantage[n],
            weight=weights(n),
            key=(trajectory.group, trajectory.sample),
        )
        for n, trajectory in enumerate(trajectories)
        if positions[n] and not (grpo.drop_zero_advantage and advantage[n] == 0.0)
    ]


@dataclass(slots=True)
class UpdateStats:
    """What one optimiser step did; `sums` and `largest` (of the absolute values) are over the `rows` tokens in the
    loss. tokens: of the items; computed_tokens: of them, each that is shared once."""

    tokens: int = 0
    computed_tokens: int = 0
    rows: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0
    lr: float = 0.0
    capped: int = 0
    seconds: float = 0.0
    epoch: int = 0  # which pass over its batch, from 0
    sums: dict[str, float] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)

    def record(
        self, loss: torch.Tensor, capped: torch.Tensor, sums: dict[str, torch.Tensor], largest: dict[str, torch.Tensor]
    ) -> None:
        """Add a batch's figures. All come to the host together: each trip of its own would make it wait for the GPU."""
        scalars = [loss, capped, *(value_R.double().sum() for value_R in sums.values())]
        scalars += [value_R.abs().max() for value_R in largest.values()]
        loss_value, capped_value, *values = torch.stack([scalar.double() for scalar in scalars]).tolist()
        self.loss += loss_value
        self.capped += int(capped_value)
        for name, value in zip(sums, values[: len(sums)], strict=True):
            self.sums[name] = self.sums.get(name, 0.0) + value
        for name, value in zip(largest, values[len(sums) :], strict=True):
            self.largest[name] = max(self.largest.get(name, 0.0), value)


class Updater:
    """The optimiser and its schedule around one policy. `reference` may be None where beta is 0; it is asked with its
    adapters off, so that a policy with adapters is its own reference.

    `master` holds the weights that are trained, always float32: the policy itself where it computes in float32, else a
    model of its own, from which the policy is refreshed after every step (at lr 1e-6 a bfloat16 weight would not move).
    """

    def __init__(
        self,
        policy: Policy,
        master: nn.Module,
        reference: Policy | StreamedPolicy | None,
        optim: OptimSection,
        grpo: GrpoSection,
        vocab_size: int,
        total_steps: int,
    ) -> None:
        self.policy, self.master, self.reference, self.optim, self.grpo = policy, master, reference, optim, grpo
        self.vocab_size, self.total_steps = vocab_size, total_steps
        self.attention = choose_attention(optim, policy)
        self.recompute = checkpoints_activations(optim)
        self.masters = self._trained_weights()
        self.partial = choose_sharing(optim, policy)
        self.optimizer = make_optimizer(master, optim, optim.lr)

    def update(
        self, items: Sequence[Item], step: int, temperature: float, recorder: TokenRecorder | None = None
    ) -> UpdateStats:
        """One optimiser step on all items. step: its number among the run's `total_steps` optimiser steps, from 0; it
        sets the learning rate. recorder: keeps what is found of each token. Returns what happened."""
        started = time.perf_counter()
        stats = UpdateStats()
        batches = self._batches(items)
        lacking = self._lacking(len(batches))
        for batch in batches:
            found_R = self._backward(batch, temperature, stats)
            if recorder is not None:
                recorder.add([(items[n].key, len(items[n].positions)) for n in batch.items], found_R)
        for _ in range(lacking):
            self._empty_pass()
        stats.lr = scheduled_lr(self.optim.lr, self.optim.schedule, self.optim.warmup_ratio, step, self.total_steps)
        stats.grad_norm = self._step(stats.lr)
        if self.policy.device.type == "cuda":
            torch.cuda.synchronize(self.policy.device)  # or the optimiser's time would be the next rollout's
        stats.seconds = time.perf_counter() - started
        return stats

    def _batches(self, items: Sequence[Item]) -> list[Batch]:
        budget, device = self.optim.micro_batch_tokens, self.policy.device
        if self.partial is None:
            return pack(items, budget, device, self.attention)
        return pack_shared(items, budget, device, self.attention, self.partial)

    # What is otherwise where every rank holds a share of the weights: sharded_update.py.

    def rolling_out(self) -> AbstractContextManager[None]:
        """Within it the rollout's policy has the trained weights."""
        return nullcontext()

    def savable(self) -> tuple[SavablePolicy, torch.optim.Optimizer] | None:
        """The trained weights and the optimiser's state, whole, on the rank that saves them; None elsewhere."""
        assert isinstance(self.master, Policy)
        return self.master, self.optimizer

    def load_moments(self, checkpoint: Path) -> None:
        """Put a checkpoint's moments and step counts into the optimiser."""
        load_optimizer(checkpoint, self.optimizer, self.master.named_parameters())

    def _trained_weights(self) -> TrainedWeights:
        assert isinstance(self.master, Policy)
        return Masters(self.policy, self.master, apart=self.optim.offload == "masters")

    def _lacking(self, batches: int) -> int:
        """How many micro-batches fewer than another rank this one has, with so many."""
        return 0

    def _empty_pass(self) -> None:
        """Take part in a forward and a backward without a micro-batch of one's own."""

    def _step(self, lr: float) -> float:
        """Step the trained weights on the policy's gradients; returns their norm before clipping."""
        self.masters.complete()
        norm = step_optimizer(self.master, self.optimizer, self.optim, lr)
        self.masters.refresh()
        return norm

    def logprobs(self, items: Sequence[Item], temperature: float) -> list[list[float]]:
        """The policy's log-probs of every item's trained tokens, as the update computes them, without a gradient."""
        found: list[list[float]] = [[] for _ in items]
        for batch in self._batches(items):
            with torch.no_grad():
                values = iter(self._logprobs_of(self.policy, batch, temperature).tolist())
            for number in batch.items:
                found[number] = list(itertools.islice(values, len(items[number].positions)))
        return found

    def _logprobs_of(self, model: Policy | StreamedPolicy, batch: Batch, temperature: float) -> torch.Tensor:
        hidden_TH = model.hidden(batch.ids_T, batch.layout.positions_T, batch.layout)
        logprobs_R, _ = token_logprobs(
            batch.pick(hidden_TH),
            model.head_VH,
            batch.targets_R,
            temperature=temperature,
            vocab_size=self.vocab_size,
            workspace_bytes=self.optim.loss_workspace_bytes,
        )
        return logprobs_R

    def _backward(self, batch: Batch, temperature: float, stats: UpdateStats) -> dict[str, torch.Tensor]:
        """Add a micro-batch's gradients; returns what store/token_stats.py keeps of its rows."""
        reference_logprobs = None
        if self.reference is not None:
            with torch.no_grad(), self.reference.adapters_off():
                reference_logprobs = self._logprobs_of(self.reference, batch, temperature)
        hidden_TH = self.policy.hidden(batch.ids_T, batch.layout.positions_T, batch.layout, self.recompute)
        hidden_RH = batch.pick(hidden_TH)
        head_grad_VH = self.masters.head_gradient()
        grpo = self.grpo
        # The kernel calls these R rows its T tokens: whatever is masked was left out above, by `rows_R`.
        result = grpo_loss(
            hidden_RH,
            self.policy.head_VH,
            batch.targets_R,
            batch.old_logprobs_R,
            batch.advantages_R,
            batch.weights_R,
            ref_logprobs_T=reference_logprobs,
            temperature=temperature,
            clip_low=grpo.clip_low,
            clip_high=grpo.clip_high,
            dual_clip=grpo.dual_clip,
            kl_value=grpo.kl_value,
            kl_gradient=grpo.kl_gradient,
            beta=grpo.beta if self.reference is not None else 0.0,
            entropy_coef=grpo.entropy_coef,
            vocab_size=self.vocab_size,
            workspace_bytes=self.optim.loss_workspace_bytes,
            lm_head_grad_VH=head_grad_VH,
        )
        if head_grad_VH is not None:
            # The head's gradient lies already in the trained weights' own buffer, which saves a second one of [V, H].
            hidden_RH.backward(result.hidden_grad_TH)
        else:
            result.loss.backward()
        self.masters.collect()
        stats.tokens += batch.tokens
        stats.computed_tokens += batch.computed_tokens
        stats.rows += len(batch.rows_R)
        gap_R = (result.logprobs - batch.old_logprobs_R).abs()
        sums = {"entropy": result.entropy, "clipped": result.clipped, "ratio": result.ratios, "logprob_gap": gap_R}
        largest = {"logprob_gap_max": gap_R}
        if reference_logprobs is not None:
            sums |= {f"kl_{name}": result.kl[name] for name in ("k1", "k2", "k3")}
            log_ref_ratio_R = result.logprobs - reference_logprobs
            estimator = grpo.kl_gradient or grpo.kl_value
            largest["kl_coefficient_largest"] = kl_coefficient(estimator, log_ref_ratio_R, result.ratios)
            if grpo.kl_value != "none":
                largest["kl_largest"] = result.kl[grpo.kl_value]
        stats.record(result.loss.detach(), result.capped, sums, largest)
        found_R = {"recomputed": result.logprobs, "entropy": result.entropy, "clipped": result.clipped}
        if reference_logprobs is not None:
            found_R["reference"] = reference_logprobs
        return found_R if grpo.importance == "none" else found_R | {"advantage": batch.advantages_R}
