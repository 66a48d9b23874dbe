"""Admission and preemption of sequences. Pure bookkeeping, no tensors.

The scheduler admits the oldest sequence first, when a slot is free and the pool has room for its tokens. When the pool
is full, the scheduler preempts the youngest running sequence: its tokens are kept and its blocks are freed, which
changes no result. The pool has room for the longest sequence, so the oldest one can always continue and there is no
deadlock. A sequence is skipped while another one is about to compute its prefix; the pool's tree records such blocks.
"""

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from thresher.common.errors import UserError
from thresher.engine.decoding.blocks import BlockPool, Ints, Prefix, RadixNode
from thresher.engine.decoding.stop_tags import Hit


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling settings of a sequence (kernels/sampling.py). Temperature 0 is greedy."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


@dataclass(slots=True, eq=False)
class SharedPrompt:
    """Prompt ids that several sequences share. hidden_H: hidden state of the last token, once it is computed; all
    sequences draw their first token from it. waiting: number of sequences that have not begun. filling: one sequence
    computes the prompt, and the others wait."""

    ids: list[int]
    waiting: int = 0
    filling: bool = False
    hidden_H: "torch.Tensor | None" = None

    @property
    def last_hidden_H(self) -> "torch.Tensor":
        assert self.hidden_H is not None
        return self.hidden_H


@dataclass(slots=True, eq=False)
class TokenSequence:
    """One stream of tokens. `ids` is complete between turns; within a turn, the newest ids are in its slot's arrays.

    stop, room: stop strings and token limit of the turn. finish: why the last turn ended, "stop", "eos" or "length";
    hit: the stop that ended it. prefilled: number of tokens computed for it without being drawn, recomputed ones
    included. earlier: earlier text for the same question, in which drafts are looked up. scored_from: if above 0,
    nothing is drawn, and `logprobs` are those of the ids from there on. keep_at: for such a sequence, the number of ids
    after which the states are kept for others. carried: number of its ids that earlier rollouts have computed. version:
    version of the weights under which it began, if the pool outlives them.
    """

    prompt: SharedPrompt
    seed: int
    draw: SamplingParams
    ids: list[int] = field(default_factory=list)
    most: int | None = None  # largest number of tokens that it can have, if known
    grows: bool = True  # whether it may need more blocks than at its admission
    number: int = -1  # order of submission
    begun: bool = False
    slot: int = -1
    writing: bool = False
    stop: tuple[str, ...] = ()
    room: int = 0
    turn_start: int = 0
    logprobs: list[float] = field(default_factory=list)  # of the turn's tokens
    stop_state: int = 0  # of the stop automaton, while the sequence has no slot
    finish: str = ""
    hit: Hit | None = None
    node: RadixNode | None = None  # its last full node in the pool's tree
    node_end: int = 0  # number of tokens up to that node's end
    unready: list[tuple[RadixNode, int]] = field(default_factory=list)  # nodes that it is about to fill, and their ends
    prefilled: int = 0
    earlier: npt.NDArray[np.int32] | None = None
    drafted: int = 0
    accepted: int = 0
    scored_from: int = 0
    keep_at: int = 0
    carried: int = 0
    version: int = 0

    def __post_init__(self) -> None:
        self.ids = self.ids or list(self.prompt.ids)

    @property
    def turn_ids(self) -> list[int]:
        """Return the ids of the turn that has just ended."""
        return self.ids[self.turn_start :]

    @property
    def unscored(self) -> int:
        """Return the number of log-probs of given ids that are missing; 0 for a sequence that is not scored."""
        return len(self.ids) - self.scored_from - len(self.logprobs) if self.scored_from else 0


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that begins now, with its blocks. The first blocks hold `cached` of its tokens.

    copy: blocks (from, to) to copy before anything is computed, if those tokens end within a block; else None.
    snapshot: snapshot of the states after those tokens, if the model has states and there are such tokens.
    """

    sequence: TokenSequence
    cached: int
    blocks: list[int]
    copy: tuple[int, int] | None
    snapshot: int | None


def start_scheduler(
    num_blocks: int,
    kv_block_size: int,
    longest: int,
    max_running: int,
    reuse: bool = True,
    snapshots: int | None = None,
    kept: BlockPool | None = None,
) -> "Scheduler":
    """Return a scheduler with a new pool, or with `kept`. snapshots: number of snapshots of states; None: the model has
    no states. UserError if a sequence of `longest` tokens does not fit into the pool."""
    pool = kept or BlockPool(num_blocks, kv_block_size, snapshots or 0)
    if pool.blocks_for(longest) > pool.num_free:
        raise UserError(
            f"the KV cache of {pool.num_free * kv_block_size} tokens is too small for a sequence of {longest}; raise "
            "kv_tokens or lower the longest context"
        )
    return Scheduler(pool, max_running, reuse, snapshots is not None)


class Scheduler:
    """Admission of the oldest sequences first, with blocks of the pool. reuse: if off, no sequence uses keys and values
    that another one computed. has_states: the model has layers with states, so that cached keys and values can be used
    only up to a snapshot."""

    def __init__(self, pool: BlockPool, max_running: int, reuse: bool = True, has_states: bool = False) -> None:
        self.pool, self.max_running, self.reuse, self.has_states = pool, max_running, reuse, has_states
        self.running: list[TokenSequence] = []  # by age
        self.waiting: list[TokenSequence] = []  # by age
        self._number = 0

    def submit(self, sequence: TokenSequence) -> None:
        """Queue a sequence: a new one, one that is preempted in its turn, or one that was preempted between two turns
        and now has a turn."""
        if sequence.number < 0:
            sequence.number = self._number
            sequence.prompt.waiting += 1
            self._number += 1
        bisect.insort(self.waiting, sequence, key=attrgetter("number"))

    def admit(self) -> Iterator[Admission]:
        """Admit the sequences that can begin now, and yield each with its blocks."""
        passed: list[TokenSequence] = []
        while self.waiting and len(self.running) < self.max_running and len(passed) < self.max_running:
            sequence = self.waiting[0]
            if sequence.prompt.filling:
                passed.append(self.waiting.pop(0))
                continue
            prefix = self._prefix(sequence)
            blocks = self.pool.blocks_for(len(sequence.ids)) - len(prefix.blocks)
            if prefix.wait:
                passed.append(self.waiting.pop(0))
                continue
            # One more block per sequence that may need one soon; otherwise the next step would have to preempt.
            growing = sum(one.grows for one in self.running)
            idle = int((self.pool.ref_count_P[prefix.blocks] == 0).sum())
            if self.running and self.pool.num_free - idle < blocks + growing:
                break
            held = self.pool.blocks_for(len(sequence.ids))
            sequence.grows = sequence.most is None or self.pool.blocks_for(sequence.most) > held
            self.waiting.pop(0)
            bisect.insort(self.running, sequence, key=attrgetter("number"))
            yield self._begin(sequence, prefix, blocks)
        self.waiting[:0] = passed

    def _begin(self, sequence: TokenSequence, prefix: Prefix, count: int) -> Admission:
        """Allocate `count` blocks after those of its prefix; record that the sequence will compute the rest."""
        shared = prefix.blocks
        self.pool.add_ref(shared)
        blocks = [*shared, *self.pool.allocate(count).tolist()]
        cached = len(shared) * self.pool.block_size + prefix.tail_tokens
        if cached < len(sequence.ids):
            sequence.prompt.filling = self.reuse and len(sequence.ids) == len(sequence.prompt.ids)
        sequence.node, sequence.node_end = prefix.last, len(shared) * self.pool.block_size
        if self.reuse:
            self._remember(sequence, sequence.ids, blocks, ready=False)
        copy = None if prefix.tail is None else (prefix.tail, blocks[len(shared)])
        return Admission(sequence, cached, blocks, copy, prefix.snapshot)

    def allocate(self, count: int) -> Ints | None:
        """Return `count` new blocks; None if the pool has too few."""
        return self.pool.allocate(count) if count <= self.pool.num_free else None

    def _prefix(self, sequence: TokenSequence) -> Prefix:
        if not self.reuse:
            return Prefix([], self.pool.root_of(sequence.version))
        # All of it can come from the cache only if the last token's hidden state is known. A scored id needs the
        # hidden state of the token before it.
        whole = sequence.prompt.hidden_H is not None and len(sequence.ids) == len(sequence.prompt.ids)
        match = self.pool.match_state if self.has_states else self.pool.match_prefix
        most = len(sequence.ids) - (sequence.unscored + 1 if sequence.scored_from else not whole)
        return match(sequence.ids, most, sequence.version)

    def mark_computed(self, sequence: TokenSequence, cached: int) -> None:
        """Mark the nodes of the sequence's first `cached` tokens as ready for others."""
        while sequence.unready and sequence.unready[0][1] <= cached:
            sequence.unready.pop(0)[0].ready = True

    def leave(self, sequence: TokenSequence, cached: int, blocks: Sequence[int], keep: bool) -> None:
        """Free a sequence's blocks, which hold `cached` of its tokens. keep: keep them in the tree for others."""
        if self.reuse:
            if cached < len(sequence.prompt.ids):
                sequence.prompt.filling = False
            self.pool.drop_unready([node for node, _ in sequence.unready])
            sequence.unready = []
            if keep:
                self._remember(sequence, sequence.ids[:cached], blocks, ready=True)
        self.pool.free(blocks)

    def keep(self, sequence: TokenSequence, ids: Sequence[int], blocks: Sequence[int]) -> None:
        """Record in the tree that a running sequence's blocks hold `ids`, its first tokens."""
        if self.reuse:
            self._remember(sequence, ids, blocks, ready=True)

    def _remember(self, sequence: TokenSequence, ids: Sequence[int], blocks: Sequence[int], ready: bool) -> None:
        """Record in the pool's tree which tokens the sequence's blocks hold or are about to hold."""
        block_size = self.pool.block_size
        if sequence.node is None or not self.pool.contains(sequence.node) or sequence.node_end > len(ids):
            sequence.node, sequence.node_end = self.pool.root_of(sequence.version), 0
        path = self.pool.insert(ids, blocks, sequence.node, sequence.node_end, ready)
        for number, node in enumerate(path):
            end = min(sequence.node_end + (number + 1) * block_size, len(ids))
            if not node.ready and node.block == blocks[(end - 1) // block_size]:
                sequence.unready.append((node, end))
        full = len(ids) // block_size * block_size
        if full > sequence.node_end:
            sequence.node = path[(full - sequence.node_end) // block_size - 1]
            sequence.node_end = full

    def preempt(self) -> TokenSequence:
        """Remove and return the youngest running sequence; it is queued again if it has a turn or ids to score."""
        sequence = self.running.pop()
        if sequence.writing or sequence.unscored:
            self.submit(sequence)
        return sequence


if TYPE_CHECKING:
    import torch  # for annotations: the scheduler does not need torch
