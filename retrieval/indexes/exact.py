"""The exact k rows of largest inner product, independent of batch composition to the last bit.

A matmul finds more than k candidates (`scan`). All that may be among the first k are rescored one by one: the float64
inner product rounded to float32, with equal scores ordered by row. If the error bound of a float32 inner product does
not prove that the candidates contain the answer, the whole matrix is searched. Rows in float16 are converted block by
block. Not thread-safe. Shape letters: N rows, Q queries, D dimension, F fetched candidates, B rows of a block.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from thresher.retrieval.encoders import Vectors
from thresher.retrieval.indexes.faiss_library import faiss, faiss_installed
from thresher.retrieval.indexes.vector_file import SLICE_BYTES, Array

# Candidates fetched beyond k: except for real ties, no query of HotpotQA's 500 then needs the whole matrix.
MARGIN = 8
# Rows fetched at a time, and rows scored at a time, whose float64 copies fit in a core's private cache.
SCORE_CHUNK, SCORE_CACHED = 256, 64
# Multiplications of a search up to which FAISS takes about a millisecond, whereas importing torch takes a second.
SMALL = 1 << 22
# Bytes of float32 scanned at a time: the overhead of a block, .3 ms, is a hundredth of the time to read it.
BLOCK_BYTES = 256 * 2**20
# Queries of one pass over all rows, and their candidates: 200 MB with their scores.
QUERIES, CANDIDATES = 512, 1 << 22

Rows = npt.NDArray[np.int64]
# (row, score), best first.
Found = list[tuple[int, float]]


class RowScores:
    """Scores of single rows. `take` fetches them: rows [F] to their vectors [F, D], float32 or float16."""

    def __init__(self, take: Callable[[Rows], Array]) -> None:
        self._take = take

    def ranked(self, query_QD: Vectors, rows: Sequence[Rows] | Rows, k: int) -> list[Found]:
        """Score each query's rows, `rows[q]`, one by one, and return the first `k` by (-score, row)."""
        if not len(rows):
            return []
        row_QF = np.full((len(rows), max(map(len, rows))), -1)
        for number, row_F in enumerate(rows):
            row_QF[number, : len(row_F)] = row_F
        score_QF = self._scores(query_QD, row_QF)
        pairs = zip(score_QF, row_QF, rows, strict=True)
        return [best_first(score_F[: len(own)], row_F[: len(own)], k) for score_F, row_F, own in pairs]

    def scores(self, query_D: Vectors, row_F: Rows) -> Vectors:
        """Return float32 [F]: the inner products of the query with the rows `row_F`, each summed in float64."""
        score_F: Vectors = self._scores(query_D[None], row_F[None])[0]
        return score_F

    def _scores(self, query_QD: Vectors, row_QF: Rows) -> Vectors:
        """Return the scores of every query with its rows, [Q, F]; -inf for a row below 0."""
        query64_QD = query_QD.astype(np.float64)
        score_QF = np.empty(row_QF.shape, np.float32)
        for part in _tiles(row_QF.shape, SCORE_CHUNK):
            wanted_QF, part_QF, part64_QD = row_QF[part], score_QF[part], query64_QD[part[0]]
            taken_QFD = self._take(np.maximum(wanted_QF, 0).ravel()).reshape(*wanted_QF.shape, -1)
            for cached in _tiles(wanted_QF.shape, SCORE_CACHED):
                # Not a matmul: each row is summed in the same order for any number of rows.
                part_QF[cached] = np.einsum("qfd,qd->qf", taken_QFD[cached].astype(np.float64), part64_QD[cached[0]])
            part_QF[wanted_QF < 0] = -np.inf
        return score_QF


def _tiles(shape: tuple[int, ...], cells: int) -> list[tuple[slice, slice]]:
    """Return tiles of at most `cells` cells of a matrix: several whole rows, or parts of one row if it has more
    cells."""
    rows, columns = shape
    wide = max(1, min(columns, cells))
    high = cells // wide
    return [
        (slice(row, row + high), slice(column, column + wide))
        for row in range(0, rows, high)
        for column in range(0, columns, wide)
    ]


class ExactRows(RowScores):
    """`vectors_ND`, float32 or float16, in memory or mapped, and the largest L2 norm of a row, computed unless given.
    `verify` is called with (first, stop) before rows are read. `full_scans` counts searches of the whole matrix."""

    def __init__(
        self, vectors_ND: Array, largest_norm: float | None = None, verify: Callable[[int, int], None] | None = None
    ) -> None:
        self._verify = verify or (lambda first, stop: None)
        super().__init__(lambda row_F: vectors_ND[row_F])
        self.vectors_ND = vectors_ND
        self.full_scans = 0
        self._largest_norm = largest_row_norm(vectors_ND) if largest_norm is None else largest_norm
        if vectors_ND.size > SMALL:
            _load_torch()  # not in the first search, which would be slowed down

    def __len__(self) -> int:
        return len(self.vectors_ND)

    def top(self, query_QD: Vectors, k: int) -> list[Found]:
        """Return the exact top min(k, N) of every query, float32 [Q, D]; equal scores are ordered by row."""
        k, fetch = min(k, len(self)), min(len(self), k + MARGIN)
        step = max(1, min(QUERIES, CANDIDATES // max(1, fetch)))
        parts = [query_QD[start : start + step] for start in range(0, len(query_QD), step)]
        return [best for part_QD in parts for best in self._top(part_QD, k, fetch)]

    def _top(self, query_QD: Vectors, k: int, fetch: int) -> list[Found]:
        score_QF, row_QF = rough_top(query_QD, len(self), self._blocks(), fetch)
        error_Q = self._error_bounds(query_QD)
        # All others score less than these k, up to the error.
        near_Q = (score_QF >= score_QF[:, k - 1, None] - 2 * error_Q[:, None]).sum(1)
        last_Q, last_row_Q = score_QF[:, -1], row_QF[:, -1]
        row_QF = row_QF[:, : max(k, near_Q.max())]
        exact_QF = self._scores(query_QD, row_QF)
        order_QK = np.lexsort((row_QF, -exact_QF))[:, :k]
        best_QK, best_row_QK = (np.take_along_axis(found_QF, order_QK, 1) for found_QF in (exact_QF, row_QF))
        # Rows that were not fetched score at most as much as the last fetched one, up to the error.
        apart_Q = np.greater(best_QK[:, -1], last_Q + error_Q)
        proved_Q = (last_row_Q >= 0) & (apart_Q | (fetch == len(self)))
        found = [list(zip(*each, strict=True)) for each in zip(best_row_QK.tolist(), best_QK.tolist(), strict=True)]
        for number in np.flatnonzero(~proved_Q).tolist():
            found[number] = self._out_of_all(query_QD[number], k, error_Q[number])
        return found

    def _out_of_all(self, query_D: Vectors, k: int, error: float) -> Found:
        """Return the top k of all rows, for a query whose candidates are not proved to contain them."""
        self.full_scans += 1
        rough_N = np.concatenate([block_BD @ query_D for _, block_BD in self._blocks()])
        kth = np.partition(rough_N, len(rough_N) - k)[len(rough_N) - k]
        return self.ranked(query_D[None], [np.flatnonzero(rough_N >= kth - 2 * error)], k)[0]

    def _blocks(self) -> Iterator[tuple[int, Array]]:
        """Yield (first row, rows) block by block, each of them verified first."""
        step = max(1, BLOCK_BYTES // (4 * self.vectors_ND.shape[1]))
        for start in range(0, len(self), step):
            self._verify(start, min(start + step, len(self)))
            yield start, self.vectors_ND[start : start + step]

    def _error_bounds(self, query_QD: Vectors) -> npt.NDArray[np.float64]:
        """Bound the error of a float32 inner product, summed in any order: (d + 1) * 2^-24 * |q| * |p| (Higham 2002,
        section 3.1), twice, for its higher-order terms and our rounding to float32."""
        query64_QD = query_QD.astype(np.float64)
        norm_Q: npt.NDArray[np.float64] = np.sqrt(np.einsum("qd,qd->q", query64_QD, query64_QD))
        bound_Q: npt.NDArray[np.float64] = norm_Q * (2 * (query_QD.shape[1] + 1) * 2.0**-24 * self._largest_norm)
        return bound_Q


def rough_top(query_QD: Vectors, rows: int, blocks: Iterable[tuple[int, Array]], fetch: int) -> tuple[Vectors, Rows]:
    """Return scores and rows, [Q, F], of the `fetch` best rows by float32 inner products, row -1 if a score is NaN.
    `blocks` yields all `rows`: (first row, [B, D] in float32 or float16). Ties at the end are cut arbitrarily. A small
    search is done by FAISS, if installed, which does not need torch."""
    if rows * query_QD.size > SMALL or not faiss_installed():
        top = _load_torch()(query_QD, fetch)
        for start, block_BD in blocks:
            top.add(start, block_BD)
        all_of_them: tuple[Vectors, Rows] = top.found()
        return all_of_them
    found = [
        (score_QF, np.where(row_QF < 0, row_QF, start + row_QF))
        for start, block_BD in blocks
        for score_QF, row_QF in [
            faiss.knn(
                query_QD,
                np.ascontiguousarray(block_BD, np.float32),
                min(fetch, len(block_BD)),
                metric=faiss.METRIC_INNER_PRODUCT,
            )
        ]
    ]
    return best_of(found, fetch)


def _load_torch() -> Any:
    from thresher.retrieval.indexes.scan import RunningTop

    return RunningTop


def best_first(score_F: Vectors, row_F: Rows, k: int) -> Found:
    """Return the first `k` rows by (-score, row)."""
    order = np.lexsort((row_F, -score_F))[:k]
    return list(zip(row_F[order].tolist(), score_F[order].tolist(), strict=True))


def best_of(found: list[tuple[Vectors, Rows]], fetch: int) -> tuple[Vectors, Rows]:
    """Merge searches of different rows: the `fetch` highest scores and their rows, [Q, F], equal scores by row."""
    if len(found) == 1:
        return found[0]
    score_QF, row_QF = (np.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
    order_QF = np.lexsort((row_QF, -score_QF))[:, :fetch]
    return np.take_along_axis(score_QF, order_QF, 1), np.take_along_axis(row_QF, order_QF, 1)


def largest_row_norm(vectors_ND: Array) -> float:
    """Return the largest L2 norm of a row."""
    largest = 0.0
    step = max(1, SLICE_BYTES // (4 * vectors_ND.shape[1]))
    for start in range(0, len(vectors_ND), step):
        block_BD = vectors_ND[start : start + step].astype(np.float32, copy=False)
        largest = max(largest, float(np.einsum("nd,nd->n", block_BD, block_BD).max()))
    return float(np.sqrt(largest))
