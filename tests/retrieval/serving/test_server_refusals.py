"""What the server refuses: nonsense by its reason, what is no HTTP, bodies that are too long or never arrive."""

import http.client
import json
import socket
from collections.abc import Callable

import pytest
from retrieval_server_cases import Scripted, address, ask, until

from thresher.common.errors import UserError
from thresher.common.hosts import host_allowed, server_names
from thresher.retrieval.serving.server import Server


def exchange(server: Server, sent: bytes) -> bytes:
    """Everything that comes back until the server ends the connection or falls silent."""
    answer = b""
    with socket.create_connection(address(server), timeout=1.0) as connection:
        connection.sendall(sent)
        try:
            while part := connection.recv(65_536):
                answer += part
        except (TimeoutError, ConnectionResetError):
            pass
    return answer


LONG = "x" * 100_000
RETRIEVE = {
    b"": "the body is not JSON",
    b"{": "the body is not JSON",
    b"\xff\xfe": "the body is not UTF-8",
    b"[" * 100_000: "the body is nested too deeply",
    b"1" * 5000: "the body is not JSON",
    b"[]": "the body: expected an object, got a list",
    b"null": "the body: expected an object, got null",
    b"{}": "queries: missing; expected a list of strings",
    b'{"queries": "a"}': 'queries: expected a list of strings, got "a"',
    b'{"queries": []}': "queries: expected from 1 to 8192 queries, got 0",
    b'{"queries": [""]}': "queries: blank; expected text to search for",
    b'{"queries": ["a", 3]}': "queries[1]: expected a string, got 3",
    b'{"queries": ["a", null]}': "queries[1]: expected a string, got null",
    b'{"queries": ["\\ud800"]}': "queries[0]: holds half of a surrogate pair",
    json.dumps({"queries": ["a", LONG]}).encode(): "queries[1]: expected at most 65536 characters, got 100000",
    json.dumps({"queries": ["a"] * 8193}).encode(): "queries: expected from 1 to 8192 queries, got 8193",
    json.dumps({"queries": ["a"] * 8000, "topk": 9}).encode(): "topk: 8000 queries x 9 are 72000 passages, more than",
    b'{"queries": ["a"], "topk": 0}': "topk: expected a whole number from 1 to 100, got 0",
    b'{"queries": ["a"], "topk": 101}': "topk: expected a whole number from 1 to 100, got 101",
    b'{"queries": ["a"], "topk": 2.0}': "topk: expected a whole number from 1 to 100, got 2.0",
    b'{"queries": ["a"], "topk": true}': "topk: expected a whole number from 1 to 100, got true",
    b'{"queries": ["a"], "topk": "3"}': 'topk: expected a whole number from 1 to 100, got "3"',
    b'{"queries": ["a"], "topk": NaN}': "topk: expected a whole number from 1 to 100, got NaN",
    b'{"queries": ["a"], "topk": 10}': "topk: k is 10, but the corpus holds 9 passages; lower k",
    b'{"queries": ["a"], "return_scores": 1}': "return_scores: expected true or false, got 1",
    b'{"queries": ["a"], "top_k": 3}': '"top_k": unknown key; expected queries, topk, return_scores',
}


def test_nonsense_is_refused_by_the_name_of_its_key(serve: Callable[..., Server], scripted: Scripted) -> None:
    server = serve(scripted)
    for body, reason in RETRIEVE.items():
        status, answer, _ = ask(server, "/retrieve", body)
        assert status == 400 and answer["error"].startswith(reason), (body[:60], answer)
        assert len(answer["error"]) < 200
    assert scripted.searched == []
    for path, body, reason in (
        ("/search", {"query": ["a"]}, "query: expected a string, got a list"),
        ("/search", {"query": "  "}, "query: blank"),
        ("/search", {"query": LONG}, "query: expected at most"),
        ("/batch_search", {"query": "a"}, 'query: expected a list of strings, got "a"'),
        ("/batch_search", {"query": ["a"], "top_n": -1}, "top_n: expected a whole number"),
        ("/batch_search", {"queries": ["a"]}, '"queries": unknown key'),
    ):
        status, answer, _ = ask(server, path, body)
        assert status == 400 and answer["error"].startswith(reason), (body, answer)


def test_other_paths_and_methods(serve: Callable[..., Server], scripted: Scripted) -> None:
    server = serve(scripted)
    assert ask(server, "/")[:2] == (
        404,
        {"error": "no such path; expected one of /retrieve, /search, /batch_search, /health, /metrics"},
    )
    status, answer, headers = ask(server, "/retrieve")
    assert (status, headers["allow"]) == (405, "POST") and answer["error"].startswith("/retrieve takes POST")
    assert ask(server, "/health", b"{}")[0] == 405
    status, text, headers = ask(server, "/health", method="HEAD")
    assert (status, text) == (200, "") and int(headers["content-length"]) > 50


@pytest.mark.parametrize(
    ("hosts", "status"),
    [
        (["localhost"], 200),
        (["LOCALHOST.:8000"], 200),
        (["127.0.0.1:8000"], 200),
        (["10.1.2.3"], 200),
        (["[::1]:8000"], 200),
        (["node17:8000"], 200),
        (["proxy.example"], 200),
        (["this-machine.cluster"], 200),
        (["this-machine"], 200),
        (["evil.example"], 403),
        (["localhost.evil.example"], 403),
        (["127.0.0.1.evil.example"], 403),
        (["evil@localhost"], 403),
        ([""], 403),
        ([], 403),
        (["localhost", "evil.example"], 403),
        (["evil.example", "localhost"], 403),
    ],
)
def test_a_host_header_that_names_another_server(
    hosts: list[str], status: int, serve: Callable[..., Server], scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page whose name was made to resolve to this machine must not read what the server answers."""
    monkeypatch.setattr("socket.gethostname", lambda: "This-Machine.cluster")
    server = serve(scripted, allow_hosts=("node17", "Proxy.example"))
    head = "".join(f"Host: {host}\r\n" for host in hosts)
    for path in ("/health", "/metrics"):
        answer = exchange(server, f"GET {path} HTTP/1.1\r\nConnection: close\r\n{head}\r\n".encode())
        # aiohttp itself may refuse a request with none or two.
        assert int(answer[9:12]) in ((status,) if len(hosts) == 1 else (400, 403)), answer
        assert (b"passages" in answer or b"requests_total" in answer) == (status == 200)
    if status == 403 and len(hosts) == 1:
        body = b'{"queries": ["a"]}'
        sent = (
            f"POST /retrieve HTTP/1.1\r\nConnection: close\r\n{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        )
        assert exchange(server, sent).startswith(b"HTTP/1.1 403 ") and scripted.searched == []


def test_the_hosts_of_a_request() -> None:
    assert not host_allowed(["localhost", "localhost"]) and not host_allowed([]) and host_allowed(["localhost"])
    assert host_allowed(["h:1"], server_names("h")) and not host_allowed(["h"], server_names("0.0.0.0"))
    for wrong in ("", "a b", "http://h", "h:80", "*"):
        with pytest.raises(UserError, match=r"--allow-host .*: expected a host name without a port"):
            server_names("127.0.0.1", [wrong])


def test_what_is_no_http(
    serve: Callable[..., Server],
    scripted: Scripted,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Alone, after a request, in a body, and in a body whose request was refused before it was read."""
    monkeypatch.setattr("thresher.retrieval.serving.server.LINGER_SECONDS", 0.1)
    server = serve(scripted)
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    body = b" /retrieve HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    long_head = b"GET / HTTP/1.1\r\nX: " + b"y" * 40_000
    for sent in (b"\x00\xff\r\n\r\n", b"GET\r\n\r\n", long_head, whole + b"\x00 \r\n\r\n", b"POST" + body + b"zz\r\n"):
        answer = exchange(server, sent)
        assert answer.count(b"HTTP/1.") == 1 and b" 400 Bad Request\r\n" in answer
    with socket.create_connection(address(server), timeout=20) as connection:
        connection.sendall(b"PUT" + body)
        assert connection.recv(12) == b"HTTP/1.1 405"
        connection.sendall(b"zz\r\n")
        while connection.recv(65_536):
            pass  # ends, and nothing more is said
    assert ask(server, "/health")[0] == 200 and capfd.readouterr().err == ""


def test_a_body_that_is_too_long(
    serve: Callable[..., Server], scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thresher.retrieval.serving.server.LINGER_SECONDS", 0.1)
    server = serve(scripted, max_body=1000)
    for length in (1001, 3999):
        status, answer, headers = ask(server, "/retrieve", b"x" * length)
        assert (status, headers["connection"]) == (413, "close")
        assert answer["error"] == "the body is longer than 1000 bytes; ask in several requests"
    head = b"POST /retrieve HTTP/1.1\r\nHost: localhost\r\n"
    assert b" 413 " in exchange(server, head + b"Content-Length: 99999999999\r\n\r\nx")
    chunk = b"%x\r\n%s\r\n" % (500, b"x" * 500)
    assert b" 413 " in exchange(server, head + b"Transfer-Encoding: chunked\r\n\r\n" + 9 * chunk)
    assert ask(server, "/retrieve", b"x" * 1000)[0] == 400


def test_a_body_that_is_far_too_long_gets_its_413(serve: Callable[..., Server], scripted: Scripted) -> None:
    """To a client that reads nothing before it has sent everything, with a length and in chunks; one that asks first
    whether to send it is not told to."""
    server = serve(scripted, max_body=1000)
    for body in (b"x" * 30_000_000, (b"x" * 100_000 for _ in range(100))):
        connection = http.client.HTTPConnection(*address(server), timeout=20)
        connection.request("POST", "/retrieve", body, encode_chunked=not isinstance(body, bytes))
        response = connection.getresponse()
        assert response.status == 413 and b"longer than 1000 bytes" in response.read()
        connection.close()
    head = b"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: "
    assert exchange(server, head + b"9999\r\n\r\n").startswith(b"HTTP/1.1 413 ")
    assert exchange(server, head + b"9\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"


def test_a_body_that_does_not_arrive(
    serve: Callable[..., Server], scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thresher.retrieval.serving.server.LINGER_SECONDS", 0.1)
    server = serve(scripted, timeout=0.2)
    answer = exchange(server, b"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 408 ") and b"the body did not arrive within 0.2 s" in answer


def test_a_request_that_does_not_arrive(
    serve: Callable[..., Server], scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No head, half a head, and a pause after a request: each time the connection ends, and costs nothing more."""
    monkeypatch.setattr("thresher.retrieval.serving.server.IDLE_SECONDS", 0.2)
    server = serve(scripted)
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for sent in (b"", b"POST /ret", whole + b"GET /hea"):
        answer = exchange(server, sent)
        assert answer.startswith(b"HTTP/1.1 200 ") if whole in sent else answer == b""
    until(lambda: server.connections == 0)


def test_an_answer_that_is_not_read(
    serve: Callable[..., Server], scripted: Scripted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("thresher.retrieval.serving.server.IDLE_SECONDS", 0.5)
    server = serve(scripted)
    scripted.passages = 100
    with socket.create_connection(address(server)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        body = json.dumps({"queries": ["x" * 500 + str(n) for n in range(200)], "topk": 100}).encode()
        head = b"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(body)
        connection.sendall(head + body)
        until(lambda: server.app.metrics.requests["/retrieve", 200] == 1)
        assert server.connections == 1
        until(lambda: server.connections == 0)
