"""`thresher serve-retriever`: an index served over HTTP, in the dialects of app.py.

One event loop reads and writes (aiohttp's low-level server); a thread searches (`Batcher`). There is no TLS and no
password, so the default is the loopback address. In addition to aiohttp's limits, `Connections` ends a connection after
IDLE_SECONDS without a complete request or with an unread answer, and limits the time of a body to `Settings.timeout`.
It ends those that have waited longest if there are as many as the process may have descriptors, or if unfinished bodies
have BODIES times the largest size. The search of a client that has disconnected is cancelled.
"""

import asyncio
import logging
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

from thresher.common.errors import UserError
from thresher.common.hosts import server_names
from thresher.retrieval.indexes.manifest import read_manifest
from thresher.retrieval.retriever import Retriever
from thresher.retrieval.serving.app import App, Refused, Reply, Served, Settings

try:
    from aiohttp import web
except ModuleNotFoundError as error:
    if error.name != "aiohttp":
        raise
    raise UserError("aiohttp is not installed; install thresher with its extra [serve]") from None

LOOPBACK = ("127.0.0.1", "::1", "localhost")
# A client whose idle connection was closed opens another.
IDLE_SECONDS = 60.0
LINGER_SECONDS = 30.0  # for the rest of a refused body to be read and dropped
BODIES = 64  # unfinished bodies at a time, of the largest size, or the same bytes in shorter ones
ACCEPTED = 64  # connections that an iteration of the event loop takes from the system's queue,
QUEUE = 1024  # which has this length
SPARE = 5 * ACCEPTED  # descriptors for connections that arrive while others are being ended, and for the index
FEWEST = 64  # connections that are always allowed
CLOSE = (("connection", "close"),)  # the rest of a body is not awaited

# A broken request is not logged.
SILENT = logging.Logger("aiohttp.silent", logging.CRITICAL + 1)


@dataclass(slots=True)
class _State:
    since: float  # time at which waiting for it began
    reading: int = 0  # bytes of an unfinished body
    busy: bool = False  # a request is being read or served
    served: bool = False  # its request has arrived, and it must not be ended


class Connections(web.Server):
    """All connections of a server, with the limits above. Created in a running event loop."""

    def __init__(self, app: App) -> None:
        super().__init__(
            self._handle,
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            logger=SILENT,
            lingering_time=LINGER_SECONDS,
        )
        self._app = app
        self._most = max(FEWEST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE)
        self._states: dict[web.RequestHandler, _State] = {}  # the one that has waited longest first
        self._bodies = 0  # bytes of unfinished ones
        self._closing = False

    async def listen(self, listening: socket.socket) -> asyncio.Server:
        """Accept connections of the socket `listening`."""
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(self, sock=listening, backlog=ACCEPTED)
        listening.listen(QUEUE)  # asyncio has one number for both
        return listener

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        self._make_room()
        super().connection_made(handler, transport)
        self._states[handler] = _State(time.monotonic())

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._states.pop(handler, None)

    async def sweep(self) -> None:
        """End connections that have waited too long, until cancelled."""
        while True:
            await asyncio.sleep(min(1.0, IDLE_SECONDS / 4))
            self.end(lambda state: not state.busy and state.since < time.monotonic() - IDLE_SECONDS)

    async def close(self, timeout: float) -> None:
        """Answer requests that have arrived, for up to `timeout` seconds, and end all other connections."""
        self._closing = True
        self.end(lambda state: state.busy and not state.served)
        transports = [connection.transport for connection in self._states if connection.transport is not None]
        until = time.monotonic() + timeout
        self.pre_shutdown()  # ends those without a request
        await self.shutdown(timeout)
        while any(transport.get_write_buffer_size() for transport in transports) and time.monotonic() < until:
            await asyncio.sleep(0.01)

    def end(self, which: Callable[[_State], bool] = lambda state: True) -> None:
        """End the connections whose state satisfies `which`, answered or not."""
        for connection in [connection for connection, state in self._states.items() if which(state)]:
            _end(connection)

    def _make_room(self) -> None:
        """End the connections that have waited longest, until one more is allowed."""
        waiting = (connection for connection, state in self._states.items() if not state.served)
        for connection in list(islice(waiting, max(0, len(self._states) + 1 - self._most))):
            del self._states[connection]
            _end(connection)

    def _make_room_for_body(self, mine: web.RequestHandler) -> None:
        """End the connections that have been sending a body for longest, except `mine`."""
        for connection, state in list(self._states.items()):
            if self._bodies <= BODIES * self._app.settings.max_body:
                return
            if state.reading and connection is not mine:
                self._bodies -= state.reading
                state.reading = 0
                _end(connection)

    async def _handle(self, request: web.BaseRequest) -> web.Response:
        connection = request.protocol
        state = self._move_back(connection, busy=True)
        body = partial(self._read_body, request, state)
        try:
            hosts = request.headers.getall("host", [])
            return self._response(await self._app.answer(request.method, request.path, hosts, body, connection))
        finally:
            self._bodies -= state.reading
            self._move_back(connection)

    def _move_back(self, connection: web.RequestHandler, busy: bool = False) -> _State:
        state = _State(time.monotonic(), busy=busy)
        if self._states.pop(connection, None):  # else it is being ended
            self._states[connection] = state
        return state

    def _response(self, answer: Reply) -> web.Response:
        headers = {"content-type": answer.kind, "server": "thresher", **dict(answer.headers)}
        response = web.Response(status=answer.status, body=answer.body, headers=headers)
        if self._closing or CLOSE[0] in answer.headers:
            response.force_close()
        return response

    async def _read_body(self, request: web.BaseRequest, state: _State) -> bytes:
        """Return the body. Refused if it is longer than allowed, ends early, is not HTTP, or takes too long."""
        limit, timeout = self._app.settings.max_body, self._app.settings.timeout
        too_long = Refused(413, f"the body is longer than {limit} bytes; ask in several requests", CLOSE)
        if (request.content_length or 0) > limit:
            raise too_long
        if request.headers.get("expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = bytearray()
        try:
            async with asyncio.timeout(timeout):
                async for part in request.content.iter_any():
                    body += part
                    if len(body) > limit:
                        raise too_long
                    self._bodies += len(part)
                    state.reading += len(part)
                    if self._bodies > BODIES * limit:
                        self._make_room_for_body(request.protocol)
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {timeout:g} s", CLOSE) from None
        except (web.RequestPayloadError, ConnectionError):
            raise Refused(400, "this is not an HTTP request: its body is broken, or ends too early", CLOSE) from None
        self._bodies -= state.reading
        state.reading, state.served = 0, True
        return bytes(body)


def _end(connection: web.RequestHandler) -> None:
    if connection.transport is not None:
        connection.transport.abort()


class Server:
    """A server on its own socket. `serve` runs it in this thread, the context manager in another one:

    with Server(retriever, served, port=0) as server:
        RemoteRetriever(server.url)

    UserError if the address is not available.
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
        names = server_names(host, settings.allow_hosts)
        retriever.check_k(settings.k)
        self._socket = _listen(host, port)
        # The socket listens from now on: a client that connects before `serve` has to wait, but is not refused.
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._socket.getsockname()[1]}"
        self.app = App(retriever, served, settings, names)
        self._connections: Connections | None = None  # while it runs
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def serve(self) -> None:
        """Serve until SIGTERM, SIGINT or `stop`. Requests that have arrived by then are answered, unless a second one
        follows."""
        try:
            asyncio.run(self._serve())
        finally:
            self._socket.close()
            self.app.batcher.close(timeout=1.0)

    @property
    def connections(self) -> int:
        """Return the number of open connections."""
        return 0 if self._connections is None else len(self._connections.connections)

    def stop(self) -> None:
        """Make `serve` return; may be called from any thread."""
        self._stopped = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._stopping.is_set() and self._connections is not None:
            self._connections.end()
        self._stopping.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        if self._stopped:  # before there was a loop
            return
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._loop.add_signal_handler(number, self._stop)
        self._connections = Connections(self.app)
        listener = await self._connections.listen(self._socket)
        sweep = asyncio.create_task(self._connections.sweep())
        await self._stopping.wait()
        listener.close()
        await asyncio.sleep(0.05)  # for the requests of connections that were just accepted
        await self._connections.close(2 * self.app.settings.timeout + 1)
        sweep.cancel()

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
    """Load an index folder and serve it at `address`, (host, port), until a signal ends it; return figures.
    `parameters`, `gpu` and `verify`: see `load_retriever`."""
    from thresher.retrieval.indexes.load import load_retriever  # FAISS: not needed to serve a loaded index

    served = Served.by(read_manifest(Path(folder)), parameters)
    retriever = load_retriever(folder, None, parameters, gpu, verify)
    host, port = address
    server = Server(retriever, served, settings, host=host, port=port)
    if host not in LOOPBACK:
        say(f"{host} can be reached from outside this machine, and the server requires no password")
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
        return socket.create_server((host, port), family=family, backlog=QUEUE)
    except OSError as error:
        # The socket module's own text repeats the address; a name that is not found has no system error number.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise UserError(f"{host}:{port}: cannot listen there ({reason}); give another --host or --port") from None
