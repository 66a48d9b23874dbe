"""Tests that references in the documents exist: links, pictures, paths, names in README tables, `make` targets."""

import ast
import importlib
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from glob import glob
from pathlib import Path

import pytest
from documents import ROOT, documents, inline, links, read, table_rows, to_be_added

FOLDERS = ("bench", "cli", "common", "docs", "engine", "kernels", "policy", "recipes", "retrieval", "rewards", "tests")
SHOWN = ("quote.py", "sums.py", "mine.py", "path/to/file.py", "path/to/mine.py", "thresher.x")  # a reader's own files
_PATH = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./*-]+")
_FILE = re.compile(r"(?<![\w./<*-])(?:[\w-]+/)*\w+\.py\b")
_ROOM = re.compile(rf"(?<![\w./<-])(?:{'|'.join(FOLDERS)})(?:/[\w-]+(?:\.\w[\w-]*)*)+(?![\w/{{(<*-])")
_MODULE = re.compile(r"\bthresher(?:\.\w+)+")
_CALL = re.compile(r"(\w+)(?:\(([^)]*)\))?$")


def heads(document: str) -> set[str]:
    """Return the anchors of a document's headings."""
    lines = (line for line in read(document) if line.startswith("#"))
    return {re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in lines}


@pytest.mark.parametrize("document", documents())
def test_links_and_pictures_lead_somewhere(document: str) -> None:
    missing = []
    for number, link in links(document):
        target, _, anchor = link.partition("#")
        path = (ROOT / document).parent / target if target else ROOT / document
        if not path.exists():
            missing.append(f"{document}:{number}: {link} is not there")
        elif anchor and anchor not in heads(str(path.resolve().relative_to(ROOT))):
            missing.append(f"{document}:{number}: {link}: no heading makes this anchor")
    assert missing == []


@pytest.mark.parametrize("document", documents())
def test_paths_lead_somewhere(document: str) -> None:
    """A path from the top of the checkout, between backticks, exists."""
    missing = [
        f"{document}:{number}: {code} is not there"
        for number, code in inline(document)
        if _PATH.fullmatch(code.partition(":")[0])
        and not glob(str(ROOT / code.partition(":")[0]))
        and not to_be_added(document, code)
        and not glob(str((ROOT / document).parent / code.partition(":")[0]))
    ]
    assert missing == []


@cache
def paths() -> frozenset[str]:
    """Return every file and folder of the checkout, by each of its suffixes; a module also without ".py"."""
    found = [path for path in ROOT.glob("*") if path.is_file()]
    found += [path for folder in FOLDERS for path in (ROOT / folder, *(ROOT / folder).rglob("*"))]
    parts = [path.relative_to(ROOT).parts for path in found]
    endings = {"/".join(one[start:]) for one in parts for start in range(len(one))}
    return frozenset(endings | {ending.removesuffix(".py") for ending in endings})


def remarks(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of the docstrings and comments of a module."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if documented and (text := ast.get_docstring(node, clean=False)):
            yield node.body[0].lineno, text


def unknown(text: str) -> list[str]:
    """Return the files, folders and modules that a text names but that do not exist.

    A name that starts with an underscore may be the end of a file name ("_triton.py").
    """
    named = dict.fromkeys(found[0] for pattern in (_FILE, _ROOM) for found in pattern.finditer(text))
    wrong = [name for name in named if name not in paths() and not _is_suffix(name)]
    for found in _MODULE.finditer(text):
        path = "/".join(found[0].split(".")[1:])
        if path not in paths() and path.rpartition("/")[0] not in paths():  # the last part may be a name in a module
            wrong.append(found[0])
    return wrong


def _is_suffix(name: str) -> bool:
    """Return whether a name is allowed: the end of a file name, the placeholder FILE.py, or one in data/."""
    return (
        name == "FILE.py"
        or name.startswith("data/")
        or (name.startswith("_") and any(path.endswith(name) for path in paths()))
    )


def test_a_wrong_name_in_a_text_is_noticed() -> None:
    good = "engine/training/train.py, training/train.py, train.py, *_triton.py, _triton.py, retrieval/indexes, a/b"
    assert unknown(f"{good}, thresher.engine.episode, thresher.engine.episode.System, `policy/model`") == []
    wrong = ["engine/train.py", "grain.py", "retrieval/index", "thresher.engine.nowhere.System"]
    assert unknown(", ".join(wrong)) == wrong
    assert [text for _, text in remarks('"""One."""\nx = "a.py"  # two\ndef f():\n    """Three."""')] == [
        "# two",
        "One.",
        "Three.",
    ]


@pytest.mark.parametrize("folder", [*FOLDERS[:-1], pytest.param(FOLDERS[-1], marks=pytest.mark.slow)])
def test_docstrings_and_comments_name_what_is_there(folder: str) -> None:
    missing = [
        f"{path.relative_to(ROOT)}:{number}: {name} is not there"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for number, text in remarks(path.read_text("utf-8"))
        for name in unknown(text)
    ]
    assert missing == []


def test_settings_name_what_is_there() -> None:
    files = [*(ROOT / name for name in ("setup.py", "pyproject.toml", "Makefile")), *ROOT.glob("recipes/**/*.toml")]
    missing = [f"{path.relative_to(ROOT)}: {name}" for path in files for name in unknown(path.read_text("utf-8"))]
    assert missing == []


@pytest.mark.parametrize("document", [document for document in documents() if document != "docs/internals/log.md"])
def test_documents_name_what_is_there(document: str) -> None:
    """Paths that start in a folder of the package (`training/step.py: f`), and those in blocks.

    The log may name former files.
    """
    missing = [
        f"{document}:{number}: {name} is not there"
        for number, line in enumerate(read(document), start=1)
        for name in unknown(line)
        if name not in SHOWN and not to_be_added(document, name)
    ]
    assert missing == []


@pytest.mark.parametrize("row", table_rows("README.md", "package"), ids=lambda row: row[0])
def test_the_packages_of_the_readme_have_the_names_it_gives_them(row: list[str]) -> None:
    """The arguments that it shows exist, too."""
    package = importlib.import_module(row[0].strip("`"))
    shown = re.findall(r"`([^`]+)`", row[1])
    assert shown
    for text in shown:
        found = _CALL.match(text)
        assert found, text
        arguments = [one.strip() for one in (found[2] or "").split(",") if one.strip() not in ("", "..")]
        assert list(inspect.signature(getattr(package, found[1])).parameters)[: len(arguments)] == arguments


def test_the_systems_and_baselines_of_the_readme_load() -> None:
    from thresher.engine.baselines import NAMES as BASELINES
    from thresher.engine.systems import NAMES as SYSTEMS
    from thresher.engine.systems import load_system

    shown = [name for row in table_rows("README.md", "system") for name in re.findall(r"`(\w+)`", row[0])]
    assert sorted(shown) == sorted(SYSTEMS)
    for name in shown:
        load_system(name, {})
        assert list((ROOT / "recipes" / name).glob("*.toml"))
    text = " ".join(read("README.md"))
    said = re.search(r"Baselines without training: ([^.]*)\.", text)
    assert said and sorted(re.findall(r"`(\w+)`", said[1])) == sorted(BASELINES)


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([\w.-]+):", Path(ROOT / "Makefile").read_text("utf-8"), re.M))
    for document in documents():
        text = "\n".join(read(document))
        for target in re.findall(r"(?:^ {4,}|`)make ([a-z-]+)", text, re.M):
            assert target in targets, f"{document}: make {target} is no target of the Makefile"


def test_extras_and_variables_that_are_named_exist() -> None:
    setup = (ROOT / "setup.py").read_text("utf-8")
    sources = [path.read_text("utf-8") for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    for document in documents():
        text = "\n".join(read(document))
        for extras in re.findall(r"pip install '\.\[([\w,]+)\]'", text):
            assert all(f'"{extra}": [' in setup for extra in extras.split(",")), f"{document}: {extras}"
        for variable in set(re.findall(r"\bTHRESHER_[A-Z]+", text)):
            assert any(variable in source for source in sources), f"{document}: nothing reads {variable}"
