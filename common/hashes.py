"""Block hashes of a folder's files, which detect a flipped bit before it is used: `hashes.json`.

    {"format": 1, "block": 262144, "files": {"state.json": {"bytes": .., "digests": ["..", ..]}, ..}, "own": ".."}

A digest is the first 128 bits of the SHA-256 of one block, "own" that of the list itself. Hashes protect against
errors of disks, copies and memory, not against people. Files that are read whole are verified before use, a block of a
mapped file when it is first touched (`Blocks`). A folder without the file is read unverified.
"""

import hashlib
import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from thresher.common.errors import UserError
from thresher.common.files import MOST_BYTES, MOST_TEXT, atomic_write_text, check_file, read_bytes, read_json_object

FILE = "hashes.json"
FORMAT = 1
# Reading a single row costs the hash of its block, .2 ms; a list has 144 bytes of digests per MiB.
BLOCK = 1 << 18
DIGEST_CHARS = 32
MODEL_FILES = ("config.json", "*.safetensors", "tokenizer.json")  # files of a model folder that determine its output
# Least blocks per thread, most blocks per call, most threads.
FEWEST_FOR_THREADS, LONGEST_RUN, MOST_THREADS = 64, 256, 8


class Damaged(UserError):
    """Error for a file that differs from the file that was written."""


@dataclass(frozen=True, slots=True)
class _Listed:
    size: int
    digests: Sequence[str]


class Blocks:
    """The blocks of one file, each verified on its first use. Thread-safe."""

    def __init__(self, path: Path, block: int, entry: _Listed, listed: Path) -> None:
        self.path, self.block, self._list = path, block, listed
        self._entry = entry
        self._seen = bytearray(len(entry.digests))
        self._left = len(self._seen)
        self._lock = Lock()

    @property
    def whole(self) -> bool:
        """Return whether every block has been verified."""
        return self._left == 0

    def touch(self, begin: int, end: int) -> None:
        """Verify the blocks that hold the bytes `begin` to `end` - 1. Damaged if one differs from its digest."""
        if end > begin and self._left:
            self.check(range(begin // self.block, (end - 1) // self.block + 1))

    def check(self, numbers: Iterable[int]) -> None:
        """Verify the blocks with these numbers."""
        new = [number for number in numbers if number >= len(self._seen) or not self._seen[number]]
        if not new:
            return
        for number, digest in zip(new, _digests(self.path, self.block, new), strict=True):
            if number >= len(self._seen) or digest != self._entry.digests[number]:
                begin = number * self.block
                end = min(begin + self.block, self._entry.size)
                raise Damaged(
                    _changed(
                        self.path, f"its bytes {begin:,} to {end:,} differ from those that were written", self._list
                    )
                )
        with self._lock:
            for number in new:
                self._left -= not self._seen[number]
                self._seen[number] = 1


class Hashes:
    """The hashes of the files in a folder. Made by `read_hashes`."""

    def __init__(self, path: Path, block: int, files: dict[str, _Listed]) -> None:
        self.path, self.folder, self.block = path, path.parent, block
        self._files = files

    def check(self, names: Iterable[str]) -> None:
        """Verify these files completely. Damaged if one is absent or changed. Files that are not listed are ignored."""
        for name in names:
            if name in self._files:
                self.blocks(name).check(range(len(self._files[name].digests)))

    def check_all(self, but: Collection[str] = ()) -> None:
        """Verify every listed file, except `but`."""
        self.check(name for name in self._files if name not in but)

    def blocks(self, name: str, path: Path | None = None) -> Blocks:
        """Return the blocks of a file and check its size. path: of a file outside the folder."""
        path, entry = path or self.folder / name, self._files.get(name)
        if entry is None:
            raise Damaged(_changed(path, f"{self.path.name} does not list it", self.path))
        try:
            size = path.stat().st_size
        except FileNotFoundError:
            raise Damaged(f"{path}: no such file, though {self.path.name} lists it; fetch or make it again") from None
        if size != entry.size:
            raise Damaged(_changed(path, f"expected {entry.size} bytes, found {size}", self.path))
        return Blocks(path, self.block, entry, self.path)


def text_digest(path: str | Path) -> str:
    """Return a digest, in hex, of a text file, such as a prompt template."""
    return hashlib.blake2b(read_bytes(path, MOST_TEXT), digest_size=8).hexdigest()


def write_hashes(folder: Path, leave_out: Collection[str] = ()) -> None:
    """Write `hashes.json` over all files in `folder`, except hidden ones and `leave_out`."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    names = {path.relative_to(folder).as_posix(): path for path in paths}
    write_list(folder / FILE, {name: path for name, path in names.items() if name not in (FILE, *leave_out)})


def write_list(path: Path, files: Mapping[str, Path]) -> None:
    """Write the hashes of these files (name -> place) as `path`."""
    listed = {name: dict(zip(("bytes", "digests"), _hash_file(place), strict=True)) for name, place in files.items()}
    record = {"format": FORMAT, "block": BLOCK, "files": listed, "own": _own(BLOCK, listed)}
    atomic_write_text(path, json.dumps(record, indent=0) + "\n")


def content_digest(files: Iterable[Path]) -> str:
    """Return a digest of the names and contents of these files. UserError if one cannot be read."""
    listed = [[path.name, *_hash_file(path)] for path in files]
    return _digest(json.dumps(listed).encode("utf-8", "surrogatepass"))


def folder_digest(folder: str | Path, *patterns: str) -> str | None:
    """Return the digest of the files of a folder that match the patterns; None if there are none."""
    files = sorted(path for pattern in patterns for path in Path(folder).glob(pattern) if path.is_file())
    return content_digest(files) if files else None


def _hash_file(path: Path) -> tuple[int, list[str]]:
    size = path.stat().st_size
    return size, _digests(path, BLOCK, range(-(-size // BLOCK)))


def read_hashes(folder: Path, expected: bool = False, file: str = FILE) -> Hashes | None:
    """Return the hashes of a folder from its list `file`; None if it has none. Damaged if they are `expected` and
    absent, and if the list was changed."""
    path = folder / file
    if not os.path.lexists(path):
        if expected:
            raise Damaged(f"{path}: no such file, though one was written with the folder; fetch the folder again")
        return None
    record = read_json_object(path, MOST_BYTES)
    block, files = record.get("block"), record.get("files")
    if record.get("format") != FORMAT or record.get("own") != _own(block, files):
        raise Damaged(_changed(path, "its own digest does not match", path))
    assert isinstance(block, int) and isinstance(files, dict)  # guaranteed by the digest
    return Hashes(path, block, {name: _Listed(entry["bytes"], entry["digests"]) for name, entry in files.items()})


def check_hashes(folder: Path, names: Iterable[str]) -> None:
    """Verify these files as `Hashes.check`, if the folder has hashes."""
    if (hashes := read_hashes(folder)) is not None:
        hashes.check(names)


def _changed(path: Path, found: str, listed: Path) -> str:
    own = f"or delete {listed.name} if the change is your own"
    return f"{path}: damaged or changed, {found}; fetch or make it again, {own}"


def _own(block: Any, files: Any) -> str:
    return _digest(json.dumps([block, files], sort_keys=True).encode("utf-8", "surrogatepass"))


def _digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()[:DIGEST_CHARS]


def _digests(path: Path, block: int, numbers: Sequence[int]) -> list[str]:
    """Hash the blocks with these numbers, in order; many blocks in threads, because hashing releases the GIL."""
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)), len(numbers) // FEWEST_FOR_THREADS)
    check_file(path)
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror}); check its permissions") from None
    try:
        if threads < 2:
            return _digests_of(descriptor, path, block, numbers)
        # A thread gets adjacent blocks, so the disk is read in runs. An interrupt waits for running calls.
        step = min(-(-len(numbers) // threads), LONGEST_RUN)
        parts = [numbers[start : start + step] for start in range(0, len(numbers), step)]
        with ThreadPoolExecutor(threads, "hashes") as pool:
            found = pool.map(lambda part: _digests_of(descriptor, path, block, part), parts)
            return [digest for part in found for digest in part]
    finally:
        os.close(descriptor)


def _digests_of(descriptor: int, path: Path, block: int, numbers: Sequence[int]) -> list[str]:
    buffer = memoryview(bytearray(block))
    found = []
    for number in numbers:
        length = 0
        try:
            while length < block and (count := os.preadv(descriptor, [buffer[length:]], number * block + length)):
                length += count
        except OSError as error:
            raise Damaged(f"{path}: cannot be read ({error.strerror}); fetch or make it again") from None
        found.append(_digest(buffer[:length]))
    return found
