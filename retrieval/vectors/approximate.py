"""Approximate search: FAISS looks at a part of the vectors, and what it finds is scored exactly.

Lists (IVF) or a graph (HNSW) name candidates; each is scored again from the kept matrix, as `exact` does it, so a hit's
score is its true inner product and equal scores go by row. Only the choice of candidates is approximate. How far it
falls short was measured when the index was built and stands in the manifest, with the search parameter (`nprobe`
lists, or `efSearch` vertices) and the number of candidates that reached the recall wanted. Scoring again reads
`candidates` * k + 8 rows a query from the file: two to four microseconds each where the operating system has them in
memory, a seek on a cold disk. An index that discarded its vectors orders by FAISS's own scores, which for codes are
estimates.

A query's result is independent of batch composition. FAISS keeps that inside the lists and the graph; the nearest
lists themselves are chosen exactly, by `ExactRows` over the centroids, and a rotation is done in float64.

Deliberately absent: a promise of k hits (a graph may have parts that a search does not reach), filters, deletion.

Shape letters: N passages, Q queries, D dimension, F candidates, P directions or probed lists, M blocks of B rows.
"""

import math
from abc import ABC, abstractmethod

import numpy as np

from thresher.retrieval.encoders.encoder import Vectors
from thresher.retrieval.vectors.exact import MARGIN, Found, Rows, RowScores, best_first
from thresher.retrieval.vectors.file import Array

# Multiplications in a product up to which OpenBLAS takes one thread: 4 times 2^16.
ONE_THREAD = 1 << 18


class Candidates(ABC):
    """A structure that finds rows near a vector, the better the higher its search parameter. `parameter` is FAISS's
    name for that ("nprobe" or "efSearch"), `most` the value beyond which there is nothing more to find."""

    parameter: str
    most: int

    @abstractmethod
    def find(self, query_QD: Vectors, fetch: int, value: int) -> tuple[Vectors, Rows]:
        """Scores and rows of at most `fetch` candidates of every query, [Q, F], best first; row -1 fills up."""

    def span(self, fetch: int) -> tuple[int, int]:
        """The least and the highest value that are worth trying for `fetch` candidates."""
        return 1, self.most


class Projection:
    """Queries behind a rotation or projection, or as they are for None. In float64, where a query's bits do not depend
    on the others' number once they are rounded; and in blocks so small that NumPy's OpenBLAS multiplies each on one
    thread, for its other threads would go on waiting busily beside FAISS's: 8 queries took 8 ms instead of 2. Where
    BLAS has one thread anyway, a lone query takes .12 ms instead of .04 (192 x 768)."""

    def __init__(self, rotation_PD: Vectors | None) -> None:
        self._rotation_MDB: Array | None = None
        if rotation_PD is not None:
            self._directions, dim = rotation_PD.shape
            self._block = max(1, math.isqrt(ONE_THREAD // dim))
            block_MBD = _blocks(rotation_PD, self._block)
            self._rotation_MDB = np.ascontiguousarray(block_MBD.swapaxes(1, 2))

    def __call__(self, query_QD: Vectors) -> Vectors:
        """float32 [Q, P] of float32 [Q, D]."""
        if self._rotation_MDB is None:
            return query_QD
        turned_NMBB = _blocks(query_QD, self._block)[:, None] @ self._rotation_MDB
        turned_QP = turned_NMBB.swapaxes(1, 2).reshape(-1, self._rotation_MDB.shape[0] * self._block)
        return turned_QP[: len(query_QD), : self._directions].astype(np.float32)


def _blocks(rows_RD: Vectors, block: int) -> Array:
    """The rows in float64, `block` at a time: [ceil(R / B), B, D], filled up with zeros."""
    padded_RD = np.zeros((-(-len(rows_RD) // block) * block, rows_RD.shape[1]))
    padded_RD[: len(rows_RD)] = rows_RD
    return padded_RD.reshape(-1, block, rows_RD.shape[1])


class ApproximateSearch:
    """Candidates, scored exactly where `exact` has their vectors. `value` (of the search parameter) and `factor`
    (candidates fetched per hit wanted) may be set at any time."""

    def __init__(self, candidates: Candidates, exact: RowScores | None, rows: int, value: int, factor: int) -> None:
        self.candidates = candidates
        self.value, self.factor = value, factor
        self._exact = exact
        self._rows = rows

    def span(self, k: int) -> tuple[int, int]:
        """The least and the highest value of the search parameter that are worth trying for `k` hits."""
        return self.candidates.span(self._fetch(k))

    def _fetch(self, k: int) -> int:
        return min(self._rows, k * self.factor + MARGIN)

    def top(self, query_QD: Vectors, k: int) -> list[Found]:
        """At most `k` rows for every query, best first. Where the value reaches fewer than k, a higher
        one is taken for that query."""
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
