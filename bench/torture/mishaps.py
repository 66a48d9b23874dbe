"""Mishaps of a run: a system's file that ends the process, records that are deleted while it writes, and two processes
that write to one place."""

import shutil
import time
from collections.abc import Iterator

from thresher.bench.torture.attack import Field, Tried, content, different, fault_of, last_line, tried
from thresher.bench.torture.disks import WRITERS, Writer
from thresher.bench.torture.kills import clear
from thresher.bench.torture.worker import ForkLimits
from thresher.bench.torture.world import train_words

LIMITS = ForkLimits(seconds=90)
LEAST = 1  # of each kind

# What stands in a system's reward, in the place of its result.
REWARDS = {
    "exits with 0": "raise SystemExit(0)",
    "exits with 3": "import sys; sys.exit(3)",
    "raises what is no Exception": "raise GeneratorExit",
    "raises": "raise KeyError('x')",
    "is NaN": "return RewardResult(float('nan'), answer_measures(None, attempt.golds), None)",
    "is None": "return None",
    "is endless recursion": "return reward(attempt)",
}
REWARD = "    text = b"
EPISODE = "    yield Generate("  # a limit of tokens may end an episode before it comes to its end
DELETED = ("metrics.jsonl", "checkpoints")


def attack(field: Field) -> Iterator[Tried]:
    """All of them at full scale, a few of each kind below."""
    draw = field.draw("mishaps")
    for name in draw.sample(list(REWARDS), min(len(REWARDS), field.count(len(REWARDS), LEAST))):
        yield _own_system(field, f"its reward {name}", REWARD, REWARDS[name])
    yield _own_system(field, "its episode exits", EPISODE, "raise SystemExit(0)")
    for name in draw.sample(DELETED, min(len(DELETED), field.count(len(DELETED), 1))):
        yield _deleted(field, name)
    for name in draw.sample(list(WRITERS), min(len(WRITERS), field.count(len(WRITERS), LEAST))):
        yield two_at_once(field, name, WRITERS[name])


def _own_system(field: Field, what: str, line: str, put: str) -> Tried:
    text = (field.at / "letters.py").read_text()
    file, out = field.scratch / "system.py", field.scratch / "out"
    file.write_text(text.replace(line, f"    {put}\n{line}", 1))
    ended = field.worker.play(train_words(field.at, out, "--set", f"system.name={file}"), LIMITS)
    clear(out)
    return tried("a system's file", what, ended)


def _deleted(field: Field, name: str) -> Tried:
    """What a run has written is deleted while it goes on: it ends in a sentence, or has all of it at its end."""
    out = field.scratch / "out"
    words = train_words(field.at, out, "--set", "run.steps=12", "--set", "run.save_every=2")
    started = field.worker.start(words, LIMITS)
    metrics = out / "metrics.jsonl"
    while started.running() and not (metrics.exists() and metrics.read_bytes().count(b"\n") >= 3):
        time.sleep(0.005)
    path = out / name
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
    ended = started.wait()
    lost = not path.exists() or (name == "metrics.jsonl" and b'"step": 1,' not in path.read_bytes())
    clear(out)
    return tried("deleted while it runs", name, ended, passes=not lost)


def two_at_once(field: Field, name: str, writer: Writer) -> Tried:
    """The same command twice at the same time: one comes to the result, the other is refused or comes to it too."""
    out = field.scratch / writer.out
    words = writer.words(field.at, out)
    alone = field.worker.play(words, LIMITS)
    if alone.status != 0:
        raise RuntimeError(f"thresher {' '.join(words)}: {alone.err}")
    expected = content(out)
    clear(out)
    both = [field.worker.start(words, LIMITS) for _ in range(2)]
    ends = [one.wait() for one in both]
    found, left = content(out), list(out.parent.glob(".*.tmp"))
    clear(out)
    said = "; ".join(last_line(one) for one in ends)
    if faults := [fault for one in ends if (fault := fault_of(one))]:
        return Tried("two at once", "wrong", f"{name}: {faults[0]}")
    if all(one.status == 2 for one in ends):
        return Tried("two at once", "wrong", f"{name}: neither comes to an end: {said}")
    if differ := different(found, expected):
        return Tried("two at once", "wrong", f"{name}: {', '.join(differ)} differ from the command's alone; {said}")
    if left:
        return Tried("two at once", "wrong", f"{name}: {left[0].name} is left")
    return Tried("two at once", "right" if {one.status for one in ends} == {0} else "refused", f"{name}: {said}")
