"""Ctrl-C and SIGTERM: work that must not be interrupted is finished first, everything else ends at once.

    with handle_signals():                                          # once per process: cli/main.py
        with defer_signals("the step is finished first"):           # training: a signal is noted
            with allow_signals():                                   # an evaluation: raised at once
        with defer_signals("..", unless=lambda: step.collecting):   # the same; `unless` is called on a signal

The first signal raises `Interrupted` in the main thread, once. Inside `defer_signals` it is noted, and raised at the
beginning of `allow_signals`, at `check()`, or at the end of `defer_signals`. A second Ctrl-C ends the process at once
with status 130, like a kill. Under torchrun a second one is ignored, because torchrun repeats Ctrl-C to its ranks and
kills them after 30 s.
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
SHOW_CURSOR = b"\x1b[?25h"  # a progress line hides the cursor


class Interrupted(KeyboardInterrupt):
    """Raised by a signal. kept: description of the results that the command leaves; None: none. flag: resumes the
    command. spent: a flag with its value that must not be repeated."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.kept: str | None = None
        self.flag = self.spent = ""

    @property
    def status(self) -> int:
        """Return the exit status: 130 or 143."""
        return 128 + self.number


@dataclass(slots=True)
class _Signals:
    noted: int | None = None  # the first signal received
    first: str | None = None  # work that is finished before it is raised; None: none
    unless: Callable[[], bool] | None = None  # whether it is raised at once nevertheless
    raised: bool = False


_state = _Signals()


@contextmanager
def handle_signals() -> Iterator[None]:
    """Raise `Interrupted` for a signal in the block, even if other code has replaced it by another error. Outside the
    main thread this does nothing."""
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
    """Return whether this process is a rank started by torchrun."""
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
    """Return the signal received so far, if any."""
    return _state.noted


@contextmanager
def defer_signals(first: str, unless: Callable[[], bool] | None = None) -> Iterator[None]:
    """Defer signals in the block. first: message about the work that is finished first. unless: whether a new signal is
    raised at once nevertheless; an earlier one waits for `check`."""
    before = _state.first, _state.unless
    _state.first, _state.unless = first, unless
    try:
        yield
    finally:
        _state.first, _state.unless = before
    _raise_noted()


@contextmanager
def allow_signals() -> Iterator[None]:
    """Raise signals at once in the block, as outside `defer_signals`; also one that was noted before."""
    before, _state.first = _state.first, None
    try:
        _raise_noted()
        yield
    finally:
        _state.first = before


def check() -> None:
    """Raise the signal received so far, if any, also inside `defer_signals`."""
    if _state.noted is not None:
        _state.raised = True
        raise Interrupted(_state.noted)


def _raise_noted() -> None:
    if _state.first is None:
        check()


def interruption(error: BaseException) -> Interrupted | None:
    """Return the interruption that `error` is or results from; None for any other error.

    C code that calls Python may replace a signal's exception by its own, as torch.asarray does.
    """
    if isinstance(error, KeyboardInterrupt):
        return error if isinstance(error, Interrupted) else Interrupted()
    if _state.raised and _state.noted is not None and isinstance(error, Exception):
        return Interrupted(_state.noted)
    return None


@contextmanager
def on_interrupt(kept: Callable[[], str | None], flag: str = "", spent: Callable[[], str] = str) -> Iterator[None]:
    """Set `kept`, `flag` and `spent` of an `Interrupted` raised in the block. Of nested blocks the outermost sets
    them."""
    try:
        yield
    except BaseException as error:
        stopped = interruption(error)
        if stopped is None:
            raise
        stopped.kept, stopped.flag, stopped.spent = kept(), flag, spent()
        raise stopped from None


def lines_in(path: Path) -> str | None:
    """Describe the lines in a file that grows line by line, for `on_interrupt`; None without the file."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        lines = sum(line.endswith(b"\n") for line in file)
    return f"{path} keeps what is done, {lines:,} line{'' if lines == 1 else 's'}"
