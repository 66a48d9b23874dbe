"""Tests of promised bits under other instruction sets than this machine's: the tests marked `bits` of several files, in
separate processes, because torch and its libraries read these settings when they are loaded.

A test that finds the BLAS not batch-invariant skips (batch_invariance.py). It must not skip where batch invariance is
promised: on an Intel CPU with MKL's strict reproducibility, or with AVX-512 on one thread.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from batch_invariance import NOT_INVARIANT

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
MARKED = [
    "tests/kernels/test_paged_attention.py",
    "tests/kernels/test_logprob.py",
    "tests/kernels/test_noise.py",
    "tests/policy/test_lora.py",
    "tests/engine/rollout/test_rollout.py",
]
READ = ("MKL_", "ATEN_CPU_", "ONEDNN_", "DNNL_", "OMP_", "PYTEST_")
NARROW = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}  # with MKL_CBWR, emulates a CPU without AVX-512
SETTINGS: list[tuple[dict[str, str], int]] = [
    ({}, 1),
    ({}, 2),
    ({"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"}, 1),
    ({"MKL_CBWR": "COMPATIBLE"}, 1),
    ({"MKL_CBWR": "AVX2", **NARROW}, 1),
    ({"MKL_CBWR": "AVX2,STRICT", **NARROW}, 2),
    ({"MKL_CBWR": "AUTO,STRICT"}, 1),
    ({"MKL_CBWR": "AUTO,STRICT"}, 2),
]


def cpu_info() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8") if path.is_file() else ""


INTEL = "GenuineIntel" in cpu_info() and torch.backends.mkl.is_available()
AVX512 = re.search(r"^flags\b.*\bavx512f\b", cpu_info(), re.MULTILINE) is not None


def promised(settings: dict[str, str], threads: int) -> bool:
    """Return whether every probe must find batch invariance here."""
    if not INTEL:
        return False
    return settings.get("MKL_CBWR", "").endswith("STRICT") or (AVX512 and not settings and threads == 1)


IDS = [" ".join([*(f"{name}={value}" for name, value in s.items()), f"{n} threads"]) for s, n in SETTINGS]


def run_under(settings: dict[str, str], threads: int) -> subprocess.CompletedProcess[str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith(READ)}
    return subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "-rs", "--tb=short", "-m", "bits", *MARKED],
        env={**ours, **settings, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive", "PYTHONSAFEPATH": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def runs() -> Iterator[list[Future[subprocess.CompletedProcess[str]]]]:
    """Start the tests under each of SETTINGS, one process per processor at a time: most of a run keeps one busy."""
    pool = ThreadPoolExecutor(os.cpu_count())
    yield [pool.submit(run_under, settings, threads) for settings, threads in SETTINGS]
    pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("number", range(len(SETTINGS)), ids=IDS)
def test_bits_under(number: int, runs: list[Future[subprocess.CompletedProcess[str]]]) -> None:
    done = runs[number].result()
    assert done.returncode == 0, done.stdout + done.stderr
    ran = re.search(r"(\d+) passed", done.stdout)
    if promised(*SETTINGS[number]):
        assert ran and int(ran[1]) >= 8 and NOT_INVARIANT not in done.stdout, done.stdout
