"""Tests of the measures of answers, evidence, rankings and references, with cases worked out by hand."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thresher.rewards import (
    UserError,
    answer_measures,
    answer_recalled,
    char_f1,
    compression_ratio,
    f1_score,
    ndcg_at,
    recall_at,
    relevance_scores,
    sub_em,
)


@pytest.mark.parametrize(
    ("answer", "golds", "expected"),
    [
        (None, ["Paris"], (False, 0.0, False)),
        ("", ["Paris"], (False, 0.0, True)),
        ("the Paris.", ["Rome", "Paris"], (True, 1.0, True)),
        ("Paris, France", ["Paris"], (False, 2 / 3, True)),
    ],
)
def test_the_shared_metrics(answer: str | None, golds: list[str], expected: tuple[bool, float, bool]) -> None:
    em, f1, answered = expected
    assert answer_measures(answer, golds) == {"em": em, "f1": pytest.approx(f1), "answered": answered}


@pytest.mark.parametrize(
    ("answer", "golds", "expected"),
    [
        ("abc", "abc", 1.0),
        ("abc", "cab", 1.0),  # a bag of characters, which is why it flatters
        ("Rome", ["Oslo"], 0.25),  # the letter o, of four and four
        ("ab cd", "abcd", 8 / 9),  # the space counts
        ("yes", "eyes", 0.0),
    ],
)
def test_character_f1(answer: str, golds: str | list[str], expected: float) -> None:
    assert char_f1(answer, golds) == pytest.approx(expected)


def test_character_f1_is_not_token_f1() -> None:
    assert f1_score("Marseille", "Marseilles") == 0.0 and char_f1("Marseille", "Marseilles") > 0.9
    assert char_f1("yes", "eyes", yes_no=False) == pytest.approx(6 / 7)
    assert char_f1("a-b", "b") == char_f1("ab", "b") != char_f1("a-b", "b", variant="arena_code")


def test_containment_lenient_and_strict() -> None:
    text = "a party, born in Paris"
    assert sub_em(text, ["Rome", "art"]) and not answer_recalled(text, ["art"]) and answer_recalled(text, ["Paris"])


def test_compression() -> None:
    cases = {(500, 20): 25.0, (500, 1): 500.0, (20, 40): 0.5, (0, 5): 0.0, (500, 0): None, (0, 0): None}
    assert {lengths: compression_ratio(*lengths) for lengths in cases} == cases


LOG3 = 1 / math.log2(3)


@pytest.mark.parametrize(
    ("relevant", "k", "ndcg", "recall"),
    [
        ([True, False, False], 5, 1.0, 1.0),
        ([False, True, False], 5, LOG3, 1.0),
        ([False, False, True], 5, 0.5, 1.0),
        ([True, False, True], 5, 1.5 / (1 + LOG3), 1.0),
        ([False, False, True], 2, 0.0, 0.0),
        ([True, False, True], 1, 1.0, 1.0),
        ([False, True], 1, 0.0, 0.0),
        ([True, True, True], 2, 1.0, 1.0),
        ([False] * 5, 5, 0.0, 0.0),
        ([], 5, 0.0, 0.0),
    ],
)
def test_rankings(relevant: list[bool], k: int, ndcg: float, recall: float) -> None:
    for measure in (ndcg_at, recall_at):
        with pytest.raises(UserError, match="at least 1"):
            measure(relevant, 0)
    assert ndcg_at(relevant, k) == pytest.approx(ndcg)
    assert recall_at(relevant, k) == recall


@settings(derandomize=True, max_examples=200, deadline=None)
@given(st.lists(st.booleans(), max_size=12), st.integers(1, 12))
def test_a_better_ranking_never_scores_lower(relevant: list[bool], k: int) -> None:
    value = ndcg_at(relevant, k)
    assert 0.0 <= value <= 1.0 + 1e-12
    assert (value > 0) == (recall_at(relevant, k) > 0)
    for i in range(len(relevant) - 1):
        if relevant[i + 1] and not relevant[i]:
            swapped = [*relevant[:i], True, False, *relevant[i + 2 :]]
            assert ndcg_at(swapped, k) >= value - 1e-12
    if any(relevant):
        assert ndcg_at(sorted(relevant, reverse=True), k) == 1.0


@pytest.mark.parametrize(
    ("named", "gold", "expected"),
    [
        ({1, 5}, {1, 5}, (1.0, 1.0)),
        ({1}, {1, 5}, (1.0, 0.5)),
        (range(1, 11), [1, 5], (0.2, 1.0)),
        ({2}, {1}, (0.0, 0.0)),
        (set(), {1}, (0.0, 0.0)),
        (None, {1}, (0.0, 0.0)),
        ([1, 1, 2], [1, 1], (0.5, 1.0)),
        ({1}, set(), None),
        (None, set(), None),
    ],
)
def test_precision_and_recall_of_references(named: object, gold: object, expected: object) -> None:
    assert relevance_scores(named, gold) == expected  # type: ignore[arg-type]
