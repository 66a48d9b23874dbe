"""Test `thresher serve-retriever` as a process: it serves an index, ends cleanly, and survives malformed requests."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import pytest
from retrieval_server_cases import address, ask, until

from thresher.retrieval.indexes.load import Index
from thresher.retrieval.indexes.manifest import read_manifest
from thresher.retrieval.serving.app import DIALECTS, contents

FUZZED = int(os.environ.get("THRESHER_FUZZ", "1500"))


def spawn(index: Path, *flags: str, log: Any = None) -> tuple["subprocess.Popen[str]", str]:
    """Start `thresher serve-retriever`; return the process and its address. `log` is a file for its stderr."""
    command = [sys.executable, "-P", "-m", "thresher.cli", "serve-retriever", "--index", str(index), *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
    assert process.stdout is not None
    line = process.stdout.readline()
    found = re.search(r"passages \(flat\) of .* at (http://127\.0\.0\.1:\d+)", line)
    assert found, line
    return process, found[1]


Spawned = tuple["subprocess.Popen[str]", str, Path]


@pytest.fixture(scope="module")
def spawned(tiny_index_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Spawned]:
    """Yield the process, its address, and the file of its stderr."""
    path = tmp_path_factory.mktemp("log") / "stderr"
    with path.open("w") as log:
        process, url = spawn(tiny_index_folder, "--port", "0", log=log)
        yield process, url, path
        process.kill()
        process.wait()


def test_the_command_serves_an_index(spawned: Spawned, tiny_index: Index, tiny_index_folder: Path) -> None:
    _, url, _ = spawned
    status, health, _ = ask(url, "/health")
    assert (status, health["passages"]) == (200, len(tiny_index))
    assert health["corpus_sha256"] == read_manifest(tiny_index_folder).corpus_sha256 == tiny_index.corpus.sha256
    query = "the rival of Mia Noor"
    _, answer, _ = ask(url, "/retrieve", {"queries": [query], "topk": 4, "return_scores": True})
    for hit, said in zip(tiny_index.search([query], 4)[0], answer["result"][0], strict=True):
        assert said == {"document": {"id": hit.passage.id, "contents": contents(hit.passage)}, "score": hit.score}


def test_sigterm_lets_what_has_arrived_finish(tiny_index_folder: Path) -> None:
    """A waiting batch is searched at once and answered; idle connections and half-sent requests delay nothing."""
    process, url = spawn(tiny_index_folder, "--port", "0", "--max-wait-ms", "700")
    half = b"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10\r\n\r\n{"
    open_ones = [socket.create_connection(address(url)) for _ in range(3)]
    for connection, sent in zip(open_ones, (b"", half[:9], half), strict=True):
        connection.sendall(sent)
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(ask, url, "/retrieve", {"queries": ["Mia Noor"]})
        until(lambda: '"waiting_queries": 1' in json.dumps(ask(url, "/health")[1]))
        process.send_signal(signal.SIGTERM)
        assert answer.result()[0] == 200
    assert process.wait(20) == 0
    for connection in open_ones:
        connection.close()
    assert process.stdout is not None and "ended; 1 queries were searched" in process.stdout.read()


# fuzzing


def fuzzed(draw: Random) -> bytes:
    """Return a malformed request, or bytes that are not a request; a few requests are valid."""
    body = draw.choice((some_json(draw, 3), some_request(draw)))
    data = json.dumps(body).encode() if draw.random() < 0.8 else draw.randbytes(draw.randrange(200))
    if draw.random() < 0.1:
        data = draw.choice((b"[" * 50_000, b'{"queries": ["' + b"q" * 100_000 + b'"]}', data[: len(data) // 2]))
    path = draw.choice((*DIALECTS, "/retrieve", "/health", "/metrics", "/", "/%00%ff", "*", "/retrieve?x=\x7f", "//"))
    method = draw.choice(("POST", "POST", "POST", "POST", "GET", "PUT", "HEAD", "OPTIONS", "CONNECT", "BREW", "post"))
    length = draw.choice((str(len(data)),) * 8 + ("-1", "1e3", str(len(data) + 5), str(10**30), "", "0", "0, 5"))
    headers = [f"Host: {draw.choice(('localhost',) * 4 + ('', 'a b', 'x' * 300))}", f"Content-Length: {length}"]
    extra = (
        "Transfer-Encoding: chunked",
        "Transfer-Encoding: gzip",
        "Connection: upgrade\r\nUpgrade: websocket",
        "Expect: 100-continue",
        "Content-Length: 3",
        "X: " + "y" * draw.choice((10, 40_000)),
        " folded: yes",
        "Nö: ü",
        "Connection: close",
    )
    headers += draw.sample(extra, draw.choice((0, 0, 0, 1, 2)))
    version = draw.choice(("HTTP/1.1",) * 8 + ("HTTP/1.0", "HTTP/2.0", "HTTP/9", ""))
    request = "\r\n".join((f"{method} {path} {version}", *headers)).encode("latin-1") + b"\r\n\r\n" + data
    mutation = draw.random()
    if mutation < 0.1:
        at = draw.randrange(len(request))
        request = request[:at] + draw.randbytes(3) + request[at + draw.randrange(5) :]
    elif mutation < 0.15:
        request = draw.randbytes(draw.randrange(1, 400))
    elif mutation < 0.2:
        request *= draw.randrange(2, 5)  # pipelined
    return request


def some_json(draw: Random, depth: int) -> Any:
    kinds = [None, True, 0, -1, 10**25, 1.5, float("nan"), "", "\ud800", "queries", "x" * 50]
    value = draw.choice(kinds)
    if depth and draw.random() < 0.6:
        parts = [some_json(draw, depth - 1) for _ in range(draw.randrange(4))]
        names = ("queries", "topk", "return_scores", "query", "top_n", "return_score", "")
        return {draw.choice(names): part for part in parts} if draw.random() < 0.7 else parts
    return value


def some_request(draw: Random) -> Any:
    body: dict[str, Any] = {"queries": [draw.choice(("rival", "spouse of Mia", "é"))] * draw.randrange(3)}
    if draw.random() < 0.3:
        body = {"query": body["queries"] if draw.random() < 0.5 else "rival"}
    if draw.random() < 0.7:
        key = draw.choice(("topk", "top_n"))
        body[key] = draw.choice((1, 2, 3, 3, 41, 10**9, some_json(draw, 1)))
    return body


def test_fuzzed_requests_leave_it_alive_and_small(spawned: Spawned) -> None:
    """THRESHER_FUZZ sets the number of requests. Most connections close without reading, like a careless client's."""
    process, url, log = spawned
    draw = Random(5)
    for number in range(FUZZED // 4):  # allocate one-time memory before the measurement
        throw(url, fuzzed(draw), number % 4 == 0)
    before, statuses = resident_kib(process.pid), set()
    for number in range(FUZZED):
        status = throw(url, fuzzed(draw), number % 4 == 0)
        if status:
            statuses.add(status)
    assert log.read_text() == ""
    assert statuses >= {200, 400, 403, 404, 405} and statuses <= {200, 400, 403, 404, 405, 413, 100}
    assert process.poll() is None and ask(url, "/health")[0] == 200
    assert ask(url, "/retrieve", {"queries": ["rival"], "topk": 1})[0] == 200
    values = ask(url, "/metrics")[1]
    assert 'code="500"' not in values and "thresher_waiting_queries 0" in values
    assert resident_kib(process.pid) - before < 16 * 1024


def throw(url: str, request: bytes, read: bool) -> int:
    """Send bytes; return the status of the answer, or 0 without one."""
    with socket.create_connection(address(url), timeout=20) as connection:
        try:
            connection.sendall(request)
            if not read:
                return 0
            connection.settimeout(0.05)
            answer = connection.recv(65_536)
        except (TimeoutError, ConnectionError):
            return 0
    if not answer:
        return 0
    assert answer.startswith(b"HTTP/") and b"Traceback" not in answer
    return int(answer[9:12])


def resident_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status")
    if not status.exists():
        pytest.skip("no /proc to read a process's memory from")
    return int(re.search(r"VmRSS:\s+(\d+)", status.read_text())[1])  # type: ignore[index]
