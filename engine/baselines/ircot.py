"""Interleaved retrieval and chain of thought (IRCoT, Trivedi et al. 2023): every thought is the next query.

    question -> <information>  ->  <thought>one sentence</thought> -> <information>  ->  ..  ->  <answer>..</answer>

The question itself is the first query, each thought the one after. A passage is shown once. Of N turns the last may
only answer, and feedback says so. The original then lets a second prompt read all passages; here the context that holds
the thoughts holds them too, and the answer is written in it.
"""

from thresher.engine.baselines.common import Options, answer_reward, built_in
from thresher.engine.episode import Episode, Feedback, Generate, Prompt, Retrieved, Search, System, Tools, pair_tags
from thresher.engine.systems.search_r1 import AFTER, BEFORE
from thresher.retrieval.questions import Question

__all__ = ["Options", "system"]

INVALID = "\nThat was neither a thought nor an answer. Write one of them between its tags.\n"
LAST = "\nNo more documents will come. Give the final answer now, between answer tags.\n"


def episode(question: Question, tools: Tools) -> Episode:
    yield Prompt(tools.template, question.question)
    query: str | None = question.question
    shown: set[str] = set()
    for turns_left in reversed(range(tools.max_turns)):
        if query:
            hits = yield Search(query)
            fresh = [hit for hit in hits if hit.passage.id not in shown]
            shown.update(hit.passage.id for hit in fresh)
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
        episode=episode,
        reward=answer_reward,
        template=built_in("ircot", options),
        preset={"retrieval": {"k": 3}, "rollout": {"max_turns": 5}},
    )
