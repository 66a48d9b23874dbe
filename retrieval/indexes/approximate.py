"""An index with a structure: candidates from lists, a graph or another kind's, scored from the kept vectors.

How a search goes is `vectors/approximate`'s; here it is put together from what a folder holds.

Deliberately absent: what differs between kinds (`kind`, and a file each).
"""

import math
from pathlib import Path

from thresher.common.errors import UserError
from thresher.common.hashes import Hashes
from thresher.retrieval.data.corpus import Corpus
from thresher.retrieval.encoders.encoder import Encoder, Vectors
from thresher.retrieval.indexes.dense import DenseIndex
from thresher.retrieval.indexes.kind import INDEX_FILE, read_structure
from thresher.retrieval.indexes.kinds import parse_kind
from thresher.retrieval.indexes.manifest import NOT_KEPT, Manifest, check_file, kept_vectors
from thresher.retrieval.vectors.approximate import ApproximateSearch, Candidates
from thresher.retrieval.vectors.exact import Found, RowScores
from thresher.retrieval.vectors.file import VectorFile
from thresher.retrieval.vectors.gpu import FLAT_FACTOR, flat_on_gpus


class ApproximateIndex(DenseIndex):
    """A corpus, its encoder and a structure over their vectors. Made by `read_approximate`."""

    def __init__(self, corpus: Corpus, encoder: Encoder, embed: str, dim: int, search: ApproximateSearch) -> None:
        super().__init__(corpus, encoder, embed, dim)
        self._search = search

    @property
    def parameters(self) -> dict[str, int]:
        """What a search does: its parameter, under FAISS's name for it, and the candidates it fetches per hit."""
        return {self._search.candidates.parameter: self._search.value, "candidates": self._search.factor}

    def _top(self, query_QD: Vectors, k: int) -> list[Found]:
        return self._search.top(query_QD, k)


def read_approximate(
    manifest: Manifest,
    folder: Path,
    corpus: Corpus,
    encoder: Encoder,
    parameters: dict[str, int] | None = None,
    gpu: bool = False,
    hashes: Hashes | None = None,
) -> ApproximateIndex:
    """The index with a structure in `folder`, for corpus and encoder that were checked against its manifest; with
    `gpu`, of kind flat or flat16 too.

    `parameters` replaces those of the manifest one by one. UserError for a damaged file, a parameter that the kind does
    not have or that is below 1, a GPU that is not there, and a kind that has no form for GPUs. `hashes`, those of the
    folder: its other files have been verified, and the kept vectors are as they are read; without them a structure's
    numbers are looked through.
    """
    kind = parse_kind(manifest.factory, manifest.passages, manifest.dim)
    kept = None
    if manifest.dtype != NOT_KEPT:
        kept = kept_vectors(folder, manifest, hashes)
        kept.open()  # checks its header, and maps nothing yet
    chosen = checked_parameters({**manifest.parameters, **(parameters or {})}, manifest.parameters, str(folder))
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
        candidates = kind.on_gpus(index) if gpu else kind.candidates(index)
    exact = None if kept is None else RowScores(kept.take)
    search = ApproximateSearch(
        candidates,
        exact,
        manifest.passages,
        chosen.get(candidates.parameter, 1),
        chosen.get("candidates", FLAT_FACTOR if kind.exact else 1),
    )
    return ApproximateIndex(corpus, encoder, manifest.embed, manifest.dim, search)


def checked_parameters(given: dict[str, int], known: dict[str, int], where: str) -> dict[str, int]:
    """`given`; UserError for a name that is not in `known` and for a value that is no whole number of at least 1."""
    for name, value in given.items():
        if name not in known:
            raise UserError(f"{where}: no search parameter {name!r}; this index has {', '.join(known)}")
        if type(value) is not int or not 1 <= value < math.inf:
            raise UserError(f"{where}: {name} is {value!r}; expected a whole number of at least 1")
    return given
