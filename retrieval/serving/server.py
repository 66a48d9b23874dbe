"""`thresher serve-retriever`: an index behind a URL, in the two dialects that training code already speaks (wire.py).

    GET /health   {"status", "passages", "kind", "corpus_sha256", ..}; 503 while a search hangs
    GET /metrics  counters and latencies for Prometheus
    POST          wire.DIALECTS; 400 or 413 with a reason for a request that is wrong, 503 with Retry-After for one that
                  may be repeated, 500 for a search that failed (its trace goes to the server's log, never to the wire)

One event loop reads and writes, one thread searches (batcher.py). Everything is bounded: connections, the size of a
head and a body, the time to send either, queries in a request, queries waiting, the time of a search, and the time that
an answer may take to be read. Every answer names the index in a header, so that a client notices another one.

uvicorn does the HTTP. It sets no limit on the time in which a request must arrive, so `_Connection` does.

Deliberately absent: a web framework, for five routes need none; TLS, passwords and several processes, which a proxy in
front has. Hence the loopback address unless another is asked for.
"""

import asyncio
import hashlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from thresher.retrieval.indexes.manifest import Manifest, read_manifest
from thresher.retrieval.retriever import Retriever
from thresher.retrieval.serving.batcher import Batcher, Full
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
from thresher.rewards.errors import UserError

try:
    import h11
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ModuleNotFoundError:
    raise UserError("uvicorn is not installed; install thresher with its extra [serve]") from None

LOOPBACK = ("127.0.0.1", "::1", "localhost")
HEAD_BYTES = 32_768
# Of a connection on which no request is being served: for its head to arrive, or for the last answer to be read. A
# client whose connection was closed while it did other things opens another.
IDLE_SECONDS = 60.0
# A body that is too long is read on up to so many times the limit: closing earlier would lose our answer on its way.
DRAIN = 4
RETRY = (("retry-after", "1"),)
CLOSE = (("connection", "close"),)  # the rest of a body is not waited for

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a server is run. timeout: seconds for a body to arrive, for a search, and for an answer to be read."""

    k: int = 3  # passages for a request to /retrieve that does not say
    max_batch: int = 256  # queries searched at once
    max_wait_ms: float = 3.0  # for others to join a search
    max_waiting: int = 16_384  # queries
    max_body: int = 8 * 2**20  # bytes
    max_connections: int = 512
    timeout: float = 60.0
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
class _Answer:
    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()
    kind: str = "application/json"


class App:
    """The server without its sockets, as an ASGI application."""

    def __init__(self, retriever: Retriever, served: Served, settings: Settings) -> None:
        self.retriever, self.served, self.settings = retriever, served, settings
        self.metrics = Metrics()
        self.batcher = Batcher(
            retriever.search,
            max_batch=settings.max_batch,
            max_wait=settings.max_wait_ms / 1000,
            max_waiting=settings.max_waiting,
        )

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        path = scope["path"]
        try:
            answer = await self._answer(scope["method"], path, scope["headers"], receive)
        except Refused as refused:
            answer = _refusal(refused)
        except Exception:
            # Whatever it is, one request must not end the others': the log gets the trace, the client a 500.
            print(traceback.format_exc(), file=sys.stderr, flush=True)
            answer = _refusal(Refused(500, "the server failed on this request; its log says more"))
        self.metrics.count(path if path in (*DIALECTS, "/health", "/metrics") else "other", answer.status)
        headers = [("content-type", answer.kind), ("content-length", str(len(answer.body)))]
        headers += [(IDENTITY_HEADER, self.served.identity), *answer.headers]
        encoded = [(name.encode("ascii"), value.encode("ascii")) for name, value in headers]
        await send({"type": "http.response.start", "status": answer.status, "headers": encoded})
        await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else answer.body})

    async def _answer(self, method: str, path: str, headers: list[tuple[bytes, bytes]], receive: Receive) -> _Answer:
        allowed = "POST" if path in DIALECTS else "GET" if path in ("/health", "/metrics") else None
        if allowed is None:
            raise Refused(404, f"no such path; expected one of {', '.join((*DIALECTS, '/health', '/metrics'))}")
        if method != allowed and (method, allowed) != ("HEAD", "GET"):
            raise Refused(405, f"{path} takes {allowed}, not {method[:40]}", (("allow", allowed),))
        if path == "/health":
            return self._health()
        if path == "/metrics":
            return _Answer(200, self._metrics().encode(), kind="text/plain; version=0.0.4; charset=utf-8")
        try:
            body = await asyncio.wait_for(_read_body(headers, receive, self.settings.max_body), self.settings.timeout)
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {self.settings.timeout:g} s", CLOSE) from None
        started = time.monotonic()
        dialect = DIALECTS[path]
        request = read_request(body, dialect, self.settings.bounds, self.settings.k)
        answer = await self._search(request, dialect)
        self.metrics.served(len(request.queries), time.monotonic() - started)
        return answer

    async def _search(self, request: Request, dialect: Dialect) -> _Answer:
        try:
            self.retriever.check_k(request.k)
        except UserError as error:
            raise Refused(400, f"{dialect.k}: {error}") from None
        limit = self.settings.timeout
        try:
            waiting = asyncio.wrap_future(self.batcher.submit(request.queries, request.k))
            found = await asyncio.wait_for(waiting, limit)
        except Full:
            raise Refused(503, f"{self.batcher.waiting} queries are waiting already; ask again", RETRY) from None
        except TimeoutError:
            raise Refused(503, f"the search was not done within {limit:g} s; ask again, or for less", RETRY) from None
        except Exception as error:
            print("".join(traceback.format_exception(error)), file=sys.stderr, flush=True)
            reason = str(error) if isinstance(error, UserError) else type(error).__name__
            raise Refused(500, f"the search failed ({reason}); the server's log says more") from None
        return _Answer(200, render_answer(found, dialect, request.scores))

    def _health(self) -> _Answer:
        hangs = self.batcher.busy_seconds() > self.settings.timeout
        report = {
            "status": "a search hangs" if hangs else "ok",
            "passages": self.served.passages,
            "kind": self.served.kind,
            "corpus_sha256": self.served.corpus_sha256,
            "index": self.served.identity,
            "waiting_queries": self.batcher.waiting,
        }
        return _Answer(503 if hangs else 200, json.dumps(report).encode("ascii"))

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


class _Connection(H11Protocol):
    """uvicorn's connection, cut when the head of a request does not come, or its answer is not read."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # Head and body are written one after the other: without this the second waits for the first's receipt, 40 ms.
        # asyncio does it by itself for sockets that it has made, but not for those accepted on ours.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        assert isinstance(self.config.app, App)
        self._request_seconds = 3 * self.config.app.settings.timeout  # body and search have one each
        self._deadline: asyncio.TimerHandle | None = None
        self._served: object = None
        self._allow(IDLE_SECONDS)

    def connection_lost(self, error: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        # uvicorn forgets it where a connection was reset, and its timer would keep all of this alive for a minute.
        self._unset_keepalive_if_required()
        super().connection_lost(error)

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP is refused, unless the request has had its answer already: uvicorn would fail there."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = json.dumps({"error": "this is not an HTTP request, or its head is too long"})
            head = "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n"
            self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode("ascii"))
        self.transport.close()

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not self._served and not self.cycle.response_complete:
            self._served = self.cycle
            self._allow(self._request_seconds)

    def shutdown(self) -> None:
        """What has arrived is answered; who is still sending may send it to the next server."""
        if self.cycle is not None and self.cycle.more_body and not self.cycle.response_complete:
            self.transport.abort()
        else:
            super().shutdown()

    def on_response_complete(self) -> None:
        self._allow(IDLE_SECONDS)
        super().on_response_complete()

    def _allow(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = self.loop.call_later(seconds, self.transport.abort)


class Server:
    """A server on a socket of its own. `serve` runs it here, the context manager in a thread:

    with Server(retriever, served, port=0) as server:
        RemoteRetriever(server.url)

    UserError when the address cannot be had.
    """

    def __init__(
        self,
        retriever: Retriever,
        served: Served,
        settings: Settings | None = None,
        *,
        host: str = "127.0.0.1",
        port: int = 8000,
    ) -> None:
        settings = settings or Settings()
        retriever.check_k(settings.k)
        self._socket = _listen(host, port)
        # The socket listens from now on: who connects before `serve` has begun waits, and is not refused.
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._socket.getsockname()[1]}"
        self.app = App(retriever, served, settings)
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)  # a line for each broken request helps nobody
        self._server = uvicorn.Server(
            uvicorn.Config(
                self.app,
                http=_Connection,
                loop="asyncio",
                lifespan="off",
                ws="none",
                interface="asgi3",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                backlog=1024,
                limit_concurrency=settings.max_connections,
                h11_max_incomplete_event_size=HEAD_BYTES,
                timeout_keep_alive=int(IDLE_SECONDS),
                timeout_graceful_shutdown=int(2 * settings.timeout) + 1,
            )
        )
        self._thread: threading.Thread | None = None

    def serve(self) -> None:
        """Until SIGTERM or SIGINT, or `stop`; requests that have arrived by then are answered."""
        main = threading.current_thread() is threading.main_thread()
        # When it is done, uvicorn raises the signal once more, for the handlers that were there before: these.
        numbers = (signal.SIGTERM, signal.SIGINT) if main else ()
        before = [(number, signal.signal(number, lambda *_: None)) for number in numbers]
        try:
            self._server.run(sockets=[self._socket])
        finally:
            self._socket.close()
            self.app.batcher.close(timeout=1.0)
            for number, handler in before:
                signal.signal(number, handler)

    def stop(self) -> None:
        """Makes `serve` return; may be called from any thread."""
        self._server.should_exit = True

    def __enter__(self) -> "Server":
        self._thread = threading.Thread(target=self.serve, name="server")
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._thread is not None
        self.stop()
        self._thread.join()


def serve_folder(
    folder: str | Path,
    settings: Settings,
    address: tuple[str, int],
    say: Callable[[str], None],
    parameters: dict[str, int] | None = None,
    gpu: bool = False,
    verify: bool = True,
) -> dict[str, Any]:
    """Loads an index folder and serves it at `address`, a host and a port, until a signal ends it.

    `say` is called with where, and what is served; `parameters`, `gpu` and `verify` as `load_retriever` has them.
    Returns the same as figures, with the number of queries that were searched. UserError as that, and as Server.
    """
    from thresher.retrieval.indexes.load import load_retriever  # FAISS: not needed to serve what is loaded already

    served = Served.by(read_manifest(Path(folder)), parameters)
    retriever = load_retriever(folder, None, parameters, gpu, verify)
    host, port = address
    server = Server(retriever, served, settings, host=host, port=port)
    if host not in LOOPBACK:
        say(f"{host} can be reached from outside this machine, and the server asks nobody for a password")
    say(f"{served.passages:,} passages ({served.kind}) of {folder} at {server.url}; end with SIGTERM or Ctrl-C")
    server.serve()
    queries = retriever.stats.queries
    say(f"ended; {queries:,} queries were searched")
    return {
        "index": str(folder),
        "url": server.url,
        "passages": served.passages,
        "kind": served.kind,
        "queries": queries,
    }


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        # The socket module's own text repeats the address; a name that is not found has no number of the system's.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise UserError(f"{host}:{port}: cannot listen there ({reason}); give another --host or --port") from None


async def _read_body(headers: list[tuple[bytes, bytes]], receive: Receive, limit: int) -> bytes:
    """The body of a request. Refused, with 413, when it is or says that it will be longer than `limit` bytes."""
    announced = next((value for name, value in headers if name == b"content-length"), b"0")
    too_long = Refused(413, f"the body is longer than {limit} bytes; ask in several requests", CLOSE)
    if int(announced) > DRAIN * limit:
        raise too_long
    body, length, more = bytearray(), 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Refused(400, "the connection was closed before the body had arrived")
        length += len(message.get("body", b""))
        if length > DRAIN * limit:
            raise too_long
        if length <= limit:
            body += message.get("body", b"")
        more = message.get("more_body", False)
    if length > limit:
        raise too_long
    return bytes(body)


def _refusal(refused: Refused) -> _Answer:
    return _Answer(refused.status, json.dumps({"error": refused.reason}).encode("ascii"), refused.headers)
