"""What our two HTTP clients share: an address made whole, an answer as JSON, a failed attempt in words.

Deliberately absent: retries and patience, which differ: searches of a run wait for one server in turn, requests to a
chat model run side by side and are called off together.
"""

import json
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import urllib3

from thresher.rewards.errors import UserError


def service_address(url: str, path: str, whose: str, example: str, root: str = "") -> str:
    """`url` with `path` at its end, or behind `root` where it names a server alone. UserError for one that is none, in
    words of `whose` address it should be, with an `example`."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and parts.hostname and not parts.query and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise UserError(f"{url}: is no address of {whose}; expected one such as {example}")
    given = parts.path.rstrip("/") or root
    return urlunsplit((parts.scheme, parts.netloc, given if given.endswith(path) else given + path, "", ""))


def json_of(response: urllib3.BaseHTTPResponse) -> Any:
    """The response's value; None where it holds no JSON."""
    try:
        return json.loads(response.data)
    except (ValueError, RecursionError):
        return None


def in_words(error: Exception, timeout: float, answer: str) -> str:
    """Why an attempt failed; `answer` is what did not come within `timeout` seconds."""
    if isinstance(error, urllib3.exceptions.ReadTimeoutError):
        return f"{answer} that took longer than {timeout:g} s"
    if isinstance(error, urllib3.exceptions.NewConnectionError | urllib3.exceptions.ConnectTimeoutError):
        return "a connection that could not be made"
    if isinstance(error, urllib3.exceptions.ProtocolError):
        return "a connection that broke"
    return type(error).__name__
