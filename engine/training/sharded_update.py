"""`Updater` where every rank holds a share of the weights (engine/parallel/shards.py): the same sum, made by all.

Each rank goes through the micro-batches of its own trajectories. Forward and backward gather a layer at a time, so all
ranks must make as many: one that has fewer feeds a single token for each that it lacks, with a gradient of zeros.

The head's gradient is no part of that. The loss adds it up in a buffer of [V, H], which is whole on each rank and is
summed over them once a step; a tied embedding gets its other half from backward.
"""

from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import torch

from thresher.engine.assemble import Parts
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.sections import GrpoSection, OptimSection
from thresher.engine.optim.masters import TrainedWeights
from thresher.engine.optim.optimizer import make_optimizer, step_optimizer
from thresher.engine.parallel.ranks import Ranks
from thresher.engine.parallel.shards import Shards, free_outside, load_sharded, on_first, whole_weights
from thresher.engine.store.checkpoint import Checkpoint, SavablePolicy, load_optimizer
from thresher.engine.training.master_weights import starting_weights, trained_and_reference
from thresher.engine.training.update import Updater
from thresher.kernels.attention.varlen import Varlen
from thresher.policy.model import Policy
from thresher.policy.streamed import StreamedPolicy


class ShardedUpdater(Updater):
    """whole: the rollout's policy, which holds memory only within `rolling_out`. sharded: the trained one, its shards
    float32 (those of a frozen base in the dtype of the computation). reference: sharded too, or `sharded` itself where
    that has adapters."""

    def __init__(
        self,
        whole: Policy,
        sharded: Policy,
        reference: Policy | None,
        optim: OptimSection,
        grpo: GrpoSection,
        vocab_size: int,
        total_steps: int,
        ranks: Ranks,
    ) -> None:
        self.whole, self.sharded, self.ranks, self.shards = whole, sharded, ranks, Shards(sharded, ranks)
        super().__init__(whole, self.shards, reference, optim, grpo, vocab_size, total_steps)
        self.policy = sharded

    def rolling_out(self) -> AbstractContextManager[None]:
        return whole_weights(self.whole, self.policy)

    def savable(self) -> tuple[SavablePolicy, torch.optim.Optimizer] | None:
        """Gathered parameter by parameter, into rank 0's memory on the CPU."""
        policy = on_first(self.policy, self.ranks)
        optimizer = None if policy is None else make_optimizer(policy, self.optim, self.optim.lr)
        into = {} if policy is None else dict(policy.named_parameters())
        for name, part in self.shards.named_parameters():
            for what, value in self.optimizer.state.get(part, {}).items():
                moment = self.shards.whole_moment(name, value)
                if optimizer is not None:
                    optimizer.state[into[name]][what] = moment.cpu()
        return None if policy is None or optimizer is None else (policy, optimizer)

    def load_moments(self, checkpoint: Path) -> None:
        load_optimizer(checkpoint, self.optimizer, self.shards.named_parameters(), self.shards.cut)

    def _lacking(self, batches: int) -> int:
        return self.ranks.most(batches) - batches

    def _empty_pass(self) -> None:
        device = self.policy.device
        layout = Varlen([1], device, self.attention)
        ids_T = torch.zeros(1, dtype=torch.int64, device=device)
        if self.reference is not None:
            with torch.no_grad(), self.reference.adapters_off():
                self.reference.hidden(ids_T, layout.positions_T, layout)
        hidden_TH = self.policy.hidden(ids_T, layout.positions_T, layout)
        hidden_TH.backward(torch.zeros_like(hidden_TH))

    def _trained_weights(self) -> TrainedWeights:
        return ShardedWeights(self.shards, self.sharded, self.reference)

    def _step(self, lr: float) -> float:
        self.masters.complete()
        norm = self.shards.clip(self.optim.max_grad_norm)
        step_optimizer(self.shards, self.optimizer, replace(self.optim, max_grad_norm=torch.inf), lr)
        self.masters.refresh()
        return norm


class ShardedWeights:
    """`Masters` of several ranks: backward itself puts the gradients into the shards, all but the head's."""

    def __init__(self, shards: Shards, policy: Policy, reference: Policy | StreamedPolicy | None) -> None:
        self.shards, self.policies = shards, [x for x in (policy, reference) if isinstance(x, Policy)]
        self.head_name = "embed_VH" if policy.untied_head_VH is None else "untied_head_VH"
        self._head_grad_VH: torch.Tensor | None = None

    def held(self) -> list[torch.Tensor]:
        return [] if self._head_grad_VH is None else [self._head_grad_VH]

    def head_gradient(self) -> torch.Tensor | None:
        head_VH = self.policies[0].head_VH  # whole, since a forward has just gathered it
        if head_VH.requires_grad and self._head_grad_VH is None:
            self._head_grad_VH = torch.zeros(head_VH.shape, dtype=torch.float32, device=head_VH.device)
        return self._head_grad_VH

    def collect(self) -> None:
        """Backward has done it."""

    def complete(self) -> None:
        self.shards.take_gradients()
        head = self.shards.parts[self.head_name]
        if head.requires_grad:
            if self._head_grad_VH is None:  # this rank had nothing to train on
                shape = self.shards.sharded[self.head_name].shape
                self._head_grad_VH = torch.zeros(shape, dtype=torch.float32, device=head.device)
            self.shards.add_summed(self.head_name, self._head_grad_VH)
            self._head_grad_VH = None

    def refresh(self) -> None:
        for policy in self.policies:
            free_outside(policy)


def load_updater(recipe: Recipe, parts: Parts, checkpoint: Checkpoint | None, ranks: Ranks) -> Updater:
    """The updater of a run on these ranks, for parts that were loaded from `starting_weights`."""
    policy, optim, grpo = parts.policy, recipe.optim, recipe.grpo
    steps = recipe.run.steps * grpo.updates_per_batch * grpo.epochs_per_batch
    if not ranks.several:
        master, reference = trained_and_reference(recipe, policy, checkpoint)
        return Updater(policy, master, reference, optim, grpo, parts.vocab_size, steps)
    beside = grpo.beta > 0
    folder = starting_weights(recipe, checkpoint)
    if recipe.lora is not None:
        trained_and_reference(recipe, policy, checkpoint)  # puts the adapters on
        sharded = load_sharded(folder, policy, policy.dtype, ranks, trained=True)
        reference = sharded if beside else None
    else:
        sharded = load_sharded(folder, policy, torch.float32, ranks, trained=True)
        reference = load_sharded(recipe.model.path, policy, policy.dtype, ranks, trained=False) if beside else None
    policy.requires_grad_(False)
    return ShardedUpdater(policy, sharded, reference, optim, grpo, parts.vocab_size, steps, ranks)
