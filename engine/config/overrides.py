"""What `--set` says: "key=value" strings, a value read as TOML and, where it is none, taken as a bare string.

Nothing behind the equals sign takes a key away again; the empty string is `key=""`.
"""

import tomllib
from collections.abc import Sequence
from typing import Any

from thresher.common.errors import UserError
from thresher.engine.config.tables import Unfit, plain


def parse_overrides(texts: Sequence[str]) -> dict[str, Any]:
    """ "key=value" strings as a table, values read as TOML or taken as bare strings."""
    table: dict[str, Any] = {}
    for text in texts:
        key, equals, written = text.partition("=")
        if not equals or not key.strip():
            raise UserError(f"--set {text}: expected key=value")
        if written.strip():
            table[key.strip()] = _value(written.strip())
        else:
            table.pop(key.strip(), None)
    return table


def override(table: dict[str, Any], text: str) -> str:
    """Set one "section.key=value" in nested tables, or take away what "section.key=" or "section=" names; returns its
    dotted key."""
    dotted, equals, written = text.partition("=")
    path = [part.strip() for part in dotted.split(".")]
    if equals and all(path) and not written.strip():
        _remove(table, path)
        return ".".join(path)
    if not equals or len(path) < 2 or not all(path):
        raise UserError(f"--set {text}: expected section.key=value, such as run.seed=1")
    for parent in path[:-1]:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise UserError(f"--set {text}: {parent} is not a table in the recipe; expected section.key=value")
    table[path[-1]] = _value(written.strip())
    return ".".join(path)


def unsets(text: str) -> bool:
    """Whether an override takes its key away."""
    _, equals, written = text.partition("=")
    return bool(equals) and not written.strip()


def _remove(table: dict[str, Any], path: Sequence[str]) -> None:
    for parent in path[:-1]:
        table = table.get(parent, {})
        if not isinstance(table, dict):
            return
    table.pop(path[-1], None)


def _value(written: str) -> Any:
    try:
        (value,) = tomllib.loads(f"value = {written}").values()
        return plain(value)
    except (ValueError, RecursionError, Unfit):  # Unfit: a date to TOML, the name of a folder to us
        return written
