"""The demo's weights do not depend on the number of cores, bit for bit: its model computes with one thread."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHORT = (
    *("sft.steps=2", "sft.min_steps=1", "sft.gate_every=2", "sft.max_restarts=0", "sft.batch_size=4"),
    *("run.steps=1", "run.eval_questions=4", "rollout.questions_per_step=2", "rollout.max_turn_tokens=16"),
)


def begun(out: Path, cores: set[int]) -> subprocess.Popen[str]:
    """Start a short demo that is bound to these cores."""
    free = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "MKL_NUM"))}
    code = f"import os; os.sched_setaffinity(0, {cores}); from thresher.cli.main import main; main()"
    sets = [part for text in SHORT for part in ("--set", text)]
    return subprocess.Popen(
        [sys.executable, "-c", code, "demo", "--out", str(out), *sets],
        env=free | {"PYTHONSAFEPATH": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def digests(out: Path) -> dict[str, str]:
    """Return SHA-256 of all weights that a demo wrote, and of its evaluations."""
    (step,) = [
        json.loads(line) for line in (out / "grpo" / "metrics.jsonl").read_text().splitlines() if '"threads"' in line
    ]
    assert step["threads"] == 1
    files = sorted([*out.rglob("model.safetensors"), *(out / "grpo" / "evaluations").iterdir()])
    return {str(file.relative_to(out)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system does not bind a process to cores")
@pytest.mark.slow
def test_one_core_and_two_give_the_same_bits(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        pytest.skip("there is one core")
    # Run at the same time: most of it makes the world, which is not tested here.
    running = [begun(tmp_path / "one", {cores[0]}), begun(tmp_path / "two", set(cores))]
    said = [process.communicate()[1] for process in running]
    for process, error in zip(running, said, strict=True):
        assert process.returncode == 0, error[-2000:]
    one, two = digests(tmp_path / "one"), digests(tmp_path / "two")
    assert one == two and any(name.startswith("grpo") and name.endswith("safetensors") for name in one)
