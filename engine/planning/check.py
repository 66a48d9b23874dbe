"""The plan, checked when a run starts, before a weight is loaded.

On CUDA the plan must fit what is free: a run that would end in its first update, hours after its index was loaded, ends
here. A CPU's memory is shared, swapped and reclaimed, so there a run is refused only where the plan exceeds all that
the machine (or the container) has, and one that exceeds what is available now is warned of.

What a recipe leaves to "auto" is decided here, once: optim.checkpoint_activations and grpo.reference.
"""

from dataclasses import replace
from pathlib import Path

import torch

from thresher.common.console import console
from thresher.common.errors import UserError
from thresher.common.machine import cpu_memory
from thresher.engine.config.recipe import Recipe
from thresher.engine.planning.plan import GB, Plan, plan
from thresher.policy.config import read_config


def check_memory(recipe: Recipe, folder: str | Path, ranks: int = 1, local: int = 1) -> tuple[Recipe, Plan]:
    """The recipe of a GRPO run from the model in `folder`, with no "auto" left of what decides its memory, and its
    plan: what does not fit otherwise is turned, and printed. UserError where the run cannot fit; a warning where it may
    not. ranks: that share the states; local: of them on this machine, which share its memory."""
    config = read_config(folder)
    total, available = (size // local for size in cpu_memory())
    there = f"there are {total / GB:.1f}"
    memory: int | None = total
    if recipe.model.device == "cuda":
        memory = int(torch.cuda.mem_get_info()[0]) if torch.cuda.is_available() else None
        there = f"the GPU has {(memory or 0) / GB:.1f} free"
    found = plan(config, recipe, ranks, memory_bytes=memory)
    if found.fits is False:
        raise UserError(_sentence(found, there))
    beside = sum(found.host.values()) if recipe.model.device == "cuda" else found.total_bytes
    if beside > available:
        console.print(
            f"train: the run may take {beside / GB:.1f} GB of memory, and {available / GB:.1f} are available now",
            soft_wrap=True,
        )
    return _decided(recipe, found, there), found


def _decided(recipe: Recipe, found: Plan, there: str) -> Recipe:
    """The recipe as the plan has it. One line says what was turned."""
    optim = replace(recipe.optim, checkpoint_activations="on" if found.checkpointed else "off")
    grpo = recipe.grpo
    if found.reference is not None:
        grpo = replace(grpo, reference="cpu" if found.reference == "cpu" else "device")
    turned = []
    if recipe.optim.checkpoint_activations == "auto" and found.checkpointed:
        turned.append('optim.checkpoint_activations = "on"')
    if recipe.grpo.reference == "auto" and found.reference == "cpu":
        turned.append('grpo.reference = "cpu"')
    if turned:
        words = " and ".join(turned)
        console.print(
            f"train: the plan takes {words}, for without it the run does not fit, and {there}", soft_wrap=True
        )
    return replace(recipe, optim=optim, grpo=grpo)


def _sentence(found: Plan, there: str) -> str:
    return (
        f"the run needs {found.total_bytes / GB:.1f} GB at its {found.peak} ({found.sentence()}), and {there}; "
        f"{found.advice[0]} (thresher plan has the rest)"
    )
