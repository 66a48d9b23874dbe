"""Which pages of the KV cache belong to whom: pure bookkeeping, no tensors.

A sequence owns a list of blocks (pages of `page_size` slots). Several sequences may own the same block: the samples of
one question share their prompt's. A block that has more than one owner is never written; whoever has to, gets a copy.

Invariant, after every operation: free + blocks with owners = total, and no block has a negative count of owners.
Block 0 belongs to nobody: rows that pad a batch are written there.
"""

from dataclasses import dataclass, field


@dataclass(slots=True)
class BlockTable:
    """One sequence's pages in order, and how many of their slots are filled."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0


class BlockPool:
    """A fixed number of blocks, handed out and taken back. Which block is handed out changes no result."""

    def __init__(self, num_blocks: int, page_size: int) -> None:
        if num_blocks < 2 or page_size < 1:
            raise ValueError(f"a pool needs at least 2 blocks of at least 1 slot, got {num_blocks} of {page_size}")
        self.page_size = page_size
        self.num_blocks = num_blocks
        self._owners = [0] * num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def owners(self, block: int) -> int:
        return self._owners[block]

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def fork(self, table: BlockTable) -> BlockTable:
        """A second owner of everything in `table`; nothing is copied until one of them writes."""
        for block in table.blocks:
            self._owners[block] += 1
        return BlockTable(list(table.blocks), table.length)

    def extend(self, table: BlockTable, tokens: int) -> list[tuple[int, int]]:
        """Make room for `tokens` more and count them as filled. Returns the (from, to) block copies to make first."""
        copies = []
        if tokens > 0 and table.length % self.page_size and self._owners[table.blocks[-1]] > 1:
            shared = table.blocks[-1]
            table.blocks[-1] = self._take()
            self._owners[shared] -= 1
            copies.append((shared, table.blocks[-1]))
        table.length += tokens
        while len(table.blocks) * self.page_size < table.length:
            table.blocks.append(self._take())
        return copies

    def release(self, table: BlockTable) -> None:
        for block in table.blocks:
            self._owners[block] -= 1
            if self._owners[block] == 0:
                self._free.append(block)
        table.blocks.clear()
        table.length = 0

    def _take(self) -> int:
        if not self._free:
            raise RuntimeError("the block pool is empty: the scheduler promised more blocks than there are")
        block = self._free.pop()
        self._owners[block] = 1
        return block
