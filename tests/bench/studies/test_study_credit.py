"""Test `thresher study credit`: its table, figures and picture. tests/rewards/test_credit.py tests its rules."""

import json
from pathlib import Path

import pytest

from thresher.bench.studies.credit import FORESTS, enumerate_all
from thresher.cli import main as cli


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "study"
    assert cli.run(["study", "credit", "--out", str(out), "--draws", "2", "--seed", "7"]) == 0
    said = capsys.readouterr().out
    assert "Rules: against the policy gradient, median of 2 policies" in said and "+ weight 1 / |y|" in said
    found = json.loads((out / "credit.json").read_text())
    assert (found["policies"], found["seed"], found["dtype"]) == (2, 7, "float64") and found["torch"]
    assert found["rows"] == json.loads(json.dumps(enumerate_all(2, 7)))
    for row in found["rows"]:
        for name, figures in row["settings"].items():
            assert (name == FORESTS) == row["rule"].startswith("tree")
            for part in (one for key, one in figures.items() if key != "finding"):
                assert (
                    part["smallest"] <= part["low"] <= part["median"] <= part["high"] <= part["largest"]
                )  # bound: their order
    assert (out / "credit.png").read_bytes().startswith(b"\x89PNG")


def test_a_file_in_the_way_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert cli.run(["study", "credit", "--out", str(tmp_path / "file")]) == 2
    assert "in the way" in capsys.readouterr().err
