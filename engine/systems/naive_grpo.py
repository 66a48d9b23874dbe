"""Naive GRPO, ARENA's baseline: think and answer in one pass, rewarded by format and exact match.

    question, passages  ->  <think>..</think> <answer>..</answer>

    reward = format + EM(answer, golds)        format: 1 where both sections stand in order, with nothing around them

With `passages` off the question stands alone; the search papers' baseline of that kind is r1.py.

Preset: ARENA's (arena.py), but for the KL, which is k3.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from thresher.engine.episode import Episode, EpisodeConfig, Generate, Prompt, System, pair_tags, read_template
from thresher.retrieval.questions import Question
from thresher.rewards.papers.naive import naive_reward


@dataclass(frozen=True, kw_only=True)
class Options:
    """passages: the prompt shows them. Off, the template has no place for them."""

    passages: bool = True


def episode(question: Question, tools: EpisodeConfig, options: Options) -> Episode:
    yield Prompt(tools.template, question.question, question.passages if options.passages else ())
    turn = yield Generate(stop=("</answer>",))
    return "answered" if turn.stopped_at("</answer>") and turn.inside("answer") else "ended"


def system(options: Options) -> System:
    template = "naive_grpo.txt" if options.passages else "naive_grpo_closed.txt"
    return System(
        name="naive_grpo",
        tags=pair_tags("think", "answer"),
        episode=partial(episode, options=options),
        reward=naive_reward,
        template=read_template(Path(__file__).with_name(template), passages=options.passages),
        preset={
            "retrieval": {"k": 10},
            "rollout": {
                "group_size": 7,
                "questions_per_step": 256,
                "max_turns": 1,
                "max_turn_tokens": 256,
                "max_context": 4096,
                "max_passage_tokens": 3072,
                "temperature": 0.9,
            },
            "grpo": {"clip_low": 0.2, "clip_high": 0.2, "kl_value": "k3", "beta": 4e-2},
            "optim": {"lr": 3e-6, "warmup_ratio": 0.1, "schedule": "cosine"},
        },
        given_passages=options.passages,
    )
