"""Conversion of published files to one file of our records: read, skip and count, sample, mix, pool passages, write.

A source is one question set: a name, its files, and the number of its questions to take. Without a seed the first ones
are taken; with a seed, each source is sampled with a separate seed and all questions are shuffled. If several sources
are mixed, an id becomes `name/id` and the metadata gets "dataset". If the id of a question was used for another one, a
hash of the question is appended, because merged files, such as Search-R1's, number each of their sets from 0. Records
that are left out are counted by reason.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from random import Random
from typing import Any

from thresher.common.errors import UserError
from thresher.common.files import need_room
from thresher.common.jsonl import Record, read_head, write_jsonl
from thresher.retrieval.datasets.browsecomp import iter_documents
from thresher.retrieval.datasets.containers import iter_rows, plain
from thresher.retrieval.datasets.formats import QuestionFormat, Row, Skipped, content_id, detect, find_format, require
from thresher.retrieval.passages import Passage
from thresher.retrieval.questions import NAMED_DOCUMENTS, Question, passage_record, question_record

AUTO = "auto"
BROWSECOMP = "browsecomp-plus"
ID_AGAIN = "the id and the question were there before"
RENAMED = "questions given another id, for theirs was used before"
SAMPLE = 100  # records of a file from which the disk space of its questions is estimated
GZIPPED = 0.2  # fraction of a text's size; a low estimate, so that no file that would fit is refused
ALIAS_KEYS = ("aliases", "demonyms")
OnRecord = Callable[[str, int], None]  # name of the source, records read


@dataclass(frozen=True, slots=True, kw_only=True)
class MixSource:
    """One question set. name: None if it is the only one. count: number of questions to take, None for all."""

    paths: tuple[Path, ...]
    name: str | None = None
    count: int | None = None


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts of a source's records. skipped: (where, id, reason) of each that was left out."""

    name: str
    formats: list[str] = field(default_factory=list)
    records: int = 0
    kept: int = 0
    asked: int | None = None
    skipped: list[tuple[str, str, str]] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)

    def figures(self) -> dict[str, Any]:
        return {
            "source": self.name,
            "format": " + ".join(dict.fromkeys(self.formats)),
            "records": self.records,
            "skipped": dict(Counter(reason for _, _, reason in self.skipped)),
            "asked": self.asked,
            "kept": self.kept,
            "notes": {note: count for note, count in self.notes.items() if count},
        }


def parse_mix(text: str) -> MixSource:
    """Parse NAME=FILE or NAME=FILE:COUNT. UserError for anything else."""
    match = re.fullmatch(r"([^=/\s]+)=(.+?)(?::(\d+))?", text)
    if match is None or match[3] == "0":
        raise UserError(f"--mix {text!r}: expected NAME=FILE or NAME=FILE:COUNT, such as hotpotqa=train.json:10000")
    return MixSource(name=match[1], paths=(Path(match[2]),), count=int(match[3]) if match[3] else None)


def convert(
    sources: Sequence[MixSource],
    out: str | Path,
    *,
    fmt: str = AUTO,
    seed: int | None = None,
    aliases: str | Path | None = None,
    canary: str | None = None,
    documents: Sequence[str | Path] = (),
    corpus: str | Path | None = None,
    skipped: str | Path | None = None,
    passages: int | None = None,
    on_record: OnRecord = lambda name, records: None,
) -> dict[str, Any]:
    """Write questions to `out`, passages to `corpus`, skipped records to `skipped`; return figures.

    passages: number of passages, from the first, that a question keeps; None for all. fmt: a name of `formats`, or
    auto, which detects the format of every file. aliases: 2Wiki's second file. canary: the key to BrowseComp-Plus.
    documents: files of its corpus, which are written to `corpus` in place of the questions' passages.
    """
    chosen_format = None if fmt == AUTO else find_format(fmt)
    outputs = [Path(path) for path in (out, corpus, skipped) if path is not None]
    _check_paths(sources, outputs, [*documents, *(() if aliases is None else (aliases,))])
    if documents and corpus is None:
        raise UserError("--documents is written to --corpus; give --corpus FILE")
    known = {} if aliases is None else read_aliases(aliases)
    planned = sum(
        planned_bytes(source, fmt=chosen_format, aliases=known, canary=canary, passages=passages) for source in sources
    )
    need_room(Path(out), _written(out, planned), "the questions")
    pool = Pool()
    tallies = [Tally(name=source.name or "questions", asked=source.count) for source in sources]

    def chosen() -> Iterator[Question]:
        for source, tally in zip(sources, tallies, strict=True):
            read = read_source(source, tally, fmt=chosen_format, aliases=known, canary=canary, on_record=on_record)
            for question in draw(read, source.count, None if seed is None else f"{seed}/{source.name or ''}"):
                tally.kept += 1
                yield _named(question, source.name)

    found: Iterable[Question] = chosen()
    if seed is not None and len(sources) > 1:
        found = draw(found, None, f"{seed}")
    counts: Counter[str] = Counter()
    named_by: dict[str, str] = {}  # a document -> a question

    def records() -> Iterator[Record]:
        for question in found:
            pooled = question if corpus is None else pool.enter(question)
            pooled = pooled if passages is None else first_passages(pooled, passages)
            counts["with passages"] += bool(pooled.passages)
            counts["with gold indices"] += pooled.gold_indices is not None
            counts["passages"] += len(pooled.passages)
            if documents:
                named = (id_ for key in NAMED_DOCUMENTS for id_ in question.metadata.get(key, ()))
                named_by.update(dict.fromkeys(named, question.id))
            yield question_record(pooled)
        # Checked before the file appears, which it does when this generator ends.
        _check_outcome(tallies, None if documents else corpus, pool, aliases, canary, documents)
        if documents and corpus is not None:
            need_room(
                Path(corpus), _written(corpus, sum(Path(path).stat().st_size for path in documents)), "the corpus"
            )
            kept = _documents(documents, named_by, counts, on_record)
            counts["documents in the corpus"] = write_jsonl(corpus, kept)

    written = write_jsonl(out, records())
    if corpus is not None and not documents:
        write_jsonl(corpus, map(passage_record, pool.passages.values()))
    if skipped is not None:
        keys = ("where", "id", "reason")
        found_out = ((tally.name, record) for tally in tallies for record in tally.skipped)
        write_jsonl(skipped, ({"source": name, **dict(zip(keys, record, strict=True))} for name, record in found_out))
    figures = {"questions": written, **counts, "sources": [tally.figures() for tally in tallies]}
    if corpus is not None and not documents:
        figures |= {"passages in the corpus": len(pool.passages), "passages given another id": pool.renamed}
    return figures


def read_source(
    source: MixSource,
    tally: Tally,
    *,
    fmt: QuestionFormat | None = None,
    aliases: Mapping[str, tuple[str, ...]] | None = None,
    canary: str | None = None,
    on_record: OnRecord = lambda name, records: None,
) -> Iterator[Question]:
    """Yield every question of a source, in order, with distinct ids; omitted records are put in `tally`. fmt: None to
    detect the format of each file."""
    seen: dict[str, str] = {}
    for path in source.paths:
        reader = fmt or detect(path)
        tally.formats.append(reader.name)
        for where, record in iter_rows(path):
            require(reader, record, where)
            row = Row(
                fields=record,
                where=where,
                number=tally.records,
                aliases=aliases or {},
                canary=canary,
                notes=tally.notes,
            )
            tally.records += 1
            on_record(tally.name, tally.records)
            try:
                question = reader.read(row)
                if seen.get(question.id, question.question) != question.question:
                    tally.notes[RENAMED] += 1
                    question = replace(question, id=f"{question.id}#{content_id('', question.question)}")
                if question.id in seen:
                    raise Skipped(ID_AGAIN)
            except Skipped as skip:
                tally.skipped.append((where, row.id("id", "_id", "QuestionId", "question_id", "query_id"), str(skip)))
                continue
            seen[question.id] = question.question
            yield question


def planned_bytes(
    source: MixSource,
    *,
    fmt: QuestionFormat | None = None,
    aliases: Mapping[str, tuple[str, ...]] | None = None,
    canary: str | None = None,
    passages: int | None = None,
) -> float:
    """Estimate the bytes of a source's questions as JSON lines from the first records of every file. The estimate is
    too low if a file is compressed."""
    questions = written = 0.0
    most = math.inf if source.count is None else source.count
    for path in source.paths:
        if questions >= most:
            break
        tally = Tally(name="")
        first = read_source(MixSource(paths=(path,)), tally, fmt=fmt, aliases=aliases, canary=canary)
        sample = islice(first, int(min(SAMPLE, most)))
        cut = sample if passages is None else (first_passages(question, passages) for question in sample)
        found = [_size(question_record(question)) for question in cut]
        head = read_head(path)
        tight = len(b"".join(map(bytes.strip, head.splitlines()))) / max(len(head), 1)  # without indentation
        read = sum(_size(record, head.isascii()) for _, record in islice(iter_rows(path), tally.records))
        times = max(1.0, tight * path.stat().st_size / max(read, 1))
        questions += times * len(found)
        written += times * sum(found)
    return written * min(1.0, most / max(questions, 1))


def _size(record: Mapping[str, Any], escaped: bool = False) -> int:
    """Return the bytes of a record as JSON; escaped: in ASCII."""
    return len(json.dumps(plain(record), ensure_ascii=escaped).encode("utf-8", "backslashreplace"))


def _written(path: str | Path, size: float) -> int:
    return int(size * (GZIPPED if Path(path).suffix == ".gz" else 1))


def draw(questions: Iterable[Question], count: int | None, seed: str | None) -> Iterable[Question]:
    """Return the first `count` questions (None: all), or with a seed `count` random ones, in random order."""
    if seed is None:
        return questions if count is None else islice(questions, count)
    random = Random(seed)
    kept: list[Question] = []
    for number, question in enumerate(questions):
        if count is None or number < count:
            kept.append(question)
        elif (place := random.randrange(number + 1)) < count:
            kept[place] = question
    random.shuffle(kept)
    return kept


def first_passages(question: Question, count: int) -> Question:
    """Return the question with its first `count` passages and their gold indices, if known."""
    gold = question.gold_indices
    kept = None if gold is None or count == 0 else tuple(number for number in gold if number <= count)
    return replace(question, passages=question.passages[:count], gold_indices=kept)


class Pool:
    """Passages by id. `renamed` counts those that got another id because theirs belonged to another passage."""

    def __init__(self) -> None:
        self.passages: dict[str, Passage] = {}
        self.renamed = 0

    def enter(self, question: Question) -> Question:
        """Add the passages of `question` to the pool, and return it with their ids in the pool."""
        return replace(question, passages=tuple(self._add(passage) for passage in question.passages))

    def _add(self, passage: Passage) -> Passage:
        known = self.passages.setdefault(passage.id, passage)
        if (known.title, known.text) == (passage.title, passage.text):
            return known
        self.renamed += 1
        id_ = f"{passage.id}#{content_id(passage.title, passage.text)}"
        return self.passages.setdefault(id_, replace(passage, id=id_))


def _documents(
    paths: Sequence[str | Path], named_by: dict[str, str], counts: Counter[str], on_record: OnRecord
) -> Iterator[Record]:
    """Yield the corpus's records. At the end, raise UserError if a document that a question names is not among
    them."""
    empty: list[str] = []
    for number, passage in enumerate(iter_documents(paths, empty), 1):
        named_by.pop(passage.id, None)
        on_record("the corpus", number)
        yield passage_record(passage)
    counts["documents without text, left out"] = len(empty)
    for id_, question in named_by.items():
        raise UserError(
            f"{', '.join(map(str, paths))}: {len(named_by):,} of the documents that questions name are absent, such as "
            f"{id_!r} of question {question!r}; give all files of the corpus"
        )


def read_aliases(path: str | Path) -> dict[str, tuple[str, ...]]:
    """Read 2Wiki's id_aliases.json: {"Q_id", "aliases": [..], "demonyms": [..]}, one per line or in a list."""
    first = next(iter_rows(path), None)
    if first is None or "Q_id" not in first[1]:
        raise UserError(f'{path}: expected 2Wiki\'s aliases, records with "Q_id" and "aliases"; give id_aliases.json')
    found: dict[str, tuple[str, ...]] = {}
    for where, record in iter_rows(path):
        names = [name for key in ALIAS_KEYS for name in record.get(key) or []]
        if not isinstance(record.get("Q_id"), str) or not all(isinstance(name, str) for name in names):
            raise UserError(f'{where}: expected "Q_id" and lists of strings in "aliases"; fix this record')
        found[record["Q_id"]] = tuple(names)
    return found


def _named(question: Question, name: str | None) -> Question:
    if name is None:
        return question
    return replace(question, id=f"{name}/{question.id}", metadata={**question.metadata, "dataset": name})


def _check_outcome(
    tallies: Sequence[Tally],
    corpus: str | Path | None,
    pool: Pool,
    aliases: str | Path | None,
    canary: str | None,
    documents: Sequence[str | Path],
) -> None:
    """Raise UserError if no question is left, an option does not apply to these sets, or the corpus has no room."""
    if not any(tally.kept for tally in tallies):
        reasons = Counter(reason for tally in tallies for _, _, reason in tally.skipped)
        counted = ", ".join(f"{reason} ({count})" for reason, count in reasons.most_common())
        raise UserError(
            f"{', '.join(tally.name for tally in tallies)}: no question is left: {counted}; give other files"
        )
    if corpus is not None and not pool.passages:
        raise UserError(f"{corpus}: none of these questions comes with passages; leave --corpus out")
    if aliases is not None and not any("2wiki" in tally.formats for tally in tallies):
        raise UserError(f"{aliases}: aliases are for 2WikiMultiHopQA, and no such file was read; leave --aliases out")
    formats = {name for tally in tallies for name in tally.formats}
    if canary is not None and BROWSECOMP not in formats:
        raise UserError("--canary is for BrowseComp-Plus, and no such file was read; leave --canary out")
    if documents and formats != {BROWSECOMP}:
        raise UserError("--documents is the corpus of BrowseComp-Plus, and another set was read; leave --documents out")
    if corpus is not None:
        texts = sum(len(passage.title) + len(passage.text) for passage in pool.passages.values())
        need_room(Path(corpus), _written(corpus, texts), "the corpus")


def _check_paths(sources: Sequence[MixSource], outputs: Sequence[Path], others: Sequence[str | Path]) -> None:
    names = [source.name for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise UserError(f"--mix names {name!r} twice; give every source its own name")
    inputs = {path.resolve() for source in sources for path in source.paths} | {Path(path).resolve() for path in others}
    for number, path in enumerate(outputs):
        if path.resolve() in inputs or path.resolve() in {other.resolve() for other in outputs[:number]}:
            raise UserError(f"{path}: is read or written under another name too; choose another path to write")
        if path.name.removesuffix(".gz").endswith(".json"):
            raise UserError(f"{path}: JSON lines are written, and .json would be read as one list; name it .jsonl")
        if not path.parent.is_dir():
            raise UserError(f"{path}: the folder {path.parent} does not exist; make it first")
