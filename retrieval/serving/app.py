"""What the server answers to a request, without its sockets: routes, refusals, searches, /health and /metrics.

    GET /health   {"status", "passages", "kind", "corpus_sha256", ..}; 503 while a search hangs
    GET /metrics  counters and latencies for Prometheus
    POST          wire.DIALECTS; 400 or 413 with a reason for a request that is wrong, 503 with Retry-After for one that
                  may be repeated, 500 for a search that failed (its trace goes to the server's log, never to the wire)

A request whose Host header names another server gets 403, whatever its path (hosts.py).
Every answer names the index in a header, so that a client notices another one. All runs in the server's one event loop.
"""

import asyncio
import hashlib
import json
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field

from thresher.common.errors import UserError
from thresher.retrieval.indexes.manifest import Manifest
from thresher.retrieval.retriever import Retriever
from thresher.retrieval.serving.batcher import Batcher, Full
from thresher.retrieval.serving.hosts import host_allowed
from thresher.retrieval.serving.metrics import Metrics
from thresher.retrieval.serving.wire import (
    DIALECTS,
    IDENTITY_HEADER,
    Bounds,
    Dialect,
    Refused,
    Request,
    read_request,
    render_answer,
)

RETRY = (("retry-after", "1"),)
PATHS = (*DIALECTS, "/health", "/metrics")

ReadBody = Callable[[], Awaitable[bytes]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a server is run. timeout: seconds for a body to arrive, and for a search."""

    k: int = 3  # passages for a request to /retrieve that does not say
    max_batch: int = 256  # queries searched at once
    max_wait_ms: float = 3.0  # for others to join a search
    max_waiting: int = 16_384  # queries
    max_body: int = 8 * 2**20  # bytes
    max_connections: int = 512  # whose request is being served
    timeout: float = 60.0
    allow_hosts: tuple[str, ...] = ()  # names that a Host header may hold, beside those of hosts.py
    bounds: Bounds = field(default_factory=Bounds)


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What is served, as /health reports it. identity: names this index, in every answer."""

    passages: int
    kind: str
    corpus_sha256: str
    identity: str

    @classmethod
    def by(cls, manifest: Manifest, parameters: dict[str, int] | None = None) -> "Served":
        """From the manifest of an index, and what replaces its parameters: what is encoded and searched the same way
        is the same index."""
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
        """To a request of a `client` with these Host headers, whose body `read_body` waits for, or raises Refused."""
        try:
            if not host_allowed(hosts, self._names):
                raise _other_host(hosts)
            answer = await self._answer(method, path, read_body, client)
        except Refused as refused:
            answer = _refusal(refused)
        except Exception:
            # Whatever it is, one request must not end the others': the log gets the trace, the client a 500.
            print(traceback.format_exc(), file=sys.stderr, flush=True)
            answer = _refusal(Refused(500, "the server failed on this request; its log says more"))
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
            request = read_request(body, dialect, self.settings.bounds, self.settings.k)
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
            raise Refused(503, f"the search was not done within {limit:g} s; ask again, or for less", RETRY) from None
        except Exception as error:
            # Whatever the retriever, which may be a user's, raised: it is this request's failure and no other's.
            print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)
            reason = str(error) if isinstance(error, UserError) else type(error).__name__
            raise Refused(500, f"the search failed ({reason}); the server's log says more") from None
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
                ("waiting_queries", "gauge", "queries that no search has begun for", self.batcher.waiting),
            )
        )


def _other_host(hosts: Sequence[str]) -> Refused:
    found = f"names {hosts[0][:80]!r}" if len(hosts) == 1 else f"is there {len(hosts)} times"
    return Refused(
        403,
        f"the Host header {found}; expected an IP address, localhost or this machine's name once; "
        "serve-retriever --allow-host NAME adds another",
    )


def _refusal(refused: Refused) -> Reply:
    return Reply(refused.status, json.dumps({"error": refused.reason}).encode("ascii"), refused.headers)
