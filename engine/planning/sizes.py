"""What follows from a model's sizes: weights, bytes of keys and values, and the shapes of all parameters.

The counts that floors.py divides by leave out norms and biases, under a thousandth of the weights; the embedding is
read a row a token, and no matmul. `parameter_shapes` leaves nothing out: it asks the family itself, whose layers are
made without memory (torch's "meta" device).
"""

from functools import lru_cache
from math import prod

import torch

from thresher.policy.config import ModelConfig
from thresher.policy.lora import linear_shapes
from thresher.policy.model import Policy

BF16, FP32 = 2, 4  # bytes


def query_width(config: ModelConfig) -> int:
    return config.num_attention_heads * config.head_dim


def layer_weights(config: ModelConfig) -> int:
    """Elements of the matrices of all layers: q and o, k and v, gate, up and down."""
    kv_width = config.num_key_value_heads * config.head_dim
    one = config.hidden_size * (2 * query_width(config) + 2 * kv_width + 3 * config.intermediate_size)
    return config.num_hidden_layers * one


def head_weights(config: ModelConfig) -> int:
    """Elements of the LM head."""
    return config.vocab_size * config.hidden_size


def trained_weights(config: ModelConfig) -> int:
    """Elements that an optimiser has: layers, head, and the embedding where it is not the head."""
    heads = 1 if config.tie_word_embeddings else 2
    return layer_weights(config) + heads * head_weights(config)


def kv_bytes(config: ModelConfig) -> int:
    """Bytes of a token's keys and values in all layers, bfloat16."""
    return 2 * BF16 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


@lru_cache(maxsize=32)
def _shapes(config: ModelConfig) -> tuple[tuple[tuple[str, tuple[int, ...]], ...], tuple[tuple[str, int, int], ...]]:
    """(name, shape) of every parameter, and (name, outputs, inputs) of the linear maps of one layer."""
    with torch.device("meta"):
        policy = Policy(config.replace(num_hidden_layers=1))
    every = [
        (name, tuple(parameter.shape))
        for name, parameter in policy.named_parameters()
        for _ in range(config.num_hidden_layers if name.startswith("layers.") else 1)
    ]
    maps = linear_shapes(next(policy.decoder_layers()))
    return tuple(every), tuple((name, *shape) for name, shape in maps.items())


def parameter_shapes(config: ModelConfig) -> list[tuple[int, ...]]:
    """The shape of every parameter of a policy."""
    return [shape for _, shape in _shapes(config)[0]]


def all_weights(config: ModelConfig) -> int:
    """Elements of all parameters, norms and biases included."""
    return sum(map(prod, parameter_shapes(config)))


def one_layer(config: ModelConfig) -> int:
    """Elements of the parameters of a layer."""
    every = _shapes(config)[0]
    return sum(prod(shape) for name, shape in every if name.startswith("layers.")) // config.num_hidden_layers


def linear_maps(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of each linear map of a layer, by the names of a recipe's [lora] targets."""
    return {name: (outputs, inputs) for name, outputs, inputs in _shapes(config)[1]}
