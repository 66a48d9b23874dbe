"""Memory that a training run holds on its device, for the message that it did not fit; memory that a CPU gives back."""

import ctypes
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from thresher.common.errors import UserError
from thresher.engine.parallel.shards import local
from thresher.engine.rollout.rollout import Rollout
from thresher.engine.training.update import Updater
from thresher.policy.model import Policy
from thresher.policy.streamed import StreamedPolicy

GIB = 2**30
MMAP_THRESHOLD, SMALLEST_MAPPING = -3, 2**20  # glibc's M_MMAP_THRESHOLD; bytes


def return_freed_memory() -> None:
    """Have glibc map every block of a MiB or more by itself from now on, so that it goes back once it is freed.

    `thresher` begins with the reverse (cli/process.py): freed memory is kept, which is faster. But what lies in a heap
    below a block that lives cannot go back, a step's activations leave holes that the next step's do not fill, and the
    process outgrows its plan (docs/scale.md has by how much). Nothing is done where the user's MALLOC_* or
    GLIBC_TUNABLES have decided, or where the C library is another.
    """
    chosen = any(name.startswith("MALLOC_") for name in os.environ) or "malloc" in os.environ.get("GLIBC_TUNABLES", "")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None and not chosen:
        mallopt(MMAP_THRESHOLD, SMALLEST_MAPPING)


def held(updater: Updater, rollout: Rollout) -> dict[str, int]:
    """Bytes on the policy's device by what they are for. A tensor that serves twice counts once."""
    trained, device = list(updater.weights.module.parameters()), updater.device
    counted: set[int] = set()

    def total(tensors: Iterable[Tensor | None]) -> int:
        here = [local(x) for x in tensors if x is not None]
        fresh = {x.data_ptr(): x for x in here if x.numel() and x.device == device and x.data_ptr() not in counted}
        counted.update(fresh)
        # A rollout's copy that was given back keeps its shape, and has no storage.
        return sum(min(x.nbytes, x.untyped_storage().nbytes()) for x in fresh.values())

    def parameters(model: Policy | StreamedPolicy | None) -> Iterable[Tensor]:
        return () if model is None else model.parameters()

    states = updater.optimizer.state.values()
    cache = rollout.decoder.held()
    return {
        "weights": total([*parameters(updater.policy), *trained, *parameters(rollout.policy)]),
        "gradients": total([*(x.grad for x in (*trained, *parameters(updater.policy))), *updater.weights.buffers()]),
        "moments": total(x for state in states for x in state.values() if isinstance(x, Tensor)),
        "the reference": total(parameters(updater.reference)),
        "keys and values": total(cache),
    }


@contextmanager
def in_a_sentence(updater: Updater, rollout: Rollout) -> Iterator[None]:
    """A device that is full within it is a UserError: what took how much, and what to lower."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise _out_of_memory(updater, rollout) from None


def _out_of_memory(updater: Updater, rollout: Rollout) -> UserError:
    parts = held(updater, rollout)
    device = updater.device
    said = ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size)
    if device.type == "cuda":
        rest = max(torch.cuda.max_memory_allocated(device) - sum(parts.values()), 0)
        said += f", activations and the loss's workspace up to {rest / GIB:.1f}"
    return UserError(
        f"{device} is out of memory; GiB held: {said}; lower optim.micro_batch_tokens (activations), "
        "optim.loss_workspace_bytes or rollout.kv_tokens, or set optim.checkpoint_activations, optim.offload or "
        "grpo.reference (docs/design.md, Update), and --resume; a new run may train adapters ([lora])"
    )
