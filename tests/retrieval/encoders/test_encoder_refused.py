"""Settings and folders that an encoder is not made of, each refused in one sentence."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import encoder_folders as folders
import pytest
import torch
import transformers

from thresher.retrieval.encoders.learned import load_encoder
from thresher.retrieval.encoders.tokenizer import load_wordpiece


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "no file says how its vectors are made (pooling is unknown); give pooling (mean or cls) and normalize"),
        ({"pooling": "cls"}, "no file says how its vectors are made (normalize is unknown)"),
        ({"pooling": "max", "normalize": True}, "pooling is 'max' (given), expected mean or cls"),
        ({"pooling": "cls", "normalize": 1}, "normalize is 1 (given), expected true or false"),
        ({"pooling": "cls", "normalize": True, "query_prefix": 3}, "query_prefix is 3 (given), expected a string"),
        ({"pooling": "cls", "normalize": True, "max_length": 71}, "max_length is 71 (given), expected 3 to 70 tokens"),
        ({"pooling": "cls", "normalize": True, "max_length": 2}, "max_length is 2 (given), expected 3 to 70 tokens"),
        ({"pooling": "cls", "normalize": True, "batch_tokens": 0}, "batch_tokens is 0; expected at least 1"),
        ({"device": "tpu"}, "device is 'tpu'; expected cpu, cuda or cuda:N"),
        ({"device": "meta"}, "device is 'meta'; expected cpu, cuda or cuda:N"),
        ({"device": "cuda:99"}, "device is 'cuda:99', but torch sees"),
    ],
)
def test_settings_that_are_refused(plain: Path, given: dict[str, Any], said: str) -> None:
    assert said in folders.refusal(lambda: load_encoder(plain, **given))


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ({"pooling": {"pooling_mode_max_tokens": True}}, "the pooling is max_tokens, expected mean or cls"),
        (
            {"pooling": {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}},
            "the pooling is cls_token and mean_tokens, expected mean or cls",
        ),
        ({"pooling": {}}, "the pooling is None, expected mean or cls"),
        ({"pooling": {"pooling_mode": "mean", "include_prompt": False}}, "include_prompt is false"),
        (
            {"pooling": {"pooling_mode": "mean", "word_embedding_dimension": 64}},
            "word_embedding_dimension is 64, but config.json says 32",
        ),
        ({"top": {"similarity_fn_name": "euclidean"}}, "similarity_fn_name is 'euclidean', expected cosine or dot"),
        ({"sentence": {"do_lower_case": True}}, "do_lower_case is true"),
        ({"sentence": {"max_seq_length": 512}}, "max_length is 512 (sentence_bert_config.json), expected 3 to 70"),
        ({"sentence": {"max_seq_length": "all"}}, "max_length is 'all' (sentence_bert_config.json)"),
    ],
)
def test_layouts_that_are_refused(copy: Callable[[str], Path], layout: dict[str, Any], said: str) -> None:
    folder = folders.lay_out(copy("any"), "Transformer", "Pooling", **layout)
    assert said in folders.refusal(lambda: load_encoder(folder))


def test_modules_that_are_refused(copy: Callable[[str], Path]) -> None:
    folder = folders.lay_out(copy("any"), "Transformer", "Pooling", "Dense")
    assert "modules.json: the module Dense is not supported" in folders.refusal(lambda: load_encoder(folder))
    for bad in ("{", '{"type": "a.Pooling"}', '[{"type": "a.Transformer"}]', "[1]"):
        (folder / "modules.json").write_text(bad)
        assert "modules.json: expected a JSON list" in folders.refusal(lambda: load_encoder(folder)), bad


def spoil(name: str, content: bytes | None) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)

    return change


def no_tokenizer(folder: Path) -> None:
    for file in (*folder.glob("tokenizer*"), *folder.glob("vocab*")):
        file.unlink()


def vocabulary(text: str, config: dict[str, Any]) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "tokenizer.json").unlink()
        (folder / "vocab.txt").write_text(text)
        folders.write(folder / "tokenizer_config.json", config)

    return change


def without_special_tokens(folder: Path) -> None:
    record = json.loads((folder / "tokenizer.json").read_text())
    folders.write(folder / "tokenizer.json", record | {"post_processor": None})


LOWER = {"do_lower_case": True}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (spoil("config.json", None), "config.json: no such file"),
        (spoil("config.json", b"{"), "config.json: line 1 is not valid JSON"),
        (spoil("model.safetensors", None), "holds neither model.safetensors nor"),
        (spoil("model.safetensors", b"\x10"), "truncated or not safetensors"),
        (spoil("tokenizer.json", b"{}"), "tokenizer.json: not a tokenizers file"),
        (no_tokenizer, "holds neither tokenizer.json nor vocab.txt"),
        (without_special_tokens, "puts no token of its own before and after a text"),
        (vocabulary("\n".join(folders.SPECIAL), {}), "do_lower_case is None, expected true or false"),
        (vocabulary("\n".join(folders.SPECIAL[:3]), LOWER), "vocab.txt: lacks the token [SEP]"),
        (
            vocabulary("\n".join([*folders.VOCABULARY, "more"]), LOWER),
            f"has {len(folders.VOCABULARY) + 1} tokens, but the model {len(folders.VOCABULARY)}",
        ),
    ],
)
def test_bad_folders(copy: Callable[[str], Path], change: Callable[[Path], None], said: str) -> None:
    folder = copy("e5-base")
    change(folder)
    found = folders.refusal(lambda: load_encoder(folder))
    assert said in found and str(folder) in found


def test_damaged_numbers(copy: Callable[[str], Path]) -> None:
    folder = copy("e5-base")
    model = transformers.BertModel.from_pretrained(folder)
    bias = model.encoder.layer[1].output.dense.bias
    with torch.no_grad():
        bias[3] = torch.nan
    model.save_pretrained(folder)
    assert "tensor encoder.layer.1.output.dense.bias holds numbers that are not finite" in folders.refusal(
        lambda: load_encoder(folder)
    )
    with torch.no_grad():
        model.encoder.layer[1].output.LayerNorm.weight.fill_(3e38)
        bias[3] = 0.0
    model.save_pretrained(folder)
    assert "makes vectors that are not finite" in folders.refusal(
        lambda: load_encoder(folder).encode_passages(folders.TEXTS)
    )


def test_a_vocabulary_much_smaller_than_the_model_is_anothers(tmp_path: Path) -> None:
    size = len(folders.VOCABULARY)
    folders.save_tokenizer(tmp_path)
    load_wordpiece(tmp_path, size + 127, 20)
    assert f"has {size} tokens, but the model {size + 128}" in folders.refusal(
        lambda: load_wordpiece(tmp_path, size + 128, 20)
    )


def test_half_a_pair(tmp_path: Path) -> None:
    folder = folders.dpr_pair(tmp_path / "dpr")
    said = folders.refusal(lambda: load_encoder(folder / "ctx_encoder"))
    assert "holds one half of DPR (DPRContextEncoder); put both halves into one folder" in said
    (folder / "ctx_encoder").rename(folder / "spare")
    assert "ctx_encoder: no such folder; DPR's encoders are a pair" in folders.refusal(lambda: load_encoder(folder))
    shutil.copytree(folder / "question_encoder", folder / "ctx_encoder")
    assert "holds a DPRQuestionEncoder, expected a DPRContextEncoder" in folders.refusal(lambda: load_encoder(folder))


def test_halves_of_unlike_width(tmp_path: Path) -> None:
    folder = folders.dpr_pair(tmp_path / "dpr")
    shutil.rmtree(folder / "ctx_encoder")
    config = transformers.DPRConfig(**folders.SIZES | {"hidden_size": 16})
    folders.save_model(folder / "ctx_encoder", folders.random_model(transformers.DPRContextEncoder, config))
    assert "queries get 32 dimensions and passages 16" in folders.refusal(lambda: load_encoder(folder))


def test_no_folder(tmp_path: Path) -> None:
    assert "no such folder; give the folder of an encoder" in folders.refusal(lambda: load_encoder(tmp_path / "none"))
