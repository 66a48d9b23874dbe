"""Output of a running command: one line that moves, and one table at the end.

Everything printed goes through `visible`: texts of models, data and paths may hold characters that a terminal obeys. A
program gets the same as one object (`--json`): inside `answering()`, what `figures` and `table` show is kept as well,
exact and not rounded. A command whose object should hold something else calls `answer(values)`.
"""

import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

# Text of others may hold anything. Control characters become their pictures; those without one, characters that change
# the direction of text, and lone surrogates become JSON's escapes.
_VISIBLE: dict[int, int | str] = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_VISIBLE |= {
    code: f"\\u{code:04x}"
    for codes in (range(0x7F, 0xA0), (0x61C, 0x200E, 0x200F), range(0x202A, 0x202F), range(0x2066, 0x206A))
    for code in codes
}
_VISIBLE |= {code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)}


def visible(text: object) -> str:
    """The text with nothing in it that could act on a terminal or a page."""
    return str(text).translate(_VISIBLE)


class SafeConsole(Console):
    """A console that prints text as `visible` has it; colours and movements of its own stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


# Text is printed as it is: "thresher[bench]" and "[/INST]" are no markup of rich's.
console = SafeConsole(highlight=False, markup=False)


@dataclass
class Answer:
    """Findings of a command. given: by `answer`, in the place of figures and tables. files: written by it, by flag."""

    given: dict[str, Any] | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    tables: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """One object for JSON; numbers that are not finite are null."""
        found = self.figures | ({"tables": self.tables} if self.tables else {}) if self.given is None else self.given
        values: dict[str, Any] = _plain(self.files | found)
        return values


_answers: list[Answer] = []  # of the command that runs, and of those that run it
_lines_shown = True
_lines: list["Line"] = []  # the one that is drawn, and what goes on within it
# Between two drawings of a line: on a terminal, and where every one stays.
REDRAW_SECONDS, PLAIN_SECONDS = 0.2, 30.0
# Characters of a table where output is no terminal: a file or a pipe has room, and what is cut is lost.
PLAIN_WIDTH = 200


@contextmanager
def answering(quiet: bool = False) -> Iterator[Answer]:
    """Keep what is shown inside. quiet: show no progress lines and announcements, also not those of commands inside."""
    global _lines_shown
    before = _lines_shown
    _lines_shown = before and not quiet
    _answers.append(Answer())
    try:
        yield _answers[-1]
    finally:
        _answers.pop()
        _lines_shown = before


def announce(text: str) -> None:
    """Print a line on what a command has begun to do; --quiet leaves it out, as it does progress."""
    if _lines_shown:
        console.print(text, soft_wrap=True)


def answer(values: Mapping[str, Any]) -> None:
    """Set what the command's object holds, in the place of what the command shows."""
    if _answers:
        _answers[-1].given = dict(values)


def wrote(files: Mapping[str, Any]) -> None:
    """Files of the command, by the flag that named them; None was not given."""
    if _answers:
        _answers[-1].files |= {flag: path for flag, path in files.items() if path is not None}


def _plain(value: Any) -> Any:
    """Of what JSON knows; anything else is its text."""
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    if isinstance(value, Sequence | set | frozenset):
        return [_plain(part) for part in value]
    return _plain(value.item()) if hasattr(value, "item") else str(value)


@contextmanager
def progress_line(label: str, total: int) -> Iterator["Line"]:
    """A bar with the time left and a free text; where output is no terminal, a plain line every tenth of the way and
    every half minute. Within another line it is a part of that one, and so is every `stage`."""
    if _lines or not _lines_shown:
        with stage(label, total) as line:
            yield line
        return
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}", markup=False),
    )
    with Progress(*columns, console=console, transient=False, disable=not console.is_terminal) as bars:
        line = _BarLine(label, total, bars)
        with _shown(line):
            yield line


@contextmanager
def stage(label: str, total: int = 0) -> Iterator["Line"]:
    """A part of the line that is shown now, for as long as it lasts: how far a step is within; without a total its name
    alone. Without a line, or with --quiet, it shows nothing."""
    with _shown(Line(label, total)) as line:
        yield line


class Stage(NamedTuple):
    """Progress of a part of the work: `done` of `total`, and a free text."""

    label: str
    done: int
    total: int
    text: str = ""


@contextmanager
def polling(ask: Callable[[], Stage | None]) -> Iterator[None]:
    """Show what `ask` returns as a part of the line that is shown now; None: nothing to show.

    A thread asks every REDRAW_SECONDS, so that the work itself calls nothing here: `ask` reads what it has noted.
    """
    if not _lines:
        yield
        return
    over, line = threading.Event(), _PolledLine(ask)

    def follow() -> None:
        while not over.wait(REDRAW_SECONDS):
            line.ask()
            _lines[0].refresh()

    thread = threading.Thread(target=follow, name="progress", daemon=True)
    with _shown(line):
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()


@contextmanager
def _shown(line: "Line") -> Iterator["Line"]:
    _lines.append(line)
    _lines[0].refresh()
    try:
        yield line
    finally:
        _lines.remove(line)
        if _lines:
            _lines[0].refresh()


@contextmanager
def stages() -> Iterator[Callable[[str, int, int], None]]:
    """A line for each stage of a command, one after the other: yields the function to be called with a stage's name,
    how far it is, and of how many. A stage has begun when the one before was last heard of."""
    with ExitStack() as stack:
        lines: dict[str, Line] = {}
        heard = time.monotonic()

        def to(name: str, done: int, total: int) -> None:
            nonlocal heard
            if name not in lines:
                stack.close()
                lines[name] = stack.enter_context(progress_line(name, total))
                lines[name].since(heard)
            lines[name].to(done, "")
            heard = time.monotonic()

        yield to


class Line:
    """Progress line. `to` moves it; `at` does the same for calls so frequent that even making a text costs time."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total = label, total
        self.done, self.text = 0, ""
        self._before = 0
        self._started = self._moved = time.monotonic()

    def since(self, started: float) -> None:
        """It began at `started`, of time.monotonic."""
        self._started = started

    def from_before(self, done: int) -> None:
        """So much was done by an earlier run, in no time of this one."""
        self.done = self._before = done

    def to(self, done: int, text: str) -> None:
        """`done` of all, and a free text."""
        self._move(done)
        self.text = text
        if _lines:
            _lines[0].refresh()

    def at(self, done: int, say: Callable[[], str]) -> None:
        """`to`, with a text that is made only if it will be shown."""
        self._move(done)
        if _lines and _lines[0].due():
            self.to(done, say())

    def _move(self, done: int) -> None:
        if done == self._before:
            self._started = self._moved = time.monotonic()
        elif done != self.done:
            self._moved = time.monotonic()
        self.done = done

    def left(self) -> str:
        """The time left, at the pace so far, as "left 40 s"; nothing until there is a pace."""
        if self.done <= self._before and self.done < self.total:
            return ""
        pace = (self._moved - self._started) / max(self.done - self._before, 1)
        left = pace * (self.total - self.done) - (time.monotonic() - self._moved)
        return f"left {show_time(max(left, 0.0))}"

    def shown(self) -> str:
        """As a plain line, or as a part of another."""
        if not self.total:
            return self.label
        return "  ".join(filter(None, (f"{self.label} {self.done}/{self.total}", self.left(), self.text)))

    def due(self) -> bool:
        """Return whether `refresh` would show something."""
        return False

    def refresh(self) -> None:
        """Show what it and the lines within it say now, if it is the one that is drawn and it is time."""


class _PolledLine(Line):
    """The part of a line that `polling` shows: the stage that was found last."""

    def __init__(self, ask: Callable[[], Stage | None]) -> None:
        super().__init__("", 0)
        self._ask = ask
        self._stage: Line | None = None

    def ask(self) -> Line | None:
        """Ask once; a stage with another label begins anew. The thread asks, and whoever draws the line."""
        found, stage = self._ask(), self._stage
        if found is None:
            stage = None
        else:
            if stage is None or stage.label != found.label:
                stage = Line(found.label, found.total)
            stage._move(found.done)
            stage.text = found.text
        self._stage = stage
        return stage

    def shown(self) -> str:
        """As Line has it, of what is found now; "" where there is nothing to show."""
        stage = self.ask()
        return "" if stage is None else stage.shown()


class _BarLine(Line):
    """The line that is drawn."""

    def __init__(self, label: str, total: int, bars: Progress) -> None:
        super().__init__(label, total)
        self._bars = bars
        self._task = bars.add_task(visible(label), total=total, text="")
        self._tenth, self._drawn = 0, time.monotonic()

    def from_before(self, done: int) -> None:
        """As Line has it."""
        super().from_before(done)
        self._tenth = min(done, self.total) * 10 // max(self.total, 1)

    def due(self) -> bool:
        """As Line has it."""
        return time.monotonic() - self._drawn >= (REDRAW_SECONDS if console.is_terminal else PLAIN_SECONDS)

    def to(self, done: int, text: str) -> None:
        """As Line has it; a step is shown at once on a terminal, and else at every tenth of the way."""
        tenth = min(done, self.total) * 10 // max(self.total, 1)
        self._tenth, further = tenth, tenth > self._tenth
        if console.is_terminal or further:
            self._drawn = -math.inf
        super().to(done, text)

    def refresh(self) -> None:
        """As Line has it."""
        if not self.due():
            return
        self._drawn = time.monotonic()
        if console.is_terminal:
            parts = [self.left(), self.text, *(line.shown() for line in _lines[1:])]
            self._bars.update(self._task, completed=self.done, text=visible("  ".join(filter(None, parts))))
        else:
            parts = [self.shown(), *(line.shown() for line in _lines[1:])]
            console.print("  ".join(filter(None, parts)), soft_wrap=True)


def show_time(seconds: float) -> str:
    """For a reader: "40 s", "12 min", "3.1 h", "2.5 days"."""
    for size, unit, most in ((1.0, "s", 120.0), (60.0, "min", 7200.0), (3600.0, "h", 172_800.0)):
        if seconds < most:
            return f"{seconds / size:.{int(unit == 'h')}f} {unit}"
    return f"{seconds / 86_400:.1f} days"


class Counter:
    """The line of work of unknown length: `to(done, what)`."""

    def __init__(self, what: str, show: Callable[[str], None]) -> None:
        self._what, self._show = what, show
        self._started = self._drawn = time.monotonic()

    def to(self, done: int, text: str = "") -> None:
        """So much is done."""
        now = time.monotonic()
        if now - self._drawn >= (REDRAW_SECONDS if console.is_terminal else PLAIN_SECONDS):
            self._drawn = now
            rate = done / (now - self._started)
            self._show("  ".join(filter(None, (f"{self._what} {done:,}", f"{rate:,.0f} a second", text))))


@contextmanager
def counting(what: str) -> Iterator[Counter]:
    """A line for work of unknown length, which says `what` is counted: on a terminal one that is rewritten, else a
    plain one every half minute."""
    if not _lines_shown:
        yield Counter(what, lambda text: None)
    elif console.is_terminal:
        with console.status(Text(what)) as status:
            yield Counter(what, lambda text: status.update(Text(text)))
    else:
        yield Counter(what, lambda text: console.print(text, markup=False, soft_wrap=True))


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table; numbers are rounded for reading, the files hold them exactly."""
    if _answers:
        _answers[-1].tables.append({"title": title, "columns": list(columns), "rows": [list(row) for row in rows]})
    _draw(title, columns, rows)


def figures(title: str, values: Mapping[str, Any]) -> None:
    """A table of names and values."""
    if _answers:
        _answers[-1].figures |= values
    _draw(title, ("figure", "value"), list(values.items()))


def _draw(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    drawn = Table()
    for number, column in enumerate(columns):
        drawn.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    for row in rows:
        drawn.add_row(*(Text(visible(shown(value))) for value in row))
    console.print(title, style="table.title", markup=False, soft_wrap=True)
    draw(drawn)


def draw(drawn: Table) -> None:
    """Print a table, as wide as it wants to be where output is no terminal."""
    room = console if console.is_terminal else SafeConsole(file=console.file, width=PLAIN_WIDTH, highlight=False)
    room.print(drawn)


def say(text: str, end: str = "\n", *, exact: bool = False) -> None:
    """Print a text to stdout as it stands, without colours or line breaks of ours, as `visible` has it. exact: every
    character is kept where stdout is no terminal, for the text is what a program asked for."""
    print(text if exact and not sys.stdout.isatty() else visible(text), end=end, flush=True)


def shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {shown(part)}" for name, part in value.items())
    return str(value)
