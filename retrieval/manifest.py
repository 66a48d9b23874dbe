"""What an index folder says about itself, so that it can refuse to be used with anything else.

The manifest is the last file written into a folder that appears whole or not at all: a folder without one is
no index. The corpus is not copied into the index; its path is kept, relative (a run folder may be moved) and
absolute (the index alone may be), and its hash decides.
"""

import json
import os
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from thresher.policy.files import atomic_write_text, read_json_object
from thresher.retrieval.corpus import Corpus, read_corpus
from thresher.rewards.errors import UserError

FILE = "manifest.json"
FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The record in `manifest.json`. `vectors_bytes` is the size of the file of vectors, `corpus_paths` where
    the corpus was, seen from the index folder and from the root (empty for a corpus that was never a
    file)."""

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

    def write(self, folder: Path) -> None:
        """Writes `manifest.json` into `folder`."""
        atomic_write_text(folder / FILE, json.dumps(asdict(self), indent=2) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Reads `folder/manifest.json`. UserError when there is no such folder, no manifest in it, or one that
    lacks a key or holds the wrong kind of value."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; build the index first (thresher index build)")
    path = folder / FILE
    if not path.is_file():
        raise UserError(f"{folder}: holds no {FILE}, so it is no finished index; remove it and build it again")
    record = read_json_object(path)
    if record.get("format") != FORMAT:
        raise UserError(
            f'{path}: "format" is {record.get("format")!r}, expected {FORMAT}; build the index again with this version'
        )
    for field in fields(Manifest):
        value = record.get(field.name)
        if field.name == "corpus_paths":
            good = isinstance(value, list) and all(isinstance(path, str) for path in value)
        else:
            good = type(value) is field.type
        if not good:
            raise UserError(f'{path}: "{field.name}" is missing or of the wrong kind; build the index again')
    return Manifest(**{field.name: record[field.name] for field in fields(Manifest)})


def corpus_paths(corpus: Corpus, folder: Path) -> list[str]:
    """What `Manifest.corpus_paths` should hold for an index of `corpus` in `folder`."""
    if corpus.path is None:
        return []
    absolute = os.path.abspath(corpus.path)
    return [os.path.relpath(absolute, os.path.abspath(folder)), absolute]


def find_corpus(manifest: Manifest, folder: Path, corpus: Corpus | None) -> Corpus:
    """The corpus the index in `folder` was built from: `corpus` itself, or read again from where it was.
    UserError when it is not to be found or not the same."""
    if corpus is None:
        places = [folder / path for path in manifest.corpus_paths]
        place = next((place for place in places if place.is_file()), None)
        if place is None:
            told = f"no longer at {places[-1]}" if places else "was never a file"
            raise UserError(f"{folder}: the corpus of this index is {told}; put it there, or build the index again")
        corpus = read_corpus(place)
    if corpus.sha256 != manifest.corpus_sha256:
        raise UserError(
            f"{folder}: the index was built from another corpus ({manifest.passages} passages, sha256 "
            f"{manifest.corpus_sha256[:12]}) than {corpus.path or 'the one given'} ({len(corpus)} passages, "
            f"sha256 {corpus.sha256[:12]}); give it that corpus, or build the index again"
        )
    return corpus
