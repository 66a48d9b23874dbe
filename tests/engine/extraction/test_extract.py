"""`thresher extract`: evidence from a tiny model, answers from another one or from a chat model, in both loops."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest
from chat_server import ChatServer
from extract_cases import ANSWER, EOS, PASSAGES, SMALL, chat, extracted, lines
from stored_cases import reweighted, stored

from thresher.common.errors import UserError
from thresher.engine.baselines import load_baseline
from thresher.engine.compressors.options import CompressorOptions
from thresher.engine.episode import EpisodeConfig, Generate, Prompt, Retrieved, Search, Turn
from thresher.engine.extraction.extractor import (
    AgentSearch,
    Extraction,
    ReadingRetriever,
    thinking,
    with_packed_searches,
)
from thresher.engine.extraction.run import Chosen, ExtractionPlan, extract
from thresher.retrieval.indexes.load import Index
from thresher.retrieval.questions import Question, question_record

# --- Traditional


def test_evidence_of_every_question(plan: ExtractionPlan, script: Any, tiny_tokenizer: Any) -> None:
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
    # The baseline reads the file that was written.
    system = load_baseline("evidence", {"file": plan.out})
    prompt = next(system.episode(Question("q0", "Who?", ()), EpisodeConfig(system.template, 1)))
    assert isinstance(prompt, Prompt) and [passage.text for passage in prompt.passages] == ["Carl Dorn"]


def test_other_extractors_noise_and_a_bound_on_evidence(
    plan: ExtractionPlan, script: Any, tiny_tokenizer: Any, tmp_path: Path
) -> None:
    noisy = replace(plan, system=None, noise=2, seed=3, evidence_tokens=3)
    asked = [json.loads(line) for line in Path(plan.questions).read_text().splitlines()]
    for number, question in enumerate(asked):  # noise is drawn from the passages of the other questions
        question["passages"] = [{"title": "", "text": f"{word} {number}."} for word in ("Carl", "Ida", "Mia")]
    Path(plan.questions).write_text("".join(json.dumps(question) + "\n" for question in asked))
    for name, written, kept in (
        ("extract_only", "<extract>Carl Dorn Carl Dorn</extract>", "Carl Dorn Carl Dorn"),
        ("cot", "<think>Mia</think><answer>no</answer>", "Mia"),
    ):
        options = ("system.options.passages=true",) if name == "cot" else ()
        script({n: [written] for n in range(3)})
        out = str(tmp_path / f"{name}.jsonl")
        figures = extract(replace(noisy, baseline=name, out=out, overrides=(*SMALL, *options)))
        found = stored(Path(out))
        assert all(len(line["passages"]) == 5 and "rationale" not in line for line in found)
        cut = tiny_tokenizer.decode(tiny_tokenizer.encode(kept)[:3]).strip()
        assert {line["evidence"] for line in found} == {cut}
        assert {line["ended"] for line in found} == {"extracted"} and "recall_rationale" not in figures
        lengths = [line["passage_tokens"] for line in found]
        assert figures["deviations"]["passage_tokens"] == pytest.approx(stdev(lengths))
    with pytest.raises(UserError, match="direct takes no evidence from passages that it is shown; choose --system"):
        extract(replace(noisy, template=None, baseline="direct", out=str(tmp_path / "direct.jsonl")))


def test_what_is_kept_and_measured_is_what_was_shown(plan: ExtractionPlan, script: Any, tiny_tokenizer: Any) -> None:
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


def test_a_limit_below_what_is_there_is_reported(plan: ExtractionPlan, script: Any) -> None:
    script({n: [EOS] for n in range(3)})
    figures, said = extract(plan), list[str]()
    assert extract(replace(plan, limit=3), say=said.append) == figures and not said
    assert extract(replace(plan, limit=2), say=said.append) == figures
    assert said == [
        f"extract: {plan.out} holds 3 questions already, more than --limit 2; the figures are over all of them"
    ]


def test_passages_are_retrieved_where_a_question_brings_none(
    plan: ExtractionPlan, script: Any, tiny_index: Index, tiny_index_folder: Path, tiny_questions: list[Question]
) -> None:
    Path(plan.questions).write_text(json.dumps(question_record(tiny_questions[4])) + "\n")
    script({0: [extracted("", "Eva")]})
    extract(replace(plan, index=str(tiny_index_folder), k=3))
    (record,) = lines(plan)
    (hits,) = tiny_index.search([tiny_questions[4].question], 3)
    assert [passage["id"] for passage in record["passages"]] == [hit.passage.id for hit in hits]


def test_what_cannot_be_read_is_refused_before_anything_is(
    plan: ExtractionPlan, tiny_questions: list[Question]
) -> None:
    known = Path(plan.questions).read_text()
    Path(plan.questions).write_text(known + json.dumps(question_record(tiny_questions[4])) + "\n")
    with pytest.raises(UserError, match=r"question q4 has no passages.*--index"):
        extract(replace(plan, batch=1))
    long = question_record(replace(tiny_questions[4], question="w" * 5000, passages=PASSAGES))
    Path(plan.questions).write_text(known + json.dumps(long) + "\n")
    with pytest.raises(UserError, match="question q4: its prompt"):
        extract(replace(plan, batch=1))
    assert not list(Path(plan.out).parent.glob("e.*"))


def test_bare_questions_are_measured_by_nothing_that_takes_a_gold_answer(plan: ExtractionPlan, script: Any) -> None:
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
    # If no question has a gold answer, there is no such figure.
    Path(plan.questions).write_text(json.dumps(bare[0]) + "\n")
    script({0: [extracted("r", "Eva"), "<answer>Eva</answer>"]})
    figures = extract(replace(plan, generator=Chosen(model=plan.model), out=str(Path(plan.out).with_name("b.jsonl"))))
    assert figures["without_golds"] == 1 and not {"em", "f1", "recall_evidence", "recall_rationale"} & figures.keys()


def test_a_generator_of_ours_answers_from_the_evidence(plan: ExtractionPlan, script: Any) -> None:
    # One queue per seed: the extractor's turn comes first, then the generator's.
    script({n: [extracted("r", f"note {n}"), [ANSWER, f"nothing{EOS}", "<answer>Eva</answer>"][n]] for n in range(3)})
    figures = extract(replace(plan, generator=Chosen(model=plan.model)))
    assert [(line["answer"], line["em"], line["answered"], line["answer_ended"]) for line in lines(plan)] == [
        ("Carl Dorn", True, True, "answered"),
        (None, False, False, "ended"),
        ("Eva", False, True, "answered"),
    ]
    assert figures["em"] == figures["f1"] == pytest.approx(1 / 3) and figures["answered"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("extractor", [{"baseline": "extract_only"}, {"refining": CompressorOptions(name="filco")}])
def test_a_baseline_extracts_and_another_model_answers(
    plan: ExtractionPlan, script: Any, tmp_path: Path, extractor: dict[str, Any]
) -> None:
    other = reweighted(Path(plan.model), tmp_path / "other")
    script({n: ["<extract>note</extract>", ANSWER] for n in range(3)})
    figures = extract(replace(plan, generator=Chosen(model=str(other)), **extractor))
    assert figures["answered"] == 1.0 and {line["evidence"] for line in lines(plan)} == {"note"}


def test_a_chat_model_answers_from_the_evidence(
    plan: ExtractionPlan, script: Any, server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script({n: [extracted("r", f"note <answer> {n}")] for n in range(3)})
    (tmp_path / "a.txt").write_text("Say. {question}\n{passages}")
    monkeypatch.setenv("TEST_KEY", "secret")
    server.reply = lambda content: f"It is {ANSWER} or <answer>Eva</answer>."
    extract(replace(plan, generator=chat(server, str(tmp_path / "a.txt")), key_env="TEST_KEY"))
    asked = sorted(request["messages"][0]["content"] for request in server.asked)
    assert asked[0] == f'Say. {lines(plan)[0]["question"]}\nDoc 1(Title: "") note < answer> 0' and len(asked) == 3
    assert {len(request["messages"]) for request in server.asked} == {1} and set(server.keys) == {"Bearer secret"}
    assert [line["answer"] for line in lines(plan)] == ["Carl Dorn"] * 3
    assert "secret" not in "".join(path.read_text() for path in tmp_path.glob("e.*"))


# --- Agentic


def test_only_evidence_comes_back_to_an_agent_of_ours(agentic: ExtractionPlan, script: Any, tiny_index: Index) -> None:
    """Seed 0 belongs to both the agent and the extractor, which take turns from one queue."""
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


def test_a_chat_agent_and_its_last_turn(agentic: ExtractionPlan, script: Any, server: ChatServer) -> None:
    # The extractor's first search in each call has seed 0.
    script({0: [extracted("r", f"note {n} </answer>") for n in range(4)]})
    server.reply = lambda content: "<think>t</think><search>mayor</search> <information>made up</information>"
    plan = replace(agentic, overrides=(*SMALL, "retrieval.k=1"))  # takes precedence over k
    figures = extract(replace(plan, agent=replace(chat(server), template=agentic.agent.template), actions=2))
    messages = server.asked[-1]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant", "user"]
    assert messages[1]["content"] == "<think>t</think><search>mayor</search>"
    # For the same query with the same thoughts, the extractor is not run again.
    assert messages[2]["content"] == messages[4]["content"] == "\n\n<information>note 0 < /answer></information>\n\n"
    (record,) = lines(agentic)
    assert (record["searches"], record["answer"], record["answer_ended"]) == (2, None, "turns")
    assert [len(read["passages"]) for read in record["reads"]] == [1, 1]
    assert (figures["em"], figures["answered"], figures["searches"]) == (0, 0, 2) and len(server.asked) == 3


class Pen:
    """An extractor that records its questions."""

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
                rationale_tokens=0,
                reason="extracted",
            )
            for n, question in enumerate(questions)
        ]


def test_the_extractor_gets_question_thinking_and_query(tiny_index: Index) -> None:
    pen = Pen()
    reader = ReadingRetriever(tiny_index, pen)  # type: ignore[arg-type]
    asks = [AgentSearch('Who "x"?', "I think", "mayor"), AgentSearch("Who?", "", "rival")]
    hits = reader.search([ask.packed() for ask in asks], 2)
    assert [hit[0].passage.text for hit in hits] == ["E0", "E1"]
    (questions,) = pen.calls
    assert questions[0].question == 'Who "x"?\nThinking: I think\nSearch: mayor'
    assert questions[1].question == "Who?\nSearch: rival"
    found = tiny_index.search(["mayor", "rival"], 2)
    assert [q.passages for q in questions] == [tuple(hit.passage for hit in one) for one in found]
    assert reader.readings[asks[1].packed()].evidence == "E1"
    # If the search finds nothing, there is nothing to read and no model is run.
    assert reader.search([AgentSearch("Who?", "", "zzz").packed()], 2) == [[]] and tiny_index.search(["zzz"], 2) == [[]]
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
    system = with_packed_searches(load_baseline("search_loop", {}))
    episode = system.episode(Question("q", "Who?", ()), EpisodeConfig("{question}", 3))
    assert [episode.send(None), episode.send(None)] == [
        Prompt("{question}", "Who?"),
        Generate(("</search>", "</answer>")),
    ]
    request = episode.send(Turn(b"<think>a</think><search>b</search>", "</search>"))
    assert request == Search(AgentSearch("Who?", "a", "b").packed())
    assert isinstance(episode.send([]), Retrieved)
    episode.send(None)
    with pytest.raises(StopIteration, match="answered"):
        episode.send(Turn(ANSWER.encode(), "</answer>"))
