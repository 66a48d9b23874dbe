"""The folder of `thresher eval`: it survives a kill, and the same command goes on from it.

    settings.json        what decides the trajectories; a command with other settings is refused
    generated.jsonl      the trajectories so far, appended part by part; gone when the evaluation is complete
    answers.jsonl        of an endpoint, if one answered: nothing is paid for twice
    replies.jsonl        of an LLM judge, if one was asked: likewise
    trajectories.jsonl   every question: its trajectory, reward, parts and measures
    table.md             the table, for people
    metrics.json         the same and what it was measured under; written last, so that it is there when all is

The JSONL files have checksums (common/records.py); metrics.json has the number and the digest of the
trajectories. One process at a time writes to it.

Deliberately absent: any knowledge of judges and measures, which come after all that is costly is on the disk.
"""

import json
import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text, read_json_object, staged_folder
from thresher.common.locks import lock_folder
from thresher.common.records import RecordLog, write_object, write_records
from thresher.engine.protocol.trajectory import Segment, Trajectory, check_trajectory
from thresher.engine.rollout.rollout import EpisodeRunner
from thresher.rewards.reward import Source

ANSWERS = "answers.jsonl"
REMEDY = "delete this line and those behind it, and they are generated again"


@dataclass(frozen=True, slots=True)
class Generated:
    """A trajectory; of the passages found or given, which hold a gold; and its shares of what is known of its part as a
    whole: the rollout's seconds, and the branches that found no room in the context."""

    trajectory: Trajectory
    seconds: float
    relevant: list[bool]
    branches_without_room: float = 0.0


class EvalFolder:
    """An evaluation's folder, locked. Use it in a `with`: one that fails with nothing in it yet leaves no folder."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path, self._lock = path, lock
        self._file = path / "generated.jsonl"
        self._generated = RecordLog(self._file, remedy=REMEDY)

    @staticmethod
    def check(path: str | Path, settings: Mapping[str, Any]) -> None:
        """Raise UserError unless the folder is free or holds an unfinished evaluation with these settings."""
        path = Path(path)
        if not os.path.lexists(path):
            return
        if not (path / "settings.json").is_file() or (path / "metrics.json").exists():
            raise UserError(f"{path}: exists already; choose another folder for the evaluation")
        before = read_json_object(path / "settings.json")
        now = json.loads(json.dumps(settings))
        if different := [key for key in {**before, **now} if before.get(key) != now.get(key)]:
            key = different[0]
            raise UserError(
                f"{path}: holds an unfinished evaluation with {key} = {_shown(before.get(key))}, "
                f"not {_shown(now.get(key))}; finish it with its own settings, or choose another folder"
            )

    @classmethod
    def open(cls, path: str | Path, settings: Mapping[str, Any]) -> "EvalFolder":
        """Return a new folder, or one that was left unfinished. UserError as `check`, and while another process writes
        to it."""
        path = Path(path)
        cls.check(path, settings)
        if path.exists():
            return cls(path, lock_folder(path))
        with staged_folder(path) as staged:
            atomic_write_text(staged / "settings.json", json.dumps(settings, indent=1) + "\n")
            lock = lock_folder(staged)  # held through the rename
        return cls(path, lock)

    def __enter__(self) -> "EvalFolder":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and {path.name for path in self.path.iterdir()} <= {"settings.json", ".lock"}:
            shutil.rmtree(self.path)
        os.close(self._lock)

    def generated(self) -> list[Generated]:
        """Return the entries so far; half a line, as a kill leaves it, is passed over."""
        return [read_generated(record, f"{self._file}:{number}") for number, record in self._generated.recover()]

    def append(self, entries: Iterable[Generated]) -> None:
        """Add to what was generated, handed to the operating system before this returns."""
        self._generated.append(*map(write_generated, entries))

    def finish(self, records: Iterable[dict[str, Any]], table: str, figures: Mapping[str, Any]) -> None:
        """Write the results; metrics.json, by which the evaluation counts as complete, last."""
        mark = write_records(self.path / "trajectories.jsonl", records)
        atomic_write_text(self.path / "table.md", table)
        write_object(self.path / "metrics.json", {**figures, "trajectories": mark})
        self._file.unlink(missing_ok=True)


def check_belongs(done: Sequence[Generated], ids: Sequence[str], path: Path) -> None:
    """Raise UserError unless the trajectories answer the first of these questions."""
    if [entry.trajectory.question_id for entry in done] != list(ids[: len(done)]):
        raise UserError(f"{path}: holds trajectories of other questions; choose another folder for the evaluation")


def _shown(value: object) -> str:
    return "nothing" if value is None else json.dumps(value, ensure_ascii=False)


def check_generated(entries: Sequence[Generated], rollout: EpisodeRunner, path: Path) -> None:
    """Raise UserError, naming the line, where a trajectory of the rollout, or a branch of it, breaks an invariant."""
    for number, entry in enumerate(entries, 1):
        for one in (entry.trajectory, *entry.trajectory.branches.values()):
            if wrong := check_trajectory(one, rollout.tokenizer, rollout.system.tags, rollout.limits.max_context):
                raise UserError(f"{path}:{number}: {'; '.join(wrong)}; {REMEDY}")


def write_generated(entry: Generated) -> dict[str, Any]:
    """Return the record of an entry."""
    return asdict(entry) | {"trajectory": _stored(entry.trajectory)}


def _stored(trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory's record, in which `from_api` has its first name, "elsewhere"."""
    record = asdict(trajectory)
    record["branches"] = {name: _stored(branch) for name, branch in trajectory.branches.items()}
    record["elsewhere"] = record.pop("from_api")
    return record


def read_generated(record: Mapping[str, Any], where: str) -> Generated:
    """Return the entry of a record. UserError, starting with `where`, for one that was not written so."""
    try:
        record = {key: value for key, value in record.items() if key != "check"}  # a digest of an earlier version
        entry = Generated(**{**record, "trajectory": _trajectory(record["trajectory"])})
        numbers = (entry.seconds, entry.branches_without_room)
        if not all(isinstance(x, int | float) and 0 <= x < math.inf for x in numbers):
            raise ValueError("a number of seconds or branches")
        if not isinstance(entry.relevant, list) or not all(isinstance(x, bool) for x in entry.relevant):
            raise ValueError("relevant")
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise UserError(
            f"{where}: no trajectory as it was written ({type(error).__name__}: {error}); {REMEDY}"
        ) from None
    return entry


def _trajectory(record: Mapping[str, Any]) -> Trajectory:
    """Read a trajectory. ValueError, TypeError or KeyError where the record is not one of `asdict`; check_trajectory
    does the rest."""
    fields = {"from_api" if key == "elsewhere" else key: value for key, value in record.items()}
    segments = [_segment(segment) for segment in fields.pop("segments")]
    branches = {name: _trajectory(branch) for name, branch in fields.pop("branches").items()}
    trajectory = Trajectory(**fields, segments=segments, branches=branches)
    texts = (trajectory.question_id, trajectory.reason, *branches)
    if not all(isinstance(text, str) for text in texts) or not all(map(_whole, (trajectory.group, trajectory.sample))):
        raise TypeError("the question's id, the reason, a group or a sample's number")
    if not isinstance(trajectory.searches, list):
        raise TypeError("searches")
    for search in trajectory.searches:
        if not isinstance(search, dict) or not isinstance(search["query"], str):
            raise TypeError("a search's query")
    return trajectory


def _segment(record: Mapping[str, Any]) -> Segment:
    segment = Segment(**{**record, "source": Source(record["source"])})
    if not isinstance(segment.ids, list) or not all(map(_whole, segment.ids)):
        raise TypeError("token ids")
    if not isinstance(segment.logprobs, list) or not all(isinstance(x, float | int) for x in segment.logprobs):
        raise TypeError("log-probs")
    if not (segment.stop is None or (isinstance(segment.stop, str) and segment.stop)) or not _whole(segment.trailing):
        raise TypeError("a segment's end")
    return segment


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
