"""What autograd keeps of a forward, in bytes a token, from the operations of a layer.

A layer (policy/layers.py), e bytes an element; H hidden, N and K heads of D, I intermediate:

    operation    keeps, on a CPU                        on CUDA, by the fused kernels of kernels/*_triton.py
    norm, twice  x in float32, 1/rms 4; n e H           x e H
    q, k, v      its input e H                          the same
    attention    q, k, v e (N + 2K) D, o e N D, lse 4 N q, k turned e (N + K) D, q k v e (N + 2K) D, o e N D, lse 4 N
    o            its input e N D                        that is attention's o
    gate, up     its input e H                          the same
    silu x up    gate and up 2 e I, silu(gate) e I      gate and up 2 e I
    down         its input e I                          the same

A weight that is not trained does not need its input: with adapters the inputs of maps without one are not kept, nor
the n of a norm; an adapter keeps its input and x A^T, e R. On a CPU attention copies q, k and v to padded places, but
where prompts are computed once (kernels/attention/prefix.py): there it keeps what it keeps on CUDA. Sequences of a
micro-batch are of like length, so padding counts as tokens here, as it does in packing.py: pack.

Deliberately absent: what is saved once a forward and not for each token (A and B in bfloat16, say).
Axes: T tokens (docs/notation.md).
"""

from thresher.engine.planning.setting import PlanSetting
from thresher.engine.planning.sizes import FP32
from thresher.policy.config import ModelConfig
from thresher.policy.lora import RANK_STEP

INDEX = 8  # bytes of an int64


def layer_bytes(config: ModelConfig, setting: PlanSetting) -> int:
    """A token, of one layer."""
    e, hidden, inner = setting.item, config.hidden_size, config.intermediate_size
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    q, kv = heads * dim, kv_heads * dim
    total = 0
    for maps in (("q", "k", "v"), ("gate", "up")):
        total += norm_bytes(config, setting) + (e * hidden if _input_kept(setting, *maps) else 0)
    total += e * (q + 2 * kv) + e * q + FP32 * heads  # q, k and v as attention has them, o, log-sum-exp
    if setting.cuda or setting.prompt_once:
        total += e * (q + kv)  # turned, beside the projection, of which v is a view
    else:
        total += e * q if _input_kept(setting, "o") else 0  # o once more, without padding
    total += 2 * e * inner + (0 if setting.cuda else e * inner)
    total += e * inner if _input_kept(setting, "down") else 0
    if setting.adapters is not None:
        rank, targets = setting.adapters
        total += e * len(targets) * -(-rank // RANK_STEP) * RANK_STEP
    return total


def norm_bytes(config: ModelConfig, setting: PlanSetting) -> int:
    """A token, of one norm."""
    hidden = config.hidden_size
    if setting.cuda:
        return setting.item * hidden
    return FP32 * hidden + FP32 + (setting.item * hidden if setting.adapters is None else 0)


def _input_kept(setting: PlanSetting, *maps: str) -> bool:
    return setting.adapters is None or any(name in setting.adapters[1] for name in maps)


def around_bytes(config: ModelConfig, setting: PlanSetting) -> int:
    """A token, beside the layers: ids and places, the table of the rotation, the last norm (the first one's input is a
    frozen embedding where there are adapters, and keeps nothing: the last takes its place)."""
    total = (0 if setting.prompt_once else INDEX) + setting.item * config.head_dim
    if setting.adapters is None:
        total += INDEX + norm_bytes(config, setting)
    return total


def activation_bytes(config: ModelConfig, setting: PlanSetting, checkpointed: bool) -> int:
    """A token, of all layers. checkpointed: a layer keeps its two inputs alone; one at a time is computed anew."""
    layers, one = config.num_hidden_layers, layer_bytes(config, setting)
    if checkpointed:
        return 2 * setting.item * config.hidden_size * layers + one + around_bytes(config, setting)
    return layers * one + around_bytes(config, setting)


def backward_bytes(config: ModelConfig, setting: PlanSetting) -> int:
    """A token: the most that gradients of one layer's activations take at a time, beyond what they replace. Those of
    gate and up, while silu's is there; on a CPU in bfloat16 a norm's five terms in float32, where they are more."""
    hidden, inner = config.hidden_size, config.intermediate_size
    gate = setting.item * (2 * inner + hidden)
    return gate if setting.cuda or setting.item == FP32 else max(gate, 5 * FP32 * hidden + setting.item * hidden)


def forward_bytes(config: ModelConfig, setting: PlanSetting) -> int:
    """A row, of a forward that keeps nothing: gate and up, silu and its parts, and the residual stream."""
    widest = 3 if setting.cuda else 4
    return setting.item * (widest * config.intermediate_size + 4 * config.hidden_size)
