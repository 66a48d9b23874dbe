"""Text measures of open-domain question answering: normalisation, exact match, token F1, containment.

They decide most of every reward, so their corners are stated rather than left to chance:

- An answer or a gold that normalises to nothing ("", "The", "...") matches nothing, in every measure.
- A gold of yes or no is found in almost any text, so `contains_answer` never counts it.
- Punctuation is deleted, not spaced, as in SQuAD's script: "U.S." is "us" and "Paris/London" is one token.
  Only ASCII punctuation counts as such; curly quotes and dashes stay, as they do in the published scores.
- ARENA's code takes TriviaQA's normalisation instead: punctuation, underscores and the quotes ‘ ’ ´ among it, becomes
  a space ("New_York" is "new york", "U.S." is "u s", "twenty-one" is "twenty one"). Its F1 knows no yes and no.

`golds` is one acceptable answer or a list of them; the best one counts, and an empty list matches nothing.

Deliberately absent: Unicode composition (NFC) and number words, since no published score applies them.
Substring containment ("sub-EM") is a switch of `contains_answer`. What only evaluation asks for is in measures.py.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from thresher.common.errors import UserError, shown

Variant = Literal["squad", "arena"]
Golds = str | Sequence[str]

YES_NO = frozenset({"yes", "no", "noanswer"})

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_SPACED = string.punctuation + "\u2018\u2019\u00b4"
_PUNCTUATION: dict[str, Mapping[int, int | None]] = {
    "squad": str.maketrans("", "", string.punctuation),
    "arena": str.maketrans(_SPACED, " " * len(_SPACED)),
}


def normalize_answer(s: str, variant: Variant = "squad") -> str:
    """Lower case, no ASCII punctuation, no articles (a, an, the), single spaces, no space at the ends.

    "squad" deletes punctuation ("U.S." -> "us"); "arena" turns it, underscores and ‘ ’ ´ included, into spaces ("u s").
    Idempotent. Raises UserError for another variant.
    """
    if not isinstance(s, str):
        raise UserError(f"the text is {shown(s)}: write it as a string")
    if not isinstance(variant, str) or variant not in _PUNCTUATION:
        raise UserError(f"unknown normalisation {variant!r}: choose one of {', '.join(_PUNCTUATION)}")
    bare = s.lower().translate(_PUNCTUATION[variant])
    return " ".join(_ARTICLES.sub(" ", bare).split())


def exact_match(s: str, golds: Golds, *, variant: Variant = "squad") -> bool:
    """Return whether `s` equals any gold after normalisation."""
    answer = normalize_answer(s, variant)
    return bool(answer) and any(answer == normalize_answer(gold, variant) for gold in as_golds(golds))


def f1_score(s: str, golds: Golds, *, yes_no: bool = True, variant: Variant = "squad") -> float:
    """F1 of the overlap of normalised tokens (each counted as often as it occurs), the best over the golds,
    in [0, 1].

    With `yes_no`, as in HotpotQA's official script, F1 is 0 unless both sides are the same word where either
    side is yes, no or noanswer.
    """
    return overlap_f1(s, golds, str.split, yes_no=yes_no, variant=variant)


def overlap_f1(
    s: str, golds: Golds, units: Callable[[str], Sequence[str]], *, yes_no: bool = True, variant: Variant = "squad"
) -> float:
    """`f1_score` over whatever `units` makes of a normalised text: its tokens there, its characters in `char_f1`."""
    answer = normalize_answer(s, variant)
    normal = (normalize_answer(gold, variant) for gold in as_golds(golds))
    return max((_f1(answer, gold, units, yes_no) for gold in normal), default=0.0)


def contains_answer(text: str, golds: Golds, *, substring: bool = False, variant: Variant = "squad") -> bool:
    """Return whether any gold occurs in `text`, both normalised, as a run of whole tokens ("art" is not in "party").

    Golds that are yes, no or noanswer, or that normalise to nothing, never occur. `substring` is the plain test of the
    released code instead: characters rather than tokens, yes and no included (so "no" is found in "I do not know").
    Golds that normalise to nothing are left out of it, since they would be found everywhere.
    """
    normal = normalize_answer(text, variant)
    wanted = [gold for gold in (normalize_answer(gold, variant) for gold in as_golds(golds)) if gold]
    if substring:
        return any(gold in normal for gold in wanted)
    padded = f" {normal} "
    return any(f" {gold} " in padded for gold in wanted if gold not in YES_NO)


def as_golds(golds: Golds) -> list[str]:
    """`golds` as a list. Raises UserError where one is not a string, such as a bare number read from JSON."""
    if isinstance(golds, str):
        return [golds]
    if not isinstance(golds, Iterable):
        raise UserError(f"the gold answers are {shown(golds)}: write a string or a list of strings")
    golds = list(golds)
    for gold in golds:
        if not isinstance(gold, str):
            raise UserError(f"gold answer {gold!r} is a {type(gold).__name__}: write it as a string")
    return golds


def _f1(answer: str, gold: str, units: Callable[[str], Sequence[str]], yes_no: bool) -> float:
    if yes_no and answer != gold and (answer in YES_NO or gold in YES_NO):
        return 0.0
    answer_units, gold_units = units(answer), units(gold)
    common = sum((Counter(answer_units) & Counter(gold_units)).values())
    # 2PR/(P+R) with P = common/|answer| and R = common/|gold|; written so, equal sides give exactly 1.
    return 2 * common / (len(answer_units) + len(gold_units)) if common else 0.0
