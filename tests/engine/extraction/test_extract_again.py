"""`thresher extract` interrupted and resumed, its conversations with chat models, and what the command refuses."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer
from extract_cases import ANSWER, EOS, PASSAGES, SMALL, chat, extracted, lines
from report_cases import make_run
from rollout_cases import system_of
from stored_cases import reweighted

from thresher.cli import main as cli
from thresher.common.errors import UserError
from thresher.common.locks import locked_file
from thresher.common.records import read_object
from thresher.engine.episode import (
    EpisodeConfig,
    Feedback,
    Generate,
    Prompt,
    Retrieved,
    Search,
)
from thresher.engine.evaluation.api_rollout import chat_rollout
from thresher.engine.extraction import run as extract_module
from thresher.engine.extraction.records import Journal, summarise
from thresher.engine.extraction.run import ExtractionPlan, extract, local_recipe, responses
from thresher.engine.protocol.prompts import Renderer
from thresher.retrieval.indexes.load import Index
from thresher.retrieval.questions import Question
from thresher.rewards.reward import Source

# --- The best checkpoint of a run


def test_the_best_checkpoint_of_a_run_is_asked_as_it_was_trained(
    plan: ExtractionPlan, script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 0 is the model that the run started from; prompt, passage format, budget and k are the run's own."""
    run = make_run(
        tmp_path / "run",
        plan.model,
        system={"name": "eviomni", "template": str(tmp_path / "t.txt")},
        retrieval={"k": 2, "passage_format": "<{text}>"},
        rollout={"max_turn_tokens": 120, "max_passage_tokens": 60, "max_context": 400},
    )
    run.append_metrics({"step": 0, "eval": {"em": 0.5}})
    formats: list[str] = []
    render = Renderer.prompt

    def spy(self: Renderer, asked: Prompt) -> list[int]:
        formats.append(self.passage_format)
        return render(self, asked)

    monkeypatch.setattr(Renderer, "prompt", spy)
    script({n: [extracted("why", "Eva")] for n in range(3)})
    words = ["extract", "--best-of", str(run.path), "--questions", plan.questions, "--out", plan.out]
    assert cli.run(words) == 0
    assert {line["evidence"] for line in lines(plan)} == {"Eva"} and set(formats) == {"<{text}>"}
    settings = json.loads(Path(plan.out).with_suffix(".json").read_text())["settings"]
    assert (settings["model"], settings["k"], settings["prompt"]) == (plan.model, 2, "raw")
    assert all(line["cut_passages"] == 0 for line in lines(plan))
    assert cli.run([*words, "--distractors", "1", "--loop", "agentic", "--agent-model", plan.model]) == 2


def test_a_run_that_was_trained_by_trees_is_asked_without_them(plan: ExtractionPlan, tmp_path: Path) -> None:
    trees = {"trees": 2, "tree_nodes": 3, "group_size": 8}
    grpo = {"advantage": "tree", "baseline": "leave_one_out", "scale": "none"}
    run = make_run(tmp_path / "run", plan.model, system={"name": "eviomni"}, rollout=trees, grpo=grpo)
    recipe = local_recipe(replace(plan, run=str(run.path)))
    assert recipe.rollout.trees == 0


# --- Interrupted and resumed


def test_a_run_goes_on_where_it_stopped(plan: ExtractionPlan, script: Any) -> None:
    script({0: [extracted("r", "one")]})
    extract(replace(plan, limit=1, batch=1))
    out = Path(plan.out)
    first = out.read_bytes()
    out.write_bytes(first + b'{"id": "q1", "evid')  # as a kill leaves it
    script({0: [extracted("r", "two"), extracted("r", "three")]})
    seen: list[int] = []
    figures = extract(replace(plan, batch=1), lambda done, of: seen.append(done))
    records = first.splitlines(keepends=True)[:1]  # without the closing line
    assert out.read_bytes().startswith(*records) and [line["evidence"] for line in lines(plan)] == [
        "one",
        "two",
        "three",
    ]
    assert seen == [1, 2, 3] and figures["questions"] == 3
    # Nothing is left to do, not even loading a model.
    assert extract(replace(plan, batch=5)) == figures


def test_an_endpoint_that_fails_costs_nothing_that_was_done(
    plan: ExtractionPlan, script: Any, server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extract_module, "Endpoint", one_at_a_time(extract_module.Endpoint))
    script({n: [extracted("r", f"note {n}")] for n in range(3)})
    refusal = (400, {"error": {"message": "no such model"}})
    server.script = [ANSWER, refusal]
    with_chat = replace(plan, generator=chat(server))
    with pytest.raises(UserError, match="no such model"):
        extract(with_chat)
    assert sorted(line["evidence"] for line in lines(plan)) == ["note 0", "note 1", "note 2"]
    assert not any("answer" in line for line in lines(plan)) and len(server.asked) == 2
    script({})  # the extractor is not run again, and the chat model is not asked again for replies that it gave
    server.reply = lambda content: ANSWER
    figures = extract(with_chat)
    assert len(server.asked) == 4 and [line["answer"] for line in lines(plan)] == ["Carl Dorn"] * 3
    assert [line["id"] for line in lines(plan)] == ["q0", "q1", "q2"] and figures["questions"] == 3


def one_at_a_time(endpoint: Any) -> Callable[..., Any]:
    return lambda *arguments, **named: endpoint(*arguments, **named, concurrency=1)


def test_only_one_process_writes_to_a_file(plan: ExtractionPlan) -> None:
    with locked_file(Path(plan.out)), pytest.raises(UserError, match=r"e\.jsonl: process \d+ is writing to this file"):
        extract(plan)
    assert not list(Path(plan.out).parent.glob(".*.lock"))
    with pytest.raises(UserError, match=r"the folder .* does not exist"):
        extract(replace(plan, out=f"{plan.out}/none/e.jsonl"))


def test_other_settings_do_not_mix(plan: ExtractionPlan, script: Any, tmp_path: Path) -> None:
    script({n: [EOS] for n in range(3)})
    figures = extract(plan)
    # Settings that do not affect a record may change.
    assert extract(replace(plan, overrides=(*SMALL[1:], "model.device=cpu"), batch=1, patience=1.0)) == figures
    with pytest.raises(UserError, match=r"e\.jsonl: was begun with k 5, not 2; choose another file"):
        extract(replace(plan, k=2))
    folder = reweighted(Path(plan.model), tmp_path / "model", by=0.0)
    moved = replace(plan, model=str(folder), out=str(tmp_path / "moved.jsonl"))
    script({n: [EOS] for n in range(3)})
    extract(moved)
    reweighted(Path(plan.model), folder)
    with pytest.raises(UserError, match=r"moved\.jsonl: was begun with the model's content"):
        extract(moved)
    (tmp_path / "p.txt").write_text("{question} {passages}")
    told = replace(plan, template=str(tmp_path / "p.txt"), out=str(tmp_path / "told.jsonl"), limit=1)
    script({0: [EOS]})
    extract(told)
    (tmp_path / "p.txt").write_text("Extract. {question} {passages}")
    with pytest.raises(UserError, match=r"told\.jsonl: was begun with the templates' content"):
        extract(replace(told, limit=2))
    Path(plan.questions).write_text(Path(plan.questions).read_text().replace("Ida Jones", "Ida James"))
    with pytest.raises(UserError, match="was begun with the questions' content"):
        extract(plan)
    Path(plan.out).with_suffix(".json").unlink()
    with pytest.raises(UserError, match=r"e\.jsonl: exists, but without the e\.json needed"):
        extract(plan)


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        ({"evidence": None}, 'has no text as its "evidence"'),
        ({"rationale": 3}, 'has no text as its "rationale"'),
        ({"evidence_tokens": "5"}, 'has evidence_tokens "5", which is no number'),
        ({"compression_ratio": math.inf}, "has compression_ratio Infinity, which is no number"),
        ({"cut_passages": []}, r"has cut_passages \[\], which is no number"),
        ({"golden_answers": "x"}, 'has no list of texts as its "golden_answers"'),
        ({"passages": ["x"]}, 'has no list of passages with a "text" as its "passages"'),
    ],
)
def test_a_line_that_was_broken_is_named(plan: ExtractionPlan, script: Any, broken: Any, fault: str) -> None:
    script({n: [extracted("r", f"note {n}")] for n in range(3)})
    extract(plan)
    first, second, *_ = lines(plan)
    side = Path(plan.out).with_suffix(".json")
    side.write_text(json.dumps({"settings": read_object(side)["settings"]}))  # as written by an earlier version
    Path(plan.out).write_text(json.dumps(first) + "\n" + json.dumps(second | broken) + "\n")
    with pytest.raises(UserError, match=rf"e\.jsonl:2: {fault}; choose another file to write, or delete this one"):
        extract(plan)


def test_a_journal_hands_partial_records_back(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    journal = Journal(path, {"a": 1}, ["answer"])
    journal.add({"id": "x", "evidence": ""})
    journal.add({"id": "y", "evidence": "", "answer": None})
    journal.add({"id": "x", "evidence": "", "answer": "\ud800"})
    assert journal.done == {"x", "y"} and journal.partial == {}
    again = Journal(path, {"a": 1}, ["answer"])
    assert again.done == {"x", "y"} and again.partial == {} and len(path.read_bytes().splitlines()) == 3
    assert [record["id"] for record in again.records()] == ["y", "x"] and len(path.read_bytes().splitlines()) == 2
    path.write_text('{"evidence": ""}\n')
    with pytest.raises(UserError, match=r'j\.jsonl:1: has no "id"'):
        Journal(path, {"a": 1}, ["answer"])
    with pytest.raises(UserError, match=r"ends in \.jsonl"):
        Journal(tmp_path / "j.jsonl.gz", {}, [])


def test_figures_leave_out_what_has_no_value() -> None:
    made = {"golden_answers": ["b"], "rationale": "a b", "em": True}
    records = [
        {**made, "evidence": "b", "compression_ratio": 4.0},
        {**made, "evidence": "", "compression_ratio": None, "em": False},
    ]
    assert summarise(records) == {
        "questions": 2,
        "without_evidence": 1,
        "without_golds": 0,
        "cut_questions": 0,
        "compression_ratio": 4.0,
        "em": 0.5,
        "recall_evidence": 0.5,
        "recall_rationale": 1.0,
    }
    assert summarise([]) == {"questions": 0, "without_evidence": 0, "without_golds": 0, "cut_questions": 0}


# --- Conversations


def test_a_conversation_says_what_the_episode_says(tiny_index: Index) -> None:
    def episode(question: Question, config: EpisodeConfig) -> Any:
        yield Prompt("T {passages} {question}", question.question, question.passages)
        yield Retrieved((yield Search("mayor")), "<i>", "</i>")
        yield Feedback("Go </a> on.")
        turn = yield Generate(("</a>",))
        if turn.stop is None:
            yield Feedback("Again.")
            yield Generate(("</a>",))
        return "done"

    class Echo:
        def __init__(self) -> None:
            self.asked: list[list[list[dict[str, str]]]] = []

        def complete(self, conversations: Any, *, temperature: float = 1.0, max_tokens: int = 0) -> list[str]:
            assert temperature == 0 and max_tokens == 9
            self.asked.append([[dict(message) for message in talk] for talk in conversations])
            return ["<a>x</a>y" if len(talk) > 1 or "q0" in talk[0]["content"] else "no" for talk in conversations]

    system = system_of(episode, ("<a>", "</a>", "<i>", "</i>"))
    echo = Echo()
    talks = chat_rollout(echo, system, EpisodeConfig("T", 1), tiny_index, 1, "{text}", 9)
    questions = [Question(f"q{n}", f"q{n} </a> {{passages}}", (), passages=PASSAGES[:1]) for n in range(2)]
    found = list(responses(talks, questions))
    assert [one.question.id for one in found] == ["q0", "q1"] and {one.trajectory.reason for one in found} == {"done"}
    first = echo.asked[0][0][0]["content"]
    (hit,) = tiny_index.search(["mayor"], 1)[0]
    prompt = f"T {PASSAGES[0].text} q0 < /a> {{passages}}"
    assert first == f"{prompt}<i>{hit.passage.text}</i>Go < /a> on."
    assert [len(batch) for batch in echo.asked] == [2, 1] and [len(talk) for talk in echo.asked[1]] == [3]
    assert [(piece.source, piece.text) for piece in found[0].attempt.pieces][-1] == (Source.POLICY, b"<a>x</a>")
    assert [piece.source for piece in found[1].attempt.pieces] == [
        *(Source.PROMPT, Source.RETRIEVED, Source.FEEDBACK, Source.POLICY, Source.FEEDBACK, Source.POLICY)
    ]
    assert found[0].trajectory.searches == [{"query": "mayor", "passages": [hit.passage.id]}]


# --- The command


def test_the_command(plan: ExtractionPlan, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is scripted: whatever the tiny model writes is a result."""
    arguments = ["extract", "--model", plan.model, "--questions", plan.questions, "--out", plan.out]
    arguments += [part for text in SMALL for part in ("--set", text)]
    assert cli.run([*arguments, "--template", str(plan.template), "--answer-model", plan.model]) == 0
    assert len(lines(plan)) == 3 and all({"evidence", "answer", "f1"} <= line.keys() for line in lines(plan))
    assert "without_evidence" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--loop", "agentic"], "--loop agentic needs an agent"),
        (["--agent-model", "m"], "an agent is for --loop agentic"),
        (
            ["--loop", "agentic", "--agent-model", "m", "--answer-model", "m"],
            "leave out the flags that begin with --answer",
        ),
        (["--answer-url", "http://h"], "either --answer-model DIR, or --answer-url URL with --answer-name MODEL"),
        (["--answer-model", "m", "--answer-name", "n"], "either --answer-model DIR"),
        (["--answer-template", "t"], "either --answer-model DIR"),
        (["--set", "grpo.beta=1"], "expected a key of model, rollout, retrieval, system"),
        (["--set", "rollout.max_turn=1"], "rollout.max_turn: unknown key"),
        (["--key-env", "NO_SUCH_KEY", "--answer-url", "http://h", "--answer-name", "n"], "NO_SUCH_KEY"),
    ],
)
def test_what_the_command_refuses(
    extra: list[str], words: str, plan: ExtractionPlan, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [part for text in SMALL for part in ("--set", text)]
    arguments = ["extract", "--model", plan.model, "--questions", plan.questions, "--out", plan.out, *small, *extra]
    assert cli.run(arguments) == 2
    assert words in capsys.readouterr().err and not list(Path(plan.out).parent.glob("e.*"))


def test_an_agent_needs_somewhere_to_search(agentic: ExtractionPlan) -> None:
    with pytest.raises(UserError, match="give --index FOLDER or --url URL"):
        extract(replace(agentic, index=None))
