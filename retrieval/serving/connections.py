"""The open connections of the retrieval server: aiohttp's low-level server, and a limit on what each may take.

aiohttp reads and writes HTTP: heads of bounded size, chunks, connections that are kept, and, where a request was
refused before all of it had come, what still comes, so that its sender sees the refusal. What is no HTTP gets aiohttp's
own 400. What it leaves to its user is here:

- A connection that is waited for, because no whole request has come or the last answer is not read, is ended after
  IDLE_SECONDS, and a body has `Settings.timeout` to arrive.
- Those that wait count against nobody. When there are as many connections as the process may have descriptors, or
  unfinished bodies hold BODIES times the largest one, whoever has waited longest makes room.
- Who has gone is not searched for.

Deliberately absent: limits for each address, which a proxy in front has.
"""

import asyncio
import logging
import resource
import socket
import time
from dataclasses import dataclass
from functools import partial
from itertools import islice

from aiohttp import web

from thresher.retrieval.serving.app import App, Reply
from thresher.retrieval.serving.wire import Refused

# A client whose connection was closed while it did other things opens another.
IDLE_SECONDS = 60.0
LINGER_SECONDS = 30.0  # for the rest of a refused body to be read and dropped
BODIES = 64  # of the largest size, or their like in shorter ones, may be unfinished at a time
ACCEPTED = 64  # connections that a turn of the event loop takes from the system's queue,
QUEUE = 1024  # which is so long
SPARE = 5 * ACCEPTED  # descriptors for who comes in the few turns that it takes others to go, and for the index
FEWEST = 64  # connections that are allowed wherever we run
CLOSE = (("connection", "close"),)  # the rest of a body is not waited for

# A line for each broken request helps nobody.
SILENT = logging.Logger("aiohttp.silent", logging.CRITICAL + 1)


@dataclass(slots=True)
class _State:
    since: float  # when it was last heard of, or began to wait
    reading: int = 0  # bytes of an unfinished body
    busy: bool = False  # a request is being read or served
    served: bool = False  # it is not to be ended: its request has arrived


class Connections:
    """All of them. To be made in a running event loop."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._server = web.Server(
            self._handle,
            handler_cancellation=True,
            auto_decompress=False,
            access_log=None,
            logger=SILENT,
            lingering_time=LINGER_SECONDS,
        )
        self._most = max(FEWEST, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - SPARE)
        # Whoever has waited longest is first.
        self._states: dict[web.RequestHandler, _State] = {}
        self._bodies = 0  # bytes of unfinished ones
        self._closing = False

    def __len__(self) -> int:
        return len(self._server.connections)

    async def listen(self, listening: socket.socket) -> asyncio.Server:
        loop = asyncio.get_running_loop()
        listener = await loop.create_server(self._accept, sock=listening, backlog=ACCEPTED)
        listening.listen(QUEUE)  # asyncio has one number for both
        return listener

    async def sweep(self) -> None:
        """Ends connections that wait for too long, or are too many; for ever."""
        while True:
            await asyncio.sleep(min(1.0, IDLE_SECONDS / 4))
            late = time.monotonic() - IDLE_SECONDS
            self._make_room()
            for connection, state in list(self._states.items()):
                if not state.busy and state.since < late:
                    _end(connection)

    async def close(self, timeout: float) -> None:
        """What has arrived is answered, for up to so many seconds; who is still sending may send it to the next
        server."""
        self._closing = True
        for connection, state in list(self._states.items()):
            if state.busy and not state.served:
                _end(connection)
        transports = [connection.transport for connection in self._states if connection.transport is not None]
        until = time.monotonic() + timeout
        self._server.pre_shutdown()  # ends those without a request
        await self._server.shutdown(timeout)
        while any(transport.get_write_buffer_size() for transport in transports) and time.monotonic() < until:
            await asyncio.sleep(0.01)

    def end(self) -> None:
        """Ends all of them, answered or not."""
        for connection in self._states:
            _end(connection)

    def _accept(self) -> asyncio.Protocol:
        if len(self._states) >= self._most:
            self._make_room()
        connection = self._server()
        self._states[connection] = _State(time.monotonic())
        return connection

    def _forget(self) -> None:
        """Drops what is known of connections that are lost; those of the last second may not be made yet."""
        recent = time.monotonic() - 1.0
        for connection, state in list(self._states.items()):
            if connection.transport is None and not state.busy and state.since < recent:
                del self._states[connection]

    def _make_room(self) -> None:
        """Ends the connections that have waited longest, until there may be one more."""
        self._forget()
        # Of those just accepted, some may not be made yet.
        waiting = (one for one, state in self._states.items() if not state.served and one.transport is not None)
        for connection in list(islice(waiting, max(0, len(self._states) + 1 - self._most))):
            del self._states[connection]
            _end(connection)

    def _make_room_for_body(self, mine: web.RequestHandler) -> None:
        """Ends the connections that have been sending a body for longest, but for `mine`."""
        for connection, state in list(self._states.items()):
            if self._bodies <= BODIES * self._app.settings.max_body:
                return
            if state.reading and connection is not mine:
                self._bodies -= state.reading
                state.reading = 0
                _end(connection)

    async def _handle(self, request: web.BaseRequest) -> web.Response:
        connection = request.protocol
        state = _State(time.monotonic(), busy=True)
        self._move_back(connection, state)
        try:
            body = partial(self._read_body, request, state)
            answer = await self._app.answer(
                request.method, request.path, request.headers.getall("host", []), body, connection
            )
            return self._response(answer)
        finally:
            self._bodies -= state.reading
            if request.transport is not None:
                self._move_back(connection, _State(time.monotonic()))
            else:
                self._states.pop(connection, None)

    def _move_back(self, connection: web.RequestHandler, state: _State) -> None:
        self._states.pop(connection, None)
        self._states[connection] = state

    def _response(self, answer: Reply) -> web.Response:
        headers = {"content-type": answer.kind, "server": "thresher", **dict(answer.headers)}
        response = web.Response(status=answer.status, body=answer.body, headers=headers)
        if self._closing or CLOSE[0] in answer.headers:
            response.force_close()
        return response

    async def _read_body(self, request: web.BaseRequest, state: _State) -> bytes:
        """Refused for one that is longer than allowed, ends early, is no HTTP, or takes too long."""
        limit, timeout = self._app.settings.max_body, self._app.settings.timeout
        too_long = Refused(413, f"the body is longer than {limit} bytes; ask in several requests", CLOSE)
        if (request.content_length or 0) > limit:
            raise too_long
        if request.headers.get("expect", "").lower() == "100-continue" and request.transport is not None:
            request.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = bytearray()
        try:
            async with asyncio.timeout(timeout):
                async for part in request.content.iter_any():
                    body += part
                    if len(body) > limit:
                        raise too_long
                    self._bodies += len(part)
                    state.reading += len(part)
                    if self._bodies > BODIES * limit:
                        self._make_room_for_body(request.protocol)
        except TimeoutError:
            raise Refused(408, f"the body did not arrive within {timeout:g} s", CLOSE) from None
        except (web.RequestPayloadError, ConnectionError):
            raise Refused(400, "this is not an HTTP request: its body is broken, or ends too early", CLOSE) from None
        self._bodies -= state.reading
        state.reading, state.served = 0, True
        return bytes(body)


def _end(connection: web.RequestHandler) -> None:
    if connection.transport is not None:
        connection.transport.abort()
