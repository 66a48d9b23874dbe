"""What a person sees while a command runs."""

import io
from typing import Any

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
