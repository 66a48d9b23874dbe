"""Drives an episode by hand: its turns, searches and calls are scripted, and its requests are returned."""

from collections.abc import Sequence
from itertools import repeat
from typing import Any

from thresher.engine.episode import EpisodeConfig, Generate, Search, SubCall, System, Turn
from thresher.retrieval.questions import Question
from thresher.retrieval.retriever import Hit


def turn(text: str, stops: Sequence[str]) -> Turn:
    """Return a turn as the engine would pass it: the stop is the tag that the text ends with, or else contains."""
    ends = [tag for tag in stops if text.endswith(tag)] or [tag for tag in stops if tag in text]
    return Turn(text.encode(), next(iter(ends), None))


def drive(
    system: System,
    question: Question,
    texts: Sequence[str],
    hits: "Sequence[list[Hit]] | repeat[list[Hit]]" = (),
    called: Sequence[str] = (),
    max_turns: int = 4,
    template: str | None = None,
) -> tuple[list[Any], str | None]:
    """Return all requests of an episode, and its reason; None if it needs more turns than `texts`. hits: of the
    searches, in order. called: the outputs of calls."""
    config = EpisodeConfig(system.template if template is None else template, max_turns)
    episode, answer = system.episode(question, config), None
    turns, found, calls, requests = list(texts), iter(hits), list(called), []
    while True:
        try:
            request: Any = episode.send(answer)
        except StopIteration as stop:
            left = [turns, calls, [] if isinstance(hits, repeat) else list(found)]
            assert not any(left), f"left over: {left}"
            return requests, stop.value
        requests.append(request)
        answer = next(found) if isinstance(request, Search) else None
        if isinstance(request, SubCall):
            answer = turn(calls.pop(0), request.context.stop)
        elif isinstance(request, Generate):
            if not turns:
                return requests, None
            answer = turn(turns.pop(0), request.stop)


def kinds(requests: Sequence[Any]) -> list[str]:
    """Return the names of the requests' classes."""
    return [type(request).__name__ for request in requests]
