"""Kinds of dense index: their names, their sizes, and which of them fits a memory.

A kind is written as FAISS's factory writes it, and nothing here needs FAISS:

    flat                    every vector in float32; every search looks at all of them and is exact
    flat16                  the same over vectors rounded to float16
    IVF4096,Flat            lists around 4,096 centroids; a search looks through the nearest lists, its effort `nprobe`
    IVF4096,SQfp16          the same, vectors in the lists in float16; SQ8 in 8 bits a coordinate, between its extremes
    [OPQ64,]IVF4096,PQ64    the same, 64 bytes a vector: product quantisation, with OPQ after a learned rotation
    HNSW32                  a graph with 32 links a vector (64 on the ground level), its effort `efSearch`
    HNSW32_SQ8              the same over vectors of its own, in 8 bits a coordinate; or SQfp16
    PCA192,HNSW32_SQ8       any but PQ, over the vectors' 192 strongest directions

What 8 bits, PQ or PCA let a search find is scored in full, from the kept vectors. A number of lists may be left out
(`IVF,Flat`), and `ivf`, `ivfpq`, `hnsw` stand for the usual choice of each.

Deliberately absent: graphs over product codes, graphs over the centroids, quantisers of 4 bits.
"""

import math
import re
from dataclasses import dataclass, replace

from thresher.rewards.errors import UserError

EXAMPLES = (
    "flat, flat16, IVF4096,Flat, IVF4096,SQfp16, OPQ64,IVF4096,PQ64, HNSW32, HNSW32_SQ8, PCA192,HNSW32_SQ8, or ivf, "
    "ivfpq, hnsw"
)
HNSW_LINKS = 32
# Passages a list should have to train its centroid on, at the least; and how many it is trained on, at the most.
LEAST_PER_LIST, TRAIN_PER_LIST = 39, 50
# Product quantisers have 256 centroids a byte; they, rotations, directions and the extremes of coordinates are found on
# at most so many vectors.
PQ_CENTROIDS, TRAIN_CODES = 256, 65_536
# Up to here an exact search over 768 dimensions takes two cores under .1 s: no approximation is worth its loss.
FLAT_PASSAGES = 200_000
# Bytes mapped or copied at a time while an index is built, and what interpreter, NumPy and FAISS need.
SLICE_BYTES, PROCESS_BYTES = 64 * 2**20, 200 * 10**6

_PCA = re.compile(r"PCA(\d+),(.+)", re.IGNORECASE)
_IVF = re.compile(r"(?:OPQ(\d+),)?IVF(\d*),(?:(Flat|SQfp16|SQ8)|PQ(\d+))", re.IGNORECASE)
_HNSW = re.compile(r"HNSW(\d*)(?:_(Flat|SQfp16|SQ8))?", re.IGNORECASE)
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)
_FLAT = {"flat": "flat", "flat16": "flat16", "sqfp16": "flat16"}
# How a coordinate is held, and what FAISS calls that.
SCALARS = {"float32": "Flat", "float16": "SQfp16", "uint8": "SQ8"}
_CODES = {name.lower(): codes for codes, name in SCALARS.items()}


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A kind, read. `family` is flat, flat16, ivf or hnsw; `lists` the number of centroids; `codes` how a list or a
    graph holds a vector: float32, float16, uint8 (between each coordinate's extremes) or pq; `pq` bytes of a code;
    `opq` whether a rotation precedes; `links` of a graph; `directions`, on how many principal directions the structure
    sees the vectors, 0 where it sees all of them."""

    family: str
    lists: int = 0
    codes: str = "float32"
    pq: int = 0
    opq: bool = False
    links: int = 0
    directions: int = 0

    @property
    def name(self) -> str:
        """The factory string, numbers filled in."""
        return f"PCA{self.directions},{self.structure}" if self.directions else self.structure

    @property
    def structure(self) -> str:
        """The factory string without PCA."""
        if self.family == "hnsw":
            return f"HNSW{self.links}" + ("" if self.codes == "float32" else f"_{SCALARS[self.codes]}")
        if self.family != "ivf":
            return self.family
        codes = f"PQ{self.pq}" if self.codes == "pq" else SCALARS[self.codes]
        return f"{f'OPQ{self.pq},' if self.opq else ''}IVF{self.lists},{codes}"

    @property
    def exact(self) -> bool:
        """Whether a search looks at every vector."""
        return self.family in ("flat", "flat16")

    @property
    def estimates(self) -> bool:
        """Whether the structure's own scores are estimates, so that more candidates than hits are fetched."""
        return self.codes in ("pq", "uint8") or self.directions > 0

    @property
    def borrows(self) -> bool:
        """Whether the structure is a graph alone, whose vectors are read from the kept ones' file."""
        return self.family == "hnsw" and self.codes == "float32" and not self.directions

    def code_bytes(self, dim: int) -> int:
        """Bytes in which a list or a graph holds one vector of `dim` dimensions."""
        dim = self.directions or dim
        return {"float32": 4 * dim, "float16": 2 * dim, "uint8": dim, "pq": self.pq}[self.codes]

    def bytes_per_vector(self, dim: int) -> int:
        """Bytes of RAM of one vector in the structure that is searched: its coordinates or code; in a list its row (8),
        in a graph its links of 4 bytes (2M on the ground, M / (M - 1) above on average), offset (8) and level (4)."""
        width = self.code_bytes(dim)
        if self.family == "hnsw":
            return width + 4 * (2 * self.links + math.ceil(self.links / (self.links - 1))) + 12
        if self.family == "ivf":
            return width + 8
        return 2 * dim if self.family == "flat16" else 4 * dim


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Bytes an index needs: of RAM while it is searched and while it is built, on disk, and on GPUs in all (0: that
    kind has no form for them). The passages' texts and a trained encoder are not in it."""

    ram_bytes: int
    disk_bytes: int
    build_ram_bytes: int
    gpu_bytes: int


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


def parse_kind(text: str, passages: int, dim: int) -> Kind:
    """Reads a kind for N x `dim` vectors. UserError for one that is none of those above, or that does not fit the
    vectors: more lists than passages, a code that does not divide `dim`, fewer than 256 passages for PQ."""
    if text.lower() in _FLAT:
        return Kind(family=_FLAT[text.lower()])
    if found := _PCA.fullmatch(text):
        return _with_directions(text, int(found[1]), found[2], passages, dim)
    usual = next((size for size in pq_sizes(dim) if size <= dim // 8), dim)
    written = {"ivf": "IVF,Flat", "ivfpq": f"OPQ{usual},IVF,PQ{usual}", "hnsw": "HNSW"}.get(text.lower(), text)
    if found := _HNSW.fullmatch(written):
        links = int(found[1] or HNSW_LINKS)
        if not 4 <= links <= 128:
            raise UserError(f"kind is {text!r}: a graph of {links} links a vector; expected 4 to 128")
        return Kind(family="hnsw", links=links, codes=_CODES[(found[2] or "Flat").lower()])
    found = _IVF.fullmatch(written)
    if text.lower() == "bm25":
        raise UserError("kind is 'bm25', which has no vectors; build it with --encoder bm25")
    if not found:
        raise UserError(f"kind is {text!r}; expected one of {EXAMPLES}")
    rotation, lists, scalar, pq = found.groups()
    kind = Kind(
        family="ivf",
        lists=int(lists) if lists else default_lists(passages),
        codes=_CODES[scalar.lower()] if scalar else "pq",
        pq=int(pq or 0),
        opq=rotation is not None,
    )
    _check_ivf(kind, text, rotation, passages, dim)
    return kind


def _with_directions(text: str, directions: int, rest: str, passages: int, dim: int) -> Kind:
    kind = parse_kind(rest, passages, dim)
    if kind.exact or kind.codes == "pq" or kind.directions:
        raise UserError(f"kind is {text!r}: PCA goes before graphs and lists of scalars only; OPQ serves PQ")
    if not 1 <= directions < dim:
        raise UserError(f"kind is {text!r}: {directions} directions of {dim} dimensions; expected 1 to {dim - 1}")
    return replace(kind, directions=directions)


def _check_ivf(kind: Kind, text: str, rotation: str | None, passages: int, dim: int) -> None:
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


def estimate(kind: Kind | str, passages: int, dim: int) -> Estimate:
    """What an index of N = `passages` vectors of d = `dim` dimensions needs.

    With b bytes a vector (`bytes_per_vector`), C centroids, T = min(N, 50 C) training vectors (for PQ, SQ8 and PCA at
    least 65,536), S = 64 MiB (a slice) and P = 200 MB (interpreter, NumPy, FAISS):

        RAM          N b + 4 d C + P        for flat the mapped file: searches want it in memory, the loader does not
        disk         4 d N, the vectors kept for exact scores, plus the structure: N b + 4 d C of lists, N b of a
                     graph with codes, N (b - 4 d) of one without (the vectors' file is its own), nothing for flat;
                     flat16 keeps 2 d N
        build RAM    max(training, filling) + 2 S + P
                     training    4 d T, three times that for PQ (its rotation and residuals are copies); a graph with
                                 SQ8 or PCA 4 d min(N, 65,536)
                     filling     N b + 4 d C + 4 N (every row's list) for lists, N b for a graph, 0 for flat
        PCA          p directions in the place of d in b and C; a graph then has vectors of its own, as with codes
        GPU          2 d N for flat, flat16 and uncompressed lists (float16), N b for codes; + 4 d C; graphs have none

    21,015,324 x 768: flat 64.6 GB, flat16 32.3 GB, HNSW32 70.4 GB, HNSW32_SQ8 21.9 GB, PCA192,HNSW32_SQ8 9.8 GB,
    OPQ96,IVF16384,PQ96 2.2 GB (+ P).
    """
    if isinstance(kind, str):
        kind = parse_kind(kind, passages, dim)
    centroids = 4 * (kind.directions or dim) * kind.lists
    structure = passages * kind.bytes_per_vector(dim) + centroids
    matrix = 4 * dim * passages
    if kind.exact:
        return Estimate(
            ram_bytes=structure + PROCESS_BYTES,
            disk_bytes=structure,
            build_ram_bytes=2 * SLICE_BYTES + PROCESS_BYTES,
            gpu_bytes=2 * dim * passages,
        )
    training = 4 * dim * training_vectors(kind, passages) * (3 if kind.codes == "pq" else 1)
    if kind.family == "hnsw":
        return Estimate(
            ram_bytes=structure + PROCESS_BYTES,
            disk_bytes=structure + (0 if kind.borrows else matrix),
            build_ram_bytes=max(training, structure) + 2 * SLICE_BYTES + PROCESS_BYTES,
            gpu_bytes=0,
        )
    return Estimate(
        ram_bytes=structure + PROCESS_BYTES,
        disk_bytes=matrix + structure,
        build_ram_bytes=max(training, structure + 4 * passages) + 2 * SLICE_BYTES + PROCESS_BYTES,
        gpu_bytes=(structure if kind.codes in ("pq", "uint8") else 2 * (kind.directions or dim) * passages) + centroids,
    )


def training_vectors(kind: Kind, passages: int) -> int:
    """How many vectors the centroids, quantisers and directions of `kind` are found on."""
    wanted = TRAIN_PER_LIST * kind.lists
    return min(passages, max(wanted, TRAIN_CODES) if kind.estimates else wanted)


def choose_kind(passages: int, dim: int, memory_bytes: int) -> tuple[str, str]:
    """The kind to build for so much RAM, and why, as a sentence.

    The first that fits, built and searched, of: flat (up to 200,000 passages), HNSW32_SQ8, IVF with 8 bits, OPQ with
    codes of falling size. HNSW32 takes three times the memory and is slower; PCA is not among them because whether
    fewer directions do depends on the vectors, and shows in the recall only. UserError when not even the smallest fits.
    """
    lists = f"IVF{default_lists(passages)}"
    sizes = pq_sizes(dim) if passages >= PQ_CENTROIDS else []
    names = [f"HNSW{HNSW_LINKS}_SQ8", f"{lists},SQ8"]
    names += [f"OPQ{size},{lists},PQ{size}" for size in sizes]
    if passages <= FLAT_PASSAGES:
        names.insert(0, "flat")
    needs = {name: _most(estimate(name, passages, dim)) for name in names}
    have = f"{passages:,} x {dim} and {show_bytes(memory_bytes)} of memory"
    for number, name in enumerate(names):
        if needs[name] <= memory_bytes:
            before = [f"{other} would need {show_bytes(needs[other])}" for other in names[max(0, number - 2) : number]]
            why = "the most precise that fits"
            if name in ("flat", names[0]):
                why = "exact" if name == "flat" else "the fastest over all dimensions"
            told = f"; {', '.join(before)}" if before else ""
            return name, f"{have}: {name} needs {show_bytes(needs[name])} and is {why}{told}"
    smallest = min(needs, key=lambda name: needs[name])
    raise UserError(
        f"{have}: not enough for any index, the smallest being {smallest} with {show_bytes(needs[smallest])}; give more"
    )


def _most(needed: Estimate) -> int:
    return max(needed.ram_bytes, needed.build_ram_bytes)


def parse_memory(text: str) -> int:
    """Bytes of "16GB" (10^9), "512MiB" (2^20), "2T" or "1000000". UserError for anything else, and for 0."""
    found = _MEMORY.fullmatch(text.strip())
    size = float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " ") if found else 0
    if size < 1:
        raise UserError(f"memory is {text!r}; expected a size such as 16GB, 512MiB or 2TB")
    return int(size)


def show_bytes(size: float) -> str:
    """`size` for a reader, in powers of 1,000: "64.6 GB"."""
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.1f} GB"
