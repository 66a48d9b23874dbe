"""How fast this machine builds and searches: the measured half of `thresher index plan`.

Every figure is the best of a few runs, for a graph the median, over random vectors with a falling spectrum,
as embeddings have (a graph over vectors without any structure is searched far longer than one over real ones). Exact
kinds are timed through the code that will search them, the others through FAISS. What is measured is a rate per vector;
how a rate becomes a time for N vectors is `plan`'s business and stands at the top of that file.

Deliberately absent: recall, which depends on the real vectors and is measured when an index is built.
"""

import os
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from thresher.common.errors import UserError
from thresher.retrieval.building.timing import K, best_time, timed
from thresher.retrieval.encoders.encoder import Encoder, Vectors
from thresher.retrieval.indexes.kind import Kind
from thresher.retrieval.indexes.lists import PQ_CENTROIDS
from thresher.retrieval.vectors.approximate import ApproximateSearch
from thresher.retrieval.vectors.exact import ExactRows
from thresher.retrieval.vectors.faiss_library import faiss
from thresher.retrieval.vectors.file import VectorFile

# 200 MB at 768 dimensions: more than a processor's caches hold, or a scan would look faster than it is.
SAMPLE = 65_536
# Of these, as many go into a graph, and train codes.
FEW = 16_384
LEAST_SAMPLE = 2_000
BATCH = 64
# Queries asked one by one, of a scan and of a graph.
ALONE, ALONE_GRAPH = 4, 32
# Lists of the small index whose scan is timed, and how many of them a query looks through.
LISTS, PROBES = 64, 16
# Centroids in the product whose speed stands for training and filling lists.
CENTROIDS = 1_024
TRAIN_ROUNDS = 1
GRAPH_PARTS = 16
DISK_BYTES = 128 * 2**20
# A passage of wiki-18 has 100 words; these are as long as English ones are on average.
PASSAGE = " ".join(f"{word} of the council" for word in ("history", "mayor", "river", "station", "treaty") * 5)
ENCODE_SECONDS = 4.0

if TYPE_CHECKING:
    from thresher.retrieval.building.calibrate_words import WordRates

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """Seconds per query and vector looked at, a query searched alone and in a batch of 64."""

    one: float
    batch: float


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphRates:
    """A graph of `vectors` vectors: seconds to add one more, and to search it for one query."""

    vectors: int
    add: float
    search: Speed


@dataclass(frozen=True, kw_only=True, slots=True)
class StructureRates:
    """A structure of any kind: seconds to build and to search it, for each of its vectors."""

    add: float
    search: Speed


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeRates:
    """Product codes: seconds of one round of training per vector, of coding a vector, the scan of a list's codes, and
    the seconds that OPQ's rotation takes a round (a decomposition of [dim, dim], whatever the number of vectors; 0
    where it was not asked for)."""

    train: float
    code: float
    scan: Speed
    rotation: float


class Calibration:
    """Rates at `dim` dimensions; each is measured when it is first asked for, so that a plan for one kind is quick."""

    def __init__(self, dim: int, sample: int = SAMPLE) -> None:
        if dim < 1:
            raise UserError(f"dim is {dim}; expected at least 1")
        if sample < LEAST_SAMPLE:
            raise UserError(f"sample is {sample}; expected at least {LEAST_SAMPLE} vectors, or the times mean nothing")
        self.dim, self.sample = dim, sample
        self.threads = int(faiss.omp_get_max_threads())
        self._known: dict[Any, Any] = {}

    @cached_property
    def _vectors_ND(self) -> Vectors:
        return synthetic_vectors(self.sample, self.dim)

    @cached_property
    def _queries_QD(self) -> Vectors:
        return synthetic_vectors(BATCH, self.dim, seed=1)

    def at(self, dim: int) -> "Calibration":
        """The rates at another number of dimensions."""
        return self if dim == self.dim else self._once(("at", dim), lambda: Calibration(dim, self.sample))

    def flat(self, half: bool) -> Speed:
        """The exact scan of float32 vectors, or of float16 ones that are widened."""

        def measure() -> Speed:
            rows = ExactRows(self._vectors_ND.astype(np.float16) if half else self._vectors_ND)
            return self._speed(lambda query_QD: rows.top(query_QD, K), self.sample)

        return self._once(("flat", half), measure)

    def multiply(self) -> float:
        """Multiplications and additions a second while vectors are put to their nearest centroid."""

        def measure() -> float:
            centroids = faiss.IndexFlatIP(self.dim)
            count = min(CENTROIDS, self.sample)
            centroids.add(self._vectors_ND[:count])
            part_ND = self._vectors_ND[:8192]
            return 2.0 * len(part_ND) * count * self.dim / best_time(lambda: centroids.search(part_ND, 1))

        return self._once("multiply", measure)

    def lists(self, codes: str) -> Speed:
        """The scan of lists of vectors in float32 ("Flat"), float16 ("SQfp16") or 8 bits ("SQ8")."""
        return self._once(("lists", codes), lambda: self._scan(self._filled(f"IVF{LISTS},{codes}")))

    def product(self, pq: int, opq: bool, trained: int) -> CodeRates:
        """Product codes of `pq` bytes, rotated or not, trained on `trained` vectors: of few of them, such as 12,000,
        FAISS's k-means takes seven times as long a vector as of many."""
        part_ND = self._vectors_ND[: min(FEW, trained)]

        def measure() -> CodeRates:
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

        return self._once(("product", pq, opq, len(part_ND)), measure)

    def graph(self, factory: str, construction: int, search: int) -> GraphRates:
        """A graph ("HNSW32", "HNSW32_SQ8") built with `construction` candidates a vector (FAISS's efConstruction),
        searched with `search` (efSearch)."""

        def measure() -> GraphRates:
            index = faiss.index_factory(self.dim, factory, faiss.METRIC_INNER_PRODUCT)
            index.hnsw.efConstruction, index.hnsw.efSearch = construction, search
            index.train(self._vectors_ND[:FEW])
            first, *parts = np.array_split(self._vectors_ND[:FEW], GRAPH_PARTS)
            index.add(first)
            later = [timed(partial(index.add, part_ND)) / len(part_ND) for part_ND in parts]
            # The median of the last half, for a build is long and sees the machine as it is on average.
            add = median(later[len(later) // 2 :])
            return GraphRates(
                vectors=min(FEW, self.sample), add=add, search=self._cold(lambda q_QD: index.search(q_QD, K))
            )

        return self._once((factory, construction, search), measure)

    def any(self, kind: Kind) -> StructureRates:
        """A kind that no law is known for: built and searched as it will be, with the least its search may take."""

        def measure() -> StructureRates:
            part_ND = self._vectors_ND[:FEW]
            with TemporaryDirectory() as scratch:
                vectors = VectorFile(Path(scratch) / "vectors.npy", len(part_ND), self.dim)
                vectors.append(part_ND)
                started = time.perf_counter()
                index = kind.grow(vectors, Path(scratch), lambda stage, done, total: None)
                add = (time.perf_counter() - started) / len(part_ND)
                search = ApproximateSearch(kind.candidates(index), None, len(part_ND), 1, 1)
                return StructureRates(add=add, search=self._speed(lambda q_QD: search.top(q_QD, K), len(part_ND)))

        return self._once(kind, measure)

    def words(self) -> "WordRates":
        """BM25, whose passages have words in the place of dimensions."""
        from thresher.retrieval.building.calibrate_words import measure_words  # vectors need no bm25s

        return self._once("words", measure_words)

    def _quantiser(self, pq: int) -> Any:
        quantiser = faiss.ProductQuantizer(self.dim, pq, 8)
        quantiser.cp.niter = TRAIN_ROUNDS
        # FAISS writes a warning to the terminal for every clustering of a small sample.
        quantiser.cp.min_points_per_centroid = 1
        return quantiser

    def _filled(self, factory: str) -> Any:
        index = faiss.index_factory(self.dim, factory, faiss.METRIC_INNER_PRODUCT)
        faiss.extract_index_ivf(index).cp.niter = 1
        faiss.extract_index_ivf(index).cp.min_points_per_centroid = 1
        index.train(self._vectors_ND[: max(LEAST_SAMPLE, LISTS)])
        index.add(self._vectors_ND)
        return index

    def _scan(self, index: Any) -> Speed:
        """Per vector of lists of average length: the lists near a query are longer (by 1.8 in one index of 10^5), and
        that is in the figure."""
        index.nprobe = PROBES
        return self._speed(lambda query_QD: index.search(query_QD, K), self.sample * PROBES / LISTS)

    def _cold(self, search: Callable[[Vectors], object]) -> Speed:
        """Seconds per query where no cache holds what is looked at: a graph small enough to be built here lies in one,
        and the graph that is planned does not. Threads share out a batch."""
        search(self._queries_QD)
        times = []
        for query_D in self._queries_QD[:ALONE_GRAPH]:
            self._vectors_ND.sum()  # fills the caches with something else
            times.append(timed(partial(search, query_D[None])))
        return Speed(one=median(times), batch=median(times) / min(self.threads, BATCH))

    def _speed(self, search: Callable[[Vectors], object], looked_at: float) -> Speed:
        """Seconds per query and vector, a query looking at `looked_at` of them. The queries asked alone differ: one
        asked again would find its vectors in the processor's cache."""

        def one_by_one() -> None:
            for query_D in self._queries_QD[:ALONE]:
                search(query_D[None])

        return Speed(
            one=best_time(one_by_one) / ALONE / looked_at,
            batch=best_time(lambda: search(self._queries_QD)) / BATCH / looked_at,
        )

    def _once(self, key: Any, measure: Callable[[], T]) -> T:
        if key not in self._known:
            self._known[key] = measure()
        return cast(T, self._known[key])


def synthetic_vectors(count: int, dim: int, seed: int = 0) -> Vectors:
    """float32 [count, dim] of norm 1; coordinate i has the deviation (1 + i)^-1/2 before."""
    vectors_ND = np.random.default_rng(seed).standard_normal((count, dim), np.float32)
    vectors_ND *= np.arange(1, dim + 1, dtype=np.float32) ** -0.5
    vectors_ND /= np.linalg.norm(vectors_ND, axis=1, keepdims=True)
    return vectors_ND


def disk_rate(folder: str | Path) -> float:
    """Bytes a second that a file written into `folder`, or the nearest one above that exists, reaches the disk with."""
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
    """Passages of 100 words that `encoder` turns into vectors a second, measured for about 4 seconds."""
    batch = [PASSAGE] * 8
    encoder.encode_passages(batch)
    started, done = time.perf_counter(), 0
    while done == 0 or time.perf_counter() - started < ENCODE_SECONDS:
        encoder.encode_passages(batch)
        done += len(batch)
    return done / (time.perf_counter() - started)
