"""Micro-batches: what several connections ask at the same time becomes one search.

A retriever is not thread-safe and answers many queries in little more time than one. So one thread owns it: requests
queue up, and whenever the thread is free it takes those that came first, up to `max_batch` queries with the same k.
When there are fewer it gives others `max_wait` seconds after the first to join, but only if the last batch was shared:
a lone client, as a training run is, never waits. Requests of one k are answered in the order in which they came, and a
request larger than a batch is searched in several.

A search that fails may be the fault of one request in the batch: each is then searched again alone, so that only the
guilty one fails.

Deliberately absent: HTTP, asyncio, and a second thread; FAISS and the BLAS under it use the cores by themselves.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from thresher.retrieval.retriever import Hit

Found = list[list[Hit]]
Search = Callable[[list[str], int], Found]


class Full(Exception):
    """More queries wait than may."""


@dataclass(slots=True)
class _Request:
    queries: list[str]
    k: int
    arrived: float
    answer: "Future[Found]" = field(default_factory=Future)


class Batcher:
    """The thread that searches. `batches` and `seconds` count what it has done, for the metrics."""

    def __init__(self, search: Search, *, max_batch: int, max_wait: float, max_waiting: int) -> None:
        self._search, self.max_batch, self.max_wait, self.max_waiting = search, max_batch, max_wait, max_waiting
        self._requests: deque[_Request] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self.waiting = 0  # queries that no search has begun for
        self.batches = 0
        self.seconds = 0.0
        self._busy_since: float | None = None
        self._shared = True  # whether the last batch held several requests; of the first, nobody knows
        self._thread = threading.Thread(target=self._work, name="retriever", daemon=True)
        self._thread.start()

    def submit(self, queries: list[str], k: int) -> "Future[Found]":
        """The hits of all `queries`, some time; cancel it to give up. Raises Full."""
        with self._changed:
            if self._closed or self.waiting + len(queries) > self.max_waiting:
                raise Full
            request = _Request(queries, k, time.monotonic())
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

    def _work(self) -> None:
        while batch := self._take():
            started = self._busy_since = time.monotonic()
            self._answer(batch)
            self.seconds += time.monotonic() - started
            self._busy_since = None

    def _take(self) -> list[_Request]:
        """The next batch; empty once closed and done."""
        with self._changed:
            while not self._requests and not self._closed:
                self._changed.wait()
            if not self._requests:
                return []
            ready = self._requests[0].arrived + (self.max_wait if self._shared else 0.0)
            while not self._closed and self.waiting < self.max_batch and (left := ready - time.monotonic()) > 0:
                self._changed.wait(left)
            batch: list[_Request] = []
            others: list[_Request] = []
            size, k = 0, self._requests[0].k
            while self._requests:
                if self._requests[0].k != k:
                    others.append(self._requests.popleft())
                    continue
                if batch and size + len(self._requests[0].queries) > self.max_batch:
                    break
                batch.append(self._requests.popleft())
                size += len(batch[-1].queries)
            self._requests.extendleft(reversed(others))
            self.waiting -= size
            self._shared = len(batch) > 1
            return batch

    def _answer(self, batch: list[_Request]) -> None:
        batch = [request for request in batch if request.answer.set_running_or_notify_cancel()]
        try:
            found = self._find([query for request in batch for query in request.queries], batch[0].k) if batch else []
        except Exception as error:
            if len(batch) == 1:
                batch[0].answer.set_exception(error)
                return
            for request in batch:
                try:
                    request.answer.set_result(self._find(request.queries, request.k))
                except Exception as own:
                    request.answer.set_exception(own)
            return
        start = 0
        for request in batch:
            request.answer.set_result(found[start : start + len(request.queries)])
            start += len(request.queries)

    def _find(self, queries: list[str], k: int) -> Found:
        found: Found = []
        for start in range(0, len(queries), self.max_batch):
            found += self._search(queries[start : start + self.max_batch], k)
            self.batches += 1
        return found
