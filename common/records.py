"""Stored records: JSONL in which a changed, lost, duplicated or moved record is detected.

    {"step": 1, .., "checksum": "1f4a.."}      one record per line; 16 hex digits, always the last key
    {"step": 2, .., "checksum": "90c3.."}
    {"records": 2, "digest": "90c3.."}         the closing line of a finished file: their number, and 64 hex digits

A checksum is the beginning of the SHA-256 of all records so far, each as its line of JSON without the checksum, with
its line feed; the digest is the whole SHA-256 of the last one. A file without checksums is of an earlier version or
another program: it is read with one warning per folder. Checksums do not protect against people, who can compute them.
"""

import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from thresher.common.errors import UserError
from thresher.common.files import Unwritable, append_bytes, atomic_path, atomic_write_text, read_json_object
from thresher.common.jsonl import BOM, Record, as_object, iter_lines, parse_json

CHECKSUM, DIGITS = "checksum", 16
REMEDY = "put a copy back, or read it as it is with --unverified"
# For files from which people make other files.
ON_PURPOSE = (
    "put a copy back, or remove the checksums from a file that was changed on purpose: "
    "jq -c 'select(.checksum) | del(.checksum)'"
)

_warned: set[Path] = set()


class _Chain:
    """Running number and digest of records."""

    def __init__(self) -> None:
        self.records, self._hash = 0, sha256()

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()

    @property
    def mark(self) -> dict[str, Any]:
        return {"records": self.records, "sha256": self.digest}

    def copy(self) -> "_Chain":
        other = _Chain()
        other.records, other._hash = self.records, self._hash.copy()
        return other

    def add(self, line: bytes) -> bytes:
        """Add a record, given as its line without a checksum; return the line to store."""
        self.records += 1
        self._hash.update(line)
        return line[:-2] + _tail(self.digest[:DIGITS]) + b"\n"

    def closing_line(self) -> bytes:
        return json_line({"records": self.records, "digest": self.digest})


def _tail(checksum: str) -> bytes:
    return f', "{CHECKSUM}": "{checksum}"}}'.encode()


_TAIL = len(_tail("0" * DIGITS))
_CLOSING = re.compile(rb'\{"records": \d+, "digest": "[0-9a-f]{64}"\}\n?')


def json_line(record: Mapping[str, Any]) -> bytes:
    """Return a record as a line of JSON. Numbers that are not finite become null."""
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError):  # slower, only for records that need it
        text = json.dumps(finite(record), ensure_ascii=False, allow_nan=False)
    # A lone surrogate cannot be encoded in UTF-8; its backslash escape is the same character in JSON.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def finite(value: Any) -> Any:
    """Return plain JSON values: None for nan and infinities, numbers for NumPy and torch scalars."""
    if isinstance(value, Mapping):
        return {str(key): finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def mark_of(records: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the number of these records and their digest, as in a file of them."""
    chain = _Chain()
    for record in records:
        chain.add(json_line(record))
    return chain.mark


def write_records(path: Path, records: Iterable[Mapping[str, Any]], *, closed: bool = True) -> dict[str, Any]:
    """Write a file of records atomically; return their mark. closed: with a closing line."""
    chain = _Chain()
    with atomic_path(path) as temporary, temporary.open("wb") as file:
        for record in records:
            file.write(chain.add(_plain_line(record)))
        if closed:
            file.write(chain.closing_line())
    return chain.mark


def _plain_line(record: Mapping[str, Any]) -> bytes:
    if not record or CHECKSUM in record:
        raise ValueError(f'a stored record needs keys, none of them "{CHECKSUM}", got {str(record)[:80]}')
    return json_line(record)


def read_records(
    path: str | Path,
    *,
    unverified: bool = False,
    foreign: bool = False,
    expected: Mapping[str, Any] | None = None,
    owner: Path | None = None,
    remedy: str = REMEDY,
) -> Iterator[tuple[int, Record]]:
    """Yield (line number from 1, record without its checksum). UserError, ending with `remedy`, for a file that was
    changed.

    unverified: ignore checksums. foreign: the file may be of another program, so do not warn if there are no checksums.
    expected: the mark of its records. owner: the folder named in the warning; default: the folder of the file.
    """
    reader = _Reader(Path(path), unverified, False, foreign, owner, remedy)
    yield from reader.records(expected)


class _Reader:
    """One pass over a file of records. growing: the file may be unfinished and end in a partial line, after a kill.
    Afterwards `chain` includes all records; `end` and `size` are the bytes up to the end of the last record and of the
    file; `closed`: there is a closing line; `as_written`: records can be appended."""

    def __init__(
        self, path: Path, unverified: bool, growing: bool, foreign: bool, owner: Path | None, remedy: str
    ) -> None:
        self.path, self.unverified, self.growing, self.foreign = path, unverified, growing, foreign
        self.owner, self.remedy = owner or path.parent, remedy
        self.chain = _Chain()
        self.end = self.size = 0
        self.closed, self.as_written = False, True
        self._guarded: bool | None = None  # whether lines have checksums; None before the first line

    def records(self, expected: Mapping[str, Any] | None = None) -> Iterator[tuple[int, Record]]:
        wanted = None if expected is None else expected.get("records")
        for number, line in iter_lines(self.path):
            self.size += len(line)
            record = self._record(number, line)
            if record is None:
                continue
            yield number, record
            if self.chain.records == wanted and self.chain.mark != expected:
                self._refuse(self.path, f"its first {wanted} records differ from those that were counted at the end")
        count = self.chain.records
        if isinstance(wanted, int) and (count < wanted or (count > wanted and not self.growing)):
            self._refuse(self.path, f"has {count} records, but {wanted} were written")
        finished = not self.growing if wanted is None else count == wanted
        if self._guarded is False and not (self.foreign or self.unverified):
            warn_unguarded(self.owner, self.path)
        elif self._guarded is not False and finished and not self.closed and not (self.foreign and count == 0):
            self._refuse(self.path, "has no closing line: it was truncated, or its writer has not finished")

    def _record(self, number: int, line: bytes) -> Record | None:
        """Return the record of a line; None for a line without one."""
        where = f"{self.path}:{number}"
        line = line.removeprefix(BOM) if number == 1 else line
        if not line.strip() and (self.unverified or not self._guarded):
            return None
        guarded, closing = _checksum(line) is not None, _CLOSING.fullmatch(line) is not None
        if self._guarded is None:
            self._guarded = guarded or closing
        verified = self._guarded and not self.unverified
        if not line.endswith(b"\n"):
            if (self.growing or self.unverified) and (verified or not _is_object(line)):
                return None
            if verified:
                self._refuse(where, "is cut off")
        if closing:
            if self.closed or line != self.chain.closing_line():
                self._refuse(where, f"is not the closing line of the {self.chain.records} records before it")
            self.closed = True
            return None
        if self.closed:
            self._refuse(where, "comes after the closing line")
            self.closed = False
        if verified and not guarded:
            self._refuse(where, "has no checksum, unlike the lines before it")
        if verified and self.chain.add(line[: -_TAIL - 1] + b"}\n") != line:
            self._refuse(where, "does not follow from the lines before it: one was changed, lost, duplicated or moved")
        record = as_object(parse_json(line.rstrip(), where), where)
        if not verified:
            if isinstance(found := record.get(CHECKSUM), str) and len(found) == DIGITS:
                self._refuse(where, "has a checksum, unlike the lines before it" if guarded else "was rewritten")
            self.chain.add(json_line({key: value for key, value in record.items() if key != CHECKSUM}))
            self.as_written = False
        self.end = self.size
        record.pop(CHECKSUM, None)
        return record

    def _refuse(self, where: object, what: str) -> None:
        if not self.unverified:
            raise UserError(f"{where}: {what}; {self.remedy}")


def _checksum(line: bytes) -> str | None:
    tail = line.removesuffix(b"\n")[-_TAIL:]
    found = tail[-DIGITS - 2 : -2].decode("ascii", "replace")
    return found if tail == _tail(found) else None


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def warn_unguarded(owner: Path, path: Path) -> None:
    """Warn, once per folder, that a file in it has no checksums."""
    if owner not in _warned:
        _warned.add(owner)
        name = path.relative_to(owner) if path.is_relative_to(owner) else path
        print(
            f"thresher: {owner}: {name} was written by an earlier version, without checksums: changed or lost records "
            "cannot be detected",
            file=sys.stderr,
        )


class RecordLog:
    """A growing file of records, with this process as its only writer. `recover` reads the existing records.

    The next append cuts off a partial last line, left by a kill, and a closing line. A file without checksums, or one
    that is read unverified, is first rewritten with checksums.
    """

    def __init__(self, path: str | Path, *, unverified: bool = False, remedy: str = REMEDY) -> None:
        self.path = Path(path)
        self._opened = partial(_Reader, self.path, unverified, True, False, None, remedy)
        self._found = self._opened()

    def recover(self, expected: Mapping[str, Any] | None = None) -> Iterator[tuple[int, Record]]:
        """Yield the existing records, as `read_records`. All must be consumed before an append. expected: the mark of
        the first ones."""
        self._found = self._opened()
        if self.path.exists():
            yield from self._found.records(expected)

    @property
    def mark(self) -> dict[str, Any]:
        """Return the number of all records, and their digest."""
        return self._found.chain.mark

    @property
    def as_left(self) -> bool:
        """Return whether the file still has the size after the last write of this log."""
        return (self.path.stat().st_size if self.path.exists() else 0) == self._found.size

    def append(self, *records: Mapping[str, Any]) -> None:
        """Append records, which survive a later kill. UserError if another program has changed the file."""
        lines = [_plain_line(record) for record in records]
        self._write(lambda chain: b"".join(map(chain.add, lines)))
        self._found.end, self._found.closed = self._found.size, False

    def finish(self) -> dict[str, Any]:
        """Append the closing line, if it is missing; return the mark of all records."""
        if not self._found.closed:
            self._write(_Chain.closing_line)
            self._found.closed = True
        return self.mark

    def _write(self, make: Callable[[_Chain], bytes]) -> None:
        found = self._found
        if not self.as_left:
            what = "changed" if self.path.exists() else "deleted"
            raise UserError(
                f"{self.path}: was {what} by another program while this one was writing to it; put a copy back, and "
                "run the same command again"
            )
        if not found.as_written:
            kept = read_records(self.path, unverified=True)
            write_records(self.path, (record for _, record in kept), closed=False)
            found.end = found.size = self.path.stat().st_size
            found.as_written = True
        chain = found.chain.copy()
        data = make(chain)
        closing = b""
        try:
            if found.size != found.end:
                closing = self.path.read_bytes()[found.end :]
                os.truncate(self.path, found.end)
                found.size = found.end
            append_bytes(self.path, data)
        except Unwritable:
            with suppress(OSError):  # remove a partial write, and close the file again
                os.truncate(self.path, found.end)
                if closing:
                    append_bytes(self.path, closing)
                    found.size = found.end + len(closing)
            raise
        except OSError as error:
            raise Unwritable(self.path, error) from None
        found.chain, found.size = chain, found.end + len(data)


def write_object(path: Path, values: Mapping[str, Any]) -> None:
    """Write one JSON object with its digest, atomically. Numbers that are not finite become null."""
    plain = finite(values)
    text = json.dumps(plain | {"digest": sha256(json_line(plain)).hexdigest()}, indent=2, allow_nan=False)
    atomic_write_text(path, text + "\n")


def read_object(path: Path, *, unverified: bool = False, remedy: str = REMEDY) -> dict[str, Any]:
    """Return an object written by `write_object`, without its digest. Arguments as in `read_records`."""
    values = read_json_object(path)
    digest = values.pop("digest", None)
    if unverified:
        return values
    if digest is None:
        warn_unguarded(path.parent, path)
    elif digest != sha256(json_line(values)).hexdigest():
        raise UserError(f"{path}: was changed since it was written, as its digest shows; {remedy}")
    return values
