"""Control bytes on a terminal: what a model, a file or an argument holds must not act on the terminal that shows it.

Commands run on a pseudo-terminal of their own. What they print may hold the sequences of colours and cursors that this
program uses; a payload that came back as it was, or any other control byte, is a fault. The exit status may be any but
that of a trace.
"""

import os
import pty
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from thresher.bench.torture.attack import Field, Tried, Verdict, fault_of
from thresher.bench.torture.inputs import generate_words
from thresher.bench.torture.worker import Ended, ForkLimits, Worker
from thresher.bench.torture.world import train_words, write_lines

LEAST = 4
LIMITS = ForkLimits(seconds=60)
PAYLOADS = {
    "title": "\x1b]0;owned\x07",
    "clear": "\x1b[2J\x1b[H",
    "bidi": "\u202etxt\u202c",
    "C1": "\x9b31m",
    "bell": "\x07\x08",
}
OURS = re.compile(r"\x1b\[[0-9;]*[mKABCDG]|\x1b\[\?25[hl]")
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")

Words = Callable[[Path, Path, str], list[str]]  # from the world, a file whose records hold the payload, and the payload
SHOWN: dict[str, Words] = {
    "generate, a model that writes any byte": lambda at, file, text: [
        *generate_words(at / "model", "--prompt", text),
        "--max-new-tokens",
        "200",
    ],
    "generate, several samples": lambda at, file, text: [*generate_words(at / "model", "--prompt", text), "--n", "3"],
    "a path": lambda at, file, text: ["data", "check", f"{at}/{text}.jsonl"],
    "--set": lambda at, file, text: train_words(at, at / "never", "--set", f"run.steps={text}"),
    "--set of an unknown key": lambda at, file, text: train_words(at, at / "never", "--set", f"run.{text}=1"),
    "--system": lambda at, file, text: ["score", "--system", text, "--transcripts", str(file), "--out", f"{at}/never"],
    "an unknown flag": lambda at, file, text: ["report", f"--{text}"],
    "data show": lambda at, file, text: ["data", "show", str(file)],
    "data check": lambda at, file, text: ["data", "check", str(file)],
}


def attack(field: Field) -> Iterator[Tried]:
    """Every payload by every way to the screen, at full scale."""
    draw, file = field.draw("terminal"), field.scratch / "asked.jsonl"
    pairs = [(way, payload) for way in SHOWN for payload in PAYLOADS]
    for way, payload in draw.sample(pairs, min(len(pairs), field.count(len(pairs), LEAST))):
        text = PAYLOADS[payload]
        record = {"id": f"a{text}", "question": f"Who {text}?", "golden_answers": [text], "metadata": {text: text}}
        write_lines(file, [record, {"id": f"a{text}", "question": text}])
        ended = on_terminal(field.worker, SHOWN[way](field.at, file, text))
        shutil.rmtree(field.at / "never", ignore_errors=True)
        yield Tried(way, *_judged(ended, payload))


def _judged(ended: Ended, payload: str) -> tuple[Verdict, str]:
    """What was shown, held against what may be."""
    refusal = [line for line in ended.out.splitlines() if line.startswith("thresher: ")]
    if ended.timed_out or ended.signal is not None or "Traceback (most recent call last)" in ended.out:
        return "wrong", f"{payload}: {fault_of(ended) or 'traceback'}"
    shown = OURS.sub("", ended.out.replace("\r\n", "\n"))
    if (found := CONTROL.search(shown)) is not None:
        begin = max(0, found.start() - 20)
        return "wrong", f"{payload}: {shown[begin : found.end() + 20]!r} is shown"
    return ("refused" if refusal else "right"), f"{payload}: {refusal[-1:]}"


def on_terminal(worker: Worker, words: list[str]) -> Ended:
    """A command on a pseudo-terminal; what it shows is the ended fork's `out`."""

    def call() -> int:
        pid, terminal = pty.fork()
        if pid == 0:
            status = 1
            try:
                status = worker.run(words)
                sys.stdout.flush()
                sys.stderr.flush()
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(status)
        while True:
            try:
                part = os.read(terminal, 1 << 16)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            os.write(1, part)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    return worker.play_call(call, LIMITS)
