"""IGPO (Wang et al. 2025, arXiv 2510.14967): the reward of a turn is the increase in a gold answer's probability.

v_t is the probability per token:

    v_t = exp(1/L sum_j log pi(a_j | q, o_<=t, a_<j))    a: a gold answer, L tokens; o_<=t: t turns, what they found
    r_t = v_t - v_(t-1)         for t < T
    r_T = F1(answer, golds)     for the last turn, where the format holds; else -2 (its code)

`gain` "log_probability" is used by the script of its code: v_t without the exp, the mean log-prob in nats. The format
holds if an answer was closed, and each think, search and answer tag is closed before the next of the same name opens.
With gamma 1 the gains telescope: the return-to-go of turn t is r_T + v_(T-1) - v_(t-1).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from thresher.rewards.measures import answer_measures
from thresher.rewards.papers.search import valid_searches
from thresher.rewards.reward import RewardInput, RewardResult, Source
from thresher.rewards.tags import final_answer, tag_sequence

Gain = Literal["probability", "log_probability"]
BROKEN = -2.0


def turn_gains(scores: Sequence[Mapping[str, Any]], turns: int, gain: Gain = "probability") -> list[float]:
    """Return r_t of each turn of a trajectory, in nats if `gain` is of log-probs. It is 0 for the last turn, and for a
    turn without a score before or after it. scores: as in RewardInput; of two at the same turn the last counts."""
    means = {one["turns"]: math.fsum(one["logprobs"]) / len(one["logprobs"]) for one in scores if one["logprobs"]}
    values = {turn: math.exp(mean) if gain == "probability" else mean for turn, mean in means.items()}
    known = [turn in values and turn + 1 in values for turn in range(turns - 1)]
    return [values[turn + 1] - values[turn] if both else 0.0 for turn, both in enumerate(known)] + [0.0] * (turns > 0)


def igpo_reward(attempt: RewardInput, *, gain: Gain = "probability") -> RewardResult:
    """Return the outcome reward, with one gain per turn as `turns`, 0 for the last.

    Parts: outcome (the reward) and gain (the sum over turns). Measures: em, f1, answered, searches (valid ones).
    """
    answer = final_answer(attempt.pieces)
    measures = answer_measures(answer, attempt.golds)
    outcome = float(measures["f1"]) if answer is not None and _tags_close(attempt) else BROKEN
    gains = turn_gains(attempt.scores, sum(piece.source is Source.POLICY for piece in attempt.pieces), gain)
    parts = {"outcome": outcome, "gain": math.fsum(gains), **measures, "searches": len(valid_searches(attempt.pieces))}
    return RewardResult(outcome, parts, answer, turns=gains)


def _tags_close(attempt: RewardInput) -> bool:
    """Return whether every opened tag is closed before the next of the same name."""
    open_tags = set[str]()
    for event in tag_sequence(attempt.pieces, ("think", "search", "answer")):
        if (event.tag in open_tags) != event.closing:
            return False
        open_tags ^= {event.tag}
    return not open_tags
