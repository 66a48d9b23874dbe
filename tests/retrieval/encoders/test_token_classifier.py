"""Classifiers of tokens against `transformers` with random weights, texts in stretches, and refusals."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import encoder_folders as folders
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from thresher.retrieval.encoders.heads import TokenClassifier, load_token_classifier


def bert() -> Any:
    return folders.random_model(transformers.BertForTokenClassification, folders.bert_config(num_labels=2))


def distilbert() -> Any:
    config = transformers.DistilBertConfig(**folders.DISTILBERT_SIZES, num_labels=2)
    return folders.random_model(transformers.DistilBertForTokenClassification, config)


def save(folder: Path, name: str) -> tuple[Path, Any]:
    if name == "xlm-r":
        return folders.save_xlm_roberta(folder, transformers.XLMRobertaForTokenClassification, num_labels=2)
    return folders.save_model(folder, model := MODELS[name]()), model


MODELS: dict[str, Callable[[], Any]] = {"bert": bert, "distilbert": distilbert}


def theirs(folder: Path, model: Any, text: str) -> list[tuple[str, float]]:
    """Words and means with transformers alone, of a text that fits, in the model's dtype."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(text, return_tensors="pt", return_offsets_mapping=True)
    offsets = batch.pop("offset_mapping")[0].tolist()
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        keep = model(**batch).logits[0].softmax(-1)[:, 1].tolist()
    found = []
    for match in re.finditer(r"\S+", text):
        values = [p for (a, b), p in zip(offsets, keep, strict=True) if match.start() < b <= match.end()]
        found.append((match[0], sum(values) / len(values) if values else 0.0))
    return found


@pytest.mark.parametrize("name", [*MODELS, "xlm-r"])
def test_words_and_their_probabilities(name: str, tmp_path: Path) -> None:
    """float64 is the truth, transformers in float32 the measure."""
    folder, model = save(tmp_path, name)
    texts = ["The mayor of the city, born  by the river.", "a", "Reiß das Étui, 東京! q??", "the: 1994"]
    found = load_token_classifier(folder).words(texts)
    other = [theirs(folder, model, text) for text in texts]
    truth = [theirs(folder, model.double(), text) for text in texts]
    assert [[word for word, _ in one] for one in found] == [[word for word, _ in one] for one in truth]
    folders.check_near(
        *(torch.tensor([p for one in x for _, p in one], dtype=torch.float64) for x in (found, other, truth))
    )
    assert found[0][4][0] == "city,"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("models") / "tokens", "bert")[0]


@pytest.fixture(scope="module")
def classifier(folder: Path) -> TokenClassifier:
    return load_token_classifier(folder)


def test_a_long_text_is_read_in_stretches_that_end_where_words_do(classifier: TokenClassifier) -> None:
    """68 tokens a stretch: 22 words of three tokens. Each stretch is as if it stood alone; a word that is longer than
    one is cut, and its mean is over all of it."""
    words = [f"{a}b{c}" for a in "xyzq" for c in "0123456789k"]
    (found,) = classifier.words([" ".join(words)])
    alone = classifier.words([" ".join(words[start : start + 22]) for start in range(0, len(words), 22)])
    assert [word for word, _ in found] == words
    torch.testing.assert_close(
        [p for _, p in found], [p for one in alone for _, p in one], rtol=0, atol=1e-6, check_stride=False
    )
    (longest,) = classifier.words(["12" * 45 + " a"])
    assert [word for word, _ in longest] == ["12" * 45, "a"]
    first, second = classifier.words(["12" * 34, "12" * 11 + " a"])
    # 90 tokens, 68 of them in the first stretch; the rest, with ##1 for its first token, is not the text "1212..".
    assert first[0][1] != longest[0][1] != second[0][1]
    assert 0 < longest[0][1] < 1  # bound: a probability


def test_no_text_depends_on_those_beside_it_and_none_is_no_text(classifier: TokenClassifier) -> None:
    texts = folders.TEXTS
    together = classifier.words(texts)
    assert together[2] == [] and classifier.words([]) == [] and classifier.words([" \n"]) == [[]]
    for text, one in zip(texts, together, strict=True):
        (alone,) = classifier.words([text])
        assert [word for word, _ in alone] == [word for word, _ in one] == text.split()
        torch.testing.assert_close([p for _, p in alone], [p for _, p in one], rtol=0, atol=1e-6)
    assert classifier.words(["\ud800 a"])[0][1][0] == "a"
    assert classifier.count_tokens(["the city", "", "zx"]) == [2, 0, 2]


def refused(folder: Path, said: str) -> None:
    found = folders.refusal(lambda: load_token_classifier(folder).words(["a"]))
    assert said in found and str(folder) in found


def test_folders_that_classify_no_tokens_are_refused(folder: Path, tmp_path: Path) -> None:
    refused(folders.save_model(tmp_path / "bare"), "holds a BertModel, expected one ..ForTokenClassification")
    pairs = folders.random_model(transformers.BertForSequenceClassification, folders.bert_config(num_labels=2))
    refused(folders.save_model(tmp_path / "pairs", pairs), "holds a BertForSequenceClassification")
    config = json.loads((tmp_path / "bare" / "config.json").read_text())
    del config["architectures"]
    folders.write(tmp_path / "bare" / "config.json", config)
    refused(tmp_path / "bare", "tensor classifier.weight is missing, so this is an encoder without a token classifier")
    three = folders.random_model(transformers.BertForTokenClassification, folders.bert_config(num_labels=3))
    refused(folders.save_model(tmp_path / "three", three), "its classifier has 3 outputs, expected 2")
    refused(tmp_path / "nowhere", "config.json: no such file")
    weights = load_file(folder / "model.safetensors")
    weights["bert.encoder.layer.2.output.LayerNorm.weight"][:] = 3e38
    broken = folders.save_model(tmp_path / "broken", bert())
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    refused(broken, "makes probabilities that are not finite; its weights are damaged")
