"""Tests that run what the documents show: every command, every Python block and every piece of a recipe.

A document is run from its top in a separate folder, with tiny stand-ins at the paths that it names; see
document_play.py and document_world.py. The id of a test is the file and line of what it runs.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Sequence

import pytest
from document_play import Play, shown
from documents import Block, Command, blocks, documents, mentions, to_be_added

from thresher.cli.main import build_parser
from thresher.engine.config.recipe import make_recipe

# Slow documents, whose commands take seconds; `make test` also runs the others.
LONG = (
    "README.md",
    *(f"docs/{name}.md" for name in ("asynchrony", "commands", "delta", "gpu", "measured", "python", "reproduce")),
    *(f"docs/{name}.md" for name in ("results", "retrieval", "scale", "add/kernel")),
    "docs/reproduce/",
    "docs/results/",
)


@pytest.mark.parametrize(
    ("document", "number"),
    [
        pytest.param(document, number, id=step.place, marks=[pytest.mark.slow] * document.startswith(LONG))
        for document, steps in shown().items()
        for number, step in enumerate(steps)
    ],
)
def test_what_is_shown_runs(
    document: str,
    number: int,
    plays: Callable[[str, Sequence[Command | Block]], Play],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    play = plays(document, shown()[document])
    monkeypatch.chdir(play.folder)
    play.until(number)


@pytest.mark.parametrize("document", documents())
def test_what_the_prose_names_is_there(document: str) -> None:
    """A command named in the prose exists, and has the flags that are named with it."""
    for command in mentions(document):
        if command.words[0].isupper() or to_be_added(document, " ".join(command.words)):
            continue
        parser, words = build_parser(), list(command.words)
        while (
            words
            and words[0][:2] != "--"
            and (choices := [action.choices for action in parser._actions if isinstance(action.choices, dict)])
        ):
            assert words[0] in choices[0], f"{command.place}: there is no thresher {' '.join(command.words)}"
            parser = choices[0][words.pop(0)]
        flags = {flag for action in parser._actions for flag in action.option_strings}
        unknown = [word for word in words if word.startswith("--") and word not in flags]
        assert not unknown, f"{command.place}: {command.words} has no {unknown[0]}"


def recipes() -> list[Block]:
    return [block for document in documents() for block in blocks(document) if block.is_toml]


@pytest.mark.parametrize("block", recipes(), ids=[block.place for block in recipes()])
def test_a_piece_of_a_recipe_is_one(block: Block) -> None:
    """Every shown section and key exists."""
    tables = tomllib.loads(block.text)
    system = {"name": "naive_grpo"} if tables.get("system", {}).get("name", "").endswith(".py") else {}
    tables = {"model": {"path": "m"}, **tables}
    tables["system"] = {**tables.get("system", {}), **system} if "system" in tables else {}
    if not tables["system"]:
        del tables["system"]
    elif system:
        tables["system"].pop("options", None)  # defined by the file itself
    make_recipe(tables, block.place, [], lambda name: {})
