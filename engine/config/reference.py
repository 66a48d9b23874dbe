"""Every key of a recipe, with its meaning, its default, its accepted values, and the systems that preset it.

Everything except the presets is read from sections.py: the meaning is the comment after a field or above it.
"""

import ast
import inspect
import io
import textwrap
import tokenize
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from typing import Any

from thresher.common.errors import UserError
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.tables import expected, hints, key_of, named_section_in, section_in, toml_value

Presets = Mapping[str, Mapping[str, Mapping[str, Any]]]  # system -> section -> key -> value
NAMED = {section for section, hint in hints(Recipe).items() if named_section_in(hint)}  # [section.NAME], any NAME


@dataclass(frozen=True)
class Key:
    """One key. default: as in TOML, or "required" or "none". presets: system -> value in TOML."""

    section: str
    name: str
    meaning: str
    default: str
    takes: str
    presets: dict[str, str]

    @property
    def dotted(self) -> str:
        return f"{self.section}.{'NAME.' * (self.section in NAMED)}{self.name}"


def keys_of(presets: Presets) -> list[Key]:
    """Return all keys, in the order of the sections and of their fields."""
    found = []
    for section in hints(Recipe):
        cls = _class_of(section)
        meanings, kinds = meanings_of(cls), hints(cls)
        for one in fields(cls):
            key = key_of(one.name)
            preset = {
                system: toml_value(values[section][key])
                for system, values in presets.items()
                if key in values.get(section, {})
            }
            takes = expected(kinds[one.name]).replace(" that is not empty", "")
            found.append(Key(section, key, meanings[one.name], _default(one), takes, preset))
    return found


def about(section: str) -> str:
    """Return the purpose of a section: its docstring without the name."""
    text = " ".join((inspect.getdoc(_class_of(section)) or "").split())
    return text.removeprefix(f"[{section}] ").removeprefix(f"[{section}.NAME] ")


def _class_of(section: str) -> type[Any]:
    hint = hints(Recipe)[section]
    cls = section_in(hint) or named_section_in(hint)
    assert cls is not None
    return cls


def meanings_of(cls: type) -> dict[str, str]:
    """Return field -> the comment lines above it and the comment after it, joined."""
    source = textwrap.dedent(inspect.getsource(cls))
    comments = {
        token.start[0]: (token.string.lstrip("# "), token.line.lstrip().startswith("#"))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    (body,) = ast.parse(source).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            above = node.lineno
            while comments.get(above - 1, ("", False))[1]:
                above -= 1
            lines = range(above, (node.end_lineno or node.lineno) + 1)
            found[node.target.id] = " ".join(comments[line][0] for line in lines if line in comments).replace(
                "None: ", "none: "
            )
    return found


def explain(keys: Sequence[Key], asked: str) -> list[Key]:
    """Return the keys named by "section.key", "section" or "key". UserError with a suggestion if there are none."""
    asked = asked.strip("[] ")
    found = [key for key in keys if asked in (key.dotted, key.section, key.name)]
    if not found:
        names = [name for key in keys for name in (key.dotted, key.name, key.section)]
        near = get_close_matches(asked, dict.fromkeys(names), n=1)
        hint = f"did you mean {near[0]}?" if near else "docs/recipe.md lists them"
        raise UserError(f"--explain {asked}: a recipe has no such key; {hint}")
    return found


def markdown(keys: Sequence[Key]) -> str:
    """Return the page docs/recipe.md."""
    lines = [
        "# The recipe",
        "",
        "Every key of every section. This page is generated from engine/config/sections.py: `make docs` writes it,",
        "and `thresher recipe --explain KEY` prints one key of it. A system's preset holds where neither the file nor",
        "`--set` sets the key; `--set section.key=` takes the file's value away. A default of none is not written:",
        "leave the key out. `thresher recipe --show RECIPE` prints a recipe with presets and defaults filled in.",
    ]
    section = None
    for key in keys:
        if key.section != section:
            section = key.section
            lines += [
                "",
                f"## {section}{'.NAME' * (section in NAMED)}",
                "",
                about(section),
                "",
                "| key | default | takes | meaning | presets |",
            ]
            lines += ["|---|---|---|---|---|"]
        presets = "; ".join(f"{_code(value)}: {', '.join(systems)}" for value, systems in by_value(key).items())
        cells = (f"`{key.name}`", _code(key.default), key.takes, key.meaning, presets)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def by_value(key: Key) -> dict[str, list[str]]:
    """Return preset value -> names of the systems with that value."""
    found: dict[str, list[str]] = {}
    for system, value in key.presets.items():
        found.setdefault(value, []).append(system)
    return found


def _code(text: str) -> str:
    return text if text in ("required", "none") else f"`{text}`"


def _default(one: Any) -> str:
    value = one.default_factory() if one.default_factory is not MISSING else one.default
    if value is MISSING:
        return "required"
    return "none" if value is None else toml_value(value)
