"""Approximate search: FAISS looks at a part of the vectors, and what it finds is scored exactly.

Lists (IVF) or a graph (HNSW) name candidates; each is scored again from the kept matrix, as `exact` does it, so a hit's
score is its true inner product and equal scores go by row. Only the choice of candidates is approximate. How far it
falls short was measured when the index was built and stands in the manifest, with the effort (`nprobe` lists, or
`efSearch` vertices) and the number of candidates that reached the recall wanted. Scoring again reads `candidates` * k +
8 rows a query from the file: two to four microseconds each where the operating system has them in memory, a seek on a
cold disk. An index that discarded its vectors orders by FAISS's own scores, which for codes are estimates.

A query's result does not depend on what else is asked. FAISS keeps that inside the lists and the graph; the nearest
lists themselves are chosen exactly, by `ExactRows` over the centroids, and a rotation is done in float64.

Deliberately absent: a promise of k hits (a graph may have parts that a search does not reach), filters, deletion.

Shape letters: N passages, Q queries, D dimension, F candidates, P directions or probed lists, M blocks of B rows.
"""

import math
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from thresher.retrieval.data.corpus import Corpus
from thresher.retrieval.encoders.encoder import Encoder, Vectors
from thresher.retrieval.indexes.dense import DenseIndex
from thresher.retrieval.indexes.kinds import Kind, parse_kind
from thresher.retrieval.indexes.lists import INDEX_FILE, behind, inner, read_structure, rotation
from thresher.retrieval.indexes.manifest import Manifest, check_file
from thresher.retrieval.vectors.exact import MARGIN, ExactRows, Found, Rows, RowScores, best_first, faiss
from thresher.retrieval.vectors.file import Array, VectorFile
from thresher.retrieval.vectors.gpu import FLAT_FACTOR, GpuLists, flat_on_gpus
from thresher.rewards.errors import UserError

# How the vectors are kept beside a structure: the file's name.
KEPT_FILES = {"float32": "vectors.npy", "float16": "vectors16.npy"}
NOT_KEPT = "none"
# Multiplications in a product up to which OpenBLAS takes one thread: 4 times 2^16.
ONE_THREAD = 1 << 18
# Efforts beyond it are not tried: over 10^6 vectors a graph found all but .005 at half of it.
MOST_EFSEARCH = 4096


class Candidates(Protocol):
    """A structure that finds rows near a vector, the better the more effort it is allowed."""

    @property
    def effort(self) -> str:
        """What FAISS calls the effort: "nprobe" or "efSearch"."""

    @property
    def most(self) -> int:
        """The effort beyond which there is nothing more to find."""

    def find(self, query_QD: Vectors, fetch: int, effort: int) -> tuple[Vectors, Rows]:
        """Scores and rows of at most `fetch` candidates of every query, [Q, F], best first; row -1 fills up."""


class ListCandidates:
    """The lists of a FAISS IVF index, with or without a rotation."""

    effort = "nprobe"

    def __init__(self, index: Any) -> None:
        self._index = index  # owns what the next lines point into
        self._lists = inner(index)
        self._turn = Turn(rotation(index))
        self.most = self._lists.nlist
        quantizer = faiss.downcast_index(self._lists.quantizer)
        centroids = faiss.rev_swig_ptr(quantizer.get_xb(), self.most * quantizer.d)
        self._centroids = ExactRows(centroids.reshape(self.most, quantizer.d))

    def find(self, query_QD: Vectors, fetch: int, effort: int) -> tuple[Vectors, Rows]:
        """As Candidates has it."""
        query_QD = self._turn(query_QD)
        effort = min(effort, self.most)
        nearest = self._centroids.top(query_QD, effort)
        list_QP = np.array([[row for row, _ in found] for found in nearest], np.int64)
        score_QP = np.array([[score for _, score in found] for found in nearest], np.float32)
        self._lists.nprobe = effort
        score_QF, row_QF = self._lists.search_preassigned(query_QD, fetch, list_QP, score_QP)
        return score_QF, row_QF


class GraphCandidates:
    """A FAISS HNSW graph with its vectors, or with the directions and codes that stand in for them."""

    effort = "efSearch"

    def __init__(self, index: Any) -> None:
        self._index = index  # owns what the next lines point into
        self._turn = Turn(rotation(index))
        self._graph = behind(index)
        self.most = int(index.ntotal)

    def find(self, query_QD: Vectors, fetch: int, effort: int) -> tuple[Vectors, Rows]:
        """As Candidates has it."""
        self._graph.hnsw.efSearch = min(max(effort, fetch), self.most)
        score_QF, row_QF = self._graph.search(self._turn(query_QD), fetch)
        return score_QF, row_QF


class Turn:
    """Queries behind a rotation or projection, or as they are for None. In float64, where a query's bits do not depend
    on the others' number once they are rounded; and in blocks so small that NumPy's OpenBLAS multiplies each on one
    thread, for its other threads would go on waiting busily beside FAISS's: 8 queries took 8 ms instead of 2. Where
    BLAS has one thread anyway, a lone query takes .12 ms instead of .04 (192 x 768)."""

    def __init__(self, rotation_PD: Vectors | None) -> None:
        self._rotation_MDB: Array | None = None
        if rotation_PD is not None:
            self._directions, dim = rotation_PD.shape
            self._block = max(1, math.isqrt(ONE_THREAD // dim))
            block_MBD = _blocks(rotation_PD, self._block)
            self._rotation_MDB = np.ascontiguousarray(block_MBD.swapaxes(1, 2))

    def __call__(self, query_QD: Vectors) -> Vectors:
        """float32 [Q, P] of float32 [Q, D]."""
        if self._rotation_MDB is None:
            return query_QD
        turned_NMBB = _blocks(query_QD, self._block)[:, None] @ self._rotation_MDB
        turned_QP = turned_NMBB.swapaxes(1, 2).reshape(-1, self._rotation_MDB.shape[0] * self._block)
        return turned_QP[: len(query_QD), : self._directions].astype(np.float32)


def _blocks(rows_RD: Vectors, block: int) -> Array:
    """The rows in float64, `block` at a time: [ceil(R / B), B, D], filled up with zeros."""
    padded_RD = np.zeros((-(-len(rows_RD) // block) * block, rows_RD.shape[1]))
    padded_RD[: len(rows_RD)] = rows_RD
    return padded_RD.reshape(-1, block, rows_RD.shape[1])


class ApproximateSearch:
    """Candidates, scored exactly where `exact` has their vectors. `effort` and `factor` (candidates fetched per hit
    wanted) may be set at any time."""

    def __init__(self, candidates: Candidates, exact: RowScores | None, rows: int, effort: int, factor: int) -> None:
        self.candidates = candidates
        self.effort, self.factor = effort, factor
        self._exact = exact
        self._rows = rows

    def span(self, k: int) -> tuple[int, int]:
        """The least and the most effort that are worth trying for `k` hits. A graph keeps as many candidates as are
        fetched in any case, and all it holds only in hours."""
        most = self.candidates.most
        if self.candidates.effort != GraphCandidates.effort:
            return 1, most
        return min(most, self._fetch(k)), max(self._fetch(k), min(most, MOST_EFSEARCH))

    def _fetch(self, k: int) -> int:
        return min(self._rows, k * self.factor + MARGIN)

    def top(self, query_QD: Vectors, k: int) -> list[Found]:
        """At most `k` rows for every query, best first. Where the effort reaches fewer than k, more is spent on that
        query."""
        fetch, effort = self._fetch(k), self.effort
        score_QF, row_QF = self.candidates.find(query_QD, fetch, effort)
        short_S = _short(row_QF, k)
        while len(short_S) and effort < self.candidates.most:
            effort *= 2
            score_QF[short_S], row_QF[short_S] = self.candidates.find(query_QD[short_S], fetch, effort)
            short_S = _short(row_QF, k)
        rows = [row_F[row_F >= 0] for row_F in row_QF]
        if self._exact is not None:
            return self._exact.ranked(query_QD, rows, k)
        return [best_first(score_F[: len(row_F)], row_F, k) for score_F, row_F in zip(score_QF, rows, strict=True)]


def _short(row_QF: Rows, k: int) -> Rows:
    short_S: Rows = np.flatnonzero((row_QF >= 0).sum(axis=1) < k)
    return short_S


class ApproximateIndex(DenseIndex):
    """A corpus, its encoder and a structure over their vectors. Made by `read_approximate`."""

    def __init__(self, corpus: Corpus, encoder: Encoder, embed: str, dim: int, search: ApproximateSearch) -> None:
        super().__init__(corpus, encoder, embed, dim)
        self._search = search

    @property
    def parameters(self) -> dict[str, int]:
        """What a search does: its effort, under FAISS's name for it, and the candidates it fetches per hit."""
        return {self._search.candidates.effort: self._search.effort, "candidates": self._search.factor}

    def _top(self, query_QD: Vectors, k: int) -> list[Found]:
        return self._search.top(query_QD, k)


def candidates_of(kind: Kind, index: Any) -> Candidates:
    """The way `index`, FAISS's of `kind`, is searched on a CPU."""
    return GraphCandidates(index) if kind.family == "hnsw" else ListCandidates(index)


def read_approximate(
    manifest: Manifest,
    folder: Path,
    corpus: Corpus,
    encoder: Encoder,
    parameters: dict[str, int] | None = None,
    gpu: bool = False,
) -> ApproximateIndex:
    """The index of kind ivf or hnsw in `folder`, for corpus and encoder that were checked against its manifest; with
    `gpu`, of kind flat or flat16 too.

    `parameters` replaces those of the manifest one by one. UserError for a damaged file, a parameter that the kind does
    not have or that is below 1, and a GPU that is not there or a graph that should go on one.
    """
    kind = parse_kind(manifest.factory, manifest.passages, manifest.dim)
    kept = None
    if manifest.dtype != NOT_KEPT:
        if manifest.dtype not in KEPT_FILES:
            raise UserError(f'{folder}: "dtype" is {manifest.dtype!r}, which is no way to keep vectors; build it again')
        kept = VectorFile(folder / KEPT_FILES[manifest.dtype], manifest.passages, manifest.dim, manifest.dtype)
        check_file(kept.path, manifest.vectors_bytes)
        kept.open()  # checks its header, and maps nothing yet
    chosen = checked_parameters({**manifest.parameters, **(parameters or {})}, manifest.parameters, str(folder))
    candidates: Candidates
    if kind.exact and kept is not None:
        candidates = flat_on_gpus(kept)
    else:
        if gpu and kind.family == "hnsw":
            raise UserError(
                f"{folder}: a graph has no form for GPUs; search it on the CPU, or build lists (--kind ivf)"
            )
        check_file(folder / INDEX_FILE, manifest.index_bytes)
        shape = kept or VectorFile(folder, manifest.passages, manifest.dim)
        index = read_structure(folder / INDEX_FILE, kind, shape)
        candidates = GpuLists(index) if gpu else candidates_of(kind, index)
    exact = None if kept is None else RowScores(kept.take)
    search = ApproximateSearch(
        candidates,
        exact,
        manifest.passages,
        chosen.get(candidates.effort, 1),
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
