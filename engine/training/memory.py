"""What a training run holds on its device, for the sentence that says why it did not fit."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from thresher.engine.parallel.shards import local
from thresher.engine.rollout.rollout import Rollout
from thresher.engine.training.update import Updater
from thresher.rewards.errors import UserError

GIB = 2**30


def held(updater: Updater, rollout: Rollout) -> dict[str, int]:
    """Bytes by what they are for. A tensor that serves twice counts once."""
    masters = list(updater.master.parameters())
    counted: set[int] = set()

    def total(tensors: Iterable[Tensor | None]) -> int:
        here = [local(x) for x in tensors if x is not None]
        fresh = {x.data_ptr(): x for x in here if x.numel() and x.data_ptr() not in counted}
        counted.update(fresh)
        # A rollout's copy that was given back keeps its shape, and has no storage.
        return sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in fresh.values())

    def parameters(model: nn.Module | None) -> Iterable[Tensor]:
        return () if model is None else model.parameters()

    states = updater.optimizer.state.values()
    cache = rollout.decoder.held()
    return {
        "weights": total([*parameters(updater.policy), *masters, *parameters(rollout.policy)]),
        "gradients": total([x.grad for x in (*masters, *parameters(updater.policy))]),
        "moments": total(x for state in states for x in state.values() if isinstance(x, Tensor)),
        "the reference": total(parameters(updater.reference)),
        "keys and values": total(cache),
    }


def out_of_memory(updater: Updater, rollout: Rollout) -> UserError:
    """The sentence for a device that is full: what took how much, and what to lower."""
    parts = held(updater, rollout)
    device = updater.policy.device
    said = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size)
    if device.type == "cuda":
        rest = max(torch.cuda.max_memory_allocated(device) - sum(parts.values()), 0)
        said += f", activations and the loss's workspace up to {rest / GIB:.1f}"
    return UserError(
        f"{device} is out of memory; GiB held: {said}; lower optim.micro_batch_tokens (activations), "
        "optim.loss_workspace_bytes or rollout.kv_tokens, or train adapters ([lora])"
    )
