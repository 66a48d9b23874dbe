"""Bookkeeping of the blocks of the KV cache: their owners, and the tokens whose keys and values they hold. No tensors.

A sequence owns a list of blocks of `block_size` tokens, and several sequences may own the same block. A tree has one
node per block. It records which tokens, counted from the start of the sequence, a block holds, so that a sequence with
the same prefix can reuse the blocks (as SGLang's RadixAttention, Zheng et al. 2024). Shared blocks are full. If only
the first tokens of a block agree, the new sequence gets a copy of it. A model whose layers have states can continue
only where a state was kept: a node records after which of its tokens there are snapshots, and `match_state` replaces
`match_prefix`. Blocks without an owner keep their content until they are needed; the block that was freed first is
evicted first. Block 0 has no owner: padding rows of a batch are written there.

If a pool outlives an update (rollout.stale_cache), each version of the weights has its own tree. A sequence shares
blocks only with sequences that began under the same weights, so a new sequence shares nothing that is stale.

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
    """Node of the tree: the tokens of one block, which follow those of its ancestors. Only a full node has children.

    ready: keys and values of all its tokens are in the block; otherwise its owner is about to compute them.
    """

    block: int
    tokens: list[int]
    parent: "RadixNode | None"
    ready: bool = True
    children: dict[int, list["RadixNode"]] = field(default_factory=dict)  # by their first token
    snapshots: dict[int, int] = field(default_factory=dict)  # number of its tokens -> snapshot after them


@dataclass(slots=True)
class Prefix:
    """Blocks in the tree that hold a prefix of a sequence.

    blocks: full blocks, to be shared. tail: block whose first `tail_tokens` slots agree, to be copied; or None. last:
    node of the last of `blocks`. wait: another sequence is about to compute more of the prefix. snapshot: snapshot of
    the states at its end, if the model has states.
    """

    blocks: list[int]
    last: RadixNode
    tail: int | None = None
    tail_tokens: int = 0
    wait: bool = False
    snapshot: int | None = None


class BlockPool:
    """Pool of a fixed number of blocks and snapshots of states. Which of them it returns changes no result."""

    def __init__(self, num_blocks: int, block_size: int, snapshots: int = 0) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.ref_count_P = np.zeros(num_blocks, np.int64)
        self._roots: dict[int, RadixNode] = {}
        self._free = list(range(num_blocks - 1, 0, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()  # cached blocks without an owner, in order of eviction
        self._nodes: dict[int, RadixNode] = {}  # block -> its node
        self._free_snapshots = list(range(snapshots - 1, -1, -1))
        # Snapshot -> its node and the number of that node's tokens before it, in order of eviction.
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
        return -(-tokens // self.block_size)

    def allocate(self, count: int) -> Ints:
        """Return `count` new blocks with one owner each. RuntimeError if fewer are available."""
        if count > self.num_free:
            raise RuntimeError(
                f"{count} blocks requested from a pool of {self.num_free}: the scheduler should have waited"
            )
        while len(self._free) < count:
            self._forget(self._nodes[next(iter(self._idle))])
        taken = np.array(self._free[len(self._free) - count :], np.int64)
        del self._free[len(self._free) - count :]
        self.ref_count_P[taken] = 1
        return taken

    def add_ref(self, blocks: Sequence[int]) -> None:
        """Add one owner to each block."""
        for block in blocks:
            self._idle.pop(block, None)
        self.ref_count_P[blocks] += 1

    def free(self, blocks: Sequence[int]) -> None:
        """Remove one owner of each block. Of a sequence's cached blocks, the last ones are evicted first."""
        for block in reversed(blocks):
            self.ref_count_P[block] -= 1
            if self.ref_count_P[block] == 0:
                if block in self._nodes:
                    self._idle[block] = None
                else:
                    self._free.append(block)

    def match_prefix(self, ids: Sequence[int], most: int, version: int = 0) -> Prefix:
        """Return the longest cached prefix of `ids`, of at most `most` tokens. `add_ref` adds owners; this does not."""
        found = Prefix([], self.root_of(version))
        at = 0
        while at < most:
            want = list(ids[at : min(at + self.block_size, most)])
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
            if agreed < self.block_size:
                found.tail, found.tail_tokens = best.block, agreed
                break
            found.blocks.append(best.block)
            found.last = best
            at += agreed
        return found

    def match_state(self, ids: Sequence[int], most: int, version: int = 0) -> Prefix:
        """Return the longest prefix of `ids`, of at most `most` tokens, that ends at a snapshot. No sequence waits for
        tokens that another one computes, except the samples of one prompt, at whose end there will be a snapshot."""
        root = self.root_of(version)
        found, reach = Prefix([], root), 0
        stack: list[tuple[RadixNode, int, list[int]]] = [(root, 0, [])]
        while stack:
            node, at, blocks = stack.pop()
            want = list(ids[at : min(at + self.block_size, most)])
            for child in node.children.get(want[0], ()) if want else ():
                same = _agreement(child.tokens, want) if child.ready else 0
                offset = max((end for end in child.snapshots if end <= same), default=0)
                if offset and at + offset > reach:
                    reach, snapshot = at + offset, child.snapshots[offset]
                    if offset == self.block_size:
                        found = Prefix([*blocks, child.block], child, snapshot=snapshot)
                    else:
                        found = Prefix(blocks, node, child.block, offset, snapshot=snapshot)
                if same == self.block_size:
                    stack.append((child, at + same, [*blocks, child.block]))
        if found.snapshot is not None:
            self._snapshots.move_to_end(found.snapshot)
        return found

    def keep_state(self, ids: Sequence[int], version: int = 0) -> int | None:
        """Return the snapshot for the states after `ids`; if none is free, the least recently used one is replaced.
        None if the tree does not hold these tokens, or if there are no snapshots."""
        node, at = self.root_of(version), 0
        while at < len(ids):
            want = list(ids[at : at + self.block_size])
            fits = (x for x in node.children.get(want[0], ()) if x.ready and x.tokens[: len(want)] == want)
            child = next(fits, None)
            if child is None:
                return None
            node, at = child, at + len(want)
        offset = (len(ids) - 1) % self.block_size + 1
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
        """Insert ids[start:] into the tree after the node `after`; return their nodes, in order. blocks: all blocks of
        the sequence. A node that already exists with another block keeps that block."""
        path = []
        for at in range(start, len(ids), self.block_size):
            tokens, block = list(ids[at : at + self.block_size]), blocks[at // self.block_size]
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
        """Remove nodes whose keys will not be computed."""
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
        """Remove a node and its descendants from the tree; their blocks become free unless they are owned."""
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
