"""A run folder: the recipe, metrics, trajectories and checkpoints of one run.

    recipe.toml                       the resolved recipe, defaults included
    starts.jsonl                      a record of each start: from which step, which code, on what machine
    metrics.jsonl                     a record of each step and of each evaluation; each has a "step"
    trajectories/step_000010.jsonl    a step's trajectories; next to them their tokens' values, token_stats.py
    evaluations/step_000010.jsonl     every question of an evaluation, with its trajectory
    checkpoints/step_000010/          see engine/store/checkpoint.py
    replies.jsonl                     of a chat model, if one is used, so that no reply is paid for twice
    sinks/, tensorboard/, wandb/      if [run] trackers names a tracker: see engine/trackers
    summary.json, plots/, report.html at the end

Records have checksums (records.py). Once the run is finished, metrics.jsonl has its closing line, and summary.json the
number and the digest of its records.

The folder is created completely, with its recipe and its lock, or not at all. One process at a time writes to it; the
lock is the operating system's, so a killed run leaves no lock. A killed run resumes by

    run = RunFolder.resume(path, recipe)
    checkpoint = checkpoint_to_resume(run.checkpoints)
    run.truncate_after(checkpoint.step if checkpoint else -1)  # without one, not even the evaluation before step 1

after which the folder is as it was when that checkpoint was saved, provided that a step's records are written before
its checkpoint.

Deliberately absent: the meaning of a metric, the choice of when to save, and any reading of checkpoints.
"""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from thresher.common.errors import UserError
from thresher.common.files import delete_folder, staged_folder
from thresher.common.jsonl import json_kind
from thresher.common.locks import lock_folder
from thresher.common.records import REMEDY as READ_REMEDY
from thresher.common.records import RecordLog, mark_of, read_object, read_records, write_object, write_records
from thresher.engine.config.recipe import Recipe, load_recipe
from thresher.engine.config.sections import RunSection

SPENT = ("prefilled_tokens", "sampled_tokens", "computed_tokens")  # of a step's record, for run.token_budget
# Advice on records that were changed, when a run is to be resumed.
REMEDY = "put a copy back, or go back to a checkpoint with --resume --resume-from STEP and the records as they are"


# Types of the stored records, for their readers. A record with a checksum has these types; one of an earlier version,
# or one that is read unverified, may hold anything. A shape is a kind of value, or a list of one shape, or a dict of
# shapes by key, with "*" for all other keys. A key may be absent or null, except a record's step.
Kind = tuple[str, Callable[[Any], bool]]

NUMBER: Kind = ("a number", lambda value: isinstance(value, int | float) and -1e300 < value < 1e300)
WHOLE: Kind = ("a whole number", lambda value: type(value) is int and abs(value) < 2**63)
TEXT: Kind = ("a string", lambda value: isinstance(value, str))
FLAG: Kind = ("true or false", lambda value: isinstance(value, bool))
NAME: Kind = ("a string or a whole number", lambda value: isinstance(value, str) or WHOLE[1](value))
ANYTHING: Kind = ("anything", lambda value: True)

NUMBERS = {"*": NUMBER}
MEASURES = {"*": NUMBER, "parts": NUMBERS, "reasons": NUMBERS, "wait_policy": TEXT, "by_epoch": [NUMBERS]}
SEGMENTS = [{"*": ANYTHING, "source": TEXT, "text": TEXT, "ids": [WHOLE], "versions": [[WHOLE]]}]

METRICS = {**MEASURES, "step": WHOLE, "eval": MEASURES, "staleness_tokens": [WHOLE]}
START = {"*": ANYTHING, "step": WHOLE}
SUMMARY = {"*": NUMBER, "metrics": {"*": ANYTHING}}
TRAJECTORY = {
    "*": ANYTHING,
    "id": NAME,
    **dict.fromkeys(("question", "reason", "answer"), TEXT),
    **dict.fromkeys(("group", "sample"), WHOLE),
    **dict.fromkeys(("reward", "advantage"), NUMBER),
    "golden_answers": [TEXT],
    "parts": NUMBERS,
    "segments": SEGMENTS,
    "branches": {"*": SEGMENTS},
    "trained_branches": [TEXT],
    "forked": [WHOLE],
    "passages": [{"*": ANYTHING, "text": TEXT}],
    "searches": [{"*": ANYTHING, "query": TEXT, "passages": [ANYTHING]}],
    "tools": [{"*": ANYTHING, "name": TEXT, "text": TEXT}],
    "scores": [{"*": ANYTHING, "text": TEXT, "logprobs": [NUMBER], "turns": WHOLE}],
}


def trajectories_of(step: int) -> str:
    """Return the path of a step's trajectories in a run folder, without the extension."""
    return f"trajectories/{step_name(step)}"


def step_name(step: int) -> str:
    """Return the name of a step's file or folder. Names sort like their numbers up to 999,999."""
    return f"step_{step:06d}"


def step_of(name: str) -> int | None:
    """Return the step in a name made by `step_name`, or None for any other name."""
    digits = name.removeprefix("step_")
    return int(digits) if digits.isdecimal() and name == step_name(int(digits)) else None


def step_folders(folder: Path) -> list[Path]:
    """Return the folders with a checkpoint's name, oldest first."""
    if not folder.is_dir():
        return []
    steps = {step: path for path in folder.iterdir() if (step := step_of(path.name)) is not None}
    return [steps[step] for step in sorted(steps)]


class RunFolder:
    """A run's folder. `create` and `resume` lock it for writing: close it, or use it in a `with`.

    `RunFolder(path)` locks and checks nothing: it is for reading, even while another process writes. unverified: its
    records are read even if they do not match their checksums.
    """

    def __init__(self, path: Path, lock: int | None = None, unverified: bool = False) -> None:
        self.path, self.unverified = path, unverified
        self._lock = lock
        self._metrics: RecordLog | None = None
        self._resumed: Recipe | None = None  # a resumed run's recipe, until it is written
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
        """Raise UserError if `create` or `resume` would refuse the path at once. Call it before anything that takes
        long."""
        path = Path(path)
        if not resume and os.path.lexists(path):
            raise UserError(f"{path}: the run folder exists already; resume it, or choose another")
        if resume:
            RunFolder.existing(path, "name one to resume, or start a new run")

    @classmethod
    def existing(
        cls, path: str | Path, advice: str = "name one that `thresher train` wrote", unverified: bool = False
    ) -> "RunFolder":
        """Return a run folder for reading. UserError if there is none, with `advice` or the names of runs inside the
        path."""
        run = cls(Path(path), unverified=unverified)
        if run.recipe_file.is_file():
            return run
        if not os.path.lexists(path):
            raise UserError(f"{path}: the run folder does not exist; {advice}")
        if inside := [str(file.parent) for file in sorted(run.path.glob("*/recipe.toml"))[:3]]:
            advice = f"name one in it: {', '.join(inside)}"
        raise UserError(f"{path}: is not a run folder (it has no recipe.toml); {advice}")

    @classmethod
    def create(cls, path: str | Path, recipe: Recipe) -> "RunFolder":
        """Return a new run folder (and its parents). UserError if anything has that name already."""
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
    def resume(cls, path: str | Path, recipe: Recipe, unverified: bool = False) -> "RunFolder":
        """Return the run folder of a run that was killed, or that is to continue for longer. unverified: accept records
        that were changed.

        `recipe` may differ from the stored one only in `MAY_CHANGE`, and in its steps only if the learning rate does
        not depend on them (`Recipe.going_on` ensures that where it can). It replaces the stored one. UserError if there
        is no such folder, if it belongs to another recipe, or while another process writes to it.
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
            if (began := stored.scheduled_steps()) != recipe.scheduled_steps():
                optim = stored.optim
                raise UserError(
                    f"{path}: the learning rate of every step follows from optim.schedule = {optim.schedule}, "
                    f"optim.warmup_ratio = {optim.warmup_ratio:g} (set by the recipe or by its system's preset) and "
                    f"the {began} steps that it was scheduled for, now {recipe.scheduled_steps()}; resume with "
                    f"run.steps={stored.run.steps}, or start a new run, whose optim.schedule_steps may be more"
                )
            run = cls(path, lock, unverified)
            for folder in (run.trajectories, run.evaluations, run.checkpoints, run.plots):
                folder.mkdir(exist_ok=True)
            run._metrics_log()  # if it raises, nothing has been written
            run._resumed = recipe
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
        """Release the lock. Safe to call twice."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def metrics(self) -> list[dict[str, Any]]:
        """Return the records of metrics.jsonl; an absent file has none. UserError, naming the line, for records that
        were changed, and for fewer of them than summary.json says that a finished run has."""
        return read_metrics(self.path, self.unverified)

    def summary(self) -> dict[str, Any] | None:
        """Return the content of summary.json; None if the run is not finished."""
        if not self.summary_file.exists():
            return None
        values = read_object(self.summary_file, unverified=self.unverified)
        check_shape(values, SUMMARY, str(self.summary_file))
        return values

    def stored_trajectories(self, path: Path) -> Iterator[dict[str, Any]]:
        """Yield the records of a step's file in trajectories/ or evaluations/. UserError as in `metrics`."""
        for number, record in read_records(path, unverified=self.unverified, owner=self.path):
            check_shape(record, TRAJECTORY, f"{path}:{number}")
            yield record

    def starts(self) -> list[dict[str, Any]]:
        """Return the records of starts.jsonl; an absent file has none. UserError as in `metrics`."""
        log = RecordLog(self.starts_file, unverified=self.unverified)
        return [_shaped(record, START, self.starts_file, number) for number, record in log.recover()]

    def append_start(self, record: Mapping[str, Any]) -> None:
        """Append a record to starts.jsonl."""
        log = RecordLog(self.starts_file, unverified=self.unverified, remedy=REMEDY)
        for _ in log.recover():
            pass
        log.append(record)

    def append_metrics(self, record: Mapping[str, Any]) -> None:
        """Append a record to metrics.jsonl, and hand it to the operating system before returning.

        It needs an integer "step". Numbers that are not finite become null, because JSON has none. UserError if another
        program has changed or removed the file.
        """
        if not isinstance(record.get("step"), int):
            raise ValueError(f'a metrics record needs an integer "step", got {record.get("step")!r}')
        self._metrics_log().append(record)

    def write_trajectories(self, step: int, trajectories: Iterable[Mapping[str, Any]]) -> Path:
        """Write trajectories/step_XXXXXX.jsonl, one per line, completely or not at all; return its path."""
        path = self.trajectories / f"{step_name(step)}.jsonl"
        write_records(path, trajectories)
        return path

    def write_evaluation(self, step: int, trajectories: Iterable[Mapping[str, Any]]) -> Path:
        """Write evaluations/step_XXXXXX.jsonl, one trajectory per line, completely or not at all; return its path."""
        path = self.evaluations / f"{step_name(step)}.jsonl"
        write_records(path, trajectories)
        return path

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Close metrics.jsonl and write summary.json, with the mark of the records, completely or not at all."""
        write_object(self.summary_file, {**summary, "metrics": self._metrics_log().finish()})

    def truncate_after(self, step: int) -> None:
        """Delete what was recorded after a step: metrics, trajectories, checkpoints, and unfinished files of a kill.
        Then write the recipe of a resumed run.

        There are checkpoints after it only if a run is told to go back (engine/store/checkpoint.py).
        """
        for path in step_folders(self.checkpoints):
            if (step_of(path.name) or 0) > step:
                delete_folder(path)
        records = read_metrics(self.metrics_file, self.unverified)
        kept = [record for record in records if record["step"] <= step]
        if len(kept) < len(records):
            write_records(self.metrics_file, kept, closed=False)
            self.summary_file.unlink(missing_ok=True)  # its records no longer exist
            self._metrics = None
        for path in (*self.trajectories.iterdir(), *self.evaluations.iterdir()):
            recorded = step_of(path.stem)
            if recorded is not None and recorded > step:
                path.unlink()
        for folder in (self.path, self.trajectories, self.evaluations):
            for path in folder.glob(".*.tmp"):
                path.unlink()
        if self._resumed is not None:  # only now, because it may say that other checkpoints must be there
            self._resumed.write(self.recipe_file)

    def metrics_mark(self) -> dict[str, Any]:
        """Return the number of records in metrics.jsonl, and their digest, to be stored in a checkpoint."""
        return self._metrics_log().mark

    def _metrics_log(self) -> RecordLog:
        """Return the log of metrics.jsonl, which is read once. Reading it for each checkpoint would make each step
        slower than the last."""
        if self._metrics is None:
            self._metrics = RecordLog(self.metrics_file, unverified=self.unverified, remedy=REMEDY)
            for _ in self._metrics.recover():
                pass
        return self._metrics

    def check_metrics(self, step: int, mark: Mapping[str, Any] | None) -> None:
        """Raise UserError unless the records up to a checkpoint's step are those that it was saved with. mark: the
        checkpoint's `metrics_mark` (None: of an earlier version). Records with which a user has resumed from it are
        accepted too, and the evaluation that belongs to it may have been added after them."""
        if mark is None:
            return
        found = read_metrics(self.metrics_file, self.unverified, REMEDY)
        records = [record for record in found if record["step"] <= step]
        if not _belongs(records, mark) and not any(_belongs(records, told) for told in self._accepted(step)):
            raise UserError(
                f"{self.metrics_file}: its records up to step {step} are not the {mark['records']} that the checkpoint "
                f"was saved with; put a copy back, or accept those that are left with --resume --resume-from {step}"
            )

    def _accepted(self, step: int) -> list[dict[str, Any]]:
        """Return the marks of records with which a user has resumed from a step."""
        marks = [start.get("metrics") for start in self.starts() if start["step"] == step]
        return [mark for mark in marks if isinstance(mark, dict) and {"records", "sha256"} <= mark.keys()]

    def check_checkpoints(
        self, step: int, period: Callable[[Recipe], int] = lambda recipe: recipe.run.save_every
    ) -> None:
        """Raise UserError if a checkpoint later than `step`, the newest that is left, was saved and is lost. There are
        then records of steps after it. period: the steps between checkpoints, by the stored recipe."""
        every = period(load_recipe(self.recipe_file))
        due = (step // every + 1) * every
        records = read_metrics(self.metrics_file, self.unverified, REMEDY)
        done = max((record["step"] for record in records if "eval" not in record), default=0)
        if done > due:
            raise UserError(
                f"{self.checkpoints}: the newest is of step {step}, and metrics.jsonl has step {done}: that of step "
                f"{due} is lost; put it back, or go back with --resume --resume-from {step}"
            )


def sft_folder(out: str | Path) -> Path:
    """Return the run folder of a `thresher sft` that is not finished; the model folder `out` appears when it is."""
    out = Path(out)
    return out.parent / f"{out.name}.training"


def to_be_resumed(command: str, out: str | Path) -> bool:
    """Return whether `thresher train --out OUT` or `thresher sft --out OUT` was begun before and needs --resume. False
    for every other command."""
    folder = {"train": Path, "sft": sft_folder}.get(command)
    return folder is not None and folder(out).exists()


def saved_so_far(path: str | Path) -> str | None:
    """Return a sentence on what is saved of an interrupted run; None if there is no folder yet."""
    run = RunFolder(Path(path))
    if not run.recipe_file.is_file():
        return None
    last = max((step_of(path.name) or 0 for path in step_folders(run.checkpoints)), default=0)
    return f"{path} is saved up to step {last}" if last else f"{path} has saved no step yet"


def count_starts(path: str | Path) -> int:
    """Return how often a run was started or resumed, and got to its first step; 0 if there is no folder yet."""
    file = RunFolder(Path(path)).starts_file
    return file.read_bytes().count(b"\n") if file.is_file() else 0


def _belongs(records: list[dict[str, Any]], mark: Mapping[str, Any]) -> bool:
    count = mark["records"]
    if not isinstance(count, int):
        return False
    added = records[count:]
    return mark_of(records[:count]) == mark and len(added) <= 1 and all("eval" in record for record in added)


def read_metrics(path: str | Path, unverified: bool = False, remedy: str = READ_REMEDY) -> list[dict[str, Any]]:
    """Return `RunFolder.metrics` of a run folder, or of its metrics.jsonl. remedy: as in `read_records`."""
    path = Path(path)
    if path.is_dir():
        path /= "metrics.jsonl"
    summary, expected = path.with_name("summary.json"), None
    if summary.exists() and not unverified:
        with suppress(UserError):  # it is raised where summary.json itself is read
            expected = read_object(summary).get("metrics")
    log = RecordLog(path, unverified=unverified, remedy=remedy)
    found = log.recover(expected if isinstance(expected, dict) else None)
    return [_shaped(record, METRICS, path, number) for number, record in found]


def _shaped(record: dict[str, Any], shape: Any, path: Path, number: int) -> dict[str, Any]:
    check_shape({"step": None, **record}, shape, f"{path}:{number}")  # a record without a step is refused
    return record


def check_shape(value: Any, shape: Any, where: str) -> None:
    """Raise UserError, starting with `where` and naming the key, if a value does not have its shape."""
    if isinstance(shape, tuple):
        expected, fits = shape[0], shape[1](value)
    else:
        expected = "a list" if isinstance(shape, list) else "an object"
        fits = isinstance(value, type(shape))
    if not fits:
        found = json_kind(value) if not isinstance(value, int | float) else str(value)[:40]
        raise UserError(f"{where}: expected {expected}, found {found}; put a copy back, or remove the file")
    if isinstance(shape, list):
        for number, part in enumerate(value, 1):
            check_shape(part, shape[0], f"{where}, item {number}")
    elif isinstance(shape, Mapping):
        for key, part in value.items():
            if part is not None or key == "step":
                check_shape(part, shape.get(key, shape["*"]), f"{where}: {key}")


@dataclass(frozen=True, slots=True)
class Best:
    """The best checkpoint of a run: a model folder, its step, and the `metric` on the dev split that it is chosen by.

    It is chosen by the evaluations that a run stores, so the choice needs no further pass and uses only the dev split.
    lost: the best step of all, if its checkpoint is not kept; else None.
    """

    path: Path
    step: int
    metric: str
    value: float
    lost: int | None


def tokens_spent(records: Iterable[Mapping[str, Any]]) -> int:
    """Return the number of tokens that these steps computed, as run.token_budget counts them. These are the prefilled
    and sampled tokens of rollouts, and those of the updates, where a shared one counts once. Evaluations, reference and
    old log-probs are not counted."""
    return sum(record.get(kind) or 0 for record in records if "eval" not in record for kind in SPENT)


def expected_steps(run: RunSection, step: int, spent: int) -> int:
    """Return the expected steps of a run that has done `step` of them with `spent` tokens. They are run.steps, or as
    many as run.token_budget allows with the same tokens per step."""
    if run.token_budget is None or not step:
        return run.steps
    return min(run.steps, max(step, math.ceil(step * run.token_budget / max(spent, 1))))


def chosen_by(records: Sequence[Mapping[str, Any]], metric: str | None) -> str:
    """Return the measure that evaluations are ranked by. It is `metric` (run.best_metric), by default exact match, or
    the reward if no evaluation has that."""
    return metric or ("em" if any((one.get("eval") or {}).get("em") is not None for one in records) else "reward")


def evaluations_by_dev(records: Sequence[Mapping[str, Any]], metric: str | None = None) -> list[Mapping[str, Any]]:
    """Return the records of evaluations that have the measure of `chosen_by`, the best first. Of equal ones the higher
    F1 is first, then the earlier step, which has moved less far from its reference."""
    name = chosen_by(records, metric)
    known = [record for record in records if record.get("eval") and record["eval"].get(name) is not None]
    return sorted(known, key=lambda r: (-r["eval"][name], -(r["eval"].get("f1") or 0.0), r["step"]))


def best_checkpoint(path: str | Path) -> Best:
    """Return the best kept checkpoint of a run folder; step 0 is the model that the run started from.

    UserError for a folder that is no run, for a run without an evaluation, and if no evaluated step is kept.
    """
    run = RunFolder.existing(path)
    recipe, records = load_recipe(run.recipe_file), read_metrics(run.metrics_file, remedy="put a copy back")
    metric = chosen_by(records, recipe.run.best_metric)
    ranked = [(record["step"], record["eval"][metric]) for record in evaluations_by_dev(records, metric)]
    if not ranked and any(record.get("eval") for record in records):
        raise UserError(f"{path}: no evaluation measures {metric}; set run.best_metric to another, or name a --model")
    if not ranked:
        raise UserError(f"{path}: the run has no evaluation to choose by; give it data.dev, or name a --model")
    for step, value in ranked:
        folder = run.checkpoints / step_name(step) if step else Path(recipe.model.path)
        if folder.is_dir():
            return Best(folder, step, metric, value, None if step == ranked[0][0] else ranked[0][0])
    raise UserError(
        f"{path}: no checkpoint of an evaluated step is kept (the best was step {ranked[0][0]}); "
        "let run.save_every divide run.eval_every, and raise run.keep_checkpoints"
    )
