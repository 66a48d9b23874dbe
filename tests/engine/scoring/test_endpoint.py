"""A chat model at a URL: requests, stored replies, and a server in trouble."""

from __future__ import annotations

import gc
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest
from chat_server import ChatServer, completion
from stored_cases import stored

from thresher.common.errors import UserError
from thresher.engine.config.sections import JudgeSection
from thresher.engine.scoring import endpoint as endpoint_module
from thresher.engine.scoring.endpoint import Endpoint, Replies, load_endpoint
from thresher.engine.scoring.judges import load_verdicts


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record the pauses between attempts and cut them short."""
    taken: list[float] = []
    wait = threading.Event.wait

    def noted(event: threading.Event, timeout: float | None = None) -> bool:
        if timeout is not None and threading.current_thread().name.startswith("endpoint"):
            taken.append(timeout)
            timeout = 0.001
        return wait(event, timeout)

    monkeypatch.setattr(threading.Event, "wait", noted)
    return taken


def said(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "user", "content": text}] for text in texts]


def failure(endpoint: Endpoint, *texts: str, **arguments: Any) -> str:
    with pytest.raises(UserError) as caught:
        endpoint.complete(said(*texts or ("q",)), **arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# requests


def test_a_request_and_its_reply(server: ChatServer) -> None:
    endpoint = Endpoint(server.url, "qwen", key="s3cret")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Wer schrieb »Emma«? \ud800"}]
    server.script = ["Austen \ud83d"]
    assert endpoint.complete([messages], temperature=0.7, max_tokens=9) == ["Austen \ud83d"]
    assert server.asked == [{"model": "qwen", "messages": messages, "temperature": 0.7, "max_tokens": 9}]
    assert server.paths == ["/v1/chat/completions"] and server.keys == ["Bearer s3cret"]
    assert Endpoint(server.url, "qwen").complete([]) == []
    Endpoint(server.url, "qwen").complete(said("x"))
    assert server.keys[1:] == [None]


def test_replies_come_in_the_order_of_the_questions_and_twins_share_one(server: ChatServer) -> None:
    endpoint = Endpoint(server.url, "m", concurrency=5)
    texts = [f"q{number % 13}" for number in range(40)]
    assert endpoint.complete(said(*texts)) == [f"re: {text}" for text in texts]
    assert len(server.asked) == endpoint.requests == 13
    assert endpoint.complete(said("q1", "new")) == ["re: q1", "re: new"]
    assert len(server.asked) == 14


def test_as_many_requests_at_once_as_allowed(server: ChatServer) -> None:
    server.hold = threading.Barrier(3)  # no reply is given before three requests run at once
    assert Endpoint(server.url, "m", concurrency=3).complete(said(*"abcdef")) == [f"re: {text}" for text in "abcdef"]
    server.hold = threading.Barrier(2)
    with pytest.raises(UserError, match="no reply"):
        Endpoint(server.url, "m", concurrency=1, timeout=0.2, patience=0).complete(said(*"gh"))
    server.hold.abort()


def test_addresses() -> None:
    for url, address in (
        ("http://h:1", "http://h:1/v1/chat/completions"),
        ("http://h:1/", "http://h:1/v1/chat/completions"),
        ("https://h/v1/", "https://h/v1/chat/completions"),
        ("https://h/api/v2", "https://h/api/v2/chat/completions"),
        ("http://[::1]:8/v1/chat/completions", "http://[::1]:8/v1/chat/completions"),
    ):
        assert Endpoint(url, "m").url == address
    for url in ("h:8000", "ftp://h", "http://", "http://h:x", "http://h:99999", "http://h/?a=1", "x"):
        with pytest.raises(UserError, match=r"is not an address of a chat model's server; expected one such as http"):
            Endpoint(url, "m")
    with pytest.raises(UserError, match=r"^host: the address holds a secret; leave it out") as caught:
        Endpoint("https://me:s3cret@host/v1", "m")
    assert "s3cret" not in str(caught.value)


# stored replies


def test_a_reply_is_paid_for_once_across_runs_and_addresses(server: ChatServer, tmp_path: Path) -> None:
    replies = tmp_path / "deep" / "replies.jsonl"
    first = Endpoint(server.url, "m", replies=replies)
    assert list(tmp_path.iterdir()) == []  # a run folder is created where nothing exists yet
    first.complete(said("a", "b"))
    with ChatServer() as moved:
        again = Endpoint(moved.url, "m", replies=replies, key="k")
        assert again.complete(said("b", "a", "c")) == ["re: b", "re: a", "re: c"]
        assert [request["messages"][0]["content"] for request in moved.asked] == ["c"]
        # Everything that affects a reply is part of its key.
        again.complete(said("a"), temperature=0.5)
        again.complete(said("a"), max_tokens=7)
        Endpoint(moved.url, "other", replies=replies).complete(said("a"))
        again.complete([[{"role": "system", "content": "a"}]])
        assert len(moved.asked) == 5
    records = stored(replies)
    assert len(records) == 7 and records[0].keys() == {"key", "request", "reply"}
    assert server.asked[0] in [record["request"] for record in records]


TWO = """
import sys
from thresher.engine.scoring.endpoint import Replies
replies = Replies(sys.argv[1])
for n in range(60):
    replies.put(f"{sys.argv[2]}{n}", {}, f"{n}")
"""


def test_processes_may_share_the_file_of_replies(tmp_path: Path) -> None:
    path = tmp_path / "replies.jsonl"
    command = [sys.executable, "-P", "-c", TWO, str(path)]
    running = [subprocess.Popen([*command, name]) for name in "ab"]
    assert [process.wait(60) for process in running] == [0, 0]
    replies = Replies(path)
    assert [replies.get(f"{name}{n}") for name in "ab" for n in range(60)] == [str(n) for n in range(60)] * 2


@pytest.mark.parametrize("cut", [1, 20])
def test_half_a_last_line_is_asked_for_anew(server: ChatServer, tmp_path: Path, cut: int) -> None:
    replies = tmp_path / "r.jsonl"
    Endpoint(server.url, "m", replies=replies, concurrency=1).complete(said("a", "b"))
    whole = replies.read_bytes()
    replies.write_bytes(whole[:-cut])
    assert Endpoint(server.url, "m", replies=replies).complete(said("a", "b")) == ["re: a", "re: b"]
    assert [request["messages"][0]["content"] for request in server.asked] == ["a", "b", "b"]
    assert replies.read_bytes() == whole


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    replies = tmp_path / "r.jsonl"
    for line in ('{"key": "a"}', "[]", "nonsense", '{"key": 1, "reply": "x"}', "[" * 100_000):
        replies.write_text('{"key": "k", "reply": "x"}\n' + line + "\n")
        with pytest.raises(UserError, match=r"r\.jsonl:2: "):
            Endpoint("http://h", "m", replies=replies)
    with pytest.raises(UserError, match=r"cannot be used \(.*\); name another file"):
        Endpoint("http://h", "m", replies=tmp_path)
    with pytest.raises(UserError, match="cannot be used"):
        Endpoint("http://h", "m", replies=replies / "below")


def test_what_is_under_way_when_one_fails_is_kept(
    server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replies = tmp_path / "r.jsonl"
    endpoint = Endpoint(server.url, "m", replies=replies, concurrency=2)
    both, refused = threading.Event(), threading.Event()
    ask = endpoint._ask

    def watched(*arguments: Any) -> str:
        try:
            return ask(*arguments)
        except UserError:
            refused.set()
            raise

    def refuse() -> Any:
        return both.wait(5) and (400, {"error": "no"})

    def keep() -> Any:
        both.set()
        return refused.wait(5) and "kept"

    monkeypatch.setattr(endpoint, "_ask", watched)
    server.script = [refuse, keep]
    problem = failure(endpoint, *"abcdef")
    assert f"refused a request with status 400 (no); fix what it names ({replies} keeps all replies)" in problem
    assert len(server.asked) == 2  # the other four requests were not begun
    assert [record["reply"] for record in stored(replies)] == ["kept"]
    assert "kept" in Endpoint(server.url, "m", replies=replies).complete(said(*"abcdef"))
    assert len(server.asked) == 2 + 5


# a server in trouble


@pytest.mark.parametrize(
    "trouble", [(503, {}), (500, b"<html>"), (529, {}), (429, {}), (408, {}), "break", "half", "sleep"]
)
def test_what_passes_is_waited_for(server: ChatServer, pauses: list[float], trouble: Any) -> None:
    lines: list[str] = []
    server.script = [trouble, trouble, "at last"]
    endpoint = Endpoint(server.url, "m", timeout=1.0 if trouble == "sleep" else 60.0, say=lines.append)
    assert endpoint.complete(said("q")) == ["at last"]
    assert server.asked == [server.asked[0]] * 3 and endpoint.requests == 3
    assert len(lines) == 2 and "asking again for up to 300 s" in lines[0] and lines[1].endswith("replies again")


def test_a_reply_that_trickles_gives_its_place_back(server: ChatServer, pauses: list[float]) -> None:
    server.script = ["drip", "drip", "fine"]
    endpoint, replies = Endpoint(server.url, "m", timeout=1.0, concurrency=1), list[str]()
    asking = threading.Thread(target=lambda: replies.extend(endpoint.complete(said("q"))), daemon=True)
    asking.start()
    asking.join(60)
    assert replies == ["fine"]


def test_pauses_double_up_to_a_limit_begin_anew_and_honour_retry_after(server: ChatServer, pauses: list[float]) -> None:
    endpoint = Endpoint(server.url, "m", concurrency=1)
    for text in "qr":
        server.script = [(503, {})] * 9 + ["done"]
        endpoint.complete(said(text))
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0] * 2
    pauses.clear()
    in_a_minute = formatdate(time.time() + 60, usegmt=True)
    values = ["7", "0", "2.5", in_a_minute, "Wed, 21 Oct 2015 07:28:00 GMT", "soon"]
    server.script = [*((429, {}, {"retry-after": value}) for value in values), "done"]
    assert endpoint.complete(said("s")) == ["done"]
    assert pauses[:3] == [7.0, 1.0, 2.5] and 55 < pauses[3] <= 60 and pauses[4:] == [8.0, 16.0]


def test_more_rest_than_patience_ends_at_once(server: ChatServer, pauses: list[float]) -> None:
    server.script = [(429, {"error": {"message": "daily limit"}}, {"Retry-After": "3600"})]
    assert failure(Endpoint(server.url, "m", patience=60)) == (
        f"{server.url}/v1/chat/completions: asks for a pause of 3600 s (status 429 (daily limit)), more than the "
        "patience of 60 s; raise it, or run this again later (all replies so far are kept in memory only)"
    )
    assert pauses == [] and len(server.asked) == 1


def test_patience_ends(server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "FIRST_PAUSE", 0.05)
    replies = tmp_path / "r.jsonl"
    endpoint = Endpoint(server.url, "m", patience=0.3, replies=replies, concurrency=2)
    endpoint.complete(said("a"))
    server.script = [(503, {"error": "loading"})] * 50
    assert failure(endpoint, *"bcdefg") == (
        f"{server.url}/v1/chat/completions: no reply for 0.3 s (status 503 (loading)); check the server and run this "
        f"again ({replies} keeps all replies)"
    )
    assert {request["messages"][0]["content"] for request in server.asked} == {"a", "b", "c"}


def test_nobody_is_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    problem = failure(Endpoint(url, "m", patience=0))
    assert "no reply for 0 s (a connection that could not be made); check the server" in problem


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (400, {"error": {"message": "max_tokens is\ntoo large", "code": None}}, "status 400 (max_tokens is too large)"),
        (401, {"error": {"message": "Incorrect key: s3cret"}}, "status 401 (Incorrect key: ...)"),
        (403, {"message": "region"}, "status 403 (region)"),
        (404, {"detail": "Not Found"}, "status 404 (Not Found)"),
        (404, b"<html>", "status 404;"),
        (422, {"detail": [{"loc": "body"}]}, "status 422;"),
        (302, {}, "status 302;"),
        (413, {"error": "x" * 5000}, f"({'x' * 197}...)"),
        (429, {"error": {"message": "pay first", "code": "insufficient_quota"}}, "status 429 (pay first)"),
    ],
)
def test_a_refusal_is_reported_at_once(server: ChatServer, status: int, body: Any, words: str) -> None:
    server.script = [(status, body)]
    problem = failure(Endpoint(server.url, "m", key="s3cret"))
    assert "refused a request with" in problem and words in problem and "s3cret" not in problem
    assert len(server.asked) == 1


NO_COMPLETION: list[Any] = [b"", b"<html>hello</html>", b"[" * 100_000, [], completion(None)]
NO_COMPLETION += [{"choices": choices} for choices in ([], {}, ["text"], [{"text": "old"}])]


@pytest.mark.parametrize("body", NO_COMPLETION)
def test_an_answer_of_another_shape_is_asked_for_once_more(server: ChatServer, tmp_path: Path, body: Any) -> None:
    endpoint = Endpoint(server.url, "m", replies=tmp_path / "r.jsonl")
    server.script = [(200, body), "fine"]
    assert endpoint.complete(said("q")) == ["fine"]
    server.script = [(200, body), (200, body)]
    problem = failure(endpoint, "r")
    assert "m gave, twice, no text at choices[0].message.content, where a chat completion has it, but" in problem
    assert len(server.asked) == 4 and len((tmp_path / "r.jsonl").read_text().splitlines()) == 1


def test_an_unusable_reply_is_asked_for_once_more_and_not_kept(server: ChatServer, tmp_path: Path) -> None:
    replies = tmp_path / "r.jsonl"
    endpoint = Endpoint(server.url, "m", replies=replies)
    server.script = ["dunno", "42"]
    assert endpoint.complete(said("q"), usable=str.isdigit) == ["42"]
    server.script = ["dunno", "well,\nperhaps"]
    problem = failure(endpoint, "How many?", usable=str.isdigit)
    assert 'm gave, twice, an unusable reply to "How many?", "well, perhaps"; name another model' in problem
    assert [record["reply"] for record in stored(replies)] == ["42"]
    # A reply is used by a caller that can use it, and requested again by one that cannot.
    assert endpoint.complete(said("word")) == ["re: word"]
    server.script = ["7"]
    assert endpoint.complete(said("word"), usable=str.isdigit) == ["7"]


# from a recipe


def test_an_endpoint_from_a_recipe(server: ChatServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    section = JudgeSection(url=server.url, model="m", key_env="CHAT_KEY", replies=str(tmp_path / "r.jsonl"))
    monkeypatch.delenv("CHAT_KEY", raising=False)
    allowed = [f"CHAT_KEY@127.0.0.1:{server.server.server_port}"]
    with pytest.raises(UserError, match=r"the environment variable CHAT_KEY, .* is not set; export it"):
        load_endpoint(section, allowed)
    monkeypatch.setenv("CHAT_KEY", "s3\ncret")
    with pytest.raises(UserError, match=r"CHAT_KEY, .* has characters that no key has") as caught:
        load_endpoint(section, allowed)
    assert "s3" not in str(caught.value)
    monkeypatch.setenv("CHAT_KEY", " s3cret\n")
    lines: list[str] = []
    endpoint = load_endpoint(section, allowed, lines.append)
    assert lines == [f"verdicts of m come from {server.url}/v1/chat/completions, with the key in CHAT_KEY"]
    endpoint.complete(said("q"))
    assert server.keys == ["Bearer s3cret"] and "s3cret" not in (tmp_path / "r.jsonl").read_text()
    with pytest.raises(UserError, match=r"the recipe names none; add judge.url and judge.model"):
        load_verdicts(JudgeSection())


@pytest.mark.parametrize(
    ("url", "host"),
    [
        ("https://API.Openai.com/v1", "api.openai.com"),
        ("http://127.0.0.1:8000", "127.0.0.1:8000"),
        ("http://evil.example\\api.openai.com/v1", "evil.example"),
        ("http://[::1]:80", "[::1]:80"),
    ],
)
def test_a_key_goes_only_where_it_is_allowed(url: str, host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the host that would be connected to counts, whatever the address looks like."""
    monkeypatch.setenv("CHAT_KEY", "s3cret")
    section, wanted = JudgeSection(url=url, model="m", key_env="CHAT_KEY"), f"CHAT_KEY@{host}"
    for allowed in ([], [f"OTHER@{host}"], [f"{wanted}0"], ["CHAT_KEY@localhost"]):
        with pytest.raises(UserError, match=rf"would send the key in CHAT_KEY to .*--allow-key {re.escape(wanted)}$"):
            load_endpoint(section, allowed)
    load_endpoint(section, ["CHAT_KEY@localhost", wanted])


def test_a_redirect_does_not_carry_the_key_away(server: ChatServer) -> None:
    with ChatServer() as other:
        for status in (301, 302, 307, 308):
            server.script = [(status, {}, {"location": f"{other.url}/v1/chat/completions"})]
            assert f"status {status}" in failure(Endpoint(server.url, "m", key="s3cret"))
        assert other.asked == [] and server.keys == ["Bearer s3cret"] * 4


def test_an_interrupt_waits_for_no_reply(server: ChatServer) -> None:
    over = threading.Event()

    def interrupt() -> Any:
        os.kill(os.getpid(), signal.SIGINT)
        return over.wait(60) and "late"

    server.script = [interrupt]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores SIGINT
    # Python drops a KeyboardInterrupt that is raised in a finalizer, such as that of an earlier test's connections.
    gc.collect()
    gc.disable()
    try:
        with pytest.raises(KeyboardInterrupt):
            Endpoint(server.url, "m").complete(said("q", "r"))
        assert not over.is_set()
    finally:
        gc.enable()
        over.set()
        signal.signal(signal.SIGINT, before)
