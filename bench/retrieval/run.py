"""`thresher bench retrieval`: the engine's indexes beside torch, numpy and FAISS, over 10^4 to 10^6 vectors and more.

For every set of vectors (sets.py; the smallest can be real passages): prove that the flat index and all peers
find the same. Then for every kind: build it in a process of its own (build.py); follow its recall as the
search parameter (nprobe, efSearch) rises, the exact searches taking turns with it; choose the least value whose recall
at 5 is .95; and let that take turns with all peers in batches from 1 to 512. Last, a server under 64 connections.

    recall      at k, against the exact answer, over 512 questions
    ratio       a peer's time by ours, of neighbouring calls
    speedup     the ratio of the faster of torch and FAISS, which search exactly

What is timed is the engine's own search with all it does, the second scoring of rows in float64 included; encoding a
question is not in it. Rows are written as they are made. The clock is looked at before each step and the build is
stopped by it; what a budget cuts off is reported. If a flat index is not exact, the command ends with status 1.

Deliberately absent: kinds tuned by hand, and recall of the peers, which are exact.

Axes: N vectors, Q queries, D dimension.
"""

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from thresher.bench.machine import facts
from thresher.bench.measure import in_turn, spread
from thresher.bench.retrieval.build import built
from thresher.bench.retrieval.curve import CURVE_BATCH, SETTLE_SECONDS, Rotation, follow, settle
from thresher.bench.retrieval.peers import ExactAnswers, Search, Searcher, bare, exact_peers, ours
from thresher.bench.retrieval.service import measure_service, unavailable
from thresher.bench.retrieval.sets import PassageSource, VectorSet, real_set, synthetic_near, synthetic_set
from thresher.bench.rows import append_rows, check_files
from thresher.common.console import console, table
from thresher.common.errors import UserError
from thresher.common.files import show_bytes
from thresher.common.machine import cpu_memory
from thresher.retrieval.building.build import CODE_FACTORS, WHOLE_FACTORS
from thresher.retrieval.encoders import Vectors
from thresher.retrieval.indexes.approximate import ApproximateSearch, candidates_of
from thresher.retrieval.indexes.exact import ExactRows, RowScores, largest_row_norm
from thresher.retrieval.indexes.kinds import Kind, estimate, parse_kind

K = 10
PROOF = 64
CELL_SECONDS = 8.0  # of timed rounds, within FEWEST and MOST
FEWEST, MOST = 3, 50
OUT_OF_TIME = "the budget was used up"
FLAT = "flat"
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalBench:
    """What to measure. sizes: numbers of synthetic vectors; kinds: as `index build` reads them, without flat, which is
    always measured; source: the real passages that come first; work: folder that keeps vectors and structures, a
    temporary one for None; server_seconds: 0 for none; budget: seconds."""

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
    """One run of the bench: where rows go, and until when."""

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
    """Measure, append the rows to `out` as they are made, draw `plot`, print tables. Returns the rows; `failure` says
    whether an exact search was wrong."""
    check_files(out, plot)
    head = {"bench": "retrieval", **facts(("faiss-cpu", "numpy"))}
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
        from thresher.bench.retrieval.plot import draw  # measuring needs no matplotlib

        draw(run.rows, Path(plot))
        console.print(f"drawn in {plot}")
    return run.rows


def read_source(corpus: str | None, encoder: str | None, passages: int, questions: str | None) -> PassageSource | None:
    """The real passages that the command line names; None where it names none. UserError for half of it."""
    if corpus is None and encoder is None and questions is None:
        return None
    if corpus is None or encoder is None:
        raise UserError("real passages take --corpus and --encoder both; give the other one too, or neither")
    return PassageSource(corpus=corpus, encoder=encoder, passages=passages, questions=questions)


def failure(rows: Sequence[dict[str, Any]]) -> str | None:
    """One sentence if the flat index was wrong anywhere; None if all is well."""
    wrong = [f"{row['shape']['passages']} vectors: {row['wrong']['flat']}" for row in rows if row.get("wrong")]
    return f"the flat index is not exact over {wrong[0]}" if wrong else None


def _sets(bench: RetrievalBench, folder: Path, run: BenchRun) -> list[tuple[str, Callable[[], VectorSet | None]]]:
    """(name, how to make it), the real one first."""
    found: list[tuple[str, Callable[[], VectorSet | None]]] = []
    if bench.source is not None:
        source = bench.source
        found.append((f"{source.passages:,} real passages", lambda: real_set(source, folder, run.deadline)))
    for size in sorted(set(bench.sizes)):
        name = f"{size:,} x {bench.dim} synthetic"
        found.append((name, partial(synthetic_set, size, bench.dim, folder, run.deadline)))
    return found


def measure_set(made: VectorSet, run: BenchRun) -> None:
    """Every row of one set of vectors."""
    rows, dim = made.vectors.rows, made.vectors.dim
    kinds = [parse_kind(name, rows, dim) for name in (FLAT, *run.bench.kinds)]
    vectors_ND = made.vectors.open()
    exact = ExactRows(vectors_ND, largest_row_norm(vectors_ND))
    truth = ExactAnswers(made.question_QD, exact, min(K, rows))
    peers = exact_peers(vectors_ND)
    wrong = {
        peer.name: reason
        for peer in (Searcher(FLAT, "", ours(exact.top)), *peers)
        if (reason := truth.wrong(peer.search, PROOF)) is not None
    }
    if FLAT in wrong:
        run.keep({"shape": made.shape, "wrong": wrong})
        return
    common = {"shape": made.shape, "near": made.near().round(4).tolist(), "proved": PROOF, "wrong_peers": wrong}
    if made.made == "real":
        common["near_synthetic"] = synthetic_near(made).round(4).tolist()
    peers = [peer for peer in peers if peer.name not in wrong]
    for kind in kinds:
        name = f"{kind.name} over {rows:,} x {dim} {made.made}"
        needed = estimate(kind, rows, dim)
        # Beside the structure and the vectors themselves, a peer holds the scores of a whole batch.
        memory = needed.ram_bytes + 4 * rows * (max(run.bench.batches) + (0 if kind.exact else dim))
        if memory > cpu_memory()[0]:
            run.left_out[name] = f"{show_bytes(memory)} of memory would be needed"
        elif run.late():
            run.left_out[name] = OUT_OF_TIME
        else:
            console.print(name)
            row = measure_kind(kind, made, truth, exact, peers, run, name)
            if row is not None:
                run.keep({**common, "kind": kind.name, **row})


def measure_kind(
    kind: Kind,
    made: VectorSet,
    truth: ExactAnswers,
    exact: ExactRows,
    peers: Sequence[Searcher],
    run: BenchRun,
    name: str,
) -> dict[str, Any] | None:
    """The figures of one kind; None where the budget did not suffice for any."""
    if kind.exact:
        found = {"recall": {str(k): 1.0 for k in (1, 5, 10)}}
        return {**found, "batches": _batches(ours(exact.top), None, made.question_QD, truth.k, peers, run, name)}
    folder = made.folder / kind.name.replace(",", "-")
    structure = built(kind, made.vectors, folder, max(1.0, run.deadline - time.monotonic()))
    if structure is None:
        run.left_out[name] = f"{OUT_OF_TIME}, by building it"
        return None
    index = structure.read(kind, made.vectors)
    scores = RowScores(made.vectors.take)
    for factor in CODE_FACTORS if kind.estimates else WHOLE_FACTORS:
        search = ApproximateSearch(candidates_of(kind, index), scores, made.vectors.rows, 1, factor)
        curve = follow(search, truth, peers, run.deadline)
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
        run.left_out[name] = f"no search parameter reached the recall wanted, the best being {curve.best():.3f}"
        return row
    search.value = chosen.parameter
    row |= {"chosen": chosen.parameter, "recall": chosen.recall}
    structure_only = bare(index, search.candidates.parameter, chosen.parameter)
    row["batches"] = _batches(ours(search.top), structure_only, made.question_QD, truth.k, peers, run, name)
    return row


def _batches(
    search: Search,
    structure_only: Search | None,
    question_QD: Vectors,
    k: int,
    peers: Sequence[Searcher],
    run: BenchRun,
    name: str,
) -> dict[str, Any]:
    """{batch: figures}: ours, FAISS's structure alone (`structure_only`) and the peers, taking turns."""
    found: dict[str, Any] = {}
    before = 0.0
    for size in sorted(batch for batch in set(run.bench.batches) if batch <= len(question_QD)):
        if time.monotonic() + 8 * before * FEWEST >= run.deadline:
            run.left_out[f"{name}, batches of {size}"] = OUT_OF_TIME
            continue
        searches = (
            {"ours": search}
            | ({"alone": structure_only} if structure_only else {})
            | {peer.name: peer.search for peer in peers}
        )
        calls = [Rotation(each, question_QD, size, k) for each in searches.values()]
        before = sum(1e-3 * times[0] + SETTLE_SECONDS for times in in_turn(calls, 1, CPU, settle))
        rounds = min(max(int(CELL_SECONDS / before), FEWEST), MOST)
        times = dict(zip(searches, in_turn(calls, rounds, CPU, settle), strict=True))
        ratios = {
            peer: spread([theirs / mine for theirs, mine in zip(times[peer], times["ours"], strict=True)])
            for peer in times
            if peer != "ours"
        }
        figures: dict[str, Any] = {
            who: {"ms": spread(ms), "queries_per_s": 1e3 * size / spread(ms)["p50"]} for who, ms in times.items()
        }
        medians = {peer: figures[peer]["ms"]["p50"] for peer in ("torch", "FAISS") if peer in figures}
        fastest = min(medians, key=medians.__getitem__, default="")
        found[str(size)] = {
            "rounds": rounds,
            "ours": figures.pop("ours"),
            "alone": figures.pop("alone", None),
            "peers": figures,
            "ratio": ratios,
            "speedup": {"over": fastest, **ratios[fastest]} if fastest in ratios else None,
        }
    return found


def _measure_server(run: BenchRun, scratch: Path) -> None:
    """One row for different queries, one for repeated ones."""
    if reason := unavailable():
        run.left_out["the server"] = reason
        return
    if time.monotonic() + 3 * run.bench.server_seconds >= run.deadline:
        run.left_out["the server"] = OUT_OF_TIME
        return
    console.print("a server under 64 connections")
    corpus = None if run.bench.source is None else run.bench.source.corpus
    for figures in measure_service(corpus, scratch / "service", run.bench.server_seconds):
        run.keep({"server": figures})


def _show(run: BenchRun) -> None:
    """One table of kinds, one line for each server row, and what was left out."""
    lines = [_line(row) for row in run.rows if "batches" in row]
    if lines:
        table(
            f"Search, batches of {CURVE_BATCH}: medians; speedup over the faster of torch and FAISS, both exact",
            ("vectors", "kind", "parameter", "recall@5", "build s", "RAM / vectors", "ms", "queries/s", "speedup"),
            lines,
        )
    for row in run.rows:
        if "server" in row:
            console.print(
                "server, {queries} queries, {connections} connections: {requests_per_s:,.0f} answers a second, p50"
                " {p50_ms:.0f} ms, p99 {p99_ms:.0f} ms, {failed} failed".format(**row["server"])
            )
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
        cell and f"{cell['speedup']['p50']:.2f}",
    )
