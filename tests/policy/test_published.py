"""Tests of every published model's structure, cut to a few narrow layers: forward, gradients, cached decoding, adapters
and files.

Numbers of heads, the ratio of the heads' width to the hidden one, tied heads, RoPE's base and its scaling are the
published ones; the widths are a 16th of theirs, the MLP's a 64th. transformers is the truth.
"""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from model_cases import stir

from thresher.engine.decoding.generator import GenerateRequest, Generator
from thresher.policy.families import FAMILIES
from thresher.policy.lora import FOLDER, adapters, add_lora
from thresher.policy.model import Policy, hf_views, load_policy
from thresher.policy.tokenizer import Tokenizer, train_bpe

transformers = pytest.importorskip("transformers")

# With D 8 and a base of 500,000 one wavelength, 167 positions, lies between the kept and the divided waves.
SCALED = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALED |= {"original_max_position_embeddings": 256}
QWEN3 = {"model_type": "qwen3", "rope_theta": 1e6, "rms_norm_eps": 1e-6, "head_dim": 128}
LLAMA = {"model_type": "llama", "rope_theta": 5e5, "rms_norm_eps": 1e-5, "head_dim": 128}
LLAMA |= {"rope_scaling": SCALED | {"factor": 8.0}}
LLAMA_32 = LLAMA | {"rope_scaling": SCALED | {"factor": 32.0}}
R1_QWEN = {"model_type": "qwen2", "rope_theta": 1e4, "rms_norm_eps": 1e-6}
R1_LARGE = {"model_type": "qwen2", "rope_theta": 1e6, "rms_norm_eps": 1e-5}
DELTA = {"linear_num_key_heads": 16, "linear_key_head_dim": 128 // 16, "linear_value_head_dim": 128 // 16}
QWEN35 = {"model_type": "qwen3_5_text", "rms_norm_eps": 1e-6, "head_dim": 256, "num_hidden_layers": 4} | DELTA
QWEN35 |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}}
# the family's settings, hidden and inner widths, heads, key/value heads, tied
SHAPES: dict[str, tuple[dict[str, Any], int, int, int, int, bool]] = {
    "Qwen3-0.6B": (QWEN3, 1024, 3072, 16, 8, True),
    "Qwen3-1.7B": (QWEN3, 2048, 6144, 16, 8, True),
    "Qwen3-4B": (QWEN3, 2560, 9728, 32, 8, True),
    "Qwen3-8B": (QWEN3, 4096, 12288, 32, 8, False),
    "Qwen3-14B": (QWEN3, 5120, 17408, 40, 8, False),
    "Qwen3-32B": (QWEN3, 5120, 25600, 64, 8, False),
    "Llama-3.1-8B": (LLAMA, 4096, 14336, 32, 8, False),
    "Llama-3.2-1B": (LLAMA_32 | {"head_dim": 64}, 2048, 8192, 32, 8, True),
    "Llama-3.2-3B": (LLAMA_32, 3072, 8192, 24, 8, True),
    "Qwen3.5-0.8B": (QWEN35 | {"linear_num_value_heads": 16}, 1024, 3584, 8, 2, True),
    "Qwen3.5-2B": (QWEN35 | {"linear_num_value_heads": 16}, 2048, 6144, 8, 2, True),
    "Qwen3.5-4B": (QWEN35 | {"linear_num_value_heads": 32}, 2560, 9216, 16, 4, True),
    "Qwen3.5-9B": (QWEN35 | {"linear_num_value_heads": 32}, 4096, 12288, 16, 4, False),
    "Qwen3.5-27B": (QWEN35 | {"linear_num_value_heads": 48}, 5120, 17408, 24, 4, False),
    "R1-Distill-Llama-8B": (LLAMA, 4096, 14336, 32, 8, False),
    "R1-Distill-Qwen-1.5B": (R1_QWEN, 1536, 8960, 12, 2, False),
    "R1-Distill-Qwen-7B": (R1_QWEN, 3584, 18944, 28, 4, False),
    "R1-Distill-Qwen-14B": (R1_LARGE, 5120, 13824, 40, 8, False),
    "R1-Distill-Qwen-32B": (R1_LARGE, 5120, 27648, 40, 8, False),
}
WIDTH, INNER, VOCAB = 16, 64, 272
# For logits of order 1. If the delta rule forgets at once, its output is q . k times a vector, which a norm then
# divides by its length, so that rounding errors grow. Therefore states are made to last: then transformers' float32 and
# ours are both 5e-5 from float64, and 4e-6 in the other families. Gradients of the delta rule differ from float64's by
# up to 4e-4 of their norm, transformers' float32 ones by up to 2e-3.
WITHIN, WITHIN_DELTA, WITHIN_DELTA_GRADIENTS = 1e-4, 1e-3, 2e-3


def config_of(name: str) -> Any:
    """Return transformers' config, with the widths divided by WIDTH, the MLP's by INNER."""
    family, hidden, inner, heads, kv_heads, tied = SHAPES[name]
    sizes = {"hidden_size": hidden // WIDTH, "intermediate_size": inner // INNER, "num_hidden_layers": 2}
    sizes |= {"vocab_size": VOCAB, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    ids = {"max_position_embeddings": 512, "bos_token_id": 256, "eos_token_id": [256, 258]}
    own = {"head_dim": family["head_dim"] // WIDTH} if "head_dim" in family else {}
    return transformers.AutoConfig.for_model(**sizes | family | ids | own, tie_word_embeddings=tied)


IDS = torch.arange(40) * 37 % 255


class Case(NamedTuple):
    folder: Path
    theirs: Any
    policy: Policy
    expected_TV: torch.Tensor

    @property
    def within(self) -> float:
        return WITHIN_DELTA if self.policy.config.delta_layers else WITHIN


@pytest.fixture(scope="module", params=SHAPES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    theirs = stir(transformers.AutoModelForCausalLM.from_config(config_of(request.param), attn_implementation="eager"))
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("A_log"):
                parameter.sub_(3)
    theirs.save_pretrained(folder)
    with torch.no_grad():
        expected_TV = theirs(IDS[None]).logits[0]
    case = Case(folder, theirs, load_policy(folder), expected_TV)
    assert expected_TV.std() > 100 * case.within, "logits too flat to show a difference"
    return case


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe([], 259, ["<|end|>", "<|more|>", "<|eot|>"])


def logits_of(folder: Path, ids: torch.Tensor = IDS) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        logits: torch.Tensor = model(ids[None]).logits[0]
    return logits


def test_every_family_is_among_them() -> None:
    # test_qwen35.py tests the family of text and images.
    assert {family["model_type"] for family, *_ in SHAPES.values()} == set(FAMILIES) - {"qwen3_5"}


def test_forward(case: Case) -> None:
    config, published = case.policy.config, case.theirs.config
    assert type(case.theirs).__name__ == FAMILIES[published.model_type].architecture
    assert config.eos_token_ids == (256, 258) and config.head_dim in (4, 8, 16)
    assert (case.policy.untied_head_VH is None) == published.tie_word_embeddings
    torch.testing.assert_close(case.policy.logits(IDS), case.expected_TV, rtol=0, atol=case.within)
    assert (config.rope_scaling is not None) == (config.model_type == "llama")
    if config.rope_scaling is not None:
        unscaled = load_policy(case.folder)
        unscaled.config = config.replace(rope_scaling=None)
        assert (unscaled.logits(IDS) - case.expected_TV).abs().max() > 1e-2, "the scaling would not be missed"


def test_gradients(case: Case) -> None:
    policy = case.policy
    theirs = deepcopy(case.theirs).double() if policy.config.delta_layers else case.theirs
    for model in (theirs, policy):
        model.zero_grad()
    F.cross_entropy(theirs(IDS[None, :-1]).logits[0], IDS[1:]).backward()
    F.cross_entropy(policy.logits(IDS[:-1]), IDS[1:]).backward()
    gradients = deepcopy(policy)
    for parameter, source in zip(gradients.parameters(), policy.parameters(), strict=True):
        parameter.data = source.grad
    found = hf_views(gradients)
    for name, parameter in theirs.named_parameters():
        if policy.config.delta_layers:
            assert (found[name] - parameter.grad).norm() <= WITHIN_DELTA_GRADIENTS * parameter.grad.norm(), name
        else:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)


def test_cached_decoding(case: Case, tokenizer: Tokenizer) -> None:
    """With two prompts that share a prefix and several samples each, the log-probs of the samples are transformers'."""
    generator = Generator(case.policy, tokenizer, max_running=8)
    prompts = [IDS[:21].tolist(), [*IDS[:18].tolist(), 5, 6]]
    requests = [GenerateRequest(prompt_ids=ids, max_new_tokens=12, n=2, seed=seed) for seed, ids in enumerate(prompts)]
    for prompt, samples in zip(prompts, generator.generate(requests), strict=True):
        assert len(samples) == 2 and len(samples[0].token_ids) > 1
        for sample in samples:
            ids = torch.tensor([*prompt, *sample.token_ids])
            with torch.no_grad():
                logits_TV = case.theirs(ids[None]).logits[0][len(prompt) - 1 : -1, : tokenizer.vocab_size]
            expected = torch.log_softmax(logits_TV, -1).gather(1, ids[len(prompt) :, None])[:, 0]
            torch.testing.assert_close(torch.tensor(sample.logprobs), expected, rtol=0, atol=case.within)


def test_adapters_are_merged_on_save(case: Case, tmp_path: Path) -> None:
    policy = load_policy(case.folder)
    add_lora(policy, rank=2, alpha=4)
    generator = torch.Generator().manual_seed(5)
    for _, adapter in adapters(policy):
        torch.nn.init.normal_(adapter.b_OR, 0.0, 0.1, generator=generator)
    adapted_TV = policy.logits(IDS).detach()
    assert (adapted_TV - case.expected_TV).abs().max() > 0.05
    policy.save(tmp_path)
    torch.testing.assert_close(logits_of(tmp_path), adapted_TV, rtol=0, atol=case.within)
    torch.testing.assert_close(load_policy(tmp_path).logits(IDS), adapted_TV, rtol=0, atol=case.within)
    beside = json.loads((tmp_path / FOLDER / "adapter_config.json").read_text())
    names = {f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")}
    if policy.config.delta_layers:
        names |= {"in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"}
    assert set(beside["target_modules"]) == names
    for name, _ in adapters(policy):
        assert isinstance(case.theirs.get_submodule(name), torch.nn.Linear), "PEFT finds them by these names"


def test_what_is_saved_is_read_by_transformers_and_by_us(case: Case, tmp_path: Path) -> None:
    case.policy.save(tmp_path)
    assert torch.equal(logits_of(tmp_path), case.expected_TV)
    again = load_policy(tmp_path)
    assert again.config == case.policy.config
    assert torch.equal(again.logits(IDS), case.policy.logits(IDS))
    ours, theirs = hf_views(case.policy), dict(case.theirs.named_parameters())
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
