"""The shell's completion, asked of bash itself."""

import shutil
import subprocess
from pathlib import Path

import pytest

from thresher.cli import main as cli


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from thresher.cli.commands.completion import script

    path = tmp_path_factory.mktemp("completion") / "thresher.bash"
    path.write_text(script(cli.build_parser()))
    return path


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("tr", {"train", "train-encoder"}),
        ("index bu", {"build"}),
        ("index build --corp", {"--corpus"}),
        ("train r.toml --out runs/index --res", {"--resume"}),  # a value is no command
        ("train r.toml --device c", {"cpu", "cuda"}),
        ("train recipes/", set()),  # files are the shell's
    ],
)
def test_bash_completes(script: Path, typed: str, expected: set[str]) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    words = ["thresher", *typed.split(" ")]
    asked = f'. "$0"; COMP_WORDS=("$@"); COMP_CWORD={len(words) - 1}; _thresher; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run([bash, "-uc", asked, str(script), *words], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert set(done.stdout.split()) == expected


def test_the_command_prints_it(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["completion", "bash"]) == 0
    assert capsys.readouterr().out == script.read_text()
