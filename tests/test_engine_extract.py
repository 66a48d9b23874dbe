"""`thresher extract`: evidence from a tiny model, answers from another or from a chat model, in both loops; what is
kept when it is stopped, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer

from thresher.engine import cli
from thresher.engine import extract as extract_module
from thresher.engine.agentic import Ask, ReadingRetriever, asking, thinking
from thresher.engine.baselines import load_baseline
from thresher.engine.converse import Converser, cut
from thresher.engine.episode import Feedback, Fork, Generate, Prompt, Retrieved, Search, System, Tools, Turn
from thresher.engine.extract import Chosen, Plan, extract, summarise
from thresher.engine.extractor import Extraction
from thresher.engine.journal import Journal
from thresher.engine.systems import load_system
from thresher.retrieval.formats import Passage
from thresher.retrieval.index import Index
from thresher.retrieval.questions import Question, question_record
from thresher.rewards.errors import UserError
from thresher.rewards.transcript import Source

EOS = "<|endoftext|>"
ANSWER = "<answer>Carl Dorn</answer>"
SMALL = ("rollout.max_running=8", "rollout.max_turn_tokens=120", "rollout.max_passage_tokens=200")
TEMPLATE = "Q: {question}\nP: {passages}\n"
PASSAGES = (
    Passage("a", "Anna", "Anna Bell has birthplace Carl Dorn."),
    Passage("b", "Ida", "Ida Jones has rival Mia Noor."),
)


def extracted(rationale: str, evidence: str) -> str:
    return f"<reason>{rationale}</reason><extract>{evidence}</extract>"


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with ChatServer() as server:
        yield server


@pytest.fixture
def plan(tiny_model_folder: Path, tiny_questions: list[Question], tmp_path: Path) -> Plan:
    """Three questions with passages, the extractor a tiny model."""
    questions = [replace(question, passages=PASSAGES) for question in tiny_questions[:3]]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(question_record(q)) + "\n" for q in questions))
    (tmp_path / "t.txt").write_text(TEMPLATE)
    return Plan(
        model=str(tiny_model_folder),
        questions=str(tmp_path / "q.jsonl"),
        out=str(tmp_path / "e.jsonl"),
        template=str(tmp_path / "t.txt"),
        overrides=SMALL,
    )


def lines(plan: Plan) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(plan.out).read_text().splitlines()]


def chat(server: ChatServer, template: str | None = None) -> Chosen:
    return Chosen(url=server.url, name="m", template=template)


# --- Traditional


def test_evidence_of_every_question(plan: Plan, script: Any, tiny_tokenizer: Any) -> None:
    script({0: [extracted("why", "Carl Dorn")], 1: ["<reason>no end</reason><extract>Carl" + EOS], 2: [EOS]})
    seen: list[tuple[int, int]] = []
    figures = extract(plan, lambda done, of: seen.append((done, of)))
    first, second, third = lines(plan)
    assert (first["rationale"], first["evidence"], first["ended"]) == ("why", "Carl Dorn", "extracted")
    tokens = sum(len(tiny_tokenizer.encode(passage.text)) for passage in PASSAGES)
    ratio = tokens / len(tiny_tokenizer.encode("Carl Dorn"))
    assert first["compression_ratio"] == ratio and second["compression_ratio"] is None
    assert (second["rationale"], second["evidence"], second["ended"]) == ("no end", "", "ended")
    assert (third["rationale"], third["evidence"]) == ("", "")
    assert first["passages"] == [{"id": p.id, "title": p.title, "text": p.text} for p in PASSAGES]
    assert [(line["id"], line["question"][:7]) for line in (first, second, third)] == [
        (f"q{n}", "What is") for n in range(3)
    ]
    assert figures["questions"] == 3 and figures["without_evidence"] == 2 and figures["compression_ratio"] == ratio
    assert figures["recall_evidence"] == pytest.approx(1 / 3) and figures["recall_rationale"] == 0
    assert seen == [(0, 3), (3, 3)] and "em" not in figures
    beside = json.loads(Path(plan.out).with_suffix(".json").read_text())
    assert beside["figures"] == figures and beside["settings"]["k"] == 5
    # What it wrote is what the baseline reads.
    system = load_baseline("evidence", {"file": plan.out})
    prompt = next(system.episode(Question("q0", "Who?", ()), Tools(system.template, 1)))
    assert isinstance(prompt, Prompt) and prompt.question == "Who?\n\nEvidence: Carl Dorn"


def test_what_is_kept_and_measured_is_what_was_shown(plan: Plan, script: Any, tiny_tokenizer: Any) -> None:
    small = (*SMALL[:2], "rollout.max_passage_tokens=44")
    script({n: [extracted("why", "Carl Dorn")] for n in range(3)})
    said: list[str] = []
    figures = extract(replace(plan, overrides=small), say=said.append)
    assert said == [
        "extract: 3 of 3 questions had passages cut to what fits; raise rollout.max_passage_tokens with --set"
    ]
    evidence = len(tiny_tokenizer.encode("Carl Dorn"))
    for line in lines(plan):
        texts = [passage["text"] for passage in line["passages"]]
        assert all(whole.text.startswith(text) for text, whole in zip(texts, PASSAGES, strict=True))
        assert line["cut_passages"] == sum(text != whole.text for text, whole in zip(texts, PASSAGES, strict=True)) > 0
        assert line["compression_ratio"] == sum(len(tiny_tokenizer.encode(text)) for text in texts) / evidence
    assert figures["cut_questions"] == 3


def test_a_limit_below_what_is_there_is_told(plan: Plan, script: Any) -> None:
    script({n: [EOS] for n in range(3)})
    figures, said = extract(plan), list[str]()
    assert extract(replace(plan, limit=3), say=said.append) == figures and not said
    assert extract(replace(plan, limit=2), say=said.append) == figures
    assert said == [
        f"extract: {plan.out} holds 3 questions already, more than --limit 2; the figures are over all of them"
    ]


def test_passages_are_retrieved_where_a_question_brings_none(
    plan: Plan, script: Any, tiny_index: Index, tiny_index_folder: Path, tiny_questions: list[Question]
) -> None:
    Path(plan.questions).write_text(json.dumps(question_record(tiny_questions[4])) + "\n")
    script({0: [extracted("", "Eva")]})
    extract(replace(plan, index=str(tiny_index_folder), k=3))
    (record,) = lines(plan)
    (hits,) = tiny_index.search([tiny_questions[4].question], 3)
    assert [passage["id"] for passage in record["passages"]] == [hit.passage.id for hit in hits]


def test_what_cannot_be_read_is_refused_before_anything_is(plan: Plan, tiny_questions: list[Question]) -> None:
    known = Path(plan.questions).read_text()
    Path(plan.questions).write_text(known + json.dumps(question_record(tiny_questions[4])) + "\n")
    with pytest.raises(UserError, match=r"question q4 comes with no passages.*--index"):
        extract(replace(plan, batch=1))
    long = question_record(replace(tiny_questions[4], question="w" * 5000, passages=PASSAGES))
    Path(plan.questions).write_text(known + json.dumps(long) + "\n")
    with pytest.raises(UserError, match="question q4: its prompt"):
        extract(replace(plan, batch=1))
    assert not list(Path(plan.out).parent.glob("e.*"))


def test_bare_questions_are_measured_by_nothing_that_takes_a_gold_answer(plan: Plan, script: Any) -> None:
    asked = [json.loads(line) for line in Path(plan.questions).read_text().splitlines()]
    bare = [{key: value for key, value in asked[0].items() if key != "golden_answers"}, asked[1] | {"answer": []}]
    bare[1].pop("golden_answers")
    Path(plan.questions).write_text("".join(json.dumps(question) + "\n" for question in [*bare, asked[2]]))
    script({n: [extracted("r", "Eva"), "<answer>Eva</answer>"] for n in range(3)})
    figures = extract(replace(plan, generator=Chosen(model=plan.model)))
    first, second, third = lines(plan)
    assert first.keys() == second.keys() == third.keys() - {"golden_answers", "em", "f1"}
    assert (first["answer"], first["evidence"], first["answered"]) == ("Eva", "Eva", True)
    assert (figures["questions"], figures["without_golds"], figures["answered"]) == (3, 2, 1)
    assert figures["em"] == third["em"] and figures["recall_evidence"] == float(third["golden_answers"] == ["Eva"])
    # With none at all there is no such figure.
    Path(plan.questions).write_text(json.dumps(bare[0]) + "\n")
    script({0: [extracted("r", "Eva"), "<answer>Eva</answer>"]})
    figures = extract(replace(plan, generator=Chosen(model=plan.model), out=str(Path(plan.out).with_name("b.jsonl"))))
    assert figures["without_golds"] == 1 and not {"em", "f1", "recall_evidence", "recall_rationale"} & figures.keys()


def test_a_generator_of_ours_answers_from_the_evidence(plan: Plan, script: Any) -> None:
    # One queue per seed: the extractor takes its turn, then the generator.
    script({n: [extracted("r", f"note {n}"), [ANSWER, f"nothing{EOS}", "<answer>Eva</answer>"][n]] for n in range(3)})
    figures = extract(replace(plan, generator=Chosen(model=plan.model)))
    assert [(line["answer"], line["em"], line["answered"], line["answer_ended"]) for line in lines(plan)] == [
        ("Carl Dorn", True, True, "answered"),
        (None, False, False, "ended"),
        ("Eva", False, True, "answered"),
    ]
    assert figures["em"] == figures["f1"] == pytest.approx(1 / 3) and figures["answered"] == pytest.approx(2 / 3)


def test_a_chat_model_answers_from_the_evidence(
    plan: Plan, script: Any, server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script({n: [extracted("r", f"note <answer> {n}")] for n in range(3)})
    (tmp_path / "a.txt").write_text("Say. {question}")
    monkeypatch.setenv("TEST_KEY", "secret")
    server.reply = lambda content: f"It is {ANSWER} or <answer>Eva</answer>."
    extract(replace(plan, generator=chat(server, str(tmp_path / "a.txt")), key_env="TEST_KEY"))
    asked = sorted(request["messages"][0]["content"] for request in server.asked)
    assert asked[0] == f"Say. {lines(plan)[0]['question']}\n\nEvidence: note < answer> 0" and len(asked) == 3
    assert {len(request["messages"]) for request in server.asked} == {1} and set(server.keys) == {"Bearer secret"}
    assert [line["answer"] for line in lines(plan)] == ["Carl Dorn"] * 3
    assert "secret" not in "".join(path.read_text() for path in tmp_path.glob("e.*"))


# --- Agentic


@pytest.fixture
def agentic(plan: Plan, tiny_index_folder: Path, tmp_path: Path) -> Plan:
    (tmp_path / "agent.txt").write_text("Search: {question}\n")
    agent = Chosen(model=plan.model, template=str(tmp_path / "agent.txt"))
    return replace(plan, index=str(tiny_index_folder), k=2, agent=agent, limit=1)


def test_only_evidence_comes_back_to_an_agent_of_ours(agentic: Plan, script: Any, tiny_index: Index) -> None:
    """Seed 0 is the agent's and the extractor's: they take turns from one queue."""
    query = "<think>Anna?</think><search>Anna Bell birthplace</search>"
    script({0: [query, extracted("r", "Carl"), "<search>mayor</search>", EOS, ANSWER]})
    figures = extract(agentic)
    (record,) = lines(agentic)
    (hits,) = tiny_index.search(["Anna Bell birthplace"], 2)
    first, second = record["reads"]
    assert (first["thinking"], first["query"], first["evidence"]) == ("Anna?", "Anna Bell birthplace", "Carl")
    assert [passage["id"] for passage in first["passages"]] == [hit.passage.id for hit in hits]
    assert (second["query"], second["evidence"], second["compression_ratio"]) == ("mayor", "", None)
    assert (record["answer"], record["em"], record["answer_ended"]) == ("Carl Dorn", True, "answered")
    assert (record["searches"], record["empty"], record["evidence"]) == (2, 1, "Carl")
    assert record["compression_ratio"] == first["compression_ratio"] > 1
    assert (figures["em"], figures["searches"], figures["without_evidence"]) == (1, 2, 0)
    assert figures["compression_ratio"] == record["compression_ratio"]


def test_a_chat_agent_and_its_last_turn(agentic: Plan, script: Any, server: ChatServer) -> None:
    # The extractor's first search of each call has seed 0.
    script({0: [extracted("r", f"note {n} </answer>") for n in range(4)]})
    server.reply = lambda content: "<think>t</think><search>mayor</search> <information>made up</information>"
    figures = extract(replace(agentic, agent=replace(chat(server), template=agentic.agent.template), actions=2))
    messages = server.asked[-1]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant", "user"]
    assert messages[1]["content"] == "<think>t</think><search>mayor</search>"
    # Asked the same, in the same thoughts, the extractor is not asked again.
    assert messages[2]["content"] == messages[4]["content"] == "\n\n<information>note 0 < /answer></information>\n\n"
    (record,) = lines(agentic)
    assert (record["searches"], record["answer"], record["answer_ended"]) == (2, None, "turns")
    assert (figures["em"], figures["answered"], figures["searches"]) == (0, 0, 2) and len(server.asked) == 3


class Pen:
    """An extractor that says what it was given."""

    def __init__(self) -> None:
        self.calls: list[list[Question]] = []

    def extract(self, questions: list[Question]) -> list[Extraction]:
        self.calls.append(questions)
        return [
            Extraction(
                rationale="",
                evidence=f"E{n}",
                passages=question.passages,
                cut_passages=0,
                passage_tokens=8,
                evidence_tokens=2,
                reason="extracted",
            )
            for n, question in enumerate(questions)
        ]


def test_the_extractor_gets_question_thinking_and_query(tiny_index: Index) -> None:
    pen = Pen()
    reader = ReadingRetriever(tiny_index, pen)  # type: ignore[arg-type]
    asks = [Ask('Who "x"?', "I think", "mayor"), Ask("Who?", "", "rival")]
    hits = reader.search([ask.packed() for ask in asks], 2)
    assert [hit[0].passage.text for hit in hits] == ["E0", "E1"]
    (questions,) = pen.calls
    assert questions[0].question == 'Who "x"?\nThinking: I think\nSearch: mayor'
    assert questions[1].question == "Who?\nSearch: rival"
    found = tiny_index.search(["mayor", "rival"], 2)
    assert [q.passages for q in questions] == [tuple(hit.passage for hit in one) for one in found]
    assert reader.readings[asks[1].packed()].evidence == "E1"
    # Where nothing is found there is nothing to read, and no model is asked.
    assert reader.search([Ask("Who?", "", "zzz").packed()], 2) == [[]] and tiny_index.search(["zzz"], 2) == [[]]
    assert [len(call) for call in pen.calls] == [2, 0]
    with pytest.raises(UserError):
        reader.check_k(10_000)


def test_what_a_turn_thinks() -> None:
    for text, thought in (
        ("<think> a </think><search>b</search>", "a"),
        ("So: <search>b</search>", "So:"),
        ("<search>b</search>", ""),
        ("a<think></think> c<search>b</search>", "a<think></think> c"),
    ):
        assert thinking(Turn(text.encode(), "</search>")) == thought
    system = asking(load_baseline("search_loop", {}))
    episode = system.episode(Question("q", "Who?", ()), Tools("{question}", 3))
    assert [episode.send(None), episode.send(None)] == [
        Prompt("{question}", "Who?"),
        Generate(("</search>", "</answer>")),
    ]
    request = episode.send(Turn(b"<think>a</think><search>b</search>", "</search>"))
    assert request == Search(Ask("Who?", "a", "b").packed())
    assert isinstance(episode.send([]), Retrieved)
    episode.send(None)
    with pytest.raises(StopIteration, match="answered"):
        episode.send(Turn(ANSWER.encode(), "</answer>"))


# --- Stopped and gone on with


def test_a_run_goes_on_where_it_stopped(plan: Plan, script: Any) -> None:
    script({0: [extracted("r", "one")]})
    extract(replace(plan, limit=1, batch=1))
    out = Path(plan.out)
    first = out.read_bytes()
    out.write_bytes(first + b'{"id": "q1", "evid')  # as a kill leaves it
    script({0: [extracted("r", "two"), extracted("r", "three")]})
    seen: list[int] = []
    figures = extract(replace(plan, batch=1), lambda done, of: seen.append(done))
    assert out.read_bytes().startswith(first) and [line["evidence"] for line in lines(plan)] == ["one", "two", "three"]
    assert seen == [1, 2, 3] and figures["questions"] == 3
    # Nothing is left to do, not even to load a model.
    assert extract(replace(plan, batch=5)) == figures


def test_an_endpoint_that_fails_costs_nothing_that_was_done(
    plan: Plan, script: Any, server: ChatServer, monkeypatch: pytest.MonkeyPatch
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
    script({})  # the extractor is not asked again, nor is the chat model for what it has said
    server.reply = lambda content: ANSWER
    figures = extract(with_chat)
    assert len(server.asked) == 4 and [line["answer"] for line in lines(plan)] == ["Carl Dorn"] * 3
    assert [line["id"] for line in lines(plan)] == ["q0", "q1", "q2"] and figures["questions"] == 3


def one_at_a_time(endpoint: Any) -> Callable[..., Any]:
    return lambda *arguments, **named: endpoint(*arguments, **named, concurrency=1)


def test_other_settings_do_not_mix(plan: Plan, script: Any) -> None:
    script({n: [EOS] for n in range(3)})
    figures = extract(plan)
    # What decides no record may change.
    assert extract(replace(plan, overrides=(*SMALL[1:], "model.device=cpu"), batch=1, patience=1.0)) == figures
    with pytest.raises(UserError, match=r"e\.jsonl: was begun with k 5, not 2; choose another file"):
        extract(replace(plan, k=2))
    Path(plan.questions).write_text(Path(plan.questions).read_text().replace("Ida Jones", "Ida James"))
    with pytest.raises(UserError, match="was begun with the questions' content"):
        extract(plan)
    Path(plan.out).with_suffix(".json").unlink()
    with pytest.raises(UserError, match=r"e\.jsonl: exists, without the e\.json of a run"):
        extract(plan)


def test_a_journal_hands_partial_records_back(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    journal = Journal(path, {"a": 1}, ["answer"])
    journal.add({"id": "x", "n": 1})
    journal.add({"id": "y", "answer": None})
    journal.add({"id": "x", "n": 1, "answer": "\ud800"})
    assert journal.done == {"x", "y"} and journal.partial == {}
    again = Journal(path, {"a": 1}, ["answer"])
    assert again.done == {"x", "y"} and again.partial == {} and len(path.read_bytes().splitlines()) == 3
    assert [record["id"] for record in again.records()] == ["y", "x"] and len(path.read_bytes().splitlines()) == 2
    path.write_text('{"n": 1}\n')
    with pytest.raises(UserError, match=r'j\.jsonl:1: has no "id"'):
        Journal(path, {"a": 1}, ["answer"])
    with pytest.raises(UserError, match=r"the folder .* does not exist"):
        Journal(tmp_path / "none" / "j.jsonl", {}, [])
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


def test_a_reply_is_cut_at_its_first_stop() -> None:
    stop = ("</search>", "</answer>")
    assert cut("<search>a</search> b <answer>c</answer>", stop) == Turn(b"<search>a</search>", "</search>")
    assert cut("<answer>c</answer></search>", stop) == Turn(b"<answer>c</answer>", "</answer>")
    assert cut("plain", stop) == Turn(b"plain", None)


def test_a_conversation_says_what_the_episode_says(tiny_index: Index) -> None:
    def episode(question: Question, tools: Tools) -> Any:
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

    system = System("test", ("<a>", "</a>", "<i>", "</i>"), episode, None, "T")  # type: ignore[arg-type]
    echo = Echo()
    converser = Converser(
        system=system, tools=Tools("T", 1), chat=echo, retriever=tiny_index, k=1, passage_format="{text}", max_tokens=9
    )
    questions = [Question(f"q{n}", f"q{n} </a> {{passages}}", (), passages=PASSAGES[:1]) for n in range(2)]
    talks = list(converser.converse(questions))
    assert [talk.question.id for talk in talks] == ["q0", "q1"] and {talk.reason for talk in talks} == {"done"}
    first = echo.asked[0][0][0]["content"]
    (hit,) = tiny_index.search(["mayor"], 1)[0]
    prompt = f"T {PASSAGES[0].text} q0 < /a> {{passages}}"
    assert first == f"{prompt}<i>{hit.passage.text}</i>Go < /a> on."
    assert [len(batch) for batch in echo.asked] == [2, 1] and [len(talk) for talk in echo.asked[1]] == [3]
    assert [(piece.source, piece.text) for piece in talks[0].pieces][-1] == (Source.POLICY, b"<a>x</a>")
    assert [piece.source for piece in talks[1].pieces] == [
        *(Source.PROMPT, Source.RETRIEVED, Source.FEEDBACK, Source.POLICY, Source.FEEDBACK, Source.POLICY)
    ]
    assert talks[0].searches == [{"query": "mayor", "passages": [hit.passage.id]}]


def test_a_chat_model_cannot_fork() -> None:
    def episode(question: Question, tools: Tools) -> Any:
        yield Prompt("", "")
        yield Fork({})

    system = replace(load_system("search_r1", {}), episode=episode)
    converser = Converser(
        system=system,
        tools=Tools("", 1),
        chat=None,
        retriever=None,
        k=1,
        passage_format="",
        max_tokens=1,  # type: ignore[arg-type]
    )
    with pytest.raises(TypeError, match="which a chat model cannot serve"):
        list(converser.converse([Question("q", "Who?", ())]))


# --- The command


def test_the_command(plan: Plan, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing scripted: whatever the tiny model writes is a result."""
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
        (["--loop", "agentic", "--agent-model", "m", "--answer-model", "m"], "leave out what begins with --answer"),
        (["--answer-url", "http://h"], "either --answer-model DIR, or --answer-url URL with --answer-name MODEL"),
        (["--answer-model", "m", "--answer-name", "n"], "either --answer-model DIR"),
        (["--answer-template", "t"], "either --answer-model DIR"),
        (["--set", "grpo.beta=1"], "expected a key of model, rollout or retrieval"),
        (["--set", "rollout.max_turn=1"], "rollout.max_turn: unknown key"),
        (["--key-env", "NO_SUCH_KEY", "--answer-url", "http://h", "--answer-name", "n"], "NO_SUCH_KEY"),
    ],
)
def test_what_the_command_refuses(extra: list[str], words: str, plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    small = [part for text in SMALL for part in ("--set", text)]
    arguments = ["extract", "--model", plan.model, "--questions", plan.questions, "--out", plan.out, *small, *extra]
    assert cli.run(arguments) == 2
    assert words in capsys.readouterr().err and not list(Path(plan.out).parent.glob("e.*"))


def test_an_agent_needs_somewhere_to_search(agentic: Plan) -> None:
    with pytest.raises(UserError, match="give --index FOLDER or --url URL"):
        extract(replace(agentic, index=None))
