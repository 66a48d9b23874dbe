"""The recipes that come with Thresher, found by name wherever it is installed.

    search_r1/laptop.toml    the file of that name below the working directory, else the one that came with Thresher

`recipes/search_r1/laptop.toml`, as the files are called in a checkout, names the same.
"""

import os
import tomllib
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path

from thresher.common.errors import UserError

FOLDER = Path(str(files("thresher.recipes")))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShippedRecipe:
    """A recipe that came with Thresher. about: the first sentence of its head. system, model: as it names them."""

    name: str
    path: Path
    about: str
    system: str | None
    model: str


def shipped_recipes() -> list[ShippedRecipe]:
    """All of them, by name."""
    return [_read(path) for path in sorted(FOLDER.glob("*/*.toml"))]


def find_recipe(path: str | Path) -> Path:
    """`path`, or the recipe that came with Thresher under that name where there is nothing at `path`."""
    path = Path(path)
    return path if os.path.exists(path) else _shipped(path) or path


def shipped_recipe(name: str | Path) -> Path:
    """The file of the recipe that came with Thresher under that name. UserError where there is none."""
    if (found := _shipped(Path(name))) is None:
        names = [recipe.name for recipe in shipped_recipes()]
        close = get_close_matches(str(name), names, 1)
        hint = f"did you mean {close[0]}?" if close else "thresher recipe --list shows them"
        raise UserError(f"{name}: no recipe of this name came with Thresher; {hint}")
    return found


def _shipped(name: Path) -> Path | None:
    parts = name.parts[1:] if name.parts[:1] == ("recipes",) else name.parts
    wanted = FOLDER.joinpath(*parts)
    return wanted if len(parts) == 2 and wanted.suffix == ".toml" and ".." not in parts and wanted.is_file() else None


def _read(path: Path) -> ShippedRecipe:
    text = path.read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    head = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        head.append(line.removeprefix("#").strip())
    return ShippedRecipe(
        name=path.relative_to(FOLDER).as_posix(),
        path=path,
        about=" ".join(head).partition(". ")[0].rstrip("."),
        system=tables.get("system", {}).get("name"),
        model=tables["model"]["path"],
    )
