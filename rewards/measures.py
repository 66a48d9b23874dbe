"""Measures of an answer, of evidence, of named references and of a ranking, whatever the reward was.

`answer_measures` are the shared metrics: every reward puts their three keys among its parts. A measure without a value
for a question is None: the caller leaves it out of means and counts it.
"""

import math
from collections.abc import Collection, Sequence
from itertools import islice

from thresher.common.errors import UserError, as_whole, shown
from thresher.rewards.text import Golds, Variant, contains_answer, exact_match, f1_score, overlap_f1


def answer_measures(answer: str | None, golds: Golds) -> dict[str, float | int | bool]:
    """Return em, f1 and answered (an `<answer>` was closed) of a final answer; None: there is none."""
    return {
        "em": answer is not None and exact_match(answer, golds),
        "f1": 0.0 if answer is None else f1_score(answer, golds),
        "answered": answer is not None,
    }


def char_f1(s: str, golds: Golds, *, yes_no: bool = True, variant: Variant = "squad") -> float:
    """`f1_score` of characters, spaces between words included, in [0, 1].

    No reward uses it. EviOmni's printed F1 looks like it (.46 on wrong answers); it is for comparing with such tables.
    """
    return overlap_f1(s, golds, tuple, yes_no=yes_no, variant=variant)


def sub_em(s: str, golds: Golds) -> bool:
    """Return whether any gold is a plain substring of `s`, both normalised ("no" is found in "know")."""
    return contains_answer(s, golds, substring=True)


def answer_recalled(text: str, golds: Golds) -> bool:
    """Return whether a text holds a gold as a run of whole tokens (EviOmni's answer recall; the mean is AR)."""
    return contains_answer(text, golds)


def compression_ratio(length_of_passages: int, length_of_evidence: int) -> float | None:
    """EviOmni's CR: length of the passages over that of the evidence, in one unit; None for empty evidence."""
    return length_of_passages / length_of_evidence if length_of_evidence > 0 else None


def recall_at(relevant: Sequence[bool], k: int) -> float:
    """Return 1 where one of the first `k` passages is relevant, else 0, as open-domain QA counts recall."""
    return float(any(islice(relevant, _checked(k))))


def ndcg_at(relevant: Sequence[bool], k: int) -> float:
    """Return the normalised discounted cumulative gain of a ranking, in [0, 1]; 0 where no passage is relevant.

        DCG@k = sum over ranks i = 1..k of relevant_i / log2(i + 1),    NDCG@k = DCG@k / DCG@k of the best order

    relevant: of all passages in the order of their ranks. The best order takes those behind `k` too.
    """

    def gain(ranking: Sequence[bool]) -> float:
        return math.fsum(1 / math.log2(rank + 1) for rank, hit in enumerate(islice(ranking, k), start=1) if hit)

    _checked(k)
    best = gain(sorted(map(bool, relevant), reverse=True))
    return gain(relevant) / best if best else 0.0


def relevance_scores(named: Collection[int] | None, gold: Collection[int]) -> tuple[float, float] | None:
    """Return precision and recall of the references named; None where no reference is gold.

    With nothing named, or nothing that could be read (None), precision is 0.
    """
    named, gold = frozenset(named or ()), frozenset(gold)
    if not gold:
        return None
    common = len(named & gold)
    return (common / len(named) if named else 0.0), common / len(gold)


def _checked(k: int) -> int:
    if (as_whole(k) or 0) < 1:
        raise UserError(f"k is {shown(k)}: a ranking is measured over its first passages, at least 1")
    return k
