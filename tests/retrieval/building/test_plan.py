"""Test the planner: cost formulas by hand, byte counts, refusals, and a calibration that leaves no files."""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

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
    disk_rate,
    made_up,
    measure_words,
    plan,
    show_seconds,
)
from thresher.retrieval.indexes.bm25 import build_bm25
from thresher.retrieval.indexes.kinds import PROCESS_BYTES, estimate, usual_kinds

N, D = 21_015_324, 768
NS = 1e-9


class Given(Calibration):
    """Calibration with round rates instead of measured ones; `asked` names the rates that a plan used."""

    def __init__(self) -> None:
        self.asked: set[str] = set()

    def _answer(self, name: str, rates):
        self.asked.add(name)
        return rates

    def at(self, dim: int) -> "Given":
        return self._answer(f"at {dim}", self)

    def flat(self, half: bool) -> Speed:
        return self._answer("flat16" if half else "flat", Speed(one=(300 if half else 200) * NS, batch=100 * NS))

    def multiply(self) -> float:
        return self._answer("multiply", 1e11)

    def lists(self, codes: str) -> Speed:
        return self._answer(codes, Speed(one=250 * NS, batch=125 * NS))

    def product(self, pq: int, opq: bool, trained: int) -> CodeRates:
        scan = Speed(one=40 * NS, batch=20 * NS)
        return self._answer(f"pq{pq}", CodeRates(train=1e-4, code=1e-5, scan=scan, rotation=2.0 if opq else 0.0))

    def graph(self, factory: str, construction: int, search: int) -> GraphRates:
        return self._answer(factory, GraphRates(vectors=2**14, add=4e-4, search=Speed(one=1e-3, batch=5e-4)))

    def words(self) -> WordRates:
        grown = {"build_bytes": Growth(passage=3000, root=1024), "disk_bytes": Growth(passage=500, root=0)}
        return self._answer("words", WordRates(build=1e-4, search=50 * NS, **grown))


def one(kind: str, passages: int = 2**20, memory: int = 10**12, disk: float = 1e9):
    calibration = Given()
    (row,) = plan(passages, D, [kind], memory, calibration, disk)
    return row, calibration.asked


def measured(passages: int, batch: float, searches: int) -> float:
    """Return the seconds of the final measurement: 200 exact queries, and the searches that set nprobe or efSearch."""
    return 200 * (passages * 100 * NS + searches * batch)


def build_seconds(row, work: float, searches: int = 6, passages: int = 2**20) -> float:
    """Return the seconds of a build by hand: its work, writing at 1 GB/s, and measuring recall."""
    return work + row.disk_bytes / 1e9 + measured(passages, row.batch_seconds / 64, searches)


TRAINED_LISTS = (10 * 50 * 4096 + 2**20) * 2 * 4096 / 1e11  # seconds per dimension
CODED = (10 * 65_536 + 2**20) * 2 * 1024 * D / 1e11 + 2**20 * 1e-5 + 15 * 65_536 * 1e-4


@pytest.mark.parametrize(
    ("kind", "asked", "one_query", "of_64", "work"),
    [
        ("HNSW32", {"HNSW32", "flat"}, 1e-3 * 20 / 14, 5e-4 * 20 / 14, 2**20 * 4e-4 * 2.5),
        (
            "PCA192,HNSW32",
            {"flat", "multiply", "HNSW32", "at 192"},
            1e-3 * 20 / 14,
            5e-4 * 20 / 14,
            2**20 * 4e-4 * 2.5 + 2 * 2**20 * D * 192 / 1e11,
        ),
        (
            "IVF4096,Flat",
            {"flat", "multiply", "Flat"},
            4096 * 200 * NS + 2**20 / 32 * 250 * NS,
            4096 * 100 * NS + 2**20 / 32 * 125 * NS,
            TRAINED_LISTS * D,
        ),
        (
            "PCA192,IVF4096,SQfp16",
            {"flat", "multiply", "SQfp16", "at 192"},
            4096 * 200 * NS + 2**20 / 32 * 250 * NS,
            4096 * 100 * NS + 2**20 / 32 * 125 * NS,
            TRAINED_LISTS * 192 + 2 * 2**20 * D * 192 / 1e11,
        ),
        (
            "IVF1024,PQ96",
            {"flat", "multiply", "pq96"},
            1024 * 200 * NS + 2**20 / 32 * 40 * NS,
            1024 * 100 * NS + 2**20 / 32 * 20 * NS,
            CODED,
        ),
        (  # ten decompositions, and FAISS's 40 + 9 * 4 rounds of codes
            "OPQ96,IVF1024,PQ96",
            {"flat", "multiply", "pq96"},
            1024 * 200 * NS + 2**20 / 32 * 40 * NS,
            1024 * 100 * NS + 2**20 / 32 * 20 * NS,
            CODED + 10 * 2.0 + 76 * 65_536 * 1e-4,
        ),
    ],
)
def test_a_kind_with_a_structure_follows_its_law(kind, asked, one_query, of_64, work):
    row, used = one(kind)
    assert used == asked
    assert row.one_seconds == pytest.approx(one_query) and row.batch_seconds == pytest.approx(64 * of_64)
    assert row.build_seconds == pytest.approx(build_seconds(row, work))
    assert (
        row.effort
        == {"H": "128", "I": str(4096 // 32 if "4096" in kind else 1024 // 32)}[
            kind.removeprefix("PCA192,").removeprefix("OPQ96,")[0]
        ]
    )


def test_exact_kinds_look_at_every_vector():
    flat, asked = one("flat")
    assert asked == {"flat"}
    assert flat.one_seconds == pytest.approx(2**20 * 200 * NS)
    assert flat.batch_seconds == pytest.approx(64 * 2**20 * 100 * NS)
    assert flat.build_seconds == pytest.approx(4 * D * 2**20 / 1e9)  # written once
    assert (flat.effort, flat.recall) == ("-", "1")
    half, _ = one("flat16")
    assert half.disk_bytes * 2 == flat.disk_bytes == 4 * D * 2**20
    assert half.one_seconds == pytest.approx(2**20 * 300 * NS)
    assert half.build_seconds == pytest.approx(build_seconds(half, 0, searches=3))


def test_a_small_graph_costs_at_least_its_additions():
    assert one("HNSW32", 1000)[0].build_seconds > 1000 * 4e-4


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
    assert sum(map(len, different)) / 1500 == pytest.approx(66, abs=6)  # distinct words of 100, as in HotpotQA
    passages = Counter(word for words in different for word in words)
    share = sum(passages[word] for words in found for word in words) / (100 * 1500 * 1500)
    assert 0.2 < share < 0.3  # HotpotQA: a word of a question occurs in .247 of the passages


def test_words_are_measured(tmp_path: Path):
    rates = measure_words(400, 400)
    again = measure_words(400, 400)
    assert rates.disk_bytes == again.disk_bytes
    # One score and one row per distinct word; and at 400 passages the size of the index that it was fitted to.
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
    assert rows["flat16"].disk_bytes == rows["flat"].gpu_bytes - 3 * 2**29 == 32_279_537_664
    assert not rows["flat"].fits and not rows["HNSW32"].fits and rows["HNSW32"].gpu_bytes == 0
    assert any(row.fits and row.kind.startswith("OPQ") for row in rows.values())
    for name, row in rows.items():
        assert asdict(estimate(name, N, D)).items() <= asdict(row).items()
        assert len(row.row()) == len(COLUMNS)
    assert rows["flat"].row()[:2] == ("flat", "no")
    assert usual_kinds(N, D, 10**12)[-1] == "OPQ96,IVF16384,PQ96" and len(usual_kinds(N, D, 1)) == 8
    assert "not enough for any index" in advice(N, D, 1000)


def test_a_kind_is_planned_once_and_all_of_them_are_offered_to_few():
    rows = plan(1000, 64, ["flat", "all", "FLAT"], 10**9, Given(), 1e9)
    assert [row.kind for row in rows] == ["flat", "flat16", "HNSW32", "HNSW32_SQ8", "IVF16,Flat", "IVF16,SQfp16"]


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


def test_times_for_a_reader():
    seconds = (0.00213, 0.9994, 1.0, 119.0, 120.0, 7200.0, 200_000.0)
    assert [show_seconds(each) for each in seconds] == ["2.13 ms", "999 ms", "1 s", "119 s", "2 min", "2 h", "2.3 days"]


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


def test_a_calibration_that_would_mean_nothing():
    with pytest.raises(UserError, match="sample is 1999; expected at"):
        Calibration(8, 1999)


def test_the_disk_is_written_and_left_as_it_was(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(plan_module, "DISK_BYTES", 2**21)
    assert disk_rate(tmp_path / "not" / "there" / "yet") > 0
    assert list(tmp_path.iterdir()) == []


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
