"""Every family in both decoders: sharing a batch, a prefix or the cache changes results only by rounding."""

from copy import deepcopy
from random import Random
from typing import Any

import pytest
import torch
from decoding_cases import agree, alone, blocks, make_decoder, play, random_world
from model_cases import make_config

from thresher.engine.decoding.decoder_cuda import DeviceDecoder
from thresher.kernels.attention import paged_cuda
from thresher.policy.config import DeltaShape, RopeScaling
from thresher.policy.model import Policy, init_policy
from thresher.policy.tokenizer import Tokenizer

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"num_attention_heads": 10, "num_key_value_heads": 2, "head_dim": 12, "tie_word_embeddings": False},
    "llama": {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "hidden_size": 48,
        "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 64),
    },
    "qwen3_5_text": {
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "partial_rotary_factor": 0.25,
        "layer_types": ("linear_attention", "full_attention", "linear_attention", "linear_attention"),
        "delta": DeltaShape(2, 4, 8, 6, 4),
    },
}


@pytest.fixture(params=SHAPES)
def policy(request: pytest.FixtureRequest, tiny_tokenizer: Tokenizer) -> Policy:
    end = tiny_tokenizer.added_tokens["<|endoftext|>"]
    sizes = {"vocab_size": tiny_tokenizer.vocab_size + 4, "max_position_embeddings": 2048, "eos_token_ids": (end,)}
    policy = init_policy(make_config(model_type=request.param, **sizes | SHAPES[request.param]), 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.5 * torch.randn(parameter.shape, generator=generator))
    return policy.requires_grad_(False)


@pytest.mark.parametrize("device", [False, True], ids=["host", "device"])
@pytest.mark.fast_cases(2)
def test_results_are_those_of_one_sequence_at_a_time(
    device: bool, policy: Policy, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():
        monkeypatch.setattr(paged_cuda, "_runs_triton", lambda q: False)  # the interpreter would take minutes
    prompts, plans = random_world(Random(7), tiny_tokenizer.vocab_size, 8)
    wanted = alone(policy, tiny_tokenizer, prompts, plans)
    sizes = {"num_blocks": blocks(prompts, plans, 3), "block_size": 16, "max_running": 5}
    make = DeviceDecoder if device else make_decoder
    if device and torch.cuda.is_available() and policy.config.head_dim >= 16:  # the kernels' minimum
        policy = deepcopy(policy).to("cuda")
    found = play(make(policy, tiny_tokenizer, **sizes), prompts, plans)
    assert sum(len(turn[0]) for record in wanted for turn in record) > 20
    agree(found, wanted)
