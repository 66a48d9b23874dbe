"""Tests that one file and one row define another model family. test_published.py tests the existing families."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from model_cases import make_config
from rollout_cases import Make, assert_logprobs_match, make_jobs
from safetensors.torch import load_file

from thresher.common.errors import UserError
from thresher.policy.config import ConfigRules, config_from_dict, read_config
from thresher.policy.families import FAMILIES, Family
from thresher.policy.layers import DecoderLayer
from thresher.policy.lora import adapters, add_lora
from thresher.policy.model import Policy, init_policy, load_policy

IDS = torch.tensor([3, 14, 1, 5, 9, 2, 6, 5, 3, 5, 8])


class ToyLayer(DecoderLayer):
    """A family that only this test has: Qwen2 without biases, with heads of any width."""

    rules = ConfigRules(constants={"toy_bias": False}, integers=("head_dim",))


@pytest.fixture
def toy_family(monkeypatch: pytest.MonkeyPatch) -> str:
    """Register the family's row. This file is its one file."""
    row = Family(architecture="ToyForCausalLM", models="Toy", module=ToyLayer.__module__, layer="ToyLayer")
    monkeypatch.setitem(FAMILIES, "toy", row)
    return "toy"


def make_toy(seed: int = 0, **changes: Any) -> Policy:
    config = make_config(model_type="toy", head_dim=12, **changes)
    return init_policy(config, seed)


def test_a_toy_family_is_made_saved_and_loaded(toy_family: str, tmp_path: Path) -> None:
    policy = make_toy()
    assert isinstance(policy.layers[0], ToyLayer)
    assert not [name for name, _ in policy.named_parameters() if "bias" in name]
    policy.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["model.layers.1.self_attn.q_proj.weight"].shape == (48, 32)
    assert not [name for name in tensors if name.endswith("bias")]
    config = read_config(tmp_path)
    assert (config.model_type, config.head_dim, config.extra) == ("toy", 12, {})
    again = load_policy(tmp_path)
    assert again.config == policy.config
    assert torch.equal(again.logits(IDS), policy.logits(IDS))


def test_a_toy_family_computes_what_it_says(toy_family: str) -> None:
    """With Qwen2's own head_dim it equals a Qwen2 whose biases are 0."""
    policy = init_policy(make_config(model_type=toy_family), 0)
    qwen2 = init_policy(make_config(), 1)
    missing, surplus = qwen2.load_state_dict(policy.state_dict(), strict=False)
    assert surplus == [] and {name.rpartition(".")[2] for name in missing} == {"qkv_bias"}
    assert torch.equal(policy.logits(IDS), qwen2.logits(IDS))


def test_a_toy_family_is_sampled_from_and_adapted(
    toy_family: str, tiny_policy: Policy, tiny_rollout: Make, tiny_questions: list[Any]
) -> None:
    """Rollout uses its KV cache, and the log-probs are those of the training forward."""
    plain = tiny_policy.config
    policy = make_toy(vocab_size=plain.vocab_size, max_position_embeddings=2048, eos_token_ids=plain.eos_token_ids)
    for adapted in (False, True):
        if adapted:
            add_lora(policy, rank=4, alpha=8)
            for _, adapter in adapters(policy):
                torch.nn.init.normal_(adapter.b_OR, 0.0, 0.2, generator=torch.Generator().manual_seed(3))
        run = tiny_rollout(policy=policy, max_turn_tokens=9)
        trajectories = run.run(make_jobs(tiny_questions[:3], samples=2), 1.0)
        assert all(trajectory.policy_positions() for trajectory in trajectories)
        assert_logprobs_match(run, trajectories, 1.0)
        loss = F.cross_entropy(policy.logits(IDS[:-1]), IDS[1:])
        loss.backward()
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        assert trained and all(parameter.grad is not None for parameter in trained)


def test_a_familys_rules_are_its_own(toy_family: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 29, "head_dim": 12}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    rest = {"rms_norm_eps": 1e-6, "rope_theta": 300.0, "tie_word_embeddings": True}
    # Qwen2 refuses the activation; the toy family does not read it.
    written = {"architectures": ["ToyForCausalLM"], "hidden_act": "gelu", **sizes, **heads, **rest}
    config = config_from_dict(written, "here")
    assert (config.model_type, config.head_dim) == ("toy", 12)
    assert config.replace(hidden_size=64).head_dim == 12, "an independent head_dim follows nothing"
    with pytest.raises(UserError, match="here: toy_bias is true, only false is supported"):
        config_from_dict({**written, "toy_bias": True}, "here")
    with pytest.raises(UserError, match="here: head_dim is null, expected a positive integer"):
        config_from_dict({**written, "head_dim": None}, "here")
    with pytest.raises(UserError, match=r"here: head_dim 7 .* is odd"):
        config_from_dict({**written, "head_dim": 7}, "here")
    with pytest.raises(UserError, match=r"here: architectures is \['ToyForCausalLM'\] but model_type is 'qwen2'"):
        config_from_dict({**written, "model_type": "qwen2"}, "here")


def test_an_unknown_family_is_answered_with_those_there_are(toy_family: str) -> None:
    for table in ({"architectures": ["MistralForCausalLM"], "model_type": "mistral"}, {"model_type": ["qwen2"]}):
        with pytest.raises(UserError, match=r"^here: .* expected one of .*; use a Qwen2 / Qwen2\.5 or .*Toy model$"):
            config_from_dict(table, "here")
    with pytest.raises(UserError, match=r"model_type is 'mistral', expected one of 'qwen2',.* 'toy'"):
        make_config(model_type="mistral")
