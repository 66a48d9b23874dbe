"""The table of vector index kinds, and what is asked of all of them: read a name, what it needs, which fits a memory.

A kind is written as FAISS's factory writes it; each file of the table lists its spellings. Before a kind that is
`projectable` may stand PCA192, its structure then seeing the vectors' 192 strongest directions. What 8 bits, PQ or PCA
let a search find is scored in full, from the kept vectors.

To add a kind: a file like `graph`, and a row here; docs/add/index.md walks through it.
"""

import re
from dataclasses import replace

from thresher.common.errors import UserError
from thresher.common.files import show_bytes as show_bytes
from thresher.retrieval.indexes.flat import Flat
from thresher.retrieval.indexes.graph import Graph
from thresher.retrieval.indexes.kind import Estimate, Kind
from thresher.retrieval.indexes.lists import Lists

# By the manifest's name for it. --memory prefers an earlier one.
KINDS: dict[str, type[Kind]] = {
    "flat": Flat,
    "flat16": Flat,
    "hnsw": Graph,
    "ivf": Lists,
}
CLASSES = tuple(dict.fromkeys(KINDS.values()))
# Files that a build may leave for another go.
SCRATCH = tuple(name for kind in CLASSES for name in kind.scratch)

_PCA = re.compile(r"PCA(\d+),(.+)", re.IGNORECASE)
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", re.IGNORECASE)


def parse_kind(text: str, passages: int, dim: int) -> Kind:
    """Reads a kind for N x `dim` vectors. UserError for one that is none of the table's, or that does not fit the
    vectors: more lists than passages, a code that does not divide `dim`, fewer than 256 passages for PQ."""
    if found := _PCA.fullmatch(text):
        return _with_directions(text, int(found[1]), found[2], passages, dim)
    for kind in CLASSES:
        if (read := kind.parse(text, passages, dim)) is not None:
            return read
    if text.lower() == "bm25":
        raise UserError("kind is 'bm25', which has no vectors; build it with --encoder bm25")
    examples = ", ".join(name for kind in CLASSES for name in kind.examples)
    raise UserError(f"kind is {text!r}; expected one of {examples}, or such behind a projection, PCA192,HNSW32_SQ8")


def _with_directions(text: str, directions: int, rest: str, passages: int, dim: int) -> Kind:
    kind = parse_kind(rest, passages, dim)
    if not kind.projectable or kind.directions:
        raise UserError(f"kind is {text!r}: PCA goes before graphs and lists of scalars only; OPQ serves PQ")
    if not 1 <= directions < dim:
        raise UserError(f"kind is {text!r}: {directions} directions of {dim} dimensions; expected 1 to {dim - 1}")
    return replace(kind, directions=directions)


def estimate(kind: Kind | str, passages: int, dim: int) -> Estimate:
    """What an index of N = `passages` vectors of d = `dim` dimensions needs; the arithmetic is each kind's own.

    21,015,324 x 768: flat 64.6 GB, flat16 32.3 GB, HNSW32 70.4 GB, HNSW32_SQ8 21.9 GB, PCA192,HNSW32_SQ8 9.8 GB,
    OPQ96,IVF16384,PQ96 2.2 GB (+ 200 MB of the process).
    """
    return (parse_kind(kind, passages, dim) if isinstance(kind, str) else kind).estimate(passages, dim)


def choose_kind(passages: int, dim: int, memory_bytes: int) -> tuple[str, str]:
    """The kind to build for so much RAM, and why, as a sentence.

    The first that fits, built and searched, of what the kinds offer (`Kind.choices`): flat (up to 200,000 passages),
    HNSW32_SQ8, IVF with 8 bits, OPQ with codes of falling size. UserError when not even the smallest fits.
    """
    names = [name for kind in CLASSES for name in kind.choices(passages, dim)]
    needs = {name: _most(estimate(name, passages, dim)) for name in names}
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


def _most(needed: Estimate) -> int:
    return max(needed.ram_bytes, needed.build_ram_bytes)


def parse_memory(text: str) -> int:
    """Bytes of "16GB" (10^9), "512MiB" (2^20), "2T" or "1000000". UserError for anything else, and for 0."""
    found = _MEMORY.fullmatch(text.strip())
    size = float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2].upper() or " ") if found else 0
    if size < 1:
        raise UserError(f"memory is {text!r}; expected a size such as 16GB, 512MiB or 2TB")
    return int(size)
