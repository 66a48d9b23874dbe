"""Episodes whose turns are written by a chat model behind a URL: a rollout without tokens.

The prompt is the user's first message, a turn the assistant's, and what the engine appends between two turns
(passages, feedback) the user's next. A reply is cut behind the first stop tag in it: such a model may well go on and
invent what the search would have found. Questions and passages have their tags escaped, as in the renderer.

All episodes of a call go forward together, turn by turn, and each round is one call of the model and one of the
retriever.

Deliberately absent: the model's tokens and log-probs, which a chat does not report; so nothing here can be trained on.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from thresher.engine.episode import Episode, EpisodeConfig, Feedback, Generate, Prompt, Retrieved, Search, System, cut
from thresher.engine.protocol.prompts import passage_lines
from thresher.retrieval.questions import Question
from thresher.retrieval.retriever import Retriever
from thresher.rewards.tags import escape_tags
from thresher.rewards.transcript import Source, TextSegment


class Chat(Protocol):
    """A chat model; engine/scoring/endpoint.py has one."""

    def complete(
        self, conversations: Sequence[Sequence[Mapping[str, str]]], *, temperature: float = ..., max_tokens: int = ...
    ) -> list[str]: ...


@dataclass(slots=True)
class Conversation:
    """One question's episode: what was said, as messages and as the pieces that rewards read, and why it ended."""

    question: Question
    messages: list[dict[str, str]] = field(default_factory=list)
    pieces: list[TextSegment] = field(default_factory=list)
    searches: list[dict[str, Any]] = field(default_factory=list)
    reason: str = ""
    unsent: str = ""  # what the next user message will say
    stop: tuple[str, ...] = ()  # of the turn that is due


@dataclass(frozen=True, slots=True, kw_only=True)
class Converser:
    """How to hold conversations of one system. retriever: for systems that search. max_tokens: of one reply."""

    system: System
    tools: EpisodeConfig
    chat: Chat
    retriever: Retriever | None
    k: int
    passage_format: str
    max_tokens: int

    def converse(self, questions: Sequence[Question]) -> Iterator[Conversation]:
        """Each question's conversation, as soon as it has ended; greedy. UserError as the chat model's."""
        waiting: list[tuple[Conversation, Episode, Any]] = [
            (Conversation(question), self.system.episode(question, self.tools), None) for question in questions
        ]
        while waiting:
            due = self._serve(waiting)
            yield from (talk for talk, _, _ in waiting if talk.reason)
            if not due:
                return
            for talk, _ in due:
                talk.messages.append({"role": "user", "content": talk.unsent})
                talk.unsent = ""
            replies = self.chat.complete(
                [talk.messages for talk, _ in due], temperature=0.0, max_tokens=self.max_tokens
            )
            waiting = []
            for (talk, episode), reply in zip(due, replies, strict=True):
                turn = cut(reply, talk.stop)
                text = turn.text.decode("utf-8", "replace")
                talk.messages.append({"role": "assistant", "content": text})
                talk.pieces.append(TextSegment(Source.POLICY, turn.text))
                waiting.append((talk, episode, turn))

    def _serve(self, ready: Sequence[tuple[Conversation, Episode, Any]]) -> list[tuple[Conversation, Episode]]:
        """Answer the episodes' requests until each is due to write or has ended; those that are due."""
        due: list[tuple[Conversation, Episode]] = []
        while ready:
            asking: list[tuple[Conversation, Episode, str]] = []
            for talk, episode, answer in ready:
                request = self._advance(talk, episode, answer)
                if isinstance(request, Search):
                    asking.append((talk, episode, request.query))
                elif isinstance(request, Generate):
                    talk.stop = request.stop
                    due.append((talk, episode))
            ready = []
            if asking:
                assert self.retriever is not None, f"{self.system.name} searches, and there is nowhere to"
                found = self.retriever.search([query for _, _, query in asking], self.k)
                for (talk, episode, query), hits in zip(asking, found, strict=True):
                    talk.searches.append({"query": query, "passages": [hit.passage.id for hit in hits]})
                    ready.append((talk, episode, hits))
        return due

    def _advance(self, talk: Conversation, episode: Episode, answer: object) -> Search | Generate | None:
        """Send `answer` to the episode; the first of its requests that must wait, None if it has ended."""
        while True:
            try:
                request = episode.send(answer)
            except StopIteration as stop:
                talk.reason = stop.value or "ended"
                return None
            answer = None
            if isinstance(request, Search | Generate):
                return request
            source, text = self._written(request)
            talk.pieces.append(TextSegment(source, text.encode("utf-8", "surrogatepass")))
            talk.unsent += text

    def _written(self, request: object) -> tuple[Source, str]:
        """A request that only appends, as text."""
        tags = self.system.tags
        if isinstance(request, Prompt):
            lines = passage_lines(request.passages, self.passage_format)
            places = {"{question}": escape_tags(request.question, tags), "{passages}": escape_tags(lines, tags)}
            filled = re.sub(r"\{question\}|\{passages\}", lambda match: places[match[0]], request.template)
            return Source.PROMPT, filled
        if isinstance(request, Retrieved):
            hits = request.hits
            lines = hits if isinstance(hits, str) else passage_lines([hit.passage for hit in hits], self.passage_format)
            return Source.RETRIEVED, request.before + escape_tags(lines, tags) + request.after
        if isinstance(request, Feedback):
            return Source.FEEDBACK, escape_tags(request.text, tags)
        raise TypeError(f"{self.system.name} yielded {request!r}, which a chat model cannot serve")
