"""Test classifiers of pairs and of tokens against `transformers` with random weights: logits, truncation, padding,
labels, texts in stretches, and refusals.

The models are tiny, but chosen to reveal errors: wide weights, no bias at 0 and no norm at 1.
"""

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
from batch_invariance import needs_invariant_rows, weight_shapes
from safetensors.torch import load_file, save_file

from thresher.common.errors import UserError
from thresher.retrieval.encoders.heads import Classifier, TokenClassifier, load_classifier, load_token_classifier
from thresher.retrieval.encoders.transformer import load_bert

CLAIM = "The mayor was born."
PAIRS = [
    ("The mayor of the city was born by the river.", CLAIM),
    ("a", "b"),
    ("", CLAIM),
    (CLAIM, ""),
    ("Reiß das Étui, 東京! [SEP] q??", "the query [CLS]"),
    ("river city " * 60, CLAIM),  # truncated
    ("x" * 150, "the mayor, the river: born 1994"),
    ("the passage\nof the city " * 2, "the mayor, the city, the river " * 2),
]


def bert(**changes: Any) -> Any:
    config = folders.bert_config(**{"id2label": folders.NLI} | changes)
    return folders.random_model(transformers.BertForSequenceClassification, config)


def distilbert(**changes: Any) -> Any:
    config = transformers.DistilBertConfig(**folders.DISTILBERT_SIZES, id2label=folders.NLI, **changes)
    return folders.random_model(transformers.DistilBertForSequenceClassification, config)


def theirs(folder: Path, model: Any, pairs: list[tuple[str, str]], max_tokens: int = 70) -> torch.Tensor:
    """Compute logits as the model's authors do, with transformers alone."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    premises, hypotheses = zip(*pairs, strict=True)
    batch = tokenizer(
        list(premises), list(hypotheses), padding=True, truncation="only_first", max_length=max_tokens,
        return_tensors="pt",
    )  # fmt: skip
    if model.config.model_type == "distilbert":
        batch.pop("token_type_ids", None)
    with torch.no_grad():
        logits: torch.Tensor = model(**batch).logits
    return logits


MODELS: dict[str, Callable[[], Any]] = {
    "bert": bert,
    "minilm-two-way": lambda: bert(id2label={0: "contradiction", 1: "entailment"}, hidden_act="gelu_new"),
    "distilbert": distilbert,
    "deberta-v3": folders.deberta,
    "deberta-v2-convolution": lambda: folders.deberta(conv_kernel_size=3, conv_act="gelu"),
    "deberta-types-positions": lambda: folders.deberta(
        type_vocab_size=2, position_biased_input=True, share_att_key=False, position_buckets=-1, norm_rel_ebd="none"
    ),
    "deberta-groups-wide": lambda: folders.deberta(conv_kernel_size=5, conv_groups=4, max_relative_positions=40),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    folder = folders.save_classifier(tmp_path, model)
    reference_NK, truth_NK = theirs(folder, model, PAIRS), theirs(folder, model.double(), PAIRS)
    classifier = load_classifier(folder)
    found_NK = classifier.logits(PAIRS)
    assert found_NK.dtype == torch.float32
    folders.check_near(found_NK, reference_NK, truth_NK)
    # WordPiece reads 150 letters in a row as one unknown word.
    assert classifier.cut == (2 if "deberta" in name else 1) and classifier.max_tokens == 70
    assert classifier.labels == ("contradiction", "entailment", "neutral")[: truth_NK.shape[1]]
    # A pair alone is as close to float64.
    folders.check_near(torch.cat([classifier.logits([pair]) for pair in PAIRS]), reference_NK, truth_NK)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.save_classifier(tmp_path_factory.mktemp("bert"), bert())


@pytest.fixture
def classifier(folder: Path) -> Classifier:
    return load_classifier(folder)


@pytest.mark.parametrize("name", ["bert", "distilbert"])
def test_a_pair_is_independent_of_batch_composition(name: str, tmp_path: Path) -> None:
    folders.save_classifier(tmp_path, MODELS[name]())
    heads = {tuple(tensor.shape) for tensor in load_file(tmp_path / "model.safetensors").values() if tensor.dim() == 2}
    needs_invariant_rows(weight_shapes(load_bert(tmp_path)) | heads, most=2048)
    classifier = load_classifier(tmp_path)
    pairs = PAIRS + [(f"{premise} {claim}", claim) for premise, claim in PAIRS]
    together_NK = classifier.logits(pairs)
    assert torch.equal(classifier.logits(pairs[::-1]), together_NK.flip(0))
    assert torch.equal(load_classifier(tmp_path, batch_tokens=1).logits(pairs), together_NK)
    for rows in ([0], [5, 3], [2, 9, 2]):
        assert torch.equal(classifier.logits([pairs[row] for row in rows]), together_NK[rows])


def test_a_batch_holds_no_more_tokens_than_it_may(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    classifier = load_classifier(folder, batch_tokens=96)
    shapes: list[tuple[int, int]] = []
    padded = classifier._encoder.padded

    def watched(rows: Any, length: int, types: Any) -> Any:
        shapes.append((len(rows), length))
        return padded(rows, length, types)

    monkeypatch.setattr(classifier._encoder, "padded", watched)
    classifier.logits([(CLAIM * count, CLAIM) for count in (1, 1, 1, 2, 1, 1)])
    assert sum(rows for rows, _ in shapes) == 6 and len(shapes) > 1
    assert all(rows == 1 or rows * length <= 96 for rows, length in shapes)
    assert [length for _, length in shapes] == sorted((length for _, length in shapes), reverse=True)


def test_the_premise_alone_is_cut_by_tokens(folder: Path, classifier: Classifier) -> None:
    """Text after the cut has no effect, text before it does, and the claim is read to its end."""
    short = load_classifier(folder, max_tokens=24)
    words = ["city", "river", "mayor", "passage"] * 3
    pair = (" ".join(words), CLAIM)  # 12 and 7 tokens and 3 special ones leave 2 of 24
    full_NK = short.logits([pair])
    long = " ".join([*words, "the", "the"])
    assert torch.equal(short.logits([(long, CLAIM)]), short.logits([(long + " query" * 1000, CLAIM)]))
    assert short.cut == 1
    assert not torch.equal(short.logits([("the " + pair[0], CLAIM)]), full_NK)
    assert not torch.equal(short.logits([(long, CLAIM.replace("born", "city"))]), short.logits([(long, CLAIM)]))
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    pairs = [(long * 3, CLAIM), ("", CLAIM)]
    reference_NK, truth_NK = theirs(folder, model, pairs, 24), theirs(folder, model.double(), pairs, 24)
    folders.check_near(short.logits(pairs), reference_NK, truth_NK)
    load_classifier(folder, max_tokens=11).logits([("the city", CLAIM)])  # 3 + 7 tokens, and one of the premise
    with pytest.raises(UserError, match=r"the hypothesis 'The mayor was born.' takes 7 tokens, .* max_tokens = 10"):
        load_classifier(folder, max_tokens=10).logits([("the city", CLAIM)])


def test_a_megabyte_and_half_a_character_pair_are_read(classifier: Classifier) -> None:
    found_NK = classifier.logits([("the " * 250_000, CLAIM), ("\ud800 the", CLAIM), ("? the", CLAIM)])
    assert torch.equal(found_NK[1], found_NK[2]) and classifier.cut == 1
    assert classifier.logits([]).shape == (0, 3)


# labels


def named(folder: Path, copy: Path, names: Any) -> Path:
    return folders.edit(folder, copy, id2label={str(number): name for number, name in enumerate(names)})


def test_entailment_is_found_by_its_name(folder: Path, tmp_path: Path) -> None:
    for place, names in (
        (0, ["entailment", "neutral", "contradiction"]),
        (2, ["CONTRADICTION", "NEUTRAL", "ENTAILMENT"]),
        (1, ["Contradiction", " Entailment ", "Neutral"]),
        (2, ["not_entailment", "x", "entailment"]),
    ):
        assert load_classifier(named(folder, tmp_path / "".join(names).strip(), names)).entailment == place


@pytest.mark.parametrize(
    "names", [["LABEL_0", "LABEL_1", "LABEL_2"], None, ["entailment", "Entailment", "x"], list("abc")]
)
def test_labels_that_cannot_be_told_must_be_given(folder: Path, tmp_path: Path, names: list[str] | None) -> None:
    copy = named(folder, tmp_path / "c", names) if names else folders.edit(folder, tmp_path / "c", id2label=...)
    said = folders.refusal(lambda: load_classifier(copy).entailment)
    assert said.startswith(f"{copy}: the labels [")
    assert said.endswith('give labels, the names of its 3 outputs in the model\'s order, one of them "entailment"')
    assert load_classifier(copy, labels=["neutral", "contradiction", "entailment"]).entailment == 2


@pytest.mark.parametrize(
    ("changes", "arguments", "said"),
    [
        ({}, {"labels": ["entailment", "other"]}, "has 3 outputs, but 2 labels are given; give 3"),
        ({"id2label": {"0": "a", "1": "b"}}, {}, "expected names for 0 to 2"),
        ({"id2label": {"0": "a", "1": "b", "2": 3}}, {}, "expected names for 0 to 2"),
        ({"id2label": ["a", "b", "c"]}, {}, "expected names for 0 to 2"),
        ({"model_type": "roberta"}, {}, "model_type is 'roberta', expected one of bert, distilbert, deberta-v2"),
        ({"problem_type": "multi_label_classification"}, {}, "problem_type is 'multi_label_classification'"),
        ({}, {"max_tokens": 71}, "max_tokens is 71; expected 1 to 70, the positions of"),
        ({}, {"max_tokens": 0}, "max_tokens is 0"),
        ({}, {"batch_tokens": 0}, "batch_tokens is 0; expected at least 1"),
        ({}, {"device": "meta"}, "device is 'meta'; expected cpu, cuda or cuda:N"),
    ],
)
def test_what_is_refused(
    folder: Path, tmp_path: Path, changes: dict[str, Any], arguments: dict[str, Any], said: str
) -> None:
    copy = folders.edit(folder, tmp_path / "c", **changes)
    assert said in folders.refusal(lambda: load_classifier(copy, **arguments))


def refused(folder: Path, said: str) -> None:
    assert said in folders.refusal(lambda: load_classifier(folder).logits([("a", "b")]))


def test_weights_without_a_head_or_with_a_damaged_one(folder: Path, tmp_path: Path) -> None:
    copy = folders.edit(folder, tmp_path / "c")
    file = copy / "model.safetensors"
    tensors = load_file(file)

    def write(kept: dict[str, torch.Tensor]) -> None:
        save_file(kept, file, {"format": "pt"})

    for name in ("classifier.weight", "bert.pooler.dense.weight"):
        write({key: value for key, value in tensors.items() if key != name})
        refused(copy, "so this is an encoder without a classifier's head; use a folder that was fine-tuned")
    write({key: value for key, value in tensors.items() if key != "classifier.bias"})
    refused(copy, "tensor classifier.bias is missing")
    write(tensors | {"classifier.bias": torch.zeros(2)})
    refused(copy, "tensor classifier.bias has shape [2], the config specifies [3]")
    write(tensors | {"classifier.bias": torch.full([3], float("nan"))})
    refused(copy, "tensor classifier.bias holds numbers that are not finite")
    huge = {name: torch.full_like(x, 3e38) for name, x in tensors.items() if name.endswith("layer.0.output.dense.bias")}
    write(tensors | huge)
    refused(copy, "produces logits that are not finite")


def test_tokenizers_that_do_not_do(folder: Path, tmp_path: Path) -> None:
    copy = folders.edit(folder, tmp_path / "c")
    record = json.loads((copy / "tokenizer.json").read_text()) | {"post_processor": None}
    (copy / "tokenizer.json").write_text(json.dumps(record))
    refused(copy, "tokenizer.json: adds no tokens of its own around two texts")
    for name in ("tokenizer.json", "vocab.txt"):
        (copy / name).unlink()
    refused(copy, "holds neither tokenizer.json nor vocab.txt")
    (copy / "spm.model").write_bytes(b"")
    refused(copy, "its tokenizer is a sentencepiece file, which is not read; convert it once")


# Tokens


TOKEN_MODELS: dict[str, Callable[[], Any]] = {
    "bert": lambda: folders.random_model(transformers.BertForTokenClassification, folders.bert_config(num_labels=2)),
    "distilbert": lambda: folders.random_model(
        transformers.DistilBertForTokenClassification,
        transformers.DistilBertConfig(**folders.DISTILBERT_SIZES, num_labels=2),
    ),
}


def save_token_model(folder: Path, name: str) -> tuple[Path, Any]:
    if name == "xlm-r":
        return folders.save_xlm_roberta(folder, transformers.XLMRobertaForTokenClassification, num_labels=2)
    return folders.save_model(folder, model := TOKEN_MODELS[name]()), model


def their_words(folder: Path, model: Any, text: str) -> list[tuple[str, float]]:
    """Return the words of a text that fits and their means, with transformers alone, in the model's dtype."""
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


@pytest.mark.parametrize("name", [*TOKEN_MODELS, "xlm-r"])
def test_words_and_their_probabilities(name: str, tmp_path: Path) -> None:
    """The reference is float64; the bound follows from the error of transformers in float32."""
    folder, model = save_token_model(tmp_path, name)
    texts = ["The mayor of the city, born  by the river.", "a", "Reiß das Étui, 東京! q??", "the: 1994"]
    found = load_token_classifier(folder).words(texts)
    other = [their_words(folder, model, text) for text in texts]
    truth = [their_words(folder, model.double(), text) for text in texts]
    assert [[word for word, _ in one] for one in found] == [[word for word, _ in one] for one in truth]
    folders.check_near(
        *(torch.tensor([p for one in x for _, p in one], dtype=torch.float64) for x in (found, other, truth))
    )
    assert found[0][4][0] == "city,"


@pytest.fixture(scope="module")
def token_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_token_model(tmp_path_factory.mktemp("models") / "tokens", "bert")[0]


@pytest.fixture(scope="module")
def tokens(token_folder: Path) -> TokenClassifier:
    return load_token_classifier(token_folder)


def test_a_long_text_is_read_in_stretches_that_end_where_words_do(tokens: TokenClassifier) -> None:
    """A stretch has 68 tokens: 22 words of three tokens. Each stretch is read like a text of its own; a word that is
    longer than a stretch is cut, and its mean is over all its tokens."""
    words = [f"{a}b{c}" for a in "xyzq" for c in "0123456789k"]
    (found,) = tokens.words([" ".join(words)])
    alone = tokens.words([" ".join(words[start : start + 22]) for start in range(0, len(words), 22)])
    assert [word for word, _ in found] == words
    torch.testing.assert_close(
        [p for _, p in found], [p for one in alone for _, p in one], rtol=0, atol=1e-6, check_stride=False
    )
    (longest,) = tokens.words(["12" * 45 + " a"])
    assert [word for word, _ in longest] == ["12" * 45, "a"]
    first, second = tokens.words(["12" * 34, "12" * 11 + " a"])
    # 90 tokens, 68 of them in the first stretch; the rest begins with the token ##1, so it is not the text "1212..".
    assert first[0][1] != longest[0][1] != second[0][1]
    assert 0 < longest[0][1] < 1  # bound: a probability


def test_no_text_depends_on_those_beside_it_and_none_is_no_text(tokens: TokenClassifier) -> None:
    texts = folders.TEXTS
    together = tokens.words(texts)
    assert together[2] == [] and tokens.words([]) == [] and tokens.words([" \n"]) == [[]]
    for text, one in zip(texts, together, strict=True):
        (alone,) = tokens.words([text])
        assert [word for word, _ in alone] == [word for word, _ in one] == text.split()
        torch.testing.assert_close([p for _, p in alone], [p for _, p in one], rtol=0, atol=1e-6)
    assert tokens.words(["\ud800 a"])[0][1][0] == "a"
    assert tokens.count_tokens(["the city", "", "zx"]) == [2, 0, 2]


def no_tokens(folder: Path, said: str) -> None:
    found = folders.refusal(lambda: load_token_classifier(folder).words(["a"]))
    assert said in found and str(folder) in found


def test_folders_that_classify_no_tokens_are_refused(token_folder: Path, tmp_path: Path) -> None:
    no_tokens(folders.save_model(tmp_path / "bare"), "holds a BertModel, expected one ..ForTokenClassification")
    pairs = folders.random_model(transformers.BertForSequenceClassification, folders.bert_config(num_labels=2))
    no_tokens(folders.save_model(tmp_path / "pairs", pairs), "holds a BertForSequenceClassification")
    config = json.loads((tmp_path / "bare" / "config.json").read_text())
    del config["architectures"]
    folders.write(tmp_path / "bare" / "config.json", config)
    no_tokens(
        tmp_path / "bare", "tensor classifier.weight is missing, so this is an encoder without a token classifier"
    )
    three = folders.random_model(transformers.BertForTokenClassification, folders.bert_config(num_labels=3))
    no_tokens(folders.save_model(tmp_path / "three", three), "its classifier has 3 outputs, expected 2")
    no_tokens(tmp_path / "nowhere", "config.json: no such file")
    weights = load_file(token_folder / "model.safetensors")
    weights["bert.encoder.layer.2.output.LayerNorm.weight"][:] = 3e38
    broken = folders.save_model(tmp_path / "broken", TOKEN_MODELS["bert"]())
    save_file(weights, broken / "model.safetensors", {"format": "pt"})
    no_tokens(broken, "produces probabilities that are not finite; its weights are damaged")
