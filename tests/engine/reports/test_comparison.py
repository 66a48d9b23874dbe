"""Several runs as one page: which curves lie over each other, what is tested against what, and what is said instead."""

from pathlib import Path

import pytest
from report_cases import Page, eval_record, make_run, step_record, trajectory

from thresher.cli import main as cli
from thresher.common.errors import UserError
from thresher.engine.reports import report as comparison
from thresher.engine.reports.charts import Chart
from thresher.engine.reports.report import write_comparison, write_curves
from thresher.engine.store.run_folder import RunFolder

NAMES = [f"q{number}" for number in range(12)]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Chart]:
    """The charts, which are not drawn: each takes a tenth of a second or two."""
    charts: list[Chart] = []

    def draw(chart: Chart, path: Path) -> None:
        charts.append(chart)
        path.write_bytes(b"PNG")

    monkeypatch.setattr(comparison, "draw", draw)
    return charts


def run_with(path: Path, right: int, steps: int = 3, **sections: dict[str, object]) -> RunFolder:
    """A run whose last evaluation has so many of NAMES right."""
    run = make_run(path, **sections)
    run.append_start({"step": 2, "at": "2026-11-22T10:00:00", "commit": "abc123+", "machine": "2 x Chip", "gpu": None})
    for step in range(1, steps + 1):
        run.append_metrics(step_record(step, sampled_tokens=1000 * right))
    run.append_metrics(eval_record(steps, right / 12, questions=12))
    run.write_evaluation(0, [trajectory(name, False) for name in NAMES])
    run.write_evaluation(steps, [trajectory(name, place < right) for place, name in enumerate(NAMES)])
    return run


def test_runs_lie_over_each_other(tmp_path: Path, drawn: list[Chart]) -> None:
    first = run_with(tmp_path / "first", 2)
    more = {"grpo": {"kl_value": "k2", "beta": 0.02}, "run": {"steps": 30, "seed": 8}}
    second = run_with(tmp_path / "second", 10, steps=5, **more)
    second.write_summary({"seconds": 130.0})
    tests = write_comparison([first.path, second.path], tmp_path / "new" / "page.html")
    html = (tmp_path / "new" / "page.html").read_text(encoding="utf-8")
    page = Page(html)
    assert list(page.pictures.values()) == [b"PNG"] * len(drawn)
    assert "http" not in html and "Thresher: 2 runs" in page.text

    charts = {chart.title: chart for chart in drawn}
    assert [
        (series.label, series.values.tolist()) for series in charts["Reward: sampled, training questions"].series
    ] == [
        ("A", [1 / 30, 2 / 30, 3 / 30]),
        ("B", [1 / 30, 2 / 30, 3 / 30, 4 / 30, 5 / 30]),
    ]
    assert [series.values.tolist() for series in charts["Exact match: greedy, held-out questions"].series] == [
        [2 / 12],
        [10 / 12],
    ]
    assert charts["Seconds per step"].series[0].values[0] == pytest.approx(1.01)  # its layers' sum
    assert charts["Trajectories without an answer"].series[0].values[0] == pytest.approx(4 / 16)
    assert {"KL to the reference, by estimator: k3", "Entropy (nats per sampled token)"} <= charts.keys()
    assert not any("k1" in title or "coefficient" in title for title in charts)
    assert not any(chart.stacked or chart.rule for chart in drawn)

    em = tests[0]["differences"]["em"]
    assert (em["first"], em["second"], em["count"]) == (2 / 12, 10 / 12, 12) and em["p"] == pytest.approx(2 / 2**8)
    assert "Exact match 16.7% 83.3% +66.7 pts" in page.text and "0.0078 12" in page.text
    assert "rewarded differently" not in page.text
    assert "Steps 3 of 30 5 of 30" in page.text and "In all - 2 min 10 s" in page.text
    assert "Rollout, tokens per second 5,000 25,000" in page.text
    assert 'grpo .kl_value "k3" "k2"' in page.text and "run .seed 7 8" in page.text and "run .steps" not in page.text
    assert "abc123+" in page.text and "2 x Chip" in page.text and "last resumed from step 2" in page.text


def test_seeds_of_a_method_are_one_curve_with_their_deviation(tmp_path: Path, drawn: list[Chart]) -> None:
    seeds = [run_with(tmp_path / str(right), right, steps=right).path for right in (2, 4)]
    other = run_with(tmp_path / "other", 10)
    out = tmp_path / "curves.html"
    write_curves("Both", {"Ours": seeds, "Theirs": [other.path], "None": []}, out, ["reward", "em"])
    assert len(drawn) == 4 and list(Page(out.read_text("utf-8")).pictures.values()) == [b"PNG"] * 4
    ours, theirs = next(chart for chart in drawn if chart.title.startswith("Exact match: greedy")).series
    assert (ours.label, theirs.label) == ("Ours", "Theirs") and theirs.spread is None and ours.spread is not None
    assert ours.steps.tolist() == [2, 4] and ours.values.tolist() == [2 / 12, 4 / 12]  # never both at one step
    reward = next(chart for chart in drawn if chart.title.startswith("Reward: sampled")).series[0]
    assert reward.values.tolist() == pytest.approx([1 / 30, 2 / 30, 3 / 30, 4 / 30]) and reward.spread is not None
    assert reward.spread.tolist() == [0.0] * 4


def test_what_runs_do_not_share_is_said(tmp_path: Path, drawn: list[Chart]) -> None:
    first, other, fresh = run_with(tmp_path / "a", 3), run_with(tmp_path / "b", 5), make_run(tmp_path / "c")
    other.write_evaluation(9, [trajectory("else", True)])
    assert write_comparison([first.path, other.path, fresh.path], tmp_path / "page.html") == []
    text = Page((tmp_path / "page.html").read_text(encoding="utf-8")).text
    assert "no question is in both" in text and "C has no evaluation of held-out questions yet." in text
    assert "not recorded" in text and "all keys are the same" in text
    assert all([series.label for series in chart.series] == ["A", "B"] for chart in drawn)
    again = make_run(tmp_path / "d")
    with pytest.raises(UserError, match="share neither a metric nor a question"):
        write_comparison([fresh.path, again.path], tmp_path / "none.html")
    with pytest.raises(UserError, match=r"page: expected a file ending in \.html"):
        write_comparison([first.path, other.path], tmp_path / "page")
    with pytest.raises(UserError, match="from 2 to 7 runs"):
        write_comparison([first.path] * 8, tmp_path / "page.html")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be written"):
        write_comparison([first.path, other.path], tmp_path / "file" / "page.html")


def test_the_command(tmp_path: Path, drawn: list[Chart], capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(run_with(tmp_path / name, 4).path) for name in ("a", "b")]
    assert cli.run(["report", *paths]) == 2 and "expected --out with several runs" in capsys.readouterr().err
    assert cli.run(["report", *paths, "--out", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'}\n"
    assert cli.run(["report", *paths, str(tmp_path), "--out", str(tmp_path / "page.html")]) == 2
    assert "is not a run folder" in capsys.readouterr().err
