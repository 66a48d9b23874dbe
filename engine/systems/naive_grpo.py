"""Naive GRPO, ARENA's baseline: think and answer in one pass; the reward is format plus exact match.

    question, passages  ->  <think>..</think> <answer>..</answer>

    reward = format + EM(answer, golds)        format: 1 if both sections are in order, with nothing around them

With `passages` off the prompt has only the question; the corresponding baseline of the search papers is `r1`.

Preset: ARENA's (arena.py), except for the KL, which is k3.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from thresher.engine.episode import (
    System,
    answer_once,
    answer_without_passages,
    pair_tags,
    read_preset,
    read_template,
)
from thresher.engine.systems import search_r1
from thresher.rewards.papers.arena import naive_reward


@dataclass(frozen=True, kw_only=True)
class Options:
    """passages: the prompt shows passages; if off, the template has no placeholder for them."""

    passages: bool = True


def system(options: Options) -> System:
    template = "naive_grpo.txt" if options.passages else "naive_grpo_closed.txt"
    return System(
        name="naive_grpo",
        tags=pair_tags("think", "answer"),
        episode=answer_once if options.passages else answer_without_passages,
        reward=naive_reward,
        template=read_template(Path(__file__).with_name(template), passages=options.passages),
        preset=read_preset(Path(__file__).with_suffix(".toml")),
        given_passages=options.passages,
    )


@dataclass(frozen=True, kw_only=True)
class R1Options:
    """R1 has no switches."""


def r1(options: R1Options) -> System:
    """Make R1, the search papers' baseline: GRPO on questions alone, without passages and without searches.

    Prompt and episode are those of naive_grpo with `passages` off; reward, EM(answer, golds), and preset are
    Search-R1's (eps .2, G 5, lr 1e-6, k3 with beta 1e-3, 512 questions per step in two updates of 256), so the two
    differ only by the searches. ARENA's baseline of this kind is naive_grpo itself.
    """
    preset = read_preset(Path(__file__).with_name("r1.toml"))
    return replace(system(Options(passages=False)), name="r1", reward=search_r1.reward, preset=preset)
