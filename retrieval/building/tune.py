"""How much of the exact answer an index finds, measured on a sample while it is built, and the lowest search parameter
(nprobe, efSearch) that finds as much as is wanted.

The sample's queries are runs of words out of passages drawn by a fixed seed, encoded as queries: close to what will be
asked, and there for every corpus. They are easier than questions in one way (the passage they come from is among the
answers) and harder in another (no passage answers most runs well). Recall at k is the share of hits whose exact score
is at least that of the exact k-th passage, so passages with equal vectors count for each other.

200 queries put the standard error of a recall of .95 at about .01 or less: the figure says where an index stands, not
its third digit. Deliberately absent: a choice by time, which would not repeat; the parameter is raised until recall is
there.

Shape letters: N passages, Q queries, D dimension, B a slice, F candidates.
"""

import time
from collections.abc import Callable, Iterator

import numpy as np

from thresher.retrieval.data.corpus import Corpus, embedded_text
from thresher.retrieval.encoders.encoder import Encoder, Vectors
from thresher.retrieval.indexes.dense import checked_vectors
from thresher.retrieval.indexes.kind import OnStage
from thresher.retrieval.vectors.approximate import ApproximateSearch
from thresher.retrieval.vectors.exact import MARGIN, Found, Rows, RowScores, best_of
from thresher.retrieval.vectors.faiss_library import faiss
from thresher.retrieval.vectors.file import VectorFile, sample_rows

QUERIES = 200
QUERY_WORDS = 12
SEED = 4321
KS = (5, 10)
# Candidates fetched per hit, few first: where the structure holds whole vectors, and where it estimates their order.
WHOLE_FACTORS, CODE_FACTORS = (1,), (2, 4, 16, 64)
# A step of the search parameter that brings less than this is not worth the next, as long as more candidates may be
# fetched instead.
LEAST_GAIN = 0.004
BATCH = 64

Top = Callable[[Vectors, int], list[Found]]


class SampleTruth:
    """The exact answers to a sample of queries over `vectors`, found in one pass."""

    def __init__(self, vectors: VectorFile, query_QD: Vectors, on_stage: OnStage) -> None:
        self.query_QD = query_QD
        self.ks = sorted({min(k, vectors.rows) for k in KS})
        self._exact = RowScores(vectors.take)
        fetch = min(vectors.rows, self.ks[-1] + MARGIN)
        found: list[tuple[Vectors, Rows]] = []
        for start, part_BD in vectors.slices():
            score_QF, row_QF = faiss.knn(query_QD, part_BD, min(fetch, len(part_BD)), metric=faiss.METRIC_INNER_PRODUCT)
            found = [best_of([*found, (score_QF, start + row_QF)], fetch)]
            on_stage("exact answers", start + len(part_BD), vectors.rows)
        best = self._exact.ranked(query_QD, found[0][1], fetch)
        self._kth = {k: [ranked[k - 1][1] for ranked in best] for k in self.ks}

    def recall(self, top: Top, k: int) -> float:
        """The share of the exact top `k` that `top` finds, mean over the queries."""
        good = 0
        for query_D, hits, kth in zip(self.query_QD, top(self.query_QD, k), self._kth[k], strict=True):
            rows = np.array([row for row, _ in hits], np.int64)
            good += int((self._exact.scores(query_D, rows) >= kth).sum())
        return good / (k * len(self.query_QD))

    def recalls(self, top: Top) -> dict[str, float]:
        """Recall at every k, by name, with the number of queries and their searches a second in batches of 64."""
        figures = {f"recall_at_{k}": self.recall(top, k) for k in self.ks}
        started = time.perf_counter()
        for start in range(0, len(self.query_QD), BATCH):
            top(self.query_QD[start : start + BATCH], self.ks[0])
        seconds = time.perf_counter() - started
        return {**figures, "queries": len(self.query_QD), "queries_per_second": len(self.query_QD) / seconds}


def sample_queries(corpus: Corpus, encoder: Encoder, embed: str, vectors: VectorFile) -> Vectors:
    """Vectors of at most 200 queries, float32 [Q, D]; the same for the same corpus and encoder. Where no run of words
    gives a vector, the passages' own vectors."""
    rows = sample_rows(len(corpus), min(QUERIES, len(corpus)), SEED)
    draw = np.random.default_rng(SEED)
    texts = []
    for row in rows.tolist():
        words = embedded_text(corpus[row], embed).split()
        first = int(draw.integers(max(1, len(words) - QUERY_WORDS + 1)))
        texts.append(" ".join(words[first : first + QUERY_WORDS]))
    query_QD = checked_vectors(encoder, encoder.encode_queries(texts), len(texts), vectors.dim)
    query_QD = query_QD[query_QD.any(axis=1)]
    return query_QD if len(query_QD) else vectors.rows_at(rows)


def tune(
    search: ApproximateSearch, truth: SampleTruth, wanted: float, factors: tuple[int, ...], on_stage: OnStage
) -> None:
    """Sets `search` to the lowest value of its parameter, and the fewest candidates, whose recall is at least
    `wanted` at every k; to the best one tried where none is."""
    best = (-1.0, search.value, search.factor)
    for factor in factors:
        before = -1.0
        search.factor = factor
        for value in values(*search.span(truth.ks[-1])):
            search.value = value
            recall = min(truth.recall(search.top, k) for k in truth.ks)
            on_stage("tuning", min(int(1000 * recall), int(1000 * wanted)), int(1000 * wanted))
            if recall > best[0]:
                best = (recall, value, factor)
            if recall >= wanted:
                return
            if factor != factors[-1] and recall - before < LEAST_GAIN:
                break
            before = recall
    _, search.value, search.factor = best


def values(least: int, most: int) -> Iterator[int]:
    """From the least up to the most, as 1, 2, 3, 4, 6, 8, 12, 16, 24, ..: steps of a third to a half, and `most`
    itself."""
    value = least
    while value < most:
        yield value
        value = max(value + 1, value * 4 // 3 if value & (value - 1) else value * 3 // 2)
    yield most
