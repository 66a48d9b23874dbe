"""Sentences, and which units the quantile of their scores keeps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thresher.engine.refiners.spans import lines, most, sentences


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("One. Two is 3.5 long! Three?", ["One. ", "Two is 3.5 long! ", "Three?"]),
        ('He said "Go." Then he left.', ['He said "Go." ', "Then he left."]),
        ("Dr. J. Smith of the U.S. Army came. He ate.", ["Dr. J. Smith of the U.S. Army came. ", "He ate."]),
        ("It was No. 5, i.e. the last. 1966 came.", ["It was No. 5, i.e. the last. ", "1966 came."]),
        ("a list, etc. and more. yes", ["a list, etc. and more. yes"]),
        ("Title without a stop\n\nThe text. ", ["Title without a stop\n\n", "The text. "]),
        ("東京は都市。川は川！end", ["東京は都市。", "川は川！", "end"]),
        ("  ", ["  "]),
        ("", []),
        ("... And so on.", ["... ", "And so on."]),
        ("End.  \n ", ["End.  \n "]),
    ],
)
def test_sentences(text: str, parts: list[str]) -> None:
    assert [text[start:end] for start, end in sentences(text)] == parts


@given(st.text(alphabet="aB. !?\n\"'。1", max_size=40))
def test_sentences_are_the_whole_text(text: str) -> None:
    spans = sentences(text)
    assert "".join(text[start:end] for start, end in spans) == text
    assert len(spans) <= 1 or all(text[start:end].strip() for start, end in spans)


def test_about_the_share_is_kept_and_one_at_least() -> None:
    scores = [0.1, 0.9, 0.5, 0.7, 0.3]
    assert most(scores, 1.0) == [True] * 5
    assert most(scores, 0.5) == [False, True, True, True, False]  # the median, .5, is kept
    # The .8 quantile of five lies .2 beyond the fourth: .7 + .2 x .2.
    assert most(scores, 0.2) == [False, True, False, False, False]
    assert most(scores, 1e-9) == [False, True, False, False, False]
    assert most([2.0], 0.01) == [True] and most([], 0.5) == []
    assert most([1.0, 1.0, 0.0], 0.4) == [True, True, False]  # equals stay or go together


@given(st.lists(st.floats(-9, 9), min_size=1, max_size=30, unique=True), st.floats(0.01, 1))
def test_the_highest_are_kept(scores: list[float], keep: float) -> None:
    kept = most(scores, keep)
    assert sum(kept) >= 1 and abs(sum(kept) - keep * len(scores)) <= 1  # bound: a quantile lies between two scores
    above, below = ([s for s, k in zip(scores, kept, strict=True) if k is which] for which in (True, False))
    assert min(above) > max(below, default=-10)  # bound: their order


def test_a_line_for_each_passage_of_which_something_is_kept() -> None:
    assert lines([["A b. ", "C."], [], [" ", "D"]]) == "A b. C.\nD" and lines([]) == ""
