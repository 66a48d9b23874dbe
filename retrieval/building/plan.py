"""What an index of N passages will need and take, before anything is built.

Bytes are arithmetic (`kinds.estimate`). Times are rates measured on this machine (`calibrate`) put into these laws,
with d dimensions, C lists, T training vectors, F multiply-adds a second, w bytes a second to the disk, n calibration
vectors:

  search, exact     N * scan
  search, lists     C * scan + (nprobe / C) N * scan of a list
  search, graph     time on n vectors * log N / log n
  build, all        (bytes on disk) / w
  build, lists      + 10 rounds * T C 2d / F     training
                    + N C 2d / F                 assigning
                    + N * coding + 15 rounds of codes, for PQ; 10 decompositions + 76 rounds, for OPQ
  build, PCA        the same with p in the place of d, and N p 2d / F
  build, graph      + N * (time to add one to n) * (1 + log2(N / n) / 4)
  build, not flat   + 200 N * scan + 1,200 searches, for recall and the search parameter (`tune`); flat16 600
  build and search  N times what each vector of a small one takes, for a kind that is not in LAWS

`scan` is seconds per vector looked at, one query alone or 64 together. The search parameter is not known before recall
is measured on the real vectors; the plan assumes nprobe C / 32, and efSearch 128. Recall is measured when an index is
built, and is not guessed here. All times hold while the index is in memory: where it does not fit, searching reads the
disk, and the plan says that it does not fit instead of how slow that would be.

BM25 (`--kind bm25`) is N times what a made-up passage costs, and for its vocabulary some sqrt(N) (`calibrate_words`); a
search holds three numbers of every passage besides the index.

Encoding the passages comes first and is mostly the longest; it is estimated only where an encoder is given.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from thresher.common.errors import UserError
from thresher.retrieval.building.calibrate import BATCH, Calibration, Speed
from thresher.retrieval.building.calibrate_words import WordRates
from thresher.retrieval.building.tune import QUERIES
from thresher.retrieval.indexes.flat import Flat
from thresher.retrieval.indexes.graph import EF_CONSTRUCTION, Graph
from thresher.retrieval.indexes.kind import PROCESS_BYTES, SCALARS, TRAIN_CODES, Kind, OnStage
from thresher.retrieval.indexes.kinds import CLASSES, choose_kind, estimate, parse_kind, show_bytes
from thresher.retrieval.indexes.lists import KMEANS_ROUNDS, OPQ_ROUNDS, PQ_ROUNDS, Lists, default_lists, pq_sizes
from thresher.retrieval.vectors.faiss_library import faiss

ALL, WORDS = "all", "bm25"
# Bytes of RAM a passage that a search by words holds: its score, and row and score of one that has such a word.
WORD_SEARCH_BYTES = 16
LISTS_PER_PROBE = 32
ASSUMED_EFSEARCH = 128
# Share of the time to add a vector to a graph that each doubling of the graph adds; so it was from 10^4 to 10^5 x 768.
GRAPH_GROWTH = 0.25
# Trying the values of the search parameter one after the other, for two k, comes to about so many times the search that
# is settled on; where there is none to choose, the sample is searched for two k, and once more for its speed.
TRIES = 6
MEASURES = 3
COLUMNS = ("kind", "fits", "RAM", "to build", "disk", "GPU", "build", "1 query", str(BATCH), "parameter", "recall")


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexPlan:
    """One kind's needs: bytes (`gpu_bytes` 0 where it has no form for GPUs), seconds to build once the passages are
    encoded, seconds a search takes alone and in a batch of 64 (of the whole batch), and the search
    parameter that is assumed (nprobe of lists, efSearch of a graph), which the written plan calls `effort`."""

    kind: str
    fits: bool
    ram_bytes: int
    build_ram_bytes: int
    disk_bytes: int
    gpu_bytes: int
    build_seconds: float
    one_seconds: float
    batch_seconds: float
    effort: str
    recall: str

    def row(self) -> tuple[str, ...]:
        """The cells under COLUMNS."""
        return (
            self.kind,
            "yes" if self.fits else "no",
            *(show_bytes(size) for size in (self.ram_bytes, self.build_ram_bytes, self.disk_bytes)),
            show_bytes(self.gpu_bytes) if self.gpu_bytes else "-",
            *(show_seconds(seconds) for seconds in (self.build_seconds, self.one_seconds, self.batch_seconds)),
            self.effort,
            self.recall,
        )


def usual_kinds(passages: int, dim: int, memory: int) -> list[str]:
    """What "all" stands for: what every kind calls usual, product codes, and in any case the kind that `choose_kind`
    takes for `memory` bytes (of codes that one alone, for they take long to calibrate)."""
    kinds = [name for kind in CLASSES for name in kind.usual(passages, dim)]
    try:
        chosen = choose_kind(passages, dim, memory)[0]
    except UserError:
        chosen = "flat"
    if chosen not in kinds:
        return [*kinds, chosen]
    size = next((size for size in pq_sizes(dim) if size <= dim // 8), 0)
    return [*kinds, f"OPQ{size},IVF{default_lists(passages)},PQ{size}"] if passages >= TRAIN_CODES and size else kinds


def plan(
    passages: int,
    dim: int,
    kinds: Sequence[str],
    memory: int,
    calibration: Calibration,
    disk_rate: float,
    on_stage: OnStage = lambda stage, done, total: None,
) -> list[IndexPlan]:
    """One `IndexPlan` for each of `kinds`, where "all" stands for the usual ones of vectors and "bm25" for words;
    `memory` in bytes, `disk_rate` in bytes a second. `on_stage` is called with what is being done, how many kinds
    it is done for, and of how many. UserError for a kind that does not exist or fit the vectors, and for fewer than 1
    passage or dimension."""
    if passages < 1 or dim < 1:
        raise UserError(f"{passages} passages of {dim} dimensions; expected at least 1 of each")
    named = [name for kind in kinds for name in (usual_kinds(passages, dim, memory) if kind == ALL else [kind])]
    read = dict.fromkeys(WORDS if name.lower() == WORDS else parse_kind(name, passages, dim) for name in named)
    plans: list[IndexPlan] = []
    for kind in read:
        on_stage("measuring", len(plans), len(read))
        plans.append(
            _plan_words(passages, memory, calibration.words(), disk_rate)
            if isinstance(kind, str)
            else _plan_one(kind, passages, dim, memory, calibration, disk_rate)
        )
    on_stage("measuring", len(plans), len(read))
    return plans


def advice(passages: int, dim: int, memory: int) -> str:
    """Which kind to build within `memory` bytes, in a sentence; or that none fits."""
    try:
        name, reason = choose_kind(passages, dim, memory)
    except UserError as error:
        return str(error)
    return f"build {name} (--kind {name}, or --memory): {reason}"


def _plan_one(
    kind: Kind, passages: int, dim: int, memory: int, calibration: Calibration, disk_rate: float
) -> IndexPlan:
    needed = estimate(kind, passages, dim)
    build, speed, parameter = LAWS.get(type(kind), _measured_times)(kind, passages, dim, calibration)
    if not kind.lossless:
        build += QUERIES * (
            passages * calibration.flat(False).batch + (MEASURES if kind.exact else TRIES) * speed.batch
        )
    recall = "1" if kind.lossless else "at build"
    return IndexPlan(
        kind=kind.name,
        fits=max(needed.ram_bytes, needed.build_ram_bytes) <= memory,
        ram_bytes=needed.ram_bytes,
        build_ram_bytes=needed.build_ram_bytes,
        disk_bytes=needed.disk_bytes,
        gpu_bytes=needed.gpu_bytes,
        build_seconds=build + needed.disk_bytes / disk_rate,
        one_seconds=speed.one,
        batch_seconds=BATCH * speed.batch,
        effort=parameter,
        recall=recall,
    )


def _plan_words(passages: int, memory: int, rates: WordRates, disk_rate: float) -> IndexPlan:
    disk_bytes = rates.disk_bytes.at(passages)
    ram_bytes = disk_bytes + WORD_SEARCH_BYTES * passages + PROCESS_BYTES
    build_ram_bytes = rates.build_bytes.at(passages) + PROCESS_BYTES
    return IndexPlan(
        kind=WORDS,
        fits=max(ram_bytes, build_ram_bytes) <= memory,
        ram_bytes=ram_bytes,
        build_ram_bytes=build_ram_bytes,
        disk_bytes=disk_bytes,
        gpu_bytes=0,
        build_seconds=passages * rates.build + disk_bytes / disk_rate,
        one_seconds=passages * rates.search,
        batch_seconds=BATCH * passages * rates.search,
        effort="-",
        recall="-",
    )


def _exact_times(kind: Kind, passages: int, dim: int, calibration: Calibration) -> tuple[float, Speed, str]:
    scan = calibration.flat(kind.codes == "float16")
    return 0.0, Speed(one=passages * scan.one, batch=passages * scan.batch), "-"


def _graph_times(kind: Kind, passages: int, dim: int, calibration: Calibration) -> tuple[float, Speed, str]:
    seen = calibration.at(kind.directions) if kind.directions else calibration
    graph = seen.graph(kind.structure, EF_CONSTRUCTION, ASSUMED_EFSEARCH)
    growth = math.log(max(2, passages)) / math.log(graph.vectors)
    speed = Speed(one=graph.search.one * growth, batch=graph.search.batch * growth)
    added = 1 + GRAPH_GROWTH * math.log2(max(1.0, passages / graph.vectors))
    return passages * graph.add * added + _projecting(kind, passages, dim, calibration), speed, str(ASSUMED_EFSEARCH)


def _list_times(kind: Lists, passages: int, dim: int, calibration: Calibration) -> tuple[float, Speed, str]:
    trained = kind.training_vectors(passages)
    build = _projecting(kind, passages, dim, calibration)
    if kind.directions:
        dim, calibration = kind.directions, calibration.at(kind.directions)
    product = 2.0 * kind.lists * dim / calibration.multiply()
    build += (KMEANS_ROUNDS * trained + passages) * product
    if kind.codes == "pq":
        codes = calibration.product(kind.pq, kind.opq, trained)
        scan = codes.scan
        build += passages * codes.code + _code_training(kind, dim, trained, codes.train, codes.rotation)
    else:
        scan = calibration.lists(SCALARS[kind.codes])
    probes = max(1, kind.lists // LISTS_PER_PROBE)
    centroids, looked_at = calibration.flat(False), passages * probes / kind.lists
    speed = Speed(
        one=kind.lists * centroids.one + looked_at * scan.one,
        batch=kind.lists * centroids.batch + looked_at * scan.batch,
    )
    return build, speed, str(probes)


def _measured_times(kind: Kind, passages: int, dim: int, calibration: Calibration) -> tuple[float, Speed, str]:
    small = calibration.any(kind)
    return passages * small.add, Speed(one=passages * small.search.one, batch=passages * small.search.batch), "-"


def _projecting(kind: Kind, passages: int, dim: int, calibration: Calibration) -> float:
    return 2.0 * passages * dim * kind.directions / calibration.multiply() if kind.directions else 0.0


def _code_training(kind: Lists, dim: int, trained: int, per_vector: float, rotation: float) -> float:
    """Seconds. A round of OPQ is a rotation and some rounds of codes, more of them in the first."""
    round_ = min(trained, TRAIN_CODES) * per_vector
    if not kind.opq:
        return PQ_ROUNDS * round_
    usual = faiss.OPQMatrix(dim, kind.pq)
    rounds: int = PQ_ROUNDS + usual.niter_pq_0 + (OPQ_ROUNDS - 1) * usual.niter_pq
    return OPQ_ROUNDS * rotation + rounds * round_


# How times grow with N, where that is known: (seconds to build, of a search, the parameter assumed).
Law = Callable[[Any, int, int, Calibration], tuple[float, Speed, str]]
LAWS: dict[type[Kind], Law] = {Flat: _exact_times, Graph: _graph_times, Lists: _list_times}


def show_seconds(seconds: float) -> str:
    """`seconds` for a reader: "2.1 ms", "35 s", "5.8 h", "2.3 days"."""
    for size, unit, most in ((1e-3, "ms", 1.0), (1.0, "s", 120.0), (60.0, "min", 7200.0), (3600.0, "h", 172_800.0)):
        if seconds < most:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86_400:.1f} days"
