"""Iter-RetGen (Shao et al. 2023): retrieve, generate, and retrieve again with what was generated.

    iteration 1: documents for (question)                   -> thoughts and an answer y1
    iteration t: documents for (question, y of t - 1)       -> thoughts and an answer yt

Every iteration but the last is a call: it sees the question and its own documents, nothing of the one before. The last
one is written in the trajectory, in the same form, and holds the answer. Tags are left out of a query.

Preset: 3 documents; 3 iterations [assumed].
"""

import re
from dataclasses import dataclass
from functools import partial

from thresher.engine.baselines import common
from thresher.engine.baselines.common import answer_reward, built_in
from thresher.engine.config.tables import Count
from thresher.engine.episode import (
    BranchPrompt,
    Episode,
    EpisodeConfig,
    Generate,
    Prompt,
    Retrieved,
    Search,
    SubCall,
    System,
    pair_tags,
)
from thresher.engine.systems.search_r1 import AFTER, BEFORE
from thresher.retrieval.questions import Question

TAGS = pair_tags("think", "information", "answer")


@dataclass(frozen=True, kw_only=True)
class Options(common.Options):
    """iterations: of retrieval and generation; 1 is retrieval for the question alone."""

    iterations: Count = 3


def episode(question: Question, tools: EpisodeConfig, iterations: int) -> Episode:
    prompt = Prompt(tools.template, question.question)
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
    return " ".join(re.sub("|".join(TAGS), " ", text.decode("utf-8", "replace")).split())


def system(options: Options) -> System:
    return System(
        name="iter_retgen",
        tags=TAGS,
        episode=partial(episode, iterations=options.iterations),
        reward=answer_reward,
        template=built_in("iter_retgen", options),
        preset={"retrieval": {"k": 3}, "rollout": {"max_turns": 1}},
    )
