"""Search-o1 (Li et al. 2025): a model that reasons at length searches the moment it is unsure, and what was found is
read apart before it comes back.

    .. <search>query</search>  ->  call: (question, reasoning so far, query, documents) -> <information>what helps</..>
        ->  <information>what helps</information>  ->  ..  ->  <answer>..</answer>

The call sees what was written and what was shown so far; the documents are in it alone. Without a closed span it has
found nothing that helps. A query that was asked before is not searched again. Of N turns the last may only answer.
With `reading` off the documents themselves come back, as in Search-R1.

Preset: 10 documents, 5 searches (its README), 2,048 tokens of documents a search [assumed], a context of 8,192
[assumed]. The original shows the call an abridged reasoning: the first step, the last four, and those that search.
"""

from dataclasses import dataclass
from pathlib import Path

from thresher.engine.baselines import common
from thresher.engine.baselines.common import answer_reward, built_in
from thresher.engine.episode import (
    BranchPrompt,
    Episode,
    EpisodeConfig,
    Feedback,
    Generate,
    Prompt,
    Retrieved,
    Search,
    SubCall,
    System,
    pair_tags,
    read_template,
)
from thresher.engine.systems.search_r1 import AFTER, BEFORE, INVALID, search_loop
from thresher.retrieval.questions import Question

READ = read_template(Path(__file__).with_name("search_o1_read.txt"), passages=True)
NOTHING = "Nothing was found that helps."
AGAIN = "\nThat query was searched before; its result stands above.\n"


@dataclass(frozen=True, kw_only=True)
class Options(common.Options):
    """reading: what was found is read in a call, and only what came of it goes back."""

    reading: bool = True


def episode(question: Question, tools: EpisodeConfig) -> Episode:
    yield Prompt(tools.template, question.question)
    reasoning, asked = "", set[str]()
    for searches_left in reversed(range(tools.max_turns)):
        turn = yield Generate(stop=("</search>", "</answer>"))
        reasoning += turn.text.decode("utf-8", "replace")
        if turn.stopped_at("</answer>") and turn.inside("answer"):
            return "answered"
        if searches_left == 0:
            break
        query = turn.inside("search") if turn.stopped_at("</search>") else None
        if query is None or query in asked:
            yield Feedback(INVALID if query is None else AGAIN)
            continue
        asked.add(query)
        hits = yield Search(query)
        about = f"{question.question}\n\nReasoning so far:\n{reasoning}\n\nQuery: {query}"
        prompt = Prompt(READ, about, [hit.passage for hit in hits])
        read = yield SubCall(BranchPrompt(prompt, (), ("</information>",)))
        helps = read.inside("information") or NOTHING
        reasoning += BEFORE + helps + AFTER
        yield Retrieved(helps, BEFORE, AFTER)
    return "turns"


def system(options: Options) -> System:
    return System(
        name="search_o1",
        tags=pair_tags("think", "search", "information", "answer"),
        episode=episode if options.reading else search_loop,
        reward=answer_reward,
        template=built_in("search_o1", options),
        preset={
            "retrieval": {"k": 10},
            "rollout": {"max_turns": 6, "max_passage_tokens": 2048, "max_context": 8192},
        },
    )
