"""Tests of ARENA's reward: its four parts, worked out by hand, forms of references, and what fools the original."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_cases import attempt

from thresher.rewards import RewardResult, UserError, arena_reward, naive_reward, parse_indices

INDICES: list[tuple[set[int] | None, tuple[str, ...]]] = [
    ({1, 5}, ("[1,5]", "[1, 5]", " [ 5 ,\n1 ] ", "1, 5", "[1],[5]", "[1] [5]", "[5,1,5]")),
    ({1, 2, 5}, ("[1,2],[5]",)),
    ({7}, ("7", "[7]", "[007]")),
    ({0}, ("[0]",)),
    (set(), ("[]", "[],[]")),
    (None, ("", "[1,5", "[1,]", "1,", "[1] and [5]", "[1],5", "[[1],[5]]", "1 5", "[1 5]", "[1-5]", "[-1]", '["1"]')),
    (None, ("[1,5].", "Reference 1", "[12345678901]", "[\u0661]")),  # the last one is a digit of another script
]


@pytest.mark.parametrize(("expected", "texts"), INDICES)
def test_indices(expected: set[int] | None, texts: tuple[str, ...]) -> None:
    assert {text: parse_indices(text) for text in texts} == dict.fromkeys(texts, expected)


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.sampled_from(["", " ", "\n "]), st.booleans())
def test_whatever_order_spacing_and_brackets(numbers: list[int], space: str, apart: bool) -> None:
    written = f",{space}".join(f"[{space}{n}{space}]" if apart else str(n) for n in numbers)
    assert parse_indices(written) == set(numbers)
    if not apart:
        assert parse_indices(f"[{written}]") == set(numbers)
    assert parse_indices(written + " x") is None


def sections(named: str, answer: str = "Paris") -> str:
    return f"p:<relevance>{named}</relevance>\n<analysis>[1] says so, [5] too.</analysis>\n<answer>{answer}</answer>"


CASES = [
    # case, pieces, format, accuracy, relevance (gold 1 and 5)
    ("all right: the maximum", [sections("[1,5]")], 1, 1, 1),
    ("one of two", [sections("[1]")], 1, 1, 0.5),
    ("one too many", [sections("[1,2,5]")], 1, 1, 0.5),
    ("naming every reference", [sections(str(list(range(1, 11))))], 1, 1, 0.5),
    ("none of them", [sections("[2,3]")], 1, 1, 0),
    ("a reference that is not there", [sections("[1,5,99]")], 1, 1, 0.5),
    ("wrong answer", [sections("[1,5]", "Rome")], 1, 0, 1),
    ("text after the last section", [sections("[1,5]") + " I am sure."], 0, 1, 1),
    ("free text inside", [sections("[1,5]").replace("says", "< 2 > <b>says</b>")], 1, 1, 1),
    ("relevance after the answer", ["p:<answer>Paris</answer><relevance>[1,5]</relevance>"], 0, 1, 0),
    ("two relevance sections", ["p:<relevance>[2]</relevance>" + sections("[1,5]")[2:]], 0, 1, 0),
    ("a passage's sections", ["r:" + sections("[1,5]")[2:], "p:?"], 0, 0, 0),
    ("references as retrieved text", ["q:q", "r:[1] Paris </analysis>", sections("[1,5]")], 1, 1, 1),
]


@pytest.mark.parametrize(
    ("parts", "form", "accuracy", "relevance"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_reward(parts: list[str], form: float, accuracy: float, relevance: float) -> None:
    result = arena_reward(attempt(*parts, gold_indices=[1, 5], passages=[("t", "x")] * 10))
    assert [result.parts[part] for part in ("format", "accuracy", "relevance")] == [form, accuracy, relevance]
    bonus = 10 if form == accuracy == relevance == 1 else 0
    assert result.parts["bonus"] == bonus
    assert result.reward == form + accuracy + relevance + bonus


@pytest.mark.parametrize(
    ("parts", "form", "accuracy", "relevance"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_the_control_is_rewarded_for_format_and_accuracy_alone(
    parts: list[str], form: float, accuracy: float, relevance: float
) -> None:
    tried = attempt(*parts, gold_indices=[1, 5], passages=[("t", "x")] * 10)
    result = arena_reward(tried, relevance_reward=False)
    assert result.reward == form + accuracy
    assert (result.parts["relevance"], result.parts["bonus"]) == (relevance, 0.0)


def test_parts_of_the_maximum() -> None:
    result = arena_reward(attempt(sections("[1,5]"), gold_indices=[5, 1, 5]))
    scored = {"format": 1.0, "accuracy": 1.0, "relevance": 1.0, "bonus": 10.0}
    assert result == RewardResult(13.0, scored | {"em": True, "f1": 1.0, "answered": True, "named": 2}, "Paris")


@pytest.mark.parametrize(
    ("gold", "named", "cap", "relevance"),
    [
        ([1, 5], "[1,2,3,4,5]", None, 0.5),
        ([1, 5], "[1,2,3,4,5]", 5, 0.5),
        ([1, 5], "[1,2,3,4,5]", 4, 0.0),  # a cap makes naming all references useless
        ([1, 5], "[1,1,1,2]", 2, 0.5),  # an index named twice counts once
        ([1, 5], "[1,5]", 1, 1.0),  # the gold set is right, whatever its size
        (None, "[1,5]", None, 0.0),
        (None, "[]", None, 0.0),
        ([], "[]", None, 1.0),
        ([], "", None, 0.0),
        ([], "[1]", None, 0.0),
    ],
)
def test_relevance(gold: list[int] | None, named: str, cap: int | None, relevance: float) -> None:
    result = arena_reward(attempt(sections(named), gold_indices=gold), max_indices=cap)
    assert result.parts["relevance"] == relevance


@pytest.mark.parametrize(
    ("answer", "golds", "options", "accuracy", "bonus"),
    [
        ("the paris.", ("Paris",), {}, 1.0, 10.0),
        ("Paris, France", ("Paris",), {}, 0.0, 0.0),
        ("Paris, France", ("Paris",), {"accuracy": "f1"}, 2 / 3, 0.0),
        ("Paris", ("Rome", "Paris"), {"accuracy": "f1"}, 1.0, 10.0),
        ("New_York", ("New York",), {"variant": "squad"}, 0.0, 0.0),
        ("New_York", ("New York",), {}, 1.0, 10.0),
        ("New_York", ("New York",), {"variant": "arena", "accuracy": "f1"}, 1.0, 10.0),
        ("New_York", ("New York",), {"variant": "arena_code"}, 1.0, 10.0),
        ("the U.S.", ("us",), {}, 1.0, 10.0),
        ("the U.S.", ("us",), {"variant": "arena_code"}, 0.0, 0.0),
        ("New-York", ("New York",), {}, 0.0, 0.0),
        ("New-York", ("New York",), {"variant": "arena_code"}, 1.0, 10.0),
        ("no way", ("no",), {"accuracy": "f1"}, 2 / 3, 0.0),  # no rule for yes and no
        ("no way", ("no",), {"accuracy": "f1", "variant": "squad"}, 0.0, 0.0),
        ("", ("",), {}, 0.0, 0.0),
    ],
)
def test_accuracy(answer: str, golds: tuple[str, ...], options: dict[str, Any], accuracy: float, bonus: float) -> None:
    result = arena_reward(attempt(sections("[1]", answer), golds=golds, gold_indices=[1]), **options)
    assert result.parts["accuracy"] == pytest.approx(accuracy)
    assert result.parts["bonus"] == bonus


def test_a_judge_decides_where_it_is_asked_to() -> None:
    def judged(text: str, verdict: bool | None) -> float:
        asked = attempt(text, gold_indices=[1], verdict=verdict)
        return arena_reward(asked, accuracy="judge").reward

    assert judged(sections("[1]", "The city of light"), True) == 13.0
    assert judged(sections("[1]", "Paris"), False) == 2.0
    assert judged("p:<relevance>[1]</relevance>", None) == 1.0  # no answer, nothing to judge
    assert judged("p:<answer> </answer>", True) == 0.0
    with pytest.raises(UserError, match="needs a judge's verdict"):
        judged(sections("[1]"), None)
    assert arena_reward(attempt(sections("[1]"), gold_indices=[1], verdict=False)).reward == 13.0  # EM needs no judge


@pytest.mark.parametrize(
    ("more", "options", "problem"),
    [
        ({"gold_indices": [0]}, {}, "gold_indices: 0 is out of range: the first passage is 1; count them from 1"),
        ({"gold_indices": [1, 3], "passages": [("", "x")] * 2}, {}, "3 is out of range: there are 2 passages"),
        ({"gold_indices": [-1], "passages": [("", "x")]}, {}, "-1 is out of range"),
        ({}, {"max_indices": 0}, "max_indices is 0; give at least 1"),
        ({}, {"accuracy": "bleu"}, "accuracy 'bleu' is unknown; choose one of em, f1, judge"),
        ({}, {"variant": "trivia"}, "squad, arena, arena_code"),
    ],
)
def test_what_is_refused(more: dict[str, Any], options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        arena_reward(attempt(sections("[1]"), **more), **options)


NAIVE = [
    # case, pieces, format, answer
    ("right", ["q:q", "p:<think>x</think>\n<answer>Paris</answer>"], 1, 1),
    ("wrong", ["p:<think>x</think><answer>Rome</answer>"], 1, 0),
    ("partly right", ["p:<think>x</think><answer>Paris, France</answer>"], 1, 0),
    ("right, not thought about", ["p:<answer>Paris</answer>"], 0, 1),
    ("no answer", ["p:<think>Paris</think>"], 0, 0),
    ("right, then talk", ["p:<think>x</think><answer>Paris</answer> I am sure."], 0, 1),
    ("an answer in the thought", ["p:<think><answer>Paris</answer></think><answer>Rome</answer>"], 0, 1),
    ("a passage's answer", ["r:<think>x</think><answer>Paris</answer>", "p:?"], 0, 0),
    ("an empty answer", ["p:<think>x</think><answer></answer>"], 1, 0),
]


@pytest.mark.parametrize(("parts", "form", "right"), [case[1:] for case in NAIVE], ids=[case[0] for case in NAIVE])
def test_naive_reward(parts: list[str], form: float, right: float) -> None:
    result = naive_reward(attempt(*parts))
    assert (result.parts["format"], result.parts["answer"], result.reward) == (form, right, form + right)
    assert result.parts.keys() == {"format", "answer", "em", "f1", "answered"}
