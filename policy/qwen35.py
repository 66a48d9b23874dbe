"""Decoder layers of Qwen3.5 (dense): three with the gated delta rule for each one with full attention.

config.json's layer_types lists the types. Attention differs from Qwen3's in two ways: RoPE rotates only a fraction of
each head, and each head's output is multiplied by a gate computed from the layer's input. A norm over H or D multiplies
by its weight plus 1. An image's positions have three axes, which are equal for text; images are not read. Axes: T
packed tokens, H hidden, N query heads, K key/value heads of attention, or query and key heads of the delta rule,
M = N + 2K, V value heads, D head dimension, E that of the delta rule's values, C channels of the convolution, W its
width in tokens.
"""

import torch
from torch import nn

from thresher.kernels.delta.layer import DeltaInputs, gated_norm, gates, uncut
from thresher.kernels.layers import linear, norm_heads
from thresher.policy.config import LINEAR, ConfigRules, ModelConfig
from thresher.policy.layers import DecoderLayer, Layer, Layout, MixerLayer, StateLayout


class Qwen35Layer(MixerLayer):
    """Base class of both types of layer."""

    norm_offset = 1.0
    rules = ConfigRules(
        constants={"hidden_act": "silu", "attention_bias": False},
        accepted={
            "attn_output_gate": ((True, None), "true"),
            "mamba_ssm_dtype": (("float32", None), "float32"),
        },
        integers=("head_dim",),
        hybrid=4,
    )

    @classmethod
    def make(cls, config: ModelConfig, number: int) -> Layer:
        return (DeltaLayer if config.layer_types[number] == LINEAR else GatedAttentionLayer)(config)


class GatedAttentionLayer(Qwen35Layer, DecoderLayer):
    """Attention with a gated output. For each head, q_proj has the query, then the gate."""

    has_head_norms = True
    q_parts = 2

    def mix(self, y_TH: torch.Tensor, rope: torch.Tensor, layout: Layout, layer: int) -> torch.Tensor:
        config = self.config
        qkv = self.adapted(y_TH, linear(y_TH, self.qkv_weight), "q", "k", "v")
        q, kv = qkv.split([2 * self.q_rows, 2 * self.kv_rows], dim=1)
        q_TND, gate_TND = q.view(len(q), -1, 2 * config.head_dim).chunk(2, dim=-1)
        qkv_TMD = torch.cat([q_TND, kv.view(len(kv), -1, config.head_dim)], dim=1)
        kv_heads = config.num_key_value_heads
        qkv_TMD = norm_heads(qkv_TMD, self.gain(self.q_norm), self.gain(self.k_norm), kv_heads, config.rms_norm_eps)
        o_TND = layout(layer, qkv_TMD, rope, kv_heads) * uncut(torch.sigmoid, gate_TND.contiguous())
        o = o_TND.reshape(len(q), self.q_rows)
        return self.adapted(o, linear(o, self.o_weight), "o")


class DeltaLayer(Qwen35Layer):
    """A layer with the gated delta rule (kernels/delta). Its four input projections are one parameter."""

    def add_mixer(self, config: ModelConfig) -> None:
        assert config.delta is not None
        self.shape = shape = config.delta
        self.values, heads = shape.num_value_heads * shape.value_head_dim, shape.num_value_heads
        self.in_rows = [shape.channels, self.values, heads, heads]
        self.in_weight = nn.Parameter(torch.empty(sum(self.in_rows), config.hidden_size))
        self.conv_weight = nn.Parameter(torch.empty(shape.channels, shape.conv_kernel_dim))
        # Across the heads, exp(a_log) goes from 1 to 16 and softplus(dt_bias) from .001 to .1, Mamba's ranges. A state
        # has decayed to half after 700 tokens in the first head, and after less than one token in the last.
        self.dt_bias = nn.Parameter(torch.logspace(-3, -1, heads).expm1().log())
        self.a_log = nn.Parameter(torch.linspace(1, 16, heads).log())
        self.head_norm = nn.Parameter(torch.ones(shape.value_head_dim))
        self.out_weight = nn.Parameter(torch.empty(config.hidden_size, self.values))

    def mix(self, y_TH: torch.Tensor, rope: torch.Tensor, layout: Layout, layer: int) -> torch.Tensor:
        assert isinstance(layout, StateLayout)
        shape = self.shape
        projected = linear(y_TH, self.in_weight)
        projected = self.adapted(y_TH, projected, "linear_qkv", "linear_z", "linear_b", "linear_a")
        mixed_TC, z, b_TV, a_TV = projected.split(self.in_rows, dim=1)
        decay_TV, beta_TV = gates(a_TV, b_TV, self.a_log, self.dt_bias)
        sizes = shape.num_key_heads, shape.key_head_dim
        o_TVE = layout.delta(layer, DeltaInputs(mixed_TC, self.conv_weight, decay_TV, beta_TV, *sizes))
        z_TVE = z.unflatten(1, (shape.num_value_heads, -1))
        o = gated_norm(o_TVE, z_TVE, self.head_norm, self.config.rms_norm_eps).flatten(1)
        return self.adapted(o, linear(o, self.out_weight), "linear_out")

    def mixer_views(self) -> dict[str, torch.Tensor]:
        qkv, z, b, a = self.in_weight.data.split(self.in_rows)
        return {
            "linear_attn.in_proj_qkv.weight": qkv,
            "linear_attn.in_proj_z.weight": z,
            "linear_attn.in_proj_b.weight": b,
            "linear_attn.in_proj_a.weight": a,
            "linear_attn.conv1d.weight": self.conv_weight.data[:, None],
            "linear_attn.dt_bias": self.dt_bias.data,
            "linear_attn.A_log": self.a_log.data,
            "linear_attn.norm.weight": self.head_norm.data,
            "linear_attn.out_proj.weight": self.out_weight.data,
        }
