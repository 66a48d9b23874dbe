"""Questions with gold answers and given passages, and bare queries, in our own file format.

    {"id", "question", "golden_answers": [..],
     "passages": [{"id", "title", "text"}, ..], "gold_indices": [..], "metadata": {..}}

There is one object per line. The question and an answer are required; "answer" and "answers" are read as well. Instead
of "gold_indices", which count from 1, a passage may have "gold": true. All other keys are kept in `metadata`.
`datasets` converts published files to these records.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thresher.common.errors import UserError
from thresher.common.jsonl import (
    Record,
    as_object,
    checked_string,
    id_field,
    iter_records,
    json_kind,
    string_field,
)
from thresher.retrieval.passages import EmptyPassage, Passage, to_passage
from thresher.rewards.text import normalize_answer

NAMED_DOCUMENTS = ("evidence_docs", "gold_docs")  # in the metadata: ids of documents that a search should find
GOLD_KEYS = ("golden_answers", "answers", "answer")
COUNTED = re.compile(r"(.*/)?((train|dev|test|validation)_)?\d+")  # ids that number the rows of a file
OWN_KEYS = frozenset(("id", "question", "passages", "gold_indices", *GOLD_KEYS))


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its correct answers, and the passages given with it. `gold_indices` are the numbers, from 1, of those
    with a supporting fact; None if unknown."""

    id: str
    question: str
    golds: tuple[str, ...]
    metadata: dict[str, Any] = field(default_factory=dict)
    passages: tuple[Passage, ...] = ()
    gold_indices: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Query:
    """A question to search with, and the titles that should be found, if known."""

    id: str
    question: str
    gold_titles: tuple[str, ...] = ()


def read_questions(path: str | Path, *, golds_needed: bool = True) -> list[Question]:
    """Read questions from JSONL (or a JSON list, `.json`), gzipped or not.

    The id defaults to the row number, from 0, and a passage's id to its position, from 1. `golds` may be empty unless
    `golds_needed`. UserError, naming file and line, also for a published set that has to be converted first.
    """
    return list(iter_questions(path, golds_needed=golds_needed))


def iter_questions(path: str | Path, *, golds_needed: bool = True) -> Iterator[Question]:
    """Yield the questions of `read_questions`."""
    for where, id_, record in _records(path):
        _refuse_original(record, where)
        yield to_question(record, id_, where, golds_needed=golds_needed)


def to_question(record: Record, id_: str, where: str, *, golds_needed: bool = True) -> Question:
    """Return the question of a record of our own format."""
    metadata = record.get("metadata")
    extra = {
        key: value
        for key, value in record.items()
        if key not in OWN_KEYS and not (key == "metadata" and isinstance(value, dict))
    }
    passages, gold_indices = _passages(record, where)
    return Question(
        id=id_,
        question=string_field(record, "question", where),
        golds=_golds(record, where, golds_needed),
        metadata={**(metadata if isinstance(metadata, dict) else {}), **extra},
        passages=passages,
        gold_indices=gold_indices,
    )


def check_apart(sets: Iterable[tuple[str | Path, Iterable[Question]]]) -> None:
    """Raise UserError if two sets, each with its file, have a question in common, by its id or its normalised text.
    An id that numbers the rows of a file, such as 17, nq/17 and train_17, is not compared."""
    first: dict[str, str | Path] = {}
    for path, questions in sets:
        here: set[str] = set()
        for question in questions:
            keys = {f"text {normalize_answer(question.question)}"}
            if not COUNTED.fullmatch(question.id):
                keys.add(f"id {question.id}")
            for key in keys & first.keys():
                raise UserError(
                    f"{path}: question {question.id} is in {first[key]} too; give the warm-up, training, dev and test "
                    "set different questions"
                )
            here |= keys
        if not here:
            raise UserError(f"{path}: holds no question, or cannot be read twice; give a file with questions")
        first |= dict.fromkeys(here, path)


def question_record(question: Question) -> Record:
    """Return the record that `read_questions` reads as this question."""
    record: Record = {"id": question.id, "question": question.question, "golden_answers": list(question.golds)}
    if question.passages:
        record["passages"] = [passage_record(passage) for passage in question.passages]
    if question.gold_indices is not None:
        record["gold_indices"] = list(question.gold_indices)
    if question.metadata:
        record["metadata"] = question.metadata
    return record


def passage_record(passage: Passage) -> Record:
    """Return the record of a passage, for a line of a corpus or an item of a question's "passages"."""
    return {"id": passage.id, "title": passage.title, "text": passage.text}


def read_queries(path: str | Path) -> list[Query]:
    """Read {"id", "question"} with optional "gold_titles" (also under "metadata"). The default is the titles of the
    gold passages. Files and errors are those of `read_questions`."""
    return [
        Query(id=id_, question=string_field(record, "question", where), gold_titles=_gold_titles(record, where))
        for where, id_, record in _records(path)
    ]


def _gold_titles(record: Record, where: str) -> tuple[str, ...]:
    metadata = record.get("metadata")
    for holder in (record, metadata if isinstance(metadata, dict) else {}):
        if "gold_titles" in holder:
            return _strings(holder["gold_titles"], f'{where}: "gold_titles"')
    passages, gold_indices = _passages(record, where)
    return tuple(dict.fromkeys(passages[number - 1].title for number in gold_indices or ()))


def _records(path: str | Path) -> Iterator[tuple[str, str, Record]]:
    """Yield place, id and content of every record. UserError if an id occurs twice or there is no record."""
    place_of: dict[str, str] = {}
    for row, (where, record) in enumerate(iter_records(path)):
        id_ = id_field(record, row, where)
        if id_ in place_of:
            raise UserError(f"{where}: the id {id_!r} was used before, at {place_of[id_]}; give every question its own")
        place_of[id_] = where
        yield where, id_, record
    if not place_of:
        raise UserError(f"{path}: holds no questions; expected at least one")


def _refuse_original(record: Record, where: str) -> None:
    """Raise UserError for a published record of HotpotQA, 2Wiki or MuSiQue: its passages would be read as metadata."""
    if "passages" in record:
        return
    paragraphs = record.get("paragraphs")
    if "context" in record and "supporting_facts" in record:
        key, name = "context", "2wiki" if "evidences" in record else "hotpotqa"
        if name == "hotpotqa" and isinstance(record["context"], dict):
            name = "hotpotqa-hub"
    elif isinstance(paragraphs, list) and any(isinstance(p, dict) and "is_supporting" in p for p in paragraphs):
        key, name = "paragraphs", "musique"
    else:
        return
    raise UserError(
        f'{where}: a record of a published set, whose passages are under "{key}"; convert the file to our records '
        f"first, with thresher data convert --format {name}"
    )


def _golds(record: Record, where: str, needed: bool) -> tuple[str, ...]:
    for key in GOLD_KEYS:
        if key in record:
            value = record[key]
            golds = _strings([value] if isinstance(value, str) else value, f'{where}: "{key}"')
            if needed and not golds:
                raise UserError(f'{where}: "{key}" is an empty list; expected at least one gold answer')
            return golds
    if not needed:
        return ()
    raise UserError(f'{where}: no gold answer; expected "golden_answers" (a list) or "answer" in every record')


def _passages(record: Record, where: str) -> tuple[tuple[Passage, ...], tuple[int, ...] | None]:
    """Return the passages and the numbers of the gold ones; None if neither indices nor flags give them."""
    given = record.get("passages", [])
    if not isinstance(given, list):
        raise UserError(f'{where}: "passages" should be a list of objects, found {json_kind(given)}; fix this record')
    passages, flags = [], []
    for number, item in enumerate(given, 1):
        place = f'{where}: "passages", item {number}'
        fields = as_object(item, place)
        try:
            passages.append(to_passage(fields, number, place))
        except EmptyPassage:
            raise UserError(f"{place}, holds no text; fill it in or remove this passage") from None
        flags.append(_flag(fields, place))
    flagged = any(flag is not None for flag in flags)
    indices = record.get("gold_indices")
    if indices is None:
        return tuple(passages), tuple(n for n, flag in enumerate(flags, 1) if flag) if flagged else None
    if flagged:
        raise UserError(f'{where}: has both "gold_indices" and passages with a "gold" flag; keep one of the two')
    return tuple(passages), _indices(indices, len(passages), where)


def _flag(fields: Record, where: str) -> bool | None:
    flag = fields.get("gold")
    if flag is not None and not isinstance(flag, bool):
        raise UserError(f'{where}: "gold" should be true or false, found {json_kind(flag)}; fix this record')
    return flag


def _indices(value: object, passages: int, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(isinstance(n, int) and not isinstance(n, bool) for n in value):
        raise UserError(f'{where}: "gold_indices" should be a list of whole numbers; fix this record')
    for position, number in enumerate(value):
        if not 1 <= number <= passages:
            raise UserError(
                f'{where}: "gold_indices" names passage {number} of {passages}; they count from 1, so fix this record'
            )
        if number in value[:position]:
            raise UserError(f'{where}: "gold_indices" names passage {number} twice; fix this record')
    return tuple(value)


def _strings(value: object, where: str) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise UserError(f"{where} should be a list of strings; fix this record")
    return tuple(checked_string(item, f"{where}, item {number},") for number, item in enumerate(value, 1))
