"""Indexes of vectors, and the loading of any index folder by its manifest.

An exact index maps its vectors from the folder's file. An index with a structure searches it for candidates and scores
them from the kept vectors (`approximate`). Folders without vectors are in the table `WITHOUT_VECTORS`.
"""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np

from thresher.common.errors import UserError
from thresher.common.hashes import Hashes, check_hashes
from thresher.retrieval.corpus import Corpus, check_embed
from thresher.retrieval.encoders import Encoder, Vectors
from thresher.retrieval.encoders.lexical import LexicalEncoder
from thresher.retrieval.indexes.approximate import (
    FLAT_FACTOR,
    ApproximateSearch,
    Candidates,
    candidates_of,
    flat_on_gpus,
)
from thresher.retrieval.indexes.bm25 import Bm25Index, load_bm25
from thresher.retrieval.indexes.exact import ExactRows, RowScores
from thresher.retrieval.indexes.faiss_library import faiss
from thresher.retrieval.indexes.hybrid import Hybrid, load_hybrid
from thresher.retrieval.indexes.kinds import FAMILIES, INDEX_FILE, MATRIX_DTYPES, parse_kind
from thresher.retrieval.indexes.manifest import FILE as MANIFEST
from thresher.retrieval.indexes.manifest import (
    NOT_KEPT,
    Manifest,
    check_file,
    find_corpus,
    kept_vectors,
    open_folder,
    read_manifest,
)
from thresher.retrieval.indexes.structures import read_structure
from thresher.retrieval.indexes.vector_file import VectorFile
from thresher.retrieval.retriever import Hit, LocalRetriever

FORMAT_1_VECTORS = "vectors.faiss"


def _load_learned(folder: Path) -> Encoder:
    # Imported here, because it imports torch.
    from thresher.retrieval.encoders.learned import LearnedEncoder

    return LearnedEncoder.load(folder)


LOADERS: dict[str, Callable[[Path], Encoder]] = {LexicalEncoder.name: LexicalEncoder.load, "learned": _load_learned}


class Index(LocalRetriever):
    """A corpus, and a `search` for the nearest rows of its vectors by `encoder`. An exact index is created by
    `build_index` or `load_index`. Not thread-safe."""

    def __init__(self, corpus: Corpus, encoder: Encoder, search: ExactRows | ApproximateSearch) -> None:
        super().__init__()
        self.corpus = corpus
        self.encoder = encoder
        self._search = search

    def _find(self, queries: list[str], k: int) -> list[list[Hit]]:
        """Return hits; see Retriever. A query with a zero vector (no known word) has none."""
        query_QD = checked_vectors(self.encoder, self.encoder.encode_queries(queries), len(queries), self.encoder.dim)
        found = self._search.top(query_QD, k)
        return [
            [Hit(row, self.corpus[row], score) for row, score in best] if query_D.any() else []
            for query_D, best in zip(query_QD, found, strict=True)
        ]


class ApproximateIndex(Index):
    """An index with a structure over the vectors, created by `load_retriever`."""

    _search: ApproximateSearch

    @property
    def parameters(self) -> dict[str, int]:
        """Return the search parameter by FAISS's name, and the candidates fetched per hit."""
        return {self._search.candidates.parameter: self._search.value, "candidates": self._search.factor}


Loaded = Index | Bm25Index | Hybrid


def checked_vectors(encoder: Encoder, vectors_ND: Vectors, count: int, dim: int) -> Vectors:
    """Return `vectors_ND` in C order and float32. ValueError unless finite and [count, dim]."""
    if vectors_ND.shape != (count, dim) or not np.isfinite(vectors_ND).all():
        raise ValueError(f"{encoder.name}: expected finite [{count}, {dim}], got {vectors_ND.shape}")
    return np.ascontiguousarray(vectors_ND, np.float32)


def find_encoder(manifest: Manifest, folder: Path, encoder: Encoder | None) -> Encoder:
    """Return the encoder of the index in `folder`: `encoder`, or loaded from the folder. UserError for another one."""
    check_embed(manifest.embed)
    if encoder is None:
        if manifest.encoder not in LOADERS:
            raise UserError(
                f"{folder}: built with the encoder {manifest.encoder!r}, expected one of "
                f"{', '.join(LOADERS)}; build the index again"
            )
        encoder = LOADERS[manifest.encoder](folder)
    if (encoder.dim, encoder.fingerprint) != (manifest.dim, manifest.encoder_fingerprint):
        raise UserError(
            f"{folder}: the index was built with another encoder ({manifest.encoder}, {manifest.dim} "
            f"dimensions, {manifest.encoder_fingerprint[:12]}) than this one ({encoder.name}, {encoder.dim} "
            f"dimensions, {encoder.fingerprint[:12]}); build the index again"
        )
    return encoder


def load_index(
    folder: str | Path, corpus: Corpus | None = None, encoder: Encoder | None = None, verify: bool = True
) -> Index:
    """Read an exact index, of this format or of the first.

    Corpus and encoder, unless given, are read from their paths in the manifest. `verify`: compare the data read with
    the folder's hashes, if any. UserError for no finished exact index, damaged vectors, and another corpus or encoder.
    """
    folder = Path(folder)
    manifest, hashes = open_folder(folder, verify, tuple(MATRIX_DTYPES))
    encoder = find_encoder(manifest, folder, encoder)
    corpus = find_corpus(manifest, folder, corpus, verify)
    if manifest.format == 1:
        return Index(corpus, encoder, ExactRows(_read_format_1(folder / FORMAT_1_VECTORS, manifest)))
    if manifest.dtype != MATRIX_DTYPES[manifest.kind]:
        raise UserError(f"{folder}: {manifest.kind} with vectors in {manifest.dtype!r}; build the index again")
    vectors = kept_vectors(folder, manifest, hashes)
    return Index(corpus, encoder, ExactRows(vectors.open(), manifest.largest_norm, vectors.verify))


def _read_format_1(path: Path, manifest: Manifest) -> Vectors:
    """Return the vectors of a folder of format 1, copied from FAISS's file."""
    check_file(path, manifest.vectors_bytes)
    try:
        flat = faiss.read_index(str(path))
    except RuntimeError:
        raise UserError(f"{path}: FAISS cannot read it; build the index again") from None
    shape, expected = (flat.ntotal, flat.d), (manifest.passages, manifest.dim)
    if shape != expected or not isinstance(flat, faiss.IndexFlatIP):
        raise UserError(f"{path}: holds {shape[0]} x {shape[1]} vectors, expected {expected}; build the index again")
    vectors_ND: Vectors = faiss.rev_swig_ptr(flat.get_xb(), flat.ntotal * flat.d).reshape(expected).copy()
    return vectors_ND


def _read_search(
    manifest: Manifest, folder: Path, parameters: dict[str, int], gpu: bool, hashes: Hashes | None
) -> ApproximateSearch:
    """Return the search of the structure in `folder`, or, on GPUs, of the matrix of an exact kind. If the folder has no
    `hashes`, the structure's numbers are checked."""
    kind = parse_kind(manifest.factory, manifest.passages, manifest.dim)
    kept = None
    if manifest.dtype != NOT_KEPT:
        kept = kept_vectors(folder, manifest, hashes)
        kept.open()  # to check its header
    chosen = {**manifest.parameters, **parameters}
    for name, value in chosen.items():
        if name not in manifest.parameters:
            raise UserError(f"{folder}: no search parameter {name!r}; this index has {', '.join(manifest.parameters)}")
        if type(value) is not int or not 1 <= value < math.inf:
            raise UserError(f"{folder}: {name} is {value!r}; expected a whole number of at least 1")
    candidates: Candidates
    if kind.exact and kept is not None:
        candidates = flat_on_gpus(kept)
    else:
        if gpu and not kind.estimate(manifest.passages, manifest.dim).gpu_bytes:
            raise UserError(
                f"{folder}: {kind.name} has no form for GPUs; search it on the CPU, or build lists (--kind ivf)"
            )
        check_file(folder / INDEX_FILE, manifest.index_bytes)
        shape = kept or VectorFile(folder, manifest.passages, manifest.dim)
        index = read_structure(folder / INDEX_FILE, kind, shape, trusted=hashes is not None)
        candidates = candidates_of(kind, index, gpu)
    value, most = chosen.get(candidates.parameter, 1), candidates.most_fetched
    if most is not None and value > most:
        raise UserError(
            f"{folder}: {candidates.parameter} is {value}; a GPU searches at most {most} lists, so set fewer"
        )
    return ApproximateSearch(
        candidates,
        None if kept is None else RowScores(kept.take),
        manifest.passages,
        value,
        chosen.get("candidates", FLAT_FACTOR if kind.exact else 1),
    )


# Kinds without vectors: the function that reads such a folder, of folder, corpus and whether to verify it.
WITHOUT_VECTORS: dict[str, Callable[[Path, Corpus | None, bool], Loaded]] = {
    "bm25": load_bm25,
    "hybrid": lambda folder, corpus, verify: load_hybrid(
        folder, corpus, partial(load_retriever, verify=verify), verify
    ),
}


def load_retriever(
    folder: str | Path,
    corpus: Corpus | None = None,
    parameters: dict[str, int] | None = None,
    gpu: bool = False,
    verify: bool = True,
) -> Loaded:
    """Read an index folder of any kind.

    `parameters` replaces search parameters of an approximate index one by one ({"nprobe": 64}). `gpu` shards lists, or
    the matrix of an exact index, over all GPUs in float16 (see `approximate`). `verify`: see `load_index`. UserError as
    in `load_index`, for an unknown kind, and for parameters or GPUs with a kind that does not have them.
    """
    folder = Path(folder)
    if verify and (folder / MANIFEST).is_file():
        check_hashes(folder, [MANIFEST])
    manifest = read_manifest(folder)
    kind = manifest.kind
    exact = kind in MATRIX_DTYPES
    if (kind in FAMILIES and not exact) or (gpu and exact and manifest.format > 1):
        manifest, hashes = open_folder(folder, verify)
        encoder = find_encoder(manifest, folder, None)
        corpus = find_corpus(manifest, folder, corpus, verify)
        search = _read_search(manifest, folder, parameters or {}, gpu, hashes)
        return ApproximateIndex(corpus, encoder, search)
    if parameters or gpu:
        asked = "search parameters" if parameters else "form for GPUs"
        raise UserError(f"{folder}: an index of kind {kind!r} has no {asked}; leave them out")
    if exact:
        return load_index(folder, corpus, verify=verify)
    if kind in WITHOUT_VECTORS:
        return WITHOUT_VECTORS[kind](folder, corpus, verify)
    raise UserError(f"{folder}: an index of kind {kind!r}, which this version does not know; build the index again")
