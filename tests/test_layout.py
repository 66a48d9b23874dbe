"""Test the layout: light modules stay light, and plain names do not collide with other packages."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from layout_cases import FOLDERS, ROOT, imports, modules

DECODING = ("engine.decoding.blocks", "engine.decoding.scheduler", "engine.decoding.stop_tags")


@pytest.mark.parametrize("absent", ["torch", "optional"])
def test_light_modules_load_neither_torch_nor_what_is_optional(absent: str) -> None:
    """`thresher --help` and the file formats must not load transformers or trl, even where they are installed."""
    modules = {
        "torch": (*DECODING, "engine.config.recipe", "engine.store.run_folder", "policy.config", "rewards", "cli.main"),
        "optional": ("cli.main", "policy", "retrieval", "rewards"),
    }[absent]
    names = {"torch"} if absent == "torch" else {"transformers", "trl", "datasets"}
    lines = [f"import thresher.{name}; assert not {names} & sys.modules.keys(), '{name}'" for name in modules]
    subprocess.run([sys.executable, "-P", "-c", "\n".join(["import sys", *lines])], check=True, cwd=ROOT)


@pytest.mark.parametrize("name", ["kernels", "engine", "policy", "rewards"])
def test_a_plain_name_is_not_our_folder(name: str) -> None:
    """Other packages probe for plain names (transformers for `kernels`) and must not find ours. `pytest` keeps the
    current folder out of the path; `python -m pytest` needs PYTHONSAFEPATH=1 for that."""
    found = importlib.util.find_spec(name)
    places = [] if found is None else [found.origin, *(found.submodule_search_locations or ())]
    assert not [place for place in places if place and Path(place).resolve().is_relative_to(ROOT / name)]
    ours = importlib.util.find_spec(f"thresher.{name}")
    assert ours is not None and ours.origin is not None


def test_every_folder_is_a_package_and_no_test_is() -> None:
    assert all((ROOT / folder / "__init__.py").is_file() for folder in FOLDERS)
    assert not (ROOT / "tests" / "__init__.py").exists()
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))  # importlib's import mode requires nothing else


def test_tests_lie_in_the_folders_of_what_they_test() -> None:
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(folders) > 15
    assert [str(folder) for folder in folders if not (ROOT / folder).is_dir()] == ["torture"]  # attacks all of it


def test_every_module_says_what_it_is() -> None:
    trees = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text("utf-8")) for path in modules()}
    assert [path for path, tree in trees.items() if tree.body and not ast.get_docstring(tree)] == []


def test_our_folders_are_imported_from_thresher() -> None:
    found = [(path, name) for path in modules() for name in imports(path.read_text("utf-8"))]
    assert len(found) > 1000 and [one for one in found if one[1].partition(".")[0] in FOLDERS] == []


def tracked() -> list[Path]:
    """Return the text files under version control."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.decode().split("\0") if name]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()[:8192]]


def forbidden() -> re.Pattern[str]:
    """Return the pattern, built from pieces, so that this file does not contain the names either."""
    homes = "|".join(("work", "home", "root", "Users"))
    hosts = "|".join(("py" + r"pi\.org", "python" + "hosted", "conda" + r"\.org", "npm" + r"js\.", "index" + "-url"))
    return re.compile(rf"(?<![\w.}}~>*])/(?:{homes})/\w|{hosts}|^[<>]{{7}} ")  # the last: leftovers of a merge


def test_tracked_files_name_no_path_of_a_machine_no_registry_and_no_conflict() -> None:
    pattern = forbidden()
    for bad in (
        f"in {'/'}home/me",
        f"'{'/'}root/x'",
        "https://py" + "pi.org/simple",
        "--index" + "-url",
        "<" * 7 + " HEAD",
    ):
        assert pattern.search(bad)
    for fine in (f"a{'/'}home/b", f"~{'/'}work/x", "the index " + "url"):
        assert not pattern.search(fine)
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[0]}"
        for path in tracked()
        for number, line in enumerate(path.read_text("utf-8", errors="replace").splitlines(), 1)
        if (match := pattern.search(line))
    ]
    assert found == []
