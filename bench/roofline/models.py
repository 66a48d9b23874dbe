"""The sizes of the Qwen2.5 models, as their published config.json files give them."""

from thresher.policy.config import ModelConfig


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
