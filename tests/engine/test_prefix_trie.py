"""Tries of token segments: every sequence is in them, each segment is stored once, and sharing is as cheap as
possible."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise, product
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thresher.engine import packing
from thresher.engine.packing import (
    OrderedIds,
    PrefixTrie,
    build_trie,
    common_length,
    cut_group,
    group_tokens,
    in_order,
    shared_groups,
    worth_sharing,
)

Sequences = list[list[int]]


def ordered(given_sequences: Sequences) -> OrderedIds:
    return OrderedIds.of([np.array(ids, np.int64) for ids in given_sequences])


def shared_tokens(a: list[int], b: list[int]) -> int:
    return common_length(np.array(a, np.int64), np.array(b, np.int64))


@contextmanager
def costs(merge: float = 0.0, node: float = 0.0) -> Iterator[None]:
    with patch.object(packing, "MERGE_COST", merge), patch.object(packing, "NODE_COST", node):
        yield


@st.composite
def sequences(draw: st.DrawFn, most: int = 9) -> Sequences:
    """Draw sequences of two or three different ids, each of which continues or equals a prefix of an earlier one."""
    made: Sequences = []
    for _ in range(draw(st.integers(1, most))):
        source = draw(st.sampled_from(made)) if made and draw(st.booleans()) else []
        start = source[: draw(st.integers(0, len(source)))]
        made.append(start + draw(st.lists(st.integers(0, 2), min_size=not start, max_size=8)))
    return [made[n] for n in in_order({n: np.array(ids, np.int64) for n, ids in enumerate(made)})]


def paths(trie: PrefixTrie, given_sequences: Sequences) -> list[tuple[list[int], list[int]]]:
    """Return the ids along each sequence's pieces, and their rows."""
    starts = {0: 0}
    for s, length in enumerate(trie.lengths):
        starts[s + 1] = starts[s] + length
    of_row = {starts[s]: s for s in range(len(trie.lengths))}
    found = []
    ids = trie.ids(ordered(given_sequences)).tolist()
    for member in range(len(given_sequences)):
        rows: list[int] = []
        before = -1
        for position, row in trie.pieces[member]:
            segment = of_row[row]
            assert position == len(rows) and trie.parents[segment] == before
            rows.extend(range(row, row + trie.lengths[segment]))
            before = segment
        found.append(([ids[row] for row in rows], rows))
    return found


@given(sequences(), st.sampled_from([(0.0, 0.0), (0.1, 1.0), (0.3, 0.0), (0.0, 5.0)]))
@settings(max_examples=300, derandomize=True, deadline=None)
def test_a_trie_holds_every_sequence(given_sequences: Sequences, cost: tuple[float, float]) -> None:
    with costs(*cost):
        trie = build_trie(ordered(given_sequences))
        groups = shared_groups(ordered(given_sequences))
    assert sum(trie.lengths) == trie.tokens and min(trie.lengths) >= 1
    for member, (ids, rows) in enumerate(paths(trie, given_sequences)):
        assert ids == given_sequences[member]
        assert trie.rows(member, np.arange(0, len(ids), 2)).tolist() == rows[::2]
    assert all(parent < s for s, parent in enumerate(trie.parents))
    inside = {member for group in groups for member in group}
    for member, pieces in enumerate(trie.pieces):
        assert member in inside or len(pieces) == 1
    if cost == (0.0, 0.0):  # then every token that can be shared is shared
        fresh = [len(given_sequences[0]), *(len(b) - shared_tokens(a, b) for a, b in pairwise(given_sequences))]
        assert trie.tokens == sum(fresh)


def cheapest(given_sequences: Sequences, merge: float, node: float) -> float:
    """Find the lowest cost by trying all sets of prefixes that at least two sequences have."""
    starts = {tuple(a[:n]) for a, b in pairwise(given_sequences) for n in [shared_tokens(a, b)] if n}
    best = float("inf")
    for flags in product((False, True), repeat=len(starts)):
        chosen = [start for start, flag in zip(sorted(starts), flags, strict=True) if flag]
        above = [[c for c in chosen if tuple(ids[: len(c)]) == c] for ids in given_sequences]
        tokens = sum(
            len(ids) - max((len(c) for c in over), default=0) for ids, over in zip(given_sequences, above, strict=True)
        )
        for c in chosen:
            tokens += len(c) - max((len(d) for d in chosen if len(d) < len(c) and c[: len(d)] == d), default=0)
        rows = sum(len(ids) - len(c) for ids, over in zip(given_sequences, above, strict=True) for c in over)
        best = min(best, tokens + merge * rows + node * len(chosen))
    return best


def priced(trie: PrefixTrie, given_sequences: Sequences, merge: float, node: float) -> float:
    """Return the cost of a trie from its pieces: a segment of several sequences is shared."""
    having = Counter(row for pieces in trie.pieces for _, row in pieces)
    merged = 0
    for ids, pieces in zip(given_sequences, trie.pieces, strict=True):
        ends = [*(position for position, _ in pieces[1:]), len(ids)]
        merged += sum(len(ids) - end for (_, row), end in zip(pieces, ends, strict=True) if having[row] > 1)
    return trie.tokens + merge * merged + node * sum(count > 1 for count in having.values())


@given(sequences(most=6), st.sampled_from([(0.1, 1.0), (0.25, 0.5), (0.0, 2.0), (0.5, 0.0)]))
@settings(max_examples=150, derandomize=True, deadline=None)
def test_no_way_to_share_is_cheaper(given_sequences: Sequences, cost: tuple[float, float]) -> None:
    with costs(*cost):
        trie = build_trie(ordered(given_sequences))
    assert priced(trie, given_sequences, *cost) == pytest.approx(cheapest(given_sequences, *cost))


@given(st.lists(st.lists(st.sampled_from([0, 1, 255, 256, 65_536, 2**31, 2**32 - 1]), max_size=4), max_size=9))
@settings(max_examples=200, derandomize=True, deadline=None)
def test_the_order_is_that_of_the_ids(given_sequences: Sequences) -> None:
    arrays = {n: np.array(ids, np.int64) for n, ids in enumerate(given_sequences)}
    assert in_order(arrays) == sorted(range(len(given_sequences)), key=lambda n: (given_sequences[n], n))


def test_by_hand() -> None:
    """abcd, abcd again, abce, ab, x; equal sequences share everything."""
    given_sequences = [[1, 2], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 5], [9]]
    with costs():
        trie = build_trie(ordered(given_sequences))
    assert trie.ids(ordered(given_sequences)).tolist() == [1, 2, 3, 4, 5, 9]
    assert trie.lengths == [2, 1, 1, 1, 1] and trie.parents == [-1, 0, 1, 1, -1]
    assert trie.pieces == [[(0, 0)], *[[(0, 0), (2, 2), (3, 3)]] * 2, [(0, 0), (2, 2), (3, 4)], [(0, 5)]]
    assert shared_groups(ordered(given_sequences)) == []  # five tokens are not worth a merge at the measured costs


@pytest.mark.parametrize(
    ("prompt", "completion", "members", "shared"),
    [(700, 200, 8, True), (150, 850, 5, True), (56, 64, 8, True), (15, 110, 8, False), (4000, 500, 1, False)],
)
def test_what_is_worth_it(prompt: int, completion: int, members: int, shared: bool) -> None:
    """The shapes of the bench, and the demo's short prompt."""
    given_sequences = [list(range(prompt)) + [10_000 * (m + 1) + n for n in range(completion)] for m in range(members)]
    assert shared_groups(ordered(given_sequences)) == ([range(members)] if shared else [])
    expected = prompt * (1 if shared else members) + members * completion
    assert build_trie(ordered(given_sequences)).tokens == expected


@given(st.integers(1, 150), st.integers(0, 60), st.integers(1, 9))
@settings(max_examples=30, derandomize=True, deadline=None)
def test_tokens_of_a_group_are_what_is_computed(prompt: int, own: int, members: int) -> None:
    """The estimate is the largest over prompts up to the given length; the longest decides whether it is shared."""

    def computed(common_tokens: int) -> int:
        group = [list(range(common_tokens)) + [1000 * (m + 1) + n for n in range(own)] for m in range(members)]
        return build_trie(ordered(group)).tokens

    assert group_tokens(prompt, own, members) == max(computed(n) for n in range(1, prompt + 1))
    assert worth_sharing(prompt, own, members) is (members > 1 and computed(prompt) < members * (prompt + own))


@given(sequences(most=12), st.integers(1, 40))
@settings(max_examples=200, derandomize=True, deadline=None)
def test_a_group_is_cut_by_members(given_sequences: Sequences, budget: int) -> None:
    with costs(0.05, 0.5):
        cuts = cut_group(ordered(given_sequences), budget)
        sizes = [build_trie(ordered(given_sequences).run(cut.start, cut.stop)).tokens for cut in cuts]
    assert [n for cut in cuts for n in cut] == list(range(len(given_sequences)))
    assert all(size <= budget or len(cut) == 1 for size, cut in zip(sizes, cuts, strict=True))


def test_a_run_with_fewer_members_is_held_to_the_budget_too() -> None:
    """At the real costs sharing a prompt may pay for 12 members but not for 8, which then are more tokens."""
    rng = random.Random(0)
    shorter = 0
    for _ in range(300):
        prompt, own = [0] * rng.randint(5, 60), rng.randint(5, 60)
        members = sorted([*prompt, *[rng.randint(1, 2) for _ in range(rng.randint(own // 2, own))]] for _ in range(12))
        budget = rng.randint(150, 600)
        for cut in cut_group(ordered(members), budget):
            assert len(cut) == 1 or build_trie(ordered(members).run(cut.start, cut.stop)).tokens <= budget
            shorter += len(cut) < 12
    assert shorter > 100


def test_a_cut_falls_where_the_least_is_shared() -> None:
    """With two first turns, the prefix is repeated, but neither turn is."""
    prompt = [0] * 10
    members = [[*prompt, turn, turn, turn, turn, n] for turn in (1, 2) for n in range(3)]
    with costs():
        assert cut_group(ordered(members), 24) == [range(6)]
        assert cut_group(ordered(members), 22) == [range(3), range(3, 6)]
        assert cut_group(ordered(members), 15) == [range(n, n + 1) for n in range(6)]


@pytest.mark.slow
def test_a_long_chain_of_prefixes() -> None:
    """The chain is deeper than Python's stack."""
    given_sequences = [list(range(n)) for n in range(1, 1200)]
    with costs():
        trie = build_trie(ordered(given_sequences))
    assert trie.ids(ordered(given_sequences)).tolist() == list(range(1199)) and len(trie.pieces[-1]) == 1199
