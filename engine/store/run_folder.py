"""A run folder: the recipe, metrics, trajectories and checkpoints of one run.

    recipe.toml                       the resolved recipe, defaults included
    starts.jsonl                      one line per start: from which step, which code, on what machine
    metrics.jsonl                     one line per record; each has a "step"
    trajectories/step_000010.jsonl    what was sampled in a step; beside it what its update found, token_stats.py
    evaluations/step_000010.jsonl     every question of an evaluation, with its trajectory
    checkpoints/step_000010/          see engine/store/checkpoint.py
    replies.jsonl                     of a chat model, where one was asked: nothing is paid for twice
    sinks/, tensorboard/, wandb/      where [run] sinks names a tracker: see engine/sinks
    summary.json, plots/, report.html at the end

The folder appears whole, with its recipe and its lock, or not at all. One process at a time writes to it; the
lock is the operating system's, so a killed run leaves none behind. A killed run resumes by

    run = RunFolder.resume(path, recipe)
    checkpoint = checkpoint_to_resume(run.checkpoints)
    run.truncate_after(checkpoint.step if checkpoint else -1)  # without one, not even the evaluation before step 1

after which the folder is as it was when that checkpoint was saved, provided that a step's records are written
before its checkpoint.

Deliberately absent: what a metric means, when to save, and any reading of checkpoints.
"""

import errno
import fcntl
import json
import math
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from thresher.engine.config.recipe import Recipe, load_recipe
from thresher.policy.files import append_bytes, atomic_write_bytes, atomic_write_text, staged_folder
from thresher.rewards.errors import UserError

if TYPE_CHECKING:
    from hashlib import _Hash as HASH


def step_name(step: int) -> str:
    """The name that a step's file or folder has, sorted as its number is up to 999,999."""
    return f"step_{step:06d}"


def step_of(name: str) -> int | None:
    """The step in a name made by `step_name`, or None for any other name."""
    digits = name.removeprefix("step_")
    return int(digits) if digits.isdecimal() and name == step_name(int(digits)) else None


@dataclass(slots=True)
class _Recorded:
    """The mark of what metrics.jsonl holds. Every checkpoint asks for it, and to read the file each time would make
    each step of a long run slower than the last."""

    records: int = 0
    digest: "HASH" = field(default_factory=sha256)

    def add(self, line: bytes) -> None:
        self.records += 1
        self.digest.update(line)


class RunFolder:
    """A run's folder. `create` and `resume` lock it for writing: close it, or use it in a `with`.

    `RunFolder(path)` locks and checks nothing: it is for reading, also while another process writes.
    """

    def __init__(self, path: Path, lock: int | None = None) -> None:
        self.path = path
        self._lock = lock
        self._known: _Recorded | None = None
        self.recipe_file = path / "recipe.toml"
        self.starts_file = path / "starts.jsonl"
        self.metrics_file = path / "metrics.jsonl"
        self.trajectories = path / "trajectories"
        self.evaluations = path / "evaluations"
        self.checkpoints = path / "checkpoints"
        self.plots = path / "plots"
        self.summary_file = path / "summary.json"
        self.report_file = path / "report.html"

    @staticmethod
    def check(path: str | Path, resume: bool) -> None:
        """UserError if `create` or `resume` would refuse the path at once; for asking before anything long is done."""
        path = Path(path)
        if not resume and os.path.lexists(path):
            raise UserError(f"{path}: the run folder exists already; resume it, or choose another")
        if resume:
            RunFolder.existing(path, "name one to resume, or start a new run")

    @classmethod
    def existing(cls, path: str | Path, advice: str = "name one that `thresher train` wrote") -> "RunFolder":
        """A run folder to read. UserError where there is none, with `advice`, or the runs that lie in the path."""
        run = cls(Path(path))
        if run.recipe_file.is_file():
            return run
        if not os.path.lexists(path):
            raise UserError(f"{path}: the run folder does not exist; {advice}")
        if inside := [str(file.parent) for file in sorted(run.path.glob("*/recipe.toml"))[:3]]:
            advice = f"name one in it: {', '.join(inside)}"
        raise UserError(f"{path}: is not a run folder (it has no recipe.toml); {advice}")

    @classmethod
    def create(cls, path: str | Path, recipe: Recipe) -> "RunFolder":
        """A new run folder (and its parents). UserError if anything has that name already."""
        path = Path(path)
        cls.check(path, resume=False)
        lock = None
        try:
            with staged_folder(path) as staged:
                recipe.write(staged / "recipe.toml")
                for name in ("trajectories", "evaluations", "checkpoints", "plots"):
                    (staged / name).mkdir()
                lock = lock_folder(staged)  # held through the rename, so that the folder is never seen unlocked
        except BaseException:
            if lock is not None:
                os.close(lock)
            raise
        return cls(path, lock)

    @classmethod
    def resume(cls, path: str | Path, recipe: Recipe) -> "RunFolder":
        """The run folder of a run that was killed, or that is to go on for longer.

        `recipe` may differ from the stored one in `MAY_CHANGE` only, in its steps only where the learning rate
        does not depend on them, and is stored in its place. Raises UserError if there is no such folder, if it
        belongs to another recipe, or while another process writes to it.
        """
        path = Path(path)
        cls.check(path, resume=True)
        lock = lock_folder(path)
        try:
            stored = load_recipe(path / "recipe.toml")
            if stored.digest() != recipe.digest():
                differences = stored.differences(recipe)
                more = f" and {len(differences) - 3} more" if len(differences) > 3 else ""
                raise UserError(
                    f"{path}: the run folder belongs to another recipe ({'; '.join(differences[:3])}{more});"
                    " resume with its own recipe.toml, or choose another folder"
                )
            if stored.run.steps != recipe.run.steps and stored.optim.depends_on_steps():
                raise UserError(
                    f"{path}: run.steps was {stored.run.steps}, and by optim.schedule and warmup_ratio the learning"
                    f" rate of every step depends on it; resume with run.steps={stored.run.steps}, or start a new run"
                )
            run = cls(path, lock)
            for folder in (run.trajectories, run.evaluations, run.checkpoints, run.plots):
                folder.mkdir(exist_ok=True)
            run._keep_metrics(read_metrics(run.metrics_file))
            recipe.write(path / "recipe.toml")
        except BaseException:
            os.close(lock)
            raise
        return run

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give up the lock. Safe to call twice."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def append_start(self, record: Mapping[str, Any]) -> None:
        """Append one line to starts.jsonl."""
        append_bytes(self.starts_file, _json_line(record))

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Append one line to metrics.jsonl, handed to the operating system before this returns.

        The record needs an integer "step". Numbers that are not finite become null, for JSON has none such.
        """
        if not isinstance(record.get("step"), int):
            raise ValueError(f'a metrics record needs an integer "step", got {record.get("step")!r}')
        known, line = self._recorded(), _json_line(record)
        append_bytes(self.metrics_file, line)
        known.add(line)

    def write_trajectories(self, step: int, trajectories: Iterable[Mapping[str, Any]]) -> Path:
        """Write trajectories/step_XXXXXX.jsonl, one a line, whole or not at all; returns its path."""
        path = self.trajectories / f"{step_name(step)}.jsonl"
        atomic_write_bytes(path, b"".join(map(_json_line, trajectories)))
        return path

    def write_evaluation(self, step: int, trajectories: Iterable[Mapping[str, Any]]) -> Path:
        """Write evaluations/step_XXXXXX.jsonl, one trajectory a line, whole or not at all; returns its path."""
        path = self.evaluations / f"{step_name(step)}.jsonl"
        atomic_write_bytes(path, b"".join(map(_json_line, trajectories)))
        return path

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write summary.json, whole or not at all."""
        atomic_write_text(self.summary_file, json.dumps(_finite(summary), indent=2, allow_nan=False) + "\n")

    def truncate_after(self, step: int) -> None:
        """Forget what was recorded after a step: metrics, trajectories, checkpoints, and what a kill left unfinished.

        Checkpoints are behind it only where a run is told to go back (engine/store/resume.py).
        """
        for path in self.checkpoints.iterdir():
            saved = step_of(path.name)
            if saved is not None and saved > step:
                # Renamed first, for a half-deleted folder must not have a checkpoint's name.
                shutil.rmtree(path.rename(path.with_name(f".{path.name}.tmp")))
        self._keep_metrics([record for record in read_metrics(self.metrics_file) if record["step"] <= step])
        for path in (*self.trajectories.iterdir(), *self.evaluations.iterdir()):
            recorded = step_of(path.stem)
            if recorded is not None and recorded > step:
                path.unlink()
        for folder in (self.path, self.trajectories, self.evaluations):
            for path in folder.glob(".*.tmp"):
                path.unlink()

    def metrics_mark(self) -> dict[str, Any]:
        """How many records metrics.jsonl holds, and their digest, for a checkpoint to remember."""
        known = self._recorded()
        return {"records": known.records, "sha256": known.digest.hexdigest()}

    def _recorded(self) -> _Recorded:
        if self._known is None:
            self._known = _Recorded()
            for record in read_metrics(self.metrics_file):
                self._known.add(_json_line(record))
        return self._known

    def check_metrics(self, step: int, mark: Mapping[str, Any] | None) -> None:
        """UserError unless the records up to a checkpoint's step are those that it was saved with, by its
        `metrics_mark` (None: of an earlier version), or those with which a person has gone on from it; behind them the
        evaluation that belongs to it may have been added."""
        if mark is None:
            return
        records = [record for record in read_metrics(self.metrics_file) if record["step"] <= step]
        if not _belongs(records, mark) and not any(_belongs(records, told) for told in self._accepted(step)):
            raise UserError(
                f"{self.metrics_file}: its records up to step {step} are not the {mark['records']} that the checkpoint "
                f"was saved with; put a copy back, or go on with those that are left by --resume --from {step}"
            )

    def _accepted(self, step: int) -> list[dict[str, Any]]:
        """The marks of records with which a person has gone on from a step; none of lines that cannot be read."""
        lines = self.starts_file.read_bytes().split(b"\n") if self.starts_file.exists() else []
        starts = [start for line in lines if (start := _record(line)) and start["step"] == step]
        return [
            mark
            for start in starts
            if isinstance(mark := start.get("metrics"), dict) and {"records", "sha256"} <= mark.keys()
        ]

    def check_checkpoints(
        self, step: int, period: Callable[[Recipe], int] = lambda recipe: recipe.run.save_every
    ) -> None:
        """UserError where there are records of steps behind which a checkpoint later than `step`, the newest that is
        left, was saved. period: the steps between checkpoints, by the stored recipe."""
        every = period(load_recipe(self.recipe_file))
        due = (step // every + 1) * every
        done = max((record["step"] for record in read_metrics(self.metrics_file) if "eval" not in record), default=0)
        if done > due:
            raise UserError(
                f"{self.checkpoints}: the newest is of step {step}, and metrics.jsonl holds step {done}: that of step "
                f"{due} is lost; put it back, or go back by --resume --from {step}"
            )

    def _keep_metrics(self, records: list[dict[str, Any]]) -> None:
        """Rewrite metrics.jsonl to these records, if it holds anything else."""
        self._known = None
        data = b"".join(map(_json_line, records))
        if (self.metrics_file.read_bytes() if self.metrics_file.exists() else b"") != data:
            atomic_write_bytes(self.metrics_file, data)


def sft_folder(out: str | Path) -> Path:
    """The run folder of a `thresher sft` that is not finished; the model folder `out` appears when it is."""
    out = Path(out)
    return out.parent / f"{out.name}.training"


def to_be_resumed(command: str, out: str | Path) -> bool:
    """Whether `thresher train --out OUT` or `thresher sft --out OUT` was begun before, so that it needs --resume. False
    for every other command."""
    folder = {"train": Path, "sft": sft_folder}.get(command)
    return folder is not None and folder(out).exists()


def saved_so_far(path: str | Path) -> str | None:
    """What a run folder keeps of a run that was interrupted, in words; None where there is no folder yet."""
    run = RunFolder(Path(path))
    if not run.recipe_file.is_file():
        return None
    folders = run.checkpoints.iterdir() if run.checkpoints.is_dir() else ()
    last = max((step for folder in folders if (step := step_of(folder.name)) is not None), default=0)
    return f"{path} is saved up to step {last}" if last else f"{path} has finished no step yet"


def count_starts(path: str | Path) -> int:
    """How often a run was started or gone on with, up to its first step or beyond; 0 where there is no folder yet."""
    file = RunFolder(Path(path)).starts_file
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def _belongs(records: list[dict[str, Any]], mark: Mapping[str, Any]) -> bool:
    count = mark["records"]
    if not isinstance(count, int):
        return False
    added = records[count:]
    return _digest(records[:count]) == mark["sha256"] and len(added) <= 1 and all("eval" in record for record in added)


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, or of a run folder's; an absent file has none.

    A last line without its end is what a kill leaves: it is dropped unless it is whole. Any other line that
    is not a JSON object with an integer "step" is a UserError with its number.
    """
    path = Path(path)
    if path.is_dir():
        path /= "metrics.jsonl"
    if not path.exists():
        return []
    *lines, tail = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate([*lines, tail] if _record(tail) else lines, 1):
        record = _record(line)
        if record is None:
            raise UserError(f'{path}: line {number}: expected a JSON object with a "step"; fix or delete the line')
        records.append(record)
    return records


def _record(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def _json_line(record: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(record, ensure_ascii=False, allow_nan=False)
    except (ValueError, TypeError):  # the slow way only for records that need it
        text = json.dumps(_finite(record), ensure_ascii=False, allow_nan=False)
    # A lone surrogate has no UTF-8; as a backslash escape it is the same character in JSON.
    return text.encode("utf-8", "backslashreplace") + b"\n"


def _digest(records: Iterable[Mapping[str, Any]]) -> str:
    return sha256(b"".join(map(_json_line, records))).hexdigest()


def _finite(value: Any) -> Any:
    """Plain JSON values: None for nan and infinities, a number for a numpy or torch scalar."""
    if isinstance(value, Mapping):
        return {str(key): _finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def lock_folder(folder: Path) -> int:
    """An open descriptor that holds the folder's lock until it is closed or its process ends.

    The file itself stays; only the lock on it counts, which is why a dead process cannot leave one behind.
    """
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 32).decode(errors="replace").strip() or "another"
        os.close(descriptor)
        raise UserError(f"{folder}: process {holder} is writing to this folder; wait for it to end") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            os.close(descriptor)
            raise
        warnings.warn(f"{folder}: this file system has no locks; start no second run in it", stacklevel=3)
    os.truncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor
