"""Where a run stands, read from its folder: steps, rates, the time left, and whether a process works on it.

    left    steps to go x the median of the last steps' seconds, and what evaluations are to come at the last one's
    alive   the process in .lock holds that file open; of a run on another host nothing is known, and it counts as alive

Deliberately absent: any lock on the folder, which could keep the run itself out.
"""

import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from thresher.engine.config.recipe import Recipe
from thresher.engine.reporting.pages import open_run
from thresher.engine.reporting.report import duration
from thresher.engine.store.run_folder import RunFolder

Record = Mapping[str, Any]

RECENT = 20  # steps that rates and the time left are taken from
PARTS = ("rollout_seconds", "reward_seconds", "update_seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """A run at one moment. process: of this host, if one works on it. age: seconds since the last record, None before
    the first."""

    recipe: Recipe
    records: list[dict[str, Any]]
    process: int | None
    elsewhere: str | None  # the host that the run was started on, if not this one
    finished: bool
    age: float | None

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [record for record in self.records if "eval" not in record]

    @property
    def evals(self) -> list[tuple[int, Record]]:
        return [(record["step"], record["eval"] or {}) for record in self.records if "eval" in record]

    @property
    def step(self) -> int:
        """The last that is recorded."""
        return self.steps[-1]["step"] if self.steps else 0

    @property
    def ended(self) -> bool:
        return self.finished or (self.process is None and self.elsewhere is None)

    @property
    def seconds_a_step(self) -> float | None:
        """Median of the last steps'."""
        found = [sum(record.get(part) or 0.0 for part in PARTS) for record in self.steps[-RECENT:]]
        return median(found) if found else None

    @property
    def left(self) -> float | None:
        """Seconds until the last step, None where nothing is known yet."""
        if self.seconds_a_step is None:
            return None
        run, to_go = self.recipe.run, range(self.step + 1, self.recipe.run.steps + 1)
        evals = sum(step == run.steps or bool(run.eval_every and step % run.eval_every == 0) for step in to_go)
        each = (self.evals[-1][1].get("seconds") or 0.0) if self.evals else 0.0
        return len(to_go) * self.seconds_a_step + evals * each

    def rate(self, tokens: str, seconds: str) -> float | None:
        """Tokens per second over the last steps."""
        recent = self.steps[-RECENT:]
        spent = sum(record.get(seconds) or 0.0 for record in recent)
        return sum(record.get(tokens) or 0 for record in recent) / spent if spent else None

    @property
    def says(self) -> str:
        """In one sentence."""
        steps, age = f"step {self.step} of {self.recipe.run.steps}", duration(round(self.age or 0.0))
        if self.finished:
            return f"finished: {steps}"
        if self.ended:
            return f"not running: {steps}, and no process on this machine works on it"
        if self.age is None:
            return "running: nothing is recorded yet"
        left = "" if self.left is None else f", {duration(round(self.left))} left"
        return f"running: {steps}{left}, last record {age} ago"

    def to_dict(self) -> dict[str, Any]:
        last = self.steps[-1] if self.steps else {}
        return {
            "step": self.step,
            "steps": self.recipe.run.steps,
            "finished": self.finished,
            "ended": self.ended,
            "process": self.process,
            "resident_bytes": resident_bytes(self.process),
            "seconds_left": None if self.ended else self.left,
            "seconds_a_step": self.seconds_a_step,
            "rollout_tokens_per_s": self.rate("sampled_tokens", "rollout_seconds"),
            "train_tokens_per_s": self.rate("train_tokens", "update_seconds"),
            "reward": last.get("reward"),
            "em": last.get("em"),
            "greedy_em": self.evals[-1][1].get("em") if self.evals else None,
        }


def read_state(path: str | Path, unverified: bool = False) -> RunState:
    """UserError for a folder that is no run, and for a file in it that is malformed or, unless `unverified`, not as it
    was written."""
    run, recipe = open_run(path, unverified)
    records = run.metrics()
    process = _process(run)
    reached = any("eval" not in record and record["step"] >= recipe.run.steps for record in records)
    return RunState(
        recipe=recipe,
        records=records,
        process=process,
        elsewhere=_elsewhere(run),
        finished=process is None and run.summary() is not None and (reached or recipe.run.steps == 0),
        age=max(time.time() - run.metrics_file.stat().st_mtime, 0.0) if records else None,
    )


def _process(run: RunFolder) -> int | None:
    """The process that holds the run's lock: the number in the file may long be another's, the open file cannot."""
    lock = run.path / ".lock"
    try:
        pid = int(lock.read_text(encoding="ascii"))
        held = os.stat(lock)
        for entry in os.scandir(f"/proc/{pid}/fd"):
            try:
                if os.path.samestat(entry.stat(), held):
                    return pid
            except OSError:
                continue
    except (OSError, ValueError):
        pass
    return None


def _elsewhere(run: RunFolder) -> str | None:
    starts = run.starts()
    host = str(starts[-1].get("host")) if starts else None
    return host if host != platform.node() else None


def resident_bytes(pid: int | None) -> int | None:
    """Memory that a process has now."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace") if pid else ""
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:")), None)
