"""Run commands in forked processes with limits of time and memory, and judge how each ended. A command with run.async
runs in two ranks, as under torchrun.

    right      status 0, and the result of the unharmed command, bit for bit except for times
    refused    status 2, no traceback, and a last line that says in a sentence what is wrong
    read       status 0 with another result: only for a file that a person may rewrite, if it is well formed
    wrong      everything else

A fork has all modules that the parent imported. The parent must not compute: OpenMP's threads do not survive a fork.
"""

import ctypes
import fcntl
import gc
import hashlib
import importlib
import json
import math
import os
import resource
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any, Literal, NoReturn, TypeVar

from full_disk import files_of_at_most, modes_that_hold
from rank_cases import free_ports

from thresher.common.errors import UserError
from thresher.engine.store.run_folder import to_be_resumed

Verdict = Literal["right", "refused", "read", "wrong"]
Command = Callable[[Sequence[str]], int]
Case = TypeVar("Case")

STOPPING = (signal.SIGINT, signal.SIGTERM)
PIPE = 1 << 20  # bytes
PR_SET_PDEATHSIG = 1  # of Linux's prctl.h
TRACEBACK = "Traceback (most recent call last)"
ASYNC = "run.async=true"  # a command with this word runs in RANKS ranks
RANKS = 2
PATIENCE = 10.0  # seconds to end: for a rank after another has failed, and for the children of a killed process

# Keys of records that differ between two sound runs: times, digests of records with times, counts of speculation, which
# starts without a history in a resumed run, and the clock of groups in a checkpoint, whose counts are in their step.
TIMED = frozenset(
    {"rollout_tokens_per_s", "train_tokens_per_s", "search_share", "forwards", "forward_rows", "drafted_tokens"}
    | {
        "accepted_tokens",
        "slots_busy",
        "search_calls",
        "queries_per_second",
        "seconds_per_question",
        "latency",
        "sha256",
    }
    | {"checksum", "digest", "clock"}
)
# Files that differ: hashes.json covers states with times, and a resumed run has started twice.
NOT_COMPARED = frozenset({"hashes.json", "report.html", "starts.jsonl"})
UNSTABLE = frozenset({"png", "tmp", "lock"})  # suffixes


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a fork. memory: address space that it may add, in bytes. file_bytes: the largest size of a file that
    it writes, as on a full disk. unprivileged: file modes hold for root too. terminal: it prints on its own
    terminal, whose text is `Ended.out`."""

    seconds: float = 120.0
    memory: int = 4 << 30
    file_bytes: int | None = None
    unprivileged: bool = False
    terminal: bool = False


DEFAULT = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command ended. status: None if a signal ended it or its time ran out."""

    status: int | None
    signal: int | None
    timed_out: bool
    seconds: float
    out: str
    err: str

    @property
    def last_line(self) -> str:
        return (self.err.strip().splitlines() or [""])[-1][:300]

    @property
    def fault(self) -> str | None:
        """The fault in how it ended, whatever its result; None if there is none."""
        if self.timed_out:
            return f"hangs: killed after {self.seconds:.0f} s"
        if TRACEBACK in self.err:
            return f"traceback: {self.last_line}"
        if self.signal is not None:
            return f"died of signal {self.signal}"
        if self.status not in (0, 2):
            return f"status {self.status}: {self.last_line}"
        if self.status == 2 and not self.last_line.startswith("thresher: "):
            return f"status 2 without a sentence: {self.last_line}"
        return None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One attempt. kind: a row of the table. what: how to repeat it, and how it ended."""

    kind: str
    verdict: Verdict
    what: str = ""


def judge(ended: Ended, right: bool, may_be_read: bool = False) -> tuple[Verdict, str]:
    """Return the verdict on a command and its reason. right: whether its result is that of the unharmed command."""
    if ended.fault:
        return "wrong", ended.fault
    if ended.status == 2:
        return "refused", ended.last_line
    if right:
        return "right", ""
    return ("read", "") if may_be_read else ("wrong", "another result without a word")


def refused(kind: str, what: str, ended: Ended, *, passes: bool = False) -> Outcome:
    """Return the outcome of an attempt that must be refused; passes: whether it may be read too."""
    verdict, reason = judge(ended, right=False, may_be_read=passes)
    return Outcome(kind, verdict, f"{what}: {reason}")


class Process:
    """A forked call, whose result is the exit status. Its streams are pipes, to which limits on files do not apply."""

    def __init__(self, call: Callable[[], int], limits: Limits) -> None:
        self.limits, self.begun, self.said = limits, time.monotonic(), [b"", b""]  # stdout, stderr
        self._ended: Ended | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        pipes = [os.openpty()] if limits.terminal else [os.pipe() for _ in self.said]
        self._streams, parent = [read for read, _ in pipes], os.getpid()
        # Python loses a signal that arrives between the fork and the child's own handlers.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        self.pid = os.fork()
        if self.pid == 0:
            run_child(call, limits, [write for _, write in pipes], parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for read, write in pipes:
            if not limits.terminal:
                fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE)
            os.set_blocking(read, False)
            os.close(write)

    def running(self) -> bool:
        """Read its output; return whether it runs."""
        if self._ended is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._read()
            if pid:
                self._finish(status)
        return self._ended is None

    def kill(self, number: int, rank: int | None = None) -> None:
        """Send a signal to the process itself, or to one of the ranks that it has started, if it still runs."""
        if self._ended is None:
            ranks = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
            chosen = rank is not None and rank < len(ranks)
            os.kill(int(ranks[rank]) if chosen else self.pid, number)

    def wait_until(self, condition: Callable[[], bool], pause: float = 0.002) -> None:
        """Return once `condition` holds or the process has ended."""
        while self.running() and not condition():
            time.sleep(pause)

    def wait(self) -> Ended:
        """Wait for the end, at most for the limit's seconds; kill the processes that it has started."""
        self.wait_until(lambda: time.monotonic() - self.begun > self.limits.seconds)
        if self._ended is None:
            os.kill(self.pid, signal.SIGKILL)
            self._finish(os.waitpid(self.pid, 0)[1], timed_out=True)
        assert self._ended is not None
        return self._ended

    def _read(self) -> bool:
        """Read its output; return whether a process is left that may print more."""
        left = False
        for number, stream in enumerate(self._streams):
            try:
                while part := os.read(stream, PIPE):
                    self.said[number] += part
            except BlockingIOError:
                left = True
            except OSError:  # a terminal's other end is closed
                pass
        return left

    def _finish(self, status: int, timed_out: bool = False) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        until = time.monotonic() + PATIENCE
        while self._read() and time.monotonic() < until:  # ranks, which die with their parent
            time.sleep(0.001)
        for stream in self._streams:
            os.close(stream)
        died = os.WIFSIGNALED(status)
        self._ended = Ended(
            status=None if died else os.WEXITSTATUS(status),
            signal=os.WTERMSIG(status) if died and not timed_out else None,
            timed_out=timed_out,
            seconds=time.monotonic() - self.begun,
            out=self.said[0].decode(errors="replace"),
            err=self.said[1].decode(errors="replace"),
        )


def run_child(call: Callable[[], int], limits: Limits, streams: Sequence[int], parent: int) -> NoReturn:
    """Run `call` in a fork and exit the fork."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # no fork outlives its parent
        if os.getppid() != parent:
            os._exit(status)
        if limits.terminal:
            os.login_tty(streams[0])
        else:
            os.setpgid(0, 0)
            for number, stream in enumerate((os.open(os.devnull, os.O_RDONLY), *streams)):
                os.dup2(stream, number)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        # In a fork of a fork nothing else holds the replaced streams, whose descriptors must stay open.
        sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + limits.memory, resource.RLIM_INFINITY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        stack = ExitStack()  # never closed: the limits end with the process
        if limits.unprivileged:
            stack.enter_context(modes_that_hold())
        if limits.file_bytes is not None:
            os.environ["PYTHONDONTWRITEBYTECODE"] = "1"  # for processes that the command starts
            stack.enter_context(files_of_at_most(limits.file_bytes))
        status = call()
    except KeyboardInterrupt as error:  # before the command handles it
        status = getattr(error, "status", 130)
    except UserError as error:  # raised by a function; a command prints its own
        print(f"thresher: {error}", file=sys.stderr)
        status = 2
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


def play_ranks(call: Callable[[], int]) -> int:
    """Run a command in RANKS forks, as torchrun does. Signals go to each of them; if one fails, those that do not end
    by themselves are killed. Return the status of the first that failed, or die of the signal that it died of."""
    (port,) = free_ports(1)
    # A signal that arrives before the handlers are set would end this process and reach no rank.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
    ranks = [Process(partial(play_rank, call, number, port), DEFAULT) for number in range(RANKS)]

    def pass_on(number: int, frame: FrameType | None) -> None:
        for one in ranks:
            one.kill(number)

    for number in STOPPING:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    until = math.inf
    while left := [one for one in ranks if one.running()]:
        if any(one.wait().status != 0 for one in ranks if one not in left):
            until = min(until, time.monotonic() + PATIENCE)
        if time.monotonic() > until:
            for one in left:
                one.kill(signal.SIGKILL)
        time.sleep(0.002)
    ends = [one.wait() for one in sorted(ranks, key=lambda one: one.begun + one.wait().seconds)]
    for ended in ends:
        print(ended.out, end="", flush=True)
        print(ended.err, end="", file=sys.stderr, flush=True)
    failed = next((ended for ended in ends if ended.status != 0), ends[0])
    if failed.signal is not None:
        if failed.signal in STOPPING:
            signal.signal(failed.signal, signal.SIG_DFL)
        os.kill(os.getpid(), failed.signal)
    return failed.status or 0


def play_rank(call: Callable[[], int], rank: int, port: int) -> int:
    """Run a command as one of the ranks that torchrun starts on this machine."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_WORLD_SIZE": RANKS, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in numbers.items()}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "torture"}
    return call()


class Campaign:
    """One attack.

    run: the command line, from arguments to an exit status. world: the folder that is attacked, restored after each
    attempt. out: a free path in its own folder, for the output of a command. draw: random numbers of this attack alone.
    scale: the factor of every number of attempts.
    """

    def __init__(self, name: str, folder: Path, run: Command, seed: int = 0, scale: float = 1.0) -> None:
        self.world, self.scratch, self.command, self.scale = folder / "world", folder / name, run, scale
        self.out, self.draw = self.scratch / "written" / "out", Random(f"{seed}/{name}")
        self.out.parent.mkdir(parents=True)

    def run(self, words: Sequence[str]) -> int:
        """Run a command in this process, or in ranks that it starts."""
        call = partial(self.command, words)
        return play_ranks(call) if ASYNC in words else call()

    def count(self, whole: int, least: int) -> int:
        """Return `whole` times the scale, and at least `least`."""
        return max(least, round(whole * self.scale))

    def some(self, cases: Collection[Case], least: int, times: int = 1) -> list[Case]:
        """Draw `times` the number of cases times the scale, at least `least` and at most all of them."""
        cases = list(cases)
        return self.draw.sample(cases, min(len(cases), self.count(times * len(cases), least)))

    def each(self, cases: Collection[Case], count: int) -> list[Case]:
        """Draw `count` of the cases; how often two of them are drawn differs by at most one."""
        order = self.draw.sample(list(cases), len(cases))
        chosen = [order[number % len(order)] for number in range(count)]
        self.draw.shuffle(chosen)
        return chosen

    def words(self, command: str, out: Path | None = None, **more: Any) -> list[str]:
        """Return the words of a command; {at} is the world, {out} the free path."""
        return [word.format(at=self.world, out=out or self.out, **more) for word in command.split()]

    def words_again(self, text: str) -> list[str]:
        """Return the words that start a command, or resume it if it has started before."""
        words = self.words(text)
        begun = self.out.with_suffix(".jsonl").exists() if words[0] == "rollout" else to_be_resumed(words[0], self.out)
        return [*words, *(["--resume"] if begun else [])]

    def start(self, what: str | Sequence[str] | Callable[[], int], limits: Limits = DEFAULT) -> Process:
        """Start a command, given as text or as words, or a function."""
        words = self.words(what) if isinstance(what, str) else what
        gc.freeze()  # the fork shares the existing objects, and its garbage collector must not touch them
        return Process(words if callable(words) else partial(self.run, words), limits)

    def play(self, what: str | Sequence[str] | Callable[[], int], limits: Limits = DEFAULT) -> Ended:
        return self.start(what, limits).wait()

    def must(self, what: str | Sequence[str], limits: Limits = DEFAULT) -> Ended:
        """Run a command that must succeed, and import the modules that it has imported here too."""
        words = self.words(what) if isinstance(what, str) else what

        def run_and_list() -> int:
            status = self.run(words)
            (self.scratch / "modules.json").write_text(json.dumps(sorted(sys.modules)))
            return status

        ended = self.play(run_and_list, limits)
        if ended.status != 0:
            raise RuntimeError(f"thresher {' '.join(words)}: status {ended.status}, signal {ended.signal}: {ended.err}")
        for name in json.loads((self.scratch / "modules.json").read_text()):
            if name not in sys.modules and name != "__mp_main__":
                with suppress(Exception):  # made by another module, or by the command itself
                    importlib.import_module(name)
        return ended

    def unharmed(self, words: str, limits: Limits = DEFAULT) -> tuple[Ended, dict[str, str]]:
        """Run a command that nothing harms; return its end and the content of its output."""
        ended = self.must(words, limits)
        found = content(self.out.parent)
        self.clear()
        return ended, found

    def unfinished(self) -> list[str]:
        """Return the temporary files that a command has left."""
        return [path.name for path in self.scratch.rglob("*.tmp")]

    def clear(self) -> None:
        """Remove the output of a command."""
        shutil.rmtree(self.out.parent)
        self.out.parent.mkdir()


def content(path: Path, *, pages: bool = False) -> dict[str, str]:
    """Return a digest of each file, without times; equal content gives equal digests. pages: of HTML pages too."""
    if path.is_file():
        return {path.name: digest(path)}
    found = {}
    for file in sorted(path.rglob("*")):
        name = file.relative_to(path)
        passed = not pages and file.name in NOT_COMPARED
        if file.is_file() and not passed and not {part.rpartition(".")[2] for part in name.parts} & UNSTABLE:
            found[str(name)] = digest(file)
    return found


def different(found: dict[str, str], expected: dict[str, str]) -> str:
    """Return the names of a few files in which two contents differ."""
    return ", ".join(sorted(name for name in {**found, **expected} if found.get(name) != expected.get(name))[:5])


def digest(path: Path) -> str:
    data = path.read_bytes()
    if path.suffix in (".json", ".jsonl"):
        with suppress(ValueError):
            lines = data.splitlines() if path.suffix == ".jsonl" else [data]
            data = json.dumps([without_times(json.loads(line)) for line in lines]).encode()
    elif path.suffix == ".md":
        data = b"".join(line for line in data.splitlines() if not line.startswith(b"- Latency"))
    return hashlib.sha256(data).hexdigest()[:16]


def without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: without_times(v) for k, v in value.items() if not k.endswith("seconds") and k not in TIMED}
    return [without_times(part) for part in value] if isinstance(value, list) else value


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
