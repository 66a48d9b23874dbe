"""Search-R1 (Jin et al. 2025): think, search, read, answer; the reward is exact match alone.

    <think>..</think> <search>query</search>  ->  <information>passages</information>  ->  ..  ->  <answer>..</answer>

A turn ends at </search> or </answer>. Of `max_turns` turns the last may only answer (the paper: 4 searches, then that
one); with `answer_after_searches` off the trajectory ends before it. A turn that neither searches nor answers counts as
a turn and gets a line of feedback.

    reward = EM(answer, golds)

Preset: eps .2, G 5, lr 1e-6, k3 with beta 1e-3, 512 questions per step in two updates of 256, lr warm-up over .285 of
the steps (its script), turns of 500 tokens (its script), 2,048 for all [assumed]. Retrieved tokens are outside the loss
because of their source; there is no separate mask.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from thresher.engine.episode import (
    Episode,
    EpisodeConfig,
    Feedback,
    Generate,
    Prompt,
    Retrieved,
    Search,
    System,
    Tool,
    pair_tags,
    read_preset,
    read_template,
)
from thresher.retrieval.questions import Question
from thresher.rewards.papers.search import search_r1_reward
from thresher.rewards.reward import RewardInput, RewardResult

BEFORE, AFTER = "\n\n<information>", "</information>\n\n"
INVALID = (
    "\nThat was no valid action. Search with a query between search tags, or answer between answer tags. Try again.\n"
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """answer_after_searches: there is a last turn that may only answer; off: the trajectory ends before it."""

    answer_after_searches: bool = True


def search_loop(
    question: Question,
    config: EpisodeConfig,
    answer_after_searches: bool = True,
    behind_information: str | None = None,
    around: tuple[str, str] = (BEFORE, AFTER),
    tool: str | None = None,
) -> Episode:
    """Yield the requests of Search-R1's episode, and of systems that differ from it only in the tags inside a turn.

    behind_information: an uncounted turn up to this tag, or to an answer, follows the passages. around: text before and
    after the passages. tool: name of a tool that is called with the query in place of a search.
    """
    yield Prompt(config.template, question.question)
    for searches_left in reversed(range(config.max_turns)):
        if searches_left == 0 and not answer_after_searches:
            break
        turn = yield Generate(stop=("</search>", "</answer>"))
        if turn.stopped_at("</answer>") and turn.inside("answer"):
            return "answered"
        if searches_left == 0:
            break
        if turn.stopped_at("</search>") and (query := turn.inside("search")):
            found = yield (Search(query) if tool is None else Tool(tool, {"query": query}))
            yield Retrieved(found if tool is None else found.text, *around)
            if behind_information is not None:
                turn = yield Generate(stop=(behind_information, "</answer>"))
                if turn.stopped_at("</answer>") and turn.inside("answer"):
                    return "answered"
        else:
            yield Feedback(INVALID)
    return "turns"


def reward(attempt: RewardInput) -> RewardResult:
    return search_r1_reward(attempt.pieces, attempt.golds)


def system(options: Options) -> System:
    return System(
        name="search_r1",
        tags=pair_tags("think", "search", "information", "answer"),
        episode=partial(search_loop, answer_after_searches=options.answer_after_searches),
        reward=reward,
        template=read_template(Path(__file__).with_name("search_r1.txt")),
        preset=read_preset(Path(__file__).with_suffix(".toml")),
    )
