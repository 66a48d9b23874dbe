"""Test what is stored of the machine and the code with measured figures."""

import subprocess
from pathlib import Path

import pytest

from thresher.common import machine


def test_results_of_a_bench_do_not_mark_the_next_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*words: str) -> None:
        owner = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", "-C", str(tmp_path), *owner, *words], check=True, capture_output=True)

    rows, picture, code = (tmp_path / name for name in ("bench/results/step.jsonl", "docs/step.png", "code.py"))
    for file in (rows, picture, code):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("1\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        git(*words)
    monkeypatch.setattr(machine, "checkout", lambda: tmp_path)
    clean = machine.commit.__wrapped__()
    assert clean is not None and not clean.endswith("+")
    rows.write_text("2\n")
    picture.write_text("2\n")
    assert machine.commit.__wrapped__() == clean
    code.write_text("2\n")
    assert machine.commit.__wrapped__() == f"{clean}+"
