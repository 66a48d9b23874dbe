"""The manifest of an index folder, by which another corpus or encoder is refused.

Only the hashes are written after it, so a folder without a manifest is not an index. The corpus is not copied; its path
is stored, relative (a run folder may be moved) and absolute (the index alone may be moved), and its hash must match.
Format 1 had only the exact flat index, with its vectors in FAISS's file; it is still read.
"""

import json
import os
from collections.abc import Collection
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, get_origin

from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text, read_json_object
from thresher.common.hashes import Hashes, read_hashes, write_hashes
from thresher.retrieval.corpus import CACHE_FILES, LEDGER_FILE, Corpus, open_corpus, read_corpus
from thresher.retrieval.indexes.vector_file import VectorFile

FILE = "manifest.json"
FORMAT = 2
FORMATS = (1, 2)
# The file of the kept vectors, by dtype.
KEPT_FILES = {"float32": "vectors.npy", "float16": "vectors16.npy"}
NOT_KEPT = "none"


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The record in `manifest.json`.

    `kind` is flat, flat16, ivf, hnsw or a kind without vectors; `factory` is its string with all numbers. `dtype` is
    that of the kept vectors ("none" if they were discarded), `vectors_bytes` their file's size, `index_bytes` that of
    FAISS's structure. `corpus_paths`: relative to the folder and absolute, empty for a corpus without a file.
    `parameters` are a search's defaults, `recall` is measured with them, `reason` says why this kind was chosen for a
    memory.
    """

    format: int
    kind: str
    passages: int
    dim: int
    embed: str
    encoder: str
    encoder_fingerprint: str
    corpus_sha256: str
    corpus_paths: list[str]
    vectors_bytes: int
    faiss_version: str
    factory: str = ""
    dtype: str = "float32"
    index_bytes: int = 0
    largest_norm: float = 0.0
    parameters: dict[str, int] = field(default_factory=dict)
    recall: dict[str, float] = field(default_factory=dict)
    reason: str = ""
    hashed: bool = False

    @classmethod
    def without_vectors(
        cls, kind: str, corpus: Corpus, folder: Path, fingerprint: str, *, embed: str = "text", index_bytes: int = 0
    ) -> "Manifest":
        """Return the manifest of an index of `corpus` without vectors at `folder`; `fingerprint` of its settings."""
        return cls(
            format=FORMAT,
            kind=kind,
            passages=len(corpus),
            dim=0,
            embed=embed,
            encoder=kind,
            encoder_fingerprint=fingerprint,
            corpus_sha256=corpus.sha256,
            corpus_paths=corpus_paths(corpus, folder),
            vectors_bytes=0,
            faiss_version="",
            factory=kind,
            dtype=NOT_KEPT,
            index_bytes=index_bytes,
            hashed=True,
        )

    def write(self, folder: Path) -> None:
        """Write `manifest.json` to `folder`."""
        atomic_write_text(folder / FILE, json.dumps(asdict(self), indent=2) + "\n")


def write_index_hashes(folder: Path, leave_out: Collection[str] = ()) -> None:
    """Write `hashes.json` of the files of a finished index folder, except the corpus's cache and `leave_out`."""
    write_hashes(folder, leave_out=(*CACHE_FILES, *leave_out))


def open_folder(folder: Path, verify: bool, kinds: tuple[str, ...] = ()) -> tuple[Manifest, Hashes | None]:
    """Return the manifest of an index folder, of one of `kinds` if given, and with `verify` its hashes, if any. All
    files except the kept vectors are verified here."""
    hashes = None
    if verify and (folder / FILE).is_file() and (hashes := read_hashes(folder)) is not None:
        hashes.check_all(but=KEPT_FILES.values())
    manifest = read_manifest(folder)
    if verify:
        read_hashes(folder, expected=manifest.hashed)
    if kinds and manifest.kind not in kinds:
        raise UserError(
            f"{folder}: an index of kind {manifest.kind!r}, expected {' or '.join(kinds)}; name another folder"
        )
    return manifest, hashes


def kept_vectors(folder: Path, manifest: Manifest, hashes: Hashes | None) -> VectorFile:
    """Return the file of the kept vectors of an index."""
    if manifest.dtype not in KEPT_FILES:
        raise UserError(f'{folder}: "dtype" is {manifest.dtype!r}, which is not a dtype of vectors; build it again')
    name = KEPT_FILES[manifest.dtype]
    check_file(folder / name, manifest.vectors_bytes)
    blocks = None if hashes is None else hashes.blocks(name)
    return VectorFile(folder / name, manifest.passages, manifest.dim, manifest.dtype, blocks)


def read_manifest(folder: Path) -> Manifest:
    """Read `folder/manifest.json`."""
    if not folder.is_dir():
        if folder.exists():
            raise UserError(f"{folder}: is a file; give the folder that thresher index build wrote")
        raise UserError(
            f"{folder}: no such folder; build the index first (thresher index build), or name another (--index; in a "
            "recipe: retrieval.index)"
        )
    path = folder / FILE
    if not path.is_file():
        raise UserError(
            f"{folder}: has no {FILE}, so it is not a finished index; check the path, or run its build command again"
        )
    record = read_json_object(path)
    if record.get("format") not in FORMATS:
        raise UserError(
            f'{path}: "format" is {record.get("format")!r}, expected {FORMAT}; build the index again with this version'
        )
    known: dict[str, Any] = {}
    for entry in fields(Manifest):
        if entry.name not in record and (entry.default, entry.default_factory) != (MISSING, MISSING):
            continue  # a key that is newer than the folder
        value = known[entry.name] = record.get(entry.name)
        if not _fits(entry.name, value, entry.type):
            raise UserError(f'{path}: "{entry.name}" is missing or of the wrong kind; build the index again')
    return Manifest(**known)


def _fits(name: str, value: object, kind: Any) -> bool:
    if name == "corpus_paths":
        return isinstance(value, list) and all(isinstance(path, str) for path in value)
    if name in ("parameters", "recall"):
        return isinstance(value, dict) and all(type(number) in (int, float) for number in value.values())
    return type(value) is (get_origin(kind) or kind)


def check_file(path: Path, size: int) -> None:
    """Raise UserError unless the file `path` has `size` bytes."""
    found = path.stat().st_size if path.is_file() else 0
    if found != size:
        raise UserError(f"{path}: expected {size} bytes, found {found}; build the index again")


def corpus_paths(corpus: Corpus, folder: Path) -> list[str]:
    """Return the value of `Manifest.corpus_paths` for an index of `corpus` in `folder`."""
    if corpus.path is None:
        return []
    absolute = os.path.abspath(corpus.path)
    return [os.path.relpath(absolute, os.path.abspath(folder)), absolute]


def find_corpus(manifest: Manifest, folder: Path, corpus: Corpus | None, verify: bool = True) -> Corpus:
    """Return the corpus of the index in `folder`: `corpus`, else read from its path. UserError for another one."""
    if corpus is None:
        places = [folder / path for path in manifest.corpus_paths]
        place = next((place for place in places if place.is_file()), None)
        if place is None:
            state = f"no longer at {places[-1]}" if places else "was never a file"
            raise UserError(f"{folder}: the corpus of this index is {state}; put it there, or build the index again")
        # If the corpus was left on disk, the offsets of its passages are in the index folder.
        stored = (folder / LEDGER_FILE).is_file()
        corpus = open_corpus(place, folder, verify=verify) if stored else read_corpus(place)
    if corpus.sha256 != manifest.corpus_sha256:
        raise UserError(
            f"{folder}: the index was built from another corpus ({manifest.passages} passages, sha256 "
            f"{manifest.corpus_sha256[:12]}) than {corpus.path or 'the one given'} ({len(corpus)} passages, "
            f"sha256 {corpus.sha256[:12]}); give it that corpus, or build the index again"
        )
    return corpus
