"""Common code of the baselines: the reward, EM(answer, golds), and their prompts with examples before them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from thresher.common.errors import UserError
from thresher.common.files import read_text
from thresher.engine.episode import (
    BranchPrompt,
    Episode,
    Prompt,
    SubCall,
    System,
    pair_tags,
    read_template,
)
from thresher.retrieval.passages import Passage
from thresher.rewards.measures import answer_measures
from thresher.rewards.reward import RewardInput, RewardResult, TextSegment
from thresher.rewards.tags import final_answer

# The request for the answer in this folder's templates, and the same without tags (engine/training/sft_data.py).
TAGGED = (
    "Give the answer between <answer> and </answer>, in a few words and without any explanation, "
    "for example <answer> Lisbon </answer>."
)
BARE = "Give the answer alone, in a few words and without any explanation, for example Lisbon."


@dataclass(frozen=True, kw_only=True)
class Options:
    """examples: a text file of worked examples, put before the built-in prompt with a blank line between."""

    examples: str | None = None


Over = Literal["index", "given"]  # source of searches: an index or server, or the question's own passages


def answer_reward(attempt: RewardInput) -> RewardResult:
    """Return the exact match of the final answer. Parts: answer (the reward), em, f1 (a measure), answered."""
    return reward_of(final_answer(attempt.pieces), attempt)


def reward_of(answer: str | None, attempt: RewardInput) -> RewardResult:
    measures = answer_measures(answer, attempt.golds)
    reward = float(measures["em"])
    return RewardResult(reward, {"answer": reward, **measures}, answer)


def reader_call(question: str, passages: Sequence[Passage]) -> SubCall:
    """Return a call that answers a question from passages, with the prompt of naive RAG."""
    template = read_template(Path(__file__).with_name("passages.txt"), passages=True)
    return SubCall(BranchPrompt(Prompt(template, question, passages), (), ("</answer>",)))


def calls(attempt: RewardInput) -> list[Sequence[TextSegment]]:
    """Return the transcripts of the attempt's calls, in order."""
    numbered = {int(name.removeprefix("call ")): pieces for name, pieces in attempt.branches.items() if "call " in name}
    return [pieces for _, pieces in sorted(numbered.items())]


def called_answer(attempt: RewardInput) -> str | None:
    """Return the final answer of the last call."""
    return final_answer(called[-1]) if (called := calls(attempt)) else None


def called_answer_reward(attempt: RewardInput) -> RewardResult:
    """Return the same reward as answer_reward, for the answer of the last call."""
    return reward_of(called_answer(attempt), attempt)


def built_in(name: str, options: Options, passages: bool = False) -> str:
    """Return the template `name`.txt next to this file, after the examples if there are any."""
    return with_examples(read_template(Path(__file__).with_name(f"{name}.txt"), passages), options)


def with_examples(template: str, options: Options) -> str:
    """Return the template after the examples. UserError for unreadable examples or examples with a placeholder."""
    if options.examples is None:
        return template
    examples = read_text(options.examples).rstrip()
    for place in ("{question}", "{passages}"):
        if place in examples:
            raise UserError(
                f"{options.examples}: examples must not contain {place}; write their questions and passages out"
            )
    return f"{examples}\n\n{template}"


def baseline(
    name: str,
    options: Options,
    tags: Sequence[str],
    episode: Callable[..., Episode],
    *,
    prompt: str | None = None,
    given: int | None = None,
    shows: bool = False,
    k: int | None = None,
    rollout: Mapping[str, Any] | None = None,
    **more: Any,
) -> System:
    """Return a System whose reward is the exact match of its final answer, unless `more` has another.

    tags: names of tag pairs. prompt: name of the template, if it is not `name`. given: the prompt shows the question's
    passages, or this number of retrieved ones if it has none. shows: the prompt shows other passages. k: passages per
    search. rollout: that section of the preset.
    """
    room = {"max_passage_tokens": 3072} if given is not None else {}
    passages = given if given is not None else k
    preset: dict[str, dict[str, Any]] = {} if passages is None else {"retrieval": {"k": passages}}
    return System(
        name=name,
        tags=pair_tags(*tags),
        episode=episode,
        template=built_in(prompt or name, options, passages=shows or given is not None),
        preset=preset | {"rollout": {"max_turns": 1} | room | dict(rollout or {})},
        given_passages=given is not None,
        **{"reward": answer_reward} | more,
    )
