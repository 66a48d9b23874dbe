"""How long a step should take, by the formulas of floors.py: what is predicted, not the floor.

Every trajectory is taken to be as long as its limits let it (rollout.max_context, max_policy_tokens), unless told
otherwise, so this is the longest step and not the mean. Of the context, what neither the policy writes nor searches
answer is the prompt, which a group shares.

    rollout    prefill: prompts once a group, passages once a sample, 2 W flops a token;
               decoding: sampled tokens / sequences at once, each a decode step at half the context
    update     floors.py: update_parts, a token; with a shared prompt computed once where optim.share_prefix is on

With activations computed anew the layers' forward comes once more, 8 W in place of 6. Every pass of
grpo.epochs_per_batch costs the same; old log-probs that are recomputed, a forward.

Deliberately absent: searches, judges, evaluations, checkpoints, links between GPUs.
"""

from dataclasses import dataclass, replace

from thresher.engine.planning import floors
from thresher.engine.planning.floors import UPDATE_SHARES, DecodeShape, DeviceRates, UpdateShape
from thresher.engine.planning.setting import PlanSetting
from thresher.engine.planning.sizes import BF16, head_weights, layer_weights
from thresher.policy.config import ModelConfig


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """DeviceRates for bfloat16's two bytes an element, in which floors.py counts."""

    flops_per_s: float
    bytes_per_s: float


def seconds_per_step(config: ModelConfig, s: PlanSetting, rates: DeviceRates, checkpointed: bool) -> dict[str, float]:
    """{"rollout": .., "update": ..} of one GPU's share of a step."""
    rates = MeasuredRates(rates.flops_per_s, rates.bytes_per_s * BF16 / s.item)
    return {"rollout": _rollout(config, s, rates), "update": _update(config, s, rates, checkpointed)}


def _rollout(config: ModelConfig, s: PlanSetting, rates: DeviceRates) -> float:
    prompt, batch = s.shared_prompt, min(s.running, s.samples)
    group = min(s.group, batch) if s.share_prefix else 1
    shape = DecodeShape(batch=batch, group=group, shared=prompt, own=max((s.length - prompt) // 2, 1))
    a_step = floors.floor_s(floors.decode_parts(config, shape), rates) / floors.decode_share(config, shape)
    fed = s.samples * (s.length - prompt - s.sampled) + -(-s.samples // s.group) * prompt
    prefill = 2 * layer_weights(config) * max(fed, 0) / rates.flops_per_s / UPDATE_SHARES["layers"]
    return prefill + a_step * s.samples * s.sampled / batch


def _update(config: ModelConfig, s: PlanSetting, rates: DeviceRates, checkpointed: bool) -> float:
    shape = UpdateShape(
        trajectories=max(s.samples // s.updates, 1),
        length=s.length,
        sampled=s.sampled,
        full=s.adapters is None,
        reference=s.beta,
    )
    parts = floors.update_parts(config, shape)
    if checkpointed:
        parts = tuple(
            replace(part, flops=part.flops + 2 * layer_weights(config)) if part.name == "layers" else part
            for part in parts
        )
    tokens = s.samples * s.length
    if s.share_rows:
        tokens -= (s.samples - -(-s.samples // s.group)) * s.shared_prompt
    forward = 2 * (layer_weights(config) + head_weights(config) * s.sampled / s.length)
    recomputing = tokens * forward / rates.flops_per_s / UPDATE_SHARES["layers"] if s.recomputes else 0.0
    return floors.predicted_update_s(parts, rates) * tokens * s.epochs + recomputing
