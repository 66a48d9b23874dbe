"""What is recorded of a test's thresholds: each kind of comparison, the largest figure, other seeds, and the table."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from margins import TESTS, compare, failures, table

THRESHOLDS = """
import numpy as np
import pytest
import torch

def test_kinds():
    assert 0 < float("1e-6") < 4e-6
    assert (torch.tensor([1.0, 3.0, -9.0]) < 4).all()
    assert 0.9 > 0.3 and not 3 > 4
    assert 1.0 < 1.75 < 2.0
    assert {"a": 1.05} == {"a": pytest.approx(1.0, abs=0.1)}
    torch.testing.assert_close(torch.ones(2), torch.ones(2) + 1e-3, rtol=0, atol=4e-3)
    np.testing.assert_allclose(np.ones(2), np.ones(2), rtol=1e-3)
    assert all(x <= 0.5 for x in (0.1, 0.2) if x < 0.15)
    assert len("abc") < 4

def test_seed():
    assert torch.rand((), generator=torch.Generator().manual_seed(0)) < 2
    torch.manual_seed(0)
    assert torch.rand(()) < 2
    assert np.random.default_rng(0).random() < 2.0

def test_beyond():
    assert 3.0 < 2.0
"""


CONFTEST = "import margins, pathlib; margins.TESTS = pathlib.Path(__file__).parent"


def recorded(folder: Path, seed: int) -> list[dict[str, Any]]:
    (folder / "test_thresholds.py").write_text(THRESHOLDS)
    (folder / "conftest.py").write_text(CONFTEST)
    lines = folder / f"{seed}.jsonl"
    environment = {"THRESHER_MARGINS": str(lines), "THRESHER_TEST_SEED": str(seed), "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-P", "-m", "pytest", "-p", "margins", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(
        command, env={**os.environ, **environment}, cwd=folder, capture_output=True, text=True, check=False
    )
    assert "1 failed, 2 passed" in done.stdout, done.stdout + done.stderr
    return [json.loads(line) | {"setting": f"seed +{seed}"} for line in lines.read_text().splitlines()]


def test_every_kind_of_threshold_is_recorded_and_other_seeds_move_those_of_noise(tmp_path: Path) -> None:
    rows = recorded(tmp_path, 0)
    by_line = {int(row["at"].rpartition(":")[2]): row["figure"] for row in rows if "at" in row}
    lines = THRESHOLDS.splitlines()
    figures = {lines[number - 1].strip(): figure for number, figure in by_line.items()}
    expected = {
        "assert 0 < ": 0.25, "assert (torch": 0.75, "assert 0.9": 1 / 3, "assert 1.0 <": 0.5, "assert {": 0.5,
        "torch.testing": 0.25, "np.testing": 0.0, "assert all": 0.2, "assert 3.0": 1.5,
    }  # fmt: skip
    for start, figure in expected.items():
        (found,) = (found for line, found in figures.items() if line.startswith(start))
        assert found == pytest.approx(figure, rel=1e-4), start
    assert not any("bound of" in line or "len(" in line for line in figures)
    more = recorded(tmp_path, 1)
    assert sum(1 for one, other in zip(rows, more, strict=True) if one != {**other, "setting": "seed +0"}) == 3
    printed = "\n".join(table(rows + more, 10))
    assert "12 thresholds, of which 3 have another figure" in printed
    beyond, otherwise = failures(rows + more)
    assert len(beyond) == 1 and "test_beyond (seed +0)" in beyond[0] and otherwise == []


def test_a_chain_is_compared_as_python_compares_it() -> None:
    assert compare(("Lt", "LtE"), 1, 2, 2) is True and compare(("Lt", "LtE"), 3, 2, "not a number") is False
    with pytest.raises(TypeError):
        compare(("Lt",), 1, "2")
    assert torch.equal(compare(("Gt",), torch.tensor([1.0, 3.0]), 2), torch.tensor([False, True]))
