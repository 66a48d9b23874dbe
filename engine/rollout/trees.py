"""Rollouts as trees: samples that continue from the end of another's turn (Tree-GRPO, Ji et al. 2025, 2509.21240).

Each of the M trees of a question begins as one sample. In each of L rounds N of its nodes are drawn, and from each of
them another sample continues independently to its end. This gives M (1 + N L) samples, which are the leaves. A node is
the prompt, or the end of a turn that another turn followed. Nodes are drawn uniformly and with replacement, as in the
paper's code, by (seed of the tree's first sample, round). A round begins when all samples of its tree so far have
ended.

An episode is a generator and cannot be copied. A sample that continues from a node has a new generator of the same
episode, to which the values are sent that the first one received up to the node. An episode therefore has to be a
function of these values; `replay` compares its requests.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from operator import attrgetter
from random import Random
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from thresher.common.errors import UserError
from thresher.engine.decoding.scheduler import SharedPrompt
from thresher.engine.episode import Episode, Request

J = TypeVar("J", bound="Seeded")  # a job
S = TypeVar("S")  # a sample in progress
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class TreeShape:
    """Shape of the trees of a question. trees: number of trees, M. nodes: nodes that each expands per round, N."""

    trees: int
    nodes: int


class Exchange(NamedTuple):
    """A value that was sent to an episode, and a digest of the request that the episode then yielded."""

    sent: object
    request: bytes


@dataclass(frozen=True, eq=False)
class Node(Generic[S]):
    """A point from which samples may continue: after `turns` turns of the sample number `sample`. state: copy of that
    sample. prompt: ids of its context there. exchanges: all exchanges with its episode until then."""

    sample: int
    turns: int
    state: S
    prompt: SharedPrompt
    exchanges: Sequence[Exchange] = ()


@dataclass(slots=True, eq=False)
class Tree(Generic[J, S]):
    """Tree of samples. seed: seed of the first sample. rounds: jobs of each round to come. playing: number of samples
    that have not ended."""

    seed: int
    rounds: list[list[J]]
    nodes: list[Node[S]] = field(default_factory=list)
    playing: int = 1
    round: int = 0

    def end_sample(self) -> list[tuple[J, Node[S]]]:
        """Record that a sample has ended. If the next round begins now, return its jobs, each with its node."""
        self.playing -= 1
        if self.playing or not self.rounds:
            return []
        jobs, self.round = self.rounds.pop(0), self.round + 1
        self.playing = len(jobs)
        nodes = sorted(self.nodes, key=attrgetter("sample", "turns"))
        return list(zip(jobs, Random(f"{self.seed} tree {self.round}").choices(nodes, k=len(jobs)), strict=True))


@dataclass(slots=True, eq=False)
class Growth(Generic[J, S]):
    """Data for samples that continue from this one: its tree, and the exchanges with its episode."""

    tree: Tree[J, S]
    exchanges: list[Exchange] = field(default_factory=list)

    def send(self, episode: Episode, reply: object) -> Request:
        """Send a reply to the episode and return its request; record both for other samples."""
        kept = copy(reply)  # because the episode may modify the reply
        request = episode.send(reply)
        self.exchanges.append(Exchange(kept, _digest(request)))
        return request


class Seeded(Protocol):
    @property
    def seed(self) -> int: ...


def plant(jobs: Sequence[J], shape: TreeShape) -> list[tuple[J, Tree[J, Any]]]:
    """Split a question's jobs. The first jobs begin trees and are returned with them; the rest are distributed over the
    trees, `shape.nodes` to each per round."""
    firsts, rest = jobs[: shape.trees], jobs[shape.trees :]
    rounds = range(0, len(rest), shape.trees * shape.nodes)
    return [
        (job, Tree(job.seed, [list(rest[at + tree * shape.nodes :][: shape.nodes]) for at in rounds]))
        for tree, job in enumerate(firsts)
    ]


def replay(episode: Episode, exchanges: Sequence[Exchange], system: str) -> Request | None:
    """Bring a new episode to the state of another; return the request that it waits with, None at its beginning.
    UserError if it makes another request."""
    request: Request | None = None
    next(episode)
    for exchange in exchanges:
        try:
            request = episode.send(copy(exchange.sent))
        except StopIteration:
            request = None
        if request is None or _digest(request) != exchange.request:
            raise UserError(
                f"{system}: the episode requested something else when it was sent the same again, so no other sample "
                "can continue from its turns; make it a function of what it is sent, or set rollout.trees = 0"
            )
    return request


def copied(record: R, **changes: Any) -> R:
    """Return a copy of a dataclass with copied lists and dictionaries, and with these changes."""
    values = {each.name: getattr(record, each.name) for each in fields(record)}  # type: ignore[arg-type]
    own = {name: copy(value) for name, value in values.items() if isinstance(value, list | dict)}
    return replace(record, **own | changes)  # type: ignore[type-var]


def _digest(request: Request) -> bytes:
    return blake2b(repr(request).encode(errors="surrogatepass"), digest_size=16).digest()
