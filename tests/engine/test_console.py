"""What a person sees while a command runs."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from thresher.engine import console


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "-"),
        (0.12345, "0.123"),
        (0.0, "0"),
        (12.3456, "12.35"),
        (12345.6, "12,346"),
        (-0.5, "-0.5"),
        (1234567, "1,234,567"),
        (True, "True"),
        ("text", "text"),
        ({"answered": 3, "turns": 1}, "answered 3, turns 1"),
    ],
)
def test_numbers_are_rounded_for_reading(value: Any, expected: str) -> None:
    assert console.shown(value) == expected


def test_without_a_terminal_a_line_is_printed_every_tenth_of_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(console, "console", Console(file=written, width=100))
    with console.progress_line("train", 40) as line:
        for done in range(1, 41):
            line.to(done, f"reward {done}")
    lines = written.getvalue().splitlines()
    assert [text.split()[1] for text in lines] == [f"{done}/40" for done in range(4, 41, 4)]
    assert lines[-1].endswith("reward 40") and "left 0 s" in lines[-1]


def test_what_is_shown_is_kept_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    console.figures("nobody asks", {"a": 1})
    with console.answering() as outer:
        console.figures("some", {"share": 0.123456789, "path": Path("x"), "rate": float("nan")})
        with console.answering() as inner:
            console.table("within", ("a",), [(1,)])
        console.table("rows", ("name", "n"), [("a", 1234567), ("b", np.float32(0.5))])
        console.wrote({"out": "folder", "plot": None})
    rows = {"title": "rows", "columns": ["name", "n"], "rows": [["a", 1234567], ["b", 0.5]]}
    assert inner.to_dict() == {"tables": [{"title": "within", "columns": ["a"], "rows": [[1]]}]}
    assert outer.to_dict() == {"out": "folder", "share": 0.123456789, "path": "x", "rate": None, "tables": [rows]}
    with console.answering() as given:
        console.figures("some", {"share": 1})
        console.answer({"other": (1, {"b": 2})})
    assert given.to_dict() == {"other": [1, {"b": 2}]}
    assert "1,234,567" in capsys.readouterr().out


def test_quiet_shows_tables_and_no_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with console.answering(quiet=True), console.answering():  # of a command within another
        with console.progress_line("train", 2) as line, console.counting("reading") as say:
            line.to(1, "x")
            say("more")
        console.figures("done", {"n": 2})
    said = capsys.readouterr().out
    assert "train" not in said and "reading" not in said and "done" in said
    with console.progress_line("train", 2) as line:
        line.to(1, "x")
    assert "train 1/2" in capsys.readouterr().out
