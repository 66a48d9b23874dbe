"""Attention of new rows to keys and values that lie in the blocks of a cache, on a CPU.

    o[i] = sum_{j <= i} softmax_j(q[i] . k[j] / sqrt(D)) v[j]         (Vaswani et al. 2017, equation 1)

A row's bits depend on its position and its own keys alone (CPU, float32). A block's scores are one product, the softmax
goes over the whole row, a block's values are weighted in another product, and the blocks' sums are added in order. Rows
that see the same block may share its products. This needs a BLAS in which a row of a batched product does not depend on
the others (tiles.py; docs/design.md, "Rollout"). Where most of the first blocks belong to a bucket's rows, the products
run over the cache in place. `paged_buckets` lays a step out, `paged_attention` computes a layer.

Axes: T rows of the step, B pieces computed together, Q rows of a piece, C blocks of a piece, X blocks that a product
runs over, N query heads, K key/value heads, D head dimension, M queries of a block's product to one KV head, W tiles of
a shared block, P blocks of the cache, S slots of a block, J keys; while a step is laid out, N pieces, I pairs of a
piece and a shared block, G shared blocks, L their queries (docs/notation.md).
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

SLOT_STEP = 16  # a block's slots are a multiple of this: softmax takes another path for the rest of a row
PIECE = 64  # new rows of one sequence that share products
SHARED_ROWS = 64  # queries of different sequences that share one
SCORE_ELEMENTS = 1 << 20  # scores held at once: 4 MiB of float32, so that they stay in a CPU's cache
LAUNCH = 256  # blocks of filling, of all KV heads, that cost a CPU about what another bucket's calls do
IN_PLACE_ROWS = 16  # most queries of a product that runs over the cache in place: blocks of others are computed in vain


@dataclass(frozen=True, slots=True)
class SharedTiles:
    """Products of blocks that several pieces of a bucket share: W tiles of M queries, each against one block.

    All are int64. The scores of head h, of each KV head's R, of piece b's row q over shared block c lie at place
    ((b * Q + q) * R + h) * blocks + c.
    block_W: a tile's block. query_WKM: flat, the query of each place of a tile, as in PagedBucket; place_WM: flat,
    where its scores lie; filling repeats any. used_L: which of the W * M are no filling; target_L: their places.
    """

    blocks: int
    block_W: Tensor
    query_WKM: Tensor
    place_WM: Tensor
    used_L: Tensor
    target_L: Tensor


@dataclass(frozen=True, slots=True)
class PagedBucket:
    """Pieces of a step that are computed together: each has Q rows, and C blocks of its own behind those it shares.

    block_BC: int64, flat, each piece's own blocks; 0 where it needs fewer.
    in_place: products run over so many of the cache's blocks, from block 0 on; 0: over the blocks of block_BC.
    query_XKM: int64, flat, the query of each place of those products: row * N + head; filling repeats any.
    unseen_BQJ: [B, Q, (shared blocks + C) * S], minus infinity at keys that a row does not see, else 0.
    out_T, take_T: int64, rows of the step's output, and which of the B * Q go there (None: all of them).
    """

    block_BC: Tensor
    in_place: int
    query_XKM: Tensor
    unseen_BQJ: Tensor
    out_T: Tensor
    take_T: Tensor | None
    shared: SharedTiles | None


def paged_attention(q_TND: Tensor, k_PKDS: Tensor, v_PKSD: Tensor, buckets: Sequence[PagedBucket]) -> Tensor:
    """New rows q [T, N, D] against cached keys [P, K, D, S] and values [P, K, S, D], which already hold the new rows'
    own -> [T, N, D].

    A row at position p sees the first p + 1 keys of its own sequence, whatever the blocks hold beyond them (as long as
    it is finite).
    """
    # Scores and weights in float32 whatever the cache holds, as the fused kernels of training keep them.
    dtype = torch.promote_types(q_TND.dtype, torch.float32)
    queries = (q_TND.to(dtype) * q_TND.shape[2] ** -0.5).flatten(0, 1)
    out_TND = torch.zeros_like(q_TND)  # rows of no bucket pad the batch
    for bucket in buckets:
        o = _attend(queries, k_PKDS, v_PKSD, bucket, q_TND.shape[1]).to(q_TND.dtype)
        out_TND.index_copy_(0, bucket.out_T, o if bucket.take_T is None else o.index_select(0, bucket.take_T))
    return out_TND


def _attend(queries: Tensor, k_PKDS: Tensor, v_PKSD: Tensor, bucket: PagedBucket, heads: int) -> Tensor:
    """A bucket's rows [B * Q, N, D]; queries: [T * N, D], scaled."""
    kv_heads, slots, dim = v_PKSD.shape[1:]
    pieces, rows, keys = bucket.unseen_BQJ.shape
    used = rows * heads // kv_heads  # queries of a piece to a KV head, filled up to a multiple of its row_tile
    shared = bucket.shared.blocks if bucket.shared is not None else 0
    shape = (pieces, keys // slots - shared, kv_heads, -1)

    k = _blocks(k_PKDS, bucket, queries.dtype)
    product = torch.bmm(queries.index_select(0, bucket.query_XKM).view(len(k), -1, dim), k)
    padded = product.shape[1]
    scores = _of_pieces(product.view(-1, kv_heads * padded * slots), bucket).view(*shape, slots)
    scores = scores[:, :, :, :used].permute(0, 2, 3, 1, 4)
    if bucket.shared is not None:
        scores = torch.cat([_shared_scores(queries, k_PKDS, bucket.shared, (pieces, kv_heads, used)), scores], 3)
    masked = queries.new_empty(pieces, kv_heads, rows, used // rows, keys)
    unseen = bucket.unseen_BQJ.view(pieces, 1, rows, 1, -1, slots)
    by_slot = (pieces, kv_heads, rows, used // rows, keys // slots, slots)
    torch.add(scores.view(by_slot), unseen, out=masked.view(by_slot))
    weights = torch.softmax(masked, -1).view(pieces, kv_heads, used, -1, slots)

    v = _blocks(v_PKSD, bucket, queries.dtype)
    own = weights[:, :, :, shared:].permute(0, 3, 1, 2, 4).reshape(-1, kv_heads, used, slots)
    product = torch.bmm(_of_blocks(own, bucket, padded).flatten(0, 1), v)
    parts = _of_pieces(product.view(-1, kv_heads * padded * dim), bucket).view(*shape, dim)[:, :, :, :used].unbind(1)
    if bucket.shared is not None:
        parts = (*_shared_parts(weights[:, :, :, :shared], v_PKSD, bucket.shared), *parts)
    o = parts[0]
    for part in parts[1:]:
        o = o + part  # torch.sum's order depends on how many there are
    return o.view(pieces, kv_heads, rows, -1, dim).transpose(1, 2).reshape(pieces * rows, heads, dim)


def _blocks(cache: Tensor, bucket: PagedBucket, dtype: torch.dtype) -> Tensor:
    """The right sides of a bucket's products: [X * K, ..] of a cache [P, K, ..]."""
    if bucket.in_place:
        return cache[: bucket.in_place].to(dtype).flatten(0, 1)
    return cache.index_select(0, bucket.block_BC).to(dtype).flatten(0, 1)


def _of_pieces(product: Tensor, bucket: PagedBucket) -> Tensor:
    """Of products over blocks [X, ..] those of the pieces' blocks [B * C, ..]."""
    return product.index_select(0, bucket.block_BC) if bucket.in_place else product


def _of_blocks(own: Tensor, bucket: PagedBucket, padded: int) -> Tensor:
    """The reverse, filled up: left sides [B * C, K, used, S] at their blocks [X, K, M, S], anything where
    nobody's are: what comes of those is never read.
    (Several write to block 0: pieces that need fewer blocks than the largest, all of them zeros.)"""
    count, kv_heads, used, slots = own.shape
    if bucket.in_place:
        filled = own.new_empty(bucket.in_place, kv_heads, padded, slots)
        filled[:, :, :used].index_copy_(0, bucket.block_BC, own)
        return filled
    if used == padded:
        return own
    filled = own.new_empty(count, kv_heads, padded, slots)
    filled[:, :, :used] = own
    return filled


def _shared_scores(queries: Tensor, k_PKDS: Tensor, shared: SharedTiles, shape: tuple[int, int, int]) -> Tensor:
    """Scores over shared blocks [*shape, blocks, S], 0 where a piece has none."""
    pieces, kv_heads, used = shape
    slots = k_PKDS.shape[3]
    k = k_PKDS.index_select(0, shared.block_W).to(queries.dtype).flatten(0, 1)
    product = torch.bmm(queries.index_select(0, shared.query_WKM).view(len(k), -1, queries.shape[1]), k)
    product = product.view(-1, kv_heads, product.shape[1], slots).transpose(0, 1).reshape(kv_heads, -1, slots)
    scores = queries.new_zeros(kv_heads, pieces * used * shared.blocks, slots)
    scores.index_copy_(1, shared.target_L, product.index_select(1, shared.used_L))
    return scores.view(kv_heads, pieces, used, shared.blocks, slots).transpose(0, 1)


def _shared_parts(weights: Tensor, v_PKSD: Tensor, shared: SharedTiles) -> Sequence[Tensor]:
    """Of weights [B, K, used, blocks, S] each shared block's sum of values [B, K, used, D]."""
    pieces, kv_heads, used, blocks, slots = weights.shape
    dim = v_PKSD.shape[3]
    v = v_PKSD.index_select(0, shared.block_W).to(weights.dtype).flatten(0, 1)
    tiles = weights.transpose(0, 1).reshape(kv_heads, -1, slots).index_select(1, shared.place_WM)
    tiles = tiles.view(kv_heads, len(shared.block_W), -1, slots).transpose(0, 1)
    product = torch.bmm(tiles.reshape(len(v), -1, slots), v).view(-1, kv_heads, tiles.shape[2], dim)
    product = product.transpose(0, 1).reshape(kv_heads, -1, dim).index_select(1, shared.used_L)
    parts = weights.new_zeros(kv_heads, pieces * used * blocks, dim)
    parts.index_copy_(1, shared.target_L, product)
    return parts.view(kv_heads, pieces, used, blocks, dim).transpose(0, 1).unbind(3)


@dataclass(frozen=True, slots=True)
class QueryRuns:
    """Stretches of new rows, each of one sequence: its table's row, first position, length, and first row."""

    table_N: Ints
    start_N: Ints
    count_N: Ints
    row_N: Ints

    def __getitem__(self, index: Ints) -> "QueryRuns":
        return QueryRuns(self.table_N[index], self.start_N[index], self.count_N[index], self.row_N[index])


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Sizes of the model and the cache that a layout needs. slots: of a block. row_tile: the rows of a product are
    filled up to a multiple of it (tiles.py)."""

    heads: int
    kv_heads: int
    slots: int
    row_tile: int = ROW_TILE

    @property
    def per_kv(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads


def paged_buckets(
    table_BP: Ints, runs: QueryRuns, shape: CacheShape, device: torch.device, shared_P: Bools | None = None
) -> list[PagedBucket]:
    """Lay out a step's new rows, `runs`, one a sequence, of any length; their rows lie one after the other.

    table_BP: each sequence's blocks in order. shared_P: blocks that several sequences may hold; where given, rows of
    different sequences share the products of a block that they share.
    """
    pieces = _cut(runs)
    blocks_N = (pieces.start_N + pieces.count_N - 1) // shape.slots + 1
    common_N = _common(table_BP, pieces, shape, shared_P)
    buckets = []
    for index in _alike(pieces.count_N, blocks_N - common_N, shape):
        chosen, common_B = pieces[index], common_N[index]
        shared = _share(table_BP, chosen, common_B, shape, device) if common_B.any() else None
        buckets.append(_bucket(table_BP, chosen, blocks_N[index], common_B, shape, device, shared))
    return buckets


def places(count_N: Ints) -> Ints:
    """0 .. count - 1 for each count, one after the other."""
    ends_N = np.cumsum(count_N)
    return np.arange(int(ends_N[-1]) if len(ends_N) else 0) - np.repeat(ends_N - count_N, count_N)


def _cut(runs: QueryRuns) -> QueryRuns:
    """Runs longer than PIECE in stretches of that."""
    if runs.count_N.max(initial=0) <= PIECE:
        return runs
    parts_N = -(-runs.count_N // PIECE)
    run = np.repeat(np.arange(len(parts_N)), parts_N)
    offset = PIECE * places(parts_N)
    count_N = np.minimum(runs.count_N[run] - offset, PIECE)
    return QueryRuns(runs.table_N[run], runs.start_N[run] + offset, count_N, runs.row_N[run] + offset)


def _common(table_BP: Ints, pieces: QueryRuns, shape: CacheShape, shared_P: Bools | None) -> Ints:
    """Return for each piece the number of leading blocks that it has in common with another piece."""
    common_N = np.zeros_like(pieces.count_N)
    if shared_P is None:
        return common_N
    few = np.flatnonzero(pieces.count_N * shape.per_kv < SHARED_ROWS)
    for place in range(int(pieces.start_N[few].max(initial=0)) // shape.slots):
        few = few[pieces.start_N[few] // shape.slots > place]  # the block in which a piece begins is its own
        block = table_BP[pieces.table_N[few], place]
        may = shared_P[block]
        few, block = few[may], block[may]
        _, group, members = np.unique(block, return_inverse=True, return_counts=True)
        few = few[members[group] > 1]
        if not len(few):
            break
        common_N[few] = place + 1
    return common_N


def _alike(count_N: Ints, own_N: Ints, shape: CacheShape) -> Iterator[Ints]:
    """Return groups of pieces to compute together: of like numbers of rows and of blocks, since both are padded to the
    largest. Padding costs time, and so does another bucket."""
    size_N = np.frexp(count_N - 1)[1]  # 1, 2, 3 to 4, 5 to 8 .. rows
    order = np.lexsort((own_N, size_N))
    size_N, own_N, count_N = size_N[order], own_N[order], count_N[order]
    first, filling = 0, 0
    for end in [*(np.flatnonzero((np.diff(size_N) != 0) | (np.diff(own_N) != 0)) + 1), len(order)]:
        if end < len(order):
            filling += (end - first) * int(own_N[end] - own_N[end - 1])
            if size_N[end] == size_N[first] and filling * shape.kv_heads <= LAUNCH:
                continue
        elements = int(count_N[first:end].max()) * int(own_N[end - 1]) * shape.slots * shape.heads
        at_once = max(1, SCORE_ELEMENTS // elements)
        yield from (order[start : min(start + at_once, end)] for start in range(first, end, at_once))
        first, filling = end, 0


def _bucket(
    table_BP: Ints,
    pieces: QueryRuns,
    blocks_B: Ints,
    common_B: Ints,
    shape: CacheShape,
    device: torch.device,
    shared: SharedTiles | None,
) -> PagedBucket:
    count, rows = len(blocks_B), int(pieces.count_N.max())
    own_B = blocks_B - common_B
    own = int(own_B.max())
    if count * own * shape.kv_heads == 1:
        own = 2  # torch hands a lone matrix to another routine than a batch, with other last bits
    within_BQ = np.minimum(np.arange(rows), pieces.count_N[:, None] - 1)
    row_BQ = pieces.row_N[:, None] + within_BQ
    used = rows * shape.per_kv
    query_BKM = np.zeros((count, shape.kv_heads, -(-used // shape.row_tile) * shape.row_tile), np.int64)
    head_KH = np.arange(shape.heads).reshape(shape.kv_heads, 1, shape.per_kv)
    query_BKM[:, :, :used] = (row_BQ[:, None, :, None] * shape.heads + head_KH).reshape(count, shape.kv_heads, used)

    place_BC = common_B[:, None] + np.arange(own)
    there_BC = np.arange(own) < own_B[:, None]
    block_BC = np.where(there_BC, table_BP[pieces.table_N[:, None], np.where(there_BC, place_BC, 0)], 0)
    needed, reach = int(own_B.sum()), int(block_BC.max()) + 1
    in_place = 0
    if query_BKM.shape[2] <= IN_PLACE_ROWS and 5 * reach <= 8 * needed and len(np.unique(block_BC[there_BC])) == needed:
        in_place = reach
        query_XKM = np.zeros((in_place, *query_BKM.shape[1:]), np.int64)
        query_XKM[block_BC[there_BC]] = np.repeat(query_BKM, own_B, 0)
    else:
        query_XKM = np.repeat(query_BKM, own, 0)

    key_BJ = (place_BC[:, :, None] * shape.slots + np.arange(shape.slots)).reshape(count, -1)
    unseen_BQJ = key_BJ[:, None] > (pieces.start_N[:, None] + within_BQ)[:, :, None]
    if shared is not None:
        absent_BJ = np.repeat(np.arange(shared.blocks) >= common_B[:, None], shape.slots, 1)
        absent_BQJ = np.broadcast_to(absent_BJ[:, None], (count, rows, absent_BJ.shape[1]))
        unseen_BQJ = np.concatenate([absent_BQJ, unseen_BQJ], 2)
    out_T, take_T = row_BQ.reshape(-1), None
    if pieces.count_N.min() < rows:
        take = np.flatnonzero(np.arange(rows) < pieces.count_N[:, None])
        out_T, take_T = out_T[take], torch.from_numpy(take).to(device)
    minus_inf_BQJ = np.where(unseen_BQJ, np.float32(-np.inf), np.float32(0))
    put = (block_BC.reshape(-1), query_XKM.reshape(-1), minus_inf_BQJ, out_T)
    block, query, unseen, out = (torch.from_numpy(x).to(device) for x in put)
    return PagedBucket(block, in_place, query, unseen, out, take_T, shared)


def _share(table_BP: Ints, pieces: QueryRuns, common_B: Ints, shape: CacheShape, device: torch.device) -> SharedTiles:
    """Tiles of the blocks that pieces have in common; a block's queries fill as many as they need."""
    rows = int(pieces.count_N.max())
    piece_I = np.repeat(np.arange(len(common_B)), common_B)  # an item: a piece against one of its shared blocks
    place_I = places(common_B)
    block_I = table_BP[pieces.table_N[piece_I], place_I]
    order = np.argsort(block_I, kind="stable")
    piece_I, place_I = piece_I[order], place_I[order]
    block_G, group_I = np.unique(block_I[order], return_inverse=True)

    queries_I = pieces.count_N[piece_I] * shape.per_kv
    queries_G = np.bincount(group_I, queries_I).astype(np.int64)
    size = min(SHARED_ROWS, -(-int(queries_G.max()) // shape.row_tile) * shape.row_tile)
    tiles_G = -(-queries_G // size)
    block_W = np.repeat(block_G, tiles_G)
    item_L = np.repeat(np.arange(len(queries_I)), queries_I)
    within_L, group_L = places(queries_I), group_I[item_L]
    place_L = np.arange(len(item_L)) - (np.cumsum(queries_G) - queries_G)[group_L]
    used_L = (np.cumsum(tiles_G) - tiles_G)[group_L] * size + place_L

    blocks, tiles = int(common_B.max()), len(block_W)
    query_WM, place_WM = np.zeros(tiles * size, np.int64), np.zeros(tiles * size, np.int64)
    row_L, head_L = np.divmod(within_L, shape.per_kv)
    query_WM[used_L] = (pieces.row_N[piece_I[item_L]] + row_L) * shape.heads + head_L
    target_L = (piece_I[item_L] * rows * shape.per_kv + within_L) * blocks + place_I[item_L]
    place_WM[used_L] = target_L
    if tiles * shape.kv_heads == 1:  # a lone matrix: see _bucket
        query_WM, place_WM, block_W = (np.tile(x, 2) for x in (query_WM, place_WM, block_W))
    heads_K = np.arange(shape.kv_heads)[:, None] * shape.per_kv
    query_WKM = (query_WM.reshape(len(block_W), 1, size) + heads_K).reshape(-1)
    put = (block_W, query_WKM, place_WM, used_L, target_L)
    return SharedTiles(blocks, *(torch.from_numpy(x).to(device) for x in put))
