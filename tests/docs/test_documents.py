"""Tests of the documents' tests: what is extracted from a text, and that a command that does not run is noticed."""

from __future__ import annotations

from pathlib import Path

import documents
import pytest
from document_play import Play, complete, entry_of, steps_of
from documents import Command

from thresher.common.errors import UserError

TEXT = """# Title

    thresher data check a.jsonl      # a comment
    make demo
    thresher train r.toml \\
        --out "runs/one two"

The prose goes on
    thresher is indented here, in the middle of a paragraph.

1. An item. This is one line of `t.jsonl`; more of it:

       {"a": 1,
        "b": 2}

   See `thresher eval`, `thresher report runs/x` and `thresher sft RECIPE --out DIR`.

This is the whole file, `x.py`.

```python
x = 1
```

    import json
    json.dumps(1)

    [run]
    steps = 1

Text [a](b.md#c) and ![d](e.png), not [f](https://example.org).
"""


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(documents, "ROOT", tmp_path)
    (tmp_path / "t.md").write_text(TEXT)
    return "t.md"


def test_what_is_read_out_of_a_text(text: str) -> None:
    found = documents.commands(text)
    assert [(command.place, *command.words) for command in found] == [
        ("t.md:3", "data", "check", "a.jsonl"),
        ("t.md:5", "train", "r.toml", "--out", "runs/one two"),
    ]
    files = [block.file for block in documents.blocks(text) if block.file]
    assert files == [("t.jsonl", '{"a": 1, "b": 2}\n'), ("x.py", "x = 1\n")]
    assert [complete(command.words) for command in documents.mentions(text)] == [False, True, False]
    assert [step.place for step in steps_of(text)] == ["t.md:3", "t.md:5", "t.md:16", "t.md:24"]
    assert documents.links(text) == [(30, "b.md#c"), (30, "e.png")]


def test_a_command_of_the_text_that_cannot_run_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.toml").write_text('[retrieval]\nurl = "http://h:1"\n')
    shown = [
        Command("t.md", 3, ("data", "check", "missing.jsonl")),
        Command("t.md", 4, ("data", "forget", "a.jsonl")),
        Command("t.md", 5, ("report", "--no-such-flag", "x")),
    ]
    play = Play(tmp_path, shown)
    with pytest.raises(AssertionError, match=r"t.md:3: thresher data check missing.jsonl"):
        play.until(0)
    with pytest.raises(AssertionError, match=r"t.md:4: thresher data forget has no row in REDUCED"):
        play.until(1)
    with pytest.raises((AssertionError, UserError)):
        play.until(2)
    assert set(play.ended) == {0, 1, 2}
    assert entry_of(("train", "r.toml", "--out", "x")) == "train --url"
    assert entry_of(("train", "other.toml", "--out", "x", "--resume")) == "train --resume"
