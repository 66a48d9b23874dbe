"""The report: what it says of a run, what it leaves out, and that nothing sampled acts on the page or the terminal."""

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from report_cases import CHARTS, Page, eval_record, make_run, step_record, trajectory
from rich.console import Console
from stored_cases import stored

from thresher.common.errors import UserError
from thresher.engine.config.sections import RetrievalSection
from thresher.engine.reports import report
from thresher.engine.reports.charts import charts_of
from thresher.engine.reports.report import print_trajectories, write_report
from thresher.engine.store.run_folder import RunFolder
from thresher.policy.model import Policy
from thresher.retrieval.building.commands import build

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def no_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the page alone: a chart takes a tenth of a second or two to draw."""
    monkeypatch.setattr(report, "draw", lambda _, path: path.write_bytes(PNG))
    monkeypatch.setattr(report, "draw_overview", lambda _, path: path.write_bytes(PNG))


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """What is printed, with its colours, on a terminal of 100 columns."""
    console = Console(force_terminal=True, width=100, color_system="standard", highlight=False, legacy_windows=False)
    monkeypatch.setattr(report, "console", console)
    console.begin_capture()
    yield console.end_capture


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunFolder, Path]:
    """A run of 30 steps with evaluations, and its report in another folder, with notes."""
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
    return run, write_report(run.path, root / "out")


def test_a_finished_run(finished: tuple[RunFolder, Path]) -> None:
    run, path = finished
    page = Page(path.read_text(encoding="utf-8"))
    assert path.name == "report.html" and not run.report_file.exists()
    assert "30 of 30 steps" in page.text and "seed 7" in page.text and "Not finished" not in page.text
    assert "Exact match 20.0% 95.0% +75.0 pts" in page.text
    assert "200 held-out questions, greedy step 0 step 30 change" in page.text
    assert "The world is <i>invented</i>. All of it. Second & last." in page.text
    # 30 s of steps and 8 s of evaluations are accounted for, of 130.
    assert "Of 2 min 10 s: 71% loading, checkpoints and files, 14% the update" in page.text
    assert page.tags.isdisjoint({"script", "link", "iframe"})
    assert "://" not in path.read_text(encoding="utf-8")


def test_the_page_holds_its_pictures(finished: tuple[RunFolder, Path]) -> None:
    path = finished[1]
    pictures = Page(path.read_text(encoding="utf-8")).pictures
    assert next(iter(pictures)) == "Reward, Exact match over the steps" and len(pictures) == 14
    assert all(picture.startswith(PNG) for picture in pictures.values())
    drawn = {file.read_bytes() for file in (path.parent / "plots").iterdir()}
    assert drawn == set(pictures.values())  # the same, for a README
    assert path.stat().st_size < 600_000


def test_trajectories_stand_beside_those_before_them(finished: tuple[RunFolder, Path]) -> None:
    text = Page(finished[1].read_text(encoding="utf-8")).text
    order = [text.index(f"Who is {name}?") for name in ("cy", "ann", "bob")]  # two searches, one, a wrong answer
    assert order == sorted(order)
    ann = text[order[1] : order[2]]
    assert ann.index("step 0 · wrong · answered Bel · 2 searches") < ann.index("step 30 · right")
    assert "Expected: Bel or Bel D." in ann
    assert "<information> It is <b>Bel</b>. </information>" in ann  # as text: the parser saw no such elements


def test_a_run_that_goes_on_and_one_that_has_only_begun(tmp_path: Path, no_drawing: None) -> None:
    run = make_run(tmp_path / "run", grpo={"shuffle_rewards": True})
    text = Page(write_report(run.path).read_text(encoding="utf-8")).text
    assert "Not finished" in text and "up to step 0" in text and "A control run" in text
    for absent in ("No step has been recorded yet", "Nothing was evaluated yet", "No trajectory has been written yet"):
        assert absent in text
    run.append_metrics(eval_record(0, 0.2))
    run.append_metrics(step_record(1))
    run.write_trajectories(1, [trajectory("ann", False), trajectory("ann", True)])
    text = Page(write_report(run.path).read_text(encoding="utf-8")).text
    assert "1 of 30 steps" in text and "Exact match 20.0% F1" in text and " pts" not in text
    assert "Sampled in training." in text and "Greedy, on" not in text
    assert f"for the steps 1: thresher report {run.path} --tokens STEP" in text
    assert text.count("Who is ann?") == 1  # samples of one question are not shown twice


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


def test_a_record_with_hardly_any_key(tmp_path: Path, no_drawing: None) -> None:
    run = make_run(tmp_path / "run", data={"train": "train.jsonl"})
    run.append_metrics({"step": 1})
    run.append_metrics({"step": 1, "eval": None})
    run.write_evaluation(1, [{"id": "a"}])
    page = Page(write_report(run.path).read_text(encoding="utf-8"))
    assert "1 of" in page.text and "Not finished" in page.text


def test_what_ran_is_read_from_the_files_around(tmp_path: Path, tiny_policy: Policy, no_drawing: None) -> None:
    model = tmp_path / "warm"
    model.mkdir()
    tiny_policy.save(model)
    facts = {"steps": 200, "restarts": 1, "names copied right": 0.95, "gate": 0.98, "passed": False}
    (model / "sft.json").write_text(json.dumps(facts))
    run = make_run(tmp_path / "run", model=str(model), retrieval={"index": "gone", "shuffle": True, "k": 5})
    text = Page(write_report(run.path).read_text(encoding="utf-8")).text
    assert f"{tiny_policy.parameter_count():,} parameters: 2 layers of width 32" in text
    assert "200 steps of supervised fine-tuning after 1 restarts; 95.0% of the held-out copied tokens right" in text
    assert "gate 98%, NOT passed" in text
    assert "gone; 5 passages a search, in an order drawn at random" in text
    remote = make_run(tmp_path / "remote", model=str(model), retrieval={"index": None, "url": "http://h:1"})
    remote.append_metrics(step_record(1) | {"rollout_seconds": 0.4, "search_seconds": 0.03})
    text = Page(write_report(remote.path).read_text(encoding="utf-8")).text
    assert "the server at http://h:1; 3 passages a search, best first" in text
    assert "Decoding waited for searches 7.5% of the rollouts' time." in text


def test_notes_of_the_out_folder_come_before_those_of_the_run(tmp_path: Path, no_drawing: None) -> None:
    run = make_run(tmp_path / "run")
    (run.path / "notes.md").write_text("Of the run.")
    assert "Of the run." in write_report(run.path, tmp_path / "new" / "out").read_text(encoding="utf-8")
    (tmp_path / "new" / "out" / "notes.md").write_text("Of the folder.")
    text = write_report(run.path, tmp_path / "new" / "out").read_text(encoding="utf-8")
    assert "Of the folder." in text and "Of the run." not in text


def test_a_systems_own_parts_are_curves_and_rows_of_their_own(tmp_path: Path, no_drawing: None) -> None:
    """Those named after another share its chart, a bonus or a count has one, and the rest share one."""

    def parts(step: int) -> dict[str, float]:
        rising = step / 30
        return {"answer": rising, "answer_full": 0.5, "format": 1.0, "relevance": rising / 2, "bonus": 10 * rising}

    run = make_run(tmp_path / "run")
    for step in (10, 20, 30):
        run.append_metrics(step_record(step, parts=parts(step), compression=None if step == 10 else 4.0))
        record = eval_record(step, 0.5)
        record["eval"] |= {"parts": parts(step), "compression": 2.0 * step, "recall_evidence": 0.25}
        run.append_metrics(record)
    records = stored(run.metrics_file)
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
    text = Page(write_report(run.path).read_text(encoding="utf-8")).text
    assert "Reward's part: bonus 3.33 10.00 +6.67" in text
    assert "Answer recall of the evidence 25.0% 25.0% +0.0 pts" in text and "Compression ratio 20.00 60.00" in text


def test_refusals(tmp_path: Path, no_drawing: None) -> None:
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


def test_on_the_terminal(tmp_path: Path, terminal: Callable[[], str]) -> None:
    run = make_run(tmp_path / "run")
    feedback = {"source": "feedback", "text": "\nNot valid.\n", "ids": [9]}
    rude = {"source": "policy", "text": "[bold]x[/bold] \x1b[31mred\x07", "ids": [8]}
    broken = trajectory("bob", False)
    broken["segments"][2:2] = [rude, feedback]
    run.write_evaluation(3, [trajectory("ann", True), broken, trajectory("cy", True)])
    print_trajectories(run.path, 2)
    printed = terminal()
    assert "Who is ann?" in printed and "Who is bob?" in printed and "Who is cy?" not in printed
    assert "\x1b[32m<answer>\x1b[0m Bel \x1b[32m</answer>\x1b[0m" in printed
    assert "\x1b[2m It is <b>Bel</b>.\x1b[0m" in printed
    assert "\x1b[33mNot valid.\x1b[0m" in printed
    assert "[bold]x[/bold] ␛[31mred␇" in printed  # neither markup nor escape codes of the policy's act
    assert "right, 1 search, reward 1.00; expected: Bel | Bel D." in printed.replace("\x1b[2m", "").replace(
        "\x1b[0m", ""
    ).replace("\x1b[32m", "")


@pytest.mark.parametrize(
    ("em", "questions", "expected"),
    [
        (0.975, 200, "94.3% to 98.9%"),
        (0.0, 8, "0.0% to 32.4%"),
        (1.0, 50, "92.9% to 100.0%"),
        (None, 9, ""),
        (1, 0, ""),
    ],
)
def test_interval(em: float | None, questions: int, expected: str) -> None:
    assert report._interval({"em": em, "questions": questions}) == expected


def test_an_index_without_vectors_is_not_of_0_dimensions(tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"id": "1", "title": "", "text": "rain falls"}\n')
    build(tmp_path / "corpus.jsonl", tmp_path / "words", "bm25")
    said = report._retrieval(RetrievalSection(index=str(tmp_path / "words"), k=3))
    assert said == "1 passages, bm25; 3 passages a search, best first"
