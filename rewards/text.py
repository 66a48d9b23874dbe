"""Text measures of open-domain question answering: normalisation, exact match, token F1, containment.

- A text that is empty after normalisation ("", "The", "...") matches nothing, in every measure.
- `contains_answer` never finds the golds yes and no, because they occur in almost any text, unless `substring` is set.
- Punctuation is deleted, not replaced by a space, as in SQuAD's script: "U.S." is "us" and "Paris/London" is one token.
  Only ASCII punctuation counts; curly quotes and dashes stay, as in the published scores.
- "arena" is ARENA's Appendix C.1: SQuAD's steps, and an underscore becomes a space ("New_York" is "new york", "U.S." is
  "us"). It does so before punctuation is removed [assumed]: in the printed order nothing is left of it by then.
  "arena_code" is its released code's, TriviaQA's: all punctuation and the quotes ‘ ’ ´ become spaces ("U.S." is "u s").
  The F1 of Appendix C.2 has no rule for yes and no.

`golds` is one acceptable answer or a list of them; the best one counts, and an empty list matches nothing.
"""

import re
import string
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from thresher.common.errors import UserError, shown

Variant = Literal["squad", "arena", "arena_code"]
Golds = str | Sequence[str]

YES_NO = frozenset({"yes", "no", "noanswer"})

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_SPACED = string.punctuation + "\u2018\u2019\u00b4"
_PUNCTUATION: dict[str, Mapping[int, int | None]] = {
    "squad": str.maketrans("", "", string.punctuation),
    "arena": str.maketrans("_", " ", string.punctuation.replace("_", "")),
    "arena_code": str.maketrans(_SPACED, " " * len(_SPACED)),
}


def normalize_answer(s: str, variant: Variant = "squad") -> str:
    """Convert to lower case; remove ASCII punctuation, articles (a, an, the) and extra white space. Idempotent.

    "squad" deletes punctuation ("U.S." -> "us"); "arena" does too, but turns "_" into a space; "arena_code" turns
    punctuation and ‘ ’ ´ into spaces ("u s").
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
    """Return F1 of the overlap of normalised tokens (as multisets), the best over the golds, in [0, 1].

    yes_no: as in HotpotQA's script, F1 is 0 if one side is yes, no or noanswer and the other is not the same.
    """
    return overlap_f1(s, golds, str.split, yes_no=yes_no, variant=variant)


def overlap_f1(
    s: str, golds: Golds, units: Callable[[str], Sequence[str]], *, yes_no: bool = True, variant: Variant = "squad"
) -> float:
    """Return `f1_score` over the units of a normalised text: tokens, or characters in `char_f1`."""
    answer = normalize_answer(s, variant)
    normal = (normalize_answer(gold, variant) for gold in as_golds(golds))
    return max((_f1(answer, gold, units, yes_no) for gold in normal), default=0.0)


def contains_answer(text: str, golds: Golds, *, substring: bool = False, variant: Variant = "squad") -> bool:
    """Return whether any gold occurs in `text`, both normalised, as a run of whole tokens ("art" is not in "party").

    The golds yes, no and noanswer are never found. substring: a plain test for a substring, as in Eval-RAR's Eq. 4,
    including yes and no (so "no" is found in "I do not know").
    """
    normal = normalize_answer(text, variant)
    wanted = [gold for gold in (normalize_answer(gold, variant) for gold in as_golds(golds)) if gold]
    if substring:
        return any(gold in normal for gold in wanted)
    padded = f" {normal} "
    return any(f" {gold} " in padded for gold in wanted if gold not in YES_NO)


def as_golds(golds: Golds) -> list[str]:
    """Return `golds` as a list. UserError if one is not a string, for example a number read from JSON."""
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
    # 2PR/(P+R) with P = common/|answer| and R = common/|gold|; in this form equal sides give exactly 1.
    return 2 * common / (len(answer_units) + len(gold_units)) if common else 0.0
