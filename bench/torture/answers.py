"""Hostile servers: one that a command asks for passages or answers, and that answers without end.

The server runs in a fork and answers every request in the same way. The command must end in a sentence, within its own
limits of time and within `MEMORY` bytes.
"""

import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from thresher.bench.torture.attack import Field, Tried, tried
from thresher.bench.torture.kills import clear
from thresher.bench.torture.worker import ForkLimits
from thresher.bench.torture.world import eval_words

LEAST = 2
MEMORY = 2 << 30
LIMITS = ForkLimits(seconds=75, memory=MEMORY)
SECONDS = 120.0  # that a server lives
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
PATIENCE = [
    word
    for key in ("retrieval.patience=1", "retrieval.timeout=3", "judge.retry_seconds=1", "judge.timeout=3")
    for word in ("--set", key)
]


def _whole(body: bytes) -> bytes:
    return HEAD + b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


# What is sent first, what is sent again and again behind it, and the seconds between two pieces.
ANSWERS: dict[str, tuple[bytes, bytes, float]] = {
    "an endless body": (HEAD + b"\r\n{", b" " * 65536, 0.0),
    "endless chunks": (HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"10000\r\n" + b" " * 65536 + b"\r\n", 0.0),
    "a length of 10^15": (HEAD + b"Content-Length: 1000000000000000\r\n\r\n", b" " * 65536, 0.0),
    "endless headers": (HEAD, b"X-A: " + b"b" * 1000 + b"\r\n", 0.0),
    "an endless first line": (b"HTTP/1.1 200 ", b"b" * 65536, 0.0),
    "a byte a second": (HEAD + b"Content-Length: 1000\r\n\r\n", b" ", 1.0),
    "a huge integer": (_whole(b'{"passages": %s, "index": "x", "result": [], "n": 1}' % (b"9" * 5000)), b"", 0.0),
    "a deep answer": (_whole(b"[" * 200_000), b"", 0.0),
    "no JSON": (_whole(b"\xff\x00"), b"", 0.0),
    "another type": (_whole(b'[{"choices": 7}]'), b"", 0.0),
    "to another place": (b"HTTP/1.1 302 X\r\nLocation: /again\r\nContent-Length: 0\r\n\r\n", b"", 0.0),
    "nothing": (b"", b"", 0.0),
}
Words = Callable[[Path, Path, str], list[str]]
ASKED: dict[str, Words] = {
    "for passages": lambda at, out, url: [*eval_words(at, out), "--url", url, *PATIENCE],
    "for answers": lambda at, out, url: [*eval_words(at, out), "--answer-url", url, "--answer-model", "m", *PATIENCE],
}


def attack(field: Field) -> Iterator[Tried]:
    """Every answer to every question, at full scale."""
    draw = field.draw("answers")
    pairs = [(asked, answer) for asked in ASKED for answer in ANSWERS]
    for asked, answer in draw.sample(pairs, min(len(pairs), field.count(len(pairs), LEAST))):
        one = try_answer(field, ASKED[asked], answer, LIMITS)
        yield Tried(asked, one.verdict, one.what)


def try_answer(field: Field, words: Words, answer: str, limits: ForkLimits) -> Tried:
    """A command, and a server that answers it so."""
    out = field.scratch / "out"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        server = field.worker.start_call(lambda: serve(listening, *ANSWERS[answer]), ForkLimits(seconds=SECONDS))
        ended = field.worker.play(words(field.at, out, url), limits)
        server.kill(signal.SIGKILL)
        server.wait()
    clear(out)
    return tried("answers", answer, ended)


def serve(listening: socket.socket, first: bytes, more: bytes, pause: float) -> int:
    """Answer one connection after the other, each for as long as somebody reads."""
    until = time.monotonic() + SECONDS
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
