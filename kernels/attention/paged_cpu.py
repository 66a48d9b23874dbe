"""Attention of new rows to keys and values in the blocks of a cache, on a CPU.

    o[i] = sum_{j <= i} softmax_j(q[i] . k[j] / sqrt(D)) v[j]         (Vaswani et al. 2017, equation 1)

A row's bits depend only on its position and its own keys (CPU, float32). A block's scores are one product, the softmax
covers the whole row, a block's values are weighted in another product, and the blocks' sums are added in order. Rows
that see the same block may share its products. This needs a BLAS in which a row of a batched product does not depend on
the others (tiles.py; docs/design.md, "Rollout"). `paged_buckets` lays out a step, `paged_attention` computes a layer.

Axes: T rows of the step, B pieces computed together, Q rows of a piece, C blocks of a piece, N query heads, K key/value
heads, D head dimension, M rows of a block's product with one KV head, X blocks that a call multiplies, L rows of all
products, P blocks of the cache, S slots of a block, J keys; while a step is laid out, N pieces, I pairs of a piece and
a block that it sees, W tiles, G calls (docs/notation.md).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thresher.kernels.attention.tiles import ROW_TILE

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

SLOT_STEP = 16  # a block's slots are a multiple of this: softmax uses another code path for the rest of a row
PIECE = 64  # new rows of one sequence that share products
SHARED_ROWS = 64  # queries of different sequences that share a product
SCORE_ELEMENTS = 1 << 19  # scores held at once: 2 MiB of float32; queries and sums of values take four times as much
# Costs on a CPU, in multiples of the time for one row of a matrix's product:
CALL = 200  # another call of torch's batched product
COPY = 16  # reading or copying the matrix, a block's keys of one head
LAUNCH = 1024  # another bucket's calls, in scores of a query to a block


@dataclass(frozen=True, slots=True)
class Tiles:
    """One batched product: left rows [X * K, M, ..], which begin at `first`, by X blocks of the cache.

    blocks: consecutive ones (slice), which are multiplied in place, or (int64) those that are gathered first.
    """

    first: int
    rows: int  # M
    blocks: slice | Tensor


@dataclass(frozen=True, slots=True)
class PagedBucket:
    """Pieces of a step that are computed together: each has Q rows, and sees at most C blocks.

    All index tensors are int64 and flat.
    tiles: the products; their L rows are contiguous, followed by a row of zeros.
    query_L: the query of each row of the scores' products, row * N + head. weight_L: the weights of each row of the
    values' products, ((b * Q + q) * N + head) * C + c. Both are 0 for rows that are never read.
    score_BQNC, part_CBQN: the index among the L rows of a block's scores, and of its sum of values; L if a piece has no
    such block.
    unseen_BQJ: [B, Q, J], for the last J of the C * S keys: minus infinity for those that a row does not see, else 0;
    all other keys are seen.
    out_T, take_T: rows of the step's output, and which of the B * Q rows go there (None: all of them).
    """

    tiles: list[Tiles]
    query_L: Tensor
    weight_L: Tensor
    score_BQNC: Tensor
    part_CBQN: Tensor
    unseen_BQJ: Tensor
    out_T: Tensor
    take_T: Tensor | None


def paged_attention(q_TND: Tensor, k_PKDS: Tensor, v_PKSD: Tensor, buckets: Sequence[PagedBucket]) -> Tensor:
    """Attend new rows q [T, N, D] to cached keys [P, K, D, S] and values [P, K, S, D]; returns [T, N, D].

    The keys and values of the new rows are already in the cache. A row at position p sees the first p + 1 keys of its
    own sequence. Other values in the blocks have no effect, as long as they are finite.
    """
    # Scores and weights are float32 for any dtype of the cache, as in the fused kernels of training.
    dtype = torch.promote_types(q_TND.dtype, torch.float32)
    queries = (q_TND.to(dtype) * q_TND.shape[2] ** -0.5).flatten(0, 1)
    out_TND = torch.zeros_like(q_TND)  # rows of no bucket pad the batch
    for bucket in buckets:
        o = _attend(queries, k_PKDS, v_PKSD, bucket, q_TND.shape[1]).to(q_TND.dtype)
        out_TND.index_copy_(0, bucket.out_T, o if bucket.take_T is None else o.index_select(0, bucket.take_T))
    return out_TND


def _attend(queries: Tensor, k_PKDS: Tensor, v_PKSD: Tensor, bucket: PagedBucket, heads: int) -> Tensor:
    """Compute a bucket's rows [B * Q, N, D]; queries: [T * N, D], scaled."""
    slots, dim = v_PKSD.shape[2:]
    pieces, rows, keys = bucket.unseen_BQJ.shape
    scores = _multiply(queries.index_select(0, bucket.query_L), k_PKDS, bucket.tiles)
    scores_BQNJ = scores.index_select(0, bucket.score_BQNC).view(pieces, rows, heads, -1)
    scores_BQNJ[..., -keys:] += bucket.unseen_BQJ[:, :, None]
    weights = torch.softmax(scores_BQNJ, -1).view(-1, slots)
    sums = _multiply(weights.index_select(0, bucket.weight_L), v_PKSD, bucket.tiles)
    parts = sums.index_select(0, bucket.part_CBQN).view(-1, pieces * rows, heads, dim).unbind()
    o = parts[0]
    for part in parts[1:]:
        o = o + part  # the order of torch.sum depends on the number of terms
    return o


def _multiply(left: Tensor, cache: Tensor, tiles: Sequence[Tiles]) -> Tensor:
    """Multiply rows [L, I] by blocks' matrices [I, O] of the cache [P, K, I, O]: [L + 1, O], the last row zeros."""
    inner, outer = cache.shape[2:]
    out = left.new_empty(len(left) + 1, outer)
    out[-1] = 0
    for tile in tiles:
        blocks = cache[tile.blocks] if isinstance(tile.blocks, slice) else cache.index_select(0, tile.blocks)
        right = blocks.to(left.dtype).flatten(0, 1)
        rows = slice(tile.first, tile.first + len(right) * tile.rows)
        torch.bmm(left[rows].view(-1, tile.rows, inner), right, out=out[rows].view(-1, tile.rows, outer))
    return out


@dataclass(frozen=True, slots=True)
class QueryRuns:
    """Runs of consecutive new tokens, one per sequence.

    slot_N: row of the sequence in the block table (and in `BatchState`). start_N: position of the run's first token in
    the sequence. count_N: number of tokens. row_N: row of the first token among all new rows. All int64.
    """

    slot_N: Ints
    start_N: Ints
    count_N: Ints
    row_N: Ints

    def __getitem__(self, index: Ints) -> "QueryRuns":
        return QueryRuns(self.slot_N[index], self.start_N[index], self.count_N[index], self.row_N[index])


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Sizes of the model and the cache that a layout needs.

    block_size: tokens of a block. row_tile: the rows of a product are padded to a multiple of it (tiles.py)."""

    heads: int
    kv_heads: int
    block_size: int
    row_tile: int = ROW_TILE

    @property
    def per_kv(self) -> int:
        """Return the number of query heads of a KV head."""
        return self.heads // self.kv_heads


def paged_buckets(
    table_BP: Ints, runs: QueryRuns, shape: CacheShape, device: torch.device, *, share: bool = True
) -> list[PagedBucket]:
    """Lay out a step's new rows: `runs`, one per sequence, of any length, whose rows are contiguous.

    table_BP: each sequence's blocks in order. share: rows of different sequences share the products of a block that
    several of them have.
    """
    pieces = _cut(runs)
    blocks_N = (pieces.start_N + pieces.count_N - 1) // shape.block_size + 1
    alike = _alike(pieces.count_N, blocks_N, shape)
    return [_bucket(table_BP, pieces[index], blocks_N[index], shape, device, share) for index in alike]


def places(count_N: Ints) -> Ints:
    """Return 0 .. count - 1 for each count, concatenated."""
    ends_N = np.cumsum(count_N)
    return np.arange(int(ends_N[-1]) if len(ends_N) else 0) - np.repeat(ends_N - count_N, count_N)


def _cut(runs: QueryRuns) -> QueryRuns:
    """Split runs longer than PIECE into pieces of that length."""
    if runs.count_N.max(initial=0) <= PIECE:
        return runs
    parts_N = -(-runs.count_N // PIECE)
    run = np.repeat(np.arange(len(parts_N)), parts_N)
    offset = PIECE * places(parts_N)
    count_N = np.minimum(runs.count_N[run] - offset, PIECE)
    return QueryRuns(runs.slot_N[run], runs.start_N[run] + offset, count_N, runs.row_N[run] + offset)


def _alike(count_N: Ints, blocks_N: Ints, shape: CacheShape) -> Iterator[Ints]:
    """Yield groups of pieces to compute together.

    They have similar numbers of rows and of blocks, because both are padded to the largest. Padding and a further
    bucket both cost time."""
    size_N = np.frexp(count_N - 1)[1]  # 1, 2, 3 to 4, 5 to 8 .. rows
    order = np.lexsort((blocks_N, size_N))
    size_N, blocks_N, count_N = size_N[order], blocks_N[order], count_N[order]
    first, filling = 0, 0
    for end in [*(np.flatnonzero((np.diff(size_N) != 0) | (np.diff(blocks_N) != 0)) + 1), len(order)]:
        queries = int(count_N[first:end].max()) * shape.heads
        if end < len(order):
            filling += (end - first) * int(blocks_N[end] - blocks_N[end - 1])
            if size_N[end] == size_N[first] and filling * queries <= LAUNCH:
                continue
        at_once = max(1, SCORE_ELEMENTS // (queries * int(blocks_N[end - 1]) * shape.block_size))
        yield from (order[start : min(start + at_once, end)] for start in range(first, end, at_once))
        first, filling = end, 0


def _bucket(
    table_BP: Ints, pieces: QueryRuns, blocks_B: Ints, shape: CacheShape, device: torch.device, share: bool
) -> PagedBucket:
    rows, columns = int(pieces.count_N.max()), int(blocks_B.max())
    there_BC = np.arange(columns) < blocks_B[:, None]
    block_I = table_BP[pieces.slot_N, :columns][there_BC]
    tiles, count, first_I, rows_I = _tile(block_I, rows * shape.per_kv, shape, device, share)

    # Places of the products' rows of each query and block.
    first_BC, rows_BC = np.full(there_BC.shape, count), np.zeros(there_BC.shape, np.int64)
    first_BC[there_BC], rows_BC[there_BC] = first_I, rows_I
    kv_N, within_N = np.divmod(np.arange(shape.heads), shape.per_kv)
    within_QN = np.arange(rows)[:, None] * shape.per_kv + within_N
    place_BQNC = first_BC[:, None, None] + rows_BC[:, None, None] * kv_N[:, None] + within_QN[:, :, None]
    place_BQNC = np.where(there_BC[:, None, None], place_BQNC, count)
    within_BQ = np.minimum(np.arange(rows), pieces.count_N[:, None] - 1)
    row_BQ = pieces.row_N[:, None] + within_BQ
    query_L, weight_L = np.zeros(count + 1, np.int64), np.zeros(count + 1, np.int64)
    query_L[place_BQNC] = (row_BQ[:, :, None] * shape.heads + np.arange(shape.heads))[..., None]
    weight_L[place_BQNC] = np.arange(place_BQNC.size).reshape(place_BQNC.shape)

    key_J = np.arange(int(pieces.start_N.min()) // shape.block_size * shape.block_size, columns * shape.block_size)
    unseen_BQJ = key_J > (pieces.start_N[:, None] + within_BQ)[:, :, None]
    out_T, take_T = row_BQ.reshape(-1), None
    if pieces.count_N.min() < rows:
        take = np.flatnonzero(np.arange(rows) < pieces.count_N[:, None])
        out_T, take_T = out_T[take], torch.from_numpy(take).to(device)
    place_CBQN = np.moveaxis(place_BQNC, 3, 0)
    minus_inf_BQJ = np.where(unseen_BQJ, np.float32(-np.inf), np.float32(0))
    put = (query_L[:-1], weight_L[:-1], place_BQNC.reshape(-1), place_CBQN.reshape(-1), minus_inf_BQJ, out_T)
    query, weight, score, part, unseen, out = (torch.from_numpy(x).to(device) for x in put)
    return PagedBucket(tiles, query, weight, score, part, unseen, out, take_T)


def _tile(
    block_I: Ints, queries: int, shape: CacheShape, device: torch.device, share: bool
) -> tuple[list[Tiles], int, Ints, Ints]:
    """Lay out products of blocks with `queries` queries per KV head each.

    Return them, their number of rows, and for each of block_I its first row of the first KV head and the distance to
    the rows of the next head."""
    tiles: list[Tiles] = []
    count, first_I, rows_I = 0, np.empty_like(block_I), np.empty_like(block_I)
    order_I = np.argsort(block_I, kind="stable")
    block_I = block_I[order_I]
    _, members_X = np.unique(block_I, return_counts=True)
    number_I = places(members_X)  # among the pieces that see a block
    at_once = SHARED_ROWS // queries if share else 1
    shared_I = np.repeat(members_X > 1, members_X) & (at_once > 1)
    apart = int(block_I[-1]) + CALL + 2  # so that blocks of different rounds are never close
    for chosen_I, most in (~shared_I, 1), (shared_I, min(at_once, int(members_X.max()))):
        if not chosen_I.any():
            continue
        # A tile is a block with up to `most` of the pieces that see it; further ones are in the next round.
        rows = -(-most * queries // shape.row_tile) * shape.row_tile
        round_I, within_I = np.divmod(number_I[chosen_I], most)
        key_W, tile_I = np.unique(round_I * apart + block_I[chosen_I], return_inverse=True)
        found, place_W, blocks = _calls(key_W, apart, rows, count, shape, device)
        tiles += found
        index = order_I[chosen_I]
        first_I[index] = count + place_W[tile_I] * shape.kv_heads * rows + within_I * queries
        rows_I[index] = rows
        count += blocks * shape.kv_heads * rows
    return tiles, count, first_I, rows_I


def _calls(
    key_W: Ints, apart: int, rows: int, first: int, shape: CacheShape, device: torch.device
) -> tuple[list[Tiles], Ints, int]:
    """Lay out the calls that multiply the tiles' blocks, key_W % apart, in this order.

    Return them, the place of each tile among all multiplied blocks, and the number of these. Unused blocks in between
    are multiplied if that costs less than another call; all are gathered if both cost more than a copy."""
    matrix = shape.kv_heads * (rows + COPY)
    begins_W = np.append(True, np.diff(key_W) - 1 > CALL / matrix)
    begin_G = np.flatnonzero(begins_W)
    start_G, size_G = key_W[begin_G], key_W[np.append(begin_G[1:], len(key_W)) - 1] - key_W[begin_G] + 1
    vain = int(size_G.sum()) - len(key_W)
    if (len(start_G) - 1) * CALL + vain * matrix > len(key_W) * shape.kv_heads * COPY:
        return [Tiles(first, rows, torch.from_numpy(key_W % apart).to(device))], np.arange(len(key_W)), len(key_W)
    if shape.kv_heads == 1:  # torch multiplies a single matrix by another routine than a batch, with other last bits
        start_G, size_G = start_G - (size_G == 1), np.maximum(size_G, 2)
    before_G = np.cumsum(size_G) - size_G
    place_W = key_W + (before_G - start_G)[np.cumsum(begins_W) - 1]
    calls = zip((start_G % apart).tolist(), size_G.tolist(), before_G.tolist(), strict=True)
    tiles = [
        Tiles(first + before * shape.kv_heads * rows, rows, slice(start, start + size)) for start, size, before in calls
    ]
    return tiles, place_W, int(size_G.sum())
