"""What a reader sees of one record: its fields, where it stands, and what every question set needs done to them.

A reader ends in a `Question`, in `Skipped` (the record is well formed, but no question can be made of it: it is counted
under its reason), or in a UserError (the record is malformed, and the file should be fixed).
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from thresher.common.errors import UserError
from thresher.common.jsonl import Record, checked_string, id_field, json_kind
from thresher.retrieval.data.formats import Passage
from thresher.retrieval.datasets.containers import plain

NO_QUESTION = "no question"
NO_ANSWER = "no gold answer"
EMPTY_PARAGRAPH = "paragraphs without text, left out"


class Skipped(Exception):
    """No question can be made of this record. The message is the reason, the same words for the same reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Paragraph:
    """One given with a question. gold: whether it holds a supporting fact, None where that is unknown. id: None where
    the source has none."""

    title: str
    text: str
    gold: bool | None = None
    id: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One record. number: its place in the source, from 0. aliases: other names of an answer, by its id (2Wiki).
    notes: counts of what was left out of records that were kept."""

    fields: Record
    where: str
    number: int = 0
    aliases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)

    def id(self, *keys: str) -> str:
        """The id under the first of `keys` that is there and not null, else the row's number."""
        key = next((key for key in keys if self.fields.get(key) is not None), None)
        return str(self.number) if key is None else id_field(self.fields, self.number, self.where, key=key)

    def question(self, key: str = "question") -> str:
        """The question, without white space around it."""
        value = self.fields.get(key)
        if value is None or (isinstance(value, str) and not value.strip()):
            raise Skipped(NO_QUESTION)
        return checked_string(value, f'{self.where}: "{key}"').strip()

    def golds(self, *values: object) -> tuple[str, ...]:
        """Gold answers from strings, numbers, lists of them and nulls: without white space around them, without blank
        ones, each once, in the order given."""
        golds: dict[str, None] = {}
        for value in values:
            for item in value if isinstance(value, list | tuple) else [value]:
                if item is None:
                    continue
                if isinstance(item, int | float) and not isinstance(item, bool):
                    item = str(item)
                if not isinstance(item, str):
                    raise UserError(
                        f"{self.where}: a gold answer should be a string, found {json_kind(item)}; fix this record"
                    )
                if item.strip():
                    golds[checked_string(item, f"{self.where}: a gold answer").strip()] = None
        if not golds:
            raise Skipped(NO_ANSWER)
        return tuple(golds)

    def given(self, paragraphs: Iterable[Paragraph]) -> tuple[tuple[Passage, ...], tuple[int, ...] | None]:
        """Passages and the numbers of the gold ones, None where no paragraph says. A paragraph without text is left out
        and counted in `notes`."""
        passages, gold, known = [], [], False
        for paragraph in paragraphs:
            known = known or paragraph.gold is not None
            if not paragraph.text.strip():
                self.notes[EMPTY_PARAGRAPH] += 1
                continue
            id_ = paragraph.id or content_id(paragraph.title, paragraph.text)
            passages.append(Passage(id_, paragraph.title, paragraph.text))
            if paragraph.gold:
                gold.append(len(passages))
        return tuple(passages), tuple(gold) if known else None

    def rest(self, *used: str) -> dict[str, Any]:
        """Everything but the keys `used`, as metadata, without nulls and what is empty. What lies under "metadata" is
        taken out of it."""
        left = {key: value for key, value in self.fields.items() if key not in used}
        inner = left.get("metadata")
        if isinstance(inner, dict):
            left = {**inner, **{key: value for key, value in left.items() if key != "metadata"}}
        return {str(key): plain(value) for key, value in left.items() if value not in (None, "", [], {})}


def content_id(title: str, text: str) -> str:
    """The id of a passage whose source gives none: 16 hexadecimal digits of a hash of what it says, so that a
    paragraph shared by two questions is one passage."""
    content = f"{len(title)} {title} {text}".encode("utf-8", "surrogatepass")
    return hashlib.sha256(content).hexdigest()[:16]
