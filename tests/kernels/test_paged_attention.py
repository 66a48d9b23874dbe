"""Tests of attention to a KV cache in blocks: results against float64, and equal bits of a row however it is computed.

Unowned blocks are full of NaN throughout, and slots after a sequence's end are not zero.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from attention_cases import QKV, make_qkv, variances
from batch_invariance import needs_invariant_attention, using_threads
from torch import Tensor

from thresher.kernels.attention import paged_cpu
from thresher.kernels.attention.paged_cpu import CacheShape, PagedBucket, QueryRuns, paged_attention, paged_buckets
from thresher.kernels.attention.tiles import row_tile

# Query heads, key/value heads, head dimension: those of Qwen2.5 (0.5B, 1.5B, 3B, 7B), Llama 3.2 (1B, 3B) and 3.1 (8B),
# Qwen3 (0.6B), and some that are small or odd.
HEADS = [
    (14, 2, 64),
    (12, 2, 128),
    (16, 2, 128),
    (28, 4, 128),
    (32, 8, 64),
    (24, 8, 128),
    (32, 8, 128),
    (16, 8, 128),
    (1, 1, 32),
    (4, 2, 24),
    (7, 1, 64),
    (5, 1, 24),
]
SMALL = [(14, 2, 64), (1, 1, 32), (4, 2, 24), (7, 1, 64), (5, 1, 24)]
PAGES = [16, 32, 64]
LENGTHS = [1, 15, 16, 17, 63, 64, 65, 200]
LONG = 700
SHARERS = 9  # tables with the same blocks as the longest sequence, for rows that share them

Run = tuple[int, int, int]  # table, first position, rows


class Cache:
    """Sequences with known q, k and v, whose keys and values are in a KV cache already, on randomly assigned blocks.

    spread: one of every `spread` blocks is owned; the others lie between them. The last SHARERS tables repeat that of
    the longest sequence, so that rows of several tables share products.
    """

    def __init__(
        self,
        heads: tuple[int, int, int],
        block_size: int,
        lengths: Sequence[int] = LENGTHS,
        spread: int = 1,
        fill: float = 50.0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        query_heads, kv_heads, dim = heads
        tile = row_tile(dim, block_size, dtype, torch.device("cpu"))
        self.shape = CacheShape(query_heads, kv_heads, block_size, tile)
        needs = [-(-length // block_size) for length in lengths]
        count = 1 + spread * (sum(needs) + 1)  # at least one spare block, which stays NaN
        free = list(range(1, count))
        Random(0).shuffle(free)
        if spread == 1:
            free.sort(key=lambda block: block == count - 1)
        self.k = torch.full((count, kv_heads, dim, block_size), torch.nan, dtype=dtype)
        self.v = torch.full((count, kv_heads, block_size, dim), torch.nan, dtype=dtype)
        self.k[0], self.v[0] = fill, -fill
        self.table_BP = np.zeros((len(lengths) + SHARERS, max(needs)), np.int64)
        self.qkv: list[QKV] = []
        for number, (length, need) in enumerate(zip(lengths, needs, strict=True)):
            q, k, v = (x.to(dtype) for x in make_qkv(*heads, length, seed=number))
            self.qkv.append((q, k, v))
            blocks, free = free[:need], free[need:]
            self.table_BP[number, :need] = blocks
            # After the last token: finite, but arbitrary.
            pad = (0, 0, 0, 0, 0, need * block_size - length)
            k, v = F.pad(k, pad, value=fill), F.pad(v, pad, value=-fill)
            self.k[blocks] = k.view(need, block_size, kv_heads, dim).permute(0, 2, 3, 1)
            self.v[blocks] = v.view(need, block_size, kv_heads, dim).transpose(1, 2)
        longest = max(range(len(lengths)), key=lambda number: lengths[number])
        self.longest = longest
        self.table_BP[len(lengths) :] = self.table_BP[longest]
        self.sharers = list(range(len(lengths), len(lengths) + SHARERS))

    def buckets(self, runs: Sequence[Run], shared: bool = False) -> list[PagedBucket]:
        slot_N, start_N, count_N = (np.array(column, np.int64) for column in zip(*runs, strict=True))
        pieces = QueryRuns(slot_N, start_N, count_N, np.cumsum(count_N) - count_N)
        return paged_buckets(self.table_BP, pieces, self.shape, torch.device("cpu"), share=shared)

    def rows(self, run: Run) -> Tensor:
        table, start, count = run
        number = table if table < len(self.qkv) else self.longest
        return self.qkv[number][0][start : start + count]

    def attend(self, runs: Sequence[Run], shared: bool = False) -> list[Tensor]:
        """Return each run's outputs, computed in one step."""
        q_TND = torch.cat([self.rows(run) for run in runs])
        out_TND = paged_attention(q_TND, self.k, self.v, self.buckets(runs, shared))
        return list(out_TND.split([count for _, _, count in runs]))

    def whole(self) -> list[Tensor]:
        """Return every sequence's rows, each sequence prefilled whole and alone."""
        return [self.attend([(number, 0, len(q))])[0] for number, (q, _, _) in enumerate(self.qkv)]


@lru_cache(maxsize=64)
def truth(
    heads: tuple[int, int, int], length: int, seed: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return a sequence's outputs in float64, and the square of each row's allowed error (attention_cases.py)."""
    q, k, v = (x.to(dtype) for x in make_qkv(*heads, length, seed))
    inputs = (x.double().transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(*inputs, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    return out, 9 * variances((q, k, v), [length], dtype)[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("block_size", PAGES)
@pytest.mark.parametrize("heads", SMALL[:3], ids=str)
@pytest.mark.fast_cases(2)
def test_rows_are_right_however_they_are_fed(heads: tuple[int, int, int], block_size: int, dtype: torch.dtype) -> None:
    """Rows are fed all at once, in pieces, one by one and with shared products; float64 is the truth."""
    cache = Cache(heads, block_size, [*LENGTHS, LONG], dtype=dtype)
    fed = [cache.attend([(number, 0, len(q)) for number, (q, _, _) in enumerate(cache.qkv)])]
    fed.append([torch.cat(cache.attend(cut)) for cut in cuts(cache)])
    for outputs in fed:
        for number, found in enumerate(outputs):
            right, squares = truth(heads, len(found), number, dtype)
            assert (found - right).norm() <= squares.sum().sqrt()
    runs = [(table, 600 + 5 * at, 1 + at) for at, table in enumerate(cache.sharers)]
    right, squares = truth(heads, LONG, cache.longest, dtype)
    for (_, start, count), found in zip(runs, cache.attend(runs, shared=True), strict=True):
        rows = slice(start, start + count)
        assert (found - right[rows]).norm() <= squares[rows].sum().sqrt()


@pytest.mark.parametrize("heads", [heads for heads in HEADS if heads not in SMALL[:3]], ids=str)
def test_rows_of_every_shape_are_right(heads: tuple[int, int, int]) -> None:
    cache = Cache(heads, 32, [65, 17])
    for number, found in enumerate(cache.attend([(0, 0, 65), (1, 0, 17)])):
        right, squares = truth(heads, len(found), number)
        assert (found - right).norm() <= squares.sum().sqrt()


def cuts(cache: Cache) -> Iterator[list[Run]]:
    """Yield each sequence's rows in random pieces."""
    rng = Random(1)
    for number, (q, _, _) in enumerate(cache.qkv):
        ends = sorted({len(q), *(rng.randint(1, len(q)) for _ in range(4))})
        yield [(number, start, end - start) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def steps(cache: Cache) -> Iterator[tuple[str, list[Run], bool]]:
    """Yield (how, runs of one step, whether products are shared): the ways in which a row may be computed."""
    rng = Random(2)
    lengths = [len(q) for q, _, _ in cache.qkv]
    numbers = range(len(lengths))
    everyone = [(number, 0, lengths[number]) for number in numbers]
    yield "prefilled together", everyone, False
    pieces = list(cuts(cache))
    for part in range(5):
        yield "a piece of each", [runs[part] for runs in pieces if part < len(runs)], False
    most = lengths[cache.longest]
    for position in (0, 14, 15, 16, 63, 64, most - 1):
        yield "decoded alone", [(cache.longest, position, 1)], False
    yield "decoded, the last of each", [(number, lengths[number] - 1, 1) for number in numbers], False
    for _ in range(2):
        order = rng.sample(numbers, len(lengths))
        yield "decoded, anywhere", [(number, rng.randrange(lengths[number]), 1) for number in order], False
    for count in range(2, 10):
        fitting = [number for number in numbers if lengths[number] >= count]
        drafts = [(number, rng.randint(0, lengths[number] - count), count) for number in fitting]
        single = [(number, lengths[number] - 1, 1) for number in numbers if number not in fitting]
        yield f"{count} drafts", (drafts if count % 2 else drafts[-1:]) + single, False
    for counts in ([1] * SHARERS, list(range(1, SHARERS + 1)), [2, 1]):
        runs = [
            (table, rng.randint(most // 2, most - count), count)
            for table, count in zip(cache.sharers, counts, strict=False)
        ]
        others = [(number, lengths[number] - 1, 1) for number in numbers]
        yield "with shared products", runs, True
        yield "with shared products among others", others + runs, True
        yield "the same, not shared", runs + others, False


def assert_equal_bits(cache: Cache) -> None:
    expected = cache.whole()
    for how, runs, shared in steps(cache):
        for (table, start, count), found in zip(runs, cache.attend(runs, shared), strict=True):
            rows = expected[table if table < len(expected) else cache.longest][start : start + count]
            assert torch.equal(found, rows), f"{how}: {count} rows of {table} from {start}"


@pytest.mark.parametrize("block_size", PAGES)
@pytest.mark.parametrize(
    "heads", [pytest.param(heads, marks=[pytest.mark.bits] if heads in SMALL[2:4] else []) for heads in HEADS], ids=str
)
@pytest.mark.fast_cases(6)
def test_a_row_has_the_same_bits_however_it_is_computed(heads: tuple[int, int, int], block_size: int) -> None:
    needs_invariant_attention(*heads)
    assert_equal_bits(Cache(heads, block_size))


@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("heads", SMALL, ids=str)
@pytest.mark.fast_cases(3)
def test_so_it_has_in_long_sequences_and_small_pieces(
    heads: tuple[int, int, int], block_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_invariant_attention(*heads)
    monkeypatch.setattr(paged_cpu, "SCORE_ELEMENTS", 4 * LONG * heads[0])
    assert_equal_bits(Cache(heads, block_size, [LONG, 40, LONG - 1]))


@pytest.mark.parametrize(("heads", "threads"), [((14, 2, 64), 2), *((heads, 3) for heads in SMALL)], ids=str)
def test_so_it_has_on_several_threads(heads: tuple[int, int, int], threads: int) -> None:
    needs_invariant_attention(*heads, threads)
    with using_threads(threads):
        assert_equal_bits(Cache(heads, 64, [1, 17, 65, 130]))


@pytest.mark.parametrize("heads", [(4, 2, 24), (1, 1, 32), (16, 8, 128)], ids=str)
def test_where_the_blocks_lie_changes_nothing(heads: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense blocks are computed in place, in one call or one call per run of blocks, and scattered ones are gathered;
    all of these occur here."""
    needs_invariant_attention(*heads)
    lengths = [200, 199, 198, 197, 196]
    dense, scattered = Cache(heads, 16, lengths), Cache(heads, 16, lengths, spread=20)
    runs = [(number, len(q) - 1, 1) for number, (q, _, _) in enumerate(dense.qkv)]
    rows, whole = scattered.attend(runs), scattered.whole()
    assert [len(blocks) for blocks in multiplied(scattered, runs)] == [5 * 13]
    assert multiplied(dense, runs) == [slice(1, 1 + 5 * 13)]
    assert all(map(torch.equal, dense.attend(runs), rows)) and all(map(torch.equal, dense.whole(), whole))
    monkeypatch.setattr(paged_cpu, "CALL", 0)  # so that no block is multiplied needlessly
    alone = [(number, len(q) - 1, 1) for number, (q, _, _) in list(enumerate(dense.qkv))[:3]]
    apart = multiplied(dense, alone)
    assert len(apart) > 1 and all(isinstance(blocks, slice) for blocks in apart)
    assert all(map(torch.equal, dense.attend(alone), rows)) and all(map(torch.equal, dense.whole(), whole))


def multiplied(cache: Cache, runs: Sequence[Run], shared: bool = False) -> list[Any]:
    """Return the blocks of each product in a step's only bucket."""
    (bucket,) = cache.buckets(runs, shared)
    return [tile.blocks for tile in bucket.tiles]


def test_blocks_are_shared_where_it_is_asked_for() -> None:
    """The tests above assume this."""
    cache = Cache((14, 2, 64), 16)
    runs = [(table, 150 + at, 1) for at, table in enumerate(cache.sharers)]
    (bucket,) = cache.buckets(runs, shared=True)
    (apart,) = cache.buckets(runs)
    # 9 rows of 7 heads are 63 queries of a product with a KV head: one tile per block. Unshared, 9 tiles of 8 rows.
    blocks = 150 // 16 + 1
    assert [(tile.rows, len(tile.blocks)) for tile in bucket.tiles] == [(64, blocks)]
    assert [(tile.rows, len(tile.blocks)) for tile in apart.tiles] == [(8, 9 * blocks)]
    (lone,), (unasked,) = cache.buckets(runs[:1], shared=True), cache.buckets(runs[:1])
    assert torch.equal(lone.query_L, unasked.query_L)


@pytest.mark.parametrize("block_size", PAGES)
def test_what_lies_behind_a_sequence_does_not_matter(block_size: int) -> None:
    results = []
    for fill in (0.0, 1e4, -3.0):
        cache = Cache((4, 2, 24), block_size, fill=fill)
        results.append([rows for _, runs, shared in steps(cache) for rows in cache.attend(runs, shared)])
    assert all(all(map(torch.equal, results[0], other)) for other in results[1:])


@pytest.mark.parametrize("heads", [(1, 1, 32), (7, 1, 64)], ids=str)
def test_no_product_is_of_a_lone_matrix_or_of_odd_rows(
    heads: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: torch passes a single matrix to another routine, which on some machines gives other last bits."""
    shapes: list[tuple[int, ...]] = []
    product = torch.bmm

    def bmm(x: Tensor, y: Tensor, out: Tensor) -> Tensor:
        shapes.append(tuple(x.shape))
        return product(x, y, out=out)

    cache = Cache(heads, 64, [1, 40, 70])  # measures the row tile with products if it is not known yet
    monkeypatch.setattr(torch, "bmm", bmm)
    for runs in ([(0, 0, 1)], [(1, 39, 1)], [(1, 0, 40)], [(2, 69, 1)]):
        cache.attend(runs)
    cache.attend([(table, 66, 1) for table in cache.sharers], shared=True)
    assert len(shapes) == 2 * 5
    assert all(matrices >= 2 and rows % cache.shape.row_tile == 0 for matrices, rows, _ in shapes)


def test_rows_of_no_sequence_are_zeros() -> None:
    """A step's rows are padded; those after the last run belong to no bucket."""
    cache = Cache((4, 2, 24), 16)
    q_TND = torch.cat([cache.qkv[6][0][64:65], torch.full((15, 4, 24), torch.nan)])
    out_TND = paged_attention(q_TND, cache.k, cache.v, cache.buckets([(6, 64, 1)]))
    assert torch.equal(out_TND[:1], cache.attend([(6, 64, 1)])[0]) and not out_TND[1:].any()
