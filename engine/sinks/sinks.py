"""The trackers of a run, each in a process of its own that follows metrics.jsonl (send.py).

metrics.jsonl is the truth, and a tracker a reader of it: one that fails, is slow or never answers takes nothing from
the run but, at its end, up to LINGER seconds. What went wrong is said once, and is in RUN/sinks/NAME.log, where a
tracker's own words go.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from thresher.common import console
from thresher.common.errors import UserError
from thresher.engine.store.run_folder import RunFolder

LINGER = 30.0  # seconds that all trackers together get at the end for what is left to send


def check_sinks(names: Sequence[str]) -> None:
    """UserError for a tracker that is not installed."""
    for name in names:
        spec = find_spec(name)
        if spec is None or spec.origin is None:  # a mere folder of that name, such as wandb leaves, has no origin
            raise UserError(
                f"run.trackers: expected trackers that are installed, and {name} is not "
                f'(pip install "thresher[{name}]", or pip install {name})'
            )


@contextmanager
def sending(run: RunFolder, names: Sequence[str], step: int) -> Iterator[None]:
    """The metrics that the run writes inside go to these trackers too. step: that of the checkpoint from which the run
    goes on, -1 without one."""
    sinks = [sink for name in names if (sink := _started(run.path, name, step)) is not None]
    done = False
    try:
        yield
        done = True
    finally:
        for sink in sinks:
            sink.end(done)
        deadline = time.monotonic() + LINGER
        for sink in sinks:
            sink.wait(max(deadline - time.monotonic(), 0.0))


def _started(run: Path, name: str, step: int) -> "_Sink | None":
    try:
        return _Sink(run, name, step)
    except OSError as error:
        _say(f"{name} could not be started ({error.strerror})", run)
        return None


class _Sink:
    """A tracker's process, and who says so when it fails."""

    def __init__(self, run: Path, name: str, step: int) -> None:
        self.run, self.name = run, name
        self.log = run / "sinks" / f"{name}.log"
        self.log.parent.mkdir(exist_ok=True)
        self._given_up = False
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(Path(__file__).with_name("send.py")), name, str(run), str(step)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONUNBUFFERED": "1"},
                start_new_session=True,  # Ctrl-C is the run's
            )
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def end(self, done: bool) -> None:
        """Tell the process that nothing more comes."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(b"done" if done else b"")
            self._process.stdin.close()
        except OSError:  # it has ended
            pass

    def wait(self, seconds: float) -> None:
        """Wait for its end, and end what does not end by itself."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            self._given_up = True
            os.killpg(self._process.pid, signal.SIGKILL)
            _say(f"{self.name} had not sent everything {LINGER:.0f} s after the end and was given up", self.run)
        self._watcher.join()

    def _watch(self) -> None:
        if self._process.wait() != 0 and not self._given_up:
            lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            _say(f"{self.name} failed ({lines[-1] if lines else 'without a word'}; {self.log})", self.run)


def _say(text: str, run: Path) -> None:
    console.console.print(
        f"run.trackers: {text}; the run is as it would be without it, and {run / 'metrics.jsonl'} holds everything",
        markup=False,
        soft_wrap=True,
    )
