"""File formats of passages, and the conversion of a record to a passage.

Only this module knows the formats of a corpus. A name that ends in `.jsonl` or `.tsv` determines the format; otherwise
the first characters do. `.gz` may follow any name:

    lines    one JSON object per line: {"title", "text"} with an optional "id" (also BEIR's "_id", and "docid"), or
             wiki-18's {"id", "contents"}, whose first line is the title in double quotes
    list     the same objects in one JSON list
    titles   one JSON object, title -> list of sentences (or one string), as HotpotQA's contexts are pooled
    tsv      DPR's table: a header with id, text and title, separated by tabs, quoted as CSV is

Lists and objects are parsed as a whole, so a corpus of millions of passages should be in lines.
"""

import csv
import io
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from thresher.common.errors import UserError
from thresher.common.files import decode_text
from thresher.common.jsonl import (
    BOM,
    Record,
    as_object,
    id_field,
    iter_lines,
    iter_list,
    line_limit,
    parse_json,
    read_head,
    read_whole,
    string_field,
)

ID_KEYS = ("id", "_id", "docid")
CHUNK_NUMBER = re.compile(r"#\d+$")
TSV_COLUMNS = frozenset(("id", "text", "title"))


@dataclass(frozen=True, slots=True)
class Passage:
    """One passage. `title` may be empty, `text` may not."""

    id: str
    title: str
    text: str


class EmptyPassage(UserError):
    """Error for a record that is well formed but has no text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusFormat:
    """The layout of records in a file. kind: lines, list, titles or tsv. seekable: whether a record can be read by
    itself. columns: of a TSV."""

    kind: str
    seekable: bool
    columns: tuple[str, ...] = ()


LINES = CorpusFormat(kind="lines", seekable=True)


def detect_format(path: str | Path) -> CorpusFormat:
    """Return the format of the file `path`. UserError for an unknown one."""
    path = Path(path)
    head = read_head(path).removeprefix(BOM).lstrip()
    first = head.partition(b"\n")[0].rstrip()
    plain = path.suffix != ".gz"
    suffix = Path(path.name.removesuffix(".gz")).suffix
    if suffix == ".tsv":
        return CorpusFormat(kind="tsv", seekable=plain, columns=_tsv_columns(path, first))
    if suffix == ".jsonl" or not head:
        return CorpusFormat(kind="lines", seekable=plain)
    if head.startswith(b"["):
        return CorpusFormat(kind="list", seekable=False)
    if head.startswith(b"{"):
        if suffix == ".json" and not _is_passage(first):
            return CorpusFormat(kind="titles", seekable=False)
        return CorpusFormat(kind="lines", seekable=plain)
    if set(_tsv_cells(first)) >= TSV_COLUMNS:
        return CorpusFormat(kind="tsv", seekable=plain, columns=_tsv_columns(path, first))
    raise UserError(
        f"{path}: not a corpus in a known format; expected JSONL, a JSON list or a JSON object of title -> sentences, "
        "or a TSV with the header id, text, title (any of them gzipped, named .gz); convert the file"
    )


def iter_located(path: str | Path, fmt: CorpusFormat) -> Iterator[tuple[str, int, Record]]:
    """Yield (where, start, record) for every record of `path`. where: the beginning of an error message. start: the
    byte at which the record begins (if seekable)."""
    path = Path(path)
    if fmt.kind == "lines":
        yield from _iter_jsonl(path)
    elif fmt.kind == "tsv":
        yield from _iter_tsv(path, fmt.columns)
    elif fmt.kind == "titles":
        yield from _iter_titles(path)
    else:
        yield from ((where, 0, record) for where, record in iter_list(path))


def record_at(data: bytes, fmt: CorpusFormat, where: str) -> Record:
    """Return the first record in `data`, which begins at a record of a seekable format."""
    if fmt.kind == "lines":
        return as_object(parse_json(data.partition(b"\n")[0].rstrip(), where), where)
    text = io.StringIO(decode_text(data, where), newline="\n")
    try:
        return _tsv_record(next(_csv_reader(text, "\t")), fmt.columns, where)
    except (csv.Error, StopIteration) as error:
        raise UserError(f"{where}: malformed TSV ({error})") from None


def to_passage(record: Record, row: int, where: str) -> Passage:
    """Return the passage of `record`, with the id `row` if it has none. EmptyPassage for a blank text; the message of a
    UserError begins with `where`."""
    if "contents" in record:
        title, text = split_contents(string_field(record, "contents", where, may_be_empty=True))
        empty = '"contents" is a title without text' if title else '"contents" is empty'
    elif "text" in record or "title" in record:
        title = string_field(record, "title", where, may_be_empty=True)
        text = string_field(record, "text", where, may_be_empty=True)
        empty = '"text" is empty'
    else:
        raise UserError(f'{where}: expected "title" and "text", or "id" and "contents"; convert the file')
    key = next((key for key in ID_KEYS if key in record), "id")
    id_ = id_field(record, row, where, key=key)
    if not text or text.isspace():
        raise EmptyPassage(f"{where}: {empty}; fill it in, remove this record, or skip all empty ones (--skip-empty)")
    return Passage(id_, title, text)


def chunks(passage: Passage, words: int) -> Iterator[Passage]:
    """Split the text at white space into passages of `words` words, with ids `ID#0`, `ID#1`, .., and the title."""
    for number, match in enumerate(_chunk_pattern(words).finditer(passage.text)):
        yield Passage(f"{passage.id}#{number}", passage.title, match[0])


def document_of(id_: str) -> str:
    """Return the id of the passage that a chunk was cut from; any other id is returned unchanged."""
    return CHUNK_NUMBER.sub("", id_)


@lru_cache(maxsize=8)
def _chunk_pattern(words: int) -> re.Pattern[str]:
    # Words are matched possessively: a word of a million characters is scanned once, not once for every split of it.
    return re.compile(rf"\S++(?:\s++\S++){{0,{words - 1}}}")


def _iter_jsonl(path: Path) -> Iterator[tuple[str, int, Record]]:
    start = 0
    for number, line in iter_lines(path):
        begin, start = start, start + len(line)
        if number == 1 and line.startswith(BOM):
            begin, line = len(BOM), line[len(BOM) :]
        if stripped := line.rstrip():
            where = f"{path}:{number}"
            yield where, begin, as_object(parse_json(stripped, where), where)


def _iter_titles(path: Path) -> Iterator[tuple[str, int, Record]]:
    # Parsed as pairs, because a title may occur twice and a dict would silently drop one passage.
    pairs = parse_json(read_whole(path), str(path), pairs=True)
    for title, value in pairs if isinstance(pairs, list) else []:
        where = f"{path}: title {title!r}"
        sentences = [value] if isinstance(value, str) else value
        if not isinstance(sentences, list) or not all(isinstance(sentence, str) for sentence in sentences):
            raise UserError(f"{where}: expected a list of sentences; one JSON object should map titles to sentences")
        yield where, 0, {"title": title, "text": join_sentences(sentences)}


def join_sentences(sentences: list[str]) -> str:
    """Join sentences into a text. HotpotQA's begin with a space; one is put before those that do not."""
    text = ""
    for sentence in sentences:
        if text and sentence and not text[-1].isspace() and not sentence[0].isspace():
            text += " "
        text += sentence
    return text


def _iter_tsv(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[str, int, Record]]:
    malformed = (
        "malformed TSV ({}); a field that begins with a double quote should end with one, with those inside doubled, "
        "so fix or remove this record"
    )
    rows = iter_table(path, "\t", malformed)
    next(rows, None)  # the header
    for where, start, cells in rows:
        yield where, start, _tsv_record(cells, columns, where)


def iter_table(path: Path, delimiter: str, malformed: str) -> Iterator[tuple[str, int, list[str]]]:
    """Yield (where, start, cells) for every row of a table that is not blank, including the header. `malformed` is the
    error for a wrongly quoted row, with {} for the reason."""
    number = end = 0  # of the last line that was read

    def decoded() -> Iterator[str]:
        nonlocal number, end
        for number, line in iter_lines(path):
            end += len(line)
            yield decode_text(line.removeprefix(BOM) if number == 1 else line, f"{path}:{number}")

    reader = _csv_reader(decoded(), delimiter)
    while True:
        start, where = end, f"{path}:{number + 1}"
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise UserError(f"{where}: {malformed.format(error)}") from None
        if len(cells) > 1 or "".join(cells).strip():
            yield where, start, cells


# _csv.Reader has no public name before Python 3.12's stubs; only its iteration is used.
def _csv_reader(lines: Iterator[str], delimiter: str) -> Iterator[list[str]]:
    csv.field_size_limit(line_limit())
    return csv.reader(lines, delimiter=delimiter, strict=True)


def _tsv_record(cells: list[str], columns: tuple[str, ...], where: str) -> Record:
    if len(cells) != len(columns):
        raise UserError(
            f"{where}: expected {len(columns)} columns ({', '.join(columns)}), found {len(cells)}; fix this record"
        )
    return dict(zip(columns, cells, strict=True))


def _tsv_columns(path: Path, header: bytes) -> tuple[str, ...]:
    columns = _tsv_cells(header)
    if not set(columns) >= TSV_COLUMNS or len(set(columns)) < len(columns):
        raise UserError(
            f"{path}: the first line should be the header id, text, title (in any order, separated by tabs), found "
            f"{header[:60].decode('utf-8', 'replace')!r}; put the header there"
        )
    return columns


def _tsv_cells(line: bytes) -> tuple[str, ...]:
    try:
        return tuple(next(_csv_reader(iter([line.decode("utf-8", "replace")]), "\t"), []))
    except csv.Error:
        return ()


def _is_passage(line: bytes) -> bool:
    """Return whether `line` is a complete JSON object with a passage's text, as in JSONL under another name."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(record, dict) and isinstance(record.get("text", record.get("contents")), str)


def split_contents(contents: str) -> tuple[str, str]:
    """Return title and text of wiki-18's `contents`. The first line is the title, with or without quotes; a single line
    is all text."""
    title, line_feed, text = contents.partition("\n")
    if not line_feed:
        return "", contents
    quoted = len(title) >= 2 and title[0] == title[-1] == '"'
    return title[1:-1] if quoted else title, text
