"""The named objectives of `grpo.objective`: the surrogate of each, and the keys of [grpo] that it presets.

Keys of the recipe file or of `--set` override those of the objective, which override those of a system's preset.
`objective = "FILE.py:FUNCTION"` is your own surrogate (kernels/objective.py), which presets nothing.
"""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class NamedObjective:
    """surrogate: name in kernels/objective.py. grpo: keys of [grpo] that it presets. source: paper and equation."""

    surrogate: str
    source: str
    grpo: dict[str, Any] = field(default_factory=dict)


_NO_REFERENCE = {"beta": 0.0}
OBJECTIVES = {
    "grpo": NamedObjective("clip", "Shao et al. 2024, 2402.03300, eq. 3"),
    "dr_grpo": NamedObjective(
        "clip", "Liu et al. 2025, 2503.20783", {"scale": "none", "aggregation": "constant", **_NO_REFERENCE}
    ),
    "dapo": NamedObjective(
        "clip",
        "Yu et al. 2025, 2503.14476, eq. 8",
        {"clip_high": 0.28, "aggregation": "token", "refill": True, **_NO_REFERENCE},
    ),
    "cispo": NamedObjective(
        "cispo",
        "MiniMax-M1 2025, 2506.13585, eq. 4; the cap of 5 is ScaleRL's, because MiniMax published none",
        {"clip_low": 1.0, "clip_high": 4.0, "aggregation": "token", **_NO_REFERENCE},
    ),
    "gspo": NamedObjective(
        "gspo",
        "Zheng et al. 2025, 2507.18071; such a narrow clip needs old log-probs without the rollout's rounding",
        {"clip_low": 3e-4, "clip_high": 4e-4, "old_logprobs": "recomputed", **_NO_REFERENCE},
    ),
    "sapo": NamedObjective("sapo", "Gao et al. 2025, 2511.20347", {**_NO_REFERENCE}),
    "gmpo": NamedObjective(
        "gmpo",
        "Zhao et al. 2025, 2507.20673; the log-ratio is bounded to [-.4, .4]",
        {"clip_low": 0.3296799539643607, "clip_high": 0.4918246976412703, **_NO_REFERENCE},
    ),
    "dppo": NamedObjective(
        "dppo_tv", "2602.04879, total variation", {"divergence": 0.15, "aggregation": "token", **_NO_REFERENCE}
    ),
    "dppo_kl": NamedObjective(
        "dppo_kl", "2602.04879, KL", {"divergence": 0.05, "aggregation": "token", **_NO_REFERENCE}
    ),
    "reinforce": NamedObjective("reinforce", "Williams 1992", {"baseline": "none", "scale": "none", **_NO_REFERENCE}),
    "rloo": NamedObjective("clip", "Ahmadian et al. 2024, 2402.14740", {"baseline": "leave_one_out", "scale": "none"}),
    "reinforce++": NamedObjective(
        "clip", "Hu 2025, 2501.03262", {"baseline": "batch", "scale": "batch", "kl_value": "k2"}
    ),
}

CLIPPED = ("clip", "gspo")  # surrogates to which dual_clip applies


def surrogate_name(objective: str) -> str:
    """Return the surrogate of a named objective, or the FILE.py:FUNCTION of a user's own."""
    return OBJECTIVES[objective].surrogate if objective in OBJECTIVES else objective
