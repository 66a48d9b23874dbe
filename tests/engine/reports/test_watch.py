"""Test the view of a running run: its state, its lines in a terminal, its page, and that page's script."""

import http.client
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from browser import run_page
from report_cases import eval_record, make_run, step_record, trajectory
from rich.console import Console

from thresher.cli import main as cli
from thresher.common.errors import UserError
from thresher.engine.config.recipe import load_recipe
from thresher.engine.reports import watch as watch_module
from thresher.engine.reports.pages import RunRecords
from thresher.engine.reports.watch import (
    FIRST,
    FOOT,
    HOST,
    LivePage,
    PageServer,
    read_state,
    serve_page,
    sparkline,
    watch_terminal,
)
from thresher.engine.store.run_folder import RunFolder

EVERY = {"steps": 30, "seed": 7, "eval_every": 10}


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunFolder]:
    """Return a run on which this process works."""
    path = make_run(tmp_path / "run", run=EVERY).path
    with RunFolder.resume(path, load_recipe(path / "recipe.toml")) as run:
        yield run


def test_where_a_run_stands(run: RunFolder) -> None:
    state = read_state(run.path)
    assert (state.process, state.last_step, state.left, state.ended) == (os.getpid(), 0, None, False)
    assert state.says == "running: nothing is recorded yet" and state.to_dict()["resident_bytes"] > 2**20
    for step in range(1, 11):
        run.append_metrics(step_record(step))
    run.append_metrics(eval_record(10, 0.5))
    state = read_state(run.path)
    assert state.left == pytest.approx(20 * 1.01 + 2 * 2.0)  # steps of .4 + .6 + .01 s, evaluations at 20 and 30
    assert state.says.startswith("running: step 10 of 30, 24 s left, last record 0 s ago")
    assert state.rate("sampled_tokens", "rollout_seconds", 20) == pytest.approx(2500.0)
    run.close()
    state = read_state(run.path)
    assert state.ended and not state.finished
    assert (run.path / ".lock").read_text() == f"{os.getpid()}\n"  # this process has closed the file
    assert state.says == "not running: step 10 of 30, and no process on this machine works on it"
    run.append_start({"step": 10, "host": "elsewhere"})
    assert not read_state(run.path).ended  # nothing is known of processes on another machine
    run.append_metrics(step_record(30))
    run.write_summary({"seconds": 3.0})
    state = read_state(run.path)
    assert state.ended and state.says == "finished: step 30 of 30"


def test_a_line_for_each_new_step(run: RunFolder, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    def nothing() -> None: ...

    happens = iter([partial(run.append_metrics, step_record(step)) for step in (1, 2)] + [nothing, nothing, run.close])
    monkeypatch.setattr(watch_module.time, "sleep", lambda _: next(happens)())
    assert watch_terminal(run.path).last_step == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0].partition("  ")[0] for line in lines] == [
        "running: nothing is recorded yet",
        "running: step 1 of 30",
        "running: step 2 of 30",
        "not running: step 2 of 30",
    ]
    assert "reward 0.0667  EM 0.0667  tokens/s sampled 2,500  trained 5,000  s a step 1.01  memory " in lines[2]


def test_the_view_of_a_terminal(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (1, 2):
        run.append_metrics(step_record(step))
    rude = trajectory("bob", False, answer="\x1b[31m[bold]red")
    run.write_trajectories(2, [trajectory("ann", True), trajectory("ann", False), rude])
    console = Console(force_terminal=True, width=120, color_system=None, highlight=False, legacy_windows=False)
    monkeypatch.setattr(watch_module, "console", console)
    monkeypatch.setattr(watch_module.time, "sleep", lambda _: run.close())
    with console.capture() as capture:
        watch_terminal(run.path)
    shown = capture.get()
    assert "running: step 2 of 30" in shown and shown.count("not running: step 2 of 30") >= 1
    assert "▁█ 0.0667" in shown and "trajectories, step 2" in shown
    assert "Who is ann?  → Bel  reward 1.00, 1 search" in shown and shown.count("Who is ann?") == shown.count("bob?")
    assert "→ ␛[31m[bold]red" in shown


def test_partial_rollouts_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path / "run", run=EVERY, rollout={"questions_per_step": 4, "partial": True})
    partial = {"slots_busy": 0.75, "staleness_mean": 0.5, "tokens_recomputed": 1234, "tokens_set_aside": 56}
    run.append_metrics(step_record(1, staleness_tokens=[7, 7], **partial))
    state = read_state(run.path)
    assert {name: state.to_dict()[name] for name in partial} == partial
    console = Console(force_terminal=True, width=120, color_system=None, highlight=False, legacy_windows=False)
    with console.capture() as capture:
        console.print(watch_module._line(state), watch_module._view(state))
    shown = " ".join(capture.get().split())
    assert "slots busy 0.75 staleness 0.5 tokens set aside 56" in shown
    assert "slots busy 0.75 tokens set aside 56 staleness 0.5 prefilled again 1,234" in shown


def test_sparkline() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([2.0, 2.0]) == "▁▁" and sparkline(range(128), 8) == "▁▂▃▄▅▆▇█"


Get = Callable[..., tuple[int, dict[str, str], bytes]]


@pytest.fixture
def served(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LivePage, Get]]:
    """Serve the page of a run, without its pictures; return it and get(path, method, host) -> status, headers, body."""

    def drawn(run: RunRecords) -> tuple[str, dict[str, bytes]]:
        return f"<body><main>step {run.last_step}</main>\n</body>\n</html>", {}

    monkeypatch.setattr(watch_module, "report_page", drawn)
    page = LivePage(run.path)
    server = PageServer(page, 0)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

    def get(path: str, method: str = "GET", host: str | list[str] | None = None) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(HOST, server.server_address[1], timeout=10)
        connection.putrequest(method, path, skip_host=host is not None)
        for name in [host] if isinstance(host, str) else host or ():
            connection.putheader("Host", name)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()

    yield page, get
    server.shutdown()
    server.server_close()


def test_the_page_moves_on_with_the_run(run: RunFolder, served: tuple[LivePage, Get]) -> None:
    page, get = served
    first = get("/")[2]
    assert b"is being drawn" in first and b"running: nothing is" in first and b'http-equiv="refresh"' in first
    assert json.loads(get("/state")[2])["version"] == 0
    page.draw()
    status, headers, body = get("/")
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    assert b"<main>step 0" in body and b"refresh" not in body and b'<script src="/watch.js">' in body
    assert body.count(b"</body>") == 1 and body.rstrip().endswith(b"</html>")
    assert json.loads(get("/state")[2]) == {"version": 1, "says": "running: nothing is recorded yet"}
    page.draw()
    assert json.loads(get("/state")[2])["version"] == 1  # nothing is new
    run.append_metrics(step_record(1))
    page.draw()
    assert b"step 1" in get("/?again")[2] and json.loads(get("/state")[2])["version"] == 2
    assert b"DOMParser" in get("/watch.js")[2]
    run.recipe_file.unlink()
    assert "is not a run folder" in json.loads(get("/state")[2])["says"]


def test_who_is_answered_and_what_there_is(served: tuple[LivePage, Get]) -> None:
    _, get = served
    for host in ("localhost", "127.0.0.1:8700", "localhost:1", "[::1]:8700"):
        assert get("/state", host=host)[0] == 200
    two = ["localhost", "evil.example"]
    for host in ("evil.example", "localhost.evil.example:80", "127.0.0.1.evil", "evil@localhost", "[", "", [], two):
        status, _, body = get("/", host=host)
        assert status == 403 and b"main" not in body, host
    for path in ("/../recipe.toml", "/recipe.toml", "/..%2frecipe.toml", "//etc/passwd", "/plots/em.png", "x"):
        assert get(path)[0] == 404, path
    assert get("/", "POST")[0] == 501 and get("/", "DELETE")[0] == 501
    status, headers, body = get("/", "HEAD")
    assert status == 200 and body == b"" and int(headers["Content-Length"]) > 100
    assert "default-src 'none'" in headers["Content-Security-Policy"] and "Access-Control-Allow-Origin" not in headers
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"


def test_a_connection_beyond_the_limit_is_closed(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "MOST_CONNECTIONS", 2)
    with PageServer(LivePage(run.path), 0) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()

        def opened() -> socket.socket:
            return socket.create_connection((HOST, server.server_address[1]), timeout=10)

        asked = b"GET /watch.js HTTP/1.0\r\nHost: localhost\r\n\r\n"
        idle = [opened(), opened()]
        with opened() as third:
            assert third.recv(1) == b""
        idle[0].sendall(asked)  # one of the two connections ends
        while idle[0].recv(65_536):
            pass
        status = b""
        while not status:  # its thread frees the place after it has closed the connection
            with opened() as fourth:
                try:
                    fourth.sendall(asked)
                    status = fourth.recv(12)
                except ConnectionError:
                    pass
        assert status == b"HTTP/1.0 200"
        for connection in idle:
            connection.close()
        server.shutdown()


def test_it_is_drawn_while_somebody_looks(run: RunFolder, served: tuple[LivePage, Get], monkeypatch: Any) -> None:
    page, _ = served
    drawn: list[float] = []
    clock = [0.0]

    def sleep(seconds: float) -> None:
        clock[0] += seconds
        if clock[0] == 10.0:
            page.get("/state")
        if clock[0] > 60.0:
            raise KeyboardInterrupt

    page._looked = page._rest = -100.0
    monkeypatch.setattr(watch_module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(watch_module.time, "sleep", sleep)
    monkeypatch.setattr(page, "draw", lambda: (drawn.append(clock[0]), setattr(page, "_version", 1)))
    with pytest.raises(KeyboardInterrupt):
        page.keep_up(2.0)
    assert drawn[0] == 0.0 and set(drawn[1:]) == {10.0, 12.0, 14.0, 16.0, 18.0, 20.0, 22.0, 24.0}


def test_a_taken_port_and_no_run(run: RunFolder, tmp_path: Path) -> None:
    with PageServer(LivePage(run.path), 0) as taken:
        port = taken.server_address[1]
        with pytest.raises(UserError, match=f"--port {port}: Address already in use; choose another"):
            serve_page(run.path, port, print)
    with pytest.raises(UserError, match="is not a run folder"):
        serve_page(tmp_path, 0, print)
    with pytest.raises(UserError, match="does not exist"):
        watch_terminal(tmp_path / "absent")


def test_an_interrupt_ends_both_views_with_130(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(watch_module, "watch_terminal", interrupted)
    monkeypatch.setattr(watch_module, "serve_page", interrupted)
    for flags in (["--tty"], ["--port", "0"]):
        assert cli.run(["watch", str(run.path), *flags]) == 130
        assert capsys.readouterr() == ("", "")
    assert cli.run(["watch", str(run.path), "--json"]) == 130
    assert json.loads(capsys.readouterr().out)["step"] == 0


LOST = "no answer from thresher watch: this page shows what it sent last"
SCRIPT = files("thresher.engine.reports").joinpath("watch.js").read_text(encoding="utf-8")
LOOK = """
const foot = document.getElementById("watch");
const look = () => ({ foot: foot.textContent, title: document.title, main: texts("main")[0] });
"""


def page(text: str) -> str:
    sections = f"<h2>Reward</h2><details>{text}</details><h2>Samples</h2><details></details>"
    picture = '<img loading="lazy" src="data:,">'
    return f"<html><head><title>run {text}</title></head><body><main>{sections}{picture}</main>\n{FOOT}\n</html>"


def state(version: int, says: str) -> dict[str, Any]:
    return {"text": json.dumps({"version": version, "says": says})}


def watch(scenario: str, states: list[dict[str, Any]], pages: list[dict[str, Any]]) -> Any:
    return run_page(page("one"), LOOK + scenario, scripts=[SCRIPT], answers={"/state": states, "/": pages})


def test_a_newer_page_takes_the_place_of_the_old_one() -> None:
    found = watch(
        """
        const seen = [look()];
        seen.push(await tick(), look());
        document.querySelectorAll("details")[1].open = true;
        scrollY = 500;
        document.querySelectorAll("h2").forEach((section, n) => { section.top = 100 + 1000 * n; });
        seen.push(await tick(), look());
        const open = document.querySelectorAll("details").map((details) => details.open);
        document.hidden = true;
        await tick();
        seen.push(await tick());
        return { seen, open, asked, scrolled: log.scrolled, lazy: texts("img[loading]").length };
        """,
        [state(1, "step 1"), state(1, "step 2"), state(2, "step 3"), state(2, "step 4"), state(2, "step 5")],
        [{"text": page("two")}],
    )
    one, two = ({"title": f"run {name}", "main": f"Reward{name}Samples"} for name in ("one", "two"))
    assert found["seen"] == [
        {"foot": "step 1"} | one,
        3000,
        {"foot": "step 2"} | one,
        3000,
        {"foot": "step 3"} | two,
        12000,
    ]
    assert found["asked"] == ["/state", "/state", "/state", "/", "/state", "/state"]
    assert found["open"] == [False, True] and found["lazy"] == 0
    # The visible section was 100 below the top and is at 0 on the new page, so the page is scrolled by the difference.
    assert found["scrolled"] == [[0, 500], [0, -100]]


@pytest.mark.parametrize(
    ("states", "pages"),
    [
        pytest.param([{"error": True}], [], id="no-server"),
        pytest.param([{"status": 500, "text": '{"version": 2, "says": "wrong"}'}], [], id="state-500"),
        pytest.param([{"cut": True}], [], id="state-cut"),
        pytest.param([{"text": '{"version": 2, "sa'}], [], id="state-half"),
        pytest.param([state(2, "step 2")], [{"error": True}], id="no-page"),
        pytest.param([state(2, "step 2")], [{"status": 403, "text": page("refused")}], id="page-403"),
        pytest.param([state(2, "step 2")], [{"cut": True, "text": page("cut")}], id="page-cut"),
        pytest.param([state(2, "step 2")], [{"text": FIRST.format(says="a new server")}], id="page-being-drawn"),
    ],
)
def test_after_a_failed_answer_the_page_stays_and_is_asked_for_again(
    states: list[dict[str, Any]], pages: list[dict[str, Any]]
) -> None:
    found = watch(
        "await tick(); const lost = look(); const ms = await tick(); return { lost, ms, again: look() };",
        [state(1, "step 1"), *states, state(2, "step 3")],
        [*pages, {"text": page("two")}],
    )
    assert found["lost"] == {"foot": LOST, "title": "run one", "main": "RewardoneSamples"}
    assert found["ms"] == 3000
    assert found["again"] == {"foot": "step 3", "title": "run two", "main": "RewardtwoSamples"}
