"""The plan: its laws by hand, its bytes, what it refuses; a calibration measures something and leaves nothing."""

import json
import math
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from thresher.cli import main as cli
from thresher.common.errors import UserError
from thresher.common.machine import cpu_memory
from thresher.retrieval.building import plan as plan_module
from thresher.retrieval.building.plan import (
    COLUMNS,
    Calibration,
    CodeRates,
    GraphRates,
    Growth,
    Speed,
    WordRates,
    advice,
    best_time,
    disk_rate,
    encode_rate,
    made_up,
    measure_words,
    plan,
    show_seconds,
    synthetic_vectors,
)
from thresher.retrieval.indexes.bm25 import build_bm25
from thresher.retrieval.indexes.kinds import PROCESS_BYTES, estimate, usual_kinds

N, D = 21_015_324, 768
NS = 1e-9


class Given(Calibration):
    """Round figures in the place of measured ones; `asked` says which of them a plan was made of."""

    def __init__(self) -> None:
        self.asked: set[str] = set()

    def at(self, dim: int) -> "Given":
        self.asked.add(f"at {dim}")
        return self

    def flat(self, half: bool) -> Speed:
        self.asked.add("flat16" if half else "flat")
        return Speed(one=(300 if half else 200) * NS, batch=100 * NS)

    def multiply(self) -> float:
        self.asked.add("multiply")
        return 1e11

    def lists(self, codes: str) -> Speed:
        self.asked.add(codes)
        return Speed(one=250 * NS, batch=125 * NS)

    def product(self, pq: int, opq: bool, trained: int) -> CodeRates:
        self.asked.add(f"pq{pq}")
        return CodeRates(train=1e-4, code=1e-5, scan=Speed(one=40 * NS, batch=20 * NS), rotation=2.0 if opq else 0.0)

    def graph(self, factory: str, construction: int, search: int) -> GraphRates:
        self.asked.add(factory)
        return GraphRates(vectors=2**14, add=4e-4, search=Speed(one=1e-3, batch=5e-4))

    def words(self) -> WordRates:
        self.asked.add("words")
        return WordRates(
            build=1e-4,
            build_bytes=Growth(passage=3000, root=1024),
            disk_bytes=Growth(passage=500, root=0),
            search=50 * NS,
        )


def one(kind: str, passages: int = 2**20, memory: int = 10**12, disk: float = 1e9):
    calibration = Given()
    (row,) = plan(passages, D, [kind], memory, calibration, disk)
    return row, calibration.asked


def measured(passages: int, batch: float, searches: int) -> float:
    """Seconds of the measurement at the end: 200 exact queries, and the searches that set nprobe or efSearch."""
    return 200 * (passages * 100 * NS + searches * batch)


def test_flat_looks_at_every_vector():
    row, asked = one("flat")
    assert asked == {"flat"}
    assert row.one_seconds == pytest.approx(2**20 * 200 * NS)
    assert row.batch_seconds == pytest.approx(64 * 2**20 * 100 * NS)
    assert row.build_seconds == pytest.approx(4 * D * 2**20 / 1e9)  # written once
    assert (row.effort, row.recall) == ("-", "1")


def test_flat16_halves_the_bytes_and_is_measured():
    row, _ = one("flat16")
    assert row.disk_bytes * 2 == one("flat")[0].disk_bytes == 4 * D * 2**20
    assert row.one_seconds == pytest.approx(2**20 * 300 * NS)
    assert row.build_seconds == pytest.approx(2 * D * 2**20 / 1e9 + measured(2**20, 2**20 * 100 * NS, 3))


def test_a_graph_grows_with_the_logarithm():
    row, asked = one("HNSW32")
    assert asked == {"HNSW32", "flat"}
    # From 2^14 to 2^20: a search takes 20/14 of its time, an addition 1 + 6/4 of its.
    assert row.one_seconds == pytest.approx(1e-3 * 20 / 14)
    assert row.batch_seconds == pytest.approx(64 * 5e-4 * 20 / 14)
    added = 2**20 * 4e-4 * 2.5
    assert row.build_seconds == pytest.approx(added + row.disk_bytes / 1e9 + measured(2**20, row.batch_seconds / 64, 6))
    # A graph smaller than the one that was measured is not said to cost nothing, nor less than one addition each.
    small, _ = one("HNSW32", 1000)
    assert small.build_seconds > 1000 * 4e-4


def test_lists_are_trained_filled_and_looked_through():
    row, asked = one("IVF4096,Flat")
    assert asked == {"flat", "multiply", "Flat"}
    assert row.effort == "128"
    assert row.one_seconds == pytest.approx(4096 * 200 * NS + 2**20 / 32 * 250 * NS)
    assert row.batch_seconds == pytest.approx(64 * (4096 * 100 * NS + 2**20 / 32 * 125 * NS))
    products = (10 * 50 * 4096 + 2**20) * 2 * 4096 * D / 1e11
    assert row.build_seconds == pytest.approx(
        products + row.disk_bytes / 1e9 + measured(2**20, row.batch_seconds / 64, 6)
    )
    assert one("IVF4096,SQfp16")[1] == {"flat", "multiply", "SQfp16"}


def test_codes_are_trained_and_made():
    plain, _ = one("IVF1024,PQ96")
    turned, asked = one("OPQ96,IVF1024,PQ96")
    assert asked == {"flat", "multiply", "pq96"}
    products = (10 * 65_536 + 2**20) * 2 * 1024 * D / 1e11
    assert plain.build_seconds == pytest.approx(
        products
        + 2**20 * 1e-5
        + 15 * 65_536 * 1e-4
        + plain.disk_bytes / 1e9
        + measured(2**20, plain.batch_seconds / 64, 6)
    )
    # OPQ: ten decompositions, and FAISS's 40 + 9 * 4 rounds of codes.
    assert turned.build_seconds - plain.build_seconds == pytest.approx(10 * 2.0 + 76 * 65_536 * 1e-4)
    assert turned.one_seconds == pytest.approx(1024 * 200 * NS + 2**20 / 32 * 40 * NS)


def test_directions_are_reckoned_at_their_own_width():
    (row, asked), (whole, _) = one("PCA192,HNSW32"), one("HNSW32")
    assert asked == {"flat", "multiply", "HNSW32", "at 192"}
    assert one("PCA192,HNSW32_SQ8")[1] == {"flat", "multiply", "HNSW32_SQ8", "at 192"}
    projecting = 2 * 2**20 * D * 192 / 1e11
    written = (row.disk_bytes - whole.disk_bytes) / 1e9
    assert row.build_seconds - whole.build_seconds == pytest.approx(projecting + written)
    lists, _ = one("PCA192,IVF4096,Flat")
    products = (10 * 50 * 4096 + 2**20) * 2 * 4096 * 192 / 1e11
    assert lists.build_seconds == pytest.approx(
        projecting + products + lists.disk_bytes / 1e9 + measured(2**20, lists.batch_seconds / 64, 6)
    )


def test_words_cost_the_same_for_every_passage():
    row, asked = one("BM25")
    assert asked == {"words"} and (row.kind, row.effort, row.recall, row.gpu_bytes) == ("bm25", "-", "-", 0)
    assert row.disk_bytes == 500 * 2**20 and row.build_ram_bytes == 3001 * 2**20 + PROCESS_BYTES
    assert row.ram_bytes == 516 * 2**20 + PROCESS_BYTES
    assert row.build_seconds == pytest.approx(2**20 * 1e-4 + row.disk_bytes / 1e9)
    assert (row.one_seconds, row.batch_seconds) == pytest.approx((2**20 * 50 * NS, 64 * 2**20 * 50 * NS))
    assert row.fits and not one("bm25", memory=2 * 10**9)[0].fits
    assert [each.kind for each in plan(1000, 64, ["bm25", "flat", "bm25"], 10**9, Given(), 1e9)] == ["bm25", "flat"]


def test_made_up_passages_are_like_real_ones():
    corpus = made_up(1500)
    assert corpus.sha256 == made_up(1500).sha256 and len(corpus) == 1500
    found = [passage.text.split() for passage in corpus]
    assert {len(words) for words in found} == {100}
    different = [set(words) for words in found]
    assert sum(map(len, different)) / 1500 == pytest.approx(66, abs=6)  # HotpotQA's, of 100
    passages = Counter(word for words in different for word in words)
    share = sum(passages[word] for words in found for word in words) / (100 * 1500 * 1500)
    assert 0.2 < share < 0.3  # HotpotQA: a word of a question stands in .247 of the passages


def test_words_are_measured(tmp_path: Path):
    rates = measure_words(400, 400)
    again = measure_words(400, 400)
    assert rates.disk_bytes == again.disk_bytes
    # A score and a row for each different word; and what it was fitted to.
    assert rates.disk_bytes.passage > 8 * 60  # bound: of 60 words and more, see above
    build_bm25(made_up(400), tmp_path / "ix")
    assert rates.disk_bytes.at(400) == pytest.approx(
        sum(f.stat().st_size for f in (tmp_path / "ix" / "scores").iterdir())
    )
    assert rates.build_bytes.at(400) == pytest.approx(again.build_bytes.at(400), rel=0.1)
    assert rates.build_bytes.at(400) > rates.disk_bytes.at(400)
    assert rates.build > 0 and rates.search > 0


def test_the_case_that_everyone_has():
    rows = {row.kind: row for row in plan(N, D, ["all"], 16 * 10**9, Given(), 1e9)}
    assert list(rows) == usual_kinds(N, D, 16 * 10**9)
    assert advice(N, D, 16 * 10**9).startswith(f"build {list(rows)[-1]} ")
    assert rows["flat"].disk_bytes == N * D * 4 == 64_559_075_328  # 64.6 GB
    assert rows["flat16"].disk_bytes == rows["flat"].gpu_bytes == 32_279_537_664
    assert not rows["flat"].fits and not rows["HNSW32"].fits and rows["HNSW32"].gpu_bytes == 0
    assert any(row.fits and row.kind.startswith("OPQ") for row in rows.values())
    for name, row in rows.items():
        needed = estimate(name, N, D)
        assert (row.ram_bytes, row.build_ram_bytes, row.disk_bytes, row.gpu_bytes) == (
            needed.ram_bytes,
            needed.build_ram_bytes,
            needed.disk_bytes,
            needed.gpu_bytes,
        )
        assert len(row.row()) == len(COLUMNS)
    assert rows["flat"].row()[:2] == ("flat", "no")
    assert usual_kinds(N, D, 10**12)[-1] == "OPQ96,IVF16384,PQ96" and len(usual_kinds(N, D, 1)) == 8
    assert "not enough for any index" in advice(N, D, 1000)


def test_a_kind_is_planned_once_and_all_of_them_are_offered_to_few():
    assert [row.kind for row in plan(1000, 64, ["flat", "all", "FLAT"], 10**9, Given(), 1e9)] == [
        "flat",
        "flat16",
        "HNSW32",
        "HNSW32_SQ8",
        "IVF16,Flat",
        "IVF16,SQfp16",
    ]


@pytest.mark.parametrize(
    ("passages", "dim", "kind", "message"),
    [
        (0, 768, "flat", "0 passages of 768 dimensions; expected at least 1 of each"),
        (5, 0, "flat", "5 passages of 0 dimensions"),
        (1000, 768, "trees", "kind is 'trees'; expected one of"),
        (1000, 768, "IVF4096,Flat", "4096 lists for 1000 passages"),
    ],
)
def test_what_cannot_be_planned(passages, dim, kind, message):
    with pytest.raises(UserError, match=message):
        plan(passages, dim, [kind], 10**9, Given(), 1e9)


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.00213, "2.13 ms"),
        (0.9994, "999 ms"),
        (1.0, "1 s"),
        (119.0, "119 s"),
        (120.0, "2 min"),
        (7200.0, "2 h"),
        (200_000.0, "2.3 days"),
    ],
)
def test_times_for_a_reader(seconds, shown):
    assert show_seconds(seconds) == shown


@pytest.fixture(scope="module")
def small() -> Calibration:
    return Calibration(32, 4000)


@pytest.mark.parametrize(
    "measure",
    [
        lambda c: c.flat(False),
        lambda c: c.flat(True),
        lambda c: c.lists("Flat"),
        lambda c: c.lists("SQfp16"),
        lambda c: c.product(8, True, 4096).scan,
        lambda c: c.graph("HNSW8", 20, 16).search,
        lambda c: c.graph("HNSW8_SQ8", 20, 16).search,
        lambda c: c.lists("SQ8"),
    ],
)
def test_a_calibration_measures_each_rate_once(small: Calibration, measure: Callable[[Calibration], Speed]):
    speed = measure(small)
    assert 0 < speed.one < 1 and 0 < speed.batch < 1
    assert measure(small) is speed


def test_a_plan_of_this_machine(small: Calibration):
    rows = plan(10**6, 32, ["all", "IVF1024,PQ8"], cpu_memory()[0], small, disk_rate("."))
    for row in rows:
        assert math.isfinite(row.build_seconds) and row.build_seconds > 0
        assert 0 < row.one_seconds < math.inf and 0 < row.batch_seconds < math.inf
    assert small.multiply() > 0 and small.product(8, False, 4096).rotation == 0


def test_vectors_are_of_norm_1_the_same_every_time_and_fall_off():
    vectors = synthetic_vectors(500, 64)
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1, atol=1e-6)
    assert (vectors == synthetic_vectors(500, 64)).all() and (vectors != synthetic_vectors(500, 64, seed=1)).any()
    assert (vectors[:, :8] ** 2).sum() > 4 * (vectors[:, -8:] ** 2).sum()


@pytest.mark.parametrize(
    ("dim", "sample", "message"), [(0, 5000, "dim is 0"), (8, 1999, "sample is 1999; expected at")]
)
def test_a_calibration_that_would_mean_nothing(dim, sample, message):
    with pytest.raises(UserError, match=message):
        Calibration(dim, sample)


def test_the_disk_is_written_and_left_as_it_was(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(plan_module, "DISK_BYTES", 2**21)
    assert disk_rate(tmp_path / "not" / "there" / "yet") > 0
    assert list(tmp_path.iterdir()) == []


def test_the_fastest_of_a_few_calls_counts_and_the_first_does_not(monkeypatch):
    clock = iter([0, 5, 10, 13])  # two timed calls, of 5 and of 3 seconds
    monkeypatch.setattr(plan_module.time, "perf_counter", lambda: next(clock))
    calls = []
    assert best_time(lambda: calls.append(1)) == 3
    assert len(calls) == 3


def test_encoding_is_counted_in_passages(monkeypatch):
    class Encoder:
        def __init__(self) -> None:
            self.texts = 0

        def encode_passages(self, texts: list[str]) -> None:
            self.texts += len(texts)

    encoder = Encoder()
    clock = iter([0.0, 3.0, 4.5, 5.0])  # asked after 8 passages, after 16, and at the end
    monkeypatch.setattr(plan_module.time, "perf_counter", lambda: next(clock))
    assert encode_rate(encoder) == 16 / 5
    assert encoder.texts == 24  # the first 8 only warm up
    assert len(plan_module.PASSAGE.split()) == 100


def test_the_command_prints_a_table_and_writes_it(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(plan_module, "DISK_BYTES", 2**21)
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["index", "plan", "--passages", "1000000", "--dim", "32", "--sample", "2000", "--kind", "flat"]
    out = tmp_path / "plan.json"
    assert cli.run([*arguments, "--memory", "1GB", "--disk", str(tmp_path), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "128 MB" in printed and "Encoding comes before the build" in printed and "Build HNSW32" in printed
    record = json.loads(out.read_text())
    assert record["plans"][0]["disk_bytes"] == 128_000_000 and record["encoded_per_second"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    assert cli.run([*arguments, "--memory", "lots"]) == 2
    assert "memory is 'lots'; expected a size such as 16GB" in capsys.readouterr().err


def test_a_plan_of_words_speaks_of_words(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(plan_module, "DISK_BYTES", 2**21)
    monkeypatch.setattr(plan_module, "measure_words", partial(measure_words, 400, 400))
    assert cli.run(["index", "plan", "--passages", "1000000", "--kind", "bm25", "--disk", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "1,000,000 passages, " in printed and "--encoder bm25" in printed
    assert "x 768" not in printed and "Encoding" not in printed and "Build" not in printed


def test_the_command_joins_indexes(tmp_path: Path, capsys):
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text('{"title": "a", "text": "one two"}\n{"title": "b", "text": "two three"}\n')
    for name, encoder in (("words", "bm25"), ("split", "bm25:tokens=split,variant=okapi")):
        assert (
            cli.run(["index", "build", "--corpus", str(corpus), "--encoder", encoder, "--out", str(tmp_path / name)])
            == 0
        )
    members = [str(tmp_path / "words"), str(tmp_path / "split")]
    assert cli.run(["index", "hybrid", *members, "--depth", "7", "--out", str(tmp_path / "both")]) == 0
    assert json.loads((tmp_path / "both/hybrid.json").read_text())["depth"] == 7
    capsys.readouterr()
    assert cli.run(["index", "hybrid", members[0], "--out", str(tmp_path / "lone")]) == 2
    assert "at least 2 indexes, got 1" in capsys.readouterr().err
