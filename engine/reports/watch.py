"""`thresher watch RUN`: a run in progress, as a page that updates itself or in a terminal.

    /            the page of `thresher report` with its pictures, and a footer with the state of the run
    /state       {"version", "says"} as JSON, which the page requests every few seconds
    /watch.js    the script that requests it, and loads a newer page at the same scroll position

Nothing is written into the run folder, and no lock is taken on it, because a lock could block the run itself. The
server answers only requests from this machine whose Host header names it (common/hosts.py), never maps a path to the
disk, and changes nothing. The page is redrawn only while a browser requests it, for at most a quarter of the time.
"""

import html
import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from thresher.common.console import console, shown, visible
from thresher.common.errors import UserError
from thresher.common.hosts import host_allowed
from thresher.engine.reports.health import health_of, short_verdict
from thresher.engine.reports.pages import RunRecords, duration, is_right, open_run, page_part, step_files
from thresher.engine.reports.report import report_page
from thresher.engine.store.run_folder import RunFolder

RECENT = 20  # steps used to compute rates and the remaining time
PARTS = ("rollout_seconds", "reward_seconds", "recompute_seconds", "update_seconds")
BARS = "▁▂▃▄▅▆▇█"
CURVE, SAMPLES, LONGEST = 64, 4, 160  # characters of the reward curve, samples shown, characters of a text
HOST = "127.0.0.1"
MOST_CONNECTIONS = 32  # each has a thread, which ends after 30 s without data
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
# Reloaded as a whole, because watch.js would load a page without its style sheet.
FIRST = """<!doctype html>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="refresh" content="2">
<title>Thresher</title>
<p>The page is being drawn, which takes some seconds.</p>
<p>{says}</p>
"""
SHARE = 3  # the page is redrawn only after this multiple of the time that the last drawing took
LOOKED = 15.0  # seconds without a request after which the page is not redrawn


@dataclass(frozen=True, kw_only=True)
class RunState(RunRecords):
    """The state of a run at one moment. process: the process on this host that trains it, if any. elsewhere: the host
    that the run was started on, if it is another one, whose processes are unknown. age: seconds since the last record,
    None before the first."""

    process: int | None
    elsewhere: str | None
    age: float | None

    @property
    def finished(self) -> bool:
        return self.process is None and bool(self.summary) and self.last_step >= self.expected_steps

    @property
    def ended(self) -> bool:
        return self.finished or (self.process is None and self.elsewhere is None)

    @property
    def seconds_a_step(self) -> float | None:
        """Return the median duration of the last steps."""
        found = [sum(record.get(part) or 0.0 for part in PARTS) for record in self.steps[-RECENT:]]
        return median(found) if found else None

    @property
    def left(self) -> float | None:
        """Return the seconds until the last step, None before the first step. Each evaluation counts as long as the
        last."""
        if self.seconds_a_step is None:
            return None
        run, steps = self.recipe.run, self.expected_steps
        to_go = range(self.last_step + 1, steps + 1)
        evals = sum(step == steps or bool(run.eval_every and step % run.eval_every == 0) for step in to_go)
        each = (self.evals[-1][1].get("seconds") or 0.0) if self.evals else 0.0
        return len(to_go) * self.seconds_a_step + evals * each

    @property
    def says(self) -> str:
        """Return the state in one sentence."""
        steps = f"step {self.last_step} of {self.expected_steps}"
        if self.finished:
            return f"finished: {steps}"
        if self.ended:
            return f"not running: {steps}, and no process on this machine works on it"
        if self.age is None:
            return "running: nothing is recorded yet"
        left = "" if self.left is None else f", {duration(round(self.left))} left"
        return f"running: {steps}{left}, last record {duration(round(self.age))} ago"

    def to_dict(self) -> dict[str, Any]:
        """Return the record of `thresher watch --json`, with rates over the last RECENT steps."""
        last = self.steps[-1] if self.steps else {}
        return {
            "step": self.last_step,
            "steps": self.expected_steps,
            "finished": self.finished,
            "ended": self.ended,
            "process": self.process,
            "resident_bytes": resident_bytes(self.process),
            "seconds_left": None if self.ended else self.left,
            "seconds_a_step": self.seconds_a_step,
            "rollout_tokens_per_s": self.rate("sampled_tokens", "rollout_seconds", RECENT),
            "train_tokens_per_s": self.rate("train_tokens", "update_seconds", RECENT),
            "reward": last.get("reward"),
            "em": last.get("em"),
            "greedy_em": self.evals[-1][1].get("em") if self.evals else None,
            "slots_busy": last.get("slots_busy"),
            "staleness_mean": last.get("staleness_mean"),
            "tokens_recomputed": last.get("tokens_recomputed"),
            "tokens_set_aside": last.get("tokens_set_aside"),
            "health": None if (found := health_of(self)) is None else [asdict(finding) for finding in found],
        }


def read_state(path: str | Path, unverified: bool = False) -> RunState:
    """Return the state of a run. Raise UserError if the folder is not a run, or if a file in it is malformed or, unless
    `unverified`, fails verification."""
    run = RunRecords.read(path, unverified)
    host = str(run.start.get("host")) if run.start else None
    return RunState(
        **vars(run),
        process=_process(run.folder),
        elsewhere=host if host != platform.node() else None,
        age=max(time.time() - run.folder.metrics_file.stat().st_mtime, 0.0) if run.records else None,
    )


def _process(run: RunFolder) -> int | None:
    """Return the process that has the run's lock file open. The number in the file alone may belong to a later
    process."""
    lock = run.path / ".lock"
    try:
        pid = int(lock.read_text(encoding="ascii"))
        held = os.stat(lock)
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with suppress(OSError):
                if os.path.samestat(entry.stat(), held):
                    return pid
    except (OSError, ValueError):
        pass
    return None


def resident_bytes(pid: int | None) -> int | None:
    """Return the resident memory of a process, in bytes."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace") if pid else ""
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:")), None)


# In a terminal


def watch_terminal(run: str | Path, every: float = 1.0, unverified: bool = False) -> RunState:
    """Show the run until it has ended; return its last state. Without a terminal, print one line per new step.

    every: seconds between two polls. Raise UserError if the folder is not a run or, unless `unverified`, its records
    fail verification. KeyboardInterrupt ends it earlier.
    """
    state = read_state(run, unverified)
    if not console.is_terminal:
        last = None
        while True:
            if last != (last := (state.last_step, len(state.evals))) or state.ended:
                console.print(_line(state), markup=False, soft_wrap=True)
            if state.ended:
                return state
            time.sleep(every)
            state = read_state(run, unverified)
    with Live(_view(state), console=console, auto_refresh=False) as live:
        while not state.ended:
            time.sleep(every)
            state = read_state(run, unverified)
            live.update(_view(state), refresh=True)
    return state


def _line(state: RunState) -> str:
    values = state.to_dict()
    names = {"reward": "reward", "em": "EM", "greedy_em": "greedy EM", "rollout_tokens_per_s": "tokens/s sampled"}
    names |= {"train_tokens_per_s": "trained", "seconds_a_step": "s a step", "slots_busy": "slots busy"}
    names |= {"staleness_mean": "staleness", "tokens_set_aside": "tokens set aside"}
    known = [f"{name} {shown(values[key])}" for key, name in names.items() if values[key] is not None]
    memory = f"memory {_memory(values)}" if state.process else ""
    return "  ".join(filter(None, [state.says, *known, memory, short_verdict(health_of(state))]))


def _memory(values: Mapping[str, Any]) -> str:
    resident = values["resident_bytes"]
    return "-" if resident is None else f"{resident / 2**30:.2f} GiB"


def _view(state: RunState) -> RenderableType:
    values = state.to_dict()
    table = Table.grid(padding=(0, 3))
    rows = [
        ("reward", values["reward"], "sampled tokens/s", values["rollout_tokens_per_s"]),
        ("EM, sampled", values["em"], "trained tokens/s", values["train_tokens_per_s"]),
        ("EM, greedy", values["greedy_em"], "seconds a step", values["seconds_a_step"]),
        ("process", str(state.process or "-"), "memory", _memory(values)),
        ("slots busy", values["slots_busy"], "tokens set aside", values["tokens_set_aside"]),
    ]
    if state.recipe.rollout.partial:
        rows.append(("staleness", values["staleness_mean"], "prefilled again", values["tokens_recomputed"]))
    for left, value, right, other in rows:
        table.add_row(Text(left, "dim"), shown(value), Text(right, "dim"), shown(other))
    rewards = [float(record["reward"]) for record in state.steps if record.get("reward") is not None]
    color = "green" if state.finished else "yellow" if state.ended else "cyan"
    lines: list[RenderableType] = [Text(str(state.folder.path), "bold"), Text(state.says, color)]
    lines += _health(state)
    lines.append(table)
    if rewards:
        lines.append(Text.assemble(("reward ", "dim"), (sparkline(rewards), "blue"), f" {shown(rewards[-1])}"))
    try:
        lines += _samples(state.folder)
    except UserError as error:  # a damaged file, or one that a resumed run has just deleted
        lines.append(Text(f"\n{error}", "red"))
    return Group(*lines)


def _health(state: RunState) -> Iterator[Text]:
    found = health_of(state)
    if found == []:
        yield Text(short_verdict(found), "green")
    for finding in found or ():
        yield Text.assemble((finding.short, "bold red"), f". {finding.explanation}")


def sparkline(values: Sequence[float], width: int = CURVE) -> str:
    """Return values as bars, scaled from smallest to largest. More than `width` values are averaged in groups."""
    means = [part.mean() for part in np.array_split(np.asarray(values, float), min(width, len(values)))]
    low, high = min(means), max(means)
    scale = (len(BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(BARS[round((mean - low) * scale)] for mean in means)


def _samples(run: RunFolder) -> Iterator[Text]:
    files = [
        (step, path) for folder in (run.evaluations, run.trajectories) for step, path in step_files(folder).items()
    ]
    if not files:
        return
    step, newest = max(files, key=lambda file: (file[0], file[1].parent == run.trajectories))
    yield Text(f"\n{newest.parent.name}, step {step}", "dim")
    seen = set()
    for record in run.stored_trajectories(newest):
        if record.get("id") in seen:
            continue
        seen.add(record.get("id"))
        answer, right = record.get("answer"), is_right(record)
        searches = len(record.get("searches") or [])
        yield Text.assemble(
            _short(record.get("question")),
            ("  → ", "dim"),
            ("no answer" if answer is None else _short(answer), "green" if right else "red"),
            (f"  reward {shown(record.get('reward'))}, {searches} search{'' if searches == 1 else 'es'}", "dim"),
        )
        if len(seen) == SAMPLES:
            return


def _short(text: object) -> str:
    line = " ".join(visible(text).split())
    return line if len(line) <= LONGEST else f"{line[:LONGEST]} …"


# As a page


class LivePage:
    """The responses to a browser; the page is redrawn when the run has new records."""

    def __init__(self, run: str | Path, unverified: bool = False) -> None:
        read_state(run, unverified)  # raises an error if there is nothing to serve
        self._run, self._unverified = Path(run), unverified
        self._error = ""  # the last failure to draw
        self._page, self._version = b"", 0
        self._drawn: Any = None  # modification times and sizes of the run's files when the page was drawn
        # On the clock of time.monotonic: the last request, and the earliest time of the next drawing.
        self._looked = self._rest = -LOOKED

    def draw(self) -> None:
        """Draw the page if the run has new records."""
        stamp = self._stamp()
        if stamp == self._drawn:
            return
        started = time.monotonic()
        page, _ = report_page(RunRecords.read(self._run, self._unverified))
        head, _, _ = page.rpartition("</body>")
        self._page, self._drawn = f"{head}{FOOT}\n</html>\n".encode(), stamp
        self._version += 1
        self._rest = time.monotonic() + SHARE * (time.monotonic() - started)

    def get(self, path: str) -> tuple[str, bytes] | None:
        """Return the content type and body of a response; None for a path that does not exist."""
        self._looked = time.monotonic()
        if path == "/":
            return HTML, self._page or FIRST.format(says=html.escape(self._says())).encode()
        if path == "/state":
            return "application/json", json.dumps({"version": self._version, "says": self._says()}).encode()
        if path == "/watch.js":
            return "text/javascript", page_part("watch.js").encode()
        return None

    def keep_up(self, every: float) -> None:
        """Redraw the page as the run goes on, while a browser requests it; never return."""
        while True:
            now = time.monotonic()
            if self._version == 0 or (now - self._looked < LOOKED and now > self._rest):
                try:
                    self.draw()
                    self._error = ""
                except (UserError, OSError) as error:  # a file that is just being replaced, or a damaged one
                    self._rest, self._error = now + every, str(error)
            time.sleep(every)

    def _says(self) -> str:
        try:
            return self._error or read_state(self._run, self._unverified).says
        except (UserError, OSError) as error:
            return str(error)

    def _stamp(self) -> Any:
        run, _ = open_run(self._run)
        watched = (run.recipe_file, run.metrics_file, run.summary_file, run.evaluations, run.trajectories)
        return [(path.stat().st_mtime_ns, path.stat().st_size) if path.exists() else None for path in watched]


def serve_page(
    run: str | Path, port: int, say: Callable[[str], None], every: float = 2.0, unverified: bool = False
) -> None:
    """Serve the page until interrupted. port: 0 chooses a free one. every: seconds between two polls of the folder.

    Raise UserError if the folder is not a run or, unless `unverified`, its records fail verification, or if the port is
    taken.
    """
    page = LivePage(run, unverified)
    try:
        server = PageServer(page, port)
    except OSError as error:
        raise UserError(f"--port {port}: {error.strerror}; choose another, or 0 for one that is free") from None
    os.nice(5)
    # The main thread draws, because an interrupt ends it at once.
    threading.Thread(target=server.serve_forever, daemon=True).start()
    say(f"watch: http://localhost:{server.server_address[1]}/ until Ctrl-C; open to this machine only")
    try:
        page.keep_up(every)
    finally:
        server.shutdown()
        server.server_close()


class PageServer(ThreadingHTTPServer):
    """A server of a page with one thread per connection; connections beyond MOST_CONNECTIONS are closed at once."""

    def __init__(self, page: LivePage, port: int) -> None:
        super().__init__((HOST, port), _PageRequest)
        self.page = page
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


class _PageRequest(BaseHTTPRequestHandler):
    server: PageServer
    timeout = 30  # seconds without data on a connection
    server_version, sys_version = "thresher", ""

    def do_GET(self) -> None:
        if not host_allowed(self.headers.get_all("Host", [])):
            self._answer(403, TEXT, b"thresher watch answers under the name localhost only\n")
        elif (found := self.server.page.get(self.path.partition("?")[0])) is None:
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
        except ConnectionError:  # the client has disconnected
            self.close_connection = True

    def log_message(self, *_: Any) -> None: ...
