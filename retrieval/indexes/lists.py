"""Kind: lists around centroids (IVF), of which a search looks through the nearest; its search parameter is `nprobe`.

    IVF4096,Flat            lists around 4,096 centroids; IVF,Flat for the usual number
    IVF4096,SQfp16          vectors in the lists in float16; SQ8 in 8 bits a coordinate, between its extremes
    [OPQ64,]IVF4096,PQ64    64 bytes a vector: product quantisation, with OPQ after a learned rotation
    PCA192,IVF4096,Flat     any but PQ, over the vectors' 192 strongest directions

Built in four steps, so that memory is known beforehand and little is lost to a kill:
  train   centroids, and for PQ its rotation and codes, on a sample; kept in `trained.faiss`
  assign  every vector's list, a slice at a time; kept in `lists.npy`, resumed where it was
  fill    every list made exactly as long as it will be, then the vectors laid into it; starts anew after a kill, being
          no more than a copy (or, for PQ, an encoding)
  write   `index.faiss`
A query's nearest lists are chosen exactly, by `ExactRows` over the centroids, so that they do not depend on the batch.

Deliberately absent: FAISS's own `add` in a stream, whose vectors grow by doubling (twice the memory at the worst);
graphs over the centroids, quantisers of 4 bits.

Shape letters: N vectors, S a sample, B a slice, Q queries, D dimension, F candidates, P probed lists.
"""

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from thresher.common.errors import UserError
from thresher.retrieval.encoders.encoder import Vectors
from thresher.retrieval.indexes.kind import (
    INDEX_FILE,
    PROCESS_BYTES,
    SCALAR_BYTES,
    SCALAR_CODES,
    SCALARS,
    SEED,
    TRAIN_CODES,
    Estimate,
    Kind,
    OnStage,
)
from thresher.retrieval.vectors.approximate import Candidates, Projection
from thresher.retrieval.vectors.exact import ExactRows, Rows
from thresher.retrieval.vectors.faiss_library import faiss
from thresher.retrieval.vectors.file import SLICE_BYTES, Array, VectorFile, sample_rows
from thresher.retrieval.vectors.gpu import GpuLists
from thresher.retrieval.vectors.structure import inner, projected, rotated, rotation, write

TRAINED_FILE, LISTS_FILE = "trained.faiss", "lists.npy"
# Passages a list should have to train its centroid on, at the least; and how many it is trained on, at the most.
LEAST_PER_LIST, TRAIN_PER_LIST = 39, 50
# Product quantisers have 256 centroids a byte.
PQ_CENTROIDS = 256
# k-means converges early and the lists' borders need no last digit: FAISS's 25 rounds find no better neighbours.
KMEANS_ROUNDS, PQ_ROUNDS, OPQ_ROUNDS = 10, 15, 10

_NAME = re.compile(r"(?:OPQ(\d+),)?IVF(\d*),(?:(Flat|SQfp16|SQ8)|PQ(\d+))", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Lists(Kind):
    """`lists` lists; `codes` may also be pq, `pq` bytes of a code, `opq` whether a rotation precedes."""

    examples: ClassVar[tuple[str, ...]] = ("IVF4096,Flat", "IVF4096,SQfp16", "OPQ64,IVF4096,PQ64", "ivf", "ivfpq")
    scratch: ClassVar[tuple[str, ...]] = (TRAINED_FILE, LISTS_FILE)
    lists: int
    pq: int = 0
    opq: bool = False

    @property
    def family(self) -> str:
        """As Kind has it."""
        return "ivf"

    @property
    def structure(self) -> str:
        """As Kind has it."""
        codes = f"PQ{self.pq}" if self.codes == "pq" else SCALARS[self.codes]
        return f"{f'OPQ{self.pq},' if self.opq else ''}IVF{self.lists},{codes}"

    @classmethod
    def parse(cls, text: str, passages: int, dim: int) -> Self | None:
        """As Kind has it."""
        usual = next((size for size in pq_sizes(dim) if size <= dim // 8), dim)
        found = _NAME.fullmatch({"ivf": "IVF,Flat", "ivfpq": f"OPQ{usual},IVF,PQ{usual}"}.get(text.lower(), text))
        if not found:
            return None
        rotation, lists, scalar, pq = found.groups()
        kind = cls(
            lists=int(lists) if lists else default_lists(passages),
            codes=SCALAR_CODES[scalar.lower()] if scalar else "pq",
            pq=int(pq or 0),
            opq=rotation is not None,
        )
        _check(kind, text, rotation, passages, dim)
        return kind

    @property
    def transformed(self) -> bool:
        """As Kind has it."""
        return self.directions > 0 or self.opq

    @property
    def projectable(self) -> bool:
        """As Kind has it: OPQ serves PQ."""
        return self.codes != "pq"

    def code_bytes(self, dim: int) -> int:
        """As Kind has it."""
        return self.pq if self.codes == "pq" else SCALAR_BYTES[self.codes] * (self.directions or dim)

    def bytes_per_vector(self, dim: int) -> int:
        """Its coordinates or code, and its row (8)."""
        return self.code_bytes(dim) + 8

    def training_vectors(self, passages: int) -> int:
        """As Kind has it."""
        wanted = TRAIN_PER_LIST * self.lists
        return min(passages, max(wanted, TRAIN_CODES) if self.estimates else wanted)

    def estimate(self, passages: int, dim: int) -> Estimate:
        """As Kind has it, with C centroids of d dimensions (of a projection's), 4 d C, wherever the structure is;
        training three times as large for PQ (its rotation and residuals are copies), and filling 4 N more (every row's
        list). On GPUs N b for codes, else float16, and the centroids."""
        centroids = 4 * (self.directions or dim) * self.lists
        structure = passages * self.bytes_per_vector(dim) + centroids
        training = 4 * dim * self.training_vectors(passages) * (3 if self.codes == "pq" else 1)
        on_gpus = structure if self.codes in ("pq", "uint8") else 2 * (self.directions or dim) * passages
        return Estimate(
            ram_bytes=structure + PROCESS_BYTES,
            disk_bytes=4 * dim * passages + structure,
            build_ram_bytes=max(training, structure + 4 * passages) + 2 * SLICE_BYTES + PROCESS_BYTES,
            gpu_bytes=on_gpus + centroids,
        )

    @classmethod
    def choices(cls, passages: int, dim: int) -> list[str]:
        """As Kind has it: 8 bits, then codes of falling size."""
        lists = f"IVF{default_lists(passages)}"
        sizes = pq_sizes(dim) if passages >= PQ_CENTROIDS else []
        return [f"{lists},SQ8", *(f"OPQ{size},{lists},PQ{size}" for size in sizes)]

    @classmethod
    def usual(cls, passages: int, dim: int) -> list[str]:
        """As Kind has it."""
        lists = default_lists(passages)
        return [f"IVF{lists},Flat", f"IVF{lists},SQfp16"]

    def grow(self, vectors: VectorFile, work: Path, on_stage: OnStage) -> Any:
        """As Kind has it."""
        index = _trained(self, vectors, work, on_stage)
        lists = VectorFile(work / LISTS_FILE, vectors.rows, 1, "int32")
        _assign(index, vectors, lists, on_stage)
        _fill(index, vectors, lists.open()[:, 0], on_stage)
        write(index, work / INDEX_FILE)
        return index

    def holds(self, structure: Any, dim: int) -> bool:
        """As Kind has it."""
        wanted = {"float32": faiss.IndexIVFFlat, "pq": faiss.IndexIVFPQ}.get(self.codes, faiss.IndexIVFScalarQuantizer)
        return isinstance(structure, wanted) and bool(structure.code_size == self.code_bytes(dim))

    def candidates(self, index: Any) -> Candidates:
        """As Kind has it."""
        return ListCandidates(index)

    def on_gpus(self, index: Any) -> Candidates:
        """As Kind has it."""
        return GpuLists(index)

    def note(self, parameters: dict[str, int]) -> str | None:
        """As Kind has it."""
        if parameters.get("nprobe") != self.lists or self.lists == 1:
            return None
        return "so much is found only by looking through every list; these vectors have no clusters: take hnsw or flat"


class ListCandidates(Candidates):
    """The lists of a FAISS IVF index, with or without a rotation."""

    parameter = "nprobe"

    def __init__(self, index: Any) -> None:
        self._index = index  # owns what the next lines point into
        self._lists = inner(index)
        self._project = Projection(rotation(index))
        self.most = self._lists.nlist
        quantizer = faiss.downcast_index(self._lists.quantizer)
        centroids = faiss.rev_swig_ptr(quantizer.get_xb(), self.most * quantizer.d)
        self._centroids = ExactRows(centroids.reshape(self.most, quantizer.d))

    def find(self, query_QD: Vectors, fetch: int, value: int) -> tuple[Vectors, Rows]:
        """As Candidates has it."""
        query_QD = self._project(query_QD)
        value = min(value, self.most)
        nearest = self._centroids.top(query_QD, value)
        list_QP = np.array([[row for row, _ in found] for found in nearest], np.int64)
        score_QP = np.array([[score for _, score in found] for found in nearest], np.float32)
        self._lists.nprobe = value
        score_QF, row_QF = self._lists.search_preassigned(query_QD, fetch, list_QP, score_QP)
        return score_QF, row_QF


def default_lists(passages: int) -> int:
    """The power of two nearest to 4 * sqrt(N), with at least 39 passages a list: 256 for 5,000 passages would leave 20,
    so 128; 4,096 for 10^6; 16,384 for 21,015,324."""
    usual = round(math.log2(4 * math.sqrt(passages)))
    most = math.floor(math.log2(max(1, passages / LEAST_PER_LIST)))
    return 1 << max(0, min(usual, most))


def pq_sizes(dim: int) -> list[int]:
    """Bytes of a code that are offered for `dim`, largest first: divisors of `dim` that put 4 to 32 dimensions into a
    byte."""
    return [dim // width for width in (4, 6, 8, 12, 16, 24, 32) if dim % width == 0]


def _check(kind: Lists, text: str, rotation: str | None, passages: int, dim: int) -> None:
    if not 1 <= kind.lists <= passages:
        raise UserError(
            f"kind is {text!r}: {kind.lists} lists for {passages} passages; IVF{default_lists(passages)} would be usual"
        )
    if rotation is not None and int(rotation) != kind.pq:
        raise UserError(f"kind is {text!r}: expected the same number in OPQ and PQ; OPQ goes with PQ only")
    if kind.codes != "pq":
        return
    if kind.pq < 1 or dim % kind.pq:
        sizes = ", ".join(map(str, pq_sizes(dim))) or "none"
        raise UserError(f"kind is {text!r}: {kind.pq} does not divide {dim} dimensions; these do well: {sizes}")
    if passages < PQ_CENTROIDS:
        raise UserError(
            f"kind is {text!r}: PQ is trained on at least {PQ_CENTROIDS} vectors, but there are {passages} passages; "
            f"take flat"
        )


def _trained(kind: Lists, vectors: VectorFile, work: Path, on_stage: OnStage) -> Any:
    path = work / TRAINED_FILE
    if path.is_file():
        return faiss.read_index(os.fspath(path))
    count = kind.training_vectors(vectors.rows)
    on_stage("training", 0, count)
    sample_SD = vectors.rows_at(sample_rows(vectors.rows, count, SEED))
    # "np": without the reordering of codes for polysemous search, which takes longer than all else and is not used.
    name = f"{kind.name}np" if kind.codes == "pq" else kind.structure
    index = faiss.index_factory(kind.directions or vectors.dim, name, faiss.METRIC_INNER_PRODUCT)
    if kind.directions:
        index = projected(sample_SD, index)
    lists = inner(index)
    lists.cp.niter, lists.cp.seed = KMEANS_ROUNDS, SEED
    quiet = [lists.cp]
    held = []
    if kind.codes == "pq":
        lists.pq.cp.niter = PQ_ROUNDS
        quiet.append(lists.pq.cp)
    if kind.opq:
        transform = faiss.downcast_VectorTransform(index.chain.at(0))
        transform.niter, transform.max_train_points = OPQ_ROUNDS, TRAIN_CODES
        held.append(faiss.ProductQuantizer(vectors.dim, kind.pq, PQ_CENTROIDS.bit_length() - 1))
        transform.pq = held[0]
        quiet.append(held[0].cp)
    for clustering in quiet:
        # FAISS writes a warning to the terminal for every clustering of a small corpus.
        clustering.min_points_per_centroid = 1
    index.train(sample_SD)
    if kind.opq:
        transform.pq = None
    write(index, path)
    on_stage("training", count, count)
    return index


def _assign(index: Any, vectors: VectorFile, lists: VectorFile, on_stage: OnStage) -> None:
    """Writes the nearest centroid of every vector that has none yet."""
    centroids = inner(index).quantizer
    matrix_DD = rotation(index)
    for start, part_BD in vectors.slices(lists.done()):
        _, list_B1 = centroids.search(rotated(part_BD, matrix_DD), 1)
        lists.append(list_B1)
        on_stage("assigning to lists", start + len(part_BD), vectors.rows)


def _fill(index: Any, vectors: VectorFile, list_N: Array, on_stage: OnStage) -> None:
    """Lays every vector, with its row as its id, into the list it was assigned to."""
    lists = inner(index)
    matrix_DD = rotation(index)
    inverted = faiss.downcast_InvertedLists(lists.invlists)
    for number, length in enumerate(np.bincount(list_N, minlength=lists.nlist).tolist()):
        inverted.resize(number, length)
        inverted.resize(number, 0)  # the memory stays, at its final size
    for start, part_BD in vectors.slices():
        ready_BD = rotated(part_BD, matrix_DD)
        row_B = np.arange(start, start + len(ready_BD), dtype=np.int64)
        list_B = list_N[start : start + len(ready_BD)].astype(np.int64)
        lists.add_core(len(ready_BD), *(faiss.swig_ptr(values) for values in (ready_BD, row_B, list_B)))
        on_stage("filling lists", start + len(ready_BD), vectors.rows)
    index.ntotal = lists.ntotal
