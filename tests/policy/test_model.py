"""Tests of the transformer against transformers' Qwen2ForCausalLM: logits, gradients, and files in both directions."""

import json
import math
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import make_config, stir

from thresher.common.errors import UserError
from thresher.kernels.attention.varlen import Varlen
from thresher.policy.config import ModelConfig
from thresher.policy.model import Policy, hf_views, init_policy, load_policy

transformers = pytest.importorskip("transformers")

# heads, key/value heads, head dimension, layers, vocabulary, tied, rope_theta. Every ratio of heads from 1 to 7, head
# dimensions that are and are not a multiple of 8, tied and untied heads, both bases of Qwen2 and Qwen2.5.
SHAPES = [
    (2, 2, 8, 1, 40, True, 1e4),
    (4, 2, 8, 2, 97, False, 1e6),
    (3, 1, 10, 2, 64, True, 1e6),
    (8, 2, 16, 1, 33, False, 1e4),
    (5, 1, 24, 2, 50, True, 1e4),
    (12, 2, 6, 1, 64, False, 1e6),
    (7, 1, 64, 1, 128, True, 1e6),
    (14, 2, 64, 2, 151, True, 1e6),
]
IDS = [f"{heads // kv}x{kv}-d{dim}-{'tied' if tied else 'untied'}" for heads, kv, dim, _, _, tied, _ in SHAPES]


def config_of(shape: tuple[int, int, int, int, int, bool, float], **changes: Any) -> ModelConfig:
    heads, kv_heads, dim, layers, vocab, tied, theta = shape
    values = {
        "vocab_size": vocab,
        "hidden_size": heads * dim,
        "intermediate_size": heads * dim + 6,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rope_theta": theta,
        "max_position_embeddings": 512,
        "tie_word_embeddings": tied,
        "initializer_range": 0.02,
        "eos_token_ids": (1,),
    }
    return make_config(**{**values, **changes})


def random_policy(config: ModelConfig, seed: int = 0) -> Policy:
    policy: Policy = stir(init_policy(config, seed), seed)
    return policy


def random_ids(config: ModelConfig, count: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed))


def theirs_from(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    assert type(model).__name__ == "Qwen2ForCausalLM"
    return model


@pytest.mark.parametrize("shape", SHAPES, ids=IDS)
def test_logits_and_gradients_equal_transformers(shape: Any, tmp_path: Path) -> None:
    config = config_of(shape)
    policy = random_policy(config)
    policy.save(tmp_path)
    theirs = theirs_from(tmp_path)
    for count in (1, 2, 37, 131):
        ids_T = random_ids(config, count, seed=count)
        ours_TV, theirs_TV = policy.logits(ids_T), theirs(ids_T[None]).logits[0]
        assert ours_TV.shape == (count, config.vocab_size)
        assert theirs_TV.std() > 1e-2, "logits too flat to tell a difference"  # a hundred times the tolerance
        torch.testing.assert_close(ours_TV, theirs_TV, rtol=0, atol=1e-4)

    weights_TV = torch.randn(ours_TV.shape, generator=torch.Generator().manual_seed(3)) / count
    (ours_TV * weights_TV).sum().backward()
    (theirs_TV * weights_TV).sum().backward()
    gradients = deepcopy(policy)
    for parameter, source in zip(gradients.parameters(), policy.parameters(), strict=True):
        assert source.grad is not None
        parameter.data = source.grad
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    views = hf_views(gradients)
    assert views.keys() == expected.keys()
    for name, grad in expected.items():
        assert grad is not None and grad.abs().max() > 1e-4, name
        torch.testing.assert_close(views[name], grad, rtol=0, atol=1e-4 * max(1.0, grad.abs().max().item()), msg=name)


def test_packed_sequences_do_not_see_each_other() -> None:
    config = config_of(SHAPES[1])
    policy = random_policy(config)
    rows = [random_ids(config, count, seed=count) for count in (5, 1, 64, 23)]
    layout = Varlen([len(row) for row in rows])
    hidden_TH = policy.hidden(torch.cat(rows), layout.positions_T, layout)
    for packed_TH, row in zip(hidden_TH.split(layout.lengths), rows, strict=True):
        torch.testing.assert_close(packed_TH @ policy.head_VH.T, policy.logits(row), rtol=0, atol=2e-5)


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[6]], ids=[IDS[1], IDS[6]])
def test_bfloat16_is_as_good_as_theirs(shape: Any, tmp_path: Path) -> None:
    """float32 on the same (bfloat16) weights is the truth. Our error may be four times theirs, as root mean squares;
    rounding the input of a norm to four bits would make it six times theirs."""
    policy = random_policy(config_of(shape)).bfloat16()
    policy.save(tmp_path)
    ids_T = random_ids(policy.config, 65)
    with torch.no_grad():
        truth_TV = load_policy(tmp_path).logits(ids_T)
        theirs_TV = theirs_from(tmp_path, torch.bfloat16)(ids_T[None]).logits[0]
        ours_TV = policy.logits(ids_T)
    assert ours_TV.dtype == torch.bfloat16
    error, their_error = ((x.float() - truth_TV).square().mean().sqrt() for x in (ours_TV, theirs_TV))
    assert 0 < error <= 4 * their_error


def test_init_is_a_function_of_the_seed() -> None:
    config = config_of(SHAPES[1], hidden_size=128, vocab_size=400, initializer_range=0.05)
    torch.manual_seed(1)
    first = init_policy(config, 7).state_dict()
    torch.manual_seed(2)
    before = torch.get_rng_state()
    second, other = init_policy(config, 7).state_dict(), init_policy(config, 8).state_dict()
    assert torch.equal(torch.get_rng_state(), before), "the global generator was used"
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
        if tensor.dim() == 2:
            assert not torch.equal(tensor, other[name]), name
            deviations = 6 * 0.05 / math.sqrt(tensor.numel())  # six deviations of a mean; of a deviation over eight
            assert abs(tensor.mean()) < deviations and abs(tensor.std() - 0.05) < deviations, name  # bound: chance
        else:
            assert torch.all(tensor == (1.0 if "norm" in name else 0.0)), name
    matrices = [tensor.flatten()[:64] for tensor in first.values() if tensor.dim() == 2]
    assert all(not torch.equal(a, b) for n, a in enumerate(matrices) for b in matrices[:n]), "two have the same noise"


@pytest.mark.parametrize("tied", [True, False])
def test_views_cover_the_policy_and_share_its_memory(tied: bool) -> None:
    policy = init_policy(config_of(SHAPES[3], tie_word_embeddings=tied), 0)
    views = hf_views(policy)
    assert sum(view.numel() for view in views.values()) == policy.parameter_count()
    assert ("lm_head.weight" in views) == (not tied)
    for number, view in enumerate(views.values(), start=1):
        view.fill_(number)
    for name, parameter in policy.named_parameters():
        assert parameter.min() >= 1, f"{name} is not covered by the views"
    layer: Any = policy.layers[0]
    written = [views[f"model.layers.0.self_attn.{x}_proj.weight"][0, 0] for x in "qkv"]
    edges = [0, layer.q_rows, layer.q_rows + layer.kv_rows]
    assert [layer.qkv_weight[row, 0] for row in edges] == written and len({float(x) for x in written}) == 3


SIZES: list[tuple[dict[str, int], str]] = [
    ({"intermediate_size": 24}, r"model\.layers\.0\.mlp\.\w+\.weight has shape .*22"),
    ({"num_hidden_layers": 2}, r"model\.layers\.1\.\S+ is missing"),
    ({"num_hidden_layers": 10**8}, r"config\.json: specifies 100,000,000 layers, but the weights have 14 tensors"),
    ({"num_hidden_layers": 10**12}, "num_hidden_layers is 1000000000000, expected a positive integer up to"),
    ({"intermediate_size": 2**31 - 1}, "has shape .*, the config specifies"),
    ({"rope_theta": 10**400}, "rope_theta is 1000.*, expected a positive number"),
    ({"hidden_size": 2**31 - 4, "intermediate_size": 2**31 - 1}, r"its sizes are too large for any tensor"),
]


@pytest.mark.parametrize(("changes", "expected"), SIZES, ids=[expected[:20] for _, expected in SIZES])
def test_sizes_that_the_files_do_not_have_take_no_memory(
    tmp_path: Path, changes: dict[str, int], expected: str
) -> None:
    random_policy(config_of(SHAPES[0])).save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UserError, match=expected):
        load_policy(tmp_path)
