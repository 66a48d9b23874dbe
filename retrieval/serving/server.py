"""`thresher serve-retriever`: an index behind a URL, in the two dialects that training code already speaks (wire.py).

One event loop reads and writes (connections.py, on aiohttp), answers what needs no search (app.py), and hands the rest
to one thread that searches (batcher.py). Everything is bounded: connections, the size of a head and a body, the time to
send either, queries in a request, queries waiting, the time of a search, and the time that an answer may take to be
read.

Deliberately absent: a web framework, for five routes need none; TLS, passwords and several processes, which a proxy in
front has. Hence the loopback address unless another is asked for.
"""

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from thresher.common.errors import UserError
from thresher.retrieval.indexes.manifest import read_manifest
from thresher.retrieval.retriever import Retriever
from thresher.retrieval.serving.app import App, Served, Settings
from thresher.retrieval.serving.hosts import server_names

try:
    from thresher.retrieval.serving.connections import QUEUE, Connections
except ModuleNotFoundError as error:
    if error.name != "aiohttp":
        raise
    raise UserError("aiohttp is not installed; install thresher with its extra [serve]") from None

LOOPBACK = ("127.0.0.1", "::1", "localhost")


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
        names = server_names(host, settings.allow_hosts)
        retriever.check_k(settings.k)
        self._socket = _listen(host, port)
        # The socket listens from now on: who connects before `serve` has begun waits, and is not refused.
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._socket.getsockname()[1]}"
        self.app = App(retriever, served, settings, names)
        self._connections: Connections | None = None  # while it runs
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._stopped = False
        self._thread: threading.Thread | None = None

    def serve(self) -> None:
        """Until SIGTERM, SIGINT or `stop`; requests that have arrived by then are answered, unless it comes twice."""
        try:
            asyncio.run(self._serve())
        finally:
            self._socket.close()
            self.app.batcher.close(timeout=1.0)

    @property
    def connections(self) -> int:
        """How many are open."""
        return 0 if self._connections is None else len(self._connections)

    def stop(self) -> None:
        """Makes `serve` return; may be called from any thread."""
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
        await asyncio.sleep(0.05)  # who has just been accepted gets to say what it wants
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
        return socket.create_server((host, port), family=family, backlog=QUEUE)
    except OSError as error:
        # The socket module's own text repeats the address; a name that is not found has no number of the system's.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror
        raise UserError(f"{host}:{port}: cannot listen there ({reason}); give another --host or --port") from None
