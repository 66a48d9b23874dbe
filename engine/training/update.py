"""One optimiser step: items in, new weights out.

    loss  = sum_i w[i] sum_{t in y_i} ( -min(r A, clip(r) A) + beta KL )   y_i: the tokens that the policy sampled

From top to bottom, as `Updater.update` and `Updater._backward` have it:

    items into micro-batches                   packing.py
    for each of these:
        the reference's log-probs, if any      policy/model.py, kernels/logprob.py
        the policy's hidden states             policy/model.py; of these the rows in the loss
        loss, and its gradient at those rows   kernels/loss.py, which adds up the head's gradient, too
        backward through the layers            autograd
        gradients to the trained weights       `TrainedWeights.collect`
    what is left of that, once for all         `TrainedWeights.complete`: with several ranks their sums
    clip, AdamW                                `TrainedWeights.clip`, `step_optimizer` (optim/master_weights.py)
    trained weights back to the policy         `TrainedWeights.refresh`

`TrainedWeights` are those of optim/master_weights.py where one process has them whole, and of
parallel/sharded_weights.py where each of several ranks has some rows.

With several ranks all of this is the same, each rank on its own items. Every forward and backward is a collective, so
the ranks make as many: what one lacks it feeds as `idle_batch`, whose gradient is 0.
Axes: T packed tokens, R rows in the loss, H hidden, V vocabulary.
"""

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from thresher.common.console import Stage
from thresher.engine.config.sections import GrpoSection, OptimSection
from thresher.engine.optim.master_weights import TrainedWeights, make_optimizer, scheduled_lr, step_optimizer
from thresher.engine.packing import Batch, TrainSequence, idle_batch, pack, pack_shared
from thresher.engine.store.checkpoint import load_optimizer
from thresher.engine.store.token_stats import TokenRecorder
from thresher.engine.training.attention import choose_attention, choose_sharing
from thresher.kernels import grpo_loss, token_logprobs
from thresher.kernels.objective import LossResult
from thresher.policy.model import Policy
from thresher.policy.streamed import StreamedPolicy


@dataclass(slots=True)
class UpdateStats:
    """Figures of one optimiser step. `sums` and `largest` (of the absolute values) are over the `rows` tokens in the
    loss. tokens: of the items. computed_tokens: the same, with each shared token counted once."""

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
    """The optimiser and its schedule around the weights that are trained. `reference` may be None where beta is 0; it
    is asked with its adapters off, so that a policy with adapters is its own reference."""

    def __init__(
        self,
        weights: TrainedWeights,
        reference: Policy | StreamedPolicy | None,
        optim: OptimSection,
        grpo: GrpoSection,
        vocab_size: int,
        total_steps: int,
    ) -> None:
        self.weights, self.policy, self.reference = weights, weights.policy, reference
        self.optim, self.grpo = optim, grpo
        self.vocab_size, self.total_steps = vocab_size, total_steps
        self.device = weights.rollout_policy.device
        self.attention, backend = choose_attention(optim, weights.rollout_policy)
        self.partial = choose_sharing(optim, weights.rollout_policy, backend)
        self.optimizer = make_optimizer(weights.module, optim, optim.lr)
        self.begun = 0  # optimiser steps, since this was made
        # Of what is under way: its name, micro-batches that are done, all of them, and rows in the loss so far.
        self._at: tuple[str, int, int, int] | None = None

    def update(
        self, items: Sequence[TrainSequence], step: int, temperature: float, recorder: TokenRecorder | None = None
    ) -> UpdateStats | None:
        """Run one optimiser step on all items, and return what happened; None where no rank has an item.

        step: its number among the run's `total_steps` optimiser steps, from 0; it sets the learning rate. recorder:
        keeps what is found of each token.
        """
        if self.weights.most(len(items)) == 0:
            return None
        started = time.perf_counter()
        self.begun += 1
        optim, stats = self.optim, UpdateStats()
        batches = self._batches(items)
        for number, batch in enumerate(batches):
            self._at = ("update", number, len(batches), stats.rows)
            found_R = self._backward(batch, temperature, stats)
            if recorder is not None and batch.items:  # an idle one has none
                recorder.add([(items[n].key, len(items[n].positions)) for n in batch.items], found_R)
        self.weights.complete()
        stats.grad_norm = self.weights.clip(optim.max_grad_norm)
        stats.lr = scheduled_lr(optim.lr, optim.schedule, optim.warmup_ratio, step, self.total_steps)
        step_optimizer(self.optimizer, stats.lr)
        self.weights.refresh()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # or the optimiser's time would be the next rollout's
        self._at = None
        stats.seconds = time.perf_counter() - started
        return stats

    def logprobs(self, items: Sequence[TrainSequence], temperature: float) -> list[list[float]]:
        """The policy's log-probs of every item's trained tokens, as the update computes them, without a gradient."""
        found: list[list[float]] = [[] for _ in items]
        batches = self._batches(items)
        for done, batch in enumerate(batches):
            self._at = ("log-probs", done, len(batches), 0)
            with torch.no_grad():
                values = iter(self._logprobs_of(self.policy, batch, temperature).tolist())
            for number in batch.items:
                found[number] = list(itertools.islice(values, len(items[number].positions)))
        self._at = None
        return found

    def stage(self) -> Stage | None:
        """Return how far the update is, for `console.polling`; None while there is none."""
        at = self._at  # once: the update goes on while this is asked
        if at is None:
            return None
        label, done, total, rows = at
        return Stage(label, done, total, f"{rows:,} tokens in the loss" if rows else "")

    def savable(self) -> tuple[Policy, torch.optim.Optimizer] | None:
        """The trained weights and the optimiser's state, whole, on the rank that saves them; None elsewhere."""
        return self.weights.whole(self.optimizer)

    def load_moments(self, checkpoint: Path) -> None:
        """Put a checkpoint's moments and step counts into the optimiser."""
        named = self.weights.module.named_parameters()
        load_optimizer(checkpoint, self.optimizer, named, self.weights.held_here)

    def _batches(self, items: Sequence[TrainSequence]) -> list[Batch]:
        """The items in micro-batches, and idle ones up to the largest number of any rank."""
        budget = self.optim.micro_batch_tokens
        if self.partial is None:
            batches = pack(items, budget, self.device, self.attention)
        else:
            batches = pack_shared(items, budget, self.device, self.attention, self.partial)
        lacking = self.weights.most(len(batches)) - len(batches)
        return batches + [idle_batch(self.device, self.attention)] * lacking

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
        """Add a micro-batch's gradients; returns what may be kept of its rows, by name, and of an idle one nothing."""
        reference_logprobs = None
        if self.reference is not None:
            with torch.no_grad(), self.reference.adapters_off():
                reference_logprobs = self._logprobs_of(self.reference, batch, temperature)
        recompute = self.optim.checkpoint_activations == "on"
        hidden_TH = self.policy.hidden(batch.ids_T, batch.layout.positions_T, batch.layout, recompute)
        hidden_RH = batch.pick(hidden_TH)
        head_grad_VH = self.weights.head_gradient()
        grpo = self.grpo
        # The kernel's T tokens are these R rows: `pick` has left out all others.
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
        else:  # the head is frozen
            result.loss.backward()
        self.weights.collect()
        return self._note(stats, batch, result, reference_logprobs) if batch.items else {}

    def _note(
        self, stats: UpdateStats, batch: Batch, result: LossResult, reference_logprobs: torch.Tensor | None
    ) -> dict[str, torch.Tensor]:
        """Add a micro-batch's figures to the step's; return the values of its rows that may be kept, by name."""
        stats.tokens += batch.tokens
        stats.computed_tokens += batch.computed_tokens
        stats.rows += len(batch.rows_R)
        gap_R = (result.logprobs - batch.old_logprobs_R).abs()
        sums = {"entropy": result.entropy, "clipped": result.clipped, "ratio": result.ratios, "logprob_gap": gap_R}
        largest = {"logprob_gap_max": gap_R}
        if reference_logprobs is not None:
            sums |= {f"kl_{name}": result.kl[name] for name in ("k1", "k2", "k3")}
            assert result.kl_coefficients is not None
            largest["kl_coefficient_largest"] = result.kl_coefficients
            if self.grpo.kl_value != "none":
                largest["kl_largest"] = result.kl[self.grpo.kl_value]
        stats.record(result.loss.detach(), result.capped, sums, largest)
        found_R = {"recomputed": result.logprobs, "entropy": result.entropy, "clipped": result.clipped}
        if reference_logprobs is not None:
            found_R["reference"] = reference_logprobs
        return found_R if self.grpo.tis_level == "none" else found_R | {"advantage": batch.advantages_R}
