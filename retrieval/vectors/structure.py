"""FAISS's structures as such: what stands in front of one, a projection for it, room for its vectors, its file.

A structure may stand behind a rotation or a projection (FAISS's IndexPreTransform). The projection here is on the
vectors' principal directions, found on a sample. They are those of the inner product itself: the mean is not taken
away, for that would change the order.

Deliberately absent: what a kind of index makes of it (`retrieval/indexes`).

Shape letters: S a sample, B a slice, D dimension, P directions.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np

from thresher.policy.files import atomic_path
from thresher.retrieval.vectors.exact import faiss
from thresher.retrieval.vectors.file import Array, VectorFile
from thresher.rewards.errors import UserError

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


def write(index: Any, path: Path, flags: int = 0) -> None:
    """`index` in the file `path`, which appears whole or not at all."""
    with atomic_path(path) as temporary:
        try:
            faiss.write_index(index, os.fspath(temporary), flags)
        except RuntimeError as error:  # FAISS's word for whatever the system said
            raise UserError(f"{path}: cannot be written ({str(error).strip()[-120:]}); make room for it") from None
