"""Self-ask with search (Press et al. 2023): the model asks itself follow-up questions, and a search answers each.

    <followup>question</followup> -> <information>  ->  <intermediate>its answer</intermediate> <followup>..</followup>
        ->  ..  ->  <answer>..</answer>

The original shows the first result as the intermediate answer; here passages come back and the model reads that answer
from them, at the beginning of its next turn. Of N turns the last may only answer, and feedback says so.
"""

from thresher.engine.baselines.common import Options, answer_reward, built_in
from thresher.engine.episode import Episode, Feedback, Generate, Prompt, Retrieved, Search, System, Tools, pair_tags
from thresher.engine.systems.search_r1 import AFTER, BEFORE
from thresher.retrieval.questions import Question

__all__ = ["Options", "system"]

INVALID = "\nThat was neither a follow-up question nor a final answer. Write one of them between its tags.\n"
LAST = "\nNo more questions can be looked up. Give the final answer now, between answer tags.\n"


def episode(question: Question, tools: Tools) -> Episode:
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
            yield Retrieved((yield Search(query)), BEFORE, AFTER)
        else:
            yield Feedback(INVALID)
    return "turns"


def system(options: Options) -> System:
    return System(
        name="self_ask",
        tags=pair_tags("followup", "information", "intermediate", "answer"),
        episode=episode,
        reward=answer_reward,
        template=built_in("self_ask", options),
        preset={"retrieval": {"k": 3}, "rollout": {"max_turns": 5}},
    )
