"""LLMLingua-2: the words that a classifier of tokens would keep, whatever the question.

    p(word) = mean over its tokens of p(keep),    kept: p(word) >= the (1 - keep) quantile over all passages' words

(Pan et al. 2024, "LLMLingua-2", arXiv:2403.12968, section 3.2; the classifier is retrieval/encoders/
token_classifier.py.) Words are kept as they stand, punctuation that touches them included. Its code takes the quantile
within each stretch of 512 tokens and weighs words by their tokens; here each word of a question's passages is one.

Deliberately absent: tokens that are kept by force, and a choice among passages before that among words.
"""

from collections.abc import Sequence

from thresher.engine.refiners.spans import lines, most
from thresher.retrieval.encoders.token_classifier import TokenClassifier
from thresher.retrieval.questions import Question


class LlmLingua2:
    def __init__(self, classifier: TokenClassifier, keep: float) -> None:
        self._classifier, self._keep = classifier, keep

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        return self._classifier.count_tokens(texts)

    def refine(self, questions: Sequence[Question]) -> list[str]:
        found = iter(self._classifier.words([p.text for question in questions for p in question.passages]))
        kept = []
        for question in questions:
            passages = [next(found) for _ in question.passages]
            keep = iter(most([value for words in passages for _, value in words], self._keep))
            kept.append(lines([[word for word, _ in words if next(keep)] for words in passages]))
        return kept
