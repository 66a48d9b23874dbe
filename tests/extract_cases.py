"""Shared by the tests of `thresher extract`: a plan for a tiny model, its forced texts, and the kept results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from chat_server import ChatServer
from stored_cases import stored

from thresher.engine.extraction.run import Chosen, ExtractionPlan
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question, question_record

EOS = "<|endoftext|>"
ANSWER = "<answer>Carl Dorn</answer>"
SMALL = ("rollout.max_num_seqs=8", "rollout.max_turn_tokens=120", "rollout.max_passage_tokens=200")
TEMPLATE = "Q: {question}\nP: {passages}\n"
PASSAGES = (
    Passage("a", "Anna", "Anna Bell has birthplace Carl Dorn."),
    Passage("b", "Ida", "Ida Jones has rival Mia Noor."),
)


def extracted(rationale: str, evidence: str) -> str:
    return f"<reason>{rationale}</reason><extract>{evidence}</extract>"


def make_plan(folder: Path, model: Path, questions: list[Question]) -> ExtractionPlan:
    """Return a plan of three questions with passages, with a tiny model as the extractor."""
    asked = [replace(question, passages=PASSAGES) for question in questions[:3]]
    (folder / "q.jsonl").write_text("".join(json.dumps(question_record(q)) + "\n" for q in asked))
    (folder / "t.txt").write_text(TEMPLATE)
    return ExtractionPlan(
        model=str(model),
        questions=str(folder / "q.jsonl"),
        out=str(folder / "e.jsonl"),
        template=str(folder / "t.txt"),
        overrides=SMALL,
    )


def make_agentic(plan: ExtractionPlan, index: Path, folder: Path) -> ExtractionPlan:
    (folder / "agent.txt").write_text("Search: {question}\n")
    agent = Chosen(model=plan.model, template=str(folder / "agent.txt"))
    return replace(plan, index=str(index), k=2, agent=agent, limit=1)


def lines(plan: ExtractionPlan) -> list[dict[str, Any]]:
    return stored(Path(plan.out))


def chat(server: ChatServer, template: str | None = None) -> Chosen:
    return Chosen(url=server.url, name="m", template=template)
