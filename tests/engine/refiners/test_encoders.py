"""RECOMP and LLMLingua-2: what is kept by an encoder's vectors, and by a classifier of tokens."""

from __future__ import annotations

from pathlib import Path

import encoder_folders as folders
import numpy as np
import pytest
import transformers

from thresher.engine.refiners.llmlingua2 import LlmLingua2
from thresher.engine.refiners.recomp import Recomp
from thresher.engine.refiners.spans import most, sentences
from thresher.retrieval.data.formats import Passage
from thresher.retrieval.encoders.learned import load_encoder
from thresher.retrieval.encoders.token_classifier import load_token_classifier
from thresher.retrieval.questions import Question

TEXTS = ("The mayor was born. The river is by the city. A query!", "Is it the city? Born 1994.", "x")
PASSAGES = tuple(Passage(str(number), "", text) for number, text in enumerate(TEXTS))
QUESTIONS = [
    Question("a", "Who is the mayor of the city?", ("x",), passages=PASSAGES),
    Question("b", "born", ("x",), passages=PASSAGES[1:]),
    Question("c", "none", ("x",)),
]


@pytest.mark.parametrize("count", [1, 3, 9])
def test_recomp_keeps_the_sentences_nearest_to_the_question(count: int, tmp_path: Path) -> None:
    """By float64 products of the encoder's vectors; Contriever's way is known by the folder's name."""
    encoder = load_encoder(folders.save_model(tmp_path / "nq_extractive_compressor"))
    assert (encoder.settings.pooling, encoder.settings.normalize) == ("mean", False)
    refined = Recomp(encoder, count).refine(QUESTIONS)
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
    refined = LlmLingua2(classifier, keep).refine(QUESTIONS)
    for question, kept in zip(QUESTIONS, refined, strict=True):
        words = classifier.words([p.text for p in question.passages])
        flags = iter(most([value for one in words for _, value in one], keep))
        expected = [[word for word, _ in one if next(flags)] for one in words]
        assert kept == "\n".join(" ".join(part) for part in expected if part)
    assert refined[2] == "" and (keep < 1 or refined[0] == "\n".join(TEXTS))
    assert 0 < len(refined[0].split()) <= 19 * keep + 1
