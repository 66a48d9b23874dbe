"""A frozen policy in CPU memory that computes on a device, to which its layers are copied one by one when needed.

The device holds two layers of each type. While one computes, the next is copied from pinned memory on a separate
stream, so a forward of many tokens hides the transfer. Embeddings are looked up in CPU memory; the head is copied at
each use. Results equal those of the policy on the device, to the bit. There are no gradients and no adapters. Axes: T
packed tokens, H hidden, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy

import torch
import torch.nn.functional as F

from thresher.policy.layers import Layer, Layout
from thresher.policy.model import Policy

BUFFERS = 2  # layers of a type on the device at once


class StreamedPolicy:
    """A `policy` in CPU memory that computes on `device`. It is frozen; if `device` is CUDA, its memory is pinned.
    ValueError for a policy that is elsewhere or has adapters."""

    def __init__(self, policy: Policy, device: torch.device | str) -> None:
        if policy.device.type != "cpu" or policy.lora is not None:
            raise ValueError(f"expected a policy in CPU memory, without adapters; this one is on {policy.device}")
        self.policy, self.device = policy.requires_grad_(False), torch.device(device)
        self._copies: torch.cuda.Stream | None = None
        if self.device.type == "cuda":
            self._copies = torch.cuda.Stream(self.device)
            for parameter in policy.parameters():
                parameter.data = parameter.data.pin_memory()
        self._layers = list(policy.decoder_layers())
        # The layers of each type alternate between the buffers of that type.
        self._place: list[int] = []
        self._buffers: list[Layer] = []
        places: dict[type[Layer], list[int]] = {}
        for number, layer in zip(policy.numbers, self._layers, strict=True):
            mine = places.setdefault(type(layer), [])
            if len(mine) < BUFFERS:
                mine.append(len(self._buffers))
                self._buffers.append(deepcopy(layer).to(self.device))
            self._place.append(mine[number % BUFFERS])
        self._norm = policy.norm.to(self.device)
        self._copied: list[torch.cuda.Event | None] = [None] * len(self._buffers)
        self._used: list[torch.cuda.Event | None] = [None] * len(self._buffers)

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the tensors of the policy that are on the device."""
        for layer in self._buffers:
            yield from layer.parameters()
        yield self._norm

    @property
    def head_VH(self) -> torch.Tensor:
        """Return the LM head [V, H], copied to the device unless that is the CPU."""
        return self.policy.head_VH.to(self.device, non_blocking=True)

    def adapters_off(self) -> AbstractContextManager[None]:
        """Do nothing, because there are no adapters."""
        return nullcontext()

    @torch.no_grad()
    def hidden(self, ids_T: torch.Tensor, positions_T: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Map packed ids [T] int64 and their positions to hidden states after the last norm [T, H]."""
        rope = self.policy.rope(positions_T)
        x_TH, addend_TH = F.embedding(ids_T.cpu(), self.policy.embed_VH).to(self.device), None
        self._copy(0)
        for index in range(len(self._layers)):
            layer = self._wait_for(index)
            if index + 1 < len(self._layers):
                self._copy(index + 1)
            x_TH, addend_TH = layer(x_TH, addend_TH, rope, layout, self.policy.numbers[index])
            if self._copies is not None:
                self._used[self._place[index]] = torch.cuda.current_stream(self.device).record_event()
        return self.policy.final_norm(x_TH, addend_TH, self._norm)

    def _copy(self, index: int) -> None:
        """Start to copy a layer into the buffer of the second previous layer of its type."""
        place = self._place[index]
        pairs = zip(self._buffers[place].parameters(), self._layers[index].parameters(), strict=True)
        if self._copies is None:
            for buffer, parameter in pairs:
                buffer.copy_(parameter)
            return
        with torch.cuda.stream(self._copies):
            if (used := self._used[place]) is not None:
                self._copies.wait_event(used)
            for buffer, parameter in pairs:
                buffer.copy_(parameter, non_blocking=True)
            self._copied[place] = self._copies.record_event()

    def _wait_for(self, index: int) -> Layer:
        place = self._place[index]
        if (copied := self._copied[place]) is not None:
            torch.cuda.current_stream(self.device).wait_event(copied)
        return self._buffers[place]
