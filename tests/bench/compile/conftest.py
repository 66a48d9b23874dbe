"""`thresher bench compile`, run once on all our kernels and once on the toys; every test of this folder reads the rows.

In processes of their own, since here kernels may be interpreted ones.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from compiling import environment

from thresher.bench.compile.target import TARGETS

HERE = Path(__file__).parent


class Run(NamedTuple):
    status: int
    said: str
    complaint: str
    rows: dict[tuple[str, str], Any]  # (kernel, target) -> row
    left_in_cache: list[Path]


def run(folder: Path, *arguments: str) -> Run:
    command = [sys.executable, "-P", "-W", "ignore", "-m", "thresher.cli", "bench", "compile"]
    done = subprocess.run(
        [*command, "--out", str(folder / "rows.jsonl"), *arguments],
        capture_output=True,
        text=True,
        env=environment(folder / "cache", HERE) | {"COLUMNS": "80"},
    )
    written = folder / "rows.jsonl"
    rows = [json.loads(line) for line in written.read_text("utf-8").splitlines()] if written.exists() else []
    left = list((folder / "cache").rglob("*.cubin"))
    return Run(done.returncode, done.stdout, done.stderr, {(r["kernel"], r["target"]): r for r in rows}, left)


@pytest.fixture(scope="session")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The command as it is, every module of kernels; a process for each target, for they take half a minute each."""
    with ThreadPoolExecutor() as pool:
        runs = list(pool.map(lambda name: run(tmp_path_factory.mktemp(name), "--target", name), TARGETS))
    return Run(
        max(one.status for one in runs),
        "".join(one.said for one in runs),
        "".join(one.complaint for one in runs),
        {key: row for one in runs for key, row in one.rows.items()},
        [path for one in runs for path in one.left_in_cache],
    )


@pytest.fixture(scope="session")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The command on toy_kernels.py."""
    return run(tmp_path_factory.mktemp("toys"), "--module", "toy_kernels")
