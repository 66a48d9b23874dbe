"""Follows a run's metrics.jsonl and hands each new record to one tracker, in a process of its own.

    python -P send.py NAME RUN STEP      STEP: that of the checkpoint from which the run goes on; -1: it begins

Records are read from the file, so the run hands over nothing and waits for nothing. The process ends when its standard
input does, which is also what a killed run leaves; the word "done" on it says that the run came to its end. How far it
is stands in RUN/sinks/NAME.json, with the identity that the tracker knows the run by: a run that goes on continues the
same curves, and a tracker that joins late gets them from the beginning.

A record's numbers become train/NAME, of an evaluation eval/NAME, those of an inner object train/OUTER/NAME; the step is
the run's.

Deliberately absent: any import of Thresher, with which this file is not started; and taking points back where a tracker
cannot: Weights & Biases and trackio keep what they have, and steps that they have are not sent again.
"""

import json
import os
import secrets
import select
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

POLL = 1.0  # seconds between two looks at the file
Place = tuple[int, int]  # of a record: its step, and 1 for an evaluation, which stands behind the step's own


class TensorBoard:
    """Event files in RUN/tensorboard. Where a run goes on, what stands there behind its checkpoint is hidden."""

    def __init__(self, run: Path, identity: str, config: dict[str, Any], begin: int, goes_on: bool) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(run / "tensorboard"))
        if goes_on:
            self._writer.add_event(
                Event(step=begin, wall_time=time.time(), session_log=SessionLog(status=SessionLog.START))
            )

    def send(self, step: int, values: Mapping[str, float]) -> None:
        found = [self._summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
        self._writer.add_event(self._event(step=step, wall_time=time.time(), summary=self._summary(value=found)))

    def flush(self) -> None:
        self._writer.flush()

    def close(self, done: bool) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of the project WANDB_PROJECT, or "thresher"; WANDB_MODE, WANDB_ENTITY and the rest are wandb's own."""

    def __init__(self, run: Path, identity: str, config: dict[str, Any], begin: int, goes_on: bool) -> None:
        import wandb

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "thresher"),
            id=identity,
            name=run.name,
            resume="allow",
            dir=str(run),
            config=config,
            settings=wandb.Settings(console="off"),
        )

    def send(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def flush(self) -> None: ...

    def close(self, done: bool) -> None:
        self._run.finish(exit_code=0 if done else 1)


class Trackio:
    """A run of the project TRACKIO_PROJECT, or "thresher"; TRACKIO_DIR and the rest are trackio's own."""

    def __init__(self, run: Path, identity: str, config: dict[str, Any], begin: int, goes_on: bool) -> None:
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", "thresher")
        self._run = trackio.init(project=project, name=f"{run.name}-{identity}", resume="allow", config=config)

    def send(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def flush(self) -> None: ...

    def close(self, done: bool) -> None:
        self._run.finish()


TRACKERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "trackio": Trackio}
TAKES_BACK = ("tensorboard",)  # where what was sent can be hidden again


def follow(name: str, run: Path, step: int) -> None:
    """Send what the tracker lacks, and then what comes, until standard input ends."""
    run = run.resolve()
    state_file = run / "sinks" / f"{name}.json"
    state = json.loads(state_file.read_text(encoding="utf-8")) if state_file.exists() else {}
    identity = state.get("id") or secrets.token_hex(4)
    sent: Place = tuple(state["sent"]) if "sent" in state else (-1, 1)
    goes_on = sent[0] >= 0
    if name in TAKES_BACK:
        sent = min(sent, (step, 1))
    config = tomllib.loads((run / "recipe.toml").read_text(encoding="utf-8"))
    tracker = TRACKERS[name](run, identity, config, sent[0] + 1, goes_on)
    _keep(state_file, identity, sent)
    lines = _Lines(run / "metrics.jsonl")
    ended = done = False
    while True:
        before = sent
        for record in lines.new():
            if (place := (record["step"], int("eval" in record))) > sent:
                tracker.send(record["step"], values_of(record))
                sent = place
        if sent != before:
            tracker.flush()
            _keep(state_file, identity, sent)
        if ended:
            break
        if select.select([sys.stdin], [], [], POLL)[0]:
            done = sys.stdin.read().strip() == "done"  # to its end, so the run has written all that it will
            ended = True
    tracker.close(done)


class _Lines:
    """The whole lines of a file that grows."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0

    def new(self) -> Iterator[dict[str, Any]]:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._at)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                self._at += len(line)
                if "step" in (record := json.loads(line)):  # not the closing line
                    yield record


def values_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a record, by the names that trackers show."""
    inner = record.get("eval")
    return dict(_numbers(inner or {}, "eval/") if "eval" in record else _numbers(record, "train/"))


def _numbers(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step":
            yield prefix + name, float(value)


def _keep(path: Path, identity: str, sent: Place) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"id": identity, "sent": sent}) + "\n", encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    follow(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
