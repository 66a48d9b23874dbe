"""Kind: a graph (HNSW), walked from vertex to vertex towards the query; its search parameter is `efSearch`.

    HNSW32                  32 links a vector (64 on the ground level), over the kept vectors
    HNSW32_SQ8              the same over vectors of its own, in 8 bits a coordinate; or SQfp16
    PCA192,HNSW32_SQ8       the same over the vectors' 192 strongest directions

A graph grows vector by vector. It is kept every 2^18 of them: over codes or directions with these, which no other file
has, else without its vectors. FAISS's random numbers for the levels are set anew at each of these points, so that a
graph that was resumed is the graph of one go. With FAISS before 1.15.1 that holds for one thread; several linked in
whatever order they came.

Deliberately absent: graphs over product codes, GPUs (FAISS has no graphs on them).

Shape letters: N vectors, S a sample, B a slice, Q queries, F candidates, P directions.
"""

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from thresher.common.errors import UserError
from thresher.retrieval.encoders.encoder import Vectors
from thresher.retrieval.indexes.kind import (
    INDEX_FILE,
    SCALAR_BYTES,
    SCALAR_CODES,
    SCALARS,
    SEED,
    Kind,
    OnStage,
    read_flags,
)
from thresher.retrieval.vectors.approximate import Candidates, Projection
from thresher.retrieval.vectors.exact import Rows
from thresher.retrieval.vectors.faiss_library import faiss
from thresher.retrieval.vectors.file import VectorFile, sample_rows
from thresher.retrieval.vectors.structure import attach, behind, projected, reserve, rotated, rotation, write

GRAPH_FILE = "graph.faiss"
LINKS = 32
# Vectors after which an unfinished graph is written.
CHECKPOINT = 1 << 18
# At 100 a graph over 192 directions of 10^6 vectors takes half as long to build, and efSearch 256 instead of 96 to find
# .95 of the best five.
EF_CONSTRUCTION = 200
# Values of efSearch beyond it are not tried: over 10^6 vectors a graph found all but .005 at half of it.
MOST_EFSEARCH = 4096
# Dimensions from which a quarter of the directions is worth a line of a plan: of 768 it held the five best of every
# question, but a sixth of 384 .81 of them.
LEAST_FOR_PCA = 512

_NAME = re.compile(r"HNSW(\d*)(?:_(Flat|SQfp16|SQ8))?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Graph(Kind):
    """A graph with `links` links a vector."""

    examples: ClassVar[tuple[str, ...]] = ("HNSW32", "HNSW32_SQ8", "hnsw")
    scratch: ClassVar[tuple[str, ...]] = (GRAPH_FILE,)
    links: int = LINKS

    @property
    def family(self) -> str:
        """As Kind has it."""
        return "hnsw"

    @property
    def structure(self) -> str:
        """As Kind has it."""
        return f"HNSW{self.links}" + ("" if self.codes == "float32" else f"_{SCALARS[self.codes]}")

    @classmethod
    def parse(cls, text: str, passages: int, dim: int) -> Self | None:
        """As Kind has it."""
        found = _NAME.fullmatch(text)
        if not found:
            return None
        links = int(found[1] or LINKS)
        if not 4 <= links <= 128:
            raise UserError(f"kind is {text!r}: a graph of {links} links a vector; expected 4 to 128")
        return cls(links=links, codes=SCALAR_CODES[(found[2] or "Flat").lower()])

    @property
    def borrows(self) -> bool:
        """As Kind has it: so does a graph alone."""
        return self.codes == "float32" and not self.directions

    @property
    def projectable(self) -> bool:
        """As Kind has it."""
        return True

    def code_bytes(self, dim: int) -> int:
        """As Kind has it."""
        return SCALAR_BYTES[self.codes] * (self.directions or dim)

    def bytes_per_vector(self, dim: int) -> int:
        """Its coordinates, links of 4 bytes (2M on the ground, M / (M - 1) above on average), offset (8), level (4)."""
        return self.code_bytes(dim) + 4 * (2 * self.links + math.ceil(self.links / (self.links - 1))) + 12

    @classmethod
    def choices(cls, passages: int, dim: int) -> list[str]:
        """As Kind has it. HNSW32 takes three times the memory and is slower; PCA is not chosen because whether fewer
        directions do depends on the vectors, and shows in the recall only."""
        return [f"HNSW{LINKS}_SQ8"]

    @classmethod
    def usual(cls, passages: int, dim: int) -> list[str]:
        """As Kind has it."""
        pca = [f"PCA{dim // 4},HNSW{LINKS}_SQ8"] if dim >= LEAST_FOR_PCA else []
        return [f"HNSW{LINKS}", f"HNSW{LINKS}_SQ8", *pca]

    def grow(self, vectors: VectorFile, work: Path, on_stage: OnStage) -> Any:
        """As Kind has it."""
        return _grown(self, vectors, work, on_stage)

    def holds(self, structure: Any, dim: int) -> bool:
        """As Kind has it."""
        if not isinstance(structure, faiss.IndexHNSWFlat if self.codes == "float32" else faiss.IndexHNSWSQ):
            return False
        held = structure.storage.sa_code_size() if structure.storage else 0
        return self.borrows or held == self.code_bytes(dim)

    def candidates(self, index: Any) -> Candidates:
        """As Kind has it."""
        return GraphCandidates(index)


class GraphCandidates(Candidates):
    """A FAISS HNSW graph with its vectors, or with the directions and codes that stand in for them."""

    parameter = "efSearch"

    def __init__(self, index: Any) -> None:
        self._index = index  # owns what the next lines point into
        self._project = Projection(rotation(index))
        self._graph = behind(index)
        self.most = int(index.ntotal)

    def span(self, fetch: int) -> tuple[int, int]:
        """As Candidates has it: a graph keeps as many candidates as are fetched in any case, and all it holds only in
        hours."""
        least = min(self.most, fetch)
        return least, max(fetch, min(self.most, MOST_EFSEARCH))

    def find(self, query_QD: Vectors, fetch: int, value: int) -> tuple[Vectors, Rows]:
        """As Candidates has it."""
        self._graph.hnsw.efSearch = min(max(value, fetch), self.most)
        score_QF, row_QF = self._graph.search(self._project(query_QD), fetch)
        return score_QF, row_QF


def _grown(kind: Graph, vectors: VectorFile, work: Path, on_stage: OnStage) -> Any:
    path = work / GRAPH_FILE
    if path.is_file():
        index = faiss.read_index(os.fspath(path), read_flags(kind))
        if kind.borrows:
            attach(index, vectors, index.ntotal)
    else:
        index = _empty(kind, vectors)
    graph, projection_PD = behind(index), rotation(index)
    graph.hnsw.efConstruction = EF_CONSTRUCTION
    storage = faiss.downcast_index(graph.storage)
    reserve(storage.codes, storage.sa_code_size() * vectors.rows)
    # Links of 2M on the ground and about M / (M - 1) above it; a little more, for levels are drawn.
    reserve(graph.hnsw.neighbors, int(vectors.rows * (2 * kind.links + 2) * 1.01))
    for start in range(graph.ntotal, vectors.rows, CHECKPOINT):
        graph.hnsw.rng = faiss.RandomGenerator(SEED + start // CHECKPOINT)
        stop = min(start + CHECKPOINT, vectors.rows)
        for first, part_BD in vectors.slices(start, stop):
            graph.add(rotated(part_BD, projection_PD))
            on_stage("linking", first + len(part_BD), vectors.rows)
        index.ntotal = graph.ntotal
        write(index, path if stop < vectors.rows else work / INDEX_FILE, read_flags(kind))
    return index


def _empty(kind: Graph, vectors: VectorFile) -> Any:
    """A graph of no vectors, behind its projection, its codes' extremes known: whatever needs a sample is done."""
    index = faiss.index_factory(kind.directions or vectors.dim, kind.structure, faiss.METRIC_INNER_PRODUCT)
    if count := kind.training_vectors(vectors.rows):
        sample_SD = vectors.rows_at(sample_rows(vectors.rows, count, SEED))
        if kind.directions:
            index = projected(sample_SD, index)
        index.train(sample_SD)
    return index
