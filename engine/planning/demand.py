"""Bytes of every part of a run in its phases, on one GPU (or in a CPU's memory), and on the host beside it.

N weights, t of them trained, e bytes an element of the computation (bfloat16 2, float32 4), T tokens of a micro-batch.

    weights          e N, and 4 t of adapters            masters    4 N where all are trained in bfloat16
    gradients        e N of the policy, 4 N of masters   moments    AdamW's two, 8 t; in 8 bits 2 t and their scales
    reference        e N where beta > 0 and all weights are trained
    KV pool          2 L K D e a token: kv_tokens, or max_num_seqs contexts; on CUDA at most KV_SHARE of what is free
    activations      T times what activations.py says    loss       kernels/logprob.py: two buffers of a chunk's logits

The phases of a run, and the parts that each has:

    loading     weights, masters, reference; on a CPU the file that is being read is mapped beside them
    rollout     weights, masters, moments, reference, KV pool, one forward
    loss        all activations of a micro-batch, the loss's workspace, the gradients of micro-batches before it
    backward    all activations, one layer's gradients of them
    gradients   a backward's end, in its last layer: the gradients of all weights, of a bfloat16 policy beside those of
                its masters
    optimiser   gradients and moments
    saving      on a CPU, with adapters: the merged weights in float32

The KV pool is given back between a rollout and its update on CUDA and kept on a CPU.
T counts computed tokens, a group's prompt once where packing computes it once (setting.py: computed_tokens): the larger
of optim.micro_batch_tokens, as far as an update has so many, and of one whole context.

With several GPUs weights, masters, gradients, moments and the reference are divided among them (FSDP), and a rollout
needs the weights whole: a gathered copy. A forward or backward gathers two layers at a time.

Deliberately absent: fragmentation; what searches, tokenizers and judges take; what is imported.
"""

from dataclasses import dataclass
from math import prod

from thresher.engine.decoding.decoder import FORWARD_ROWS
from thresher.engine.decoding.decoder_cuda import KV_SHARE
from thresher.engine.decoding.kv_cache import PagedKV
from thresher.engine.planning.activations import activation_bytes, backward_bytes, forward_bytes, layer_bytes
from thresher.engine.planning.setting import PlanSetting
from thresher.engine.planning.sizes import (
    FP32,
    all_weights,
    head_weights,
    linear_maps,
    one_layer,
    parameter_shapes,
)
from thresher.kernels.logprob import MOST_ROWS, WORKSPACE_BYTES, default_chunk_rows
from thresher.kernels.matmul import SLAB_BYTES
from thresher.policy.config import ModelConfig

# The CUDA context, libraries and their workspaces, and code of kernels: an assumption, for no GPU was measured.
CUDA_CONTEXT = 1_000_000_000
# What a process on a CPU keeps beyond its tensors once it has rolled out, whatever the model: measured, docs/scale.md.
CPU_PROCESS = 40 * 2**20
MOMENT_BYTES = {"float32": 8.0, "8bit": 2 * (1 + FP32 / 256)}  # both, of a weight; 8 bit: a scale for 256
PARTS = (
    "weights",
    "masters",
    "gradients",
    "moments",
    "reference",
    "KV pool",
    "activations",
    "loss workspace",
    "working memory",
    "gathered copy",
    "CUDA context",
)

Parts = dict[str, int]


@dataclass(frozen=True, slots=True)
class Demand:
    """By phase, bytes of each of PARTS. host: beside a GPU, the parts that lie in the machine's memory, at most."""

    phases: dict[str, Parts]
    host: Parts

    @property
    def peak(self) -> str:
        """The phase that needs most."""
        return max(self.phases, key=lambda name: sum(self.phases[name].values()))

    @property
    def total(self) -> int:
        return sum(self.phases[self.peak].values())


@dataclass(frozen=True, slots=True)
class States:
    """Bytes of what is there whatever is being computed, of one GPU; `host` what of it lies beside it."""

    weights: int
    masters: int
    policy_gradients: int
    master_gradients: int  # or of the adapters; those of a float32 policy
    moments: int
    reference: int
    host: Parts


def trained_weights_of(config: ModelConfig, setting: PlanSetting) -> int:
    """Elements that the optimiser has."""
    if setting.adapters is None:
        return all_weights(config)
    rank, targets = setting.adapters
    maps = linear_maps(config)
    return config.num_hidden_layers * sum(rank * sum(maps[target]) for target in targets)


def states(config: ModelConfig, s: PlanSetting) -> States:
    """What a run keeps, by kind."""
    n, trained = all_weights(config), trained_weights_of(config, s)
    full, split = s.adapters is None, s.gpus
    masters = FP32 * n // split if s.has_masters else 0
    moments = int(MOMENT_BYTES[s.moments] * trained) // split
    reference = s.item * n // split if s.frozen_copy else 0
    gradients = FP32 * trained // split
    host: Parts = {}
    if s.cuda and s.offload != "none":
        host["moments"], moments = moments, 0
    if s.cuda and s.offload == "masters" and masters:
        host["masters"], masters = masters, 0
        host["gradients"] = gradients
        gradients = FP32 * head_weights(config)  # the loss adds to the head's own buffer, on the device
    if s.cuda and s.reference == "cpu" and reference:
        host["reference"], reference = reference, 2 * s.item * one_layer(config)
    return States(
        # Of several GPUs each has its rows of the masters alone, and gathers the rest.
        weights=(0 if split > 1 and s.has_masters else s.item * n // split) + (0 if full else FP32 * trained),
        masters=masters,
        policy_gradients=s.item * n if s.has_masters and split == 1 else 0,
        master_gradients=gradients,
        moments=moments,
        reference=reference,
        host=host,
    )


def micro_batch(s: PlanSetting) -> tuple[int, bool]:
    """(computed tokens of the largest micro-batch, whether an update has several): the budget, for trajectories of any
    length may fill it up, or all that an update has."""
    of_update = s.groups_of_update * s.computed_tokens
    tokens = max(min(s.micro_batch_tokens, of_update), s.length)
    return tokens, of_update > tokens


def kv_token_bytes(config: ModelConfig, s: PlanSetting) -> int:
    return PagedKV.bytes_needed(config, 1, 1, s.item)


def kv_tokens(s: PlanSetting) -> tuple[int, int]:
    """(tokens of the KV pool that is wanted, those of the smallest that serves), in whole blocks and block 0."""
    a_context = -(-s.length // s.page_size)
    wanted = s.running * a_context if s.kv_tokens is None else max(s.kv_tokens // s.page_size, a_context)
    return (1 + wanted) * s.page_size, (1 + a_context) * s.page_size


def loss_workspace(config: ModelConfig, s: PlanSetting, rows: int) -> int:
    """A chunk's buffers for `rows` rows in the loss, and the narrow copies of all of them."""
    narrow = 3 * s.item * config.hidden_size * rows
    vocab = config.vocab_size
    if s.cuda:
        budget = s.loss_workspace_bytes or WORKSPACE_BYTES["cuda"]
        row = 2 * FP32 * vocab if s.item == FP32 else s.item * vocab + (8 + 2 * s.item) * config.hidden_size
        return narrow + min(budget, max(rows, 16) * row)
    chunk = min(default_chunk_rows(s.loss_workspace_bytes or WORKSPACE_BYTES["cpu"], vocab, 2 * FP32), MOST_ROWS, rows)
    slab = min(SLAB_BYTES, FP32 * head_weights(config)) if s.item != FP32 else 0
    return narrow + 2 * FP32 * max(chunk, 16) * vocab + 3 * FP32 * chunk * config.hidden_size + slab


def demand(config: ModelConfig, s: PlanSetting, memory: int | None, checkpointed: bool) -> Demand:
    """Of every phase. memory: bytes of the device, which bound a GPU's KV pool."""
    kept = states(config, s)
    base: Parts = dict.fromkeys(PARTS, 0)
    base |= {"weights": kept.weights, "masters": kept.masters, "reference": kept.reference}
    wanted, least = (tokens * kv_token_bytes(config, s) for tokens in kv_tokens(s))
    if s.cuda:
        base["CUDA context"] = CUDA_CONTEXT
    found = {"loading": base | ({} if s.cuda else {"working memory": FP32 * all_weights(config)})}
    if not s.cuda:
        base |= {"KV pool": wanted, "working memory": CPU_PROCESS}
    before = dict(base)
    if s.steps * s.updates * s.epochs > 1:
        before["moments"] = kept.moments
    rows = min(FORWARD_ROWS, s.samples * s.length)
    gathered = s.item * all_weights(config) if s.gpus > 1 else 0
    forward = rows * forward_bytes(config, s)
    rollout = before | {"working memory": before["working memory"] + forward, "gathered copy": gathered}
    if s.cuda:
        free = (memory or 0) - sum(rollout.values()) + rollout["working memory"]
        rollout["KV pool"] = wanted if memory is None else min(wanted, max(int(KV_SHARE * free), least))
    found["rollout"] = rollout
    found |= _update(config, s, kept, before, checkpointed)
    found["optimiser"] = base | {
        "moments": kept.moments,
        "gradients": kept.master_gradients,
    }
    if s.adapters is not None and not s.cuda:
        merged = base["working memory"] + FP32 * all_weights(config)
        found["saving"] = base | {"moments": kept.moments, "working memory": merged}
    return Demand(found, kept.host if s.cuda else {})


def _update(config: ModelConfig, s: PlanSetting, kept: States, before: Parts, checkpointed: bool) -> dict[str, Parts]:
    """The phases of a micro-batch: the second one, where there are several, for it finds gradients."""
    tokens, several = micro_batch(s)
    activations = tokens * activation_bytes(config, s, checkpointed)
    in_loss = max(min(tokens, s.groups_of_update * s.group * s.sampled), 1)  # shorter prompts leave room for more
    trains_head = s.adapters is None
    head = FP32 * head_weights(config)
    gradients = kept.master_gradients if several else head if trains_head else 0
    layers: Parts = {}
    if s.gpus > 1:  # docs/scale.md: two layers gathered and a layer's gradient; embedding and head; the head's gradient
        outside = all_weights(config) - config.num_hidden_layers * one_layer(config)
        copies = 2 if s.frozen_copy else 1
        layers = {"gathered copy": (2 * s.item + s.item + FP32) * one_layer(config) + copies * s.item * outside}
        gradients += head if several and trains_head and "gradients" not in kept.host else 0
    now = before | layers | {"gradients": gradients}
    largest = s.item * max(map(prod, parameter_shapes(config))) if trains_head else 0
    own, in_layer = before["working memory"], tokens * backward_bytes(config, s)
    working = own + in_layer + (largest if several else 0)
    found = {
        "loss": now | {"activations": activations, "loss workspace": loss_workspace(config, s, int(in_loss))},
        "backward": now | {"activations": activations, "working memory": working},
    }
    if trains_head:
        ending = kept.policy_gradients + (kept.master_gradients if several or not s.has_masters else head)
        inputs = 2 * s.item * config.hidden_size if checkpointed else 0
        # While the last layer's activations get their gradients, its weights have none yet, but of batches before.
        missing = s.item * one_layer(config) if s.gpus == 1 and (s.has_masters or not several) else 0
        found["gradients"] = (
            before
            | layers
            | {
                "gradients": ending,
                "activations": tokens * (layer_bytes(config, s) + inputs),
                "working memory": own + max(s.item * head_weights(config), in_layer - missing),
            }
        )
    return found
