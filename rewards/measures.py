"""Measures of an answer, of evidence, of named references and of a ranking, independent of the reward.

`answer_measures` are the shared metrics: every reward includes their three keys in its parts. A measure without a value
for a question is None; the caller leaves it out of means and counts it.
"""

import math
from collections.abc import Collection, Sequence
from itertools import islice

from thresher.common.errors import UserError, as_whole, shown
from thresher.rewards.text import Golds, Variant, contains_answer, exact_match, f1_score, overlap_f1


def answer_measures(answer: str | None, golds: Golds) -> dict[str, float | int | bool]:
    """Return em, f1 and answered (an `<answer>` was closed) of a final answer. answer: None if there is none."""
    return {
        "em": answer is not None and exact_match(answer, golds),
        "f1": 0.0 if answer is None else f1_score(answer, golds),
        "answered": answer is not None,
    }


def char_f1(s: str, golds: Golds, *, yes_no: bool = True, variant: Variant = "squad") -> float:
    """Return `f1_score` over characters, including spaces between words, in [0, 1].

    No reward uses it. EviOmni's printed F1 resembles it (.46 on wrong answers); it serves to compare with such tables.
    """
    return overlap_f1(s, golds, tuple, yes_no=yes_no, variant=variant)


def sub_em(s: str, golds: Golds) -> bool:
    """Return whether any gold is a plain substring of `s`, both normalised ("no" is found in "know")."""
    return contains_answer(s, golds, substring=True)


def answer_recalled(text: str, golds: Golds) -> bool:
    """Return whether a text contains a gold as a run of whole tokens (EviOmni's answer recall; the mean is AR)."""
    return contains_answer(text, golds)


def compression_ratio(length_of_passages: int, length_of_evidence: int) -> float | None:
    """Return EviOmni's CR: length of passages / length of evidence, in equal units; None for empty evidence."""
    return length_of_passages / length_of_evidence if length_of_evidence > 0 else None


def recall_at(relevant: Sequence[bool], k: int) -> float:
    """Return 1 if one of the first `k` passages is relevant, else 0: recall as in open-domain QA."""
    return float(any(islice(relevant, _checked(k))))


def ndcg_at(relevant: Sequence[bool], k: int) -> float:
    """Return the normalised discounted cumulative gain of a ranking, in [0, 1]; 0 if no passage is relevant.

        DCG@k = sum over ranks i = 1..k of relevant_i / log2(i + 1),    NDCG@k = DCG@k / DCG@k of the best order

    relevant: for all passages in the order of their ranks. The best order includes passages after rank `k`.
    """

    def gain(ranking: Sequence[bool]) -> float:
        return math.fsum(1 / math.log2(rank + 1) for rank, hit in enumerate(islice(ranking, k), start=1) if hit)

    _checked(k)
    best = gain(sorted(map(bool, relevant), reverse=True))
    return gain(relevant) / best if best else 0.0


def relevance_scores(named: Collection[int] | None, gold: Collection[int]) -> tuple[float, float] | None:
    """Return precision and recall of the named references; None if no reference is gold.

    If none is named, or the names could not be parsed (None), precision is 0.
    """
    named, gold = frozenset(named or ()), frozenset(gold)
    if not gold:
        return None
    common = len(named & gold)
    return (common / len(named) if named else 0.0), common / len(gold)


def _checked(k: int) -> int:
    if (as_whole(k) or 0) < 1:
        raise UserError(f"k is {shown(k)}: expected the number of first passages, at least 1")
    return k
