"""Passages, and the files they come from.

A passage has an id (what users and other programs call it) and sits at a row (its place in the file, in the
index and in every tie); the two are kept apart. The text is stored untouched: whatever it holds, control tags
included, is neutralised where it is rendered for a model, not here.

Two kinds of record are read: {"title", "text"} and wiki-18's {"id", "contents"}, whose first line is the
title in double quotes. Deliberately absent: chunking, DPR's TSV, and offsets on disk; the whole corpus is in
memory.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import overload

from thresher.retrieval.jsonl import Record, id_field, iter_records, string_field
from thresher.rewards.errors import UserError

EMBEDS = ("text", "title+text")


@dataclass(frozen=True, slots=True)
class Passage:
    """One passage. `title` may be empty, `text` may not."""

    id: str
    title: str
    text: str


class Corpus(Sequence[Passage]):
    """Passages by row, at least one, with ids that differ. `path` is the file they were read from, if any.

    UserError for no passages and for an id that occurs twice.
    """

    def __init__(self, passages: Sequence[Passage], path: str | Path | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._passages = tuple(passages)
        source = str(path) if path is not None else "the corpus"
        if not self._passages:
            raise UserError(f"{source}: holds no passages; expected at least one")
        seen: set[str] = set()
        for passage in self._passages:
            if passage.id in seen:
                raise UserError(f"{source}: the id {passage.id!r} occurs twice; give every passage its own")
            seen.add(passage.id)

    def __len__(self) -> int:
        return len(self._passages)

    @overload
    def __getitem__(self, row: int) -> Passage: ...
    @overload
    def __getitem__(self, row: slice) -> tuple[Passage, ...]: ...
    def __getitem__(self, row: int | slice) -> Passage | tuple[Passage, ...]:
        return self._passages[row]

    def __iter__(self) -> Iterator[Passage]:
        return iter(self._passages)

    @cached_property
    def sha256(self) -> str:
        """Hash of ids, titles and texts in row order, in hexadecimal: what an index is bound to.

        It is over the content, not over the file, so the same passages in JSONL, JSON or gzip are one corpus.
        """
        digest = hashlib.sha256()
        for passage in self._passages:
            for field in (passage.id, passage.title, passage.text):
                data = field.encode("utf-8", "surrogatepass")
                # The length in front keeps ("ab", "c") and ("a", "bc") apart.
                digest.update(len(data).to_bytes(8, "little"))
                digest.update(data)
        return digest.hexdigest()


def read_corpus(path: str | Path) -> Corpus:
    """Reads a corpus from JSONL, or from a JSON list when the name ends in `.json`; `.gz` of either.

    A record is {"title", "text"} with an optional "id", or {"id", "contents"} with contents `"Title"<line
    feed>text`, quotes included. A missing id is the row number; a numeric one is spelled out. UserError,
    naming file and line, for a malformed record, a missing or non-string field, a passage without text and an
    id seen before; naming the file, for an empty corpus.
    """
    passages: list[Passage] = []
    place_of: dict[str, str] = {}
    for row, (where, record) in enumerate(iter_records(path)):
        passage = _parse_passage(record, row, where)
        if passage.id in place_of:
            raise UserError(
                f"{where}: the id {passage.id!r} was used before, at {place_of[passage.id]}; give every passage its own"
            )
        place_of[passage.id] = where
        passages.append(passage)
    return Corpus(passages, path)


def embedded_text(passage: Passage, embed: str) -> str:
    """What an encoder is given of `passage`: its text, or its title, a line feed and its text. `embed` is one
    of EMBEDS; UserError otherwise."""
    check_embed(embed)
    return passage.text if embed == "text" or not passage.title else f"{passage.title}\n{passage.text}"


def check_embed(embed: str) -> None:
    """UserError unless `embed` is one of EMBEDS."""
    if embed not in EMBEDS:
        raise UserError(f"embed is {embed!r}; expected one of {', '.join(EMBEDS)}")


def _parse_passage(record: Record, row: int, where: str) -> Passage:
    if "contents" in record:
        title, text = _split_contents(string_field(record, "contents", where))
        if not text.strip():
            raise UserError(f'{where}: "contents" is a title without text; expected "Title", a line feed and the text')
    elif "text" in record or "title" in record:
        title = string_field(record, "title", where, may_be_empty=True)
        text = string_field(record, "text", where)
    else:
        raise UserError(f'{where}: expected "title" and "text", or "id" and "contents"; convert the file')
    return Passage(id_field(record, row, where), title, text)


def _split_contents(contents: str) -> tuple[str, str]:
    """Title and text of wiki-18's `contents`. The first line is the title, with or without its quotes; a
    single line is all text, as files without titles have it."""
    head, line_feed, text = contents.partition("\n")
    if not line_feed:
        return "", contents
    if len(head) >= 2 and head.startswith('"') and head.endswith('"'):
        head = head[1:-1]
    return head, text
