"""The least time that a decode step and an update can take on a chip, and what is predicted of them.

A kind of work costs arithmetic at the chip's peak or memory traffic at its bandwidth, whichever takes longer. One kind
follows another, so their times are added. Symbols: W weights of the layers, V H those of the head, N all that
are trained, B sequences, C context of one, L layers, Q width of the queries, t bytes of a token's keys and values in
bfloat16.

A decode step (a token for each of B sequences), in groups of G that share S positions and have O = C - S of their own:

    weights      flops 2 (W + V H) B          bytes 2 (W + V H)                each weight is read once
    attention    flops 4 L Q C B              bytes t (B O + B S / G)          a shared position is read once a group

An update, a token of trajectories that are C long, a share s of it sampled, so in the loss:

    layers       flops 6 W                    forward 2, backward 4
    attention    flops 3 x 4 L Q C / 2        causal; the backward without what it recomputes
    loss         flops 6 s V H                docs/loss.md
    reference    flops 2 W + 2 L Q C + 2 s V H
    optimiser    bytes 30 N / tokens          once an update: AdamW reads and writes float32 weights and moments

With adapters a frozen weight has no gradient: layers 4 W, loss 4 s V H, and the optimiser's bytes are those of the
adapters, which are left out as their products are.

The predictions. A decode step is expected to reach these shares of its floor: 65% at 7B and 50% at 1.5B where nothing
is shared, 55% and 45% with a shared prefix. They are aims, set for an H200 and B = 256; other sizes are interpolated in
log(W + V H). Slower chips hide more of the fixed costs of a step, and should exceed the aims. An update is expected
to run each kind at its share in `UPDATE_SHARES`, and

    MFU = (layers + attention + loss) / (predicted seconds x peak)      the reference's work does not count

bench/rollout/floor.py has the floor of a whole rollout on the machine that it runs on, in float32, with rates measured
there; here are single steps in bfloat16 on chips that are not there.

Deliberately absent: norms, rotations and sampling (fused, they add no traffic to speak of), activations' traffic,
gaps between launches and the host, links between GPUs (links.py).
"""

import math
from dataclasses import dataclass
from typing import Protocol

from thresher.engine.planning.sizes import (
    BF16,
    head_weights,
    kv_bytes,
    layer_weights,
    query_width,
    trained_weights,
)
from thresher.policy.config import ModelConfig

# Of the floor, of a decode step: (weights of 1.5B, share there), (weights of 7B, share there).
UNSHARED_SHARES = ((1.54e9, 0.50), (7.07e9, 0.65))
SHARED_SHARES = ((1.54e9, 0.45), (7.07e9, 0.55))
# Of its own floor, of a kind of an update's work. layers: matmuls, with the elementwise kernels between them.
UPDATE_SHARES = {"layers": 0.60, "attention": 0.45, "loss": 0.50, "reference": 0.60, "optimiser": 0.80}
ADAMW_BYTES = 30  # a weight: read master, gradient and moments, 16; write master, moments and the bfloat16 copy, 14
STATE_BYTES = 22  # a weight: bfloat16 copy and gradient 4, master 4, gradient 4, moments 8, reference 2
LOWEST_SHARE = 0.1


class DeviceRates(Protocol):
    """What a chip does in a second: of a data sheet (chips.py), or measured."""

    @property
    def flops_per_s(self) -> float: ...
    @property
    def bytes_per_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Cost:
    """What a kind of work takes."""

    name: str
    flops: float
    bytes: float

    def seconds(self, chip: DeviceRates) -> float:
        return max(self.flops / chip.flops_per_s, self.bytes / chip.bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeShape:
    """batch sequences, each with `shared` positions that its group of `group` has in common and `own` others."""

    batch: int = 256
    group: int = 1
    shared: int = 0
    own: int = 1500

    @property
    def context(self) -> int:
        return self.shared + self.own

    @property
    def positions(self) -> float:
        """Whose keys and values are read in a step."""
        return self.batch * (self.own + self.shared / self.group)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateShape:
    """trajectories of `length` tokens, `sampled` of them by the policy; both may be means. full: all weights are
    trained, else adapters, whose own work is left out. reference: whether there is one."""

    trajectories: float = 256
    length: int = 1500
    sampled: float = 300
    full: bool = True
    reference: bool = True

    @property
    def tokens(self) -> float:
        return self.trajectories * self.length


def decode_costs(config: ModelConfig, shape: DecodeShape) -> tuple[Cost, ...]:
    """The work of one step."""
    weights = layer_weights(config) + head_weights(config)
    scores = config.num_hidden_layers * query_width(config) * shape.context * shape.batch
    return (
        Cost("weights", 2 * weights * shape.batch, BF16 * weights),
        Cost("attention", 4 * scores, kv_bytes(config) * shape.positions),
    )


def update_costs(config: ModelConfig, shape: UpdateShape) -> tuple[Cost, ...]:
    """The work of one update, a token."""
    layers, head = layer_weights(config), head_weights(config) * shape.sampled / shape.length
    attention = 4 * config.num_hidden_layers * query_width(config) * shape.length / 2
    products = 6 if shape.full else 4
    return (
        Cost("layers", products * layers, 0),
        Cost("attention", 3 * attention, 0),
        Cost("loss", products * head, 0),
        Cost("reference", (2 * layers + attention + 2 * head) if shape.reference else 0, 0),
        Cost("optimiser", 0, ADAMW_BYTES * trained_weights(config) / shape.tokens if shape.full else 0),
    )


def floor_s(costs: tuple[Cost, ...], chip: DeviceRates) -> float:
    return sum(cost.seconds(chip) for cost in costs)


def decode_share(config: ModelConfig, shape: DecodeShape) -> float:
    """The share of a decode step's floor that is expected of a model of this size."""
    (small, low), (large, high) = UNSHARED_SHARES if shape.shared == 0 else SHARED_SHARES
    weights = layer_weights(config) + head_weights(config)
    share = low + (high - low) * math.log(weights / small) / math.log(large / small)
    return min(max(share, LOWEST_SHARE), high)


def predicted_update_s(costs: tuple[Cost, ...], chip: DeviceRates) -> float:
    return sum(cost.seconds(chip) / UPDATE_SHARES[cost.name] for cost in costs)


def predicted_mfu(costs: tuple[Cost, ...], chip: DeviceRates) -> float:
    """Of an update's costs: model flops a second, as a share of peak."""
    useful = sum(cost.flops for cost in costs if cost.name != "reference")
    return useful / predicted_update_s(costs, chip) / chip.flops_per_s


def decode_bytes(config: ModelConfig, shape: DecodeShape) -> float:
    """Memory that a decode step's weights, keys and values take."""
    embedding = trained_weights(config) - layer_weights(config) - head_weights(config)
    return sum(cost.bytes for cost in decode_costs(config, shape)) + BF16 * embedding


def state_bytes(config: ModelConfig) -> float:
    """Memory that full fine-tuning keeps for weights, gradients, moments and the reference, without activations."""
    return STATE_BYTES * trained_weights(config)
