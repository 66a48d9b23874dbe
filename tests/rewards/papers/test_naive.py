"""Naive GRPO: form and exact match, apart."""

import pytest
from hypothesis import given, settings
from reward_cases import GOLDS, LONG, PIECES, attempt

from thresher.rewards import RewardInput, RewardResult, TextSegment, naive_reward

CASES = [
    # what it tries, pieces, format, answer
    ("right", ["q:q", "p:<think>x</think>\n<answer>Paris</answer>"], 1, 1),
    ("wrong", ["p:<think>x</think><answer>Rome</answer>"], 1, 0),
    ("right, not thought about", ["p:<answer>Paris</answer>"], 0, 1),
    ("nothing", [], 0, 0),
    ("no answer", ["p:<think>Paris</think>"], 0, 0),
    ("right, then talk", ["p:<think>x</think><answer>Paris</answer> I am sure."], 0, 1),
    ("two answers", ["p:<think>x</think><answer>Rome</answer><answer>Paris</answer>"], 0, 0),
    ("an answer in the thought", ["p:<think><answer>Paris</answer></think><answer>Rome</answer>"], 0, 1),
    ("the prompt's example", ["q:<think>x</think><answer>Paris</answer>", "p:?"], 0, 0),
    ("a passage's answer", ["r:<think>x</think><answer>Paris</answer>", "p:?"], 0, 0),
    ("the end of text", ["p:<think>x</think><answer>Paris</answer><|im_end|>"], 1, 1),
    ("an empty answer", ["p:<think>x</think><answer></answer>"], 1, 0),
]


@pytest.mark.parametrize(("parts", "form", "right"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_reward(parts: list[str], form: float, right: float) -> None:
    result = naive_reward(attempt(*parts))
    assert (result.parts["format"], result.parts["answer"], result.reward) == (form, right, form + right)


def test_parts() -> None:
    assert naive_reward(attempt("p:<think>x</think><answer>Paris, France</answer>")) == RewardResult(
        1.0, {"format": 1.0, "answer": 0.0, "em": False, "f1": pytest.approx(2 / 3), "answered": True}, "Paris, France"
    )


@settings(derandomize=True, max_examples=200, deadline=None)
@given(PIECES, GOLDS)
def test_any_bytes(pieces: list[TextSegment], golds: list[str]) -> None:
    result = naive_reward(RewardInput(pieces=pieces, golds=golds))
    assert result.reward in (0.0, 1.0, 2.0)
    assert naive_reward(RewardInput(pieces=pieces, golds=golds)) == result


@pytest.mark.parametrize("number", range(len(LONG)))
def test_a_hundred_kilobytes(number: int) -> None:
    result = naive_reward(attempt(f"p:<think>{LONG[number]}</think><answer>Paris</answer>"))
    assert result.parts["format"] == (not any(tag in LONG[number] for tag in ("<answer>", "</answer>")))
