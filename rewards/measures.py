"""Measures of an answer, of evidence, of named references and of a ranking, whatever the reward was.

`answer_measures` are the shared metrics: every reward puts their three keys among the parts, so that systems can be
compared by the same numbers. A measure that has no value for a question is None, never a number that would distort a
mean: the caller leaves it out and counts it.

Deliberately absent: means over questions and their confidence intervals (rewards/statistics.py), and every measure that
takes a model.
"""

import math
from collections.abc import Collection, Sequence
from itertools import islice

from thresher.common.errors import UserError, as_whole, shown
from thresher.rewards.text import Golds, Variant, contains_answer, exact_match, f1_score, overlap_f1


def answer_measures(answer: str | None, golds: Golds) -> dict[str, float | int | bool]:
    """em, f1 and answered (an `<answer>` was closed) of a final answer, None where there is none."""
    return {
        "em": answer is not None and exact_match(answer, golds),
        "f1": 0.0 if answer is None else f1_score(answer, golds),
        "answered": answer is not None,
    }


def char_f1(s: str, golds: Golds, *, yes_no: bool = True, variant: Variant = "squad") -> float:
    """`f1_score` with characters in place of tokens, the spaces between words among them, in [0, 1].

    No reward uses it. EviOmni's printed F1 looks like this one (.46 on wrong answers), which a program arrives at that
    counts a string where it means to count a list of tokens; it is here so that such tables can be compared with.
    """
    return overlap_f1(s, golds, tuple, yes_no=yes_no, variant=variant)


def sub_em(s: str, golds: Golds) -> bool:
    """Return whether any gold is a plain substring of `s`, both normalised. This is lenient: it finds "no" in
    "know"."""
    return contains_answer(s, golds, substring=True)


def answer_recalled(text: str, golds: Golds) -> bool:
    """Return whether a piece of evidence, or a rationale, holds a gold as a run of whole tokens (EviOmni's answer
    recall, by Eval-RAR's rule of containment). The mean over questions is AR."""
    return contains_answer(text, golds)


def compression_ratio(length_of_passages: int, length_of_evidence: int) -> float | None:
    """EviOmni's CR: how many times shorter the evidence is than the passages, both in one unit; None where the evidence
    is empty. Below 1 where it is longer."""
    return length_of_passages / length_of_evidence if length_of_evidence > 0 else None


def recall_at(relevant: Sequence[bool], k: int) -> float:
    """1 where one of the first `k` passages is relevant, else 0: how open-domain QA counts recall, for nobody knows
    how many passages of a corpus hold the answer."""
    return float(any(islice(relevant, _checked(k))))


def ndcg_at(relevant: Sequence[bool], k: int) -> float:
    """Normalised discounted cumulative gain of a ranking, in [0, 1]; `relevant` in the order of the ranks.

        DCG@k = sum over ranks i = 1..k of relevant_i / log2(i + 1),    NDCG@k = DCG@k / DCG@k of the best order

    The best order is that of the passages given, all of them, also those behind `k`. 0 where none is relevant.
    """

    def gain(ranking: Sequence[bool]) -> float:
        return math.fsum(1 / math.log2(rank + 1) for rank, hit in enumerate(islice(ranking, k), start=1) if hit)

    _checked(k)
    best = gain(sorted(map(bool, relevant), reverse=True))
    return gain(relevant) / best if best else 0.0


def relevance_scores(named: Collection[int] | None, gold: Collection[int]) -> tuple[float, float] | None:
    """Precision and recall of the references that were named; None where no reference is gold.

    Nothing named, or nothing that could be read (None), has precision 0: to name nothing is no way to be precise.
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
