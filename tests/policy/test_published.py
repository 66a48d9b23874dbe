"""Every published model's structure, cut to two narrow layers: forward, gradients, cached decoding, adapters, files.

Numbers of heads, the ratio of the heads' width to the hidden one, tied or not, the base of RoPE and its scaling are the
published ones; the widths are a 16th of theirs, the MLP's a 64th. transformers is the truth.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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

# Between a wave that is kept and one that is divided lies one of 167 positions, at D 8 and a base of 500,000.
SCALED = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
WIDTH, INNER, VOCAB = 16, 64, 272
QWEN3 = {"model_type": "qwen3", "rope_theta": 1e6}
R1_QWEN = {"model_type": "qwen2", "rope_theta": 1e4, "eps": 1e-6}
LLAMA = {"model_type": "llama", "rope_theta": 5e5, "eps": 1e-5, "factor": 8.0}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """As config.json has it; factor: of RoPE's scaling, 0 for none."""

    model_type: str
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    tied: bool
    rope_theta: float
    head_dim: int = 128
    eps: float = 1e-6
    factor: float = 0.0

    def config(self) -> Any:
        scaling = {"rope_scaling": SCALED | {"factor": self.factor}} if self.factor else {}
        own_heads = {} if self.model_type == "qwen2" else {"head_dim": self.head_dim // WIDTH}
        return transformers.AutoConfig.for_model(
            self.model_type,
            vocab_size=VOCAB,
            hidden_size=self.hidden // WIDTH,
            intermediate_size=self.inner // INNER,
            num_hidden_layers=2,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            tie_word_embeddings=self.tied,
            max_position_embeddings=512,
            rms_norm_eps=self.eps,
            rope_theta=self.rope_theta,
            bos_token_id=256,
            eos_token_id=[256, 258],
            **scaling,
            **own_heads,
        )


SHAPES = {
    "Qwen3-0.6B": Shape(**QWEN3, hidden=1024, inner=3072, heads=16, kv_heads=8, tied=True),
    "Qwen3-1.7B": Shape(**QWEN3, hidden=2048, inner=6144, heads=16, kv_heads=8, tied=True),
    "Qwen3-4B": Shape(**QWEN3, hidden=2560, inner=9728, heads=32, kv_heads=8, tied=True),
    "Qwen3-8B": Shape(**QWEN3, hidden=4096, inner=12288, heads=32, kv_heads=8, tied=False),
    "Qwen3-14B": Shape(**QWEN3, hidden=5120, inner=17408, heads=40, kv_heads=8, tied=False),
    "Qwen3-32B": Shape(**QWEN3, hidden=5120, inner=25600, heads=64, kv_heads=8, tied=False),
    "Llama-3.1-8B": Shape(**LLAMA, hidden=4096, inner=14336, heads=32, kv_heads=8, tied=False),
    "Llama-3.2-1B": Shape(
        **LLAMA | {"factor": 32.0, "head_dim": 64}, hidden=2048, inner=8192, heads=32, kv_heads=8, tied=True
    ),
    "Llama-3.2-3B": Shape(**LLAMA | {"factor": 32.0}, hidden=3072, inner=8192, heads=24, kv_heads=8, tied=True),
    "R1-Distill-Llama-8B": Shape(**LLAMA, hidden=4096, inner=14336, heads=32, kv_heads=8, tied=False),
    "R1-Distill-Qwen-1.5B": Shape(**R1_QWEN, hidden=1536, inner=8960, heads=12, kv_heads=2, tied=False),
    "R1-Distill-Qwen-7B": Shape(**R1_QWEN, hidden=3584, inner=18944, heads=28, kv_heads=4, tied=False),
    "R1-Distill-Qwen-14B": Shape(
        **R1_QWEN | {"eps": 1e-5, "rope_theta": 1e6}, hidden=5120, inner=13824, heads=40, kv_heads=8, tied=False
    ),
    "R1-Distill-Qwen-32B": Shape(
        **R1_QWEN | {"eps": 1e-5, "rope_theta": 1e6}, hidden=5120, inner=27648, heads=40, kv_heads=8, tied=False
    ),
}
IDS = torch.arange(40) * 37 % 255


@dataclass(frozen=True)
class Case:
    shape: Shape
    folder: Path
    theirs: Any
    policy: Policy
    expected_TV: torch.Tensor


@pytest.fixture(scope="module", params=SHAPES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    shape, folder = SHAPES[request.param], tmp_path_factory.mktemp(request.param)
    theirs = transformers.AutoModelForCausalLM.from_config(shape.config(), attn_implementation="eager")
    stir(theirs)
    theirs.save_pretrained(folder)
    with torch.no_grad():
        expected_TV = theirs(IDS[None]).logits[0]
    assert expected_TV.std() > 1e-2, "logits too flat to show a difference"  # a hundred times the tolerance
    return Case(shape, folder, theirs, load_policy(folder), expected_TV)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe([], 259, ["<|end|>", "<|more|>", "<|eot|>"])


def logits_of(folder: Path, ids: torch.Tensor = IDS) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with torch.no_grad():
        logits: torch.Tensor = model(ids[None]).logits[0]
    return logits


def test_every_family_is_among_them() -> None:
    assert {shape.model_type for shape in SHAPES.values()} == set(FAMILIES)


def test_forward(case: Case) -> None:
    assert type(case.theirs).__name__ == FAMILIES[case.shape.model_type].architecture
    config = case.policy.config
    assert config.eos_token_ids == (256, 258) and config.head_dim == case.shape.head_dim // WIDTH
    assert (case.policy.untied_head_VH is None) == case.shape.tied
    torch.testing.assert_close(case.policy.logits(IDS), case.expected_TV, rtol=0, atol=1e-4)
    assert (config.rope_scaling is not None) == bool(case.shape.factor)
    if case.shape.factor:
        unscaled = load_policy(case.folder)
        unscaled.config = config.replace(rope_scaling=None)
        assert (unscaled.logits(IDS) - case.expected_TV).abs().max() > 1e-2, "the scaling would not be missed"


def test_gradients(case: Case) -> None:
    """Of every vector of the layers, which biases and norms of heads are, and of the embedding."""
    theirs, policy = case.theirs, case.policy
    theirs.zero_grad()
    F.cross_entropy(theirs(IDS[None, :-1]).logits[0], IDS[1:]).backward()
    policy.zero_grad()
    F.cross_entropy(policy.logits(IDS[:-1]), IDS[1:]).backward()
    limit = {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(policy.embed_VH.grad, theirs.get_input_embeddings().weight.grad, **limit)
    ours = dict(policy.named_parameters())
    for name, parameter in theirs.model.layers.named_parameters():
        layer, _, rest = name.partition(".")
        if rest in ("self_attn.q_norm.weight", "self_attn.k_norm.weight"):
            found = ours[f"layers.{layer}.{rest.split('.')[1]}"].grad
            torch.testing.assert_close(found, parameter.grad, **limit)
        if rest == "self_attn.q_proj.bias":
            found = ours[f"layers.{layer}.qkv_bias"].grad
            assert found is not None
            torch.testing.assert_close(found[: len(parameter)], parameter.grad, **limit)


def test_cached_decoding(case: Case, tokenizer: Tokenizer) -> None:
    """Two prompts that share a prefix, several samples each: the log-probs of what was drawn are transformers'."""
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
            torch.testing.assert_close(torch.tensor(sample.logprobs), expected, rtol=0, atol=1e-4)


def test_adapters_are_merged_on_save(case: Case, tmp_path: Path) -> None:
    policy = load_policy(case.folder)
    add_lora(policy, rank=2, alpha=4)
    generator = torch.Generator().manual_seed(5)
    for _, adapter in adapters(policy):
        torch.nn.init.normal_(adapter.b_OR, 0.0, 0.1, generator=generator)
    adapted_TV = policy.logits(IDS).detach()
    assert (adapted_TV - case.expected_TV).abs().max() > 0.05
    policy.save(tmp_path)
    torch.testing.assert_close(logits_of(tmp_path), adapted_TV, rtol=0, atol=1e-4)
    torch.testing.assert_close(load_policy(tmp_path).logits(IDS), adapted_TV, rtol=0, atol=1e-4)
    beside = json.loads((tmp_path / FOLDER / "adapter_config.json").read_text())
    names = {f"{part}_proj" for part in ("q", "k", "v", "o", "gate", "up", "down")}
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
