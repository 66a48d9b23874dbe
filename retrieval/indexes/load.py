"""One door to every index folder: its manifest says what it is, and the file of that kind reads it.

Kinds of vectors come from the table `kinds.KINDS`; those without vectors are in the table here, each imported when a
folder asks for it.

Deliberately absent: servers, which no folder names (`retrieval/serving/client`). What is loaded is not thread-safe.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Union

from thresher.common.errors import UserError
from thresher.common.hashes import check_hashes
from thresher.retrieval.data.corpus import Corpus
from thresher.retrieval.indexes.approximate import read_approximate
from thresher.retrieval.indexes.dense import DenseIndex, find_encoder
from thresher.retrieval.indexes.flat import MATRIX_DTYPES, load_index
from thresher.retrieval.indexes.kinds import KINDS
from thresher.retrieval.indexes.manifest import FILE as MANIFEST
from thresher.retrieval.indexes.manifest import find_corpus, open_folder, read_manifest

if TYPE_CHECKING:
    from thresher.retrieval.indexes.bm25 import Bm25Index
    from thresher.retrieval.indexes.hybrid import Hybrid

Loaded = Union[DenseIndex, "Bm25Index", "Hybrid"]


def _bm25(folder: Path, corpus: Corpus | None, verify: bool) -> Loaded:
    from thresher.retrieval.indexes.bm25 import load_bm25

    return load_bm25(folder, corpus, verify)


def _hybrid(folder: Path, corpus: Corpus | None, verify: bool) -> Loaded:
    from thresher.retrieval.indexes.hybrid import load_hybrid

    return load_hybrid(folder, corpus, partial(load_retriever, verify=verify), verify)


WITHOUT_VECTORS: dict[str, Callable[[Path, Corpus | None, bool], Loaded]] = {"bm25": _bm25, "hybrid": _hybrid}


def load_retriever(
    folder: str | Path,
    corpus: Corpus | None = None,
    parameters: dict[str, int] | None = None,
    gpu: bool = False,
    verify: bool = True,
) -> Loaded:
    """Reads an index folder of any kind.

    `parameters` replaces search parameters of an approximate index ({"nprobe": 64}); `gpu` lays lists, or the matrix of
    an exact index, on all GPUs, sharded, in float16 (`retrieval/vectors/gpu.py` says what that changes). `verify`: what
    is read is held against the folder's hashes (common/hashes.py), where it has some. UserError as `load_index`, also
    for a damaged file, for a kind that does not exist, and for parameters or GPUs asked of a kind that has none.
    """
    folder = Path(folder)
    if verify and (folder / MANIFEST).is_file():
        check_hashes(folder, [MANIFEST])
    manifest = read_manifest(folder)
    kind = manifest.kind
    exact = kind in MATRIX_DTYPES
    if (kind in KINDS and not exact) or (gpu and exact and manifest.format > 1):
        manifest, hashes = open_folder(folder, verify)
        encoder = find_encoder(manifest, folder, None)
        corpus = find_corpus(manifest, folder, corpus, verify)
        return read_approximate(manifest, folder, corpus, encoder, parameters, gpu, hashes)
    if parameters or gpu:
        asked = "search parameters" if parameters else "form for GPUs"
        raise UserError(f"{folder}: an index of kind {kind!r} has no {asked}; leave them out")
    if exact:
        return load_index(folder, corpus, verify=verify)
    if kind in WITHOUT_VECTORS:
        return WITHOUT_VECTORS[kind](folder, corpus, verify)
    raise UserError(f"{folder}: an index of kind {kind!r}, which this version does not know; build the index again")
