"""Shared metrics: the measures of a trajectory, by hand, and values that are missing and count for nothing."""

from dataclasses import replace
from typing import Any

import pytest
from reward_cases import PARTS

from thresher.engine.evaluation.metrics import (
    NAMES,
    mean,
    means,
    measured,
    measures_of,
    parts_of,
    ranking_measures,
    shown,
    summary_of,
)
from thresher.engine.protocol.trajectory import Segment, Trajectory
from thresher.engine.scoring.score import Scored
from thresher.engine.systems import NAMES as SYSTEMS
from thresher.engine.systems import load_system
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question
from thresher.rewards.reward import RewardInput, Source, TextSegment

PASSAGES = (("Paris", "Paris is the capital of France , as all know"), ("Bonn", "Bonn was a capital"))


def scored(
    system: str,
    *said: str,
    golds: tuple[str, ...] = ("Paris",),
    searches: int = 0,
    branch: int = 0,
    options: dict[str, Any] | None = None,
    **known: Any,
) -> Scored:
    """Score the policy's texts under a system; every segment has one id, because only the number of ids counts."""
    made = load_system(system, options or {})
    pieces = [TextSegment(Source.PROMPT, b"Q"), *(TextSegment(Source.POLICY, text.encode()) for text in said)]
    attempt = RewardInput(pieces=pieces, golds=golds, **known)
    segments = [Segment(piece.source, [1]) for piece in pieces]
    branches = {"full": Trajectory("q", 0, 0, [Segment(Source.PROMPT, [1]), Segment(Source.POLICY, [1] * branch)])}
    found = [{"query": "x", "passages": []}] * searches
    trajectory = Trajectory("q", 0, 0, segments, "answered", found, branches if branch else {})
    passages = tuple(Passage(title, title, text) for title, text in attempt.passages)
    question = Question("q", "?", golds, {}, passages, attempt.gold_indices)
    return Scored(question, trajectory, made.reward(attempt), attempt)


def measures(system: str, *said: str, **known: Any) -> dict[str, float | None]:
    return measures_of(scored(system, *said, **known), load_system(system, {}).tags)


def test_searches_that_a_tool_answers_count() -> None:
    entry = scored("zero_search", "<search>x</search>", "<answer>Paris</answer>")
    entry.trajectory.tools += [{"name": "search", "arguments": {"query": "x"}, "text": "Paris", "error": None}]
    assert measures_of(entry)["searches"] == 1.0
    entry.trajectory.tools += [{"name": "calculate", "arguments": {}, "text": "2", "error": None}]
    assert measures_of(entry)["searches"] == 1.0


def test_answers_work_and_a_judge() -> None:
    values = measures("search_r1", "<search>x</search>", "<answer>in Paris</answer>", searches=1, verdict=True)
    assert values == {
        "reward": 0.0,
        "em": 0.0,
        "f1": pytest.approx(2 / 3),
        "f1_plain": pytest.approx(2 / 3),
        "em_arena": 0.0,
        "f1_arena": pytest.approx(2 / 3),
        "char_f1": pytest.approx(2 * 5 / (8 + 5)),
        "sub_em": 1.0,
        "contains": 1.0,
        "answered": 1.0,
        "actions": 2.0,
        "invalid_actions": 0.0,
        "searches": 1.0,
        "response_tokens": 2.0,
        "tokens": 3.0,
        "verdict": 1.0,
    }
    papers = measures("search_r1", "<answer>New_York no</answer>", golds=("new york",))
    assert (papers["em"], papers["em_arena"]) == (0.0, 0.0) and papers["f1_arena"] == pytest.approx(0.8) != papers["f1"]
    spaced = measures("search_r1", "<answer>New_York</answer>", golds=("new york",))
    assert (spaced["em"], spaced["em_arena"]) == (0.0, 1.0)
    joined = measures("search_r1", "<answer>U.S.</answer>", golds=("us",))
    assert (joined["em"], joined["em_arena"]) == (1.0, 1.0)
    hyphened = measures("search_r1", "<answer>New-York</answer>", golds=("new york",))
    assert (hyphened["em_arena"], hyphened["f1_arena"]) == (0.0, 0.0)
    no = measures("search_r1", "<answer>no way</answer>", golds=("no",))
    assert (no["f1"], no["f1_plain"], no["f1_arena"]) == (0.0, pytest.approx(2 / 3), pytest.approx(2 / 3))
    nothing = measures("search_r1", "hm")
    assert nothing["answered"] == nothing["char_f1"] == nothing["sub_em"] == 0.0 and "verdict" not in nothing


def test_evidence() -> None:
    said = "<reason>Paris it is</reason><extract>the capital Paris</extract><answer>Paris</answer>"
    values = measures("eviomni", said, passages=PASSAGES, branch=7)
    assert (values["recall_evidence"], values["recall_rationale"]) == (1.0, 1.0)
    assert values["compression"] == pytest.approx((9 + 4) / 3) and values["no_evidence"] == 0.0  # in words
    assert (values["evidence_tokens"], values["rationale_tokens"]) == (3.0, 3.0)
    assert values["branch_tokens"] == 7.0 and values["response_tokens"] == 1.0
    empty = measures("eviomni", "<reason>no Bonn</reason><extract></extract><answer>Paris</answer>", passages=PASSAGES)
    assert (empty["compression"], empty["no_evidence"]) == (None, 1.0)
    assert (empty["recall_evidence"], empty["recall_rationale"]) == (0.0, 0.0)
    assert "compression" not in measures("eviomni", said)  # there are no passages


def test_named_documents_are_found_by_any_search_or_in_the_prompt() -> None:
    entry = scored("search_r1", "<answer>Paris</answer>")
    entry.trajectory.searches = [{"query": "x", "passages": ["11#0", "7"]}, {"query": "y", "passages": ["11#4", "9#9"]}]
    values = measures_of(replace(entry, question=named(evidence_docs=["11", "7", "8", "9#9"], gold_docs=["8"])))
    assert (values["recall_evidence_docs"], values["recall_gold_docs"]) == (0.75, 0.0)
    shown_too = named((Passage("8", "T", "t."),), evidence_docs=["11", "7", "8", "9"], gold_docs=["8"])
    values = measures_of(replace(entry, question=shown_too))
    assert (values["recall_evidence_docs"], values["recall_gold_docs"]) == (1.0, 1.0)
    assert "recall_evidence_docs" not in measures_of(replace(entry, question=named(evidence_docs=[])))
    assert "recall_gold_docs" not in measures_of(entry)


def named(passages: tuple[Passage, ...] = (), **documents: list[str]) -> Question:
    return Question("q", "?", ("Paris",), dict(documents), passages)


@pytest.mark.parametrize(
    ("system", "said", "name", "value"),
    [
        ("evinote", "<summary>* Paris</summary><answer>Bonn</answer>", "recall_notes", 1.0),
        ("evinote", "<answer>Paris</answer><summary>* Paris</summary>", "recall_notes", 0.0),  # after the end
        ("eval_rar", "<evaluate>Par</evaluate><evaluate>is</evaluate>", "recall_evaluation", 0.0),
        ("eval_rar", "<evaluate>It is PARIS!</evaluate>", "recall_evaluation", 1.0),
        ("arena", "<analysis>Paris [1]</analysis>", "recall_analysis", 1.0),
        ("arena", "<analysis>Paris [1]", "recall_analysis", 0.0),
    ],
)
def test_recall_of_what_else_is_written(system: str, said: str, name: str, value: float) -> None:
    values = measures(system, said, entailment=0.5)
    assert values[name] == value
    assert [key for key in values if key.startswith("recall")] == [name]


def test_a_gold_of_yes_is_recalled_by_no_text() -> None:
    values = measures("eval_rar", "<evaluate>yes</evaluate><answer>yes</answer>", golds=("yes",))
    assert values["recall_evaluation"] == 0.0 and values["em"] == 1.0


@pytest.mark.parametrize(
    ("said", "gold", "precision", "recall"),
    [
        ("<relevance>[1,2]</relevance>", (1,), 0.5, 1.0),
        ("<relevance>[2]</relevance>", (1, 2), 1.0, 0.5),
        ("<relevance>all</relevance>", (1,), 0.0, 0.0),
        ("nothing named", (1,), 0.0, 0.0),
        ("<relevance>[1]</relevance>", (), None, None),
    ],
)
def test_references(said: str, gold: tuple[int, ...], precision: float | None, recall: float | None) -> None:
    values = measures("arena", said, passages=PASSAGES, gold_indices=gold)
    assert (values["relevance_precision"], values["relevance_recall"]) == (precision, recall)
    assert "relevance_recall" not in measures("arena", said, passages=PASSAGES)  # the gold passages are unknown


def test_rankings() -> None:
    assert ranking_measures([]) == {}
    assert ranking_measures([False] * 5 + [True]) == {"ndcg@5": 0.0, "recall@5": 0.0, "recall_passages": 1.0}
    assert ranking_measures([True, False]) == {"ndcg@5": 1.0, "recall@5": 1.0, "recall_passages": 1.0}
    assert ranking_measures([False]) == {"ndcg@5": 0.0, "recall@5": 0.0, "recall_passages": 0.0}


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_system_is_measured_under_known_names(system: str) -> None:
    answer = "<answer>Paris</answer>" if load_system(system, {}).tags else "Paris"
    entry = scored(system, answer, passages=PASSAGES, gold_indices=(1,), entailment=0.5)
    values = measures_of(entry, load_system(system, {}).tags)
    assert set(values) <= set(NAMES) and values["em"] == 1.0 == entry.result.parts["em"]
    assert parts_of(entry).keys() == PARTS[system]
    assert all(isinstance(value, float) for value in parts_of(entry).values())


def test_what_nobody_measured_is_no_zero() -> None:
    said = "<reason>a</reason><extract>Paris</extract><answer>Paris</answer>"
    parts = parts_of(scored("eviomni", said, options={"rationale": False}))
    assert (parts["answer_rationale"], parts["answer_evidence"], parts["answer_full"]) == (None, 0.0, 1.0)
    assert "entailment" not in measures("evinote", "<summary>* x</summary>", options={"variant": "SEN"})
    assert means([parts])["answer_rationale"] is None


def test_counts_of_what_a_system_writes() -> None:
    assert measures("arena", "<relevance>[1,2]</relevance>", passages=PASSAGES)["named"] == 2.0
    assert measures("eval_rar", "<evaluate>a</evaluate><evaluate>b</evaluate>")["evaluations"] == 2.0


def test_means_leave_out_what_has_no_value() -> None:
    rows = [{"em": 1.0, "compression": 4.0}, {"em": 0.0, "compression": None}, {"em": 0.0}]
    assert means(rows) == {"em": pytest.approx(1 / 3), "compression": 4.0}
    assert list(means([{"own": 1.0, "tokens": 1.0, "reward": 1.0}])) == ["reward", "tokens", "own"]
    assert means([]) == {} and mean([None]) is None
    assert [shown("em", 0.5), shown("compression", 9.126), shown("em", None), shown("own", 0.5)] == [
        "50.0%",
        "9.13",
        "-",
        "0.50",
    ]


def test_a_summary_holds_the_measures_and_the_parts_apart() -> None:
    entries = [
        scored("eviomni", "<reason>a b c</reason><extract>Paris</extract><answer>Paris</answer>", passages=PASSAGES),
        scored("eviomni", "hm", passages=PASSAGES),
    ]
    summary = summary_of(measured(entries, load_system("eviomni", {}).tags))
    assert (summary["questions"], summary["em"], summary["recall_evidence"]) == (2, 0.5, 0.5)
    assert (summary["compression"], summary["no_evidence"]) == (13.0, 0.5)
    assert summary["parts"]["format"] == summary["parts"]["answer_full"] == 0.5 and "em" not in summary["parts"]
    assert summary["reasons"] == {"answered": 2}
    assert "recall_evidence" not in summary_of(measured(entries))  # the system's tags are not given
