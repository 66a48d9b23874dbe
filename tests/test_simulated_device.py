"""The path of a GPU, where there is none: on_simulated_device.py and the decoder's own tests, on the simulated device.

In a process of its own, since torch keeps the device. `make simcuda` runs the same with Triton's kernels, interpreted.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import simcuda

HERE = Path(__file__).parent
CASES = str(HERE / "on_simulated_device.py")
DECODER = str(HERE / "engine/decoding/test_decoder_cuda.py")

pytestmark = pytest.mark.skipif(simcuda.missing() is not None, reason=f"no simulated device: {simcuda.missing()}")


def run(*words: str) -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")} | {"SIMCUDA": "1"}
    command = [sys.executable, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
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
