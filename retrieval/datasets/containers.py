"""Records from all kinds of files: JSON lines, one JSON list, TriviaQA's object with its "Data", CSV, TSV, parquet.

All are read in pieces: a JSON list needs the memory of its longest item, parquet that of a batch. `.gz` may follow
every name except parquet's.
"""

import codecs
import importlib
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from thresher.common.errors import UserError
from thresher.common.jsonl import (
    BOM,
    HEAD_BYTES,
    Record,
    as_object,
    iter_jsonl,
    json_kind,
    read_head,
    readable,
)
from thresher.retrieval.passages import iter_table

PIECE = 1 << 20  # minimum number of characters of a JSON list to read at a time
BATCH = 1024  # rows of parquet
DATA = re.compile(rb'"Data"\s*:\s*\[')
SPACE = re.compile(r"[\s,]*")
TEXT_SPACE = re.compile(r"\s*")


def iter_rows(path: str | Path) -> Iterator[tuple[str, Record]]:
    """Yield (where, record) for every record of `path`; error messages begin with `where`. A suffix `.jsonl`, `.csv`,
    `.tsv` or `.parquet` determines the reader, else the first characters do."""
    path = Path(path)
    suffix = Path(path.name.removesuffix(".gz")).suffix
    head = read_head(path).removeprefix(BOM).lstrip()
    if suffix == ".parquet" or head.startswith(b"PAR1"):
        return _iter_parquet(path)
    if suffix in (".csv", ".tsv"):
        return _iter_table(path, "\t" if suffix == ".tsv" else ",")
    if suffix != ".jsonl" and head.startswith(b"["):
        return _iter_items(path, f"{path}: item ")
    if suffix != ".jsonl" and DATA.search(head):
        return _iter_items(path, f"{path}: item ", key="Data")
    if suffix == ".json" and not _is_object(head.partition(b"\n")[0]):
        raise UserError(
            f'{path}: expected a JSON list of questions, one JSON object a line, or an object with a list "Data"; '
            "found none of these, so convert the file"
        )
    return ((f"{path}:{number}", record) for number, record in iter_jsonl(path))


def plain(value: object) -> Any:
    """Return `value` in the types of JSON: NaN and infinities become null, dates and bytes become strings."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    return str(value)


def _is_object(line: bytes) -> bool:
    """Return whether the line is a complete object, or one that is truncated at the end of the head."""
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return len(line) > HEAD_BYTES // 2


class _Text:
    """The text of a JSON file, with a window of it in memory."""

    def __init__(self, path: Path) -> None:
        self.window, self.at, self.ended = "", 0, False
        self._pieces = self._read(path)

    def more(self) -> None:
        """Drop the window's text before `at`, and read until it is at least twice as long as the rest."""
        self.window, self.at = self.window[self.at :], 0
        wanted = max(PIECE, 2 * len(self.window))
        parts = [self.window]
        length = len(self.window)
        while length < wanted and not self.ended:
            piece = next(self._pieces, None)
            self.ended = piece is None
            parts.append(piece or "")
            length += len(parts[-1])
        self.window = "".join(parts)

    def skip(self, pattern: re.Pattern[str]) -> str:
        """Advance `at` past a match of `pattern`; return the character there, "" at the end of the file."""
        while True:
            match = pattern.match(self.window, self.at)
            self.at = match.end() if match else self.at
            if self.at < len(self.window) or self.ended:
                return self.window[self.at : self.at + 1]
            self.more()

    def value(self, where: str) -> object:
        """Return the JSON value that begins at `at`, and advance `at` past it."""
        decode = json.JSONDecoder().raw_decode
        while True:
            try:
                found, end = decode(self.window, self.at)
            except json.JSONDecodeError as error:
                if self.ended:
                    raise UserError(f"{where}: not valid JSON ({error.msg}); fix or remove this record") from None
            except (RecursionError, ValueError) as error:
                raise UserError(f"{where}: not valid JSON ({error}); fix or remove this record") from None
            else:
                if end < len(self.window) or self.ended:  # a number at the window's end may continue after it
                    self.at = end
                    return found
            self.more()

    @staticmethod
    def _read(path: Path) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8-sig")()
        read = 0
        try:
            with readable(path, lambda: f"after byte {read}") as file:
                while data := file.read(PIECE):
                    yield decoder.decode(data)
                    read += len(data)
            yield decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path}: not valid UTF-8 near byte {read + error.start}; expected UTF-8, so convert the file"
            ) from None


def _iter_items(path: Path, label: str, key: str | None = None) -> Iterator[tuple[str, Record]]:
    """Yield the items of a JSON list, or of the list under `key` of one JSON object, numbered from 1."""
    text = _Text(path)
    if key is not None:
        _enter(text, key, path)
    text.skip(TEXT_SPACE)
    text.at += 1  # the bracket
    number = 0
    while (character := text.skip(TEXT_SPACE)) and character != "]":
        if number:
            if character != ",":
                raise UserError(f"{path}: expected a comma after item {number}, found {character!r}; fix the file")
            text.at += 1
            text.skip(TEXT_SPACE)
        number += 1
        where = f"{label}{number}"
        yield where, as_object(text.value(where), where)
    text.at += 1
    ended = character == "]"
    if ended and key is not None:
        _pass_keys(text, None, path)
        ended = text.skip(TEXT_SPACE) == "}"
        text.at += 1
    if not ended:
        raise UserError(f"{path}: the JSON list breaks off after item {number}; fetch the file again")
    if text.skip(TEXT_SPACE):
        raise UserError(f"{path}: more follows the JSON list of {number} items; give each list a file of its own")


def _enter(text: _Text, key: str, path: Path) -> None:
    """Skip the keys of an object before `key`, up to its list."""
    text.skip(TEXT_SPACE)
    text.at += 1  # the brace
    if not _pass_keys(text, key, path):
        raise UserError(f'{path}: no list "{key}" in this object; convert the file')


def _pass_keys(text: _Text, key: str | None, path: Path) -> bool:
    """Skip keys of an object, up to the list under `key`. Return whether it was found."""
    while text.skip(SPACE) == '"':
        name = text.value(str(path))
        if text.skip(TEXT_SPACE) != ":":
            break
        text.at += 1
        if text.skip(TEXT_SPACE) == "[" and name == key:
            return True
        text.value(str(path))
    return False


def _iter_table(path: Path, delimiter: str) -> Iterator[tuple[str, Record]]:
    rows = iter_table(path, delimiter, "malformed table ({}); fix or remove this record")
    columns: list[str] | None = None
    for where, _, cells in rows:
        if columns is None:
            columns = [cell.strip() for cell in cells]
            for name in filter(None, columns):
                if columns.count(name) > 1:
                    raise UserError(f"{where}: the column {name!r} occurs twice; give every column its own name")
        elif len(cells) != len(columns):
            raise UserError(
                f"{where}: expected {len(columns)} cells ({', '.join(columns)}), found {len(cells)}; fix this record"
            )
        else:
            yield where, dict(zip(columns, cells, strict=True))


def _iter_parquet(path: Path) -> Iterator[tuple[str, Record]]:
    try:
        arrow = importlib.import_module("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise UserError(
            f"{path}: parquet is read with pyarrow, which is not installed; install thresher with its extra [data], or "
            "write the file as JSON lines"
        ) from None
    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=BATCH):
                for record in batch.to_pylist():
                    number += 1
                    yield f"{path}: row {number}", record
    except (arrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path}: not a readable parquet file after row {number} ({reason}); fetch it again") from None


def parsed(value: object, where: str) -> object:
    """Return `value`, parsed as JSON if it is a string."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        raise UserError(f"{where} should hold JSON, found {value[:40]!r}; fix this record") from None


def listed(value: object, where: str) -> list[Any]:
    """Return `value`, which may be JSON in a string. UserError, starting with `where`, unless it is a list."""
    found = parsed(value, where)
    if not isinstance(found, list):
        raise UserError(f"{where} should be a list, found {json_kind(found)}; fix this record")
    return found
