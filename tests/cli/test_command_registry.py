"""Commands are found in their folders, say what they must, and cost nothing until they are called."""

import argparse
import ast
import importlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from thresher.cli import commands
from thresher.cli.registry import add_commands, members

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 60
HEAVY = {"torch", "transformers", "trl", "datasets", "faiss", "tokenizers", "matplotlib", "bm25s", "aiohttp"}
GREET = '''"""Says hello."""

HELP = "say hello"
EXAMPLE = "toy say-hello"
PLACE = {place}


def add_arguments(parser):
    parser.add_argument("--name", default="you")


def run(options):
    print(f"hello {{options.name}}")
'''


def modules(package: ModuleType = commands) -> Iterator[ModuleType]:
    """Every command and every group."""
    for module in members(package):
        yield module
        if hasattr(module, "__path__"):
            yield from modules(module)


@pytest.mark.parametrize("module", list(modules()), ids=lambda module: module.__name__.partition("commands.")[2])
def test_a_command_says_what_it_must(module: ModuleType) -> None:
    assert module.__doc__ and isinstance(module.HELP, str) and isinstance(module.PLACE, int)
    assert isinstance(module.EXAMPLE, str)
    if hasattr(module, "__path__"):
        assert isinstance(module.METAVAR, str)
    else:
        assert module.__doc__.startswith("`thresher ")
        assert list(inspect.signature(module.add_arguments).parameters) == ["parser"]
        assert list(inspect.signature(module.run).parameters) == ["options"]


def test_a_file_in_a_folder_of_commands_is_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "toy_commands"
    (folder / "group").mkdir(parents=True)
    (folder / "__init__.py").write_text('METAVAR, EXAMPLE = "COMMAND", "toy first"')
    (folder / "group" / "__init__.py").write_text(
        'HELP, PLACE, METAVAR, EXAMPLE = "a group", 15, "ACTION", "toy group inner"'
    )
    (folder / "say_hello.py").write_text(GREET.format(place=20))
    (folder / "first.py").write_text(GREET.format(place=3))
    (folder / "group" / "inner.py").write_text(GREET.format(place=1))
    monkeypatch.syspath_prepend(tmp_path)
    parser = argparse.ArgumentParser(prog="toy")
    add_commands(parser, importlib.import_module("toy_commands"))
    text = parser.format_help()
    assert text.index("first") < text.index("group") < text.index("say-hello") and "COMMAND" in text
    for arguments in (["say-hello", "--name", "me"], ["group", "inner"]):
        options = parser.parse_args(arguments)
        options.handler(options)
    assert capsys.readouterr().out == "hello me\nhello you\n"


def test_help_loads_nothing_heavy() -> None:
    """`thresher --help` imports every command's file, and so none of them may import its work at the top."""
    check = (
        "import sys; from thresher.cli.main import build_parser; build_parser().format_help(); "
        f"print(sorted({HEAVY!r} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-P", "-c", check], check=True, cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == "[]\n"


def test_the_package_is_the_command_line() -> None:
    command = [sys.executable, "-P", "-m", "thresher.cli", "--help"]
    found = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.startswith("usage: thresher ")


def trees(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), ast.parse(path.read_text("utf-8"))


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [str(node.module)] if isinstance(node, ast.ImportFrom) else []


def test_argparse_is_the_command_lines_alone() -> None:
    others = trees("kernels", "rewards", "policy", "retrieval", "engine", "bench", "recipes")
    assert [path for path, tree in others for node in ast.walk(tree) if "argparse" in imported(node)] == []


def test_no_function_of_a_command_is_long() -> None:
    long = [
        f"{path}: {node.name}"
        for path, tree in trees("cli")
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and (node.end_lineno or 0) - node.lineno >= LONGEST
    ]
    assert long == []
