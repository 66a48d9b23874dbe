"""How much memory a call takes at its peak, on either kind of device.

On CUDA the allocator knows. On a CPU nothing does, so every operation of the call is watched and the tensors that it
made are counted as long as they live. Deliberately absent: what an operation takes for itself and gives back before it
ends (a CPU's matmul packs its operands), and the Python objects around the tensors.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the tensors that were made while it is active, and keeps the peak.

    It looks after every operation, backward's included: what an operation takes for itself and gives back within is
    not seen. Tensors that existed before do not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {storage._cdata for storage in _storages((args, kwargs))}
        for storage in _storages(out):
            if storage._cdata not in given and storage._cdata not in self._live:  # neither a view nor in place
                # The reference keeps the storage's identity taken, so that no later one can be mistaken for it.
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return out


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    return (leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """Most bytes alive at once that `call` made, beyond what was there before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return int(torch.cuda.max_memory_allocated(device)) - before
    live = LiveBytes()
    with live:
        call()
    return live.peak
