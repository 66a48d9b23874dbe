"""Decoder layers of Llama 3, 3.1 and 3.2, Qwen2 and Qwen2.5, and Qwen3 (dense). Those of Qwen3.5 are in qwen35.py.

All families share one layer: a token mixer, then a gated MLP, with a norm before each. The mixer is grouped-query
attention. Qwen2 has biases on q, k and v; Qwen3 normalises each query and key head before rotation. q, k and v are one
parameter, gate and up another; Hugging Face's names are views of them. Which tokens a token attends to is determined by
an argument, `layout`. Axes: T packed tokens, H hidden, N query heads, K key/value heads, M = N + 2K, D head dimension,
I intermediate.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol, runtime_checkable

import torch
from torch import nn

from thresher.common.errors import UserError
from thresher.kernels.delta.layer import DeltaInputs
from thresher.kernels.layers import add_norm, linear, norm_heads, silu_gate
from thresher.policy.config import ConfigRules, ModelConfig
from thresher.policy.lora import LayerAdapters


class Layout(Protocol):
    """The tokens that each token attends to, and the implementation of attention to them.

    In a rollout it is PagedStep; on CUDA PrefillStep or DeviceStep for prompts and appended text, and BucketStep for
    rows that sample. In an update it is Varlen, or PrefixForest if sequences share prefixes.
    """

    def __call__(self, layer: int, qkv_TMD: torch.Tensor, rope: torch.Tensor, kv_heads: int, /) -> torch.Tensor:
        """Compute attention: [T, N + 2K, D], queries and keys not yet rotated -> [T, N, D]. In a rollout, first write
        the rotated keys and the values to the KV cache. layer: the layer's number among those with attention."""
        ...


@runtime_checkable
class StateLayout(Layout, Protocol):
    """A layout that also computes the gated delta rule. It starts from cached states in a rollout, and from the states
    of the parent segments in an update."""

    def delta(self, layer: int, inputs: DeltaInputs, /) -> torch.Tensor:
        """Compute convolution and gated delta rule -> [T, V, E]. layer: the layer's number among those with it."""
        ...


class Layer(nn.Module, ABC):
    """One layer of a family, which adds to the residual stream."""

    rules: ClassVar[ConfigRules]  # requirements on config.json
    norm_offset: ClassVar[float] = 0.0  # added to the weight of a norm over H or D

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.adapters: LayerAdapters | None = None  # set by lora.py

    @classmethod
    def make(cls, config: ModelConfig, number: int) -> "Layer":
        """Return the layer with this number in a model."""
        return cls(config)

    @classmethod
    def make_norm(cls, width: int) -> nn.Parameter:
        """Return the initial weight of a norm, which multiplies by 1."""
        return nn.Parameter(torch.full((width,), 1 - cls.norm_offset))

    @classmethod
    def gain(cls, norm_H: torch.Tensor) -> torch.Tensor:
        """Return the factors of a norm with this weight; if there is an offset, in float32 at least."""
        if not cls.norm_offset:
            return norm_H
        return norm_H.to(torch.promote_types(norm_H.dtype, torch.float32)) + cls.norm_offset

    @abstractmethod
    def forward(
        self, x_TH: torch.Tensor, addend_TH: torch.Tensor | None, rope: torch.Tensor, layout: Layout, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the residual stream [T, H] after this layer as two terms, whose sum it is. The next norm adds the
        second to the first, as this layer's first norm adds `addend_TH` to `x_TH`. rope: from `rope_table`. layer: its
        number among those of its type."""

    @abstractmethod
    def hf_views(self) -> dict[str, torch.Tensor]:
        """Return views of the parameters' memory by Hugging Face's names within a layer, each element once."""

    def adapted(self, x: torch.Tensor, y: torch.Tensor, *targets: str) -> torch.Tensor:
        """Return y [T, ..], the outputs of the linear maps `targets` of x, plus those of their adapters."""
        return y if self.adapters is None else self.adapters(x, y, targets)


class MixerLayer(Layer):
    """A token mixer and a gated MLP, each applied after a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        hidden, inner = config.hidden_size, config.intermediate_size
        self.input_norm = self.make_norm(hidden)
        self.add_mixer(config)
        self.post_norm = self.make_norm(hidden)
        self.gate_up_weight = nn.Parameter(torch.empty(2 * inner, hidden))
        self.down_weight = nn.Parameter(torch.empty(hidden, inner))

    @abstractmethod
    def add_mixer(self, config: ModelConfig) -> None:
        """Create the mixer's parameters."""

    @abstractmethod
    def mix(self, y_TH: torch.Tensor, rope: torch.Tensor, layout: Layout, layer: int) -> torch.Tensor:
        """Return the mixer's term of the residual stream, [T, H]."""

    @abstractmethod
    def mixer_views(self) -> dict[str, torch.Tensor]:
        """Return the mixer's part of `hf_views`."""

    def forward(
        self, x_TH: torch.Tensor, addend_TH: torch.Tensor | None, rope: torch.Tensor, layout: Layout, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        eps = self.config.rms_norm_eps
        x_TH, y_TH = add_norm(x_TH, addend_TH, self.gain(self.input_norm), eps)
        x_TH, y_TH = add_norm(x_TH, self.mix(y_TH, rope, layout, layer), self.gain(self.post_norm), eps)
        inner_TI = silu_gate(self.adapted(y_TH, linear(y_TH, self.gate_up_weight), "gate", "up"))
        return x_TH, self.adapted(inner_TI, linear(inner_TI, self.down_weight), "down")

    def hf_views(self) -> dict[str, torch.Tensor]:
        views = self.mixer_views()
        gate, up = self.gate_up_weight.data.chunk(2)
        views["mlp.gate_proj.weight"] = gate
        views["mlp.up_proj.weight"] = up
        views["mlp.down_proj.weight"] = self.down_weight.data
        views["input_layernorm.weight"] = self.input_norm.data
        views["post_attention_layernorm.weight"] = self.post_norm.data
        return views


class DecoderLayer(MixerLayer):
    """A layer with grouped-query attention as its mixer."""

    has_bias: ClassVar[bool] = False  # on the projections to q, k and v
    has_head_norms: ClassVar[bool] = False  # of q and k, one weight [D] each for all their heads
    q_parts: ClassVar[int] = 1  # of q_proj, for each head: the query, and what a family adds

    def add_mixer(self, config: ModelConfig) -> None:
        self.q_rows = config.num_attention_heads * config.head_dim
        self.kv_rows = config.num_key_value_heads * config.head_dim
        rows = self.q_parts * self.q_rows + 2 * self.kv_rows
        self.qkv_weight = nn.Parameter(torch.empty(rows, config.hidden_size))
        self.qkv_bias = nn.Parameter(torch.zeros(rows)) if self.has_bias else None
        if self.has_head_norms:
            self.q_norm, self.k_norm = self.make_norm(config.head_dim), self.make_norm(config.head_dim)
        self.o_weight = nn.Parameter(torch.empty(config.hidden_size, self.q_rows))

    def mix(self, y_TH: torch.Tensor, rope: torch.Tensor, layout: Layout, layer: int) -> torch.Tensor:
        config = self.config
        qkv = self.adapted(y_TH, linear(y_TH, self.qkv_weight, self.qkv_bias), "q", "k", "v")
        qkv_TMD = qkv.view(len(qkv), -1, config.head_dim)
        if self.has_head_norms:
            qkv_TMD = norm_heads(qkv_TMD, self.q_norm, self.k_norm, config.num_key_value_heads, config.rms_norm_eps)
        o = layout(layer, qkv_TMD, rope, config.num_key_value_heads).reshape(len(qkv), self.q_rows)
        return self.adapted(o, linear(o, self.o_weight), "o")

    def mixer_views(self) -> dict[str, torch.Tensor]:
        rows = [self.q_parts * self.q_rows, self.kv_rows, self.kv_rows]
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
        return views


def _check_heads(config: ModelConfig) -> None:
    """Raise UserError if the heads do not divide hidden_size; transformers refuses this even with a head_dim."""
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
    """Llama 3, 3.1 and 3.2: no biases, no head norms. Llama 3.1's head_dim is hidden_size / num_attention_heads."""

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
    """Qwen3, dense: norms on query and key heads, no biases. config.json always gives head_dim."""

    has_head_norms = True
    rules = ConfigRules(
        constants={"hidden_act": "silu", "attention_bias": False},
        accepted={"use_sliding_window": ((False, None), "false")},
        integers=("head_dim",),
    )
