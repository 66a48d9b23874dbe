"""Test the layout: imports go one way, light modules stay light, and plain names do not collide with other packages."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from layout_cases import RANK, ROOT, imports, modules


def broken(path: str, source: str) -> list[str]:
    """What a file imports that it must not."""
    here = path.partition("/")[0]
    wrong = []
    for name, lazy in imports(source):
        top, _, rest = name.partition(".")
        if top in RANK:
            wrong.append(f"{path}: {name} without thresher in front")
        if top != "thresher" or not rest:
            continue
        there = rest.partition(".")[0]
        allowed = there == here or RANK[there] < RANK[here]
        if not allowed:
            wrong.append(f"{path}: {name}{' (inside a function)' if lazy else ''}")
    return wrong


def test_imports_go_one_way() -> None:
    found = modules()
    assert len(found) > 40
    assert [wrong for path in found for wrong in broken(str(path.relative_to(ROOT)), path.read_text("utf-8"))] == []


@pytest.mark.parametrize(
    ("path", "source", "wrong"),
    [
        ("kernels/a.py", "from thresher.policy import x", 1),
        ("kernels/a.py", "def f():\n    import thresher.rewards.text", 1),
        ("rewards/a.py", "from thresher.kernels import loss", 1),
        ("policy/a.py", "if True:\n    from thresher.retrieval.indexes.load import Index", 1),
        ("retrieval/a.py", "from thresher import engine", 1),
        ("engine/training/train.py", "def f():\n    from thresher.bench.step import run", 1),
        ("bench/a.py", "from thresher.cli.main import run", 1),
        ("engine/a.py", "import kernels", 1),
        ("cli/main.py", "def f():\n    from thresher.bench.step import run", 0),
        (
            "engine/a.py",
            "from thresher.policy import x\nfrom thresher.engine.b import y\nimport thresher.kernels.loss",
            0,
        ),
        ("bench/a.py", "from thresher.engine.training.train import train", 0),
    ],
)
def test_the_test_of_imports_can_tell(path: str, source: str, wrong: int) -> None:
    assert len(broken(path, source)) == wrong


@pytest.mark.parametrize(
    "module",
    [
        "rewards",
        "engine.decoding.blocks",
        "engine.decoding.scheduler",
        "engine.decoding.stop_tags",
        "engine.config.recipe",
        "engine.store.run_folder",
        "cli.main",
    ],
)
def test_what_needs_no_torch_loads_none(module: str) -> None:
    check = f"import sys, thresher.{module}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", check], check=True, cwd=ROOT)


@pytest.mark.parametrize("module", ["cli.main", "policy", "retrieval", "rewards"])
def test_what_loads_on_any_machine_imports_nothing_optional(module: str) -> None:
    """`thresher --help` and the file formats need neither transformers nor trl, not even where they are installed."""
    check = f"import sys, thresher.{module}; sys.exit(bool({{'transformers', 'trl', 'datasets'}} & sys.modules.keys()))"
    subprocess.run([sys.executable, "-P", "-c", check], check=True, cwd=ROOT)


@pytest.mark.parametrize("name", ["kernels", "engine", "policy", "rewards"])
def test_a_plain_name_is_not_our_folder(name: str) -> None:
    """Other packages probe for plain names (transformers for `kernels`) and must not find ours. `pytest` keeps the
    current folder out of the path; `python -m pytest` would not, but for PYTHONSAFEPATH=1."""
    found = importlib.util.find_spec(name)
    places = [] if found is None else [found.origin, *(found.submodule_search_locations or ())]
    assert not [place for place in places if place and Path(place).resolve().is_relative_to(ROOT / name)]
    ours = importlib.util.find_spec(f"thresher.{name}")
    assert ours is not None and ours.origin is not None


def test_every_folder_is_a_package_and_no_test_is() -> None:
    assert all((ROOT / folder / "__init__.py").is_file() for folder in RANK)
    assert not (ROOT / "tests" / "__init__.py").exists()
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names))  # importlib's import mode needs no more than that


def test_tests_lie_in_the_folders_of_what_they_test() -> None:
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    assert len(folders) > 15
    assert [str(folder) for folder in folders if not (ROOT / folder).is_dir()] == ["torture"]  # attacks all of it


def test_every_module_says_what_it_is() -> None:
    silent = [
        str(path.relative_to(ROOT))
        for path in modules()
        if (tree := ast.parse(path.read_text("utf-8"))).body and not ast.get_docstring(tree)
    ]
    assert silent == []


def tracked() -> list[Path]:
    """Text files under version control."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.decode().split("\0") if name]
    return [path for path in paths if path.is_file() and b"\0" not in path.read_bytes()[:8192]]


def forbidden() -> re.Pattern[str]:
    """Put together from pieces, so that this file does not name them either."""
    homes = "|".join(("work", "home", "root", "Users"))
    hosts = "|".join(("py" + r"pi\.org", "python" + "hosted", "conda" + r"\.org", "npm" + r"js\.", "index" + "-url"))
    return re.compile(rf"(?<![\w.}}~>*])/(?:{homes})/\w|{hosts}")


def test_tracked_files_name_no_path_of_a_machine_and_no_registry() -> None:
    pattern = forbidden()
    for bad in (f"in {'/'}home/me", f"'{'/'}root/x'", "https://py" + "pi.org/simple", "--index" + "-url"):
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
