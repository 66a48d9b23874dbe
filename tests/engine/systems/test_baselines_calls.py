"""Baselines that read in calls: what each call is shown, and what of it comes back, by hand and with a tiny model."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from episode_cases import drive as play

from thresher.engine.baselines import load_baseline
from thresher.engine.baselines.reading import chosen, listed
from thresher.engine.episode import Feedback, Generate, Prompt, Retrieved, Search, SubCall, System
from thresher.engine.protocol.trajectory import check_trajectory
from thresher.engine.rollout.rollout import Job, Rollout
from thresher.engine.scoring.score import Judges, check_all, score
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question
from thresher.retrieval.retriever import Hit
from thresher.rewards.reward import RewardInput, Source, TextSegment

PASSAGES = tuple(Passage(f"p{n}", f"Title {n}", f"Text {n}.") for n in range(4))
QUESTION = Question("q", "Who mapped Glass Bay?", ("Anna Bell",), passages=PASSAGES)
ANSWER = "<answer>Anna Bell</answer>"
SHOWN = ("\n\n<information>", "</information>\n\n")


def found(*numbers: int) -> list[Hit]:
    return [Hit(n, PASSAGES[n], 1.0) for n in numbers]


def drive(
    system: System, texts: Sequence[str], called: Sequence[str], hits: Sequence[list[Hit]] = (), max_turns: int = 4
) -> tuple[list[Any], str | None]:
    return play(system, QUESTION, texts, hits, called, max_turns)


def attempt_of(texts: Sequence[str], called: Sequence[str]) -> RewardInput:
    """What the engine would make of these turns."""
    return RewardInput(
        pieces=[TextSegment(Source.POLICY, text.encode()) for text in texts],
        golds=QUESTION.golds,
        branches={
            f"call {number}": [
                TextSegment(Source.PROMPT, b"<verdict>no</verdict>"),
                TextSegment(Source.POLICY, text.encode()),
            ]
            for number, text in enumerate(called, start=1)
        },
    )


def test_search_o1_shows_what_was_read_and_not_the_documents() -> None:
    system = load_baseline("search_o1", {})
    texts = ["I am unsure. <search>bay</search>", "<search>bay</search>", "<search>who</search>", ANSWER]
    read = ["<information> Anna went there. </information>", "nothing closed"]
    requests, reason = drive(system, texts, read, [found(0, 1), found(2)], max_turns=5)
    kinds = [type(request).__name__ for request in requests]
    once = ["Generate", "Search", "SubCall", "Retrieved"]
    assert kinds == ["Prompt", *once, "Generate", "Feedback", *once, "Generate"] and reason == "answered"
    assert requests[4] == Retrieved("Anna went there.", *SHOWN)
    assert requests[10] == Retrieved("Nothing was found that helps.", *SHOWN)
    assert isinstance(requests[6], Feedback) and "searched before" in requests[6].text
    first, second = (request.context for request in requests if isinstance(request, SubCall))
    assert first.prompt.passages == [PASSAGES[0], PASSAGES[1]] and second.prompt.passages == [PASSAGES[2]]
    assert QUESTION.question in first.prompt.question and first.prompt.question.endswith("Query: bay")
    assert "I am unsure." in first.prompt.question and "Anna went there." not in first.prompt.question
    assert "Anna went there." in second.prompt.question and second.prompt.question.endswith("Query: who")
    assert first.stop == ("</information>",)
    assert drive(system, ["<search>a</search>"], [], max_turns=1)[1] == "turns"


def test_iter_retgen_asks_with_what_it_wrote() -> None:
    system = load_baseline("iter_retgen", {"iterations": 3})
    first, second = "<think>The bay.</think> <answer>Bo</answer>", "no tags"
    requests, reason = drive(system, [ANSWER], [first, second], [found(0), found(1), found(2)])
    prompt = Prompt(system.template, QUESTION.question)
    searches = [request.query for request in requests if isinstance(request, Search)]
    assert searches == [QUESTION.question, f"{QUESTION.question} The bay. Bo", f"{QUESTION.question} no tags"]
    contexts = [request.context for request in requests if isinstance(request, SubCall)]
    assert [(c.prompt, c.parts) for c in contexts] == [
        (prompt, (Retrieved(found(0), *SHOWN),)),
        (prompt, (Retrieved(found(1), *SHOWN),)),
    ]
    assert requests[-2:] == [Retrieved(found(2), *SHOWN), Generate(("</answer>",))] and reason == "answered"
    once, reason = drive(load_baseline("iter_retgen", {"iterations": 1}), ["x"], [], [found(0)])
    assert [type(r).__name__ for r in once] == ["Prompt", "Search", "Retrieved", "Generate"] and reason == "ended"


def test_sure_asks_for_summaries_verdicts_and_both_orders() -> None:
    system = load_baseline("sure", {})
    written = ["<candidates>- Bo\n- Anna Bell\nBo\nCarl</candidates>"]
    called = ["<support>s1</support>", "<support>s2</support>", *["<verdict>yes</verdict>"] * 2]
    called += ["<verdict>2</verdict>", "<verdict>1</verdict>"]
    requests, reason = drive(system, written, called)
    assert requests[0] == Prompt(system.template, QUESTION.question, PASSAGES) and reason == "answered"
    prompts = [request.context.prompt for request in requests[2:]]
    assert [len(prompt.passages) for prompt in prompts] == [4, 4, 0, 0, 0, 0]
    assert prompts[0].question.endswith("Candidate answer: Bo") and "Anna Bell" in prompts[1].question
    assert prompts[3].question.endswith("Candidate answer: Anna Bell\n\nSummary: s2")
    assert prompts[4].question.endswith("Summary 1: s1\n\nSummary 2: s2")
    assert prompts[5].question.endswith("Summary 1: s2\n\nSummary 2: s1")
    result = system.reward(attempt_of(written, called))
    assert (result.reward, result.answer) == (1.0, "Anna Bell") and system.answer(attempt_of(written, called)) == (
        "Anna Bell"
    )
    # One candidate needs no verdict, none is no answer, and what passages or prompts hold is neither.
    requests, reason = drive(system, ["<candidates>Anna Bell</candidates>"], [])
    assert reason == "answered" and len(requests) == 2
    assert system.reward(attempt_of(["<candidates>Anna Bell</candidates>"], [])).reward == 1
    assert drive(system, ["Anna Bell"], [])[1] == "ended" and system.reward(attempt_of(["Anna Bell"], [])).reward == 0
    assert listed("a\n* b\n\nc", 2) == ["a", "b"]


@pytest.mark.parametrize(
    ("verdicts", "answer"),
    [
        (["yes", "yes", "1", "2"], "Bo"),
        (["yes", "yes", "1", "1"], "Bo"),  # undecided between the orders: the first of equals
        (["no", "Yes.", "1", "2"], "Bo"),  # 0 + 1 and 1 + 0
        (["no", "yes", "1", "1"], "Anna Bell"),
        (["", "maybe", "2", "1"], "Anna Bell"),
        (["yes", "yes", "2"], None),  # one is missing
    ],
)
def test_sure_adds_validity_and_ranks(verdicts: list[str], answer: str | None) -> None:
    called = ["<support>s</support>"] * 2 + [f"<verdict>{text}</verdict>" for text in verdicts]
    assert chosen(attempt_of(["<candidates>Bo\nAnna Bell</candidates>"], called), 2) == answer


def test_ircot_with_a_reader_of_all_passages() -> None:
    system = load_baseline("ircot", {"reader": True})
    texts = ["<thought>It is Glass Bay.</thought>", "<answer>Bo</answer>"]
    requests, reason = drive(system, texts, [ANSWER], [found(0, 1), found(1, 2)])
    assert requests[-1].context.prompt.passages == list(PASSAGES[:3]) and reason == "answered"
    assert requests[-1].context.prompt.question == QUESTION.question
    result = system.reward(attempt_of(texts, [ANSWER]))
    assert (result.reward, result.answer) == (1.0, "Anna Bell")
    plain = load_baseline("ircot", {})
    assert plain.reward(attempt_of(texts, [ANSWER])).answer == "Bo" and plain.answer(attempt_of(texts, [])) == "Bo"
    assert system.answer(attempt_of(texts, [])) is None and system.reward(attempt_of(texts, [])).reward == 0


def test_self_ask_with_a_reader_gets_the_answer_alone() -> None:
    system = load_baseline("self_ask", {"reader": True})
    texts = ["<followup>Where is it?</followup>", "<followup>Who?</followup>", ANSWER]
    requests, reason = drive(system, texts, ["<answer>North</answer>", "none"], [found(0), found(1)], max_turns=4)
    shown = [request for request in requests if isinstance(request, Retrieved)]
    around = ("\n<intermediate>", "</intermediate>\n")
    assert shown == [Retrieved("North", *around), Retrieved("The documents do not say.", *around)]
    (first, second) = (request.context.prompt for request in requests if isinstance(request, SubCall))
    assert (first.question, list(first.passages), second.question) == ("Where is it?", [PASSAGES[0]], "Who?")
    assert reason == "answered" and "intermediate" in system.template


@pytest.mark.parametrize(
    ("name", "options", "fewest"),
    [
        ("search_o1", {}, 0),
        ("iter_retgen", {}, 2),
        ("sure", {}, 0),
        ("ircot", {"reader": True}, 1),
        ("self_ask", {}, 0),
    ],
)
@pytest.mark.fast_cases(1)
def test_a_tiny_model_calls(
    name: str,
    options: dict[str, Any],
    fewest: int,
    tiny_rollout: Callable[..., Rollout],
    tiny_questions: list[Question],
) -> None:
    questions = [replace(question, passages=PASSAGES) for question in tiny_questions[:3]]
    system = load_baseline(name, options)
    limits = {"max_context": 1600, "max_turn_tokens": 400, "max_policy_tokens": 800, "max_turns": 2, "max_num_seqs": 2}
    run = tiny_rollout(system, template=system.template, max_passage_tokens=500, **limits)
    trajectories = run.run([Job(question, n, 0, n) for n, question in enumerate(questions)], 1.0)
    scored = score(questions, trajectories, system, run.tokenizer, Judges())
    check_all(scored, run.tokenizer, system.tags, run.limits.max_context)
    for trajectory in trajectories:
        assert check_trajectory(trajectory, run.tokenizer, system.tags, 1600) == []
        assert list(trajectory.branches) == [f"call {n}" for n in range(1, len(trajectory.branches) + 1)]
        if trajectory.reason in ("answered", "ended"):
            assert len(trajectory.branches) >= fewest
