"""The extractor inside a search loop: the agent searches as Search-R1 does, and only evidence comes back to it.

    agent: <think>t</think> <search>s</search>
        -> passages P for s  ->  extractor(q + t + s, P) = evidence e  ->  agent: .. <information>e</information> ..

The agent never sees a passage; where the evidence is empty, neither does it see anything in its place. To the loop the
extractor is part of the retriever: `ReadingRetriever` is asked with a query that carries its context, finds passages
for the query and returns the evidence as its one hit.

Measured per question: searches, and the compression ratio, the length of all passages behind its evidence by that of
the evidence; a question whose searches all left no evidence has none and is counted.
"""

import json
from dataclasses import dataclass, replace
from typing import Any

from thresher.engine.episode import Episode, EpisodeConfig, Generate, Search, System, Turn
from thresher.engine.extraction.extractor import CompressorExtractor, Extraction, Extractor
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question, passage_record
from thresher.retrieval.retriever import Hit, Retriever
from thresher.rewards.measures import compression_ratio

NOTHING = Extraction(
    rationale="",
    evidence="",
    passages=(),
    cut_passages=0,
    passage_tokens=0,
    evidence_tokens=0,
    rationale_tokens=0,
    reason="ended",
)


@dataclass(frozen=True, slots=True)
class AgentSearch:
    """A search with what it was asked for: the question, the agent's thinking in that turn, and the query."""

    question: str
    thinking: str
    query: str

    def packed(self) -> str:
        """Return one line that `unpack` reads, for retrievers that are asked with a string."""
        return json.dumps([self.question, self.thinking, self.query])

    @staticmethod
    def unpack(text: str) -> "AgentSearch":
        return AgentSearch(*json.loads(text))

    def wanted(self) -> str:
        """Return the text in the place of the extractor's question."""
        thinking = f"\nThinking: {self.thinking}" if self.thinking else ""
        return f"{self.question}{thinking}\nSearch: {self.query}"


class ReadingRetriever(Retriever):
    """Finds passages for packed agent searches and returns what the extractor takes from them; `readings`, by the
    packed search, keeps what was read on the way."""

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
        # Where nothing was found there is nothing to read.
        extracted = iter(self._extractor.extract([question for question in questions if question.passages]))
        extractions = [next(extracted) if given else NOTHING for given in passages]
        self.readings.update(zip(queries, extractions, strict=True))
        return [
            [Hit(-1, Passage("evidence", "", extraction.evidence), 0.0)] if extraction.evidence else []
            for extraction in extractions
        ]


def with_packed_searches(system: System) -> System:
    """Return the system with its searches packed: each carries the question and the thinking of its turn."""

    def episode(question: Question, tools: EpisodeConfig) -> Episode:
        loop = system.episode(question, tools)
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
    """Return what a turn says before it searches: in <think> if the agent keeps to the tags, else everything."""
    return turn.inside("think") or turn.text.partition(b"<search>")[0].decode("utf-8", "replace").strip()


def reading_record(packed: str, reading: Extraction) -> dict[str, Any]:
    """Return one search of the agent, for the output: what it asked, what was found, what was made of it."""
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
    """Return the figures of one question: how often it searched, how often in vain, and its compression ratio, None
    without evidence."""
    useful = [reading for reading in readings if reading.evidence]
    passages = sum(extraction.passage_tokens for extraction in useful)
    evidence = sum(extraction.evidence_tokens for extraction in useful)
    return {
        "searches": len(readings),
        "empty": len(readings) - len(useful),
        "compression_ratio": compression_ratio(passages, evidence),
        "cut_passages": sum(reading.cut_passages for reading in readings),
    }
