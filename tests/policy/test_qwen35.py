"""Tests of Qwen3.5's layers: sequences with shared prefixes, the published folder of text and images, and invalid
configs. test_published.py compares forward, gradients, decoding and adapters with transformers'."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from model_cases import make_config, stir
from safetensors.torch import load_file, save_file

from thresher.common.errors import UserError
from thresher.kernels.attention.prefix import PrefixForest
from thresher.kernels.attention.varlen import Varlen
from thresher.policy.config import DeltaShape, ModelConfig, config_from_dict
from thresher.policy.lora import add_lora
from thresher.policy.model import Policy, init_policy, load_policy
from thresher.policy.streamed import StreamedPolicy

IDS = torch.arange(40) * 37 % 255
MTP = "mtp.fc.weight"
TYPES = ("linear_attention", "linear_attention", "full_attention", "linear_attention")


def hybrid_config(**changes: Any) -> ModelConfig:
    own: dict[str, Any] = {"model_type": "qwen3_5_text", "num_hidden_layers": 4, "layer_types": TYPES, "head_dim": 16}
    own |= {"partial_rotary_factor": 0.25, "delta": DeltaShape(2, 4, 8, 6, 4)}
    return make_config(**own | changes)


def hybrid(seed: int = 0, **changes: Any) -> Policy:
    policy: Policy = stir(init_policy(hybrid_config(**changes), seed))
    return policy


def gradients(policy: Policy, hidden_TH: torch.Tensor, weight_TH: torch.Tensor) -> dict[str, torch.Tensor]:
    policy.zero_grad()
    (hidden_TH * weight_TH).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in policy.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("checkpoint", [False, True])
def test_what_is_shared_is_what_is_not(checkpoint: bool) -> None:
    """A trie three segments deep, one shorter than the convolution, in float64: hidden states and gradients."""
    policy = hybrid().double()
    lengths, parents = [70, 2, 5, 9, 1], [-1, 0, 1, 1, 0]
    starts = [0, 70, 72, 77, 86]
    noise = torch.Generator().manual_seed(0)
    ids_T = torch.randint(0, 29, (87,), generator=noise)
    paths = [[0, 1, 2], [0, 1, 3], [0, 4]]
    rows = [torch.cat([torch.arange(starts[s], starts[s] + lengths[s]) for s in path]) for path in paths]
    whole = Varlen([len(row) for row in rows])
    apart_TH = policy.hidden(ids_T[torch.cat(rows)], whole.positions_T, whole)
    weight_TH = torch.randn(apart_TH.shape, generator=noise, dtype=torch.float64)
    wanted = gradients(policy, apart_TH, weight_TH)

    forest = PrefixForest(lengths, parents)
    shared_TH = policy.hidden(ids_T, forest.positions_T, forest, checkpoint)
    # Scores are float32 sums in attention's parts; all else is float64.
    torch.testing.assert_close(shared_TH[torch.cat(rows)], apart_TH, rtol=0, atol=1e-10)
    summed_TH = torch.zeros_like(shared_TH).index_add_(0, torch.cat(rows), weight_TH)
    found = gradients(policy, shared_TH, summed_TH)
    assert (
        found.keys() == wanted.keys() == {name for name, _ in policy.named_parameters()} - {"embed_VH"} | {"embed_VH"}
    )
    for name, slope in found.items():
        assert float((slope - wanted[name]).norm()) <= 1e-9 * float(wanted[name].norm()), name


def test_a_streamed_copy_computes_the_same_bits() -> None:
    """Layers of the two types alternate, each type with its own buffers."""
    policy = hybrid().requires_grad_(False)
    layout = Varlen([len(IDS)])
    ids_T = IDS % 29
    expected_TH = policy.hidden(ids_T, layout.positions_T, layout)
    streamed = StreamedPolicy(policy, "cpu")
    assert torch.equal(streamed.hidden(ids_T, layout.positions_T, layout), expected_TH)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return a folder of text and images as published, cut, and transformers' model of it."""
    transformers = pytest.importorskip("transformers")
    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25}
    sizes = {"vocab_size": 272, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 4}
    linear = {"linear_num_value_heads": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    axes = {"mrope_section": [1, 1, 0], "mrope_interleaved": True}
    ids = {"eos_token_id": 256, "max_position_embeddings": 512, "tie_word_embeddings": True}
    text = sizes | heads | linear | ids | {"rope_parameters": rope | axes}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}
    vision |= {"num_position_embeddings": 16}
    config = transformers.Qwen3_5Config(text_config=text, vision_config=vision, tie_word_embeddings=True)
    theirs = stir(transformers.Qwen3_5ForConditionalGeneration(config)).eval()
    with torch.no_grad():
        for name, parameter in theirs.named_parameters():
            if name.endswith("A_log"):
                parameter.sub_(3)  # so that states last (test_published.py, WITHIN_DELTA)
    folder = tmp_path_factory.mktemp("published")
    theirs.save_pretrained(folder)
    # Published folders also contain weights that predict one more token, which transformers ignores, and several files.
    first, second = (folder / f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    (folder / "model.safetensors").rename(first)
    save_file({MTP: torch.randn(64, 128)}, second)
    weight_map = dict.fromkeys(load_file(first), first.name) | {MTP: second.name}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder, theirs


@pytest.mark.parametrize("adapted", [False, True])
def test_a_folder_of_text_and_images_is_read_and_written_back(
    adapted: bool, published: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, theirs = published
    policy = load_policy(folder)
    with torch.no_grad():
        expected_TV = theirs(input_ids=IDS[None]).logits[0]
    torch.testing.assert_close(policy.logits(IDS), expected_TV, rtol=0, atol=1e-3)
    assert {name.split(".")[0] for name in policy.kept} == {"model", "mtp"}
    assert all(name.startswith(("model.visual.", "mtp.")) for name in policy.kept)
    if adapted:
        add_lora(policy, rank=2, alpha=4)
    policy.save(tmp_path)
    again = type(theirs).from_pretrained(tmp_path)
    saved = dict(again.named_parameters())
    assert all(torch.equal(saved[name], parameter) for name, parameter in theirs.named_parameters())
    assert torch.equal(
        load_file(tmp_path / "model.safetensors")[MTP], load_file(folder / "model-00002-of-00002.safetensors")[MTP]
    )
    first, second = (json.loads((each / "config.json").read_text()) for each in (folder, tmp_path))
    assert first.keys() <= second.keys() | {"transformers_version"}
    for key in ("vision_config", "image_token_id", "model_type", "architectures"):
        assert second[key] == first[key]
    for key in ("layer_types", "linear_num_value_heads", "rope_parameters", "model_type", "head_dim"):
        assert second["text_config"][key] == first["text_config"][key]
    assert load_policy(tmp_path).config == policy.config


def test_configs_that_cannot_be(published: tuple[Path, Any]) -> None:
    table = json.loads((published[0] / "config.json").read_text())

    def changed(**changes: Any) -> dict[str, Any]:
        return table | {"text_config": table["text_config"] | changes}

    assert config_from_dict(table, "here").delta == DeltaShape(4, 8, 8, 8, 4)
    without = {key: value for key, value in table["text_config"].items() if key != "layer_types"}
    assert config_from_dict(table | {"text_config": without}, "here").layer_types[-1] == "full_attention"
    types = table["text_config"]["layer_types"]
    for wrong, why in (
        (
            changed(layer_types=[*types[:3], "sliding_attention"]),
            r"layer_types\[3\] is \"sliding_attention\", expected",
        ),
        (changed(layer_types=types[:3]), "layer_types has 3 entries, num_hidden_layers is 4"),
        (changed(layer_types="linear_attention"), "layer_types is .* expected a list"),
        (changed(linear_num_value_heads=6), "linear_num_value_heads 6 is not a multiple of linear_num_key_heads 4"),
        (changed(linear_key_head_dim=0), "linear_key_head_dim is 0, expected a positive integer"),
        (changed(rope_parameters={"rope_theta": 1e7, "partial_rotary_factor": 0.2}), "3 dimensions; expected an even"),
        (changed(attn_output_gate=False), "attn_output_gate is false, only true is supported"),
        (changed(mamba_ssm_dtype="bfloat16"), "mamba_ssm_dtype is"),
        ({key: value for key, value in table.items() if key != "text_config"}, "key text_config is missing"),
    ):
        with pytest.raises(UserError, match=f"^here: .*{why}"):
            config_from_dict(wrong, "here")
    with pytest.raises(UserError, match="layer_types must all be 'full_attention'"):
        config_from_dict({"model_type": "qwen3", "layer_types": types}, "here")


def test_types_go_on_as_they_begin() -> None:
    config = hybrid_config()
    assert config.replace(num_hidden_layers=6).layer_types == (*TYPES, *TYPES[:2])
    assert (config.delta_layers, config.attention_layers, config.replace(num_hidden_layers=2).attention_layers) == (
        3,
        1,
        0,
    )


def test_adapters_on_one_type_alone() -> None:
    policy = hybrid()
    add_lora(policy, rank=2, alpha=4, targets=["linear_out"])
    assert [len(layer.adapters.by_target) for layer in policy.decoder_layers() if layer.adapters] == [1, 1, 0, 1]
    with pytest.raises(UserError, match="but the model has none"):
        add_lora(init_policy(make_config(), 0), rank=2, alpha=4, targets=["linear_out"])
