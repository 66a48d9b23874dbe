"""Sides in turn on the clock: wall seconds, and CPU seconds of all of this process's threads.

Each round begins one further on, so that nobody always follows the same neighbour. A peer that fails leaves with its
reason, and the others go on; ours does not fail without ending the bench.

Deliberately absent: memory, which `thresher bench loss` measures for the part where it decides.
"""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from thresher.bench.rollout.ours import Work


class Side(Protocol):
    """Somebody who can play a round."""

    @property
    def name(self) -> str: ...

    def run(self) -> Work: ...


@dataclass(frozen=True, slots=True)
class Round:
    """One side's round."""

    wall: float
    cpu: float
    work: Work


@dataclass(slots=True)
class Rounds:
    """Everybody's rounds, ours first; and why a peer has none."""

    ours: list[Round] = field(default_factory=list)
    peers: dict[str, list[Round]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def fail(self, peer: str, error: Exception) -> None:
        text = " ".join(str(error).split()) or "no message"
        self.failures[peer] = f"{type(error).__name__}: {text[:200]}"
        self.peers.pop(peer, None)


def timed(side: Side) -> Round:
    """One round. What it wrote is dropped: the proof has seen its like."""
    gc.collect()
    wall, cpu = time.perf_counter(), time.process_time()
    work = side.run()
    seconds = time.perf_counter() - wall, time.process_time() - cpu
    work.written.clear()
    return Round(*seconds, work)


def take_turns(ours: Side, peers: Sequence[Side], rounds: int, deadline: float, into: Rounds) -> None:
    """Up to `rounds` of each, at least one, as long as another fits before `deadline` (time.monotonic)."""
    into.peers.update({peer.name: [] for peer in peers})
    longest = 0.0
    for first in range(rounds):
        started = time.monotonic()
        if first and started + longest > deadline:
            break
        sides = [ours, *(peer for peer in peers if peer.name in into.peers)]
        for place in range(len(sides)):
            side = sides[(first + place) % len(sides)]
            if side is ours:
                into.ours.append(timed(side))
                continue
            try:
                into.peers[side.name].append(timed(side))
            except Exception as error:  # whatever a peer's library may raise
                into.fail(side.name, error)
        longest = max(longest, time.monotonic() - started)
