"""Tests of training from Python as the documents show it: the README's block, and the notebook in docs/."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from document_play import Play
from documents import ROOT, Block, blocks
from gguf_cases import make_model, write_gguf

from thresher.common.errors import UserError
from thresher.engine.store.run_folder import read_metrics

SMALL = {"questions_per_step": 2, "group_size": 2, "max_turn_tokens": 6, "max_context": 400}


def shown(document: str) -> Block:
    return next(block for block in blocks(document) if block.is_python and "GRPO(" in block.text)


@pytest.fixture
def folder(tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a working folder with a tiny model and questions at the documents' paths."""
    shutil.copytree(tiny_model_folder, tmp_path / "models" / "Qwen2.5-0.5B-Instruct")
    for name in ("train", "dev"):
        lines = [json.dumps({"question": f"What is {n}?", "golden_answers": [str(n)]}) + "\n" for n in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("document", ["README.md", "docs/python.md"])
def test_the_lines_of_a_document_train(document: str, folder: Path) -> None:
    block = shown(document)
    assert document != "README.md" or len(block.text.strip().splitlines()) <= 10
    Play(folder, [block]).until(0)
    (summary,) = folder.glob("runs/*/summary.json")
    assert json.loads(summary.read_text())["steps"] == 2
    assert len([record for record in read_metrics(summary.parent) if "eval" not in record]) == 2


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("reward(text, gold)", "reward(text, golt)", "takes golt"),
        ('"gold": ', '"golt": ', "takes gold"),
        ("steps=", "step=", "step is not a key of a recipe"),
        ("models/", "nowhere/", "no such folder"),
        ("import GRPO", "import Grpo", "cannot import name"),
    ],
)
def test_lines_that_are_wrong_are_noticed(old: str, new: str, why: str, folder: Path) -> None:
    block = shown("README.md")
    assert old in block.text
    wrong = replace(block, text=block.text.replace(old, new))
    with pytest.raises((UserError, ImportError), match=why):
        Play(folder, [wrong]).until(0)


def test_the_cells_of_the_notebook_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    path = ROOT / "docs" / "grpo_smollm2.py"
    head, first, *cells = re.split(r"^# %% .*$", path.read_text("utf-8"), flags=re.M)
    names: dict[str, Any] = {"__name__": "cells"}
    for cell in (head, first):
        exec(compile(cell, str(path), "exec"), names)
    write_gguf(tmp_path / names["GGUF"], *make_model("llama", max_position_embeddings=1024))
    (tmp_path / "models").mkdir()
    names |= {"STEPS": 2, "DEV": 2, "SIZES": SMALL}
    for cell in cells:
        exec(compile(cell, str(path), "exec"), names)
    said = capsys.readouterr().out
    assert len(cells) >= 6 and re.search(r"^reward \d\.\d\d -> \d\.\d\d$", said, re.M)
    assert re.search(r"^   2 \d\.\d\d #*$", said, re.M)
    assert names["short"]("Graz", "Graz").reward == 1 and names["short"]("Cork", "Graz").reward == 0
    assert 0.1 <= names["short"]("She lives in the town of Graz", "Graz").reward < 1
