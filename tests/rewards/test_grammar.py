"""The outline of a transcript: what is in a paper's form, and every way to look like it."""

import pytest
from hypothesis import given, settings
from reward_cases import LONG, PIECES, transcript

from thresher.rewards import Source, TextSegment, outline

AB = ("a", "b")

OUTLINES = [
    # what it tries, pieces, sections a and b
    ("nothing", [], ()),
    ("two sections", ["p:<a>x</a><b>y</b>"], AB),
    ("a section twice", ["p:<a>x</a><a>y</a>"], ("a", "a")),
    ("empty sections", ["p:<a></a><b> </b>"], AB),
    ("white space outside", ["q:q", "p:\n <a>x</a>\n\n<b>y</b>\t\n"], AB),
    ("free text inside", ["p:<a>1 < 2 > 0 <i>x</i> < a> <A> </c></a><b>[1]{</b>"], AB),
    ("text before", ["p:Sure: <a>x</a>"], None),
    ("text after", ["p:<a>x</a><b>y</b>."], None),
    ("a half tag after, as a token may leave it", ["p:<a>x</a></"], None),
    ("unclosed", ["p:<a>x</a><b>y"], None),
    ("never opened", ["p:<a>x</a>y</b>"], None),
    ("crossed", ["p:<a>x<b>y</a>z</b>"], None),
    ("nested in another", ["p:<a>x<b>y</b>z</a>"], None),
    ("a tag over two pieces", ["p:<a>x</", "p:a><", "p:b>y</b>"], AB),
    ("a tag over a passage", ["p:<a>x</", "r:-", "p:a>"], None),
    ("closed by a passage", ["p:<a>x", "r:</a>"], None),
    ("sections in a passage", ["r:<a>x</a>", "p:<b>y</b>"], ("b",)),
    ("a passage between", ["p:<a>x</a>", "r:</a>", "p:<b>y</b>"], AB),
    ("feedback between", ["p:<a>x</a>", "f:Try again.", "p:<b>y</b>"], None),
    ("white feedback", ["p:<a>x</a>", "f:\n", "p:<b>y</b>"], AB),
    ("the end of text", ["p:<a>x</a><|im_end|>\n"], ("a",)),
    ("the end of text before the end", ["p:<a>x</a><|im_end|><b>y</b>"], None),
    ("the end of text of an earlier turn", ["p:<a>x</a><|im_end|>", "r:-", "p:<b>y</b>"], None),
    ("text behind the end of text", ["p:<a>x</a><|im_end|>x"], None),
]


@pytest.mark.parametrize(("parts", "expected"), [case[1:] for case in OUTLINES], ids=[case[0] for case in OUTLINES])
def test_outline(parts: list[str], expected: tuple[str, ...] | None) -> None:
    assert outline(transcript(*parts), AB) == expected


def test_bytes_that_are_no_text() -> None:
    cut = "é".encode()[:1]
    assert outline([TextSegment(Source.POLICY, b"<a>" + cut + b"</a>")], AB) == ("a",)
    assert outline([TextSegment(Source.POLICY, b"<a>x</a>" + cut)], AB) is None
    assert outline([TextSegment(Source.POLICY, cut + b"<a>x</a>")], AB) is None


RETRIEVED = [
    # what it tries, pieces, sections a and i, where i is what was retrieved
    ("one search", ["p:<a>x</a>", "r:\n<i>Doc 1</i>\n", "p:<a>y</a>"], ("a", "i", "a")),
    ("whatever a passage says", ["p:<a>x</a>", "r:</i><a><i></a>", "p:<a>y</a>"], ("a", "i", "a")),
    ("an empty one", ["p:<a>x</a>", "r:", "p:<a>y</a>"], ("a", "i", "a")),
    ("written by the policy", ["p:<a>x</a><i>Doc 1</i><a>y</a>"], None),
    ("closed by the policy", ["p:<a>x</a>", "r:<i>Doc 1", "p:</i><a>y</a>"], None),
]


@pytest.mark.parametrize(("parts", "expected"), [case[1:] for case in RETRIEVED], ids=[case[0] for case in RETRIEVED])
def test_what_was_retrieved_is_a_section(parts: list[str], expected: tuple[str, ...] | None) -> None:
    assert outline(transcript(*parts), ("a",), retrieved="i") == expected


@settings(derandomize=True, max_examples=300, deadline=None)
@given(PIECES)
def test_whatever_else_is_said_and_however_it_is_cut(pieces: list[TextSegment]) -> None:
    tags = ("think", "search", "summary", "answer")
    found = outline(pieces, tags, retrieved="information")
    assert found is None or set(found) <= {*tags, "information"}
    silent = [p if p.source is Source.POLICY else TextSegment(p.source, b"." * len(p.text)) for p in pieces]
    if not any(p.source is Source.FEEDBACK for p in pieces):
        assert outline(silent, tags, retrieved="information") == found
    halves = [TextSegment(p.source, half) for p in pieces for half in (p.text[:7], p.text[7:])]
    assert outline(halves, tags, retrieved="information") == found


@pytest.mark.parametrize("number", range(len(LONG)))
def test_a_hundred_kilobytes(number: int) -> None:
    text = LONG[number]
    inside = [tag for tag in ("<answer>", "</answer>", "<summary>") if tag in text]
    expected = None if inside else ("summary", "answer")
    pieces = transcript(f"p:<summary>{text}</summary><answer>x</answer>")
    assert outline(pieces, ("summary", "answer")) == expected
    outside = transcript(f"p:<summary></summary>{text}<answer>x</answer>")
    assert (outline(outside, ("summary", "answer")) is None) == bool(text.strip())
