"""Test the server: exact answers in two dialects, refusals with a reason, shared searches, and no tracebacks."""

import http.client
import json
import re
import resource
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace

import pytest
from retrieval_server_cases import SERVED, address, ask, until

from thresher.bench.retrieval_server import measure_server
from thresher.cli import main as cli
from thresher.common.errors import UserError
from thresher.common.hosts import host_allowed, server_names
from thresher.retrieval.indexes.manifest import read_manifest
from thresher.retrieval.passages import Passage
from thresher.retrieval.serving.app import (
    Metrics,
    Served,
    Settings,
    contents,
    passage_of,
)
from thresher.retrieval.serving.server import Server, serve_folder

SERVER = "thresher.retrieval.serving.server"


# answers


def test_search_r1_and_verl_get_what_they_parse(serve, scripted):
    server = serve(scripted)
    body = {"queries": ["a", "b"], "topk": 2, "return_scores": True}
    status, answer, headers = ask(server, "/retrieve", body)
    assert status == 200 and headers["thresher-index"] == SERVED.identity
    assert answer == {
        "result": [
            [
                {"document": {"id": f"{q}-0", "contents": f'"T0"\nabout {q}'}, "score": 1.0},
                {"document": {"id": f"{q}-1", "contents": f'"T1"\nabout {q}'}, "score": 0.5},
            ]
            for q in ("a", "b")
        ]
    }
    plain = {"result": [[hit["document"] for hit in hits] for hits in answer["result"]]}
    assert ask(server, "/retrieve", body | {"return_scores": False})[1] == plain
    blank = ask(server, "/retrieve", {"queries": ["a", " \n", "b"], "topk": 1})[1]
    assert [len(hits) for hits in blank["result"]] == [1, 0, 1]
    for default in ({}, {"topk": None}):
        assert [len(hits) for hits in ask(server, "/retrieve", {"queries": ["a"]} | default)[1]["result"]] == [3]


def test_recall_gets_what_it_parses(serve, scripted):
    server = serve(scripted)
    documents = {q: [{"id": f"{q}-{n}", "contents": f'"T{n}"\nabout {q}'} for n in range(2)] for q in ("a", "b")}
    one, many = {"query": "a", "top_n": 2}, {"query": ["a", "b"], "top_n": 2}
    assert ask(server, "/search", one)[1] == documents["a"]
    assert ask(server, "/search", one | {"return_score": True})[1] == [documents["a"], [1.0, 0.5]]
    assert ask(server, "/batch_search", many)[1] == [documents["a"], documents["b"]]
    both = [[documents["a"], documents["b"]], [[1.0, 0.5], [1.0, 0.5]]]
    assert ask(server, "/batch_search", many | {"return_score": True})[1] == both
    # The default is 10, and the corpus has 9 passages.
    assert len(ask(server, "/search", {"query": "a"})[1]) == 9 and len(ask(server, "/search", one)[1]) == 2


@pytest.mark.parametrize(
    ("title", "text"),
    [("Mia", "Mia has a rival."), ("", "no title"), ('The "Best"', "a\nb\n"), ('"', '"'), ("é \ud800", "\u2028 x")],
)
def test_a_passage_comes_back_as_it_was_sent(title, text):
    passage = Passage("p", title, text)
    assert passage_of("p", json.loads(json.dumps(contents(passage)))) == passage
    assert contents(Passage("p", f"{title}\n", text)) == contents(Passage("p", f"{title} ", text))


# failures and load


def test_a_search_that_fails_says_so_and_no_more(serve, scripted, capfd):
    server = serve(scripted)
    status, answer, _ = ask(server, "/retrieve", {"queries": ["explode"]})
    assert (status, answer) == (500, {"error": "the search failed (ZeroDivisionError); see the server's log"})
    assert "secret of the index" in capfd.readouterr().err
    assert "build it again" in ask(server, "/retrieve", {"queries": ["mistake"]})[1]["error"]
    assert ask(server, "/retrieve", {"queries": ["a"]})[0] == 200


def test_a_search_that_hangs_and_a_queue_that_is_full(serve, scripted):
    server = serve(scripted, timeout=0.3, max_waiting=2, max_wait_ms=0.1)
    scripted.go.clear()
    status, answer, headers = ask(server, "/retrieve", {"queries": ["a"]})
    assert (status, headers["retry-after"]) == (503, "1") and "not done within 0.3 s" in answer["error"]
    with ThreadPoolExecutor() as pool:  # these two wait for the same search and give up too
        waiting = [pool.submit(ask, server, "/retrieve", {"queries": [query]}) for query in ("b", "c")]
        until(lambda: server.app.batcher.waiting == 2)
        status, answer, headers = ask(server, "/retrieve", {"queries": ["d"]})
        assert (status, headers["retry-after"]) == (503, "1")
        assert answer["error"] == "2 queries are waiting already; ask again"
        assert [future.result()[0] for future in waiting] == [503, 503]
    status, answer, _ = ask(server, "/health")
    assert (status, answer["status"]) == (503, "a search hangs")
    scripted.go.set()
    until(lambda: ask(server, "/health")[0] == 200)
    assert ask(server, "/retrieve", {"queries": ["e"]})[0] == 200
    assert [queries for queries, _ in scripted.searched] == [["a"], ["e"]]  # the requests for b and c have given up


def test_too_many_requests(serve, scripted):
    server = serve(scripted, max_connections=3, max_wait_ms=0.0)
    scripted.go.clear()
    with ThreadPoolExecutor() as pool:
        served = [pool.submit(ask, server, "/retrieve", {"queries": [query]}) for query in "abc"]
        until(lambda: server.app.serving == 3)
        status, answer, headers = ask(server, "/retrieve", {"queries": ["d"]})
        assert (status, headers["retry-after"]) == (503, "1")
        assert answer["error"] == "3 requests are being served already; ask again" and ask(server, "/health")[0] == 200
        scripted.go.set()
        assert [one.result()[0] for one in served] == [200] * 3


HALF = b"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\n\r\n{"


def test_waiting_connections_make_room(serve, scripted, monkeypatch):
    """Open more connections than fit, without a request, with half a head, or with half a body. The server closes those
    that have waited longest when a request arrives, but never one that it serves."""
    monkeypatch.setattr(f"{SERVER}.SPARE", -9 + resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    monkeypatch.setattr(f"{SERVER}.FEWEST", 9)
    server = serve(scripted, max_connections=3)
    scripted.go.clear()
    with ThreadPoolExecutor() as pool:
        served = pool.submit(ask, server, "/retrieve", {"queries": ["a"]})
        until(lambda: server.app.serving == 1)
        idle = [socket.create_connection(address(server)) for _ in range(60)]
        for number, connection in enumerate(idle):
            with suppress(ConnectionError):  # it may be gone already
                connection.sendall((b"", b"POST /ret", HALF)[number % 3])
        assert ask(server, "/health")[0] == 200
        until(lambda: server.connections <= 9)
        scripted.go.set()
        assert served.result()[0] == 200 and ask(server, "/retrieve", {"queries": ["b"]})[0] == 200
    for connection in idle:
        connection.close()


def test_unfinished_bodies_hold_only_so_much(serve, scripted, monkeypatch):
    monkeypatch.setattr(f"{SERVER}.BODIES", 2)
    server = serve(scripted, max_body=1000)
    slow = [socket.create_connection(address(server)) for _ in range(5)]
    for connection in slow:
        connection.sendall(HALF + b" " * 700)
    until(lambda: server.connections == 2)
    assert ask(server, "/retrieve", {"queries": ["a" * 800]})[0] == 200
    for connection in slow:
        connection.close()


def test_health_and_metrics(serve, scripted):
    server = serve(scripted)
    health = {"status": "ok", "passages": 9, "kind": "flat", "corpus_sha256": "ab" * 32, "waiting_queries": 0}
    assert ask(server, "/health")[:2] == (200, health | {"index": SERVED.identity})
    for queries in (["a", "b"], ["a"], []):
        ask(server, "/retrieve", {"queries": queries})
    ask(server, "/nowhere")
    status, text, headers = ask(server, "/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert values['thresher_requests_total{path="/retrieve",code="200"}'] == "2"
    assert values['thresher_requests_total{path="/retrieve",code="400"}'] == "1"
    assert values['thresher_requests_total{path="other",code="404"}'] == "1"
    assert values["thresher_queries_total"] == "3" and values["thresher_cached_queries_total"] == "1"
    assert values["thresher_batches_total"] == "2" and values["thresher_request_seconds_count"] == "2"
    assert values['thresher_request_seconds_bucket{le="+Inf"}'] == "2"
    assert values["thresher_waiting_queries"] == "0" and float(values["thresher_search_seconds_total"]) > 0


def test_the_histogram_counts_up():
    metrics = Metrics()
    for seconds in (0.001, 0.0011, 3, 1000):
        metrics.served(1, seconds)
    counts = [int(n) for n in re.findall(r'_bucket\{le="[^"]+"\} (\d+)', metrics.text(()))]
    assert counts == [1, *[2] * 10, 3, 3, 3, 3, 4] and "request_seconds_sum 1003.0021" in metrics.text(())


# connections


def test_connections_share_searches(serve, scripted):
    server = serve(scripted, max_wait_ms=0.0)
    scripted.go.clear()
    with ThreadPoolExecutor(17) as pool:
        first = pool.submit(ask, server, "/retrieve", {"queries": ["first"]})
        until(lambda: bool(scripted.searched))
        others = [pool.submit(ask, server, "/retrieve", {"queries": [f"q{n}"], "topk": 1}) for n in range(16)]
        until(lambda: server.app.batcher.waiting == 16)
        scripted.go.set()
        assert first.result()[0] == 200
        for number, other in enumerate(others):
            assert other.result()[1] == {"result": [[{"id": f"q{number}-0", "contents": f'"T0"\nabout q{number}'}]]}
    assert [len(queries) for queries, _ in scripted.searched] == [1, 16]


def test_a_client_that_has_gone_is_not_searched_for(serve, scripted):
    server = serve(scripted, max_wait_ms=0.0)
    scripted.go.clear()
    with ThreadPoolExecutor() as pool:
        first = pool.submit(ask, server, "/retrieve", {"queries": ["first"]})
        until(lambda: bool(scripted.searched))
        body = b'{"queries": ["gone"]}'
        with socket.create_connection(address(server)) as connection:
            connection.sendall(HALF.replace(b"900\r\n\r\n{", b"%d\r\n\r\n%s" % (len(body), body)))
            until(lambda: server.app.serving == 2)
        until(lambda: server.app.serving == 1)
        scripted.go.set()
        assert first.result()[0] == 200 and ask(server, "/retrieve", {"queries": ["next"]})[0] == 200
    assert [queries for queries, _ in scripted.searched] == [["first"], ["next"]]


def test_a_server_that_is_stopped_twice_ends_at_once(serve, scripted):
    server = serve(scripted)
    scripted.go.clear()
    with ThreadPoolExecutor() as pool:
        asked = pool.submit(ask, server, "/retrieve", {"queries": ["a"]})
        until(lambda: bool(scripted.searched))
        server.stop()
        with pytest.raises(ConnectionError):
            while True:
                socket.create_connection(address(server)).close()
        assert not asked.done()
        server.stop()
        assert isinstance(asked.exception(20), ConnectionError | http.client.HTTPException)


# address, command, figures


def test_an_address_that_is_taken_or_foreign(scripted):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UserError, match=rf"127.0.0.1:{port}: cannot listen there \(Address already in use\); give"):
            Server(scripted, SERVED, port=port)
    with pytest.raises(UserError, match=r"nowhere\.invalid:1: cannot listen there"):
        Server(scripted, SERVED, host="nowhere.invalid", port=1)
    with pytest.raises(UserError, match="k is 10, but the corpus holds 9 passages"):
        Server(scripted, SERVED, Settings(k=10), port=0)


def test_what_makes_an_index_another(tiny_index_folder):
    manifest = read_manifest(tiny_index_folder)
    others = [
        replace(manifest, corpus_sha256="0" * 64),
        replace(manifest, embed="title+text"),
        replace(manifest, encoder_fingerprint="another"),
        replace(manifest, kind="ivf", factory="IVF8,Flat", parameters={"nprobe": 4}),
    ]
    served = [Served.by(manifest), *map(Served.by, others), Served.by(others[-1], {"nprobe": 8})]
    assert len({one.identity for one in served}) == 6
    same = replace(manifest, corpus_paths=["elsewhere"], recall={"5": 0.9}, faiss_version="0")
    assert Served.by(same) == served[0] and Served.by(others[-1], {"nprobe": 4}) == served[4]


def test_what_the_command_says(scripted, tiny_index_folder, monkeypatch, capsys):
    said: list[str] = []
    monkeypatch.setattr(Server, "serve", lambda self: self.app.batcher.close())
    serve_folder(tiny_index_folder, Settings(), ("localhost", 0), said.append)
    assert len(said) == 2 and said[0].startswith("40 passages (flat) of ") and "http://localhost:" in said[0]
    serve_folder(tiny_index_folder, Settings(), ("0.0.0.0", 0), said.append)
    assert said[2] == "0.0.0.0 can be reached from outside this machine, and the server requires no password"
    for arguments, message in (
        (["--index", "nowhere"], "thresher: nowhere: no such folder; build the index first"),
        (["--index", str(tiny_index_folder), "--k", "41"], "thresher: k is 41, but the corpus holds 40 passages"),
        (["--index", str(tiny_index_folder), "--host", "nowhere.invalid"], "cannot listen there"),
        (["--index", str(tiny_index_folder), "--set", "nprobe=4"], "has no search parameters"),
    ):
        assert cli.run(["serve-retriever", *arguments, *["--port", "0"]]) == 2
        assert message in capsys.readouterr().err
    for wrong in (["--port", "70000"], ["--k", "0"], ["--timeout", "0"], ["--timeout", "nan"], ["--max-body", "8MB"]):
        assert cli.run(["serve-retriever", "--index", str(tiny_index_folder), *wrong]) == 2


def test_the_load_generator_counts_what_it_was_answered(serve, scripted, monkeypatch):
    monkeypatch.setattr("thresher.bench.retrieval_server.WARM_UP", 0.0)
    server = serve(scripted)
    figures = measure_server(server.url, ["a", "b", "c"], connections=4, seconds=0.3, k=2)
    answered = server.app.metrics.requests["/retrieve", 200]
    assert (figures["requests"], figures["failed"]) == (answered, 0) and answered > 4
    assert figures["requests_per_s"] == pytest.approx(answered / 0.3)
    assert 0 < figures["p50_ms"] <= figures["p99_ms"] <= figures["largest_ms"]  # bound: their order
    refused = measure_server(server.url, ["a"], connections=2, seconds=0.1, k=10)
    assert refused["requests"] == 0 and refused["failed"] == server.app.metrics.requests["/retrieve", 400] > 0


# refusals: invalid values, invalid HTTP, bodies that are too long or never arrive


def exchange(server: Server, sent: bytes) -> bytes:
    """Return all bytes that arrive until the server ends the connection or sends nothing for a second."""
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
    **{
        b'{"queries": ["a"], "topk": %s}' % k.encode(): f"topk: expected a whole number from 1 to 100, got {k}"
        for k in ("0", "101", "2.0", "true", '"3"', "NaN")
    },
    b'{"queries": ["a"], "topk": 10}': "topk: k is 10, but the corpus holds 9 passages; lower k",
    b'{"queries": ["a"], "return_scores": 1}': "return_scores: expected true or false, got 1",
    b'{"queries": ["a"], "top_k": 3}': '"top_k": unknown key; expected queries, topk, return_scores',
}


def test_nonsense_is_refused_by_the_name_of_its_key(serve, scripted):
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


def test_other_paths_and_methods(serve, scripted):
    server = serve(scripted)
    expected = "/retrieve, /search, /batch_search, /health, /metrics"
    assert ask(server, "/")[:2] == (404, {"error": f"no such path; expected one of {expected}"})
    status, answer, headers = ask(server, "/retrieve")
    assert (status, headers["allow"]) == (405, "POST") and answer["error"].startswith("/retrieve takes POST")
    assert ask(server, "/health", b"{}")[0] == 405
    status, text, headers = ask(server, "/health", method="HEAD")
    assert (status, text) == (200, "") and int(headers["content-length"]) > 50


HOSTS_SERVED = "localhost LOCALHOST.:8000 127.0.0.1:8000 10.1.2.3 [::1]:8000 node17:8000 proxy.example this-machine"
HOSTS_REFUSED = "evil.example localhost.evil.example 127.0.0.1.evil.example evil@localhost"


@pytest.mark.parametrize(
    ("hosts", "status"),
    [
        *(([host], 200) for host in (*HOSTS_SERVED.split(), "this-machine.cluster")),
        *(([host], 403) for host in (*HOSTS_REFUSED.split(), "")),
        *((hosts, 403) for hosts in ([], ["localhost", "evil.example"], ["evil.example", "localhost"])),
    ],
)
def test_a_host_header_that_names_another_server(hosts, status, serve, scripted, monkeypatch):
    """A web page whose host name resolves to this machine must not be able to read the server's answers."""
    monkeypatch.setattr("socket.gethostname", lambda: "This-Machine.cluster")
    server = serve(scripted, allow_hosts=("node17", "Proxy.example"))
    head = "".join(f"Host: {host}\r\n" for host in hosts) + "Connection: close\r\n"
    for path in ("/health", "/metrics"):
        answer = exchange(server, f"GET {path} HTTP/1.1\r\n{head}\r\n".encode())
        # aiohttp itself may refuse a request with no Host header or two.
        assert int(answer[9:12]) in ((status,) if len(hosts) == 1 else (400, 403)), answer
        assert (b"passages" in answer or b"requests_total" in answer) == (status == 200)
    if status == 403 and len(hosts) == 1:
        sent = f'POST /retrieve HTTP/1.1\r\n{head}Content-Length: 18\r\n\r\n{{"queries": ["a"]}}'
        assert exchange(server, sent.encode()).startswith(b"HTTP/1.1 403 ") and scripted.searched == []


def test_the_hosts_of_a_request():
    assert not host_allowed(["localhost", "localhost"]) and not host_allowed([]) and host_allowed(["localhost"])
    assert host_allowed(["h:1"], server_names("h")) and not host_allowed(["h"], server_names("0.0.0.0"))
    for wrong in ("", "a b", "http://h", "h:80", "*"):
        with pytest.raises(UserError, match=r"--allow-host .*: expected a host name without a port"):
            server_names("127.0.0.1", [wrong])


def test_what_is_no_http(serve, scripted, capfd, monkeypatch):
    """Invalid HTTP arrives alone, after a request, in a body, and in the body of a request that was already refused."""
    monkeypatch.setattr(f"{SERVER}.LINGER_SECONDS", 0.1)
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
            pass  # the connection ends without another answer
    assert ask(server, "/health")[0] == 200 and capfd.readouterr().err == ""


def test_a_body_that_is_too_long(serve, scripted, monkeypatch):
    monkeypatch.setattr(f"{SERVER}.LINGER_SECONDS", 0.1)
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


def test_a_body_that_is_far_too_long_gets_its_413(serve, scripted):
    """The client sends the whole body before it reads, with a length or in chunks. A client that first asks whether to
    send the body (Expect: 100-continue) is refused before it sends it."""
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


def test_a_request_that_does_not_arrive(serve, scripted, monkeypatch):
    """The connection ends after half a body, no head, half a head, and a pause after a request."""
    monkeypatch.setattr(f"{SERVER}.LINGER_SECONDS", 0.1)
    monkeypatch.setattr(f"{SERVER}.IDLE_SECONDS", 0.2)
    server = serve(scripted, timeout=0.2)
    answer = exchange(server, HALF)
    assert answer.startswith(b"HTTP/1.1 408 ") and b"the body did not arrive within 0.2 s" in answer
    whole = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    for sent in (b"", b"POST /ret", whole + b"GET /hea"):
        answer = exchange(server, sent)
        assert answer.startswith(b"HTTP/1.1 200 ") if whole in sent else answer == b""
    until(lambda: server.connections == 0)


def test_an_answer_that_is_not_read(serve, scripted, monkeypatch):
    monkeypatch.setattr(f"{SERVER}.IDLE_SECONDS", 0.5)
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
