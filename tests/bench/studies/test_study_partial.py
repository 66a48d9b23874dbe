"""Test `thresher study partial`: its runs, and its report of made-up ones. Training is tested elsewhere."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from thresher.bench.studies.partial import OBJECTIVES, ROLLOUTS, PartialRun, cases_of, markdown, run_study, summary_of
from thresher.engine.config.recipe import Recipe


@pytest.fixture
def cases(tmp_path: Path) -> list[PartialRun]:
    (tmp_path / "world").mkdir()
    return cases_of(tmp_path, [3, 4], 0, ["run.steps=5"])


def test_runs_of_a_seed_differ_in_rollouts_and_objective_alone(cases: list[PartialRun]) -> None:
    assert [(case.seed, case.rollout, case.objective) for case in cases] == [
        (seed, rollout, objective) for seed in (3, 4) for rollout in ROLLOUTS for objective in OBJECTIVES
    ]
    assert len({case.folder for case in cases}) == len(cases)
    first = cases[0].recipe
    for case in cases:
        recipe = case.recipe
        assert (recipe.run.seed, recipe.run.steps, recipe.run.eval_every) == (case.seed, 5, 8)
        assert Path(recipe.model.path).name == "base0"
        late = {"whole": 0, "stale1": 1, "stale3": 3}[case.rollout]
        assert recipe.rollout.partial == (late > 0)
        assert recipe.rollout.in_flight == (1 + late) * recipe.rollout.questions_per_step
        weighed = ("recomputed", "token") if case.objective == "recomputed" else ("rollout", "none")
        assert (recipe.grpo.old_logprobs, recipe.grpo.tis_level) == weighed and recipe.grpo.tis_rule == "truncate"
        rollout = replace(recipe.rollout, partial=False, max_staleness=1, max_num_seqs=first.rollout.max_num_seqs)
        grpo = replace(recipe.grpo, old_logprobs="rollout", tis_level="none")
        assert replace(recipe, rollout=rollout, grpo=grpo, run=replace(recipe.run, seed=3)) == first
    wide = next(case.recipe.rollout for case in cases if case.rollout == "stale3")
    assert wide.max_num_seqs == wide.in_flight * wide.group_size


def records_of(case: PartialRun, em: float) -> list[dict[str, Any]]:
    """Return made-up metrics of three steps."""
    steps: list[dict[str, Any]] = [
        {
            "step": step,
            "reward": 0.1 * step,
            "response_tokens": 40.0 + step,
            "slots_busy": 0.5,
            "loss_tokens": 100,
            "tokens_recomputed": 30 * (case.rollout != "whole"),
            "sampled_tokens": 100,
            "forwards": 50,
            "rollout_seconds": 2.0,
        }
        for step in (1, 2, 3)
    ]
    if case.rollout != "whole":  # the first step's tokens are all fresh
        steps[1]["slots_busy"] = None  # a step whose groups were complete before it began
        for step, counts in zip(steps, ([100], [50, 50], [30, 60, 10]), strict=True):
            step["staleness_tokens"] = counts
    return [{"step": 0, "eval": {"em": 0.4}}, *steps, {"step": 3, "eval": {"em": em}}]


def test_rows_and_table(cases: list[PartialRun]) -> None:
    rows = []
    for case in cases:
        case.folder.mkdir(parents=True)
        (case.folder / "summary.json").write_text(json.dumps({"seconds": 9.0}))
        em = {"whole": 0.8, "stale1": 0.9, "stale3": 0.7}[case.rollout] + 0.01 * case.seed * (case.rollout != "stale1")
        rows.append(summary_of(case, records_of(case, em)))
    whole, stale = rows[0], rows[2]
    assert (whole["name"], whole["staleness"], whole["recomputed_share"]) == ("whole rollout seed 3", [1.0], 0.0)
    assert whole["em"] == [0.4, pytest.approx(0.83)] and whole["reward"] == pytest.approx(0.2)
    assert stale["staleness"] == pytest.approx([180 / 300, 110 / 300, 10 / 300]) and stale["recomputed_share"] == 0.3
    assert (stale["forwards"], stale["rollout_seconds"], stale["response_tokens"]) == (150, 6.0, 42.0)
    lines = markdown(rows).splitlines()
    assert len(lines) == 2 + len(ROLLOUTS) * len(OBJECTIVES) + 2
    assert lines[2].startswith("| whole | rollout | 0.830, 0.840 | 0.835 ± 0.064 | - | 0.200 | 42.0 | 100% | 50% | 0%")
    # .9 less .83 and .84; Student's t with one degree of freedom: 12.706 x .01 / 2
    assert "| stale1 | rollout | 0.900, 0.900 | 0.900 ± 0.000 | +0.065 ± 0.064, 0.5 |" in lines[3]
    assert "| 60%, 37%, 3% | 50% | 30% | 150 |" in lines[3]
    assert "| -0.100 ± 0.000, 0.5 |" in lines[4]
    assert "With 2 seeds no p is below 0.5." in lines[-1]
    one = markdown([row for row in rows if row["seed"] == 3])
    assert len(one.splitlines()) == 8 and "| stale1 | rollout | 0.900 | 0.900 | +0.070 |" in one


def test_the_study_writes_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A seed that is given twice is run once; metrics are read from the runs' folders."""
    trained, typed = list[tuple[int, str]](), list[list[str]]()

    def train(recipe: Recipe, folder: Path, *_: Any, **__: Any) -> None:
        trained.append((recipe.run.seed, folder.name))
        folder.mkdir(parents=True)
        case = next(one for one in cases_of(tmp_path / "out", [0, 2], 1, []) if one.folder == folder)
        lines = [json.dumps(record) + "\n" for record in records_of(case, 0.5)]
        (folder / "metrics.jsonl").write_text("".join(lines))
        (folder / "summary.json").write_text(json.dumps({"seconds": 9.0}))

    def run_command(words: list[str]) -> None:
        typed.append(words)
        Path(words[words.index("--out") + 1]).mkdir(parents=True)

    monkeypatch.setattr("thresher.bench.studies.runs.train", train)
    run_study(tmp_path / "out", [2, 0, 2], 1, [], run_command)
    made = [Path(words[words.index("--out") + 1]).name for words in typed]
    assert made == ["data", "index", "init1", "recite1", "base1"]
    assert [seed for seed, _ in trained] == [0] * 6 + [2] * 6
    found = json.loads((tmp_path / "out" / "partial.json").read_text())
    assert [row["seed"] for row in found["runs"]] == [0] * 6 + [2] * 6
    assert (tmp_path / "out" / "table.md").read_text() == markdown(found["runs"])
