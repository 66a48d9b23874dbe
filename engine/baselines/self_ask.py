"""Self-ask with search (Press et al. 2023): the model asks itself follow-up questions, and a search answers each.

    <followup>question</followup> -> <information>  ->  <intermediate>its answer</intermediate> <followup>..</followup>
        ->  ..  ->  <answer>..</answer>

The original shows the search engine's own answer as the intermediate one; here passages come back and the model reads
that answer from them, at the beginning of its next turn. With `reader` on, a call answers the follow-up question from
the passages, and only its answer comes back, between the tags of the intermediate one. Of N turns the last may only
answer, and feedback says so.
"""

from dataclasses import dataclass
from functools import partial

from thresher.engine.baselines import common
from thresher.engine.baselines.common import Over, answer_reward, built_in, reader_call, searching
from thresher.engine.episode import (
    Episode,
    EpisodeConfig,
    Feedback,
    Generate,
    Prompt,
    Retrieved,
    Search,
    System,
    pair_tags,
)
from thresher.engine.systems.search_r1 import AFTER, BEFORE
from thresher.retrieval.questions import Question

INVALID = "\nThat was neither a follow-up question nor a final answer. Write one of them between its tags.\n"
LAST = "\nNo more questions can be looked up. Give the final answer now, between answer tags.\n"
UNKNOWN = "The documents do not say."


@dataclass(frozen=True, kw_only=True)
class Options(common.Options):
    """reader: a call reads the passages and gives the intermediate answer. over: what is searched, an index or server,
    or the passages that a question brings."""

    reader: bool = False
    over: Over = "index"


def episode(question: Question, tools: EpisodeConfig, reader: bool) -> Episode:
    yield Prompt(tools.template, question.question)
    for turns_left in reversed(range(tools.max_turns)):
        if turns_left == 0:
            yield Feedback(LAST)
        turn = yield Generate(stop=("</followup>", "</answer>") if turns_left else ("</answer>",))
        if turn.stopped_at("</answer>") and turn.inside("answer"):
            return "answered"
        if turns_left == 0:
            break
        if turn.stopped_at("</followup>") and (query := turn.inside("followup")):
            hits = yield Search(query)
            if reader:
                read = yield reader_call(query, [hit.passage for hit in hits])
                yield Retrieved(read.inside("answer") or UNKNOWN, "\n<intermediate>", "</intermediate>\n")
            else:
                yield Retrieved(hits, BEFORE, AFTER)
        else:
            yield Feedback(INVALID)
    return "turns"


def system(options: Options) -> System:
    made = System(
        name="self_ask",
        tags=pair_tags("followup", "information", "intermediate", "answer"),
        episode=partial(episode, reader=options.reader),
        reward=answer_reward,
        template=built_in("self_ask_reader" if options.reader else "self_ask", options),
        preset={"retrieval": {"k": 3}, "rollout": {"max_turns": 5}},
    )
    return searching(made, options.over)
