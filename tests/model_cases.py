"""The shape of a small model, for any test that needs one: two layers, two query heads per key/value head.

Deliberately absent: policies. A config needs no torch until it is made into one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from thresher.policy.config import ModelConfig


def make_config(**changes: Any) -> ModelConfig:
    """Return a config of width 32, with `changes`; head_dim is hidden_size / num_attention_heads unless given."""
    from thresher.policy.config import ModelConfig

    values: dict[str, Any] = {
        "vocab_size": 29,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 300.0,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
        "eos_token_ids": (0,),
        **changes,
    }
    values.setdefault("head_dim", values["hidden_size"] // values["num_attention_heads"])
    return ModelConfig(**values)


def stir(model: Any, seed: int = 3) -> Any:
    """Make all parameters random and return the model: the biases and norms of a fresh model would hide mistakes. A
    matrix is scaled by its number of inputs, so that logits are of order 1 at every width."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(0.3 * noise) if parameter.dim() == 1 else parameter.copy_(noise / parameter.shape[1] ** 0.5)
    return model
