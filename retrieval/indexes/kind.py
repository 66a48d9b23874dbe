"""What a kind of vector index is: the class that `flat`, `graph` and `lists` fill in, and its structure's file.

An index keeps the vectors in a file of their own; an approximate one has, beside them, a structure of FAISS's that
names candidates. A kind says how it is written, what it needs, how its structure is built, recognised and searched.
What is the same for all (encoding, resuming, measuring recall, the manifest) is not its business, and neither is the
file of the vectors. `kinds` is the table of them.

Deliberately absent: kinds without vectors, such as `bm25`.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

from thresher.common.errors import UserError
from thresher.retrieval.vectors.approximate import Candidates
from thresher.retrieval.vectors.faiss_library import faiss
from thresher.retrieval.vectors.file import SLICE_BYTES, VectorFile
from thresher.retrieval.vectors.structure import attach, behind, bounded_reading, in_range

INDEX_FILE = "index.faiss"
# What interpreter, NumPy and FAISS need.
PROCESS_BYTES = 200 * 10**6
# Quantisers, rotations, directions and the extremes of coordinates are found on at most so many vectors.
TRAIN_CODES = 65_536
# FAISS computes products of centroids and codes as it reads a PQ, where they take no more than this.
PQ_TABLES = 2**31
# Of every draw while a structure is built.
SEED = 1234
# How a coordinate is held, and what FAISS calls that.
SCALARS = {"float32": "Flat", "float16": "SQfp16", "uint8": "SQ8"}
SCALAR_BYTES = {"float32": 4, "float16": 2, "uint8": 1}
SCALAR_CODES = {name.lower(): codes for codes, name in SCALARS.items()}

# (what is being done, how far, of how many)
OnStage = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Bytes an index needs: of RAM while it is searched and while it is built, on disk, and on GPUs in all (0: that
    kind has no form for them). The passages' texts and a trained encoder are not in it."""

    ram_bytes: int
    disk_bytes: int
    build_ram_bytes: int
    gpu_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind(ABC):
    """A kind, read. `codes` is how it holds a vector: float32, float16, uint8 (between each coordinate's extremes), or
    a name of its own; `directions`, on how many principal directions the structure sees the vectors, 0 where it sees
    all of them.

    `family`, `structure`, `parse` and `code_bytes` are every kind's own; `grow`, `holds` and `candidates` that of every
    kind with a structure. The rest has a usual answer."""

    # Spellings for help and error messages, and files that a build leaves for another go and a finished index does not.
    examples: ClassVar[tuple[str, ...]]
    scratch: ClassVar[tuple[str, ...]] = ()
    codes: str = "float32"
    directions: int = 0

    @property
    @abstractmethod
    def family(self) -> str:
        """The manifest's name for the kind, whatever its numbers; its row in `kinds.KINDS`."""

    @property
    @abstractmethod
    def structure(self) -> str:
        """How the kind is written without its projection, numbers filled in; `parse` reads it again."""

    @classmethod
    @abstractmethod
    def parse(cls, text: str, passages: int, dim: int) -> Self | None:
        """The kind that `text` spells for N x `dim` vectors, None if it spells none of these. UserError for numbers
        that do not fit the vectors."""

    @abstractmethod
    def code_bytes(self, dim: int) -> int:
        """Bytes in which the structure holds one vector of `dim` dimensions, without what it adds to it."""

    @property
    def name(self) -> str:
        """The factory string, numbers filled in."""
        return f"PCA{self.directions},{self.structure}" if self.directions else self.structure

    @property
    def exact(self) -> bool:
        """Whether a search looks at every vector as it is kept, and so there is no structure."""
        return False

    @property
    def lossless(self) -> bool:
        """Whether a search returns the encoded vectors' exact answer, and so there is no recall to measure."""
        return False

    @property
    def estimates(self) -> bool:
        """Whether the structure's own scores are estimates, so that more candidates than hits are fetched."""
        return self.codes not in ("float32", "float16") or self.directions > 0

    @property
    def borrows(self) -> bool:
        """Whether the structure's file lacks the vectors, which are read from the kept ones' file."""
        return False

    @property
    def transformed(self) -> bool:
        """Whether a projection or rotation stands in front of the structure."""
        return self.directions > 0

    @property
    def projectable(self) -> bool:
        """Whether PCA may precede it."""
        return False

    def bytes_per_vector(self, dim: int) -> int:
        """Bytes of RAM of one vector in the structure that is searched."""
        return self.code_bytes(dim)

    def training_vectors(self, passages: int) -> int:
        """How many vectors the structure is trained on."""
        return min(passages, TRAIN_CODES) if self.estimates else 0

    def estimate(self, passages: int, dim: int) -> Estimate:
        """What an index of N vectors of d dimensions needs, with b bytes a vector (`bytes_per_vector`), T training
        vectors, S = 64 MiB (a slice) and P = 200 MB (interpreter, NumPy, FAISS):

            RAM          N b + P
            disk         4 d N, the vectors kept for exact scores, plus N b of the structure; N b alone where it borrows
            build RAM    max(4 d T, N b) + 2 S + P
        """
        structure, matrix = passages * self.bytes_per_vector(dim), 4 * dim * passages
        training = 4 * dim * self.training_vectors(passages)
        return Estimate(
            ram_bytes=structure + PROCESS_BYTES,
            disk_bytes=structure + (0 if self.borrows else matrix),
            build_ram_bytes=max(training, structure) + 2 * SLICE_BYTES + PROCESS_BYTES,
            gpu_bytes=0,
        )

    @classmethod
    def choices(cls, passages: int, dim: int) -> list[str]:
        """What --memory may choose, the best first."""
        return []

    @classmethod
    def usual(cls, passages: int, dim: int) -> list[str]:
        """What `index plan` shows where no kind is named."""
        return []

    def grow(self, vectors: VectorFile, work: Path, on_stage: OnStage) -> Any:
        """The structure over `vectors`, of FAISS's classes, written to `work/index.faiss`. What `work` holds of an
        earlier go over the same vectors may be used; the same bytes must come of it."""
        raise NotImplementedError(f"{self.name} has no structure")

    def holds(self, structure: Any, dim: int) -> bool:
        """Whether `structure`, read from a file, without its projection, is of this kind over `dim` dimensions."""
        raise NotImplementedError(f"{self.name} has no structure")

    def candidates(self, index: Any) -> Candidates:
        """How the structure `index` is searched on a CPU."""
        raise NotImplementedError(f"{self.name} has no structure")

    def on_gpus(self, index: Any) -> Candidates:
        """How it is searched on all GPUs, for a kind whose estimate gives it bytes there."""
        raise NotImplementedError(f"{self.name} has no form for GPUs")

    def note(self, parameters: dict[str, int]) -> str | None:
        """What a user should know of the search parameters that the wanted recall took, if anything."""
        return None


def grow(kind: Kind, vectors: VectorFile, work: Path, on_stage: OnStage) -> Any:
    """The structure of `kind` over `vectors`, also in `work/index.faiss`; read from there if it was finished before."""
    path = work / INDEX_FILE
    return read_structure(path, kind, vectors) if path.is_file() else kind.grow(vectors, work, on_stage)


def read_structure(path: Path, kind: Kind, vectors: VectorFile, trusted: bool = True) -> Any:
    """Reads `index.faiss`; a structure that borrows its vectors gets them from `vectors`, copied to RAM. UserError when
    FAISS cannot, or it holds something else; unless `trusted`, also where a number in it points beside the vectors."""
    try:
        with bounded_reading(path, PQ_TABLES if kind.codes == "pq" else 0):
            index = faiss.read_index(os.fspath(path), read_flags(kind))
    except (RuntimeError, MemoryError):
        raise UserError(f"{path}: FAISS cannot read it; build the index again") from None
    if (index.ntotal, index.d) != (vectors.rows, vectors.dim) or not _is_of(index, kind):
        raise UserError(
            f"{path}: holds {index.ntotal} x {index.d} vectors in a {type(index).__name__}, expected {vectors.rows} x "
            f"{vectors.dim} in {kind.name}; build the index again"
        )
    if not trusted and not in_range(index):
        raise UserError(f"{path}: damaged, its numbers point beside its {index.ntotal} vectors; build the index again")
    if kind.borrows:
        attach(index, vectors, index.ntotal)
    return index


def read_flags(kind: Kind) -> int:
    """For FAISS's reading and writing: a structure that borrows its vectors leaves them out."""
    return int(faiss.IO_FLAG_SKIP_STORAGE) if kind.borrows else 0


def _is_of(index: Any, kind: Kind) -> bool:
    structure = behind(index)
    if (structure is not index) != kind.transformed or structure.d != (kind.directions or index.d):
        return False
    return kind.holds(structure, index.d)
