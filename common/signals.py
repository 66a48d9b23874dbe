"""Ctrl-C and SIGTERM: what must not be cut in two is finished first, all else ends at once.

    with handle_signals():                                          # once a process: cli/main.py
        with defer_signals("the step is finished first"):           # training: a signal is noted
            with allow_signals():                                   # an evaluation: raised at once
        with defer_signals("..", unless=lambda: step.collecting):   # the same, asked when a signal comes

The first signal raises `Interrupted` in the main thread, once; inside `defer_signals` it is noted, and raised where
`allow_signals` begins, at `check()`, or where `defer_signals` ends. A second Ctrl-C ends the process at once with
status 130, as a kill. Under torchrun a second one is ignored: torchrun repeats Ctrl-C to its ranks, and kills them
after 30 s.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

NUMBERS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = b"\x1b[?25h"  # which a progress line hides


class Interrupted(KeyboardInterrupt):
    """Raised by a signal. kept: what the command leaves, in words; None: nothing. flag: with which the command goes on.
    spent: a flag with a value that is not given again."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.kept: str | None = None
        self.flag = self.spent = ""

    @property
    def status(self) -> int:
        """The exit status: 130 or 143."""
        return 128 + self.number


@dataclass(slots=True)
class _Signals:
    noted: int | None = None  # the first signal that came
    first: str | None = None  # what is finished before it is raised; None: nothing
    unless: Callable[[], bool] | None = None  # whether it is raised at once all the same
    raised: bool = False


_state = _Signals()


@contextmanager
def handle_signals() -> Iterator[None]:
    """Raise `Interrupted` for a signal inside, even if other code has put another error in its place. Outside of the
    main thread nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _state.noted, _state.first, _state.raised = None, None, False
    before = {number: signal.getsignal(number) for number in NUMBERS}
    replaced = {number: handler for number, handler in before.items() if handler != signal.SIG_IGN}
    try:
        for number in replaced:
            signal.signal(number, _on_signal)
        yield
    except Exception as error:
        stopped = interruption(error)
        if stopped is None:
            raise
        raise stopped from error
    finally:
        for number, handler in replaced.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        _state.noted, _state.first, _state.raised = None, None, False


def under_torchrun() -> bool:
    """Return whether this process is a rank that torchrun has started."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def _on_signal(number: int, frame: FrameType | None) -> None:
    if _state.noted is not None:
        if number == signal.SIGINT and not under_torchrun():
            if os.isatty(1):
                os.write(1, SHOW_CURSOR)
            os._exit(Interrupted().status)
        return
    _state.noted = number
    if _state.first is None or (_state.unless is not None and _state.unless()):
        check()
    more = "" if under_torchrun() else "; Ctrl-C once more ends at once"
    if os.environ.get("RANK", "0") == "0":
        os.write(2, f"{signal.Signals(number).name}: {_state.first}{more}\n".encode())


def noted() -> int | None:
    """The signal that came, if one did."""
    return _state.noted


@contextmanager
def defer_signals(first: str, unless: Callable[[], bool] | None = None) -> Iterator[None]:
    """Raise nothing inside. first: what is finished before, for the user. unless: whether a signal that comes now is
    raised at once all the same; one that came before waits for `check`."""
    before = _state.first, _state.unless
    _state.first, _state.unless = first, unless
    try:
        yield
    finally:
        _state.first, _state.unless = before
    _raise_noted()


@contextmanager
def allow_signals() -> Iterator[None]:
    """Raise a signal at once inside, as outside of any `defer_signals`; also one that was noted before."""
    before, _state.first = _state.first, None
    try:
        _raise_noted()
        yield
    finally:
        _state.first = before


def check() -> None:
    """Raise the signal that came, if one did, also inside `defer_signals`."""
    if _state.noted is not None:
        _state.raised = True
        raise Interrupted(_state.noted)


def _raise_noted() -> None:
    if _state.first is None:
        check()


def interruption(error: BaseException) -> Interrupted | None:
    """Return the interruption that `error` is or comes from; None for any other error.

    C code that calls Python may replace a signal's exception by its own, as torch.asarray does.
    """
    if isinstance(error, KeyboardInterrupt):
        return error if isinstance(error, Interrupted) else Interrupted()
    if _state.raised and _state.noted is not None and isinstance(error, Exception):
        return Interrupted(_state.noted)
    return None


@contextmanager
def on_interrupt(kept: Callable[[], str | None], flag: str = "", spent: Callable[[], str] = str) -> Iterator[None]:
    """Set in `Interrupted` what the command leaves, the flag with which it goes on, and the one not to repeat. The
    outermost of several sets it."""
    try:
        yield
    except BaseException as error:
        stopped = interruption(error)
        if stopped is None:
            raise
        stopped.kept, stopped.flag, stopped.spent = kept(), flag, spent()
        raise stopped from None


def lines_in(path: Path) -> str | None:
    """Say what a file that grows line by line keeps, for `on_interrupt`; None without the file."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        lines = sum(line.endswith(b"\n") for line in file)
    return f"{path} keeps what is done, {lines:,} line{'' if lines == 1 else 's'}"
