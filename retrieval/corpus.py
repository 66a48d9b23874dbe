"""Passages by row, in memory or left in their file.

A passage has an id (its name) and a row (its place in corpus and index). The text is stored unchanged; control tags are
escaped when it is rendered for a model. `read_corpus` reads a file into memory. `open_corpus` leaves it on disk: one
pass checks every record, hashes the content and stores the byte at which each passage begins. A file without byte
offsets (gzip, a JSON list or object), or one that is split into chunks, is copied to plain JSONL next to the offsets.
"""

import hashlib
import json
import os
import weakref
from array import array
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import IO, overload

import numpy as np

from thresher.common.errors import UserError
from thresher.common.files import atomic_path, atomic_write_text
from thresher.common.hashes import read_hashes, write_list
from thresher.retrieval.passages import (
    LINES,
    CorpusFormat,
    EmptyPassage,
    chunks,
    detect_format,
    iter_located,
    record_at,
    to_passage,
)
from thresher.retrieval.passages import Passage as Passage

OFFSETS_FILE = "corpus.offsets"  # uint64, little-endian: the beginning of each passage, and the end of the last one
COPY_FILE = "corpus.copy.jsonl"
LEDGER_FILE = "corpus.ledger.json"
HASHES_FILE = "corpus.hashes.json"  # of the offsets, and of the file that they refer to, wherever it is
CACHE_FILES = (OFFSETS_FILE, COPY_FILE, HASHES_FILE, LEDGER_FILE)  # the ledger is written last
STORED = "passages"
LEDGER_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """The record of a cache folder, `corpus.ledger.json`, written last and removed first. source_bytes,
    source_mtime_ns: of the original. stored_bytes: of the file that the offsets refer to, the copy if `copied`."""

    format: int
    source_bytes: int
    source_mtime_ns: int
    copied: bool
    stored_bytes: int
    chunk_words: int
    skip_empty: bool
    records: int
    skipped: int
    passages: int
    sha256: str

    def write(self, cache: Path) -> None:
        """Write `corpus.ledger.json` to the folder `cache`."""
        atomic_write_text(cache / LEDGER_FILE, json.dumps(asdict(self), indent=2) + "\n")

    def describes(self, path: Path, cache: Path, chunk_words: int, skip_empty: bool) -> bool:
        """Return whether file and options are unchanged, and the files of the cache are complete."""
        if (self.chunk_words, self.skip_empty) != (chunk_words, skip_empty):
            return False
        if (self.source_bytes, self.source_mtime_ns) != stamp(os.stat(path)):
            return False
        files = {OFFSETS_FILE: 8 * (self.passages + 1), **({COPY_FILE: self.stored_bytes} if self.copied else {})}
        return all((cache / name).is_file() and (cache / name).stat().st_size == size for name, size in files.items())


def read_ledger(cache: Path) -> Ledger | None:
    """Return the ledger in `cache`; None if there is none that this version wrote."""
    try:
        record = json.loads((cache / LEDGER_FILE).read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or record.get("format") != LEDGER_FORMAT:
        return None
    if any(type(record.get(field.name)) is not field.type for field in fields(Ledger)):
        return None
    return Ledger(**{field.name: record[field.name] for field in fields(Ledger)})


def stamp(stat: os.stat_result) -> tuple[int, int]:
    """Return size and modification time of a file."""
    return stat.st_size, stat.st_mtime_ns


PAIRED = "title[SEP]text"  # as DPR reads a passage
EMBEDS = ("text", "title+text", PAIRED)
OFFSETS_AT_A_TIME = 1 << 12  # buffered before they are written
PASSAGES_AT_A_TIME = 256  # read in iteration
# Hashes that occur twice whose ids the second pass compares; more of them would not change the error.
MOST_SUSPECTS = 1 << 16


class Corpus(Sequence[Passage]):
    """Passages by row, at least one, with distinct ids. path: their file, if any. records: their number in that file.
    skipped: the number of empty records, which are left out."""

    path: Path | None
    records: int
    skipped: int

    def __init__(
        self,
        passages: Sequence[Passage],
        path: str | Path | None = None,
        *,
        records: int | None = None,
        skipped: int = 0,
    ) -> None:
        self.path = None if path is None else Path(path)
        self._passages = tuple(passages)
        self.records = len(self._passages) if records is None else records
        self.skipped = skipped
        source = str(path) if path is not None else "the corpus"
        if not self._passages:
            raise UserError(_no_passages(source, skipped))
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
        if isinstance(row, slice):
            rows = range(len(self))[row]
            return tuple(self._run(rows.start, rows.stop) if rows.step == 1 else (self[each] for each in rows))
        row = range(len(self))[row]
        return next(self._run(row, row + 1))

    def __iter__(self) -> Iterator[Passage]:
        for start in range(0, len(self), PASSAGES_AT_A_TIME):
            yield from self._run(start, min(start + PASSAGES_AT_A_TIME, len(self)))

    def _run(self, first: int, end: int) -> Iterator[Passage]:
        return iter(self._passages[first:end])

    @cached_property
    def sha256(self) -> str:
        """Return the hash of ids, titles and texts in row order, in hexadecimal, for any format of the file."""
        digest = hashlib.sha256()
        for passage in self:
            digest.update(_hashed(passage))
        return digest.hexdigest()


def read_corpus(path: str | Path, *, chunk_words: int = 0, skip_empty: bool = False) -> Corpus:
    """Read a corpus, in any format of `passages`, into memory.

    A missing id is the row number. `chunk_words`, unless 0, splits every text into passages of this number of words,
    with ids from `ID#0`. `skip_empty` omits and counts records without text. UserError names file and line.
    """
    scan = _Scan(Path(path), detect_format(path), chunk_words, skip_empty)
    passages: list[Passage] = []
    place_of: dict[str, str] = {}
    for where, _, passage in scan:
        if passage.id in place_of:
            raise UserError(_used_before(passage.id, where, place_of[passage.id]))
        place_of[passage.id] = where
        passages.append(passage)
    return Corpus(passages, path, records=scan.records, skipped=scan.skipped)


def open_corpus(
    path: str | Path,
    cache: str | Path,
    *,
    chunk_words: int | None = None,
    skip_empty: bool | None = None,
    verify: bool = True,
) -> Corpus:
    """Open a corpus without reading it into memory; content, hash, order and errors are those of `read_corpus`.

    `cache` is a folder for the results of the pass: offsets, hashes, ledger, and a copy if there are no byte offsets.
    It is reused while the file's size and modification time and the options are the same. An option that is None is
    taken from the cache, and is 0 or False in a new one. A killed pass leaves a complete cache or none.

    RAM: 8 bytes per passage during the pass, almost none after it (a JSON list or object is parsed as a whole). Disk: 8
    bytes per passage, and the copy. Several threads may read the same corpus. `verify`: offsets are compared with their
    hashes here, passages when first read. UserError if a passage is read from a file that has changed.
    """
    path, cache = Path(path), Path(cache)
    if path.name in CACHE_FILES and path.resolve().parent == cache.resolve():
        raise UserError(f"{path}: would be overwritten by its cache in {cache}; rename it, or name another folder")
    fmt = detect_format(path)
    ledger = read_ledger(cache)
    if chunk_words is None:
        chunk_words = ledger.chunk_words if ledger else 0
    if skip_empty is None:
        skip_empty = ledger.skip_empty if ledger else False
    if ledger is None or not ledger.describes(path, cache, chunk_words, skip_empty):
        try:
            cache.mkdir(parents=True, exist_ok=True)
            ledger = _write_cache(_Scan(path, fmt, chunk_words, skip_empty), cache)
        except OSError as error:
            raise UserError(
                f"{cache}: cannot store what a pass over {path} finds ({error.strerror}); make room there, or make the "
                "folder writable"
            ) from None
    return _StoredCorpus(path, cache, ledger, LINES if ledger.copied else fmt, verify)


def embedded_text(passage: Passage, embed: str) -> str:
    """Return the text of `passage`, or its title and text joined by a line feed or BERT's [SEP]. `embed` is one of
    EMBEDS."""
    check_embed(embed)
    if embed == "text" or not passage.title:
        return passage.text
    between = " [SEP] " if embed == PAIRED else "\n"
    return f"{passage.title}{between}{passage.text}"


def check_embed(embed: str) -> None:
    """Raise UserError unless `embed` is one of EMBEDS."""
    if embed not in EMBEDS:
        raise UserError(f"embed is {embed!r}; expected one of {', '.join(EMBEDS)}")


class _Scan:
    """Passes over a file. Iteration yields (where, byte at which the record starts, passage), and counts records."""

    def __init__(self, path: Path, fmt: CorpusFormat, chunk_words: int, skip_empty: bool) -> None:
        if chunk_words < 0:
            raise UserError(f"{path}: chunk_words is {chunk_words}; expected at least 1 word, or 0 for whole passages")
        self.path, self.fmt, self.chunk_words, self.skip_empty = path, fmt, chunk_words, skip_empty
        self.records = self.skipped = 0

    def __iter__(self) -> Iterator[tuple[str, int, Passage]]:
        self.records = self.skipped = 0
        for where, start, record in iter_located(self.path, self.fmt):
            self.records += 1
            try:
                passage = to_passage(record, self.records - self.skipped - 1, where)
            except EmptyPassage:
                if not self.skip_empty:
                    raise
                self.skipped += 1
                continue
            if self.chunk_words:
                for chunk in chunks(passage, self.chunk_words):
                    yield where, start, chunk
            else:
                yield where, start, passage


def _write_cache(scan: _Scan, cache: Path) -> Ledger:
    before = os.stat(scan.path)
    copied = scan.chunk_words > 0 or not scan.fmt.seekable
    digest = hashlib.sha256()
    id_hashes, starts = array("q"), array("Q")
    end = 0
    with ExitStack() as stack:
        offsets = stack.enter_context(stack.enter_context(atomic_path(cache / OFFSETS_FILE)).open("wb"))
        copy = stack.enter_context(stack.enter_context(atomic_path(cache / COPY_FILE)).open("wb")) if copied else None
        for _, start, passage in scan:
            digest.update(_hashed(passage))
            id_hashes.append(hash(passage.id))
            starts.append(end if copied else start)
            if copy:
                end += copy.write(_json_line(passage))
            if len(starts) == OFFSETS_AT_A_TIME:
                _flush(starts, offsets)
        if not id_hashes:
            raise UserError(_no_passages(str(scan.path), scan.skipped))
        passages = len(id_hashes)
        _check_ids(id_hashes, scan)
        if stamp(os.stat(scan.path)) != stamp(before):
            raise UserError(f"{scan.path}: changed while it was read; wait until it is written, then start again")
        starts.append(end if copied else before.st_size)
        _flush(starts, offsets)
        (cache / LEDGER_FILE).unlink(missing_ok=True)  # just before the new files replace the old ones
    write_list(
        cache / HASHES_FILE,
        {OFFSETS_FILE: cache / OFFSETS_FILE, STORED: cache / COPY_FILE if copied else scan.path},
    )
    ledger = Ledger(
        format=LEDGER_FORMAT,
        source_bytes=before.st_size,
        source_mtime_ns=before.st_mtime_ns,
        copied=copied,
        stored_bytes=end if copied else before.st_size,
        chunk_words=scan.chunk_words,
        skip_empty=scan.skip_empty,
        records=scan.records,
        skipped=scan.skipped,
        passages=passages,
        sha256=digest.hexdigest(),
    )
    ledger.write(cache)
    return ledger


def _check_ids(id_hashes: "array[int]", scan: _Scan) -> None:
    """Raise UserError, naming both places, if an id occurs twice; for equal hashes, a second pass compares the ids."""
    hashes = np.frombuffer(id_hashes, np.int64)
    hashes.sort()
    suspects = set(hashes[1:][hashes[1:] == hashes[:-1]][:MOST_SUSPECTS].tolist())
    if not suspects:
        return
    place_of: dict[str, str] = {}
    for where, _, passage in scan:
        if hash(passage.id) in suspects:
            if passage.id in place_of:
                raise UserError(_used_before(passage.id, where, place_of[passage.id]))
            place_of[passage.id] = where


class _StoredCorpus(Corpus):
    """A corpus left on disk: file and offsets are open, passages are read on access."""

    def __init__(self, path: Path, cache: Path, ledger: Ledger, fmt: CorpusFormat, verify: bool) -> None:
        self.path = path
        self.records, self.skipped, self.sha256 = ledger.records, ledger.skipped, ledger.sha256
        self._stored = cache / COPY_FILE if ledger.copied else path
        self._fmt = fmt
        # No file object: each read states its position, so that threads do not interfere, and nothing is buffered.
        self._file = os.open(self._stored, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)
        self._stamp = stamp(os.fstat(self._file))
        self._blocks = None
        if verify and (hashes := read_hashes(cache, file=HASHES_FILE)) is not None:
            hashes.check([OFFSETS_FILE])
            self._blocks = hashes.blocks(STORED, self._stored)
        self._offsets = np.memmap(cache / OFFSETS_FILE, dtype="<u8", mode="r")
        # Another process may have written to the file or the cache since the ledger was read.
        if (self._stamp[0], len(self)) != (ledger.stored_bytes, ledger.passages):
            raise UserError(self._changed())
        if not ledger.copied and self._stamp != (ledger.source_bytes, ledger.source_mtime_ns):
            raise UserError(self._changed())

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def _run(self, first: int, end: int) -> Iterator[Passage]:
        """Yield the passages of rows `first` to `end`, exclusive, from one read."""
        if first >= end:
            return
        places = self._offsets[first : end + 1].tolist()
        data = self._read(places[0], places[-1])
        for row, begin, stop in zip(range(first, end), places, places[1:], strict=False):
            where = f"{self._stored}: row {row}"
            piece = data[begin - places[0] : stop - places[0]]
            yield to_passage(record_at(piece, self._fmt, where), row, where)

    def _read(self, begin: int, end: int) -> bytes:
        first, parts = begin, []
        while begin < end:  # one read gives 2 GiB at most
            parts.append(os.pread(self._file, end - begin, begin))
            begin += len(parts[-1])
            if not parts[-1]:
                break
        if begin != end or stamp(os.fstat(self._file)) != self._stamp:
            raise UserError(self._changed())
        if self._blocks is not None:
            self._blocks.touch(first, end)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _changed(self) -> str:
        return f"{self._stored}: changed since it was opened; leave it as it is, and start again"


def _flush(starts: "array[int]", file: IO[bytes]) -> None:
    file.write(np.frombuffer(starts, np.uint64).astype("<u8").tobytes())
    del starts[:]


def _json_line(passage: Passage) -> bytes:
    record = {"id": passage.id, "title": passage.title, "text": passage.text}
    return json.dumps(record, ensure_ascii=False).encode("utf-8") + b"\n"


def _hashed(passage: Passage) -> bytes:
    parts = []
    for field in (passage.id, passage.title, passage.text):
        data = field.encode("utf-8", "surrogatepass")
        # The length prefix distinguishes ("ab", "c") from ("a", "bc").
        parts += [len(data).to_bytes(8, "little"), data]
    return b"".join(parts)


def _no_passages(source: str, skipped: int) -> str:
    besides = f" besides {skipped} empty ones" if skipped else ""
    return f"{source}: holds no passages{besides}; expected at least one"


def _used_before(id_: str, where: str, before: str) -> str:
    return f"{where}: the id {id_!r} was used before, at {before}; give every passage its own"
