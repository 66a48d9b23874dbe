"""The exact index, and the doors to every other: build one, load one, whichever kind it is.

An `Index` looks at every vector and returns the exact top k (`exact` says how that is made sure), over vectors in
float32 or rounded to float16. They lie in the folder's file, mapped: loading costs no RAM of its own, searching keeps
in memory what the operating system finds room for.

Deliberately absent: approximate kinds (`approximate`), words (`bm25`, `hybrid`), and how a folder is built (`build`).
Not thread-safe.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from thresher.policy.files import staged_folder
from thresher.retrieval.building.build import MATRIX_FILES, BuildSettings, fill_folder
from thresher.retrieval.data.corpus import Corpus, check_embed
from thresher.retrieval.encoders.encoder import Encoder, Vectors
from thresher.retrieval.encoders.lexical import LexicalEncoder
from thresher.retrieval.indexes.dense import DenseIndex
from thresher.retrieval.indexes.kinds import parse_kind
from thresher.retrieval.indexes.manifest import Manifest, check_file, find_corpus, read_manifest
from thresher.retrieval.retriever import Hit as Hit
from thresher.retrieval.vectors.approximate import read_approximate
from thresher.retrieval.vectors.exact import ExactRows, Found, faiss
from thresher.retrieval.vectors.file import Array, VectorFile
from thresher.rewards.errors import UserError

if TYPE_CHECKING:
    from thresher.retrieval.indexes.bm25 import Bm25Index
    from thresher.retrieval.indexes.hybrid import Hybrid

FORMAT_1_VECTORS = "vectors.faiss"


def _load_learned(folder: Path) -> Encoder:
    # Lazily, for it imports torch.
    from thresher.retrieval.encoders.learned import LearnedEncoder

    return LearnedEncoder.load(folder)


LOADERS: dict[str, Callable[[Path], Encoder]] = {LexicalEncoder.name: LexicalEncoder.load, "learned": _load_learned}


class Index(DenseIndex):
    """A corpus, its vectors (float32 or float16 [N, D], one row per passage) and the encoder that made them. Made by
    `build_index` or `load_index`. `largest_norm` is that of the rows, looked for unless given."""

    def __init__(
        self, corpus: Corpus, encoder: Encoder, vectors_ND: Array, embed: str, largest_norm: float | None = None
    ) -> None:
        super().__init__(corpus, encoder, embed, vectors_ND.shape[1])
        self._rows = ExactRows(vectors_ND, largest_norm)

    def _top(self, query_QD: Vectors, k: int) -> list[Found]:
        found = self._rows.top(query_QD, k)
        self.stats.full_scans = self._rows.full_scans
        return found


def build_index(
    corpus: Corpus,
    encoder: Encoder,
    folder: str | Path,
    embed: str = "text",
    on_progress: Callable[[int], None] | None = None,
) -> Index:
    """Encodes every passage (its text, or title and text, see `embedded_text`) and writes an exact index into
    `folder`.

    The folder appears when all is written, or not at all, and an interrupted build leaves nothing; for one that goes
    on where it was, and for other kinds, see `build.build_folder`. A folder that exists is refused with a UserError.
    `on_progress` is called with the number of passages encoded so far.
    """
    check_embed(embed)
    folder = Path(folder)

    def on_stage(stage: str, done: int, total: int) -> None:
        if on_progress is not None:
            on_progress(done)

    with staged_folder(folder) as staged:
        kind = parse_kind("flat", len(corpus), encoder.dim)
        fill_folder(staged, folder, corpus, encoder, BuildSettings(kind=kind, embed=embed), on_stage)
    return load_index(folder, corpus, encoder)


def load_index(folder: str | Path, corpus: Corpus | None = None, encoder: Encoder | None = None) -> Index:
    """Reads an exact index, of this format or of the first.

    The corpus is read again from the path in the manifest unless given, the encoder is loaded from the folder
    unless given. UserError when the folder is no finished index or one of another kind, its vectors are damaged or of
    another shape, or corpus or encoder are not those it was built with.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if manifest.kind not in MATRIX_FILES:
        raise UserError(f"{folder}: an index of kind {manifest.kind!r}, expected flat or flat16; name another folder")
    encoder = _find_encoder(manifest, folder, encoder)
    corpus = find_corpus(manifest, folder, corpus)
    if manifest.format == 1:
        return Index(corpus, encoder, _read_format_1(folder / FORMAT_1_VECTORS, manifest), manifest.embed)
    name, dtype = MATRIX_FILES[manifest.kind]
    check_file(folder / name, manifest.vectors_bytes)
    vectors_ND = VectorFile(folder / name, manifest.passages, manifest.dim, dtype).open()
    return Index(corpus, encoder, vectors_ND, manifest.embed, manifest.largest_norm)


def load_retriever(
    folder: str | Path, corpus: Corpus | None = None, parameters: dict[str, int] | None = None, gpu: bool = False
) -> "DenseIndex | Bm25Index | Hybrid":
    """Reads an index folder of any kind.

    `parameters` replaces search parameters of an approximate index ({"nprobe": 64}); `gpu` lays lists, or the matrix of
    an exact index, on all GPUs, sharded, in float16 (`retrieval/indexes/gpu.py` says what that changes). UserError as
    `load_index`, for a kind that does not exist, and for parameters or GPUs asked of a kind that has none.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    kind = manifest.kind
    if kind in ("ivf", "hnsw") or (gpu and kind in MATRIX_FILES and manifest.format > 1):
        encoder = _find_encoder(manifest, folder, None)
        return read_approximate(manifest, folder, find_corpus(manifest, folder, corpus), encoder, parameters, gpu)
    if parameters or gpu:
        asked = "search parameters" if parameters else "form for GPUs"
        raise UserError(f"{folder}: an index of kind {kind!r} has no {asked}; leave them out")
    if kind in MATRIX_FILES:
        return load_index(folder, corpus)
    if kind == "bm25":
        from thresher.retrieval.indexes.bm25 import load_bm25

        return load_bm25(folder, corpus)
    if kind == "hybrid":
        from thresher.retrieval.indexes.hybrid import load_hybrid

        return load_hybrid(folder, corpus)
    raise UserError(f"{folder}: an index of kind {kind!r}, which this version does not know; build the index again")


def _find_encoder(manifest: Manifest, folder: Path, encoder: Encoder | None) -> Encoder:
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


def _read_format_1(path: Path, manifest: Manifest) -> Vectors:
    """The vectors of a folder of format 1, copied out of FAISS's file."""
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
