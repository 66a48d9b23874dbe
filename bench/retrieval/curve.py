"""Recall against speed: what a larger search parameter (nprobe lists, or efSearch) brings, and what it costs.

All values take turns, batch of 64 by batch of 64, with the exact searches among them, so that a busy minute of the
machine falls on all. The first batch goes up the scale and finds where to stop, at a recall of .99. Recall is counted
over all batches.

Deliberately absent: a value between the steps, found by bisection; what is chosen was measured.

Axes: Q queries, D dimension, K hits.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from thresher.bench.measure import spread
from thresher.bench.retrieval.peers import ExactAnswers, Search, Searcher, ours
from thresher.retrieval.encoders import Vectors
from thresher.retrieval.indexes.approximate import ApproximateSearch
from thresher.retrieval.indexes.exact import Rows

WANTED, WANTED_K = 0.95, 5
ENOUGH = 0.99
CURVE_BATCH = 64
SETTLE_SECONDS = 0.05
RECALLS = (1, 5, 10)
PARAMETERS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)


@dataclass(slots=True)
class Point:
    """A value of the search parameter: ms of every batch, rows found for all queries, and the recall by k as text."""

    parameter: int
    ms: list[float] = field(default_factory=list)
    found: list[Rows] = field(default_factory=list)
    recall: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RecallCurve:
    """Points by rising parameter, and the ms of the exact searches that were measured among them, by name."""

    points: Sequence[Point]
    exact: dict[str, list[float]]

    def chosen(self) -> Point | None:
        """The least parameter whose recall at 5 is at least .95; None where none is."""
        return next((point for point in self.points if _wanted(point) >= WANTED), None)

    def best(self) -> float:
        """The highest recall at 5."""
        return max(map(_wanted, self.points), default=0.0)

    def record(self) -> dict[str, Any]:
        """As a row keeps it; `speedup` over the faster of the exact searches."""
        fastest = min((spread(ms)["p50"] for ms in self.exact.values()), default=float("nan"))
        return {
            "batch": CURVE_BATCH,
            "exact_ms": {name: spread(ms) for name, ms in self.exact.items()},
            "points": [
                {
                    "effort": point.parameter,
                    "recall": point.recall,
                    "ms": spread(point.ms),
                    "speedup": fastest / spread(point.ms)["p50"],
                }
                for point in self.points
            ],
        }


class Rotation:
    """A search to be called again and again, each time for the next `size` of the queries."""

    def __init__(self, search: Search, query_QD: Vectors, size: int, k: int) -> None:
        self._search, self._query_QD, self._size, self._k = search, query_QD, size, k
        self._next = 0

    def __call__(self) -> Rows:
        take = np.arange(self._next, self._next + self._size) % len(self._query_QD)
        self._next += self._size
        return self._search(self._query_QD[take], self._k)


def follow(search: ApproximateSearch, truth: ExactAnswers, peers: Sequence[Searcher], deadline: float) -> RecallCurve:
    """The curve of `search` over the queries of `truth`; `deadline` (time.monotonic) ends it early, with the batches
    done so far."""
    exact: dict[str, list[float]] = {peer.name: [] for peer in peers}
    points: list[Point] = []
    done = 0
    for start in range(0, len(truth.query_QD), CURVE_BATCH):
        batch_QD = truth.query_QD[start : start + CURVE_BATCH]
        if done and (time.monotonic() >= deadline or len(batch_QD) < CURVE_BATCH):
            break
        done += len(batch_QD)
        for peer in peers:
            exact[peer.name].append(_timed(peer.search, batch_QD, truth.k)[0])
        if start:
            for point in points:
                _measure(search, point, batch_QD, truth.k)
            continue
        for parameter in _parameters(search, truth.k):
            point = Point(parameter)
            _measure(search, point, batch_QD, truth.k)
            points.append(point)
            recall = truth.recall(point.found[0], min(WANTED_K, truth.k))
            if recall >= ENOUGH or time.monotonic() >= deadline:
                break
    for point in points:
        row_QK = np.concatenate(point.found)
        point.recall = {str(k): truth.recall(row_QK, k) for k in RECALLS if k <= truth.k}
    return RecallCurve(points, exact)


def _parameters(search: ApproximateSearch, k: int) -> list[int]:
    least, most = search.span(k)
    # All there is, where that is a step away.
    return [value for value in PARAMETERS if least <= value < most] + ([most] if most < 2 * PARAMETERS[-1] else [])


def _measure(search: ApproximateSearch, point: Point, batch_QD: Vectors, k: int) -> None:
    search.value = point.parameter
    ms, row_QK = _timed(ours(search.top), batch_QD, k)
    point.ms.append(ms)
    point.found.append(row_QK)


def settle() -> None:
    """To be called before a search is timed. Threads of the libraries that searched before go on waiting busily for
    some 25 ms (OpenBLAS's, for 2^26 cycles), and who comes next would pay for it."""
    time.sleep(SETTLE_SECONDS)


def _timed(search: Search, batch_QD: Vectors, k: int) -> tuple[float, Rows]:
    settle()
    started = time.perf_counter()
    row_QK = search(batch_QD, k)
    return 1e3 * (time.perf_counter() - started), row_QK


def _wanted(point: Point) -> float:
    return point.recall.get(str(WANTED_K), 0.0)
