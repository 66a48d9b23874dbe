"""Reading and writing records in JSON files: JSONL, a JSON list, and either of them gzipped.

A malformed line raises UserError with the file, the line and what was expected. Lines are split only at line feeds
(passages may contain U+2028) and decoded one by one; only blank lines are skipped.
"""

import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from thresher.common.errors import UserError
from thresher.common.files import atomic_path, unreadable

Record = dict[str, Any]
BOM = b"\xef\xbb\xbf"
HEAD_BYTES = 1 << 16
WHOLE_LIMIT = 4 << 30
LINE_LIMIT = "THRESHER_LINE_LIMIT"
TAR_MAGIC = (b"ustar\x0000", b"ustar  \x00")  # POSIX and GNU; with the NUL, because text may contain "mustard"
TAR_AT = slice(257, 265)
PACKED = {
    b"BZh": ("bzip2", "bzip2 -dc"),
    b"\xfd7zXZ\x00": ("xz", "xz -dc"),
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -dc"),
    b"PK\x03\x04": ("zip", "unzip -p"),
}


def iter_jsonl(path: str | Path) -> Iterator[tuple[int, Record]]:
    """Yield (line number from 1, JSON object) for every line of `path` that is not blank.

    A file whose name ends in `.gz` is decompressed. UserError for a file that is absent, unreadable or truncated, and
    for a line that is not a JSON object.
    """
    path = Path(path)
    for number, line in iter_lines(path):
        if number == 1:
            line = line.removeprefix(BOM)
        if line.strip():
            yield number, as_object(parse_json(line.rstrip(), f"{path}:{number}"), f"{path}:{number}")


def iter_records(path: str | Path) -> Iterator[tuple[str, Record]]:
    """Yield (where, JSON object) for the records of `path`: JSONL or, if named `.json` or `.json.gz`, a JSON list.

    where: the start of an error message, `file:line` or `file: item 3` (from 1). UserError as `iter_jsonl`.
    """
    path = Path(path)
    if path.name.removesuffix(".gz").endswith(".json"):
        yield from iter_list(path)
    else:
        for number, record in iter_jsonl(path):
            yield f"{path}:{number}", record


def iter_list(path: Path) -> Iterator[tuple[str, Record]]:
    """Yield as `iter_records` from a JSON list, for any file name. The file is parsed whole."""
    records = parse_json(read_whole(path), str(path))
    if not isinstance(records, list):
        raise UserError(f"{path}: expected a JSON list of objects, found {json_kind(records)}; convert the file")
    for number, record in enumerate(records, 1):
        yield f"{path}: item {number}", as_object(record, f"{path}: item {number}")


def write_jsonl(path: str | Path, records: Iterable[Record]) -> int:
    """Write one JSON object per line to `path` (gzipped if named `.gz`), atomically, and return their number. UserError
    if the folder does not exist. ValueError for NaN and infinities, which JSON does not have."""
    path = Path(path)
    if not path.parent.is_dir():
        raise UserError(f"{path}: the folder {path.parent} does not exist; make it first")
    count = 0
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        # The gzip header has no mtime and no name, so equal records give equal files.
        zipped = gzip.GzipFile(filename="", mode="wb", fileobj=file, mtime=0) if path.suffix == ".gz" else file
        with cast(IO[bytes], zipped) as out:
            for record in records:
                line = json.dumps(record, allow_nan=False, ensure_ascii=False)
                # A lone surrogate cannot be encoded in UTF-8; its backslash escape is also its JSON escape.
                out.write(line.encode("utf-8", "backslashreplace") + b"\n")
                count += 1
    return count


def string_field(record: Record, key: str, where: str, *, may_be_empty: bool = False) -> str:
    """Return the string under `key`. UserError, starting with `where`, if there is no usable string."""
    if key not in record:
        raise UserError(f'{where}: no "{key}" in this record; expected a string there')
    return checked_string(record[key], f'{where}: "{key}"', may_be_empty=may_be_empty)


def checked_string(value: object, where: str, *, may_be_empty: bool = False) -> str:
    """Return `value` if it is a usable string. UserError, starting with `where`, for anything else."""
    if not isinstance(value, str):
        raise UserError(f"{where} should be a string, found {json_kind(value)}; fix this record")
    if not may_be_empty and not value.strip():
        raise UserError(f"{where} is empty; fill it in or remove this record")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(
                f"{where} holds half of a surrogate pair, which is not a character; fix this record"
            ) from None
    return value


def id_field(record: Record, row: int, where: str, *, key: str = "id") -> str:
    """Return the record's id as a string (a number is converted), or `row` if it has none. UserError, starting with
    `where`, for any other type of id and for an empty one."""
    value = record.get(key, row)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return checked_string(value, f'{where}: "{key}"')


def iter_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (number from 1, line with its line feed) of `path`. UserError as `iter_jsonl`, and for a line longer than
    `line_limit`, because a few kilobytes of gzip may contain a line that fills the memory."""
    number, limit = 0, line_limit()
    with readable(path, lambda: f"after line {number}") as file:
        while line := file.readline(limit + 1):
            number += 1
            if len(line) > limit:
                raise UserError(
                    f"{path}:{number}: the line is longer than {limit:,} bytes; convert the file to one record per "
                    f"line, or set the environment variable {LINE_LIMIT} to more bytes"
                )
            yield number, line


def read_whole(path: Path) -> bytes:
    """Return the content of `path` without a byte order mark. UserError as `iter_lines`, up to WHOLE_LIMIT."""
    with readable(path, lambda: "at its beginning") as file:
        content = file.read(WHOLE_LIMIT + 1)
    if len(content) > WHOLE_LIMIT:
        raise UserError(f"{path}: holds more than {WHOLE_LIMIT:,} bytes in one JSON value; convert the file to JSONL")
    return content.removeprefix(BOM)


def line_limit() -> int:
    """Return the limit on the bytes of a line: 64 MB, unless the environment sets another."""
    said = os.environ.get(LINE_LIMIT, "64000000")
    if not said.isdecimal() or not 0 < int(said) < 2**62:
        raise UserError(f"{LINE_LIMIT} is {said!r}; expected a number of bytes, such as 64000000")
    return int(said)


def read_head(path: Path) -> bytes:
    """Return the first HEAD_BYTES of `path`, starting at its first line that is not blank."""
    with readable(path, lambda: "at its beginning") as file:
        line = next((line for line in iter(lambda: file.readline(HEAD_BYTES), b"") if line.strip()), b"")
        return line + file.read(max(0, HEAD_BYTES - len(line)))


@contextmanager
def readable(path: Path, place: Callable[[], str]) -> Iterator[IO[bytes]]:
    """Open `path` as a stream of bytes, decompressed if named `.gz`. place: describes in an error how far the file was
    read. UserError as `iter_lines`, and for a tar archive of any name."""
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            if file.peek(TAR_AT.stop)[TAR_AT] in TAR_MAGIC:
                raise UserError(f"{path}: is a tar archive; unpack it first: tar -xOf {path} > FILE.jsonl")
            for magic, (name, unpack) in PACKED.items():
                if file.peek(len(magic)).startswith(magic):
                    raise UserError(f"{path}: is {name} data; unpack it first: {unpack} {path} > FILE.jsonl")
            yield cast(IO[bytes], file)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{path}: truncated or damaged gzip data {place()} ({error}); fetch the file again") from None
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; check the path") from None
    except OSError as error:
        raise unreadable(path, error) from None


def parse_json(data: bytes, where: str, *, pairs: bool = False) -> object:
    """Return the JSON value of `data`. pairs: return objects as lists of (key, value), which keep repeated keys.
    UserError, starting with `where`, if `data` is not JSON in UTF-8."""
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=list if pairs else None)
    except json.JSONDecodeError as error:
        at = f"line {error.lineno} column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        raise UserError(f"{where}: not valid JSON at {at} ({error.msg}); fix or remove this record") from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{where}: not valid UTF-8 at byte {error.start}; expected UTF-8, so convert the file"
        ) from None
    except (RecursionError, ValueError) as error:
        raise UserError(f"{where}: not valid JSON ({error}); fix or remove this record") from None


def as_object(value: object, where: str) -> Record:
    """Return `value` if it is a JSON object. UserError, starting with `where`, for anything else."""
    if not isinstance(value, dict):
        raise UserError(f"{where}: expected a JSON object, found {json_kind(value)}; fix or remove this record")
    return value


def json_kind(value: object) -> str:
    """Return the JSON name of the type of `value`."""
    if value is None:
        return "null"
    names = {bool: "a boolean", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), "a number")
