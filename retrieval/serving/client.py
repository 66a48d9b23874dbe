"""Searches answered by a server: our own, Search-R1's, or another that implements its `/retrieve` (app.py).

All queries of a call are sent in one request, or a few, over a persistent connection. If a server refuses or breaks the
connection, takes too long or is overloaded, the request is repeated after doubling pauses for `patience` seconds. Then,
or if the answer has another shape or is from another index (a header), `Unanswered` is raised.
"""

import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import urllib3

from thresher.common.http import HttpAnswer, TooLarge, in_words, json_of, request, service_address
from thresher.retrieval.retriever import Hit, Retriever, Unanswered, check_positive
from thresher.retrieval.serving.app import IDENTITY_HEADER, Bounds, passage_of

PATH = "/retrieve"
# Queries in one request: the number of samples that decode at once; the answer has a few megabytes.
MAX_BATCH = 1024
MAX_PASSAGES, MAX_CHARACTERS = Bounds().max_passages, Bounds().max_characters
MAX_BYTES = 4 * 2**20  # of the queries in one request, as JSON
CONNECT_SECONDS = 5.0
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
# With one of these statuses, the same request may succeed later.
PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})


class RemoteRetriever(Retriever):
    """Client of the server at `url`, which is its root or the address of its /retrieve.

    timeout: seconds for one answer. patience: seconds that the server may be unavailable. say: called with a sentence
    when the waiting begins and ends.
    """

    elsewhere = True

    def __init__(
        self,
        url: str,
        *,
        timeout: float = 60.0,
        patience: float = 120.0,
        max_batch: int = MAX_BATCH,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__()
        self.url = service_address(url, PATH, "a retrieval server", "http://127.0.0.1:8000")
        self.timeout, self.patience, self.max_batch, self._say = timeout, patience, max_batch, say
        self.retries = 0  # attempts that had to be repeated, since creation
        self._pool = urllib3.PoolManager(num_pools=1, maxsize=1, retries=False)
        self._passages: int | None = None
        self._asked_health = False

    def check_k(self, k: int) -> None:
        """Check `k` if the server reports its number of passages; see Retriever. The first call waits for a server."""
        if not self._asked_health:
            self._passages = self._read_health()
            self._asked_health = True
        check_positive(k, k if self._passages is None else self._passages)

    def _find(self, queries: list[str], k: int) -> list[list[Hit]]:
        found: list[list[Hit]] = []
        for part in self._parts(queries, k):
            body = json.dumps({"queries": part, "topk": k, "return_scores": True}).encode("ascii")
            response = self._ask("POST", self.url, body)
            if response.status != 200:
                raise Unanswered(f"{self.url}: refused a search with status {response.status}{_reason(response)}")
            self._check_identity(response)
            found += self._read_answer(response, len(part), k)
        return found

    def _parts(self, queries: list[str], k: int) -> Iterator[list[str]]:
        """Yield the queries in parts that a server accepts in one request. A query beyond its limit is cut."""
        most, part, size = max(1, min(self.max_batch, MAX_PASSAGES // k)), list[str](), 0
        for query in queries:
            query = query[:MAX_CHARACTERS]
            length = len(json.dumps(query))
            if part and (len(part) == most or size + length > MAX_BYTES):
                yield part
                part, size = [], 0
            part.append(query)
            size += length
        if part:
            yield part

    def _read_health(self) -> int | None:
        """Return the server's number of passages; None if it does not report it, because other servers lack /health."""
        response = self._ask("GET", self.url.removesuffix(PATH) + "/health", None)
        report = json_of(response) if response.status == 200 else None
        self._check_identity(response)
        passages = report.get("passages") if isinstance(report, dict) else None
        return passages if type(passages) is int and passages > 0 else None

    def _ask(self, method: str, url: str, body: bytes | None) -> HttpAnswer:
        """Repeat a request until its status is not a passing failure. Unanswered when patience ends."""
        deadline, pause = None, FIRST_PAUSE
        while True:
            headers = {"content-type": "application/json"} if body is not None else {}
            try:
                response = request(self._pool, method, url, body, headers, self.timeout, CONNECT_SECONDS)
                if response.status not in PASSING:
                    if deadline is not None:
                        self._say(f"{url}: answers again")
                    return response
                failure = f"status {response.status}{_reason(response)}"
            except TooLarge as error:
                raise Unanswered(f"{url}: sends {error}; give the address of a retrieval server") from None
            except urllib3.exceptions.HTTPError as error:
                failure = in_words(error, self.timeout, "an answer")
            now = time.monotonic()
            if deadline is None:
                deadline = now + self.patience
                self._say(f"{url}: no answer ({failure}); asking again for up to {self.patience:g} s")
            if now >= deadline:
                advice = (
                    "start the server again, and continue a training run with --resume"
                    if self._asked_health
                    else "start the server there (thresher serve-retriever), or fix retrieval.url"
                )
                raise Unanswered(f"{url}: no answer for {self.patience:g} s ({failure}); {advice}")
            self.retries += 1
            time.sleep(min(pause, deadline - now))
            pause = min(2 * pause, LONGEST_PAUSE)

    def _check_identity(self, response: HttpAnswer) -> None:
        identity = response.headers.get(IDENTITY_HEADER)
        if self.identity is not None and identity != self.identity:
            raise Unanswered(
                f"{self.url}: now serves another index ({identity or 'unnamed'}) than when this run began "
                f"({self.identity}); start the server with the earlier one, and continue with --resume"
            )
        self.identity = identity

    def _read_answer(self, response: HttpAnswer, count: int, k: int) -> list[list[Hit]]:
        answer = json_of(response)
        lists = answer.get("result") if isinstance(answer, dict) else None
        if not isinstance(lists, list) or len(lists) != count:
            got = f"{len(lists)} of them" if isinstance(lists, list) else "none"
            raise self._malformed(f'"result" with a list for each of {count} queries', got)
        return [self._read_hits(hits, f"result[{number}]", k) for number, hits in enumerate(lists)]

    def _read_hits(self, hits: Any, place: str, k: int) -> list[Hit]:
        if not isinstance(hits, list) or len(hits) > k:
            got = f"{len(hits)}" if isinstance(hits, list) else "no list"
            raise self._malformed(f"at most {k} passages in {place}", got)
        return [self._read_hit(hit, f"{place}[{rank}]") for rank, hit in enumerate(hits)]

    def _read_hit(self, hit: Any, place: str) -> Hit:
        document = hit.get("document") if isinstance(hit, dict) else None
        if not isinstance(document, dict):
            raise self._malformed(f'{place} with a "document" and a "score"', "neither or another kind of value")
        identifier, written, score = document.get("id"), document.get("contents"), hit.get("score")
        if type(identifier) is int:
            identifier = str(identifier)
        if not isinstance(identifier, str) or not isinstance(written, str):
            raise self._malformed(f'strings "id" and "contents" in {place}.document', "something else")
        if not isinstance(score, int | float) or isinstance(score, bool) or not math.isfinite(score):
            raise self._malformed(f"a number as {place}.score", json.dumps(score)[:40])
        return Hit(-1, passage_of(identifier, written), float(score))

    def _malformed(self, expected: str, got: str) -> Unanswered:
        return Unanswered(
            f"{self.url}: the answer is not Search-R1's: expected {expected}, got {got}; give the address of a server "
            "that speaks its /retrieve"
        )


def _reason(response: HttpAnswer) -> str:
    """Return the server's reason for a refusal, under our key or that of others."""
    report = json_of(response)
    reason = report.get("error", report.get("detail")) if isinstance(report, dict) else None
    return f" ({reason[:200]})" if isinstance(reason, str) else ""
