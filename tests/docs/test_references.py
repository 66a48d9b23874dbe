"""What the documents point at is there: links, pictures, paths, names of the README's tables, targets of `make`."""

import importlib
import inspect
import re
from glob import glob
from pathlib import Path

import pytest
from documents import ROOT, documents, inline, links, read, table_rows, to_be_added

FOLDERS = ("bench", "cli", "docs", "engine", "kernels", "policy", "recipes", "retrieval", "rewards", "tests")
_PATH = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./*-]+")
_CALL = re.compile(r"(\w+)(?:\(([^)]*)\))?$")


def heads(document: str) -> set[str]:
    """The anchors that a document's headings make."""
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
    """A path from the top of the checkout between backquotes."""
    missing = [
        f"{document}:{number}: {code} is not there"
        for number, code in inline(document)
        if _PATH.fullmatch(code.partition(":")[0])
        and not glob(str(ROOT / code.partition(":")[0]))
        and not to_be_added(document, code)
        and not glob(str((ROOT / document).parent / code.partition(":")[0]))
    ]
    assert missing == []


@pytest.mark.parametrize("row", table_rows("README.md", "package"), ids=lambda row: row[0])
def test_the_packages_of_the_readme_have_the_names_it_gives_them(row: list[str]) -> None:
    """So have their functions the arguments that it shows."""
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
