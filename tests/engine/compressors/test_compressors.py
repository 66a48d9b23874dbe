"""Compressors: self-information against float64 logits, sentence vectors, a token classifier; and what each keeps."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import encoder_folders as folders
import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from thresher.common.errors import UserError
from thresher.engine.compressors.compressors import LlmLingua2, Recomp, SelectiveContext, lines, most, sentences
from thresher.retrieval.encoders.heads import load_token_classifier
from thresher.retrieval.encoders.learned import load_encoder
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question

if TYPE_CHECKING:
    from thresher.policy.model import Policy
    from thresher.policy.tokenizer import Tokenizer

TEXTS = (
    "Anna Bell has birthplace Carl Dorn. Ida Jones has rival Mia Noor. Zürich – 東京!",
    "Eva Frost has spouse Karl Lund. Karl Lund has mayor Otto Pike.",
    "One",
)
QUESTION = Question("q0", "Who?", ("Carl Dorn",), passages=tuple(Passage(str(n), "", t) for n, t in enumerate(TEXTS)))


def exact(policy: Policy, begin: int, ids: list[int], vocab: int) -> list[float]:
    """Return -log p of each id after `begin`, in float64."""
    with torch.no_grad():
        logits_TV = deepcopy(policy).double().logits(torch.tensor([begin, *ids]))[:-1, :vocab]
    return [-float(row_V.log_softmax(0)[token]) for row_V, token in zip(logits_TV, ids, strict=True)]


def test_self_information_is_that_of_float64(tiny_policy: Policy, tiny_tokenizer: Tokenizer) -> None:
    begin = tiny_policy.config.eos_token_ids[0]
    ids = [tiny_tokenizer.encode(text) for text in TEXTS]
    found = SelectiveContext(tiny_policy, tiny_tokenizer, 0.5, "token").self_information([*ids, []])
    truth = [exact(tiny_policy, begin, one, tiny_tokenizer.vocab_size) for one in ids]
    assert [len(one) for one in found] == [len(one) for one in ids] + [0]
    ours_T, truth_T = (torch.tensor([value for one in x for value in one]).double() for x in (found, truth))
    # Log-probs from float32 hidden states: about a hundred roundings of logits of magnitude up to |z|.
    assert truth_T.std() > 0.5
    assert (ours_T - truth_T).abs().max() <= 100 * 2**-24 * truth_T.abs().max()


def test_what_is_longer_than_the_context_is_read_in_stretches(
    tiny_policy: Policy, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    refiner = SelectiveContext(tiny_policy, tiny_tokenizer, 0.5, "token")
    ids = tiny_tokenizer.encode(TEXTS[0])
    monkeypatch.setattr(refiner._likelihood, "longest", 11)
    (found,) = refiner.self_information([ids])
    parts = refiner.self_information([ids[start : start + 10] for start in range(0, len(ids), 10)])
    assert len(ids) > 20 and found == pytest.approx([value for part in parts for value in part], abs=1e-5)


@pytest.mark.parametrize("keep", [0.2, 0.6])
def test_sentences_and_tokens_that_are_kept(tiny_policy: Policy, tiny_tokenizer: Tokenizer, keep: float) -> None:
    """A sentence's score, by hand, is the mean over the tokens that end in it; all passages form one pool."""
    begin, vocab = tiny_policy.config.eos_token_ids[0], tiny_tokenizer.vocab_size
    scores, units, tokens, pieces = [], [], [], []
    for number, text in enumerate(TEXTS):
        ids = tiny_tokenizer.encode(text)
        information = exact(tiny_policy, begin, ids, vocab)
        tokens += information
        pieces += [(number, tiny_tokenizer.token_bytes(token)) for token in ids]
        at, owner = 0, []
        for token in ids:
            at += len(tiny_tokenizer.token_bytes(token))
            owner.append(next(n for n, (_, end) in enumerate(sentences(text)) if at <= len(text[:end].encode())))
        for place, (start, end) in enumerate(sentences(text)):
            own = [value for value, n in zip(information, owner, strict=True) if n == place]
            scores.append(sum(own) / len(own))
            units.append((number, text[start:end].strip()))
    for unit, values, found in (("sentence", scores, units), ("token", tokens, None)):
        kept = most(values, keep)
        expected = []
        for number in range(len(TEXTS)):
            if found is not None:
                line = " ".join(text for (n, text), k in zip(found, kept, strict=True) if k and n == number)
            else:
                joined = b"".join(piece for (n, piece), k in zip(pieces, kept, strict=True) if k and n == number)
                line = joined.decode("utf-8", "ignore").strip()
            expected += [line] if line else []
        refiner = SelectiveContext(tiny_policy, tiny_tokenizer, keep, unit)  # type: ignore[arg-type]
        bare = replace(QUESTION, passages=())
        assert refiner.compress([QUESTION, bare, QUESTION]) == ["\n".join(expected), "", "\n".join(expected)]


def test_everything_can_be_kept_and_what_nothing_precedes_is_refused(
    tiny_policy: Policy, tiny_tokenizer: Tokenizer
) -> None:
    for unit in ("sentence", "token"):
        refiner = SelectiveContext(tiny_policy, tiny_tokenizer, 1.0, unit)  # type: ignore[arg-type]
        assert refiner.compress([QUESTION]) == ["\n".join(TEXTS)]
    assert refiner.count_tokens(TEXTS) == [len(tiny_tokenizer.encode(text)) for text in TEXTS]
    nameless = deepcopy(tiny_policy)
    nameless.config = tiny_policy.config.replace(eos_token_ids=())
    with pytest.raises(UserError, match="selective-context: the model names no token that begins or ends a text"):
        SelectiveContext(nameless, tiny_tokenizer, 0.5, "token")


# --- RECOMP and LLMLingua-2

ENGLISH = ("The mayor was born. The river is by the city. A query!", "Is it the city? Born 1994.", "x")
IN_ENGLISH = tuple(Passage(str(number), "", text) for number, text in enumerate(ENGLISH))
QUESTIONS = [
    Question("a", "Who is the mayor of the city?", ("x",), passages=IN_ENGLISH),
    Question("b", "born", ("x",), passages=IN_ENGLISH[1:]),
    Question("c", "none", ("x",)),
]


@pytest.mark.parametrize("count", [1, 3, 9])
def test_recomp_keeps_the_sentences_nearest_to_the_question(count: int, tmp_path: Path) -> None:
    """Scores are float64 dot products of the encoder's vectors; Contriever is recognised by the folder's name."""
    encoder = load_encoder(folders.save_model(tmp_path / "nq_extractive_compressor"))
    assert (encoder.settings.pooling, encoder.settings.normalize) == ("mean", False)
    refined = Recomp(encoder, count).compress(QUESTIONS)
    for question, kept in zip(QUESTIONS, refined, strict=True):
        own = [(n, p.text[a:b].strip()) for n, p in enumerate(question.passages) for a, b in sentences(p.text)]
        scores = [
            float(encoder.encode_queries([question.question])[0].astype(np.float64) @ encoder.encode_passages([s])[0])
            for _, s in own
        ]
        best = sorted(range(len(own)), key=lambda n: -scores[n])[:count]
        expected = [[s for place, (n, s) in enumerate(own) if n == number and place in best] for number in range(3)]
        assert kept == "\n".join(" ".join(part) for part in expected if part)
    assert Recomp(encoder, 1).count_tokens(["the city", ""]) == [2, 0]


@pytest.mark.parametrize("keep", [0.3, 1.0])
def test_llmlingua2_keeps_words_by_the_quantile_over_all_passages(keep: float, tmp_path: Path) -> None:
    model = folders.random_model(transformers.BertForTokenClassification, folders.bert_config(num_labels=2))
    classifier = load_token_classifier(folders.save_model(tmp_path, model))
    refined = LlmLingua2(classifier, keep).compress(QUESTIONS)
    for question, kept in zip(QUESTIONS, refined, strict=True):
        words = classifier.words([p.text for p in question.passages])
        flags = iter(most([value for one in words for _, value in one], keep))
        expected = [[word for word, _ in one if next(flags)] for one in words]
        assert kept == "\n".join(" ".join(part) for part in expected if part)
    assert refined[2] == "" and (keep < 1 or refined[0] == "\n".join(ENGLISH))
    assert 0 < len(refined[0].split()) <= 19 * keep + 1


# --- Sentences, and the quantile of their scores


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("One. Two is 3.5 long! Three?", ["One. ", "Two is 3.5 long! ", "Three?"]),
        ('He said "Go." Then he left.', ['He said "Go." ', "Then he left."]),
        ("Dr. J. Smith of the U.S. Army came. He ate.", ["Dr. J. Smith of the U.S. Army came. ", "He ate."]),
        ("It was No. 5, i.e. the last. 1966 came.", ["It was No. 5, i.e. the last. ", "1966 came."]),
        ("a list, etc. and more. yes", ["a list, etc. and more. yes"]),
        ("Title without a stop\n\nThe text. ", ["Title without a stop\n\n", "The text. "]),
        ("東京は都市。川は川！end", ["東京は都市。", "川は川！", "end"]),
        ("  ", ["  "]),
        ("", []),
        ("... And so on.", ["... ", "And so on."]),
        ("End.  \n ", ["End.  \n "]),
    ],
)
def test_sentences(text: str, parts: list[str]) -> None:
    assert [text[start:end] for start, end in sentences(text)] == parts


@given(st.text(alphabet="aB. !?\n\"'。1", max_size=40))
def test_sentences_are_the_whole_text(text: str) -> None:
    spans = sentences(text)
    assert "".join(text[start:end] for start, end in spans) == text
    assert len(spans) <= 1 or all(text[start:end].strip() for start, end in spans)


def test_about_the_share_is_kept_and_one_at_least() -> None:
    scores = [0.1, 0.9, 0.5, 0.7, 0.3]
    assert most(scores, 1.0) == [True] * 5
    assert most(scores, 0.5) == [False, True, True, True, False]  # the median, .5, is kept
    # The .8 quantile of five values lies .2 past the fourth: .7 + .2 x .2.
    assert most(scores, 0.2) == [False, True, False, False, False]
    assert most(scores, 1e-9) == [False, True, False, False, False]
    assert most([2.0], 0.01) == [True] and most([], 0.5) == []
    assert most([1.0, 1.0, 0.0], 0.4) == [True, True, False]  # ties are kept or dropped together


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=30, unique=True), st.floats(0.01, 1))
def test_the_highest_are_kept(scores: list[float], keep: float) -> None:
    kept = most(scores, keep)
    assert sum(kept) >= 1 and abs(sum(kept) - keep * len(scores)) <= 1  # bound: a quantile lies between two scores
    above, below = ([s for s, k in zip(scores, kept, strict=True) if k is which] for which in (True, False))
    assert min(above) > max(below, default=-10)  # bound: their order


def test_a_line_for_each_passage_of_which_something_is_kept() -> None:
    assert lines([["A b. ", "C."], [], [" ", "D"]]) == "A b. C.\nD" and lines([]) == ""
