"""`thresher bench retrieval`: the engine's indexes next to torch, numpy and FAISS, over 10^4 to 10^6 vectors and more.

For every set of vectors, check that the flat index and all peers find the same. Then for every kind of index: build it
in a separate process; measure its recall as the search parameter (nprobe, efSearch) rises; choose the least value with
a recall at 5 of .95, and time it against all peers in batches from 1 to 512. Last, test a server with 64 connections.
The command ends with status 1 if a flat index is not exact. Parts cut off by a budget are reported.

    recall      at k, against the exact answer, over 512 questions; a row counts by its score in float64
    ratio       a peer's time / ours, of neighbouring calls
    speedup     the ratio of the fastest of torch, numpy and FAISS, which search exactly

The engine's search is timed with its float64 rescoring, without encoding of questions.

Axes: N vectors, Q queries, D dimension, K hits.
"""

import math
import os
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch

from thresher.bench.harness import append_rows, check_files, facts, in_turn, print_files, ratios, spread
from thresher.bench.retrieval_server import measure_service
from thresher.bench.retrieval_sets import PassageSource, VectorSet, built, real_set, synthetic_near, synthetic_set
from thresher.common.console import console, table
from thresher.common.errors import UserError
from thresher.common.files import show_bytes
from thresher.common.machine import cpu_memory
from thresher.retrieval.building.build import CODE_FACTORS, WHOLE_FACTORS
from thresher.retrieval.encoders import Vectors
from thresher.retrieval.indexes.approximate import ApproximateSearch, candidates_of
from thresher.retrieval.indexes.exact import ExactRows, Found, Rows, RowScores, largest_row_norm
from thresher.retrieval.indexes.faiss_library import faiss
from thresher.retrieval.indexes.kinds import Kind, estimate, parse_kind

K = 10
PROOF = 64
CELL_SECONDS = 8.0  # of timed rounds, between FEWEST and MOST of them
FEWEST, MOST = 3, 50
OUT_OF_TIME = "the budget was used up"
FLAT = "flat"
CPU = torch.device("cpu")
WANTED, WANTED_K = 0.95, 5
ENOUGH = 0.99
CURVE_BATCH = 64
SETTLE_SECONDS = 0.05
RECALLS = (1, 5, 10)
PARAMETERS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
# Largest difference that float32 makes in a score of unit vectors, for any order of the sum.
ROUNDING = 1e-5

Search = Callable[[Vectors, int], Rows]


# peers and the exact answer


def exact_peers(vectors_ND: Vectors) -> dict[str, Search]:
    """Return torch, numpy and FAISS searches over `vectors_ND`, float32, which none of them copies.

    Each gets queries [Q, D] and k and returns rows [Q, k], best first; all use the machine's threads (OMP_NUM_THREADS).
    """
    with warnings.catch_warnings():
        # The mapped file is read-only, and it is only read.
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        tensor_ND = torch.from_numpy(vectors_ND)

    def by_torch(query_QD: Vectors, k: int) -> Rows:
        found: Rows = torch.topk(torch.from_numpy(query_QD) @ tensor_ND.T, k).indices.numpy()
        return found

    def by_numpy(query_QD: Vectors, k: int) -> Rows:
        score_QN = query_QD @ vectors_ND.T
        # Row by row, because all at once would hold 8-byte indices for every score.
        best_QK = np.stack([np.argpartition(score_N, -k)[-k:] for score_N in score_QN])
        order_QK = np.argsort(-np.take_along_axis(score_QN, best_QK, 1), axis=1)
        return np.take_along_axis(best_QK, order_QK, 1)

    def by_faiss(query_QD: Vectors, k: int) -> Rows:
        found: Rows = faiss.knn(query_QD, vectors_ND, k, metric=faiss.METRIC_INNER_PRODUCT)[1]
        return found

    return {"torch": by_torch, "numpy": by_numpy, "FAISS": by_faiss}


def ours(top: Callable[[Vectors, int], list[Found]]) -> Search:
    """Return an engine search as a contender: row -1 if it found fewer than k."""

    def search(query_QD: Vectors, k: int) -> Rows:
        row_QK = np.full((len(query_QD), k), -1, np.int64)
        for row_K, found in zip(row_QK, top(query_QD, k), strict=True):
            row_K[: len(found)] = [row for row, _ in found]
        return row_QK

    return search


def bare(index: Any, name: str, value: int) -> Search:
    """Return a search of FAISS's structure `index` without our rescoring, with its parameter `name` set."""

    def search(query_QD: Vectors, k: int) -> Rows:
        faiss.ParameterSpace().set_index_parameter(index, name, value)
        found: Rows = index.search(query_QD, k)[1]
        return found

    return search


class ExactAnswers:
    """The exact answers to `query_QD`: rows and float64 scores [Q, k], by the engine's flat search."""

    def __init__(self, query_QD: Vectors, exact: Any, k: int) -> None:
        self.query_QD, self.k = query_QD, k
        self._exact: RowScores = exact
        self._score_QK = np.array([[score for _, score in found] for found in exact.top(query_QD, k)])

    def wrong(self, search: Search, queries: int) -> str | None:
        """Return in a few words why `search` is not exact on the first `queries`; None if it is."""
        row_QK = search(self.query_QD[:queries], self.k)
        for number, row_K in enumerate(row_QK):
            if len(set(row_K.tolist())) < self.k or row_K.min() < 0:
                return f"query {number} got {len(set(row_K.tolist()))} different rows instead of {self.k}"
            error = np.abs(self._scores(number, row_K) - self._score_QK[number]).max()
            if error > ROUNDING:
                return f"query {number}: a score is off by {error:.1e}"
        return None

    def recall(self, row_QK: Rows, k: int) -> float:
        """Return recall at k of rows [Q, >= k] found for the first Q queries. It is the share with a score of at least
        the exact k-th, so that equal passages count for each other."""
        good = 0
        for number, row_K in enumerate(row_QK[:, :k]):
            kth = self._score_QK[number, k - 1]
            good += int((self._scores(number, row_K[row_K >= 0]) >= kth - ROUNDING / 100).sum())
        return good / (k * len(row_QK))

    def _scores(self, number: int, row_F: Rows) -> Vectors:
        return self._exact.scores(self.query_QD[number], row_F)


# recall against speed


@dataclass(slots=True)
class Point:
    """A value of the search parameter: ms of every batch, rows found for all queries, and the recall by k as text."""

    parameter: int
    ms: list[float] = field(default_factory=list)
    found: list[Rows] = field(default_factory=list)
    recall: dict[str, float] = field(default_factory=dict)

    @property
    def wanted(self) -> float:
        return self.recall.get(str(WANTED_K), 0.0)


@dataclass(frozen=True, slots=True)
class RecallCurve:
    """Points by rising parameter, and the ms of the exact searches that were measured in between, by name."""

    points: Sequence[Point]
    exact: dict[str, list[float]]

    def chosen(self) -> Point | None:
        """Return the point of the least parameter with a recall at 5 of at least .95; None if there is none."""
        return next((point for point in self.points if point.wanted >= WANTED), None)

    def best(self) -> float:
        """Return the highest recall at 5."""
        return max((point.wanted for point in self.points), default=0.0)

    def record(self) -> dict[str, Any]:
        """Return the curve in the format of a row; `speedup` over the fastest of the exact searches."""
        fastest = min((spread(ms)["p50"] for ms in self.exact.values()), default=None)
        return {
            "batch": CURVE_BATCH,
            "exact_ms": {name: spread(ms) for name, ms in self.exact.items()},
            "points": [
                {
                    "effort": point.parameter,
                    "recall": point.recall,
                    "ms": spread(point.ms),
                    "speedup": None if fastest is None else fastest / spread(point.ms)["p50"],
                }
                for point in self.points
            ],
        }


def rotation(search: Search, query_QD: Vectors, size: int, k: int) -> Callable[[], Rows]:
    """Return a call that searches for the next `size` of the queries, cyclically."""
    starts = count(0, size)

    def call() -> Rows:
        start = next(starts)
        return search(query_QD[np.arange(start, start + size) % len(query_QD)], k)

    return call


def follow(search: ApproximateSearch, truth: ExactAnswers, peers: Mapping[str, Search], deadline: float) -> RecallCurve:
    """Measure the curve of `search` over the queries of `truth`, with the batches done until `deadline`.

    deadline: on the clock of time.monotonic. All values are timed in turn, in batches of 64, together with the exact
    searches. The first batch goes through rising values and stops at a recall of .99. Recall is counted over all
    batches.
    """
    exact: dict[str, list[float]] = {name: [] for name in peers}
    points: list[Point] = []
    done = 0
    for start in range(0, len(truth.query_QD), CURVE_BATCH):
        batch_QD = truth.query_QD[start : start + CURVE_BATCH]
        if done and (time.monotonic() >= deadline or len(batch_QD) < CURVE_BATCH):
            break
        done += len(batch_QD)
        for name, peer in peers.items():
            exact[name].append(_timed(peer, batch_QD, truth.k)[0])
        if start:
            for point in points:
                _measure(search, point, batch_QD, truth.k)
            continue
        for parameter in _parameters(search, truth.k):
            point = Point(parameter)
            _measure(search, point, batch_QD, truth.k)
            points.append(point)
            recall = truth.recall(point.found[0], min(WANTED_K, truth.k))
            if recall >= ENOUGH or time.monotonic() >= deadline:
                break
    for point in points:
        row_QK = np.concatenate(point.found)
        point.recall = {str(k): truth.recall(row_QK, k) for k in RECALLS if k <= truth.k}
    return RecallCurve(points, exact)


def _parameters(search: ApproximateSearch, k: int) -> list[int]:
    least, most = search.span(k)
    # The largest value, if it is one step away.
    return [value for value in PARAMETERS if least <= value < most] + ([most] if most < 2 * PARAMETERS[-1] else [])


def _measure(search: ApproximateSearch, point: Point, batch_QD: Vectors, k: int) -> None:
    search.value = point.parameter
    ms, row_QK = _timed(ours(search.top), batch_QD, k)
    point.ms.append(ms)
    point.found.append(row_QK)


def settle() -> None:
    """Sleep before a search is timed, so that threads of the previous search do not slow it down. Libraries' threads
    spin for about 25 ms after a search (OpenBLAS's, for 2^26 cycles)."""
    time.sleep(SETTLE_SECONDS)


def _timed(search: Search, batch_QD: Vectors, k: int) -> tuple[float, Rows]:
    settle()
    started = time.perf_counter()
    row_QK = search(batch_QD, k)
    return 1e3 * (time.perf_counter() - started), row_QK


# the command


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalBench:
    """Options. sizes: numbers of synthetic vectors; kinds: as in `index build`, without flat, which is always measured;
    source: real passages, measured first; work: folder that keeps vectors and structures, None for a temporary one;
    server_seconds: 0 for none; budget: seconds."""

    sizes: Sequence[int] = (10_000, 100_000, 1_000_000)
    dim: int = 768
    kinds: Sequence[str] = ("ivf", "hnsw")
    batches: Sequence[int] = (1, 8, 64, 512)
    source: PassageSource | None = None
    work: str | None = None
    server_seconds: float = 10.0
    budget: float = math.inf


@dataclass(slots=True)
class BenchRun:
    """One run of the bench: where rows are written, and its deadline."""

    bench: RetrievalBench
    head: dict[str, Any]
    out: str | Path | None
    deadline: float
    rows: list[dict[str, Any]]
    left_out: dict[str, str]

    def late(self) -> bool:
        return time.monotonic() >= self.deadline

    def keep(self, row: dict[str, Any]) -> None:
        self.rows.append({**self.head, "load": os.getloadavg()[0], **row})
        append_rows(self.out, self.rows[-1])


def run_retrieval_bench(
    bench: RetrievalBench, out: str | Path | None = None, plot: str | Path | None = None
) -> list[dict[str, Any]]:
    """Measure, append the rows to `out` as they are made, draw `plot`, print tables. Return the rows; `failure` tells
    whether an exact search was wrong."""
    check_files(out, plot)
    head = {"bench": "retrieval", **facts(("faiss-cpu", "numpy")), "device": "cpu"}
    run = BenchRun(bench, head, out, time.monotonic() + bench.budget, [], {})
    with TemporaryDirectory() as scratch:
        folder = Path(bench.work or scratch)
        for name, make in _sets(bench, folder, run):
            console.print(f"{name}: making vectors, where they are not there yet")
            made = None if run.late() else make()
            if made is None:
                run.left_out[name] = OUT_OF_TIME
            else:
                measure_set(made, run)
        if bench.server_seconds:
            _measure_server(run, Path(scratch))
    _show(run)
    if run.left_out:
        run.keep({"left_out": run.left_out})
    if plot is not None and any("curve" in row for row in run.rows):
        from thresher.bench.plots import draw_retrieval  # measuring needs no matplotlib

        draw_retrieval(run.rows, WANTED, Path(plot))
        print_files(None, plot)
    return run.rows


def read_source(corpus: str | None, encoder: str | None, passages: int, questions: str | None) -> PassageSource | None:
    """Return the real passages named on the command line, None if there are none. UserError for half of the options."""
    if corpus is None and encoder is None and questions is None:
        return None
    if corpus is None or encoder is None:
        raise UserError("real passages need both --corpus and --encoder; give the other one too, or neither")
    return PassageSource(corpus=corpus, encoder=encoder, passages=passages, questions=questions)


def failure(rows: Sequence[dict[str, Any]]) -> str | None:
    """Return one sentence if the flat index was wrong anywhere; else None."""
    wrong = [f"{row['shape']['passages']} vectors: {row['wrong']['flat']}" for row in rows if row.get("wrong")]
    return f"the flat index is not exact over {wrong[0]}" if wrong else None


def _sets(bench: RetrievalBench, folder: Path, run: BenchRun) -> Iterator[tuple[str, Callable[[], VectorSet | None]]]:
    """Yield (name, a call that makes it) for each set, the real one first."""
    if bench.source is not None:
        yield f"{bench.source.passages:,} real passages", partial(real_set, bench.source, folder, run.deadline)
    for size in sorted(set(bench.sizes)):
        make = partial(synthetic_set, size, bench.dim, folder, run.deadline)
        yield f"{size:,} x {bench.dim} synthetic", make


def measure_set(made: VectorSet, run: BenchRun) -> None:
    """Make every row of one set of vectors."""
    rows, dim = made.vectors.rows, made.vectors.dim
    kinds = [parse_kind(name, rows, dim) for name in (FLAT, *run.bench.kinds)]
    vectors_ND = made.vectors.open()
    exact = ExactRows(vectors_ND, largest_row_norm(vectors_ND))
    truth = ExactAnswers(made.question_QD, exact, min(K, rows))
    peers = exact_peers(vectors_ND)
    found = {name: truth.wrong(search, PROOF) for name, search in ({FLAT: ours(exact.top)} | peers).items()}
    wrong = {name: reason for name, reason in found.items() if reason is not None}
    if FLAT in wrong:
        run.keep({"shape": made.shape, "wrong": wrong})
        return
    common = {"shape": made.shape, "near": made.near().round(4).tolist(), "proved": PROOF, "wrong_peers": wrong}
    if made.made == "real":
        common["near_synthetic"] = synthetic_near(made).round(4).tolist()
    contest = Contest(made, truth, exact, {name: peer for name, peer in peers.items() if name not in wrong}, run)
    for kind in kinds:
        name = f"{kind.name} over {rows:,} x {dim} {made.made}"
        needed = estimate(kind, rows, dim)
        # In addition to the structure and the vectors, a peer holds the scores of a whole batch.
        memory = needed.ram_bytes + 4 * rows * (max(run.bench.batches) + (0 if kind.exact else dim))
        if memory > cpu_memory()[0]:
            run.left_out[name] = f"{show_bytes(memory)} of memory would be needed"
        elif run.late():
            run.left_out[name] = OUT_OF_TIME
        else:
            console.print(name)
            row = measure_kind(kind, contest, name)
            if row is not None:
                run.keep({**common, "kind": kind.name, **row})


@dataclass(frozen=True, slots=True)
class Contest:
    """A set of vectors, its exact answers, and the peers that find them."""

    made: VectorSet
    truth: ExactAnswers
    exact: ExactRows
    peers: Mapping[str, Search]
    run: BenchRun


def measure_kind(kind: Kind, contest: Contest, name: str) -> dict[str, Any] | None:
    """Measure one kind; None if the budget did not suffice for any figure."""
    made, truth, run = contest.made, contest.truth, contest.run
    if kind.exact:
        searches = {"ours": ours(contest.exact.top)}
        return {"recall": {str(k): 1.0 for k in (1, 5, 10)}, "batches": _batches(searches, contest, name)}
    folder = made.folder / kind.name.replace(",", "-")
    structure = built(kind, made.vectors, folder, max(1.0, run.deadline - time.monotonic()))
    if structure is None:
        run.left_out[name] = f"{OUT_OF_TIME}, by building it"
        return None
    index = structure.read(kind, made.vectors)
    scores = RowScores(made.vectors.take)
    for factor in CODE_FACTORS if kind.estimates else WHOLE_FACTORS:
        search = ApproximateSearch(candidates_of(kind, index), scores, made.vectors.rows, 1, factor)
        curve = follow(search, truth, contest.peers, run.deadline)
        if (chosen := curve.chosen()) is not None or run.late():
            break
    row: dict[str, Any] = {
        "build": {
            "seconds": structure.seconds,
            "resumed": structure.resumed,
            "peak_mib": structure.peak_bytes / 2**20,
            "peak_by_vectors": structure.peak_bytes / (4 * made.vectors.rows * made.vectors.dim),
            "disk_mib": structure.disk_bytes / 2**20,
        },
        "effort": search.candidates.parameter,
        "candidates": factor,
        "curve": curve.record(),
    }
    if chosen is None:
        run.left_out[name] = f"no search parameter reached the required recall; the best was {curve.best():.3f}"
        return row
    search.value = chosen.parameter
    row |= {"chosen": chosen.parameter, "recall": chosen.recall}
    alone = bare(index, search.candidates.parameter, chosen.parameter)
    row["batches"] = _batches({"ours": ours(search.top), "alone": alone}, contest, name)
    return row


def _batches(own: Mapping[str, Search], contest: Contest, name: str) -> dict[str, Any]:
    """Return {batch: figures} of `own` (ours, and FAISS's structure alone) and of the peers, timed in turn."""
    run, question_QD = contest.run, contest.made.question_QD
    searches = {**own, **contest.peers}
    found: dict[str, Any] = {}
    before = 0.0
    for size in sorted(batch for batch in set(run.bench.batches) if batch <= len(question_QD)):
        if time.monotonic() + 8 * before * FEWEST >= run.deadline:
            run.left_out[f"{name}, batches of {size}"] = OUT_OF_TIME
            continue
        calls = [rotation(each, question_QD, size, contest.truth.k) for each in searches.values()]
        before = sum(1e-3 * times[0] + SETTLE_SECONDS for times in in_turn(calls, 1, CPU, settle))
        rounds = min(max(int(CELL_SECONDS / before), FEWEST), MOST)
        times = dict(zip(searches, in_turn(calls, rounds, CPU, settle), strict=True))
        by_ours = {peer: ratios(times[peer], times["ours"]) for peer in times if peer != "ours"}
        figures: dict[str, Any] = {
            who: {"ms": spread(ms), "queries_per_s": 1e3 * size / spread(ms)["p50"]} for who, ms in times.items()
        }
        medians = {peer: figures[peer]["ms"]["p50"] for peer in contest.peers}
        fastest = min(medians, key=medians.__getitem__, default="")
        found[str(size)] = {
            "rounds": rounds,
            "ours": figures.pop("ours"),
            "alone": figures.pop("alone", None),
            "peers": figures,
            "ratio": by_ours,
            "speedup": {"over": fastest, **by_ours[fastest]} if fastest in by_ours else None,
        }
    return found


def _measure_server(run: BenchRun, scratch: Path) -> None:
    """Make one row for different queries and one for repeated ones."""
    late = time.monotonic() + 3 * run.bench.server_seconds >= run.deadline
    if late or find_spec("aiohttp") is None:
        missing = "aiohttp is not installed; the extra [serve] installs it"
        run.left_out["the server"] = OUT_OF_TIME if late else missing
        return
    console.print("a server under 64 connections")
    corpus = None if run.bench.source is None else run.bench.source.corpus
    for figures in measure_service(corpus, scratch / "service", run.bench.server_seconds):
        run.keep({"server": figures})


def _show(run: BenchRun) -> None:
    """Print one table of kinds, one line for each server row, and the list of omissions."""
    lines = [_line(row) for row in run.rows if "batches" in row]
    if lines:
        table(
            f"Search, batches of {CURVE_BATCH}: medians; speedup over the fastest of torch, numpy and FAISS, all exact",
            ("vectors", "kind", "parameter", "recall@5", "build s", "RAM / vectors", "ms", "queries/s", "speedup"),
            lines,
        )
    for row in run.rows:
        if "server" in row:
            said = "server, {queries} queries, {connections} connections: {requests_per_s:,.0f} answers a second, "
            said += "p50 {p50_ms:.0f} ms, p99 {p99_ms:.0f} ms, " if row["server"]["requests"] else ""
            console.print((said + "{failed} failed").format(**row["server"]))
    for name, reason in run.left_out.items():
        console.print(f"left out: {name}: {reason}")


def _line(row: dict[str, Any]) -> tuple[Any, ...]:
    shape, build = row["shape"], row.get("build", {})
    cell = row["batches"].get(str(CURVE_BATCH))
    return (
        f"{shape['passages']:,} x {shape['dim']} {shape['vectors']}",
        row["kind"],
        row.get("chosen"),
        f"{row['recall']['5']:.3f}",
        build.get("seconds"),
        build.get("peak_by_vectors"),
        cell and cell["ours"]["ms"]["p50"],
        cell and cell["ours"]["queries_per_s"],
        cell and cell["speedup"] and f"{cell['speedup']['p50']:.2f}",
    )
