"""Test `thresher bench step` at small sizes: that it runs, its refusals, and its rows, but not its figures."""

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from itertools import accumulate, cycle
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from thresher.bench import step as step_module
from thresher.bench.roofline import MODELS
from thresher.bench.settings import STEP_SHAPES, PeerWay, Seconds, Sizes, StepShape, make_step_setting
from thresher.bench.step import (
    LARGEST_GAP,
    NOT_YET,
    Ours,
    StepBench,
    Steps,
    make_row,
    prove_ours,
    prove_theirs,
    rows_of_steps,
    run_step_bench,
)
from thresher.cli.commands import bench as command_line
from thresher.cli.main import run
from thresher.common.errors import UserError
from thresher.common.machine import checkout
from thresher.policy.model import Policy
from thresher.rewards.reward import Source

TINY = Sizes(num_hidden_layers=1, hidden_size=32, intermediate_size=48, vocab_size=600, initializer_range=0.08)
FLOAT = torch.float32
CONTRACT = ("shape", "threads", "ratio_step", "ratio_update", "ratio_rollout", "shared_gain")


def small(name: str, **lengths: Any) -> StepShape:
    shape = STEP_SHAPES[name]
    return replace(shape, lengths=replace(shape.lengths, sizes=TINY, questions=2, group=3, **lengths))


SMALL = {
    "demo": small("demo", question=24, turns=(9,)),
    "search": small("search", question=20, turns=(5, 5, 5), appended=7),
}
WAYS = (PeerWay(batch=3), PeerWay(batch=3, checkpointing=True))
SMOLLM2 = replace(small("smollm2", question=24, turns=(9,)), peer_ways=WAYS)


@pytest.fixture
def at_small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, shape in SMALL.items():
        monkeypatch.setitem(STEP_SHAPES, name, shape)


@pytest.fixture
def fixed_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make steps last 8 s, 3 of them in the rollout, and 16 s, 6 of them there, in turns; half of it is CPU time."""
    passing = {
        "perf_counter": (1.0, 3.0, 5.0, 1.0, 6.0, 10.0),
        "process_time": (0.5, 1.5, 2.5, 0.5, 3.0, 5.0),
    }
    clocks = {name: accumulate(cycle(seconds)).__next__ for name, seconds in passing.items()}
    monkeypatch.setattr(step_module, "time", SimpleNamespace(**clocks, monotonic=time.monotonic))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.fast_cases(1)
def test_a_step_alone_from_the_command_line(at_small_sizes: None, fixed_times: None, tmp_path: Path, name: str) -> None:
    """Regression: the bench made a Renderer that refuses its own passage format, so `make bench` measured nothing."""
    out, plot, profile = tmp_path / "new" / "step.jsonl", tmp_path / "step.png", tmp_path / "kernels.txt"
    command = ["bench", "step", "--shape", name, "--peer", "none", "--steps", "2", "--threads", "1", "--out", str(out)]
    assert run([*command, "--plot", str(plot), "--profile", str(profile)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    title, first, *others = profile.read_text(encoding="utf-8").splitlines()
    assert title == f"an update, {name}" and " us " in first and any(" aten::mm" in line for line in (first, *others))
    first, row = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    assert row["update_profile"]["kernels"] > 100 and row["update_profile"]["busy_s"] > 0
    assert first == row | {"update_profile": None}, "it was written before the profile"
    shape = SMALL[name]
    assert (row["bench"], row["shape"], row["steps"], row["threads"]) == ("step", name, 2, 1)
    assert row["tokens"] == 6 * shape.lengths.longest and row["sampled_tokens"] == 6 * shape.peer_completion
    assert row["asked_tokens"] == row["tokens"] - 6, "the last token of a trajectory predicts nothing"
    assert 0 < row["computed_tokens"] <= row["asked_tokens"]
    assert set(CONTRACT) <= row.keys()
    assert [row[f"ratio_{part}"] for part in ("step", "update", "rollout")] == [None] * 3 and row["peer"] is None
    assert 0 <= row["logprob_gap"]["recomputed"] <= LARGEST_GAP[FLOAT] and row["logprob_gap"].keys() == {"recomputed"}
    for side in ("shared", "unshared"):  # each has one step of 8 s and one of 16
        found = row[side]
        for figures in found.values():
            assert 0 < figures["p20"] < figures["p50"] < figures["p80"]
        medians = {name: figures["p50"] for name, figures in found.items()}
        rate, seconds = row["tokens"] * (1 / 8 + 1 / 16) / 2, {"step": 12.0, "rollout": 4.5, "update": 7.5}
        of_wall = {"tokens_per_s": rate} | {f"{part}_s": value for part, value in seconds.items()}
        of_cpu = {"tokens_per_cpu_s": 2 * rate} | {f"{part}_cpu_s": value / 2 for part, value in seconds.items()}
        assert medians == pytest.approx(of_wall | of_cpu)
    assert row["shared_gain"] == pytest.approx((5 / 10 + 10 / 5) / 2), "of neighbouring steps"


@pytest.mark.slow
def test_rows_are_appended_and_a_spent_budget_ends_a_run_behind_one_step(at_small_sizes: None, tmp_path: Path) -> None:
    out = tmp_path / "step.jsonl"
    out.write_text('{"bench": "step", "shape": {"questions": 16}}\n', encoding="utf-8")  # a row in an earlier form
    for name in SMALL:
        assert run_step_bench(StepBench(shape=name, peer="none", steps=50, budget=0.0), out)["steps"] == 1
    assert [row["shape"] for row in rows_of_steps(out)] == list(SMALL)


def test_a_search_step_trains_on_what_was_sampled_and_not_on_what_was_found() -> None:
    shape = SMALL["search"]
    ours = Ours(make_step_setting(shape))
    for trajectory in ours.side.sample():
        sources = [segment.source for segment in trajectory.segments]
        assert sources == [Source.PROMPT, *[Source.POLICY, Source.RETRIEVED] * 2, Source.POLICY]
        assert len(trajectory.ids()) == shape.lengths.longest == 20 + 3 * 5 + 2 * 7
        assert len(trajectory.policy_positions()) == shape.peer_completion == 15
    before = {name: value.clone() for name, value in ours.policy.named_parameters()}
    for share in (True, False):
        seconds = ours.step(share)
        assert 0 < seconds.rollout < seconds.total and seconds.update_cpu > 0  # bound: it is a part
    assert any(not torch.equal(value, before[name]) for name, value in ours.policy.named_parameters())


@pytest.mark.slow
def test_a_peer_of_one_turn_gets_as_many_tokens() -> None:
    setting = make_step_setting(SMALL["search"])
    assert [len(ids) for ids in setting.peer_ids()] == [20 + 2 * 7] * 2
    setting = make_step_setting(SMALL["demo"])
    assert setting.peer_ids() == setting.rollout.prompts() and {len(ids) for ids in setting.peer_ids()} == {24}


def test_a_row_has_the_others_seconds_by_ours_and_a_wrong_model_is_not_timed() -> None:
    ours = Ours(make_step_setting(SMALL["demo"]))
    seconds = {"shared": (1, 2, 1, 2), "unshared": (1, 4, 1, 4), "peer": (2, 10, 2, 10)}
    steps = Steps({}, {side: [Seconds(*spent)] for side, spent in seconds.items()}, [{"host": 0.0}])
    row = make_row(ours, steps, {})
    assert (row["ratio_step"], row["ratio_update"], row["ratio_rollout"], row["shared_gain"]) == (5, 8, 2, 3)
    gaps = prove_ours(ours) | prove_theirs(ours, lambda ids: ours.policy.logits(torch.tensor(ids)))
    assert gaps.keys() == {"recomputed", "peer"} and max(gaps.values()) <= LARGEST_GAP[FLOAT]
    with pytest.raises(RuntimeError, match="wrong results are not timed"):
        prove_theirs(ours, lambda ids: 1.01 * ours.policy.logits(torch.tensor(ids)))
    with pytest.raises(RuntimeError, match="wrong results are not timed"):  # NaN is above every bound
        prove_theirs(ours, lambda ids: torch.full((len(ids), 600), torch.nan))


def test_the_command_names_the_shapes() -> None:
    assert tuple(STEP_SHAPES) == get_args(command_line.StepShape)
    assert all(shape.model in MODELS for shape in STEP_SHAPES.values() if shape.model is not None)


def test_a_vocabulary_without_a_text_decodes_every_id_and_encodes_none_of_the_rest() -> None:
    shape = replace(SMALL["demo"], lengths=replace(SMALL["demo"].lengths, sizes=replace(TINY, vocab_size=3000)))
    setting = make_step_setting(shape)
    tokenizer = setting.rollout.tokenizer
    assert tokenizer.vocab_size == setting.rollout.policy.config.vocab_size == 3000
    assert tokenizer.decode([2998]) == "#2998" and max(tokenizer.encode("#2999 #1200")) < 1200


def test_what_cannot_be_measured_is_said(
    at_small_sizes: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"--shape 0\.5B: its model is for a GPU; give --device cuda"):
        run_step_bench(StepBench(shape="0.5B"))
    appended: list[Any] = []
    monkeypatch.setattr(step_module, "append_rows", lambda path, *rows: appended.append(path))
    monkeypatch.setattr(step_module, "find_spec", lambda name: None)
    assert run_step_bench(StepBench(steps=1))["peer"] is None
    assert appended == [None], "without --out there is no file"
    said = capsys.readouterr().out
    assert 'TRL is not installed, so ours is measured alone; pip install "thresher[bench]"' in said


def test_a_peer_that_fails_leaves_its_reason_and_our_figures(
    at_small_sizes: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It fails when it is imported."""
    monkeypatch.setattr(step_module, "find_spec", lambda name: True)
    monkeypatch.setitem(sys.modules, "thresher.bench.step_trl", None)
    row = run_step_bench(StepBench(steps=1), tmp_path / "rows.jsonl")
    assert row["peer_failure"].startswith("ModuleNotFoundError: import of thresher.bench.step_trl halted")
    assert row["peer"] is None and row["steps"] == 1 and row["shared"]["tokens_per_s"]["p50"] > 0


def test_a_peer_that_ends_the_process_loses_no_row(
    at_small_sizes: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Ending(ModuleType):
        def __getattr__(self, name: str) -> None:
            raise SystemExit(9)

    monkeypatch.setattr(step_module, "find_spec", lambda name: True)
    monkeypatch.setitem(sys.modules, "thresher.bench.step_trl", Ending("step_trl"))
    with pytest.raises(SystemExit):
        run_step_bench(StepBench(steps=1), tmp_path / "rows.jsonl")
    (row,) = rows_of_steps(tmp_path / "rows.jsonl")
    assert row["peer_failure"] == NOT_YET and row["steps"] == 1 and row["shared"]["tokens_per_s"]["p50"] > 0


def test_an_interrupted_run_keeps_its_finished_rounds(
    at_small_sizes: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The fourth round, of which one is to warm up, is interrupted between its two steps."""
    taken, right = iter(range(100)), Ours.step

    def step(self: Ours, share_prefix: bool) -> Seconds:
        if next(taken) == 7:
            raise KeyboardInterrupt
        return right(self, share_prefix)

    monkeypatch.setattr(Ours, "step", step)
    with pytest.raises(KeyboardInterrupt):
        run_step_bench(StepBench(steps=5, peer="none"), tmp_path / "rows.jsonl")
    (row,) = rows_of_steps(tmp_path / "rows.jsonl")
    assert row["steps"] == 2


ENDING = """
import os, sys
from dataclasses import replace
from types import ModuleType

from thresher.bench import delta, rollout, step
from thresher.bench.harness import read_rows
from thresher.bench.settings import ROLLOUT_SHAPES, STEP_SHAPES, Sizes

class Ending(ModuleType):
    def __getattr__(self, name):
        if name == "Theirs":  # others look for names like __file__ in every module
            os._exit(9)
        raise AttributeError(name)

def end(*given):
    os._exit(9)

sizes = Sizes(num_hidden_layers=1, hidden_size=32, intermediate_size=48, vocab_size=600)
small = replace(ROLLOUT_SHAPES["demo"][0], sizes=sizes, questions=2, group=2, turns=(5,))
ROLLOUT_SHAPES["demo"], STEP_SHAPES["demo"] = (small,), replace(STEP_SHAPES["demo"], lengths=small)
sys.modules["thresher.bench.step_trl"] = Ending("step_trl")
step.find_spec = rollout.find_spec = lambda name: True
rollout.HuggingFace = delta._peer = end
heads = {"key_heads": 1, "value_heads": 1, "dim": 4}
benches = (
    lambda out: step.run_step_bench(step.StepBench(steps=1), out),
    lambda out: rollout.run_rollout_bench(rollout.RolloutBench(shapes=("demo",)), out),
    lambda out: delta.run_delta_bench(delta.DeltaBench(sequences=1, length=8, device="cpu", **heads), out),
)
for number, run in enumerate(benches):
    out = f"{sys.argv[1]}/{number}.jsonl"
    child = os.fork()
    if child == 0:
        run(out)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    print("ended", os.waitstatus_to_exitcode(status), [row["bench"] for row in read_rows(out)], flush=True)
"""


@pytest.mark.slow
def test_no_bench_loses_its_row_to_a_peer_that_ends_the_process(tmp_path: Path) -> None:
    hide = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", ENDING, str(tmp_path)]
    done = subprocess.run(command, env=os.environ | hide, capture_output=True, text=True, timeout=200)
    said = [line for line in done.stdout.splitlines() if line.startswith("ended")]
    assert said == [f"ended 9 ['{name}']" for name in ("step", "rollout", "delta")], done.stdout + done.stderr


def test_a_published_model_takes_the_place_of_random_weights(
    monkeypatch: pytest.MonkeyPatch, tiny_model_folder: Path, tiny_policy: Policy, tmp_path: Path
) -> None:
    monkeypatch.setitem(STEP_SHAPES, "smollm2", SMOLLM2)
    command = ["bench", "step", "--shape", "smollm2", "--model", str(tiny_model_folder), "--peer", "none"]
    out = tmp_path / "rows.jsonl"
    assert run([*command, "--steps", "1", "--out", str(out)]) == 0
    (row,) = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    assert row["lengths"]["weights"] == tiny_model_folder.name and row["peer_ways_tried"] == []
    assert row["lengths"]["parameters"] == tiny_policy.parameter_count()
    assert row["tokens"] == 2 * 3 * (24 + 9), "no sample ends early, whatever the model has learned"
    setting = make_step_setting(SMOLLM2, folder=tiny_model_folder)
    assert setting.end == "<|endoftext|>" and {len(ids) for ids in setting.rollout.prompts()} == {24}


def test_beside_trl(at_small_sizes: None, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    row = run_step_bench(StepBench(shape="search", steps=2), tmp_path / "rows.jsonl")
    assert row["logprob_gap"]["peer"] <= LARGEST_GAP[FLOAT]
    assert row["ratio_step"] > 0 and row["ratio_update"] > 0 and row["ratio_rollout"] > 0
    assert row["peer_way"] == {"batch": None, "checkpointing": False} and row["peer_ways_tried"] == []
    assert isinstance(row["trl"], str) and row["peer"]["update_s"]["p50"] > 0 and row["steps"] == 2


def test_the_quickest_way_of_trl_is_the_peer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    monkeypatch.setitem(STEP_SHAPES, "smollm2", SMOLLM2)
    row = run_step_bench(StepBench(shape="smollm2", steps=1), tmp_path / "rows.jsonl")
    first, second = row["peer_ways_tried"]
    assert [(way["batch"], way["checkpointing"]) for way in (first, second)] == [(3, False), (3, True)]
    assert row["peer_way"]["checkpointing"] == (second["step_s"] < first["step_s"])
    assert row["logprob_gap"]["peer"] <= LARGEST_GAP[FLOAT] and row["lengths"]["weights"] is None


def test_make_appends_to_the_published_rows() -> None:
    root = checkout()
    if root is None:
        pytest.skip("there is no checkout")
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    assert "--out bench/results/step-cpu.jsonl --plot docs/step.png" in makefile
    assert (root / "bench" / "results" / "step-cpu.jsonl").is_file()


def test_another_family_has_a_panel_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one shape have no family, as in older files, its own family, or Qwen3.5; the last of each is drawn."""
    axes = pytest.importorskip("matplotlib.axes").Axes
    figure = pytest.importorskip("matplotlib.figure").Figure
    from thresher.bench.plots import draw_step

    results = Path(__file__).parents[2] / "bench" / "results" / "step-cpu.jsonl"
    old = next(row for row in rows_of_steps(results) if row["shape"] == "rag")
    assert "family" not in old["lengths"]
    rows = [old, *(old | {"lengths": old["lengths"] | {"family": name}} for name in ("qwen2", "qwen3_5_text"))]
    rows[-1] |= {"gpu": "NVIDIA H200", "device": "cuda", "commit": "another"}
    titles: list[str] = []
    feet: list[str] = []
    monkeypatch.setattr(axes, "set_title", lambda self, title: titles.append(title))
    monkeypatch.setattr(figure, "supxlabel", lambda self, text, **style: feet.append(text))
    draw_step(rows, tmp_path / "step.png")
    assert all(name in feet[0] for name in (old["machine"], "NVIDIA H200", f"commit {old['commit']}, another"))
    assert [title.partition(":")[0] for title in titles] == ["rag", "rag (Qwen3.5)"]
