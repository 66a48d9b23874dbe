"""Test the runner of `make gpu-check` with parts that need no GPU: a part that fails or hangs affects no other."""

import ast
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from thresher.bench import gpu_check as module
from thresher.bench.gpu_check import (
    LOSS_TARGETS,
    NOT_PREDICTED,
    OF_A_CPU,
    RACED,
    CheckPart,
    Outcome,
    TableLine,
    attention_lines,
    decode_lines,
    failure,
    loss_lines,
    named_parts,
    parts,
    rollout_lines,
    run_gpu_check,
    smoke_lines,
    step_lines,
    table_text,
)
from thresher.bench.gpu_smoke import main as smoke
from thresher.bench.roofline import MODELS, predicted_step
from thresher.cli.main import run as cli
from thresher.common.errors import UserError
from thresher.engine.planning import time as planning_time
from thresher.engine.planning.time import CHIPS
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
    return tmp_path


STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGINT, lambda *_: open(sys.argv[1], "w").close())
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("child", child.pid, flush=True)
while True:
    time.sleep(1)
"""


@pytest.mark.slow
def test_each_part_ends_on_its_own_and_what_it_measured_is_kept(
    on_a_gpu: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    counted = "print('FAILED a.py::b: it is wrong'); print('1 failed, 2 passed in 3.21s'); raise SystemExit(3)"
    played = (
        CheckPart(name="fine", command=(*PYTHON, "pass"), seconds=60),
        CheckPart(name="wrong", command=(*PYTHON, counted), seconds=60),
        CheckPart(name="hangs", command=(*PYTHON, ROW, "{out}", "60"), seconds=5, rows="hangs", lines=values),
        CheckPart(name="absent", command=("no-such-program",), seconds=60, needs=("no-such-program", "pytest")),
        CheckPart(name="last", command=(*PYTHON, ROW, "{out}", "0"), seconds=60, rows="last", lines=values),
    )
    monkeypatch.setattr(module, "parts", lambda: played)
    started, before = (
        time.monotonic(),
        signal.signal(signal.SIGINT, signal.SIG_IGN),
    )  # as in a shell's background job
    try:
        outcomes = run_gpu_check(on_a_gpu / "results", 300)
    finally:
        signal.signal(signal.SIGINT, before)
    assert time.monotonic() - started < 50
    assert [outcome.how for outcome in outcomes] == ["passed", "failed", "cut off", "left out", "passed"]
    assert failure(outcomes) == "wrong failed (3); hangs cut off (after its 5 s)"
    assert [line.what for line in outcomes[2].lines] == ["value 1", "value 2"], "a half line is no row"
    assert outcomes[1].counted == "1 failed, 2 passed"
    said = capsys.readouterr().out
    assert "absent: left out (no-such-program not installed)" in said and "gpu-check on NVIDIA Invented 9000" in said
    assert "  FAILED a.py::b: it is wrong" in said and "KeyboardInterrupt" in said, "SIGINT came first"
    name = "check-nvidia-invented-9000"
    written = (on_a_gpu / "results" / f"{name}.jsonl").read_text().splitlines()
    assert [json.loads(line)["part"] for line in written] == [part.name for part in played]
    assert (on_a_gpu / "results" / f"{name}.txt").read_text() in said
    assert "1 failed, 2 passed" in (on_a_gpu / "results" / f"{name}-wrong.log").read_text()


@pytest.mark.slow
def test_a_part_that_does_not_end_is_killed_with_all_that_it_began(
    on_a_gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = on_a_gpu / "told"
    stubborn = CheckPart(name="stubborn", command=(*PYTHON, STUBBORN, str(told)), seconds=5)
    monkeypatch.setattr(module, "parts", lambda: (stubborn,))
    monkeypatch.setattr(module, "GRACE", 1.0)
    (outcome,) = run_gpu_check(on_a_gpu, 60)
    assert outcome.how == "cut off" and told.exists()
    child = int((on_a_gpu / "check-nvidia-invented-9000-stubborn.log").read_text().split()[1])
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and Path(f"/proc/{child}/stat").exists():
        if Path(f"/proc/{child}/stat").read_text().rpartition(") ")[2][0] == "Z":
            return
        time.sleep(0.1)
    with pytest.raises(ProcessLookupError):
        os.kill(child, signal.SIG_DFL)


def test_a_table_is_there_after_each_part(on_a_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(part: CheckPart, *_: Any) -> Outcome:
        if part.name == "second":
            raise KeyboardInterrupt
        return Outcome(part, "passed", seconds=2.0, lines=(TableLine("  it", "1 token/s"),))

    played = tuple(CheckPart(name=name, command=("true",), seconds=60) for name in ("first", "second"))
    monkeypatch.setattr(module, "parts", lambda: played)
    monkeypatch.setattr(module, "run_part", killed)
    with pytest.raises(KeyboardInterrupt):
        run_gpu_check(on_a_gpu, 60)
    text = (on_a_gpu / "check-nvidia-invented-9000.txt").read_text()
    assert [line.split() for line in text.splitlines()[2:]] == [
        ["first", "passed,", "2", "s"],
        ["it", "1", "token/s", "-", "-", "-"],
    ]
    assert table_text([], "none").startswith("gpu-check on none\n")


def test_a_budget_that_is_used_up_begins_nothing(on_a_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "parts", lambda: (CheckPart(name="late", command=("false",), seconds=60),))
    (outcome,) = run_gpu_check(on_a_gpu, 1.0)
    assert outcome.how == "left out" and failure([outcome]) is None


def test_it_wants_a_gpu_and_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "gpu", lambda: None)
    with pytest.raises(UserError, match="torch sees no CUDA device"):
        run_gpu_check(tmp_path, 60)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    with pytest.raises(UserError, match="run it from a checkout"):
        run_gpu_check(tmp_path, 60)


def test_parts_are_run_by_name_and_in_their_order(capsys: pytest.CaptureFixture[str]) -> None:
    names = [part.name for part in parts()]
    assert [part.name for part in named_parts(None)] == names
    assert [part.name for part in named_parts(["decode,smoke", "tests"])] == ["smoke", "tests", "decode"]
    with pytest.raises(
        UserError, match=f"--parts decoding: there is no such part; expected some of {', '.join(names)}"
    ):
        named_parts(["smoke,decoding"])
    with pytest.raises(UserError, match="names no part"):
        named_parts([","])
    assert cli(["bench", "gpu-check", "--help"]) == 0
    assert ", ".join(names) in " ".join(capsys.readouterr().out.split())


def test_the_parts_fit_into_eight_minutes() -> None:
    found = parts()
    assert sum(part.seconds for part in found) <= 450
    assert not any("shared/data" in argument or "http" in argument for part in found for argument in part.command)
    root = Path(__file__).parents[1] / "kernels"
    assert all((root / f"test_{name}.py").is_file() for name in OF_A_CPU)


BROKEN = """
import pytest
from thresher.bench import gpu_tests

def break_it(*_):
    raise RuntimeError("CUDA error: an illegal memory access was encountered\\nmore")

def test_breaks():
    gpu_tests.synchronize = break_it

def test_behind():
    pass

def test_hangs():
    import time
    time.sleep(60)

def test_wrong():
    assert 1 == 2, "it is wrong"
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_a_broken_context_and_a_test_that_hangs_cost_one_test(workers: int, tmp_path: Path) -> None:
    (tmp_path / "test_broken.py").write_text(BROKEN)
    (tmp_path / "hasty.py").write_text("from thresher.bench import gpu_tests\ngpu_tests.HANGS = 2.0\n")
    words = [
        "-m",
        "pytest",
        "-p",
        "thresher.bench.gpu_tests",
        "-p",
        "hasty",
        "-p",
        "no:cacheprovider",
        "-n",
        str(workers),
    ]
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, *words, str(tmp_path)],
        cwd=tmp_path,
        # the inner pytest must not run as a worker of this one
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
        | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    said = done.stdout + done.stderr
    assert "test_broken.py::test_breaks: RuntimeError: CUDA error: an illegal memory access was" in said
    assert "CUDA fails from here on" in said
    if workers:
        assert "test_broken.py::test_hangs: took more than 2 s" in said, said
        assert "test_broken.py::test_wrong: AssertionError: it is wrong" in said
        assert "1 passed" in said
    else:
        assert done.returncode == 3


@pytest.mark.slow
def test_the_first_commands_of_a_user_run(tmp_path: Path) -> None:
    smoke(str(tmp_path / "rows.jsonl"), "tiny", "cpu")
    (row,) = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert list(row["seconds"]) == ["data", "init", "index", "sft", "train", "resume", "eval"]
    assert all(step["grad_norm"] > 0 for step in row["steps"])
    assert [line.what for line in smoke_lines([row])] == ["  step 1", "  step 2", "  step 3", "  its commands"]


def test_racecheck_sees_every_file_of_kernels() -> None:
    """The tests that it names exist, and have one case each."""
    root = Path(__file__).parents[1] / "kernels"
    files = set()
    for name in RACED:
        path, _, function = name.partition("::")
        (found,) = [node for node in ast.parse((root / path).read_text()).body if getattr(node, "name", "") == function]
        assert isinstance(found, ast.FunctionDef) and not found.decorator_list, name
        files.add(path.rpartition("/")[2].removeprefix("test_").removesuffix(".py"))
    assert files | {"head_triton"} == {module.rpartition(".")[2] for module in triton_modules()}


@pytest.mark.parametrize("part", [part for part in parts() if "thresher.cli" in part.command], ids=lambda p: p.name)
def test_its_commands_are_commands(
    part: CheckPart, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a GPU the commands run until they find that there is none."""
    if torch.cuda.is_available():
        pytest.skip("it would run")
    arguments = [argument for argument in part.command[3:] if argument not in ("--out", "{out}")]
    assert cli(arguments) == 2
    assert "--device cuda: torch" in capsys.readouterr().err


HIDDEN = """
import sys
from importlib import import_module

from thresher.bench.gpu_check import parts
from thresher.cli.main import run

names = "tokenizers safetensors jinja2 urllib3 bm25s matplotlib transformers trl datasets triton"
hidden = dict.fromkeys(names.split())
sys.modules.update(hidden)
print(run(["bench", "gpu-check", "--out", sys.argv[1]]), flush=True)
for part in sorted(parts(), key=lambda part: len(part.needs)):
    for name in part.needs:
        if name in hidden:
            sys.modules.pop(name, None)
    if part.rows == "smoke":
        import_module("thresher.bench.gpu_smoke")
    elif "thresher.cli" in part.command:
        print(part.name, run([word for word in part.command[3:] if word not in ("--out", "{out}")]), flush=True)
"""


@pytest.mark.slow
def test_a_part_needs_only_the_packages_that_it_names(tmp_path: Path) -> None:
    """Without the others, check and parts run until they find that there is no GPU."""
    command, hide = [*PYTHON, HIDDEN, str(tmp_path)], {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=os.environ | hide, capture_output=True, text=True, timeout=200)
    ends = ["2", *(f"{name} 2" for name in ("tuning", "loss", "attention", "decode", "rollout", "step"))]
    assert done.stdout.splitlines() == ends, done.stdout + done.stderr
    assert done.stderr.count("sees no CUDA device") == len(ends)
    assert named_parts(["rollout"])[0].needs == ("tokenizers", "urllib3")


SPREAD = {"p20": 1.0, "p50": 1.5, "p80": 2.0}
LOSS = {"ours": {"share": {"nominal": 0.6, "measured": 0.7}}}
DECODE = {
    "model": "7B",
    "shape": {"batch": 256, "group": 8, "shared": 1200, "own": 300},
} | {"tokens_per_s": 20_000.0, "floor_s": 0.005, "floor_share": 0.4, "predicted_share": 0.5, "host_s": 0.0004}
ROLLOUT = {"shape": "rag", "tokens": 48, "ours_tokens_per_s": SPREAD, "peer": "generate_batch", "ratio": SPREAD}
SHARED = {"tokens_per_s": SPREAD, "rollout_s": SPREAD, "update_s": SPREAD}
STEP = {"shape": "0.5B", "tokens": 80_384, "shared": SHARED, "ratio_step": 2.5}
STEP |= {"asked_tokens": 80_320, "computed_tokens": 20_080, "shared_gain": 3.0}


def test_the_lines_of_a_row() -> None:
    floor = "of the floor"
    right = {"shape": {"hidden": 1536}, "ours": LOSS, "ratio": {"ours": {"liger": SPREAD}}}
    line = TableLine("loss, H 1,536", f"60% {floor}", "-", f"{LOSS_TARGETS[1536]:.0%} {floor}", "liger 1.50x")
    assert loss_lines([right]) == [line]
    wrong = {"shape": {"hidden": 64}, "ours": {"ours": {"left_out": "Wrong."}}, "ratio": {}}
    assert loss_lines([wrong]) == [TableLine("loss, H 64", "Wrong.")]
    assert loss_lines([{"left_out": [{"hidden": 64, "reason": "The budget was used up."}]}]) == []
    sides = {"ours": {"left_out": None, "ms": SPREAD}}
    heads = {"model": "7B", "sides": sides, "floor_ms": 0.6, "ratio": {"flex": SPREAD}}
    line = TableLine("attention, heads of 7B", f"1.50 ms, 40% {floor}", "-", f"45% {floor}", "flex 1.50x")
    assert attention_lines([heads]) == [line]
    wrong = heads | {"sides": {"ours": {"left_out": "It is wrong by 5.0e-01."}}, "ratio": {}}
    assert attention_lines([wrong])[0].measured == "It is wrong by 5.0e-01."
    kind, rate = "decode 7B, context 1,200/8 + 300", "20,000 tokens/s, 40%"
    assert decode_lines([DECODE]) == [
        TableLine(kind, rate, "25,600 tokens/s", f"50% {floor}"),
        TableLine("  the host's part of a step, 7B", "0.40 ms", "-", ".5 ms"),
    ]
    unknown = decode_lines([DECODE | {"floor_s": None, "floor_share": None, "predicted_share": None}])
    assert unknown[0] == TableLine(kind, "20,000 tokens/s")
    line = TableLine("rollout rag, 48 tokens", "2 tokens/s", "-", "3x generate_batch", "generate_batch 1.50x")
    alone = TableLine("rollout rag, 48 tokens", "2 tokens/s")
    ours = ROLLOUT | {"peer": None, "ratio": None}
    assert rollout_lines([ours, ROLLOUT]) == [line, NOT_PREDICTED]
    assert rollout_lines([ours]) == [alone, NOT_PREDICTED] and rollout_lines([]) == []
    failed = ROLLOUT | {"ratio": None, "peer_failure": "OutOfMemoryError: none left"}
    assert rollout_lines([failed])[0].peer == "OutOfMemoryError: none left"


def test_the_lines_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have the predictions of `bench roofline` for this machine's GPU, if it is a known one."""
    monkeypatch.setattr(planning_time, "this_chip", lambda device: None)
    assert step_lines([STEP | {"ratio_step": None, "peer_failure": "not measured yet"}, STEP]) == [
        TableLine("step 0.5B, 80,384 tokens", "2 tokens/s", peer="TRL 2.50x"),
        TableLine("  its rollout", "1.50 s"),
        TableLine("  its update, prefixes shared", "1.50 s"),
        TableLine("  its update, prefixes shared / unshared", "3.00x", "4.00x by tokens"),
    ]
    profiled = step_lines([STEP | {"update_profile": {"kernels": 1900, "busy_s": 0.25}}])
    assert profiled[-1].measured == "1,900 kernels, 0.25 of 1.50 s"
    assert step_lines([STEP | {"ratio_step": None}])[0].peer == "-"
    assert step_lines([STEP | {"ratio_step": None, "peer_failure": "ImportError: x"}])[0].peer == "ImportError: x"
    monkeypatch.setattr(planning_time, "this_chip", lambda device: CHIPS["H200"])
    found = predicted_step(MODELS["0.5B"], CHIPS["H200"])
    assert [line.predicted for line in step_lines([STEP])] == [
        f"{80_384 / (found['rollout'] + found['update']):,.0f} tokens/s",
        f"{found['rollout']:.2f} s",
        f"{found['update']:.2f} s",
        f"{found['unshared'] / found['update']:.2f}x, 4.00x by tokens",
    ]
    assert [line.predicted for line in step_lines([STEP | {"shape": "7B-lora"}])][:3] == ["-"] * 3
