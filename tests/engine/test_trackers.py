"""Trackers follow metrics.jsonl in separate processes: what they receive, once or again, and that none harms a run.

The trackers here are small stand-ins that record how they are called.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_cases import eval_record, make_run, step_record

from thresher.common.errors import UserError
from thresher.engine import trackers
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.tables import from_dict
from thresher.engine.store.run_folder import RunFolder
from thresher.engine.trackers import check_trackers, tracking, values_of
from thresher.engine.training.train import train

NOTE = """
import json, os
def note(*said):
    with open(os.environ["TOLD"], "a") as file:
        file.write(json.dumps(said) + "\\n")
"""
WANDB = """
from noted import note
class Settings(dict): ...
class Run:
    def log(self, values, step): note("log", step, values)
    def finish(self, exit_code): note("finish", exit_code)
def init(**options):
    note("init", options["id"], options["resume"], options["config"]["run"]["steps"])
    return Run()
"""
TRACKIO = """
from noted import note
class Run:
    def log(self, values, step): note("log", step, values)
    def finish(self): note("finish", 0)
def init(project, name, resume, config):
    note("init", name, resume, config["run"]["steps"])
    return Run()
"""
EVENTS = """
class SessionLog:
    START = 1
    def __init__(self, status): ...
class Event:
    def __init__(self, step, wall_time, session_log=None, summary=None):
        self.said = ("begin", step) if session_log else ("log", step, summary.values)
"""
SUMMARY = """
class Summary:
    def __init__(self, value): self.values = dict(value)
    @staticmethod
    def Value(tag, simple_value): return tag, simple_value
"""
WRITER = """
from noted import note
class EventFileWriter:
    def __init__(self, folder): note("init", folder.rpartition("/")[2])
    def add_event(self, event): note(*event.said)
    def flush(self): ...
    def close(self): note("finish", 0)
"""
FAKES = {
    "wandb.py": WANDB,
    "trackio.py": TRACKIO,
    "tensorboard/__init__.py": "",
    "tensorboard/compat/proto/event_pb2.py": EVENTS,
    "tensorboard/compat/proto/summary_pb2.py": SUMMARY,
    "tensorboard/summary/writer/event_file_writer.py": WRITER,
}
Told = Callable[[], list[Any]]


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    """Install the stand-ins; return a function that reads their calls since it was last called."""
    for name, text in {"noted.py": NOTE, **FAKES}.items():
        path = tmp_path / "fakes" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for name in ("wandb", "trackio", "tensorboard"):
        monkeypatch.delitem(trackers.sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path / "fakes")
    file = tmp_path / "told.jsonl"
    monkeypatch.setenv("TOLD", str(file))

    def read() -> list[Any]:
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        file.write_text("")
        return lines

    return read


def steps(run: RunFolder, first: int, last: int) -> None:
    for step in range(first, last + 1):
        run.append_metrics(step_record(step) if step else eval_record(0, 0.1))
    run.append_metrics(eval_record(last, 0.5))


def sent(lines: list[Any]) -> list[tuple[int, str]]:
    return [(line[1], next(iter(line[2])).partition("/")[0]) for line in lines if line[0] == "log"]


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_run_that_goes_on_continues_its_curves(name: str, tmp_path: Path, told: Told) -> None:
    run = make_run(tmp_path / "run")
    with tracking(run.path, [name], -1):
        steps(run, 0, 3)
    first = told()
    assert sent(first) == [(0, "eval"), (1, "train"), (2, "train"), (3, "train"), (3, "eval")]
    assert next(line[2] for line in first if line[:2] == ["log", 2])["train/reward"] == 2 / 30
    assert first[-1] == ["finish", 0]
    run.truncate_after(2)  # as a run does when it resumes from the checkpoint of step 2
    with tracking(run.path, [name], 2):
        steps(run, 3, 4)
    again = told()
    if name == "tensorboard":
        assert ["begin", 3] not in first and again[1] == ["begin", 3]  # hides later records, which are sent again
        assert sent(again) == [(3, "train"), (4, "train"), (4, "eval")]
    else:
        assert again[0][:2] == first[0][:2] and again[0][2] == "allow"  # its earlier identity
        assert sent(again) == [(4, "train"), (4, "eval")]


def test_a_tracker_that_joins_late_gets_all(tmp_path: Path, told: Told) -> None:
    run = make_run(tmp_path / "run")
    steps(run, 0, 2)
    with tracking(run.path, ["tensorboard"], 2):
        run.append_metrics(step_record(3))
    assert sent(told()) == [(0, "eval"), (1, "train"), (2, "train"), (2, "eval"), (3, "train")]


def test_a_run_that_fails_is_told_as_failed(tmp_path: Path, told: Told) -> None:
    run = make_run(tmp_path / "run")
    with pytest.raises(ZeroDivisionError), tracking(run.path, ["wandb"], -1):
        run.append_metrics(step_record(1))
        raise ZeroDivisionError
    assert told()[-2:] == [["log", 1, values_of(step_record(1))], ["finish", 1]]


def test_no_tracker_harms_a_run(
    tmp_path: Path, told: Told, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fakes" / "wandb.py").write_text("raise OSError('no network')")
    (tmp_path / "fakes" / "trackio.py").write_text("import time\ntime.sleep(60)")
    monkeypatch.setattr(trackers, "LINGER", 0.5)
    run = make_run(tmp_path / "run")
    with tracking(run.path, ["wandb", "trackio", "tensorboard"], -1):
        steps(run, 0, 1)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2 and sent(told()) == [(0, "eval"), (1, "train"), (1, "eval")]
    failed, slow = sorted(said, key=lambda line: "failed" not in line)
    assert "run.trackers: wandb failed (OSError: no network; " in failed and "metrics.jsonl has everything" in failed
    assert "run.trackers: trackio had not sent everything" in slow
    monkeypatch.setattr(trackers.sys, "executable", str(tmp_path / "absent"))
    with tracking(run.path, ["wandb"], -1):
        pass
    assert "wandb could not be started (No such file" in capsys.readouterr().out


def test_what_is_sent_of_a_record() -> None:
    inner = {"em": 0.5, "note": "text", "parts": {"answer": 1.0, "gone": None}}
    assert values_of({"step": 3, "eval": inner}) == {"eval/em": 0.5, "eval/parts/answer": 1.0}
    assert values_of({"step": 3, "reward": 0.5, "reasons": {"ended": 2}}) == {
        "train/reward": 0.5,
        "train/reasons/ended": 2,
    }
    assert values_of({"step": 3, "staleness_tokens": [7, 0], "by_epoch": [{"ratio": 1.0}, {"ratio": 0.9}]}) == {
        "train/staleness_tokens/0": 7,
        "train/staleness_tokens/1": 0,
        "train/by_epoch/0/ratio": 1.0,
        "train/by_epoch/1/ratio": 0.9,
    }


def test_one_that_is_not_installed_is_refused_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()  # a folder of that name, such as wandb leaves, is not the package
    monkeypatch.setattr(trackers.sys, "path", [str(tmp_path)])
    monkeypatch.delitem(trackers.sys.modules, "wandb", raising=False)
    recipe = from_dict(Recipe, {"model": {"path": "nowhere"}, "run": {"trackers": ["wandb"]}}, "test")
    with pytest.raises(UserError, match=r'wandb is not \(pip install "thresher\[wandb\]", or pip install wandb\)'):
        train(recipe, tmp_path / "run")
    check_trackers(())
    with pytest.raises(UserError, match="trackers: expected each once"):
        from_dict(Recipe, {"model": {"path": "nowhere"}, "run": {"trackers": ["wandb", "wandb"]}}, "test")
