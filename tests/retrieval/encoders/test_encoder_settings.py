"""What a model's folder is taken for: its tokenizer, and the settings that its files give."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import encoder_folders as folders
import pytest
import transformers

from thresher.retrieval.encoders.learned import read_settings
from thresher.retrieval.encoders.tokenizer import load_wordpiece

# Tokenizers


@pytest.mark.parametrize(
    "settings",
    [
        {"do_lower_case": True},
        {"do_lower_case": False},
        {"do_lower_case": True, "strip_accents": False},
        {"do_lower_case": False, "strip_accents": True, "tokenize_chinese_chars": False},
    ],
)
def test_a_vocabulary_without_tokenizer_json(settings: dict[str, Any], tmp_path: Path) -> None:
    folders.save_tokenizer(tmp_path, **settings)
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path)(folders.TEXTS)["input_ids"]
    assert load_wordpiece(tmp_path, len(folders.VOCABULARY), 1000).encode(folders.TEXTS) == (expected, 0)
    (tmp_path / "tokenizer.json").unlink()
    folders.write(tmp_path / "tokenizer_config.json", settings)
    (tmp_path / "vocab.txt").write_text("\n".join(folders.VOCABULARY) + "\n", "utf-8")
    assert load_wordpiece(tmp_path, len(folders.VOCABULARY), 1000).encode(folders.TEXTS) == (expected, 0)


def test_padding_and_truncation_in_the_file_are_switched_off(copy: Callable[[str], Path]) -> None:
    folder = copy("model")
    record = json.loads((folder / "tokenizer.json").read_text())
    record["padding"] = {
        "strategy": {"Fixed": 12},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "[PAD]",
    }
    record["truncation"] = {"direction": "Right", "max_length": 12, "strategy": "LongestFirst", "stride": 0}
    folders.write(folder / "tokenizer.json", record)
    (short, long), cut = load_wordpiece(folder, len(folders.VOCABULARY), 20).encode(["the", "the " * 15])
    assert (len(short), len(long), cut) == (3, 17, 0)


# What a folder says


@pytest.mark.parametrize(
    ("layout", "expected", "why"),
    [
        ({"pooling": {"pooling_mode_cls_token": True}}, {"pooling": "cls", "normalize": False}, "no Normalize"),
        ({"pooling": {"pooling_mode": "mean"}, "top": {"similarity_fn_name": "cosine"}}, {"normalize": True}, "cosine"),
        ({"top": {"similarity_fn_name": "dot"}}, {"normalize": False}, "no Normalize"),
        (
            {"top": {"prompts": {"query": "q: ", "document": "d: "}}},
            {"query_prefix": "q: ", "passage_prefix": "d: "},
            "no Normalize",
        ),
        ({"top": {"prompts": {"query": "", "document": ""}}}, {"query_prefix": ""}, "no Normalize"),
        ({"sentence": {"max_seq_length": None}}, {"max_length": 70}, "no Normalize"),
    ],
)
def test_layouts(copy: Callable[[str], Path], layout: dict[str, Any], expected: dict[str, Any], why: str) -> None:
    settings, _ = read_settings(folders.lay_out(copy("any"), "Transformer", "Pooling", **layout), {})
    assert {name: getattr(settings, name) for name in expected} == expected
    assert why in settings.why["normalize"]


def test_a_transformer_in_a_folder_of_its_own(copy: Callable[[str], Path], tmp_path: Path) -> None:
    copy("any").rename(tmp_path / "model")
    top = tmp_path / "top"
    folders.lay_out(top, "Transformer", "Pooling")
    (tmp_path / "model").rename(top / "0_Transformer")
    records = json.loads((top / "modules.json").read_text())
    records[0]["path"] = "0_Transformer"
    folders.write(top / "modules.json", records)
    folders.write(top / "0_Transformer" / "sentence_bert_config.json", {"max_seq_length": 33})
    settings, places = read_settings(top, {})
    assert settings.max_length == 33 and places.query == places.passage == top / "0_Transformer"


def test_what_is_given_wins(copy: Callable[[str], Path]) -> None:
    folder = folders.lay_out(copy("e5-base"), "Transformer", "Pooling", "Normalize", sentence={"max_seq_length": 50})
    given = {"pooling": "cls", "normalize": False, "query_prefix": "", "passage_prefix": None, "max_length": 20}
    settings, _ = read_settings(folder, given)
    assert settings.values() == given | {"passage_prefix": "passage: "}
    assert settings.why["query_prefix"] == "given" and settings.why["passage_prefix"].startswith("E5")


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("e5-base-v2", "E5"),
        ("my-e5-large-tuned", "E5"),
        ("bge-small-en-v1.5", "BGE (English)"),
        ("bge-large-zh", "BGE (Chinese)"),
        ("snapshots/0123abcd", "E5"),  # of models--intfloat--e5-small, see below
        ("multilingual-e5-large-instruct", None),
        ("bge-m3", None),
        ("safe5-base", None),
        ("contriever-msmarco", "Contriever"),
        ("nq_extractive_compressor", "Contriever"),
        ("contrievers", None),
        ("bert-base-uncased", None),
    ],
)
def test_families_by_the_folders_name(plain: Path, tmp_path: Path, name: str, family: str | None) -> None:
    folder = tmp_path / "models--intfloat--e5-small" / name
    shutil.copytree(plain, folder)
    if family is None:
        assert "no file says how its vectors are made (pooling is unknown)" in folders.refusal(
            lambda: read_settings(folder, {})
        )
    else:
        assert read_settings(folder, {})[0].why["pooling"].startswith(family)


def test_families_by_a_file(copy: Callable[[str], Path]) -> None:
    folder = copy("any")
    record = json.loads((folder / "config.json").read_text())
    folders.write(folder / "config.json", record | {"_name_or_path": "BAAI/bge-base-en/"})
    assert read_settings(folder, {})[0].why["pooling"] == "BGE (English), by _name_or_path in config.json"
    folders.write(folder / "config.json", record)
    (folder / "README.md").write_text(
        "---\ntags:\n- mteb\nmodel-index:\n- name: e5-small-v2\n  results:\n---\n# Text\n"
    )
    assert read_settings(folder, {})[0].why["pooling"] == "E5, by README.md"


@pytest.mark.parametrize(("name", "length", "prefix"), [("all-MiniLM-L6-v2", 256, ""), ("e5-base-v2", 512, "query: ")])
def test_published_configs(shared_data: Path, name: str, length: int, prefix: str) -> None:
    settings, _ = read_settings(shared_data / "encoders" / name, {})
    assert (settings.pooling, settings.normalize, settings.max_length) == ("mean", True, length)
    assert settings.query_prefix == prefix


def test_published_tokenizer_and_its_vocabulary_agree(shared_data: Path, tmp_path: Path) -> None:
    source = shared_data / "encoders" / "e5-base-v2"
    expected = load_wordpiece(source, 30522, 512).encode(folders.TEXTS)
    assert expected[0][1] == [101, 1037, 102]
    for name in ("vocab.txt", "tokenizer_config.json"):
        shutil.copy(source / name, tmp_path / name)
    assert load_wordpiece(tmp_path, 30522, 512).encode(folders.TEXTS) == expected
