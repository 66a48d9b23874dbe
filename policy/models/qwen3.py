"""Qwen3, the dense models: no biases, a head size of its own, and a norm of each query head and each key head.

Qwen3 0.6B has 16 heads of 128 on a width of 1,024, 32B has 64 on 5,120: config.json always says `head_dim`, and a
reader that took the quotient would be wrong.

Deliberately absent: experts (Qwen3MoE is another model_type, and refused), sliding windows.
"""

from thresher.policy.config import ConfigRules
from thresher.policy.models.decoder import DecoderLayer


class Qwen3Layer(DecoderLayer):
    """Norms of heads; no biases."""

    has_head_norms = True
    rules = ConfigRules(
        constants={"hidden_act": "silu", "attention_bias": False},
        accepted={"use_sliding_window": ((False, None), "false")},
        integers=("head_dim",),
    )
