"""Several retrievers of one corpus, searched together and joined by reciprocal rank fusion.

The score of a passage is  sum over members of  1 / (60 + rank),  with ranks from 1 and 0 for a member that does not
list it (Cormack, Clarke and Buettcher 2009). The sum is rounded once (`math.fsum`), so the order of the members does
not matter; equal sums are ordered by row. `hybrid.json` has the members' folders, relative and absolute, and the hash
of each member's manifest; a member that was rebuilt is refused.
"""

import hashlib
import json
import math
import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text, read_bytes, read_json_object, staged_folder
from thresher.retrieval.corpus import Corpus
from thresher.retrieval.indexes.manifest import FILE as MANIFEST
from thresher.retrieval.indexes.manifest import (
    Manifest,
    find_corpus,
    open_folder,
    read_manifest,
    write_index_hashes,
)
from thresher.retrieval.retriever import Hit, LocalRetriever, Retriever

KIND = "hybrid"
FILE = "hybrid.json"
# The constant of the paper: the larger it is, the smaller is the weight of the first ranks.
CONSTANT = 60
DEPTH = 100

# Reads a member's folder of any kind: `load.load_retriever`, which is passed in because load.py imports this file.
Load = Callable[[Path, Corpus | None], Retriever]


class Hybrid(LocalRetriever):
    """Two or more retrievers of the same corpus as one; each is queried for `depth` passages, or for k if that is more.
    Members must have a `corpus`, which a remote one lacks."""

    def __init__(self, members: Sequence[Retriever], depth: int = DEPTH) -> None:
        super().__init__()
        if len(members) < 2:
            raise UserError(f"a hybrid index joins at least 2 indexes, got {len(members)}; name another one")
        if depth < 1:
            raise UserError(f"depth is {depth}; expected at least 1 passage from every index of a hybrid one")
        corpora = [_corpus_of(member) for member in members]
        for number, corpus in enumerate(corpora[1:], 2):
            if corpus is not corpora[0] and corpus.sha256 != corpora[0].sha256:
                raise UserError(
                    f"hybrid: index {number} is of another corpus ({len(corpus)} passages, sha256 "
                    f"{corpus.sha256[:12]}) than index 1 ({len(corpora[0])} passages, sha256 "
                    f"{corpora[0].sha256[:12]}); build both from the same file"
                )
        self.corpus = corpora[0]
        self.members = tuple(members)
        self.depth = depth

    def _find(self, queries: list[str], k: int) -> list[list[Hit]]:
        """Return hits; see Retriever. All queries are passed to every member in one call."""
        depth = min(len(self), max(k, self.depth))
        # Not `search`, because each member would keep `depth` passages of every query in a cache of its own.
        found = [member._find(queries, depth) for member in self.members]
        return [self._fused(lists, k) for lists in zip(*found, strict=True)]

    def _fused(self, lists: tuple[list[Hit], ...], k: int) -> list[Hit]:
        shares: dict[int, list[float]] = defaultdict(list)
        for hits in lists:
            for rank, hit in enumerate(hits, 1):
                shares[hit.row].append(1 / (CONSTANT + rank))
        scores = sorted(
            ((math.fsum(parts), row) for row, parts in shares.items()), key=lambda pair: (-pair[0], pair[1])
        )
        return [Hit(row, self.corpus[row], score) for score, row in scores[:k]]


def build_hybrid(members: Sequence[str | Path], folder: str | Path, load: Load, depth: int = DEPTH) -> Hybrid:
    """Join the indexes in the folders `members`, loaded by `load`, and write `folder`, completely or not at all.
    UserError for a `folder` that exists, a member named twice, and a hybrid as a member."""
    folder = Path(folder)
    places = [Path(os.path.abspath(member)) for member in members]
    for place, member in zip(places, members, strict=True):
        if places.count(place) > 1:
            raise UserError(f"{member}: named twice; a hybrid index joins different ones")
        if read_manifest(Path(member)).kind == KIND:
            raise UserError(f"{member}: is a hybrid index itself; name the indexes that it joins")
    with staged_folder(folder) as staged:
        hybrid = _join(places, None, depth, load)
        hashes = [_manifest_hash(place) for place in places]
        record = {
            "depth": depth,
            "members": [
                {"paths": [os.path.relpath(place, os.path.abspath(folder)), str(place)], "manifest_sha256": hash_}
                for place, hash_ in zip(places, hashes, strict=True)
            ],
        }
        atomic_write_text(staged / FILE, json.dumps(record, indent=2) + "\n")
        Manifest.without_vectors(KIND, hybrid.corpus, folder, _fingerprint(depth, hashes)).write(staged)
        write_index_hashes(staged)
    return hybrid


def load_hybrid(folder: str | Path, corpus: Corpus | None, load: Load, verify: bool = True) -> Hybrid:
    """Read an index of `build_hybrid`; `load` reads a member. Arguments and errors are those of `load_index`."""
    folder = Path(folder)
    manifest, _ = open_folder(folder, verify, (KIND,))
    record = read_json_object(folder / FILE)
    members, depth = record.get("members"), record.get("depth")
    if not isinstance(members, list) or type(depth) is not int:
        raise UserError(
            f'{folder / FILE}: "members" should be a list and "depth" a whole number; build the index again'
        )
    places = [_find_member(folder, member) for member in members]
    if _fingerprint(depth, [_manifest_hash(place) for place in places]) != manifest.encoder_fingerprint:
        raise UserError(f"{folder / FILE}: was changed after the index was built; build the index again")
    # The first member opens the corpus by its own cache; a hybrid index has none.
    hybrid = _join(places, corpus, depth, load)
    find_corpus(manifest, folder, hybrid.corpus)
    return hybrid


def _join(places: list[Path], corpus: Corpus | None, depth: int, load: Load) -> Hybrid:
    members: list[Retriever] = []
    for place in places:
        members.append(load(place, corpus))
        corpus = _corpus_of(members[-1])
    return Hybrid(members, depth)


def _find_member(folder: Path, member: Any) -> Path:
    paths = member.get("paths") if isinstance(member, dict) else None
    if not isinstance(paths, list) or not paths or not all(isinstance(path, str) for path in paths):
        raise UserError(f'{folder / FILE}: a member lacks its "paths"; build the index again')
    places: list[Path] = [folder / path for path in paths]
    place = next((place for place in places if (place / MANIFEST).is_file()), None)
    if place is None:
        raise UserError(f"{folder}: its member {places[-1]} is no longer there; put it back, or build the index again")
    if _manifest_hash(place) != member.get("manifest_sha256"):
        raise UserError(f"{folder}: its member {place} was rebuilt since; build the hybrid index again")
    return place


def _fingerprint(depth: int, manifest_hashes: list[str]) -> str:
    return hashlib.sha256(json.dumps([depth, *manifest_hashes]).encode("ascii")).hexdigest()


def _manifest_hash(place: Path) -> str:
    return hashlib.sha256(read_bytes(place / MANIFEST)).hexdigest()


def _corpus_of(member: Retriever) -> Corpus:
    corpus = getattr(member, "corpus", None)
    if not isinstance(corpus, Corpus):
        raise UserError(f"hybrid: {type(member).__name__} holds no corpus; join indexes that are in this process")
    return corpus
