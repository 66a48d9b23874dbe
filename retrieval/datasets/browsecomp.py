"""BrowseComp-Plus: decoding of its obfuscated texts, and the corpus of its questions.

A question is {"query_id", "query", "answer", "evidence_docs", "gold_docs", "negative_docs"}; the last three are lists
of {"docid", "text", "url"}. All strings except "query_id" are base64 of UTF-8, with its bytes XORed with the repeated
SHA-256 of a published string, the canary. The corpus is {"docid", "text", "url"} in plain text. Most of its texts begin
with a header between two lines `---`; its first line is `title: ..`.
"""

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator
from itertools import cycle
from pathlib import Path

from thresher.common.errors import UserError
from thresher.retrieval.datasets.containers import iter_rows
from thresher.retrieval.passages import EmptyPassage, Passage, to_passage

TITLE = re.compile(r"---\s*\ntitle:[ \t]*([\"']?)(.+?)\1[ \t]*\n")


def is_obfuscated(text: object) -> bool:
    """Return whether a question is base64; one in plain text has spaces."""
    try:
        return isinstance(text, str) and len(base64.b64decode(text, validate=True)) > 0
    except ValueError:
        return False


def reveal(text: object, canary: str | None, where: str) -> object:
    """Return the decoded text; `text` itself without a canary. UserError, starting with `where`, for a wrong canary."""
    if canary is None or not isinstance(text, str):
        return text
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        raise UserError(f"{where} is not obfuscated (it is not base64); leave --canary out") from None
    try:
        key = cycle(hashlib.sha256(canary.encode()).digest())
        return bytes(a ^ b for a, b in zip(data, key, strict=False)).decode()
    except UnicodeDecodeError:
        raise UserError(
            f"{where} is not text with this --canary; give the whole canary line at the end of the data set's card"
        ) from None


def iter_documents(paths: Iterable[str | Path], empty: list[str]) -> Iterator[Passage]:
    """Yield the corpus as passages with the titles of their texts. Ids of documents without text are put in `empty`."""
    for path in paths:
        for row, (where, record) in enumerate(iter_rows(path)):
            if record.get("docid") is None:
                raise UserError(f'{where}: expected a document with "docid" and "text"; give files of the corpus')
            title = TITLE.match(record["text"]) if isinstance(record.get("text"), str) else None
            try:
                yield to_passage({**record, "title": title[2] if title else ""}, row, where)
            except EmptyPassage:
                empty.append(str(record["docid"]))
