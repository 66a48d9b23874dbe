"""What a rollout keeps of each sample while it runs: records without decisions, which are rollout.py's; and how a
sample comes by its seed."""

from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np

from thresher.engine.decoding.decoder import DecodeClock
from thresher.engine.decoding.scheduler import TokenSequence
from thresher.engine.decoding.speculative import TURN_END, Int32s
from thresher.engine.episode import Episode, Reprefill
from thresher.engine.protocol.trajectory import Trajectory
from thresher.retrieval.questions import Question
from thresher.rewards.transcript import Source


@dataclass(frozen=True, slots=True)
class Job:
    """One sample to draw: jobs with the same `group` answer the same question and share its prompt."""

    question: Question
    group: int
    sample: int
    seed: int


def seed_of(*parts: object) -> int:
    """63 bits that depend on all parts, the same on every machine."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


def ids_by_turns(trajectory: Trajectory) -> Int32s:
    """A trajectory's ids, with the ends of its turns."""
    ids: list[int] = []
    for segment in trajectory.segments:
        ids += segment.ids
        if segment.source is Source.POLICY:
            ids.append(TURN_END)
    return np.array(ids, np.int32)


@dataclass(slots=True)
class RolloutClock(DecodeClock):
    """Where the time of a rollout went, in seconds, and how much was done. cut_search_tokens: of retrieved passages,
    beyond the budget of a search."""

    search: float = 0.0
    search_queries: int = 0
    search_calls: int = 0
    cut_search_tokens: int = 0
    branches: int = 0
    branches_without_room: int = 0

    @property
    def rest(self) -> float:
        """As of a decoder, and not spent in searches; 0 where a search passed while the GPU was decoding."""
        return max(self.total - self.decode - self.prefill - self.search, 0.0)


@dataclass(slots=True)
class Sample:
    """A sample that is under way. Its sequence is what the decoder knows of it."""

    job: Job
    episode: Episode
    trajectory: Trajectory
    sequence: TokenSequence
    policy_tokens: int = 0
    max_tokens: int | None = None  # of the turn, where its episode says so
    forks: dict[str, tuple[Reprefill, list[int]]] = field(default_factory=dict)  # branches, with their contexts
    reported: bool = True  # to whoever watches; a branch is not
    calls: int = 0
    caller: "tuple[Sample, str] | None" = None  # who waits for it, and its name there
