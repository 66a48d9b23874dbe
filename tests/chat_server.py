"""A small chat model's server for tests: it replies according to a script and records its requests."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def completion(text: str | None) -> dict[str, Any]:
    """Return a whole answer, in the chunks that servers send."""
    message = {"role": "assistant", "content": text}
    return {"id": "c", "object": "chat.completion", "choices": [{"index": 0, "message": message}], "usage": {}}


def _last(request: dict[str, Any]) -> str:
    return str(request["messages"][-1]["content"] if "messages" in request else request["prompt"])


class ChatServer:
    """A server. script: one answer per request: a text to reply, (status, body) or (status, body, headers), a word
    ("break", "half", "drip", "sleep"), or a function that returns one of these after any time. When it is empty, the
    text is `reply(content of the last message)`."""

    def __init__(self) -> None:
        self.script: list[Any] = []
        self.reply: Callable[[str], str] = lambda content: f"re: {content}"
        self.asked: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.keys: list[str | None] = []
        self.hold: threading.Barrier | None = None  # requests wait for each other at it
        self._lock = threading.Lock()
        stub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *arguments: Any) -> None:
                pass

            def do_POST(self) -> None:
                request = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with stub._lock:
                    stub.paths.append(self.path)
                    stub.keys.append(self.headers.get("authorization"))
                    stub.asked.append(request)
                    said = stub.script.pop(0) if stub.script else stub.reply(_last(request))
                if callable(said):
                    said = said()
                if stub.hold is not None:
                    with suppress(threading.BrokenBarrierError):
                        stub.hold.wait(5)
                if said == "break":
                    # A linger time of 0 turns the close into a reset.
                    self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    self.close_connection = True
                elif said == "half":
                    self.wfile.write(b'HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n{"choices": ')
                    self.close_connection = True
                elif said == "drip":
                    self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n")
                    with suppress(ConnectionError):
                        for _ in range(40):
                            self.wfile.write(b" ")
                            time.sleep(0.05)
                    self.close_connection = True
                elif said == "sleep":
                    threading.Event().wait(1.5)
                    self.close_connection = True
                elif isinstance(said, str):
                    self.answer(200, completion(said))
                else:
                    self.answer(*said)

            def answer(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self._thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> ChatServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()
