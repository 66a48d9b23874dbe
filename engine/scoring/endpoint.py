"""HTTP client of chat models with OpenAI's /v1/chat/completions: retries, concurrency, replies stored on disk.

    endpoint = Endpoint("http://127.0.0.1:8000", "qwen", replies=folder / "replies.jsonl")
    texts = endpoint.complete([[{"role": "user", "content": "Who wrote Emma?"}]])

Each reply is appended to a file as soon as it has arrived, under the digest of everything that decides it (model,
messages, temperature, max_tokens; not the address), so that a run that died requests only the rest.

A request to a server that is unreachable, overloaded or slow (no connection, 408, 425, 429, 5xx) is repeated after
pauses that double, or as long as its Retry-After says, until patience ends. A reply that cannot be used is requested
once more. Any other refusal is final. Each ends in a UserError. Not supported: streaming, tools, several samples of one
request, proxies.
"""

import hashlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import as_completed, wait
from contextlib import nullcontext
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import urllib3

from thresher.common import console
from thresher.common.background import Background
from thresher.common.errors import UserError
from thresher.common.files import Unwritable
from thresher.common.http import (
    CHAT_PATH,
    HttpAnswer,
    TooLarge,
    chat_reply,
    in_words,
    json_of,
    request,
    service_address,
)
from thresher.common.locks import locked_in_turn
from thresher.common.records import RecordLog
from thresher.engine.config.sections import JudgeSection

Messages = Sequence[Mapping[str, str]]

CONNECT_SECONDS = 10.0
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
PASSING = frozenset({408, 425, 429})  # transient statuses, like all from 500 on
# A final refusal that comes with a status that is otherwise transient.
FINAL_CODES = frozenset({"insufficient_quota"})


class _Passing(Exception):
    """Error for a failure that may be transient. after: seconds that the server asks to wait."""

    def __init__(self, words: str, after: float = 0.0) -> None:
        super().__init__(words)
        self.after = after


class Unusable(Exception):
    """Error for a reply that is complete and cannot be used."""


class _Called(Exception):
    """Error for a request that is cancelled because another has failed."""


class Replies:
    """Replies by the digest of their request, in memory and, if there is a path, as stored records on disk. The file
    and its folders are created with the first reply. UserError for a file that cannot be read or written, was changed,
    or holds a line of another kind. Threads and processes may share a file."""

    def __init__(self, path: str | Path | None = None) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, str] = {}
        self._log = None if path is None else self._opened(Path(path), alone=not os.path.lexists(path))

    def _opened(self, path: Path, alone: bool = False) -> RecordLog:
        """Return the log of a file, and add its replies to the known ones. alone: the file is not locked."""
        with nullcontext() if alone else locked_in_turn(path):
            return self._read(path)

    def _read(self, path: Path) -> RecordLog:
        try:
            path.open("rb").close()
        except FileNotFoundError:
            pass
        except OSError as error:
            raise UserError(f"{path}: cannot be used ({error.strerror}); name another file") from None
        log = RecordLog(path, remedy="put a copy back, or remove the file")
        for number, record in log.recover():
            key, reply = record.get("key"), record.get("reply")
            if not isinstance(key, str) or not isinstance(reply, str):
                raise UserError(f'{path}:{number}: expected an object with "key" and "reply"; remove the file')
            self._known[key] = reply
        return log

    def get(self, key: str) -> str | None:
        with self._lock:
            return self._known.get(key)

    def put(self, key: str, request: Mapping[str, Any], reply: str) -> None:
        """Store a reply; when this returns, it survives a kill of the process."""
        with self._lock:
            self._known[key] = reply
            if self._log is None:
                return
            try:
                self._log.path.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise Unwritable(self._log.path, error) from None
            with locked_in_turn(self._log.path):
                if self._log.path.exists() and not self._log.as_left:  # another endpoint has stored something since
                    self._log = self._read(self._log.path)
                self._log.append({"key": key, "request": request, "reply": reply})


class Endpoint:
    """Client of `model` on the server at `url`: its root, its /v1, or the whole address of its chat completions.

    key: sent as a bearer token, and never shown. timeout: seconds to wait for one reply. patience: seconds to retry an
    unreachable server. concurrency: number of concurrent requests. replies: the file that stores them, None for memory
    only. say: called, from any thread, when the waiting begins and ends. path: the end of the address. UserError for an
    invalid `url`, and for `replies` as in Replies.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key: str | None = None,
        timeout: float = 120.0,
        patience: float = 300.0,
        concurrency: int = 4,
        replies: str | Path | None = None,
        say: Callable[[str], None] = lambda _: None,
        path: str = CHAT_PATH,
    ) -> None:
        self.url, self.model = _address(url, path), model
        self.requests = 0  # number sent to the server so far, repeated ones included
        self._key = key
        self._timeout, self._patience, self._concurrency, self._say = timeout, patience, concurrency, say
        self._replies = Replies(replies)
        self._kept = "all replies so far are kept in memory only" if replies is None else f"{replies} keeps all replies"
        self._pool = urllib3.PoolManager(num_pools=1, maxsize=concurrency, block=True, retries=False)
        self._lock = threading.Lock()

    def complete(
        self,
        conversations: Sequence[Messages],
        *,
        temperature: float = 0.0,
        max_tokens: int = 512,
        usable: Callable[[str], bool] = lambda _: True,
    ) -> list[str]:
        """Return the reply to each conversation, a list of {"role", "content"}.

        A reply that is not `usable` is not stored, and is requested once more. When one request fails, those in
        progress are finished and stored, no other is begun, and its UserError is raised.
        """
        asked = {"model": self.model, "temperature": temperature, "max_tokens": max_tokens}
        return self.replies(
            [asked | {"messages": [dict(message) for message in messages]} for messages in conversations], usable
        )

    def replies(self, bodies: Sequence[dict[str, Any]], usable: Callable[[str], bool] = lambda _: True) -> list[str]:
        """Return the result of `_read` for the answer to each request, a JSON object; otherwise as `complete`."""
        keys = [hashlib.sha256(json.dumps(body, sort_keys=True).encode("ascii")).hexdigest() for body in bodies]
        requests = dict(zip(keys, bodies, strict=True))
        # A stored reply may be usable to one caller and not to another.
        known = {key: reply for key in requests if (reply := self._replies.get(key)) is not None and usable(reply)}
        missing = {key: request for key, request in requests.items() if key not in known}
        known |= self._ask_all(missing, usable)
        return [known[key] for key in keys]

    def _ask_all(self, requests: Mapping[str, dict[str, Any]], usable: Callable[[str], bool]) -> dict[str, str]:
        if not requests:
            return {}
        called_off = threading.Event()
        with Background[str](self._concurrency, "endpoint") as threads:
            asked = {
                key: threads.submit(partial(self._ask, key, request, usable, called_off))
                for key, request in requests.items()
            }
            try:
                with console.stage("replies", len(asked)) as line:
                    for done, future in enumerate(as_completed(asked.values()), 1):
                        if future.exception() is not None:
                            break
                        line.to(done, "")
                called_off.set()
                wait(asked.values())
            finally:  # an interrupt does not wait for any
                called_off.set()
        failures = [future.exception() for future in asked.values()]
        for failure in failures:
            if failure is not None and not isinstance(failure, _Called):
                raise failure
        return {key: future.result() for key, future in asked.items()}

    def _ask(
        self, key: str, request: dict[str, Any], usable: Callable[[str], bool], called_off: threading.Event
    ) -> str:
        """Request one reply, store and return it. UserError if there is none; then no other request begins."""
        try:
            reply = self._usable_reply(request, usable, called_off)
            self._replies.put(key, request, reply)
            return reply
        except BaseException:
            called_off.set()
            raise

    def _usable_reply(self, request: dict[str, Any], usable: Callable[[str], bool], called_off: threading.Event) -> str:
        failure = ""
        for _ in range(2):
            try:
                reply = self._read(self._send(json.dumps(request).encode("ascii"), called_off))
            except Unusable as error:
                failure = str(error)
                continue
            if usable(reply):
                return reply
            asked = request["messages"][-1].get("content", "") if "messages" in request else request.get("prompt", "")
            failure = f"an unusable reply to {shown(asked)}, {shown(reply)}"
        raise UserError(f"{self.url}: {self.model} gave, twice, {failure}; name another model or server ({self._kept})")

    def _send(self, body: bytes, called_off: threading.Event) -> HttpAnswer:
        """Return the server's answer with status 200, after any number of attempts. UserError if it refuses, or
        patience ends."""
        deadline, pause = None, FIRST_PAUSE
        while True:
            if called_off.is_set():
                raise _Called
            try:
                response = self._attempt(body)
            except _Passing as failure:
                now = time.monotonic()
                if deadline is None:
                    deadline = now + self._patience
                    self._say(f"{self.url}: no reply ({failure}); asking again for up to {self._patience:g} s")
                if now >= deadline:
                    raise UserError(
                        f"{self.url}: no reply for {self._patience:g} s ({failure}); check the server and run this "
                        f"again ({self._kept})"
                    ) from None
                if now + failure.after > deadline:  # the server forbids an earlier request
                    raise UserError(
                        f"{self.url}: asks for a pause of {failure.after:g} s ({failure}), more than the patience of "
                        f"{self._patience:g} s; raise it, or run this again later ({self._kept})"
                    ) from None
                called_off.wait(max(failure.after, min(pause, deadline - now)))
                pause = min(2 * pause, LONGEST_PAUSE)
            else:
                if deadline is not None:
                    self._say(f"{self.url}: replies again")
                return response

    def _attempt(self, body: bytes) -> HttpAnswer:
        headers = {"content-type": "application/json"}
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        with self._lock:
            self.requests += 1
        try:
            response = request(self._pool, "POST", self.url, body, headers, self._timeout, CONNECT_SECONDS)
        except TooLarge as error:
            raise UserError(f"{self.url}: sends {error}; give the address of a chat model ({self._kept})") from None
        except urllib3.exceptions.HTTPError as error:
            raise _Passing(in_words(error, self._timeout, "a reply")) from None
        if response.status == 200:
            return response
        reason, code = _reason(response)
        if self._key is not None:
            reason = reason.replace(self._key, "...")
        words = f"status {response.status}{f' ({reason})' if reason else ''}"
        if (response.status in PASSING or response.status >= 500) and code not in FINAL_CODES:
            raise _Passing(words, _retry_after(response))
        raise UserError(f"{self.url}: refused a request with {words}; fix what it names ({self._kept})")

    def _read(self, response: HttpAnswer) -> str:
        reply = chat_reply(response)
        if reply is None:
            got = shown(response.data[:400].decode("utf-8", "replace"))
            raise Unusable(f"no text at choices[0].message.content, where a chat completion has it, but {got}")
        return reply


def load_endpoint(
    section: JudgeSection, allow_keys: Collection[str] = (), say: Callable[[str], None] = lambda _: None
) -> Endpoint:
    """Return the endpoint of a recipe's [judge], and print its address by `say`.

    A recipe names both an environment variable and an address, and may come from anyone. So a key is sent only to a
    host that allow_keys allows for its variable: "VARIABLE@HOST", with the port if the address has one. UserError if
    that is missing, if the recipe names no chat model, and if the variable is not set.
    """
    if section.url is None or section.model is None:
        raise UserError("a chat model must be asked, but the recipe names none; add judge.url and judge.model")
    variable, address = section.key_env, _address(section.url, CHAT_PATH)
    if variable is not None and (wanted := key_at(variable, address)) not in allow_keys:
        raise UserError(
            f"judge.key_env: the recipe would send the key in {variable} to {address}; allow it, if that is what you "
            f"want, with --allow-key {wanted}"
        )
    say(f"verdicts of {section.model} come from {address}" + (f", with the key in {variable}" if variable else ""))
    return Endpoint(
        section.url,
        section.model,
        key=None if section.key_env is None else read_key(section.key_env),
        timeout=section.timeout,
        patience=section.retry_seconds,
        concurrency=section.concurrency,
        replies=section.replies,
        say=say,
    )


def key_at(variable: str, address: str) -> str:
    """Return the name in `allow_keys` of a variable and the host of an address, as the client will connect to it."""
    parts = urllib3.util.parse_url(address)
    return f"{variable}@{parts.host}" + (f":{parts.port}" if parts.port else "")


def read_key(variable: str) -> str:
    """Return the key in an environment variable. UserError if it is not set, or cannot be sent in a header."""
    key = os.environ.get(variable, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        state = "has characters that no key has" if key else "is not set"
        raise UserError(f"the environment variable {variable}, which should hold the server's key, {state}; export it")
    return key


def _address(url: str, path: str) -> str:
    """Return the address of the (chat) completions; a secret in it is refused, because addresses are printed."""
    address = service_address(url, path, "a chat model's server", "http://127.0.0.1:8000/v1", root="/v1")
    parts = urlsplit(address)
    if "@" in parts.netloc:
        raise UserError(f"{parts.hostname}: the address holds a secret; leave it out and name its variable in key_env")
    return address


def _reason(response: HttpAnswer) -> tuple[str, str]:
    """Return a server's reason for a refusal, in one line, and its code: OpenAI's {"error": {"message", "code"}}, or
    {"error": text}, {"message": text} or {"detail": text} as others do."""
    report = json_of(response)
    if not isinstance(report, dict):
        return "", ""
    reason = report.get("error", report.get("message", report.get("detail")))
    code = reason.get("code") if isinstance(reason, dict) else None
    words = reason.get("message") if isinstance(reason, dict) else reason
    return _line(words) if isinstance(words, str) else "", code if isinstance(code, str) else ""


def _retry_after(response: HttpAnswer) -> float:
    """Return the seconds that Retry-After asks for, given as a number or as a date; 0 without one."""
    value = response.headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d{1,9}(\.\d+)?", value):
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, TypeError, OverflowError):
        return 0.0


def _line(text: str) -> str:
    """Return a text as one line of at most 200 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 200 else line[:197] + "..."


def shown(text: str) -> str:
    return json.dumps(_line(text), ensure_ascii=False)
