"""Tests of an installation: one version everywhere, types for users, and names that can be found."""

import importlib.util
import re
import subprocess
import sys
from importlib.metadata import metadata
from pathlib import Path

import pytest

import thresher

ROOT = Path(__file__).resolve().parents[1]


def test_the_version_is_one() -> None:
    (cited,) = re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text("utf-8"), re.MULTILINE)
    assert thresher.__version__ == metadata("thresher")["Version"] == cited
    assert f"## {thresher.__version__}" in (ROOT / "CHANGELOG.md").read_text("utf-8")


def test_thresher_is_one_package_whose_types_are_used() -> None:
    spec = importlib.util.find_spec("thresher")
    assert spec is not None and spec.origin is not None, (
        "a namespace would leave an empty folder when it is uninstalled"
    )
    assert (Path(spec.origin).parent / "py.typed").is_file()


def test_setup_names_every_package_and_the_page(tmp_path: Path) -> None:
    """Check what setuptools would build, without building it."""
    words = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    if done.returncode and "No module named 'setuptools'" in done.stderr:
        pytest.skip("setuptools is not installed")
    assert done.returncode == 0, done.stderr
    (info,) = tmp_path.glob("*.egg-info")
    about = (info / "PKG-INFO").read_text("utf-8")
    assert "Description-Content-Type: text/markdown" in about and "\n# Thresher\n" in about
    sources = (info / "SOURCES.txt").read_text("utf-8").splitlines()
    assert {"package/__init__.py", "package/py.typed", "recipes/search_r1/laptop.toml"} <= set(sources)


@pytest.mark.parametrize("package", ["thresher.engine", "thresher.policy"])
def test_names_that_are_loaded_late_are_listed(package: str) -> None:
    code = f"import sys, {package} as it; print(set(it.__all__) <= set(dir(it)), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["True", "False"], done.stderr
