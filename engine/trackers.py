"""Trackers of a run (TensorBoard, Weights & Biases, trackio), each in a process that follows metrics.jsonl.

    python -P trackers.py NAME RUN STEP      STEP: that of the checkpoint from which the run resumes; -1: it begins

The process reads records from the file, so the run sends it nothing, and waits for it only at its end, for up to LINGER
seconds. A tracker's output goes to RUN/sinks/NAME.log; a failure is printed once. The process ends when its standard
input is closed, as it also is when the run is killed; the word "done" on it means that the run is complete.

RUN/sinks/NAME.json holds the last position that was sent and the run's identity in the tracker: a resumed run continues
the same curves, and a tracker that is added later gets them from the beginning. Weights & Biases and trackio cannot
delete points: steps that they have are not sent again.

A record's numbers are named train/NAME, an evaluation's eval/NAME, those of an inner object train/OUTER/NAME and those
of a list, such as tokens by staleness, train/NAME/0, train/NAME/1, ..
"""

import json
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LINGER = 30.0  # seconds that all trackers together have at the end to send the rest
POLL = 1.0  # seconds between two reads of the file
Position = tuple[int, int]  # of a record: its step, and 1 for an evaluation, which follows the step's own


# In the run's process


def check_trackers(names: Sequence[str]) -> None:
    """Raise UserError for a tracker that is not installed."""
    from thresher.common.errors import UserError  # here and below, because a tracker's process starts without it

    for name in names:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a mere folder of that name, such as wandb leaves, has no origin
            raise UserError(
                f"run.trackers: expected trackers that are installed, and {name} is not "
                f'(pip install "thresher[{name}]", or pip install {name})'
            )


@contextmanager
def tracking(run: Path, names: Sequence[str], step: int) -> Iterator[None]:
    """Send the metrics that a run writes within the block to these trackers. run: its folder. step: that of the
    checkpoint from which it is resumed, -1 without one."""
    trackers = []
    for name in names:
        try:
            trackers.append(_TrackerProcess(run, name, step))
        except OSError as error:
            _say(f"{name} could not be started ({error.strerror})", run)
    done = False
    try:
        yield
        done = True
    finally:
        for tracker in trackers:
            tracker.end(done)
        deadline = time.monotonic() + LINGER
        for tracker in trackers:
            tracker.wait(max(deadline - time.monotonic(), 0.0))


class _TrackerProcess:
    """A tracker's process, with a thread that prints its failure."""

    def __init__(self, run: Path, name: str, step: int) -> None:
        self.run, self.name = run, name
        self.log = run / "sinks" / f"{name}.log"
        self.log.parent.mkdir(exist_ok=True)
        self._given_up = False
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", __file__, name, str(run), str(step)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # Ctrl-C goes to the run only
            )
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def end(self, done: bool) -> None:
        """Close the process's standard input: no more records will come. done: the run is complete."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"done" if done else b"")
            self._process.stdin.close()
        except OSError:  # it has ended
            pass

    def wait(self, seconds: float) -> None:
        """Wait for the process to end, and kill it after `seconds`."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._given_up = True
            os.killpg(self._process.pid, signal.SIGKILL)
            _say(f"{self.name} had not sent everything {LINGER:.0f} s after the end and was killed", self.run)
        self._watcher.join()

    def _watch(self) -> None:
        if self._process.wait() != 0 and not self._given_up:
            lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            _say(f"{self.name} failed ({lines[-1] if lines else 'without a message'}; {self.log})", self.run)


def _say(text: str, run: Path) -> None:
    from thresher.common import console

    console.console.print(
        f"run.trackers: {text}; the run itself is not affected, and {run / 'metrics.jsonl'} has everything",
        markup=False,
        soft_wrap=True,
    )


# In a tracker's process


class TensorBoard:
    """Event files in RUN/tensorboard. In a resumed run, points after its checkpoint are hidden."""

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


class Trackio(WeightsAndBiases):
    """A run of the project TRACKIO_PROJECT, or "thresher"; TRACKIO_DIR and the rest are trackio's own."""

    def __init__(self, run: Path, identity: str, config: dict[str, Any], begin: int, goes_on: bool) -> None:
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", "thresher")
        self._run = trackio.init(project=project, name=f"{run.name}-{identity}", resume="allow", config=config)

    def close(self, done: bool) -> None:
        self._run.finish()


TRACKERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WeightsAndBiases, "trackio": Trackio}
TAKES_BACK = ("tensorboard",)  # trackers in which points that were sent can be hidden


def follow(name: str, run: Path, step: int) -> None:
    """Send the records that the tracker lacks, and then new ones, until standard input is closed."""
    run = run.resolve()
    state_file = run / "sinks" / f"{name}.json"
    state = json.loads(state_file.read_text(encoding="utf-8")) if state_file.exists() else {}
    identity = state.get("id") or secrets.token_hex(4)
    sent: Position = tuple(state["sent"]) if "sent" in state else (-1, 1)
    goes_on = sent[0] >= 0
    if name in TAKES_BACK:
        sent = min(sent, (step, 1))
    config = tomllib.loads((run / "recipe.toml").read_text(encoding="utf-8"))
    tracker = TRACKERS[name](run, identity, config, sent[0] + 1, goes_on)
    _keep(state_file, identity, sent)
    metrics, read = run / "metrics.jsonl", 0
    ended = done = False
    while True:
        before = sent
        records, read = _new_records(metrics, read)
        for record in records:
            if (position := (record["step"], int("eval" in record))) > sent:
                tracker.send(record["step"], values_of(record))
                sent = position
        if sent != before:
            tracker.flush()
            _keep(state_file, identity, sent)
        if ended:
            break
        if select.select([sys.stdin], [], [], POLL)[0]:
            done = sys.stdin.read().strip() == "done"  # read to its end, so the run has written all its records
            ended = True
    tracker.close(done)


def _new_records(path: Path, read: int) -> tuple[list[dict[str, Any]], int]:
    """Return the records in the whole lines after byte `read` of a growing file, and the end of these lines."""
    if not path.exists():
        return [], read
    with path.open("rb") as file:
        file.seek(read)
        whole = file.read().rpartition(b"\n")
    records = [json.loads(line) for line in whole[0].splitlines()]
    return [record for record in records if "step" in record], read + len(whole[0] + whole[1])  # no closing line


def values_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a record by their names in a tracker."""
    inner = record.get("eval")
    return dict(_numbers(inner or {}, "eval/") if "eval" in record else _numbers(record, "train/"))


def _numbers(table: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for name, value in table.items():
        if isinstance(value, list):
            value = {str(number): one for number, one in enumerate(value)}
        if isinstance(value, dict):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step":
            yield prefix + name, float(value)


def _keep(path: Path, identity: str, sent: Position) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"id": identity, "sent": sent}) + "\n", encoding="utf-8")
    temporary.replace(path)


if __name__ == "__main__":
    follow(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
