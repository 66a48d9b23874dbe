"""Functions of both HTTP clients: an address completed, one request with an answer of limited size, failures in words.
Each client retries in its own way."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import urllib3

from thresher.common.errors import UserError

# Of an answer: the passages of a whole batch are some 50 MB.
MOST_BYTES = 2**28
CHAT_PATH = "/chat/completions"  # what the address of a chat model ends in


def service_address(url: str, path: str, whose: str, example: str, root: str = "") -> str:
    """Put `path` at the end of `url`, or behind `root` where it names a server alone. UserError for no address, in
    words of `whose` it should be, with an `example`."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and not parts.query and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise UserError(f"{url}: is no address of {whose}; expected one such as {example}")
    given = parts.path.rstrip("/") or root
    return urlunsplit((parts.scheme, parts.netloc, given if given.endswith(path) else given + path, "", ""))


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """A server's answer, read to its end."""

    status: int
    headers: Mapping[str, str]
    data: bytes


class TooLarge(Exception):
    """Error for an answer of more bytes than are read, in words."""


class TooSlow(urllib3.exceptions.HTTPError):
    """Error for an answer that is not complete in time."""


def request(
    pool: urllib3.PoolManager,
    method: str,
    url: str,
    body: bytes | None,
    headers: Mapping[str, str],
    seconds: float,
    connect_seconds: float,
    most: int | None = None,
) -> HttpAnswer:
    """Send one request and read the whole answer within `seconds`.

    TooLarge as soon as more than `most` decompressed bytes have come (None: MOST_BYTES); urllib3's HTTPError where the
    attempt fails. The headers may take longer: urllib3 limits each read from the socket, and only reads of the body are
    limited together.
    """
    most = MOST_BYTES if most is None else most
    deadline = time.monotonic() + seconds
    timeout = urllib3.Timeout(connect=min(connect_seconds, seconds), read=seconds)
    response = pool.request(
        method, url, body=body, headers=headers, timeout=timeout, redirect=False, preload_content=False
    )
    data = bytearray()
    try:
        while part := response.read1(2**16):
            data += part
            if len(data) > most:
                raise TooLarge(f"an answer of more than {most:,} bytes")
            if time.monotonic() > deadline:
                raise TooSlow
    except BaseException:
        response.close()
        raise
    response.release_conn()
    return HttpAnswer(response.status, response.headers, bytes(data))


def json_of(response: HttpAnswer) -> Any:
    """Return the answer's JSON value; None where it has none."""
    try:
        return json.loads(response.data)
    except (ValueError, RecursionError):
        return None


def chat_reply(response: HttpAnswer) -> str | None:
    """Return the text of a chat completion; None where the answer is none."""
    answer = json_of(response)
    try:
        reply = answer["choices"][0]["message"]["content"]
    except (TypeError, KeyError, IndexError):
        return None
    return reply if isinstance(reply, str) else None


def in_words(error: Exception, timeout: float, answer: str) -> str:
    """Say why an attempt failed; `answer` is what did not come within `timeout` seconds."""
    if isinstance(error, urllib3.exceptions.ReadTimeoutError | TooSlow):
        return f"{answer} that took longer than {timeout:g} s"
    if isinstance(error, urllib3.exceptions.NewConnectionError | urllib3.exceptions.ConnectTimeoutError):
        return "a connection that could not be made"
    if isinstance(error, urllib3.exceptions.ProtocolError):
        return "a connection that broke"
    return type(error).__name__
