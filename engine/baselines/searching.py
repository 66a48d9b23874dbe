"""Baselines that search while they reason."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from thresher.engine.baselines.common import (
    Options,
    Over,
    answer_reward,
    baseline,
    called_answer,
    called_answer_reward,
    reader_call,
    reward_of,
    with_examples,
)
from thresher.engine.config.tables import Count
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
    Turn,
    last_answer,
    over_given,
    pair_tags,
    read_template,
)
from thresher.engine.systems import load_system
from thresher.engine.systems.search_r1 import AFTER, BEFORE, INVALID, search_loop
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import Question
from thresher.rewards.reward import RewardInput, RewardResult, Source, TextSegment
from thresher.rewards.tags import final_answer


def untrained_search_loop(options: Options) -> System:
    """Make the untrained search loop: Search-R1's protocol with a model that was not trained for it."""
    base = load_system("search_r1", {})
    return replace(
        base,
        name="search_loop",
        reward=answer_reward,
        template=with_examples(base.template, options),
        preset={"retrieval": {"k": 3}, "rollout": {"max_turns": 5}},
    )


# IRCoT

NO_THOUGHT = "\nThat was neither a thought nor an answer. Write one of them between its tags.\n"
NO_MORE_DOCUMENTS = "\nNo more documents will come. Give the final answer now, between answer tags.\n"


@dataclass(frozen=True, kw_only=True)
class IrcotOptions(Options):
    """reader: the answer comes from a call that reads all passages."""

    reader: bool = False


def ircot(options: IrcotOptions) -> System:
    """Make IRCoT, interleaved retrieval and chain of thought (Trivedi et al. 2023): every thought is the next query.

        question -> <information>  ->  <thought>one sentence</thought> -> <information>  ->  ..  ->  <answer>..</answer>

    The question is the first query, each thought the next one. A passage is shown only once. Of N turns the last may
    only answer, and feedback says so. The answer is generated in the context of thoughts and passages; with `reader`,
    as in the original, a call after the thoughts reads the question and all passages, and its answer counts.
    """
    return baseline(
        "ircot",
        options,
        ("thought", "information", "answer"),
        partial(think_and_search, reader=options.reader),
        k=3,
        rollout={"max_turns": 5} | ({"max_passage_tokens": 3072} if options.reader else {}),
        reward=called_answer_reward if options.reader else answer_reward,
        answer=called_answer if options.reader else last_answer,
    )


def think_and_search(question: Question, config: EpisodeConfig, reader: bool) -> Episode:
    shown: dict[str, Passage] = {}
    reason = yield from thoughts(question, config, shown)
    if reader:
        turn = yield reader_call(question.question, list(shown.values()))
        return "answered" if turn.inside("answer") else "ended"
    return reason


def thoughts(question: Question, config: EpisodeConfig, shown: dict[str, Passage]) -> Episode:
    """Yield the requests of the loop, and add the passages that it shows to `shown`, by id."""
    yield Prompt(config.template, question.question)
    query: str | None = question.question
    for turns_left in reversed(range(config.max_turns)):
        if query:
            hits = yield Search(query)
            fresh = [hit for hit in hits if hit.passage.id not in shown]
            shown.update((hit.passage.id, hit.passage) for hit in fresh)
            yield Retrieved(fresh, BEFORE, AFTER)
        else:
            yield Feedback(NO_THOUGHT)
        if turns_left == 0:
            yield Feedback(NO_MORE_DOCUMENTS)
        turn = yield Generate(stop=("</thought>", "</answer>") if turns_left else ("</answer>",))
        if turn.stopped_at("</answer>") and turn.inside("answer"):
            return "answered"
        query = turn.inside("thought") if turn.stopped_at("</thought>") else None
    return "turns"


# Iter-RetGen

ITER_TAGS = ("think", "information", "answer")


@dataclass(frozen=True, kw_only=True)
class IterRetgenOptions(Options):
    """iterations: number of rounds of retrieval and generation; 1 retrieves only for the question."""

    iterations: Count = 3


def iter_retgen(options: IterRetgenOptions) -> System:
    """Make Iter-RetGen (Shao et al. 2023): retrieve, generate, and retrieve again with the generated text.

        iteration 1: documents for (question)                   -> thoughts and an answer y1
        iteration t: documents for (question, y of t - 1)       -> thoughts and an answer yt

    Every iteration but the last is a call, which sees only the question and its own documents. The last one is in the
    trajectory, in the same form, and contains the answer. Tags are removed from queries.

    Preset: 3 documents; 3 iterations [assumed].
    """
    return baseline("iter_retgen", options, ITER_TAGS, partial(iterate, iterations=options.iterations), k=3)


def iterate(question: Question, config: EpisodeConfig, iterations: int) -> Episode:
    prompt = Prompt(config.template, question.question)
    yield prompt
    query = question.question
    for _ in range(iterations - 1):
        shown = Retrieved((yield Search(query)), BEFORE, AFTER)
        turn = yield SubCall(BranchPrompt(prompt, (shown,), ("</answer>",)))
        query = f"{question.question} {without_tags(turn.text)}".strip()
    yield Retrieved((yield Search(query)), BEFORE, AFTER)
    turn = yield Generate(stop=("</answer>",))
    return "answered" if turn.inside("answer") else "ended"


def without_tags(text: bytes) -> str:
    return " ".join(re.sub("|".join(pair_tags(*ITER_TAGS)), " ", text.decode("utf-8", "replace")).split())


# Self-ask

NO_QUESTION = "\nThat was neither a follow-up question nor a final answer. Write one of them between its tags.\n"
NO_MORE_QUESTIONS = "\nNo more questions can be looked up. Give the final answer now, between answer tags.\n"
UNKNOWN = "The documents do not say."


@dataclass(frozen=True, kw_only=True)
class SelfAskOptions(Options):
    """reader: a call reads the passages and returns the intermediate answer. over: source of searches, an index or
    server, or the question's own passages."""

    reader: bool = False
    over: Over = "index"


def self_ask(options: SelfAskOptions) -> System:
    """Make self-ask with search (Press et al. 2023): the model asks follow-up questions, and a search answers each.

        <followup>question</followup> -> <information>  ->  <intermediate>its answer</intermediate>
            <followup>..</followup>  ->  ..  ->  <answer>..</answer>

    The original shows the search engine's answer as the intermediate one. Here the model takes it from passages, at the
    beginning of its next turn; with `reader`, a call answers the follow-up question from the passages, and only its
    answer is shown. Of N turns the last may only answer, and feedback says so.
    """
    made = baseline(
        "self_ask",
        options,
        ("followup", "information", "intermediate", "answer"),
        partial(ask_oneself, reader=options.reader),
        prompt="self_ask_reader" if options.reader else "self_ask",
        k=3,
        rollout={"max_turns": 5},
    )
    return over_given(made) if options.over == "given" else made


def ask_oneself(question: Question, config: EpisodeConfig, reader: bool) -> Episode:
    yield Prompt(config.template, question.question)
    for turns_left in reversed(range(config.max_turns)):
        if turns_left == 0:
            yield Feedback(NO_MORE_QUESTIONS)
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
            yield Feedback(NO_QUESTION)
    return "turns"


# Search-o1

READ = read_template(Path(__file__).with_name("search_o1_read.txt"), passages=True)
NOTHING = "Nothing was found that helps."
AGAIN = "\nThat query was searched before; its result stands above.\n"


@dataclass(frozen=True, kw_only=True)
class SearchO1Options(Options):
    """reading: a call reads the documents, and only its result is shown."""

    reading: bool = True


def search_o1(options: SearchO1Options) -> System:
    """Make Search-o1 (Li et al. 2025): a model that reasons at length searches when it is unsure, and a call reads the
    documents found.

        .. <search>query</search>  ->  call: (question, reasoning so far, query, documents)  ->  what helps
            ->  <information>what helps</information>  ->  ..  ->  <answer>..</answer>

    The call sees all text written and shown so far, and only the call sees the documents. Without a closed span its
    result is that nothing was found. A repeated query is not searched again. Of N turns the last may only answer. With
    `reading` off the documents themselves are shown, as in Search-R1.

    Preset: 10 documents, 5 searches (its README), 2,048 tokens of documents per search [assumed], a context of 8,192
    [assumed]. In the original the call sees abridged reasoning: the first step, the last four, and those that search.
    """
    return baseline(
        "search_o1",
        options,
        ("think", "search", "information", "answer"),
        search_and_read if options.reading else search_loop,
        k=10,
        rollout={"max_turns": 6, "max_passage_tokens": 2048, "max_context": 8192},
    )


def search_and_read(question: Question, config: EpisodeConfig) -> Episode:
    yield Prompt(config.template, question.question)
    reasoning, asked = "", set[str]()
    for searches_left in reversed(range(config.max_turns)):
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


# Released checkpoints

Name = Literal["research", "r1_searcher", "simple_deep_searcher"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchProtocol:
    """query: the tags around a query. around: text before and after the passages. answer_tag, boxed: form of the
    answer."""

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
class ReleasedOptions(Options):
    """protocol: of the checkpoint. over: as in SelfAskOptions."""

    protocol: Name = "research"
    over: Over = "index"


def released(options: ReleasedOptions) -> System:
    """Make the baseline of released checkpoints that were trained to search, each with its own protocol.

        research              <think>..</think> <search>query</search>  ->  <result>passages</result>  ->  ..
                              ->  <answer>.. \\boxed{answer}</answer>                    (ReSearch, Chen et al. 2025)
        r1_searcher           <think>.. <|begin_of_query|>query<|end_of_query|>
                              ->  <|begin_of_documents|>passages<|end_of_documents|>  ->  ..
                              ->  </think> <answer>answer</answer>                    (R1-Searcher, Song et al. 2025)
        simple_deep_searcher  .. <|begin_search_query|>query<|end_search_query|>
                              ->  <|begin_search_result|>passages<|end_search_result|>  ->  ..
                              ->  .. \\boxed{answer}, to the end of the text  (SimpleDeepSearcher, Sun et al. 2025)

    Their tokenizers treat the tags as text. A turn without a search ends the trajectory; the last of N turns may not
    search. ARENA's table has `over` = "given".

        reward = EM(answer, golds)    answer: the first closed <answer>; for ReSearch the last \\boxed in it; for
                                      SimpleDeepSearcher the last \\boxed of the policy's whole text

    Preset: 5 passages (R1-Searcher's and ReSearch's code; else [assumed]) in at most 1,024 tokens [assumed], turns of
    512 tokens (R1-Searcher's code) or 1,024 (else [assumed]), 10 turns (R1-Searcher's code, SimpleDeepSearcher's 10
    searches; ReSearch [assumed]), a context of 8,192 [assumed]. SimpleDeepSearcher first has another model summarise
    web pages; here the passages themselves are shown. The prompts are in our words; a checkpoint performs best with its
    own, set by system.template. R1-Searcher (base) and ReSearch (base) use theirs without a chat template, by
    model.prompt = "raw".
    """
    known, protocol = PROTOCOLS[options.protocol], options.protocol
    limits = {"max_turns": 10, "max_turn_tokens": known.turn_tokens, "max_context": 8192, "max_passage_tokens": 1024}
    made = baseline(
        "released",
        options,
        (),
        partial(follow, protocol=protocol),
        prompt=protocol,
        k=5,
        rollout=limits,
        reward=partial(released_reward, protocol=protocol),
        answer=partial(answer_of, protocol=protocol),
        searches=True,
    )
    made = replace(made, tags=known.tags)
    return over_given(made) if options.over == "given" else made


def follow(question: Question, config: EpisodeConfig, protocol: Name) -> Episode:
    known = PROTOCOLS[protocol]
    opening, closing = known.query
    yield Prompt(config.template, question.question)
    written: list[TextSegment] = []
    for searches_left in reversed(range(config.max_turns)):
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
    """Return the answer in the policy's text; None if there is none."""
    known = PROTOCOLS[protocol]
    if known.answer_tag:
        answer = final_answer(pieces)
    else:
        written = (piece.text.decode("utf-8", "replace") for piece in pieces if piece.source is Source.POLICY)
        return next(filter(None, map(last_boxed, reversed(list(written)))), None)
    return last_boxed(answer or "") if known.boxed else answer


def last_boxed(text: str) -> str | None:
    """Return the text of the last closed \\boxed{..}, without a \\text{..} around it; None if there is none."""
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
    """Return the exact match of the answer in the form of the protocol."""
    return reward_of(answer_of(attempt, protocol), attempt)
