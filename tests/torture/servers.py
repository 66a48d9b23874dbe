"""Attacks over the network, and endurance: hostile requests to our servers, hostile answers to our clients.

A complete request gets an answer in HTTP, never a 500, within seconds; a connection without a valid request may be
closed. Sound requests among them get the same answer as before, while idle and half-sent requests stay open. In the end
the server has printed no traceback, and holds no more memory or descriptors.
"""

import json
import os
import re
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from random import Random
from statistics import linear_regression, median_high
from typing import Any

from torture.harness import TRACEBACK, Campaign, Limits, Outcome, Process, Verdict, refused
from torture.world import EVAL, TRAIN, with_settings

Address = tuple[str, int]

LURKERS = 100  # connections that send nothing, or half a request, and stay open
FLOOD = 300  # idle connections to the live page
PATIENCE = 15.0  # seconds for an answer; with other work on the machine a search takes a while
MAX_BODY = 65_536
GROWTH = 256 << 20  # bytes of memory that a server may keep after the attack
SOUND = {"queries": ["Anna Bell", "Otto Pike"], "topk": 2, "return_scores": True}
ANSWERED = frozenset({200, 400, 404, 405, 408, 411, 413, 414, 415, 417, 426, 431, 501, 503, 505})
FOREIGN = frozenset({400, 403, 421})


@dataclass(frozen=True, slots=True)
class Hostile:
    """Bytes to send. statuses: of valid answers. whole: it is a complete request, which must be answered. ends: no
    other request may follow on its connection. leave: close the connection without reading."""

    data: bytes
    statuses: frozenset[int] = ANSWERED
    whole: bool = True
    ends: bool = False
    leave: bool = False


class Connection:
    """A connection that is opened when it is needed."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._socket: socket.socket | None = None

    def send(self, data: bytes) -> None:
        if self._socket is None:
            self._socket = socket.create_connection(self._address, timeout=PATIENCE)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with suppress(BrokenPipeError, ConnectionResetError):  # refused already; the answer may still be there
            self._socket.sendall(data)

    def answer(self) -> tuple[int, bytes] | None:
        """Return status and body; None if the connection ended without an answer."""
        assert self._socket is not None
        try:
            response = HTTPResponse(self._socket)
            response.begin()
            body = response.read()
        except ConnectionResetError:
            return None
        if response.will_close:
            self.close()
        # The library answers invalid HTTP in HTTP/1.0 and in plain text.
        return response.status, body if response.version == 11 else b""

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None


def requests(campaign: Campaign) -> Iterator[Outcome]:
    served = f"serve-retriever --index {{at}}/flat --max-body {MAX_BODY} --timeout 5 --port 0"
    server = campaign.start(served, Limits(seconds=7200))
    with ExitStack() as lurkers:
        address = address_of(server)
        expected = ask(address)
        for _ in range(LURKERS):
            lurkers.enter_context(lurk(address, campaign.draw))
        connection = Connection(address)
        for _ in range(200):  # memory that grows only once has grown
            attack(connection, campaign.draw)
        before = held(server.pid)
        for number in range(campaign.count(100_000, 5 * len(KINDS))):
            if number % 40 == 0:
                server.running()  # reads its log, which would fill the pipe
                yield ask_soundly(address, expected)
            else:
                yield attack(connection, campaign.draw)
        connection.close()
    until, now = time.monotonic() + PATIENCE, held(server.pid)
    while now[1] > before[1] and time.monotonic() < until:
        time.sleep(0.1)
        now = held(server.pid)
    grown = now[0] - before[0]
    yield Outcome("the server's memory", "right" if grown < GROWTH else "wrong", f"{grown / 2**20:.0f} MiB more")
    fewer: Verdict = "right" if now[1] <= before[1] else "wrong"
    yield Outcome("the server's descriptors", fewer, f"{before[1]}, then {now[1]}")
    server.kill(signal.SIGTERM)
    log = server.wait().err
    yield Outcome("the server's log", "wrong" if TRACEBACK in log else "right", log[-500:] if TRACEBACK in log else "")
    yield from watch(campaign)


def watch(campaign: Campaign) -> Iterator[Outcome]:
    """The live page refuses foreign names, and gives many idle connections a bounded number of threads."""
    page = campaign.start("watch {at}/run --port 0", Limits(seconds=600))
    address = address_of(page)
    two = Hostile(b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n", FOREIGN, ends=True)
    foreign = [Hostile(b"GET / HTTP/1.1\r\nHost: %s\r\n\r\n" % host, FOREIGN, ends=True) for host in HOSTS]
    for one in (*foreign, two):
        yield Outcome("the live page: foreign hosts", *exchange(Connection(address), one))
    with ExitStack() as flood:
        opened = 0
        for _ in range(FLOOD):
            with suppress(OSError):
                flood.enter_context(socket.create_connection(address, timeout=0.1))
                opened += 1
        time.sleep(0.5)
        threads = len(os.listdir(f"/proc/{page.pid}/task"))
        said = f"{threads} threads for {opened} connections"
        yield Outcome("the live page: a flood", "right" if threads < FLOOD // 2 else "wrong", said)
    asked = Hostile(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", frozenset({200}), ends=True)
    until = time.monotonic() + PATIENCE
    while (behind := exchange(Connection(address), asked))[0] == "wrong" and time.monotonic() < until:
        time.sleep(0.1)  # until it notices that the others have gone
    yield Outcome("the live page: behind it", *behind)
    page.kill(signal.SIGTERM)
    page.wait()


def address_of(server: Process) -> Address:
    """Wait until a server listens; return its address."""
    until = time.monotonic() + 60
    printed = re.compile(rb"http://(?:127\.0\.0\.1|localhost):([0-9]+)")
    server.wait_until(lambda: bool(printed.search(b"".join(server.said))) or time.monotonic() > until)
    if found := printed.search(b"".join(server.said)):
        return "127.0.0.1", int(found[1])
    server.kill(signal.SIGKILL)
    raise RuntimeError(f"no server: {server.wait().err}")


def ask(address: Address) -> tuple[int, bytes] | None:
    """Return the answer to a sound request on its own connection."""
    connection = Connection(address)
    connection.send(post(json.dumps(SOUND)))
    answer = connection.answer()
    connection.close()
    return answer


def ask_soundly(address: Address, expected: tuple[int, bytes] | None) -> Outcome:
    """Send a sound request, and repeat it while the server answers 503."""
    until = time.monotonic() + PATIENCE
    try:
        while (answer := ask(address)) is not None and answer[0] == 503 and time.monotonic() < until:
            time.sleep(0.05)
    except (OSError, HTTPException) as error:
        return Outcome("sound requests", "wrong", f"{type(error).__name__}: {error}")
    return Outcome("sound requests", "right" if answer == expected else "wrong", f"got {answer}, before {expected}")


def attack(connection: Connection, draw: Random) -> Outcome:
    kind = draw.choice(KINDS)
    return Outcome(kind, *exchange(connection, make_hostile(kind, draw)))


def exchange(connection: Connection, hostile: Hostile) -> tuple[Verdict, str]:
    """Send one hostile request, and judge the answer."""
    said = f"{hostile.data[:200]!r}: "
    try:
        connection.send(hostile.data)
        answer = None if hostile.leave else connection.answer()
    except (OSError, HTTPException) as error:
        connection.close()
        return "wrong", f"{said}{type(error).__name__}: {error}"
    if hostile.ends or answer is None:
        connection.close()
    if answer is None:
        return ("wrong", f"{said}no answer") if hostile.whole and not hostile.leave else ("refused", said)
    status, body = answer
    if status not in hostile.statuses:
        return "wrong", f"{said}status {status}"
    try:
        json.loads(body or b"null")
    except ValueError:
        if status != 200:  # /metrics is text
            return "wrong", f"{said}a body that is not JSON: {body[:80]!r}"
    return ("read" if status == 200 else "refused"), said


def lurk(address: Address, draw: Random) -> socket.socket:
    """Open a connection that sends nothing more."""
    lurker = socket.create_connection(address, timeout=PATIENCE)
    lurker.sendall(draw.choice([b"", b"P", b"POST /retrieve HTTP/1.1\r\n", post("{", length=MAX_BODY)]))
    return lurker


def held(pid: int) -> tuple[int, int]:
    """Return the resident bytes and open descriptors of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(f"/proc/{pid}/fd"))


# Requests.


def post(body: bytes | str, path: str = "/retrieve", length: int | None = None, more: bytes = b"") -> bytes:
    body = body.encode() if isinstance(body, str) else body
    size = len(body) if length is None else length
    return b"POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n%s\r\n%s" % (path.encode(), size, more, body)


KINDS = (
    *("foreign hosts", "bodies that are no JSON", "values of other types", "out of bounds", "numbers that are none"),
    *("odd queries", "paths and methods", "no HTTP", "lengths", "bodies too long", "clients that leave"),
    *("several in one packet", "headers"),
)
HOSTS = (b"evil.example", b"127.0.0.1.evil.example", b"localhost.evil.example", b"", b"a b", b"localhost@evil.example")
JUNK = (None, True, -1, 0, 1.5, "", "x", [], {}, [[]], [None], [1], 10**30, "\ud800", "\x00", {"a": {}})
FIELDS = {
    "/retrieve": ("queries", "topk", "return_scores"),
    "/search": ("query", "top_n", "return_score"),
    "/batch_search": ("query", "top_n", "return_score"),
}
NO_JSON = (
    *(b"", b"{", b"[]", b"null", b"7", b'"x"', b"\xff\xfe", b'{"queries":', b"{'queries': ['a']}", b"[" * 30_000),
    *(b'{"a":' * 9_000, b'{"queries": ["a"]} x', b'{"queries": ["\xed\xa0\x80"]}', b"\x00" * 50),
)
NO_NUMBERS = (b"NaN", b"Infinity", b"1e999", b"-0", b"1e1", b"9" * 5000, b"0x1", b"1_0", b"01")
ODD_QUERIES = ("\x00", "<answer>", "\u202e", "a" * 20_000, "\U0010ffff" * 99, " ", "%00", "' OR 1=1", "é\u0301")
PATHS = ("/", "//", "/../../etc/passwd", "/retrieve/", "/%2e%2e", "*", "/retrieve?x=" + "y" * 900, "/RETRIEVE")
METHODS = ("GET", "PUT", "DELETE", "OPTIONS", "TRACE", "POST", "PATCH", "get", "X")
GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n"
NO_HTTP = (
    b"GET / HTTP/9.9\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost h\r\n\r\n",
    b"GET / HTTP/1.1\r\n: x\r\n\r\n",
    b"GET  / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    b"POST /retrieve HTTP/1.1\nHost: localhost\n\n",
    GET + b"a: b\r\n" * 9000 + b"\r\n",
    b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
    GET + b"x: \x00\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
)
POST = b"POST /retrieve HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n"
LENGTHS = (
    POST + b"Content-Length: -1\r\n\r\n",
    POST + b"Content-Length: 1e3\r\n\r\n",
    POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
    POST + b"Content-Length: 99999999999999999999\r\n\r\n",
    POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    *(CHUNKED + rest for rest in (b"\r\nZZ\r\n", b"\r\n-1\r\nx\r\n", b"\r\n2\r\n{}\r\n0\r\n\r\n")),
    POST + b"Transfer-Encoding: gzip\r\n\r\n",
    POST + b"\r\n",
)
HEADERS = (
    b"Expect: 100-continue\r\n",
    b"Expect: nonsense\r\n",
    b"Connection: upgrade\r\nUpgrade: websocket\r\n",
    b"Content-Type: application/xml\r\n",
    b"Content-Encoding: gzip\r\n",
    b"X-Forwarded-For: 1.2.3.4\r\nAuthorization: x\r\n",
    b"Cookie: " + b"c" * 8000 + b"\r\n",
)


def make_hostile(kind: str, draw: Random) -> Hostile:
    sound = post(json.dumps(SOUND))
    match kind:
        case "foreign hosts":  # a name that is not this machine's, none, or two, as a page in a browser may cause
            host, chance = draw.choice(HOSTS), draw.random()
            if chance < 0.3:
                return Hostile(post(json.dumps(SOUND), more=b"Host: " + host + b"\r\n"), FOREIGN, ends=True)
            replaced = b"" if chance < 0.44 else b"Host: " + host + b"\r\n"
            return Hostile(sound.replace(b"Host: localhost\r\n", replaced), FOREIGN, ends=True)
        case "bodies that are no JSON":
            return Hostile(post(draw.choice(NO_JSON), draw.choice(list(FIELDS))), frozenset({400}))
        case "values of other types":
            path, names = draw.choice(list(FIELDS.items()))
            value: dict[str, Any] = {names[0]: "a" if path == "/search" else ["a", "b"]}
            others = draw.sample([*names, "k", "", "__proto__"], draw.randint(0, 2))
            value |= {name: draw.choice(JUNK) for name in others}
            return Hostile(post(json.dumps(value), path), frozenset({200, 400, 503}))
        case "out of bounds":
            value = {"queries": ["a"], "topk": draw.choice([0, -1, 101, 65, 10**18, 2**63, -(2**64)])}
            if draw.random() < 0.3:
                value = {"queries": ["a"] * 9000, "topk": 1}
            return Hostile(post(json.dumps(value)), frozenset({400}))
        case "numbers that are none":
            return Hostile(post(b'{"queries": ["a"], "topk": %s}' % draw.choice(NO_NUMBERS)), frozenset({400}))
        case "odd queries":
            value = {"queries": [draw.choice(ODD_QUERIES), "Anna"], "topk": 1}
            return Hostile(post(json.dumps(value)), frozenset({200, 400}))
        case "paths and methods":
            line = (
                f"{draw.choice(METHODS)} {draw.choice(PATHS)} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
            )
            return Hostile(line.encode(), ends=True)
        case "no HTTP":  # the server may wait for the rest of a possible head
            hello = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(50) + b"\r\n\r\n"
            data = draw.choice((*NO_HTTP, hello, draw.randbytes(200) + b"\r\n\r\n"))
            return Hostile(data, whole=False, ends=True)
        case "lengths":
            return Hostile(draw.choice(LENGTHS), whole=False, ends=True)
        case "bodies too long":
            data = post(b"x" * (MAX_BODY + draw.choice([1, 100, MAX_BODY])))
            chunks = CHUNKED + b"\r\n" + b"%x\r\n%s\r\n" % (8192, b"x" * 8192) * 10 + b"0\r\n\r\n"
            return Hostile(draw.choice((data, chunks)), frozenset({413}), ends=True)
        case "clients that leave":
            return Hostile(sound[: draw.randrange(1, len(sound) + 1)], leave=True)
        case "several in one packet":  # invalid HTTP may have its whole packet refused
            behind = draw.choice([b"GET", b"\x00\x00", post('{"queries": 7}'), sound[:30]])
            return Hostile(sound + behind, frozenset({200, 400} if b"\x00" in behind else {200}), ends=True)
        case _:  # headers
            return Hostile(post(json.dumps(SOUND), more=draw.choice(HEADERS)), whole=False, ends=True)


# Hostile servers, in a fork: each answers every request in one way, for as long as the client reads. The client's
# command must end in a sentence, within its own limits of time and within 2 GiB.

SECONDS = 120.0  # lifetime of a server
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
SHORT = ("retrieval.patience=1", "retrieval.timeout=3", "judge.retry_seconds=1", "judge.timeout=3")
ASKED = {
    "for passages": with_settings(f"{EVAL} --url {{url}}", *SHORT),
    "for answers": with_settings(f"{EVAL} --answer-url {{url}} --answer-model m", *SHORT),
}


def whole(body: bytes) -> bytes:
    return HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


# The first bytes, the bytes that are repeated after them, and the seconds between two pieces.
ANSWERS: dict[str, tuple[bytes, bytes, float]] = {
    "an endless body": (HEAD + b"\r\n{", b" " * 65536, 0.0),
    "endless chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b" " * 65536 + b"\r\n", 0.0),
    "a length of 10^15": (HEAD + b"Content-Length: 1000000000000000\r\n\r\n", b" " * 65536, 0.0),
    "endless headers": (HEAD, b"X-A: " + b"b" * 1000 + b"\r\n", 0.0),
    "an endless first line": (b"HTTP/1.1 200 ", b"b" * 65536, 0.0),
    "a byte a second": (HEAD + b"Content-Length: 1000\r\n\r\n", b" ", 1.0),
    "a huge integer": (whole(b'{"passages": %s, "index": "x", "result": [], "n": 1}' % (b"9" * 5000)), b"", 0.0),
    "a deep answer": (whole(b"[" * 200_000), b"", 0.0),
    "no JSON": (whole(b"\xff\x00"), b"", 0.0),
    "another type": (whole(b'[{"choices": 7}]'), b"", 0.0),
    "to another place": (b"HTTP/1.1 302 X\r\nLocation: /again\r\nContent-Length: 0\r\n\r\n", b"", 0.0),
    "nothing": (b"", b"", 0.0),
}


def answers(campaign: Campaign) -> Iterator[Outcome]:
    for asked, answer in campaign.some([(asked, answer) for asked in ASKED for answer in ANSWERS], 2):
        yield try_answer(campaign, asked, ASKED[asked], answer, Limits(seconds=75, memory=2 << 30))


def try_answer(campaign: Campaign, kind: str, words: str, answer: str, limits: Limits) -> Outcome:
    first, more, pause = ANSWERS[answer]
    until = time.monotonic() + SECONDS

    def serve() -> int:
        while time.monotonic() < until:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                connection.settimeout(5)
                connection.recv(1 << 16)
                connection.sendall(first)
                while more and time.monotonic() < until:
                    connection.sendall(more)
                    time.sleep(pause)
        return 0

    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        server = campaign.start(serve, Limits(seconds=SECONDS))
        ended = campaign.play(campaign.words(words, url=url), limits)
        server.kill(signal.SIGKILL)
        server.wait()
    campaign.clear()
    return refused(kind, answer, ended)


# Endurance: a long run of small steps, which evaluates, saves and prunes, with flat memory and descriptors.

RISE = 16 << 20  # bytes that a line fitted to the memory may rise; in ten minutes a leak of a few kB per step shows
Look = tuple[float, int, int]  # seconds since the beginning, resident bytes, open descriptors


def endurance(campaign: Campaign) -> Iterator[Outcome]:
    seconds = max(4.0, 600.0 * campaign.scale)
    kept = ("run.save_every=5", "run.keep_checkpoints=1", "run.keep_trajectories=100")
    started = campaign.start(with_settings(TRAIN, "run.steps=1000000", *kept), Limits(seconds=seconds + 600))
    begun, looks = time.monotonic(), list[Look]()
    while time.monotonic() - begun < seconds and started.running():
        looks.append((time.monotonic() - begun, *held(started.pid)))
        time.sleep(0.2)
    alive = started.running()
    started.kill(signal.SIGKILL)
    ended, metrics = started.wait(), campaign.out / "metrics.jsonl"
    steps = metrics.read_bytes().count(b'"reward"') if metrics.exists() else 0
    campaign.clear()
    fault = None if alive else ended.fault or f"ended with status {ended.status}"
    yield Outcome("steps", "wrong" if fault or not steps else "right", fault or f"{steps} in {seconds:.0f} s")
    yield judge_memory(looks)
    yield judge_descriptors(looks)


def judge_memory(looks: Sequence[Look]) -> Outcome:
    """Judge the rise of a line fitted to resident memory after the first third, in which caches fill."""
    late = looks[len(looks) // 3 :]
    if len(late) < 3:
        return Outcome("memory", "wrong", "the run was over before there was anything to see")
    times = [look[0] for look in late]
    rise = linear_regression(times, [look[1] for look in late]).slope * (times[-1] - times[0])
    said = f"{rise / 2**20:+.1f} MiB in {times[-1] - times[0]:.0f} s, at {late[-1][1] / 2**20:.0f} MiB"
    return Outcome("memory", "right" if rise < RISE else "wrong", said)


def judge_descriptors(looks: Sequence[Look]) -> Outcome:
    """Judge the descriptors: the median of the last third must not exceed the maximum before it. Two files that are
    open for a moment may overlap for the first time in the last third, but a leak stays."""
    counts = [look[2] for look in looks]
    end = 2 * len(counts) // 3
    before, after = max(counts[:end], default=0), median_high(counts[end:] or [0])
    return Outcome("descriptors", "right" if 0 < after <= before else "wrong", f"{before}, then {after}")
