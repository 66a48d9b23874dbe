"""What every attack shares: where it is carried out, how chance is drawn, and what counts as survived.

A command that is attacked may end in three ways, and every other way is a fault of ours:

    right      status 0, and the result is that of the unharmed command, to the bit but for what the clock says
    refused    status 2, no traceback, and a last line that says in a sentence what is wrong
    read       status 0 with another result, allowed only of what a person may write anew and nobody has a hash of
               (questions, transcripts, a recipe), and only where the file is still one of its format

A traceback, another status, a signal, time or memory beyond the limits, and another result without a word are wrong.
"""

import hashlib
import json
import sys
import tomllib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal

from thresher.bench.torture.worker import Ended, ForkLimits, Worker
from thresher.common.errors import UserError
from thresher.engine.store.run_folder import to_be_resumed

Verdict = Literal["right", "refused", "read", "wrong"]

# What a clock says, digests of records that hold it, and how much a forward held: a resumed run has nothing
# to guess from.
CLOCK = frozenset(
    {"rollout_tokens_per_s", "train_tokens_per_s", "search_share", "forwards", "forward_rows", "drafted_tokens"}
    | {"accepted_tokens", "search_calls", "queries_per_second", "seconds_per_question", "latency", "sha256"}
    | {"checksum", "digest"}
)
NOT_COMPARED = frozenset(
    {".lock", "hashes.json", "report.html", "starts.jsonl"}
)  # of a folder's files; hashes are of states with times, and a resumed run has started twice


@dataclass(frozen=True, slots=True)
class Tried:
    """One attempt. kind: a row of the table. what: how to repeat it, and what it ended in."""

    kind: str
    verdict: Verdict
    what: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Where an attack is carried out. at: the world, restored after each attempt. scratch: for what it writes. scale:
    of every number of attempts; 1 is the whole campaign."""

    at: Path
    scratch: Path
    worker: Worker
    seed: int
    scale: float

    def draw(self, name: str) -> Random:
        """Chance of its own for an attack, so that none depends on what others have drawn."""
        return Random(f"{self.seed}/{name}")

    def count(self, whole: int, least: int) -> int:
        """How many of `whole` attempts are due, every one of `least` kinds among them."""
        return max(least, round(whole * self.scale))


@dataclass(slots=True)
class Counts:
    """What came of the attempts of one kind."""

    tried: int = 0
    right: int = 0
    refused: int = 0
    read: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, one: Tried) -> None:
        self.tried += 1
        if one.verdict == "wrong":
            self.wrong.append(one.what)
        else:
            setattr(self, one.verdict, getattr(self, one.verdict) + 1)


def judge(
    ended: Ended, is_right: Callable[[], bool], is_read: Callable[[], bool] = lambda: False
) -> tuple[Verdict, str]:
    """The verdict on an ended command, and a word on it. is_right: whether the result is the unharmed one; is_read:
    whether another may be accepted."""
    if fault := fault_of(ended):
        return "wrong", fault
    if ended.status == 2:
        return "refused", last_line(ended)
    if is_right():
        return "right", ""
    return ("read", "") if is_read() else ("wrong", "another result without a word")


def tried(kind: str, what: str, ended: Ended, passes: bool = False) -> Tried:
    """An attempt that must be refused; passes: it may also be taken for what it is."""
    verdict, word = judge(ended, lambda: False, lambda: passes)
    return Tried(kind, verdict, f"{what}: {word}")


def called(worker: Worker, call: Callable[[], int], limits: ForkLimits | None = None) -> Ended:
    """A function in a fork; its UserError ends as a command's does."""

    def call_or_refuse() -> int:
        try:
            return call()
        except UserError as error:
            print(f"thresher: {error}", file=sys.stderr)
            return 2

    return worker.play_call(call_or_refuse, limits)


def fault_of(ended: Ended) -> str | None:
    """What is wrong with the way in which a command ended, whatever its result; None where nothing is."""
    if ended.timed_out:
        return f"hangs: killed after {ended.seconds:.0f} s"
    if ended.signal is not None:
        return f"died of signal {ended.signal}"
    if "Traceback (most recent call last)" in ended.err:
        return f"traceback: {last_line(ended)}"
    if ended.status not in (0, 2):
        return f"status {ended.status}: {last_line(ended)}"
    if ended.status == 2 and not last_line(ended).startswith("thresher: "):
        return f"status 2 without a sentence: {last_line(ended)}"
    return None


def last_line(ended: Ended) -> str:
    return (ended.err.strip().splitlines() or [""])[-1][:300]


def content(path: Path, but: Collection[str] = NOT_COMPARED) -> dict[str, str]:
    """What a command wrote, file by file, as digests; without what the clock says and files named in `but`. Equal where
    it is the same."""
    if not path.is_dir():
        return {path.name: _digest(path)} if path.exists() else {}
    files = sorted(file for file in path.rglob("*") if file.is_file())
    kept = [file for file in files if file.name not in but and file.suffix not in (".png", ".tmp", ".lock")]
    return {str(file.relative_to(path)): _digest(file) for file in kept}


def different(found: dict[str, str], expected: dict[str, str]) -> list[str]:
    """The files in which two contents differ, a few of them."""
    return sorted(name for name in {**found, **expected} if found.get(name) != expected.get(name))[:5]


def _digest(path: Path) -> str:
    data = path.read_bytes()
    if path.suffix in (".json", ".jsonl"):
        try:
            lines = data.splitlines() if path.suffix == ".jsonl" else [data]
            data = json.dumps([_untimed(json.loads(line)) for line in lines]).encode()
        except ValueError:  # compared as it is
            pass
    elif path.suffix == ".md":
        data = b"".join(line for line in data.splitlines() if not line.startswith(b"- Latency"))
    return hashlib.sha256(data).hexdigest()[:16]


def _untimed(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _untimed(v) for k, v in value.items() if not k.endswith("seconds") and k not in CLOCK}
    return [_untimed(part) for part in value] if isinstance(value, list) else value


def begun_again(words: Sequence[str], out: Path) -> list[str]:
    """The words that go on with a command which may have been begun before, into `out`."""
    resumes = to_be_resumed(words[0], out) or (words[0] == "rollout" and out.exists())
    return [*words, *(["--resume"] if resumes else [])]


def is_legible(path: Path) -> bool:
    """Whether a file of text is still one of its format, by Python's own readers."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
        if path.suffix == ".toml":
            tomllib.loads(text)
        elif path.suffix == ".jsonl":
            return all(isinstance(json.loads(line), dict) for line in text.split("\n") if line.strip())
        elif path.suffix == ".py":
            compile(text, path.name, "exec")
    except (ValueError, SyntaxError, OSError):
        return False
    return True


def shuffled(draw: Random, kinds: Sequence[Any], count: int) -> list[Any]:
    """`count` of `kinds`, each as often as any other but for one, in any order."""
    order = draw.sample(kinds, len(kinds))
    chosen = [order[number % len(order)] for number in range(count)]
    draw.shuffle(chosen)
    return chosen
