"""Output of a running command: one progress line, and one table at the end.

All text is printed through `visible`. For `--json`, `answering()` collects the values that `figures` and `table` show,
exact and not rounded; a command whose JSON object should hold other values calls `answer(values)`.
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

# Foreign text may contain any character. Control characters become their pictures; those without a picture, characters
# that change the direction of text, and lone surrogates become JSON escapes.
_VISIBLE: dict[int, int | str] = {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_VISIBLE |= {
    code: f"\\u{code:04x}"
    for codes in (range(0x7F, 0xA0), (0x61C, 0x200E, 0x200F), range(0x202A, 0x202F), range(0x2066, 0x206A))
    for code in codes
}
_VISIBLE |= {code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)}


def visible(text: object) -> str:
    """Replace the characters that could control a terminal or a page."""
    return str(text).translate(_VISIBLE)


class SafeConsole(Console):
    """A console that prints text through `visible`; its own colours and cursor movements remain."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


# Text is printed unchanged: "thresher[bench]" and "[/INST]" are not markup of rich.
console = SafeConsole(highlight=False, markup=False)


@dataclass
class Answer:
    """Results of a command. given: set by `answer`, replaces figures and tables. files: written files, by flag."""

    given: dict[str, Any] | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    tables: list[dict[str, Any]] = field(default_factory=list)
    files: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return one object for JSON; numbers that are not finite become null."""
        found = self.figures | ({"tables": self.tables} if self.tables else {}) if self.given is None else self.given
        return dict(_plain(self.files | found))


_answers: list[Answer] = []  # of the running command and the commands that called it
_lines_shown = True
_lines: list["Line"] = []  # the drawn line, and the lines inside it
# Seconds between two drawings of a line: on a terminal, and on output where each one remains.
REDRAW_SECONDS, PLAIN_SECONDS = 0.2, 30.0
# Width of a table in characters if output is not a terminal: files and pipes have room, and cut text is lost.
PLAIN_WIDTH = 200


@contextmanager
def answering(quiet: bool = False) -> Iterator[Answer]:
    """Collect the shown values. quiet: show no progress lines and announcements, also in nested commands."""
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
    """Print a text unchanged; the terminal wraps its lines."""
    console.print(text, style=style, soft_wrap=True)


def announce(text: str) -> None:
    """Print a text about work that begins, unless --quiet."""
    if _lines_shown:
        note(text)


def answer(values: Mapping[str, Any]) -> None:
    """Set the JSON object of the command, in place of the values that it shows."""
    if _answers:
        _answers[-1].given = dict(values)


def wrote(files: Mapping[str, Any]) -> None:
    """Record files that the command wrote, by the flag that named them; None: flag not given."""
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
    """Show a bar with the time left and a free text. If output is not a terminal, print a line every tenth of the way
    and every half minute. Inside another progress line it is shown as a part of that line."""
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
    """Show progress as a part of the current line, if any; without a total show only the label."""
    with _shown(Line(label, total)) as line:
        yield line


class Stage(NamedTuple):
    """Progress of one part of the work: `done` of `total`, and a free text."""

    label: str
    done: int
    total: int
    text: str = ""


@contextmanager
def polling(ask: Callable[[], Stage | None]) -> Iterator[None]:
    """Call `ask` every REDRAW_SECONDS in a thread, and show the result in the current line; None: show nothing."""
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
    """Show a line for each stage of a command in turn. Yields a function of a stage's name, the number done, and the
    total. A stage begins at the last report of the previous stage."""
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
    """Progress line. `to` advances it; `at` does so for calls that are too frequent to format a text each time. total:
    may be changed."""

    def __init__(self, label: str, total: int) -> None:
        self.label, self.total = label, total
        self.done, self.text = 0, ""
        self._before = 0
        self._started = self._moved = time.monotonic()

    def since(self, started: float) -> None:
        """Set the start time, as of time.monotonic."""
        self._started = started

    def from_before(self, done: int) -> None:
        """Set the amount done by an earlier run, which does not count for the pace."""
        self.done = self._before = done

    def to(self, done: int, text: str) -> None:
        """Advance to `done`, with a free text."""
        self._move(done)
        self.text = text
        if _lines:
            _lines[0].refresh()

    def at(self, done: int, say: Callable[[], str]) -> None:
        """Advance to `done`; `say` is called for the text only if it will be shown."""
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
        """Return the text of the line, alone or as a part of another line."""
        if not self.total:
            return self.label
        return "  ".join(filter(None, (f"{self.label} {self.done}/{self.total}", self.left(), self.text)))

    def due(self) -> bool:
        """Return whether `refresh` would show something."""
        return False

    def refresh(self) -> None:
        """Draw the line and the lines inside it, if it is the outermost line and a redraw is due."""


class _PolledLine(Line):
    """The part of a line shown by `polling`."""

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
    """The outermost line, which is drawn."""

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
    """Format a time for display: "40 s", "12 min", "3.1 h", "2.5 days"."""
    for size, unit, most in ((1.0, "s", 120.0), (60.0, "min", 7200.0), (3600.0, "h", 172_800.0)):
        if seconds < most:
            return f"{seconds / size:.{int(unit == 'h')}f} {unit}"
    return f"{seconds / 86_400:.1f} days"


@contextmanager
def counting(what: str) -> Iterator[Callable[..., None]]:
    """Show work of unknown length. Yields a function of the number done and a free text."""
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
    """Print a table; numbers are rounded for display, while the files hold them exactly."""
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
    """Print a table of texts without lines between columns; the first column is a name. look: arguments of Table."""
    drawn = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, **look)
    for number, column in enumerate(columns):
        drawn.add_column(column, justify="right" if number else "left", no_wrap=True)
    for row in rows:
        drawn.add_row(*row)
    _print(drawn)


def _print(drawn: Table) -> None:
    """Print a table, at its full width if output is not a terminal."""
    room = console if console.is_terminal else SafeConsole(file=console.file, width=PLAIN_WIDTH, highlight=False)
    room.print(drawn)


def say(text: str, end: str = "\n", *, exact: bool = False) -> None:
    """Print a text to stdout, plain and through `visible`. exact: unchanged if stdout is not a terminal."""
    print(text if exact and not sys.stdout.isatty() else visible(text), end=end, flush=True)


def shown(value: Any) -> str:
    """Format a value for a table, with numbers rounded."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}" if abs(value) < 1 else f"{value:.2f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {shown(part)}" for name, part in value.items())
    return str(value)
