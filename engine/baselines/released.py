"""Checkpoints that others trained to search and released, each in the protocol that it knows.

    research              <think>..</think> <search>query</search>  ->  <result>passages</result>  ->  ..
                              ->  <answer>.. \\boxed{answer}</answer>                       (ReSearch, Chen et al. 2025)
    r1_searcher           <think>.. <|begin_of_query|>query<|end_of_query|>
                              ->  <|begin_of_documents|>passages<|end_of_documents|>  ->  ..
                              ->  </think> <answer>answer</answer>                       (R1-Searcher, Song et al. 2025)
    simple_deep_searcher  .. <|begin_search_query|>query<|end_search_query|>
                              ->  <|begin_search_result|>passages<|end_search_result|>  ->  ..
                              ->  .. \\boxed{answer}, to the end of the text     (SimpleDeepSearcher, Sun et al. 2025)

The tags are text to their tokenizers. A turn that searches for nothing ends the trajectory, and the last of N turns may
search no more. `over` = "given" answers searches from the passages that the question brings, as ARENA's table has them.

    reward = EM(answer, golds)    answer: the first closed <answer>, of ReSearch the last \\boxed in it; of
                                  SimpleDeepSearcher the last \\boxed of all that was written

Preset: 5 passages (R1-Searcher's and ReSearch's code; else [assumed]), for which 1,024 tokens are room [assumed], turns
of 512 tokens (R1-Searcher's code) or 1,024 (else [assumed]), 10 turns (R1-Searcher's code, SimpleDeepSearcher's 10
searches; ReSearch [assumed]), a context of 8,192 [assumed]. SimpleDeepSearcher has another model sum up web pages
first; here the passages themselves are shown. The prompts are in our words: a checkpoint is at its best under its own,
by system.template. R1-Searcher (base) and ReSearch (base) take theirs without a chat template (model.prompt = "raw").
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from thresher.engine.baselines import common
from thresher.engine.baselines.common import Over, built_in, reward_of, searching
from thresher.engine.episode import Episode, EpisodeConfig, Generate, Prompt, Retrieved, Search, System, Turn, pair_tags
from thresher.retrieval.questions import Question
from thresher.rewards.attempt import RewardInput
from thresher.rewards.result import RewardResult
from thresher.rewards.tags import final_answer
from thresher.rewards.transcript import Source, TextSegment

Name = Literal["research", "r1_searcher", "simple_deep_searcher"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchProtocol:
    """query: the tags around one. around: what stands before and behind the passages. answer_tag, boxed: where the
    answer stands."""

    query: tuple[str, str]
    around: tuple[str, str]
    answer_tag: bool
    boxed: bool
    turn_tokens: int = 1024

    @property
    def tags(self) -> tuple[str, ...]:
        shown = [text.strip() for text in self.around]
        return (*pair_tags("think"), *self.query, *shown, *(pair_tags("answer") if self.answer_tag else ()))


PROTOCOLS: dict[Name, SearchProtocol] = {
    "research": SearchProtocol(
        query=("<search>", "</search>"), around=(" <result>\n", "\n</result>"), answer_tag=True, boxed=True
    ),
    "r1_searcher": SearchProtocol(
        query=("<|begin_of_query|>", "<|end_of_query|>"),
        around=("\n\n<|begin_of_documents|>\n", "<|end_of_documents|>\n\n"),
        answer_tag=True,
        boxed=False,
        turn_tokens=512,
    ),
    "simple_deep_searcher": SearchProtocol(
        query=("<|begin_search_query|>", "<|end_search_query|>"),
        around=("\n\n<|begin_search_result|>", "<|end_search_result|>\n\n"),
        answer_tag=False,
        boxed=True,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Options(common.Options):
    """protocol: whose. over: what is searched, an index or server, or the passages that a question brings."""

    protocol: Name = "research"
    over: Over = "index"


def episode(question: Question, tools: EpisodeConfig, protocol: Name) -> Episode:
    known = PROTOCOLS[protocol]
    opening, closing = known.query
    yield Prompt(tools.template, question.question)
    written: list[TextSegment] = []
    for searches_left in reversed(range(tools.max_turns)):
        turn: Turn = yield Generate(stop=(closing, "</answer>") if known.answer_tag else (closing,))
        written.append(TextSegment(Source.POLICY, turn.text))
        if not turn.stopped_at(closing):
            return "answered" if answer_in(written, protocol) else "ended"
        query = turn.text.decode("utf-8", "replace").partition(closing)[0].rpartition(opening)[2]
        query = " ".join(query.replace('"', "").split())
        if not query or opening.encode() not in turn.text:
            return "ended"
        if searches_left:
            yield Retrieved((yield Search(query)), *known.around)
    return "turns"


def answer_in(pieces: Sequence[TextSegment], protocol: Name) -> str | None:
    """The answer that stands in what the policy wrote; None where there is none."""
    known = PROTOCOLS[protocol]
    if known.answer_tag:
        answer = final_answer(pieces)
    else:
        written = (piece.text.decode("utf-8", "replace") for piece in pieces if piece.source is Source.POLICY)
        answer = next(filter(None, map(last_boxed, reversed(list(written)))), None)
        return answer
    return last_boxed(answer or "") if known.boxed else answer


def last_boxed(text: str) -> str | None:
    """What stands in the last \\boxed{..} that is closed, its own braces in pairs, without a \\text{..} around it all;
    None without one."""
    start = len(text)
    while (start := text.rfind("\\boxed{", 0, start)) >= 0:
        begin, depth = start + len("\\boxed{"), 1
        for place in range(begin, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                inside = text[begin:place].strip()
                bare = inside.removeprefix("\\text{").removesuffix("}") if inside.startswith("\\text{") else inside
                return bare.strip()
    return None


def answer_of(attempt: RewardInput, protocol: Name) -> str | None:
    return answer_in(attempt.pieces, protocol)


def released_reward(attempt: RewardInput, protocol: Name) -> RewardResult:
    """Exact match of the answer where the protocol has it."""
    return reward_of(answer_of(attempt, protocol), attempt)


def system(options: Options) -> System:
    known = PROTOCOLS[options.protocol]
    made = System(
        name="released",
        tags=known.tags,
        episode=partial(episode, protocol=options.protocol),
        reward=partial(released_reward, protocol=options.protocol),
        template=built_in(options.protocol, options),
        preset={
            "retrieval": {"k": 5},
            "rollout": {
                "max_turns": 10,
                "max_turn_tokens": known.turn_tokens,
                "max_context": 8192,
                "max_passage_tokens": 1024,
            },
        },
        answer=partial(answer_of, protocol=options.protocol),
        searches=True,
    )
    return searching(made, options.over)
