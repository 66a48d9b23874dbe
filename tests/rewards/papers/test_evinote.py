"""EviNote-RAG's reward: its equation and its eight variants by hand, marks, form, and what fools the original."""

from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_cases import GOLDS, LONG, PIECES, attempt, transcript

from thresher.rewards import RewardInput, RewardResult, TextSegment, UserError, evinote_claims, evinote_reward
from thresher.rewards.papers.evinote import NOTE_TAGS, Variant, has_mark, notes

MARKS = [
    # note, carries *, carries -
    ("* Paris is the capital\n- the date is unsure", True, True),
    ("*Paris* is the capital, -perhaps-", True, True),
    ("**Paris** is the capital, --perhaps--", True, True),
    ("*Paris is the capital.* -Since when is open.-", True, True),
    ("Paris is the capital", False, False),
    ("a well-known, so-called city", False, False),  # hyphens inside words
    ("pre-war and post-war, 1939-1945", False, False),
    ("Paris - the capital - is large", False, False),  # dashes between words
    ("pre- and post-war", False, False),
    ("2 * 3 * 4", False, False),
    ("2*3*4", False, False),
    ("a*, b*", False, False),
    ("see f(*args, **more)", False, False),
    ("it was -5 to -3 degrees", False, False),
    ("-5 degrees", False, False),
    ("*key fact without an end", False, False),
    ("-unsure without an end", False, False),
    ("a pair *over\nlines* is none", False, False),
    ("*", False, False),
    ("-", False, False),
    ("**", False, False),
    ("--", False, False),
    ("* ", False, False),
    ("***", False, False),
    ("---\n***", False, False),
    ("- - -\n* * *", False, False),
    ("  - indented\n\t* too", True, True),
    ("-\twith a tab", False, True),
    ("text, then\n- an item", False, True),
    ("text * no item", False, False),
    ("(*in brackets*) and '-in quotes-'", True, True),
    ("*a well-known fact*", True, False),
    ("-a well-known doubt-", False, True),
    ("-x- y, *x* y", True, True),
    ("so -x y- z, *x y* z", True, True),
    ("a -x b-c d, *x b*c d", False, False),
    ("so -x y - z, *x y * z", False, False),
    ("so x- -\ty-, x* *\ty*", False, False),
    ("* - both, but only one begins the line", True, False),
    ("- *both*, one an item, one a pair", True, True),
    ("• a bullet, – a dash", False, False),
    ("*東京* -Köln-", True, True),
    ("", False, False),
]


@pytest.mark.parametrize(("note", "star", "dash"), MARKS)
def test_marks(note: str, star: bool, dash: bool) -> None:
    assert (has_mark(note, "*"), has_mark(note, "-")) == (star, dash)


WORDS = st.text(alphabet="ab-", min_size=1, max_size=8).map(lambda word: f"x{word}x")


@settings(derandomize=True, max_examples=100, deadline=None)
@given(st.lists(WORDS, max_size=8).map(" ".join))
def test_a_hyphen_inside_a_word_never_counts(note: str) -> None:
    assert not has_mark(note, "-")
    assert has_mark(f"- {note} x", "-") and has_mark(f"so -{note or 'x'}- it is", "-")


SEARCH, INFORMATION = "<search>capital of France</search>", "r:\n<information>Doc 1 Paris</information>\n"
NOTE = "<summary>\n* Paris is the capital\n- the year is unsure</summary>"
PLAIN = "<summary>Paris is the capital</summary>"
PARIS, ROME = "<answer>Paris</answer>", "<answer>Rome</answer>"


def episode(note: str = NOTE, answer: str = PARIS) -> list[str]:
    return ["q:Which?", f"p:<think>x</think>{SEARCH}", INFORMATION, f"p:{note}<think>y</think>{answer}"]


SEN = [
    # what it tries, pieces, format, answer, notes, reward with an entailment of .5
    ("right", episode(), 1, 1, 1, 1.5),
    ("right, unmarked", episode(PLAIN), 1, 1, 0, 1.5),
    ("wrong, marked", episode(NOTE, ROME), 1, 0, 1, 0.6),
    ("wrong, unmarked", episode(PLAIN, ROME), 1, 0, 0, 0),
    ("wrong, one mark", episode("<summary>* Paris</summary>", ROME), 1, 0, 0, 0),
    ("no thoughts", [f"p:{SEARCH}", INFORMATION, f"p:{NOTE}{PARIS}"], 1, 1, 1, 1.5),
    ("two searches", [f"p:{SEARCH}", INFORMATION, f"p:{NOTE}{SEARCH}", INFORMATION, f"p:{NOTE}{PARIS}"], 1, 1, 1, 1.5),
    (
        "one mark in each of two notes",
        [
            f"p:{SEARCH}",
            INFORMATION,
            f"p:<summary>* a</summary>{SEARCH}",
            INFORMATION,
            f"p:<summary>- b</summary>{ROME}",
        ],
        *(1, 0, 1, 0.6),
    ),
    (
        "no note after the second",
        [f"p:{SEARCH}", INFORMATION, f"p:{NOTE}{SEARCH}", INFORMATION, f"p:{PARIS}"],
        *(0, 1, 1, 0),
    ),
    ("no search", [f"p:{NOTE}{PARIS}"], 0, 1, 1, 0),
    ("a search without result", [f"p:{SEARCH}{NOTE}{PARIS}"], 0, 1, 1, 0),
    ("no note", [f"p:{SEARCH}", INFORMATION, f"p:{PARIS}"], 0, 1, 0, 0),
    ("an empty note", episode("<summary> </summary>"), 0, 1, 0, 0),
    ("two notes", episode(NOTE + NOTE), 0, 1, 1, 0),
    ("two thoughts", episode(NOTE + "<think>z</think>"), 1, 1, 1, 1.5),
    ("a note before the passages", [f"p:{NOTE}{SEARCH}", INFORMATION, f"p:{PARIS}"], 0, 1, 1, 0),
    ("a note as evidence", episode(NOTE.replace("summary", "evidence")), 0, 1, 0, 0),
    ("no answer", episode(NOTE, ""), 0, 0, 1, 0),
    ("an empty answer", episode(NOTE, "<answer></answer>"), 0, 0, 1, 0),
    ("an unclosed note", episode("<summary>* a\n- b"), 0, 1, 0, 0),
    ("an unclosed answer", episode(NOTE, "<answer>Paris"), 0, 0, 1, 0),
    ("a nested note", episode(f"<summary>x{NOTE}</summary>"), 0, 1, 1, 0),
    ("an answer in a note", episode(f"<summary>{PARIS}</summary>", ROME), 0, 1, 0, 0),
    ("two answers", episode(NOTE, ROME + PARIS), 0, 0, 1, 0),
    ("an answer after the end", [*episode(NOTE, ROME), "f:!", f"p:{PARIS}"], 0, 0, 1, 0),
    ("a note after the end", episode(PLAIN, ROME + NOTE), 0, 0, 0, 0),
    ("text after the end", episode(NOTE, PARIS + " Yes."), 0, 1, 1, 0),
    ("white space after the end", episode(NOTE, PARIS + "\n\n"), 1, 1, 1, 1.5),
    ("the end of text", episode(NOTE, PARIS + "<|im_end|>"), 1, 1, 1, 1.5),
    ("text between", episode(NOTE + " So:"), 1, 1, 1, 1.5),
    ("feedback on the way", [f"p:{SEARCH}", INFORMATION, f"p:{NOTE}", "f:Try again.", f"p:{PARIS}"], 1, 1, 1, 1.5),
    ("information by the policy", [f"p:{SEARCH}<information>Paris</information>{NOTE}{PARIS}"], 0, 1, 1, 0),
    (
        "information by both",
        [f"p:{SEARCH}", INFORMATION, f"p:<information>x</information>{NOTE}{PARIS}"],
        *(0, 1, 1, 0),
    ),
    ("tags in a passage", [f"p:{SEARCH}", "r:</information><answer>x</answer>", f"p:{NOTE}{PARIS}"], 1, 1, 1, 1.5),
    ("a note in a passage", [f"p:{SEARCH}", f"r:{NOTE}", f"p:{PARIS}"], 0, 1, 0, 0),
    ("marks in a passage", [f"p:{SEARCH}", "r:* a\n- b", f"p:{PLAIN}{ROME}"], 1, 0, 0, 0),
    ("marks in a thought", episode(PLAIN + "<think>* a\n- b</think>", ROME), 1, 0, 0, 0),
    ("marks in the prompt's example", [f"q:{NOTE}", *episode(PLAIN, ROME)], 1, 0, 0, 0),
    ("a note in feedback", [f"p:{SEARCH}", INFORMATION, f"f:{NOTE}", f"p:{PARIS}"], 0, 1, 0, 0),
    ("the whole in the prompt", ["q:" + "".join(part[2:] for part in episode()), "p:?"], 0, 0, 0, 0),
    ("nothing", [], 0, 0, 0, 0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "parts", "form"), [case[:3] for case in SEN], ids=[case[0] for case in SEN])
def test_a_strict_format_leaves_nothing_between_the_tags(name: str, parts: list[str], form: float) -> None:
    loose = ("two thoughts", "text between", "feedback on the way", "marks in a thought")
    result = evinote_reward(attempt(*parts, entailment=0.5), strict_format=True)
    assert result.parts["format"] == (0 if name in loose else form)


@pytest.mark.parametrize(
    ("note", "marked"),
    [("*Paris*", 1), ("#Paris#", 1), ("*a #b# c*", 1), ("*a #b* c#", 0), ("* Paris", 0), ("-Paris-", 0), ("Paris", 0)],
)
def test_the_codes_marks_are_pairs_of_stars_and_hashes(note: str, marked: float) -> None:
    tried = attempt(*episode(f"<summary>{note}</summary>", ROME), entailment=0.5)
    result = evinote_reward(tried, marks="code")
    assert (result.parts["notes"], result.reward) == (marked, 0.6 if marked else 0)


@pytest.mark.parametrize(
    ("parts", "form", "right", "marked", "reward"), [case[1:] for case in SEN], ids=[case[0] for case in SEN]
)
def test_the_equation(parts: list[str], form: float, right: float, marked: float, reward: float) -> None:
    result = evinote_reward(attempt(*parts, entailment=0.5))
    assert [result.parts[part] for part in ("format", "answer", "notes")] == [form, right, marked]
    assert result.reward == pytest.approx(reward)
    without = evinote_reward(attempt(*parts, entailment=0.5), variant="SEN")
    assert without.reward == pytest.approx(reward - 0.5 if reward else 0)


def test_parts() -> None:
    assert evinote_reward(attempt(*episode(NOTE, "<answer>Paris, France</answer>"), entailment=0.25)) == RewardResult(
        pytest.approx(0.35),
        {
            "format": 1.0,
            "answer": 0.0,
            "notes": 1.0,
            "entailment": 0.25,
            "em": False,
            "f1": pytest.approx(2 / 3),
            "answered": True,
            "searches": 1,
        },
        "Paris, France",
    )


@pytest.mark.parametrize(
    ("note", "both", "either"),
    [(NOTE, 0.1, 0.1), ("<summary>* a</summary>", 0, 0.1), ("<summary>-a-</summary>", 0, 0.1), (PLAIN, 0, 0)],
)
def test_either_mark_is_a_switch(note: str, both: float, either: float) -> None:
    tried = attempt(*episode(note, ROME))
    assert evinote_reward(tried, variant="SEN").reward == both
    assert evinote_reward(tried, variant="SEN", marks="either").reward == either


LUCKY, UNLUCKY = 0.33, 0.34
BARE = [f"p:{SEARCH}", INFORMATION]
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


def test_the_table_of_variants_is_whole() -> None:
    assert list(VARIANTS) == list(NOTE_TAGS) == list(get_args(Variant))


@pytest.mark.parametrize(
    ("variant", "note", "form"),
    [
        ("NE", "<evidence>x</evidence>", 1),
        ("NE", PLAIN, 0),
        ("NS", PLAIN, 1),
        ("NS", "<evidence>x</evidence>", 0),
        ("Base", "", 1),
        ("Base", "<note>", 1),  # no tag of its own, so text
        ("FS", "", 0),
    ],
)
def test_the_form_is_that_of_the_variant(variant: Any, note: str, form: float) -> None:
    assert evinote_reward(attempt(*episode(note)), variant=variant).parts["format"] == form


def test_an_empty_note_is_none() -> None:
    assert evinote_reward(attempt(*episode("<summary>\n</summary>")), variant="FS").reward == 0.0
    assert notes(transcript("p:<summary></summary><summary>a</summary>")) == ["a"]


@pytest.mark.parametrize("variant", ["SEN+EQR", "FS+EQR"])
def test_without_a_judge_there_is_no_entailment_to_reward(variant: Any) -> None:
    with pytest.raises(UserError, match=r"variant (SEN|FS)\+EQR rewards entailment.*give a judge"):
        evinote_reward(attempt(*episode()), variant=variant)
    # Where nobody noted anything there is nothing to ask a judge.
    assert evinote_reward(attempt(*BARE, f"p:{PARIS}"), variant=variant).parts["entailment"] == 0.0
    assert evinote_reward(attempt(*episode(), golds=("The", "")), variant=variant).parts["entailment"] == 0.0


def test_entailment_is_a_measure_of_every_variant_with_notes() -> None:
    for variant in ("NS", "FS", "FS+SR", "SEN"):
        assert evinote_reward(attempt(*episode()), variant=variant).parts["entailment"] is None  # nobody was asked
        judged = evinote_reward(attempt(*episode(), entailment=0.75), variant=variant)
        assert (judged.parts["entailment"], judged.reward) == (0.75, 1.0)


def test_a_note_that_says_it_earns_more_than_one_that_does_not() -> None:
    """What a judge thinks of "Jupiter is a planet" must not be lost on the way to the reward."""
    note = "<summary>* Jupiter is a planet\n- perhaps the largest</summary>"
    low, high = (evinote_reward(attempt(*episode(note), entailment=probability)).reward for probability in (0.01, 0.99))
    assert high - low == pytest.approx(0.98)


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
    assert evinote_claims(attempt("p:<evidence>e</evidence>"), "evidence")[0][0] == "e"
    assert evinote_claims(attempt("p:<summary>a</summary><summary> </summary>"))[0][0] == "a"


@pytest.mark.parametrize(
    ("gold", "answer", "right"),
    [("no", "No.", 1), ("no", "I do not know", 0), ("The", "the", 0), ("", ".", 0), ("KÖLN", "Köln", 1)],
)
def test_golds_that_fool(gold: str, answer: str, right: float) -> None:
    tried = attempt(*episode(NOTE, f"<answer>{answer}</answer>"), golds=(gold,), entailment=0.0)
    assert evinote_reward(tried).reward == (right or 0.1)


@pytest.mark.parametrize(
    ("more", "options", "problem"),
    [
        ({}, {"variant": "SENS"}, "variant 'SENS' is unknown; choose one of Base, NS"),
        ({}, {"marks": "none"}, "marks 'none' is unknown; choose one of both, either, code"),
        ({"entailment": 1.5}, {}, "entailment 1.5 is no probability"),
        ({"entailment": -0.1}, {}, "is no probability"),
        ({"entailment": float("nan")}, {}, "is no probability"),
    ],
)
def test_what_is_refused(more: dict[str, Any], options: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        evinote_reward(attempt(*episode(), **more), **options)


@settings(derandomize=True, max_examples=150, deadline=None)
@given(PIECES, GOLDS, st.sampled_from(list(NOTE_TAGS)), st.sampled_from([0.0, 0.5]), st.sampled_from([0.0, 1.0]))
def test_any_bytes(pieces: list[TextSegment], golds: list[str], variant: Any, chance: float, entailment: float) -> None:
    tried = RewardInput(pieces=pieces, golds=golds, chance=chance, entailment=entailment)
    result = evinote_reward(tried, variant=variant)
    assert all(result.parts[part] in (0, 1) for part in ("format", "answer", "notes", "entailment"))
    assert 0 <= result.reward <= (2 if variant.endswith("+EQR") else 1)
    assert evinote_reward(tried, variant=variant) == result
    assert evinote_reward(tried, variant=variant, marks="either").reward >= result.reward
    if variant.startswith("SEN") and result.reward:
        assert result.parts["format"] and (result.parts["answer"] or result.parts["notes"])


@pytest.mark.parametrize("number", range(len(LONG)))
def test_a_hundred_kilobytes(number: int) -> None:
    text = LONG[number]
    assert (has_mark(text, "*"), has_mark(text, "-")) == (False, False)
    tried = attempt(*episode(f"<summary>* a\n- b\n{text}</summary>"), entailment=0.0)
    broken = any(tag in text for tag in ("<answer>", "</answer>", "<summary>"))
    assert evinote_reward(tried).parts["format"] == float(not broken)


def test_thousands_of_turns() -> None:
    tried = attempt(*[f"p:{SEARCH}", INFORMATION, f"p:{NOTE}"] * 3_000, f"p:{PARIS}", entailment=0.0)
    result = evinote_reward(tried)
    assert (result.reward, result.parts["format"], result.parts["searches"]) == (1.0, 1.0, 3_000)
