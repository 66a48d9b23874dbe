"""Functions of both HTTP clients: addresses, one request with an answer of limited size, descriptions of failures.
Each client retries in its own way."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import urllib3

from thresher.common.errors import UserError

# Limit of an answer: the passages of a whole batch are some 50 MB.
MOST_BYTES = 2**28
CHAT_PATH = "/chat/completions"  # end of the address of a chat model


def service_address(url: str, path: str, whose: str, example: str, root: str = "") -> str:
    """Return `url` completed by `path`, after `root` if the URL names only a server. UserError for an invalid address,
    with the words `whose` and an `example`."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and not parts.query and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise UserError(f"{url}: is not an address of {whose}; expected one such as {example}")
    given = parts.path.rstrip("/") or root
    return urlunsplit((parts.scheme, parts.netloc, given if given.endswith(path) else given + path, "", ""))


@dataclass(frozen=True, slots=True)
class HttpAnswer:
    """The complete answer of a server."""

    status: int
    headers: Mapping[str, str]
    data: bytes


class TooLarge(Exception):
    """Error for an answer above the size limit; its text is a description."""


class TooSlow(urllib3.exceptions.HTTPError):
    """Error for an answer that was not complete in time."""


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

    TooLarge as soon as more than `most` decompressed bytes have arrived (None: MOST_BYTES); urllib3's HTTPError if the
    attempt fails. The headers may take longer, because urllib3 limits each read from the socket, and only the reads of
    the body are limited together.
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
        response.release_conn()  # else its place in a pool that blocks stays taken
        raise
    response.release_conn()
    return HttpAnswer(response.status, response.headers, bytes(data))


def json_of(response: HttpAnswer) -> Any:
    """Return the JSON value of the answer; None if it is not JSON."""
    try:
        return json.loads(response.data)
    except (ValueError, RecursionError):
        return None


def chat_reply(response: HttpAnswer) -> str | None:
    """Return the text of a chat completion; None if the answer is not one."""
    answer = json_of(response)
    try:
        reply = answer["choices"][0]["message"]["content"]
    except (TypeError, KeyError, IndexError):
        return None
    return reply if isinstance(reply, str) else None


def in_words(error: Exception, timeout: float, answer: str) -> str:
    """Describe why an attempt failed. answer: name of the answer that did not arrive within `timeout` seconds."""
    if isinstance(error, urllib3.exceptions.ReadTimeoutError | TooSlow):
        return f"{answer} that took longer than {timeout:g} s"
    if isinstance(error, urllib3.exceptions.NewConnectionError | urllib3.exceptions.ConnectTimeoutError):
        return "a connection that could not be made"
    if isinstance(error, urllib3.exceptions.ProtocolError):
        return "a connection that broke"
    return type(error).__name__
