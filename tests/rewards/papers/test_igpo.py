"""Tests of IGPO's reward, worked out by hand: gains of turns, the outcome, and the format."""

from math import log
from typing import Any

import pytest
from reward_cases import attempt

from thresher.rewards import igpo_reward
from thresher.rewards.papers.igpo import turn_gains


def scored(turns: int, *probabilities: float) -> dict[str, Any]:
    logprobs = [log(p) for p in probabilities]
    return {"context": "\n<answer>", "text": "Paris", "turns": turns, "logprobs": logprobs}


# Geometric means: .2, .5, .6.
SCORES = [scored(0, 0.1, 0.4), scored(1, 0.5, 0.5), scored(2, 0.9, 0.4)]
SEARCH, PASSAGE = "p:<think>t</think><search>q</search>", "r:<information>Paris</information>"
PARTS = [SEARCH, PASSAGE, SEARCH, PASSAGE, "p:<think>t</think><answer>Paris</answer>"]


def test_a_turn_earns_what_it_adds_to_the_probability() -> None:
    result = igpo_reward(attempt(*PARTS, golds=("Paris France", "Lyon"), scores=SCORES))
    assert result.turns == pytest.approx([0.3, 0.1, 0.0])
    assert result.reward == pytest.approx(2 / 3) and result.answer == "Paris"
    parts = {"outcome": result.reward, "gain": pytest.approx(0.4), "em": False, "answered": True, "searches": 2}
    assert result.parts == {**parts, "f1": result.reward}
    # From log-probs: the means are log .2, log .5 and log .6.
    by_log = igpo_reward(attempt(*PARTS, scores=SCORES), gain="log_probability")
    assert by_log.turns == pytest.approx([log(0.5 / 0.2), log(0.6 / 0.5), 0.0])


def test_what_was_not_scored_adds_nothing() -> None:
    assert turn_gains(SCORES, 4) == pytest.approx([0.3, 0.1, 0.0, 0.0])  # nothing after the third turn
    assert turn_gains(SCORES, 2) == pytest.approx([0.3, 0.0])  # the last turn has none, although a score follows it
    assert turn_gains(SCORES[:1] + SCORES[2:], 3) == [0.0, 0.0, 0.0]
    assert turn_gains([], 3) == [0.0] * 3 and turn_gains([], 0) == turn_gains(SCORES, 0) == []


@pytest.mark.parametrize(
    ("parts", "reward"),
    [
        (PARTS, 1.0),
        (["p:<answer>Rome</answer>"], 0.0),
        (["p:<answer></answer>"], 0.0),  # closed, but wrong
        (["p:so be it"], -2.0),
        (["p:<answer>Paris"], -2.0),
        (["p:<think>t<answer>Paris</answer>"], -2.0),
        (["p:t</think><answer>Paris</answer>"], -2.0),
        (["p:<think><think></think></think><answer>Paris</answer>"], -2.0),
        (["p:<search>q", "r:</search>", "p:<answer>Paris</answer>"], -2.0),
        (["q:<answer>Paris</answer>", "r:<answer>Paris</answer>", "p:<answer>Rome</answer>"], 0.0),
        (["q:<think>", "p:<answer>Paris</answer>"], 1.0),  # the prompt's tags do not count for the format
    ],
)
def test_the_outcome(parts: list[str], reward: float) -> None:
    result = igpo_reward(attempt(*parts))
    assert result.reward == result.parts["outcome"] == reward
