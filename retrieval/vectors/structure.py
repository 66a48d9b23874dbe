"""FAISS's structures as such: what stands in front of one, a projection for it, room for its vectors, its file.

A structure may stand behind a rotation or a projection (FAISS's IndexPreTransform). The projection here is on the
vectors' principal directions, found on a sample. They are those of the inner product itself: the mean is not taken
away, for that would change the order.

Deliberately absent: what a kind of index makes of it (`retrieval/indexes`).

Shape letters: S a sample, B a slice, D dimension, P directions.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from thresher.common.errors import UserError
from thresher.common.files import atomic_path
from thresher.retrieval.vectors.faiss_library import faiss
from thresher.retrieval.vectors.file import Array, VectorFile

# Sampled rows that are widened to float64 at a time.
DIRECTIONS_CHUNK = 8192


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


def rotated(part_BD: Array, matrix_DD: Array | None) -> Array:
    """`part_BD` behind the rotation or projection `matrix_DD`, in C order."""
    return np.ascontiguousarray(part_BD if matrix_DD is None else part_BD @ matrix_DD.T)


def projected(sample_SD: Array, index: Any) -> Any:
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


def attach(index: Any, vectors: VectorFile, rows: int) -> None:
    """Gives a graph read without its vectors the first `rows` of the file."""
    storage = faiss.IndexFlatIP(vectors.dim)
    reserve(storage.codes, 4 * vectors.dim * vectors.rows)
    for _, part_BD in vectors.slices(0, rows):
        storage.add(np.ascontiguousarray(part_BD, np.float32))
    index.storage = storage
    # The graph frees it from here on.
    index.own_fields = True
    storage.this.disown()


def reserve(vector: Any, elements: int) -> None:
    """Room for so many elements in one of FAISS's vectors, whose content stays."""
    size = vector.size()
    vector.resize(max(size, elements))
    vector.resize(size)


@contextmanager
def bounded_reading(path: Path, beyond: int = 0) -> Iterator[None]:
    """While FAISS reads `path`: no array may be larger than the file that should hold it, and `beyond` bytes that are
    computed, so that a damaged length ends in an error and not in the machine's memory. Older versions of FAISS have no
    such bound."""
    if not hasattr(faiss, "set_deserialization_vector_byte_limit"):
        yield
        return
    before = faiss.get_deserialization_vector_byte_limit()
    faiss.set_deserialization_vector_byte_limit(path.stat().st_size + beyond)
    try:
        yield
    finally:
        faiss.set_deserialization_vector_byte_limit(before)


def in_range(index: Any) -> bool:
    """Whether links, levels and rows of `index` point at vectors that it has: what can be told of a structure without
    hashes, of a graph by one pass over its links, of lists over their rows; of another structure nothing."""
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
    """`index` in the file `path`, which appears whole or not at all."""
    with atomic_path(path) as temporary:
        try:
            # Through a file of ours: FAISS does not look whether its own could be flushed when it was closed.
            with temporary.open("wb") as file:
                faiss.write_index(index, faiss.PyCallbackIOWriter(file.write), flags)
        except (RuntimeError, OSError) as error:  # FAISS's word for whatever the system said, and the system's own
            raise UserError(f"{path}: cannot be written ({str(error).strip()[-120:]}); make room for it") from None
