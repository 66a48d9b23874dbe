"""What both sides of `thresher bench step` start from: one model, the same prompts, one reward.

Nothing here knows which side steps.

Deliberately absent: an end of text in the model's config, so that every sample has its full length.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from thresher.bench.decode.run import UNDRAWN, random_policy
from thresher.bench.rollout.setting import RolloutSetting, invented_facts, make_rollout_setting, text_of
from thresher.bench.roofline.models import MODELS
from thresher.bench.step.shapes import StepShape


@dataclass(frozen=True, slots=True)
class Seconds:
    """One step's clock: wall seconds, and CPU seconds of all of the process's threads."""

    rollout: float
    total: float
    rollout_cpu: float = 0.0
    total_cpu: float = 0.0

    @property
    def update(self) -> float:
        return self.total - self.rollout

    @property
    def update_cpu(self) -> float:
        return self.total_cpu - self.rollout_cpu


@dataclass(slots=True)
class Steps:
    """Everybody's steps on the clock, and where the time of our rollouts went."""

    shared: list[Seconds] = field(default_factory=list)
    unshared: list[Seconds] = field(default_factory=list)
    peer: list[Seconds] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)
    asked: int = 0
    computed: int = 0


@dataclass(frozen=True, slots=True)
class Setting:
    """The model, the texts of our side, and prompts for a peer of one turn, which hold as many tokens as ours and its
    passages together."""

    shape: StepShape
    rollout: RolloutSetting
    peer_prompts: list[str]

    @property
    def device(self) -> torch.device:
        return self.rollout.policy.device

    def peer_ids(self) -> list[list[int]]:
        return [self.rollout.tokenizer.encode(text) for text in self.peer_prompts]


def make_setting(shape: StepShape, device: torch.device | None = None) -> Setting:
    """A function of the shape, its seed included."""
    lengths, device = shape.lengths, device or torch.device("cpu")
    if shape.model is None:
        rollout = make_rollout_setting(lengths, device)
    else:
        config = MODELS[shape.model]
        policy = random_policy(config, device, torch.bfloat16)
        rollout = make_rollout_setting(lengths, device, policy, config.vocab_size - UNDRAWN)
    if shape.peer_prompt == lengths.prompt:
        prompts = rollout.questions
    else:
        rng, facts = random.Random(lengths.seed), invented_facts(lengths.seed)
        prompts = [text_of(shape.peer_prompt, facts, rollout.tokenizer, rng) for _ in range(lengths.questions)]
    return Setting(shape, rollout, prompts)


def reward_of(ids: Sequence[int]) -> float:
    """The share of odd ids: cheap, and different enough within a group to give every sample an advantage."""
    return sum(token % 2 for token in ids) / len(ids)
