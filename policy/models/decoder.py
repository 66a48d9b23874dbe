"""The layer that Llama, Qwen2 and Qwen3 share: attention with grouped queries, then a gated MLP, a norm before each.

A family's file says what sets it apart: whether q, k and v have a bias, and whether each query head and each key head
goes through a norm of its own before it is rotated.

The query, key and value projections are one parameter, gate and up another; the names and pieces that Hugging Face
files use are views of them.

Deliberately absent: sliding windows, which published Qwen models have switched off (refused where they are on).
Axes: T packed tokens, H hidden, N query heads, K key/value heads, M = N + 2K, D head dimension, I intermediate.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from thresher.kernels.elementwise.layers import add_norm, norm_heads, silu_gate
from thresher.policy.config import ModelConfig
from thresher.policy.models.layer import Attend, Layer


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
