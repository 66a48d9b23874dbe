"""Admission and preemption of sequences. Pure bookkeeping, no tensors.

A sequence is admitted, the oldest first, when a slot is free and the pool has room for its tokens. When the pool is
full, the youngest running sequence waits again: its tokens are kept and its blocks are freed, which changes no result.
The pool holds the longest sequence, so the oldest can always go on and there is no deadlock. A sequence is passed over
while another is about to compute its beginning; the pool's tree knows what blocks are about to hold.
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
    """Ids with which several sequences begin. hidden_H: the last token's hidden state, once it is computed; all draw
    their first token from it. waiting: sequences that have not begun. filling: one of them computes it, others wait."""

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
    """One stream of tokens. `ids` is complete between turns; within one, the newest ids are in its slot's arrays.

    stop, room: the turn's stop strings, and its largest number of tokens. finish: why the last turn ended, "stop",
    "eos" or "length"; hit: the stop that ended it. prefilled: tokens computed for it without being drawn, recomputed
    ones included. earlier: what was written before for the same question, in which drafts are looked up. scored_from:
    above 0, nothing is drawn, and `logprobs` are those of the ids from there on. keep_at: of such a sequence, behind
    how many ids the states are kept for others. carried: how many of its ids earlier rollouts have computed. version:
    of the weights that it began under, where the pool outlives them.
    """

    prompt: SharedPrompt
    seed: int
    draw: SamplingParams
    ids: list[int] = field(default_factory=list)
    most: int | None = None  # tokens that it can come to hold, where that is known
    grows: bool = True  # whether it may need blocks beyond those that it was let in with
    number: int = -1  # in the order in which they were handed in
    begun: bool = False
    slot: int = -1
    writing: bool = False
    stop: tuple[str, ...] = ()
    room: int = 0
    turn_start: int = 0
    logprobs: list[float] = field(default_factory=list)  # of the turn's tokens
    stop_state: int = 0  # of the stop automaton, while it has no slot
    finish: str = ""
    hit: Hit | None = None
    node: RadixNode | None = None  # the last full node of it that is in the pool's tree
    node_end: int = 0  # tokens up to that node's end
    unready: list[tuple[RadixNode, int]] = field(default_factory=list)  # nodes that it is about to fill; their ends
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
        """Return how many log-probs of given ids are missing; 0 too for a sequence of which none are wanted."""
        return len(self.ids) - self.scored_from - len(self.logprobs) if self.scored_from else 0


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that begins now, with its blocks; the first of them hold `cached` of its tokens.

    copy: blocks (from, to) to copy before anything is computed, where those tokens end within a block; else None.
    snapshot: of the states behind those tokens, where a model has states and there are such tokens.
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
    """Return a scheduler of a new pool, or of one that was kept. snapshots: of states; None: the model has none.
    UserError where a sequence of `longest` tokens does not fit into it."""
    pool = kept or BlockPool(num_blocks, kv_block_size, snapshots or 0)
    if pool.blocks_for(longest) > pool.num_free:
        raise UserError(
            f"the KV cache of {pool.num_free * kv_block_size} tokens is too small for a sequence of {longest}; raise "
            "kv_tokens or lower the longest context"
        )
    return Scheduler(pool, max_running, reuse, snapshots is not None)


class Scheduler:
    """Admission, oldest first, with blocks of the pool. `reuse` off: nothing that another sequence computed is used.
    has_states: the model has layers with states, so that keys and values are of use only up to a snapshot."""

    def __init__(self, pool: BlockPool, max_running: int, reuse: bool = True, has_states: bool = False) -> None:
        self.pool, self.max_running, self.reuse, self.has_states = pool, max_running, reuse, has_states
        self.running: list[TokenSequence] = []  # by age
        self.waiting: list[TokenSequence] = []  # by age
        self._number = 0

    def submit(self, sequence: TokenSequence) -> None:
        """Queue a new sequence, or one that was preempted between two turns and now has a turn."""
        if sequence.number < 0:
            sequence.number = self._number
            sequence.prompt.waiting += 1
            self._number += 1
        bisect.insort(self.waiting, sequence, key=attrgetter("number"))

    def admit(self) -> Iterator[Admission]:
        """Admit the sequences that may begin now, one after the other, each with its blocks."""
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
            # One more block for each that may need one soon, or the next step would have to preempt.
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
        """Allocate `count` blocks beside those of its prefix, and note that the sequence will compute the rest."""
        shared = prefix.blocks
        self.pool.add_ref(shared)
        blocks = [*shared, *self.pool.allocate(count).tolist()]
        cached = len(shared) * self.pool.page_size + prefix.tail_tokens
        if cached < len(sequence.ids):
            sequence.prompt.filling = self.reuse and len(sequence.ids) == len(sequence.prompt.ids)
        sequence.node, sequence.node_end = prefix.last, len(shared) * self.pool.page_size
        if self.reuse:
            self._remember(sequence, sequence.ids, blocks, ready=False)
        copy = None if prefix.tail is None else (prefix.tail, blocks[len(shared)])
        return Admission(sequence, cached, blocks, copy, prefix.snapshot)

    def allocate(self, count: int) -> Ints | None:
        """Return so many new blocks; None while the pool has too few."""
        return self.pool.allocate(count) if count <= self.pool.num_free else None

    def _prefix(self, sequence: TokenSequence) -> Prefix:
        if not self.reuse:
            return Prefix([], self.pool.root_of(sequence.version))
        # The whole of it is of use only where the last token's hidden state is known; a scored id needs that of the
        # token before it.
        whole = sequence.prompt.hidden_H is not None and len(sequence.ids) == len(sequence.prompt.ids)
        match = self.pool.match_state if self.has_states else self.pool.match_prefix
        most = len(sequence.ids) - (sequence.unscored + 1 if sequence.scored_from else not whole)
        return match(sequence.ids, most, sequence.version)

    def mark_computed(self, sequence: TokenSequence, cached: int) -> None:
        """Mark the nodes of the sequence's first `cached` tokens as ready for others."""
        while sequence.unready and sequence.unready[0][1] <= cached:
            sequence.unready.pop(0)[0].ready = True

    def leave(self, sequence: TokenSequence, cached: int, blocks: Sequence[int], keep: bool) -> None:
        """Free a sequence's blocks, which hold `cached` of its tokens; keep: others are to find them."""
        if self.reuse:
            if cached < len(sequence.prompt.ids):
                sequence.prompt.filling = False
            self.pool.drop_unready([node for node, _ in sequence.unready])
            sequence.unready = []
            if keep:
                self._remember(sequence, sequence.ids[:cached], blocks, ready=True)
        self.pool.free(blocks)

    def keep(self, sequence: TokenSequence, ids: Sequence[int], blocks: Sequence[int]) -> None:
        """Note that a running sequence's blocks hold `ids`, its first tokens."""
        if self.reuse:
            self._remember(sequence, ids, blocks, ready=True)

    def _remember(self, sequence: TokenSequence, ids: Sequence[int], blocks: Sequence[int], ready: bool) -> None:
        """Note in the pool's tree what the sequence's blocks hold, or are about to hold."""
        page_size = self.pool.page_size
        if sequence.node is None or not self.pool.contains(sequence.node) or sequence.node_end > len(ids):
            sequence.node, sequence.node_end = self.pool.root_of(sequence.version), 0
        path = self.pool.insert(ids, blocks, sequence.node, sequence.node_end, ready)
        for number, node in enumerate(path):
            end = min(sequence.node_end + (number + 1) * page_size, len(ids))
            if not node.ready and node.block == blocks[(end - 1) // page_size]:
                sequence.unready.append((node, end))
        full = len(ids) // page_size * page_size
        if full > sequence.node_end:
            sequence.node = path[(full - sequence.node_end) // page_size - 1]
            sequence.node_end = full

    def preempt(self) -> TokenSequence:
        """Remove and return the youngest running sequence; it waits again if it has a turn, or ids to be
        scored."""
        sequence = self.running.pop()
        if sequence.writing or sequence.unscored:
            self.submit(sequence)
        return sequence


if TYPE_CHECKING:
    import torch  # the scheduler needs none of it
