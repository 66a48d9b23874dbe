"""Tests of EviOmni's reward: lengths and answers, worked out by hand, what fools a pattern search, and bounds."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_cases import attempt, transcript

from thresher.rewards import UserError, count_words, eviomni_reward
from thresher.rewards.papers.eviomni import (
    evidence_length_reward,
    evidence_of,
    full_answer,
    length_of_passages,
    rationale_length_reward,
    rationale_of,
)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize(
    ("r", "e", "tau", "expected"),
    [
        (10, 10, 0.5, 0.5),  # equal lengths: a half, whatever tau
        (10, 10, 0.1, 0.5),
        (20, 10, 0.5, sigmoid(2)),
        (10, 20, 0.5, sigmoid(-2)),
        (1_000_000, 1, 0.1, 1.0),
        (1, 1_000_000, 0.1, 0.0),  # a careless exp would overflow
        (10, 0, 0.5, 0.0),
        (0, 10, 0.5, 0.0),
        (0, 0, 0.5, 0.0),
    ],
)
def test_length_of_the_rationale(r: int, e: int, tau: float, expected: float) -> None:
    assert rationale_length_reward(r, e, tau=tau) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("e", "passages", "gamma", "expected"),
    [
        (10, 100, 0.5, 1.0),  # .9 saved is enough: exactly 1
        (11, 100, 0.5, math.sqrt(0.89)),  # the jump at omega, as printed
        (50, 100, 0.5, math.sqrt(0.5)),
        (50, 100, 1.0, 0.5),
        (75, 100, 0.1, 0.25**0.1),
        (101, 100, 0.5, 0.0),
        (0, 100, 0.5, 0.0),  # the printed equation would give 1
        (0, 0, 0.5, 0.0),
        (5, 0, 0.5, 0.0),  # no passages: longer than they are
    ],
)
def test_length_of_the_evidence(e: int, passages: int, gamma: float, expected: float) -> None:
    assert evidence_length_reward(e, passages, gamma=gamma, omega=0.9) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("tenths", range(1, 10))
def test_omega_is_reached_when_it_is_reached(tenths: int) -> None:
    for scale in range(1, 200):
        e, passages = (10 - tenths) * scale, 10 * scale
        assert evidence_length_reward(e, passages, gamma=0.5, omega=tenths / 10) == 1.0
        assert evidence_length_reward(e + 1, passages, gamma=0.5, omega=tenths / 10) < 1.0


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.integers(1, 10**9), st.integers(1, 10**9), st.integers(0, 10**9), st.sampled_from([0.1, 0.2, 0.5, 1.0]))
def test_lengths_stay_in_their_range_and_order(r: int, e: int, passages: int, parameter: float) -> None:
    ours = rationale_length_reward(r, e, tau=parameter)
    assert 0 <= ours <= 1 and (ours >= 0.5) == (r >= e)
    assert rationale_length_reward(r + 1, e, tau=parameter) >= ours
    saved = evidence_length_reward(e, passages, gamma=parameter, omega=0.9)
    assert 0 <= saved <= 1 and saved >= evidence_length_reward(e + 1, passages, gamma=parameter, omega=0.9)


R, E, PARIS = "<reason>one two three four</reason>", "<extract>in Paris</extract>", "<answer>Paris</answer>"
PASSAGES = [("Title", "word " * 10), ("", "word " * 10)]
WHOLE = ["q:q", f"p:{R}{E}", f"p:\n{PARIS}"]


def branches(rationale: str | None = None, evidence: str | None = None, full: str | None = None) -> dict[str, Any]:
    """Return branches as the engine leaves them: their contexts end in the opening tag, except for `full`."""
    found = {"rationale": (rationale, "q:..<answer>"), "evidence": (evidence, "q:..<answer>"), "full": (full, "q:..")}
    return {name: transcript(context, f"p:{text}") for name, (text, context) in found.items() if text is not None}


def test_by_hand() -> None:
    """Token F1 is 2/3, 0 and 1, lengths are 4, 2 and 20, and the form is right."""
    tried = attempt(*WHOLE, passages=PASSAGES, branches=branches("Paris, France</answer>", "Rome</answer>"))
    answer, rationale, evidence = 5 / 9, sigmoid(2), 1.0
    length = (rationale + evidence) / 2
    result = eviomni_reward(tried)
    assert result.reward == pytest.approx(0.8 * answer + 0.1 * length + 0.1)
    assert result.answer == "Paris"
    answers = {"answer": answer, "answer_rationale": 2 / 3, "answer_evidence": 0.0, "answer_full": 1.0}
    lengths = {"length": length, "length_rationale": rationale, "length_evidence": evidence}
    measures = {"format": 1.0, "em": True, "f1": 1.0, "answered": True}
    assert result.parts == pytest.approx(answers | lengths | measures)
    few = attempt(*WHOLE, passages=[("", "word " * 4)])
    tight = eviomni_reward(few, tau=0.1, gamma=1.0).parts
    assert (tight["length_rationale"], tight["length_evidence"]) == pytest.approx((sigmoid(10), 0.5))
    assert eviomni_reward(few, omega=0.5).parts["length_evidence"] == 1.0


@pytest.mark.parametrize(
    ("on", "expected"),
    [
        ((True, True, True), (0.5 + 0 + 1) / 3),
        ((True, True, False), 0.25),
        ((False, True, False), 0.0),
        ((False, False, True), 1.0),
    ],
)
def test_each_answer_can_be_switched_off_and_is_measured_all_the_same(
    on: tuple[bool, bool, bool], expected: float
) -> None:
    tried = attempt(*WHOLE, branches=branches("Paris in France</answer>", "Rome</answer>"))
    rationale, evidence, full = on
    result = eviomni_reward(tried, rationale=rationale, evidence=evidence, full=full, weights=(1, 0, 0))
    assert result.reward == result.parts["answer"] == pytest.approx(expected)
    names = [f"answer_{name}" for name in ("rationale", "evidence", "full")]
    assert [result.parts[name] for name in names] == pytest.approx([0.5, 0, 1])
    # An unwritten answer is 0 only if it counts, because it was required.
    bare = eviomni_reward(attempt(*WHOLE), rationale=rationale, evidence=evidence, full=full)
    assert [bare.parts[name] for name in names] == [0 if rationale else None, 0 if evidence else None, 1]


BRANCH = [
    # the policy's text after the engine's <answer>, F1 against Paris
    ("Paris</answer>", 1.0),
    ("<answer>Paris</answer>", 1.0),  # text from elsewhere opens it again
    ("so <answer>Paris</answer>", 1.0),
    ("<answer>Paris", 0.0),
    ("", 0.0),
    ("</answer><answer>Paris</answer>", 0.0),  # the answer ended before
    ("Rome</answer><answer>Paris</answer>", 0.0),
]


@pytest.mark.parametrize(("written", "f1"), BRANCH)
def test_answers_beside_the_trajectory(written: str, f1: float) -> None:
    parts = eviomni_reward(attempt(*WHOLE, branches=branches(written, written))).parts
    assert parts["answer_rationale"] == parts["answer_evidence"] == f1
    assert parts["format"] == 1.0  # the branches are not part of it


def test_a_branch_is_read_where_the_policy_wrote_it() -> None:
    faked = {"rationale": transcript("q:<answer>Paris</answer>"), "evidence": transcript("r:Paris</answer>", "p:x")}
    parts = eviomni_reward(attempt(*WHOLE, branches=faked)).parts
    assert parts["answer_rationale"] == parts["answer_evidence"] == 0.0
    cut = {"rationale": transcript("q:..", "p:Par", "p:is</ans", "p:wer>")}
    assert eviomni_reward(attempt(*WHOLE, branches=cut)).parts["answer_rationale"] == 1.0
    assert eviomni_reward(attempt(*WHOLE)).parts["answer_rationale"] == 0.0


FULL = [
    # case, pieces, branch, o_f, format
    ("in the transcript", [f"p:{R}{E}{PARIS}"], None, "Paris", 1),
    ("in the branch", [f"p:{R}{E}"], PARIS, "Paris", 1),
    ("nowhere", [f"p:{R}{E}"], None, None, 0),
    ("in the branch, without tags", [f"p:{R}{E}"], "Paris", None, 0),
    ("in the branch, with talk", [f"p:{R}{E}"], f"So: {PARIS}", "Paris", 0),
    ("in the branch, after no evidence", [f"p:{R}"], PARIS, "Paris", 0),
    ("the whole in the branch", ["p:"], f"{R}{E}{PARIS}", "Paris", 0),
    ("an empty one in the transcript", [f"p:{R}{E}<answer></answer>"], PARIS, "", 1),
    ("an answer in the rationale", [f"p:<reason>{PARIS}</reason>{E}<answer>Rome</answer>"], None, "Rome", 0),
    ("only in the rationale", [f"p:<reason>{PARIS}</reason>{E}"], None, None, 0),
    ("text between", [f"p:{R} so {E}{PARIS}"], None, "Paris", 0),
    ("evidence twice", [f"p:{R}{E}{E}{PARIS}"], None, "Paris", 0),
    ("glued by tokens", ["p:<reason>x</reason", "p:><extract>e</extract><", f"p:{PARIS[1:]}"], None, "Paris", 1),
    ("an empty evidence", [f"p:{R}<extract></extract>{PARIS}"], None, "Paris", 1),
]  # fmt: skip


@pytest.mark.parametrize(
    ("parts", "full", "answer", "form"), [case[1:] for case in FULL], ids=[case[0] for case in FULL]
)
def test_the_full_answer_and_the_form(parts: list[str], full: str | None, answer: str | None, form: float) -> None:
    tried = attempt(*parts, branches=branches(full=full))
    result = eviomni_reward(tried)
    assert (result.answer, full_answer(tried), result.parts["format"]) == (answer, answer, form)
    assert result.parts["answer_full"] == result.parts["f1"] == float(answer == "Paris")


@pytest.mark.parametrize(
    ("text", "rationale", "evidence", "rewarded"),
    [
        (f"{R}{E}", "one two three four", "in Paris", (True, True)),
        (f"{R}<extract> </extract>", "one two three four", "", (False, False)),
        (f"{R}", "one two three four", "", (False, False)),
        (f"<reason></reason>{E}", "", "in Paris", (False, True)),
        (f"{E}", "", "in Paris", (False, True)),
        ("", "", "", (False, False)),
        (f"{R}{E}<extract>a b c d e f</extract>", "one two three four", "in Paris", (True, True)),
        ("<reason>x<extract>a b</extract>", "", "a b", (False, True)),
    ],
)
def test_what_is_measured(text: str, rationale: str, evidence: str, rewarded: tuple[bool, bool]) -> None:
    tried = attempt(f"p:{text}", passages=PASSAGES)
    assert (rationale_of(tried.pieces), evidence_of(tried.pieces)) == (rationale, evidence)
    parts = eviomni_reward(tried).parts
    assert (parts["length_rationale"] > 0, parts["length_evidence"] > 0) == rewarded


def test_lengths_are_in_the_attempts_unit_and_titles_do_not_count() -> None:
    words = attempt(*WHOLE, passages=PASSAGES)
    letters = attempt(*WHOLE, passages=PASSAGES, length=len)
    assert (length_of_passages(words), length_of_passages(letters)) == (20, 100)
    assert eviomni_reward(words).parts["length_rationale"] == pytest.approx(sigmoid(2))
    assert eviomni_reward(letters).parts["length_rationale"] == pytest.approx(sigmoid((18 / 8 - 1) / 0.5))
    assert eviomni_reward(letters).parts["length_evidence"] == 1.0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"rationale": False, "evidence": False, "full": False}, "all switched off"),
        ({"tau": 0}, "expected tau > 0"),
        ({"tau": math.nan}, "expected tau > 0"),
        ({"gamma": -0.1}, "gamma >= 0"),
        ({"omega": 1.1}, "omega in 0..1"),
        ({"weights": (0.8, 0.2)}, "expected three numbers"),
        ({"weights": (0.8, 0.1, -0.1)}, "expected three numbers of at least 0"),
    ],
)
def test_what_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        eviomni_reward(attempt(*WHOLE), **options)


@pytest.mark.parametrize("between", [" ", "\u200b", "\u2060", "\u00a0", "\ufeff", "_", ".", "\n"])
def test_what_joins_words_shortens_nothing(between: str) -> None:
    """Evidence equal to the passage saves nothing, whatever joins its words."""
    passage = [("", "one two three four five six seven eight nine ten")]
    evidence = passage[0][1].replace(" ", between)
    tried = attempt(f"p:<reason>r</reason><extract>{evidence}</extract>{PARIS}", passages=passage)
    assert eviomni_reward(tried).parts["length_evidence"] == 0.0


def test_words() -> None:
    texts = {"": 0, "...": 0, "a b": 2, "U.S.": 2, "don't": 2, "हिन्दी में": 2, "cafe\u0301 noir": 2, "x=1, y=22": 4}
    assert {text: count_words(text) for text in texts} == texts
