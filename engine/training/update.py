"""One optimiser step: sequences in, new weights out.

    loss  = sum_i w[i] sum_{t in y_i} ( -min(r A, clip(r) A) + beta KL )   y_i: the tokens that the policy sampled

The order of `Updater.update` and `Updater._train_micro_batch`:

    sequences into micro-batches               packing.py
    for each micro-batch:
        the reference's log-probs, if any      policy/model.py, kernels/logprob.py
        the policy's hidden states             policy/model.py; of these the rows in the loss
        loss, and its gradient at those rows   kernels/loss.py, which also accumulates the head's gradient
        backward through the layers            autograd
        gradients to the trained weights       `TrainedWeights.add_gradients`
    rest of the gradients, after the last one  `TrainedWeights.complete`: with several ranks their sums
    clip, AdamW                                `TrainedWeights.clip`, `step_optimizer` (optim/master_weights.py)
    trained weights back to the policy         `TrainedWeights.refresh`

With several ranks (parallel/sharded_weights.py) each rank does the same with its own sequences. Every forward and
backward is a collective, so all ranks run the same number: a rank with fewer micro-batches adds `idle_batch`, whose
gradient is 0.
Axes: T packed tokens, R rows in the loss, H hidden, V vocabulary.
"""

import itertools
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from thresher.common import console
from thresher.common.console import Stage
from thresher.common.errors import UserError
from thresher.engine.config.objectives import OBJECTIVES
from thresher.engine.config.sections import GrpoSection, OptimSection
from thresher.engine.optim.master_weights import TrainedWeights, make_optimizer, scheduled_lr, step_optimizer
from thresher.engine.packing import MicroBatch, TrainSequence, idle_batch, pack, pack_shared
from thresher.engine.parallel.sharded_weights import local
from thresher.engine.rollout.rollout import Rollout
from thresher.engine.store.checkpoint import load_optimizer
from thresher.engine.store.token_stats import TokenRecorder
from thresher.engine.systems import load_own_function
from thresher.kernels import grpo_loss, token_logprobs
from thresher.kernels.attention.backends.choice import Backend, load_attention
from thresher.kernels.attention.backends.libraries import Unserved
from thresher.kernels.attention.backends.parts import load_forest_attention
from thresher.kernels.attention.parts import AttentionWithLSE
from thresher.kernels.attention.prefix import ForestKernels
from thresher.kernels.attention.varlen import TrainingAttention
from thresher.kernels.objective import PER_TOKEN, LossResult, Objective, WrongObjective
from thresher.kernels.operands import RowCheck, raise_deferred
from thresher.policy.model import Policy, attention_backend
from thresher.policy.streamed import StreamedPolicy

GIB = 2**30


@dataclass(slots=True)
class UpdateStats:
    """Statistics of one optimiser step. `sums` and `largest` (of the absolute values) are over the `rows` tokens in the
    loss. tokens: number of tokens of the sequences. computed_tokens: the same, with each shared token counted once.
    fresh: number of rows sampled with the weights of the update; the log-prob gap is over these."""

    tokens: int = 0
    computed_tokens: int = 0
    rows: int = 0
    fresh: int = 0
    loss: float = 0.0
    grad_norm: float = 0.0
    lr: float = 0.0
    capped: int = 0
    seconds: float = 0.0
    epoch: int = 0  # number of the pass over the step's trajectories, from 0
    moved: bool = False  # whether the weights changed
    sums: dict[str, float] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)

    def add(self, other: "UpdateStats") -> None:
        """Add the counts, the loss, the sums and the largest values of `other`."""
        for name in ("tokens", "computed_tokens", "rows", "fresh", "loss", "capped"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        for name, value in other.largest.items():
            self.largest[name] = max(self.largest.get(name, 0.0), value)


@dataclass(slots=True)
class Unread:
    """Statistics that stay on the device until an update's micro-batches are done. They are the loss, capped ratios,
    sums and largest values of each. Each copy to the host waits for the GPU, so all are copied together."""

    scalars_X: list[Tensor] = field(default_factory=list)
    sums: tuple[str, ...] = ()
    largest: tuple[str, ...] = ()

    def add(self, result: LossResult, sums: Mapping[str, Tensor], largest: Mapping[str, Tensor]) -> None:
        """Add the statistics of a micro-batch; all micro-batches have values of the same names."""
        scalars = [result.loss.detach(), result.capped, *(value_R.double().sum() for value_R in sums.values())]
        scalars += [value_R.abs().max() for value_R in largest.values()]
        self.scalars_X.append(torch.stack([scalar.double() for scalar in scalars]))
        self.sums, self.largest = tuple(sums), tuple(largest)

    def read(self, stats: UpdateStats) -> None:
        """Add all statistics to `stats`, in the order of the micro-batches."""
        for loss, capped, *values in torch.stack(self.scalars_X).tolist() if self.scalars_X else ():
            sums = dict(zip(self.sums, values[: len(self.sums)], strict=True))
            largest = dict(zip(self.largest, values[len(self.sums) :], strict=True))
            stats.add(UpdateStats(loss=loss, capped=int(capped), sums=sums, largest=largest))


def choose_attention(optim: OptimSection, policy: Policy) -> tuple[TrainingAttention, Backend]:
    """Return the attention function of this policy's forwards and backwards, and its backend. UserError if the recipe's
    choice cannot be used here. On CUDA the backend is tried out, which takes a moment."""
    backend = attention_backend(policy, optim.attention, "training", "optim.")
    return load_attention(backend), backend


def choose_sharing(optim: OptimSection, policy: Policy, backend: Backend) -> AttentionWithLSE | ForestKernels | None:
    """Return the attention for sequences with a shared prefix: on CUDA our kernels, else the backend's parts. None:
    each sequence is computed whole. If None is not the recipe's choice, the reason is printed."""
    if not optim.share_prefix:
        return None
    try:
        return load_forest_attention(backend, policy.device, policy.dtype, policy.config.head_dim)
    except Unserved as error:
        console.console.print(
            f"optim.share_prefix has no effect: attention is computed by {backend}, which {error}", soft_wrap=True
        )
        return None


def backward_from_loss(weights: TrainedWeights, hidden_RH: Tensor, result: LossResult) -> None:
    """Run the backward of a micro-batch, and add its gradients to those of the trained weights. result: of `grpo_loss`
    for `hidden_RH`, which has already added the head's gradient to `weights.head_gradient()`. Only the gradient of the
    hidden states is left to propagate, and no second tensor of [V, H] is made."""
    if result.hidden_grad_TH is not None:
        hidden_RH.backward(result.hidden_grad_TH)
    else:  # the head is frozen
        result.loss.backward()
    weights.add_gradients()


def load_surrogate(objective: str) -> str | Objective:
    """Return the surrogate of a recipe's objective (kernels/objective.py): its name, or a user's function."""
    named = OBJECTIVES.get(objective)
    return named.surrogate if named else load_own_function(objective, "grpo.objective")


class Updater:
    """The optimiser and its schedule for the trained weights. `reference` may be None if beta is 0. Its adapters are
    off in its forwards, so that a policy with adapters is its own reference."""

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
        self.optim, self.grpo, self.surrogate = optim, grpo, load_surrogate(grpo.objective)
        self.vocab_size, self.total_steps = vocab_size, total_steps
        self.device = weights.rollout_policy.device
        self.attention, backend = choose_attention(optim, weights.rollout_policy)
        self.prefix_attention = choose_sharing(optim, weights.rollout_policy, backend)
        self.optimizer = make_optimizer(weights.module, optim, optim.lr)
        self.begun = 0  # number of optimiser steps begun since this object was made
        self.moving = False  # whether there has been a gradient, so that moments move the weights
        self._stage: Stage | None = None

    def update(
        self,
        sequences: Sequence[TrainSequence],
        optimizer_step: int,
        temperature: float,
        recorder: TokenRecorder | None = None,
        moved: bool = True,
    ) -> UpdateStats | None:
        """Run one optimiser step on all sequences and return its statistics; None if no rank has a sequence.

        optimizer_step: its number among the run's `total_steps`, from 0; it sets the learning rate. recorder: records
        the values of each token. moved: whether the weights differ from those that sampled the tokens that are not
        stale.
        """
        if self.weights.max_over_ranks(len(sequences)) == 0:
            return None
        started = time.perf_counter()
        self.begun += 1
        optim, stats, unread = self.optim, UpdateStats(), Unread()
        micro_batches = self._pack(sequences)
        # Whether a token's advantage may differ from its trajectory's.
        per_token = self.grpo.tis_level != "none" or any(isinstance(one.advantage, list) for one in sequences)
        for number, micro_batch in enumerate(micro_batches):
            detail = f"{stats.rows:,} tokens in the loss" if stats.rows else ""
            self._stage = Stage("update", number, len(micro_batches), detail)
            members = [sequences[n] for n in micro_batch.members]
            guarded_R = self._guarded(micro_batch, moved, any(one.stale for one in members))
            values_R = self._train_micro_batch(micro_batch, temperature, unread, guarded_R)
            if members:  # an idle micro-batch has none
                rows = len(micro_batch.rows_R)
                fresh = rows - sum(one.stale for one in members)
                stats.add(UpdateStats(micro_batch.tokens, micro_batch.computed_tokens, rows, fresh))
            if recorder is not None and members:
                if not per_token:
                    values_R.pop("advantage")
                recorder.add([(one.key, one.context, len(one.positions)) for one in members], values_R)
        self.weights.complete()
        unread.read(stats)
        stats.grad_norm = self.weights.clip(optim.max_grad_norm)
        stats.lr = scheduled_lr(optim.lr, optim.schedule, optim.warmup_ratio, optimizer_step, self.total_steps)
        step_optimizer(self.optimizer, stats.lr)
        self.moving |= stats.grad_norm > 0
        stats.moved = stats.lr > 0 and (self.moving or optim.weight_decay > 0)
        self.weights.refresh()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # otherwise the optimiser's time would count in the next rollout
        self._stage = None
        stats.seconds = time.perf_counter() - started
        return stats

    def logprobs(self, sequences: Sequence[TrainSequence], temperature: float) -> list[list[float]]:
        """Return the policy's log-probs of the trained tokens, as the update computes them, without a gradient."""
        result: list[list[float]] = [[] for _ in sequences]
        logprobs_R: list[Tensor] = []
        checks: list[list[RowCheck]] = []
        micro_batches = self._pack(sequences)
        for done, micro_batch in enumerate(micro_batches):
            self._stage = Stage("log-probs", done, len(micro_batches), "")
            with torch.no_grad():
                values_R = self._logprobs_of(self.policy, micro_batch, temperature, checks)
            if micro_batch.members:
                logprobs_R.append(values_R)
        raise_deferred(checks)
        values = iter(torch.cat(logprobs_R).tolist() if logprobs_R else ())
        for number in itertools.chain.from_iterable(micro_batch.members for micro_batch in micro_batches):
            result[number] = list(itertools.islice(values, len(sequences[number].positions)))
        self._stage = None
        return result

    def stage(self) -> Stage | None:
        """Return the progress of the update, for `console.polling`; None while there is none."""
        return self._stage

    def load_moments(self, checkpoint: Path) -> None:
        """Put a checkpoint's moments and step counts into the optimiser."""
        named = self.weights.module.named_parameters()
        load_optimizer(checkpoint, self.optimizer, named, self.weights.rows_here)

    def _pack(self, sequences: Sequence[TrainSequence]) -> list[MicroBatch]:
        """Pack the sequences, and add idle micro-batches up to the largest number on any rank."""
        budget = self.optim.micro_batch_tokens
        if self.prefix_attention is None:
            micro_batches = pack(sequences, budget, self.device, self.attention)
        else:
            micro_batches = pack_shared(sequences, budget, self.device, self.attention, self.prefix_attention)
        lacking = self.weights.max_over_ranks(len(micro_batches)) - len(micro_batches)
        return micro_batches + [idle_batch(self.device, self.attention) for _ in range(lacking)]

    def _logprobs_of(
        self, model: Policy | StreamedPolicy, micro_batch: MicroBatch, temperature: float, checks: list[list[RowCheck]]
    ) -> Tensor:
        """Return the log-probs of the rows in the loss. checks: the list that the data's checks are added to."""
        hidden_TH = model.hidden(micro_batch.ids_T, micro_batch.layout.positions_T, micro_batch.layout)
        logprobs_R, _ = token_logprobs(
            micro_batch.pick(hidden_TH),
            model.head_VH,
            micro_batch.targets_R,
            temperature=temperature,
            vocab_size=self.vocab_size,
            workspace_bytes=self.optim.loss_workspace_bytes,
            defer_checks_to=checks,
        )
        return logprobs_R

    def _guarded(self, micro_batch: MicroBatch, moved: bool, stale: bool) -> Tensor | None:
        """Return the turn of each row, -1 for a row without the guard; None if no row has it.

        Until the weights move, the tokens that they sampled are as likely as before, and a difference is rounding. For
        half of the tokens the guard would take it for a fall, at its full slope. stale: whether earlier weights sampled
        some.
        """
        if self.grpo.guard == "none":
            return None
        if moved:
            return micro_batch.turn_R
        if self.grpo.old_logprobs == "recomputed" or not stale:
            return None
        return micro_batch.turn_R.masked_fill(micro_batch.fresh_R, -1)

    def _train_micro_batch(
        self, micro_batch: MicroBatch, temperature: float, unread: Unread, turn_R: Tensor | None
    ) -> dict[str, Tensor]:
        """Run the forwards, the loss and the backward of a micro-batch, and add its gradients and statistics. Return
        the values of its rows, by name, for a recorder. turn_R: as in `grpo_loss`."""
        reference_logprobs, checks = None, list[list[RowCheck]]()
        if self.reference is not None:
            with torch.no_grad(), self.reference.adapters_off():
                reference_logprobs = self._logprobs_of(self.reference, micro_batch, temperature, checks)
        layout, checkpoint = micro_batch.layout, self.optim.checkpoint_activations == "on"
        hidden_TH = self.policy.hidden(micro_batch.ids_T, layout.positions_T, layout, checkpoint)
        hidden_RH = micro_batch.pick(hidden_TH)
        grpo = self.grpo
        # The kernel's T tokens are these R rows: `pick` has left out all others.
        try:
            result = grpo_loss(
                hidden_RH,
                self.policy.head_VH,
                micro_batch.targets_R,
                micro_batch.old_logprobs_R,
                micro_batch.advantages_R,
                micro_batch.weights_R,
                ref_logprobs_T=reference_logprobs,
                temperature=temperature,
                surrogate=self.surrogate,
                sequence_T=None if self.surrogate in PER_TOKEN else micro_batch.sequence_R,
                turn_T=turn_R,
                tau_positive=grpo.tau_positive,
                tau_negative=grpo.tau_negative,
                divergence=grpo.divergence,
                guard=0.0 if turn_R is None else grpo.guard_weight,
                guard_zero=grpo.guard == "llds",
                clip_low=grpo.clip_low,
                clip_high=grpo.clip_high,
                dual_clip=grpo.dual_clip,
                kl_value=grpo.kl_value,
                kl_gradient=grpo.kl_gradient,
                beta=grpo.beta if self.reference is not None else 0.0,
                entropy_coef=grpo.entropy_coef,
                vocab_size=self.vocab_size,
                workspace_bytes=self.optim.loss_workspace_bytes,
                lm_head_grad_VH=self.weights.head_gradient(),
                deferred_checks=checks,
            )
        except WrongObjective as error:
            raise UserError(f"grpo.objective: {grpo.objective}: {error}; fix the file") from None
        backward_from_loss(self.weights, hidden_RH, result)
        if not micro_batch.members:
            return {}
        gap_R = (result.logprobs - micro_batch.old_logprobs_R).abs().masked_fill(~micro_batch.fresh_R, 0.0)
        sums = {"entropy": result.entropy, "clipped": result.clipped, "ratio": result.ratios, "logprob_gap": gap_R}
        largest = {"logprob_gap_max": gap_R}
        if reference_logprobs is not None:
            sums |= {f"kl_{name}": result.kl[name] for name in ("k1", "k2", "k3")}
            assert result.kl_coefficients is not None
            largest["kl_coefficient_largest"] = result.kl_coefficients
            if grpo.kl_value != "none":
                largest["kl_largest"] = result.kl[self.grpo.kl_value]
        unread.add(result, sums, largest)
        assert result.logit_gradients is not None
        values_R = {"recomputed": result.logprobs, "entropy": result.entropy, "clipped": result.clipped}
        values_R["gradient"] = -result.logit_gradients
        if reference_logprobs is not None:
            values_R["reference"] = reference_logprobs
        values_R["advantage"] = micro_batch.advantages_R
        return values_R


def memory_by_use(updater: Updater, rollout: Rollout) -> dict[str, int]:
    """Return the bytes on the policy's device by use. A tensor with two uses counts once."""
    trained, device = list(updater.weights.module.parameters()), updater.device
    counted: set[int] = set()

    def total(tensors: Iterable[Tensor | None]) -> int:
        here = [local(x) for x in tensors if x is not None]
        fresh = {x.data_ptr(): x for x in here if x.numel() and x.device == device and x.data_ptr() not in counted}
        counted.update(fresh)
        # A freed copy of a rollout keeps its shape, but has no storage.
        return sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in fresh.values())

    policy, states = list(updater.policy.parameters()), updater.optimizer.state.values()
    return {
        "weights": total([*policy, *trained, *rollout.policy.parameters()]),
        "gradients": total([*(x.grad for x in (*trained, *policy)), *updater.weights.buffers()]),
        "moments": total(x for state in states for x in state.values() if isinstance(x, Tensor)),
        "the reference": total(() if updater.reference is None else updater.reference.parameters()),
        "keys and values": total(rollout.decoder.held()),
    }


@contextmanager
def explain_out_of_memory(updater: Updater, rollout: Rollout) -> Iterator[None]:
    """Turn an OutOfMemoryError within the block into a UserError that lists bytes by use, and settings to lower."""
    try:
        yield
    except torch.OutOfMemoryError:
        used, device = memory_by_use(updater, rollout), updater.device
        listed = ", ".join(f"{name} {size / GIB:.1f}" for name, size in used.items() if size)
        if device.type == "cuda":
            rest = max(torch.cuda.max_memory_allocated(device) - sum(used.values()), 0)
            listed += f", activations and the loss's workspace up to {rest / GIB:.1f}"
        raise UserError(
            f"{device} is out of memory; GiB held: {listed}; lower optim.micro_batch_tokens (activations), "
            "optim.loss_workspace_bytes or rollout.kv_tokens, or set optim.checkpoint_activations, optim.offload or "
            "grpo.reference (docs/design.md, Update), and --resume; a new run may train adapters ([lora])"
        ) from None
