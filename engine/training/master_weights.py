"""What a run trains and what it is held against: all weights beside a frozen copy, or adapters on a frozen base.

    all weights      the policy, or float32 masters of a bfloat16 one; the reference is the model at `model.path`, anew,
                     on the device or in CPU memory
    [lora] adapters  theirs alone, float32; the reference is the same policy with them off, so there is one model

A run with adapters goes on from its recipe's `model.path` and the adapters of its checkpoint, not from the merged
weights beside them, whose last bits are others.
"""

from dataclasses import asdict
from pathlib import Path

import torch

from thresher.engine.assemble import DTYPES, load_on_device
from thresher.engine.config.recipe import Recipe
from thresher.engine.store.checkpoint import Checkpoint
from thresher.policy.lora import FOLDER, add_lora, load_adapters
from thresher.policy.model import Policy, load_policy
from thresher.policy.streamed import StreamedPolicy


def starting_weights(recipe: Recipe, checkpoint: Checkpoint | None) -> Path:
    """The folder from which the policy of a run is loaded."""
    return Path(recipe.model.path) if checkpoint is None or recipe.lora is not None else checkpoint.path


def trained_and_reference(
    recipe: Recipe, policy: Policy, checkpoint: Checkpoint | None
) -> tuple[Policy, Policy | StreamedPolicy | None]:
    """(who holds the trained weights, the reference, None where beta is 0) for a policy of `starting_weights`, which is
    made trainable, or given the recipe's adapters, in place."""
    beside = recipe.grpo.beta > 0
    if recipe.lora is not None:
        put_adapters(recipe, policy)
        if checkpoint is not None:
            load_adapters(policy, checkpoint.path / FOLDER)
        return policy, policy if beside else None
    policy.requires_grad_(True)
    folder = starting_weights(recipe, checkpoint)
    place = "cpu" if recipe.optim.offload == "masters" else recipe.model.device
    # Verified a moment ago, when the policy was read from the same folder.
    master = policy if policy.dtype == torch.float32 else load_policy(folder, device=place, verify=False)
    return master, _reference(recipe) if beside else None


def _reference(recipe: Recipe) -> Policy | StreamedPolicy:
    """A frozen copy of the model at `model.path`, where grpo.reference wants it. "auto" is the plan's to decide, before
    a run begins (engine/planning/check.py); without one, on the device."""
    if recipe.grpo.reference != "cpu":
        return load_on_device(recipe, recipe.model.path).requires_grad_(False)
    model = load_policy(recipe.model.path, DTYPES[recipe.model.dtype], verify=recipe.run.verify)
    return StreamedPolicy(model, recipe.model.device)


def put_adapters(recipe: Recipe, policy: Policy) -> None:
    """Fresh adapters as the recipe's [lora] has them, which it must have."""
    assert recipe.lora is not None
    add_lora(policy, **asdict(recipe.lora))
