"""Test the retrieval bench: it detects an inexact search, its curves are correct, and it names what it leaves out."""

import json
import math
from pathlib import Path
from typing import Any

import encoder_folders
import numpy as np
import pytest

from thresher.bench import plots, retrieval_server
from thresher.bench import retrieval as bench_module
from thresher.bench.plots import draw_retrieval
from thresher.bench.retrieval import (
    OUT_OF_TIME,
    ExactAnswers,
    RecallCurve,
    RetrievalBench,
    bare,
    exact_peers,
    failure,
    follow,
    ours,
    read_source,
    rotation,
    run_retrieval_bench,
)
from thresher.bench.retrieval_sets import (
    CHUNK,
    RECORD,
    Law,
    PassageSource,
    SyntheticVectors,
    VectorSet,
    built,
    neighbours,
    real_set,
    synthetic_set,
)
from thresher.cli.main import run
from thresher.common.errors import UserError
from thresher.retrieval.encoders import Vectors
from thresher.retrieval.indexes.approximate import ApproximateSearch, candidates_of
from thresher.retrieval.indexes.exact import ExactRows, Rows, RowScores
from thresher.retrieval.indexes.faiss_library import faiss
from thresher.retrieval.indexes.kinds import parse_kind
from thresher.retrieval.indexes.structures import grow

N, D = 1500, 24
WIDTH = 96  # of synthetic vectors


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the fewest rounds, because these tests do not check the figures."""
    monkeypatch.setattr(bench_module, "CELL_SECONDS", 0.0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> VectorSet:
    found = synthetic_set(N, D, tmp_path_factory.mktemp("work"), math.inf)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def truth(made: VectorSet) -> ExactAnswers:
    return ExactAnswers(made.question_QD, ExactRows(made.vectors.open()), 10)


def test_peers_are_exact_and_who_is_not_is_found_out(made: VectorSet, truth: ExactAnswers) -> None:
    peers = exact_peers(made.vectors.open())
    assert list(peers) == ["torch", "numpy", "FAISS"]
    for search in peers.values():
        assert truth.wrong(search, 64) is None
        assert (search(made.question_QD[:5], 3) == search(made.question_QD, 10)[:5, :3]).all()
    exact = peers["torch"]

    def next_best(query_QD: Vectors, k: int) -> Rows:
        return exact(query_QD, k + 1)[:, 1:]

    def twice(query_QD: Vectors, k: int) -> Rows:
        return exact(query_QD, k)[:, [0, *range(k - 1)]]

    def too_few(query_QD: Vectors, k: int) -> Rows:
        return np.where(np.arange(k) < k - 1, exact(query_QD, k), -1)

    assert "a score is off by" in str(truth.wrong(next_best, 8))
    assert "9 different rows instead of 10" in str(truth.wrong(twice, 8))
    assert "different rows" in str(truth.wrong(too_few, 8))


def test_recall_counts_what_was_found(made: VectorSet, truth: ExactAnswers) -> None:
    row_QK = exact_peers(made.vectors.open())["torch"](made.question_QD, 11)
    assert truth.recall(row_QK[:, :10], 10) == truth.recall(row_QK[:, ::-1][:, 1:], 10) == 1
    assert truth.recall(row_QK[:, 1:], 1) == 0
    assert truth.recall(row_QK[:, 1:], 5) == pytest.approx(0.8)
    assert truth.recall(np.where(np.arange(11) < 5, row_QK, -1), 10) == pytest.approx(0.5)


@pytest.mark.parametrize("name", ["IVF16,Flat", "HNSW8", "PCA18,HNSW8", "PCA18,HNSW8_SQ8", "PCA18,IVF16,Flat"])
@pytest.mark.slow
def test_a_curve_rises_to_what_is_wanted(made: VectorSet, truth: ExactAnswers, tmp_path: Path, name: str) -> None:
    kind = parse_kind(name, N, D)
    index = grow(kind, made.vectors, tmp_path, lambda *_: None)
    search = ApproximateSearch(
        candidates_of(kind, index), RowScores(made.vectors.take), N, 1, 4 if "PCA" in name else 1
    )
    curve = follow(search, truth, {"torch": exact_peers(made.vectors.open())["torch"]}, math.inf)
    chosen = curve.chosen()
    assert chosen is not None and chosen.recall["5"] >= 0.95 and all(len(point.ms) == 8 for point in curve.points)
    recalls = [point.recall["5"] for point in curve.points]
    assert recalls == sorted(recalls) and all(recall < 0.95 for recall in recalls[: curve.points.index(chosen)])
    search.value = chosen.parameter
    assert truth.recall(ours(search.top)(made.question_QD, 10), 5) == chosen.recall["5"]
    low = RecallCurve(curve.points[:1], {})
    assert low.chosen() is (chosen if chosen is curve.points[0] else None) and low.best() == recalls[0]
    recorded = curve.record()
    assert [point["effort"] for point in recorded["points"]] == [point.parameter for point in curve.points]
    assert set(recorded["exact_ms"]) == {"torch"}
    structure_only = bare(index, search.candidates.parameter, search.candidates.most)
    if "PCA" not in name:
        assert truth.recall(structure_only(made.question_QD, 10), 10) > 0.99


def test_a_rotation_asks_for_every_query_in_turn() -> None:
    asked: list[float] = []

    def search(query_QD: Vectors, k: int) -> Rows:
        asked.extend(query_QD[:, 0].tolist())
        return np.zeros((len(query_QD), k), np.int64)

    ask = rotation(search, np.arange(5, dtype=np.float32)[:, None], 2, 1)
    for _ in range(3):
        ask()
    assert asked == [0, 1, 2, 3, 4, 0]


def test_what_is_built_is_built_once_and_what_is_cut_off_is_gone_on_with(made: VectorSet, tmp_path: Path) -> None:
    kind = parse_kind("IVF16,Flat", N, D)
    folder = tmp_path / "one"
    assert built(kind, made.vectors, folder, 1e-3) is None
    assert not (folder / RECORD).exists()
    (folder / "begun").touch()
    first = built(kind, made.vectors, folder, 60)
    assert first is not None and first.resumed and first.peak_bytes > 4 * N * D
    assert first.disk_bytes > 4 * N * D and first.read(kind, made.vectors).ntotal == N
    assert built(kind, made.vectors, folder, 1e-3) == first
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "index.faiss").write_bytes(b"nonsense")
    with pytest.raises(RuntimeError, match=r"IVF16,Flat over 1500 vectors was not built: .*build the index again"):
        built(kind, made.vectors, tmp_path / "two", 60)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


@pytest.mark.slow
def test_the_command_measures_writes_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot, work = tmp_path / "rows.jsonl", tmp_path / "new" / "curve.png", tmp_path / "work"
    command = ["bench", "retrieval", "--sizes", "600", "--dim", "16", "--kinds", "hnsw", "--batches", "1", "64"]
    assert run([*command, "--work", str(work), "--server", "0", "--out", str(out), "--plot", str(plot)]) == 0
    flat, graph = rows_of(out)
    assert flat["kind"] == "flat" and flat["recall"]["5"] == 1 and flat["proved"] == 64
    assert graph["shape"] == {"vectors": "synthetic", "passages": 600, "dim": 16, "questions": 512}
    assert graph["chosen"] in [point["effort"] for point in graph["curve"]["points"]] and graph["recall"]["5"] >= 0.95
    assert {"commit", "machine", "torch", "faiss-cpu", "numpy", "load", "at"} <= graph.keys()
    cell = graph["batches"]["64"]
    assert set(cell["peers"]) == {"torch", "numpy", "FAISS"} and set(cell["ratio"]) == {*cell["peers"], "alone"}
    assert cell["ours"]["queries_per_s"] == pytest.approx(64e3 / cell["ours"]["ms"]["p50"])
    assert cell["speedup"]["over"] in ("torch", "FAISS") and graph["build"]["peak_by_vectors"] > 1
    assert plot.read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert "HNSW32" in said and "left out" not in said
    assert (work / "synthetic-600x16" / "HNSW32" / RECORD).is_file()


def test_a_budget_leaves_out_and_says_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = run_retrieval_bench(RetrievalBench(sizes=(300, 400), dim=8, budget=0.0), tmp_path / "rows.jsonl")
    assert rows_of(tmp_path / "rows.jsonl") == rows and failure(rows) is None
    assert rows[0]["left_out"] == {
        "300 x 8 synthetic": OUT_OF_TIME,
        "400 x 8 synthetic": OUT_OF_TIME,
        "the server": OUT_OF_TIME,
    }
    assert "left out: 300 x 8 synthetic" in capsys.readouterr().out


def test_a_flat_index_that_is_wrong_ends_with_status_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = ExactRows.top

    def second_best(self: ExactRows, query_QD: Vectors, k: int) -> Any:
        return right(self, query_QD, k) if len(query_QD) > 64 else [hits[1:] for hits in right(self, query_QD, k + 1)]

    monkeypatch.setattr(ExactRows, "top", second_best)
    assert run(["bench", "retrieval", "--sizes", "300", "--dim", "8", "--server", "0", "--budget", "60"]) == 1
    wrong = "thresher: the flat index is not exact over 300 vectors: query 0: a score is off by"
    assert capsys.readouterr().err.startswith(wrong)


@pytest.mark.slow
@pytest.mark.parametrize("wrong", [["liar"], ["torch", "FAISS"]], ids=str)
def test_a_wrong_peer_is_named_and_left_out(
    wrong: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def liar(query_QD: Vectors, k: int) -> Rows:
        return np.tile(np.arange(k), (len(query_QD), 1))

    liars = dict.fromkeys(wrong, liar)
    monkeypatch.setattr(bench_module, "exact_peers", lambda vectors_ND: exact_peers(vectors_ND) | liars)
    command = ["bench", "retrieval", "--sizes", "300", "--dim", "8", "--kinds", "hnsw", "--batches", "64"]
    assert run([*command, "--server", "0", "--out", str(tmp_path / "rows.jsonl")]) == 0
    for row in rows_of(tmp_path / "rows.jsonl"):
        assert set(row["wrong_peers"]) == {*wrong} and "a score is off by" in row["wrong_peers"][wrong[0]]
        assert set(row["batches"]["64"]["peers"]) == {"torch", "numpy", "FAISS"} - {*wrong}
    assert "Search, batches of 64: medians" in capsys.readouterr().out


def test_real_passages_are_drawn_encoded_once_and_bound_to_their_source(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.jsonl"
    texts = [f"the river of town {number} runs north" for number in range(40)]
    corpus.write_text("".join(json.dumps({"title": text, "text": text}) + "\n" for text in texts), "utf-8")
    model = encoder_folders.save_model(tmp_path / "model")
    (model / "1_Pooling").mkdir()
    (model / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}', "utf-8")
    parts = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    modules = [{"path": path, "type": f"sentence_transformers.models.{name}"} for name, path in parts]
    (model / "modules.json").write_text(json.dumps(modules), "utf-8")
    source = PassageSource(corpus=str(corpus), encoder=str(model), passages=20)
    assert real_set(source, tmp_path / "work", 0.0) is None
    first = real_set(source, tmp_path / "work", math.inf)
    assert first is not None and first.vectors.rows == 20 and len(first.question_QD) == 40
    assert np.allclose(np.linalg.norm(first.vectors.open(), axis=1), 1, atol=1e-5)
    before = first.vectors.path.stat().st_mtime_ns
    assert real_set(source, tmp_path / "work", 0.0) is not None and first.vectors.path.stat().st_mtime_ns == before
    corpus.write_text("".join(json.dumps({"title": text, "text": text + "."}) + "\n" for text in texts), "utf-8")
    with pytest.raises(UserError, match="holds vectors of another corpus"):
        real_set(source, tmp_path / "work", math.inf)


def test_half_a_source_is_refused() -> None:
    assert read_source(None, None, 5, None) is None
    assert read_source("corpus", "model", 5, None) == PassageSource(corpus="corpus", encoder="model", passages=5)
    for corpus, encoder, questions in ((None, "model", None), ("corpus", None, None), (None, None, "questions")):
        with pytest.raises(UserError, match="both --corpus and --encoder"):
            read_source(corpus, encoder, 5, questions)


def test_the_picture_holds_several_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = {"machine": "a machine", "threads": 2, "torch": "2", "faiss-cpu": "1", "commit": "abc", "load": 0.0}

    def row(passages: int, kind: str, recalls: list[float], chosen: int | None) -> dict[str, Any]:
        points = [
            {"effort": place, "recall": {"5": recall}, "ms": {"p50": float(place)}, "speedup": 9.0}
            for place, recall in enumerate(recalls, 1)
        ]
        curve = {"batch": 64, "exact_ms": {"torch": {"p50": 30.0}}, "points": points}
        shape = {"vectors": "synthetic", "passages": passages, "dim": 8}
        return {**head, "shape": shape, "kind": kind, "effort": "nprobe", "curve": curve, "chosen": chosen}

    rows = [row(10, "IVF4,Flat", [0.3, 0.96, 1.0], 2), row(20, "IVF8,Flat", [0.5], None), row(20, "HNSW8", [1.0], 1)]
    notes: list[str] = []
    monkeypatch.setattr(plots, "_note", lambda axes, text, *given, **style: notes.append(text))
    draw_retrieval([*rows, {"server": {}}], 0.95, tmp_path / "picture.png")
    assert "nprobe 2\n15× exact" in notes, "30 ms by 2"
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_a_server_without_an_answer_has_no_latency(monkeypatch: pytest.MonkeyPatch) -> None:
    async def failing(reader: Any, writer: Any, requests: Any, tally: Any) -> None:
        tally.failed += 1

    async def connected(host: Any, port: Any) -> tuple[None, None]:
        return None, None

    monkeypatch.setattr(retrieval_server, "_ask", failing)
    monkeypatch.setattr(retrieval_server.asyncio, "open_connection", connected)
    figures = retrieval_server.measure_server("http://localhost:1", ["q"], connections=2, seconds=0.1)
    assert (figures["requests"], figures["failed"]) == (0, 2)
    assert figures["p50_ms"] is figures["p99_ms"] is figures["largest_ms"] is None


@pytest.mark.slow
def test_the_server_is_started_asked_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval_server, "DIFFERENT", 200)
    different, repeated = retrieval_server.measure_service(None, tmp_path / "made up", 0.2, passages=30)
    for figures, name in ((different, "different"), (repeated, "repeated")):
        assert figures["queries"] == name and figures["passages"] == 30 and figures["connections"] == 64
        assert figures["requests"] > 0 and figures["failed"] == 0


# synthetic vectors: they do not depend on other draws, and their neighbours are as far away as those of real ones


def passages(rows: int, seed: int = 0) -> np.ndarray:
    return np.concatenate(list(SyntheticVectors(WIDTH, seed=seed).passages(rows)))


def test_a_passage_is_the_same_whatever_else_is_drawn() -> None:
    many, few = passages(CHUNK + 50), passages(20)
    assert many.shape == (CHUNK + 50, WIDTH) and many.dtype == np.float32
    assert np.array_equal(many[:20], few) and not np.array_equal(few, passages(20, seed=1))
    np.testing.assert_allclose(np.linalg.norm(many, axis=1), 1, atol=1e-5)


def test_a_question_is_about_its_passage_and_is_not_a_copy() -> None:
    world, rows = SyntheticVectors(WIDTH), CHUNK + 50
    question_QD, gold_Q = world.questions(100, rows)
    again_QD, again_Q = SyntheticVectors(WIDTH).questions(100, rows)
    assert np.array_equal(question_QD, again_QD) and np.array_equal(gold_Q, again_Q)
    assert question_QD.shape == (100, WIDTH) and gold_Q.max() < rows and gold_Q.max() >= CHUNK // 2
    vectors_ND = passages(rows)
    own_Q = (question_QD * vectors_ND[gold_Q]).sum(1)
    others_Q = (question_QD @ vectors_ND.T).mean(1)
    assert (own_Q > others_Q).mean() > 0.95 and np.median(own_Q) < 0.9
    assert np.median(own_Q) > np.median(others_Q) + 0.3


def test_the_spectrum_is_the_laws() -> None:
    variance_D = Law().deviations(WIDTH) ** 2
    assert variance_D.sum() == pytest.approx(1, abs=1e-5) and (np.diff(variance_D) < 0).all()
    # Words and noise have the same spectrum, and so has their sum; the tolerance allows for frequent words.
    measured_D = passages(2 * CHUNK).var(axis=0)
    assert np.abs(measured_D[8:] / measured_D[8:].sum() - variance_D[8:] / variance_D[8:].sum()).sum() < 0.1


def test_neighbours_are_where_those_of_real_embeddings_are() -> None:
    # The medians of all-MiniLM-L6-v2 over 2,000 Wikipedia passages, of the neighbours of rank 1, 5, 10 and 100.
    vectors_ND = np.concatenate(list(SyntheticVectors(384).passages(2000)))
    score_QF, _ = faiss.knn(vectors_ND[:300], vectors_ND, 101, metric=faiss.METRIC_INNER_PRODUCT)
    np.testing.assert_allclose(
        np.median(score_QF[:, [1, 5, 10, 100]], axis=0), [0.430, 0.346, 0.314, 0.197], atol=0.035
    )
    # With more vectors neighbours are nearer; otherwise an index over many would be measured on another task.
    few = neighbours(vectors_ND[:50], vectors_ND[50:550], (5,))
    assert few[0, 1] < neighbours(vectors_ND[:50], vectors_ND[50:], (5,))[0, 1] - 0.03
