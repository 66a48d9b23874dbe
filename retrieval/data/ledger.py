"""What a corpus that is left on the disk keeps in a folder: its files' names, and the ledger that vouches for them.

Deliberately absent: the files' content, which is `corpus`'s.
"""

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from thresher.common.files import atomic_write_text

OFFSETS_FILE = "corpus.offsets"  # uint64, little-endian: where each passage begins, and where the last one ends
COPY_FILE = "corpus.copy.jsonl"
LEDGER_FILE = "corpus.ledger.json"
HASHES_FILE = "corpus.hashes.json"  # of the offsets, and of the file that they are into, wherever that is
CACHE_FILES = (OFFSETS_FILE, COPY_FILE, HASHES_FILE, LEDGER_FILE)  # the last vouches for the others
STORED = "passages"
LEDGER_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Ledger:
    """What a cache folder says of itself, in `corpus.ledger.json`. It is written last and removed first, so that
    the offsets beside a ledger are always its own.

    source_bytes, source_mtime_ns: of the file the pass was over. stored_bytes: of the file that the offsets are into,
    which is the copy if `copied`. The rest as in Corpus and `open_corpus`.
    """

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
        """Writes `corpus.ledger.json` into the folder `cache`."""
        atomic_write_text(cache / LEDGER_FILE, json.dumps(asdict(self), indent=2) + "\n")

    def describes(self, path: Path, cache: Path, chunk_words: int, skip_empty: bool) -> bool:
        """Whether file and options are still the same, and the cache's own files are whole."""
        if (self.chunk_words, self.skip_empty) != (chunk_words, skip_empty):
            return False
        if (self.source_bytes, self.source_mtime_ns) != stamp(os.stat(path)):
            return False
        files = {OFFSETS_FILE: 8 * (self.passages + 1), **({COPY_FILE: self.stored_bytes} if self.copied else {})}
        return all((cache / name).is_file() and (cache / name).stat().st_size == size for name, size in files.items())


def read_ledger(cache: Path) -> Ledger | None:
    """None where there is none that this version wrote: a cache can always be made again."""
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
    """Size and time of change: what tells a file from another of its name."""
    return stat.st_size, stat.st_mtime_ns
