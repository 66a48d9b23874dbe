"""Which command made what: out/commands/NAME/command.json, and the lock of who runs it now.

    {"words": ["train", "recipes/world/recipe.toml", ..], "recipes": {"recipes/world/recipe.toml": SHA-256 of its keys}}

Words are of the folder that a table is made in and of the recipes that come with Thresher, however --out is spelled and
wherever they are installed. What was typed by hand has no record, and is taken as it is.
"""

import hashlib
import json
import os
import shlex
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text, read_json_object
from thresher.common.locks import lock_folder
from thresher.engine.reproduction.commands import Cell, Command
from thresher.engine.synthetic.shared_base import RECIPES

RECORD = "command.json"


@contextmanager
def locked(command: Command, out: Path) -> Iterator[bool]:
    """Whether no other process runs this command, and until the end none will; if so, and it is still to be run, its
    record is written. The lock goes with its process."""
    place = _place(command, out)
    place.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = lock_folder(place)
    except UserError:
        yield False
        return
    try:
        if not command.finished:
            atomic_write_text(place / RECORD, json.dumps(_record(command, out), indent=1) + "\n")
        yield True
    finally:
        os.close(descriptor)


def check_folder(cells: Sequence[Cell], out: Path) -> None:
    """UserError where another command than now made something here: of other overrides, of another paper, or of a
    recipe that says something else since. What was refused made nothing."""
    for command in dict.fromkeys(command for cell in cells for command in cell.every()):
        file = _place(command, out) / RECORD
        if not (file.is_file() and command.folder.exists()):
            continue
        made, now = read_json_object(file), _record(command, out)
        words = made.get("words")
        if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            raise UserError(f"{file}: expected the words of a command; delete it if {command.folder} is to be kept")
        before, after = _said(words), _said(now["words"])
        if before != after:
            then, changed = (
                shlex.join([f"{key}={value}" if value else key for key, value in sorted(some.items() - others.items())])
                or "less"
                for some, others in ((before, after), (after, before))
            )
            raise UserError(
                f"{command.folder}: was made with {then}, where now there is {changed}; choose another --out, or the "
                "flags of then"
            )
        other = [name for name, content in made.get("recipes", {}).items() if now["recipes"].get(name) != content]
        if other:
            raise UserError(
                f"{command.folder}: was made when {other[0]} had other keys; choose another --out, or delete {file} if "
                "it is to be kept"
            )


def _record(command: Command, out: Path) -> dict[str, Any]:
    words = [word.replace(f"{RECIPES}/", "recipes/").replace(f"{out}/", "") for word in command.words]
    recipes = [word for word in command.words if word.endswith(".toml") and Path(word).is_file()]
    return {"words": words, "recipes": {word.replace(f"{RECIPES}/", "recipes/"): _keys(word) for word in recipes}}


def _keys(recipe: str) -> str:
    with Path(recipe).open("rb") as file:
        return hashlib.sha256(json.dumps(tomllib.load(file), sort_keys=True).encode()).hexdigest()


def _said(words: Sequence[str]) -> dict[str, str]:
    """A command's words in whatever order: of overrides of one key the last counts."""
    return dict(word.partition("=")[::2] for word in words)


def _place(command: Command, out: Path) -> Path:
    return out / "commands" / "-".join(command.folder.relative_to(out).parts)
