"""What both sides of `thresher bench step` start from: the shape of a step, one model, the same prompts, one reward.

The model is the demo's Qwen2 with random weights, the vocabulary is trained on an invented world, and a prompt is made
of that world's facts. Nothing here knows which side steps.

Deliberately absent: an end of text in the model's config, so that every sample has its full length.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.resources import files

from thresher.engine.synthetic.random_model import END_OF_TEXT, ROUND
from thresher.engine.synthetic.world import Size, invent, passages, questions
from thresher.policy.config import config_from_dict
from thresher.policy.model import Policy, init_policy
from thresher.policy.tokenizer import Tokenizer, train_bpe
from thresher.retrieval.questions import Question


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """What a step consists of. Lengths in tokens; a prompt has at least `prompt` and few more."""

    questions: int = 16
    group: int = 8
    prompt: int = 56
    completion: int = 64
    beta: float = 0.02
    lr: float = 1e-5
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Seconds:
    """One step's clock."""

    rollout: float
    total: float

    @property
    def update(self) -> float:
        return self.total - self.rollout


@dataclass(frozen=True, slots=True)
class Setting:
    """What both sides start from. The policy's config has no end of text, so that every sample has its full length."""

    shape: StepShape
    tokenizer: Tokenizer
    policy: Policy
    questions: list[Question]

    @property
    def prompts(self) -> list[list[int]]:
        return [self.tokenizer.encode(question.question) for question in self.questions]

    @property
    def rollout_tokens(self) -> int:
        return self.shape.questions * self.shape.group * self.shape.completion

    @property
    def update_tokens(self) -> int:
        return self.rollout_tokens + self.shape.group * sum(map(len, self.prompts))


def make_setting(shape: StepShape) -> Setting:
    """The demo's model and vocabulary, and prompts made of facts of an invented world with a question at the end."""
    world = invent(Size(warmup_worlds=0), shape.seed).train
    facts_of_world = [passage.text for passage in passages([world], shape.seed)]
    tokenizer = train_bpe(facts_of_world, 800, [END_OF_TEXT])
    config = json.loads((files("thresher.recipes") / "demo" / "config.json").read_text(encoding="utf-8"))
    config["vocab_size"] = -(-tokenizer.vocab_size // ROUND) * ROUND
    policy = init_policy(config_from_dict(config, "the demo's config.json").replace(eos_token_ids=()), shape.seed)
    rng = random.Random(shape.seed)

    def lengthened(question: Question) -> Question:
        text = question.question
        while len(tokenizer.encode(text)) < shape.prompt:
            text = f"{rng.choice(facts_of_world)}\n{text}"
        return replace(question, question=text)

    asked = questions(world, shape.questions, 0.67, shape.seed, "bench")
    return Setting(shape, tokenizer, policy, [lengthened(question) for question in asked])


def reward_of(ids: Sequence[int]) -> float:
    """The share of odd ids: cheap, and different enough within a group to give every sample an advantage."""
    return sum(token % 2 for token in ids) / len(ids)
