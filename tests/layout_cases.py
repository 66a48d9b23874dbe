"""Shared by the tests of the layout: the packages' files, and the imports of each.

Nothing is imported: an import inside a function or under TYPE_CHECKING counts like any other.
"""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("common", "kernels", "rewards", "recipes", "policy", "retrieval", "engine", "bench", "cli")  # the product


def modules() -> list[Path]:
    return sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


@cache
def sources() -> dict[str, str]:
    """Return every module's source, by its path in the checkout ("common/console.py")."""
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in modules()}


@cache
def imports(source: str) -> tuple[str, ...]:
    """Return the full name of each imported module, or of a name in it."""
    found: list[str] = []
    waiting: list[ast.AST] = [ast.parse(source)]
    while waiting:
        for child in ast.iter_child_nodes(waiting.pop()):
            if isinstance(child, ast.Import):
                found += [alias.name for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, "imports are absolute here"
                found += [f"{child.module}.{alias.name}" for alias in child.names]
            elif not isinstance(child, ast.expr):
                waiting.append(child)
    return tuple(found)


@cache
def imported_files(path: str, source: str) -> frozenset[str]:
    """Return the paths of our own files that a file imports, except those that an `__init__.py` re-exports from its own
    folder, because no file in the folder uses the package for them."""
    found = set()
    for name in imports(source):
        parts = name.split(".")[1:] if name.startswith("thresher.") else []
        while parts:
            here = "/".join(parts)
            if there := next((file for file in (f"{here}.py", f"{here}/__init__.py") if (ROOT / file).is_file()), None):
                found.add(there)
                break
            parts.pop()
    folder, _, file = path.rpartition("/")
    return frozenset(there for there in found - {path} if file != "__init__.py" or not there.startswith(f"{folder}/"))
