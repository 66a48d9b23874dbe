"""Answers without training: what each baseline shows and asks for, by hand, and with a tiny model."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from episode_cases import drive as play
from episode_cases import kinds

from thresher.common.errors import UserError
from thresher.engine.baselines import NAMES, load_baseline
from thresher.engine.episode import (
    EpisodeConfig,
    Feedback,
    Generate,
    Prompt,
    Retrieved,
    Search,
    System,
)
from thresher.engine.protocol.prompts import Renderer, first_prompt
from thresher.engine.protocol.trajectory import check_trajectory
from thresher.engine.rollout.rollout import Job, Rollout
from thresher.engine.systems import load_system
from thresher.engine.training.sft import encode_transcript
from thresher.engine.training.sft_data import make_records
from thresher.policy.tokenizer import Tokenizer
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question
from thresher.retrieval.retriever import Hit
from thresher.rewards.reward import RewardInput, Source, TextSegment

PASSAGES = tuple(Passage(f"p{n}", f"Title {n}", f"Text {n}.") for n in range(7))
QUESTION = Question("q", "Who mapped Glass Bay?", ("Anna Bell",), passages=PASSAGES)
ANSWER, ANSWERED = "<answer>Anna Bell</answer>", Generate(("</answer>",))
LIMITS = {"max_context": 1600, "max_turn_tokens": 24, "max_turns": 3}
ONE_TURN = ("direct", "cot", "naive_rag", "full_passages", "evidence")


def found(*numbers: int) -> list[Hit]:
    return [Hit(n, PASSAGES[n], 1.0) for n in numbers]


def options_of(name: str, folder: Path, ids: Sequence[str] = ("q",)) -> dict[str, Any]:
    """The least that a baseline must be given."""
    if name != "evidence":
        return {}
    file = folder / "evidence.jsonl"
    file.write_text("".join(json.dumps({"id": id_, "evidence": "Anna Bell mapped it."}) + "\n" for id_ in ids))
    return {"file": str(file)}


def drive(
    system: System, texts: Sequence[str], hits: Sequence[list[Hit]] = (), max_turns: int = 4
) -> tuple[list[Any], str | None]:
    return play(system, QUESTION, texts, hits, max_turns=max_turns)


@pytest.mark.parametrize(
    ("name", "options", "shown"),
    [
        ("direct", {}, ()),
        ("cot", {}, ()),
        ("cot", {"passages": True}, PASSAGES),
        ("naive_rag", {}, PASSAGES[:5]),
        ("naive_rag", {"k": 2}, PASSAGES[:2]),
        ("full_passages", {}, PASSAGES),
    ],
)
def test_one_turn(name: str, options: dict[str, Any], shown: tuple[Passage, ...]) -> None:
    system = load_baseline(name, options)
    requests, reason = drive(system, [f"<think>Hm.</think> {ANSWER}"])
    assert requests == [Prompt(system.template, QUESTION.question, shown), ANSWERED] and reason == "answered"
    assert system.given_passages == bool(shown) == ("{passages}" in system.template)
    assert system.preset.get("retrieval") == ({"k": options.get("k", 5)} if shown else None)
    for text in ("Anna Bell", "<answer> </answer>", "", "Anna Bell</answer>"):
        assert drive(system, [text])[1] == "ended"


def test_the_prompt_of_evidence(tmp_path: Path) -> None:
    file = tmp_path / "e.jsonl"
    file.write_text('{"id": "q", "evidence": " Anna <answer>Bell</answer> ", "x": 1}\n{"id": "r", "evidence": ""}\n')
    system = load_baseline("evidence", {"file": str(file)})
    requests, reason = drive(system, [ANSWER])
    passage = Passage("evidence", "", "Anna <answer>Bell</answer>")
    assert requests == [Prompt(system.template, "Who mapped Glass Bay?", (passage,)), ANSWERED]
    assert reason == "answered"
    assert not system.given_passages  # it searches for none where a question brings none
    tools = EpisodeConfig(system.template, 1)
    empty = next(system.episode(replace(QUESTION, id="r"), tools))
    assert isinstance(empty, Prompt) and empty.passages == ()
    with pytest.raises(UserError, match=r"e\.jsonl: holds no evidence for question s"):
        next(system.episode(replace(QUESTION, id="s"), tools))


@pytest.mark.parametrize(("baseline", "kind"), [("evidence", "qa"), ("full_passages", "qa"), ("direct", "closed-book")])
def test_what_a_generator_is_asked_is_to_the_token_what_it_was_tuned_on(
    baseline: str, kind: str, tmp_path: Path, tiny_tokenizer: Tokenizer
) -> None:
    system = load_baseline(baseline, options_of(baseline, tmp_path))
    question = replace(QUESTION, passages=(Passage("evidence", "", "Anna Bell mapped it."),))
    renderer = Renderer(
        tokenizer=tiny_tokenizer, tags=system.tags, k=1, chat=False, max_passage_tokens=99, passage_format="{text}"
    )
    asked = renderer.prompt(first_prompt(system, question, EpisodeConfig(system.template, 1)))
    for style, same in (("tagged", True), ("plain", False)):
        ((record,), _) = make_records([question], kind, style)
        tuned = encode_transcript(record, tiny_tokenizer, renderer, "unused", 0)
        assert (tuned.ids[: tuned.positions[0]] == asked) == same
        assert ("<answer>" in record["template"]) == same


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ('{"id": "q"}', r':1: no "evidence"'),
        ('{"id": "q", "evidence": null}', r':1: "evidence" should be a string'),
        ('{"id": "q", "evidence": "a"}\n{"id": "q", "evidence": "b"}', r":2: the id 'q' was used before"),
    ],
)
def test_evidence_that_cannot_be_used(lines: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "e.jsonl").write_text(lines)
    with pytest.raises(UserError, match=words):
        load_baseline("evidence", {"file": str(tmp_path / "e.jsonl")})


def test_ircot_searches_with_every_thought() -> None:
    system = load_baseline("ircot", {})
    both = Generate(("</thought>", "</answer>"))
    requests, reason = drive(
        system, ["<thought>It is Glass Bay.</thought>", ANSWER], [found(0, 1), found(1, 2)], max_turns=4
    )
    assert requests == [
        Prompt(system.template, QUESTION.question),
        Search(QUESTION.question),
        Retrieved(found(0, 1), "\n\n<information>", "</information>\n\n"),
        both,
        Search("It is Glass Bay."),
        Retrieved(found(2), "\n\n<information>", "</information>\n\n"),  # the other one is shown already
        both,
    ]
    assert reason == "answered"
    # A turn without a thought finds nothing, and the last turn is for the answer alone.
    requests, reason = drive(system, ["Hm.", "<thought> </thought>", "<thought>x</thought>"], [found(0)], max_turns=3)
    assert kinds(requests[3:]) == [
        "Generate",
        "Feedback",
        "Generate",
        *["Feedback"] * 2,
        "Generate",
    ]
    assert requests[-1] == ANSWERED and reason == "turns"
    assert drive(system, [ANSWER], [found(0)], max_turns=1)[1] == "answered"


def test_self_ask_searches_with_every_follow_up() -> None:
    system = load_baseline("self_ask", {})
    both = Generate(("</followup>", "</answer>"))
    texts = [
        "<followup>Where is it?</followup>",
        "<intermediate>North.</intermediate><followup>Who?</followup>",
        ANSWER,
    ]
    requests, reason = drive(system, texts, [found(0), found(1)], max_turns=3)
    last = requests.pop(-2)
    assert isinstance(last, Feedback) and "final answer" in last.text
    assert requests == [
        Prompt(system.template, QUESTION.question),
        both,
        Search("Where is it?"),
        Retrieved(found(0), "\n\n<information>", "</information>\n\n"),
        both,
        Search("Who?"),
        Retrieved(found(1), "\n\n<information>", "</information>\n\n"),
        ANSWERED,
    ]
    assert reason == "answered"
    requests, reason = drive(system, ["<followup></followup>", "Where?", "<answer></answer>"], max_turns=3)
    assert kinds(requests[1::2]) == ["Generate", "Generate", "Feedback"] and reason == "turns"


def test_the_search_loop_is_search_r1_untrained() -> None:
    ours, theirs = load_baseline("search_loop", {}), load_system("search_r1", {})
    texts, hits = ["<search>bay</search>", "nothing", ANSWER], [found(3)]
    assert drive(ours, texts, hits) == drive(theirs, texts, hits)
    assert ours.template == theirs.template and ours.tags == theirs.tags and ours.name == "search_loop"
    freely = load_baseline("search_o1", {"reading": False})
    assert freely.template != ours.template and freely.tags == ours.tags
    assert drive(freely, texts, hits)[0][1:] == drive(ours, texts, hits)[0][1:]


# --- Prompts, options, reward


@pytest.mark.parametrize("name", NAMES)
def test_prompts_and_examples(name: str, tmp_path: Path) -> None:
    options = options_of(name, tmp_path)
    system = load_baseline(name, options)
    assert system.name == name and system.template.count("{question}") == 1
    answer = "candidates" if name == "sure" else "answer"
    assert f"<{answer}>" in system.template and {f"<{answer}>", f"</{answer}>"} <= set(system.tags)
    words = ("thought", "followup", "intermediate", "search", "think", "information")
    named = {word for word in words if f"<{word}>" in system.template}
    assert all(f"</{word}>" in system.tags for word in named)
    examples = tmp_path / "examples.txt"
    examples.write_text("Question: Where is Graz?\n<answer> Austria </answer>\n\n")
    with_them = load_baseline(name, {**options, "examples": str(examples)}).template
    assert with_them == "Question: Where is Graz?\n<answer> Austria </answer>\n\n" + system.template
    examples.write_text("Question: {question}")
    with pytest.raises(UserError, match=r"examples\.txt: examples hold no \{question\}"):
        load_baseline(name, {**options, "examples": str(examples)})
    with pytest.raises(UserError, match=r"none\.txt: no such file"):
        load_baseline(name, {**options, "examples": str(tmp_path / "none.txt")})


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("drect", {}, r"baseline 'drect' is unknown; did you mean direct\?"),
        ("zzz", {}, "baseline 'zzz' is unknown; choose one of cot, direct"),
        ("direct", {"k": 3}, "k: unknown key"),
        ("naive_rag", {"k": 0}, "k"),
        ("evidence", {}, "no file to answer from; add --set system.options.file=FILE"),
        ("search_o1", {"reading": 1}, "reading"),
        ("sure", {"candidates": 0}, "candidates"),
    ],
)
def test_what_no_baseline_knows(name: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_baseline(name, options)


@pytest.mark.parametrize(
    ("pieces", "parts"),
    [
        ([(Source.POLICY, ANSWER)], {"answer": 1.0, "em": True, "f1": 1.0, "answered": True}),
        ([(Source.POLICY, "<answer>the Bell</answer>")], {"answer": 0.0, "em": False, "f1": 2 / 3, "answered": True}),
        ([(Source.POLICY, f"<answer>x</answer>{ANSWER}")], {"answer": 0.0, "em": False, "f1": 0.0, "answered": True}),
        ([(Source.POLICY, "Anna Bell")], {"answer": 0.0, "em": False, "f1": 0.0, "answered": False}),
        (
            [(Source.PROMPT, ANSWER), (Source.RETRIEVED, ANSWER)],
            {"answer": 0.0, "em": False, "f1": 0.0, "answered": False},
        ),
    ],
)
def test_the_reward_is_exact_match(pieces: list[tuple[Source, str]], parts: dict[str, Any]) -> None:
    attempt = RewardInput(pieces=[TextSegment(source, text.encode()) for source, text in pieces], golds=("Anna Bell",))
    result = load_baseline("direct", {}).reward(attempt)
    assert result.parts == pytest.approx(parts) and result.reward == parts["em"]


# --- With a model


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.fast_cases(7)
def test_a_tiny_model_runs_every_baseline(
    name: str, tiny_rollout: Callable[..., Rollout], tiny_questions: list[Question], tmp_path: Path
) -> None:
    questions = [replace(question, passages=PASSAGES) for question in tiny_questions[:4]]
    system = load_baseline(name, options_of(name, tmp_path, [question.id for question in questions]))
    run = tiny_rollout(system, template=system.template, max_passage_tokens=500, **LIMITS)
    trajectories = run.run([Job(question, n, 0, n) for n, question in enumerate(questions)], 1.0)
    for trajectory in trajectories:
        assert check_trajectory(trajectory, run.tokenizer, system.tags, LIMITS["max_context"]) == []
        prompt = run.tokenizer.decode(trajectory.segments[0].ids)
        assert ("Title 0" in prompt) == system.given_passages and ("Anna Bell mapped" in prompt) == (name == "evidence")
    assert {t.reason for t in trajectories} <= {"answered", "ended", "turns", "turn_tokens", "tokens"}
    if name in ONE_TURN:
        assert all(len(t.segments) == 2 and not t.searches for t in trajectories)
    if name == "ircot":
        assert all(t.searches[0]["query"] == q.question for t, q in zip(trajectories, questions, strict=True))
