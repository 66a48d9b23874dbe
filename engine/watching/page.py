"""`thresher watch RUN`: the run's page on this machine, which brings itself up to date.

    /            the page of `thresher report`, its pictures inside, with a line at its foot: where the run stands
    /state       {"version", "says"} as JSON, which the page asks for every few seconds
    /watch.js    what asks, and puts a new page in the place of the old one where the reader has scrolled to

There is nothing else, and no path is looked up on the disk. Only this machine is served, and only to requests whose
Host header names it (common/hosts.py). At most MOST_CONNECTIONS are open; a further one is closed at once.
The page is drawn anew only while somebody looks, for at most a quarter of the time, and behind the run's own work.

Deliberately absent: anything that is changed by a request.
"""

import html
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

from thresher.common.errors import UserError
from thresher.common.hosts import host_allowed
from thresher.engine.reporting.pages import open_run
from thresher.engine.reporting.report import write_report
from thresher.engine.watching.state import read_state

HOST = "127.0.0.1"
MOST_CONNECTIONS = 32  # each has a thread, for 30 s where nothing comes
HTML, TEXT = "text/html; charset=utf-8", "text/plain; charset=utf-8"
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'self'; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
FOOT = """<div id="watch" role="status"></div>
<style>
body { padding-bottom: 44px; }
#watch { position: fixed; left: 0; right: 0; bottom: 0; padding: 7px 24px; font-size: 14px; background: var(--card);
  border-top: 1px solid var(--line); color: var(--soft); font-variant-numeric: tabular-nums; }
</style>
<script src="/watch.js"></script>
</body>"""
# Asked for again as a whole: what watch.js brings in has no style sheet here.
FIRST = """<!doctype html>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="refresh" content="2">
<title>Thresher</title>
<p>The page is being drawn, which takes some seconds.</p>
<p>{says}</p>
"""
SHARE = 3  # the page is drawn anew after so many times what drawing it took
LOOKED = 15.0  # seconds after which nobody looks any more


class LivePage:
    """What a browser asks for, drawn anew when the run has moved on."""

    def __init__(self, run: str | Path, unverified: bool = False) -> None:
        read_state(run, unverified)  # or there is nothing to serve
        self._run, self._unverified = Path(run), unverified
        self._wrong = ""  # what keeps the page from being drawn
        self._page, self._version = b"", 0
        self._drawn: Any = None  # what the folder's files were when the page was drawn
        self._looked = self._rest = -LOOKED  # on the clock of time.monotonic: last asked, and not to be drawn before

    def draw(self) -> None:
        """Draw the page, if the run has moved on."""
        stamp = self._stamp()
        if stamp == self._drawn:
            return
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            page = write_report(self._run, folder, self._unverified).read_text(encoding="utf-8")
        head, _, _ = page.rpartition("</body>")
        self._page, self._drawn = f"{head}{FOOT}\n</html>\n".encode(), stamp
        self._version += 1
        self._rest = time.monotonic() + SHARE * (time.monotonic() - started)

    def get(self, path: str) -> tuple[str, bytes] | None:
        """What a browser is to have: its type and its bytes; None for a path that there is not."""
        self._looked = time.monotonic()
        if path == "/":
            return HTML, self._page or FIRST.format(says=html.escape(self._says())).encode()
        if path == "/state":
            return "application/json", json.dumps({"version": self._version, "says": self._says()}).encode()
        if path == "/watch.js":
            return "text/javascript", files("thresher.engine.watching").joinpath("watch.js").read_bytes()
        return None

    def keep_up(self, every: float) -> None:
        """Draw as the run goes on, while somebody looks; without end."""
        while True:
            now = time.monotonic()
            if self._version == 0 or (now - self._looked < LOOKED and now > self._rest):
                try:
                    self.draw()
                    self._wrong = ""
                except (UserError, OSError) as error:  # a file that is just being replaced, or one that is damaged
                    self._rest, self._wrong = now + every, str(error)
            time.sleep(every)

    def _says(self) -> str:
        try:
            return self._wrong or read_state(self._run, self._unverified).says
        except (UserError, OSError) as error:
            return str(error)

    def _stamp(self) -> Any:
        run, _ = open_run(self._run)
        watched = (run.recipe_file, run.metrics_file, run.summary_file, run.evaluations, run.trajectories)
        return [(path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else None for path in watched]


def serve_page(
    run: str | Path, port: int, say: Callable[[str], None], every: float = 2.0, unverified: bool = False
) -> None:
    """Serve until interrupted. port: 0 takes a free one. every: seconds between two looks at the folder.

    UserError for a folder that is no run or, unless `unverified`, whose records are not as they were written, and for a
    port that is taken.
    """
    page = LivePage(run, unverified)
    try:
        server = PageServer((HOST, port), handler(page))
    except OSError as error:
        raise UserError(f"--port {port}: {error.strerror}; choose another, or 0 for one that is free") from None
    os.nice(5)
    # Drawing is this thread's, for an interrupt ends it at once there.
    threading.Thread(target=server.serve_forever, daemon=True).start()
    say(f"watch: http://localhost:{server.server_address[1]}/ until Ctrl-C; open to this machine alone")
    try:
        page.keep_up(every)
    finally:
        server.shutdown()
        server.server_close()


class PageServer(ThreadingHTTPServer):
    """A server with a thread for each of at most MOST_CONNECTIONS connections."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._free = threading.Semaphore(MOST_CONNECTIONS)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()


def handler(page: LivePage) -> type[BaseHTTPRequestHandler]:
    """What answers GET and HEAD from this machine, and nothing else."""

    class PageRequest(BaseHTTPRequestHandler):
        timeout = 30  # of a connection on which nothing comes
        server_version, sys_version = "thresher", ""

        def do_GET(self) -> None:
            if not host_allowed(self.headers.get_all("Host", [])):
                self._answer(403, TEXT, b"thresher watch answers under the name localhost only\n")
            elif (found := page.get(self.path.partition("?")[0])) is None:
                self._answer(404, TEXT, b"not found\n")
            else:
                self._answer(200, *found)

        do_HEAD = do_GET

        def _answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **HEADERS}.items():
                self.send_header(name, value)
            try:
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)
            except ConnectionError:  # nobody reads it any more
                self.close_connection = True

        def log_message(self, *_: Any) -> None: ...

    return PageRequest
