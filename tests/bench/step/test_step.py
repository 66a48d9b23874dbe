"""`thresher bench step` from the command line at a small size: that it runs, and what its row says. Not its figures."""

import json
from functools import partial
from pathlib import Path

import pytest

from thresher.bench.machine import checkout
from thresher.bench.step import run as step_module
from thresher.bench.step.run import LARGEST_GAP, run_step_bench
from thresher.bench.step.setting import StepShape
from thresher.cli.main import run
from thresher.rewards.errors import UserError

SMALL = StepShape(questions=2, group=3, prompt=24, completion=9)


def test_a_step_alone_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regression: the bench made a Renderer that refuses its own passage format, so `make bench` measured nothing."""
    monkeypatch.setattr(step_module, "run_step_bench", partial(run_step_bench, shape=SMALL))
    out = tmp_path / "new" / "step.jsonl"
    for _ in range(2):
        assert run(["bench", "step", "--peer", "none", "--steps", "1", "--out", str(out)]) == 0
    first, row = map(json.loads, out.read_text(encoding="utf-8").splitlines())  # appended to, not overwritten
    assert row.keys() == first.keys() and row["bench"] == "step" and row["steps"] == 1
    shape = row["shape"]
    assert (shape["questions"], shape["group"], shape["completion"]) == (2, 3, 9)
    assert shape["rollout_tokens"] == 2 * 3 * 9
    shortest, longest = shape["prompt"]
    assert 24 <= shortest <= longest and 2 * 3 * shortest <= shape["update_tokens"] - 54 <= 2 * 3 * longest
    assert shape["parameters"] > 100_000 and shape["layers"] >= 1
    assert 0 <= row["logprob_gap"]["recomputed"] <= LARGEST_GAP and row["logprob_gap"].keys() == {"recomputed"}
    assert row["theirs"] is None and row["ratio"] is None
    ours = row["ours"]
    for name in ("rollout_s", "update_s", "total_s", "rollout_tokens_per_s", "update_tokens_per_s"):
        assert 0 < ours[name]["p20"] <= ours[name]["p50"] <= ours[name]["p80"], name
    assert ours["rollout_s"]["p50"] + ours["update_s"]["p50"] == pytest.approx(ours["total_s"]["p50"])
    assert ours["rollout_tokens_per_s"]["p50"] == pytest.approx(54 / ours["rollout_s"]["p50"])


@pytest.mark.parametrize(("options", "words"), [({"peer": "verl"}, "--peer verl"), ({"steps": 0}, "--steps 0")])
def test_options_are_refused_before_anything_runs(options: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        run_step_bench(**options)  # type: ignore[arg-type]


def test_make_appends_where_the_command_does() -> None:
    root = checkout()
    if root is None:
        pytest.skip("there is no checkout")
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    assert "bench step --out bench/results/step-cpu.jsonl" in makefile
    assert (root / "bench" / "results" / "step-cpu.jsonl").is_file()
