"""FAISS's structures: built over the file of vectors so that a kill loses little, written, read and recognised.

A structure may follow a rotation (OPQ's) or a projection on the vectors' principal directions, found on a sample
without removing the mean, which would change the order of inner products. Lists are built in four steps:
  train   centroids, and for PQ its rotation and codes, on a sample; kept in `trained.faiss`
  assign  every vector's list, a slice at a time; kept in `lists.npy`, resumed after a kill
  fill    every list is allocated at its exact length, then the vectors are put into it; this is repeated after a kill,
          because it is only a copy (or, for PQ, an encoding)
  write   `index.faiss`

A graph is written every 2^18 vectors. FAISS's random numbers for the levels are seeded again at each of these points,
so that a resumed graph equals one built without a break; with FAISS before 1.15.1 this holds for one thread.

Shape letters: N vectors, S a sample, B a slice, D dimension, P directions.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from thresher.common.errors import UserError
from thresher.common.files import atomic_path
from thresher.retrieval.indexes.faiss_library import faiss
from thresher.retrieval.indexes.kinds import INDEX_FILE, PQ_CENTROIDS, SEED, TRAIN_CODES, Kind, OnStage
from thresher.retrieval.indexes.vector_file import Array, VectorFile, sample_rows

TRAINED_FILE, LISTS_FILE, GRAPH_FILE = "trained.faiss", "lists.npy", "graph.faiss"
# Files that a build may leave for its resumption, and that a finished index does not have.
SCRATCH = (GRAPH_FILE, TRAINED_FILE, LISTS_FILE)
# FAISS computes products of centroids and codes when it reads a PQ, if they take no more than this.
PQ_TABLES = 2**31
# k-means converges early and the lists' borders need not be precise: FAISS's 25 rounds find no better neighbours.
KMEANS_ROUNDS, PQ_ROUNDS, OPQ_ROUNDS = 10, 15, 10
# Vectors after which an unfinished graph is written.
CHECKPOINT = 1 << 18
# At 100 a graph over 192 directions of 10^6 vectors takes half as long to build, and efSearch 256 instead of 96 to find
# .95 of the best five.
EF_CONSTRUCTION = 200
# Sampled rows that are converted to float64 at a time.
DIRECTIONS_CHUNK = 8192


def grow(kind: Kind, vectors: VectorFile, work: Path, on_stage: OnStage) -> Any:
    """Build or resume FAISS's structure of `kind` over `vectors`, and write it to `work/index.faiss`."""
    path = work / INDEX_FILE
    if path.is_file():
        return read_structure(path, kind, vectors)
    return _grow_graph(kind, vectors, work, on_stage) if kind.links else _grow_lists(kind, vectors, work, on_stage)


def read_structure(path: Path, kind: Kind, vectors: VectorFile, trusted: bool = True) -> Any:
    """Read `index.faiss`; a structure that borrows its vectors gets a copy of `vectors`. UserError for another
    structure and, unless `trusted`, for one whose numbers are out of the vectors' range."""
    try:
        with _bounded_reading(path, PQ_TABLES if kind.codes == "pq" else 0):
            index = faiss.read_index(os.fspath(path), _read_flags(kind))
    except (RuntimeError, MemoryError):
        raise UserError(f"{path}: FAISS cannot read it; build the index again") from None
    if (index.ntotal, index.d) != (vectors.rows, vectors.dim) or not _is_of(index, kind):
        raise UserError(
            f"{path}: holds {index.ntotal} x {index.d} vectors in a {type(index).__name__}, expected {vectors.rows} x "
            f"{vectors.dim} in {kind.name}; build the index again"
        )
    if not trusted and not _in_range(index):
        raise UserError(f"{path}: damaged, its numbers are outside its {index.ntotal} vectors; build the index again")
    if kind.borrows:
        _attach(index, vectors, index.ntotal)
    return index


def _read_flags(kind: Kind) -> int:
    """Return FAISS's flags for reading and writing: a structure that borrows its vectors leaves them out."""
    return int(faiss.IO_FLAG_SKIP_STORAGE) if kind.borrows else 0


def _is_of(index: Any, kind: Kind) -> bool:
    structure = behind(index)
    if (structure is not index) != (kind.directions > 0 or kind.opq) or structure.d != (kind.directions or index.d):
        return False
    if kind.links:
        if not isinstance(structure, faiss.IndexHNSWFlat if kind.codes == "float32" else faiss.IndexHNSWSQ):
            return False
        return kind.borrows or bool(structure.storage and structure.storage.sa_code_size() == kind.code_bytes(index.d))
    wanted = {"float32": faiss.IndexIVFFlat, "pq": faiss.IndexIVFPQ}.get(kind.codes, faiss.IndexIVFScalarQuantizer)
    return isinstance(structure, wanted) and bool(structure.code_size == kind.code_bytes(index.d))


def _grow_graph(kind: Kind, vectors: VectorFile, work: Path, on_stage: OnStage) -> Any:
    path = work / GRAPH_FILE
    if path.is_file():
        index = faiss.read_index(os.fspath(path), _read_flags(kind))
        if kind.borrows:
            _attach(index, vectors, index.ntotal)
    else:
        index = faiss.index_factory(kind.directions or vectors.dim, kind.structure, faiss.METRIC_INNER_PRODUCT)
        if count := kind.training_vectors(vectors.rows):
            sample_SD = vectors.rows_at(sample_rows(vectors.rows, count, SEED))
            index = _projected(sample_SD, index) if kind.directions else index
            index.train(sample_SD)
    graph, projection_PD = behind(index), rotation(index)
    graph.hnsw.efConstruction = EF_CONSTRUCTION
    storage = faiss.downcast_index(graph.storage)
    _reserve(storage.codes, storage.sa_code_size() * vectors.rows)
    # Links of 2M on the ground and about M / (M - 1) above it; a little more, because levels are random.
    _reserve(graph.hnsw.neighbors, int(vectors.rows * (2 * kind.links + 2) * 1.01))
    for start in range(graph.ntotal, vectors.rows, CHECKPOINT):
        graph.hnsw.rng = faiss.RandomGenerator(SEED + start // CHECKPOINT)
        stop = min(start + CHECKPOINT, vectors.rows)
        for first, part_BD in vectors.slices(start, stop):
            graph.add(_rotated(part_BD, projection_PD))
            on_stage("linking", first + len(part_BD), vectors.rows)
        index.ntotal = graph.ntotal
        write(index, path if stop < vectors.rows else work / INDEX_FILE, _read_flags(kind))
    return index


def _grow_lists(kind: Kind, vectors: VectorFile, work: Path, on_stage: OnStage) -> Any:
    index = _trained(kind, vectors, work, on_stage)
    lists, matrix_DD = inner(index), rotation(index)
    # The list of every vector that has none yet: its nearest centroid.
    assigned = VectorFile(work / LISTS_FILE, vectors.rows, 1, "int32")
    for start, part_BD in vectors.slices(assigned.done()):
        _, list_B1 = lists.quantizer.search(_rotated(part_BD, matrix_DD), 1)
        assigned.append(list_B1)
        on_stage("assigning to lists", start + len(part_BD), vectors.rows)
    _fill(index, vectors, assigned.open()[:, 0], on_stage)
    write(index, work / INDEX_FILE)
    return index


def _fill(index: Any, vectors: VectorFile, list_N: Array, on_stage: OnStage) -> None:
    """Put every vector, with its row as its id, into the list to which it was assigned."""
    lists, matrix_DD = inner(index), rotation(index)
    inverted = faiss.downcast_InvertedLists(lists.invlists)
    for number, length in enumerate(np.bincount(list_N, minlength=lists.nlist).tolist()):
        inverted.resize(number, length)
        inverted.resize(number, 0)  # the memory remains allocated, at its final size
    for start, part_BD in vectors.slices():
        ready_BD = _rotated(part_BD, matrix_DD)
        row_B = np.arange(start, start + len(ready_BD), dtype=np.int64)
        list_B = list_N[start : start + len(ready_BD)].astype(np.int64)
        lists.add_core(len(ready_BD), *(faiss.swig_ptr(values) for values in (ready_BD, row_B, list_B)))
        on_stage("filling lists", start + len(ready_BD), vectors.rows)
    index.ntotal = lists.ntotal


def _trained(kind: Kind, vectors: VectorFile, work: Path, on_stage: OnStage) -> Any:
    path = work / TRAINED_FILE
    if path.is_file():
        return faiss.read_index(os.fspath(path))
    count = kind.training_vectors(vectors.rows)
    on_stage("training", 0, count)
    sample_SD = vectors.rows_at(sample_rows(vectors.rows, count, SEED))
    # "np": without the reordering of codes for polysemous search, which takes longer than all the rest and is not used.
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
        # Without this, FAISS writes a warning to the terminal for every clustering of a small corpus.
        clustering.min_points_per_centroid = 1
    index.train(sample_SD)
    if kind.opq:
        transform.pq = None
    write(index, path)
    on_stage("training", count, count)
    return index


def inner(index: Any) -> Any:
    """Return the lists of `index`, without its rotation, if any."""
    return faiss.downcast_index(faiss.extract_index_ivf(index))


def behind(index: Any) -> Any:
    """Return the structure of `index` that follows its rotation or projection, if any."""
    return faiss.downcast_index(index.index) if isinstance(index, faiss.IndexPreTransform) else index


def rotation(index: Any) -> Array | None:
    """Return the rotation, float32 [D, D], or projection, [P, D], before the structure, if any, to apply as A x."""
    if not isinstance(index, faiss.IndexPreTransform):
        return None
    transform = faiss.downcast_VectorTransform(index.chain.at(0))
    matrix_DD: Array = faiss.vector_to_array(transform.A).reshape(transform.d_out, transform.d_in)
    return matrix_DD


def _rotated(part_BD: Array, matrix_DD: Array | None) -> Array:
    """Return `part_BD` after the rotation or projection `matrix_DD`, if any, in C order."""
    return np.ascontiguousarray(part_BD if matrix_DD is None else part_BD @ matrix_DD.T)


def _projected(sample_SD: Array, index: Any) -> Any:
    """Return `index`, of P dimensions, after the projection on the P strongest directions of `sample_SD`."""
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


def _attach(index: Any, vectors: VectorFile, rows: int) -> None:
    """Attach the first `rows` of the file to a graph that was read without its vectors."""
    storage = faiss.IndexFlatIP(vectors.dim)
    _reserve(storage.codes, 4 * vectors.dim * vectors.rows)
    for _, part_BD in vectors.slices(0, rows):
        storage.add(np.ascontiguousarray(part_BD, np.float32))
    index.storage = storage
    # From now on the graph owns the storage and frees it.
    index.own_fields = True
    storage.this.disown()


def _reserve(vector: Any, elements: int) -> None:
    """Reserve memory for `elements` elements in one of FAISS's vectors, whose content is unchanged."""
    size = vector.size()
    vector.resize(max(size, elements))
    vector.resize(size)


@contextmanager
def _bounded_reading(path: Path, beyond: int = 0) -> Iterator[None]:
    """Limit the arrays that FAISS reads to the size of the file and `beyond` computed bytes. A damaged length is then
    an error and does not fill the memory. Older versions of FAISS have no such limit."""
    if not hasattr(faiss, "set_deserialization_vector_byte_limit"):
        yield
        return
    before = faiss.get_deserialization_vector_byte_limit()
    faiss.set_deserialization_vector_byte_limit(path.stat().st_size + beyond)
    try:
        yield
    finally:
        faiss.set_deserialization_vector_byte_limit(before)


def _in_range(index: Any) -> bool:
    """Return whether links, levels and rows of `index` refer to vectors that it has."""
    structure = behind(index)
    if hasattr(structure, "hnsw"):
        return _graph_in_range(structure.hnsw, index.ntotal)
    if not hasattr(structure, "invlists"):
        return True
    lists = faiss.downcast_InvertedLists(structure.invlists)
    sizes = [lists.list_size(number) for number in range(structure.nlist)]
    if sum(sizes) != index.ntotal:
        return False
    rows = [faiss.rev_swig_ptr(lists.get_ids(number), size) for number, size in enumerate(sizes) if size]
    return all(row_L.min() >= 0 and row_L.max() < index.ntotal for row_L in rows)


def _graph_in_range(hnsw: Any, count: int) -> bool:
    level_N, offset_N, link_M, width_L = (
        faiss.rev_swig_ptr(vector.data(), vector.size()) if vector.size() else np.zeros(0, np.int64)
        for vector in (hnsw.levels, hnsw.offsets, hnsw.neighbors, hnsw.cum_nneighbor_per_level)
    )
    if (len(level_N), len(offset_N)) != (count, count + 1) or not count:
        return False
    if level_N.min() < 1 or level_N.max() >= len(width_L) or hnsw.max_level != level_N.max() - 1:
        return False
    return bool(
        0 <= hnsw.entry_point < count
        and (np.diff(offset_N.astype(np.int64)) == width_L[level_N]).all()
        and (offset_N[0], offset_N[-1]) == (0, len(link_M))
        and link_M.min() >= -1
        and link_M.max() < count
    )


def write(index: Any, path: Path, flags: int = 0) -> None:
    """Write `index` to the file `path`, completely or not at all."""
    with atomic_path(path) as temporary:
        try:
            # To a file opened here, because FAISS does not check whether its own was flushed when it was closed.
            with temporary.open("wb") as file:
                faiss.write_index(index, faiss.PyCallbackIOWriter(file.write), flags)
        except (RuntimeError, OSError) as error:  # FAISS's wrapper of any error of the system, and the system's own
            raise UserError(f"{path}: cannot be written ({str(error).strip()[-120:]}); make room for it") from None
