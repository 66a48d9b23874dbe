"""Endurance: a training run of small steps for minutes, whose memory and open descriptors must stay flat.

The run evaluates, saves and prunes all along. Resident memory is read from /proc; the first third of the time is not
counted, for caches fill. What is left is fitted by a line, and the line may rise by `RISE` over it: a leak of a few
kilobytes a step shows in ten minutes, and a shorter run only shows a larger one.
"""

import signal
import time
from collections.abc import Iterator, Sequence
from statistics import linear_regression, median_high

from thresher.bench.torture.attack import Field, Tried, fault_of
from thresher.bench.torture.kills import clear
from thresher.bench.torture.requests import held
from thresher.bench.torture.worker import ForkLimits
from thresher.bench.torture.world import train_words

SECONDS = 600.0
LEAST = 4.0  # seconds at the smallest scale
PAUSE = 0.2  # seconds between two looks
RISE = 16 << 20  # bytes

Look = tuple[float, int, int]  # seconds since the beginning, resident bytes, open descriptors


def attack(field: Field) -> Iterator[Tried]:
    """One run, watched."""
    out = field.scratch / "out"
    seconds = max(LEAST, SECONDS * field.scale)
    endless = ["run.steps=1000000", "run.save_every=5", "run.keep_checkpoints=1", "run.keep_trajectories=100"]
    words = train_words(field.at, out, *(word for text in endless for word in ("--set", text)))
    started = field.worker.start(words, ForkLimits(seconds=seconds + 600))
    begun, looks = time.monotonic(), list[Look]()
    while time.monotonic() - begun < seconds and started.running():
        looks.append((time.monotonic() - begun, *held(started.pid)))
        time.sleep(PAUSE)
    alive = started.running()
    started.kill(signal.SIGKILL)
    ended = started.wait()
    steps = (out / "metrics.jsonl").read_bytes().count(b'"reward"') if (out / "metrics.jsonl").exists() else 0
    clear(out)
    fault = None if alive else fault_of(ended) or f"ended with status {ended.status}"
    yield Tried("steps", "wrong" if fault or not steps else "right", fault or f"{steps} in {seconds:.0f} s")
    yield judged_memory(looks)
    yield judged_descriptors(looks)


def judged_memory(looks: Sequence[Look]) -> Tried:
    """Whether resident memory is flat behind the first third."""
    late = looks[len(looks) // 3 :]
    if len(late) < 3:
        return Tried("memory", "wrong", "the run was over before there was anything to see")
    times = [look[0] for look in late]
    slope = linear_regression(times, [look[1] for look in late]).slope
    rise = slope * (times[-1] - times[0])
    said = f"{rise / 2**20:+.1f} MiB in {times[-1] - times[0]:.0f} s, at {late[-1][1] / 2**20:.0f} MiB"
    return Tried("memory", "right" if rise < RISE else "wrong", said)


def judged_descriptors(looks: Sequence[Look]) -> Tried:
    """Whether most looks of the last third see no more open descriptors than any look before.

    A file that is open for a moment may meet another such file for the first time in the last third; a leak stays.
    """
    counts = [look[2] for look in looks]
    end = 2 * len(counts) // 3
    before, after = max(counts[:end], default=0), median_high(counts[end:] or [0])
    return Tried("descriptors", "right" if 0 < after <= before else "wrong", f"{before}, then {after}")
