"""Qwen2 and Qwen2.5, and what was distilled into them (R1-Distill-Qwen): biases on q, k and v.

Deliberately absent: sliding windows, which published models have switched off (refused where they are on), and head
sizes of their own, which this family does not have.
"""

from thresher.policy.config import ConfigRules, ModelConfig
from thresher.policy.models.decoder import DecoderLayer
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


class Qwen2Layer(DecoderLayer):
    """Biases on q, k and v; no norms of heads."""

    has_bias = True
    rules = ConfigRules(
        constants={"hidden_act": "silu"},
        accepted={"use_sliding_window": ((False, None), "false")},
        check=_check_sizes,
    )
