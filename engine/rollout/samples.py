"""What a rollout keeps of each sample while it runs: records without decisions, which are rollout.py's."""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from thresher.engine.episode import Episode, Reprefill
from thresher.engine.protocol.trajectory import Segment, Trajectory
from thresher.engine.rollout.blocks import BlockPool, BlockTable
from thresher.engine.rollout.kv_cache import NewRows
from thresher.retrieval.questions import Question

CHUNK = 1024  # a longer input enters the cache in several forwards, cut at multiples of this from its own start


@dataclass(frozen=True, slots=True)
class Job:
    """One sample to draw: jobs with the same `group` answer the same question and share its prompt."""

    question: Question
    group: int
    sample: int
    seed: int


@dataclass(slots=True)
class Live:
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
class Opening:
    """What the samples of one question share: the prompt, its pages, and the hidden state of its last token."""

    ids: list[int]
    jobs: list[Job]
    begin: Callable[[Job], Episode]  # a sample's episode, whose first request is the prompt
    table: BlockTable = field(default_factory=BlockTable)
    hidden_H: torch.Tensor | None = None


@dataclass(slots=True)
class Feed:
    """What enters the cache in one forward, and whose it is."""

    pool: BlockPool
    items: list[NewRows] = field(default_factory=list)
    owners: list[Live | Opening] = field(default_factory=list)
    page_copies: list[tuple[int, int]] = field(default_factory=list)

    def add(self, owner: Live | Opening, table: BlockTable, ids: list[int]) -> list[int]:
        """Feed the first chunk of `ids`, making room for it; returns the rest, for the next forward."""
        chunk, start = ids[:CHUNK], table.length
        self.page_copies.extend(self.pool.extend(table, len(chunk)))
        self.items.append(NewRows(chunk, start, table.blocks))
        self.owners.append(owner)
        return ids[CHUNK:]
