"""Output of a running command: one progress line, and one table at the end.

All text is printed as `visible` makes it. For `--json`, `answering()` keeps what `figures` and `table` show, exact and
not rounded; a command whose object should hold something else calls `answer(values)`.
"""

import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
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
    """Replace the characters that could act on a terminal or a page."""
    return str(text).translate(_VISIBLE)


class SafeConsole(Console):
    """A console that prints text through `visible`; its own colours and movements stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


# Text is printed as it is: "thresher[bench]" and "[/INST]" are no markup of rich's.
console = SafeConsole(highlight=False, markup=False)


@dataclass
class Answer:
    """Findings of a command. given: by `answer`, replaces figures and tables. files: that it wrote, by flag."""

    given: dict[str, Any] | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    tables: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """One object for JSON; numbers that are not finite are null."""
        found = self.figures | ({"tables": self.tables} if self.tables else {}) if self.given is None else self.given
        return dict(_plain(self.files | found))


_answers: list[Answer] = []  # of the command that runs, and of those that run it
_lines_shown = True
_lines: list["Line"] = []  # the one that is drawn, and what goes on within it
# Between two drawings of a line: on a terminal, and where every one stays.
REDRAW_SECONDS, PLAIN_SECONDS = 0.2, 30.0
# Characters of a table where output is no terminal: a file or a pipe has room, and what is cut is lost.
PLAIN_WIDTH = 200


@contextmanager
def answering(quiet: bool = False) -> Iterator[Answer]:
    """Keep what is shown inside. quiet: show no progress lines and announcements, in nested commands neither."""
    global _lines_shown
    before = _lines_shown
    _lines_shown = before and not quiet
    _answers.append(Answer())
    try:
        yield _answers[-1]
    finally:
        _answers.pop()
        _lines_shown = before


def note(text: str, style: str | None = None) -> None:
    """Print a text as it is; the terminal wraps its lines."""
    console.print(text, style=style, soft_wrap=True)


def announce(text: str) -> None:
    """Print what a command has begun to do, unless --quiet."""
    if _lines_shown:
        note(text)


def answer(values: Mapping[str, Any]) -> None:
    """Set the command's object, in place of what the command shows."""
    if _answers:
        _answers[-1].given = dict(values)


def wrote(files: Mapping[str, Any]) -> None:
    """Record files that the command wrote, by the flag that named them; None: not given."""
    if _answers:
        _answers[-1].files |= {flag: path for flag, path in files.items() if path is not None}


def _plain(value: Any) -> Any:
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
    """Show a bar with the time left and a free text; where output is no terminal, print a line every tenth of the way
    and every half minute. Inside another line it is a part of that one."""
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
    """Show progress as a part of the current line; without a total the label alone. Without a line show nothing."""
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
    """Show what a thread gets from `ask` every REDRAW_SECONDS as a part of the current line; None: nothing."""
    if not _lines:
        yield
        return
    over, line = threading.Event(), _PolledLine(ask)

    def follow() -> None:
        while not over.wait(REDRAW_SECONDS):
            line.shown()
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
    """Show a line for each stage of a command in turn: yields the function to call with a stage's name, the number
    done, and the total. A stage begins at the last report of the one before."""
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
    """Progress line. `to` moves it; `at` does so for calls that are too frequent to make a text each time. total: may
    be set anew."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total = label, total
        self.done, self.text = 0, ""
        self._before = 0
        self._started = self._moved = time.monotonic()

    def since(self, started: float) -> None:
        """Set the time of its beginning, of time.monotonic."""
        self._started = started

    def from_before(self, done: int) -> None:
        """Set how much an earlier run has done; it does not count for the pace."""
        self.done = self._before = done

    def to(self, done: int, text: str) -> None:
        """Move it to `done`, with a free text."""
        self._move(done)
        self.text = text
        if _lines:
            _lines[0].refresh()

    def at(self, done: int, say: Callable[[], str]) -> None:
        """Move it; `say` makes the text where it will be shown."""
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
        """Return the time left at the pace so far, as "left 40 s"; "" until there is a pace."""
        if self.done <= self._before and self.done < self.total:
            return ""
        pace = (self._moved - self._started) / max(self.done - self._before, 1)
        left = pace * (self.total - self.done) - (time.monotonic() - self._moved)
        return f"left {show_time(max(left, 0.0))}"

    def shown(self) -> str:
        """Return its text, alone or as a part of another line."""
        if not self.total:
            return self.label
        return "  ".join(filter(None, (f"{self.label} {self.done}/{self.total}", self.left(), self.text)))

    def due(self) -> bool:
        """Return whether `refresh` would show something."""
        return False

    def refresh(self) -> None:
        """Draw it and the lines inside it, if it is the outermost and it is time."""


class _PolledLine(Line):
    """The part of a line that `polling` shows."""

    def __init__(self, ask: Callable[[], Stage | None]) -> None:
        super().__init__("", 0)
        self._ask = ask
        self._stage: Line | None = None

    def shown(self) -> str:
        found, stage = self._ask(), self._stage
        if found is None:
            stage = None
        else:
            if stage is None or stage.label != found.label:
                stage = Line(found.label, found.total)
            stage._move(found.done)
            stage.text = found.text
        self._stage = stage
        return "" if stage is None else stage.shown()


class _BarLine(Line):
    """The line that is drawn."""

    def __init__(self, label: str, total: int, bars: Progress) -> None:
        super().__init__(label, total)
        self._bars = bars
        self._task = bars.add_task(visible(label), total=total, text="")
        self._tenth, self._drawn = 0, time.monotonic()

    def from_before(self, done: int) -> None:
        super().from_before(done)
        self._tenth = self._tenth_at(done)

    def due(self) -> bool:
        return time.monotonic() - self._drawn >= (REDRAW_SECONDS if console.is_terminal else PLAIN_SECONDS)

    def to(self, done: int, text: str) -> None:
        before, self._tenth = self._tenth, self._tenth_at(done)
        if console.is_terminal or self._tenth > before:
            self._drawn = -math.inf  # due at once
        super().to(done, text)

    def refresh(self) -> None:
        if not self.due():
            return
        self._drawn = time.monotonic()
        inner = [line.shown() for line in _lines[1:]]
        if console.is_terminal:
            text = "  ".join(filter(None, [self.left(), self.text, *inner]))
            self._bars.update(self._task, completed=self.done, total=self.total, text=visible(text))
        else:
            console.print("  ".join(filter(None, [self.shown(), *inner])), soft_wrap=True)

    def _tenth_at(self, done: int) -> int:
        return min(done, self.total) * 10 // max(self.total, 1)


def show_time(seconds: float) -> str:
    """Return a time for a reader: "40 s", "12 min", "3.1 h", "2.5 days"."""
    for size, unit, most in ((1.0, "s", 120.0), (60.0, "min", 7200.0), (3600.0, "h", 172_800.0)):
        if seconds < most:
            return f"{seconds / size:.{int(unit == 'h')}f} {unit}"
    return f"{seconds / 86_400:.1f} days"


@contextmanager
def counting(what: str) -> Iterator[Callable[..., None]]:
    """Show work of unknown length: yields the function to call with the number done, and a free text."""
    started = drawn = time.monotonic()

    def count(done: int, text: str = "") -> None:
        nonlocal drawn
        now = time.monotonic()
        if now - drawn >= (REDRAW_SECONDS if console.is_terminal else PLAIN_SECONDS):
            drawn = now
            show("  ".join(filter(None, (f"{what} {done:,}", f"{done / (now - started):,.0f} a second", text))))

    def show(text: str) -> None:
        if status is not None:
            status.update(Text(text))
        elif _lines_shown:
            console.print(text, soft_wrap=True)

    status = console.status(Text(what)) if _lines_shown and console.is_terminal else None
    with status or nullcontext():
        yield count


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table; numbers are rounded for reading, the files hold them exactly."""
    if _answers:
        _answers[-1].tables.append({"title": title, "columns": list(columns), "rows": [list(row) for row in rows]})
    _draw(title, columns, rows)


def figures(title: str, values: Mapping[str, Any]) -> None:
    """Print a table of names and values."""
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
    _print(drawn)


def grid(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], **look: Any) -> None:
    """Print a table of texts without lines between columns; the first is a name. look: arguments of rich's Table."""
    drawn = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, **look)
    for number, column in enumerate(columns):
        drawn.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        drawn.add_row(*row)
    _print(drawn)


def _print(drawn: Table) -> None:
    """Print a table, as wide as it wants to be where output is no terminal."""
    room = console if console.is_terminal else SafeConsole(file=console.file, width=PLAIN_WIDTH, highlight=False)
    room.print(drawn)


def say(text: str, end: str = "\n", *, exact: bool = False) -> None:
    """Print a text to stdout, plain and through `visible`; exact: unchanged where stdout is no terminal."""
    print(text if exact and not sys.stdout.isatty() else visible(text), end=end, flush=True)


def shown(value: Any) -> str:
    """Return a value for a table, numbers rounded."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {shown(part)}" for name, part in value.items())
    return str(value)
