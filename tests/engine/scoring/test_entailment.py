"""Judges of entailment: the order of the stand-in's scores, the classifier under its name, and the memory of pairs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import encoder_folders as folders
import pytest
import torch
import transformers

from thresher.common.errors import UserError
from thresher.engine.config.sections import JudgeSection
from thresher.engine.scoring.judges import LexicalJudge, ModelJudge, RememberingJudge, load_judge

JUPITER = "Jupiter is the answer to 'What is the largest planet in the solar system?'"
NLI = {0: "contradiction", 1: "neutral", 2: "entailment"}
NOTES = [("the city was born by the river", "the mayor was born"), ("a", "b"), ("the river " * 60, "the mayor")]


def score(premise: str, hypothesis: str) -> float:
    (value,) = LexicalJudge().probabilities([(premise, hypothesis)])
    return value


def test_jupiter() -> None:
    """SYSTEMS.md's case, and the scores of less useful notes."""
    notes = ["* Jupiter is the largest planet in the solar system.", "Jupiter is a planet in the solar system"]
    notes += ["Jupiter is a planet", "Jupiter", "Nothing useful was found."]
    scores = [score(note, JUPITER) for note in notes]
    assert scores == sorted(set(scores), reverse=True)
    assert scores[0] == 1 and scores[1] == (4 / 5) ** 2 and scores[-1] == 0
    assert "lexical" in LexicalJudge().name and "stand-in" in LexicalJudge().name


ALPS = "Monte Rosa is the answer to 'What is the highest mountain of Switzerland?'"


@pytest.mark.parametrize(
    ("premise", "hypothesis", "expected"),
    [
        ("", JUPITER, 0.0),
        ("Jupiter", "", 0.0),
        ("", "", 0.0),
        ("!?", "...", 0.0),
        ("It is.", "It is", 1.0),  # only grammar words: then these count
        ("the WHO", "Who?", 1.0),
        ("red, blue; green", "Green red", 1.0),
        ("red", "red green", 0.25),
        ("Mars is not red", "Mars is red", 0.5),
        ("Mars isn't red", "Mars is not red", 1.0),
        ("Mars isn’t red", "Mars is red", 0.5),
        ("nobody", "no", 0.0),
        ("Ærø østlich 東京", "東京 ÆRØ", 1.0),
        # Words of the question earn nothing.
        ("* What is the highest mountain of Switzerland?", ALPS, 0.0),
        ("The highest mountain of Switzerland is the Eiger", ALPS, 0.0),
        ("The highest mountain of Switzerland is Monte Rosa", ALPS, 1.0),
        ("The highest mountain of Switzerland is Monte Leone", ALPS, (4 / 5) ** 2 / 2),
        ("Monte Rosa", ALPS, (2 / 5) ** 2),
        ("The Nile is longer than the Rhine", "Nile is the answer to 'Which is longer, Nile or Rhine?'", 0.0),
        ("yes", "yes is the answer to 'Is it?'", 1.0),
    ],
)
def test_overlap(premise: str, hypothesis: str, expected: float) -> None:
    assert score(premise, hypothesis) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("name", "least"), [("snli_1.0_dev.jsonl", 0.70), ("textfooler_mnli_matched.tsv", 0.68)])
def test_the_stand_in_on_real_pairs(shared_data: Path, name: str, least: float) -> None:
    """Entailment against the rest: better than always no (.660 and .627), far from a classifier's .9."""
    lines = (shared_data / "nli" / name).read_text("utf-8").splitlines()
    if name.endswith(".jsonl"):
        records = [json.loads(line) for line in lines]
        rows = [(record["gold_label"], record["sentence1"], record["sentence2"]) for record in records]
    else:
        rows = [(label, premise, claim) for label, premise, claim in (line.split("\t") for line in lines)]
    rows = [row for row in rows if row[0] != "-"]
    scores = LexicalJudge().probabilities([(premise, claim) for _, premise, claim in rows])
    right = sum((found >= 0.5) == (label == "entailment") for found, (label, *_) in zip(scores, rows, strict=True))
    assert least < right / len(rows) < 0.8


# a classifier


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = transformers.DistilBertConfig(**folders.DISTILBERT_SIZES, id2label=NLI)
    model = folders.random_model(transformers.DistilBertForSequenceClassification, config)
    return folders.save_model(tmp_path_factory.mktemp("judges") / "tiny-nli", model)


def test_probabilities_are_the_softmax_at_entailment(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judge = ModelJudge(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    premises, claims = zip(*NOTES, strict=True)
    batch = tokenizer(
        list(premises), list(claims), padding=True, truncation="only_first", max_length=70, return_tensors="pt"
    )
    batch.pop("token_type_ids", None)
    with torch.no_grad():
        expected = model(**batch).logits.softmax(-1)[:, 2].tolist()
    assert max(expected) - min(expected) > 0.01
    assert judge.probabilities(NOTES[:2]) == pytest.approx(expected[:2], abs=1e-5)
    assert capsys.readouterr().out == ""
    for _ in range(2):
        assert judge.probabilities(NOTES) == pytest.approx(expected, abs=1e-5)
    said = "entailment by tiny-nli: a premise of more than 70 tokens, with its hypothesis, is cut at its end\n"
    assert capsys.readouterr().out == said  # printed once
    assert judge.probabilities([]) == []


def test_labels_given_take_the_place_of_the_folders(folder: Path) -> None:
    turned = ModelJudge(folder, labels=["entailment", "neutral", "contradiction"]).probabilities(NOTES)
    assert turned != pytest.approx(ModelJudge(folder).probabilities(NOTES), abs=0.01)
    with pytest.raises(
        UserError, match=r'the labels \["a", "b", "c"\] do not say which output is entailment; give labels'
    ):
        ModelJudge(folder, labels=["a", "b", "c"])


# memory


class Counting:
    """A judge that records its pairs; its probability rises with the length of the premise."""

    name = "counting"

    def __init__(self) -> None:
        self.asked: list[tuple[str, str]] = []

    def probabilities(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
        self.asked += pairs
        return [len(premise) / 100 for premise, _ in pairs]


def test_equal_pairs_are_judged_once_and_come_back_in_order() -> None:
    inner = Counting()
    judge = RememberingJudge(inner, 10)
    assert judge.probabilities([("aa", "c"), ("b", "c"), ("aa", "c")]) == [0.02, 0.01, 0.02]
    assert judge.probabilities([("b", "c"), ("bbb", "c"), ("aa", "c")]) == [0.01, 0.03, 0.02]
    assert inner.asked == [("aa", "c"), ("b", "c"), ("bbb", "c")] and judge.hits == 4 - 1
    assert judge.name == "counting" and judge.probabilities([]) == []
    judge.probabilities([("ab", "c"), ("a", "bc"), ("abc", ""), ("\ud800", "")])
    assert len(inner.asked) == 3 + 4, "where one text ends matters"


def test_the_memory_is_bounded_and_forgets_the_longest_unused() -> None:
    inner = Counting()
    judge = RememberingJudge(inner, 2)
    for premise in "abacab":
        judge.probabilities([(premise, "x")])
    assert [premise for premise, _ in inner.asked] == ["a", "b", "c", "b"]
    many = [(f"{number}", "x") for number in range(5)]  # more at once than the memory holds
    assert judge.probabilities(many) == [0.01] * 5


def test_a_failure_is_not_remembered() -> None:
    class Failing(Counting):
        def probabilities(self, pairs: Sequence[tuple[str, str]]) -> list[float]:
            if not self.asked:
                self.asked.append(("", ""))
                raise UserError("away")
            return super().probabilities(pairs)

    judge = RememberingJudge(Failing(), 4)
    with pytest.raises(UserError, match="away"):
        judge.probabilities([("aa", "x")])
    assert judge.probabilities([("aa", "x")]) == [0.02]


# from a recipe


def test_a_judge_from_a_recipe(folder: Path) -> None:
    assert isinstance(load_judge(JudgeSection()), LexicalJudge)
    judge = load_judge(JudgeSection(entailment=str(folder), max_tokens=30, batch_tokens=64))
    assert isinstance(judge, RememberingJudge) and judge.name == "entailment by tiny-nli"
    assert judge.probabilities(NOTES) == judge.probabilities(NOTES) and judge.hits == 3
    plain = load_judge(JudgeSection(entailment=str(folder), cache_size=0, max_tokens=30))
    assert isinstance(plain, ModelJudge) and plain.probabilities(NOTES) == judge.probabilities(NOTES)
    with pytest.raises(UserError, match="no such file"):
        load_judge(JudgeSection(entailment=str(folder / "absent")))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"labels": ["entailment", "other"]}, "labels: expected none without entailment"),
        ({"url": "http://h"}, "model: expected a string if url is set, got nothing"),
        ({"model": "m"}, "url: expected a string if model is set, got nothing"),
        ({"key_env": "sk-s3cret"}, "key_env: expected the name of an environment variable such as API_KEY, not a key"),
        ({"cache_size": -1}, "cache_size: expected an integer >= 0, got -1"),
        ({"entailment": ""}, "entailment: expected a string that is not empty"),
    ],
)
def test_a_section_that_does_not_do(keys: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        JudgeSection(**keys)
    assert str(caught.value).startswith(said) and "s3cret" not in str(caught.value)
