"""Naive GRPO, ARENA's baseline: one pass, `<think>..</think><answer>..</answer>`, rewarded for form and exact match.

    R = format + answer,    each 1 or 0, scored apart

Deliberately absent: everything that the other systems add; that is what it is for.
"""

from thresher.rewards.attempt import RewardInput
from thresher.rewards.grammar import outline
from thresher.rewards.measures import answer_measures
from thresher.rewards.result import RewardResult
from thresher.rewards.tags import final_answer

SECTIONS = ("think", "answer")


def naive_reward(attempt: RewardInput) -> RewardResult:
    """format: the two sections, in order, and nothing else (grammar.py). answer: EM against any gold, in whatever form.

    Parts: format, answer; measures em, f1, answered.
    """
    answer = final_answer(attempt.pieces)
    measures = answer_measures(answer, attempt.golds)
    formatted = float(outline(attempt.pieces, SECTIONS) == SECTIONS)
    matched = float(measures["em"])
    return RewardResult(formatted + matched, {"format": formatted, "answer": matched, **measures}, answer)
