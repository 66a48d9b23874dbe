"""Training of RECOMP's compressor: its records, its loss and gradients, and the encoder that `extract` then reads."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import encoder_folders as folders
import pytest
import torch
import transformers
from stored_cases import stored

from thresher.cli.main import run
from thresher.common.errors import UserError
from thresher.common.hashes import read_hashes
from thresher.engine.compressors import recomp_train
from thresher.engine.compressors.recomp_train import contrastive_loss, evaluate, train_recomp
from thresher.engine.compressors.training_data import AnswerLikelihood, Contrast, make_contrasts, read_contrasts
from thresher.retrieval.encoders.learned import load_encoder, save_encoder
from thresher.retrieval.encoders.transformer import tensors_of
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question

RECORD = {"id": "a", "question": "who?", "positive": "the mayor", "negatives": ["the city", "the river"]}
RAGGED = [
    Contrast("a", "who is the mayor?", "the mayor was born", ("the city", "a query by the river")),
    Contrast("b", "city", "the river city, the city", ("born 1994",)),
    Contrast("c", "born", "x", ("the passage", "the mayor", "born born")),
]
WORDS = ["city", "river", "mayor", "born", "query", "passage"]
SMALL = {"num_hidden_layers": 1, "initializer_range": 0.1}


def write_records(path: Path, *records: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def toy(count: int) -> list[dict[str, Any]]:
    """Return records whose positive sentence names what the question asks for; the number next to it is noise."""
    found = []
    for n in range(count):
        asked, *others = (WORDS[(n + shift) % 6] for shift in range(4))
        negatives = [f"The {word} {(n * 7 + place) % 10}." for place, word in enumerate(others)]
        texts = {"question": f"who is {asked}?", "positive": f"The {asked} {n * 3 % 10}.", "negatives": negatives}
        found.append({"id": n} | texts)
    return found


def test_a_record_is_the_best_sentence_and_what_falls_short_of_it(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = {"One is here.": -2.0, "Two.": -1.0, "Three!": -1.5, "Four is there.": -2.1}
    passages = (Passage("p", "", "One is here. Two.\nThree! "), Passage("r", "", "Two. Four is there."))
    question = Question("q", "Who?", ("Dorn",), passages=passages)
    monkeypatch.setattr(AnswerLikelihood, "logprobs", lambda self, asked, texts: [values[text] for text in texts])

    def made(margin: float) -> dict[str, Contrast]:
        return make_contrasts([question, replace(question, id="none", passages=())], tiny_model_folder, margin)

    assert made(1.0) == {"q": Contrast("q", "Who?", "Two.", ("Four is there.",))}  # 1 nat is not more than 1
    assert made(0.0)["q"].negatives == ("One is here.", "Three!", "Four is there.")
    assert made(2.0) == {}
    asked = {"id": "q", "question": "Who?", "golden_answers": ["Dorn"]}
    shown = [{"id": p.id, "title": "", "text": p.text} for p in passages]
    questions = write_records(tmp_path / "q.jsonl", asked | {"passages": shown}, asked | {"id": "none"})
    typed = ["data", "sft", "--kind", "recomp", "--model", str(tiny_model_folder), "--questions", str(questions)]
    assert run([*typed, "--out", str(tmp_path / "c.jsonl")]) == 0
    texts = {"question": "Who?", "positive": "Two.", "negatives": ["Four is there."]}
    assert stored(tmp_path / "c.jsonl") == [{"id": "q"} | texts]
    assert json.loads((tmp_path / "c.jsonl.unused.jsonl").read_text()) == {"id": "none", "reason": "no passages"}
    assert run([*typed, "--margin", "2", "--out", str(tmp_path / "none.jsonl")]) == 2
    assert "the best by more than 2.0 nats" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("normed", [False, True])
def test_gradients_are_those_of_float64(normed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of all parameters, in parts of two questions, match transformers' model and the paper's formula."""
    monkeypatch.setattr(recomp_train, "MICRO", 2)
    model = folders.random_model(transformers.BertModel, folders.bert_config(**SMALL | {"initializer_range": 0.3}))
    folder = folders.save_model(tmp_path / "contriever", model)
    if normed:
        folders.lay_out(folder, "Transformer", "Pooling", "Normalize")
    encoder = recomp_train._load(folder, "cpu")
    loss = recomp_train._backward(encoder, RAGGED)
    exact, truth = model.double(), torch.zeros((), dtype=torch.float64)
    tokenizer = transformers.BertTokenizerFast.from_pretrained(folder)

    def vector(text: str) -> torch.Tensor:
        pooled_H = exact(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].mean(0)
        return pooled_H / pooled_H.norm() if normed else pooled_H

    for record in RAGGED:
        asked_H = vector(record.question)
        products = [asked_H @ vector(text) / (0.05 if normed else 1) for text in (record.positive, *record.negatives)]
        truth = truth + (torch.stack(products).logsumexp(0) - products[0]) / 3
    truth.backward()
    bert = encoder.tower.bert
    for parameter in bert.parameters():
        assert parameter.grad is not None
        parameter.data.copy_(parameter.grad)
    budget = 2**-24 * 300  # some hundred successive roundings, and products of up to 20 or 32
    assert abs(loss - truth.item()) <= budget * truth.item()
    wanted = {name: parameter.grad for name, parameter in exact.named_parameters() if "pooler" not in name}
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in tensors_of(bert).items():
        assert (gradient - wanted[name]).abs().max() <= budget * largest, name
    assert wanted.keys() == tensors_of(bert).keys()


def test_a_sentence_that_is_not_there_is_no_negative() -> None:
    query_BH = torch.tensor([[1.0, 2.0], [0.5, -1.0]], dtype=torch.float64, requires_grad=True)
    sentence_SH = torch.tensor([[0.1, 1], [1, 0], [2, 1], [0, 0], [3, -2]], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda q, s: contrastive_loss(q, s, [2, 3], 0.7), (query_BH, sentence_SH))
    both = [contrastive_loss(query_BH[:1], sentence_SH[:2], [2], 0.7)]
    both.append(contrastive_loss(query_BH[1:], sentence_SH[2:], [3], 0.7))
    whole = contrastive_loss(query_BH, sentence_SH, [2, 3], 0.7)
    assert whole.item() == pytest.approx(sum(both).item() / 2, rel=1e-12)


def test_negatives_are_those_nearest_to_the_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    encoder = load_encoder(folders.save_model(tmp_path / "contriever"))
    monkeypatch.setattr(recomp_train, "HARD", 2)
    monkeypatch.setattr(recomp_train, "AT_ONCE", 2)
    for record, found in zip(RAGGED, recomp_train._hardest(encoder, RAGGED), strict=True):
        asked_H = encoder.encode_queries([record.question])[0].astype("float64")
        scores = {text: encoder.encode_passages([text])[0] @ asked_H for text in record.negatives}
        assert found == replace(record, negatives=tuple(sorted(scores, key=lambda text: -scores[text])[:2]))


def test_what_is_trained_is_what_extract_keeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Through the command line: a new encoder finds the right sentences of unseen questions, loaded from its folder.

    Whatever the initial weights, the four sentences of a question are about equally likely at first: a loss of about ln
    4. The encoder learns a few words, and a tenth of that loss puts the right sentence far ahead of its negatives.
    """
    model = folders.random_model(transformers.BertModel, folders.bert_config(**SMALL))
    start = folders.save_model(tmp_path / "contriever", model)
    records = write_records(tmp_path / "c.jsonl", *toy(60))
    words = ["train-encoder", "--records", str(records), "--model", str(start), "--steps", "60", "--lr", "3e-3"]
    words += ["--batch", "16", "--out"]
    assert run([*words, str(tmp_path / "out"), "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["records"], figures["held out"], figures["steps"]) == (54, 6, 60)
    assert figures["held-out accuracy"] == 1 != figures["held-out accuracy before"]
    assert figures["held-out loss"] < figures["held-out loss before"] / 10
    found = read_hashes(tmp_path / "out", expected=True)
    assert found is not None and {path.name for path in tmp_path.iterdir()} == {"contriever", "c.jsonl", "out"}
    found.check_all()
    assert run([*words, str(tmp_path / "out")]) == 2 and "exists already" in capsys.readouterr().err
    asked = []
    for word, first, second in (
        ("river", "The mayor 8. The born 8. The query 7.", "The river 9."),
        ("born", "The query 8. The born 7.", "The passage 8. The city 9."),
    ):
        passages = [{"id": first, "title": "", "text": first}, {"id": second, "title": "", "text": second}]
        question = {"id": word, "question": f"who is {word}?", "golden_answers": ["x"]}
        asked.append(question | {"passages": passages})
    questions = write_records(tmp_path / "q.jsonl", *asked)
    evidence = tmp_path / "e.jsonl"
    typed = ["extract", "--refiner", "recomp", "--model", str(tmp_path / "out"), "--questions", str(questions)]
    assert run([*typed, "--out", str(evidence)]) == 0
    kept = [record["evidence"] for record in stored(evidence)]
    assert kept == ["The river 9.", "The born 7."]


def test_training_is_a_function_of_its_seed(tmp_path: Path) -> None:
    start = folders.save_model(tmp_path / "contriever")
    records = write_records(tmp_path / "c.jsonl", *toy(12))
    weights = []
    for seed, name in ((1, "a"), (1, "b"), (2, "c")):
        figures = train_recomp(records, start, tmp_path / name, steps=2, batch=4, seed=seed)
        weights.append((tmp_path / name / "model.safetensors").read_bytes())
    assert weights[0] == weights[1] != weights[2] and figures["held out"] == 1
    assert train_recomp(records, start, tmp_path / "d", batch=100)["steps"] == 3  # a batch holds at most all records
    with pytest.raises(UserError, match=r"step 2: the loss is .*; give a lower --lr"):
        train_recomp(records, start, tmp_path / "e", steps=3, batch=4, lr=1e30)
    assert not (tmp_path / "e").exists()


@pytest.mark.parametrize("kinds", [("Transformer", "Pooling"), ("Transformer", "Pooling", "Normalize")])
def test_a_saved_encoder_has_the_settings_and_the_vectors(kinds: tuple[str, ...], tmp_path: Path) -> None:
    start = folders.save_model(tmp_path / "start")
    top = {"prompts": {"query": "query: ", "passage": ""}, "similarity_fn_name": "cosine" if len(kinds) == 3 else "dot"}
    cls = {"word_embedding_dimension": 32, "pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}
    folders.lay_out(start, *kinds, top=top, pooling=cls, sentence={"max_seq_length": 20, "do_lower_case": False})
    encoder = load_encoder(start)
    (tmp_path / "out").mkdir()
    save_encoder(encoder, tmp_path / "out")
    again = load_encoder(tmp_path / "out")
    modules = json.loads((tmp_path / "out" / "modules.json").read_text())
    assert [module["type"].rpartition(".")[2] for module in modules] == list(kinds)
    assert again.settings == encoder.settings and (again.settings.pooling, again.settings.max_length) == ("cls", 20)
    assert (again.encode_queries(folders.TEXTS) == encoder.encode_queries(folders.TEXTS)).all()
    assert evaluate(again, RAGGED) == evaluate(encoder, RAGGED)
    texts = ["the city", "the river"]
    reference_NH, found_NH = torch.from_numpy(encoder.encode_passages(texts)), again.passage_vectors(texts)
    again.tower.bert.double()
    folders.check_near(found_NH, reference_NH, again.passage_vectors(texts))


@pytest.mark.parametrize("family", ["classifier", "distilbert", "xlm-roberta"])
def test_a_saved_encoder_is_read_by_transformers(family: str, tmp_path: Path) -> None:
    """Names have no prefix, only a pooler is missing, and the vectors are those of the initial encoder."""
    start = tmp_path / "contriever"
    if family == "xlm-roberta":
        folders.save_xlm_roberta(start, transformers.XLMRobertaModel)
    elif family == "distilbert":
        config = transformers.DistilBertConfig(**folders.DISTILBERT_SIZES)
        folders.save_model(start, folders.random_model(transformers.DistilBertModel, config))
    else:
        model = folders.random_model(transformers.BertForSequenceClassification, folders.bert_config())
        folders.save_model(start, model)
    encoder = load_encoder(start)
    (out := tmp_path / "out").mkdir()
    save_encoder(encoder, out)
    _, said = transformers.AutoModel.from_pretrained(out, output_loading_info=True)
    assert all(name.startswith("pooler.") for name in said["missing_keys"]) and not said["unexpected_keys"]
    assert (load_encoder(out).encode_queries(folders.TEXTS) == encoder.encode_queries(folders.TEXTS)).all()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"positive": None}, 'c.jsonl:2: "positive" should be a string, found null'),
        ({"question": " "}, 'c.jsonl:2: "question" is empty'),
        ({"negatives": "x"}, 'c.jsonl:2: expected a list of sentences under "negatives", found a string'),
        ({"negatives": []}, 'c.jsonl:2: expected a list of sentences under "negatives", found an empty list'),
        ({"negatives": ["y", 3]}, 'c.jsonl:2: a sentence of "negatives" should be a string, found a number'),
        ({"negatives": ["the mayor"]}, 'c.jsonl:2: the positive sentence is among the "negatives" as well'),
        (None, "c.jsonl: expected 2 records or more, found 1"),
    ],
)
def test_records_that_are_none(change: dict[str, Any] | None, said: str, tmp_path: Path) -> None:
    records = [RECORD] if change is None else [RECORD, RECORD | change]
    path = write_records(tmp_path / "c.jsonl", *records)
    assert said in folders.refusal(lambda: read_contrasts(path))
    assert read_contrasts(write_records(path, RECORD, RECORD))[1].negatives == ("the city", "the river")


def test_what_the_commands_refuse(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = write_records(tmp_path / "c.jsonl", RECORD, RECORD)
    pair = folders.dpr_pair(tmp_path / "dpr")
    trained = ["train-encoder", "--records", str(records), "--out", str(tmp_path / "o")]
    made = ["data", "sft", "--questions", str(records), "--out", str(tmp_path / "o"), "--kind"]
    for words, said in (
        ([*trained, "--model", str(pair)], "is a pair of transformers; give an encoder that has one"),
        ([*trained, "--model", "m", "--batch", "0"], "--batch: expected a whole number of at least 1, got 0"),
        ([*made, "recomp"], "--kind recomp needs --model"),
        ([*made, "recomp", "--model", "m", "--template", "t"], "a record of kind recomp has none"),
        ([*made, "qa", "--margin", "1"], "--margin is for --kind recomp"),
        ([*made, "recomp", "--margin", "inf"], "--margin: expected a finite number of at least 0, got inf"),
    ):
        assert run(words) == 2
        assert said in " ".join(capsys.readouterr().err.split()) and not (tmp_path / "o").exists()
