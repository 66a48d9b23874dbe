"""Kind: flat, every vector looked at by every search, in float32 (`flat`) or rounded to float16 (`flat16`).

The index returns the exact top k (`vectors/exact` says how that is made sure). The vectors lie in the folder's file,
mapped: loading costs no RAM of its own, searching keeps in memory what the operating system finds room for.

Deliberately absent: how a folder is built (`retrieval/building`), and a structure, which an exact kind does not have.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self

from thresher.common.errors import UserError
from thresher.retrieval.data.corpus import Corpus
from thresher.retrieval.encoders.encoder import Encoder, Vectors
from thresher.retrieval.indexes.dense import DenseIndex, find_encoder
from thresher.retrieval.indexes.kind import PROCESS_BYTES, SCALAR_BYTES, Estimate, Kind
from thresher.retrieval.indexes.manifest import Manifest, check_file, find_corpus, kept_vectors, open_folder
from thresher.retrieval.vectors.exact import ExactRows, Found
from thresher.retrieval.vectors.faiss_library import faiss
from thresher.retrieval.vectors.file import SLICE_BYTES, Array

FORMAT_1_VECTORS = "vectors.faiss"
# Up to here an exact search over 768 dimensions takes two cores under .1 s: no approximation is worth its loss.
FLAT_PASSAGES = 200_000
# How the matrix that is searched is kept.
MATRIX_DTYPES = {"flat": "float32", "flat16": "float16"}
_NAMES = {"flat": "float32", "flat16": "float16", "sqfp16": "float16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Flat(Kind):
    """Every vector in float32 or float16."""

    examples: ClassVar[tuple[str, ...]] = ("flat", "flat16")

    @property
    def family(self) -> str:
        """As Kind has it."""
        return "flat" if self.codes == "float32" else "flat16"

    @property
    def structure(self) -> str:
        """As Kind has it."""
        return self.family

    @classmethod
    def parse(cls, text: str, passages: int, dim: int) -> Self | None:
        """As Kind has it."""
        codes = _NAMES.get(text.lower())
        return None if codes is None else cls(codes=codes)

    @property
    def exact(self) -> bool:
        """As Kind has it."""
        return True

    @property
    def lossless(self) -> bool:
        """As Kind has it: but for what rounding costs."""
        return self.codes == "float32"

    def code_bytes(self, dim: int) -> int:
        """As Kind has it."""
        return SCALAR_BYTES[self.codes] * dim

    def estimate(self, passages: int, dim: int) -> Estimate:
        """As Kind has it; the mapped file alone, and on GPUs in float16. Searches want it in memory, the loader does
        not."""
        matrix = passages * self.code_bytes(dim)
        return Estimate(
            ram_bytes=matrix + PROCESS_BYTES,
            disk_bytes=matrix,
            build_ram_bytes=2 * SLICE_BYTES + PROCESS_BYTES,
            gpu_bytes=2 * dim * passages,
        )

    @classmethod
    def choices(cls, passages: int, dim: int) -> list[str]:
        """As Kind has it."""
        return ["flat"] if passages <= FLAT_PASSAGES else []

    @classmethod
    def usual(cls, passages: int, dim: int) -> list[str]:
        """As Kind has it."""
        return ["flat", "flat16"]


class Index(DenseIndex):
    """A corpus, its vectors (float32 or float16 [N, D], one row per passage) and the encoder that made them. Made by
    `build_index` or `load_index`. `largest_norm` is that of the rows, looked for unless given; `verify` as ExactRows
    has it."""

    def __init__(
        self,
        corpus: Corpus,
        encoder: Encoder,
        vectors_ND: Array,
        embed: str,
        largest_norm: float | None = None,
        verify: Callable[[int, int], None] | None = None,
    ) -> None:
        super().__init__(corpus, encoder, embed, vectors_ND.shape[1])
        self._rows = ExactRows(vectors_ND, largest_norm, verify)

    def _top(self, query_QD: Vectors, k: int) -> list[Found]:
        found = self._rows.top(query_QD, k)
        self.stats.full_scans = self._rows.full_scans
        return found


def load_index(
    folder: str | Path, corpus: Corpus | None = None, encoder: Encoder | None = None, verify: bool = True
) -> Index:
    """Reads an exact index, of this format or of the first.

    The corpus is read again from the path in the manifest unless given, the encoder is loaded from the folder
    unless given. `verify`: what is read is held against the folder's hashes, where it has some; the vectors at the
    first search. UserError when the folder is no finished index or one of another kind, its vectors are damaged or of
    another shape, or corpus or encoder are not those it was built with.
    """
    folder = Path(folder)
    manifest, hashes = open_folder(folder, verify)
    if manifest.kind not in MATRIX_DTYPES:
        raise UserError(f"{folder}: an index of kind {manifest.kind!r}, expected flat or flat16; name another folder")
    encoder = find_encoder(manifest, folder, encoder)
    corpus = find_corpus(manifest, folder, corpus, verify)
    if manifest.format == 1:
        return Index(corpus, encoder, _read_format_1(folder / FORMAT_1_VECTORS, manifest), manifest.embed)
    if manifest.dtype != MATRIX_DTYPES[manifest.kind]:
        raise UserError(f"{folder}: {manifest.kind} with vectors in {manifest.dtype!r}; build the index again")
    vectors = kept_vectors(folder, manifest, hashes)
    return Index(corpus, encoder, vectors.open(), manifest.embed, manifest.largest_norm, vectors.verify)


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
