"""A system whose episodes call a tool, and that tool, in one file."""

# The tool's result depends on how often it was called, so that a run repeats from its record alone.
LOOKING = """
import itertools
from dataclasses import dataclass

from thresher.engine.episode import Generate, Prompt, Retrieved, System, Tool, pair_tags
from thresher.rewards.papers.search import search_r1_reward

NAMES, COUNT = ["Anna Bell", "Carl Dorn", "Eva Frost"], itertools.count()


def look(query):
    number = next(COUNT)
    if number % 4 == 3:
        raise LookupError(query)
    return f"{number}: {query} is {NAMES[number % 3]}."


@dataclass(frozen=True)
class Options:
    pass


def episode(question, config):
    yield Prompt(config.template, question.question)
    for _ in range(config.max_turns):
        turn = yield Generate(stop=("</search>", "</answer>"))
        if turn.stopped_at("</answer>"):
            return "answered"
        result = yield Tool("look", {"query": turn.inside("search") or question.id})
        yield Retrieved(result.text, "<result>", "</result>")
    return "turns"


def system(options):
    tags = pair_tags("search", "result", "evaluate", "answer")
    reward = lambda attempt: search_r1_reward(attempt.pieces, attempt.golds)
    return System("looking", tags, episode, reward, "{question}", tools=("look",))
"""
