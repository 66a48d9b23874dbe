"""The runner of `make gpu-check` with parts that need no GPU: what fails or hangs costs its own part alone."""

import ast
import json
import sys
import time
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from thresher.bench import gpu_check as module
from thresher.bench.gpu_check import (
    LOSS_TARGETS,
    RACED,
    CheckPart,
    TableLine,
    decode_lines,
    failure,
    loss_lines,
    parts,
    rollout_lines,
    run_gpu_check,
    step_lines,
)
from thresher.cli.commands.bench import Part
from thresher.cli.main import run as cli
from thresher.common.errors import UserError
from thresher.kernels.registry import triton_modules

PYTHON = (sys.executable, "-c")
ROW = """
import json, sys, time
with open(sys.argv[1], "a") as file:
    for value in (1, 2):
        file.write(json.dumps({"value": value}) + "\\n")
    file.write('{"val')
time.sleep(float(sys.argv[2]))
"""


def values(rows: Any) -> list[TableLine]:
    return [TableLine(f"value {row['value']}", "measured") for row in rows]


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(module, "gpu", lambda: "NVIDIA Invented 9000, 80 GiB, driver 1, CUDA 13")
    monkeypatch.setattr(module, "checkout", lambda: tmp_path)
    return tmp_path


@pytest.mark.slow
def test_each_part_ends_on_its_own_and_what_it_measured_is_kept(
    on_a_gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played = (
        CheckPart(name="fine", command=(*PYTHON, "pass"), seconds=60),
        CheckPart(name="wrong", command=(*PYTHON, "raise SystemExit(3)"), seconds=60),
        CheckPart(name="hangs", command=(*PYTHON, ROW, "{out}", "60"), seconds=5, rows="hangs", lines=values),
        CheckPart(name="absent", command=("no-such-program",), seconds=60, needs="no-such-program"),
        CheckPart(name="last", command=(*PYTHON, ROW, "{out}", "0"), seconds=60, rows="last", lines=values),
    )
    monkeypatch.setattr(module, "parts", lambda root: played)
    started = time.monotonic()
    outcomes = run_gpu_check(on_a_gpu / "results", 300)
    assert time.monotonic() - started < 50
    assert [outcome.how for outcome in outcomes] == ["passed", "failed", "cut off", "left out", "passed"]
    assert failure(outcomes) == "wrong failed (3); hangs cut off (after its 5 s)"
    assert [line.what for line in outcomes[2].lines] == ["value 1", "value 2"], "a half line is no row"
    said = capsys.readouterr().out
    assert "absent: left out (no-such-program is not installed)" in said and "gpu-check on NVIDIA Invented 9000" in said
    written = (on_a_gpu / "results" / "check-nvidia-invented-9000.jsonl").read_text().splitlines()
    assert [json.loads(line)["part"] for line in written] == [part.name for part in played]


def test_a_budget_that_is_used_up_begins_nothing(on_a_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "parts", lambda root: (CheckPart(name="late", command=("false",), seconds=60),))
    (outcome,) = run_gpu_check(on_a_gpu, 1.0)
    assert outcome.how == "left out" and failure([outcome]) is None


def test_it_wants_a_gpu_and_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "gpu", lambda: None)
    monkeypatch.setattr(module, "checkout", lambda: tmp_path)
    with pytest.raises(UserError, match="torch sees no CUDA device"):
        run_gpu_check(tmp_path, 60)
    monkeypatch.setattr(module, "checkout", lambda: None)
    with pytest.raises(UserError, match="run it from a checkout"):
        run_gpu_check(tmp_path, 60)


def test_the_parts_fit_into_eight_minutes_and_are_those_that_the_command_names(tmp_path: Path) -> None:
    found = parts(tmp_path)
    assert [part.name for part in found] == list(get_args(Part))
    assert sum(part.seconds for part in found) <= 450
    assert not any("shared/data" in argument or "http" in argument for part in found for argument in part.command)


def test_racecheck_sees_every_file_of_kernels() -> None:
    """By tests that are there, and that are one case each."""
    root = Path(__file__).parents[1] / "kernels"
    files = set()
    for name in RACED:
        path, _, function = name.partition("::")
        (found,) = [node for node in ast.parse((root / path).read_text()).body if getattr(node, "name", "") == function]
        assert isinstance(found, ast.FunctionDef) and not found.decorator_list, name
        files.add(path.rpartition("/")[2].removeprefix("test_").removesuffix(".py"))
    assert files | {"head_triton"} == {module.rpartition(".")[2] for module in triton_modules()}


@pytest.mark.parametrize(
    "part", [part for part in parts(Path()) if "thresher.cli" in part.command], ids=lambda p: p.name
)
def test_its_commands_are_commands(
    part: CheckPart, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where there is no GPU they get as far as finding that out."""
    if torch.cuda.is_available():
        pytest.skip("it would run")
    arguments = [argument for argument in part.command[3:] if argument not in ("--out", "{out}")]
    assert cli(arguments) == 2
    assert "--device cuda: torch" in capsys.readouterr().err


SPREAD = {"p20": 1.0, "p50": 1.5, "p80": 2.0}
LOSS = {"ours": {"share": {"nominal": 0.6, "measured": 0.7}}}
DECODE = {
    "model": "7B",
    "shape": {"batch": 256, "group": 8, "shared": 1200, "own": 300},
} | {"tokens_per_s": 20_000.0, "floor_s": 0.005, "floor_share": 0.4, "predicted_share": 0.5, "host_s": 0.0004}
ROLLOUT = {"shape": "rag", "tokens": 48, "ours_tokens_per_s": SPREAD, "peer": "generate_batch", "ratio": SPREAD}
STEP = {"shape": "0.5B", "tokens": 80_384, "shared": {"tokens_per_s": SPREAD}, "ratio_step": 2.5}
STEP |= {"asked_tokens": 80_320, "computed_tokens": 20_080, "shared_gain": 3.0}


def test_the_lines_of_a_row() -> None:
    floor = "of the floor"
    right = {"shape": {"hidden": 1536}, "ours": LOSS, "ratio": {"ours": {"liger": SPREAD}}}
    line = TableLine("loss, H 1,536", f"60% {floor}", "-", f"{LOSS_TARGETS[1536]:.0%} {floor}", "liger 1.50x")
    assert loss_lines([right]) == [line]
    wrong = {"shape": {"hidden": 64}, "ours": {"ours": {"left_out": "Wrong."}}, "ratio": {}}
    assert loss_lines([wrong]) == [TableLine("loss, H 64", "Wrong.")]
    kind, rate = "decode 7B, 1,200 shared + 300", "20,000 tokens/s, 40%"
    assert decode_lines([DECODE]) == [
        TableLine(kind, rate, "25,600 tokens/s", f"50% {floor}"),
        TableLine("  the host's part of a step, 7B", "0.40 ms", "-", ".5 ms"),
    ]
    line = TableLine("rollout rag, 48 tokens", "2 tokens/s", "-", "3x generate_batch", "generate_batch 1.50x")
    assert rollout_lines([ROLLOUT, ROLLOUT | {"peer": None, "ratio": None}]) == [line]
    whole, update = step_lines([STEP])
    assert whole == TableLine("step 0.5B, 80,384 tokens", "2 tokens/s", peer="TRL 2.50x")
    assert update == TableLine("  its update, prefixes shared by unshared", "3.00x", "4.00x by tokens")
    assert step_lines([STEP | {"ratio_step": None}])[0].peer == "-"
