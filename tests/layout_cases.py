"""What the tests of the layout read: the packages' files, and what each of them imports.

Deliberately absent: importing anything. All of it is read from the source, so that an import inside a function or under
TYPE_CHECKING counts as any other does.
"""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# A folder may import from those of a lower rank and from itself; of two on one rank neither from the other.
RANK = {
    "common": 0,
    "kernels": 1,
    "rewards": 1,
    "recipes": 1,
    "policy": 2,
    "retrieval": 3,
    "engine": 4,
    "bench": 5,
    "cli": 6,
}


def modules() -> list[Path]:
    return sorted(path for folder in RANK for path in (ROOT / folder).rglob("*.py"))


@cache
def sources() -> dict[str, str]:
    """Every module's source, by its path in the checkout ("common/console.py")."""
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in modules()}


@cache
def parsed(source: str) -> ast.Module:
    return ast.parse(source)


@cache
def imports(source: str) -> tuple[tuple[str, bool], ...]:
    """(full name of an imported module or of a name in it, whether it is imported inside a function)."""
    found: list[tuple[str, bool]] = []
    waiting: list[tuple[ast.AST, bool]] = [(parsed(source), False)]
    while waiting:
        node, lazy = waiting.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found += [(alias.name, lazy) for alias in child.names]
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, "imports are absolute here"
                found += [(f"{child.module}.{alias.name}", lazy) for alias in child.names]
            elif not isinstance(child, ast.expr):
                inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                waiting.append((child, lazy or inside))
    return tuple(found)


@cache
def imported_files(path: str, source: str) -> frozenset[str]:
    """The paths of our own files that a file imports; what an `__init__.py` re-exports from its own folder is left out,
    for nothing in the folder gets to it through that."""
    found = set()
    for name, _ in imports(source):
        parts = name.split(".")[1:] if name.startswith("thresher.") else []
        while parts:
            here = "/".join(parts)
            if there := next((file for file in (f"{here}.py", f"{here}/__init__.py") if (ROOT / file).is_file()), None):
                found.add(there)
                break
            parts.pop()
    folder, _, file = path.rpartition("/")
    return frozenset(there for there in found - {path} if file != "__init__.py" or not there.startswith(f"{folder}/"))
