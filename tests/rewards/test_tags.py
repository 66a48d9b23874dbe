"""Tests of tags: only the policy's own text counts, and nothing else can look like a tag."""

import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_cases import PIECES, transcript

from thresher.rewards import (
    Source,
    TextSegment,
    UserError,
    blocks,
    escape_tags,
    final_answer,
    outline,
    tag_sequence,
    tag_strings,
)
from thresher.rewards.tags import up_to_answer

prompt, policy, retrieved, feedback = (
    lambda text, source=source: TextSegment(source, text if isinstance(text, bytes) else text.encode())
    for source in (Source.PROMPT, Source.POLICY, Source.RETRIEVED, Source.FEEDBACK)
)


ANSWERS = [
    # case, pieces, final answer
    ("nothing", [], None),
    ("plain", [policy("<think>x</think><answer> Paris\n</answer>")], "Paris"),
    ("an answer in a passage", [policy("<search>q</search>"), retrieved("<answer>gold</answer>")], None),
    ("opened by the policy, closed by a passage", [policy("<answer>gold"), retrieved("</answer>")], None),
    ("a passage between", [policy("<answer>a"), retrieved("gold"), policy("b</answer>")], None),
    ("a tag split by a passage", [policy("<answer>gold</ans"), retrieved("r"), policy("wer>")], None),
    ("a tag split over two policy pieces", [policy("<ans"), policy("wer>gold</answ"), policy("er>")], "gold"),
    ("two answers", [policy("<answer>one</answer> <answer>two</answer>")], "one"),
    ("an empty answer", [policy("<answer> </answer>")], ""),
    ("an empty one first", [policy("<answer> </answer>"), feedback("!"), policy("<answer>gold</answer>")], "gold"),
    ("a stray end first", [policy("x</answer>"), feedback("!"), policy("<answer>gold</answer>")], "gold"),
    ("an answer after the end", [policy("<answer>one</answer>"), retrieved(""), policy("<answer>two</answer>")], "one"),
    ("nested", [policy("<answer>a<answer>gold</answer>b</answer>")], "gold"),
    ("inner spaces", [policy("< answer>gold</answer >")], None),
    ("an attribute", [policy("<answer id=1>gold</answer>")], None),
    ("other tags inside", [policy("<answer><b>gold</b></answer>")], "<b>gold</b>"),
    ("a broken character", [policy(b"<answer>K\xc3</answer>")], "K\ufffd"),
    ("a character over two pieces", [policy(b"<answer>K\xc3"), policy(b"\xb6ln</answer>")], "Köln"),
]


@pytest.mark.parametrize(("pieces", "answer"), [c[1:] for c in ANSWERS], ids=[c[0] for c in ANSWERS])
def test_final_answer(pieces: list[TextSegment], answer: str | None) -> None:
    assert final_answer(pieces) == answer


def test_blocks_carry_their_place_in_the_whole_transcript() -> None:
    pieces = [
        prompt("Frage: Köln? <search>no</search>"),
        policy("<search> one"),
        policy("</search>"),
        retrieved("<search>no</search>"),
        policy(""),
        policy("hm <search></search><search>two</search>"),
    ]
    whole = b"".join(piece.text for piece in pieces)
    found = blocks(pieces, "search")
    assert [block.text for block in found] == ["one", "", "two"]
    assert [whole[b.start : b.end] for b in found] == [
        b"<search> one</search>",
        b"<search></search>",
        b"<search>two</search>",
    ]


def test_a_close_takes_the_innermost_open_and_frees_the_rest() -> None:
    text = "<a>1<a>2</a>3</a></a><a>4<b></a></b><a>5"
    assert [block.text for block in blocks([policy(text)], "a")] == ["2", "4<b>"]
    assert [block.text for block in blocks([policy(text)], "b")] == ["</a>"]


def test_tag_sequence_reads_the_policy_in_order() -> None:
    pieces = [
        prompt("<think></think>"),
        policy("<think>x</think><sea"),
        policy("rch>q</search>"),
        retrieved("<answer>no</answer>"),
        policy("</think><other><answer>"),
    ]
    events = tag_sequence(pieces, ["think", "search", "answer"])
    assert [("/" if e.closing else "") + e.tag for e in events] == [
        "think",
        "/think",
        "search",
        "/search",
        "/think",
        "answer",
    ]
    whole = b"".join(piece.text for piece in pieces)
    for e in events:
        assert whole[e.start : e.end].decode() == f"<{'/' if e.closing else ''}{e.tag}>"
    assert tag_sequence(pieces, []) == []


def test_up_to_answer_cuts_after_the_final_answer() -> None:
    pieces = [
        prompt("<answer>no</answer>"),
        policy("</answer><answer></answer><answer>a</ans"),
        policy("wer>tail"),
        policy("more"),
        retrieved("r"),
    ]
    kept = up_to_answer(pieces)
    assert kept[:2] == pieces[:2] and kept[2:] == [policy("wer>")]
    assert up_to_answer(pieces[:2]) == pieces[:2]


FRAGMENTS = st.sampled_from(
    ["<a>", "</a>", "<b>", "</b>", "<", "/", "a", ">", "</", "a>", " ", "é", "<a", "</b", "</ a>", "<A>"]
)
TEXTS = st.lists(FRAGMENTS, max_size=8).map("".join)
SOURCES = st.sampled_from(list(Source))


@settings(derandomize=True, max_examples=400, deadline=None)
@given(st.lists(st.tuples(SOURCES, TEXTS), max_size=8), st.integers(0, 40))
def test_only_policy_bytes_matter_and_cutting_them_does_not(parts: list[tuple[Source, str]], cut: int) -> None:
    pieces = [TextSegment(source, text.encode()) for source, text in parts]
    found = blocks(pieces, "a")
    # Other sources' texts, at equal length, do not change the policy's blocks.
    silent = [p if p.source is Source.POLICY else TextSegment(p.source, b"." * len(p.text)) for p in pieces]
    assert blocks(silent, "a") == found
    # Splitting a policy piece changes neither text nor place.
    pieced = [TextSegment(p.source, half) for p in pieces for half in (p.text[:cut], p.text[cut:])]
    assert blocks(pieced, "a") == found
    for block in found:
        assert "</a>" not in block.text and "<a>" not in block.text


TAGS = tag_strings("a", "b", "ab", "information")

ESCAPED = [
    ("plain text, 1 < 2 > 0", "plain text, 1 < 2 > 0"),
    ("</a>", "< /a>"),
    ("x<a>y</b>z", "x< a>y< /b>z"),
    ("</A> < /a> </a > <c>", "</A> < /a> </a > <c>"),
    ("<<a>>", "<< a>>"),
    ("<a</a>>", "<a< /a>>"),
    ("1 <", "1 < "),
    ("ends in </informa", "ends in < /informa"),
    ("</informal", "</informal"),
    ("<ab", "< ab"),
    ("<e\u0301></a>", "<é>< /a>"),
    ("", ""),
]


@pytest.mark.parametrize(("text", "expected"), ESCAPED)
def test_escape_tags(text: str, expected: str) -> None:
    assert escape_tags(text, TAGS) == expected


BARE = ["<", ">", "/", "a", "b", "<a", "</", "ab>", "</inform", "ation>", "x", "é", "A>", "< a>", " ", "\n"]
TAG_PIECES = st.sampled_from([*BARE, "<a>", "</a>", "</ab>", "<information>"])
HOSTILE = st.lists(TAG_PIECES, max_size=10).map("".join)


def occurrences(text: str) -> int:
    return sum(text.startswith(tag, i) for tag in TAGS for i in range(len(text)))


@settings(derandomize=True, max_examples=500, deadline=None)
@given(st.lists(HOSTILE, max_size=4), st.lists(st.sampled_from(["", *TAGS]), min_size=5, max_size=5))
def test_no_tag_survives_alone_or_between_neighbours(texts: list[str], wrappers: list[str]) -> None:
    outputs = [escape_tags(text, TAGS) for text in texts]
    for text, output in zip(texts, outputs, strict=True):
        assert occurrences(output) == 0
        assert escape_tags(output, TAGS) == output
        assert output.replace(" ", "") == text.replace(" ", "")
        if occurrences(text) == 0 and not any(tag.startswith(text[text.rfind("<") :]) for tag in TAGS if "<" in text):
            assert output == text
    joined = wrappers[0] + "".join(o + w for o, w in zip(outputs, wrappers[1:], strict=False))
    used = wrappers[: len(outputs) + 1]
    assert occurrences(joined) == sum(occurrences(w) for w in used)


def test_the_tokenizers_normal_form_cannot_bring_a_tag_back() -> None:
    kelvin = "<O\u212a>"
    assert unicodedata.normalize("NFC", kelvin) == "<OK>"
    assert escape_tags(kelvin, tag_strings("OK")) == "< OK>"


def test_what_is_no_tag_and_no_name_is_refused() -> None:
    wrong: list[Any] = [["answer"], ["<two words>"], ["<é>"], ["<a><b>"], ["<"], [""], [7], "</a>"]
    for tags in wrong:
        with pytest.raises(UserError, match="between < and >"):
            escape_tags("text", tags)
    names: list[Any] = ["", "<answer>", "/answer", "two words", "é", 7]
    for name in names:
        for read in (tag_strings, lambda tag: blocks([], tag), lambda tag: tag_sequence([], [tag])):
            with pytest.raises(UserError, match="ASCII word"):
                read(name)


@pytest.mark.parametrize(
    ("text", "closed", "events", "answer"),
    [
        ("<answer>" * 20_000, 0, 20_000, None),
        ("</answer>" * 20_000, 0, 20_000, None),
        ("<answer>x</answer>" * 20_000, 20_000, 40_000, "x"),
        ("<" * 200_000, 0, 0, None),
    ],
)
def test_hundreds_of_kilobytes(text: str, closed: int, events: int, answer: str | None) -> None:
    """Quadratic work on such a text would take minutes, which would be noticed without measuring time."""
    pieces = [policy(text[i : i + 50]) for i in range(0, len(text), 50)]
    assert len(blocks(pieces, "answer")) == closed
    assert len(tag_sequence(pieces, ["answer", "search"])) == events
    assert final_answer(pieces) == answer
    assert occurrences(escape_tags(text, TAGS)[:200]) == 0


AB = ("a", "b")

OUTLINES = [
    # case, pieces, sections a and b
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
    ("closed by another", ["p:<a>x</b>"], None),
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
    # case, pieces, sections a and i, where i holds retrieved text
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
