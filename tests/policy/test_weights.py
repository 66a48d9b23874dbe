"""Tests that weights survive a round trip, and that a folder that is not exactly the model is refused when opened."""

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from thresher.common.errors import UserError
from thresher.policy.weights import INDEX, SINGLE, read_weights, write_weights

EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def make(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        EMBED: torch.randn(10, 4, generator=generator),
        "model.layers.0.mlp.up_proj.weight": torch.randn(6, 4, generator=generator),
        "model.layers.0.bias": torch.randn(3, generator=generator).bfloat16(),
        "model.norm.weight": torch.randn(4, generator=generator).half(),
        "model.empty": torch.zeros(0, 4),
        "model.scalar": torch.tensor(2.5),
    }


def shapes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def assert_same(folder: Path, expected: dict[str, torch.Tensor], **options: Any) -> None:
    found = dict(read_weights(folder, shapes(expected), **options))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


def refusal(folder: Path, expected: dict[str, torch.Size], **options: Any) -> str:
    """Return the error message with which the call itself refuses to read, before any tensor is requested."""
    with pytest.raises(UserError) as caught:
        read_weights(folder, expected, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("limit", "shards"), [(1, 6), (100, 3), (160, 2), (256, 2), (273, 2), (274, 1)])
def test_sharded_roundtrip(tmp_path: Path, limit: int, shards: int) -> None:
    """The tensors take 160, 96, 6, 8, 0 and 4 bytes: 274 in all, in this order."""
    tensors = make()
    write_weights(tmp_path, tensors, max_shard_bytes=limit)
    assert_same(tmp_path, tensors)
    if shards == 1:
        assert names(tmp_path) == [SINGLE]
        assert b'"__metadata__":{"format":"pt"}' in (tmp_path / SINGLE).read_bytes()
        return
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    assert names(tmp_path) == [*files, INDEX]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == 274
    for file in files:
        in_shard = load_file(tmp_path / file)
        assert {name for name, shard in index["weight_map"].items() if shard == file} == in_shard.keys()
        assert sum(tensor.nbytes for tensor in in_shard.values()) <= limit or len(in_shard) == 1


def test_views_of_a_fused_tensor_and_parameters_are_written(tmp_path: Path) -> None:
    """The model keeps q, k and v in one parameter and saves slices of it; non-contiguous views become contiguous."""
    fused = torch.nn.Parameter(torch.arange(24.0).reshape(6, 4))
    tensors = {"q": fused.data[:3], "k": fused.data[3:5], "v": fused.data[5:], "t": torch.rand(3, 5).t()}
    write_weights(tmp_path, {**tensors, "p": torch.nn.Parameter(torch.ones(2))})
    assert_same(tmp_path, {**tensors, "p": torch.ones(2)})


def test_read_tensors_are_independent_of_a_later_write(tmp_path: Path) -> None:
    first, second = make(0), make(1)
    write_weights(tmp_path, first)
    stream = read_weights(tmp_path, shapes(first))
    name, tensor = next(stream)
    write_weights(tmp_path, second)
    assert torch.equal(tensor, first[name])


@pytest.mark.parametrize(("old", "new"), [(10**6, 10**6), (10**6, 100), (100, 10**6), (100, 100), (1, 100), (100, 1)])
@pytest.mark.parametrize("calls_before_the_end", [*range(8), 99])
def test_an_interrupted_write_never_mixes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: int, new: int, calls_before_the_end: int
) -> None:
    """After any number of renames the folder holds the old weights or the new ones, or is refused."""
    write_weights(tmp_path, make(0), max_shard_bytes=old)
    real, calls = os.replace, 0

    def replace(source: Any, target: Any) -> None:
        nonlocal calls
        calls += 1
        if calls > calls_before_the_end:
            raise KeyboardInterrupt
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    try:
        write_weights(tmp_path, make(1), max_shard_bytes=new)
        finished = True
    except KeyboardInterrupt:
        finished = False
    assert not any(name.endswith(".tmp") for name in names(tmp_path))
    try:
        found = dict(read_weights(tmp_path, shapes(make())))
    except UserError:
        assert not finished and new <= 100 and old != 10**6
        return
    if finished:  # files of the other layout and leftover shards are deleted
        count = {10**6: 1, 100: 3, 1: 6}[new]
        assert len(names(tmp_path)) == count + (count > 1)
    seed = 1 if finished else 0
    assert all(torch.equal(found[name], tensor) for name, tensor in make(seed).items())


def test_transformers_reads_ours_and_we_read_its(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, **heads}
    config = transformers.Qwen2Config(**sizes, tie_word_embeddings=True)
    torch.manual_seed(0)
    model = transformers.Qwen2ForCausalLM(config)
    state = {name: tensor for name, tensor in model.state_dict().items() if name != HEAD}
    model.save_pretrained(tmp_path / "one")
    model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    assert len(names(tmp_path / "many")) > 4
    for layout in ("one", "many"):
        assert_same(tmp_path / layout, state, optional={HEAD})
    for limit in (10**9, 20_000):
        config.save_pretrained(tmp_path / str(limit))
        write_weights(tmp_path / str(limit), state, max_shard_bytes=limit)
        again = transformers.Qwen2ForCausalLM.from_pretrained(tmp_path / str(limit))
        assert all(torch.equal(tensor, state[name]) for name, tensor in again.state_dict().items() if name != HEAD)
        assert torch.equal(again.lm_head.weight, state[EMBED])


@pytest.mark.parametrize("limit", [10**6, 100])
def test_names_and_shapes_are_strict(tmp_path: Path, limit: int) -> None:
    tensors = make()
    write_weights(tmp_path, tensors, max_shard_bytes=limit)
    expected = shapes(tensors)
    message = refusal(tmp_path, {**expected, "model.more": torch.Size([2])})
    assert "tensor model.more is missing" in message and str(tmp_path) in message
    fewer = {name: shape for name, shape in expected.items() if name != "model.norm.weight"}
    message = refusal(tmp_path, fewer)
    assert "tensor model.norm.weight is not part of the model" in message and ".safetensors" in message
    for shape in ([4, 10], [10, 5], [40], [10, 4, 1]):
        message = refusal(tmp_path, {**expected, EMBED: torch.Size(shape)})
        assert f"tensor {EMBED} has shape [10, 4], the config specifies {shape}" in message
        assert ".safetensors:" in message


@pytest.mark.parametrize("limit", [10**6, 100])
def test_a_copy_of_a_tied_head(tmp_path: Path, limit: int) -> None:
    tensors = make()
    expected = shapes(tensors)
    write_weights(tmp_path, {**tensors, HEAD: tensors[EMBED].clone()}, max_shard_bytes=limit)
    assert f"tensor {HEAD} is not part" in refusal(tmp_path, expected)
    assert_same(tmp_path, tensors, optional={HEAD})
    # An untied head is an ordinary tensor, equal to the embedding or not.
    assert_same(tmp_path, {**tensors, HEAD: tensors[EMBED]})
    for other in (tensors[EMBED] + 1e-6, tensors[EMBED].bfloat16(), tensors[EMBED][:9].clone()):
        write_weights(tmp_path, {**tensors, HEAD: other}, max_shard_bytes=limit)
        assert f"tensor {HEAD} differs from {EMBED}" in refusal(tmp_path, expected, optional={HEAD})
        assert_same(tmp_path, {**tensors, HEAD: other})
    write_weights(tmp_path, tensors, max_shard_bytes=limit)
    wanted = {**expected, HEAD: torch.Size([10, 4])}
    assert f"tensor {HEAD} is missing" in refusal(tmp_path, wanted)
    assert dict(read_weights(tmp_path, wanted, optional={HEAD})).keys() == tensors.keys()


def test_a_truncated_file_is_refused_at_every_length(tmp_path: Path) -> None:
    tensors = make()
    write_weights(tmp_path, tensors)
    whole = (tmp_path / SINGLE).read_bytes()
    for length in [*range(24), *range(24, len(whole), 7), len(whole) - 1]:
        (tmp_path / SINGLE).write_bytes(whole[:length])
        message = refusal(tmp_path, shapes(tensors))
        assert message.startswith(f"{tmp_path / SINGLE}: truncated"), (length, message)
    assert "inside tensor" in message
    (tmp_path / SINGLE).write_bytes(whole + b"\x00")
    assert "1 bytes too long" in refusal(tmp_path, shapes(tensors))
    (tmp_path / SINGLE).unlink()
    write_weights(tmp_path, tensors, max_shard_bytes=100)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-5])
    message = refusal(tmp_path, shapes(tensors))
    assert str(shard) in message and "at least 5 bytes are missing" in message
    shard.unlink()
    assert f"{shard}: no such shard" in refusal(tmp_path, shapes(tensors))


def entry(begin: Any = 0, end: int = 16, dtype: str = "F32", shape: Any = (4,)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape) if isinstance(shape, tuple) else shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "complaint"),
    [
        ({"w": entry()}, None),
        ({"w": entry(), "__metadata__": {"format": "pt"}}, None),
        ({"w": entry(4, 20)}, "tensor w lies at bytes 4 to 20"),
        ({"w": entry(shape=(5,))}, "does not fit its shape [5]"),
        ({"w": entry(), "x": entry(8, 24)}, "tensor x lies at bytes 8 to 24"),
        ({"w": entry(0, 64, shape=(16,))}, "truncated inside tensor w"),
        ({"w": entry(dtype="I8", shape=(16,))}, "tensor w is I8"),
        ({"w": entry(shape="4")}, "corrupt header"),
        ({"w": entry([0], 16)}, "tensor w lies at"),
        ({"w": {"dtype": "F32", "shape": [4]}}, "corrupt header"),
        ({}, "16 bytes too long"),
        ([], "expected a JSON object"),
        (b"{nonsense", "not valid JSON"),
    ],
)
def test_corrupt_headers(tmp_path: Path, header: Any, complaint: str | None) -> None:
    spelled = header if isinstance(header, bytes) else json.dumps(header).encode()
    (tmp_path / SINGLE).write_bytes(struct.pack("<Q", len(spelled)) + spelled + b"\x00" * 16)
    if complaint is None:
        assert_same(tmp_path, {"w": torch.zeros(4)})
    else:
        message = refusal(tmp_path, {"w": torch.Size([4])})
        assert complaint in message and str(tmp_path / SINGLE) in message


SHARD = "model-0000{}-of-00003.safetensors"


@pytest.mark.parametrize(
    ("name", "file", "complaint"),
    [
        (EMBED, SHARD.format(2), f"tensor {EMBED} is missing, though"),
        (EMBED, SHARD.format(9), "no such shard"),
        (EMBED, f"../{SHARD.format(1)}", "expected a file in the same folder"),
        (EMBED, 1, "expected weight_map to map tensors to files"),
        ("model.norm.weight", None, "tensor model.norm.weight is not placed there"),
    ],
)
def test_an_index_that_disagrees_with_its_shards(tmp_path: Path, name: str, file: Any, complaint: str) -> None:
    tensors = make()
    write_weights(tmp_path, tensors, max_shard_bytes=100)
    index = json.loads((tmp_path / INDEX).read_text())
    files = index["weight_map"] | {name: file}
    index["weight_map"] = {tensor: shard for tensor, shard in files.items() if shard is not None}
    (tmp_path / INDEX).write_text(json.dumps(index))
    assert complaint in refusal(tmp_path, shapes(tensors))
    (tmp_path / INDEX).write_text("{}")
    assert "expected weight_map" in refusal(tmp_path, shapes(tensors))


def test_folders_without_weights(tmp_path: Path) -> None:
    assert "no such folder" in refusal(tmp_path / "nowhere", {})
    (tmp_path / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 988097824\n")
    assert "Git LFS pointer" in refusal(tmp_path, {})
    (tmp_path / SINGLE).unlink()
    assert f"holds neither {SINGLE} nor {INDEX}" in refusal(tmp_path, {})
    (tmp_path / ".model.safetensors.0000.tmp").write_bytes(b"left by a kill")
    assert f"holds neither {SINGLE} nor {INDEX}" in refusal(tmp_path, {})
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"")
    assert "only pytorch_model.bin, which is not read" in refusal(tmp_path, {})
    (tmp_path / INDEX).write_text("{")
    assert f"{INDEX}: line 1 is not valid JSON" in refusal(tmp_path, {})
    (tmp_path / SINGLE).mkdir()
    assert f"{SINGLE}: cannot be read" in refusal(tmp_path, {})


@pytest.mark.parametrize("name", [SINGLE, INDEX, "model-00001-of-00001.safetensors"])
def test_pipes_and_links_to_nothing_are_not_waited_for_or_passed_over(tmp_path: Path, name: str) -> None:
    if name.startswith("model-"):
        for impossible in ("\ud800", "a\0b"):
            (tmp_path / INDEX).write_text(json.dumps({"weight_map": {EMBED: impossible}}))
            assert "no such shard" in refusal(tmp_path, {})
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": {EMBED: name}}))
    os.mkfifo(tmp_path / name)
    assert f"{name}: expected a regular file, found a pipe" in refusal(tmp_path, {})
    (tmp_path / name).unlink()
    (tmp_path / name).symlink_to(tmp_path / "nowhere")
    assert f"{name}: is a link to a file that does not exist" in refusal(tmp_path, {})
