"""Micro-batches: what several connections ask at the same time becomes one search, and each gets its share of it.

A retriever is not thread-safe and answers many queries in little more time than one. So one thread owns it: requests
queue up, and whenever the thread is free it takes up to `max_batch` queries with the same k, of a long request as many
as fit. When there are fewer it gives others `max_wait` seconds after the first to join, but only if the last batch was
shared: a lone client, as a training run is, never waits.

Who comes next is fair queueing, a client being a connection (self-clocked: Golestani 1994). A request starts where its
client's last one ends, or now, if that is later, now being the start of what was served last; it ends one later for
every query. The first is whose next batch ends first. So a client that asks little is in the next batch whoever else is
waiting, and one that asks much gets what the others leave. What is next to nothing beside the request that would join
it is searched without it: that costs the other little, and saves this one its time.

A full queue makes room for a short request by refusing the longest one that has not begun. A search that fails may be
the fault of one request in the batch: each is then searched again alone, so that only the guilty one fails.

Deliberately absent: HTTP, asyncio, and a second thread; FAISS and the BLAS under it use the cores by themselves.
"""

import threading
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field

from thresher.retrieval.retriever import Hit

Found = list[list[Hit]]
Search = Callable[[list[str], int], Found]
# A request does not join a batch beside which it is so many times as large. The batch after one that is so many times
# smaller than the largest is half of the largest, for that client may ask again; docs/log.md has what this costs.
ALONE = 16


class Full(Exception):
    """More queries wait than may."""


@dataclass(slots=True, eq=False)
class _Request:
    queries: list[str]
    k: int
    start: int  # of what is left
    arrived: float
    taken: int = 0  # queries that a search has begun for
    found: Found = field(default_factory=list)
    answer: "Future[Found]" = field(default_factory=Future)

    @property
    def left(self) -> int:
        return len(self.queries) - self.taken


_Batch = list[tuple[_Request, list[str]]]  # requests, and which of their queries


class Batcher:
    """The thread that searches. `batches` and `seconds` count what it has done, for the metrics."""

    def __init__(self, search: Search, *, max_batch: int, max_wait: float, max_waiting: int) -> None:
        self._search, self.max_batch, self.max_wait, self.max_waiting = search, max_batch, max_wait, max_waiting
        self._requests: list[_Request] = []
        self._clock = 0  # the latest start of what was served
        self._ends: dict[Hashable, int] = {}  # of each client's last request, where that is later
        self._changed = threading.Condition()
        self._closed = False
        self.waiting = 0  # queries that no search has begun for
        self.batches = 0
        self.seconds = 0.0
        self._busy_since: float | None = None
        self._short = False  # whether the last batch was
        self._shared = True  # whether the last batch held several requests; of the first, nobody knows
        self._thread = threading.Thread(target=self._work, name="retriever", daemon=True)
        self._thread.start()

    def submit(self, queries: list[str], k: int, client: Hashable) -> "Future[Found]":
        """The hits of all `queries`, some time, or Full; cancel it to give up. Raises Full."""
        with self._changed:
            if self._closed or not self._make_room(len(queries)):
                raise Full
            start = max(self._clock, self._ends.get(client, 0))
            self._ends[client] = start + len(queries)
            request = _Request(queries, k, start, time.monotonic())
            self._requests.append(request)
            before, self.waiting = self.waiting, self.waiting + len(queries)
            # The thread sleeps without work, or for a batch to fill; in between, waking it would only cost time.
            if before == 0 or before < self.max_batch <= self.waiting:
                self._changed.notify()
        return request.answer

    def busy_seconds(self) -> float:
        """For how long the search that is running has been running; 0 if none is."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self, timeout: float | None = None) -> None:
        """Takes no more requests, and returns when those that wait are answered, or after `timeout` seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout)

    def _make_room(self, queries: int) -> bool:
        """Whether so many more may wait, once longer requests that have not begun are refused."""
        while self.waiting + queries > self.max_waiting:
            longest = max((one for one in self._requests if not one.taken), key=lambda one: one.left, default=None)
            if longest is None or longest.left <= queries:
                return False
            self._remove(longest)
            if longest.answer.set_running_or_notify_cancel():
                longest.answer.set_exception(Full())
        return True

    def _remove(self, request: _Request) -> None:
        self._requests.remove(request)
        self.waiting -= request.left

    def _work(self) -> None:
        while batch := self._take():
            started = self._busy_since = time.monotonic()
            self._answer(batch)
            self.seconds += time.monotonic() - started
            self._busy_since = None

    def _take(self) -> _Batch:
        """The next batch; empty once closed and done."""
        with self._changed:
            while True:
                self._requests = [one for one in self._requests if not one.answer.cancelled()]
                self.waiting = sum(one.left for one in self._requests)
                if not self._requests:
                    if self._closed:
                        return []
                    self._changed.wait()
                    continue
                ready = self._requests[0].arrived + (self.max_wait if self._shared else 0.0)
                left = ready - time.monotonic()
                if self._closed or self.waiting >= self.max_batch or left <= 0:
                    break
                self._changed.wait(left)
            batch = self._first(max(1, self.max_batch // 2) if self._short else self.max_batch)
            self._shared = len(batch) > 1
            self._short = sum(count for _, count in batch) * ALONE <= self.max_batch
            return [(request, self._begin(request, count)) for request, count in batch]

    def _first(self, most: int) -> list[tuple[_Request, int]]:
        """Requests with one k, and how many queries of each come next, together at most so many."""
        order = sorted(self._requests, key=lambda one: (one.start + min(one.left, most), one.arrived))
        batch: list[tuple[_Request, int]] = []
        size = 0
        for request in order:
            count = min(request.left, most - size)
            if request.k == order[0].k and count:
                if batch and count >= ALONE * size:
                    break
                batch.append((request, count))
                size += count
        return batch

    def _begin(self, request: _Request, count: int) -> list[str]:
        """The next `count` queries of a request, which no longer wait."""
        queries = request.queries[request.taken : request.taken + count]
        self._clock = max(self._clock, request.start)
        request.start += count
        request.taken += count
        self.waiting -= count
        if not request.left:
            self._requests.remove(request)
        if len(self._ends) > 2 * len(self._requests) + 1024:
            self._ends = {client: end for client, end in self._ends.items() if end > self._clock}
        return queries

    def _answer(self, batch: _Batch) -> None:
        try:
            found = self._find([query for _, queries in batch for query in queries], batch[0][0].k)
        except Exception as error:
            if len(batch) == 1:
                self._fail(batch[0][0], error)
            else:
                for one in batch:
                    self._answer([one])
            return
        start = 0
        for request, queries in batch:
            request.found += found[start : start + len(queries)]
            start += len(queries)
            if len(request.found) == len(request.queries) and request.answer.set_running_or_notify_cancel():
                request.answer.set_result(request.found)

    def _fail(self, request: _Request, error: Exception) -> None:
        with self._changed:
            if request.left:
                self._remove(request)
        if request.answer.set_running_or_notify_cancel():
            request.answer.set_exception(error)

    def _find(self, queries: list[str], k: int) -> Found:
        found = self._search(queries, k)
        self.batches += 1
        return found
