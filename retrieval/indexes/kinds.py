"""Kinds of vector index: how each is written, what it needs, and which fits a memory.

A kind is written like a string for FAISS's factory:

    flat, flat16            every vector is scanned by every search, in float32 or rounded to float16
    HNSW32                  a graph of 32 links per vector (64 on the ground level), over the kept vectors
    HNSW32_SQ8              the same over its own copies of the vectors, in 8 bits per coordinate; or SQfp16
    IVF4096,Flat            lists around 4,096 centroids; IVF,Flat for the usual number
    IVF4096,SQfp16          vectors in the lists in float16; SQ8 in 8 bits per coordinate, between its extremes
    [OPQ64,]IVF4096,PQ64    64 bytes per vector: product quantisation, with OPQ after a learned rotation
    PCA192,IVF4096,Flat     graphs, and lists except PQ, over the vectors' 192 strongest directions

In addition to the file of vectors, an approximate kind has a FAISS structure that gives candidates (`structures` builds
and reads it, `approximate` searches it); they are scored in full from the kept vectors. docs/add/index.md explains how
to add a kind. Kinds without vectors, such as BM25, are not here.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from thresher.common.errors import UserError
from thresher.common.files import show_bytes
from thresher.retrieval.indexes.vector_file import SLICE_BYTES

INDEX_FILE = "index.faiss"
# RAM of interpreter, NumPy and FAISS.
PROCESS_BYTES = 200 * 10**6
# Memory that FAISS reserves on every GPU for its own use.
FAISS_GPU_BYTES = 3 << 29
# Maximum number of vectors on which quantisers, rotations, directions and the extremes of coordinates are found.
TRAIN_CODES = 65_536
# Seed of every random choice while a structure is built.
SEED = 1234
# dtype of a coordinate: FAISS's name for it, and its bytes.
SCALARS = {"float32": "Flat", "float16": "SQfp16", "uint8": "SQ8"}
SCALAR_BYTES = {"float32": 4, "float16": 2, "uint8": 1}
SCALAR_CODES = {name.lower(): codes for codes, name in SCALARS.items()}
# Up to this number an exact search over 768 dimensions takes two cores less than .1 s, so no approximation is needed.
FLAT_PASSAGES = 200_000
LINKS = 32
# Dimensions from which a plan has a kind with a quarter of the directions: of 768 dimensions, these found the five best
# passages of every question, whereas a sixth of 384 found .81 of them.
LEAST_FOR_PCA = 512
# Minimum number of passages per list for training its centroid, and maximum number on which it is trained.
LEAST_PER_LIST, TRAIN_PER_LIST = 39, 50
# Product quantisers have 256 centroids per byte.
PQ_CENTROIDS = 256
# The manifest's names for the kinds of vectors, and how an exact kind keeps the matrix that it searches.
FAMILIES = ("flat", "flat16", "hnsw", "ivf")
MATRIX_DTYPES = {"flat": "float32", "flat16": "float16"}
EXAMPLES = (
    *("flat", "flat16", "HNSW32", "HNSW32_SQ8", "hnsw"),
    *("IVF4096,Flat", "IVF4096,SQfp16", "OPQ64,IVF4096,PQ64", "ivf", "ivfpq"),
)

_FLAT = re.compile(r"(flat)|flat16|SQfp16", re.IGNORECASE)
_GRAPH = re.compile(r"HNSW(\d*)(?:_(Flat|SQfp16|SQ8))?", re.IGNORECASE)
_LISTS = re.compile(r"(?:OPQ(\d+),)?IVF(\d*),(?:(Flat|SQfp16|SQ8)|PQ(\d+))", re.IGNORECASE)
_PCA = re.compile(r"PCA(\d+),(.+)", re.IGNORECASE)
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)

# (stage, number done, total)
OnStage = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Bytes of an index: RAM for searching and for building, disk, and all GPUs together (0: no form for GPUs), without
    the passages' texts and a trained encoder."""

    ram_bytes: int
    disk_bytes: int
    build_ram_bytes: int
    gpu_bytes: int

    @property
    def most_ram(self) -> int:
        """Return the larger of the two RAM figures."""
        return max(self.ram_bytes, self.build_ram_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind, read by `parse_kind`.

    links: of a graph, per vector. lists: of IVF. A kind with neither is exact. codes: how the structure stores a
    vector: float32, float16, uint8 or pq, of `pq` bytes, with `opq` after a rotation. directions: the number of
    principal directions in the structure, 0 for whole vectors.
    """

    links: int = 0
    lists: int = 0
    codes: str = "float32"
    pq: int = 0
    opq: bool = False
    directions: int = 0

    @property
    def family(self) -> str:
        """Return the manifest's name for the kind, one of FAMILIES."""
        return "ivf" if self.lists else "hnsw" if self.links else "flat" if self.codes == "float32" else "flat16"

    @property
    def structure(self) -> str:
        """Return the kind's factory string without its projection, with all numbers."""
        if self.lists:
            codes = f"PQ{self.pq}" if self.codes == "pq" else SCALARS[self.codes]
            return f"{f'OPQ{self.pq},' if self.opq else ''}IVF{self.lists},{codes}"
        if self.links:
            return f"HNSW{self.links}" + ("" if self.codes == "float32" else f"_{SCALARS[self.codes]}")
        return self.family

    @property
    def name(self) -> str:
        """Return the factory string, with all numbers; `parse_kind` reads it."""
        return f"PCA{self.directions},{self.structure}" if self.directions else self.structure

    @property
    def exact(self) -> bool:
        """Return whether a search scans every kept vector, without a structure."""
        return not (self.lists or self.links)

    @property
    def lossless(self) -> bool:
        """Return whether a search gives the exact answer of the encoded vectors, so that no recall is measured."""
        return self.exact and self.codes == "float32"

    @property
    def estimates(self) -> bool:
        """Return whether the structure's own scores are estimates, so that more candidates than hits are fetched."""
        return self.codes not in ("float32", "float16") or self.directions > 0

    @property
    def borrows(self) -> bool:
        """Return whether the structure's file lacks the vectors, which are read from the kept ones: a plain graph."""
        return self.links > 0 and self.codes == "float32" and not self.directions

    def code_bytes(self, dim: int) -> int:
        """Return the bytes of the code of one vector of `dim` dimensions, without the structure's additional data."""
        return self.pq if self.codes == "pq" else SCALAR_BYTES[self.codes] * (self.directions or dim)

    def training_vectors(self, passages: int) -> int:
        """Return the number of vectors on which the structure is trained."""
        wanted = TRAIN_PER_LIST * self.lists
        return min(passages, max(wanted, TRAIN_CODES) if self.estimates else wanted)

    def estimate(self, passages: int, dim: int) -> Estimate:
        """Return the requirements of an index of N vectors of d dimensions.

        T: training vectors. C: lists. S = 64 MiB (a slice). P = 200 MB (interpreter, NumPy, FAISS). b: bytes per vector
        in the structure, which are its code; in lists 8 more for its row; in a graph of M links also
        4 (2M + ceil(M / (M - 1))) for these and 12 for offset and level.

            RAM          N b + P, and 4 d C for the centroids
            disk         4 d N, the vectors kept for exact scores, plus the structure; for an exact kind only N b
            build RAM    max(4 d T, structure) + 2 S + P; PQ trains on three times as much (its rotation and residuals
                         are copies), filling lists takes 4 N more (every row's list), and an exact kind 2 S + P
            GPUs         for lists the structure if it has codes, else float16, and the centroids; for an exact kind
                         float16; and 1.5 GiB of FAISS's own, which every further GPU needs too

        A search of an exact kind maps its file, which should fit in memory; loading it takes no time.
        """
        slices = 2 * SLICE_BYTES + PROCESS_BYTES
        each, vectors = self.code_bytes(dim), 4 * dim * passages
        if self.exact:
            matrix = passages * each
            return Estimate(
                ram_bytes=matrix + PROCESS_BYTES,
                disk_bytes=matrix,
                build_ram_bytes=slices,
                gpu_bytes=2 * dim * passages + FAISS_GPU_BYTES,
            )
        training = 4 * dim * self.training_vectors(passages)
        if self.links:
            structure = passages * (each + 4 * (2 * self.links + math.ceil(self.links / (self.links - 1))) + 12)
            return Estimate(
                ram_bytes=structure + PROCESS_BYTES,
                disk_bytes=structure + (0 if self.borrows else vectors),
                build_ram_bytes=max(training, structure) + slices,
                gpu_bytes=0,
            )
        centroids = 4 * (self.directions or dim) * self.lists
        structure = passages * (each + 8) + centroids
        on_gpus = structure if self.codes in ("pq", "uint8") else 2 * (self.directions or dim) * passages
        return Estimate(
            ram_bytes=structure + PROCESS_BYTES,
            disk_bytes=vectors + structure,
            build_ram_bytes=max(training * (3 if self.codes == "pq" else 1), structure + 4 * passages) + slices,
            gpu_bytes=on_gpus + centroids + FAISS_GPU_BYTES,
        )

    def note(self, parameters: dict[str, int]) -> str | None:
        """Return a warning about the search parameters that were needed for the wanted recall, or None."""
        if not self.lists or parameters.get("nprobe") != self.lists or self.lists == 1:
            return None
        return "only a search of every list finds this many, as these vectors have no clusters; use hnsw or flat"


def parse_kind(text: str, passages: int, dim: int) -> Kind:
    """Parse a kind for N x `dim` vectors. UserError for an unknown string, or one that does not fit the vectors."""
    if found := _PCA.fullmatch(text):
        kind, directions = parse_kind(found[2], passages, dim), int(found[1])
        if kind.exact or kind.codes == "pq" or kind.directions:
            raise UserError(f"kind is {text!r}: PCA can precede only graphs and lists of scalars; use OPQ with PQ")
        if not 1 <= directions < dim:
            raise UserError(f"kind is {text!r}: {directions} directions of {dim} dimensions; expected 1 to {dim - 1}")
        return replace(kind, directions=directions)
    if found := _FLAT.fullmatch(text):
        return Kind(codes="float32" if found[1] else "float16")
    if found := _GRAPH.fullmatch(text):
        links = int(found[1] or LINKS)
        if not 4 <= links <= 128:
            raise UserError(f"kind is {text!r}: a graph of {links} links per vector; expected 4 to 128")
        return Kind(links=links, codes=SCALAR_CODES[(found[2] or "Flat").lower()])
    usual = next((size for size in pq_sizes(dim) if size <= dim // 8), dim)
    if found := _LISTS.fullmatch({"ivf": "IVF,Flat", "ivfpq": f"OPQ{usual},IVF,PQ{usual}"}.get(text.lower(), text)):
        return _lists(text, passages, dim, *found.groups())
    if text.lower() == "bm25":
        raise UserError("kind is 'bm25', which has no vectors; build it with --encoder bm25")
    raise UserError(
        f"kind is {text!r}; expected one of {', '.join(EXAMPLES)}, or one after a projection, as in PCA192,HNSW32_SQ8"
    )


def _lists(
    text: str, passages: int, dim: int, rotation: str | None, number: str, scalar: str | None, code: str | None
) -> Kind:
    lists, pq = int(number) if number else default_lists(passages), int(code or 0)
    if not 1 <= lists <= passages:
        raise UserError(
            f"kind is {text!r}: {lists} lists for {passages} passages; IVF{default_lists(passages)} would be usual"
        )
    if rotation is not None and (code is None or int(rotation) != pq):
        raise UserError(f"kind is {text!r}: expected the same number in OPQ and PQ; OPQ goes with PQ only")
    if scalar:
        return Kind(lists=lists, codes=SCALAR_CODES[scalar.lower()])
    if pq < 1 or dim % pq:
        sizes = ", ".join(map(str, pq_sizes(dim))) or "none"
        raise UserError(f"kind is {text!r}: {pq} does not divide {dim} dimensions; these work well: {sizes}")
    if passages < PQ_CENTROIDS:
        raise UserError(
            f"kind is {text!r}: PQ is trained on at least {PQ_CENTROIDS} vectors, but there are {passages} passages; "
            f"take flat"
        )
    return Kind(lists=lists, codes="pq", pq=pq, opq=rotation is not None)


def default_lists(passages: int) -> int:
    """Return the power of two nearest to 4 * sqrt(N), with at least 39 passages per list: 4,096 for 10^6."""
    usual = round(math.log2(4 * math.sqrt(passages)))
    most = math.floor(math.log2(max(1, passages / LEAST_PER_LIST)))
    return 1 << max(0, min(usual, most))


def pq_sizes(dim: int) -> list[int]:
    """Return the code sizes in bytes for `dim`, largest first: divisors with 4 to 32 dimensions per byte."""
    return [dim // width for width in (4, 6, 8, 12, 16, 24, 32) if dim % width == 0]


def estimate(kind: Kind | str, passages: int, dim: int) -> Estimate:
    """Return the requirements of an index of `kind` over N x `dim` vectors."""
    return (parse_kind(kind, passages, dim) if isinstance(kind, str) else kind).estimate(passages, dim)


def choose_kind(passages: int, dim: int, memory_bytes: int) -> tuple[str, str]:
    """Return the kind to build with `memory_bytes` of RAM, and the reason as a sentence.

    It is the first that fits, for building and searching, of: flat (up to 200,000 passages), HNSW32_SQ8, IVF with 8
    bits, OPQ with codes of decreasing size. HNSW32 takes three times the memory and is slower. PCA is not chosen
    because it depends on the vectors whether fewer directions suffice. UserError if not even the smallest fits.
    """
    lists = f"IVF{default_lists(passages)}"
    sizes = pq_sizes(dim) if passages >= PQ_CENTROIDS else []
    names = [f"HNSW{LINKS}_SQ8", f"{lists},SQ8", *(f"OPQ{size},{lists},PQ{size}" for size in sizes)]
    if passages <= FLAT_PASSAGES:
        names.insert(0, "flat")
    needs = {name: estimate(name, passages, dim).most_ram for name in names}
    have = f"{passages:,} x {dim} and {show_bytes(memory_bytes)} of memory"
    for number, name in enumerate(names):
        if needs[name] <= memory_bytes:
            before = [f"{other} would need {show_bytes(needs[other])}" for other in names[max(0, number - 2) : number]]
            why = "the most precise that fits"
            if name in ("flat", names[0]):
                why = "exact" if name == "flat" else "the fastest over all dimensions"
            others = f"; {', '.join(before)}" if before else ""
            return name, f"{have}: {name} needs {show_bytes(needs[name])} and is {why}{others}"
    smallest = min(needs, key=lambda name: needs[name])
    raise UserError(
        f"{have}: not enough for any index, the smallest being {smallest} with {show_bytes(needs[smallest])}; give more"
    )


def usual_kinds(passages: int, dim: int, memory: int) -> list[str]:
    """Return the kinds that a plan shows by default: flat, graphs, lists, one with product codes, and the one that
    `choose_kind` chooses for `memory` bytes."""
    lists = f"IVF{default_lists(passages)}"
    pca = [f"PCA{dim // 4},HNSW{LINKS}_SQ8"] if dim >= LEAST_FOR_PCA else []
    kinds = ["flat", "flat16", f"HNSW{LINKS}", f"HNSW{LINKS}_SQ8", *pca, f"{lists},Flat", f"{lists},SQfp16"]
    try:
        chosen = choose_kind(passages, dim, memory)[0]
    except UserError:
        chosen = "flat"
    if chosen not in kinds:
        return [*kinds, chosen]
    size = next((size for size in pq_sizes(dim) if size <= dim // 8), 0)
    return [*kinds, f"OPQ{size},{lists},PQ{size}"] if passages >= TRAIN_CODES and size else kinds


def parse_memory(text: str) -> int:
    """Return the bytes of "16GB" (10^9), "512MiB" (2^20), "2T" or "1000000"."""
    found = _MEMORY.fullmatch(text.strip())
    size = float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " ") if found else 0
    if size < 1:
        raise UserError(f"memory is {text!r}; expected a size such as 16GB, 512MiB or 2TB")
    return int(size)
