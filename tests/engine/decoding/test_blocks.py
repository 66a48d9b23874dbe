"""The block pool against a memory that records every write: nothing is lost or miscounted, and a prefix that is found
has exactly its own contents."""

from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thresher.engine.decoding.blocks import BlockPool, Prefix
from thresher.engine.decoding.scheduler import SamplingParams, Scheduler, SharedPrompt, TokenSequence

Content = tuple[int, ...]  # of a slot: the tokens from the sequence's start, on all of which its key depends


class Writer:
    """A sequence, its blocks, and how many of its tokens are written."""

    def __init__(self, ids: list[int]) -> None:
        self.sequence = TokenSequence(SharedPrompt(ids), 0, SamplingParams())
        self.ids, self.blocks, self.written = self.sequence.ids, list[int](), 0


class Memory:
    """A pool, the written contents of its slots, and sequences that use them as the decoder does."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool, self.size = BlockPool(num_blocks, block_size), block_size
        self.scheduler = Scheduler(self.pool, max_running=99)
        self.slots: list[list[Content | None]] = [[None] * block_size for _ in range(num_blocks)]
        self.writers: list[Writer] = []

    def find(self, ids: list[int], most: int) -> Prefix:
        """Return the result of `match_prefix`, checked against the contents of the blocks."""
        found = self.pool.match_prefix(ids, most)
        assert len(found.blocks) * self.size + found.tail_tokens <= most
        assert (found.tail is None) == (found.tail_tokens == 0) and 0 <= found.tail_tokens < self.size
        slots = [content for block in found.blocks for content in self.slots[block]]
        if found.tail is not None:
            slots += self.slots[found.tail][: found.tail_tokens]
        assert slots == [tuple(ids[: at + 1]) for at in range(len(slots))]
        assert self.pool.contains(found.last) and found.last.block == (found.blocks[-1] if found.blocks else 0)
        return found

    def begin(self, ids: list[int]) -> bool:
        """Begin a new sequence, unless it has to wait or there is no room; return whether it began."""
        found = self.find(ids, len(ids) - 1)
        count = self.pool.blocks_for(len(ids)) - len(found.blocks)
        idle = sum(self.pool.ref_count_P[block] == 0 for block in found.blocks)
        if found.wait or self.pool.num_free - idle < count:
            return False
        writer = Writer(ids)
        admission = self.scheduler._begin(writer.sequence, found, count)
        writer.blocks, writer.written = admission.blocks, admission.cached
        if admission.copy is not None:
            self.slots[admission.copy[1]] = list(self.slots[admission.copy[0]])
        self.writers.append(writer)
        return True

    def write(self, writer: Writer, tokens: int) -> None:
        """Write the next tokens to their slots."""
        for at in range(writer.written, min(writer.written + tokens, len(writer.ids))):
            block = writer.blocks[at // self.size]
            assert self.pool.ref_count_P[block] == 1, "written to by one of several owners"
            self.slots[block][at % self.size] = tuple(writer.ids[: at + 1])
            writer.written = at + 1
        self.scheduler.mark_computed(writer.sequence, writer.written)

    def grow(self, writer: Writer, ids: list[int]) -> None:
        """Append tokens after all earlier ones are written, if there is room."""
        self.write(writer, len(writer.ids))
        needed = self.pool.blocks_for(len(writer.ids) + len(ids)) - len(writer.blocks)
        if needed <= self.pool.num_free:
            writer.blocks += self.pool.allocate(needed).tolist()
            writer.ids += ids
            self.write(writer, len(ids))

    def leave(self, writer: Writer, keep: bool) -> None:
        self.scheduler.leave(writer.sequence, writer.written, writer.blocks, keep)
        self.writers.remove(writer)

    def check(self) -> None:
        pool = self.pool
        owners = Counter(block for writer in self.writers for block in writer.blocks)
        assert all(pool.ref_count_P[block] == owners[block] >= 0 for block in range(pool.num_blocks))
        assert pool.num_free + len(owners) == pool.num_blocks - 1, "a block is lost or handed out twice"
        assert 0 not in owners, "block 0 belongs to nobody"
        for writer in self.writers:
            read = [content for block in writer.blocks for content in self.slots[block]][: writer.written]
            assert read == [tuple(writer.ids[: at + 1]) for at in range(writer.written)], "somebody else wrote there"

    def kept(self, ids: list[int]) -> Writer:
        """Return a sequence that began, was written and left, with its tokens kept."""
        writer = self.began(ids)
        self.write(writer, len(ids))
        self.leave(writer, keep=True)
        return writer

    def began(self, ids: list[int]) -> Writer:
        assert self.begin(ids)
        return self.writers[-1]

    def finds(self, ids: list[int], most: int, owner: Writer, blocks: int, tail: int = 0, wait: bool = False) -> None:
        """Check that the first `blocks` of `owner` are found, and `tail` slots of its next one."""
        found = self.find(ids, most)
        last = owner.blocks[blocks] if tail else None
        assert found == Prefix(owner.blocks[:blocks], found.last, last, tail, wait), (ids, most)


# Operation: begin, write, grow, leave without or with its tokens kept, find. Then which sequence, and a seed.
OPERATION = st.tuples(st.sampled_from("bbbwggglkkf"), st.integers(0, 50), st.integers(0, 10**6))


@settings(derandomize=True, max_examples=400, deadline=None)
@given(st.integers(2, 24), st.integers(1, 5), st.integers(1, 3), st.lists(OPERATION, max_size=80))
def test_what_is_found_is_right_and_nothing_is_lost(
    num_blocks: int, block_size: int, letters: int, operations: list[tuple[str, int, int]]
) -> None:
    """Few letters, so that prefixes often agree and end within a block."""
    memory = Memory(num_blocks, block_size)
    for what, which, seed in operations:
        rng = Random(seed)
        ids = [rng.randrange(letters) for _ in range(rng.randint(1, 4 * block_size))]
        if what == "f":
            memory.find(ids, rng.randint(0, len(ids)))
        elif what == "b" or not memory.writers:
            memory.begin(ids)
        else:
            writer = memory.writers[which % len(memory.writers)]
            if what == "w":
                memory.write(writer, rng.randint(0, 2 * block_size))
            elif what == "g":
                memory.grow(writer, ids[: rng.randint(0, len(ids))])
            else:
                memory.leave(writer, keep=what == "k")
        memory.check()
    for writer in list(memory.writers):
        memory.leave(writer, keep=True)
        memory.check()
    assert memory.pool.num_free == num_blocks - 1
    assert len(memory.pool.allocate(num_blocks - 1)) == num_blocks - 1
    assert memory.pool.match_prefix([0] * 9, 9) == Prefix([], memory.pool.root), "every block is somebody else's now"


@pytest.fixture
def memory() -> Memory:
    return Memory(30, 4)


def test_all_that_is_known_of_a_beginning_is_found(memory: Memory) -> None:
    ids = list(range(1, 11))
    first = memory.kept(ids)
    for most, blocks, tail in ((10, 2, 2), (9, 2, 1), (8, 2, 0), (7, 1, 3)):
        memory.finds(ids, most, first, blocks, tail)
    memory.finds([*ids, 11], 11, first, 2, 2)
    memory.finds([1, 2, 3, 4, 5, 6, 0, 8], 8, first, 1, 2)
    memory.finds([1, 2], 2, first, 0, 2)
    memory.finds([1, 0, 3, 4], 4, first, 0, 1)
    memory.finds([2, 3, 4], 3, first, 0)
    memory.finds([5, 6, 7, 8], 4, first, 0)  # known, but after other tokens
    # A new sequence shares full blocks and copies the partial one.
    second = memory.began([1, 2, 3, 4, 5, 6, 0])
    assert second.blocks[:1] == first.blocks[:1] and second.blocks[1] not in first.blocks and second.written == 6
    memory.write(second, 1)
    memory.check()
    memory.finds(ids, 10, first, 2, 2)


def test_of_several_the_longest_agreement_is_found_and_of_two_equal_ones_that_which_is_there(memory: Memory) -> None:
    *_, last = [memory.kept(ids) for ids in ([1, 2, 9], [1, 2, 3, 9], [1, 9], [1, 2, 3, 4, 5])]
    memory.finds([1, 2, 3, 4, 5, 6], 6, last, 1, 1)
    assert memory.find([1, 2, 3, 8], 4).tail_tokens == 3
    memory.began([5, 6, 3, 7])
    memory.finds([5, 6], 2, memory.kept([5, 6, 5, 6]), 0, 2)


def test_what_a_sequence_wrote_since_it_began_is_found_too(memory: Memory) -> None:
    writer = memory.began([1, 2])
    memory.grow(writer, [3, 4, 5])
    memory.grow(writer, [6, 7, 8, 9, 10])
    memory.leave(writer, keep=True)
    memory.finds(writer.ids, 10, writer, 2, 2)


def test_a_page_belongs_to_one_block_and_a_block_to_one_page() -> None:
    pool = BlockPool(1 + 4, 3)
    a, b, c, d = pool.allocate(4).tolist()

    def remember(ids: list[int], *blocks: int) -> list[int]:
        return [node.block for node in pool.insert(ids, blocks, pool.root, 0, ready=True)]

    assert remember([1, 2], a) == [a] and remember([1], b) == [a]
    assert remember([1, 2, 3, 4], b, c) == [b, c]
    # Block a now covers the same tokens as b, and a sequence that follows a's node finds c after it.
    assert remember([1, 2, 3], a) == [a] and remember([1, 2, 3, 4, 5], d, c) == [a, c]
    found = pool.match_prefix([1, 2, 3, 4, 5], 5)
    assert (found.blocks, found.tail) == ([a], c)
    pool.free([a, b, c, d])
    assert sorted(pool.allocate(4).tolist()) == [1, 2, 3, 4]
    assert pool.match_prefix([1, 2, 3], 3) == Prefix([], pool.root)


def test_who_would_compute_what_another_is_about_to_waits(memory: Memory) -> None:
    first = memory.began([1, 2, 3, 4, 5, 6])
    memory.finds([1, 2, 3, 4, 9], 5, first, 0, wait=True)
    memory.finds([1, 2, 3], 3, first, 0, wait=True)
    memory.finds([1, 2, 0, 4], 4, first, 0)  # it has a block of its own there: nothing to wait for
    memory.write(first, 4)
    memory.finds([1, 2, 3, 4, 9], 5, first, 1)
    memory.finds([1, 2, 3, 4, 5, 6], 6, first, 1, wait=True)
    memory.write(first, 2)
    memory.finds([1, 2, 3, 4, 5, 6], 6, first, 1, 2)


def test_what_its_writer_left_unwritten_is_forgotten(memory: Memory) -> None:
    ids = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    for written, keep, tail in ((5, False, 0), (2, True, 2)):  # the second finds 4 of its tokens, and writes 2
        writer = memory.began(ids)
        memory.write(writer, written)
        memory.leave(writer, keep)
        memory.finds(ids, 9, writer, 1, tail)
    memory.pool.drop_unready([memory.find(ids, 9).last])
    memory.finds(ids, 9, writer, 1, 2)  # the ready block is not forgotten
    memory.check()


def test_of_two_that_computed_the_same_the_firsts_is_kept(memory: Memory) -> None:
    for _ in range(2):
        memory.write(memory.began([1, 2, 3]), 3)
    first, second = memory.writers
    for writer in (first, second):
        memory.grow(writer, [4, 5])
    assert not set(first.blocks) & set(second.blocks)
    for writer in (first, second):
        memory.leave(writer, keep=True)
        memory.finds([1, 2, 3, 4, 5], 5, first, 1, 1)
    memory.check()
    assert memory.pool.num_free == 29


def test_who_gave_up_first_goes_first_and_of_each_the_end() -> None:
    memory = Memory(1 + 5, 2)
    first, second = memory.kept([1, 2, 3, 4]), memory.kept([5, 6, 7, 8])
    for left in ([2, 2], [1, 2], [0, 2], [0, 1], [0, 0]):
        memory.pool.allocate(1)  # the first time a block of unknown contents
        for writer, count in zip((first, second), left, strict=True):
            memory.finds(writer.ids, 4, writer, count)
    # A sequence that is used again is evicted last.
    memory = Memory(1 + 4, 2)
    first, second = memory.kept([1, 2, 3, 4]), memory.kept([5, 6, 7, 8])
    memory.pool.add_ref(first.blocks)
    memory.pool.free(first.blocks)
    assert sorted(memory.pool.allocate(2).tolist()) == sorted(second.blocks)
    memory.finds([1, 2, 3, 4], 4, first, 2)
    memory.finds([5, 6], 2, second, 0)


def test_what_lies_behind_a_block_that_went_is_forgotten_but_stays_its_owners() -> None:
    pool = BlockPool(1 + 4, 2)
    first, second = pool.allocate(2).tolist()
    nodes = pool.insert([1, 2, 3, 4], [first, second], pool.root, 0, ready=True)
    pool.free([first])
    assert pool.match_prefix([1, 2, 3, 4], 4).blocks == [first, second], "nobody has needed it yet"
    assert all(map(pool.contains, nodes))
    assert second not in pool.allocate(3) and pool.num_free == 0
    assert pool.match_prefix([1, 2, 3, 4], 4) == Prefix([], pool.root) and pool.ref_count_P[second] == 1
    assert not any(map(pool.contains, nodes)) and pool.contains(pool.root)
    pool.free([second])
    assert pool.allocate(1).tolist() == [second]


def test_what_began_under_other_weights_is_shared_with_nobody_else() -> None:
    pool = BlockPool(1 + 4, 2)
    old, new = pool.allocate(2).tolist()
    (stale,) = pool.insert([1, 2], [old], pool.root_of(3), 0, ready=True)
    assert pool.match_prefix([1, 2, 3], 3, 4) == Prefix([], pool.root_of(4))
    (fresh,) = pool.insert([1, 2], [new], pool.root_of(4), 0, ready=True)
    assert stale is not fresh and pool.contains(stale) and pool.contains(fresh)
    assert [pool.match_prefix([1, 2, 3], 3, version).blocks for version in (3, 4, 0)] == [[old], [new], []]


def test_blocks_are_handed_out_once_and_as_an_array() -> None:
    pool = BlockPool(6, 2)
    mine = pool.allocate(3)
    assert mine.dtype == np.int64 and mine.shape == (3,)
    pool.add_ref(mine[:1].tolist())
    pool.free(mine.tolist())
    assert pool.num_free == 4 and mine[0] not in pool.allocate(4) and pool.num_free == 0
    with pytest.raises(RuntimeError, match="1 blocks requested from a pool of 0"):
        pool.allocate(1)
    assert pool.allocate(0).tolist() == [] and pool.ref_count_P.tolist() == [0, 1, 1, 1, 1, 1]
    assert [BlockPool(2, 16).blocks_for(tokens) for tokens in (0, 1, 15, 16, 17, 160)] == [0, 1, 1, 1, 2, 10]
