"""Tests of config.json and generation_config.json: both dialects are read, one is written, all else gives an error."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from thresher.common.errors import UserError
from thresher.policy.config import ModelConfig, RopeScaling, config_from_dict, read_config, write_config

SMALL: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 32,
    "initializer_range": 0.03,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "max_window_layers": 2,
    "model_type": "qwen2",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 300,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 64,
}
WITHOUT = object()
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def changed(**changes: Any) -> dict[str, Any]:
    values = {**SMALL, **changes}
    return {key: value for key, value in values.items() if value is not WITHOUT}


def store(folder: Path, config: Any, generation: Any = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_reads_both_dialects(tmp_path: Path) -> None:
    config = read_config(store(tmp_path, SMALL))
    unknown = ("attention_dropout", "max_window_layers", "sliding_window", "use_sliding_window")
    other = ("architectures", "model_type", "torch_dtype", "hidden_act", "eos_token_id")
    fields = {key: value for key, value in SMALL.items() if key not in (*unknown, *other)}
    extra = {key: SMALL[key] for key in unknown}
    assert config == ModelConfig(**fields, head_dim=8, eos_token_ids=(2,), extra=extra)
    assert isinstance(config.rope_theta, float) and hash(config) == hash(config.replace(extra={}))
    newer = changed(
        **dict.fromkeys(("rope_theta", "torch_dtype", "architectures"), WITHOUT),
        dtype="bfloat16",
        rope_parameters={"rope_theta": 300.0, "rope_type": "default"},
        layer_types=["full_attention", "full_attention"],
        pad_token_id=None,
    )
    assert config_from_dict(newer, "new") == config


def test_reads_what_the_installed_transformers_writes_and_it_reads_ours(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {key: SMALL[key] for key in ("vocab_size", "intermediate_size", "num_key_value_heads")}
    shape |= {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "rope_theta": 1e6}
    theirs = transformers.Qwen2Config(**shape, tie_word_embeddings=False, eos_token_id=[3, 4], pad_token_id=5)
    theirs.save_pretrained(tmp_path / "theirs")
    config = read_config(tmp_path / "theirs")
    assert (config.rope_theta, config.head_dim, config.eos_token_ids) == (1e6, 8, (3, 4))
    assert (config.tie_word_embeddings, config.pad_token_id, config.num_hidden_layers) == (False, 5, 3)

    # A copy with another number of layers must not keep the old list of layer types.
    write_config(config.replace(num_hidden_layers=2), tmp_path / "ours")
    again = transformers.AutoConfig.from_pretrained(tmp_path / "ours")
    assert type(again) is transformers.Qwen2Config and again.architectures == ["Qwen2ForCausalLM"]
    assert again.num_hidden_layers == 2 and again.num_attention_heads == 6 and again.vocab_size == 64
    assert again.eos_token_id == [3, 4] and again.pad_token_id == 5 and again.tie_word_embeddings is False
    assert (getattr(again, "rope_parameters", None) or {"rope_theta": again.rope_theta})["rope_theta"] == 1e6
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "ours")
    assert generation.eos_token_id == [3, 4] and generation.pad_token_id == 5


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_scaling": LLAMA3},
        {"rope_scaling": {("type" if key == "rope_type" else key): value for key, value in LLAMA3.items()}},
        {"rope_parameters": LLAMA3 | {"rope_theta": 300.0}, "rope_theta": WITHOUT},
        {"rope_parameters": LLAMA3 | {"rope_theta": 300.0}, "rope_scaling": LLAMA3},
    ],
)
def test_llama3_scaling_in_both_dialects(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The older dialect is written; the installed transformers reads it like its own."""
    config = config_from_dict(changed(**changes), "here")
    assert config.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 64) and config.rope_theta == 300.0
    assert hash(config) != hash(config.replace(rope_scaling=None)) and not config.extra.keys() & {"rope_parameters"}
    write_config(config, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["rope_scaling"], written["rope_theta"]) == (LLAMA3, 300.0)
    assert read_config(tmp_path) == config
    transformers = pytest.importorskip("transformers")
    again = transformers.AutoConfig.from_pretrained(tmp_path)
    assert (getattr(again, "rope_parameters", None) or again.rope_scaling).items() >= LLAMA3.items()


def test_what_is_written_is_read_back_and_keeps_what_it_does_not_know(tmp_path: Path) -> None:
    generation = {"bos_token_id": 1, "eos_token_id": [7, 8], "temperature": 0.7, "top_k": 20, "_from_model": True}
    store(tmp_path, changed(use_cache=True, _name_or_path="somewhere"), generation)
    config = read_config(tmp_path)
    assert config.extra["_name_or_path"] == "somewhere"
    assert config.generation_extra == {"temperature": 0.7, "top_k": 20}
    write_config(config, tmp_path / "deep" / "copy")
    assert read_config(tmp_path / "deep" / "copy") == config
    written = json.loads((tmp_path / "deep" / "copy" / "config.json").read_text())
    write_config(config, tmp_path / "half", "bfloat16")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert written["torch_dtype"] == "float32" and written["model_type"] == "qwen2"
    assert written["eos_token_id"] == [7, 8] and "layer_types" not in written
    assert sorted(path.name for path in (tmp_path / "deep" / "copy").iterdir()) == [
        "config.json",
        "generation_config.json",
    ]


@pytest.mark.parametrize(
    ("in_config", "in_generation", "expected"),
    [
        (2, None, (2,)),
        ([2, 5], None, (2, 5)),
        (2, {"eos_token_id": [7, 8]}, (7, 8)),
        (2, {"eos_token_id": 9}, (9,)),
        (2, {"eos_token_id": None}, (2,)),
        (2, {"temperature": 1.0}, (2,)),
        (WITHOUT, {"eos_token_id": [7, 7, 8]}, (7, 8)),
        (None, None, ()),
        (WITHOUT, {}, ()),
    ],
)
def test_the_generation_file_wins_for_end_tokens(
    tmp_path: Path, in_config: Any, in_generation: Any, expected: tuple[int, ...]
) -> None:
    assert read_config(store(tmp_path, changed(eos_token_id=in_config), in_generation)).eos_token_ids == expected


@pytest.mark.parametrize(
    ("name", "heads", "kv_heads", "layers", "tied"),
    [("0.5B", 14, 2, 24, True), ("1.5B", 12, 2, 28, True), ("3B", 16, 2, 36, True), ("7B", 28, 4, 28, False)],
)
def test_published_configs(shared_data: Path, name: str, heads: int, kv_heads: int, layers: int, tied: bool) -> None:
    path = shared_data / "qwen2.5" / f"Qwen2.5-{name}-Instruct.config.json"
    config = config_from_dict(json.loads(path.read_text()), str(path))
    assert (config.num_attention_heads, config.num_key_value_heads) == (heads, kv_heads)
    assert (config.num_hidden_layers, config.tie_word_embeddings) == (layers, tied)
    assert config.head_dim == (64 if name == "0.5B" else 128)
    assert config.rope_theta == 1e6 and config.eos_token_ids == (151645,)


def test_replace_keeps_the_head_width_consistent() -> None:
    config = config_from_dict(SMALL, "small")
    assert config.replace(hidden_size=64).head_dim == 16
    assert config.replace(num_attention_heads=8).head_dim == 4
    assert config.replace(hidden_size=64, num_attention_heads=16).head_dim == 4
    assert config.replace(num_hidden_layers=5).head_dim == 8
    assert dataclasses.replace(config, hidden_size=64, head_dim=16).head_dim == 16
    with pytest.raises(UserError, match="head_dim 8"):
        dataclasses.replace(config, hidden_size=64)
    with pytest.raises(UserError, match="hidden_size 30"):
        config.replace(hidden_size=30)


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    optional = {"architectures", "model_type", "torch_dtype", "attention_dropout", "hidden_act", "initializer_range"}
    optional |= {"bos_token_id", "eos_token_id", "max_window_layers", "sliding_window", "use_sliding_window"}
    for key in SMALL.keys() - optional:
        with pytest.raises(UserError, match=f"config.json.*{key} is missing"):
            read_config(store(tmp_path, changed(**{key: WITHOUT})))


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_size": "32"}, 'hidden_size is "32"'),
        ({"hidden_size": True}, "hidden_size is true"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_key_value_heads": None}, "num_key_value_heads is null"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
        ({"rope_theta": float("inf")}, "rope_theta is Infinity"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1"),
        ({"eos_token_id": "2"}, 'eos_token_id is "2"'),
        ({"eos_token_id": [2, "3"]}, "eos_token_id is "),
        ({"eos_token_id": 64}, "eos_token_id 64 is outside the vocabulary of 64"),
        ({"bos_token_id": -1}, "bos_token_id is -1"),
        ({"hidden_size": 30}, "hidden_size 30 is not a multiple of num_attention_heads 4"),
        ({"hidden_size": 12}, "is odd"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"head_dim": 16}, "head_dim 16"),
        ({"model_type": "mistral"}, "model_type is 'mistral'"),
        ({"model_type": WITHOUT, "architectures": WITHOUT}, "model_type is None"),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "architectures is "),
        ({"architectures": "Qwen2ForCausalLM"}, "architectures is "),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu"'),
        ({"use_sliding_window": True}, "use_sliding_window is true"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_scaling has rope_type 'yarn' with factor, only"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "remove it if it was added for longer contexts",
        ),
        ({"rope_scaling": 8.0}, "rope_scaling is 8.0, expected an object"),
        ({"rope_scaling": LLAMA3 | {"beta_fast": 32}}, "rope_type 'llama3' with beta_fast"),
        ({"rope_scaling": LLAMA3 | {"factor": 0.5}}, "rope_scaling: factor 0.5, low_freq_factor 1.0 and"),
        ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4}}, "low_freq_factor 4.0 and high_freq_factor 4.0 are no"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling: key low_freq_factor is missing"),
        (
            {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": 64.5}},
            "original_max_position_embeddings is 64.5",
        ),
        (
            {"rope_parameters": {"rope_theta": 300, "rope_type": "default"}, "rope_scaling": LLAMA3},
            "rope_scaling differs",
        ),
        ({"rope_parameters": {"rope_theta": 300.0, "rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
        ({"rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 300.0}}}, "full_attention"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters: key rope_theta is missing"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "rope_theta is 300 but rope_parameters says 1000000.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
    ],
)
def test_odd_values(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UserError) as caught:
        config_from_dict(changed(**changes), "here/config.json")
    assert complaint in str(caught.value)
    assert str(caught.value).startswith("here/config.json") and "\n" not in str(caught.value)


def test_values_that_change_nothing() -> None:
    plain: list[dict[str, Any]] = [
        {"model_type": WITHOUT},
        {"rope_scaling": {"rope_type": "default"}},
        {"rope_parameters": {"rope_theta": 300.0, "partial_rotary_factor": 1.0}},
    ]
    for changes in plain:
        config = config_from_dict(changed(**changes), "here/config.json")
        assert config.rope_theta == 300.0 and config.head_dim * config.num_attention_heads == 32


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"a": 1,\n "b" 2}', "line 2 is not valid JSON"),
        ("[1]", "expected a JSON object, found list"),
        (json.dumps(SMALL | {"eos_token_id": 64}), "eos_token_id 64 is outside"),
        (json.dumps(SMALL | {"eos_token_id": "x"}), 'eos_token_id is "x"'),
    ],
)
def test_unreadable_files(tmp_path: Path, content: str, complaint: str) -> None:
    for name in ("config.json", "generation_config.json"):
        store(tmp_path, SMALL, {})
        (tmp_path / name).write_text(content)
        with pytest.raises(UserError, match=f"{name}.*{complaint}"):
            read_config(tmp_path)
