"""Interleaved retrieval and chain of thought (IRCoT, Trivedi et al. 2023): every thought is the next query.

    question -> <information>  ->  <thought>one sentence</thought> -> <information>  ->  ..  ->  <answer>..</answer>

The question itself is the first query, each thought the one after. A passage is shown once. Of N turns the last may
only answer, and feedback says so. The context that holds the thoughts holds the passages too, and the answer is written
in it. With `reader` on it is as in the original: when the thoughts have ended, a call reads the question and all
passages, and its answer counts.
"""

from dataclasses import dataclass
from functools import partial

from thresher.engine.baselines import common
from thresher.engine.baselines.common import answer_reward, built_in, called_answer, called_answer_reward, reader_call
from thresher.engine.episode import (
    Episode,
    EpisodeConfig,
    Feedback,
    Generate,
    Prompt,
    Retrieved,
    Search,
    System,
    last_answer,
    pair_tags,
)
from thresher.engine.systems.search_r1 import AFTER, BEFORE
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question

INVALID = "\nThat was neither a thought nor an answer. Write one of them between its tags.\n"
LAST = "\nNo more documents will come. Give the final answer now, between answer tags.\n"


@dataclass(frozen=True, kw_only=True)
class Options(common.Options):
    """reader: the answer is that of a call, which reads all passages."""

    reader: bool = False


def episode(question: Question, tools: EpisodeConfig, reader: bool) -> Episode:
    shown: dict[str, Passage] = {}
    reason = yield from thoughts(question, tools, shown)
    if reader:
        turn = yield reader_call(question.question, list(shown.values()))
        return "answered" if turn.inside("answer") else "ended"
    return reason


def thoughts(question: Question, tools: EpisodeConfig, shown: dict[str, Passage]) -> Episode:
    """The loop; the passages that it shows come into `shown`, by id."""
    yield Prompt(tools.template, question.question)
    query: str | None = question.question
    for turns_left in reversed(range(tools.max_turns)):
        if query:
            hits = yield Search(query)
            fresh = [hit for hit in hits if hit.passage.id not in shown]
            shown.update((hit.passage.id, hit.passage) for hit in fresh)
            yield Retrieved(fresh, BEFORE, AFTER)
        else:
            yield Feedback(INVALID)
        if turns_left == 0:
            yield Feedback(LAST)
        turn = yield Generate(stop=("</thought>", "</answer>") if turns_left else ("</answer>",))
        if turn.stopped_at("</answer>") and turn.inside("answer"):
            return "answered"
        query = turn.inside("thought") if turn.stopped_at("</thought>") else None
    return "turns"


def system(options: Options) -> System:
    return System(
        name="ircot",
        tags=pair_tags("thought", "information", "answer"),
        episode=partial(episode, reader=options.reader),
        reward=called_answer_reward if options.reader else answer_reward,
        template=built_in("ircot", options),
        preset={
            "retrieval": {"k": 3},
            "rollout": {"max_turns": 5} | ({"max_passage_tokens": 3072} if options.reader else {}),
        },
        answer=called_answer if options.reader else last_answer,
    )
