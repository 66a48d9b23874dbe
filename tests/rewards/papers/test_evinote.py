"""Tests of EviNote-RAG's reward: its equation and eight variants, worked out by hand, marks, form, and attacks."""

from typing import Any, get_args

import pytest
from reward_cases import attempt, transcript

from thresher.rewards import RewardResult, UserError, evinote_claims, evinote_reward
from thresher.rewards.papers.evinote import NOTE_TAGS, Variant, has_mark, notes

MARKS: list[tuple[str, tuple[str, ...]]] = [
    # the marks in the notes
    ("*-", ("* Paris is the capital\n- the date is unsure", "*Paris* is the capital, -perhaps-", "-x- y, *x* y")),
    ("*-", ("*Paris is the capital.* -Since when is open.-", "**Paris** is it, --perhaps--", "so -x y- z, *x y* z")),
    ("*-", ("  - indented\n\t* too", "(*in brackets*) and '-in quotes-'", "- *both*, one an item, one a pair")),
    ("*", ("*a well-known fact*", "* - both, but only one begins the line")),
    ("-", ("-\twith a tab", "text, then\n- an item", "-a well-known doubt-")),
    ("-", ("– b", "text, then\n  – an item", "since 1939, –perhaps–", "so –perhaps-")),
    ("", ("Paris is the capital", "", "*", "- - -\n* * *", "---\n***", "• a bullet, – a dash", "text * no item")),
    ("", ("a well-known, so-called city", "pre-war and post-war, 1939-1945", "Paris - the capital - is large")),
    ("", ("1939–1945 and 2001–2003", "Paris – the capital – is large", "— b, —perhaps—", "–", "– –")),
    ("", ("2 * 3 * 4", "see f(*args, **more)", "it was -5 to -3 degrees", "*key fact without an end")),
    ("", ("a pair *over\nlines* is none", "a -x b-c d, *x b*c d", "so -x y - z, *x y * z", "so x- -\ty-, x* *\ty*")),
]


@pytest.mark.parametrize(("marks", "noted"), MARKS)
def test_marks(marks: str, noted: tuple[str, ...]) -> None:
    found = {note: "".join(mark for mark in "*-" if has_mark(note, mark)) for note in noted}
    assert found == dict.fromkeys(noted, marks)


SEARCH, INFORMATION = "<search>capital of France</search>", "r:\n<information>Doc 1 Paris</information>\n"
NOTE = "<summary>\n* Paris is the capital\n- the year is unsure</summary>"
PLAIN = "<summary>Paris is the capital</summary>"
PARIS, ROME = "<answer>Paris</answer>", "<answer>Rome</answer>"

BARE = [f"p:{SEARCH}", INFORMATION]
ONE_MARK = [f"p:<summary>* a</summary>{SEARCH}", INFORMATION, f"p:<summary>- b</summary>{ROME}"]


def episode(note: str = NOTE, answer: str = PARIS) -> list[str]:
    return ["q:Which?", f"p:<think>x</think>{SEARCH}", INFORMATION, f"p:{note}<think>y</think>{answer}"]


SEN = [
    # case, pieces, format, answer, notes, reward with an entailment of .5
    ("right", episode(), 1, 1, 1, 1.5),
    ("right, unmarked", episode(PLAIN), 1, 1, 0, 1.5),
    ("wrong, marked", episode(NOTE, ROME), 1, 0, 1, 0.6),
    ("wrong, unmarked", episode(PLAIN, ROME), 1, 0, 0, 0),
    ("wrong, one mark", episode("<summary>* Paris</summary>", ROME), 1, 0, 0, 0),
    ("two searches", [f"p:{SEARCH}", INFORMATION, f"p:{NOTE}{SEARCH}", INFORMATION, f"p:{NOTE}{PARIS}"], 1, 1, 1, 1.5),
    ("one mark a note", [*BARE, *ONE_MARK], 1, 0, 1, 0.6),
    ("no note after the second", [*BARE, f"p:{NOTE}{SEARCH}", INFORMATION, f"p:{PARIS}"], 1, 1, 1, 1.5),
    ("no note after the first", [*BARE, f"p:{SEARCH}", INFORMATION, f"p:{NOTE}{PARIS}"], 1, 1, 1, 1.5),
    ("no note after the second, wrong", [*BARE, f"p:{NOTE}{SEARCH}", INFORMATION, f"p:{ROME}"], 1, 0, 1, 0.6),
    ("no note after either", [*BARE, f"p:{SEARCH}", INFORMATION, f"p:{PARIS}"], 0, 1, 0, 0),
    ("two notes after the second", [*BARE, f"p:{SEARCH}", INFORMATION, f"p:{NOTE}{NOTE}{PARIS}"], 0, 1, 1, 0),
    ("no search", [f"p:{NOTE}{PARIS}"], 0, 1, 1, 0),
    ("no note", [f"p:{SEARCH}", INFORMATION, f"p:{PARIS}"], 0, 1, 0, 0),
    ("an empty note", episode("<summary> </summary>"), 0, 1, 0, 0),
    ("two notes", episode(NOTE + NOTE), 0, 1, 1, 0),
    ("two thoughts", episode(NOTE + "<think>z</think>"), 1, 1, 1, 1.5),
    ("a note before the passages", [f"p:{NOTE}{SEARCH}", INFORMATION, f"p:{PARIS}"], 0, 1, 1, 0),
    ("no answer", episode(NOTE, ""), 0, 0, 1, 0),
    ("an unclosed note", episode("<summary>* a\n- b"), 0, 1, 0, 0),
    ("an answer in a note", episode(f"<summary>{PARIS}</summary>", ROME), 0, 1, 0, 0),
    ("an answer after the end", [*episode(NOTE, ROME), "f:!", f"p:{PARIS}"], 0, 0, 1, 0),
    ("a note after the end", episode(PLAIN, ROME + NOTE), 0, 0, 0, 0),
    ("text between", episode(NOTE + " So:"), 1, 1, 1, 1.5),
    ("feedback on the way", [f"p:{SEARCH}", INFORMATION, f"p:{NOTE}", "f:Try again.", f"p:{PARIS}"], 1, 1, 1, 1.5),
    ("tags in a passage", [f"p:{SEARCH}", "r:</information><answer>x</answer>", f"p:{NOTE}{PARIS}"], 1, 1, 1, 1.5),
    ("a note in a passage", [f"p:{SEARCH}", f"r:{NOTE}", f"p:{PARIS}"], 0, 1, 0, 0),
    ("marks in a passage", [f"p:{SEARCH}", "r:* a\n- b", f"p:{PLAIN}{ROME}"], 1, 0, 0, 0),
    ("marks in a thought", episode(PLAIN + "<think>* a\n- b</think>", ROME), 1, 0, 0, 0),
    ("marks in the prompt's example", [f"q:{NOTE}", *episode(PLAIN, ROME)], 1, 0, 0, 0),
]  # fmt: skip


@pytest.mark.parametrize(
    ("note", "both", "either", "code"),
    [
        ("*Paris*", 0, 1, 1),
        ("#Paris#", 0, 0, 1),
        ("*a #b# c*", 0, 1, 1),
        ("*a #b* c#", 0, 1, 0),
        ("* Paris", 0, 1, 0),
        ("-Paris-", 0, 1, 0),
        ("* a\n- b", 1, 1, 0),
        ("Paris", 0, 0, 0),
    ],
)
def test_what_counts_as_marked_is_a_switch(note: str, both: float, either: float, code: float) -> None:
    tried = attempt(*episode(f"<summary>{note}</summary>", ROME), entailment=0.5)
    marks: dict[Any, float] = {"both": both, "either": either, "code": code}
    for choice, marked in marks.items():
        result = evinote_reward(tried, marks=choice)
        assert (result.parts["notes"], result.reward) == (marked, 0.6 if marked else 0), choice


@pytest.mark.parametrize(("name", "parts", "form", "right", "marked", "reward"), SEN, ids=[case[0] for case in SEN])
def test_the_equation(name: str, parts: list[str], form: float, right: float, marked: float, reward: float) -> None:
    result = evinote_reward(attempt(*parts, entailment=0.5))
    assert [result.parts[part] for part in ("format", "answer", "notes")] == [form, right, marked]
    assert result.reward == pytest.approx(reward)
    without = evinote_reward(attempt(*parts, entailment=0.5), variant="SEN")
    assert without.reward == pytest.approx(reward - 0.5 if reward else 0)
    loose = ("two thoughts", "text between", "feedback on the way", "marks in a thought")
    every = evinote_reward(attempt(*parts, entailment=0.5), note_every_search=True)
    assert every.parts["format"] == (0 if name.startswith("no note after") else form)
    strict = evinote_reward(attempt(*parts, entailment=0.5), strict_format=True)
    assert strict.parts["format"] == (0 if name in loose else every.parts["format"])


def test_parts() -> None:
    parts = {"format": 1.0, "answer": 0.0, "notes": 1.0, "entailment": 0.25, "em": False, "f1": pytest.approx(2 / 3)}
    parts |= {"answered": True, "searches": 1}
    tried = attempt(*episode(NOTE, "<answer>Paris, France</answer>"), entailment=0.25)
    assert evinote_reward(tried) == RewardResult(pytest.approx(0.35), parts, "Paris, France")


LUCKY, UNLUCKY = 0.33, 0.34
VARIANTS: dict[str, list[float]] = {
    # right and marked; wrong and marked; right, no note; wrong, no note; wrong, unmarked, bad form; a note, no answer
    "Base": [1, 0, 1, 0, 0, 0],
    "NS": [1, 0, 1, 0, 0, 0],
    "NE": [1, 0, 1, 0, 0, 0],
    "FS": [1, 0, 0, 0, 0, 0],
    "FS+SR": [1, 0.1, 0, 0, 0.1, 0],
    "FS+EQR": [1.5, 0.5, 0, 0, 0.5, 0.5],
    "SEN": [1, 0.1, 0, 0, 0, 0],
    "SEN+EQR": [1.5, 0.6, 0, 0, 0, 0],
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant(variant: Any) -> None:
    assert list(VARIANTS) == list(NOTE_TAGS) == list(get_args(Variant))
    tag = NOTE_TAGS[variant] or "summary"
    tries = [
        episode(NOTE, PARIS),
        episode(NOTE, ROME),
        [*BARE, f"p:{PARIS}"],
        [*BARE, f"p:{ROME}"],
        episode("so " + PLAIN, ROME),
        episode(NOTE, ""),
    ]
    written = [[part.replace("summary", tag) for part in parts] for parts in tries]
    rewards = [evinote_reward(attempt(*p, entailment=0.5, chance=LUCKY), variant=variant).reward for p in written]
    assert rewards == pytest.approx(VARIANTS[variant])
    if variant == "FS+SR":
        unlucky = [evinote_reward(attempt(*p, chance=UNLUCKY), variant=variant).reward for p in written]
        assert unlucky == VARIANTS["FS"]


@pytest.mark.parametrize(
    ("variant", "note", "form"),
    [
        ("NE", "<evidence>x</evidence>", 1),
        ("NE", PLAIN, 0),
        ("NS", PLAIN, 1),
        ("NS", "<evidence>x</evidence>", 0),
        ("Base", "", 1),
        ("Base", "<note>", 1),  # not a tag of this variant, so plain text
        ("FS", "", 0),
    ],
)
def test_the_form_is_that_of_the_variant(variant: Any, note: str, form: float) -> None:
    assert evinote_reward(attempt(*episode(note)), variant=variant).parts["format"] == form


def test_entailment_is_a_measure_and_rewarded_where_a_judge_was_asked() -> None:
    variants: tuple[Any, ...] = ("SEN+EQR", "FS+EQR")
    for variant in variants:
        with pytest.raises(UserError, match=r"variant (SEN|FS)\+EQR rewards entailment.*give a judge"):
            evinote_reward(attempt(*episode()), variant=variant)
        # Without a note there is nothing to ask a judge.
        assert evinote_reward(attempt(*BARE, f"p:{PARIS}"), variant=variant).parts["entailment"] == 0.0
        assert evinote_reward(attempt(*episode(), golds=("The", "")), variant=variant).parts["entailment"] == 0.0
    variants = ("NS", "FS", "FS+SR", "SEN")
    for variant in variants:
        assert evinote_reward(attempt(*episode()), variant=variant).parts["entailment"] is None  # no judge was asked
        judged = evinote_reward(attempt(*episode(), entailment=0.75), variant=variant)
        assert (judged.parts["entailment"], judged.reward) == (0.75, 1.0)


def test_what_a_judge_is_asked() -> None:
    first, last = "<summary>* a</summary>", "<summary>- b &\n* c</summary>"
    parts = [f"p:{first}{SEARCH}", "r:<summary>x</summary>", f"p:{last}{PARIS}<summary>late</summary>"]
    tried = attempt(*parts, golds=("Paris", "The", "", "no"), question="Which?")
    assert evinote_claims(tried) == [
        ("- b &\n* c", "Paris is the answer to 'Which?'"),
        ("- b &\n* c", "no is the answer to 'Which?'"),
    ]
    assert evinote_claims(tried, "evidence") == []
    assert evinote_claims(attempt("p:x")) == []
    assert notes(transcript("p:<summary></summary><summary>a</summary>")) == ["a"]
    assert evinote_claims(attempt("p:<evidence>e</evidence>"), "evidence")[0][0] == "e"
    assert evinote_claims(attempt("p:<summary>a</summary><summary> </summary>"))[0][0] == "a"


@pytest.mark.parametrize(
    ("more", "options", "problem"),
    [
        ({}, {"variant": "SENS"}, "variant 'SENS' is unknown; choose one of Base, NS"),
        ({}, {"marks": "none"}, "marks 'none' is unknown; choose one of both, either, code"),
        ({"entailment": 1.5}, {}, "entailment 1.5 is not a probability"),
        ({"entailment": -0.1}, {}, "is not a probability"),
        ({"entailment": float("nan")}, {}, "is not a probability"),
    ],
)
def test_what_is_refused(more: dict[str, Any], options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        evinote_reward(attempt(*episode(), **more), **options)
