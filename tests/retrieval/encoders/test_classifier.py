"""Classifiers of pairs against `transformers` with random weights: logits, truncation, padding, labels and refusals.

As in test_bert.py the folders are tiny, but made to discriminate: wide weights, no bias at 0 and no norm at 1.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import encoder_folders as folders
import pytest
import torch
import transformers
from batch_invariance import needs_invariant_rows, weight_shapes
from safetensors.torch import load_file, save_file
from transformers.models.deberta_v2.modeling_deberta_v2 import build_relative_position

from thresher.common.errors import UserError
from thresher.retrieval.encoders.heads import Classifier, load_classifier
from thresher.retrieval.encoders.transformer import buckets, load_bert, load_deberta, read_deberta_config

NLI = {0: "contradiction", 1: "entailment", 2: "neutral"}
CLAIM = "The mayor was born."
PAIRS = [
    ("The mayor of the city was born by the river.", CLAIM),
    ("a", "b"),
    ("", CLAIM),
    (CLAIM, ""),
    ("Reiß das Étui, 東京! [SEP] q??", "the query [CLS]"),
    ("river city " * 60, CLAIM),  # is cut
    ("x" * 150, "the mayor, the river: born 1994"),
    ("the passage\nof the city " * 2, "the mayor, the city, the river " * 2),
]
PIECES = ["▁the", "▁city", "▁river", "▁mayor", "ing", "▁", *folders.LETTERS]
SPECIAL = ["[PAD]", "[CLS]", "[SEP]", "[UNK]"]
DEBERTA_SIZES: dict[str, Any] = {
    **folders.SIZES,
    "vocab_size": len(SPECIAL) + len(PIECES) + 8,
    "pad_token_id": 0,
    "type_vocab_size": 0,
    "relative_attention": True,
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "position_buckets": 8,  # far fewer than the 70 distances
}


def bert(**changes: Any) -> Any:
    config = folders.bert_config(**{"id2label": NLI} | changes)
    return folders.random_model(transformers.BertForSequenceClassification, config)


def distilbert(**changes: Any) -> Any:
    config = transformers.DistilBertConfig(**folders.DISTILBERT_SIZES, id2label=NLI, **changes)
    return folders.random_model(transformers.DistilBertForSequenceClassification, config)


def deberta(**changes: Any) -> Any:
    config = transformers.DebertaV2Config(**DEBERTA_SIZES | {"id2label": NLI} | changes)
    return folders.random_model(transformers.DebertaV2ForSequenceClassification, config)


def save(folder: Path, model: Any) -> Path:
    """Weights, config and tokenizer, of which DeBERTa's is made of sentence pieces."""
    if model.config.model_type != "deberta-v2":
        return folders.save_model(folder, model)
    model.save_pretrained(folder)
    pieces = [*((token, 0.0) for token in SPECIAL), *((piece, -float(len(piece) < 3)) for piece in PIECES)]
    transformers.DebertaV2Tokenizer(vocab=pieces, unk_id=3).save_pretrained(folder)
    return folder


def theirs(folder: Path, model: Any, pairs: list[tuple[str, str]], max_tokens: int = 70) -> torch.Tensor:
    """Logits as the model's authors make them, with transformers alone."""
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
    "deberta-v3": deberta,
    "deberta-v2-convolution": lambda: deberta(conv_kernel_size=3, conv_act="gelu"),
    "deberta-types-positions": lambda: deberta(
        type_vocab_size=2, position_biased_input=True, share_att_key=False, position_buckets=-1, norm_rel_ebd="none"
    ),
    "deberta-groups-wide": lambda: deberta(conv_kernel_size=5, conv_groups=4, max_relative_positions=40),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    model = MODELS[name]()
    folder = save(tmp_path, model)
    reference_NK, truth_NK = theirs(folder, model, PAIRS), theirs(folder, model.double(), PAIRS)
    classifier = load_classifier(folder)
    found_NK = classifier.logits(PAIRS)
    assert found_NK.dtype == torch.float32
    folders.check_near(found_NK, reference_NK, truth_NK)
    # WordPiece takes 150 letters in a row for one unknown word.
    assert classifier.cut == (2 if "deberta" in name else 1) and classifier.max_tokens == 70
    assert classifier.labels == ("contradiction", "entailment", "neutral")[: truth_NK.shape[1]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("bert"), bert())


@pytest.fixture
def classifier(folder: Path) -> Classifier:
    return load_classifier(folder)


@pytest.mark.parametrize("name", ["bert", "distilbert"])
def test_a_pair_is_independent_of_batch_composition(name: str, tmp_path: Path) -> None:
    save(tmp_path, MODELS[name]())
    heads = {tuple(tensor.shape) for tensor in load_file(tmp_path / "model.safetensors").values() if tensor.dim() == 2}
    needs_invariant_rows(weight_shapes(load_bert(tmp_path)) | heads, most=2048)
    classifier = load_classifier(tmp_path)
    pairs = PAIRS + [(f"{premise} {claim}", claim) for premise, claim in PAIRS]
    together_NK = classifier.logits(pairs)
    assert torch.equal(classifier.logits(pairs[::-1]), together_NK.flip(0))
    assert torch.equal(load_classifier(tmp_path, batch_tokens=1).logits(pairs), together_NK)
    for rows in ([0], [5, 3], [2, 9, 2]):
        assert torch.equal(classifier.logits([pairs[row] for row in rows]), together_NK[rows])


@pytest.mark.parametrize("name", ["deberta-v3", "deberta-v2-convolution"])
def test_the_batch_changes_a_debertas_pair_by_rounding_at_most(name: str, tmp_path: Path) -> None:
    """Alone it is as near to float64 as together (see above)."""
    model = MODELS[name]()
    folder = save(tmp_path, model)
    reference_NK, truth_NK = theirs(folder, model, PAIRS), theirs(folder, model.double(), PAIRS)
    classifier = load_classifier(folder)
    folders.check_near(torch.cat([classifier.logits([pair]) for pair in PAIRS]), reference_NK, truth_NK)


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


def test_no_pairs(classifier: Classifier) -> None:
    assert classifier.logits([]).shape == (0, 3)


def test_the_premise_alone_is_cut_by_tokens(folder: Path, classifier: Classifier) -> None:
    """What stands behind the cut cannot matter, what stands before it does, and the claim is read to its end."""
    short = load_classifier(folder, max_tokens=24)
    words = ["city", "river", "mayor", "passage"] * 3
    pair = (" ".join(words), CLAIM)  # 12 and 7 tokens with 3 between them leave 2 of 24
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


def test_a_megabyte_and_half_a_character_pair_are_read(classifier: Classifier) -> None:
    found_NK = classifier.logits([("the " * 250_000, CLAIM), ("\ud800 the", CLAIM), ("? the", CLAIM)])
    assert torch.equal(found_NK[1], found_NK[2]) and classifier.cut == 1


def test_a_claim_that_leaves_no_room_is_refused_not_cut(folder: Path) -> None:
    short = load_classifier(folder, max_tokens=11)
    short.logits([("the city", CLAIM)])  # 3 + 7, and one of the premise
    short = load_classifier(folder, max_tokens=10)
    with pytest.raises(UserError, match=r"the hypothesis 'The mayor was born.' takes 7 tokens, .* max_tokens = 10"):
        short.logits([("the city", CLAIM)])


# labels


def edit(folder: Path, target: Path, **changes: Any) -> Path:
    """A copy of the folder with another config.json; `...` removes a key."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    record = json.loads((folder / "config.json").read_text()) | changes
    (target / "config.json").write_text(json.dumps({key: value for key, value in record.items() if value is not ...}))
    return target


@pytest.mark.parametrize(
    ("names", "place"),
    [
        (["entailment", "neutral", "contradiction"], 0),
        (["CONTRADICTION", "NEUTRAL", "ENTAILMENT"], 2),
        (["Contradiction", " Entailment ", "Neutral"], 1),
        (["not_entailment", "x", "entailment"], 2),
    ],
)
def test_entailment_is_found_by_its_name(folder: Path, tmp_path: Path, names: list[str], place: int) -> None:
    copy = edit(folder, tmp_path / "c", id2label={str(number): name for number, name in enumerate(names)})
    assert load_classifier(copy).entailment == place


@pytest.mark.parametrize(
    "names", [["LABEL_0", "LABEL_1", "LABEL_2"], None, ["entailment", "Entailment", "x"], list("abc")]
)
def test_labels_that_cannot_be_told_must_be_given(folder: Path, tmp_path: Path, names: list[str] | None) -> None:
    named = ... if names is None else {str(number): name for number, name in enumerate(names)}
    copy = edit(folder, tmp_path / "c", id2label=named)
    with pytest.raises(UserError) as caught:
        _ = load_classifier(copy).entailment
    said = str(caught.value)
    assert said.startswith(f"{copy}: which output is entailment cannot be read from the labels [") and "\n" not in said
    assert said.endswith('give labels, the names of its 3 outputs in the model\'s order, one of them "entailment"')
    assert load_classifier(copy, labels=["neutral", "contradiction", "entailment"]).entailment == 2


@pytest.mark.parametrize(
    ("changes", "arguments", "said"),
    [
        ({}, {"labels": ["entailment", "other"]}, "has 3 outputs, and 2 labels are given; give 3"),
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
    with pytest.raises(UserError) as caught:
        load_classifier(edit(folder, tmp_path / "c", **changes), **arguments)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def refused(folder: Path, said: str) -> None:
    with pytest.raises(UserError) as caught:
        load_classifier(folder).logits([("a", "b")])
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_weights_without_a_head_or_with_a_damaged_one(folder: Path, tmp_path: Path) -> None:
    copy = edit(folder, tmp_path / "c")
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
    refused(copy, "tensor classifier.bias has shape [2], the config asks for [3]")
    write(tensors | {"classifier.bias": torch.full([3], float("nan"))})
    refused(copy, "tensor classifier.bias holds numbers that are not finite")
    huge = {name: torch.full_like(x, 3e38) for name, x in tensors.items() if name.endswith("layer.0.output.dense.bias")}
    write(tensors | huge)
    refused(copy, "makes logits that are not finite")


def test_tokenizers_that_do_not_do(folder: Path, tmp_path: Path) -> None:
    copy = edit(folder, tmp_path / "c")
    record = json.loads((copy / "tokenizer.json").read_text()) | {"post_processor": None}
    (copy / "tokenizer.json").write_text(json.dumps(record))
    refused(copy, "tokenizer.json: puts no tokens of its own around two texts")
    for name in ("tokenizer.json", "vocab.txt"):
        (copy / name).unlink()
    refused(copy, "holds neither tokenizer.json nor vocab.txt")
    (copy / "spm.model").write_bytes(b"")
    refused(copy, "its tokenizer is a sentencepiece file, which is not read; convert it once")


# DeBERTa alone


@pytest.mark.parametrize(("span", "farthest"), [(256, 512), (8, 70), (16, 40), (512, 0)])
def test_buckets_are_those_of_transformers(span: int, farthest: int) -> None:
    length = 700  # beyond the farthest
    place_T = torch.arange(length)
    states = torch.empty(1, length, 1)
    expected_TT = build_relative_position(states, states, span if farthest else -1, farthest or -1)[0]
    found_TT = buckets(place_T[:, None] - place_T, span, farthest)
    assert torch.equal(found_TT, (expected_TT + span).clamp(0, 2 * span - 1))
    assert torch.equal(
        (found_TT - span)[1:, 0].clamp(max=span - 1), -(found_TT - span)[0, 1:].clamp(min=1 - span)
    )  # odd


def test_deberta_in_float64_is_theirs_but_for_rounding(tmp_path: Path) -> None:
    """Heads of 12, for their scale is a float32 square root, which of 3 * 12 is exact."""
    model = deberta(conv_kernel_size=3, conv_act="gelu", hidden_size=48)
    save(tmp_path, model)
    generator = torch.Generator().manual_seed(1)
    ids_BT = torch.randint(4, 40, (5, 48), generator=generator)
    mask_BT = torch.arange(48) < torch.tensor([48, 33, 17, 2, 1])[:, None]
    with torch.no_grad():
        expected_BTH = model.double().deberta(ids_BT, mask_BT.long()).last_hidden_state
    found_BTH = load_deberta(tmp_path, torch.float64)(ids_BT, mask_BT)
    torch.testing.assert_close(found_BTH[mask_BT], expected_BTH[mask_BT], rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "deberta"}, "model_type is 'deberta', expected 'deberta-v2'"),
        ({"relative_attention": False}, "relative_attention is False, expected True"),
        ({"pos_att_type": ["c2p"]}, "pos_att_type is ['c2p'], expected 'p2c|c2p'"),
        ({"pos_att_type": ...}, "pos_att_type is None"),
        ({"embedding_size": 16}, "embedding_size is 16, expected 32"),
        ({"attention_head_size": 16}, "attention_head_size is 16, expected 8"),
        ({"num_attention_heads": 5}, "32 is not a multiple of the 5 attention heads"),
        ({"position_buckets": "8"}, "position_buckets is '8', expected an integer from -1 to"),
        ({"hidden_act": "swish"}, "hidden_act is 'swish', expected one of gelu"),
        ({"layer_norm_eps": 0}, "layer_norm_eps is 0, expected a positive number"),
    ],
)
def test_a_deberta_of_another_kind_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    save(tmp_path / "a", deberta())
    with pytest.raises(UserError) as caught:
        read_deberta_config(edit(tmp_path / "a", tmp_path / "b", **changes))
    assert said in str(caught.value) and "config.json" in str(caught.value) and "\n" not in str(caught.value)


def test_a_deberta_whose_tensors_do_not_fit_its_config(tmp_path: Path) -> None:
    save(tmp_path / "a", deberta())
    refused(edit(tmp_path / "a", tmp_path / "b", position_buckets=9), "tensor deberta.encoder.rel_embeddings.weight")
    refused(
        edit(tmp_path / "a", tmp_path / "c", share_att_key=False),
        "tensor deberta.encoder.layer.0.attention.self.pos_key_proj.weight is missing",
    )
    refused(edit(tmp_path / "a", tmp_path / "d", pooler_hidden_act="tanh"), "pooler_hidden_act is 'tanh'")
    with pytest.raises(UserError, match="model_type is 'deberta-v2', expected one of bert"):
        load_bert(tmp_path / "a")
