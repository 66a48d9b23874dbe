"""Who searches the same vectors: the engine's kinds, and what people write without an engine.

    torch           topk of a matmul, in float32: the scores of all queries at once
    numpy           the same with argpartition, which has no batch of its own
    FAISS           its flat search, as IndexFlatIP does it

Each gets queries [Q, D] and k and returns rows [Q, k], best first; the machine's threads are everyone's
(OMP_NUM_THREADS). A search counts as right when its rows have the scores, in float64, of the exact answer.

Deliberately absent: other vector databases, which would need a server each.

Axes: N vectors, Q queries, D dimension.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from thresher.retrieval.encoders import Vectors
from thresher.retrieval.indexes.exact import Found, Rows, RowScores
from thresher.retrieval.indexes.faiss_library import faiss

# What float32 may add to or take from a score of unit vectors, whatever the order of its sum.
ROUNDING = 1e-5

Search = Callable[[Vectors, int], Rows]


@dataclass(frozen=True, slots=True)
class Searcher:
    """A name, a version and the search."""

    name: str
    version: str
    search: Search


def exact_peers(vectors_ND: Vectors) -> list[Searcher]:
    """torch, numpy and FAISS over `vectors_ND`, float32, which none of them copies."""
    with warnings.catch_warnings():
        # The file's map is read-only, and so is all that is done with it.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        tensor_ND = torch.from_numpy(vectors_ND)

    def by_torch(query_QD: Vectors, k: int) -> Rows:
        found: Rows = torch.topk(torch.from_numpy(query_QD) @ tensor_ND.T, k).indices.numpy()
        return found

    def by_numpy(query_QD: Vectors, k: int) -> Rows:
        score_QN = query_QD @ vectors_ND.T
        # Row by row, for all at once would hold indices of 8 bytes for every score.
        best_QK = np.stack([np.argpartition(score_N, -k)[-k:] for score_N in score_QN])
        order_QK = np.argsort(-np.take_along_axis(score_QN, best_QK, 1), axis=1)
        return np.take_along_axis(best_QK, order_QK, 1)

    def by_faiss(query_QD: Vectors, k: int) -> Rows:
        found: Rows = faiss.knn(query_QD, vectors_ND, k, metric=faiss.METRIC_INNER_PRODUCT)[1]
        return found

    return [
        Searcher("torch", torch.__version__, by_torch),
        Searcher("numpy", np.__version__, by_numpy),
        Searcher("FAISS", faiss.__version__, by_faiss),
    ]


def ours(top: Callable[[Vectors, int], list[Found]]) -> Search:
    """A search of the engine as a contender: row -1 where it found fewer than k."""

    def search(query_QD: Vectors, k: int) -> Rows:
        row_QK = np.full((len(query_QD), k), -1, np.int64)
        for row_K, found in zip(row_QK, top(query_QD, k), strict=True):
            row_K[: len(found)] = [row for row, _ in found]
        return row_QK

    return search


def bare(index: Any, name: str, value: int) -> Search:
    """FAISS's structure `index` without our rescoring, its parameter `name` set: what it finds, by its own scores."""

    def search(query_QD: Vectors, k: int) -> Rows:
        faiss.ParameterSpace().set_index_parameter(index, name, value)
        found: Rows = index.search(query_QD, k)[1]
        return found

    return search


class ExactAnswers:
    """The exact answers to `query_QD`: rows and float64 scores [Q, k], by the engine's flat search."""

    def __init__(self, query_QD: Vectors, exact: Any, k: int) -> None:
        self.query_QD, self.k = query_QD, k
        self._exact: RowScores = exact
        self._score_QK = np.array([[score for _, score in found] for found in exact.top(query_QD, k)])

    def wrong(self, search: Search, count: int) -> str | None:
        """Why `search` is not exact on the first `count` queries, in a few words; None if it is."""
        row_QK = search(self.query_QD[:count], self.k)
        for number, row_K in enumerate(row_QK):
            if len(set(row_K.tolist())) < self.k or row_K.min() < 0:
                return f"query {number} got {len(set(row_K.tolist()))} different rows instead of {self.k}"
            error = np.abs(self._scores(number, row_K) - self._score_QK[number]).max()
            if error > ROUNDING:
                return f"query {number}: a score is off by {error:.1e}"
        return None

    def recall(self, row_QK: Rows, k: int) -> float:
        """Recall at k of rows [Q, >= k] found for the first Q queries: the share whose score is at least the exact
        k-th, so that equal passages count for each other."""
        good = 0
        for number, row_K in enumerate(row_QK[:, :k]):
            kth = self._score_QK[number, k - 1]
            good += int((self._scores(number, row_K[row_K >= 0]) >= kth - ROUNDING / 100).sum())
        return good / (k * len(row_QK))

    def _scores(self, number: int, row_F: Rows) -> Vectors:
        return self._exact.scores(self.query_QD[number], row_F)
