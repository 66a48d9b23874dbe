"""Qwen2 and Qwen2.5: attention with grouped queries and biases on q, k and v; a gated MLP; a norm before each.

The query, key and value projections are one parameter, gate and up another; the names and pieces that Hugging Face
files use are views of them.

Deliberately absent: sliding windows, which published Qwen2.5 models have switched off (refused where they are on).
Axes: T packed tokens, H hidden, N query heads, K key/value heads, M = N + 2K, D head dimension, I intermediate.
"""

import torch
import torch.nn.functional as F
from torch import nn

from thresher.kernels.elementwise.layers import add_norm, silu_gate
from thresher.policy.config import ConfigRules, ModelConfig
from thresher.policy.models.layer import Attend, Layer
from thresher.rewards.errors import UserError


def _check_sizes(config: ModelConfig) -> None:
    """Qwen2's heads share the hidden width among them."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    if hidden % heads:
        raise UserError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}; change one of them")
    if config.head_dim * heads != hidden:
        raise UserError(
            f"head_dim {config.head_dim} is not hidden_size / num_attention_heads = {hidden // heads}, "
            "the only one Qwen2 has; correct or remove it"
        )


class Qwen2Layer(Layer):
    """One layer: attention and a gated MLP, each behind a norm and added to the stream."""

    rules = ConfigRules(
        constants={"hidden_act": "silu"},
        accepted={"use_sliding_window": ((False, None), "false")},
        check=_check_sizes,
    )

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        hidden, inner = config.hidden_size, config.intermediate_size
        self.q_rows = config.num_attention_heads * config.head_dim
        self.kv_rows = config.num_key_value_heads * config.head_dim
        self.input_norm = nn.Parameter(torch.ones(hidden))
        self.qkv_weight = nn.Parameter(torch.empty(self.q_rows + 2 * self.kv_rows, hidden))
        self.qkv_bias = nn.Parameter(torch.zeros(self.q_rows + 2 * self.kv_rows))
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
        o_TND = attend(layer, qkv.view(len(qkv), -1, config.head_dim), rope, config.num_key_value_heads)
        o = o_TND.reshape(len(qkv), self.q_rows)
        x_TH, y_TH = add_norm(
            x_TH, self.adapted(o, F.linear(o, self.o_weight), "o"), self.post_norm, config.rms_norm_eps
        )
        inner_TI = silu_gate(self.adapted(y_TH, F.linear(y_TH, self.gate_up_weight), "gate", "up"))
        return x_TH, self.adapted(inner_TI, F.linear(inner_TI, self.down_weight), "down")

    def hf_views(self) -> dict[str, torch.Tensor]:
        rows = [self.q_rows, self.kv_rows, self.kv_rows]
        views = {}
        for name, weight, bias in zip(
            "qkv", self.qkv_weight.data.split(rows), self.qkv_bias.data.split(rows), strict=True
        ):
            views[f"self_attn.{name}_proj.weight"] = weight
            views[f"self_attn.{name}_proj.bias"] = bias
        views["self_attn.o_proj.weight"] = self.o_weight.data
        gate, up = self.gate_up_weight.data.chunk(2)
        views["mlp.gate_proj.weight"] = gate
        views["mlp.up_proj.weight"] = up
        views["mlp.down_proj.weight"] = self.down_weight.data
        views["input_layernorm.weight"] = self.input_norm.data
        views["post_attention_layernorm.weight"] = self.post_norm.data
        return views
