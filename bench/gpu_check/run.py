"""The parts of `make gpu-check` one after the other, within a budget, and the table: measured, predicted, target, peer.

    thresher bench gpu-check --out bench/results

Every part ends in one line as it ends: passed, failed (with its exit status), cut off, or left out. The status of the
whole is 1 where a part failed or was cut off.
"""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thresher.bench.gpu_check.parts import CheckPart, TableLine, missing, parts
from thresher.bench.machine import facts
from thresher.bench.rows import append_rows, check_files
from thresher.common.console import console, table
from thresher.common.errors import UserError
from thresher.common.machine import checkout, gpu

FEWEST_SECONDS = 5.0  # with less left, a part is not begun


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a part ended: "passed", "failed", "cut off" or "left out", and why."""

    part: CheckPart
    how: str
    why: str
    seconds: float
    lines: tuple[TableLine, ...]

    @property
    def wrong(self) -> bool:
        return self.how in ("failed", "cut off")


def run_gpu_check(out: str | Path, budget: float, only: Sequence[str] | None = None) -> list[Outcome]:
    """Run the parts (those named in `only`), say how each ended, show the table."""
    root, name = checkout(), gpu()
    if root is None:
        raise UserError("the tests are part of the check: run it from a checkout of the repository")
    if name is None:
        raise UserError("torch sees no CUDA device; run this where there is one")
    slug = re.sub("[^a-z0-9]+", "-", name.partition(",")[0].lower())
    folder = Path(out)
    check_files(folder / f"check-{slug}.jsonl", None)
    chosen = [part for part in parts(root) if only is None or part.name in only]
    deadline = time.monotonic() + budget
    outcomes = []
    for part in chosen:
        outcome = run_part(part, folder, slug, deadline)
        outcomes.append(outcome)
        console.print(f"{part.name}: {outcome.how}{outcome.why}, {outcome.seconds:.0f} s", soft_wrap=True)
        row = {"bench": "gpu-check", **facts(("triton",)), "part": part.name, "how": outcome.how, "why": outcome.why}
        append_rows(folder / f"check-{slug}.jsonl", row | {"seconds": outcome.seconds})
    show(outcomes, name)
    return outcomes


def run_part(part: CheckPart, folder: Path, slug: str, deadline: float) -> Outcome:
    """One part in a process group of its own, which is stopped as a whole."""
    seconds = min(part.seconds, deadline - time.monotonic())
    if missing(part):
        return Outcome(part, "left out", f" ({part.needs} is not installed)", 0.0, ())
    if seconds < FEWEST_SECONDS:
        return Outcome(part, "left out", " (no time left)", 0.0, ())
    path = None if part.rows is None else folder / f"{part.rows}-{slug}.jsonl"
    before = _rows(path)
    command = [argument.format(out=path) if argument == "{out}" else argument for argument in part.command]
    started = time.monotonic()
    process = subprocess.Popen(command, env=os.environ | dict(part.environment), start_new_session=True)
    try:
        status: int | None = process.wait(seconds)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    lines = tuple(part.lines(_rows(path)[len(before) :]))
    spent = time.monotonic() - started
    if status is None:
        return Outcome(part, "cut off", f" (after its {seconds:.0f} s)", spent, lines)
    return Outcome(part, "passed" if status == 0 else "failed", "" if status == 0 else f" ({status})", spent, lines)


def _rows(path: Path | None) -> list[dict[str, Any]]:
    """What a bench has written so far; a line that was cut off is left out."""
    if path is None or not path.is_file():
        return []
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def show(outcomes: Sequence[Outcome], name: str) -> None:
    """The table; a part without figures has a line that says how it ended."""
    lines = [
        line
        for outcome in outcomes
        for line in (outcome.lines or (TableLine(outcome.part.name, f"{outcome.how}{outcome.why}"),))
    ]
    table(
        f"gpu-check on {name}",
        ("", "measured", "predicted", "target", "peer"),
        [(line.what, line.measured, line.predicted, line.target, line.peer) for line in lines],
    )


def failure(outcomes: Sequence[Outcome]) -> str | None:
    """A sentence that names the parts that did not pass; None where all did, or were left out."""
    wrong = [f"{outcome.part.name} {outcome.how}{outcome.why}" for outcome in outcomes if outcome.wrong]
    return "; ".join(wrong) or None
