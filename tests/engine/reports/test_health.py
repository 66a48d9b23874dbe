"""The verdict on a run: each condition is found in a run that has it, from the step at which it began."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from report_cases import Page, make_run, step_record, trajectory
from train_cases import Make, sampled, single_threaded, steps_of

from thresher.cli import main as cli
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.tables import from_dict
from thresher.engine.reports import report
from thresher.engine.reports.health import WINDOW, conditions, findings, health_of, short_verdict
from thresher.engine.reports.pages import RunRecords
from thresher.engine.reports.report import write_report
from thresher.engine.reports.token_view import policy_counts
from thresher.engine.reports.watch import watch_terminal
from thresher.engine.store.token_stats import TokenRecorder, read_token_stats, stats_of, write_token_stats
from thresher.engine.training.train import train

GROUPS = 4
HEALTHY: dict[str, Any] = {"em": 0.3, "actions": 2.5, "invalid_actions": 0.1, "right_logprob": -0.1}
SICK: list[tuple[str, dict[str, Any]]] = [
    ("dead groups", {"zero_advantage_groups": 4}),
    ("gradient 0", {"grad_norm": 0.0}),
    ("format not obeyed", {"answered": 0.05}),
    ("format not obeyed", {"actions": 4.0, "invalid_actions": 3.8}),
    ("entropy gone", {"entropy": 0.002}),  # of 60 tokens
    ("length running away", {"reasons": {"answered": 8, "turn_tokens": 2, "tokens": 3, "context": 3}}),
    ("searches collapsing", {"searches": 0.4}),  # 1.5 before
    ("right answers less likely", {"right_logprob": -0.25}),
    ("rollout and update apart", {"logprob_gap": 0.03}),
]


def records(count: int, *changes: tuple[int, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return records of steps 1 to `count`: healthy, except for changes that each apply from one step on."""
    found = []
    for step in range(1, count + 1):
        record = step_record(step, **HEALTHY)
        for since, change in changes:
            record |= change if step >= since else {}
        found.append(record)
    return found


def shorts(found: list[dict[str, Any]]) -> list[str]:
    return [finding.short for finding in findings(found, GROUPS) or ()]


@pytest.mark.parametrize(("name", "change"), SICK)
def test_a_condition_is_found_from_the_step_on_which_it_began(name: str, change: dict[str, Any]) -> None:
    assert shorts(records(30, (11, change))) == [f"{name} since step 11"]
    assert shorts(records(13, (11, change))) == []  # three steps may be noise
    assert shorts(records(40, (11, change), (21, step_record(0, **HEALTHY)))) == []  # it is over


STALE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("stale tokens clipped", {"clipped": 0.01}, {"clipped": 0.08}),
    ("few stale samples count", {"importance_mean": 0.9, "importance_effective": 0.8}, {"importance_effective": 0.3}),
]


@pytest.mark.parametrize(("name", "healthy", "change"), STALE)
def test_stale_tokens_are_named_where_they_cost_the_signal(
    name: str, healthy: dict[str, Any], change: dict[str, Any]
) -> None:
    assert shorts(records(30, (1, {"staleness_mean": 0.8, **healthy}), (11, change))) == [f"{name} since step 11"]
    assert shorts(records(30, (1, {"staleness_mean": 0.8, **healthy}))) == []
    assert shorts(records(30, (1, healthy), (11, change))) == []  # tokens of the newest weights
    recomputed = {"staleness_mean": 0.8, "importance_mean": 1.0, "clipped": 0.08}  # the clip's centre is not stale
    assert shorts(records(30, (1, recomputed))) == []


@pytest.mark.parametrize(("name", "change"), SICK)
def test_every_other_step_is_not_enough(name: str, change: dict[str, Any]) -> None:
    sick = records(30, (11, change))
    mild = [one if one["step"] % 2 else healthy for one, healthy in zip(sick, records(30), strict=True)]
    assert shorts(mild) == []


def test_a_healthy_run_and_what_cannot_be_told() -> None:
    assert findings(records(30), GROUPS) == [] and short_verdict([]) == "healthy"
    assert findings(records(WINDOW - 1, (1, {"grad_norm": 0.0})), GROUPS) is None and short_verdict(None) == ""
    assert findings([{"step": step} for step in range(1, 30)], GROUPS) == []  # of records with hardly any key
    former = [{key: value for key, value in one.items() if key != "right_logprob"} for one in records(30)]
    assert findings(former, GROUPS) == []
    evaluated = [{"step": step, "eval": None} for step in range(30)]
    assert findings(evaluated, GROUPS) is None and findings([*records(9), *evaluated], GROUPS) == []


def test_a_run_that_has_learned_all_is_healthy_without_a_signal() -> None:
    silent = {"zero_advantage_groups": 4, "grad_norm": 0.0, "entropy": 0.001}
    names = ["dead groups", "gradient 0", "entropy gone"]
    assert shorts(records(30, (11, silent | {"em": 0.95}))) == []
    assert shorts(records(30, (11, silent | {"em": 0.85}))) == [f"{name} since step 11" for name in names]


def test_steps_without_an_update_have_no_gradient() -> None:
    found = records(30, (11, {"train_tokens": 0}))
    for record in found[10:]:
        del record["grad_norm"]
    assert shorts(found) == ["gradient 0 since step 11"]


def test_values_are_held_against_the_start_or_the_best() -> None:
    """Texts cut from the first step on mean too low a limit. A run with few searches cannot lose them. Likelihood falls
    from its highest value. Log-probs that are far apart need not have grown apart."""
    assert shorts(records(30, (1, {"reasons": {"context": 16}}))) == []
    assert shorts(records(30, (1, {"searches": 0.4}), (11, {"searches": 0.0}))) == []
    risen = records(40, (1, {"right_logprob": -0.3}), (11, {"right_logprob": -0.1}), (25, {"right_logprob": -0.3}))
    assert shorts(risen) == ["right answers less likely since step 25"]
    assert shorts(records(30, (1, {"right_logprob": -0.001}), (11, {"right_logprob": -0.01}))) == []  # noise near 0
    assert shorts(records(30, (1, {"right_logprob": -0.1}), (11, {"right_logprob": None}))) == []
    assert shorts(records(30, (1, {"logprob_gap": 0.12}))) == ["rollout and update apart since step 1"]
    assert shorts(records(30, (1, {"logprob_gap": 0.015}), (11, {"logprob_gap": 0.03}))) == []
    fallen = (11, {"logprob_gap": 0.004})  # the start is the reference, not the best value
    assert shorts(records(40, (1, {"logprob_gap": 0.01}), fallen, (25, {"logprob_gap": 0.025}))) == []


def test_advice_names_keys_that_a_recipe_has() -> None:
    table = {
        "model": {"path": "m"},
        "data": {"train": "t"},
        "system": {"name": "eval_rar"},
        "retrieval": {"index": "i"},
    }
    known = {*from_dict(Recipe, table, "test").keys(), "system.options"}
    for condition in conditions(GROUPS):
        named = set(re.findall(r"\b[a-z]+\.[a-z_]+\b", f"{condition.cause} {condition.advice}"))
        assert named and named <= known, condition.name


def test_the_document_has_all_conditions() -> None:
    text = (Path(__file__).parents[3] / "docs" / "commands.md").read_text()
    section = text.partition("## Is a run healthy?")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| ")]
    assert rows[1:] == [f"| {condition.name}" for condition in conditions(GROUPS)]


def test_the_trajectory_that_shows_it(tmp_path: Path) -> None:
    """The example comes from the first stored step at which the condition held: the trajectory that shows it most."""
    run = make_run(tmp_path / "run")
    for record in records(20, *((11, change) for _, change in SICK if "actions" not in change)):
        run.append_metrics(record)
    assert all(finding.example == "" for finding in health_of(RunRecords.read(run.path)) or ())
    one = {"group": 0, "sample": 0, "advantage": 1.0}
    stored = [
        trajectory("ann", False, 2, **one),
        trajectory("ann", True, 2, **one | {"sample": 1, "advantage": 0.0}),
        trajectory("bob", False, 2, **one | {"group": 1, "answer": None}),
        trajectory("bob", True, 3, **one | {"group": 1, "sample": 1}),
        trajectory("cy", True, 0, **one | {"group": 2}),
    ]
    for step in (8, 16):
        run.write_trajectories(step, stored if step == 16 else stored[:1])
    counts, _ = policy_counts(stored)
    keys = [(n, 0) for n in range(len(stored))]
    logprobs = {key: [-0.1 - 0.1 * (key[0] == 4)] * count for key, count in zip(keys, counts, strict=True)}
    entries = stats_of(logprobs, {}, TokenRecorder())
    for entry in entries:
        count = len(entry.values["sampled"])
        entry.values["entropy"] = np.full(count, 0.5 * (entry.key[0] != 2), np.float16)
        entry.values["recomputed"] = entry.values["sampled"] - np.float32(entry.key[0] == 3)
    write_token_stats(run.trajectories / "step_000016.safetensors", entries, 2**20)
    found = {finding.name: finding.example for finding in health_of(RunRecords.read(run.path)) or ()}
    assert {name: re.findall(r"line (\d)", example) for name, example in found.items()} == {
        "dead groups": ["2"],
        "gradient 0": ["2"],
        "format not obeyed": ["3"],
        "entropy gone": ["3"],
        "length running away": ["4"],
        "searches collapsing": ["5"],
        "right answers less likely": ["5"],
        "rollout and update apart": ["4"],
    }
    assert found["format not obeyed"] == "trajectories/step_000016.jsonl, line 3 (group 1, sample 0)"
    (run.trajectories / "step_000016.jsonl").write_text("{")  # damaged: the verdict is still given
    assert {finding.example for finding in health_of(RunRecords.read(run.path)) or ()} == {""}


SMALL: dict[str, dict[str, Any]] = {
    "data": {"dev": None},
    "rollout": {"questions_per_step": 2},
    "run": {"steps": WINDOW, "eval_every": None, "save_every": 100},
    "optim": {"lr": 1e-4, "warmup_ratio": 0.0},
}


def changed(**changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: SMALL.get(name, {}) | changes.get(name, {}) for name in {**SMALL, **changes}}


def unanswerable(questions: str, folder: Path) -> str:
    """Write the questions with a gold answer that no sample gives; return the file's name."""
    lines = [json.loads(line) | {"golden_answers": ["zzz"]} for line in Path(questions).read_text().splitlines()]
    (folder / "train.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder / "train.jsonl")


def test_a_run_that_trains_is_healthy_and_records_how_likely_right_answers_are(
    tmp_path: Path, make_recipe: Make
) -> None:
    with single_threaded():
        train(make_recipe(**SMALL), tmp_path / "run")
    run = RunRecords.read(tmp_path / "run")
    assert health_of(run) == []
    for record in run.steps:
        stored = sampled(run.folder.path, record["step"])
        path = run.folder.trajectories / f"step_{record['step']:06d}.safetensors"
        stats = read_token_stats(path, *policy_counts(stored))
        assert stats is not None
        right = [one.values["sampled"] for one, of in zip(stats, stored, strict=True) if of["parts"]["em"]]
        wanted = pytest.approx(np.mean([one.mean() for one in right]), rel=1e-5) if right else None
        assert record["right_logprob"] == wanted
    assert any(record["right_logprob"] is not None for record in run.steps)


@pytest.mark.slow
def test_samples_that_are_copies(tmp_path: Path, make_recipe: Make, base: dict[str, Any]) -> None:
    """At a temperature near 0 all samples of a group are equal, and none is right here."""
    data = {"dev": None, "train": unanswerable(base["data"]["train"], tmp_path)}
    with single_threaded():
        train(make_recipe(**changed(data=data, rollout={"group_size": 2, "temperature": 0.01})), tmp_path / "run")
    found = findings(steps_of(tmp_path / "run"), 2) or []
    assert {"dead groups", "gradient 0", "entropy gone"} <= {finding.name for finding in found}
    assert {finding.since_step for finding in found} == {1}


def test_a_run_cut_before_it_answers_is_told_of_while_it_trains_and_afterwards(
    tmp_path: Path, make_recipe: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, out = tmp_path / "recipe.toml", tmp_path / "run"
    make_recipe(**changed(rollout={"max_turn_tokens": 2, "temperature": 2.0})).write(recipe)
    names = ("dead groups", "gradient 0", "format not obeyed")
    verdict = ", ".join(f"{name} since step 1" for name in names)
    with single_threaded():
        assert cli.run(["train", str(recipe), "--out", str(out)]) == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("train ")]
        assert [f"unhealthy: {verdict}" in line for line in lines] == [f"train {WINDOW}/" in line for line in lines]
        # The earlier records count when the run is resumed.
        more = ["--resume", "--set", f"run.steps={WINDOW + 1}"]
        assert cli.run(["train", str(recipe), "--out", str(out), *more]) == 0
    assert f"unhealthy: {verdict}" in capsys.readouterr().out
    state = watch_terminal(out)
    assert capsys.readouterr().out.strip().endswith(verdict)
    assert [finding["name"] for finding in state.to_dict()["health"]] == list(names)
    monkeypatch.setattr(report, "draw", lambda *_: b"")
    text = Page(write_report(out).read_text()).text
    assert "Not healthy dead groups since step 1. Likely cause: all samples of nearly every group" in text
    assert "See trajectories/step_000001.jsonl, line 1 (group 0, sample 0)." in text and ", healthy" not in text
