"""Answers without training: what each baseline shows and requests, what its calls return, by hand, and with a tiny
model."""

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
from thresher.engine.baselines.reading import chosen, listed
from thresher.engine.episode import EpisodeConfig, Feedback, Generate, Prompt, Retrieved, Search, SubCall, System
from thresher.engine.protocol.prompts import Renderer, first_prompt, with_noise, with_passages
from thresher.engine.protocol.trajectory import check_trajectory
from thresher.engine.rollout.rollout import Job, Rollout
from thresher.engine.scoring.score import Judges, check_all, score
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
SHOWN = ("\n\n<information>", "</information>\n\n")
ANSWER, ANSWERED = "<answer>Anna Bell</answer>", Generate(("</answer>",))
LIMITS = {"max_context": 1600, "max_turn_tokens": 300, "max_policy_tokens": 600, "max_turns": 2, "max_num_seqs": 2}
ONE_TURN = ("direct", "cot", "naive_rag", "full_passages", "evidence")


def found(*numbers: int) -> list[Hit]:
    return [Hit(n, PASSAGES[n], 1.0) for n in numbers]


def options_of(name: str, folder: Path, ids: Sequence[str] = ("q",)) -> dict[str, Any]:
    """Return the options that a baseline needs at least."""
    if name != "evidence":
        return {}
    file = folder / "evidence.jsonl"
    file.write_text("".join(json.dumps({"id": id_, "evidence": "Anna Bell mapped it."}) + "\n" for id_ in ids))
    return {"file": str(file)}


def drive(
    system: System,
    texts: Sequence[str],
    hits: Sequence[list[Hit]] = (),
    called: Sequence[str] = (),
    max_turns: int = 4,
) -> tuple[list[Any], str | None]:
    return play(system, QUESTION, texts, hits, called, max_turns)


@pytest.mark.parametrize(
    ("name", "options", "shown"),
    [
        ("direct", {}, ()),
        ("cot", {}, ()),
        ("cot", {"passages": True}, PASSAGES),
        ("naive_rag", {}, PASSAGES),
        ("full_passages", {}, PASSAGES),
    ],
)
def test_one_turn(name: str, options: dict[str, Any], shown: tuple[Passage, ...]) -> None:
    system = load_baseline(name, options)
    requests, reason = drive(system, [f"<think>Hm.</think> {ANSWER}"])
    assert requests == [Prompt(system.template, QUESTION.question, shown), ANSWERED] and reason == "answered"
    assert system.given_passages == bool(shown) == ("{passages}" in system.template)
    assert system.preset.get("retrieval") == ({"k": 5} if shown else None)
    for text in ("Anna Bell", "<answer> </answer>", "", "Anna Bell</answer>"):
        assert drive(system, [text])[1] == "ended"


@pytest.mark.parametrize("k", [2, 5])
def test_naive_rag_shows_the_first_passages_of_a_question_and_all_others(k: int) -> None:
    """Retrieved passages and added noise are not cut: `retrieval.k` and --distractors say how many there are."""
    system = load_baseline("naive_rag", {"k": k})
    assert system.preset["retrieval"] == {"k": k}
    given = replace(QUESTION, gold_indices=(2, len(PASSAGES)))
    (own,) = with_passages([given], None, 9, system.most_given)
    assert own.passages == PASSAGES[:k] and own.gold_indices == (2,)
    noise = [Passage(str(n), "", f"noise {n}") for n in range(9)]
    (noisy,) = with_noise([own], noise, 3, 0)
    assert len(noisy.passages) == k + 3 and set(PASSAGES[:k]) < set(noisy.passages)
    assert with_passages([given], None, 9, None) == [given]


def test_the_prompt_of_evidence(tmp_path: Path) -> None:
    file = tmp_path / "e.jsonl"
    file.write_text('{"id": "q", "evidence": " Anna <answer>Bell</answer> ", "x": 1}\n{"id": "r", "evidence": ""}\n')
    system = load_baseline("evidence", {"file": str(file)})
    requests, reason = drive(system, [ANSWER])
    passage = Passage("evidence", "", "Anna <answer>Bell</answer>")
    assert requests == [Prompt(system.template, "Who mapped Glass Bay?", (passage,)), ANSWERED]
    assert reason == "answered"
    assert not system.given_passages  # it does not search if a question has no passages
    config = EpisodeConfig(system.template, 1)
    empty = next(system.episode(replace(QUESTION, id="r"), config))
    assert isinstance(empty, Prompt) and empty.passages == ()
    with pytest.raises(UserError, match=r"e\.jsonl: holds no evidence for question s"):
        next(system.episode(replace(QUESTION, id="s"), config))


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
    texts = ["<thought>It is Glass Bay.</thought>", ANSWER]
    requests, reason = drive(system, texts, [found(0, 1), found(1, 2)])
    assert requests == [
        Prompt(system.template, QUESTION.question),
        Search(QUESTION.question),
        Retrieved(found(0, 1), *SHOWN),
        both,
        Search("It is Glass Bay."),
        Retrieved(found(2), *SHOWN),  # the other passage is shown already
        both,
    ]
    assert reason == "answered"
    # A turn without a thought finds nothing, and the last turn may only answer.
    requests, reason = drive(system, ["Hm.", "<thought> </thought>", "<thought>x</thought>"], [found(0)], max_turns=3)
    assert kinds(requests[3:]) == ["Generate", "Feedback", "Generate", "Feedback", "Feedback", "Generate"]
    assert requests[-1] == ANSWERED and reason == "turns"
    assert drive(system, [ANSWER], [found(0)], max_turns=1)[1] == "answered"


def test_self_ask_searches_with_every_follow_up() -> None:
    system = load_baseline("self_ask", {})
    both = Generate(("</followup>", "</answer>"))
    followup = "<intermediate>North.</intermediate><followup>Who?</followup>"
    texts = ["<followup>Where is it?</followup>", followup, ANSWER]
    requests, reason = drive(system, texts, [found(0), found(1)], max_turns=3)
    last = requests.pop(-2)
    assert isinstance(last, Feedback) and "final answer" in last.text
    assert requests == [
        Prompt(system.template, QUESTION.question),
        both,
        Search("Where is it?"),
        Retrieved(found(0), *SHOWN),
        both,
        Search("Who?"),
        Retrieved(found(1), *SHOWN),
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


# --- Baselines that read in calls


def attempt_of(texts: Sequence[str], called: Sequence[str]) -> RewardInput:
    """Return the reward input that the engine would make from these turns."""
    prompt = TextSegment(Source.PROMPT, b"<verdict>no</verdict>")
    return RewardInput(
        pieces=[TextSegment(Source.POLICY, text.encode()) for text in texts],
        golds=QUESTION.golds,
        branches={
            f"call {number}": [prompt, TextSegment(Source.POLICY, text.encode())]
            for number, text in enumerate(called, start=1)
        },
    )


def test_search_o1_shows_what_was_read_and_not_the_documents() -> None:
    system = load_baseline("search_o1", {})
    texts = ["I am unsure. <search>bay</search>", "<search>bay</search>", "<search>who</search>", ANSWER]
    read = ["<information> Anna went there. </information>", "nothing closed"]
    requests, reason = drive(system, texts, [found(0, 1), found(2)], read, max_turns=5)
    once = ["Generate", "Search", "SubCall", "Retrieved"]
    assert kinds(requests) == ["Prompt", *once, "Generate", "Feedback", *once, "Generate"] and reason == "answered"
    assert requests[4] == Retrieved("Anna went there.", *SHOWN)
    assert requests[10] == Retrieved("Nothing was found that helps.", *SHOWN)
    assert isinstance(requests[6], Feedback) and "searched before" in requests[6].text
    first, second = (request.context for request in requests if isinstance(request, SubCall))
    assert first.prompt.passages == [PASSAGES[0], PASSAGES[1]] and second.prompt.passages == [PASSAGES[2]]
    assert QUESTION.question in first.prompt.question and first.prompt.question.endswith("Query: bay")
    assert "I am unsure." in first.prompt.question and "Anna went there." not in first.prompt.question
    assert "Anna went there." in second.prompt.question and second.prompt.question.endswith("Query: who")
    assert first.stop == ("</information>",)
    assert drive(system, ["<search>a</search>"], max_turns=1)[1] == "turns"


def test_iter_retgen_asks_with_what_it_wrote() -> None:
    system = load_baseline("iter_retgen", {"iterations": 3})
    first, second = "<think>The bay.</think> <answer>Bo</answer>", "no tags"
    requests, reason = drive(system, [ANSWER], [found(0), found(1), found(2)], [first, second])
    prompt = Prompt(system.template, QUESTION.question)
    searches = [request.query for request in requests if isinstance(request, Search)]
    assert searches == [QUESTION.question, f"{QUESTION.question} The bay. Bo", f"{QUESTION.question} no tags"]
    contexts = [request.context for request in requests if isinstance(request, SubCall)]
    assert [(c.prompt, c.parts) for c in contexts] == [
        (prompt, (Retrieved(found(0), *SHOWN),)),
        (prompt, (Retrieved(found(1), *SHOWN),)),
    ]
    assert requests[-2:] == [Retrieved(found(2), *SHOWN), Generate(("</answer>",))] and reason == "answered"
    once, reason = drive(load_baseline("iter_retgen", {"iterations": 1}), ["x"], [found(0)])
    assert kinds(once) == ["Prompt", "Search", "Retrieved", "Generate"] and reason == "ended"


def test_sure_asks_for_summaries_verdicts_and_both_orders() -> None:
    system = load_baseline("sure", {})
    written = ["<candidates>- Bo\n- Anna Bell\nBo\nCarl</candidates>"]
    called = ["<support>s1</support>", "<support>s2</support>", *["<verdict>yes</verdict>"] * 2]
    called += ["<verdict>2</verdict>", "<verdict>1</verdict>"]
    requests, reason = drive(system, written, called=called)
    assert requests[0] == Prompt(system.template, QUESTION.question, PASSAGES) and reason == "answered"
    prompts = [request.context.prompt for request in requests[2:]]
    assert [len(prompt.passages) for prompt in prompts] == [len(PASSAGES)] * 2 + [0] * 4
    assert prompts[0].question.endswith("Candidate answer: Bo") and "Anna Bell" in prompts[1].question
    assert prompts[3].question.endswith("Candidate answer: Anna Bell\n\nSummary: s2")
    assert prompts[4].question.endswith("Summary 1: s1\n\nSummary 2: s2")
    assert prompts[5].question.endswith("Summary 1: s2\n\nSummary 2: s1")
    result = system.reward(attempt_of(written, called))
    assert (result.reward, result.answer) == (1.0, "Anna Bell")
    assert system.answer(attempt_of(written, called)) == "Anna Bell"
    # One candidate needs no verdict, none gives no answer, and passages or prompts are no candidates.
    requests, reason = drive(system, ["<candidates>Anna Bell</candidates>"])
    assert reason == "answered" and len(requests) == 2
    assert system.reward(attempt_of(["<candidates>Anna Bell</candidates>"], [])).reward == 1
    assert drive(system, ["Anna Bell"])[1] == "ended" and system.reward(attempt_of(["Anna Bell"], [])).reward == 0
    assert listed("a\n* b\n\nc", 2) == ["a", "b"]
    assert listed("1. Lisbon\n2) Porto\n(3) Faro\n• 3.5 million\n1984\n-- x", 9) == [
        *("Lisbon", "Porto", "Faro", "3.5 million", "1984", "x")
    ]
    assert "the two that are" in system.template
    assert "the three that are" in load_baseline("sure", {"candidates": 3}).template


@pytest.mark.parametrize(
    ("verdicts", "answer"),
    [
        (["yes", "yes", "1", "2"], "Bo"),
        (["yes", "yes", "1", "1"], "Bo"),  # the two orders disagree: the first of equals wins
        (["no", "Yes.", "1", "2"], "Bo"),  # 0 + 1 and 1 + 0
        (["no", "yes", "1", "1"], "Anna Bell"),
        (["", "maybe", "2", "1"], "Anna Bell"),
        (["yes", "yes", "2"], None),  # one verdict is missing
    ],
)
def test_sure_adds_validity_and_ranks(verdicts: list[str], answer: str | None) -> None:
    called = ["<support>s</support>"] * 2 + [f"<verdict>{text}</verdict>" for text in verdicts]
    assert chosen(attempt_of(["<candidates>Bo\nAnna Bell</candidates>"], called), 2) == answer


def test_ircot_with_a_reader_of_all_passages() -> None:
    system = load_baseline("ircot", {"reader": True})
    texts = ["<thought>It is Glass Bay.</thought>", "<answer>Bo</answer>"]
    requests, reason = drive(system, texts, [found(0, 1), found(1, 2)], [ANSWER])
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
    requests, reason = drive(system, texts, [found(0), found(1)], ["<answer>North</answer>", "none"])
    shown = [request for request in requests if isinstance(request, Retrieved)]
    around = ("\n<intermediate>", "</intermediate>\n")
    assert shown == [Retrieved("North", *around), Retrieved("The documents do not say.", *around)]
    (first, second) = (request.context.prompt for request in requests if isinstance(request, SubCall))
    assert (first.question, list(first.passages), second.question) == ("Where is it?", [PASSAGES[0]], "Who?")
    assert reason == "answered" and "intermediate" in system.template


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
    with pytest.raises(UserError, match=r"examples\.txt: examples must not contain \{question\}"):
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
    ("text", "source", "em", "f1", "answered"),
    [
        (ANSWER, Source.POLICY, 1, 1, 1),
        ("<answer>the Bell</answer>", Source.POLICY, 0, 2 / 3, 1),
        (f"<answer>x</answer>{ANSWER}", Source.POLICY, 0, 0, 1),
        ("Anna Bell", Source.POLICY, 0, 0, 0),
        (ANSWER, Source.PROMPT, 0, 0, 0),
        (ANSWER, Source.RETRIEVED, 0, 0, 0),
    ],
)
def test_the_reward_is_exact_match(text: str, source: Source, em: int, f1: float, answered: int) -> None:
    attempt = RewardInput(pieces=[TextSegment(source, text.encode())], golds=("Anna Bell",))
    result = load_baseline("direct", {}).reward(attempt)
    assert result.parts == pytest.approx({"answer": em, "em": em, "f1": f1, "answered": answered})
    assert result.reward == em


# --- With a model


# The fewest calls of a trajectory that ends by itself.
FEWEST = {"iter_retgen": 2, "ircot": 1}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.fast_cases(3)
def test_a_tiny_model_runs_every_baseline(
    name: str, tiny_rollout: Callable[..., Rollout], tiny_questions: list[Question], tmp_path: Path
) -> None:
    questions = [replace(question, passages=PASSAGES) for question in tiny_questions[:4]]
    options = options_of(name, tmp_path, [question.id for question in questions])
    system = load_baseline(name, options | ({"reader": True} if name == "ircot" else {}))
    run = tiny_rollout(system, template=system.template, max_passage_tokens=500, **LIMITS)
    trajectories = run.run([Job(question, n, 0, n) for n, question in enumerate(questions)], 1.0)
    scored = score(questions, trajectories, system, run.tokenizer, Judges())
    check_all(scored, run.tokenizer, system.tags, run.limits.max_context)
    for trajectory, question in zip(trajectories, questions, strict=True):
        assert check_trajectory(trajectory, run.tokenizer, system.tags, LIMITS["max_context"]) == []
        prompt = run.tokenizer.decode(trajectory.segments[0].ids)
        assert ("Title 0" in prompt) == system.given_passages and ("Anna Bell mapped" in prompt) == (name == "evidence")
        assert trajectory.reason in {"answered", "ended", "turns", "turn_tokens", "tokens"}
        assert list(trajectory.branches) == [f"call {n}" for n in range(1, len(trajectory.branches) + 1)]
        if trajectory.reason in ("answered", "ended"):
            assert len(trajectory.branches) >= FEWEST.get(name, 0)
        if name in ONE_TURN:
            assert len(trajectory.segments) == 2 and not trajectory.searches
        if name == "ircot":
            assert trajectory.searches[0]["query"] == question.question
