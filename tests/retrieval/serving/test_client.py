"""Test the client: it returns what the index would return, or raises an error that says what is wrong."""

import gzip
import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from thresher.common import http as http_module
from thresher.common.errors import UserError
from thresher.engine.scoring.endpoint import Endpoint
from thresher.retrieval.indexes.load import Index
from thresher.retrieval.passages import Passage
from thresher.retrieval.retriever import Hit, Unanswered
from thresher.retrieval.serving import client as client_module
from thresher.retrieval.serving.app import Served
from thresher.retrieval.serving.client import RemoteRetriever
from thresher.retrieval.serving.server import Server

GOOD = {"result": [[{"document": {"id": "7", "contents": '"T"\ntext'}, "score": 0.5}]]}
QUERIES = ["the rival of Mia Noor", "spouse", "Anna Bell", "teacher of Otto Pike", "", "spouse"]


class Stub:
    """Scripted server: `script` holds, for each coming POST, a (status, body) or the name of a `do_` method."""

    def __init__(self) -> None:
        self.script: list[Any] = []
        self.health: Any = (404, {})
        self.identity: str | None = None
        self.asked: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.sent, self.over = threading.Event(), threading.Event()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: Any) -> None: ...

            def do_GET(self) -> None:
                self.answer(*stub.health)

            def do_POST(self) -> None:
                stub.paths.append(self.path)
                stub.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                said = stub.script.pop(0)
                if not isinstance(said, str):
                    return self.answer(*said)
                self.close_connection = True
                with suppress(ConnectionError):
                    getattr(self, f"do_{said}")()
                stub.sent.set()

            def do_break(self) -> None:
                # A linger time of zero turns the close into a reset.
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

            def do_half(self) -> None:
                self.wfile.write(b'HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n{"result": ')

            def do_sleep(self) -> None:
                stub.over.wait(3)  # time.sleep may be cut short by a test

            def do_drip(self) -> None:
                self.head(content_length=10**6)
                while not stub.over.wait(0.01):
                    self.wfile.write(b" ")

            def do_flood(self) -> None:
                self.head(content_length=2**22)
                self.wfile.write(b" " * 2**22)

            def do_inflate(self) -> None:
                data = gzip.compress(b" " * 2**22)
                self.head(content_encoding="gzip", content_length=len(data))
                self.wfile.write(data)

            def do_chunk(self) -> None:
                self.head(transfer_encoding="chunked")
                while not stub.over.is_set():
                    self.wfile.write(b"10000\r\n%s\r\n" % (b" " * 2**16))

            def head(self, status: int = 200, **headers: Any) -> None:
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name.replace("_", "-"), str(value))
                self.end_headers()

            def answer(self, status: int, body: Any) -> None:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                identity = {} if stub.identity is None else {"thresher_index": stub.identity}
                self.head(status, content_length=len(data), **identity)
                self.wfile.write(data)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()


@pytest.fixture
def stub() -> Iterator[Stub]:
    stub = Stub()
    yield stub
    stub.over.set()
    stub.server.shutdown()
    stub.thread.join()
    stub.server.server_close()


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the pauses between attempts, and cut them short."""
    taken: list[float] = []
    sleep = time.sleep
    monkeypatch.setattr(client_module.time, "sleep", lambda seconds: (taken.append(seconds), sleep(0.001)))
    return taken


@pytest.fixture
def server(tiny_index: Index) -> Iterator[Server]:
    sha256 = tiny_index.corpus.sha256
    with Server(
        tiny_index, Served(passages=len(tiny_index), kind="flat", corpus_sha256=sha256, identity="one"), port=0
    ) as running:
        yield running


# the same results as an index in this process


def test_the_hits_are_those_of_the_index_but_for_their_rows(server: Server, tiny_index: Index) -> None:
    remote = RemoteRetriever(server.url)
    expected = [[Hit(-1, hit.passage, hit.score) for hit in hits] for hits in tiny_index.search(QUERIES, 3)]
    assert remote.search(QUERIES, 3) == expected and any(expected)
    assert remote.identity == "one" and remote.retries == 0


def test_one_request_for_all_that_wait_over_one_connection(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    remote = RemoteRetriever(server.url)
    for _ in range(3):
        remote.search(QUERIES, 3)
    assert server.app.metrics.requests["/retrieve", 200] == 1 and server.app.metrics.queries == 4  # the rest are cached
    assert (remote.stats.queries, remote.stats.cached) == (18, 13)  # the blank query is sent to no server
    split = RemoteRetriever(server.url, max_batch=3)
    assert split.search(QUERIES, 3) == remote.search(QUERIES, 3)
    assert server.app.metrics.requests["/retrieve", 200] == 3
    assert server.connections == 2  # one per client
    monkeypatch.setattr(client_module, "MAX_PASSAGES", 8)
    RemoteRetriever(server.url).search(QUERIES, 4)
    assert server.app.metrics.requests["/retrieve", 200] == 5
    monkeypatch.setattr(client_module, "MAX_BYTES", 40)  # in JSON the queries have 23, 8, 11 and 22 characters
    RemoteRetriever(server.url).search(QUERIES, 3)
    assert server.app.metrics.requests["/retrieve", 200] == 7
    monkeypatch.setattr(client_module, "MAX_CHARACTERS", 6)
    assert RemoteRetriever(server.url).search(["spouse of"], 3) == split.search(["spouse"], 3)


def test_k_is_held_to_the_passages_that_a_server_tells_of(server: Server, stub: Stub) -> None:
    remote = RemoteRetriever(server.url)
    remote.check_k(40)
    for k in (0, 41):
        with pytest.raises(UserError, match=f"k is {k}"):
            remote.check_k(k)
    for health in ((404, {"detail": "Not Found"}), (200, b"fine"), (200, {"passages": "9"}), (200, [])):
        stub.health = health
        foreign = RemoteRetriever(stub.url)
        foreign.check_k(10**6)
        with pytest.raises(UserError, match="k is 0"):
            foreign.check_k(0)


def test_search_r1s_own_server(stub: Stub) -> None:
    """Search-R1's server has no /health, integer ids, and extra keys in a document."""
    document = {"id": 7, "contents": '"The Title"\nSome text.', "title": "x"}
    stub.script = [(200, {"result": [[{"document": document, "score": 1}]]})]
    found = RemoteRetriever(f"{stub.url}/retrieve").search(["q"], 1)
    assert found == [[Hit(-1, Passage("7", "The Title", "Some text."), 1.0)]]
    assert stub.asked == [{"queries": ["q"], "topk": 1, "return_scores": True}] and stub.paths == ["/retrieve"]


# a faulty server


@pytest.mark.parametrize("trouble", [(503, {}), (500, {}), (502, b"<html>"), (429, {}), "break", "half", "sleep"])
def test_what_passes_is_waited_for(stub: Stub, pauses: list[float], trouble: Any) -> None:
    said: list[str] = []
    stub.script = [trouble, trouble, (200, GOOD)]
    remote = RemoteRetriever(stub.url, timeout=0.5 if trouble == "sleep" else 60, say=said.append)
    assert [hit.passage.id for hit in remote.search(["q"], 1)[0]] == ["7"]
    assert remote.retries == 2 and stub.asked == [stub.asked[0]] * 3
    assert len(said) == 2 and "asking again for up to 120 s" in said[0] and said[1].endswith("answers again")
    stub.script = [(200, GOOD)]
    remote.search(["r"], 1)
    assert remote.retries == 2 and len(said) == 2


def test_pauses_double_up_to_a_limit_and_begin_anew(stub: Stub, pauses: list[float]) -> None:
    remote = RemoteRetriever(stub.url)
    for query in ("q", "r"):
        stub.script = [(503, {})] * 8 + [(200, GOOD)]
        remote.search([query], 1)
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0] * 2


def test_patience_ends(stub: Stub) -> None:
    remote = RemoteRetriever(stub.url, patience=0.3)
    stub.script = [(200, GOOD)] + [(503, {"error": "the queue is full"})] * 9
    remote.search(["q"], 1)
    started = time.monotonic()
    with pytest.raises(Unanswered) as caught:
        remote.search(["r"], 1)
    waited = time.monotonic() - started
    assert waited >= 0.3  # bound: its patience
    assert waited < 5
    assert str(caught.value) == (
        f"{stub.url}/retrieve: no answer for 0.3 s (status 503 (the queue is full)); "
        "start the server again, and continue a training run with --resume"
    )


def test_a_server_that_is_not_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(Unanswered) as caught:
        RemoteRetriever(url, patience=0).check_k(3)
    assert str(caught.value) == (
        f"{url}/health: no answer for 0 s (a connection that could not be made); "
        "start the server there (thresher serve-retriever), or fix retrieval.url"
    )


def test_a_refusal_is_reported_at_once(server: Server, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "MAX_CHARACTERS", 2 * client_module.MAX_CHARACTERS)
    with pytest.raises(Unanswered, match=r"refused a search with status 400 \(queries\[0\]: expected at most"):
        RemoteRetriever(server.url).search(["x" * 70_000], 3)
    stub.script = [(422, {"detail": [{"loc": "body"}]})]
    remote = RemoteRetriever(stub.url)
    with pytest.raises(Unanswered, match=r"refused a search with status 422$"):
        remote.search(["q"], 1)
    assert remote.retries == 0


HIT = GOOD["result"][0][0]
MALFORMED: list[tuple[Any, str]] = [
    (b"", 'expected "result" with a list for each of 1 queries, got none'),
    (b"[" * 100_000, "got none"),
    ([], "got none"),
    ({"result": {}}, "got none"),
    ({"result": []}, "got 0 of them"),
    ({"result": [[], []]}, "got 2 of them"),
    ({"result": [None]}, r"expected at most 1 passages in result\[0\], got no list"),
    ({"result": [[HIT, HIT]]}, r"expected at most 1 passages in result\[0\], got 2"),
    ({"result": [["text"]]}, r'expected result\[0\]\[0\] with a "document" and a "score"'),
    ({"result": [[HIT["document"]]]}, 'with a "document" and a "score"'),
    ({"result": [[HIT | {"document": {"id": "7"}}]]}, r'expected strings "id" and "contents" in result\[0\]\[0\]'),
    ({"result": [[HIT | {"document": {"id": True, "contents": "x"}}]]}, 'strings "id" and "contents"'),
    ({"result": [[HIT | {"document": {"id": "7", "contents": 5}}]]}, 'strings "id" and "contents"'),
    ({"result": [[HIT | {"score": "high"}]]}, r'expected a number as result\[0\]\[0\].score, got "high"'),
    ({"result": [[HIT | {"score": True}]]}, "expected a number as"),
    ({"result": [[HIT | {"score": float("nan")}]]}, "expected a number as .* got NaN"),
]


@pytest.mark.parametrize(("answer", "message"), MALFORMED)
def test_an_answer_of_another_shape(stub: Stub, answer: Any, message: str) -> None:
    stub.script = [(200, answer)]
    with pytest.raises(Unanswered, match=f"the answer is not Search-R1's: .*{message}"):
        RemoteRetriever(stub.url).search(["q"], 1)


def test_another_index_behind_the_same_address(stub: Stub) -> None:
    stub.identity = "one"
    remote = RemoteRetriever(stub.url)
    stub.script = [(200, GOOD)] * 3
    remote.search(["q"], 1)
    stub.identity = "two"
    with pytest.raises(Unanswered, match=r"now serves another index \(two\) than when this run began \(one\)"):
        remote.search(["r"], 1)
    stub.identity = None
    with pytest.raises(Unanswered, match=r"now serves another index \(unnamed\)"):
        remote.search(["s"], 1)


def test_addresses() -> None:
    for url, address in (
        ("http://h:1/", "http://h:1/retrieve"),
        ("https://h/retrieve/", "https://h/retrieve"),
        ("http://[::1]:8000/deep", "http://[::1]:8000/deep/retrieve"),
    ):
        assert RemoteRetriever(url).url == address
    for url in ("h:8000", "ftp://h", "http://", "http://h:x", "http://h:99999", "http://h/?a=1", "x"):
        with pytest.raises(UserError, match=r"is not an address of a retrieval server; expected one such as http"):
            RemoteRetriever(url)


QUESTION = [[{"role": "user", "content": "q"}]]


@pytest.mark.parametrize("answer", ["flood", "inflate", "chunk"])
def test_an_answer_of_any_size_is_not_read(stub: Stub, answer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer announces a large length, inflates to one, or has no end."""
    monkeypatch.setattr(http_module, "MOST_BYTES", 2**20)
    stub.script = [answer] * 2
    remote, endpoint = RemoteRetriever(stub.url), Endpoint(stub.url, "m")
    with pytest.raises(Unanswered, match="sends an answer of more than 1,048,576 bytes; give the address of"):
        remote.search(["q"], 1)
    with pytest.raises(UserError, match="sends an answer of more than 1,048,576 bytes; give the address of"):
        endpoint.complete(QUESTION)
    assert stub.sent.wait(20)
    assert remote.retries == 0 and endpoint.requests == 1


def test_the_limit_on_time_is_of_the_whole_answer(stub: Stub) -> None:
    """The server sends one byte at a time, each within the limit of one read."""
    stub.script = ["drip"] * 9
    ended = threading.Timer(60, stub.over.set)  # without the limit the test fails here instead of hanging
    ended.start()
    with pytest.raises(Unanswered, match=r"an answer that took longer than 0\.5 s"):
        RemoteRetriever(stub.url, timeout=0.5, patience=0.1).search(["q"], 1)
    with pytest.raises(UserError, match=r"a reply that took longer than 0\.5 s"):
        Endpoint(stub.url, "m", timeout=0.5, patience=0.1).complete(QUESTION)
    assert not stub.over.is_set()
    ended.cancel()
