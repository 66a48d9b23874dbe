"""Extractors: from question and passages to rationale and evidence; alone, or inside the search loop of an agent.

    evidence     rationale    system or baseline
    <extract>    <reason>     eviomni, lear
    <extract>                 extract_only
    <think>                   cot, with passages: its thoughts are the evidence

In the loop an agent searches as in Search-R1, and reads evidence in place of passages (`ReadingRetriever`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from thresher.common import console
from thresher.common.errors import UserError
from thresher.engine.assemble import RunContext
from thresher.engine.compressors.options import Compressor
from thresher.engine.episode import Episode, EpisodeConfig, Generate, Search, System, Turn
from thresher.engine.evaluation.evaluate import jobs_of
from thresher.engine.protocol.prompts import truncate_passages
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question, passage_record
from thresher.retrieval.retriever import Hit, Retriever
from thresher.rewards.measures import compression_ratio
from thresher.rewards.tags import blocks

SPANS = (("extract", "reason"), ("think", None))  # tags of evidence and rationale; the first pair that a system has


@dataclass(frozen=True, slots=True, kw_only=True)
class Extraction:
    """Evidence extracted from passages. Texts are stripped, and empty if their span is missing or not closed.

    rationale: None if the system writes none. passages: as shown, `cut_passages` of them cut to fit. passage_tokens:
    length of the passages' texts in the extractor's tokens. reason: "extracted", the limit that ended it
    ("turn_tokens", "context", ..), "ended", or "refined" if a compressor selected the text.
    """

    rationale: str | None = None
    evidence: str = ""
    passages: tuple[Passage, ...] = ()
    cut_passages: int = 0
    passage_tokens: int = 0
    evidence_tokens: int = 0
    rationale_tokens: int = 0
    reason: str = "ended"

    @property
    def compression_ratio(self) -> float | None:
        """Return passage_tokens / evidence_tokens; None without evidence."""
        return compression_ratio(self.passage_tokens, self.evidence_tokens)


class Extractor:
    """A policy as extractor, greedy. It generates the first turn of its system, up to the end of the evidence.

    context: UserError unless its system shows passages and has tags of SPANS. evidence_tokens: longer evidence is cut.
    """

    def __init__(self, context: RunContext, evidence_tokens: int | None = None) -> None:
        self.tokenizer = context.tokenizer
        self.evidence_tokens = evidence_tokens
        self.evidence_tag, self.rationale_tag = spans_of(context.system)
        self._rollout = replace(context, system=first_turn(context.system, self.evidence_tag)).rollout(None)

    def check(self, questions: Sequence[Question]) -> None:
        """Raise UserError for the first question whose prompt with passages does not fit into the context."""
        self._rollout.check_prompts(questions)

    def extract(self, questions: Sequence[Question]) -> list[Extraction]:
        """Extract from the passages of each question, cut to fit. UserError if the prompt itself does not fit."""
        run = self._rollout
        whole = [question.passages for question in questions]
        questions = truncate_passages(questions, run.system, run.episode_config, run.renderer).questions
        with console.polling(run.stage):
            trajectories = run.run(jobs_of(questions), 0.0)
        extractions = []
        for passages, question, trajectory in zip(whole, questions, trajectories, strict=True):
            found = {
                tag: next((span.text for span in blocks(trajectory.pieces(self.tokenizer), tag)), "")
                for tag in (self.evidence_tag, self.rationale_tag)
                if tag is not None
            }
            evidence = self._cut(found[self.evidence_tag])
            rationale = found[self.rationale_tag] if self.rationale_tag is not None else None
            extractions.append(
                Extraction(
                    rationale=rationale,
                    evidence=evidence,
                    passages=question.passages,
                    cut_passages=sum(a is not b for a, b in zip(passages, question.passages, strict=True)),
                    passage_tokens=sum(len(self.tokenizer.encode(passage.text)) for passage in question.passages),
                    evidence_tokens=len(self.tokenizer.encode(evidence)),
                    rationale_tokens=len(self.tokenizer.encode(rationale or "")),
                    reason=trajectory.reason,
                )
            )
        return extractions

    def _cut(self, evidence: str) -> str:
        ids = self.tokenizer.encode(evidence)
        if self.evidence_tokens is None or len(ids) <= self.evidence_tokens:
            return evidence
        return self.tokenizer.decode_bytes(ids[: self.evidence_tokens]).decode("utf-8", "ignore").strip()


class CompressorExtractor:
    """A compressor as extractor: the evidence is the part of the passages that it keeps."""

    def __init__(self, compressor: Compressor) -> None:
        self._compressor = compressor

    def check(self, questions: Sequence[Question]) -> None:
        """Do nothing; a compressor has no limit on the context."""

    def extract(self, questions: Sequence[Question]) -> list[Extraction]:
        evidence = self._compressor.compress(questions)
        lengths = iter(self._compressor.count_tokens([p.text for question in questions for p in question.passages]))
        return [
            Extraction(
                evidence=kept,
                passages=question.passages,
                passage_tokens=sum(next(lengths) for _ in question.passages),
                evidence_tokens=length,
                reason="refined",
            )
            for question, kept, length in zip(questions, evidence, self._compressor.count_tokens(evidence), strict=True)
        ]


def spans_of(system: System) -> tuple[str, str | None]:
    """Return the tags of evidence and of rationale in the first turn of a system."""
    found = next(((tag, before) for tag, before in SPANS if f"<{tag}>" in system.tags), None)
    if found is None or not system.given_passages:
        raise UserError(
            f"extract: {system.name} takes no evidence from passages that it is shown; choose --system eviomni, "
            "--baseline extract_only, or --baseline cot with --set system.options.passages=true"
        )
    tag, before = found
    return tag, before if f"<{before}>" in system.tags else None


def first_turn(system: System, tag: str) -> System:
    """Return the system with an episode that ends after its first turn, in which `tag` is closed."""

    def episode(question: Question, config: EpisodeConfig) -> Episode:
        whole = system.episode(question, config)
        request = next(whole)
        while not isinstance(request, Generate):
            request = whole.send((yield request))
        whole.close()
        turn = yield replace(request, stop=(f"</{tag}>",))
        return "extracted" if turn.stopped_at(f"</{tag}>") else "ended"

    return replace(system, episode=episode)


# --- Inside the search loop of an agent


@dataclass(frozen=True, slots=True)
class AgentSearch:
    """A search query with the question and the agent's thinking of that turn."""

    question: str
    thinking: str
    query: str

    def packed(self) -> str:
        """Return the search as one line that `unpack` reads, because the queries of a retriever are strings."""
        return json.dumps([self.question, self.thinking, self.query])

    @staticmethod
    def unpack(text: str) -> "AgentSearch":
        return AgentSearch(*json.loads(text))

    def wanted(self) -> str:
        """Return the text that the extractor gets as its question."""
        thinking = f"\nThinking: {self.thinking}" if self.thinking else ""
        return f"{self.question}{thinking}\nSearch: {self.query}"


class ReadingRetriever(Retriever):
    """Retriever that returns evidence extracted from the passages of packed agent searches. The evidence is a single
    hit; there is no hit if it is empty. readings: packed search -> its Extraction."""

    samples = True

    def __init__(self, retriever: Retriever, extractor: Extractor | CompressorExtractor) -> None:
        super().__init__()
        self.readings: dict[str, Extraction] = {}
        self._retriever, self._extractor = retriever, extractor

    def check_k(self, k: int) -> None:
        self._retriever.check_k(k)

    def _find(self, queries: list[str], k: int) -> list[list[Hit]]:
        searches = [AgentSearch.unpack(query) for query in queries]
        found = self._retriever.search([search.query for search in searches], k)
        passages = [tuple(hit.passage for hit in hits) for hits in found]
        questions = [
            Question(f"search {number}", search.wanted(), (), passages=given)
            for number, (search, given) in enumerate(zip(searches, passages, strict=True))
        ]
        extracted = iter(self._extractor.extract([question for question in questions if question.passages]))
        extractions = [next(extracted) if given else Extraction(rationale="") for given in passages]
        self.readings.update(zip(queries, extractions, strict=True))
        return [
            [Hit(-1, Passage("evidence", "", extraction.evidence), 0.0)] if extraction.evidence else []
            for extraction in extractions
        ]


def with_packed_searches(system: System) -> System:
    """Return the system with packed searches, which contain the question and the thinking of their turn."""

    def episode(question: Question, config: EpisodeConfig) -> Episode:
        loop = system.episode(question, config)
        answer, turn = None, Turn(b"", None)
        while True:
            try:
                request = loop.send(answer)
            except StopIteration as stop:
                return str(stop.value)
            if isinstance(request, Search):
                request = Search(AgentSearch(question.question, thinking(turn), request.query).packed())
            answer = yield request
            if isinstance(request, Generate):
                turn = answer

    return replace(system, episode=episode)


def thinking(turn: Turn) -> str:
    """Return the thinking of a turn: the text in <think>, or without that span the text before <search>."""
    return turn.inside("think") or turn.text.partition(b"<search>")[0].decode("utf-8", "replace").strip()


def reading_record(packed: str, reading: Extraction) -> dict[str, Any]:
    """Return the record of one search of the agent."""
    search = AgentSearch.unpack(packed)
    return {
        "thinking": search.thinking,
        "query": search.query,
        "passages": [passage_record(passage) for passage in reading.passages],
        **({} if reading.rationale is None else {"rationale": reading.rationale}),
        "evidence": reading.evidence,
        "compression_ratio": reading.compression_ratio,
        "ended": reading.reason,
    }


def reading_figures(readings: list[Extraction]) -> dict[str, Any]:
    """Return the figures of one question. compression_ratio: over searches with evidence; None if there are none."""
    useful = [reading for reading in readings if reading.evidence]
    passages = sum(extraction.passage_tokens for extraction in useful)
    evidence = sum(extraction.evidence_tokens for extraction in useful)
    return {
        "searches": len(readings),
        "empty": len(readings) - len(useful),
        "compression_ratio": compression_ratio(passages, evidence),
        "cut_passages": sum(reading.cut_passages for reading in readings),
    }
