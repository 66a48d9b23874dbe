"""The model beside the extractor, a generator or an agent: a model folder of ours, or a chat model behind a URL.

Both play a System, greedy, and their answers are scored alike.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from thresher.engine.assemble import RunContext
from thresher.engine.episode import EpisodeConfig, System
from thresher.engine.evaluation.api_rollout import ApiRollout, Continued, cut
from thresher.engine.protocol.prompts import Renderer
from thresher.engine.rollout.rollout import Job, Limits, Rollout
from thresher.engine.scoring.endpoint import Messages
from thresher.engine.scoring.score import Scored, check_all, score
from thresher.policy.tokenizer import train_bpe
from thresher.retrieval.questions import Question
from thresher.retrieval.retriever import Retriever


class Responder:
    """Answers questions with the system of a rollout."""

    def __init__(self, rollout: Rollout | ApiRollout) -> None:
        self._rollout = rollout

    def responses(self, questions: Sequence[Question]) -> Iterator[Scored]:
        """Yield an answer to each question. Those of a chat model come as soon as each is known: what it said before
        it stopped to reply, with its endpoint's UserError, has been handed out."""
        rollout = self._rollout
        jobs = [Job(question, number, 0, number) for number, question in enumerate(questions)]
        played = rollout.stream(jobs, 0.0) if isinstance(rollout, ApiRollout) else rollout.run(jobs, 0.0)
        for trajectory in played:
            scored = score([questions[trajectory.group]], [trajectory], rollout.system, rollout.tokenizer)
            check_all(scored, rollout.tokenizer, rollout.system.tags, rollout.limits.max_context)
            yield from scored


def local_responder(
    context: RunContext, system: System, tools: EpisodeConfig, retriever: Retriever | None, passage_format: str
) -> Responder:
    """Return a policy of ours under `system`, shown passages in this format, with all else as in `context`."""
    renderer = replace(context.renderer, tags=system.tags, passage_format=passage_format)
    return Responder(replace(context, system=system, tools=tools, renderer=renderer).rollout(retriever))


class Chat(Protocol):
    """A chat model; engine/scoring/endpoint.py has one."""

    def complete(
        self, conversations: Sequence[Sequence[Mapping[str, str]]], *, temperature: float = ..., max_tokens: int = ...
    ) -> list[str]: ...


class WholeReplies:
    """A chat model's replies as turns. It is told no stop tag and may well go on to invent what the search would have
    found, so a reply is cut behind the first of its tags."""

    def __init__(self, chat: Chat) -> None:
        self._chat = chat

    def continued(self, asked: Sequence[tuple[Messages, tuple[str, ...], int]], temperature: float) -> list[Continued]:
        replies = self._chat.complete(
            [messages for messages, _, _ in asked], temperature=temperature, max_tokens=asked[0][2]
        )
        return [
            Continued(cut(reply.encode("utf-8", "replace").decode(), stop), full=False)
            for reply, (_, stop, _) in zip(replies, asked, strict=True)
        ]


def chat_responder(
    chat: Chat,
    system: System,
    tools: EpisodeConfig,
    retriever: Retriever | None,
    k: int,
    passage_format: str,
    max_tokens: int,
) -> Responder:
    """Return a chat model under `system`, without any limit but `max_tokens` of a reply."""
    tokenizer = train_bpe((), 256)  # a byte is a token
    renderer = Renderer(
        tokenizer=tokenizer,
        tags=system.tags,
        k=k,
        chat=False,
        max_passage_tokens=sys.maxsize,
        passage_format=passage_format,
    )
    limits = Limits(
        max_turn_tokens=max_tokens, max_policy_tokens=sys.maxsize, max_context=sys.maxsize, max_num_seqs=sys.maxsize
    )
    return Responder(ApiRollout(WholeReplies(chat), tokenizer, retriever, system, tools, renderer, limits))
