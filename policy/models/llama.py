"""Llama 3, 3.1 and 3.2, and what has their shape: no biases; RoPE scaled to a longer context from 3.1 on.

The scaling is `policy/config.py`'s (any family may have it), as are several end tokens. A config.json without
`head_dim` means hidden_size / num_attention_heads, as Llama 3.1's does; 3.2's says it.

Deliberately absent: Llama 1 and 2, whose tokenizer is not byte-level BPE and refused as such; Llama 4, another
model_type.
"""

from thresher.policy.config import ConfigRules, ModelConfig
from thresher.policy.models.decoder import DecoderLayer
from thresher.rewards.errors import UserError


def _check_sizes(config: ModelConfig) -> None:
    """transformers refuses such a model even where `head_dim` is given, and could not load what we saved."""
    hidden, heads = config.hidden_size, config.num_attention_heads
    if hidden % heads:
        raise UserError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}; change one of them")


class LlamaLayer(DecoderLayer):
    """Neither biases nor norms of heads."""

    rules = ConfigRules(
        constants={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
        written=("head_dim",),
        check=_check_sizes,
    )
