"""Approximate search: lists (IVF) or a graph (HNSW) of FAISS give candidates, which are scored as in `exact`.

The manifest has the measured recall, and the search parameter (`nprobe` or `efSearch`) and number of candidates that
reached it. Without kept vectors, FAISS's own scores determine the order. A query's result is independent of batch
composition: the nearest lists are chosen by `ExactRows`, and a rotation is computed in float64. On GPUs, lists or a
flat matrix are sharded in float16, and sums may round differently. No machine with FAISS for GPUs was available, so
only the division into shards is tested. Letters: N passages, Q queries, D dimension, F candidates, P directions or
lists, M blocks of B rows.
"""

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from thresher.common.errors import UserError
from thresher.retrieval.encoders import Vectors
from thresher.retrieval.indexes.exact import MARGIN, ExactRows, Found, Rows, RowScores, best_first, best_of
from thresher.retrieval.indexes.faiss_library import faiss
from thresher.retrieval.indexes.kinds import Kind
from thresher.retrieval.indexes.structures import behind, inner, rotation
from thresher.retrieval.indexes.vector_file import Array, VectorFile

# Multiplications in a product up to which OpenBLAS uses one thread: 4 times 2^16.
ONE_THREAD = 1 << 18
# Higher values of efSearch are not tried: over 10^6 vectors a graph found all but .005 at half of this value.
MOST_EFSEARCH = 4096
# Candidates fetched per hit from a flat index in float16, whose order near the k-th place is not quite the exact one.
FLAT_FACTOR = 2
# Candidates of a query, and lists, that FAISS chooses on a GPU (its GPU_MAX_SELECTION_K).
GPU_MOST = 2048


class Candidates(ABC):
    """A structure that finds rows near a vector. `parameter` is FAISS's name of its search parameter ("nprobe" or
    "efSearch"), `most` its largest useful value, `most_fetched` a bound on `fetch` and on this value, if there is
    one."""

    parameter: str
    most: int
    most_fetched: int | None = None

    @abstractmethod
    def find(self, query_QD: Vectors, fetch: int, value: int) -> tuple[Vectors, Rows]:
        """Return scores and rows of at most `fetch` candidates, [Q, F], best first, padded with row -1."""

    def span(self, fetch: int) -> tuple[int, int]:
        """Return the lowest and the highest value that are worth trying for `fetch` candidates."""
        return 1, self.most


class GraphCandidates(Candidates):
    """A FAISS HNSW graph with its vectors, or with their directions and codes."""

    parameter = "efSearch"

    def __init__(self, index: Any) -> None:
        self._index = index  # owns what the next lines point into
        self._project = Projection(rotation(index))
        self._graph = behind(index)
        self.most = int(index.ntotal)

    def span(self, fetch: int) -> tuple[int, int]:
        """Return the span of efSearch: a graph keeps at least as many candidates as are fetched, and keeping all its
        vectors takes hours."""
        least = min(self.most, fetch)
        return least, max(fetch, min(self.most, MOST_EFSEARCH))

    def find(self, query_QD: Vectors, fetch: int, value: int) -> tuple[Vectors, Rows]:
        self._graph.hnsw.efSearch = min(max(value, fetch), self.most)
        score_QF, row_QF = self._graph.search(self._project(query_QD), fetch)
        return score_QF, row_QF


class ListCandidates(Candidates):
    """The lists of a FAISS IVF index, with or without a rotation."""

    parameter = "nprobe"

    def __init__(self, index: Any) -> None:
        self._index = index  # owns what the next lines point into
        self._lists = inner(index)
        self._project = Projection(rotation(index))
        self.most = self._lists.nlist
        quantizer = faiss.downcast_index(self._lists.quantizer)
        centroids = faiss.rev_swig_ptr(quantizer.get_xb(), self.most * quantizer.d)
        self._centroids = ExactRows(centroids.reshape(self.most, quantizer.d))

    def find(self, query_QD: Vectors, fetch: int, value: int) -> tuple[Vectors, Rows]:
        query_QD = self._project(query_QD)
        value = min(value, self.most)
        nearest = self._centroids.top(query_QD, value)
        list_QP = np.array([[row for row, _ in found] for found in nearest], np.int64)
        score_QP = np.array([[score for _, score in found] for found in nearest], np.float32)
        self._lists.nprobe = value
        score_QF, row_QF = self._lists.search_preassigned(query_QD, fetch, list_QP, score_QP)
        return score_QF, row_QF


def check_gpus() -> int:
    """Return the number of GPUs that FAISS sees; UserError if there are none."""
    count = faiss.get_num_gpus() if hasattr(faiss, "StandardGpuResources") else 0
    if count < 1:
        raise UserError("this FAISS sees no GPU; install thresher with its extra [gpu] on a machine that has one")
    return int(count)


class GpuLists(Candidates):
    """The lists of a FAISS IVF index on all GPUs."""

    parameter = "nprobe"
    most_fetched = GPU_MOST

    def __init__(self, index: Any) -> None:
        check_gpus()
        self.most = min(int(inner(index).nlist), GPU_MOST)
        options = faiss.GpuMultipleClonerOptions()
        options.shard = True
        options.useFloat16 = True
        self._index = faiss.index_cpu_to_all_gpus(index, options)
        self._space = faiss.GpuParameterSpace()

    def find(self, query_QD: Vectors, fetch: int, value: int) -> tuple[Vectors, Rows]:
        self._space.set_index_parameter(self._index, "nprobe", min(value, self.most))
        score_QF, row_QF = self._index.search(query_QD, fetch)
        return score_QF, row_QF


class FlatShards(Candidates):
    """Consecutive rows of `vectors` in each of the FAISS flat indexes `shards`, given empty; without a parameter."""

    parameter = "passes"
    most = 1
    most_fetched = GPU_MOST

    def __init__(self, vectors: VectorFile, shards: list[Any]) -> None:
        borders = [vectors.rows * number // len(shards) for number in range(len(shards) + 1)]
        self._shards = list(zip(borders, shards, strict=False))
        for start, stop, shard in zip(borders, borders[1:], shards, strict=False):
            for _, part_BD in vectors.slices(start, stop):
                shard.add(part_BD.astype("float32", copy=False))

    def find(self, query_QD: Vectors, fetch: int, value: int) -> tuple[Vectors, Rows]:
        found = []
        for start, shard in self._shards:
            score_QF, row_QF = shard.search(query_QD, min(fetch, shard.ntotal))
            found.append((score_QF, start + row_QF))
        return best_of(found, fetch)


def flat_on_gpus(vectors: VectorFile) -> FlatShards:
    """Return a search of `vectors` in float16 on all GPUs."""
    shards = []
    for device in range(check_gpus()):
        config = faiss.GpuIndexFlatConfig()
        config.device, config.useFloat16 = device, True
        # FAISS's Python layer keeps the resources as long as the index.
        shards.append(faiss.GpuIndexFlatIP(faiss.StandardGpuResources(), vectors.dim, config))
    return FlatShards(vectors, shards)


def candidates_of(kind: Kind, index: Any, gpu: bool = False) -> Candidates:
    """Return the search of the structure `index` of `kind`, on a CPU or, for lists, on all GPUs."""
    if kind.links:
        return GraphCandidates(index)
    return GpuLists(index) if gpu else ListCandidates(index)


class Projection:
    """Rotates or projects queries, or returns them unchanged for None. The product is in float64, so that a query's
    rounded bits do not depend on the other queries, and in blocks that OpenBLAS multiplies on one thread, because its
    other threads would slow FAISS down (8 queries took 8 ms instead of 2)."""

    def __init__(self, rotation_PD: Vectors | None) -> None:
        self._rotation_MDB: Array | None = None
        if rotation_PD is not None:
            self._directions, dim = rotation_PD.shape
            self._block = max(1, math.isqrt(ONE_THREAD // dim))
            block_MBD = _blocks(rotation_PD, self._block)
            self._rotation_MDB = np.ascontiguousarray(block_MBD.swapaxes(1, 2))

    def __call__(self, query_QD: Vectors) -> Vectors:
        """Map float32 [Q, D] to float32 [Q, P]."""
        if self._rotation_MDB is None:
            return query_QD
        turned_NMBB = _blocks(query_QD, self._block)[:, None] @ self._rotation_MDB
        turned_QP = turned_NMBB.swapaxes(1, 2).reshape(-1, self._rotation_MDB.shape[0] * self._block)
        return turned_QP[: len(query_QD), : self._directions].astype(np.float32)


def _blocks(rows_RD: Vectors, block: int) -> Array:
    """Return the rows in float64, in blocks of `block`: [ceil(R / B), B, D], padded with zeros."""
    padded_RD = np.zeros((-(-len(rows_RD) // block) * block, rows_RD.shape[1]))
    padded_RD[: len(rows_RD)] = rows_RD
    return padded_RD.reshape(-1, block, rows_RD.shape[1])


class ApproximateSearch:
    """Search by candidates, which are scored exactly if `exact` has their vectors. `value` of the search parameter and
    `factor` (candidates fetched per hit) may be set at any time."""

    def __init__(self, candidates: Candidates, exact: RowScores | None, rows: int, value: int, factor: int) -> None:
        self.candidates = candidates
        self.value, self.factor = value, factor
        self._exact = exact
        self._rows = rows

    def span(self, k: int) -> tuple[int, int]:
        """Return the lowest and the highest value of the search parameter that are worth trying for `k` hits."""
        return self.candidates.span(self._fetch(k))

    def _fetch(self, k: int) -> int:
        wanted, most = min(self._rows, k * self.factor + MARGIN), self.candidates.most_fetched
        if most is not None and wanted > most:
            raise UserError(
                f"k {k} with {self.factor} candidates for each needs {wanted} candidates, but a GPU finds at most "
                f"{most}; lower k or candidates, or search on the CPU"
            )
        return wanted

    def top(self, query_QD: Vectors, k: int) -> list[Found]:
        """Return at most `k` rows for every query, best first. A query with fewer hits is searched again with higher
        values."""
        fetch, value = self._fetch(k), self.value
        score_QF, row_QF = self.candidates.find(query_QD, fetch, value)
        short_S = _short(row_QF, k)
        while len(short_S) and value < self.candidates.most:
            value *= 2
            score_QF[short_S], row_QF[short_S] = self.candidates.find(query_QD[short_S], fetch, value)
            short_S = _short(row_QF, k)
        rows = [row_F[row_F >= 0] for row_F in row_QF]
        if self._exact is not None:
            return self._exact.ranked(query_QD, rows, k)
        return [best_first(score_F[: len(row_F)], row_F, k) for score_F, row_F in zip(score_QF, rows, strict=True)]


def _short(row_QF: Rows, k: int) -> Rows:
    short_S: Rows = np.flatnonzero((row_QF >= 0).sum(axis=1) < k)
    return short_S
