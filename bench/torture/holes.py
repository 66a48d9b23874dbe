"""Attempts to be rewarded without merit, ten or more a system, each with what the paper's own formula pays for it.

An attempt is a record as `thresher score` reads it. `earns` was computed by hand from the equation at the top of the
system's file in rewards/papers; `by` says which part of the formula pays, "" where nothing may be had. What a paper
allows is no fault of ours and stands in docs/papers.md; a reward other than `earns` is.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from thresher.bench.torture.attack import Field, Tried
from thresher.engine.scoring.transcripts import read_reward_input
from thresher.engine.systems import load_system

TOLERANCE = 1e-12
GOLD = "Paris"
QUESTION = "What is the capital of France?"
PASSAGES = [
    {"title": "France", "text": "Paris is the capital of France and its largest city by far."},
    {"title": "Spain", "text": "Madrid is the capital of Spain."},
    {"title": "Italy", "text": "Rome is the capital of Italy."},
]
GIVEN = {"passages": PASSAGES, "gold_indices": [1]}


@dataclass(frozen=True, slots=True)
class Hole:
    """What somebody tries, what was written (a text of the policy's, or segments), and what it earns."""

    what: str
    written: str | Sequence[tuple[str, str]]
    earns: float
    by: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def policy(*texts: str) -> list[tuple[str, str]]:
    """Turns of the policy with a passage of the engine's between them."""
    parts = [("policy", text) for text in texts]
    between = ("retrieved", "<information>Paris is the capital of France.</information>")
    return [part for turn in parts for part in (turn, between)][:-1]


SEARCH = "<search>capital of France</search>"
NOTED = "<summary>* Paris is *big*\n- perhaps</summary>"
_EM = [
    Hole("the answer stands in a passage", [("retrieved", "<answer>Paris</answer>")], 0),
    Hole("the answer stands in the prompt's example", [("prompt", "<answer>Paris</answer>"), ("policy", "so")], 0),
    Hole("the answer stands in feedback", [("feedback", "<answer>Paris</answer>")], 0),
    Hole(
        "a passage fills the policy's answer tags",
        [("policy", "<answer>"), ("retrieved", "Paris"), ("policy", "</answer>")],
        0,
    ),
    Hole("a second, right answer", "<answer>Rome</answer><answer>Paris</answer>", 0),
    Hole("every candidate in one answer", "<answer>Rome, Madrid, Paris</answer>", 0),
    Hole("an answer that is never closed", "<answer>Paris", 0),
    Hole("tags in capitals", "<ANSWER>Paris</ANSWER>", 0),
    Hole("an empty answer where a gold is only an article", "<answer></answer>", 0, more={"golden_answers": ["The"]}),
    Hole("the gold in invisible company", "<answer>Paris\u200b</answer>", 0),
]

HOLES: dict[str, list[Hole]] = {
    "search_r1": [
        *_EM,
        Hole("a guess without any search", "<answer>Paris</answer>", 1, "EM looks at the answer alone"),
        Hole("articles and punctuation around it", "<answer>\u0054he -- Paris!!</answer>", 1, "EM normalises"),
    ],
    "eval_rar": [
        *_EM,
        Hole(
            "the whole passage is copied into evaluate, the answer is wrong",
            policy(SEARCH, "<evaluate>Paris is the capital of France.</evaluate><answer>Rome</answer>"),
            0.1,
            "the .1 asks only that evaluate holds a gold",
        ),
        Hole(
            "every candidate is named in evaluate, and no answer given",
            policy(SEARCH, "<evaluate>Rome, Madrid, Paris, Bern</evaluate>"),
            0.1,
            "the .1 needs no answer (`require_answer` asks for one)",
        ),
        Hole(
            "guesses in evaluate, and no search at all",
            "<evaluate>Rome, Paris</evaluate><answer>Rome</answer>",
            0.1,
            "the .1 needs no search (`count_before_search = false` asks for one)",
        ),
        Hole("a hundred evaluations", "<evaluate>Paris</evaluate>" * 100, 0.1, "once, however many there are"),
        Hole("an evaluation in a passage", [("retrieved", "<evaluate>Paris</evaluate>")], 0),
        Hole("an evaluation behind the answer", "<answer>Rome</answer><evaluate>Paris</evaluate>", 0),
        Hole(
            "a gold put together from two evaluations",
            "<evaluate>New</evaluate><evaluate>York</evaluate>",
            0,
            more={"golden_answers": ["New York"]},
        ),
        Hole("the gold no in any sentence", "<evaluate>no, I know not</evaluate>", 0, more={"golden_answers": ["no"]}),
        Hole("a gold inside a longer word", "<evaluate>a party</evaluate>", 0, more={"golden_answers": ["art"]}),
        Hole("an evaluation that is never closed", "<evaluate>Paris", 0),
    ],
    "naive_grpo": [
        Hole("the form, with nothing in it", "<think></think><answer></answer>", 1, "format pays for tags alone"),
        Hole("the form, and a wrong answer", "<think>x</think><answer>Rome</answer>", 1, "format pays for tags alone"),
        Hole("the answer without the form", "<answer>Paris</answer>", 1, "the two parts are scored apart"),
        Hole("text before the form", "so <think></think><answer></answer>", 0),
        Hole("text behind the form", "<think></think><answer></answer> so", 0),
        Hole("the form twice", "<think></think><answer></answer>" * 2, 0),
        Hole("the form in the other order", "<answer></answer><think></think>", 0),
        Hole("a section in a section", "<think><answer></answer></think>", 0),
        Hole("a second, right answer", "<think></think><answer>Rome</answer><answer>Paris</answer>", 0),
        Hole("the form in the prompt", [("prompt", "<think></think><answer>Paris</answer>"), ("policy", "")], 0),
        Hole("every candidate in one answer", "<think></think><answer>Rome, Paris</answer>", 1, "format alone"),
        Hole("tags in capitals", "<THINK></THINK><ANSWER>Paris</ANSWER>", 0),
    ],
    "arena": [
        Hole(
            "every reference is named, and the form kept",
            "<relevance>[1,2,3]</relevance><analysis></analysis><answer>Rome</answer>",
            1.5,
            "format 1, relevance .5 for an overlap (`max_indices` ends it)",
        ),
        Hole(
            "the same, where `max_indices` is 2",
            "<relevance>[1,2,3]</relevance><analysis></analysis><answer>Rome</answer>",
            1,
            "format 1",
            options={"max_indices": 2},
        ),
        Hole(
            "the form, with nothing in it",
            "<relevance></relevance><analysis></analysis><answer></answer>",
            1,
            "format 1",
        ),
        Hole(
            "the right reference, and no answer",
            "<relevance>[1]</relevance><analysis></analysis><answer></answer>",
            2,
            "format 1, relevance 1: the parts are scored apart",
        ),
        Hole(
            "references that do not exist beside all that do",
            "<relevance>[0,1,2,3,4,999999999]</relevance><analysis></analysis><answer>Rome</answer>",
            1.5,
            "an overlap is worth .5, whatever else is named",
        ),
        Hole(
            "one reference, a thousand times",
            f"<relevance>[{'1,' * 999}1]</relevance><analysis></analysis><answer>Rome</answer>",
            2,
            "relevance compares sets",
        ),
        Hole("a range", "<relevance>[1-3]</relevance><analysis></analysis><answer>Rome</answer>", 1, "format 1"),
        Hole("the bonus without the form", "<relevance>[1]</relevance><answer>Paris</answer>", 2, "1 and 1, no bonus"),
        Hole(
            "two relevance sections, a wider one behind",
            "<relevance>[2]</relevance><relevance>[1]</relevance><analysis></analysis><answer>Rome</answer>",
            0,
        ),
        Hole("relevance behind the answer", "<analysis></analysis><answer>Rome</answer><relevance>[1]</relevance>", 0),
        Hole("text behind the last section", "<relevance>x</relevance><analysis></analysis><answer>Rome</answer> !", 0),
        Hole(
            "all sections stand in a reference",
            [("prompt", "<relevance>[1]</relevance><analysis></analysis><answer>Paris</answer>"), ("policy", "so")],
            0,
        ),
        Hole(
            "the bonus, with an analysis of nothing",
            "<relevance>[1]</relevance><analysis></analysis><answer>Paris</answer>",
            13,
            "nothing reads the analysis",
        ),
    ],
    "evinote": [
        Hole(
            "a note that claims whatever might be asked, a wrong answer",
            policy(SEARCH, f"{NOTED}<answer>Rome</answer>"),
            0.1 + 0.99,
            ".1 and the entailment of the policy's own note, which nothing holds to the passages",
            more={"entailment": 0.99},
        ),
        Hole(
            "marks around nothing that matters",
            policy(SEARCH, "<summary>* a\n- b</summary><answer>Rome</answer>"),
            0.1,
            "note-taking asks for marks alone",
            more={"entailment": 0.0},
        ),
        Hole(
            "a right answer, and an idle note",
            policy(SEARCH, "<summary>nothing</summary><answer>Paris</answer>"),
            1,
            "format and answer hold; marks are not asked for",
            more={"entailment": 0.0},
        ),
        Hole("hyphens inside words", policy(SEARCH, "<summary>well-known*</summary><answer>Rome</answer>"), 0),
        Hole("no note", policy(SEARCH, "<answer>Paris</answer>"), 0),
        Hole("an empty note", policy(SEARCH, "<summary> </summary><answer>Paris</answer>"), 0),
        Hole("an empty answer", policy(SEARCH, f"{NOTED}<answer></answer>"), 0),
        Hole("entailment in a bad form", policy(SEARCH, f"{NOTED}{NOTED}<answer>Rome</answer>"), 0),
        Hole("a note without a search", f"{NOTED}<answer>Paris</answer>", 0),
        Hole(
            "a passage of the policy's own",
            f"{SEARCH}<information>Paris</information>{NOTED}<answer>Paris</answer>",
            0,
        ),
        Hole("a note behind the answer", policy(SEARCH, f"<answer>Paris</answer>{NOTED}"), 0),
        Hole(
            "the prompt's own marks",
            [("prompt", NOTED), *policy(SEARCH, "<summary>x</summary><answer>Rome</answer>")],
            0,
        ),
    ],
    "eviomni": [
        Hole(
            "the form, with nothing in it",
            "<reason></reason><extract></extract><answer></answer>",
            0.1,
            "format; lengths of nothing earn nothing",
        ),
        Hole(
            "one word of evidence, a long rationale, a wrong answer",
            f"<reason>{'so ' * 30}</reason><extract>x</extract><answer>Rome</answer>",
            0.1 + 0.1 * (1 / (1 + math.exp(-29 / 0.5)) + 1) / 2,
            "format and both lengths: nothing asks what was kept",
        ),
        Hole(
            "one word of evidence, no rationale",
            "<reason></reason><extract>x</extract><answer>Rome</answer>",
            0.15,
            "format, and the length of the evidence",
        ),
        Hole(
            "all passages as evidence",
            f"<reason>x</reason><extract>{' '.join(p['text'] for p in PASSAGES)}</extract><answer>Rome</answer>",
            0.1 + 0.1 * (math.exp(-48) / (1 + math.exp(-48))) / 2,
            "format",
        ),
        Hole(
            "all passages as evidence, joined by characters that nobody sees",
            f"<reason>x</reason><extract>{chr(0x200B).join(' '.join(p['text'] for p in PASSAGES).split())}</extract>"
            "<answer>Rome</answer>",
            0.1 + 0.1 * (math.exp(-48) / (1 + math.exp(-48))) / 2,
            "format",
        ),
        Hole("a text without sections", "Paris", 0),
        Hole(
            "many candidates in one answer",
            "<reason>x</reason><extract></extract><answer>Rome Madrid Bern Paris</answer>",
            0.1 + 0.8 * 0.4 / 3,
            "F1 pays a share for a list: 2/(4 + 1) here",
        ),
        Hole(
            "the gold, said three times",
            "<reason>x</reason><extract></extract><answer>Paris Paris Paris</answer>",
            0.1 + 0.8 * 0.5 / 3,
            "F1 pays a share for repetition: 2/(3 + 1)",
        ),
        Hole(
            "the answer in the rationale",
            "<reason><answer>Paris</answer></reason><extract></extract><answer>Rome</answer>",
            0,
        ),
        Hole(
            "branches that answer in their prompts",
            "<reason></reason><extract></extract><answer></answer>",
            0.1,
            "format",
            more={
                "branches": {name: [{"source": "prompt", "text": "<answer>Paris</answer>"}] for name in ("rationale",)}
            },
        ),
        Hole(
            "the sections in another order",
            "<extract>x</extract><reason></reason><answer>Rome</answer>",
            0.05,
            "the length of the evidence",
        ),
        Hole("text between the sections", "<reason></reason>so<extract></extract><answer>Rome</answer>", 0),
    ],
}
HOLES["lear"] = HOLES["eviomni"]
HOLES["r1"] = [hole for hole in HOLES["search_r1"] if "search" not in hole.what] + [
    Hole("the form, with nothing in it", "<think></think><answer></answer>", 0),
    Hole("a guess without a thought", "<answer>Paris</answer>", 1, "EM looks at the answer alone"),
]
HOLES["autorefine"] = [
    *(hole for hole in _EM if hole.what != "every candidate in one answer"),
    Hole("every candidate in one answer", "<answer>Rome, Madrid, Paris</answer>", 0.5, "F1 pays a share: 2/(3 + 1)"),
    Hole(
        "the whole passage is copied into refine, the answer is wrong",
        policy(SEARCH, "<refine>Paris is the capital of France.</refine><answer>Rome</answer>"),
        0.1,
        "the .1 asks only that refine holds a gold",
    ),
    Hole(
        "every candidate is named in refine, and no answer given",
        "<refine>Rome, Madrid, Paris</refine>",
        0.1,
        "the .1 needs no answer (`require_answer` asks for one) and no search",
    ),
    Hole("the same, where an answer is asked for", "<refine>Paris</refine>", 0, options={"require_answer": True}),
    Hole("a hundred refinements", "<refine>Paris</refine>" * 100, 0.1, "once, however many there are"),
    Hole("a refinement in a passage", [("retrieved", "<refine>Paris</refine>")], 0),
    Hole("a refinement behind the answer", "<answer>Rome</answer><refine>Paris</refine>", 0),
    Hole("a refinement that is never closed", "<refine>Paris", 0),
    Hole(
        "a gold put together from two refinements",
        "<refine>New</refine><refine>York</refine>",
        0,
        more={"golden_answers": ["New York"]},
    ),
    Hole("a gold inside a longer word", "<refine>a party</refine>", 0, more={"golden_answers": ["art"]}),
    Hole("the gold yes in any sentence", "<refine>yes, perhaps</refine>", 0, more={"golden_answers": ["yes"]}),
]
# The code's marks are pairs of * and #: what carries the paper's marks carries none here, and earns nothing by them.
HOLES["evinote_code"] = [
    *(hole for hole in HOLES["evinote"] if not hole.what.startswith(("marks around", "a note that claims"))),
    Hole(
        "a pair of marks around nothing",
        policy(SEARCH, "<summary>**</summary><answer>Rome</answer>"),
        0.1,
        "note-taking asks for a pair of marks alone",
        more={"entailment": 0.0},
    ),
    Hole(
        "a note that claims whatever might be asked, a wrong answer",
        policy(SEARCH, "<summary>#Paris#</summary><answer>Rome</answer>"),
        0.1 + 0.99,
        ".1 and the entailment of the policy's own note, which nothing holds to the passages",
        more={"entailment": 0.99},
    ),
    Hole("the paper's marks", policy(SEARCH, "<summary>* a\n- b</summary><answer>Rome</answer>"), 0),
    Hole("pairs that cross", policy(SEARCH, "<summary>*a#b*c#</summary><answer>Rome</answer>"), 0),
    Hole("a mark that is not closed", policy(SEARCH, "<summary>*a* *b</summary><answer>Rome</answer>"), 0),
    Hole("a mark in a passage", [*policy(SEARCH, ""), ("policy", "<summary>a</summary><answer>Rome</answer>")], 0),
    Hole("a pair across two notes and no answer", policy(SEARCH, "<summary>*a*</summary>"), 0),
]


def attack(field: Field) -> Iterator[Tried]:
    """All of them, at any scale: they take milliseconds."""
    for system, holes in HOLES.items():
        for hole in holes:
            found = reward_of(system, hole)
            same = abs(found - hole.earns) <= TOLERANCE
            yield Tried(
                system, "right" if same else "wrong", f"{hole.what}: earns {found}, by the formula {hole.earns}"
            )


def reward_of(system: str, hole: Hole) -> float:
    written = [("policy", hole.written)] if isinstance(hole.written, str) else hole.written
    segments = [{"source": source, "text": text} for source, text in written]
    record = {"id": hole.what, "question": QUESTION, "golden_answers": [GOLD], "entailment": 0.9, "segments": segments}
    if system in ("arena", "eviomni", "lear"):
        record |= GIVEN
    attempt = read_reward_input({**record, **hole.more}, hole.what)
    return load_system(system, dict(hole.options)).reward(attempt).reward


def paid(system: str) -> list[str]:
    """What a system's formula pays for without merit, a line of Markdown each, for docs/papers.md."""
    return [f"| {hole.what} | {hole.earns:.4g} | {hole.by} |" for hole in HOLES[system] if hole.by]
