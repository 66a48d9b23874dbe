"""SuRe (Kim et al. 2024): candidate answers, a summary of the passages for each, and the candidate whose summary holds.

    question, passages  ->  <candidates>one a line</candidates>
    for each candidate  ->  call: a summary of the passages that argues for it
                            call: does the summary support it?            v = 1 for yes, else 0
    for each two        ->  two calls, in both orders: which summary says more about the question?
                            r = the share of its comparisons that a candidate's summary wins
    answer = the candidate with the largest v + r, the first of equals

A call's verdict is the text of its <verdict>, yes or no, 1 or 2; another counts for nobody [assumed]. The answer is a
candidate, so the reward reads it from what the policy wrote and from the calls. Preset: 2 candidates, 5 passages where
a question brings none [assumed].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from pathlib import Path

from thresher.engine.baselines import common
from thresher.engine.baselines.common import built_in, calls, reward_of
from thresher.engine.config.tables import Count
from thresher.engine.episode import (
    BranchPrompt,
    Episode,
    EpisodeConfig,
    Generate,
    Prompt,
    SubCall,
    System,
    Turn,
    pair_tags,
    read_template,
)
from thresher.retrieval.questions import Question
from thresher.rewards.attempt import RewardInput
from thresher.rewards.result import RewardResult
from thresher.rewards.tags import blocks
from thresher.rewards.transcript import TextSegment

SUMMARY = read_template(Path(__file__).with_name("sure_summary.txt"), passages=True)
VALIDITY, RANKING = (read_template(Path(__file__).with_name(f"sure_{name}.txt")) for name in ("validity", "ranking"))


@dataclass(frozen=True, kw_only=True)
class Options(common.Options):
    """candidates: at most so many of those that were written."""

    candidates: Count = 2


def episode(question: Question, tools: EpisodeConfig, most: int) -> Episode:
    yield Prompt(tools.template, question.question, question.passages)
    turn = yield Generate(stop=("</candidates>",))
    candidates = listed(turn.inside("candidates"), most)
    if len(candidates) < 2:
        return "answered" if candidates else "ended"
    summaries = []
    for candidate in candidates:
        about = f"{question.question}\n\nCandidate answer: {candidate}"
        read: Turn = yield SubCall(BranchPrompt(Prompt(SUMMARY, about, question.passages), (), ("</support>",)))
        summaries.append(read.inside("support") or "none was written")
    for candidate, summary in zip(candidates, summaries, strict=True):
        about = f"{question.question}\n\nCandidate answer: {candidate}\n\nSummary: {summary}"
        yield SubCall(BranchPrompt(Prompt(VALIDITY, about), (), ("</verdict>",)))
    for one, other in permutations(summaries, 2):
        about = f"{question.question}\n\nSummary 1: {one}\n\nSummary 2: {other}"
        yield SubCall(BranchPrompt(Prompt(RANKING, about), (), ("</verdict>",)))
    return "answered"


def listed(text: str | None, most: int) -> list[str]:
    """The candidates, one a line, without marks of a list and those that were named before."""
    lines = (line.strip().lstrip("-*").strip() for line in (text or "").splitlines())
    return list(dict.fromkeys(line for line in lines if line))[:most]


def chosen(attempt: RewardInput, most: int) -> str | None:
    """The answer; None without candidates, and where a call is missing."""
    spans = blocks(attempt.pieces, "candidates")
    candidates = listed(spans[0].text if spans else None, most)
    if len(candidates) < 2:
        return candidates[0] if candidates else None
    count, said = len(candidates), [verdict(pieces) for pieces in calls(attempt)]
    if len(said) < count + count * count:
        return None
    scores = [float(said[count + number] == "yes") for number in range(count)]
    for (one, other), won in zip(permutations(range(count), 2), said[2 * count :], strict=True):
        if won in ("1", "2"):
            scores[one if won == "1" else other] += 0.5 / (count - 1)
    return candidates[scores.index(max(scores))]


def chosen_reward(attempt: RewardInput, most: int) -> RewardResult:
    """Exact match of the chosen candidate."""
    return reward_of(chosen(attempt, most), attempt)


def verdict(pieces: Sequence[TextSegment]) -> str:
    spans = blocks(pieces, "verdict")
    return spans[0].text.lower().rstrip(".") if spans else ""


def system(options: Options) -> System:
    return System(
        name="sure",
        tags=pair_tags("candidates", "support", "verdict"),
        episode=partial(episode, most=options.candidates),
        reward=partial(chosen_reward, most=options.candidates),
        template=built_in("sure", options, passages=True),
        preset={"retrieval": {"k": 5}, "rollout": {"max_turns": 1, "max_passage_tokens": 3072}},
        given_passages=True,
        answer=partial(chosen, most=options.candidates),
    )
