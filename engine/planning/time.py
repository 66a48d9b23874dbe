"""Seconds of a step: the floor on a chip, the prediction, and data sheets of the chips.

docs/gpu.md, Floors and predictions, has the formulas of a decode step and of an update, and the expected shares of the
floors. docs/scale.md has those of a step of a recipe with all trajectories at their maximum length, and the traffic
between several GPUs. A kind of work costs arithmetic at the chip's peak or memory traffic at its bandwidth, whichever
takes longer; times of several kinds are added. Floors do not count norms, rotations and sampling (fused), activation
traffic, gaps between launches, the host, searches, judges, evaluations. The prediction of a decode step has a term for
some of these, fitted to an H200; the other predictions are assumed shares of the floors.

Data sheets of NVIDIA: A100 40GB and 80GB SXM, A800 80GB SXM (an A100 with slower NVLink), H100 SXM and PCIe, H800 SXM
(an H100 with slower NVLink), H200 SXM. Peak is that of dense bfloat16 products with float32 sums: SMs x products a
cycle of one x the boost clock. NVLink, both directions together, of which one is half: A100 600 GB/s, A800 400, H100
and H200 900, H800 400; the H100 PCIe's PCIe 5.0 x16: 128. The latency of a load that misses every cache, in cycles: Luo
et al. 2024, "Benchmarking and Dissecting the Nvidia Hopper GPU Architecture via Microbenchmarking", table of memory
latencies: 466 on an A100, 479 on an H100; the H200 is assumed to be an H100 with other memory. Little's law, bytes in
flight = latency x bandwidth, uses the latency of an idle memory, so the product is necessary and not sufficient.
"""

import math
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch

from thresher.engine.config.objectives import surrogate_name
from thresher.engine.decoding.kv_cache import DeltaStates
from thresher.engine.planning.memory import (
    BF16,
    FP32,
    PlanSetting,
    all_weights,
    head_weights,
    in_layers,
    kv_bytes,
    layer_weights,
    micro_batch,
    query_width,
    trained_weights,
    trained_weights_of,
)
from thresher.kernels.delta.rule import CHUNK
from thresher.kernels.objective import PER_TOKEN
from thresher.policy.config import ModelConfig

GB, TB, TERA = 1e9, 1e12, 1e12
# Share of the floor that a decode step reaches on a GPU, and the seconds per layer that do not shrink with the work, by
# whether sequences share a prefix: fitted to six shapes on an H200 (docs/gpu.md), with errors of at most 7%.
DECODE_SHARE, LAYER_SECONDS = 0.70, {False: 25e-6, True: 56e-6}
# Assumed share of the floor that a decode step reaches on a CPU, with rates of `plan --measure`: two points (weights,
# share), interpolated by the logarithm of the weights.
ASSUMED_SHARES = ((1.54e9, 0.45), (7.07e9, 0.55))
# Share of its floor that each kind of an update's work reaches. layers: matmuls and elementwise kernels.
UPDATE_SHARES = {"layers": 0.60, "attention": 0.45, "loss": 0.50, "reference": 0.60, "optimiser": 0.80}
ADAMW_BYTES = 30  # per weight: read master, gradient and moments, 16; write master, moments and the bfloat16 copy, 14
STATE_BYTES = 22  # per weight: bfloat16 copy and gradient 4, master 4, gradient 4, moments 8, reference 2
LOWEST_SHARE = 0.1


class DeviceRates(Protocol):
    """The rates of a chip, from a data sheet or measured."""

    @property
    def flops_per_s(self) -> float: ...
    @property
    def bytes_per_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class MeasuredRates:
    """DeviceRates for elements of two bytes (bfloat16), the unit of costs."""

    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """A GPU. flops_per_s: dense bfloat16, multiplications and additions. memory and bytes_per_s: of its HBM.
    link_bytes_per_s: to the other GPUs of its machine, in one direction."""

    name: str
    capability: int
    sms: int
    clock_hz: float
    flops_per_s: float
    memory: float
    bytes_per_s: float
    link_bytes_per_s: float
    latency_cycles: int

    @property
    def bytes_in_flight_per_sm(self) -> float:
        """Return the bytes in flight per multiprocessor that fill the memory bandwidth, by Little's law."""
        return self.latency_cycles / self.clock_hz * self.bytes_per_s / self.sms


_A100 = partial(Chip, capability=80, sms=108, clock_hz=1.41e9, flops_per_s=312 * TERA, latency_cycles=466)
_HOPPER = partial(Chip, capability=90, sms=132, clock_hz=1.83e9, flops_per_s=989 * TERA, latency_cycles=479)
_EVERY = (
    _A100(name="A100-40", memory=40 * GB, bytes_per_s=1.555 * TB, link_bytes_per_s=300 * GB),
    _A100(name="A100-80", memory=80 * GB, bytes_per_s=2.039 * TB, link_bytes_per_s=300 * GB),
    _A100(name="A800", memory=80 * GB, bytes_per_s=2.039 * TB, link_bytes_per_s=200 * GB),
    _HOPPER(name="H100", memory=80 * GB, bytes_per_s=3.35 * TB, link_bytes_per_s=450 * GB),
    _HOPPER(name="H200", memory=141 * GB, bytes_per_s=4.8 * TB, link_bytes_per_s=450 * GB),
)
CHIPS: dict[str, Chip] = {chip.name: chip for chip in _EVERY}
# Predictions are not made for these, but a bench may run on them.
_H800 = _HOPPER(name="H800", memory=80 * GB, bytes_per_s=3.35 * TB, link_bytes_per_s=200 * GB)
_PCIE = _HOPPER(name="H100-PCIe", memory=80 * GB, bytes_per_s=2.0 * TB, link_bytes_per_s=64 * GB)
_PCIE = replace(_PCIE, sms=114, clock_hz=1.755e9, flops_per_s=756 * TERA)


def fastest(capability: int) -> Chip:
    """Return the chip of this compute capability whose memory needs the most bytes in flight."""
    return max((chip for chip in CHIPS.values() if chip.capability == capability), key=lambda chip: chip.bytes_per_s)


def this_chip(device: torch.device) -> Chip | None:
    """Return the chip of a device, by the words of its name and its memory; None if it is unknown. That includes a GPU
    with other rates under a known name, and a slice of a GPU."""
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    words = set(re.split(r"[\s-]+", found.name))
    if words & {"GH200", "NVL", "MIG"} or {"H800", "PCIe"} <= words:
        return None
    if "A100" in words:
        return CHIPS["A100-80" if found.total_memory > 50e9 else "A100-40"]
    known = {"H100": _PCIE} if "PCIe" in words else {}
    known = {chip.name: chip for chip in (_H800, *CHIPS.values())} | known
    return next((chip for name, chip in known.items() if name in words), None)


@dataclass(frozen=True, slots=True)
class Cost:
    """A kind of work: its operations and its bytes of memory traffic."""

    name: str
    flops: float
    bytes: float

    def seconds(self, chip: DeviceRates) -> float:
        return max(self.flops / chip.flops_per_s, self.bytes / chip.bytes_per_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeShape:
    """The shape of a decode step. Each of `batch` sequences has `shared` positions in common with its group of `group`
    sequences, and `own` others."""

    batch: int = 256
    group: int = 1
    shared: int = 0
    own: int = 1500

    @property
    def context(self) -> int:
        return self.shared + self.own

    @property
    def shares(self) -> bool:
        """Return whether sequences have positions in common."""
        return self.group > 1 and self.shared > 0

    @property
    def positions(self) -> float:
        """Return the number of positions whose keys and values are read in a step."""
        return self.batch * (self.own + self.shared / self.group)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateShape:
    """The shape of an update: trajectories of `length` tokens, `sampled` of them by the policy; both may be means.

    full: all weights are trained, else adapters, whose own work is not counted. reference: whether there is one.
    checkpointed: whether the backward recomputes activations. head_first: how often the head computes log-probs before
    the gradient.
    """

    trajectories: float = 256
    length: int = 1500
    sampled: float = 300
    full: bool = True
    reference: bool = True
    checkpointed: bool = False
    head_first: float = 0.0

    @property
    def tokens(self) -> float:
        return self.trajectories * self.length


def decode_costs(config: ModelConfig, shape: DecodeShape) -> tuple[Cost, ...]:
    """Return the work of one decode step."""
    weights = layer_weights(config) + head_weights(config)
    scores = config.attention_layers * query_width(config) * shape.context * shape.batch
    costs = (
        Cost("weights", 2 * weights * shape.batch, BF16 * weights),
        Cost("attention", 4 * scores, kv_bytes(config) * shape.positions),
    )
    if not config.delta_layers:
        return costs
    # Each state is read once and written once; two rows are multiplied with it, and one product is added to it.
    states = DeltaStates.bytes_needed(config, BF16) * shape.batch
    return *costs, Cost("states", 3 * 2 * states / FP32, 2 * states)


def delta_flops(config: ModelConfig) -> float:
    """Return the operations per token of the gated delta rule in chunks (kernels/delta/rule.py).

    These are k k^T and q k^T, the solve, w S, q S and P x, and the update of the state.
    """
    shape = config.delta
    if shape is None:
        return 0.0
    return config.delta_layers * delta_flops_of(shape.num_value_heads, shape.key_head_dim, shape.value_head_dim)


def delta_flops_of(heads: int, key_dim: int, value_dim: int) -> float:
    """Return the `delta_flops` of one layer."""
    inside = 2 * key_dim + (key_dim + value_dim) / 2 + value_dim  # times the tokens of a chunk
    return heads * 2 * (inside * CHUNK + 3 * key_dim * value_dim)


def update_costs(config: ModelConfig, shape: UpdateShape) -> tuple[Cost, ...]:
    """Return the work of one update, per token."""
    layers, head = layer_weights(config), head_weights(config) * shape.sampled / shape.length
    attention = 4 * config.attention_layers * query_width(config) * shape.length / 2 + delta_flops(config)
    products = 6 if shape.full else 4
    again = 2 if shape.checkpointed else 0
    return (
        Cost("layers", (products + again) * layers, 0),
        Cost("attention", 3 * attention, 0),
        Cost("loss", (products + 2 * shape.head_first) * head, 0),
        Cost("reference", (2 * layers + attention + 2 * head) if shape.reference else 0, 0),
        Cost("optimiser", 0, ADAMW_BYTES * trained_weights(config) / shape.tokens if shape.full else 0),
    )


def floor_s(costs: tuple[Cost, ...], chip: DeviceRates) -> float:
    return sum(cost.seconds(chip) for cost in costs)


def predicted_decode_s(config: ModelConfig, shape: DecodeShape, rates: DeviceRates) -> float:
    """Return the predicted seconds of a decode step."""
    floor = floor_s(decode_costs(config, shape), rates)
    if isinstance(rates, Chip):
        return floor / DECODE_SHARE + config.num_hidden_layers * LAYER_SECONDS[shape.shares]
    (small, low), (large, high) = ASSUMED_SHARES
    weights = layer_weights(config) + head_weights(config)
    share = low + (high - low) * math.log(weights / small) / math.log(large / small)
    return floor / min(max(share, LOWEST_SHARE), high)


def predicted_prefill_s(config: ModelConfig, tokens: float, rates: DeviceRates) -> float:
    """Return the predicted seconds of a prefill, from the matrices of its layers only."""
    return 2 * layer_weights(config) * tokens / rates.flops_per_s / UPDATE_SHARES["layers"]


def predicted_update_s(costs: tuple[Cost, ...], chip: DeviceRates) -> float:
    return sum(cost.seconds(chip) / UPDATE_SHARES[cost.name] for cost in costs)


def predicted_mfu(costs: tuple[Cost, ...], chip: DeviceRates) -> float:
    """Return the model FLOPs per second of an update, as a share of peak."""
    useful = sum(cost.flops for cost in costs if cost.name != "reference")
    return useful / predicted_update_s(costs, chip) / chip.flops_per_s


def decode_bytes(config: ModelConfig, shape: DecodeShape) -> float:
    """Return the bytes of a decode step's weights, keys and values."""
    embedding = trained_weights(config) - layer_weights(config) - head_weights(config)
    return sum(cost.bytes for cost in decode_costs(config, shape)) + BF16 * embedding


def state_bytes(config: ModelConfig) -> float:
    """Return the bytes of weights, gradients, moments and the reference in full fine-tuning."""
    return STATE_BYTES * trained_weights(config)


def sent_bytes(config: ModelConfig, s: PlanSetting) -> dict[str, float]:
    """Return {"rollout": .., "update": ..}, the bytes that a rank sends (and receives) per step; 0 for one rank."""
    whole = s.item * all_weights(config)
    layers = s.item * in_layers(config)
    tokens, _ = micro_batch(s)
    batches = -(-s.groups_of_update * s.computed_tokens // tokens)
    a_batch = whole + layers + FP32 * trained_weights_of(config, s) + (layers if s.grpo.beta > 0 else 0)
    an_update = batches * a_batch + (whole - layers if s.grpo.beta > 0 else 0)
    once_more = batches * whole if s.recomputes else 0
    updates = s.grpo.updates_per_batch * (an_update * s.grpo.epochs_per_batch + once_more)
    share = (s.gpus - 1) / s.gpus
    return {"rollout": whole * share, "update": updates * share}


def seconds_per_step(config: ModelConfig, s: PlanSetting, rates: DeviceRates, checkpointed: bool) -> dict[str, float]:
    """Return {"rollout": .., "update": ..}, the seconds of one GPU's share of a step."""
    links, rates = link_rate(rates, s.gpus), rates_of_item(rates, s.item)
    rollout, update = _rollout(config, s, rates), _update(config, s, rates, checkpointed)
    if links is not None:
        sent = sent_bytes(config, s)
        rollout, update = rollout + sent["rollout"] / links, max(update, sent["update"] / links)
    return {"rollout": rollout, "update": update}


def rates_of_item(rates: DeviceRates, item: int) -> DeviceRates:
    """Return rates for elements of `item` bytes, to use with costs that count two bytes per element."""
    a_byte = rates.bytes_per_s * BF16 / item
    return replace(rates, bytes_per_s=a_byte) if isinstance(rates, Chip) else MeasuredRates(rates.flops_per_s, a_byte)


def link_rate(rates: DeviceRates, gpus: int) -> float | None:
    """Return the bytes per second that a GPU sends to the others; None with one GPU, or if unknown."""
    return rates.link_bytes_per_s if gpus > 1 and isinstance(rates, Chip) else None


def _rollout(config: ModelConfig, s: PlanSetting, rates: DeviceRates) -> float:
    prompt, batch = s.prompt, min(s.rollout.max_num_seqs, s.samples_in_flight)
    group = min(s.rollout.group_size, batch) if s.rollout.share_prefix else 1
    shape = DecodeShape(batch=batch, group=group, shared=prompt, own=max((s.length - prompt) // 2, 1))
    a_step = predicted_decode_s(config, shape, rates)
    fed = s.samples * (s.length - prompt - s.sampled) + s.groups * prompt
    return predicted_prefill_s(config, max(fed, 0), rates) + a_step * s.samples * s.sampled / batch


def _head_first(s: PlanSetting) -> float:
    """Return the share of updates in which the loss needs log-probs of whole sequences or turns before a gradient. In
    the first update of a batch, the guard has no effect except on tokens of earlier weights."""
    grpo = s.grpo
    if surrogate_name(grpo.objective) not in PER_TOKEN or (grpo.guard != "none" and s.rollout.partial):
        return 1.0
    return 0.0 if grpo.guard == "none" else 1.0 - 1.0 / (grpo.updates_per_batch * grpo.epochs_per_batch)


def _update(config: ModelConfig, s: PlanSetting, rates: DeviceRates, checkpointed: bool) -> float:
    tokens = s.groups * s.computed_tokens
    whole = tokens / s.length  # fewer trajectories if prompts are computed once, each with more rows in the loss
    shape = UpdateShape(
        trajectories=whole / s.grpo.updates_per_batch,
        length=s.length,
        sampled=s.samples * s.sampled / whole,
        full=s.adapters is None,
        reference=s.grpo.beta > 0,
        checkpointed=checkpointed,
        head_first=_head_first(s),
    )
    costs = update_costs(config, shape)
    forward = 2 * (layer_weights(config) + head_weights(config) * shape.sampled / s.length)
    recomputing = tokens * forward / rates.flops_per_s / UPDATE_SHARES["layers"] if s.recomputes else 0.0
    return predicted_update_s(costs, rates) * tokens * s.grpo.epochs_per_batch + recomputing
