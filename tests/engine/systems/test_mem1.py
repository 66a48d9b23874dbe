"""MEM1, driven by hand: after each search the context is the prompt, the last turn and the search's result."""

from itertools import repeat

import pytest
from episode_cases import drive, kinds

from thresher.engine.episode import Fold, KeptSpan, Prompt, Retrieved
from thresher.engine.systems import load_system
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question
from thresher.retrieval.retriever import Hit

QUESTION = Question("q", "Who mapped Glass Bay?", ("Anna Bell",))
HITS = [Hit(4, Passage("p4", "Glass Bay", "Anna Bell mapped it."), 0.5)]
FIRST, SECOND = "<think>I know é.</think><search>a</search>", "<think>More.</think><search>b</search> "
ANSWER = "<think>All.</think><answer>Anna Bell</answer>"


def test_a_search_keeps_the_prompt_and_the_last_turn() -> None:
    texts = [FIRST, "I do not know.", SECOND, ANSWER]
    requests, reason = drive(
        load_system("mem1", {}), QUESTION, texts, repeat(HITS), max_turns=5, template="T {question}"
    )
    assert reason == "answered"
    once = ["Generate", "Search", "Fold", "Retrieved"]
    assert kinds(requests) == ["Prompt", *once, "Generate", "Feedback", *once, "Generate"]
    folds = [request.context for request in requests if isinstance(request, Fold)]
    assert [fold.prompt for fold in folds] == [Prompt("T {question}", QUESTION.question)] * 2 == [requests[0]] * 2
    first, other, second = (len(text.encode()) for text in texts[:3])
    assert [fold.parts for fold in folds] == [
        (KeptSpan(0, first),),
        (KeptSpan(first + other, first + other + second),),
    ]
    shown = [request for request in requests if isinstance(request, Retrieved)]
    assert all(request.hits is HITS for request in shown)
    assert [request.before for request in shown] == [
        f"\n\n<information>{line}\n" for line in ("4 turns are left.", "2 turns are left.")
    ]


@pytest.mark.parametrize("options", [{"count_turns": False}, {"fold": False, "count_turns": False}])
def test_switches(options: dict[str, bool]) -> None:
    """Without folds and turn numbers it makes the same requests as Search-R1."""
    texts = [FIRST, "nothing", SECOND, FIRST]
    asked = {
        name: drive(load_system(name, given), QUESTION, texts, repeat(HITS), max_turns=4, template="T {question}")
        for name, given in (("mem1", options), ("search_r1", {}))
    }
    requests, reason = asked["mem1"]
    assert ([r for r in requests if not isinstance(r, Fold)], reason) == asked["search_r1"] and reason == "turns"
    assert kinds(requests).count("Fold") == (0 if "fold" in options else 2)


def test_the_last_turn_may_only_answer_and_is_told() -> None:
    requests, reason = drive(load_system("mem1", {}), QUESTION, [FIRST, ANSWER], repeat(HITS), max_turns=2)
    assert reason == "answered" and "1 turn is left: answer in it.\n" in requests[4].before
    requests, reason = drive(load_system("mem1", {}), QUESTION, [FIRST, SECOND], repeat(HITS), max_turns=2)
    assert reason == "turns" and kinds(requests)[-1] == "Generate"
