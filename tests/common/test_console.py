"""Tests of the output that a person sees while a command runs."""

import io
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from thresher.common import console


def test_numbers_are_rounded_for_reading() -> None:
    texts = {None: "-", 0.12345: "0.123", 0.0: "0", 12.3456: "12.35", 12345.6: "12,346", -0.5: "-0.5", "text": "text"}
    texts |= {1234567: "1,234,567"}
    assert {value: console.shown(value) for value in texts} == texts and console.shown(True) == "True"
    assert console.shown({"answered": 3, "turns": 1}) == "answered 3, turns 1"


EVIL = "a\x1b[2J\u202eb\x9bc\ud800"
SHOWN = r"a␛[2J\u202eb\u009bc\ud800"


def test_nothing_printed_acts_on_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lines, tables and progress are escaped, also on a terminal, whose own colour codes stay."""
    written = io.StringIO()
    made = console.SafeConsole(file=written, highlight=False, width=200, force_terminal=True, color_system="standard")
    monkeypatch.setattr(console, "console", made)
    console.console.print(EVIL, style="red", markup=False)
    console.table(EVIL, ["name"], [[EVIL]])
    with console.progress_line(EVIL, 2) as line:
        line.to(1, EVIL)
    text = written.getvalue()
    assert text.count(SHOWN) >= 5 and "\x1b[31m" in text
    assert not {"\u202e", "\x9b", "\ud800"} & set(text) and "\x1b[2J\\u" not in text
    monkeypatch.undo()
    console.say(EVIL)
    assert capsys.readouterr().out == f"{SHOWN}\n"


@pytest.mark.parametrize(("terminal", "expected"), [(True, "a␛[2Jb"), (False, "a\x1b[2Jb")])
def test_an_exact_text_is_kept_where_no_terminal_reads_it(
    terminal: bool, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    console.say("a\x1b[2Jb", end="", exact=True)
    assert capsys.readouterr().out == expected


class Screen:
    """A console and a time.monotonic that the test sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, terminal: bool = False, width: int = 160) -> None:
        self.now, self.written = 0.0, io.StringIO()
        monkeypatch.setattr(console.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(console, "console", Console(file=self.written, width=width, force_terminal=terminal))

    def lines(self) -> list[str]:
        return self.written.getvalue().splitlines()


def test_without_a_terminal_a_line_is_printed_every_tenth_of_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(monkeypatch)
    with console.progress_line("train", 40) as line:
        for done in range(1, 41):
            line.to(done, f"reward {done}")
    lines = screen.lines()
    assert [text.split()[1] for text in lines] == [f"{done}/40" for done in range(4, 41, 4)]
    assert lines[-1].endswith("reward 40") and "left 0 s" in lines[-1]


def test_inside_a_step_a_plain_line_comes_every_half_minute_with_what_is_within(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, made = Screen(monkeypatch, width=40), []
    with console.progress_line("train", 100) as line:
        line.from_before(40)  # resumed
        for step in (41, 42):
            with console.stage("rollout", 60) as inner:
                for done in range(1, 61):
                    clock.now += 1
                    inner.at(done, lambda: made.append(1) or "7 searches")  # type: ignore[func-returns-value]
            with console.stage("evaluation"), console.progress_line("eval", 4) as nested:  # of a nested command
                clock.now += 45
                nested.to(1, "")
            line.to(step, "reward 1")
    assert clock.lines() == [
        "train 40/100  rollout 30/60  left 30 s  7 searches",
        "train 40/100  rollout 60/60  left 0 s  7 searches",
        "train 40/100  evaluation  eval 1/4  left 2 min",
        "train 41/100  left 103 min  reward 1  rollout 30/60  left 30 s  7 searches",
        "train 41/100  left 102 min  reward 1  rollout 60/60  left 0 s  7 searches",
        "train 41/100  left 102 min  reward 1  evaluation  eval 1/4  left 2 min",
    ]
    assert len(made) == 4  # a text is made only when it is shown


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_polled_is_a_part_of_the_line(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(console, "console", Console(file=written, width=160, force_terminal=terminal))
    monkeypatch.setattr(console, "REDRAW_SECONDS", 0.001)
    monkeypatch.setattr(console, "PLAIN_SECONDS", 0.001)
    stages = {"rollout 1/3": console.Stage("rollout", 1, 3, "7 tokens"), "update 2/8": console.Stage("update", 2, 8)}
    asked: list[int] = []

    def ask() -> console.Stage | None:
        asked.append(threading.get_ident())
        return next((stage for text, stage in stages.items() if text not in written.getvalue()), None)

    with console.polling(ask):  # without a progress line the function is not called
        pass
    with console.progress_line("train", 9) as line, console.polling(ask):
        until = time.monotonic() + 60
        while "update 2/8" not in written.getvalue() and time.monotonic() < until:
            time.sleep(0.001)
        line.to(1, "reward 1")
    over = len(asked)
    assert "7 tokens" in written.getvalue() and "update 2/8" in written.getvalue()
    time.sleep(0.01)
    assert len(asked) == over and set(asked) - {threading.get_ident()}


def test_a_stage_without_a_line_shows_nothing_and_one_on_a_terminal_rewrites_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Screen(monkeypatch, terminal=True)
    with console.stage("rollout", 3) as inner:
        clock.now += 99
        inner.at(1, lambda: "x")
    assert clock.lines() == []
    with console.progress_line("train", 9) as line, console.stage("update", 8) as inner:
        clock.now += 1
        inner.at(2, lambda: "70 tokens")
        line.to(1, "reward 1")
    shown = clock.written.getvalue()
    assert "update 2/8  left 3 s  70 tokens" in shown and shown.count("\n") == 1


def test_stages_and_work_of_unknown_length(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen(monkeypatch)
    with console.stages() as on_stage:  # a stage starts at the last report of the stage before it
        screen.now += 10
        on_stage("encoding", 20, 100)
        screen.now += 3
        on_stage("linking", 1, 10)
    with console.counting("checked:") as counter:
        for done in range(1, 62):
            screen.now += 1
            counter(done * 1000)
    stages = ["encoding 20/100  left 40 s", "linking 1/10  left 27 s"]
    assert screen.lines() == [*stages, "checked: 30,000  1,000 a second", "checked: 60,000  1,000 a second"]


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
    with console.answering(quiet=True), console.answering():  # of a nested command
        with console.progress_line("train", 2) as line, console.counting("reading") as counter:
            line.to(1, "x")
            counter(9)
        console.figures("done", {"n": 2})
    said = capsys.readouterr().out
    assert "train" not in said and "reading" not in said and "done" in said
    with console.progress_line("train", 2) as line:
        line.to(1, "x")
    assert "train 1/2" in capsys.readouterr().out


def test_brackets_are_printed_as_they_are(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = "[bold]a[/INST] of thresher[bench]"
    console.console.print(said)
    console.figures(said, {said: said})
    assert capsys.readouterr().out.count(said) == 4

    # On a terminal, with its codes: a progress line with a stage, and a count.
    terminal = io.StringIO()
    monkeypatch.setattr(console.console, "_file", terminal)
    monkeypatch.setattr(console.console, "_force_terminal", True)
    with console.progress_line(said, 2) as line:
        line.to(1, "[/x] text[y]")
    with console.counting(said) as counter:
        counter(1, said)
    printed = terminal.getvalue()
    assert "[/x] text[y]" in printed and "[/INST] of thresher[bench]" in printed
