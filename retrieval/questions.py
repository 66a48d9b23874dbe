"""Questions with their gold answers, and bare queries, from the files people have.

FlashRAG writes "golden_answers", HotpotQA and NQ-open "answer" (a string or a list), DPR "answers"; all
become `golds`. Everything else a record holds (type, level, gold_titles, FlashRAG's "metadata") is kept in
`metadata`.

Deliberately absent: CSV, parquet and the nested originals, which a converter turns into these records.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thresher.retrieval.jsonl import Record, checked_string, id_field, iter_records, string_field
from thresher.rewards.errors import UserError

GOLD_KEYS = ("golden_answers", "answers", "answer")


@dataclass(frozen=True, slots=True)
class Question:
    """A question and the answers that count as right, at least one."""

    id: str
    question: str
    golds: tuple[str, ...]
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Query:
    """A question to search with. `gold_titles` are the titles that should be found, empty where the file
    names none."""

    id: str
    question: str
    gold_titles: tuple[str, ...] = ()


def read_questions(path: str | Path) -> list[Question]:
    """Reads questions from JSONL (or a JSON list, `.json`), gzipped or not.

    The id defaults to the row number, from 0. UserError, naming file and line, for a malformed record, an
    empty question, an id seen before and a record without gold answers; naming the file, when it holds no
    questions.
    """
    questions = []
    for where, id_, record in _records(path):
        metadata = record.get("metadata")
        extra = {
            key: value
            for key, value in record.items()
            if key not in {"id", "question", *GOLD_KEYS} and not (key == "metadata" and isinstance(value, dict))
        }
        questions.append(
            Question(
                id=id_,
                question=string_field(record, "question", where),
                golds=_golds(record, where),
                metadata={**(metadata if isinstance(metadata, dict) else {}), **extra},
            )
        )
    return questions


def read_queries(path: str | Path) -> list[Query]:
    """Reads {"id", "question"} with optional "gold_titles" (a list of strings); gold answers are not needed.
    Files and errors as `read_questions`."""
    return [
        Query(
            id=id_,
            question=string_field(record, "question", where),
            gold_titles=_strings(record.get("gold_titles", []), f'{where}: "gold_titles"'),
        )
        for where, id_, record in _records(path)
    ]


def _records(path: str | Path) -> Iterator[tuple[str, str, Record]]:
    """Where, id and content of every record, ids differing, at least one."""
    place_of: dict[str, str] = {}
    for row, (where, record) in enumerate(iter_records(path)):
        id_ = id_field(record, row, where)
        if id_ in place_of:
            raise UserError(f"{where}: the id {id_!r} was used before, at {place_of[id_]}; give every question its own")
        place_of[id_] = where
        yield where, id_, record
    if not place_of:
        raise UserError(f"{path}: holds no questions; expected at least one")


def _golds(record: Record, where: str) -> tuple[str, ...]:
    for key in GOLD_KEYS:
        if key in record:
            value = record[key]
            golds = _strings([value] if isinstance(value, str) else value, f'{where}: "{key}"')
            if not golds:
                raise UserError(f'{where}: "{key}" is an empty list; expected at least one gold answer')
            return golds
    raise UserError(f'{where}: no gold answer; expected "golden_answers" (a list) or "answer" in every record')


def _strings(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise UserError(f"{where} should be a list of strings; mend this record")
    return tuple(checked_string(item, f"{where}, item {number},") for number, item in enumerate(value, 1))
