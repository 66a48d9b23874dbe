"""How long a step should take, by the formulas of floors.py: what is predicted, not the floor.

Every trajectory is taken to be as long as its limits let it (rollout.max_context, max_policy_tokens), unless told
otherwise, so this is the longest step and not the mean. Of the context, what neither the policy writes nor searches
answer is the prompt, which a group shares.

    rollout    prefill: prompts once a group, passages once a sample, 2 W flops a token;
               decoding: sampled tokens / sequences at once, each a decode step at half the context
    update     floors.py: update_costs, a token that is computed (setting.py: computed_tokens)

With activations computed anew the layers' forward comes once more, 8 W in place of 6. Every pass of
grpo.epochs_per_batch costs the same; old log-probs that are recomputed, a forward.

Several GPUs, of a chip whose links are known: an update takes as long as its computation or as what is sent meanwhile
(links.py), whichever is longer, for a layer is gathered while the one before it is computed; a rollout waits for its
copy. All are taken to be linked as in one machine. With rates that were measured, links are left out.

Deliberately absent: searches, judges, evaluations, checkpoints.
"""

from dataclasses import dataclass, replace

from thresher.engine.planning import floors
from thresher.engine.planning.chips import Chip
from thresher.engine.planning.floors import UPDATE_SHARES, DecodeShape, DeviceRates, UpdateShape
from thresher.engine.planning.links import sent_bytes
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
    links = link_rate(rates, s.gpus)
    rates = MeasuredRates(rates.flops_per_s, rates.bytes_per_s * BF16 / s.item)
    rollout, update = _rollout(config, s, rates), _update(config, s, rates, checkpointed)
    if links is not None:
        sent = sent_bytes(config, s)
        rollout, update = rollout + sent["rollout"] / links, max(update, sent["update"] / links)
    return {"rollout": rollout, "update": update}


def link_rate(rates: DeviceRates, gpus: int) -> float | None:
    """Bytes a second that a GPU sends to the others, and receives; None with one, and where it is not known."""
    return rates.link_bytes_per_s if gpus > 1 and isinstance(rates, Chip) else None


def _rollout(config: ModelConfig, s: PlanSetting, rates: DeviceRates) -> float:
    prompt, batch = s.prompt, min(s.running, s.samples)
    group = min(s.group, batch) if s.share_prefix else 1
    shape = DecodeShape(batch=batch, group=group, shared=prompt, own=max((s.length - prompt) // 2, 1))
    a_step = floors.floor_s(floors.decode_costs(config, shape), rates) / floors.decode_share(config, shape)
    fed = s.samples * (s.length - prompt - s.sampled) + s.groups * prompt
    prefill = 2 * layer_weights(config) * max(fed, 0) / rates.flops_per_s / UPDATE_SHARES["layers"]
    return prefill + a_step * s.samples * s.sampled / batch


def _update(config: ModelConfig, s: PlanSetting, rates: DeviceRates, checkpointed: bool) -> float:
    tokens = s.groups * s.computed_tokens
    whole = tokens / s.length  # fewer trajectories where prompts are computed once, each with more rows in the loss
    shape = UpdateShape(
        trajectories=whole / s.updates,
        length=s.length,
        sampled=s.samples * s.sampled / whole,
        full=s.adapters is None,
        reference=s.beta,
    )
    costs = floors.update_costs(config, shape)
    if checkpointed:
        costs = tuple(
            replace(cost, flops=cost.flops + 2 * layer_weights(config)) if cost.name == "layers" else cost
            for cost in costs
        )
    forward = 2 * (layer_weights(config) + head_weights(config) * shape.sampled / s.length)
    recomputing = tokens * forward / rates.flops_per_s / UPDATE_SHARES["layers"] if s.recomputes else 0.0
    return floors.predicted_update_s(costs, rates) * tokens * s.epochs + recomputing
