"""Protocols of released checkpoints: what ends a turn, the query, the place of the answer; and searches that are
answered from a question's own passages."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

import pytest
from episode_cases import drive as play
from episode_cases import kinds

from thresher.common.errors import UserError
from thresher.engine.baselines import load_baseline
from thresher.engine.baselines.searching import PROTOCOLS, last_boxed
from thresher.engine.episode import Retrieved, Search, System
from thresher.engine.protocol.trajectory import check_trajectory
from thresher.engine.rollout.rollout import Job, Rollout
from thresher.retrieval.indexes.bm25 import rank_in_context
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question
from thresher.retrieval.retriever import Hit
from thresher.rewards.reward import RewardInput, Source, TextSegment

PASSAGES = (
    Passage("a", "Glass Bay", "Anna Bell mapped the bay."),
    Passage("b", "Red Hill", "Nobody mapped it, said the mayor."),
    Passage("c", "Mayor", "Carl is the mayor of the hill."),
)
QUESTION = Question("q", "Who mapped Glass Bay?", ("Anna Bell",), passages=PASSAGES)
SCRIPTS = {  # a search and an answer, as each protocol writes them
    "research": ("<think>x</think> <search> bay\n map </search>", "<answer> so \\[ \\boxed{Anna Bell} \\] </answer>"),
    "r1_searcher": ('I look <|begin_of_query|> "bay"  map<|end_of_query|>', "</think> <answer>Anna Bell</answer>"),
    "simple_deep_searcher": ("Well <|begin_search_query|>bay map<|end_search_query|>", "It is \\boxed{Anna Bell}."),
}


def drive(system: System, texts: Sequence[str], max_turns: int = 4) -> tuple[list[Any], str | None]:
    return play(system, QUESTION, texts, repeat([Hit(0, PASSAGES[0], 1.0)]), max_turns=max_turns)


def rewarded(system: System, *texts: str) -> tuple[float, str | None]:
    pieces = [TextSegment(Source.PROMPT, b"\\boxed{Lyon} <answer>Lyon</answer>")]
    pieces += [TextSegment(Source.POLICY, text.encode()) for text in texts]
    pieces.append(TextSegment(Source.RETRIEVED, b"\\boxed{Bo}"))
    result = system.reward(RewardInput(pieces=pieces, golds=QUESTION.golds))
    return result.reward, result.answer


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_search_and_an_answer(name: Any) -> None:
    system, (search, answer) = load_baseline("released", {"protocol": name}), SCRIPTS[name]
    requests, reason = drive(system, [search, answer])
    assert kinds(requests) == ["Prompt", "Generate", "Search", "Retrieved", "Generate"] and reason == "answered"
    assert requests[2] == Search("bay map") and isinstance(requests[3], Retrieved)
    around = (requests[3].before, requests[3].after)
    assert around == PROTOCOLS[name].around and all(text.strip() in system.tags for text in around)
    assert rewarded(system, search, answer) == (1.0, "Anna Bell") and rewarded(system, search) == (0.0, None)
    assert system.needs_index and system.answer(RewardInput(pieces=[], golds=())) is None
    # A turn with neither search nor answer ends it, and so does a query that is empty or was never opened.
    assert drive(system, ["I do not know."])[1] == "ended"
    opening, closing = PROTOCOLS[name].query
    assert drive(system, [f"bay{closing}"])[1] == "ended" and drive(system, [f'{opening} " {closing}'])[1] == "ended"
    assert drive(system, [search] * 2, max_turns=2) == (requests[:5], "turns")
    assert set(system.tags) >= {tag for tag in PROTOCOLS[name].query if tag in system.template} != set()


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ("\\boxed{a} then \\boxed{ b }", "b"),
        ("\\boxed{x_{1} {y}} .", "x_{1} {y}"),
        ("\\boxed{\\text{The Bay}}", "The Bay"),
        ("\\boxed{a} and \\boxed{open", "a"),
        ("boxed{a}", None),
        ("\\boxed{" * 300, None),
        ("", None),
    ],
)
def test_the_last_box(text: str, inside: str | None) -> None:
    assert last_boxed(text) == inside


def test_research_reads_the_box_of_its_answer_alone() -> None:
    system = load_baseline("released", {})
    assert rewarded(system, "\\boxed{Anna Bell} <answer>Anna Bell</answer>") == (0.0, None)
    assert rewarded(system, "<answer>\\boxed{Anna Bell}</answer> \\boxed{Bo}") == (1.0, "Anna Bell")


def test_ranking_of_given_passages() -> None:
    ids = [hit.passage.id for hit in rank_in_context(PASSAGES, "the mayor of the hill", 5)]
    assert ids == ["c", "b", "a"] and [hit.row for hit in rank_in_context(PASSAGES, "Glass", 1)] == [0]
    nothing = rank_in_context(PASSAGES, "zebra", 2)
    assert [hit.passage.id for hit in nothing] == ["a", "b"] and nothing[0].score == 0
    assert rank_in_context((), "x", 3) == [] == rank_in_context((Passage("e", "", "?"),), "x", 0)


@pytest.mark.parametrize(
    ("name", "options"),
    [*(("released", {"protocol": name}) for name in PROTOCOLS), ("self_ask", {})],
)
def test_over_given_passages_no_index_is_asked(
    name: str,
    options: dict[str, Any],
    tiny_rollout: Callable[..., Rollout],
    tiny_questions: list[Question],
    script: Callable[..., None],
) -> None:
    system = load_baseline(name, {**options, "over": "given"})
    assert not system.needs_index and load_baseline(name, options).needs_index
    written = SCRIPTS.get(options.get("protocol", ""), ("<followup>bay map</followup>", "<answer>Anna Bell</answer>"))
    script({0: [*written, "<|endoftext|>"]})
    question = replace(tiny_questions[0], passages=PASSAGES)
    run = tiny_rollout(
        system, template="{question}", k=2, max_turns=3, max_passage_tokens=200, max_context=1200, max_turn_tokens=90
    )
    run.retriever = None
    (trajectory,) = run.run([Job(question, 0, 0, 0)], 1.0)
    assert trajectory.searches == [{"query": "bay map", "passages": ["a", "b"]}]
    shown = next(s for s in trajectory.segments if s.source is Source.RETRIEVED)
    assert "Anna Bell mapped" in run.tokenizer.decode(shown.ids) and trajectory.reason == "answered"
    assert check_trajectory(trajectory, run.tokenizer, system.tags, 1200) == []
    script({0: [*written, "<|endoftext|>"]})
    with pytest.raises(UserError, match="has no passages to search"):
        run.run([Job(tiny_questions[0], 0, 0, 0)], 1.0)
