"""A system whose episodes fold, and end with a trained branch that has its own reward."""

OWN = """
from dataclasses import dataclass

from thresher.engine.episode import (
    BranchPrompt, Fold, Generate, KeptSpan, Prompt, Retrieved, Search, SpawnBranches, System, pair_tags
)
from thresher.rewards.papers.search import search_r1_reward
from thresher.rewards.reward import RewardResult


@dataclass(frozen=True, kw_only=True)
class Options:
    rewarded: bool = True


def system(options):
    def episode(question, config):
        prompt = Prompt(config.template, question.question)
        yield prompt
        end = 0
        for left in reversed(range(config.max_turns)):
            turn = yield Generate(("</search>", "</answer>"))
            start, end = end, end + len(turn.text)
            if turn.stopped_at("</answer>") or not left:
                again = BranchPrompt(prompt, (KeptSpan(0, 9),), ("</answer>",), 12)
                yield SpawnBranches({"again": again}, trained=True)
                return "answered"
            hits = yield Search(turn.inside("search") or "mayor")
            yield Fold(BranchPrompt(prompt, (KeptSpan(start, end),)))
            yield Retrieved(hits, "<information>", "</information>")

    def reward(attempt):
        found = search_r1_reward(attempt.pieces, attempt.golds)
        told = {name: float(len(pieces[1].text)) for name, pieces in attempt.branches.items()}
        return RewardResult(found.reward, found.parts, found.answer, branches=told if options.rewarded else None)

    return System("own", pair_tags("search", "information", "answer"), episode, reward, "{question}")
"""
