"""The retrieval server without its sockets: its wire format, its metrics, and searches shared by requests.

    POST /retrieve      {"queries": [..], "topk": 3, "return_scores": true}    as sent by Search-R1 and verl
                        {"result": [[{"document": {"id", "contents"}, "score": .83}]]}, or [[{"id", "contents"}]] in it
    POST /search        {"query": "..", "top_n": 5, "return_score": true}      as sent by ReCall
                        [{"id", "contents"}], or [those, their scores]
    POST /batch_search  {"query": [..], ..}
                        the same with a list for each query
    GET /health         {"status", "passages", "kind", "corpus_sha256", ..}; 503 while a search hangs
    GET /metrics        counters and latencies for Prometheus

`contents` is wiki-18's: the title in double quotes, a line feed, the text. 400 and 413 name the wrong or unknown key;
a request with 503 and Retry-After may be repeated; 500 is a failed search, whose trace is written to the log; 403 is
for a Host header that names another server (common/hosts.py). Every answer identifies the index in a header.
"""

import asyncio
import hashlib
import json
import sys
import threading
import time
import traceback
from bisect import bisect_left
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from thresher.common.errors import UserError
from thresher.common.hosts import host_allowed
from thresher.retrieval.indexes.manifest import Manifest
from thresher.retrieval.passages import Passage, split_contents
from thresher.retrieval.retriever import Hit, Retriever

# Header of every answer of our server that identifies the index; its value is only for comparison.
IDENTITY_HEADER = "thresher-index"


class Refused(Exception):
    """Raised for a request that is not served: HTTP status, the reason that is sent back, and headers."""

    def __init__(self, status: int, reason: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(reason)
        self.status, self.reason, self.headers = status, reason, headers


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The keys of a request, whether it has many queries, and its default k."""

    queries: str
    k: str
    scores: str
    many: bool
    default_k: int | None  # None: the server's


DIALECTS = {
    "/retrieve": Dialect(queries="queries", k="topk", scores="return_scores", many=True, default_k=None),
    "/search": Dialect(queries="query", k="top_n", scores="return_score", many=False, default_k=10),
    "/batch_search": Dialect(queries="query", k="top_n", scores="return_score", many=True, default_k=10),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Limits of one request."""

    max_queries: int = 8192  # more than a whole batch of a training run
    max_characters: int = 65_536  # of one query; an encoder reads a few hundred words of it
    max_k: int = 100
    max_passages: int = 65_536  # queries x k: an answer has to fit in memory


@dataclass(frozen=True, slots=True)
class Request:
    """A request that was parsed and is within the bounds."""

    queries: list[str]
    k: int
    scores: bool


def read_request(body: bytes, dialect: Dialect, bounds: Bounds, default_k: int, passages: int) -> Request:
    """Return the request in `body`. Refused with 400 if it is not JSON, has a wrong key, or is out of bounds. A blank
    query among others finds nothing. passages: their number in the corpus, a limit of k in a request without it."""
    record = _read_object(body)
    for key in record:
        if key not in (dialect.queries, dialect.k, dialect.scores):
            known = ", ".join((dialect.queries, dialect.k, dialect.scores))
            raise _bad(f"{_shown(key)}: unknown key; expected {known}")
    queries = _queries(record, dialect, bounds)
    k = record.get(dialect.k)
    if k is None:
        k = min(default_k if dialect.default_k is None else dialect.default_k, bounds.max_k, passages)
    if type(k) is not int or not 1 <= k <= bounds.max_k:
        raise _bad(f"{dialect.k}: expected a whole number from 1 to {bounds.max_k}, got {_shown(k)}")
    if len(queries) * k > bounds.max_passages:
        raise _bad(
            f"{dialect.k}: {len(queries)} queries x {k} are {len(queries) * k} passages, more than the "
            f"{bounds.max_passages} that one answer may hold; ask in several requests"
        )
    scores = record.get(dialect.scores, False)
    if not isinstance(scores, bool):
        raise _bad(f"{dialect.scores}: expected true or false, got {_shown(scores)}")
    return Request(queries, k, scores)


def render_answer(found: Sequence[Sequence[Hit]], dialect: Dialect, scores: bool) -> bytes:
    """Return the answer to a request of this dialect as ASCII JSON, with lone surrogates as escapes."""
    documents = [[{"id": hit.passage.id, "contents": contents(hit.passage)} for hit in hits] for hits in found]
    values = [[hit.score for hit in hits] for hits in found]
    answer: Any
    if dialect is DIALECTS["/retrieve"]:
        answer = {
            "result": [
                [{"document": document, "score": value} for document, value in zip(*pair, strict=True)]
                for pair in zip(documents, values, strict=True)
            ]
            if scores
            else documents
        }
    elif dialect.many:
        answer = [documents, values] if scores else documents
    else:
        answer = [documents[0], values[0]] if scores else documents[0]
    return json.dumps(answer, separators=(",", ":")).encode("ascii")


def contents(passage: Passage) -> str:
    """Return a passage in wiki-18's form. There a title is one line, so its line feeds become spaces."""
    return f'"{passage.title.replace(chr(10), " ")}"\n{passage.text}'


def passage_of(identifier: str, written: str) -> Passage:
    """Return the passage whose `contents` are `written`."""
    return Passage(identifier, *split_contents(written))


def _read_object(body: bytes) -> dict[str, Any]:
    try:
        record = json.loads(body.decode("utf-8"))
    except UnicodeDecodeError:
        raise _bad("the body is not UTF-8; send JSON") from None
    except RecursionError:
        raise _bad("the body is nested too deeply; send an object of queries and numbers") from None
    except ValueError as error:
        raise _bad(f"the body is not JSON ({str(error)[:80]})") from None
    if not isinstance(record, dict):
        raise _bad(f"the body: expected an object, got {_shown(record)}")
    return record


def _queries(record: dict[str, Any], dialect: Dialect, bounds: Bounds) -> list[str]:
    key = dialect.queries
    if key not in record:
        raise _bad(f"{key}: missing; expected {'a list of strings' if dialect.many else 'a string'}")
    value = record[key]
    if not dialect.many:
        value = [value]
    elif not isinstance(value, list):
        raise _bad(f"{key}: expected a list of strings, got {_shown(value)}")
    if not 1 <= len(value) <= bounds.max_queries:
        raise _bad(f"{key}: expected from 1 to {bounds.max_queries} queries, got {len(value)}")
    for number, query in enumerate(value):
        place = f"{key}[{number}]" if dialect.many else key
        if not isinstance(query, str):
            raise _bad(f"{place}: expected a string, got {_shown(query)}")
        if len(query) > bounds.max_characters:
            raise _bad(f"{place}: expected at most {bounds.max_characters} characters, got {len(query)}")
        if any("\ud800" <= character <= "\udfff" for character in query):
            raise _bad(f"{place}: holds half of a surrogate pair, which is not text")
    if not any(query.strip() for query in value):
        raise _bad(f"{key}: blank; expected text to search for")
    return value


def _bad(reason: str) -> Refused:
    return Refused(400, reason)


def _shown(value: Any) -> str:
    """Return a value as it is shown in a reason: as short JSON."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."


# Seconds: from a cached answer to a search that is about to be given up.
LATENCY_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metrics:
    """Requests by path and status, and the latencies of those that were served."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, int]] = Counter()
        self.queries = 0
        self._buckets = [0] * (len(LATENCY_BOUNDS) + 1)
        self._seconds = 0.0

    def count(self, path: str, status: int) -> None:
        """Count a request that was answered."""
        self.requests[path, status] += 1

    def served(self, queries: int, seconds: float) -> None:
        """Count a request whose queries were searched, and the time from its last byte to its answer."""
        self.queries += queries
        self._buckets[bisect_left(LATENCY_BOUNDS, seconds)] += 1
        self._seconds += seconds

    def text(self, others: Iterable[tuple[str, str, str, float]]) -> str:
        """Return all metrics as text; `others` are (name, type, help, value) of metrics that are counted elsewhere."""
        lines = _header("requests_total", "counter", "requests by path and status")
        for (path, status), count in sorted(self.requests.items()):
            lines.append(f'thresher_requests_total{{path="{path}",code="{status}"}} {count}')
        lines += _header("request_seconds", "histogram", "time from a request's last byte to its answer")
        total = 0
        for bound, count in zip((*map(str, LATENCY_BOUNDS), "+Inf"), self._buckets, strict=True):
            total += count
            lines.append(f'thresher_request_seconds_bucket{{le="{bound}"}} {total}')
        lines += [f"thresher_request_seconds_sum {self._seconds:.9g}", f"thresher_request_seconds_count {total}"]
        for name, kind, text, value in (("queries_total", "counter", "queries served", self.queries), *others):
            lines += [*_header(name, kind, text), f"thresher_{name} {value:.12g}"]
        return "\n".join(lines) + "\n"


def _header(name: str, kind: str, text: str) -> list[str]:
    return [f"# HELP thresher_{name} {text}", f"# TYPE thresher_{name} {kind}"]


Found = list[list[Hit]]
Search = Callable[[list[str], int], Found]
# A request that is ALONE times as large as a batch does not join it. After a batch that is ALONE times smaller than the
# largest, the next batch is at most half of the largest, because that client may send another request;
# docs/internals/log.md has the cost.
ALONE = 16


class Full(Exception):
    """Raised if more queries are waiting than allowed."""


@dataclass(slots=True, eq=False)
class _Queued:
    queries: list[str]
    k: int
    start: int  # of the remaining queries
    arrived: float
    taken: int = 0  # queries that a search has begun for
    found: Found = field(default_factory=list)
    answer: "Future[Found]" = field(default_factory=Future)

    @property
    def left(self) -> int:
        return len(self.queries) - self.taken


_Batch = list[tuple[_Queued, list[str]]]  # requests, and those of their queries that are in the batch


class Batcher:
    """The thread that searches for all connections. `batches` and `seconds` count its searches and their time.

    One thread owns the retriever, which is not thread-safe. Whenever it is free it takes up to `max_batch` queries with
    the same k, and of a long request as many as fit. If there are fewer, it waits for others until `max_wait` seconds
    after the first, but only if the last batch was shared. A single client, such as a training run, thus never waits.

    The order is fair queueing, where a client is a connection (self-clocked: Golestani 1994). A request starts at the
    end of its client's last one, or at the latest start of those served, if that is later, and its end is one later for
    every query. The request whose next batch ends first is served first. A client with few queries is therefore in the
    next batch, and one with many gets the rest. A request much smaller than the next one is searched without it.

    If the queue is full, the longest request that has not begun is refused in favour of a shorter one. After a search
    that failed, each request of its batch is searched separately, so that only the one at fault fails.
    """

    def __init__(self, search: Search, *, max_batch: int, max_wait: float, max_waiting: int) -> None:
        self._search, self.max_batch, self.max_wait, self.max_waiting = search, max_batch, max_wait, max_waiting
        self._requests: list[_Queued] = []
        self._clock = 0  # the latest start of the requests served
        self._ends: dict[Hashable, int] = {}  # of each client's last request, if that is later
        self._changed = threading.Condition()
        self._closed = False
        self.waiting = 0  # queries for which no search has begun
        self.batches = 0
        self.seconds = 0.0
        self._busy_since: float | None = None
        self._short = False  # whether the last batch was
        self._shared = True  # whether the last batch had several requests; True before the first
        self._thread = threading.Thread(target=self._work, name="retriever", daemon=True)
        self._thread.start()

    def submit(self, queries: list[str], k: int, client: Hashable) -> "Future[Found]":
        """Return the future of the hits of all `queries`. Full, at once or from the future, if too many wait."""
        with self._changed:
            if self._closed or not self._make_room(len(queries)):
                raise Full
            start = max(self._clock, self._ends.get(client, 0))
            self._ends[client] = start + len(queries)
            request = _Queued(queries, k, start, time.monotonic())
            self._requests.append(request)
            before, self.waiting = self.waiting, self.waiting + len(queries)
            # The thread sleeps if it has no work or waits for a full batch; otherwise waking it would only cost time.
            if before == 0 or before < self.max_batch <= self.waiting:
                self._changed.notify()
        return request.answer

    def busy_seconds(self) -> float:
        """Return the seconds for which the current search has been running; 0 if there is none."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def close(self, timeout: float | None = None) -> None:
        """Accept no more requests, and return when the waiting ones are answered, or after `timeout` seconds."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join(timeout)

    def _make_room(self, queries: int) -> bool:
        """Return whether `queries` more may wait, after refusing longer requests that have not begun. Where none waits,
        a request of any length may."""
        while self.waiting and self.waiting + queries > self.max_waiting:
            longest = max((one for one in self._requests if not one.taken), key=lambda one: one.left, default=None)
            if longest is None or longest.left <= queries:
                return False
            self._remove(longest)
            if longest.answer.set_running_or_notify_cancel():
                longest.answer.set_exception(Full())
        return True

    def _remove(self, request: _Queued) -> None:
        self._requests.remove(request)
        self.waiting -= request.left

    def _work(self) -> None:
        while batch := self._take():
            started = self._busy_since = time.monotonic()
            self._answer(batch)
            self.seconds += time.monotonic() - started
            self._busy_since = None

    def _take(self) -> _Batch:
        """Return the next batch; an empty one when closed and done."""
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

    def _first(self, most: int) -> list[tuple[_Queued, int]]:
        """Return requests with the same k, and the number of queries of each that are next, at most `most` in all."""
        order = sorted(self._requests, key=lambda one: (one.start + min(one.left, most), one.arrived))
        batch: list[tuple[_Queued, int]] = []
        size = 0
        for request in order:
            count = min(request.left, most - size)
            if request.k == order[0].k and count:
                if batch and count >= ALONE * size:
                    break
                batch.append((request, count))
                size += count
        return batch

    def _begin(self, request: _Queued, count: int) -> list[str]:
        """Return the next `count` queries of a request, which are no longer waiting."""
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
            found = self._search([query for _, queries in batch for query in queries], batch[0][0].k)
        except Exception as error:
            if len(batch) == 1:
                self._fail(batch[0][0], error)
            else:
                for one in batch:
                    self._answer([one])
            return
        self.batches += 1
        start = 0
        for request, queries in batch:
            request.found += found[start : start + len(queries)]
            start += len(queries)
            if len(request.found) == len(request.queries) and request.answer.set_running_or_notify_cancel():
                request.answer.set_result(request.found)

    def _fail(self, request: _Queued, error: Exception) -> None:
        with self._changed:
            if request.left:
                self._remove(request)
        if request.answer.set_running_or_notify_cancel():
            request.answer.set_exception(error)


RETRY = (("retry-after", "1"),)
PATHS = (*DIALECTS, "/health", "/metrics")

ReadBody = Callable[[], Awaitable[bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a server. timeout: seconds for a body to arrive, and for a search."""

    k: int = 3  # passages for a request to /retrieve without `topk`
    max_batch: int = 256  # queries searched at once
    max_wait_ms: float = 3.0  # that a search waits for other requests
    max_waiting: int = 16_384  # queries
    max_body: int = 8 * 2**20  # bytes
    max_connections: int = 512  # whose request is being served
    timeout: float = 60.0
    allow_hosts: tuple[str, ...] = ()  # names that a Host header may have, in addition to those of hosts.py
    bounds: Bounds = field(default_factory=Bounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The index that is served, as /health reports it. identity: identifies this index in every answer."""

    passages: int
    kind: str
    corpus_sha256: str
    identity: str

    @classmethod
    def by(cls, manifest: Manifest, parameters: dict[str, int] | None = None) -> "Served":
        """Return the record of an index; two that are encoded and searched in the same way have the same identity."""
        built = (manifest.corpus_sha256, manifest.embed, manifest.encoder_fingerprint, manifest.kind, manifest.factory)
        searched = sorted((manifest.parameters | (parameters or {})).items())
        return cls(
            passages=manifest.passages,
            kind=manifest.kind,
            corpus_sha256=manifest.corpus_sha256,
            identity=hashlib.sha256(repr((built, searched)).encode()).hexdigest()[:16],
        )


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    kind: str = "application/json"


class App:
    """The server without its sockets."""

    def __init__(
        self, retriever: Retriever, served: Served, settings: Settings, names: Collection[str] = frozenset()
    ) -> None:
        self.retriever, self.served, self.settings = retriever, served, settings
        self._names = names  # of the server, see hosts.py
        self.metrics = Metrics()
        self.serving = 0  # requests that have arrived and are not answered
        self.batcher = Batcher(
            retriever.search,
            max_batch=settings.max_batch,
            max_wait=settings.max_wait_ms / 1000,
            max_waiting=settings.max_waiting,
        )

    async def answer(
        self, method: str, path: str, hosts: Sequence[str], read_body: ReadBody, client: Hashable
    ) -> Reply:
        """Return the answer to a request of `client`, whose body `read_body` reads or refuses."""
        try:
            if not host_allowed(hosts, self._names):
                found = f"names {hosts[0][:80]!r}" if len(hosts) == 1 else f"is given {len(hosts)} times"
                raise Refused(
                    403,
                    f"the Host header {found}; expected an IP address, localhost or this machine's name once; "
                    "serve-retriever --allow-host NAME adds another",
                )
            answer = await self._answer(method, path, read_body, client)
        except Refused as refused:
            answer = _refusal(refused)
        except Exception:
            # No error of one request may end the others: the trace is written to the log, and the client gets a 500.
            print(traceback.format_exc(), file=sys.stderr, flush=True)
            answer = _refusal(Refused(500, "the server failed on this request; see its log"))
        self.metrics.count(path if path in PATHS else "other", answer.status)
        named = (*answer.headers, (IDENTITY_HEADER, self.served.identity))
        return Reply(answer.status, answer.body, named, answer.kind)

    async def _answer(self, method: str, path: str, read_body: ReadBody, client: Hashable) -> Reply:
        allowed = "POST" if path in DIALECTS else "GET" if path in PATHS else None
        if allowed is None:
            raise Refused(404, f"no such path; expected one of {', '.join(PATHS)}")
        if method != allowed and (method, allowed) != ("HEAD", "GET"):
            raise Refused(405, f"{path} takes {allowed}, not {method[:40]}", (("allow", allowed),))
        if path == "/health":
            return self._health()
        if path == "/metrics":
            return Reply(200, self._metrics().encode(), kind="text/plain; version=0.0.4; charset=utf-8")
        body = await read_body()
        if self.serving >= self.settings.max_connections:
            raise Refused(503, f"{self.serving} requests are being served already; ask again", RETRY)
        self.serving += 1
        try:
            started = time.monotonic()
            dialect = DIALECTS[path]
            request = read_request(body, dialect, self.settings.bounds, self.settings.k, self.served.passages)
            answer = await self._search(request, dialect, client)
            self.metrics.served(len(request.queries), time.monotonic() - started)
            return answer
        finally:
            self.serving -= 1

    async def _search(self, request: Request, dialect: Dialect, client: Hashable) -> Reply:
        try:
            self.retriever.check_k(request.k)
        except UserError as error:
            raise Refused(400, f"{dialect.k}: {error}") from None
        limit = self.settings.timeout
        try:
            waiting = asyncio.wrap_future(self.batcher.submit(request.queries, request.k, client))
            found = await asyncio.wait_for(waiting, limit)
        except Full:
            raise Refused(503, f"{self.batcher.waiting} queries are waiting already; ask again", RETRY) from None
        except TimeoutError:
            raise Refused(
                503, f"the search was not done within {limit:g} s; ask again, or for fewer passages", RETRY
            ) from None
        except Exception as error:
            # Any exception of the retriever, which may be a user's, is a failure of this request only.
            print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)
            reason = str(error) if isinstance(error, UserError) else type(error).__name__
            raise Refused(500, f"the search failed ({reason}); see the server's log") from None
        return Reply(200, render_answer(found, dialect, request.scores))

    def _health(self) -> Reply:
        hangs = self.batcher.busy_seconds() > self.settings.timeout
        report = {
            "status": "a search hangs" if hangs else "ok",
            "passages": self.served.passages,
            "kind": self.served.kind,
            "corpus_sha256": self.served.corpus_sha256,
            "index": self.served.identity,
            "waiting_queries": self.batcher.waiting,
        }
        return Reply(503 if hangs else 200, json.dumps(report).encode("ascii"))

    def _metrics(self) -> str:
        stats = self.retriever.stats
        return self.metrics.text(
            (
                ("batches_total", "counter", "searches, each of one or more requests", self.batcher.batches),
                ("search_seconds_total", "counter", "time spent searching", self.batcher.seconds),
                ("cached_queries_total", "counter", "queries answered without a search", stats.cached),
                ("waiting_queries", "gauge", "queries that wait for a search", self.batcher.waiting),
            )
        )


def _refusal(refused: Refused) -> Reply:
    return Reply(refused.status, json.dumps({"error": refused.reason}).encode("ascii"), refused.headers)
