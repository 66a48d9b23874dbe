"""Commands in forked processes: what is imported is there already, and whatever the command does ends with its process.

    ended = worker.play(["eval", ..], ForkLimits(seconds=60))        to its end
    started = worker.start(["train", ..]); started.kill(SIGKILL)  or to any moment

A fork has its own limits of time and memory, so a command that hangs, eats memory or dies of a signal is a result like
any other. A command's arguments are played as `thresher` plays them, to the exit status and the last word on stderr.

The forking process must import and nothing else: OpenMP's threads do not survive a fork, so whoever has computed with
several of them would leave forks that hang. `preload` imports what a fork says that it needed.

Deliberately absent: any judgement of what came out (attack.py).
"""

import fcntl
import gc
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

STREAMS = ("stdout", "stderr")
STOPPING = (signal.SIGINT, signal.SIGTERM)
PIPE = 1 << 20  # bytes that a command may say whose streams are pipes
MEMORY = 4 << 30  # bytes of address space beyond what the fork begins with


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkLimits:
    """Of one command. seconds: on the clock; one that takes longer hangs. memory: address space that it may add, in
    bytes. file_bytes: of any file that it writes, as on a full disk; None: no limit. powerless: file modes hold for it
    even where it is root."""

    seconds: float = 120.0
    memory: int = MEMORY
    file_bytes: int | None = None
    powerless: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a command ended. status: of its exit, None where a signal ended it or time ran out."""

    status: int | None
    signal: int | None
    timed_out: bool
    seconds: float
    out: str
    err: str


class Started:
    """A forked process. Its streams go to files of its own in `folder`, which is new."""

    def __init__(self, call: Callable[[], int], folder: Path, limits: ForkLimits) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.limits, self.begun = folder, limits, time.monotonic()
        sys.stdout.flush()
        sys.stderr.flush()
        # A limit of files holds for the streams' too, so there they are pipes.
        self._pipes = [_pipe() for _ in STREAMS] if limits.file_bytes is not None else []
        # A signal that comes before the child has handlers of its own would be raised in Python's own code after a
        # fork, which loses it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOPPING)
        self.pid = os.fork()
        if self.pid == 0:
            _be_the_child(call, folder, limits, [write for _, write in self._pipes])
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for _, write in self._pipes:
            os.close(write)
        self._ended: Ended | None = None

    def running(self) -> bool:
        """Whether it has not ended yet."""
        return self._ended is None and self._reaped(os.WNOHANG) is None

    def kill(self, number: int) -> None:
        """Send it, and it alone, a signal. Nothing happens where it has ended."""
        if self._ended is None:
            os.kill(self.pid, number)

    def wait(self) -> Ended:
        """How it ended; whatever it started is killed with it."""
        pause = 0.001
        while self._ended is None and self._reaped(os.WNOHANG) is None:
            if time.monotonic() - self.begun > self.limits.seconds:
                os.kill(self.pid, signal.SIGKILL)
                self._reaped(0, timed_out=True)
            time.sleep(pause)
            pause = min(pause * 1.5, 0.02)
        assert self._ended is not None
        return self._ended

    def _reaped(self, options: int, timed_out: bool = False) -> Ended | None:
        pid, status = os.waitpid(self.pid, options)
        if pid == 0:
            return None
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)  # what it has started
        died = os.WIFSIGNALED(status)
        self._ended = Ended(
            status=None if died else os.WEXITSTATUS(status),
            signal=os.WTERMSIG(status) if died and not timed_out else None,
            timed_out=timed_out,
            seconds=time.monotonic() - self.begun,
            out=self._said(0),
            err=self._said(1),
        )
        for read, _ in self._pipes:
            os.close(read)
        return self._ended

    def _said(self, number: int) -> str:
        """What the process has written to a stream."""
        if self._pipes:
            return _drained(self._pipes[number][0]).decode(errors="replace")
        path = self.folder / STREAMS[number]
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


class Worker:
    """Plays commands, given as `thresher`'s arguments. run: the command line, from arguments to an exit status."""

    def __init__(self, run: Callable[[Sequence[str]], int], streams: Path) -> None:
        self.run, self._streams = run, streams
        streams.mkdir(parents=True, exist_ok=True)
        self.played = 0

    def start(self, words: Sequence[str], limits: ForkLimits | None = None) -> Started:
        """Begin a command, and do not wait."""
        return self.start_call(lambda: self.run(words), limits)

    def play(self, words: Sequence[str], limits: ForkLimits | None = None) -> Ended:
        """A command to its end."""
        return self.start(words, limits).wait()

    def start_call(self, call: Callable[[], int], limits: ForkLimits | None = None) -> Started:
        """Begin any function, whose result is the exit status."""
        self.played += 1
        gc.freeze()  # what is there is shared with the fork, and no collection of its own is to touch it
        return Started(call, self._streams / f"{self.played % 8}", limits or ForkLimits())

    def play_call(self, call: Callable[[], int], limits: ForkLimits | None = None) -> Ended:
        """Any function to its end."""
        return self.start_call(call, limits).wait()

    def preload(self, words: Sequence[str]) -> Ended:
        """Play a command, and import here what it has imported."""
        listed = self._streams / "modules.json"
        listed.unlink(missing_ok=True)

        def listing() -> int:
            status = self.run(words)
            listed.write_text(json.dumps(sorted(sys.modules)))
            return status

        ended = self.play_call(listing)
        for name in json.loads(listed.read_text()) if listed.exists() else ():
            if name not in sys.modules and name != "__mp_main__":
                try:
                    importlib.import_module(name)
                except Exception:  # made up by another module, or by the command itself
                    continue
        return ended


def _be_the_child(call: Callable[[], int], folder: Path, limits: ForkLimits, pipes: Sequence[int]) -> None:
    """Run `call` and leave; never returns."""
    status = 1
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOPPING)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for number, name in enumerate(STREAMS):
            stream = pipes[number] if pipes else os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(stream, number + 1)
            os.close(stream)
        sys.stdout, sys.stderr = open(1, "w", encoding="utf-8"), open(2, "w", encoding="utf-8")  # noqa: SIM115
        _limit(limits)
        status = call()
    except KeyboardInterrupt as error:  # before the command handles it; as `main` has it
        status = getattr(error, "status", 130)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


def _pipe() -> tuple[int, int]:
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, PIPE)
    os.set_blocking(read, False)
    return read, write


def _drained(descriptor: int) -> bytes:
    data = b""
    try:
        while part := os.read(descriptor, PIPE):
            data += part
    except BlockingIOError:  # something that the process had started holds it open
        pass
    return data


def _limit(limits: ForkLimits) -> None:
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + limits.memory, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limits.powerless:
        drop_powers()
    if limits.file_bytes is not None:
        # Python would keep the beginning of a module that it compiles under the limit.
        sys.dont_write_bytecode, os.environ["PYTHONDONTWRITEBYTECODE"] = True, "1"
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the call fails, as on a disk that is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (limits.file_bytes, limits.file_bytes))


def drop_powers() -> None:
    """Root without the right to pass over file modes (Linux's CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH and CAP_FOWNER)."""
    if os.geteuid() != 0:
        return
    import ctypes

    class CapabilityHead(ctypes.Structure):
        _fields_ = (("version", ctypes.c_uint32), ("pid", ctypes.c_int))

    libc = ctypes.CDLL(None, use_errno=True)
    # Effective, permitted and inheritable ones: their low words, then their high words.
    head, data = CapabilityHead(0x20080522, 0), (ctypes.c_uint32 * 6)()
    if libc.capget(ctypes.byref(head), data) != 0:
        raise OSError(ctypes.get_errno(), "capget")
    for place in range(3):
        data[place] &= ~0b1110
    if libc.capset(ctypes.byref(head), data) != 0:
        raise OSError(ctypes.get_errno(), "capset")
