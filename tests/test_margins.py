"""Tests of the recorded thresholds: each kind of comparison, other seeds, and the table."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from margins import TESTS, compare, failures, shift_seeds, table

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

def test_beyond():
    assert 3.0 < 2.0
"""


CONFTEST = "import margins, pathlib; margins.TESTS = pathlib.Path(__file__).parent"


def recorded(folder: Path) -> list[dict[str, Any]]:
    (folder / "test_thresholds.py").write_text(THRESHOLDS)
    (folder / "conftest.py").write_text(CONFTEST)
    lines = folder / "rows.jsonl"
    environment = {"THRESHER_MARGINS": str(lines), "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-P", "-m", "pytest", "-p", "margins", "-p", "no:cacheprovider", str(folder)]
    done = subprocess.run(
        command, env={**os.environ, **environment}, cwd=folder, capture_output=True, text=True, check=False
    )
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    return [json.loads(line) for line in lines.read_text().splitlines()]


@pytest.mark.slow
def test_every_kind_of_threshold_is_recorded(tmp_path: Path) -> None:
    rows = recorded(tmp_path)
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
    beyond, otherwise = failures([row | {"setting": "as it is"} for row in rows])
    assert len(beyond) == 1 and "test_beyond (as it is)" in beyond[0] and otherwise == []


def test_thresholds_whose_figure_moves_are_ranked() -> None:
    def row(at: str, figure: float, setting: str) -> dict[str, Any]:
        return {"test": f"{at}[a]", "at": f"{at}:1", "figure": figure, "value": figure, "limit": 1, "setting": setting}

    rows = [row("same", 0.9, "one"), row("same", 0.9, "other"), row("wide", 0.1, "one"), row("wide", 0.2, "other")]
    rows += [row("near", 0.5, "one"), row("near", 0.4, "other")]
    first, second, *rest = table(rows, 1)
    assert (first, second) == (
        "3 thresholds, of which 2 have another figure in another run",
        "of those, 1 are nearer than three times what was seen",
    )
    assert [line.split() for line in rest] == [["0.5", "=", "0.5", "/", "1", "near:1"], ["near[a]", "(one)"]]


def test_other_seeds_give_other_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn() -> list[float]:
        torch.manual_seed(0)
        noise = torch.Generator().manual_seed(0)
        return [float(torch.rand(())), float(torch.rand((), generator=noise)), np.random.default_rng(0).random()]

    before = drawn()
    for module, name in ((torch, "Generator"), (torch, "manual_seed"), (np.random, "default_rng")):
        monkeypatch.setattr(module, name, getattr(module, name))  # restored afterwards
    shift_seeds(1)
    assert all(one != other for one, other in zip(drawn(), before, strict=True))
    shift_seeds(-1)
    assert drawn() == before


def test_a_chain_is_compared_as_python_compares_it() -> None:
    assert compare(("Lt", "LtE"), 1, 2, 2) is True and compare(("Lt", "LtE"), 3, 2, "not a number") is False
    with pytest.raises(TypeError):
        compare(("Lt",), 1, "2")
    assert torch.equal(compare(("Gt",), torch.tensor([1.0, 3.0]), 2), torch.tensor([False, True]))
