"""The policy: a Qwen2 / Qwen2.5 transformer, small enough to read in one sitting.

One forward serves rollout and training. What differs between them, where keys and values live, is an argument: `attend`
is called once a layer with that layer's fresh q, k and v, and is either a `Varlen` layout (whole sequences, with
gradients) or a paged cache (see engine/rollout/kv_cache.py). Low-rank adapters (lora.py), where there are some, add to
a layer's linear maps, in both.

The query, key and value projections are one parameter, gate and up another; the names and pieces that Hugging Face
files use are views of them (`hf_views`), so loading and saving are one table read in two directions.

Deliberately absent: dropout, sliding windows, rope scaling (refused when the config is read), any notion of batch.
Axes: T packed tokens, H hidden, V vocabulary, D head dimension, I intermediate.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from thresher.kernels.attention import Varlen
from thresher.kernels.layers import rms_norm, rope_table, rotate, silu_gate
from thresher.policy.config import ModelConfig, read_config, write_config
from thresher.policy.lora import FOLDER, BlockAdapters, LoraSettings, merged_weights, save_adapters
from thresher.policy.weights import read_weights, write_weights

# attend(layer, q [T, heads, D], k [T, kv_heads, D], v [T, kv_heads, D]) -> [T, heads, D]
Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """One layer: attention and a gated MLP, each behind a norm and added to the stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
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
        self.adapters: BlockAdapters | None = None  # lora.py puts them here

    def forward(self, x_TH: torch.Tensor, rope: torch.Tensor, attend: Attend, layer: int) -> torch.Tensor:
        config = self.config
        y_TH = rms_norm(x_TH, self.input_norm, config.rms_norm_eps)
        qkv = self._adapted(y_TH, F.linear(y_TH, self.qkv_weight, self.qkv_bias), "q", "k", "v")
        heads_THD = qkv.view(len(qkv), -1, config.head_dim)
        # Queries and keys lie side by side, so one rotation turns both.
        turned_THD = rotate(heads_THD[:, : config.num_attention_heads + config.num_key_value_heads], rope)
        q_THD, k_TKD = turned_THD.split([config.num_attention_heads, config.num_key_value_heads], dim=1)
        v_TKD = heads_THD[:, config.num_attention_heads + config.num_key_value_heads :]
        o_TQ = attend(layer, q_THD, k_TKD, v_TKD).reshape(len(qkv), self.q_rows)
        x_TH = x_TH + self._adapted(o_TQ, F.linear(o_TQ, self.o_weight), "o")
        y_TH = rms_norm(x_TH, self.post_norm, config.rms_norm_eps)
        inner_TI = silu_gate(self._adapted(y_TH, F.linear(y_TH, self.gate_up_weight), "gate", "up"))
        return x_TH + self._adapted(inner_TI, F.linear(inner_TI, self.down_weight), "down")

    def _adapted(self, x: torch.Tensor, y: torch.Tensor, *targets: str) -> torch.Tensor:
        """The outputs y [T, ..] of the linear maps `targets` of x, with what their adapters add."""
        return y if self.adapters is None else self.adapters(x, y, targets)


class Policy(nn.Module):
    """A Qwen2 language model over packed tokens. Make one with `load_policy` or `init_policy`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.lora: LoraSettings | None = None  # of the adapters, where lora.py has put some on the layers
        self.embed_VH = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.Parameter(torch.ones(config.hidden_size))
        self.untied_head_VH = (
            None if config.tie_word_embeddings else nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        )

    @property
    def head_VH(self) -> torch.Tensor:
        """The LM head [V, H]; the embedding itself where they are tied."""
        return self.embed_VH if self.untied_head_VH is None else self.untied_head_VH

    @property
    def device(self) -> torch.device:
        return self.embed_VH.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_VH.dtype

    def blocks(self) -> Iterator[Block]:
        for layer in self.layers:
            assert isinstance(layer, Block)
            yield layer

    @contextmanager
    def adapters_off(self) -> Iterator[None]:
        """Within it the policy is its base: what it was before it got adapters. A policy without any stays as it is."""
        found = [layer.adapters for layer in self.blocks() if layer.adapters is not None]
        before = [adapters.on for adapters in found]
        for adapters in found:
            adapters.on = False
        try:
            yield
        finally:
            for adapters, on in zip(found, before, strict=True):
                adapters.on = on

    def hidden(self, ids_T: torch.Tensor, positions_T: torch.Tensor, attend: Attend) -> torch.Tensor:
        """Packed ids [T] int64 and their positions [T] int64 -> hidden states after the last norm [T, H]."""
        config = self.config
        rope = rope_table(positions_T, config.head_dim, config.rope_theta, self.dtype)
        x_TH = F.embedding(ids_T, self.embed_VH)
        for index, layer in enumerate(self.layers):
            x_TH = layer(x_TH, rope, attend, index)
        return rms_norm(x_TH, self.norm, config.rms_norm_eps)

    def logits(self, ids_T: torch.Tensor) -> torch.Tensor:
        """One sequence of ids [T] -> logits [T, V]. For inspection and tests: training never materialises them."""
        ids_T = torch.as_tensor(ids_T, dtype=torch.int64, device=self.device)
        layout = Varlen([len(ids_T)], self.device)
        return F.linear(self.hidden(ids_T, layout.positions_T, layout), self.head_VH)

    def parameter_count(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def save(self, path: str | Path) -> None:
        """Write config.json, generation_config.json and model.safetensors as Hugging Face lays them out. Adapters are
        merged into these, in float32, and written as they are into a folder beside."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        if self.lora is None:
            write_weights(folder, hf_views(self))
        else:
            write_weights(folder, merged_weights(self, hf_views(self)))
            save_adapters(self, folder / FOLDER)
        write_config(self.config, folder)


def hf_views(policy: Policy) -> dict[str, torch.Tensor]:
    """Hugging Face's names -> tensors that share the policy's memory (slices of the fused projections included)."""
    views = {"model.embed_tokens.weight": policy.embed_VH.data, "model.norm.weight": policy.norm.data}
    if policy.untied_head_VH is not None:
        views["lm_head.weight"] = policy.untied_head_VH.data
    for index, layer in enumerate(policy.blocks()):
        prefix = f"model.layers.{index}."
        sizes = [layer.q_rows, layer.kv_rows, layer.kv_rows]
        for name, weight, bias in zip(
            "qkv", layer.qkv_weight.data.split(sizes), layer.qkv_bias.data.split(sizes), strict=True
        ):
            views[f"{prefix}self_attn.{name}_proj.weight"] = weight
            views[f"{prefix}self_attn.{name}_proj.bias"] = bias
        views[f"{prefix}self_attn.o_proj.weight"] = layer.o_weight.data
        gate, up = layer.gate_up_weight.data.chunk(2)
        views[f"{prefix}mlp.gate_proj.weight"] = gate
        views[f"{prefix}mlp.up_proj.weight"] = up
        views[f"{prefix}mlp.down_proj.weight"] = layer.down_weight.data
        views[f"{prefix}input_layernorm.weight"] = layer.input_norm.data
        views[f"{prefix}post_attention_layernorm.weight"] = layer.post_norm.data
    return views


def load_policy(path: str | Path, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Policy:
    """Read a Qwen2 or Qwen2.5 model from a folder of config.json and safetensors (one file, or shards with an index).

    Names and shapes must match the config exactly; anything else is a UserError that names the file and the tensor.
    """
    folder = Path(path)
    config = read_config(folder)
    with torch.device("meta"):
        policy = Policy(config)
    policy = policy.to(dtype).to_empty(device=device)
    views = hf_views(policy)
    # Some writers keep a copy of the tied head; it is accepted if it is one.
    optional = {"lm_head.weight"} if config.tie_word_embeddings else set()
    for name, tensor in read_weights(folder, {name: view.shape for name, view in views.items()}, optional=optional):
        if name in views:
            views[name].copy_(tensor)
    return policy


def init_policy(
    config: ModelConfig, seed: int, *, embedding_std: float | None = None, zero_outputs: bool = False
) -> Policy:
    """A policy with random weights: normal(0, initializer_range), zero biases, unit norms; a function of the seed.

    `embedding_std` takes initializer_range's place for the embeddings; `zero_outputs` makes every layer begin as the
    identity, its projections into the residual stream being 0. A token is then still itself after all layers, which is
    what looking it up needs: small models learn to copy from among shuffled passages so, and else hardly (docs/log.md).
    """
    generator = torch.Generator().manual_seed(seed)
    policy = Policy(config)
    with torch.no_grad():
        for name, parameter in sorted(policy.named_parameters()):
            if parameter.dim() == 2:
                own_std = embedding_std if name == "embed_VH" else None
                parameter.normal_(0.0, own_std or config.initializer_range, generator=generator)
                if zero_outputs and name.endswith(("o_weight", "down_weight")):
                    parameter.zero_()
    return policy
