"""Kills: a command is ended at any moment of its work, begun again, and must come to what the unbroken one came to.

Moments are drawn over the time that the unbroken command took; one that was over before its signal is drawn again. A
third of those that were killed are killed once more while they go on.
"""

import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from thresher.bench.torture.attack import (
    Field,
    Tried,
    Verdict,
    begun_again,
    content,
    different,
    fault_of,
    last_line,
    shuffled,
)
from thresher.bench.torture.worker import Ended
from thresher.bench.torture.world import (
    eval_words,
    extract_words,
    index_words,
    sft_words,
    train_words,
    write_lines,
)

KILLS, LEAST = 500, 3
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
# How a command may end on a signal: of the signal, or with the status that a shell gives it.
LEFT = {signal.SIGINT: (130,), signal.SIGTERM: (143,), signal.SIGKILL: ()}
TWICE = 1 / 3
PASSAGES = 4000  # of the corpus whose index is built


@dataclass(frozen=True, slots=True)
class Killable:
    """A command that writes `out`."""

    words: Callable[[Path, Path], list[str]]
    out: str = "out"


def _built(kind: str) -> Callable[[Path, Path], list[str]]:
    return lambda at, out: index_words(at, out, kind, "big.jsonl")


def _tuned(*sets: str) -> Callable[[Path, Path], list[str]]:
    return lambda at, out: sft_words(at, out, "sft.steps=30", "sft.save_every=4", *sets)


JOBS = {
    "train": Killable(lambda at, out: train_words(at, out)),
    "train, two updates a step": Killable(
        lambda at, out: train_words(
            at, out, "--set", "rollout.questions_per_step=4", "--set", "grpo.updates_per_batch=2"
        )
    ),
    "sft": Killable(_tuned()),
    "sft, adapters and restarts": Killable(
        _tuned(
            "lora.rank=2",
            "sft.steps=12",
            "sft.held_out=0.2",
            "sft.stop_at_copy_accuracy=1",
            "sft.gate_every=5",
            "sft.max_restarts=1",
        )
    ),
    "eval": Killable(eval_words),
    "extract": Killable(extract_words, out="out.jsonl"),
    "index build, flat": Killable(_built("flat")),
    "index build, HNSW": Killable(_built("hnsw")),
    "index build, BM25": Killable(_built("bm25")),
}


def attack(field: Field) -> Iterator[Tried]:
    """Jobs of every kind, as often as each other; an attempt is one command, with a kill or two."""
    draw = field.draw("kills")
    write_big_corpus(field.at)
    whole: dict[str, tuple[float, dict[str, str]]] = {}
    for name in shuffled(draw, list(JOBS), field.count(KILLS, LEAST)):
        job = JOBS[name]
        if name not in whole:
            whole[name] = _unbroken(field, job)
        seconds, expected = whole[name]
        yield Tried(name, *kill_and_resume(field, job, draw, seconds, expected))


def write_big_corpus(at: Path) -> None:
    draw = Random(0)
    words = [f"w{number}" for number in range(500)]
    texts = (" ".join(draw.choices(words, k=12)) for _ in range(PASSAGES))
    write_lines(at / "big.jsonl", [{"id": f"b{n}", "title": f"t{n}", "text": text} for n, text in enumerate(texts)])


def kill_and_resume(
    field: Field, job: Killable, draw: Random, seconds: float, expected: dict[str, str]
) -> tuple[Verdict, str]:
    """One command, killed and begun again; the verdict. Nothing is left behind."""
    out = field.scratch / job.out
    said = []
    for _ in range(50):
        clear(out)
        number, moment = draw.choice(SIGNALS), draw.uniform(0, seconds)
        ended = struck(field, job, out, number, moment)
        said = [f"{number.name} after {moment:.3f} s of {seconds:.3f}"]
        if ended.status != 0:
            break
    else:
        return "wrong", "no kill came before the end in 50 attempts"
    if fault := _fault(ended, number):
        return "wrong", f"{said[0]}: {fault}"
    if draw.random() < TWICE:
        number, moment = draw.choice(SIGNALS), draw.uniform(0, seconds)
        ended = struck(field, job, out, number, moment)
        said.append(f"{number.name} after {moment:.3f} s")
        if ended.status not in (0, 2) and (fault := _fault(ended, number)):
            return "wrong", f"{', '.join(said)}: {fault}"
    ended = field.worker.play(_words(field, job, out))
    # It was, when the signal came.
    done = ended.status == 2 and ("exists already" in ended.err or "is finished" in ended.err)
    if (fault := fault_of(ended)) or (ended.status == 2 and not done):
        return "wrong", f"{', '.join(said)}: {fault or last_line(ended)}"
    found = content(out)
    clear(out)
    if differ := different(found, expected):
        return "wrong", f"{', '.join(said)}: {', '.join(differ)} differ from the unbroken command's"
    return "right", ""


def struck(field: Field, job: Killable, out: Path, number: signal.Signals, moment: float) -> Ended:
    """A command, begun or begun again, that gets a signal after so many seconds."""
    started = field.worker.start(_words(field, job, out))
    until = time.monotonic() + moment
    while (left := until - time.monotonic()) > 0 and started.running():
        time.sleep(min(left, 0.005))
    started.kill(number)
    return started.wait()


def _words(field: Field, job: Killable, out: Path) -> list[str]:
    return begun_again(job.words(field.at, out), out)


def _fault(ended: Ended, number: signal.Signals) -> str | None:
    """What is wrong with how a command left on a signal."""
    if ended.signal == number or ended.status in (0, *LEFT[number]):
        return None
    return fault_of(ended) or f"status {ended.status} on {number.name}: {last_line(ended)}"


def _unbroken(field: Field, job: Killable) -> tuple[float, dict[str, str]]:
    """The seconds that a command takes, and what it comes to."""
    out = field.scratch / job.out
    ended = field.worker.play(job.words(field.at, out))
    if ended.status != 0:
        raise RuntimeError(f"an unbroken command failed: {ended.err}")
    found = content(out)
    clear(out)
    return ended.seconds, found


def clear(path: Path) -> None:
    """Removes what a command wrote, the files beside it and what a kill left."""
    for one in path.parent.glob(f".{path.name}.*.tmp"):
        shutil.rmtree(one) if one.is_dir() else one.unlink()
    for one in {path, *path.parent.glob(f"{path.stem}.*")}:
        if one.is_dir():
            shutil.rmtree(one)
        else:
            one.unlink(missing_ok=True)
