"""Blocks of the KV cache: who owns which, and which tokens' keys and values lie in them. No tensors.

A sequence owns a list of blocks of `page_size` slots; several may own the same block. A tree of nodes, one a block,
remembers which tokens, from the sequence's start on, a block holds, so that a sequence that begins as another did takes
its blocks (as SGLang's RadixAttention, Zheng et al. 2024). Shared blocks are full; of one that agrees in its first
slots only, the newcomer gets a copy. A model whose layers have states goes on only where a state was kept: a node knows
behind which of its tokens there are snapshots, and `match_state` takes the place of `match_prefix`. Blocks without an
owner keep their content until they are needed, the one that was given up first goes first. Block 0 belongs to nobody:
rows that pad a batch are written there.

Where a pool outlives an update (rollout.stale_cache), each version of the weights has a tree of its own: a sequence
shares with those that began under the weights that it began under, and what is new shares nothing with what is stale.

Invariant: free + idle + owned = num_blocks - 1.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]


@dataclass(slots=True, eq=False)
class RadixNode:
    """A node of the tree: the tokens of one block, which follow those of its parents. Only a full node has children.

    ready: keys and values of all its tokens lie in the block; else its owner is about to compute them.
    """

    block: int
    tokens: list[int]
    parent: "RadixNode | None"
    ready: bool = True
    children: dict[int, list["RadixNode"]] = field(default_factory=dict)  # by their first token
    snapshots: dict[int, int] = field(default_factory=dict)  # behind so many of its tokens: the snapshot's number


@dataclass(slots=True)
class Prefix:
    """Blocks in the tree that hold the beginning of a sequence.

    blocks: full ones, to be shared. tail: a block of which the next `tail_tokens` slots fit, to be copied; or None.
    last: the node of the last of `blocks`. wait: another sequence is about to compute more of the beginning. snapshot:
    of the states at its end, where a model has states.
    """

    blocks: list[int]
    last: RadixNode
    tail: int | None = None
    tail_tokens: int = 0
    wait: bool = False
    snapshot: int | None = None


class BlockPool:
    """A fixed number of blocks, and of snapshots of states, handed out and taken back. Which one is handed out changes
    no result."""

    def __init__(self, num_blocks: int, page_size: int, snapshots: int = 0) -> None:
        self.page_size = page_size
        self.num_blocks = num_blocks
        self.ref_count_P = np.zeros(num_blocks, np.int64)
        self._roots: dict[int, RadixNode] = {}
        self._free = list(range(num_blocks - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # remembered, owned by nobody; the next to go first
        self._nodes: dict[int, RadixNode] = {}  # block -> its node
        self._free_snapshots = list(range(snapshots - 1, -1, -1))
        # Snapshot -> its node and how many of that node's tokens are before it; the next to go first.
        self._snapshots: OrderedDict[int, tuple[RadixNode, int]] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Return the number of blocks that `allocate` could return."""
        return len(self._free) + len(self._idle)

    def root_of(self, version: int) -> RadixNode:
        """Return the root of the tree of sequences that began under this version of the weights."""
        return self._roots.setdefault(version, RadixNode(0, [], None))

    @property
    def root(self) -> RadixNode:
        return self.root_of(0)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> Ints:
        """Return new blocks with one owner each. RuntimeError if there are not so many."""
        if count > self.num_free:
            raise RuntimeError(f"{count} blocks asked of a pool of {self.num_free}: the scheduler should have waited")
        while len(self._free) < count:
            self._forget(self._nodes[next(iter(self._idle))])
        taken = np.array(self._free[len(self._free) - count :], np.int64)
        del self._free[len(self._free) - count :]
        self.ref_count_P[taken] = 1
        return taken

    def add_ref(self, blocks: Sequence[int]) -> None:
        """Add one owner to each."""
        for block in blocks:
            self._idle.pop(block, None)
        self.ref_count_P[blocks] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Remove one owner of each. The last of a sequence's blocks are the first to be allocated again."""
        for block in reversed(blocks):
            self.ref_count_P[block] -= 1
            if self.ref_count_P[block] == 0:
                if block in self._nodes:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def match_prefix(self, ids: Sequence[int], most: int, version: int = 0) -> Prefix:
        """Return the longest known beginning of `ids`, of at most `most` tokens. It adds no owners; `add_ref` does."""
        found = Prefix([], self.root_of(version))
        at = 0
        while at < most:
            want = list(ids[at : min(at + self.page_size, most)])
            best, agreed = None, 0
            for node in found.last.children.get(want[0], ()):
                same = _agreement(node.tokens, want)
                if same > agreed or (same == agreed and best is not None and node.ready and not best.ready):
                    best, agreed = node, same
            if best is None:
                break
            whole = agreed == len(want)
            if not best.ready:
                found.wait = whole
                break
            if agreed < self.page_size:
                found.tail, found.tail_tokens = best.block, agreed
                break
            found.blocks.append(best.block)
            found.last = best
            at += agreed
        return found

    def match_state(self, ids: Sequence[int], most: int, version: int = 0) -> Prefix:
        """Return the longest beginning of `ids`, of at most `most` tokens, behind which there is a snapshot. Nobody
        waits for what another computes, but for the samples of one prompt, at whose end a snapshot will be."""
        root = self.root_of(version)
        found, reach = Prefix([], root), 0
        stack: list[tuple[RadixNode, int, list[int]]] = [(root, 0, [])]
        while stack:
            node, at, blocks = stack.pop()
            want = list(ids[at : min(at + self.page_size, most)])
            for child in node.children.get(want[0], ()) if want else ():
                same = _agreement(child.tokens, want) if child.ready else 0
                offset = max((end for end in child.snapshots if end <= same), default=0)
                if offset and at + offset > reach:
                    reach, snapshot = at + offset, child.snapshots[offset]
                    if offset == self.page_size:
                        found = Prefix([*blocks, child.block], child, snapshot=snapshot)
                    else:
                        found = Prefix(blocks, node, child.block, offset, snapshot=snapshot)
                if same == self.page_size:
                    stack.append((child, at + same, [*blocks, child.block]))
        if found.snapshot is not None:
            self._snapshots.move_to_end(found.snapshot)
        return found

    def keep_state(self, ids: Sequence[int], version: int = 0) -> int | None:
        """Return the snapshot in which to keep the states behind `ids`, in place of the one that was not used for the
        longest time; None where the tree does not hold these tokens, or there are no snapshots."""
        node, at = self.root_of(version), 0
        while at < len(ids):
            want = list(ids[at : at + self.page_size])
            fits = (x for x in node.children.get(want[0], ()) if x.ready and x.tokens[: len(want)] == want)
            child = next(fits, None)
            if child is None:
                return None
            node, at = child, at + len(want)
        offset = (len(ids) - 1) % self.page_size + 1
        if node.parent is None or not (self._free_snapshots or self._snapshots):
            return None
        if offset in node.snapshots:
            self._snapshots.move_to_end(node.snapshots[offset])
            return node.snapshots[offset]
        if not self._free_snapshots:
            self._drop_snapshot(next(iter(self._snapshots)))
        number = node.snapshots[offset] = self._free_snapshots.pop()
        self._snapshots[number] = node, offset
        return number

    def _drop_snapshot(self, number: int) -> None:
        node, offset = self._snapshots.pop(number)
        del node.snapshots[offset]
        self._free_snapshots.append(number)

    def insert(
        self, ids: Sequence[int], blocks: Sequence[int], after: RadixNode, start: int, ready: bool
    ) -> list[RadixNode]:
        """Put ids[start:] into the tree, behind the node `after`; return their nodes, in order. blocks: all of the
        sequence's. A node that is known from another block keeps that block."""
        path = []
        for at in range(start, len(ids), self.page_size):
            tokens, block = list(ids[at : at + self.page_size]), blocks[at // self.page_size]
            node = self._child(after, tokens, block)
            if node is None:
                node = RadixNode(block, tokens, after, ready)
                after.children.setdefault(tokens[0], []).append(node)
                self._nodes[block] = node
            elif node.block == block and (len(tokens) > len(node.tokens) or (ready and not node.ready)):
                node.tokens, node.ready = tokens, node.ready or ready
            path.append(node)
            after = node
        return path

    def drop_unready(self, nodes: Sequence[RadixNode]) -> None:
        """Remove nodes whose keys will not be computed after all."""
        for node in nodes:
            if self._nodes.get(node.block) is node and not node.ready:
                self._forget(node)

    def contains(self, node: RadixNode) -> bool:
        return node.parent is None or self._nodes.get(node.block) is node

    def _child(self, after: RadixNode, tokens: list[int], block: int) -> RadixNode | None:
        own = self._nodes.get(block)
        if own is not None and own.parent is after:
            return own
        if own is not None:
            self._forget(own)
        same = (node for node in after.children.get(tokens[0], ()) if node.tokens[: len(tokens)] == tokens)
        return next(same, None)

    def _forget(self, node: RadixNode) -> None:
        """Remove a node and all behind it from the tree; their blocks are free unless they are owned."""
        siblings = node.parent.children[node.tokens[0]] if node.parent is not None else []
        siblings.remove(node)
        if not siblings and node.parent is not None:
            del node.parent.children[node.tokens[0]]
        for gone in _subtree(node):
            for number in list(gone.snapshots.values()):
                self._drop_snapshot(number)
            del self._nodes[gone.block]
            if gone.block in self._idle:
                del self._idle[gone.block]
                self._free.append(gone.block)


def _subtree(node: RadixNode) -> Iterator[RadixNode]:
    stack = [node]
    while stack:
        node = stack.pop()
        yield node
        for children in node.children.values():
            stack.extend(children)


def _agreement(a: Sequence[int], b: Sequence[int]) -> int:
    """Return the number of leading tokens that `a` and `b` have in common."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((at for at, (x, y) in pairs if x != y), min(len(a), len(b)))
