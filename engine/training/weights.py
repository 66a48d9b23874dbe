"""From a recipe to its updater: the trained weights and the reference.

    all weights      the policy, or float32 masters of a bfloat16 one; the reference is a second copy of the model at
                     `model.path`, on the device or in CPU memory
    [lora] adapters  only the adapters, float32; the reference is the same policy with them off, so there is one model

With several ranks each of these models is sharded; masters or reference may be in CPU memory. A rank that only samples
(run.async) has only a policy, and receives the weights of the ranks that train (asynchronous.py). A run with adapters
is resumed from its recipe's `model.path` and the checkpoint's adapters, not from the merged weights next to them, whose
last bits differ.
"""

from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn

from thresher.engine.assemble import DTYPES, RunContext, load_on_device
from thresher.engine.config.recipe import Recipe
from thresher.engine.optim.master_weights import MasterWeights, TrainedWeights
from thresher.engine.parallel.ranks import Ranks
from thresher.engine.parallel.sharded_weights import ShardedWeights, load_sharded
from thresher.engine.store.checkpoint import Checkpoint
from thresher.engine.training.update import Updater
from thresher.policy.lora import FOLDER, add_lora, load_adapters
from thresher.policy.model import Policy, load_policy
from thresher.policy.streamed import StreamedPolicy

Reference = Policy | StreamedPolicy | None  # None if beta is 0


def starting_weights(recipe: Recipe, checkpoint: Checkpoint | None) -> Path:
    """Return the folder from which the policy of a run is loaded."""
    return Path(recipe.model.path) if checkpoint is None or recipe.lora is not None else checkpoint.path


class ReceivedWeights(TrainedWeights):
    """Weights of a policy that only samples; other ranks train them."""

    def __init__(self, policy: Policy) -> None:
        super().__init__(policy, policy, nn.Module())

    def whole(self, optimizer: torch.optim.Optimizer) -> None:
        return None


def load_updater(
    recipe: Recipe, context: RunContext, checkpoint: Checkpoint | None, ranks: Ranks, trains: bool = True
) -> Updater:
    """Return the updater of a run, for a context that was loaded from `starting_weights`. ranks: those that share the
    weights. trains: whether this process is one of them; if not, its updater only computes log-probs."""
    policy, grpo = context.policy, recipe.grpo
    if recipe.lora is not None:
        add_lora(policy, **asdict(recipe.lora))
        if checkpoint is not None:
            load_adapters(policy, checkpoint.path / FOLDER)
    folder = starting_weights(recipe, checkpoint)
    weights: TrainedWeights
    reference: Reference
    if not trains:
        weights, reference = ReceivedWeights(policy.requires_grad_(False)), None
    elif ranks.is_distributed:
        weights, reference = _sharded(recipe, policy, folder, ranks)
    else:
        weights = whole_weights(recipe, policy, folder)
        reference = _reference(recipe, policy) if grpo.beta > 0 else None
    steps = (recipe.optim.schedule_steps or recipe.run.steps) * grpo.updates_per_batch * grpo.epochs_per_batch
    return Updater(weights, reference, recipe.optim, grpo, context.vocab_size, steps)


def whole_weights(recipe: Recipe, policy: Policy, folder: Path) -> MasterWeights:
    """Return the weights that one process trains: the policy's adapters if it has them, else all weights. If the policy
    computes in another dtype than float32, master weights are read in float32 from `folder`, the policy's own
    folder."""
    if recipe.lora is not None:
        return MasterWeights(policy)
    policy.requires_grad_(True)
    offloaded, master = recipe.optim.offload == "masters", None
    if policy.dtype != torch.float32:
        # Already verified when the policy was read from the same folder.
        master = load_policy(folder, device="cpu" if offloaded else recipe.model.device, verify=False)
    return MasterWeights(policy, master, offloaded)


def _reference(recipe: Recipe, policy: Policy) -> Policy | StreamedPolicy:
    """Return the policy itself, if it has adapters to switch off, or a frozen copy of the model at `model.path`. The
    copy is where grpo.reference says. The plan decides "auto" before a run begins (engine/planning/plan.py); without a
    plan it is on the device."""
    if recipe.lora is not None:
        return policy
    if recipe.grpo.reference != "cpu":
        return load_on_device(recipe, recipe.model.path).requires_grad_(False)
    model = load_policy(recipe.model.path, DTYPES[recipe.model.dtype], verify=recipe.run.verify)
    return StreamedPolicy(model, recipe.model.device)


def _sharded(recipe: Recipe, policy: Policy, folder: Path, ranks: Ranks) -> tuple[TrainedWeights, Reference]:
    """Return the weights and reference of several ranks. `policy` becomes the rollout policy, into which weights are
    gathered."""
    dtype = torch.float32 if recipe.lora is None else policy.dtype  # a frozen base needs no master weights
    offloaded = recipe.optim.offload == "masters"
    # The policy was read from `folder`, so its files are verified already.
    trained = load_sharded(folder, policy, dtype, ranks, trained=True, in_cpu_memory=offloaded, verify=False)
    reference = None
    if recipe.grpo.beta > 0 and recipe.lora is not None:
        reference = trained
    elif recipe.grpo.beta > 0:
        away = recipe.grpo.reference == "cpu"
        reference = load_sharded(
            recipe.model.path,
            policy,
            policy.dtype,
            ranks,
            trained=False,
            in_cpu_memory=away,
            verify=recipe.run.verify,
        )
    policy.requires_grad_(False)
    return ShardedWeights(trained, policy, reference, recipe.optim, ranks), reference
