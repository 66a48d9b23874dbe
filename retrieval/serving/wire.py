"""What goes over the wire between a retrieval server and whoever asks it: the requests and answers of two dialects.

    POST /retrieve      {"queries": [..], "topk": 3, "return_scores": true}    as Search-R1 and verl ask
                        {"result": [[{"document": {"id", "contents"}, "score": .83}]]}, or [[{"id", "contents"}]] in it
    POST /search        {"query": "..", "top_n": 5, "return_score": true}      as ReCall asks
                        [{"id", "contents"}], or [those, their scores]
    POST /batch_search  {"query": [..], ..}
                        the same with a list for each query

`contents` is wiki-18's: the title in double quotes, a line feed, the text. A request is refused with a reason that
names the key: other keys than these too, since a misspelt `topk` would otherwise pass for the default.

Deliberately absent: HTTP, and any other dialect. Nothing here waits for anything.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from thresher.retrieval.data.corpus import Passage
from thresher.retrieval.retriever import Hit

# In every answer of ours: which index this is, in a form that only means something when compared.
IDENTITY_HEADER = "thresher-index"


class Refused(Exception):
    """A request that is not served: the HTTP status, the reason that is sent back, and headers to go with it."""

    def __init__(self, status: int, reason: str, headers: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(reason)
        self.status, self.reason, self.headers = status, reason, headers


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """The keys of a request, whether it holds many queries, and how many passages it gets that does not say."""

    queries: str
    k: str
    scores: str
    many: bool
    default_k: int | None  # None: the server's


DIALECTS = {
    "/retrieve": Dialect(queries="queries", k="topk", scores="return_scores", many=True, default_k=None),
    "/search": Dialect(queries="query", k="top_n", scores="return_score", many=False, default_k=10),
    "/batch_search": Dialect(queries="query", k="top_n", scores="return_score", many=True, default_k=10),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """What one request may ask for."""

    max_queries: int = 8192  # a whole batch of a training run, with room
    max_characters: int = 65_536  # of one query; an encoder reads a few hundred words of it
    max_k: int = 100
    max_passages: int = 65_536  # queries x k: what an answer holds has to fit in memory


@dataclass(frozen=True, slots=True)
class Request:
    """A request, read and found to be in bounds."""

    queries: list[str]
    k: int
    scores: bool


def read_request(body: bytes, dialect: Dialect, bounds: Bounds, default_k: int) -> Request:
    """The request in `body`. Refused, with status 400, for what is not JSON, lacks a key or has another, or is out of
    bounds. One query may be blank among others (models do write such) and finds nothing, but not all of them."""
    record = _read_object(body)
    for key in record:
        if key not in (dialect.queries, dialect.k, dialect.scores):
            known = ", ".join((dialect.queries, dialect.k, dialect.scores))
            raise _bad(f"{_shown(key)}: unknown key; expected {known}")
    queries = _queries(record, dialect, bounds)
    k = record.get(dialect.k)
    if k is None:
        k = default_k if dialect.default_k is None else min(dialect.default_k, bounds.max_k)
    if type(k) is not int or not 1 <= k <= bounds.max_k:
        raise _bad(f"{dialect.k}: expected a whole number from 1 to {bounds.max_k}, got {_shown(k)}")
    if len(queries) * k > bounds.max_passages:
        raise _bad(
            f"{dialect.k}: {len(queries)} queries x {k} are {len(queries) * k} passages, more than the "
            f"{bounds.max_passages} that one answer may hold; ask in several requests"
        )
    scores = record.get(dialect.scores, False)
    if not isinstance(scores, bool):
        raise _bad(f"{dialect.scores}: expected true or false, got {_shown(scores)}")
    return Request(queries, k, scores)


def render_answer(found: Sequence[Sequence[Hit]], dialect: Dialect, scores: bool) -> bytes:
    """The answer to a request of this dialect, as ASCII JSON: what Unicode cannot encode survives as an escape."""
    documents = [[{"id": hit.passage.id, "contents": contents(hit.passage)} for hit in hits] for hits in found]
    values = [[hit.score for hit in hits] for hits in found]
    answer: Any
    if dialect is DIALECTS["/retrieve"]:
        answer = {
            "result": [
                [{"document": document, "score": value} for document, value in zip(*pair, strict=True)]
                for pair in zip(documents, values, strict=True)
            ]
            if scores
            else documents
        }
    elif dialect.many:
        answer = [documents, values] if scores else documents
    else:
        answer = [documents[0], values[0]] if scores else documents[0]
    return json.dumps(answer, separators=(",", ":")).encode("ascii")


def contents(passage: Passage) -> str:
    """A passage as wiki-18 writes it. A title is one line there: its line feeds become spaces."""
    return f'"{passage.title.replace(chr(10), " ")}"\n{passage.text}'


def passage_of(identifier: str, written: str) -> Passage:
    """The passage that `contents` wrote; a single line is all text, and a title may lack its quotes."""
    title, line_feed, text = written.partition("\n")
    if not line_feed:
        return Passage(identifier, "", written)
    quoted = len(title) >= 2 and title[0] == title[-1] == '"'
    return Passage(identifier, title[1:-1] if quoted else title, text)


def _read_object(body: bytes) -> dict[str, Any]:
    try:
        record = json.loads(body.decode("utf-8"))
    except UnicodeDecodeError:
        raise _bad("the body is not UTF-8; send JSON") from None
    except RecursionError:
        raise _bad("the body is nested too deeply; send an object of queries and numbers") from None
    except ValueError as error:
        raise _bad(f"the body is not JSON ({str(error)[:80]})") from None
    if not isinstance(record, dict):
        raise _bad(f"the body: expected an object, got {_shown(record)}")
    return record


def _queries(record: dict[str, Any], dialect: Dialect, bounds: Bounds) -> list[str]:
    key = dialect.queries
    if key not in record:
        raise _bad(f"{key}: missing; expected {'a list of strings' if dialect.many else 'a string'}")
    value = record[key]
    if not dialect.many:
        value = [value]
    elif not isinstance(value, list):
        raise _bad(f"{key}: expected a list of strings, got {_shown(value)}")
    if not 1 <= len(value) <= bounds.max_queries:
        raise _bad(f"{key}: expected from 1 to {bounds.max_queries} queries, got {len(value)}")
    for number, query in enumerate(value):
        place = f"{key}[{number}]" if dialect.many else key
        if not isinstance(query, str):
            raise _bad(f"{place}: expected a string, got {_shown(query)}")
        if len(query) > bounds.max_characters:
            raise _bad(f"{place}: expected at most {bounds.max_characters} characters, got {len(query)}")
        if any("\ud800" <= character <= "\udfff" for character in query):
            raise _bad(f"{place}: holds half of a surrogate pair, which is no text")
    if not any(query.strip() for query in value):
        raise _bad(f"{key}: blank; expected text to search for")
    return value


def _bad(reason: str) -> Refused:
    return Refused(400, reason)


def _shown(value: Any) -> str:
    """A value for a reason: as JSON, and short."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
