"""Hostile requests: raw bytes to a retrieval server that runs, with a sound request among every few dozen of them.

A request that is complete gets an answer in HTTP, never a 500, within seconds; what is no request may have its
connection closed instead. The sound ones get what they got before the attack, while idle connections and half-sent
requests lie about. Behind it the server still runs, has printed no trace, and holds no more memory or descriptors.
"""

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from thresher.bench.torture.attack import Field, Tried, Verdict
from thresher.bench.torture.worker import ForkLimits, Started

REQUESTS, LEAST = 100_000, 5  # the least of each kind
SOUND_EVERY = 40  # requests
LURKERS = 100  # connections that send nothing, or half a head, all along
FLOOD = 300  # idle connections to the live page
PATIENCE = 15.0  # seconds for an answer; with other work on the machine a search takes a while
MAX_BODY = 65_536
GROWTH = 256 << 20  # bytes of memory that a server may keep behind the attack
SOUND = {"queries": ["Anna Bell", "Otto Pike"], "topk": 2, "return_scores": True}
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
ANSWERED = frozenset({200, 400, 404, 405, 408, 411, 413, 414, 415, 417, 426, 431, 501, 503, 505})


@dataclass(frozen=True, slots=True)
class Hostile:
    """Bytes to send. whole: they are a request, which must be answered. statuses: with which of these. ends: the
    connection is of no more use behind it. leave: go away without reading."""

    data: bytes
    statuses: frozenset[int] = ANSWERED
    whole: bool = True
    ends: bool = False
    leave: bool = False


class Connection:
    """A connection that is opened when it is needed. Bytes behind an answer are those of the next."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._address, self._socket, self._rest = address, None, b""

    _socket: socket.socket | None

    def send(self, data: bytes) -> None:
        if self._socket is None:
            self._socket = socket.create_connection(self._address, timeout=PATIENCE)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(BrokenPipeError, ConnectionResetError):  # refused already; the answer may still be there
            self._socket.sendall(data)

    def answer(self) -> tuple[int, bytes] | None:
        """Status and body; None where the connection ended without. TimeoutError where nothing comes."""
        assert self._socket is not None
        data = self._rest
        try:
            while b"\r\n\r\n" not in data.removeprefix(CONTINUE):
                part = self._socket.recv(1 << 16)
                if not part:
                    return None
                data += part
            head, _, body = data.removeprefix(CONTINUE).partition(b"\r\n\r\n")
            status = re.match(rb"HTTP/1\.[01] ([0-9]{3}) ", head)
            length = re.search(rb"(?i)\r\ncontent-length: *([0-9]+)", head)
            if status is None or length is None:
                raise ValueError(f"no answer in HTTP: {head[:80]!r}")
            while len(body) < int(length[1]):
                part = self._socket.recv(1 << 16)
                if not part:
                    raise ValueError("the answer breaks off")
                body += part
        except ConnectionResetError:
            return None
        self._rest = body[int(length[1]) :]
        old = head.startswith(b"HTTP/1.0")  # the library's own answer to what is no HTTP, in text
        if old or re.search(rb"(?i)\r\nconnection: *close", head):
            self.close()
        return int(status[1]), b"" if old else body[: int(length[1])]

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket, self._rest = None, b""


def attack(field: Field) -> Iterator[Tried]:
    """A server, its attackers, and what is left of it."""
    draw = field.draw("requests")
    with_limits = ["--max-body", str(MAX_BODY), "--timeout", "5", "--port", "0"]
    started = field.worker.start(
        ["serve-retriever", "--index", str(field.at / "flat"), *with_limits], ForkLimits(seconds=7200)
    )
    lurkers: list[socket.socket] = []
    try:
        address = served_at(started)
        expected = ask(Connection(address))
        lurkers = [lurking(address, draw) for _ in range(LURKERS)]
        _assail(Connection(address), draw, 200)  # what grows once has grown
        before = held(started.pid)
        connection = Connection(address)
        for number in range(field.count(REQUESTS, LEAST * len(KINDS))):
            if number % SOUND_EVERY == 0:
                yield sound(address, expected)
            else:
                yield _assailed(connection, draw)
        connection.close()
        yield from _left(started, before, lurkers)
    finally:
        for lurker in lurkers:
            lurker.close()
        started.kill(signal.SIGTERM)
        ended = started.wait()
    trace = "Traceback (most recent call last)" in ended.err
    yield Tried("the server's log", "wrong" if trace else "right", ended.err[-500:] if trace else "")
    yield from _watched(field)


def _watched(field: Field) -> Iterator[Tried]:
    """The live page: foreign names are refused, and many idle connections cost a bounded number of threads."""
    started = field.worker.start(["watch", str(field.at / "run"), "--port", "0"], ForkLimits(seconds=600))
    flood: list[socket.socket] = []
    try:
        address = served_at(started)
        for host in HOSTS:
            hostile = foreign_host(host, b"/")
            yield Tried("the live page: foreign hosts", *sent(Connection(address), hostile))
        two = Hostile(
            b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", REFUSED | {403, 421}, ends=True
        )
        yield Tried("the live page: foreign hosts", *sent(Connection(address), two))
        for _ in range(FLOOD):
            with suppress(OSError):
                flood.append(socket.create_connection(address, timeout=0.1))
        time.sleep(0.5)
        threads = len(os.listdir(f"/proc/{started.pid}/task"))
        said = f"{threads} threads for {len(flood)} connections"
        yield Tried("the live page: a flood", "right" if threads < FLOOD // 2 else "wrong", said)
        for one in flood:
            one.close()
        asked = Hostile(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", frozenset({200}), ends=True)
        yield Tried("the live page: behind it", *sent(Connection(address), asked))
    finally:
        for one in flood:
            one.close()
        started.kill(signal.SIGTERM)
        started.wait()


def served_at(started: Started) -> tuple[str, int]:
    """Where a server that was begun listens, once it does."""
    until = time.monotonic() + 60
    while time.monotonic() < until and started.running():
        said = "".join((started.folder / name).read_text() for name in ("stdout", "stderr"))
        if found := re.search(r"http://(?:127\.0\.0\.1|localhost):([0-9]+)", said):
            return "127.0.0.1", int(found[1])
        time.sleep(0.02)
    started.kill(signal.SIGKILL)
    raise RuntimeError(f"no server: {started.wait().err}")


def ask(connection: Connection) -> tuple[int, bytes] | None:
    """A sound request's answer."""
    connection.send(posted(SOUND))
    answer = connection.answer()
    connection.close()
    return answer


def sound(address: tuple[str, int], expected: tuple[int, bytes] | None) -> Tried:
    """A sound request on a connection of its own, repeated while the server asks for that."""
    begun = time.monotonic()
    try:
        while (answer := ask(Connection(address))) is not None and answer[0] == 503:
            if time.monotonic() - begun > PATIENCE:
                break
            time.sleep(0.05)
    except (OSError, ValueError) as error:
        return Tried("sound requests", "wrong", f"{type(error).__name__}: {error}")
    same = answer == expected
    return Tried("sound requests", "right" if same else "wrong", "" if same else f"got {answer}, before {expected}")


def _assail(connection: Connection, draw: Random, count: int) -> None:
    for _ in range(count):
        _assailed(connection, draw)
    connection.close()


def _assailed(connection: Connection, draw: Random) -> Tried:
    kind = draw.choice(list(KINDS))
    hostile = KINDS[kind](draw)
    return Tried(kind, *sent(connection, hostile))


def sent(connection: Connection, hostile: Hostile) -> tuple[Verdict, str]:
    """One hostile request and what came back; the verdict."""
    said = f"{hostile.data[:200]!r}: "
    try:
        connection.send(hostile.data)
        if hostile.leave:
            connection.close()
            return "refused", said
        answer = connection.answer()
    except (OSError, ValueError) as error:
        connection.close()
        return "wrong", f"{said}{type(error).__name__}: {error}"
    if hostile.ends or answer is None:
        connection.close()
    if answer is None:
        return ("wrong", f"{said}no answer") if hostile.whole else ("refused", said)
    status, body = answer
    if status not in hostile.statuses:
        return "wrong", f"{said}status {status}"
    try:
        json.loads(body or b"null")
    except ValueError:
        if status != 200:  # /metrics is text
            return "wrong", f"{said}a body that is not JSON: {body[:80]!r}"
    return ("read" if status == 200 else "refused"), said


def lurking(address: tuple[str, int], draw: Random) -> socket.socket:
    """A connection that sends nothing more."""
    lurker = socket.create_connection(address, timeout=PATIENCE)
    lurker.sendall(draw.choice([b"", b"P", b"POST /retrieve HTTP/1.1\r\n", post(b"{", length=MAX_BODY)]))
    return lurker


def held(pid: int) -> tuple[int, int]:
    """Resident bytes and open descriptors of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd"))


def _left(started: Started, before: tuple[int, int], lurkers: list[socket.socket]) -> Iterator[Tried]:
    """What the server still holds, once those that lay about have gone."""
    for lurker in lurkers:
        lurker.close()
    until, now = time.monotonic() + PATIENCE, held(started.pid)
    while now[1] > before[1] and time.monotonic() < until:
        time.sleep(0.1)
        now = held(started.pid)
    grown = now[0] - before[0]
    yield Tried("the server's memory", "right" if grown < GROWTH else "wrong", f"{grown / 2**20:.0f} MiB more")
    yield Tried("the server's descriptors", "right" if now[1] <= before[1] else "wrong", f"{before[1]}, then {now[1]}")


# What is sent.


def post(body: bytes, path: str = "/retrieve", length: int | None = None, more: bytes = b"") -> bytes:
    size = len(body) if length is None else length
    return b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n%s\r\n%s" % (path.encode(), size, more, body)


def posted(value: Any, path: str = "/retrieve") -> bytes:
    return post(json.dumps(value).encode(), path)


REFUSED = frozenset({400})
JUNK: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1.5,
    "",
    "x",
    [],
    {},
    [[]],
    [None],
    [1],
    10**30,
    "\ud800",
    "\x00",
    {"a": {}},
)


def _bad_json(draw: Random) -> Hostile:
    bodies = [b"", b"{", b"[]", b"null", b"7", b'"x"', b"\xff\xfe", b'{"queries":', b"{'queries': ['a']}"]
    bodies += [b"[" * 30_000, b'{"a":' * 9_000, b'{"queries": ["a"]} x', b'{"queries": ["\xed\xa0\x80"]}', b"\x00" * 50]
    return Hostile(post(draw.choice(bodies), draw.choice(["/retrieve", "/search", "/batch_search"])), REFUSED)


def _bad_values(draw: Random) -> Hostile:
    path, names = draw.choice(
        [
            ("/retrieve", ("queries", "topk", "return_scores")),
            ("/search", ("query", "top_n", "return_score")),
            ("/batch_search", ("query", "top_n", "return_score")),
        ]
    )
    value: dict[str, Any] = {names[0]: "a" if path == "/search" else ["a", "b"]}
    value |= {name: draw.choice(JUNK) for name in draw.sample([*names, "k", "", "__proto__"], draw.randint(0, 2))}
    return Hostile(posted(value, path), frozenset({200, 400, 503}))


def _bounds(draw: Random) -> Hostile:
    value: dict[str, Any] = {"queries": ["a"], "topk": draw.choice([0, -1, 101, 65, 10**18, 2**63, -(2**64)])}
    if draw.random() < 0.3:
        value = {"queries": ["a"] * 9000, "topk": 1}
    return Hostile(posted(value), frozenset({400}))


def _number_literals(draw: Random) -> Hostile:
    number = draw.choice([b"NaN", b"Infinity", b"1e999", b"-0", b"1e1", b"9" * 5000, b"0x1", b"1_0", b"01"])
    return Hostile(post(b'{"queries": ["a"], "topk": %s}' % number), REFUSED)


def _queries(draw: Random) -> Hostile:
    text = draw.choice(
        ["\x00", "<answer>", "\u202e", "a" * 20_000, "\U0010ffff" * 99, " ", "%00", "' OR 1=1", "é\u0301"]
    )
    return Hostile(posted({"queries": [text, "Anna"], "topk": 1}), frozenset({200, 400}))


def _paths(draw: Random) -> Hostile:
    path = draw.choice(
        ["/", "//", "/../../etc/passwd", "/retrieve/", "/%2e%2e", "*", "/retrieve?x=" + "y" * 900, "/RETRIEVE"]
    )
    method = draw.choice(["GET", "PUT", "DELETE", "OPTIONS", "TRACE", "POST", "PATCH", "get", "X"])
    return Hostile(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode(), ends=True)


def _no_http(draw: Random) -> Hostile:
    heads = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(50) + b"\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost h\r\n\r\n",
        b"GET / HTTP/1.1\r\n: x\r\n\r\n",
        b"GET  / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"POST /retrieve HTTP/1.1\nHost: localhost\n\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a: b\r\n" * 9000 + b"\r\n",
        b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nx: " + b"\x00\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        draw.randbytes(200) + b"\r\n\r\n",
    ]
    # Whoever says no more lets the server wait for the rest of what may be a head.
    return Hostile(draw.choice(heads), whole=False, ends=True)


def _lengths(draw: Random) -> Hostile:
    head = b"POST /retrieve HTTP/1.1\r\nHost: localhost\r\n"
    heads = [
        head + b"Content-Length: -1\r\n\r\n",
        head + b"Content-Length: 1e3\r\n\r\n",
        head + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        head + b"Content-Length: 99999999999999999999\r\n\r\n",
        head + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        head + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
        head + b"Transfer-Encoding: chunked\r\n\r\n-1\r\nx\r\n",
        head + b"Transfer-Encoding: gzip\r\n\r\n",
        head + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
        head + b"\r\n",
    ]
    return Hostile(draw.choice(heads), whole=False, ends=True)


def _too_much(draw: Random) -> Hostile:
    size = MAX_BODY + draw.choice([1, 100, MAX_BODY])
    if draw.random() < 0.5:
        return Hostile(post(b"x" * size), frozenset({413}), ends=True)
    chunk = b"%x\r\n%s\r\n" % (8192, b"x" * 8192)
    head = b"POST /retrieve HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    return Hostile(head + chunk * 10 + b"0\r\n\r\n", frozenset({413}), ends=True)


def _gone(draw: Random) -> Hostile:
    data = posted(SOUND)
    return Hostile(data[: draw.randrange(1, len(data) + 1)], leave=True)


def _in_one(draw: Random) -> Hostile:
    """Several requests in one packet, the last of them none; what is no HTTP may have all of its packet refused."""
    behind = draw.choice([b"GET", b"\x00\x00", posted({"queries": 7}), posted(SOUND)[:30]])
    return Hostile(posted(SOUND) + behind, frozenset({200, 400}) if b"\x00" in behind else frozenset({200}), ends=True)


def _headers(draw: Random) -> Hostile:
    more = draw.choice(
        [
            b"Expect: 100-continue\r\n",
            b"Expect: nonsense\r\n",
            b"Connection: upgrade\r\nUpgrade: websocket\r\n",
            b"Content-Type: application/xml\r\n",
            b"Content-Encoding: gzip\r\n",
            b"X-Forwarded-For: 1.2.3.4\r\nAuthorization: x\r\n",
            b"Cookie: " + b"c" * 8000 + b"\r\n",
        ]
    )
    return Hostile(post(json.dumps(SOUND).encode(), more=more), whole=False, ends=True)


HOSTS = (b"evil.example", b"127.0.0.1.evil.example", b"localhost.evil.example", b"", b"a b", b"localhost@evil.example")


def foreign_host(host: bytes, path: bytes = b"/health") -> Hostile:
    return Hostile(b"GET %s HTTP/1.1\r\nHost: %s\r\n\r\n" % (path, host), frozenset({400, 403, 421}), ends=True)


def _hosts(draw: Random) -> Hostile:
    """A name that is not this machine's, none, or two: what a page in a browser may make of its own name."""
    body = json.dumps(SOUND).encode()
    if draw.random() < 0.3:
        data = post(body, more=b"Host: " + draw.choice(HOSTS) + b"\r\n")
    elif draw.random() < 0.2:
        data = post(body).replace(b"Host: localhost\r\n", b"")
    else:
        data = post(body).replace(b"Host: localhost", b"Host: " + draw.choice(HOSTS))
    return Hostile(data, frozenset({400, 403, 421}), ends=True)


KINDS: dict[str, Callable[[Random], Hostile]] = {
    "foreign hosts": _hosts,
    "bodies that are no JSON": _bad_json,
    "values of other types": _bad_values,
    "out of bounds": _bounds,
    "numbers that are none": _number_literals,
    "odd queries": _queries,
    "paths and methods": _paths,
    "no HTTP": _no_http,
    "lengths": _lengths,
    "bodies too long": _too_much,
    "clients that leave": _gone,
    "several in one packet": _in_one,
    "headers": _headers,
}
