"""Measures the margin of every numeric threshold of the tests over CPU settings and seeds.

    make test-margins SEEDS=20 TESTS="tests/kernels tests/policy" MARKS="not slow"

runs the tests once as they are to find those that compare numbers, then these under every setting of
test_bits_settings.py and with every seed, and prints the ten tightest thresholds. A threshold's figure is the compared
value divided by its limit, 1 where the test just passes.

There are two parts: a pytest plugin (`pytest -p margins` with THRESHER_MARGINS=FILE) that appends to FILE one JSON line
for each threshold of each test, and the program that runs pytest with it. The plugin sees `<`, `<=`, `>` and `>=`
between numbers in `assert` statements of tests and their helpers, `pytest.approx`, and torch's and NumPy's comparisons
with a tolerance. It ignores comparisons of two integers, with 0, and with a tolerance of 0. THRESHER_TEST_SEED is added
to the seeds of torch's and NumPy's generators; those of `random.Random`, which choose words and scenarios, are kept. A
line that ends with a comment `# bound: ..` compares a value with a proven bound, which it may reach, and is not ranked.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import importlib.util
import json
import linecache
import math
import operator
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

TESTS = Path(__file__).resolve().parent
SETTINGS_FILE = TESTS / "kernels/test_bits_settings.py"
OPERATORS = {"Lt": operator.lt, "LtE": operator.le, "Gt": operator.gt, "GtE": operator.ge}
COMPARE = "__compare_recorded__"
OF_MAKE = {
    "MAKEFLAGS",
    "MAKEOVERRIDES",
    "MFLAGS",
    "OUT",
    "SEED",
    "SEEDS",
    "TESTS",
    "MARKS",
}  # tests that run make set their own
TIGHTEST, WIDE = 10, 1 / 3  # number of printed thresholds; the figure that a threshold should stay below

worst: dict[str, tuple[float, float, float]] = {}  # of the running test: place -> figure, value, limit


# --- Comparisons


def place() -> str:
    """Return the innermost running line of a test or a test helper."""
    frame = sys._getframe(1)
    while frame.f_back and (TESTS not in Path(frame.f_code.co_filename).parents or frame.f_globals is globals()):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return f"{path.relative_to(TESTS.parent) if TESTS in path.parents else path}:{frame.f_lineno}"


def numbers(value: Any) -> Any:
    """Return a number, a tensor or an array as float64, or None for anything else, including booleans."""
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor):
        if value.is_meta or value.dtype == torch.bool or value.is_complex():
            return None
        value = value.detach().cpu()
        return value.numpy() if not value.is_floating_point() else value.double().numpy()
    if isinstance(value, np.ndarray | np.number | float | int) and not isinstance(value, bool):
        array = np.asarray(value)
        return array if array.dtype.kind in "iuf" else None
    return None


def note(value: Any, limit: Any, where: str | None = None) -> None:
    """Record the largest value / limit, elementwise, where both are positive."""
    import numpy as np

    value, limit = np.broadcast_arrays(np.asarray(value, np.float64), np.asarray(limit, np.float64))
    seen = np.isfinite(value) & np.isfinite(limit) & (value > 0) & (limit > 0)
    figures = np.where(seen, value, 0.0) / np.where(seen, limit, 1.0)
    if figures.size:
        at = np.unravel_index(int(figures.argmax()), figures.shape)
        where = where or place()
        if where not in worst or figures[at] > worst[where][0]:
            worst[where] = float(figures[at]), float(value[at]), float(limit[at])


def compare(names: Sequence[str], *operands: Any) -> Any:
    """Compare `operands` as Python compares a chain, record the comparisons and return the result."""
    values = [numbers(operand) for operand in operands]
    floats = [value is not None and value.dtype.kind == "f" for value in values]
    ends = values[0], values[-1]
    if len(operands) == 3 and all(floats) and all(end.ndim == 0 for end in ends):
        middle, half = (ends[0] + ends[1]) / 2, abs(ends[1] - ends[0]) / 2
        if half < 0.6 * abs(middle):  # a window with close ends; otherwise two separate limits
            note(abs(values[1] - middle), half)
            values = [None] * 3
    result: Any = True
    for number, name in enumerate(names):
        one, other = values[number : number + 2]
        if one is not None and other is not None and (floats[number] or floats[number + 1]):
            note(*((one, other) if name.startswith("Lt") else (other, one)))
        result = OPERATORS[name](operands[number], operands[number + 1])
        if number + 1 < len(names) and not result:
            break
    return result


class Recorded(ast.NodeTransformer):
    """Replaces comparisons by size in `assert` statements with `compare`."""

    inside = False

    def visit_Assert(self, node: ast.Assert) -> ast.Assert:
        self.inside = True
        node.test = self.visit(node.test)
        self.inside = False
        return node

    def visit_comprehension(self, node: ast.comprehension) -> ast.comprehension:
        return node  # its conditions select and test nothing

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        self.generic_visit(node)
        names = [type(op).__name__ for op in node.ops]
        if not self.inside or not set(names) <= OPERATORS.keys():
            return node
        operators = ast.Tuple([ast.Constant(name) for name in names], ast.Load())
        call = ast.Call(ast.Name(COMPARE, ast.Load()), [operators, node.left, *node.comparators], [])
        return ast.fix_missing_locations(ast.copy_location(call, node))


def watch_asserts() -> None:
    """Apply Recorded before pytest rewrites the asserts of tests and their helpers."""
    from _pytest.assertion import rewrite

    plain = rewrite.rewrite_asserts

    def recorded(tree: ast.Module, source: bytes, path: str | None = None, config: Any = None) -> None:
        if path and TESTS in Path(path).parents:
            Recorded().visit(tree)
        plain(tree, source, path, config)

    rewrite.rewrite_asserts = recorded
    rewrite.PYC_TAIL = ".margins" + rewrite.PYC_TAIL  # separate compiled files
    setattr(builtins, COMPARE, compare)
    pytest.register_assert_rewrite(*(path.stem for path in TESTS.glob("*.py") if path.stem != "margins"))


def watch_tolerances() -> None:
    """Record the values that torch's and NumPy's comparisons with a tolerance, and pytest.approx, compare."""
    import numpy as np
    import torch
    from torch.testing._comparison import get_tolerances

    def within(found: Any, expected: Any, rtol: float | None, atol: float | None) -> None:
        if isinstance(expected, dict):
            found, expected = [found[key] for key in expected], list(expected.values())
        if isinstance(expected, list | tuple) and any(isinstance(part, torch.Tensor) for part in expected):
            for one, other in zip(found, expected, strict=True):
                within(one, other, rtol, atol)
            return
        if isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor):
            rtol, atol = get_tolerances(found, expected, rtol=rtol, atol=atol)
        found, expected = numbers(found), numbers(expected)
        if found is not None and expected is not None and (rtol or atol) and found.shape == expected.shape:
            note(np.abs(found - expected), (atol or 0.0) + (rtol or 0.0) * np.abs(expected))

    def watch(module: Any, name: str, usual: tuple[float | None, float | None]) -> None:
        plain = getattr(module, name)

        def watched(found: Any, expected: Any, *args: Any, **options: Any) -> Any:
            rtol, atol = [*args, *usual[len(args) :]][:2]
            within(found, expected, options.get("rtol", rtol), options.get("atol", atol))
            return plain(found, expected, *args, **options)

        setattr(module, name, watched)

    watch(torch.testing, "assert_close", (None, None))
    watch(torch, "allclose", (1e-5, 1e-8))
    watch(np, "allclose", (1e-5, 1e-8))
    watch(np.testing, "assert_allclose", (1e-7, 0.0))

    scalar: Any = type(pytest.approx(1.0))
    equals = scalar.__eq__

    def approx_equals(self: Any, actual: Any) -> bool:
        value, expected = numbers(actual), numbers(self.expected)
        if value is not None and expected is not None and value.ndim == 0 and math.isfinite(expected):
            note(abs(value - expected), self.tolerance)
        return equals(self, actual)

    scalar.__eq__ = approx_equals
    scalar.__ne__ = lambda self, actual: not equals(self, actual)  # it says whether they differ, but not by how much


def shift_seeds(offset: int) -> None:
    import numpy as np
    import torch

    class Shifted(torch.Generator):
        def manual_seed(self, seed: int) -> torch.Generator:
            return super().manual_seed(seed + offset)

    manual_seed, default_rng = torch.manual_seed, np.random.default_rng
    torch.Generator = Shifted  # type: ignore[misc]
    torch.manual_seed = lambda seed: manual_seed(seed + offset)
    np.random.default_rng = lambda seed=None: default_rng(seed + offset if isinstance(seed, int) else seed)


# --- The plugin


def pytest_configure() -> None:
    watch_asserts()
    watch_tolerances()
    shift_seeds(int(os.environ.get("THRESHER_TEST_SEED", "0")))


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    failed = call.excinfo is not None and not call.excinfo.errisinstance(pytest.skip.Exception)
    rows: list[dict[str, Any]] = []
    if call.when == "call" or failed:
        rows = [{"at": at, "figure": found[0], "value": found[1], "limit": found[2]} for at, found in worst.items()]
        if failed:
            rows.append({"failed": cast(Any, call.excinfo).exconly()[:200]})
        with open(os.environ["THRESHER_MARGINS"], "a", encoding="utf-8") as file:
            file.writelines(json.dumps({"test": item.nodeid, **row}) + "\n" for row in rows)
    if call.when != "setup":
        worst.clear()
    yield


# --- The program


def settings() -> list[tuple[dict[str, str], int]]:
    spec = importlib.util.spec_from_file_location("bits_settings", SETTINGS_FILE)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.SETTINGS)


def name_of(setting: tuple[dict[str, str], int], seed: int) -> str:
    return " ".join(
        [*(f"{key}={value}" for key, value in setting[0].items()), f"{setting[1]} threads", f"seed +{seed}"]
    )


def run(
    tests: Sequence[str], setting: tuple[dict[str, str], int], seed: int, out: Path, options: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return the rows of one run of pytest with `options`, each with the name of its setting."""
    listed, lines = out.with_suffix(".tests"), out.with_suffix(".jsonl")
    listed.write_text("".join(f"{test}\n" for test in tests), encoding="utf-8")
    environment = {
        **{name: value for name, value in os.environ.items() if name not in OF_MAKE},
        **setting[0],
        "OMP_NUM_THREADS": str(setting[1]),
        "OMP_WAIT_POLICY": "passive",
        "PYTHONPATH": str(TESTS),
        "PYTHONSAFEPATH": "1",
        "THRESHER_MARGINS": str(lines),
        "THRESHER_TEST_SEED": str(seed),
    }
    with open(out.with_suffix(".log"), "w", encoding="utf-8") as log:
        command = [sys.executable, "-P", "-m", "pytest", "-p", "margins", "-p", "no:cacheprovider", "--tb=line"]
        command += [f"--ignore={SETTINGS_FILE}"]  # it runs other tests under these settings itself
        command += [*options, f"@{listed}"]
        subprocess.run(command, env=environment, cwd=TESTS.parent, stdout=log, stderr=log, check=False)
    text = lines.read_text(encoding="utf-8") if lines.is_file() else ""
    name = name_of(setting, seed)
    print(f"{name}: {len(text.splitlines())} figures", flush=True)
    return [json.loads(line) | {"setting": name} for line in text.splitlines()]


def is_bound(at: str) -> bool:
    path, _, line = at.rpartition(":")
    return "  # bound: " in linecache.getline(str(TESTS.parent / path), int(line))


def table(rows: Sequence[dict[str, Any]], most: int) -> list[str]:
    """Return the tightest thresholds, one line each, of those whose figure differs between runs."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if "at" in row and not is_bound(row["at"]):
            groups.setdefault((row["at"], row["test"].partition("[")[0]), []).append(row)
    moving = []
    for found in groups.values():
        by_test: dict[str, set[float]] = {}
        for row in found:
            by_test.setdefault(row["test"], set()).add(row["figure"])
        if any(len(figures) > 1 for figures in by_test.values()):
            moving.append(max(found, key=lambda row: row["figure"]))
    moving.sort(key=lambda row: row["figure"], reverse=True)
    lines = [f"{len(groups)} thresholds, of which {len(moving)} have another figure in another run"]
    lines += [f"of those, {sum(row['figure'] > WIDE for row in moving)} are nearer than three times what was seen"]
    for row in moving[:most]:
        lines.append(f"{row['figure']:9.3g} = {row['value']:.4g} / {row['limit']:.4g}  {row['at']}")
        lines.append(f"           {row['test']}  ({row['setting']})")
    return lines


def failures(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the tests that failed, one line each: beyond a threshold, and for another reason."""
    beyond = {(row["test"], row["setting"]) for row in rows if row.get("figure", 0) >= 1}
    found: tuple[dict[str, str], dict[str, str]] = ({}, {})
    for row in rows:
        if "failed" in row:
            number = int((row["test"], row["setting"]) not in beyond)
            found[number].setdefault(row["test"], f"{row['test']} ({row['setting']}): {row['failed'].splitlines()[0]}")
    return list(found[0].values()), list(found[1].values())


def main() -> int:
    parser = argparse.ArgumentParser(description="Measure the margin of every numeric threshold of the tests.")
    parser.add_argument("tests", nargs="*", default=["tests"], help="files and folders (default: all tests)")
    parser.add_argument("--seeds", type=int, default=20, help="how many, the tests' own included")
    parser.add_argument("--marks", default="", help="the marks of the tests, as for pytest -m (default: any)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs at a time")
    parser.add_argument("--tightest", type=int, default=TIGHTEST, help="how many thresholds to print")
    parser.add_argument("--out", type=Path, help="a folder to leave all figures in")
    options = parser.parse_args()
    out = options.out or Path(tempfile.mkdtemp(prefix="margins-"))
    out.mkdir(parents=True, exist_ok=True)
    everywhere = settings()
    every = ["--numprocesses", str(options.jobs), "-m", options.marks]
    rows = run(options.tests, everywhere[0], 0, out / "first", every)
    numeric = sorted({row["test"] for row in rows if "at" in row})
    if not numeric:
        print(f"no test of {' '.join(options.tests)} compares numbers; see {out / 'first.log'}")
        return 1
    # Each setting with the tests' own seeds, then the other seeds, each under the next setting.
    pairs = [(setting, 0) for setting in everywhere[1:]]
    pairs += [(everywhere[seed % len(everywhere)], seed) for seed in range(1, options.seeds)]
    with ThreadPoolExecutor(options.jobs) as pool:
        for found in pool.map(lambda job: run(numeric, *job[1], out / str(job[0])), enumerate(pairs)):
            rows += found
    (out / "all.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    numerically, otherwise = failures(rows)
    print("\n".join(table(rows, options.tightest)))
    for title, lines in (("beyond a threshold", numerically), ("for another reason", otherwise)):
        print("\n".join([f"failed {title}: {len(lines)}", *(f"  {line}" for line in lines)]))
    print(f"all figures: {out / 'all.jsonl'}")
    return int(any(row.get("failed") and row["setting"].endswith("seed +0") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
