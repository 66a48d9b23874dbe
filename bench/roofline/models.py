"""The sizes of the Qwen2.5 models, as their published config.json files give them, and what follows from sizes.

Norms and biases, under a thousandth of the weights, are left out. The embedding is read a row a token, and no matmul.
"""

from thresher.policy.config import ModelConfig

BF16, FP32 = 2, 4  # bytes


def _qwen2_5(
    layers: int, hidden: int, heads: int, kv_heads: int, intermediate: int, vocab: int, tied: bool
) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        rms_norm_eps=1e-6,
        rope_theta=1e6,
        max_position_embeddings=32_768,
        tie_word_embeddings=tied,
        eos_token_ids=(),
    )


MODELS = {
    "0.5B": _qwen2_5(24, 896, 14, 2, 4864, 151_936, True),
    "1.5B": _qwen2_5(28, 1536, 12, 2, 8960, 151_936, True),
    "3B": _qwen2_5(36, 2048, 16, 2, 11_008, 151_936, True),
    "7B": _qwen2_5(28, 3584, 28, 4, 18_944, 152_064, False),
}


def query_width(config: ModelConfig) -> int:
    return config.num_attention_heads * config.head_dim


def layer_weights(config: ModelConfig) -> int:
    """Elements of the matrices of all layers: q and o, k and v, gate, up and down."""
    kv_width = config.num_key_value_heads * config.head_dim
    one = config.hidden_size * (2 * query_width(config) + 2 * kv_width + 3 * config.intermediate_size)
    return config.num_hidden_layers * one


def head_weights(config: ModelConfig) -> int:
    """Elements of the LM head."""
    return config.vocab_size * config.hidden_size


def trained_weights(config: ModelConfig) -> int:
    """Elements that an optimiser has: layers, head, and the embedding where it is not the head."""
    heads = 1 if config.tie_word_embeddings else 2
    return layer_weights(config) + heads * head_weights(config)


def kv_bytes(config: ModelConfig) -> int:
    """Bytes of a token's keys and values in all layers, bfloat16."""
    return 2 * BF16 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
