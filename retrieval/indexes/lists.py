"""The structure that an approximate index is searched by, made by FAISS out of a file of vectors.

Lists (IVF) in four steps, so that memory is known beforehand and little is lost to a kill:
  train   centroids, and for PQ its rotation and codes, on a sample; kept in `trained.faiss`
  assign  every vector's list, a slice at a time; kept in `lists.npy`, gone on with where it was
  fill    every list made exactly as long as it will be, then the vectors laid into it; starts anew after a kill, being
          no more than a copy (or, for PQ, an encoding)
  write   `index.faiss`
A graph (HNSW) grows vector by vector. It is kept every 2^18 of them: over codes or directions with these, which no
other file has, else without its vectors. FAISS's random numbers for the levels are set anew at each of these points, so
that a graph that was gone on with is the graph of one go. That holds for one thread; with more, FAISS links in whatever
order they come.

Before either may stand a projection on the vectors' principal directions, found on a sample. The directions are those
of the inner product itself: the mean is not taken away, for that would change the order.

Deliberately absent: FAISS's own `add` in a stream, whose vectors grow by doubling (twice the memory at the worst).

Shape letters: N vectors, S a sample, B a slice, D dimension, P directions.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from thresher.policy.files import atomic_path
from thresher.retrieval.indexes.kinds import PQ_CENTROIDS, TRAIN_CODES, Kind, training_vectors
from thresher.retrieval.vectors.exact import Rows, faiss
from thresher.retrieval.vectors.file import Array, VectorFile
from thresher.rewards.errors import UserError

INDEX_FILE = "index.faiss"
TRAINED_FILE, LISTS_FILE, GRAPH_FILE = "trained.faiss", "lists.npy", "graph.faiss"
SCRATCH = (TRAINED_FILE, LISTS_FILE, GRAPH_FILE)
# Vectors after which an unfinished graph is written.
CHECKPOINT = 1 << 18
# Sampled rows that are widened to float64 at a time.
DIRECTIONS_CHUNK = 8192
# k-means converges early and the lists' borders need no last digit: FAISS's 25 rounds find no better neighbours.
KMEANS_ROUNDS, PQ_ROUNDS, OPQ_ROUNDS = 10, 15, 10
# At 100 a graph over 192 directions of 10^6 vectors takes half as long to build, and efSearch 256 instead of 96 to find
# .95 of the best five.
EF_CONSTRUCTION = 200
SEED = 1234

# (what is being done, how far, of how many)
OnStage = Callable[[str, int, int], None]


def grow(kind: Kind, vectors: VectorFile, work: Path, on_stage: OnStage) -> Any:
    """The FAISS index of `kind` over `vectors`, also written to `work/index.faiss` (a graph without its vectors, see
    `attach`). What `work` holds of an earlier go over the same vectors is used."""
    path = work / INDEX_FILE
    if path.is_file():
        return read_structure(path, kind, vectors)
    if kind.family == "hnsw":
        return _grow_graph(kind, vectors, work, on_stage)
    index = _trained(kind, vectors, work, on_stage)
    _assign(index, vectors, VectorFile(work / LISTS_FILE, vectors.rows, 1, "int32"), on_stage)
    list_N = VectorFile(work / LISTS_FILE, vectors.rows, 1, "int32").open()[:, 0]
    _fill(index, vectors, list_N, on_stage)
    _write(index, path)
    return index


def read_structure(path: Path, kind: Kind, vectors: VectorFile) -> Any:
    """Reads `index.faiss`; a graph that borrows its vectors gets them from `vectors`, copied to RAM. UserError when
    FAISS cannot, or it holds something else."""
    try:
        index = faiss.read_index(os.fspath(path), _flags(kind))
    except RuntimeError:
        raise UserError(f"{path}: FAISS cannot read it; build the index again") from None
    if (index.ntotal, index.d) != (vectors.rows, vectors.dim) or not _is_of(index, kind):
        raise UserError(
            f"{path}: holds {index.ntotal} x {index.d} vectors in a {type(index).__name__}, expected {vectors.rows} x "
            f"{vectors.dim} in {kind.name}; build the index again"
        )
    if kind.borrows:
        _attach(index, vectors, index.ntotal)
    return index


def _is_of(index: Any, kind: Kind) -> bool:
    structure = behind(index)
    if (structure is not index) != (kind.directions > 0 or kind.opq) or structure.d != (kind.directions or index.d):
        return False
    if kind.family == "hnsw":
        wanted = faiss.IndexHNSWFlat if kind.codes == "float32" else faiss.IndexHNSWSQ
        held = structure.storage.sa_code_size() if isinstance(structure, faiss.IndexHNSW) and structure.storage else 0
    else:
        wanted = {"float32": faiss.IndexIVFFlat, "pq": faiss.IndexIVFPQ}.get(kind.codes, faiss.IndexIVFScalarQuantizer)
        held = structure.code_size if isinstance(structure, faiss.IndexIVF) else 0
    return isinstance(structure, wanted) and (kind.borrows or held == kind.code_bytes(index.d))


def _flags(kind: Kind) -> int:
    return int(faiss.IO_FLAG_SKIP_STORAGE) if kind.borrows else 0


def inner(index: Any) -> Any:
    """The lists of `index`, behind its rotation if it has one."""
    return faiss.downcast_index(faiss.extract_index_ivf(index))


def behind(index: Any) -> Any:
    """The structure of `index` that stands behind its rotation or projection, if it has one."""
    return faiss.downcast_index(index.index) if isinstance(index, faiss.IndexPreTransform) else index


def rotation(index: Any) -> Array | None:
    """The rotation, float32 [D, D], or projection, [P, D], in front of the structure, to be applied as A x; or None."""
    if not isinstance(index, faiss.IndexPreTransform):
        return None
    transform = faiss.downcast_VectorTransform(index.chain.at(0))
    matrix_DD: Array = faiss.vector_to_array(transform.A).reshape(transform.d_out, transform.d_in)
    return matrix_DD


def sample_rows(rows: int, count: int, seed: int) -> Rows:
    """`count` distinct rows out of `rows`, ascending; the same for the same arguments."""
    chosen: Rows = np.sort(np.random.default_rng(seed).choice(rows, count, replace=False))
    return chosen


def _trained(kind: Kind, vectors: VectorFile, work: Path, on_stage: OnStage) -> Any:
    path = work / TRAINED_FILE
    if path.is_file():
        return faiss.read_index(os.fspath(path))
    count = training_vectors(kind, vectors.rows)
    on_stage("training", 0, count)
    sample_SD = vectors.rows_at(sample_rows(vectors.rows, count, SEED))
    # "np": without the reordering of codes for polysemous search, which takes longer than all else and is not used.
    name = f"{kind.name}np" if kind.codes == "pq" else kind.structure
    index = faiss.index_factory(kind.directions or vectors.dim, name, faiss.METRIC_INNER_PRODUCT)
    if kind.directions:
        index = _projected(sample_SD, index)
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
    _write(index, path)
    on_stage("training", count, count)
    return index


def _assign(index: Any, vectors: VectorFile, lists: VectorFile, on_stage: OnStage) -> None:
    """Writes the nearest centroid of every vector that has none yet."""
    centroids = inner(index).quantizer
    matrix_DD = rotation(index)
    for start, part_BD in vectors.slices(lists.done()):
        _, list_B1 = centroids.search(_rotated(part_BD, matrix_DD), 1)
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
        ready_BD = _rotated(part_BD, matrix_DD)
        row_B = np.arange(start, start + len(ready_BD), dtype=np.int64)
        list_B = list_N[start : start + len(ready_BD)].astype(np.int64)
        lists.add_core(len(ready_BD), *(faiss.swig_ptr(values) for values in (ready_BD, row_B, list_B)))
        on_stage("filling lists", start + len(ready_BD), vectors.rows)
    index.ntotal = lists.ntotal


def _rotated(part_BD: Array, matrix_DD: Array | None) -> Array:
    return np.ascontiguousarray(part_BD if matrix_DD is None else part_BD @ matrix_DD.T)


def _projected(sample_SD: Array, index: Any) -> Any:
    """`index`, of P dimensions, behind the projection on the P strongest directions of `sample_SD`."""
    dim = sample_SD.shape[1]
    moment_DD = np.zeros((dim, dim))
    for start in range(0, len(sample_SD), DIRECTIONS_CHUNK):
        part_SD = sample_SD[start : start + DIRECTIONS_CHUNK].astype(np.float64)
        moment_DD += part_SD.T @ part_SD
    _, direction_DD = np.linalg.eigh(moment_DD)  # columns, the strongest last
    projection_PD = direction_DD.T[::-1][: index.d]
    transform = faiss.LinearTransform(dim, index.d, False)
    faiss.copy_array_to_vector(np.ascontiguousarray(projection_PD, np.float32).ravel(), transform.A)
    transform.is_trained = True
    return faiss.IndexPreTransform(transform, index)


def _grow_graph(kind: Kind, vectors: VectorFile, work: Path, on_stage: OnStage) -> Any:
    path = work / GRAPH_FILE
    if path.is_file():
        index = faiss.read_index(os.fspath(path), _flags(kind))
        if kind.borrows:
            _attach(index, vectors, index.ntotal)
    else:
        index = _empty_graph(kind, vectors)
    graph, projection_PD = behind(index), rotation(index)
    graph.hnsw.efConstruction = EF_CONSTRUCTION
    storage = faiss.downcast_index(graph.storage)
    _reserve(storage.codes, storage.sa_code_size() * vectors.rows)
    # Links of 2M on the ground and about M / (M - 1) above it; a little more, for levels are drawn.
    _reserve(graph.hnsw.neighbors, int(vectors.rows * (2 * kind.links + 2) * 1.01))
    for start in range(graph.ntotal, vectors.rows, CHECKPOINT):
        graph.hnsw.rng = faiss.RandomGenerator(SEED + start // CHECKPOINT)
        stop = min(start + CHECKPOINT, vectors.rows)
        for first, part_BD in vectors.slices(start, stop):
            graph.add(_rotated(part_BD, projection_PD))
            on_stage("linking", first + len(part_BD), vectors.rows)
        index.ntotal = graph.ntotal
        _write(index, path if stop < vectors.rows else work / INDEX_FILE, _flags(kind))
    return index


def _empty_graph(kind: Kind, vectors: VectorFile) -> Any:
    """A graph of no vectors, behind its projection, its codes' extremes known: whatever needs a sample is done."""
    index = faiss.index_factory(kind.directions or vectors.dim, kind.structure, faiss.METRIC_INNER_PRODUCT)
    if count := training_vectors(kind, vectors.rows):
        sample_SD = vectors.rows_at(sample_rows(vectors.rows, count, SEED))
        if kind.directions:
            index = _projected(sample_SD, index)
        index.train(sample_SD)
    return index


def _attach(index: Any, vectors: VectorFile, rows: int) -> None:
    """Gives a graph read without its vectors the first `rows` of the file."""
    storage = faiss.IndexFlatIP(vectors.dim)
    _reserve(storage.codes, 4 * vectors.dim * vectors.rows)
    for _, part_BD in vectors.slices(0, rows):
        storage.add(np.ascontiguousarray(part_BD, np.float32))
    index.storage = storage
    # The graph frees it from here on.
    index.own_fields = True
    storage.this.disown()


def _reserve(vector: Any, elements: int) -> None:
    """Room for so many elements in one of FAISS's vectors, whose content stays."""
    size = vector.size()
    vector.resize(max(size, elements))
    vector.resize(size)


def _write(index: Any, path: Path, flags: int = 0) -> None:
    with atomic_path(path) as temporary:
        faiss.write_index(index, os.fspath(temporary), flags)
