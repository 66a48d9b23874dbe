"""`thresher bench compile`: what it takes, what it refuses, and another Triton than the installed one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from thresher.bench.compile import run as command
from thresher.bench.compile import run_under
from thresher.bench.compile.target import TARGETS
from thresher.cli import main as cli


def test_the_command_line_offers_every_target_and_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [word for name in TARGETS for word in ("--target", name)]
    assert cli.build_parser().parse_args(["bench", "compile", *chosen]).target == list(TARGETS)
    assert cli.run(["bench", "compile", "--target", "sm_70"]) == 2
    assert f"--target: expected {' or '.join(TARGETS)}, got sm_70" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--module", "no.such"], "--module no.such: there is no such module"),
        (["--module", "thresher.kernels.none"], "--module thresher.kernels.none: there is no such module"),
        (["--module", "json"], "--module json: expected a module with a function specialisations()"),
    ],
)
def test_a_module_that_cannot_be_meant_is_refused(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert cli.run(["bench", "compile", *arguments]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith(f"thresher: {message}") and complaint.count("\n") == 1


def test_under_the_interpreter_the_command_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert cli.run(["bench", "compile"]) == 2
    assert capsys.readouterr().err == (
        "thresher: TRITON_INTERPRET is 1, under which Triton interprets kernels and cannot compile them: "
        "unset it and run again\n"
    )


def test_without_triton_the_command_refuses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    assert cli.run(["bench", "compile"]) == 2
    assert capsys.readouterr().err.startswith("thresher: Triton is not installed")


@pytest.mark.slow
def test_another_triton_is_found_by_its_folder(tmp_path: Path) -> None:
    """A stand-in for one that was unpacked: it is imported in place of the installed one, by a process of its own."""
    package = tmp_path / "other" / "triton"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise ModuleNotFoundError('the other Triton, from ' + __file__)\n")
    command = [sys.executable, "-P", "-m", "thresher.cli", "bench", "compile", "--target", "sm_80", "--module", "toys"]
    done = subprocess.run([*command, "--triton", str(tmp_path / "other")], capture_output=True, text=True, check=False)
    assert done.returncode not in (0, 2) and f"the other Triton, from {package}" in done.stderr
    seen = {}

    def note(words: list[str], env: dict[str, str], check: bool) -> subprocess.CompletedProcess[str]:
        seen.update(words=words, path=env["PYTHONPATH"])
        return subprocess.CompletedProcess(words, 7)

    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("PYTHONPATH", "before")
        patched.setattr(subprocess, "run", note)
        assert run_under(tmp_path / "other", ("sm_80", "sm_90"), ("toys",), "rows.jsonl") == 7
    assert seen["path"] == os.pathsep.join((str(tmp_path / "other"), "before"))
    assert seen["words"][3:] == [
        *("thresher.cli", "bench", "compile", "--target", "sm_80", "--target", "sm_90"),
        *("--module", "toys", "--out", "rows.jsonl"),
    ]


def test_a_folder_without_a_triton_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["bench", "compile", "--triton", str(tmp_path)]) == 2
    complaint = capsys.readouterr().err
    assert complaint.startswith(f"thresher: --triton {tmp_path}: expected a folder into which a wheel")
    assert complaint.count("\n") == 1
