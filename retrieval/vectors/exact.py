"""The exact k rows of largest inner product, independent of batch composition to the last bit.

FAISS finds candidates; their order is ours. It takes one path for a few queries and another (BLAS) for many, so a
score's last bits depend on the batch, and it drops tied rows at the k-th place as it pleases. So more than k
candidates are fetched and every one is scored again on its own: the float64 inner product of the query and the stored
row, rounded to float32, equal scores ordered by row. When the candidates cannot be proved to hold the answer, by the
error bound of a float32 inner product, the whole matrix is looked through for that query. The result is therefore the
exact top k whatever the batch, the number of threads and FAISS's choices.

Rows stored in float16 are exact numbers too: they are widened block by block, and the same proof holds for them.

Deliberately absent: encoders and passages; this file knows rows only. Not thread-safe.

Shape letters: N rows, Q queries, D dimension, F fetched candidates, B rows of a block.
"""

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from thresher.retrieval.encoders.encoder import Vectors
from thresher.retrieval.vectors.file import SLICE_BYTES, Array
from thresher.rewards.errors import UserError

try:
    # Its type stubs leave out half of what is used here.
    faiss: Any = importlib.import_module("faiss")
except ModuleNotFoundError:
    raise UserError("faiss is not installed; install thresher with its extra [cpu] or [gpu]") from None

# Candidates fetched beyond k: enough that, but for real ties, looking through the whole matrix is rare (no
# query of HotpotQA's 500 needs it), few enough that scoring them again costs less than FAISS itself.
MARGIN = 8
# Rows scored at a time: bounds the float64 scratch of a k near N.
SCORE_CHUNK = 512

Rows = npt.NDArray[np.int64]
# (row, score), best first.
Found = list[tuple[int, float]]


class RowScores:
    """Scores of single rows, which `take` fetches: rows [F] to their vectors [F, D], float32 or float16."""

    def __init__(self, take: Callable[[Rows], Array]) -> None:
        self._take = take

    def ranked(self, query_QD: Vectors, rows: Sequence[Rows] | Rows, k: int) -> list[Found]:
        """Scores every query's own rows, `rows[q]`, one by one and returns the first `k` by (-score, row)."""
        if not len(rows):
            return []
        query_F = np.repeat(np.arange(len(rows)), [len(row_F) for row_F in rows])
        score_F = self._scores(query_QD, query_F, np.concatenate(rows))
        border_Q = np.cumsum([len(row_F) for row_F in rows])[:-1]
        return [best_first(*each, k) for each in zip(np.split(score_F, border_Q), rows, strict=True)]

    def scores(self, query_D: Vectors, row_F: Rows) -> Vectors:
        """float32 [F]: the inner products of the query with the rows `row_F`, each summed in float64."""
        return self._scores(query_D[None], np.zeros(len(row_F), np.int64), row_F)

    def _scores(self, query_QD: Vectors, query_F: Rows, row_F: Rows) -> Vectors:
        """Of query `query_F[f]` with row `row_F[f]`; rows of all queries are fetched together."""
        query64_QD = query_QD.astype(np.float64)
        score_F = np.empty(len(row_F), np.float32)
        for start in range(0, len(row_F), SCORE_CHUNK):
            part = slice(start, start + SCORE_CHUNK)
            # Not a matmul: numpy sums each row in the same order however many there are.
            score_F[part] = (self._take(row_F[part]) * query64_QD[query_F[part]]).sum(axis=1)
        return score_F


class ExactRows(RowScores):
    """`vectors_ND`, float32 or float16, in memory or mapped; `largest_norm` is the largest L2 norm of a row, looked for
    (a pass over the matrix) unless given. `verify`, where the rows have hashes, is called with the first row
    and the one behind the last before these are read. `full_scans` counts the queries whose candidates proved
    nothing."""

    def __init__(
        self, vectors_ND: Array, largest_norm: float | None = None, verify: Callable[[int, int], None] | None = None
    ) -> None:
        self._verify = verify or (lambda first, stop: None)
        super().__init__(lambda row_F: vectors_ND[row_F])
        self.vectors_ND = vectors_ND
        self.full_scans = 0
        self._largest_norm = largest_row_norm(vectors_ND) if largest_norm is None else largest_norm

    def __len__(self) -> int:
        return len(self.vectors_ND)

    def top(self, query_QD: Vectors, k: int) -> list[Found]:
        """The exact top min(k, N) of every query, float32 [Q, D]; equal scores by ascending row."""
        k = min(k, len(self))
        score_QF, row_QF = self._candidates(query_QD, min(len(self), k + MARGIN))
        best = self.ranked(query_QD, row_QF, k)
        return [self._proved(*each) for each in zip(query_QD, score_QF, best, strict=True)]

    def _candidates(self, query_QD: Vectors, fetch: int) -> tuple[Vectors, Rows]:
        """FAISS's `fetch` best of every query, best first: scores and rows, [Q, F]."""
        found = [
            (score_QF, start + row_QF)
            for start, block_BD in self._blocks()
            for score_QF, row_QF in [
                faiss.knn(query_QD, block_BD, min(fetch, len(block_BD)), metric=faiss.METRIC_INNER_PRODUCT)
            ]
        ]
        return best_of(found, fetch)

    def _proved(self, query_D: Vectors, score_F: Vectors, best: Found) -> Found:
        """`best`, of the candidates that FAISS gave the scores `score_F`, if they provably hold it; else out of all
        rows."""
        k, error = len(best), self._error_bound(query_D)
        # Rows that were not fetched score at most the last fetched one's, give or take the error.
        if len(score_F) == len(self) or best[-1][1] > score_F[-1] + error:
            return best
        self.full_scans += 1
        rough_N = np.concatenate([block_BD @ query_D for _, block_BD in self._blocks()])
        kth = np.partition(rough_N, len(rough_N) - k)[len(rough_N) - k]
        return self.ranked(query_D[None], [np.flatnonzero(rough_N >= kth - 2 * error)], k)[0]

    def _blocks(self) -> Iterator[tuple[int, Vectors]]:
        """(first row, rows in float32): all of them at once where they are float32, else widened in blocks."""
        if self.vectors_ND.dtype == np.float32:
            self._verify(0, len(self))
            yield 0, self.vectors_ND
            return
        step = max(1, SLICE_BYTES // (4 * self.vectors_ND.shape[1]))
        for start in range(0, len(self), step):
            self._verify(start, min(start + step, len(self)))
            yield start, self.vectors_ND[start : start + step].astype(np.float32)

    def _error_bound(self, query_D: Vectors) -> float:
        """How far a float32 inner product, summed in any order, can be from ours: d * 2^-24 * |q| * |p|
        (Higham 2002, section 3.1), twice, which leaves room for its higher-order terms and for our rounding
        to float32."""
        norm = float(np.sqrt(np.square(query_D, dtype=np.float64).sum()))
        return 2 * (len(query_D) + 1) * 2.0**-24 * norm * self._largest_norm


def best_first(score_F: Vectors, row_F: Rows, k: int) -> Found:
    """The first `k` rows by (-score, row)."""
    order = np.lexsort((row_F, -score_F))[:k]
    return list(zip(row_F[order].tolist(), score_F[order].tolist(), strict=True))


def best_of(found: list[tuple[Vectors, Rows]], fetch: int) -> tuple[Vectors, Rows]:
    """The `fetch` highest scores of every query out of several searches over different rows: scores and rows, [Q, F],
    best first, equal scores by row."""
    if len(found) == 1:
        return found[0]
    score_QF, row_QF = (np.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
    order_QF = np.lexsort((row_QF, -score_QF))[:, :fetch]
    return np.take_along_axis(score_QF, order_QF, 1), np.take_along_axis(row_QF, order_QF, 1)


def largest_row_norm(vectors_ND: Array) -> float:
    """The largest L2 norm of a row."""
    largest = 0.0
    step = max(1, SLICE_BYTES // (4 * vectors_ND.shape[1]))
    for start in range(0, len(vectors_ND), step):
        block_BD = vectors_ND[start : start + step].astype(np.float32, copy=False)
        largest = max(largest, float(np.einsum("nd,nd->n", block_BD, block_BD).max()))
    return float(np.sqrt(largest))
