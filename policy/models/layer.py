"""What every family's layer has in common: its place in the residual stream, its adapters, and what it must say.

A family's file defines one subclass of `Layer`. Matrices are 2-D parameters, which `init_policy` draws and weight decay
shrinks; vectors keep the values that the constructor gives them. The two maps into the residual stream are called
`o_weight` and `down_weight`, for `init_policy` can begin with them at 0.

Deliberately absent: attention itself. Where keys and values live is an argument, `attend`, called once a layer with the
fresh q, k and v, side by side as they were projected; rotating them is its business too.
Axes: T packed tokens, H hidden, N query heads, K key/value heads, D head dimension.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
from torch import nn

from thresher.policy.config import ConfigRules, ModelConfig
from thresher.policy.lora import LayerAdapters

# attend(layer, qkv [T, N + 2K, D], rope, K) -> [T, N, D]: queries and keys are not yet rotated
Attend = Callable[[int, torch.Tensor, torch.Tensor, int], torch.Tensor]


class Layer(nn.Module, ABC):
    """One layer of a family: attention and an MLP, each added to the residual stream."""

    rules: ClassVar[ConfigRules]  # what the family asks of config.json

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.adapters: LayerAdapters | None = None  # lora.py puts them here

    @abstractmethod
    def forward(
        self, x_TH: torch.Tensor, more_TH: torch.Tensor | None, rope: torch.Tensor, attend: Attend, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream [T, H] after this layer, the one numbered `layer`, as two terms: what the last map adds
        is left to be added with the next norm, as `more_TH` was. `rope` comes from `rope_table`."""

    @abstractmethod
    def hf_views(self) -> dict[str, torch.Tensor]:
        """Hugging Face's names within a layer ("self_attn.q_proj.weight") -> tensors that share the parameters' memory,
        each element once, in the order in which they are written."""

    def adapted(self, x: torch.Tensor, y: torch.Tensor, *targets: str) -> torch.Tensor:
        """The outputs y [T, ..] of the linear maps `targets` of x, with what their adapters add."""
        return y if self.adapters is None else self.adapters(x, y, targets)
