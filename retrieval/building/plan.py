"""`thresher index plan`: prediction of the bytes and times of an index of N passages, before anything is built.

Bytes are computed (`kinds.estimate`). Times follow from rates measured on this machine (`Calibration`, `measure_words`)
by these laws, with d dimensions, C lists, T training vectors, F floating-point operations per second, w bytes per
second to disk, n calibration vectors, and `scan`, the seconds per scanned vector. They hold while the index is in
memory.

  search, exact     N * scan
  search, lists     C * scan + (nprobe / C) N * scan of a list         nprobe is assumed to be C / 32
  search, graph     time on n vectors * log N / log n                  efSearch is assumed to be 128
  build, all        (bytes on disk) / w                                encoding is not included
  build, lists      + 10 rounds * T C 2d / F     training
                    + N C 2d / F                 assigning
                    + N * coding + 15 rounds of codes, for PQ; 10 decompositions + 76 rounds, for OPQ
  build, PCA        the same with p directions for d, and N p 2d / F
  build, graph      + N * (time to add one to n) * (1 + log2(N / n) / 4)
  build, not flat   + 200 N * scan + 1,200 searches, for recall and the search parameter (`tune`); flat16 600
  BM25              N times the cost of a synthetic passage, and a multiple of sqrt(N) for the vocabulary
"""

import math
import os
import secrets
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial, wraps
from itertools import islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, TypeVar, cast

import numpy as np

from thresher.common.errors import UserError
from thresher.common.files import show_bytes
from thresher.retrieval.building.build import QUERIES
from thresher.retrieval.corpus import Corpus
from thresher.retrieval.encoders import Encoder, Vectors
from thresher.retrieval.indexes.bm25 import SCORES, build_bm25, load_bm25
from thresher.retrieval.indexes.exact import ExactRows
from thresher.retrieval.indexes.faiss_library import faiss, faiss_installed
from thresher.retrieval.indexes.kinds import (
    PQ_CENTROIDS,
    PROCESS_BYTES,
    SCALARS,
    TRAIN_CODES,
    Estimate,
    Kind,
    OnStage,
    choose_kind,
    estimate,
    parse_kind,
    usual_kinds,
)
from thresher.retrieval.indexes.structures import EF_CONSTRUCTION, KMEANS_ROUNDS, OPQ_ROUNDS, PQ_ROUNDS
from thresher.retrieval.passages import Passage

# Hits per query of a timed search.
K = 10
REPEATS = 2


def timed(call: Callable[[], object]) -> float:
    """Return the seconds that `call` takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def best_time(call: Callable[[], object]) -> float:
    """Return the seconds of the fastest of a few calls, after a warm-up."""
    call()
    return min(timed(call) for _ in range(REPEATS))


# Passages that are timed, enough to make a search's fixed cost negligible, and whose memory is traced, which is slow.
WORD_SAMPLE, TRACED = 16_384, 8_192
PASSAGE_WORDS, REPEATED, QUERY_WORDS, WORD_QUERIES = 100, 20, 12, 16
VOCABULARY = 200_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """Bytes of N passages: `passage` for each, and a vocabulary that grows with the square root of N (Heaps' law)."""

    passage: float
    root: float

    def at(self, passages: int) -> int:
        return math.ceil(passages * self.passage + math.sqrt(passages) * self.root)


@dataclass(frozen=True, kw_only=True, slots=True)
class WordRates:
    """Peak RAM of a build, and bytes on disk; seconds per passage to build, and to search for 12 words."""

    build_bytes: Growth
    disk_bytes: Growth
    build: float
    search: float


def measure_words(sample: int = WORD_SAMPLE, traced: int = TRACED) -> WordRates:
    """Measure indexes of `sample` passages and of a quarter of them, and RAM for `traced` and for a quarter of them."""
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        corpus, few = made_up(sample), made_up(sample // 4)
        build = timed(lambda: build_bm25(corpus, folder / "all"))
        build_bm25(few, folder / "few")
        retriever = load_bm25(folder / "all", corpus)
        # No query is repeated, because its answer would be cached.
        queries = (" ".join(passage.text.split()[:QUERY_WORDS]) for passage in corpus)
        search = best_time(lambda: retriever.search(list(islice(queries, WORD_QUERIES)), K)) / WORD_QUERIES
        return WordRates(
            build_bytes=_growth(traced, *(_peak_bytes(made_up(size), folder) for size in (traced // 4, traced))),
            disk_bytes=_growth(sample, *(_bytes_in(folder / name / SCORES) for name in ("few", "all"))),
            build=build / sample,
            search=search / sample,
        )


def _growth(passages: int, of_a_quarter: float, of_all: float) -> Growth:
    """Return the growth that reproduces both measurements."""
    linear = max(0.0, (of_all - 2 * of_a_quarter) / (passages / 2))
    return Growth(passage=linear, root=(of_all - linear * passages) / math.sqrt(passages))


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _peak_bytes(corpus: Corpus, folder: Path) -> int:
    tracemalloc.start()
    try:
        build_bm25(corpus, folder / f"traced{len(corpus)}")
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def made_up(passages: int) -> Corpus:
    """Return a corpus of synthetic passages, the same for the same number.

    Each has 100 words, like wiki-18's, from a vocabulary of 200,000 with Zipf's law. A fifth of the words repeat one of
    the same passage, so that a word of a query is in a quarter of the passages, as in HotpotQA's.
    """
    draw = np.random.default_rng(0)
    share_V = 1 / np.arange(1, VOCABULARY + 1)
    border_V = np.cumsum(share_V / share_V.sum())
    own_NW = np.searchsorted(border_V, draw.random((passages, PASSAGE_WORDS - REPEATED)))
    again_NW = np.take_along_axis(own_NW, draw.integers(0, own_NW.shape[1], (passages, REPEATED)), 1)
    word_NW = np.concatenate([own_NW, again_NW], axis=1)
    texts = (" ".join(f"w{word}" for word in word_W) for word_W in word_NW.tolist())
    return Corpus([Passage(str(row), "", text) for row, text in enumerate(texts)])


# 200 MB at 768 dimensions: more than a processor's caches hold, because a scan of cached vectors would be faster.
SAMPLE = 65_536
# The number of these that are put into a graph, and that train codes.
FEW = 16_384
LEAST_SAMPLE = 2_000
BATCH = 64
# Queries that are searched one by one, in a scan and in a graph.
ALONE, ALONE_GRAPH = 4, 32
# Lists of the small index whose scan is timed, and the number of them that a query scans.
LISTS, PROBES = 64, 16
# Centroids of the matrix product that gives the times of training and filling lists.
CENTROIDS = 1_024
TRAIN_ROUNDS = 1
GRAPH_PARTS = 16
DISK_BYTES = 128 * 2**20
# A passage of wiki-18 has 100 words; these are as long as English ones are on average.
PASSAGE = " ".join(f"{word} of the council" for word in ("history", "mayor", "river", "station", "treaty") * 5)
ENCODE_SECONDS = 4.0

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Seconds per query and scanned vector, for a single query and for one in a batch of 64."""

    one: float
    batch: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphRates:
    """A graph of `vectors` vectors: seconds to add one more, and per query."""

    vectors: int
    add: float
    search: Speed


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeRates:
    """Product codes: seconds per vector of a training round and of coding, the scan of a list's codes, and seconds per
    round of OPQ's rotation (0 without OPQ)."""

    train: float
    code: float
    scan: Speed
    rotation: float


def _once(measure: Callable[..., T]) -> Callable[..., T]:
    """Wrap a method of Calibration so that it measures only once for the same arguments."""

    @wraps(measure)
    def known(self: "Calibration", *arguments: Any) -> T:
        key = (measure.__name__, *arguments)
        if key not in self.known:
            self.known[key] = measure(self, *arguments)
        return cast(T, self.known[key])

    return known


class Calibration:
    """Rates at `dim` dimensions, each measured on first use: the best of a few runs, or the median for a graph.

    The vectors are random with a decaying spectrum, like embeddings, because searching a graph over vectors without any
    structure takes far longer. Exact kinds are timed with the code that will search them, the others with FAISS.
    """

    def __init__(self, dim: int, sample: int = SAMPLE) -> None:
        if sample < LEAST_SAMPLE:
            raise UserError(f"sample is {sample}; expected at least {LEAST_SAMPLE} vectors, or the times mean nothing")
        self.dim, self.sample = dim, sample
        self.known: dict[Any, Any] = {}

    @cached_property
    def threads(self) -> int:
        """Return the number of threads that a search uses."""
        return int(faiss.omp_get_max_threads()) if faiss_installed() else os.cpu_count() or 1

    @cached_property
    def _vectors_ND(self) -> Vectors:
        return synthetic_vectors(self.sample, self.dim)

    @cached_property
    def _queries_QD(self) -> Vectors:
        return synthetic_vectors(BATCH, self.dim, seed=1)

    @_once
    def at(self, dim: int) -> "Calibration":
        """Return the rates at another number of dimensions."""
        return self if dim == self.dim else Calibration(dim, self.sample)

    @_once
    def flat(self, half: bool) -> Speed:
        """Return the speed of the exact scan of float32 vectors, or of float16 vectors, which are converted."""
        rows = ExactRows(self._vectors_ND.astype(np.float16) if half else self._vectors_ND)
        return self._speed(lambda query_QD: rows.top(query_QD, K), self.sample)

    @_once
    def multiply(self) -> float:
        """Return the multiply-adds per second, times 2, of assigning vectors to their nearest centroids."""
        centroids = faiss.IndexFlatIP(self.dim)
        count = min(CENTROIDS, self.sample)
        centroids.add(self._vectors_ND[:count])
        part_ND = self._vectors_ND[:8192]
        return 2.0 * len(part_ND) * count * self.dim / best_time(lambda: centroids.search(part_ND, 1))

    @_once
    def lists(self, codes: str) -> Speed:
        """Return the scan speed of lists of vectors in float32 ("Flat"), float16 ("SQfp16") or 8 bits ("SQ8")."""
        index = faiss.index_factory(self.dim, f"IVF{LISTS},{codes}", faiss.METRIC_INNER_PRODUCT)
        faiss.extract_index_ivf(index).cp.niter = 1
        faiss.extract_index_ivf(index).cp.min_points_per_centroid = 1
        index.train(self._vectors_ND[: max(LEAST_SAMPLE, LISTS)])
        index.add(self._vectors_ND)
        return self._scan(index)

    @_once
    def product(self, pq: int, opq: bool, trained: int) -> CodeRates:
        """Return the rates of product codes of `pq` bytes, rotated or not, trained on `trained` vectors. With few, such
        as 12,000, FAISS's k-means takes seven times as long per vector as with many."""
        part_ND = self._vectors_ND[:trained]
        train = timed(lambda: self._quantiser(pq).train(part_ND)) / TRAIN_ROUNDS
        index = faiss.IndexIVFPQ(faiss.IndexFlatIP(self.dim), self.dim, LISTS, pq, 8, faiss.METRIC_INNER_PRODUCT)
        index.cp.niter, index.pq = 1, self._quantiser(pq)
        index.cp.min_points_per_centroid = 1
        index.train(part_ND[: 4 * PQ_CENTROIDS])
        code = best_time(lambda: index.pq.compute_codes(part_ND)) / len(part_ND)
        index.add(self._vectors_ND)
        rotation = 0.0
        if opq:
            turned, inner = faiss.OPQMatrix(self.dim, pq), self._quantiser(pq)
            turned.niter = turned.niter_pq = turned.niter_pq_0 = 1
            turned.pq = inner
            rotation = max(0.0, timed(lambda: turned.train(part_ND)) - train)
            turned.pq = None
        return CodeRates(train=train / len(part_ND), code=code, scan=self._scan(index), rotation=rotation)

    @_once
    def graph(self, factory: str, construction: int, search: int) -> GraphRates:
        """Return the rates of a graph ("HNSW32", "HNSW32_SQ8") with FAISS's efConstruction and efSearch."""
        index = faiss.index_factory(self.dim, factory, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction, index.hnsw.efSearch = construction, search
        index.train(self._vectors_ND[:FEW])
        first, *parts = np.array_split(self._vectors_ND[:FEW], GRAPH_PARTS)
        index.add(first)
        later = [timed(partial(index.add, part_ND)) / len(part_ND) for part_ND in parts]
        # The median of the last half, because a build is long and runs at the machine's average speed.
        add = median(later[len(later) // 2 :])
        return GraphRates(vectors=min(FEW, self.sample), add=add, search=self._cold(lambda q_QD: index.search(q_QD, K)))

    @_once
    def words(self) -> WordRates:
        """Return the rates of BM25."""
        return measure_words()

    def _quantiser(self, pq: int) -> Any:
        quantiser = faiss.ProductQuantizer(self.dim, pq, 8)
        quantiser.cp.niter = TRAIN_ROUNDS
        # Without this, FAISS writes a warning to the terminal for every clustering of a small sample.
        quantiser.cp.min_points_per_centroid = 1
        return quantiser

    def _scan(self, index: Any) -> Speed:
        """Return the speed per vector for lists of average length. The lists near a query are longer (by 1.8 in one
        index of 10^5), which the figure includes."""
        index.nprobe = PROBES
        return self._speed(lambda query_QD: index.search(query_QD, K), self.sample * PROBES / LISTS)

    def _cold(self, search: Callable[[Vectors], object]) -> Speed:
        """Return the seconds per query with cold caches: a graph that is small enough to be built here fits into them,
        but the planned graph does not. A batch is divided among the threads."""
        search(self._queries_QD)
        times = []
        for query_D in self._queries_QD[:ALONE_GRAPH]:
            self._vectors_ND.sum()  # fills the caches with something else
            times.append(timed(partial(search, query_D[None])))
        return Speed(one=median(times), batch=median(times) / min(self.threads, BATCH))

    def _speed(self, search: Callable[[Vectors], object], looked_at: float) -> Speed:
        """Return the seconds per query and vector, if a query scans `looked_at` vectors. The single queries differ,
        because the vectors of a repeated query would be in the processor's cache."""

        def one_by_one() -> None:
            for query_D in self._queries_QD[:ALONE]:
                search(query_D[None])

        return Speed(
            one=best_time(one_by_one) / ALONE / looked_at,
            batch=best_time(lambda: search(self._queries_QD)) / BATCH / looked_at,
        )


def synthetic_vectors(count: int, dim: int, seed: int = 0) -> Vectors:
    """Return float32 [count, dim] of norm 1; before normalisation, coordinate i has the deviation (1 + i)^-1/2."""
    vectors_ND = np.random.default_rng(seed).standard_normal((count, dim), np.float32)
    vectors_ND *= np.arange(1, dim + 1, dtype=np.float32) ** -0.5
    vectors_ND /= np.linalg.norm(vectors_ND, axis=1, keepdims=True)
    return vectors_ND


def disk_rate(folder: str | Path) -> float:
    """Measure the bytes per second written to the disk of `folder`, or of its nearest parent that exists."""
    place = Path(folder).absolute()
    while not place.is_dir():
        place = place.parent
    path = place / f".thresher-plan-{secrets.token_hex(4)}.tmp"
    block = os.urandom(2**20)
    try:
        started = time.perf_counter()
        with path.open("wb") as file:
            for _ in range(DISK_BYTES // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        return DISK_BYTES / (time.perf_counter() - started)
    except OSError as error:
        raise UserError(f"{place}: cannot be written ({error.strerror}); name a folder on the index's disk") from None
    finally:
        path.unlink(missing_ok=True)


def encode_rate(encoder: Encoder) -> float:
    """Return the passages of 100 words that `encoder` encodes per second, measured for about 4 seconds."""
    batch = [PASSAGE] * 8
    encoder.encode_passages(batch)
    started, done = time.perf_counter(), 0
    while done == 0 or time.perf_counter() - started < ENCODE_SECONDS:
        encoder.encode_passages(batch)
        done += len(batch)
    return done / (time.perf_counter() - started)


ALL, WORDS = "all", "bm25"
# Bytes of RAM per passage in a search by words: its score, and row and score if it has one of the words.
WORD_SEARCH_BYTES = 16
LISTS_PER_PROBE = 32
ASSUMED_EFSEARCH = 128
# Fraction by which each doubling of a graph increases the time to add a vector, as measured from 10^4 to 10^5 x 768.
GRAPH_GROWTH = 0.25
# TRIES: the time of trying the values of the search parameter, for two k, relative to the search with the chosen value.
# MEASURES: without a parameter to choose, the sample is searched for two k, and once more for its speed.
TRIES = 6
MEASURES = 3
COLUMNS = ("kind", "fits", "RAM", "to build", "disk", "GPU", "build", "1 query", str(BATCH), "parameter", "recall")


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexPlan:
    """One kind's requirements: bytes (`gpu_bytes` is 0 if it has no form for GPUs), seconds to build after the passages
    are encoded, of a single search and of a batch of 64, and the assumed nprobe or efSearch (`effort`)."""

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
        """Return the cells under COLUMNS."""
        return (
            self.kind,
            "yes" if self.fits else "no",
            *(show_bytes(size) for size in (self.ram_bytes, self.build_ram_bytes, self.disk_bytes)),
            show_bytes(self.gpu_bytes) if self.gpu_bytes else "-",
            *(show_seconds(seconds) for seconds in (self.build_seconds, self.one_seconds, self.batch_seconds)),
            self.effort,
            self.recall,
        )


def plan(
    passages: int,
    dim: int,
    kinds: Sequence[str],
    memory: int,
    calibration: Calibration,
    disk_rate: float,
    on_stage: OnStage = lambda stage, done, total: None,
) -> list[IndexPlan]:
    """Plan each of `kinds`, where "all" stands for the usual ones of vectors and "bm25" for words.

    `memory` is in bytes, `disk_rate` in bytes per second. UserError for a kind that does not exist or does not fit the
    vectors, and for fewer than 1 passage or dimension.
    """
    if passages < 1 or dim < 1:
        raise UserError(f"{passages} passages of {dim} dimensions; expected at least 1 of each")
    named = [name for kind in kinds for name in (usual_kinds(passages, dim, memory) if kind == ALL else [kind])]
    read = dict.fromkeys(WORDS if name.lower() == WORDS else parse_kind(name, passages, dim) for name in named)
    plans: list[IndexPlan] = []
    for kind in read:
        on_stage("measuring", len(plans), len(read))
        plan_kind = _plan_words if isinstance(kind, str) else partial(_plan_vectors, kind, dim)
        plans.append(plan_kind(passages, memory, calibration, disk_rate))
    on_stage("measuring", len(plans), len(read))
    return plans


def advice(passages: int, dim: int, memory: int) -> str:
    """Return a sentence that says which kind to build within `memory` bytes, or that none fits."""
    try:
        name, reason = choose_kind(passages, dim, memory)
    except UserError as error:
        return str(error)
    return f"build {name} (--kind {name}, or --memory): {reason}"


def _plan_vectors(
    kind: Kind, dim: int, passages: int, memory: int, calibration: Calibration, disk_rate: float
) -> IndexPlan:
    needed = estimate(kind, passages, dim)
    build, speed, effort = LAWS[kind.family](kind, passages, dim, calibration)
    if not kind.lossless:
        build += QUERIES * (
            passages * calibration.flat(False).batch + (MEASURES if kind.exact else TRIES) * speed.batch
        )
    return IndexPlan(
        kind=kind.name,
        fits=needed.most_ram <= memory,
        **asdict(needed),
        build_seconds=build + needed.disk_bytes / disk_rate,
        one_seconds=speed.one,
        batch_seconds=BATCH * speed.batch,
        effort=effort,
        recall="1" if kind.lossless else "at build",
    )


def _plan_words(passages: int, memory: int, calibration: Calibration, disk_rate: float) -> IndexPlan:
    rates = calibration.words()
    disk_bytes = rates.disk_bytes.at(passages)
    needed = Estimate(
        ram_bytes=disk_bytes + WORD_SEARCH_BYTES * passages + PROCESS_BYTES,
        disk_bytes=disk_bytes,
        build_ram_bytes=rates.build_bytes.at(passages) + PROCESS_BYTES,
        gpu_bytes=0,
    )
    return IndexPlan(
        kind=WORDS,
        fits=needed.most_ram <= memory,
        **asdict(needed),
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


def _list_times(kind: Kind, passages: int, dim: int, calibration: Calibration) -> tuple[float, Speed, str]:
    trained = kind.training_vectors(passages)
    build = _projecting(kind, passages, dim, calibration)
    if kind.directions:
        dim, calibration = kind.directions, calibration.at(kind.directions)
    product = 2.0 * kind.lists * dim / calibration.multiply()
    build += (KMEANS_ROUNDS * trained + passages) * product
    if kind.codes == "pq":
        codes = calibration.product(kind.pq, kind.opq, min(FEW, trained))
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


def _projecting(kind: Kind, passages: int, dim: int, calibration: Calibration) -> float:
    return 2.0 * passages * dim * kind.directions / calibration.multiply() if kind.directions else 0.0


def _code_training(kind: Kind, dim: int, trained: int, per_vector: float, rotation: float) -> float:
    """Return the seconds of training codes. A round of OPQ is a rotation and some rounds of codes, with more of these
    in the first round."""
    round_ = min(trained, TRAIN_CODES) * per_vector
    if not kind.opq:
        return PQ_ROUNDS * round_
    usual = faiss.OPQMatrix(dim, kind.pq)
    rounds: int = PQ_ROUNDS + usual.niter_pq_0 + (OPQ_ROUNDS - 1) * usual.niter_pq
    return OPQ_ROUNDS * rotation + rounds * round_


# The laws by which times grow with N, by family of a kind: (seconds to build, of a search, the assumed parameter).
LAWS = {"flat": _exact_times, "flat16": _exact_times, "hnsw": _graph_times, "ivf": _list_times}


def show_seconds(seconds: float) -> str:
    """Return `seconds` in readable form: "2.1 ms", "35 s", "5.8 h", "2.3 days"."""
    for size, unit, most in ((1e-3, "ms", 1.0), (1.0, "s", 120.0), (60.0, "min", 7200.0), (3600.0, "h", 172_800.0)):
        if seconds < most:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 86_400:.1f} days"
