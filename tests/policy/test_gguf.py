"""Tests of converting a GGUF file to a model folder, against transformers' own loader, and of refused files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_cases import make_model, write_gguf
from model_cases import make_config

from thresher.common.errors import UserError
from thresher.policy.config import RopeScaling
from thresher.policy.gguf import import_gguf
from thresher.policy.model import Policy, hf_views, load_policy
from thresher.policy.tokenizer import load_tokenizer

pytest.importorskip("gguf")
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "qwen2": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": True, "head_dim": 128},  # transformers' loader of Qwen3 supports no other
}
TEXT = "Who wrote the 1995 guide?"


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_1", "Q8_0"])
@pytest.mark.parametrize("architecture", SHAPES)
def test_logits_and_ids_are_those_of_transformers(tmp_path: Path, architecture: str, kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")  # required by transformers' loader of GGUF files
    policy, tokenizer = make_model(architecture, **SHAPES[architecture])
    file = write_gguf(tmp_path / "m.gguf", policy, tokenizer, kind)
    import_gguf(file, tmp_path / "out")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    ours = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    ids = load_tokenizer(tmp_path / "out").encode(TEXT)
    assert ids == tokenizer.encode(TEXT)
    with torch.no_grad():
        assert torch.equal(ours(torch.tensor([ids])).logits, theirs(torch.tensor([ids])).logits)
    if kind == "F32":
        found = hf_views(load_policy(tmp_path / "out"))
        assert all(torch.equal(found[name], view) for name, view in hf_views(policy).items())


def test_the_folder_says_what_the_file_says(tmp_path: Path) -> None:
    """Sizes and constants as published, rows of the head beyond the tokenizer, and the chat template are kept."""
    policy, tokenizer = make_model("qwen2", vocab_size=310, rms_norm_eps=1e-5, rope_theta=1e6)
    unused = 310 - len(tokenizer)
    found = import_gguf(write_gguf(tmp_path / "m.gguf", policy, tokenizer, unused=unused), tmp_path / "out")
    config = load_policy(tmp_path / "out").config
    expected = make_config(
        hidden_size=64, intermediate_size=96, vocab_size=310, head_dim=16, rms_norm_eps=1e-5, rope_theta=1e6,
        eos_token_ids=(tokenizer.added_tokens["<|end|>"],), bos_token_id=tokenizer.added_tokens["<|start|>"],
        initializer_range=0.02,
    )  # fmt: skip
    assert config.replace(extra={}, generation_extra={}) == expected
    read = load_tokenizer(tmp_path / "out")
    assert len(read) == len(tokenizer) == found["tokens"] and read.added_tokens == tokenizer.added_tokens
    assert read.chat_prompt("Who?") == "<|start|>Who?<|end|>> "
    assert found["parameters"] == sum(p.numel() for p in policy.parameters())


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("smollm", ["in", " ", "1", "9", "9", "5", " it", "'s", "  ", " X"]),
        ("qwen2", ["in", " ", "1", "9", "9", "5", " it", "'s", "  ", " X"]),
        ("llama-bpe", ["in", " ", "199", "5", " it", "'s", "  ", " X"]),
    ],
)
def test_words_are_cut_as_published(tmp_path: Path, pre: str, pieces: list[str]) -> None:
    import tokenizers

    policy, tokenizer = make_model("llama")
    import_gguf(write_gguf(tmp_path / "m.gguf", policy, tokenizer, pre=pre), tmp_path / "out")
    cut = tokenizers.Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).pre_tokenizer
    assert [piece.replace("Ġ", " ") for piece, _ in cut.pre_tokenize_str("in 1995 it's   X")] == pieces


def test_llama_3s_scaling_is_read_from_its_divisors(tmp_path: Path) -> None:
    scaling = RopeScaling(32.0, 1.0, 4.0, 8192)
    policy, tokenizer = make_model("llama", head_dim=32, rope_theta=500000.0)
    turns = 8192 / (2 * torch.pi * 500000.0 ** (torch.arange(0, 32, 2) / 32))
    kept = ((turns - 1) / 3).clamp(0, 1)
    divisors = 1 / (kept + (1 - kept) / 32)
    file = write_gguf(tmp_path / "m.gguf", policy, tokenizer, tensors={"rope_freqs.weight": divisors})
    import_gguf(file, tmp_path / "out")
    assert load_policy(tmp_path / "out").config.rope_scaling == scaling
    other = write_gguf(tmp_path / "n.gguf", policy, tokenizer, tensors={"rope_freqs.weight": 2 * divisors})
    with pytest.raises(UserError, match=r"n\.gguf: rope_freqs\.weight is not the scaling"):
        import_gguf(other, tmp_path / "other")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fields": {"general.architecture": "gemma"}}, "general.architecture is 'gemma', expected one of llama"),
        ({"fields": {"tokenizer.ggml.model": "llama"}}, "the tokenizer is 'llama' with tokenizer.ggml.pre 'qwen2'"),
        ({"pre": "tekken"}, "the tokenizer is 'gpt2' with tokenizer.ggml.pre 'tekken', expected 'gpt2' with one of"),
        ({"fields": {"llama.rope.scaling.type": "yarn"}}, "llama.rope.scaling.type is 'yarn', expected 'none'"),
        ({"fields": {"llama.attention.sliding_window": 4096}}, "llama.attention.sliding_window is 4096, expected 0"),
        ({"fields": {"llama.expert_count": 8}}, "llama.expert_count is 8, expected 0"),
        ({"fields": {"llama.block_count": "two"}}, "llama.block_count is 'two', expected int"),
        ({"fields": {"llama.block_count": 1}}, "tensor blk.1.* is not part of a llama model"),
        ({"fields": {"llama.feed_forward_length": 64}}, r"has shape \[96, 64\], expected \[64, 64\]"),
        ({"fields": {"llama.block_count": 3}}, "the tensor of model.layers.2.* is missing"),
        ({"tensors": {"extra.weight": torch.ones(3)}}, "tensor extra.weight is not part of a llama model"),
        ({"unused": 3}, "tokens with .* types, but the head has"),
    ],
)
def test_other_files_are_refused_by_name(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    policy, tokenizer = make_model("llama")
    file = write_gguf(tmp_path / "m.gguf", policy, tokenizer, **options)
    with pytest.raises(UserError, match=message) as caught:
        import_gguf(file, tmp_path / "out")
    assert str(file) in str(caught.value) and "\n" not in str(caught.value) and not (tmp_path / "out").exists()


@pytest.mark.parametrize("size", [0, 3, 20, 2000, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, size: int) -> None:
    policy, tokenizer = make_model("llama")
    file = write_gguf(tmp_path / "m.gguf", policy, tokenizer)
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(UserError, match=rf"{file}: (empty|not a GGUF file|truncated)"):
        import_gguf(file, tmp_path / "out")


def test_other_files_are_no_gguf(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("a text, not a model")
    for name, message in (("x", "not a GGUF file"), ("absent", "no such file"), (".", "Is a directory")):
        with pytest.raises(UserError, match=message):
            import_gguf(tmp_path / name, tmp_path / "out")


def test_a_type_that_cannot_be_dequantised_is_refused(tmp_path: Path) -> None:
    import gguf

    policy, tokenizer = make_model("llama")
    file = write_gguf(tmp_path / "m.gguf", policy, tokenizer)
    data = bytearray(file.read_bytes())
    name = b"blk.0.attn_norm.weight"
    at = data.index(name) + len(name) + 4 + 8  # after the name: dimensions, one size, the type
    data[at : at + 4] = int(gguf.GGMLQuantizationType.I32).to_bytes(4, "little")
    file.write_bytes(data)
    with pytest.raises(UserError, match=r"tensor blk\.0\.attn_norm\.weight is of the type I32"):
        import_gguf(file, tmp_path / "out")


def test_a_model_is_a_policy() -> None:
    """The parameter names of all three architectures can be converted to the file's names and back."""
    from gguf_cases import gguf_name

    from thresher.policy.gguf import _parameter

    for architecture, changes in SHAPES.items():
        policy = Policy(make_config(model_type=architecture, **changes))
        assert all(_parameter(gguf_name(name)) == name for name in hf_views(policy))
