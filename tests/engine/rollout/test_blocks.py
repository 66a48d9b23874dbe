"""The block pool against a memory that remembers every write: after each operation nothing is lost, shared by mistake
or counted wrongly."""

import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thresher.engine.rollout.kv_cache import BlockPool, BlockTable


class Memory:
    """Slots that hold what was written, as the KV cache does, and what each table should read."""

    def __init__(self, num_blocks: int, page_size: int) -> None:
        self.pool = BlockPool(num_blocks, page_size)
        self.slots = [[None] * page_size for _ in range(num_blocks)]
        self.tables: list[BlockTable] = []
        self.expected: list[list[int]] = []
        self.written = 0

    def blocks_needed(self, number: int, tokens: int) -> int:
        table, size = self.tables[number], self.pool.page_size
        copies = tokens > 0 and table.length % size and self.pool.owners(table.blocks[-1]) > 1
        return self.pool.blocks_for(table.length + tokens) - len(table.blocks) + bool(copies)

    def extend(self, number: int, tokens: int) -> None:
        table, size = self.tables[number], self.pool.page_size
        start = table.length
        for source, target in self.pool.extend(table, tokens):
            self.slots[target] = list(self.slots[source])
        for at in range(start, start + tokens):
            self.written += 1
            self.slots[table.blocks[at // size]][at % size] = self.written
            self.expected[number].append(self.written)

    def check(self) -> None:
        pool = self.pool
        owners = Counter(block for table in self.tables for block in table.blocks)
        assert all(pool.owners(block) == owners[block] >= 0 for block in range(pool.num_blocks))
        assert pool.free + len(owners) == pool.num_blocks - 1, "a block is lost or handed out twice"
        assert pool.owners(0) == 0 and 0 not in owners, "block 0 belongs to nobody"
        for table, expected in zip(self.tables, self.expected, strict=True):
            assert len(set(table.blocks)) == len(table.blocks) == pool.blocks_for(table.length)
            read = [self.slots[table.blocks[at // pool.page_size]][at % pool.page_size] for at in range(table.length)]
            assert read == expected, "somebody else wrote into this sequence"


# (what, which sequence, how many tokens)
OPERATION = st.tuples(st.sampled_from("neeeeffr"), st.integers(0, 50), st.integers(0, 9))


@settings(derandomize=True, max_examples=400, deadline=None)
@given(st.integers(2, 14), st.integers(1, 5), st.lists(OPERATION, max_size=60))
def test_nothing_is_lost_whatever_is_done(
    num_blocks: int, page_size: int, operations: list[tuple[str, int, int]]
) -> None:
    memory = Memory(num_blocks, page_size)
    for what, which, tokens in operations:
        if what == "n" or not memory.tables:
            memory.tables.append(BlockTable())
            memory.expected.append([])
            memory.check()
            continue
        number = which % len(memory.tables)
        if what == "f":
            memory.tables.append(memory.pool.fork(memory.tables[number]))
            memory.expected.append(list(memory.expected[number]))
        elif what == "r":
            memory.pool.release(memory.tables[number])
            memory.expected[number] = []
        elif memory.blocks_needed(number, tokens) <= memory.pool.free:
            free, needed = memory.pool.free, memory.blocks_needed(number, tokens)
            memory.extend(number, tokens)
            assert memory.pool.free == free - needed
        memory.check()
    for table in memory.tables:
        memory.pool.release(table)
    assert memory.pool.free == num_blocks - 1


def test_a_shared_block_is_copied_at_the_first_write_only() -> None:
    pool = BlockPool(10, 4)
    parent = BlockTable()
    assert pool.extend(parent, 6) == []
    first, second = pool.fork(parent), pool.fork(parent)
    shared = list(parent.blocks)
    copies = pool.extend(first, 1)
    assert copies == [(shared[1], first.blocks[1])] and first.blocks[0] == shared[0] != first.blocks[1] != shared[1]
    assert pool.extend(first, 1) == []
    assert pool.extend(second, 3) == [(shared[1], second.blocks[1])] and len(second.blocks) == 3
    assert parent.blocks == shared and [pool.owners(block) for block in shared] == [3, 1]
    # The last owner writes in place.
    assert pool.extend(parent, 1) == [] and parent.blocks == shared


def test_full_blocks_are_shared_without_a_copy() -> None:
    pool = BlockPool(10, 4)
    parent = BlockTable()
    pool.extend(parent, 8)
    child = pool.fork(parent)
    assert pool.extend(child, 5) == [] and child.blocks[:2] == parent.blocks and len(child.blocks) == 4
    assert pool.extend(child, 0) == []


def test_blocks_come_back_when_their_last_owner_goes() -> None:
    pool = BlockPool(4, 2)
    parent = BlockTable()
    pool.extend(parent, 6)
    child = pool.fork(parent)
    pool.release(parent)
    assert pool.free == 0 and parent == BlockTable()
    pool.release(parent)  # holds nothing any more
    pool.release(child)
    assert pool.free == 3


def test_an_empty_pool_says_so() -> None:
    pool = BlockPool(3, 2)
    pool.extend(BlockTable(), 4)
    with pytest.raises(RuntimeError, match="pool is empty"):
        pool.extend(BlockTable(), 1)


@pytest.mark.parametrize(("blocks", "size"), [(1, 4), (0, 4), (5, 0)])
def test_a_pool_of_nothing_is_refused(blocks: int, size: int) -> None:
    with pytest.raises(ValueError, match="at least 2 blocks"):
        BlockPool(blocks, size)


@pytest.mark.parametrize(
    "module",
    [
        "thresher.engine.rollout.scheduler",
        "thresher.engine.rollout.stop_tags",
        "thresher.rewards",
    ],
)
def test_bookkeeping_and_rewards_import_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
