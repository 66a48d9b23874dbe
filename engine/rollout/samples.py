"""What a rollout keeps of each sample while it runs: records without decisions, which are rollout.py's."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from thresher.engine.episode import Episode, Reprefill
from thresher.engine.protocol.trajectory import Segment, Trajectory
from thresher.engine.rollout.kv_cache import BlockTable
from thresher.retrieval.questions import Question


@dataclass(frozen=True, slots=True)
class Job:
    """One sample to draw: jobs with the same `group` answer the same question and share its prompt."""

    question: Question
    group: int
    sample: int
    seed: int


@dataclass(slots=True)
class Sample:
    """A running sample."""

    job: Job
    episode: Episode
    trajectory: Trajectory
    table: BlockTable
    pending: list[int] = field(default_factory=list)  # known tokens that are not in the cache yet
    turn: Segment | None = None  # the turn being written
    stop: tuple[str, ...] = ()
    matcher_state: int = 0
    policy_tokens: int = 0
    length: int = 0
    hidden_H: torch.Tensor | None = None  # of the last token, once nothing is pending
    forks: dict[str, tuple[Reprefill, list[int]]] = field(default_factory=dict)  # branches, with their contexts


@dataclass(slots=True)
class PrefillGroup:
    """What the samples of one question share: the prompt, its blocks, and the hidden state of its last token."""

    ids: list[int]
    jobs: list[Job]
    begin: Callable[[Job], Episode]  # a sample's episode, whose first request is the prompt
    table: BlockTable = field(default_factory=BlockTable)
    hidden_H: torch.Tensor | None = None
