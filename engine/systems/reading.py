"""Reading, the simplest task: a question with its passages, and a short answer, without tags and without reasoning.

    question, passages  ->  answer

    reward = (F1(answer, golds) + EM(answer, golds)) / 2

The answer is the whole reply, up to the control token that ends it. This is no paper's method, but a task that a small
pretrained model can learn within an hour on a CPU (recipes/smollm2/read.toml).
"""

from dataclasses import dataclass
from pathlib import Path

from thresher.engine.episode import Episode, EpisodeConfig, Generate, Prompt, System, read_preset, read_template
from thresher.retrieval.questions import Question
from thresher.rewards.measures import answer_measures
from thresher.rewards.reward import RewardInput, RewardResult


@dataclass(frozen=True, kw_only=True)
class Options:
    """Reading has no switches."""


def episode(question: Question, config: EpisodeConfig) -> Episode:
    yield Prompt(config.template, question.question, question.passages)
    yield Generate(stop=())
    return "answered"


def reply(attempt: RewardInput) -> str | None:
    """Return the answer: the policy's whole text without the control token at its end; None if it is empty."""
    return attempt.text.strip() or None


def reward(attempt: RewardInput) -> RewardResult:
    answer = reply(attempt)
    measures = answer_measures(answer, attempt.golds)
    return RewardResult((measures["f1"] + measures["em"]) / 2, measures, answer)


def system(options: Options) -> System:
    return System(
        name="reading",
        tags=(),
        episode=episode,
        reward=reward,
        template=read_template(Path(__file__).with_name("reading.txt"), passages=True),
        preset=read_preset(Path(__file__).with_suffix(".toml")),
        given_passages=True,
        answer=reply,
    )
