"""The decoder layers of all model families: Llama 3, 3.1 and 3.2; Qwen2 and Qwen2.5; Qwen3 (dense).

All are one layer: attention with grouped queries, then a gated MLP, a norm before each. Qwen2 has biases on q, k and v;
Qwen3 has a norm of each query and key head before rotation. q, k and v are one parameter, gate and up another; Hugging
Face's names are views of them. Attention is an argument, `attend`. Axes: T packed tokens, H hidden, N query heads, K
key/value heads, M = N + 2K, D head dimension, I intermediate.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from thresher.common.errors import UserError
from thresher.kernels.layers import add_norm, norm_heads, silu_gate
from thresher.policy.config import ConfigRules, ModelConfig
from thresher.policy.lora import LayerAdapters

# attend(layer, qkv [T, N + 2K, D], rope, K) -> [T, N, D]: queries and keys are not yet rotated. In a rollout it is
# PagedStep; on CUDA PrefillStep._attend or DeviceStep for prompts and appended text, BucketStep._attend for what draws.
# In an update it is Varlen, or PrefixForest where sequences share beginnings.
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
        """Return the residual stream [T, H] after this layer as two terms: the next norm adds the second, as this
        layer's first norm adds `more_TH`. rope: from `rope_table`."""

    @abstractmethod
    def hf_views(self) -> dict[str, torch.Tensor]:
        """Return Hugging Face's names within a layer and views of the parameters' memory, each element once."""

    def adapted(self, x: torch.Tensor, y: torch.Tensor, *targets: str) -> torch.Tensor:
        """Return y [T, ..], the outputs of the linear maps `targets` of x, plus those of their adapters."""
        return y if self.adapters is None else self.adapters(x, y, targets)


class DecoderLayer(Layer):
    """One layer: attention and a gated MLP, each behind a norm and added to the stream."""

    has_bias: ClassVar[bool] = False  # on the projections to q, k and v
    has_head_norms: ClassVar[bool] = False  # of q and k, one weight [D] each for all their heads

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        hidden, inner = config.hidden_size, config.intermediate_size
        self.q_rows = config.num_attention_heads * config.head_dim
        self.kv_rows = config.num_key_value_heads * config.head_dim
        rows = self.q_rows + 2 * self.kv_rows
        self.input_norm = nn.Parameter(torch.ones(hidden))
        self.qkv_weight = nn.Parameter(torch.empty(rows, hidden))
        self.qkv_bias = nn.Parameter(torch.zeros(rows)) if self.has_bias else None
        if self.has_head_norms:
            self.q_norm = nn.Parameter(torch.ones(config.head_dim))
            self.k_norm = nn.Parameter(torch.ones(config.head_dim))
        self.o_weight = nn.Parameter(torch.empty(hidden, self.q_rows))
        self.post_norm = nn.Parameter(torch.ones(hidden))
        self.gate_up_weight = nn.Parameter(torch.empty(2 * inner, hidden))
        self.down_weight = nn.Parameter(torch.empty(hidden, inner))

    def forward(
        self, x_TH: torch.Tensor, more_TH: torch.Tensor | None, rope: torch.Tensor, attend: Attend, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        config = self.config
        x_TH, y_TH = add_norm(x_TH, more_TH, self.input_norm, config.rms_norm_eps)
        qkv = self.adapted(y_TH, F.linear(y_TH, self.qkv_weight, self.qkv_bias), "q", "k", "v")
        qkv_TMD = qkv.view(len(qkv), -1, config.head_dim)
        if self.has_head_norms:
            qkv_TMD = norm_heads(qkv_TMD, self.q_norm, self.k_norm, config.num_key_value_heads, config.rms_norm_eps)
        o_TND = attend(layer, qkv_TMD, rope, config.num_key_value_heads)
        o = o_TND.reshape(len(qkv), self.q_rows)
        x_TH, y_TH = add_norm(
            x_TH, self.adapted(o, F.linear(o, self.o_weight), "o"), self.post_norm, config.rms_norm_eps
        )
        inner_TI = silu_gate(self.adapted(y_TH, F.linear(y_TH, self.gate_up_weight), "gate", "up"))
        return x_TH, self.adapted(inner_TI, F.linear(inner_TI, self.down_weight), "down")

    def hf_views(self) -> dict[str, torch.Tensor]:
        rows = [self.q_rows, self.kv_rows, self.kv_rows]
        biases = [None] * 3 if self.qkv_bias is None else self.qkv_bias.data.split(rows)
        views = {}
        for name, weight, bias in zip("qkv", self.qkv_weight.data.split(rows), biases, strict=True):
            views[f"self_attn.{name}_proj.weight"] = weight
            if bias is not None:
                views[f"self_attn.{name}_proj.bias"] = bias
        if self.has_head_norms:
            views["self_attn.q_norm.weight"] = self.q_norm.data
            views["self_attn.k_norm.weight"] = self.k_norm.data
        views["self_attn.o_proj.weight"] = self.o_weight.data
        gate, up = self.gate_up_weight.data.chunk(2)
        views["mlp.gate_proj.weight"] = gate
        views["mlp.up_proj.weight"] = up
        views["mlp.down_proj.weight"] = self.down_weight.data
        views["input_layernorm.weight"] = self.input_norm.data
        views["post_attention_layernorm.weight"] = self.post_norm.data
        return views


def _check_heads(config: ModelConfig) -> None:
    """Raise UserError for a width that the heads do not divide; transformers refuses it even with a head_dim."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    if hidden % heads:
        raise UserError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}; change one of them")


def _check_shared_width(config: ModelConfig) -> None:
    _check_heads(config)
    hidden, heads = config.hidden_size, config.num_attention_heads
    if config.head_dim * heads != hidden:
        raise UserError(
            f"head_dim {config.head_dim} is not hidden_size / num_attention_heads = {hidden // heads}, "
            "the only one Qwen2 has; correct or remove it"
        )


class LlamaLayer(DecoderLayer):
    """Llama 3, 3.1 and 3.2: no biases, no norms of heads. Llama 3.1's head_dim is hidden_size / num_attention_heads."""

    rules = ConfigRules(
        constants={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        written=("head_dim",),
        check=_check_heads,
    )


class Qwen2Layer(DecoderLayer):
    """Qwen2, Qwen2.5 and R1-Distill-Qwen: biases on q, k and v."""

    has_bias = True
    rules = ConfigRules(
        constants={"hidden_act": "silu"},
        accepted={"use_sliding_window": ((False, None), "false")},
        check=_check_shared_width,
    )


class Qwen3Layer(DecoderLayer):
    """Qwen3, dense: norms of query and key heads, no biases. config.json always gives head_dim."""

    has_head_norms = True
    rules = ConfigRules(
        constants={"hidden_act": "silu", "attention_bias": False},
        accepted={"use_sliding_window": ((False, None), "false")},
        integers=("head_dim",),
    )
