"""What a person sees while a command runs: one line that moves, and one table at the end.

A program sees the same as one object (`--json`): inside `answering()`, what `figures` and `table` show is kept as well,
exact and not rounded. A command whose object should hold something else says so by `answer(values)`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

console = Console(highlight=False)


@dataclass
class Answer:
    """What a command found. given: by `answer`, in the place of figures and tables. files: what it wrote, by flag."""

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


@contextmanager
def answering(quiet: bool = False) -> Iterator[Answer]:
    """Keep what is shown inside. quiet: show no progress lines, also not those of commands inside."""
    global _lines_shown
    before = _lines_shown
    _lines_shown = before and not quiet
    _answers.append(Answer())
    try:
        yield _answers[-1]
    finally:
        _answers.pop()
        _lines_shown = before


def answer(values: Mapping[str, Any]) -> None:
    """What the command's object holds, in the place of what it shows."""
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
    """A bar with the time left and a free text; where output is no terminal, a plain line every tenth of the way."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[text]}"),
    )
    with Progress(
        *columns, console=console, transient=False, disable=not (console.is_terminal and _lines_shown)
    ) as bars:
        yield Line(bars, label, total)


@contextmanager
def stages() -> Iterator[Callable[[str, int, int], None]]:
    """A line for each stage of a command, one after the other: yields the function to be called with a stage's name,
    how far it is, and of how many."""
    with ExitStack() as stack:
        lines: dict[str, Line] = {}

        def to(stage: str, done: int, total: int) -> None:
            if stage not in lines:
                stack.close()
                lines[stage] = stack.enter_context(progress_line(stage, total))
            lines[stage].to(done, "")

        yield to


class Line:
    """The line of one command. `to(done, text)` moves it."""

    def __init__(self, bars: Progress, label: str, total: int) -> None:
        self._bars, self._label, self._total = bars, label, max(total, 1)
        self._task = bars.add_task(label, total=total, text="")
        self._printed = 0

    def to(self, done: int, text: str) -> None:
        self._bars.update(self._task, completed=done, text=text)
        if (
            _lines_shown
            and not console.is_terminal
            and (done >= self._total or done * 10 // self._total > self._printed)
        ):
            self._printed = done * 10 // self._total
            left = self._bars.tasks[self._task].time_remaining
            console.print(
                f"{self._label} {done}/{self._total}  left {'?' if left is None else f'{left:.0f} s'}  {text}"
            )


@contextmanager
def counting(text: str) -> Iterator[Callable[[str], None]]:
    """A moving line for work of unknown length, on a terminal: yields the function that changes its text."""
    if not _lines_shown:
        yield lambda text: None
        return
    with console.status(text) as status:
        yield lambda text: status.update(text)


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
    drawn = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        drawn.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        drawn.add_row(*(shown(value) for value in row))
    console.print(drawn)


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
