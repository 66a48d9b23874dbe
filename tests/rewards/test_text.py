"""Tests of text measures, with a table of the cases that fool them."""

from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thresher.rewards import UserError, contains_answer, exact_match, f1_score, normalize_answer
from thresher.rewards.reward import RewardInput, Source, TextSegment
from thresher.rewards.text import Variant

NORMAL_FORMS = [
    # text, squad, arena, arena_code
    ("The  Beatles!", "beatles", "beatles", "beatles"),
    ("U.S.", "us", "us", "u s"),
    ("snake_case name", "snakecase name", "snake case name", "snake case name"),
    ("__the_U.S.__", "theus", "us", "u s"),
    ("Paris/London", "parislondon", "parislondon", "paris london"),
    ("twenty-one", "twentyone", "twentyone", "twenty one"),
    ("An apple a day, the end", "apple day end", "apple day end", "apple day end"),
    ("the", "", "", ""),
    ("", "", "", ""),
    ("  \n", "", "", ""),
    ("“quoted” – dash", "“quoted” – dash", "“quoted” – dash", "“quoted” – dash"),  # only ASCII punctuation is removed
    ("o'Neill's", "oneills", "oneills", "o neill s"),
    ("o’Neill", "o’neill", "o’neill", "o neill"),
]


@pytest.mark.parametrize(("text", "squad", "arena", "code"), NORMAL_FORMS)
def test_normal_forms(text: str, squad: str, arena: str, code: str) -> None:
    assert normalize_answer(text) == squad
    assert normalize_answer(text, "arena") == arena
    assert normalize_answer(text, "arena_code") == code


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.text(alphabet=st.sampled_from("aAthen THE_.,-'\n\u00e9\u0301\u0130\u03a3“x"), max_size=30))
def test_normalisation_is_idempotent(text: str) -> None:
    for variant in get_args(Variant):
        once = normalize_answer(text, variant)
        assert normalize_answer(once, variant) == once


MATCHES = [
    # answer, golds, exact match, f1
    ("Paris", "paris", True, 1.0),
    ("The Paris.", ["London", "paris"], True, 1.0),
    ("Paris, France", "Paris", False, 2 / 3),
    ("Paris", [], False, 0.0),
    ("Paris", [""], False, 0.0),
    ("", [""], False, 0.0),
    ("the", ["The"], False, 0.0),
    ("yes", "yes", True, 1.0),
    ("yes it is", "yes", False, 0.0),
    ("yes", "yes it is", False, 0.0),
    ("noanswer", ["no answer"], False, 0.0),
    ("no way", ["yes", "no way out"], False, 0.8),  # the best gold counts, not the last
    ("b b b", "b b c", False, 2 / 3),  # tokens count as often as they occur
    ("école normale", "ECOLE normale", False, 0.5),
]


@pytest.mark.parametrize(("answer", "golds", "exact", "f1"), MATCHES)
def test_exact_match_and_f1(answer: str, golds: str | list[str], exact: bool, f1: float) -> None:
    assert exact_match(answer, golds) is exact
    assert f1_score(answer, golds) == pytest.approx(f1, abs=1e-12)


def test_the_switches_reach_every_measure() -> None:
    assert f1_score("yes it is", "yes") == 0.0 and f1_score("yes it is", "yes", yes_no=False) == pytest.approx(0.5)
    assert not exact_match("New-York", "new york") and exact_match("New-York", "new york", variant="arena_code")
    assert f1_score("New-York", "new york") == 0 and f1_score("New-York", "new york", variant="arena_code") == 1
    assert not contains_answer("in Paris/London", "Paris")
    assert contains_answer("in Paris/London", "Paris", variant="arena_code")


CONTAINS = [
    # text, golds, whole tokens, plain substring
    ("I do not know", "no", False, True),
    ("The answer is no.", "no", False, True),
    ("there is no way out", "no way", True, True),
    ("the party began", "art", False, True),
    ("the Beatles sang", "The Beatles", True, True),
    ("anything at all", "The", False, False),
    ("anything at all", "", False, False),
    ("anything at all", [], False, False),
    ("", "Paris", False, False),
    ("Born in Paris (France), 1901", ["Lyon", "Paris France"], True, True),
    ("Paris, then France", "Paris France", False, False),
    ("東京は", "東京", False, True),  # no spaces, one token: whole-token matching finds nothing inside it
]


@pytest.mark.parametrize(("text", "golds", "tokens", "substring"), CONTAINS)
def test_containment(text: str, golds: str | list[str], tokens: bool, substring: bool) -> None:
    assert contains_answer(text, golds) is tokens
    assert contains_answer(text, golds, substring=True) is substring


WORDS = st.lists(st.sampled_from(["no", "yes", "the", "Paris", "x", "U.S.", "-", "a"]), max_size=6).map(" ".join)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(WORDS, WORDS)
def test_the_measures_agree_with_each_other(text: str, gold: str) -> None:
    if exact_match(text, gold):
        assert f1_score(text, gold) == 1.0
        assert contains_answer(text, gold, substring=True)
    assert 0.0 <= f1_score(text, gold) <= f1_score(text, gold, yes_no=False) <= 1.0
    assert f1_score(text, gold) == f1_score(gold, text)
    if contains_answer(text, gold):
        assert contains_answer(text, gold, substring=True)
        assert f1_score(text, gold, yes_no=False) > 0


@pytest.mark.parametrize("golds", [[1969], [None], ["Paris", 7.5]])
def test_a_gold_that_is_no_string_is_named(golds: list[str]) -> None:
    for measure in (exact_match, f1_score, contains_answer):
        with pytest.raises(UserError, match="write it as a string"):
            measure("1969", golds)


def test_a_hundred_kilobytes() -> None:
    text = "the cat's a_b, " * 7_000 + "Paris"
    assert contains_answer(text, ["nowhere", "Paris"])
    assert not exact_match(text, "Paris")
    assert 0 < f1_score(text, "Paris") < 1e-3


@pytest.mark.parametrize("end", ["<|im_end|>", "<|eot_id|>\n", "</s>", "<\uff5cend\u2581of\u2581sentence\uff5c>", ""])
def test_what_a_policy_wrote_is_without_the_end_of_a_reply(end: str) -> None:
    pieces = [TextSegment(Source.PROMPT, b"Q<|im_end|>"), TextSegment(Source.POLICY, f"Paris{end}".encode())]
    assert RewardInput(pieces=pieces, golds=["Paris"]).text == "Paris"
