"""FilCo's three measures, which choose the sentences that a filter learns to write, and the likelihood of an answer."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from thresher.common.errors import UserError
from thresher.engine.baselines.common import BARE, TAGGED, Options, built_in
from thresher.engine.compressors.training_data import AnswerLikelihood, silver_evidence
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question

if TYPE_CHECKING:
    from thresher.policy.model import Policy
    from thresher.policy.tokenizer import Tokenizer

PASSAGES = (
    Passage("a", "Anna", "Anna Bell lives here. Anna Bell, who has a long life, was born where Carl Dorn was."),
    Passage("b", "Ida", "Ida Jones met Carl Dorn. A rival is Mia Noor."),
)
QUESTION = Question("q", "Who?", ("Carl Dorn", "Dorn"), passages=PASSAGES)
YES = Question("y", "Is it?", ("yes",), passages=PASSAGES)


def test_inclusion_and_overlap() -> None:
    inclusion = silver_evidence([QUESTION, YES], "inclusion")
    assert inclusion == {
        "q": "Anna Bell, who has a long life, was born where Carl Dorn was.\nIda Jones met Carl Dorn.",
        "y": "",  # "yes" is found in no sentence
    }
    # 2 of 5 words and 2 of 2 are in common: F1 4/7, more than 4/14 of the longer sentence.
    assert silver_evidence([QUESTION, YES], "overlap") == {"q": "Ida Jones met Carl Dorn.", "y": ""}
    nowhere = replace(QUESTION, golds=("Otto Pike",))
    assert [silver_evidence([nowhere], measure)["q"] for measure in ("inclusion", "overlap")] == ["", ""]


@pytest.mark.parametrize("tagged", [True, False])
def test_the_likelihood_of_an_answer_is_that_of_float64(
    tiny_policy: Policy, tiny_tokenizer: Tokenizer, tiny_model_folder: Path, tagged: bool
) -> None:
    texts = ["Ida Jones met Carl Dorn.", "", "Anna Bell </answer> lives here."]
    found = AnswerLikelihood(tiny_model_folder, tagged=tagged).logprobs(QUESTION, texts)
    template = built_in("passages", Options(), passages=True).replace("" if tagged else TAGGED, "" if tagged else BARE)
    target = tiny_tokenizer.encode("<answer> Carl Dorn </answer>" if tagged else "Carl Dorn")
    exact = deepcopy(tiny_policy).double()
    for text, value in zip(texts, found, strict=True):
        shown = f'Doc 1(Title: "") {text}'.replace("</", "< /") if text else ""
        before, _, after = template.partition("{passages}")
        prompt = [
            *tiny_tokenizer.encode_template(before),
            *tiny_tokenizer.encode(shown),
            *tiny_tokenizer.encode_template(after.partition(" {question}")[0]),
            *tiny_tokenizer.encode(" Who?"),
            *tiny_tokenizer.encode_template("\n"),
        ]
        with torch.no_grad():
            logits_TV = exact.logits(torch.tensor([*prompt, *target]))[:, : tiny_tokenizer.vocab_size].log_softmax(1)
        truth = sum(float(logits_TV[len(prompt) + n - 1, token]) for n, token in enumerate(target))
        assert abs(value - truth) <= 100 * 2**-24 * len(target) * 20


def test_cxmi_takes_the_sentence_that_raises_the_answer_most(
    tiny_model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {"": -4.0, "Anna Bell lives here.": -3.9, "Ida Jones met Carl Dorn.": -1.0, "A rival is Mia Noor.": -5.0}
    shown: list[str] = []

    def logprobs(self: AnswerLikelihood, question: Question, texts: list[str]) -> list[float]:
        shown.extend(texts)
        return [values.get(text, -8.0) + lift for text in texts]

    monkeypatch.setattr(AnswerLikelihood, "logprobs", logprobs)
    lift = 0.0
    assert silver_evidence([QUESTION], "cxmi", tiny_model_folder) == {"q": "Ida Jones met Carl Dorn."}
    assert shown[0] == "" and len(shown) == 5
    values[""] = -0.5  # the answer is more likely without any sentence
    assert silver_evidence([QUESTION], "cxmi", tiny_model_folder) == {"q": ""}


def test_what_does_not_fit_is_named(tiny_model_folder: Path) -> None:
    long = replace(QUESTION, passages=(Passage("a", "", "w" * 5000),))
    with pytest.raises(UserError, match=r"question q: with a sentence .* more than the 2,048 positions of"):
        silver_evidence([long], "cxmi", tiny_model_folder)
