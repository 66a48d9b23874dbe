"""The model beside the extractor, a generator or an agent: a model folder of ours, or a chat model behind a URL.

Both are given a System and hand back the same Response, so that nothing else needs to know which it was. Greedy.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from thresher.engine.assemble import RunContext
from thresher.engine.episode import EpisodeConfig, System
from thresher.engine.extraction.converse import Converser
from thresher.engine.rollout.rollout import Job
from thresher.engine.scoring.score import check_all, score
from thresher.retrieval.questions import Question
from thresher.retrieval.retriever import Retriever
from thresher.rewards.attempt import RewardInput
from thresher.rewards.result import RewardResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """An answer: `result` by the system's reward, `reason` why it ended, `searches` as a trajectory has them."""

    question: Question
    result: RewardResult
    reason: str
    searches: list[dict[str, Any]]


class Responder(Protocol):
    def responses(self, questions: Sequence[Question]) -> Iterator[Response]:
        """One for each question, in no particular order, as soon as it is known."""


class LocalResponder:
    """A policy of ours under `system`, shown passages in this format, with everything else as in `parts`."""

    def __init__(
        self, parts: RunContext, system: System, tools: EpisodeConfig, retriever: Retriever | None, passage_format: str
    ) -> None:
        renderer = replace(parts.renderer, tags=system.tags, passage_format=passage_format)
        self._parts = replace(parts, system=system, tools=tools, renderer=renderer)
        self._rollout = self._parts.rollout(retriever)

    def responses(self, questions: Sequence[Question]) -> Iterator[Response]:
        parts = self._parts
        jobs = [Job(question, number, 0, number) for number, question in enumerate(questions)]
        scored = score(questions, self._rollout.run(jobs, 0.0), parts.system, parts.tokenizer)
        check_all(scored, parts.tokenizer, parts.system.tags, parts.limits.max_context)
        for entry in scored:
            trajectory = entry.trajectory
            yield Response(
                question=entry.question, result=entry.result, reason=trajectory.reason, searches=trajectory.searches
            )


class ChatResponder:
    """A chat model. What is known by the time it stops to reply, with its endpoint's UserError, has been handed out."""

    def __init__(self, converser: Converser) -> None:
        self._converser = converser

    def responses(self, questions: Sequence[Question]) -> Iterator[Response]:
        for talk in self._converser.converse(questions):
            attempt = RewardInput(pieces=talk.pieces, golds=talk.question.golds, question=talk.question.question)
            result = self._converser.system.reward(attempt)
            yield Response(question=talk.question, result=result, reason=talk.reason, searches=talk.searches)
