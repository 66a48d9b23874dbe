"""Scripts run where Triton compiles: in separate processes, because kernels may be interpreted in this one."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def environment(cache: Path, *folders: Path) -> dict[str, str]:
    """Return the environment of a process that compiles kernels into a separate cache. folders: to import from."""
    found = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, (*map(str, folders), os.environ.get("PYTHONPATH"))))
    return found | {"PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache)}


def said(script: Sequence[str], cache: Path, *folders: Path) -> Any:
    """Return what a script prints, parsed as JSON: `-c text`, or a path and arguments."""
    done = subprocess.run(
        [sys.executable, "-P", *script],
        env=environment(cache, *folders),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
