"""A retriever controlled by its queries, a server's description, and one request to a server."""

import http.client
import json
import threading
import time
from collections.abc import Callable
from typing import Any

from thresher.common.errors import UserError
from thresher.retrieval.passages import Passage
from thresher.retrieval.retriever import Hit, Retriever, check_positive
from thresher.retrieval.serving.app import Served
from thresher.retrieval.serving.server import Server

SERVED = Served(passages=9, kind="flat", corpus_sha256="ab" * 32, identity="0123456789abcdef")


class Scripted(Retriever):
    """Returns passages named after the query; a query can also make it fail, or the test make it wait."""

    def __init__(self, passages: int = 9) -> None:
        super().__init__()
        self.passages = passages
        self.searched: list[tuple[list[str], int]] = []
        self.go = threading.Event()
        self.go.set()

    def check_k(self, k: int) -> None:
        check_positive(k, self.passages)

    def _find(self, queries: list[str], k: int) -> list[list[Hit]]:
        self.searched.append((queries, k))
        assert self.go.wait(20)
        if "explode" in queries:
            raise ZeroDivisionError("secret of the index")
        if "mistake" in queries:
            raise UserError("the index is gone; build it again")
        return [[Hit(n, Passage(f"{q}-{n}", f"T{n}", f"about {q}"), 1 / (n + 1)) for n in range(k)] for q in queries]


def ask(
    server: Server | str, path: str, body: Any = None, method: str | None = None
) -> tuple[int, Any, dict[str, str]]:
    """Return (status, parsed JSON or text, headers) of one request on a new connection; `body` is JSON unless bytes."""
    address = (server if isinstance(server, str) else server.url).removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=20)
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    connection.request(method or ("GET" if body is None else "POST"), path, data)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    headers = {name.lower(): value for name, value in response.getheaders()}
    return response.status, json.loads(text) if "json" in headers["content-type"] and text else text, headers


def address(server: Server | str) -> tuple[str, int]:
    host, _, port = (server if isinstance(server, str) else server.url).removeprefix("http://").rpartition(":")
    return host, int(port)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("20 s, and the condition does not hold")
        time.sleep(0.002)
