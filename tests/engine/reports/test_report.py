"""Test reports: pages of one run and of several, chosen trajectories, charts, and that sampled text can act neither on
the page nor on the terminal."""

import json
import math
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from report_cases import CHARTS, Page, eval_record, make_run, step_record, trajectory
from rich.console import Console

from thresher.cli import main as cli
from thresher.common.console import visible
from thresher.common.errors import UserError
from thresher.engine.config.sections import RetrievalSection
from thresher.engine.reports import report
from thresher.engine.reports.charts import (
    DPI,
    PALETTE,
    PHASES,
    SIZE,
    STYLE,
    Chart,
    Series,
    _draw_axes,
    charts_of,
    smooth,
    smoothing,
)
from thresher.engine.reports.pages import choose, parts_of
from thresher.engine.reports.report import print_trajectories, write_comparison, write_curves, write_report
from thresher.engine.reproduce.manifest import read_manifest
from thresher.engine.store.run_folder import RunFolder
from thresher.policy.model import Policy
from thresher.retrieval.building.commands import build
from thresher.rewards.reward import Source

PNG = b"\x89PNG\r\n\x1a\n"
NAMES = [f"q{number}" for number in range(12)]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Chart]:
    """Record the charts of the pages instead of drawing them, which takes a tenth of a second or two for each."""
    charts: list[Chart] = []

    def draw(*several: Chart) -> bytes:
        charts.extend(several)
        return PNG

    monkeypatch.setattr(report, "draw", draw)
    return charts


def report_of(run: RunFolder, *out: Path) -> str:
    return Page(write_report(run.path, *out).read_text(encoding="utf-8")).text


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the report, with notes and in another folder, of a run of 30 steps with evaluations; return its file."""
    root = tmp_path_factory.mktemp("finished")
    run = make_run(root / "run")
    for step in range(31):
        if step:
            run.append_metrics(step_record(step))
        if step % 10 == 0:
            run.append_metrics(eval_record(step, 0.2 + 0.025 * step))
    run.write_evaluation(0, [trajectory("ann", False, 2), trajectory("bob", False), trajectory("cy", False)])
    run.write_evaluation(30, [trajectory("ann", True, 1), trajectory("bob", False), trajectory("cy", True, 2)])
    run.write_summary(
        {"em_before": 0.2, "em_after": 0.95, "seconds": 130.0, "rollout_tokens_per_s": 2500.0, "steps": 30}
    )
    (root / "out").mkdir()
    (root / "out" / "notes.md").write_text("The world is <i>invented</i>.\nAll of it.\n\n \nSecond & last.\n")
    path = write_report(run.path, root / "out")
    assert not run.report_file.exists()
    return path


def test_a_finished_run(finished: Path) -> None:
    html = finished.read_text(encoding="utf-8")
    page = Page(html)
    assert "30 of 30 steps" in page.text and "seed 7" in page.text and "Not finished" not in page.text
    assert "Exact match 20.0% 95.0% +75.0 pts" in page.text
    assert "200 held-out questions, greedy step 0 step 30 change" in page.text
    assert "The world is <i>invented</i>. All of it. Second & last." in page.text
    assert "the 95% interval of the last exact match is 91.0% to 97.3%" in page.text
    # Of 130 s, 30 s of steps and 8 s of evaluations are accounted for.
    assert "Of 2 min 10 s: 71% loading, checkpoints and files, 14% the update" in page.text
    assert page.tags.isdisjoint({"script", "link", "iframe"}) and "://" not in html and len(html) < 600_000
    assert next(iter(page.pictures)) == "Reward, Exact match over the steps" and len(page.pictures) == 14
    assert all(picture.startswith(PNG) for picture in page.pictures.values())
    assert {file.read_bytes() for file in (finished.parent / "plots").iterdir()} == set(page.pictures.values())
    order = [page.text.index(f"Who is {name}?") for name in ("cy", "ann", "bob")]  # two searches, one, a wrong answer
    ann = page.text[order[1] : order[2]]
    assert order == sorted(order)
    assert ann.index("step 0 · wrong · answered Bel · 2 searches") < ann.index("step 30 · right")
    assert "Expected: Bel or Bel D." in ann
    assert "<information> It is <b>Bel</b>. </information>" in ann  # as text: the parser saw no such elements


def test_a_run_that_goes_on_and_one_that_has_only_begun(tmp_path: Path, drawn: list[Chart]) -> None:
    run = make_run(tmp_path / "run", grpo={"shuffle_rewards": True})
    text = report_of(run)
    assert "Not finished" in text and "up to step 0" in text and "A control run" in text
    for absent in ("No step has been recorded yet", "Nothing was evaluated yet", "No trajectory has been written yet"):
        assert absent in text
    run.append_metrics(eval_record(0, 0.2))
    run.append_metrics(step_record(1))
    run.write_trajectories(1, [trajectory("ann", False), trajectory("ann", True)])
    text = report_of(run)
    assert "1 of 30 steps" in text and "Exact match 20.0% F1" in text and " pts" not in text
    assert "Sampled in training." in text and "Greedy, on" not in text
    assert f"for the steps 1: thresher report {run.path} --tokens STEP" in text
    assert text.count("Who is ann?") == 1  # samples of one question are not shown twice
    bare = make_run(tmp_path / "bare", data={"train": "train.jsonl"})
    bare.append_metrics({"step": 1})  # records with hardly any key
    bare.append_metrics({"step": 1, "eval": None})
    bare.write_evaluation(1, [{"id": "a"}])
    assert "1 of" in report_of(bare)


@pytest.mark.slow
def test_one_step_and_numbers_that_were_not_finite(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    run.append_metrics(eval_record(0, math.nan, questions=0))
    run.append_metrics(step_record(1, reward=math.nan, grad_norm=math.inf, logprob_gap=0.0, update_seconds=0.0))
    run.write_summary({"em_before": None, "em_after": None, "seconds": 1.0, "train_tokens_per_s": None})
    path = write_report(run.path)
    page = Page(path.read_text(encoding="utf-8"))
    assert path == run.report_file and "95% interval" not in page.text
    assert "Gradient norm over the steps" not in page.pictures
    assert page.pictures["Entropy (nats per sampled token) over the steps"].startswith(PNG)


def test_facts_of_a_run_are_read_from_the_files_around(tmp_path: Path, tiny_policy: Policy, drawn: list[Chart]) -> None:
    model = tmp_path / "warm"
    model.mkdir()
    tiny_policy.save(model)
    facts = {"steps": 200, "restarts": 1, "names copied right": 0.95, "gate": 0.98, "passed": False}
    (model / "sft.json").write_text(json.dumps(facts))
    run = make_run(tmp_path / "run", model=str(model), retrieval={"index": "gone", "shuffle": True, "k": 5})
    (run.path / "notes.md").write_text("Of the run.")
    text = report_of(run, tmp_path / "new" / "out")
    assert f"{tiny_policy.parameter_count():,} parameters: 2 layers of width 32" in text
    assert "200 steps of supervised fine-tuning after 1 restarts; 95.0% of the held-out copied tokens right" in text
    assert "gate 98%, NOT passed" in text and "Of the run." in text
    assert "gone; 5 passages a search, in an order drawn at random" in text
    (tmp_path / "new" / "out" / "notes.md").write_text("Of the folder.")
    text = report_of(run, tmp_path / "new" / "out")
    assert "Of the folder." in text and "Of the run." not in text
    remote = make_run(tmp_path / "remote", model=str(model), retrieval={"index": None, "url": "http://h:1"})
    remote.append_metrics(step_record(1) | {"rollout_seconds": 0.4, "search_seconds": 0.03})
    text = report_of(remote)
    assert "the server at http://h:1; 3 passages a search, best first" in text
    assert "Decoding waited for searches 7.5% of the rollouts' time." in text


def test_slots_and_staleness(tmp_path: Path, drawn: list[Chart]) -> None:
    """The pages of a run with rollout.partial and of one without; the latter recommends it if most slots are idle."""
    whole, partial = (
        make_run(tmp_path / name, rollout={"questions_per_step": 4, "max_num_seqs": 16, **more})
        for name, more in (("whole", {}), ("partial", {"partial": True, "max_staleness": 2, "groups_in_flight": 9}))
    )
    for step, counts in ((1, [50]), (2, [30, 10]), (3, [20, 15, 5])):
        record = step_record(step, slots_busy=0.4, tokens_recomputed=0, loss_tokens=sum(counts))
        whole.append_metrics(record)
        stale = {"staleness_tokens": counts, "tokens_recomputed": 10 * step - 10, "tokens_set_aside": 8}
        partial.append_metrics(record | stale)
    charts = {chart.name: chart for chart in charts_of(partial.metrics(), **CHARTS)}
    assert [series.values.tolist() for series in charts["staleness_tokens"].series] == [
        [50, 30, 20], [0, 10, 15], [0, 0, 5],
    ]  # fmt: skip
    assert [series.values.tolist() for series in charts["extra_tokens"].series] == [[0, 0.25, 0.5], [0.16, 0.2, 0.2]]
    names = [chart.name for chart in charts_of(whole.metrics(), **CHARTS)]
    assert "slots" in names and not {"staleness_tokens", "extra_tokens"} & set(names)
    drew = "In a decode step 40% of the 16 slots drew a token."
    text = report_of(partial)
    assert "Partial rollouts 9 groups in flight; staleness at most 2" in text
    assert drew in text and "rollout.partial = true" not in text
    text = report_of(whole)
    assert f"{drew} With rollout.partial = true later groups fill slots" in text and "in flight" not in text


def test_an_index_without_vectors_is_not_of_0_dimensions(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "title": "", "text": "rain falls"}\n')
    build(tmp_path / "corpus.jsonl", tmp_path / "words", "bm25")
    said = report._retrieval(RetrievalSection(index=str(tmp_path / "words"), k=3))
    assert said == "1 passages, bm25; 3 passages a search, best first"


def test_terms_of_a_reward_are_curves_and_rows_of_their_own(tmp_path: Path, drawn: list[Chart]) -> None:
    """Terms named after another one share its chart, a bonus or a count has its own, and the rest share one."""
    run, records = make_run(tmp_path / "run"), []
    for step in (10, 20, 30):
        rising = step / 30
        terms = {"answer": rising, "answer_full": 0.5, "format": 1.0, "relevance": rising / 2, "bonus": 10 * rising}
        record = eval_record(step, 0.5)
        recalls = {"recall_evidence": 0.25, "recall_refinement": 0.5}
        record["eval"] |= {"parts": terms, "compression": 2.0 * step, **recalls}
        records += [step_record(step, parts=terms, compression=None if step == 10 else 4.0), record]
    for record in records:
        run.append_metrics(record)
    charts = {chart.name: chart for chart in charts_of(records, **CHARTS)}
    own = {name: [series.label for series in chart.series] for name, chart in charts.items() if "part" in name}
    assert own == {
        "parts_answer": ["answer", "answer_full"],
        "parts": ["format", "relevance"],
        "parts_bonus": ["sampled, training questions", "greedy, held-out questions"],
    }
    assert charts["parts_answer"].series[0].values.tolist() == [10 / 30, 20 / 30, 1.0]
    assert charts["parts_bonus"].series[1].values.tolist() == pytest.approx([10 / 3, 20 / 3, 10.0])
    assert np.isnan(charts["compression"].series[0].values[0]) and charts["compression"].series[1].values[2] == 60.0
    text = report_of(run)
    assert "Reward's part: bonus 3.33 10.00 +6.67" in text
    assert "Answer recall of the refinements 50.0% 50.0% +0.0 pts" in text
    assert "Answer recall of the evidence 25.0% 25.0% +0.0 pts" in text and "Compression ratio 20.00 60.00" in text
    single = charts_of([step_record(step, parts={"answer": 0.5}) for step in (1, 2)], **CHARTS)
    assert not any(chart.name.startswith("parts") for chart in single)  # a single term equals the reward


def test_refusals(tmp_path: Path, drawn: list[Chart]) -> None:
    with pytest.raises(UserError, match="does not exist"):
        write_report(tmp_path / "absent")
    with pytest.raises(UserError, match=r"is not a run folder .it has no recipe\.toml"):
        print_trajectories(tmp_path)
    run = make_run(tmp_path / "run")
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="file: cannot write the report"):
        write_report(run.path, tmp_path / "file")
    (run.evaluations / "step_000001.jsonl").write_text('{"id": "a"}\nnot json\n')
    with pytest.raises(UserError, match=r"step_000001\.jsonl:2"):
        write_report(run.path)
    assert not run.report_file.exists()


def test_on_the_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(force_terminal=True, width=100, color_system="standard", highlight=False, legacy_windows=False)
    monkeypatch.setattr(report, "console", console)
    run = make_run(tmp_path / "run")
    feedback = {"source": "feedback", "text": "\nNot valid.\n", "ids": [9]}
    rude = {"source": "policy", "text": "[bold]x[/bold] \x1b[31mred\x07", "ids": [8]}
    broken = trajectory("bob", False)
    broken["segments"][2:2] = [rude, feedback]
    run.write_evaluation(3, [trajectory("ann", True), broken, trajectory("cy", True)])
    with console.capture() as capture:
        print_trajectories(run.path, 2)
    printed = capture.get()
    assert "Who is ann?" in printed and "Who is bob?" in printed and "Who is cy?" not in printed
    assert "\x1b[32m<answer>\x1b[0m Bel \x1b[32m</answer>\x1b[0m" in printed
    assert "\x1b[2m It is <b>Bel</b>.\x1b[0m" in printed and "\x1b[33mNot valid.\x1b[0m" in printed
    assert "[bold]x[/bold] ␛[31mred␇" in printed  # neither markup nor escape codes in sampled text take effect
    assert "\x1b[32mright\x1b[0m\x1b[2m, 1 search, reward 1.00; expected: Bel | Bel D.\x1b[0m" in printed


def run_with(path: Path, right: int, steps: int = 3, **sections: dict[str, object]) -> RunFolder:
    """Return a run whose last evaluation has `right` of NAMES right."""
    run = make_run(path, **sections)
    run.append_start({"step": 2, "at": "2026-11-22T10:00:00", "commit": "abc123+", "machine": "2 x Chip", "gpu": None})
    for step in range(1, steps + 1):
        run.append_metrics(step_record(step, sampled_tokens=1000 * right))
    run.append_metrics(eval_record(steps, right / 12, questions=12))
    run.write_evaluation(0, [trajectory(name, False) for name in NAMES])
    run.write_evaluation(steps, [trajectory(name, place < right) for place, name in enumerate(NAMES)])
    return run


def test_several_runs(tmp_path: Path, drawn: list[Chart], capsys: pytest.CaptureFixture[str]) -> None:
    more = {"grpo": {"kl_value": "k2", "beta": 0.02}, "run": {"steps": 30, "seed": 8}}
    first, second = run_with(tmp_path / "first", 2), run_with(tmp_path / "second", 10, steps=5, **more)
    second.write_summary({"seconds": 130.0})
    tests = write_comparison([first.path, second.path], tmp_path / "new" / "page.html")
    html = (tmp_path / "new" / "page.html").read_text(encoding="utf-8")
    page = Page(html)
    assert list(page.pictures.values()) == [PNG] * len(drawn)
    assert "http" not in html and "Thresher: 2 runs" in page.text

    charts = {chart.title: chart for chart in drawn}
    curves = {title: [(one.label, one.values.tolist()) for one in chart.series] for title, chart in charts.items()}
    rewards = [("A", [1 / 30, 2 / 30, 3 / 30]), ("B", [1 / 30, 2 / 30, 3 / 30, 4 / 30, 5 / 30])]
    assert curves["Reward: sampled, training questions"] == rewards
    assert curves["Exact match: greedy, held-out questions"] == [("A", [2 / 12]), ("B", [10 / 12])]
    assert charts["Seconds per step"].series[0].values[0] == pytest.approx(1.01)  # the sum of its layers
    assert charts["Trajectories without an answer"].series[0].values[0] == pytest.approx(4 / 16)
    assert {"KL to the reference, by estimator: k3", "Entropy (nats per sampled token)"} <= charts.keys()
    assert not any("k1" in title or "coefficient" in title for title in charts)
    assert not any(chart.stacked or chart.rule for chart in drawn)

    em = tests[0]["differences"]["em"]
    assert (em["first"], em["second"], em["count"]) == (2 / 12, 10 / 12, 12) and em["p"] == pytest.approx(2 / 2**8)
    assert "Exact match 16.7% 83.3% +66.7 pts" in page.text and "0.00781 12" in page.text
    assert "rewarded differently" not in page.text
    assert "Steps 3 of 30 5 of 30" in page.text and "In all - 2 min 10 s" in page.text
    assert "Rollout, tokens per second 5,000 25,000" in page.text
    assert 'grpo .kl_value "k3" "k2"' in page.text and "run .seed 7 8" in page.text and "run .steps" not in page.text
    assert "abc123+" in page.text and "2 x Chip" in page.text and "last resumed from step 2" in page.text

    paths = [str(first.path), str(second.path)]
    assert cli.run(["report", *paths]) == 2 and "expected --out with several runs" in capsys.readouterr().err
    assert cli.run(["report", *paths, "--out", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'page.html'}\n"


def test_seeds_of_a_method_are_one_curve_with_their_deviation(tmp_path: Path, drawn: list[Chart]) -> None:
    seeds = [run_with(tmp_path / str(right), right, steps=right).path for right in (2, 4)]
    groups = {"Ours": seeds, "Theirs": [run_with(tmp_path / "other", 10).path], "None": []}
    write_curves("Both", groups, tmp_path / "curves.html", ["reward", "em"])
    assert len(drawn) == 4 and list(Page((tmp_path / "curves.html").read_text()).pictures.values()) == [PNG] * 4
    ours, theirs = next(chart for chart in drawn if chart.title.startswith("Exact match: greedy")).series
    assert (ours.label, theirs.label) == ("Ours", "Theirs") and theirs.spread is None and ours.spread is not None
    assert ours.steps.tolist() == [2, 4] and ours.values.tolist() == [2 / 12, 4 / 12]  # the seeds share no step
    reward = next(chart for chart in drawn if chart.title.startswith("Reward: sampled")).series[0]
    assert reward.values.tolist() == pytest.approx([1 / 30, 2 / 30, 3 / 30, 4 / 30]) and reward.spread is not None
    assert reward.spread.tolist() == [0.0] * 4


def test_a_papers_figure_has_panels_that_a_runs_page_has_not(tmp_path: Path, drawn: list[Chart]) -> None:
    run = make_run(tmp_path / "run")
    panels = {"actions": 2.5, "tokens": 120.0, "loss_tokens": 960, "loss": -0.25}
    run.append_metrics(step_record(1, recompute_seconds=None, **panels))
    run.append_metrics(step_record(2, **dict.fromkeys(panels), sampled_tokens=0))
    write_curves("F6", {"Base": [run.path]}, tmp_path / "F6.html", read_manifest("evinote").tables["F6"].curves)
    found = {chart.title: chart.series[0].values.tolist() for chart in drawn}
    of_figures = {
        "Actions per trajectory": 2.5,
        "Whole sequence (tokens)": 120.0,
        "State tokens per step": 960.0,
        "Loss": -0.25,
        "Time per sampled token (ms)": 1.01,  # .6 + .4 + .01 s over 1,000 tokens
    }
    for title, value in of_figures.items():
        assert found[title] == pytest.approx([value, math.nan], nan_ok=True)
    assert {"Reward", "Response length (tokens)", "Valid searches per trajectory"} <= found.keys() and len(found) == 10
    drawn.clear()
    write_curves("All", {"Base": [run.path]}, tmp_path / "all.html")
    charts = [*drawn, *charts_of(run.metrics(), **CHARTS)]
    assert charts and not of_figures.keys() & {chart.title for chart in charts}


def test_bars_stand_in_groups_with_their_values_above() -> None:
    values = {"A": [0.5, 0.25, 0.0], "B": [math.nan, 0.75, 1.0]}
    spread = np.array([0.1, math.nan, 0.0])
    series = tuple(
        Series(label, color, np.arange(3.0), np.array(values[label]), spread=spread)
        for label, color in zip("AB", PALETTE, strict=False)
    )
    axes = Figure().add_subplot()
    _draw_axes(axes, Chart("0", "Format", "", series, percent=True, groups=("x", "y", "z")))
    rectangles = [bar for bar in axes.patches if isinstance(bar, Rectangle)]
    stand = [(bar.get_x() + bar.get_width() / 2, float(bar.get_height())) for bar in rectangles]
    assert stand == [
        (pytest.approx(at), height) for at, height in ((-0.21, 0.5), (0.79, 0.25), (1.79, 0), (1.21, 0.75), (2.21, 1))
    ]
    ends = [lines.get_paths()[0].vertices[:, 1].tolist() for lines in axes.collections]
    assert ends == [[0.4, 0.6], [0.75, 0.75]]  # the deviation of each first bar; nan is none
    assert [text.get_text() for text in axes.texts] == ["50%", "25%", "0%", "75%", "100%"]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["x", "y", "z"] and axes.get_xlabel() == ""


def test_a_mean_over_seeds_has_those_whose_value_is_0(tmp_path: Path, drawn: list[Chart]) -> None:
    """This holds on a log axis too, and if only one seed has a part of a reward above 1."""
    seeds = []
    for number, (turns, bonus, gap) in enumerate([(8, 2.0, 1e-6), (0, 0.9, 0.0)]):
        run = make_run(tmp_path / str(number), rollout={"questions_per_step": 4})
        parts = {"format": 0.5, "bonus": bonus}
        reasons = {"answered": 16 - turns, "turns": turns}
        for step in (1, 2):
            untimed = {f"{phase}_seconds": None for phase in PHASES} if step == 2 else {}
            run.append_metrics(step_record(step, parts=parts, reasons=reasons, logprob_gap_max=gap) | untimed)
        seeds.append(run.path)
    write_curves("Seeds", {"Ours": seeds}, tmp_path / "curves.html")
    found = {chart.title: chart.series[0].values.tolist() for chart in drawn}
    assert found["Trajectories without an answer"] == [0.25, 0.25]
    assert found["Reward's part: bonus"] == pytest.approx([1.45, 1.45])
    assert found["Log-prob gap, sampling to training: largest"] == [5e-7, 5e-7]
    assert math.isnan(found["Seconds per step"][1]), "a step that nobody timed took no 0 seconds"
    drawn.clear()
    write_comparison(seeds, tmp_path / "page.html")
    titles = {chart.title for chart in drawn}
    assert {"Trajectories without an answer", "Reward's part: bonus"} <= titles


def test_runs_that_share_too_little(tmp_path: Path, drawn: list[Chart]) -> None:
    first, other, fresh = run_with(tmp_path / "a", 3), run_with(tmp_path / "b", 5), make_run(tmp_path / "c")
    other.write_evaluation(9, [trajectory("else", True)])
    first.append_metrics(step_record(4, recall_notes=0.5))  # a curve of its own, without a comparison
    assert write_comparison([first.path, other.path, fresh.path], tmp_path / "page.html") == []
    text = Page((tmp_path / "page.html").read_text(encoding="utf-8")).text
    assert "no question is in both" in text and "C has no evaluation of held-out questions yet." in text
    assert "not recorded" in text and "all keys are the same" in text
    assert all([series.label for series in chart.series] == ["A", "B"] for chart in drawn)
    again = make_run(tmp_path / "d")
    (tmp_path / "file").write_text("")
    for runs, out, problem in (
        ([fresh, again], "none.html", "share neither a metric nor a question"),
        ([first, other], "page", r"page: expected a file ending in \.html"),
        ([first] * 8, "page.html", "from 2 to 7 runs"),
        ([first, other], "file/page.html", "cannot be written"),
    ):
        with pytest.raises(UserError, match=problem):
            write_comparison([run.path for run in runs], tmp_path / out)


TAGS = ("<think>", "</think>", "<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>")


@pytest.mark.parametrize(
    ("records", "before", "count", "expected"),
    [
        ([], set(), 3, []),
        ([("a", True, 1), ("b", True, 2), ("c", False, 1)], set(), 3, ["b", "a", "c"]),
        ([("a", True, 1), ("b", True, 1), ("c", True, 1)], {"a"}, 2, ["b", "c"]),  # newly learnt questions come first
        ([("a", True, 1), ("b", True, 1)], {"a", "b"}, 1, ["a"]),
        ([("a", True, 0), ("b", False, 0)], set(), 3, ["b", "a"]),  # fewer than requested
        ([("a", False, 3), ("a", True, 1), ("a", True, 2)], set(), 3, ["a"]),  # no question twice
        ([("a", True, 2), ("b", True, 1), ("c", False, 1)], set(), 0, []),
    ],
)
def test_choice(records: list[tuple[str, bool, int]], before: set[str], count: int, expected: list[str]) -> None:
    chosen = choose([trajectory(*record) for record in records], before, count)
    assert [record["id"] for record in chosen] == expected


def test_chunks_have_the_tag_of_their_span() -> None:
    segments = [
        {"source": "prompt", "text": "<answer> no </answer>"},
        {"source": "policy", "text": "so <think> a </think><search> q </search>"},
        {"source": "retrieved", "text": "\n\n<information> p </information>\n"},
        {"source": "policy", "text": "<ANSWER> <answer> long"},
        {"source": "somebody", "text": "else"},
    ]
    parts = parts_of(segments, TAGS, 100)
    found = [[[(c.text, c.is_tag, c.span) for c in line] for line in part.lines] for part in parts]
    assert [part.source for part in parts] == [Source.POLICY, Source.RETRIEVED, Source.POLICY]
    think, search = ("<think>", True, "think"), ("<search>", True, "search")
    assert found[0] == [
        [("so ", False, "")],
        [think, (" a ", False, "think"), ("</think>", True, "think")],
        [search, (" q ", False, "search"), ("</search>", True, "search")],
    ]
    assert found[1][0][1] == (" p ", False, "information")
    assert found[2] == [[("<ANSWER> ", False, "")], [("<answer>", True, "answer"), (" long", False, "answer")]]
    (untagged,), *_ = (part.lines for part in parts_of(segments, (), 100))
    assert [chunk.text for chunk in untagged] == [segments[1]["text"]]
    opened = parts_of(segments, TAGS, 10)[0].lines[1]  # cut right after the tag
    assert [chunk.text for chunk in opened] == ["<think>", " … (31 characters more)"]


TEXTS = st.lists(st.sampled_from([*TAGS, "a", "\n", "<", "think>", "\x1b", "\u202e", "é"]), max_size=12).map("".join)


@settings(derandomize=True, max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["policy", "retrieved", "feedback"]), TEXTS), max_size=4))
def test_parts_lose_nothing_and_add_nothing(segments: list[tuple[str, str]]) -> None:
    parts = parts_of([{"source": source, "text": text} for source, text in segments], TAGS, 10**6)
    shown = [(part.source, "".join(chunk.text for line in part.lines for chunk in line)) for part in parts]
    expected = [(source, visible(text).strip("\n")) for source, text in segments]
    assert shown == [(source, text) for source, text in expected if text]
    assert all((chunk.text in TAGS) == chunk.is_tag for part in parts for line in part.lines for chunk in line)


def test_visible() -> None:
    assert visible("a\tb\nc é 名") == "a\tb\nc é 名"
    assert visible("\x00\x1b\x7f\x9b\u202e\u2066\ud800") == "␀␛" + r"\u007f\u009b\u202e\u2066\ud800"
    visible("".join(map(chr, range(0x11000)))).encode()  # every character can be written


def test_charts_hold_the_numbers_of_the_records() -> None:
    records = [eval_record(0, 0.25), step_record(1), step_record(2, searches=None, em=0.5), eval_record(2, 0.75)]
    charts = {chart.name: chart for chart in charts_of(records, **CHARTS)}
    first = {name: [series.values[0] for series in chart.series] for name, chart in charts.items()}
    sampled, held_out = charts["em"].series
    assert sampled.steps.tolist() == [1, 2] and sampled.values.tolist() == [1 / 30, 0.5]
    assert held_out.steps.tolist() == [0, 2] and held_out.values.tolist() == [0.25, 0.75] and held_out.dots
    assert first["kl"] == [-0.01, 0.02, 0.01] and first["tokens_per_s"] == [1000 / 0.4, 3000 / 0.6]
    assert first["kl_largest"] == [4.5, 3.0] and charts["kl_largest"].log
    assert charts["zero_advantage"].series[0].values.tolist() == [0.25, 0.25]
    assert [series.label for series in charts["unanswered"].series] == ["turn limit", "context full"]
    assert first["unanswered"] == [3 / 16, 1 / 16] and sum(first["time"]) == pytest.approx(0.6 + 0.4 + 0.01)
    assert np.isnan(charts["searches"].series[0].values[1]) and first["searches"][0] == 1.5
    assert "0.02 × k2" in charts["kl"].caption and charts["grad_norm"].rule == (1.0, "clipped to 1")


def test_charts_without_numbers_are_left_out() -> None:
    def names(*records: dict[str, Any], **changes: float) -> list[str]:
        return [chart.name for chart in charts_of(records, **CHARTS | changes)]

    assert names() == names({"step": 1, "entropy": None}) == []
    no_reference = {key: value for key, value in step_record(1).items() if not key.startswith("kl_")}
    found = names(no_reference, beta=0.0, max_grad_norm=math.inf)
    assert not {"kl", "kl_largest"} & set(found) and "em" in found
    # 0 has no place on a log axis.
    assert "logprob_gap" not in names(step_record(1, logprob_gap=0.0, logprob_gap_max=0.0))


def test_smoothing() -> None:
    nan = math.nan
    assert smooth(np.array([0.0, 3.0, 6.0, 3.0]), 3).tolist() == [1.5, 3.0, 4.0, 4.5]
    found = smooth(np.array([nan, nan, nan, 2.0, nan, 4.0]), 3)
    assert np.isnan(found[:2]).all() and found[2:].tolist() == [2.0, 2.0, 3.0, 4.0]
    assert [smoothing(count) for count in (0, 1, 19)] == [1, 1, 1]
    assert all(smoothing(count) % 2 == 1 and 3 <= smoothing(count) <= count / 5 for count in range(20, 2000))


@pytest.mark.parametrize("log", [False, True])
def test_a_band_is_as_far_below_the_mean_as_above_and_above_0_on_a_log_axis(log: bool) -> None:
    steps, values, spread = np.arange(3.0), np.array([4.0, 4.0, 4.0]), np.array([8.0, 8.0, 8.0])
    series = Series("a", PALETTE[0], steps, values, dots=True, spread=spread)
    axes = Figure().add_subplot()
    _draw_axes(axes, Chart(name="x", title="KL", caption="", series=(series,), log=log))
    heights = axes.collections[0].get_paths()[0].vertices[:, 1]
    assert {round(float(height), 6) for height in heights} == {12.0, round(4 / 3, 6) if log else -4.0}


@pytest.mark.parametrize("labels", [["A", "B"], ["+ SEN + EQR"] * 7, ["a name of a run that is as long as a line"] * 3])
def test_a_legend_stays_within_its_picture_and_off_the_title(labels: list[str]) -> None:
    steps = np.arange(3.0)
    series = tuple(Series(label, color, steps, steps) for label, color in zip(labels, PALETTE, strict=False))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=SIZE, dpi=DPI, layout="constrained")
        axes = figure.add_subplot()
        _draw_axes(axes, Chart(name="x", title="Reward", caption="", series=series))
        figure.draw_without_rendering()
        legend = axes.get_legend()
        assert legend is not None
        box, above = legend.get_window_extent(), axes._left_title.get_window_extent()  # type: ignore[attr-defined]
    assert box.x1 <= SIZE[0] * DPI and box.y1 <= above.y0
    assert axes.get_window_extent().width > 0.75 * SIZE[0] * DPI


def test_the_objective_is_said_as_it_is() -> None:
    from thresher.engine.config.sections import GrpoSection
    from thresher.engine.reports.report import _objective

    assert _objective(GrpoSection()) == "GRPO, ratio clipped to [0.8, 1.2]"
    assert _objective(GrpoSection(objective="sapo")) == "sapo (surrogate sapo)"
    assert _objective(GrpoSection(objective="dapo", clip_high=0.28)).endswith("ratio clipped to [0.8, 1.28]")
