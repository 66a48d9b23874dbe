"""ARENA: the answer names its supporting references, and is rewarded for naming the right ones.

    <relevance>[1,5]</relevance> <analysis>..</analysis> <answer>..</answer>

    R = format + accuracy + relevance + bonus,    at most 13

    format     1 if the transcript is the three sections, in order, and nothing else
    accuracy   1 if the answer equals a gold (EM); variants: its F1, or a judge's yes or no (Section 3.3, Appendix G)
    relevance  1 if the named indices are the gold set, .5 if they share one with it, else 0
    bonus      10 if the other three are all exactly 1 [assumed, for F1]

The parts are scored independently: a correct answer also counts in a wrong format. The released code accepts one JSON
list of indices; here "1, 5" and "[1],[5]" are accepted too. It allows text after the last section; here that is a wrong
format. EM and F1 normalise texts as in Appendix C.1 (rewards/text.py, "arena"); the released code's normalisation is
the variant "arena_code".

Naive GRPO is ARENA's baseline: `<think>..</think><answer>..</answer>`, R = format + answer, each 1 or 0.
"""

import re
from collections.abc import Sequence
from typing import Literal, get_args

from thresher.common.errors import UserError
from thresher.rewards.measures import answer_measures
from thresher.rewards.reward import RewardInput, RewardResult, TextSegment
from thresher.rewards.tags import blocks, final_answer, outline, up_to_answer
from thresher.rewards.text import Variant, exact_match, f1_score

Accuracy = Literal["em", "f1", "judge"]

SECTIONS = ("relevance", "analysis", "answer")
NAIVE_SECTIONS = ("think", "answer")
BONUS = 10.0

# Adjacent parts cannot match the same white space, so backtracking is bounded for any text.
_ITEMS = r"[0-9]{1,9}\s*(?:,\s*[0-9]{1,9}\s*)*"
_BARE = re.compile(rf"\s*{_ITEMS}")
_LISTS = re.compile(rf"\s*\[\s*(?:{_ITEMS})?\]\s*(?:(?:,\s*)?\[\s*(?:{_ITEMS})?\]\s*)*")


def parse_indices(text: str) -> frozenset[int] | None:
    """Parse a relevance section: "[1,5]", "1, 5", "[1],[5]" and "[1] [5]" are all {1, 5}, "[]" is the empty set.

    None for anything else (words, ranges, signs, nothing at all).
    """
    if _BARE.fullmatch(text) or _LISTS.fullmatch(text):
        return frozenset(map(int, re.findall("[0-9]+", text)))
    return None


def named_indices(pieces: Sequence[TextSegment]) -> frozenset[int] | None:
    """Return the indices in the policy's first closed `<relevance>` up to its final answer; None if there are none."""
    found = blocks(up_to_answer(pieces), "relevance")
    return parse_indices(found[0].text) if found else None


def arena_reward(
    attempt: RewardInput,
    *,
    accuracy: Accuracy = "em",
    relevance_reward: bool = True,
    max_indices: int | None = None,
    variant: Variant = "arena",
) -> RewardResult:
    """Compute ARENA's reward.

    accuracy: measure of the answer; "judge" uses `attempt.verdict`. relevance_reward: False is a control that is not in
    the paper, format + accuracy alone; relevance is still measured. max_indices: an answer that names more gets no
    relevance of .5 (without a limit, naming every reference scores .5). variant: normalisation of "em" and "f1":
    "arena" is that of Appendix C.1, "arena_code" the released code's, "squad" that of other systems. If it is unknown
    which references are gold, relevance is 0 [assumed]; if none is gold, naming none is a full match [assumed].

    Parts: format, accuracy, relevance, bonus, whose sum is the reward (in the control, without relevance); measures em,
    f1, answered, named (number of references).
    """
    if accuracy not in get_args(Accuracy):
        raise UserError(f"accuracy {accuracy!r} is unknown; choose one of {', '.join(get_args(Accuracy))}")
    if max_indices is not None and max_indices < 1:
        raise UserError(f"max_indices is {max_indices}; give at least 1, or leave it out for no limit")
    answer = final_answer(attempt.pieces)
    named, gold = named_indices(attempt.pieces), _gold(attempt)
    parts = {
        "format": float(outline(attempt.pieces, SECTIONS) == SECTIONS),
        "accuracy": _accuracy(attempt, answer, accuracy, variant),
        "relevance": _relevance(named, gold, max_indices),
    }
    parts["bonus"] = BONUS if relevance_reward and all(part == 1.0 for part in parts.values()) else 0.0
    reward = sum(part for name, part in parts.items() if relevance_reward or name != "relevance")
    measures = answer_measures(answer, attempt.golds) | {"named": len(named or ())}
    return RewardResult(reward, parts | measures, answer)


def _accuracy(attempt: RewardInput, answer: str | None, accuracy: Accuracy, variant: Variant) -> float:
    if not answer:
        return 0.0
    if accuracy == "em":
        return float(exact_match(answer, attempt.golds, variant=variant))
    if accuracy == "f1":
        return f1_score(answer, attempt.golds, yes_no=variant == "squad", variant=variant)
    if attempt.verdict is None:
        raise UserError(
            "accuracy = 'judge' needs a judge's verdict on every answer, and there is none; "
            "set up a judge, or choose accuracy = 'em' or 'f1'"
        )
    return float(attempt.verdict)


def _relevance(named: frozenset[int] | None, gold: frozenset[int] | None, max_indices: int | None) -> float:
    if named is None or gold is None:
        return 0.0
    if named == gold:
        return 1.0
    too_many = max_indices is not None and len(named) > max_indices
    return 0.5 if named & gold and not too_many else 0.0


def _gold(attempt: RewardInput) -> frozenset[int] | None:
    if attempt.gold_indices is None:
        return None
    for index in attempt.gold_indices:
        if index < 1 or (attempt.passages and index > len(attempt.passages)):
            there = f"there are {len(attempt.passages)} passages" if attempt.passages else "the first passage is 1"
            raise UserError(f"gold_indices: {index} is out of range: {there}; count them from 1")
    return frozenset(attempt.gold_indices)


def naive_reward(attempt: RewardInput) -> RewardResult:
    """Compute naive GRPO's reward: 1 for the format (see `outline`) plus 1 for an exact match in any format.

    Parts: format, answer; measures em, f1, answered.
    """
    answer = final_answer(attempt.pieces)
    measures = answer_measures(answer, attempt.golds)
    formatted = float(outline(attempt.pieces, NAIVE_SECTIONS) == NAIVE_SECTIONS)
    matched = float(measures["em"])
    return RewardResult(formatted + matched, {"format": formatted, "answer": matched, **measures}, answer)
