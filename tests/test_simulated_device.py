"""Tests of a GPU's code path without a GPU: on_simulated_device.py, the decoder's own tests and gpu-check, simulated.

They run in a separate process, because torch keeps the device. `make simcuda` runs the same with interpreted kernels.
"""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from random import random

import pytest
import simcuda

from thresher.bench.harness import read_rows

HERE = Path(__file__).parent
CASES = str(HERE / "on_simulated_device.py")
DECODER = str(HERE / "engine/decoding/test_decoder_cuda.py")

pytestmark = pytest.mark.skipif(simcuda.missing() is not None, reason=f"no simulated device: {simcuda.missing()}")


def environment(**more: str) -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")} | more


def run(*words: str) -> None:
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    env = environment(SIMCUDA="1")
    done = subprocess.run(command, cwd=HERE.parent, env=env, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_a_run_and_rules_broken_on_purpose() -> None:
    run(CASES, "-m", "not slow")


@pytest.mark.slow
def test_runs_commands_and_every_line_that_asks_for_cuda() -> None:
    run(CASES)


@pytest.mark.slow
def test_the_decoder_s_own_tests() -> None:
    run(DECODER)


def begin_gpu_check(results: Path, *parts: str) -> subprocess.Popen[str]:
    """Start gpu-check with small sizes; its output is a text pipe. Every process that it starts has the device."""
    before = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join([str(HERE / "simulated_site"), str(HERE), *([before] if before else [])])
    env = environment(SIMCUDA="1", TRITON_INTERPRET="1", PYTHONPATH=path, PYTHONUNBUFFERED="1")
    command = [sys.executable, "-P", str(HERE / "simulated_gpu_check.py"), str(results), *parts]
    return subprocess.Popen(command, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.mark.slow
def test_gpu_check_ends_with_its_table(tmp_path: Path) -> None:
    names = ("smoke", "tests", "tuning", "loss", "attention", "decode", "rollout", "step")
    process = begin_gpu_check(tmp_path, *names)  # racecheck needs a GPU if compute-sanitizer is installed
    said, _ = process.communicate(timeout=1800)
    assert process.returncode == 0, said[-6000:]
    (table,) = tmp_path.glob("check-*.txt")
    assert table.read_text() in said and table.read_text().startswith("gpu-check on Simulated GPU")
    assert re.findall(r"^(\w+) +passed", table.read_text(), re.MULTILINE) == list(names)


# The line after which gpu-check is killed, the most seconds between, and the numbers of tables and of rows that may be
# left. A part takes more than a second: its process imports torch. A part's line is printed before these are written.
KILLS = {
    "in the first part": ("loss ..", 1.0, {0}),
    "as the first part ends": ("loss: passed", 0.01, {0, 1}),
    "in the second part": ("attention ..", 5.0, {1}),
}


@pytest.mark.slow
@pytest.mark.parametrize("moment", KILLS)
def test_a_killed_gpu_check_leaves_the_table_of_the_parts_that_had_ended(moment: str, tmp_path: Path) -> None:
    """The kill comes at a random moment: any must do. No table is left before a part has ended."""
    after, seconds, tables = KILLS[moment]
    process = begin_gpu_check(tmp_path, "loss", "attention")
    assert process.stdout is not None
    line = said = ""
    while not line.startswith(after):
        line = process.stdout.readline()
        assert line, f"it ended: {said}"
        said += line
    time.sleep(seconds * random())
    process.send_signal(signal.SIGSTOP)  # so that it starts no part after its children are read
    os.waitpid(process.pid, os.WUNTRACED)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.kill()
    process.communicate()
    for child in children:  # the part, which has its own process group once it has begun
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError):
                kill(int(child), signal.SIGKILL)
    left = [path.read_text() for path in tmp_path.glob("check-*.txt")]
    assert len(left) in tables
    for table in left:
        assert table.startswith("gpu-check on Simulated GPU") and re.search(r"^loss +passed", table, re.MULTILINE)
    rows = {path.name: len(read_rows(path)) for path in tmp_path.glob("*.jsonl")}
    assert rows["check-simulated-gpu.jsonl"] in tables
    assert 1 not in tables or rows["loss-simulated-gpu.jsonl"] == 1
