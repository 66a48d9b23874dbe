"""Bytes of every part of a run in its phases, on one GPU (or in a CPU's memory), in host memory, and on disk.

docs/scale.md has the sizes of the parts and the assumed lengths of trajectories. The phases of a run:

    loading     weights, masters, reference; on a CPU also the mapped file that is being read
    rollout     weights, masters, moments, reference, KV pool, one forward
    loss        all activations of a micro-batch, the loss workspace, the gradients of earlier micro-batches
    backward    all activations, and the gradients of one layer's activations
    gradients   end of a backward, in its last layer: the gradients of all weights; for a bfloat16 policy, both of the
                weights and of the masters
    optimiser   gradients and moments
    saving      on a CPU, with adapters: the merged weights in float32

With several GPUs, weights, masters, gradients, moments and the reference are sharded (FSDP). A rollout gathers a whole
copy of the weights, a forward or backward two layers at a time.

What autograd keeps of a layer (policy/layers.py), in bytes per token; H hidden, N and K heads of D, I intermediate,
e bytes per element:

    operation    keeps, on a CPU                        on CUDA, by the fused kernels of kernels/*_triton.py
    norm, twice  x in float32, 1/rms 4; n e H           x e H
    q, k, v      its input e H                          the same
    attention    q, k, v e (N + 2K) D, o e N D, lse 4 N q, k turned e (N + K) D, q k v e (N + 2K) D, o e N D, lse 4 N
    o            its input e N D                        that is attention's o
    gate, up     its input e H                          the same
    silu x up    gate and up 2 e I, silu(gate) e I      gate and up 2 e I
    down         its input e I                          the same

In a run with adapters, a linear map without an adapter does not keep its input, nor does a norm keep its n; an adapter
keeps its input and x A^T, e R. On a CPU, attention copies q, k and v into padded form, except where prompts are
computed once (kernels/attention/prefix.py): there it keeps the same as on CUDA. Gated attention also keeps the inputs
of its per-head norms, and the gate. A layer with states keeps its projections, and the tensors of the convolution, the
rule and the gated norm that `layer_bytes` lists. Attention's gate and the two gates of the delta rule run in torch on
CUDA, too.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from thresher.common.files import as_path, need_room, show_bytes
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.sections import GrpoSection, OptimSection, RolloutSection
from thresher.engine.decoding.decoder import FORWARD_ROWS, ring_of, states_bytes
from thresher.engine.decoding.decoder_cuda import KV_SHARE
from thresher.engine.decoding.kv_cache import PagedKV
from thresher.engine.packing import group_tokens, worth_sharing
from thresher.engine.store.run_folder import RunFolder
from thresher.engine.systems import load_system
from thresher.kernels.delta.rule import WORKSPACE_BYTES as WORKSPACE
from thresher.kernels.logprob import MOST_ROWS, WORKSPACE_BYTES, default_chunk_rows
from thresher.kernels.operands import SLAB_BYTES
from thresher.policy.config import FULL, LINEAR, ModelConfig, read_config
from thresher.policy.families import load_layer_class
from thresher.policy.lora import RANK_STEP, linear_shapes
from thresher.policy.model import Policy, kept_shapes
from thresher.policy.streamed import BUFFERS
from thresher.policy.weights import tensor_shapes

BF16, FP32, INT64 = 2, 4, 8  # bytes
CUDA_CONTEXT = 1_000_000_000  # with libraries, their workspaces and the code of kernels: assumed, no GPU was measured
CPU_PROCESS = 40 * 2**20  # memory of a CPU process beyond its tensors after a rollout: measured, docs/scale.md
MOMENT_BYTES = {"float32": 8.0, "8bit": 2 * (1 + FP32 / 256)}  # both moments of a weight; 8 bit: one scale for 256
PARTS = (
    *("weights", "masters", "gradients", "moments", "reference", "KV pool", "states", "activations", "loss workspace"),
    *("working memory", "gathered copy", "CUDA context"),
)
Parts = dict[str, int]


# Sizes of a model. Arithmetic counts leave out norms and biases, under a thousandth of the weights.


def query_width(config: ModelConfig) -> int:
    return config.num_attention_heads * config.head_dim


def key_width(config: ModelConfig) -> int:
    return config.num_key_value_heads * config.head_dim


def layer_weights(config: ModelConfig) -> int:
    """Return the number of elements in the matrices of all layers."""
    return sum(kind.layers * sum(map(prod, kind.maps.values())) for kind in _shapes(config)[1])


def head_weights(config: ModelConfig) -> int:
    return config.vocab_size * config.hidden_size


def trained_weights(config: ModelConfig) -> int:
    """Return the number of elements in the layers, the head, and the embedding if it is not tied to the head."""
    return layer_weights(config) + (1 if config.tie_word_embeddings else 2) * head_weights(config)


def kv_bytes(config: ModelConfig, item: int = BF16) -> int:
    """Return the bytes of a token's keys and values in all layers, with `item` bytes per element."""
    return PagedKV.bytes_needed(config, 1, 1, item)


def state_bytes_of(config: ModelConfig, s: "PlanSetting") -> int:
    """Return the bytes of layer states: of every running sequence, and of kept prefixes."""
    ring = ring_of(bool(s.rollout.num_draft_tokens), s.cuda)
    return states_bytes(config, s.item, s.rollout.max_num_seqs, ring)


class LayerKind(NamedTuple):
    """Layers of one type. layers: their number. elements: of one layer. maps: (outputs, inputs) of its linear maps, by
    the names of [lora] targets."""

    name: str
    layers: int
    elements: int
    maps: dict[str, tuple[int, int]]


@lru_cache(maxsize=32)
def _shapes(config: ModelConfig) -> tuple[list[tuple[int, ...]], list[LayerKind]]:
    """Return the shape of every parameter, and the layer types, from one-layer policies on torch's "meta" device."""
    counts = Counter(config.layer_types) if config.layer_types else {FULL: config.num_hidden_layers}
    every: list[tuple[int, ...]] = []
    kinds = []
    for name, count in counts.items():
        with torch.device("meta"):
            types = {"layer_types": (name,)} if config.layer_types else {}
            policy = Policy(config.replace(num_hidden_layers=1, **types))
        layer = next(policy.decoder_layers())
        shapes = [tuple(x.shape) for x in layer.parameters()]
        kinds.append(LayerKind(name, count, sum(map(prod, shapes)), linear_shapes(layer)))
        every += shapes * count
    outside = [tuple(x.shape) for name, x in policy.named_parameters() if not name.startswith("layers.")]
    return every + outside, kinds


def all_weights(config: ModelConfig) -> int:
    """Return the number of elements in all parameters, including norms and biases."""
    return sum(map(prod, _shapes(config)[0]))


def one_layer(config: ModelConfig) -> int:
    """Return the number of elements in the largest layer, including norms and biases."""
    return max(kind.elements for kind in _shapes(config)[1])


def in_layers(config: ModelConfig) -> int:
    """Return the number of elements in all layers, including norms and biases."""
    return sum(kind.layers * kind.elements for kind in _shapes(config)[1])


# The part of a recipe that determines memory


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSetting:
    """The part of a recipe that determines its memory, with methods to vary it.

    item: bytes per element of the computation. adapters: (rank, targets) of [lora], or None. length, sampled, searched:
    maximum tokens of a trajectory, in all, written by the policy, and retrieved by its searches (without the tags
    around them). steps: of the run.
    """

    rollout: RolloutSection
    optim: OptimSection
    grpo: GrpoSection
    cuda: bool
    item: int
    adapters: tuple[int, tuple[str, ...]] | None
    length: int
    sampled: int
    searched: int
    steps: int
    gpus: int

    def changed(self, key: str, value: Any) -> "PlanSetting":
        """Return the setting with another value for a recipe key, such as "optim.offload"."""
        section, name = key.split(".")
        return replace(self, **{section: replace(getattr(self, section), **{name: value})})

    @property
    def groups(self) -> int:
        """Return the groups of a step on one GPU, which has whole groups."""
        return -(-self.rollout.questions_per_step // self.gpus)

    @property
    def samples(self) -> int:
        return self.groups * self.rollout.group_size

    @property
    def groups_in_flight(self) -> int:
        """Return the maximum number of started and untrained groups on one GPU; without rollout.partial a step's."""
        return max(-(-self.rollout.in_flight // self.gpus), self.groups)

    @property
    def samples_in_flight(self) -> int:
        return self.groups_in_flight * self.rollout.group_size

    @property
    def groups_of_update(self) -> int:
        return -(-self.groups // self.grpo.updates_per_batch)

    @property
    def own(self) -> int:
        """Return the maximum number of a sample's tokens that are not shared with its group."""
        return min(self.sampled + self.searched, self.length - 1)

    @property
    def prompt(self) -> int:
        """Return the tokens of the prompt shared by a group, if the samples' own tokens are at their maximum."""
        return self.length - self.own

    @property
    def share_rows(self) -> bool:
        """Return whether an update computes a common prefix once. On CUDA the Triton forest does, whatever backend
        computes the other attention."""
        return self.optim.share_prefix

    @property
    def prompt_once(self) -> bool:
        """Return whether an update computes a group's prompt once."""
        return self.share_rows and worth_sharing(self.prompt, self.own, self.rollout.group_size)

    @property
    def computed_tokens(self) -> int:
        """Return the maximum number of tokens of a group that an update computes."""
        return (
            group_tokens(self.prompt, self.own, self.rollout.group_size)
            if self.share_rows
            else self.rollout.group_size * self.length
        )

    @property
    def update_tokens(self) -> int:
        """Return the maximum number of tokens that an update computes."""
        return self.groups_of_update * self.computed_tokens

    @property
    def frozen_copy(self) -> bool:
        """Return whether the reference is a separate model; with adapters it is the base model."""
        return self.grpo.beta > 0 and self.adapters is None

    @property
    def recomputes(self) -> bool:
        """Return whether a forward recomputes old log-probs before the first update of a batch."""
        return self.grpo.old_logprobs == "recomputed"

    @property
    def has_masters(self) -> bool:
        return self.item != FP32 and self.adapters is None

    def choices(self) -> Iterator["PlanSetting"]:
        """Yield the setting with each combination of values for "auto", in the order in which they are tried."""
        references, recomputed = [self.grpo.reference], [self.optim.checkpoint_activations]
        if references == ["auto"]:
            references = ["device", "cpu"] if self.cuda and self.frozen_copy else ["device"]
        if recomputed == ["auto"]:
            recomputed = ["off", "on"]
        for reference in references:
            for value in recomputed:
                yield self.changed("grpo.reference", reference).changed("optim.checkpoint_activations", value)


def read_setting(recipe: Recipe, gpus: int = 1) -> PlanSetting:
    """Return the setting of a recipe whose system preset is already filled in."""
    rollout, lora, system = recipe.rollout, recipe.lora, recipe.system
    played = None if system is None else load_system(system.name, system.options)
    searches = rollout.max_turns - 1 if played is None or played.needs_index or played.tools else 0
    written = rollout.policy_tokens
    return PlanSetting(
        rollout=rollout,
        optim=recipe.optim,
        grpo=recipe.grpo,
        cuda=recipe.model.device == "cuda",
        item=BF16 if recipe.model.dtype == "bfloat16" else FP32,
        adapters=None if lora is None else (lora.rank, tuple(lora.targets)),
        length=rollout.max_context,
        sampled=min(written, rollout.max_context),
        searched=searches * rollout.max_passage_tokens,
        steps=recipe.run.steps,
        gpus=gpus,
    )


def switches(s: PlanSetting) -> list[tuple[str, str]]:
    """Return (key, value) of changes that save memory, cheapest first, without those already set or on "auto"."""
    known = [
        (s.optim.checkpoint_activations == "off", "optim.checkpoint_activations", "on"),
        (s.optim.optimizer_state_dtype != "8bit", "optim.optimizer_state_dtype", "8bit"),
        (s.cuda and s.frozen_copy and s.grpo.reference == "device", "grpo.reference", "cpu"),
        (s.cuda and s.optim.offload == "none", "optim.offload", "moments"),
        (s.cuda and s.optim.offload != "masters" and s.has_masters, "optim.offload", "masters"),
    ]
    return [(key, value) for possible, key, value in known if possible]


# Activations, in bytes per token


def layer_bytes(config: ModelConfig, setting: PlanSetting, kind: LayerKind | None = None) -> int:
    """Return the bytes per token that autograd keeps of one layer. kind: its type; None: the model's first."""
    e, hidden, inner = setting.item, config.hidden_size, config.intermediate_size
    q, kv = query_width(config), key_width(config)
    kind = kind or _shapes(config)[1][0]

    def input_of(width: int, *maps: str) -> int:
        kept = setting.adapters is None or any(name in setting.adapters[1] for name in maps)
        return e * width if kept else 0

    total = 2 * norm_bytes(config, setting) + input_of(hidden, "gate", "up")
    if kind.name == LINEAR:
        assert config.delta is not None
        channels, heads = config.delta.channels, config.delta.num_value_heads
        values = heads * config.delta.value_head_dim
        total += input_of(hidden, "linear_qkv", "linear_z", "linear_b", "linear_a") + input_of(values, "linear_out")
        # The projections, of which z is a view; q, k and v; o; the gates. With adapters it is less.
        total += e * (2 * channels + 2 * values + 2 * heads) + FP32 * 5 * heads
    else:
        # q, k and v in the layout of attention, o, log-sum-exp
        total += input_of(hidden, "q", "k", "v") + e * (q + 2 * kv) + e * q + FP32 * config.num_attention_heads
        if setting.cuda or setting.prompt_once:
            total += e * (q + kv)  # rotated q and k, in addition to the projection, of which v is a view
        else:
            total += input_of(q, "o")  # a second copy of o, without padding
        if config.layer_types or load_layer_class(config.model_type).has_head_norms:
            # Inputs of the per-head norms and, in torch, the rms and the normalised input, for the gradient of the
            # weight; with an offset the weight is float32.
            total += e * (q + 2 * kv) if setting.cuda or e == FP32 else FP32 * (q + kv)
            if not setting.cuda:
                total += FP32 * (config.num_attention_heads + config.num_key_value_heads)
                if config.layer_types or setting.adapters is None:
                    total += (FP32 if config.layer_types else e) * (q + kv)
        if config.layer_types:
            total += 2 * e * q  # the gate, and the tensor that it multiplies
    total += (2 if setting.cuda else 3) * e * inner + input_of(inner, "down")
    if setting.adapters is not None:
        rank, targets = setting.adapters
        total += e * len(kind.maps.keys() & set(targets)) * -(-rank // RANK_STEP) * RANK_STEP
    return total


def norm_bytes(config: ModelConfig, setting: PlanSetting) -> int:
    """Return the bytes per token that autograd keeps of one norm."""
    hidden = config.hidden_size
    if setting.cuda:
        return setting.item * hidden
    gained = FP32 if config.layer_types else setting.item  # with an offset, the weight is float32
    return FP32 * hidden + FP32 + (gained * hidden if setting.adapters is None else 0)


def activation_bytes(config: ModelConfig, setting: PlanSetting, checkpointed: bool) -> int:
    """Return the bytes per token that autograd keeps of all layers. checkpointed: a layer keeps only its two inputs,
    and one layer at a time is recomputed."""
    # Outside the layers: positions, the rotary table, ids and the last norm. With adapters, the first norm's input is a
    # frozen embedding and keeps nothing, which makes up for the last norm.
    around = (0 if setting.prompt_once else INT64) + setting.item * config.head_dim
    if setting.adapters is None:
        around += INT64 + norm_bytes(config, setting)
    layers = [(kind.layers, layer_bytes(config, setting, kind)) for kind in _shapes(config)[1]]
    if checkpointed:
        return around + 2 * setting.item * config.hidden_size * config.num_hidden_layers + max(x for _, x in layers)
    return around + sum(count * one for count, one in layers)


def backward_bytes(config: ModelConfig, setting: PlanSetting) -> int:
    """Return the peak bytes per token of the gradients of one layer's activations, beyond the memory that they replace.
    These are the gradients of gate and up while silu's exists or, on a CPU in bfloat16, a norm's five terms in float32
    if they are larger."""
    hidden, inner = config.hidden_size, config.intermediate_size
    gate = setting.item * (2 * inner + hidden)
    if config.layer_types:  # kernels/delta/rule.py has the bound of its memory
        channels = 0 if config.delta is None else config.delta.channels
        if setting.cuda:  # gradients of the convolution in float32, of its input, and of the projection
            return max(gate, (FP32 + 3 * setting.item) * channels)
        # The gradients of a norm in float32. For the convolution and its heads: seven and a half tensors of float32
        # beyond temporary ones.
        return max(gate, 5 * FP32 * hidden + setting.item * hidden, 30 * channels)
    return gate if setting.cuda or setting.item == FP32 else max(gate, 5 * FP32 * hidden + setting.item * hidden)


# Parts and phases


@dataclass(frozen=True, slots=True)
class Demand:
    """Bytes of each of PARTS, by phase. host: with a GPU, the maximum bytes of the parts in host memory."""

    phases: dict[str, Parts]
    host: Parts

    @property
    def peak(self) -> str:
        """Return the phase that needs the most memory."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def total(self) -> int:
        return sum(self.phases[self.peak].values())


def trained_weights_of(config: ModelConfig, setting: PlanSetting) -> int:
    """Return the number of elements that the optimiser updates."""
    if setting.adapters is None:
        return all_weights(config)
    rank, targets = setting.adapters
    return sum(
        kind.layers * sum(rank * sum(kind.maps[target]) for target in targets if target in kind.maps)
        for kind in _shapes(config)[1]
    )


def states(config: ModelConfig, s: PlanSetting) -> tuple[Parts, Parts]:
    """Return the bytes, by part, that one GPU holds throughout a run, and those held in host memory. "gradients" are
    those of the masters, of the adapters, or of a float32 policy."""
    n, trained, split = all_weights(config), trained_weights_of(config, s), s.gpus
    device = {
        # With several GPUs, each holds only its shard of the masters, and gathers the rest.
        "weights": (0 if split > 1 and s.has_masters else s.item * n // split)
        + (0 if s.adapters is None else FP32 * trained),
        "masters": FP32 * n // split if s.has_masters else 0,
        "gradients": FP32 * trained // split,
        "moments": int(MOMENT_BYTES[s.optim.optimizer_state_dtype] * trained) // split,
        "reference": s.item * n // split if s.frozen_copy else 0,
    }
    host: Parts = {}
    if s.cuda and s.optim.offload != "none":
        host["moments"], device["moments"] = device["moments"], 0
    if s.cuda and s.optim.offload == "masters" and device["masters"]:
        host |= {"masters": device["masters"], "gradients": device["gradients"]}
        # The loss adds to a separate buffer for the head, on the device.
        device |= {"masters": 0, "gradients": FP32 * head_weights(config)}
    if s.cuda and s.grpo.reference == "cpu" and device["reference"]:
        buffers = sum(min(kind.layers, BUFFERS) * kind.elements for kind in _shapes(config)[1])
        host["reference"], device["reference"] = device["reference"], s.item * buffers
    return device, host


def micro_batch(s: PlanSetting) -> tuple[int, bool]:
    """Return (computed tokens of the largest micro-batch, whether an update has several).

    The tokens are the budget, which trajectories of any length may fill, or all tokens of an update, and at least one
    whole context.
    """
    tokens = max(min(s.optim.micro_batch_tokens, s.update_tokens), s.length)
    return tokens, s.update_tokens > tokens


def kv_tokens(s: PlanSetting) -> tuple[int, int]:
    """Return (tokens of the desired KV pool, tokens of the smallest usable one), in whole blocks and with block 0."""
    a_context = -(-s.length // s.rollout.kv_block_size)
    wanted = (
        s.rollout.max_num_seqs * a_context
        if s.rollout.kv_tokens is None
        else max(s.rollout.kv_tokens // s.rollout.kv_block_size, a_context)
    )
    return (1 + wanted) * s.rollout.kv_block_size, (1 + a_context) * s.rollout.kv_block_size


def loss_workspace(config: ModelConfig, s: PlanSetting, rows: int) -> int:
    """Return the bytes of the loss: a chunk's buffers for `rows` rows, and the low-precision copies of all rows."""
    narrow = 3 * s.item * config.hidden_size * rows
    vocab = config.vocab_size
    if s.cuda:
        budget = s.optim.loss_workspace_bytes or WORKSPACE_BYTES["cuda"]
        row = 2 * FP32 * vocab if s.item == FP32 else s.item * vocab + (8 + 2 * s.item) * config.hidden_size
        return narrow + min(budget, max(rows, 16) * row)
    chunk = min(
        default_chunk_rows(s.optim.loss_workspace_bytes or WORKSPACE_BYTES["cpu"], vocab, 2 * FP32), MOST_ROWS, rows
    )
    slab = min(SLAB_BYTES, FP32 * head_weights(config)) if s.item != FP32 else 0
    return narrow + 2 * FP32 * max(chunk, 16) * vocab + 3 * FP32 * chunk * config.hidden_size + slab


def demand(config: ModelConfig, s: PlanSetting, memory: int | None, checkpointed: bool) -> Demand:
    """Return the demand of every phase. memory: bytes of the device, which limit a GPU's KV pool."""
    kept, host = states(config, s)
    base: Parts = dict.fromkeys(PARTS, 0) | {name: kept[name] for name in ("weights", "masters", "reference")}
    wanted, least = (tokens * kv_bytes(config, s.item) for tokens in kv_tokens(s))
    if s.cuda:
        base["CUDA context"] = CUDA_CONTEXT
    found = {"loading": base | ({} if s.cuda else {"working memory": FP32 * all_weights(config)})}
    if not s.cuda:
        base |= {"KV pool": wanted, "states": state_bytes_of(config, s), "working memory": CPU_PROCESS}
    before = dict(base)
    if s.steps * s.grpo.updates_per_batch * s.grpo.epochs_per_batch > 1:
        before["moments"] = kept["moments"]
    rows = min(FORWARD_ROWS, s.samples_in_flight * s.length)
    # One row of a forward without autograd: gate and up, silu and its parts, and the residual stream.
    forward = rows * s.item * ((3 if s.cuda else 4) * config.intermediate_size + 4 * config.hidden_size)
    if config.delta is not None:  # copies of a layer's states; on a GPU, before and after a chunk of prefills
        shape = config.delta
        of_a_sequence = FP32 * shape.num_value_heads * shape.key_head_dim * shape.value_head_dim
        forward += s.rollout.max_num_seqs * of_a_sequence * (2 if s.cuda else 1) + (WORKSPACE["cuda"] if s.cuda else 0)
    gathered = s.item * all_weights(config) if s.gpus > 1 else 0
    rollout = before | {"working memory": before["working memory"] + forward, "gathered copy": gathered}
    if s.cuda:
        rollout["states"] = state_bytes_of(config, s)
        free = (memory or 0) - sum(rollout.values()) + rollout["working memory"]
        rollout["KV pool"] = wanted if memory is None else min(wanted, max(int(KV_SHARE * free), least))
    found["rollout"] = rollout
    if s.rollout.stale_cache:  # the cache of unfinished samples outlives the update
        kept_pool = {name: rollout[name] for name in ("KV pool", "states")}
        base |= kept_pool
        before |= kept_pool
    found |= _update(config, s, kept, "gradients" in host, before, checkpointed)
    found["optimiser"] = base | {"moments": kept["moments"], "gradients": kept["gradients"]}
    if s.adapters is not None and not s.cuda:
        merged = base["working memory"] + FP32 * all_weights(config)
        found["saving"] = base | {"moments": kept["moments"], "working memory": merged}
    return Demand(found, host if s.cuda else {})


def _update(
    config: ModelConfig, s: PlanSetting, kept: Parts, offloaded: bool, before: Parts, checkpointed: bool
) -> dict[str, Parts]:
    """Return the phases of a micro-batch; if there are several, of the second, because it has gradients of the first.
    offloaded: whether the masters' gradients are in host memory."""
    tokens, several = micro_batch(s)
    activations = tokens * activation_bytes(config, s, checkpointed)
    in_loss = max(
        min(tokens, s.groups_of_update * s.rollout.group_size * s.sampled), 1
    )  # shorter prompts leave more room
    trains_head = s.adapters is None
    head = FP32 * head_weights(config)
    gradients = kept["gradients"] if several else head if trains_head else 0
    layers: Parts = {}
    if s.gpus > 1:  # docs/scale.md: two layers gathered and a layer's gradient; embedding and head; the head's gradient
        outside = all_weights(config) - in_layers(config)
        copies = 2 if s.frozen_copy else 1
        layers = {"gathered copy": (2 * s.item + s.item + FP32) * one_layer(config) + copies * s.item * outside}
        gradients += head if several and trains_head and not offloaded else 0
    now = before | layers | {"gradients": gradients}
    own, in_layer = before["working memory"], tokens * backward_bytes(config, s)
    in_layer += WORKSPACE["cuda" if s.cuda else "cpu"] if config.delta_layers else 0
    largest = s.item * max(map(prod, _shapes(config)[0])) if trains_head and several else 0
    found = {
        "loss": now | {"activations": activations, "loss workspace": loss_workspace(config, s, int(in_loss))},
        "backward": now | {"activations": activations, "working memory": own + in_layer + largest},
    }
    if trains_head:
        ending = s.item * all_weights(config) if s.has_masters and s.gpus == 1 else 0
        ending += kept["gradients"] if several or not s.has_masters else head
        inputs = 2 * s.item * config.hidden_size if checkpointed else 0
        # While the last layer's activations get their gradients, its weights have only those of earlier micro-batches.
        missing = s.item * one_layer(config) if s.gpus == 1 and (s.has_masters or not several) else 0
        last = {"gradients": ending, "activations": tokens * (layer_bytes(config, s) + inputs)}
        last["working memory"] = own + max(s.item * head_weights(config), in_layer - missing)
        found["gradients"] = before | layers | last
    return found


# The disk. store/checkpoint.py checks again before every checkpoint.


def checkpoint_bytes(config: ModelConfig, recipe: Recipe) -> int:
    """Return the bytes of one checkpoint's tensors, without the kept tensors that the model does not compute with."""
    setting = read_setting(recipe)
    trained = trained_weights_of(config, setting)
    adapters = 0 if setting.adapters is None else FP32 * trained
    return FP32 * all_weights(config) + adapters + int(MOMENT_BYTES[setting.optim.optimizer_state_dtype] * trained)


def checkpoints_at_a_time(recipe: Recipe) -> int:
    """Return the maximum number of checkpoints on disk at a time. They are run.keep_checkpoints, the one with the best
    dev exact match, and the one being written."""
    run = recipe.run
    saved = -(-run.steps // run.save_every)
    judged = recipe.data is not None and recipe.data.dev is not None
    evaluated = (-(-run.steps // run.eval_every) if run.eval_every else 1) if judged else 0
    return min(run.keep_checkpoints + judged + 1, saved + evaluated)


def check_disk(recipe: Recipe, folder: str | Path, out: str | Path) -> None:
    """Raise UserError if the disk of the run folder `out` has no room for checkpoints of the model in `folder`.
    Checkpoints that exist already are not counted again."""
    checkpoints = RunFolder(Path(out)).checkpoints
    present = sum(file.stat().st_size for file in checkpoints.rglob("*") if file.is_file())
    config = read_config(folder)
    kept = FP32 * sum(map(prod, kept_shapes(config, tensor_shapes(as_path(folder))).values()))  # at most
    each, count = checkpoint_bytes(config, recipe) + kept, checkpoints_at_a_time(recipe)
    several = f"{count} checkpoints at a time" if count > 1 else "a checkpoint"
    need_room(
        Path(out),
        count * each - present,
        f"a run with {several} of {show_bytes(each)} (run.keep_checkpoints = {recipe.run.keep_checkpoints})",
    )
