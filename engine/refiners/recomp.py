"""RECOMP's extractive compressor: the sentences whose vectors are next to the question's.

    score(s) = <enc_q(q), enc_s(s)>,    kept: the first N of all passages' sentences, in the passages' order

(Xu, Shi and Choi 2024, "RECOMP", arXiv:2310.04408, section 3.1; N is 1 for NQ and TriviaQA there, 2 for HotpotQA.) Any
encoder of `retrieval.encoders` serves: RECOMP's own are Contrievers that were trained on which sentence makes the
answer likely (here: recomp_train.py), and one that was not trained so is its baseline. [assumed]: titles are no part
of a sentence.
"""

from collections.abc import Sequence

import numpy as np

from thresher.engine.refiners.spans import lines, sentence_texts
from thresher.retrieval.encoders.learned import LearnedEncoder
from thresher.retrieval.questions import Question


class Recomp:
    """`count` sentences of a question, or as many as there are. Of sentences with the same score the first wins."""

    def __init__(self, encoder: LearnedEncoder, count: int) -> None:
        self._encoder, self._count = encoder, count

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return self._encoder.count_tokens(list(texts))

    def refine(self, questions: Sequence[Question]) -> list[str]:
        parts = [[sentence_texts(passage.text) for passage in question.passages] for question in questions]
        flat = [sentence for passages in parts for part in passages for sentence in part]
        queries_QH = self._encoder.encode_queries([question.question for question in questions])
        vectors_NH = self._encoder.encode_passages(flat)
        kept, at = [], 0
        for query_H, passages in zip(queries_QH, parts, strict=True):
            count = sum(map(len, passages))
            scores_N = vectors_NH[at : at + count].astype(np.float64) @ query_H.astype(np.float64)
            first = set(np.argsort(-scores_N, kind="stable")[: self._count].tolist())
            numbers = iter(range(count))
            kept.append(lines([[sentence for sentence in part if next(numbers) in first] for part in passages]))
            at += count
        return kept
