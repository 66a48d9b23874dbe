"""The rooms of retrieval: imports go one way between them, no files import each other in a circle, none is crowded."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HOUSE = ROOT / "retrieval"
BASE = {"data"}
# What a room, or a file at the top, may import of retrieval besides itself.
MAY = {
    "data": set(),
    "questions": BASE,
    "retriever": BASE,
    "datasets": BASE | {"questions"},
    "encoders": set(),
    "vectors": {"encoders"},
    "indexes": BASE | {"questions", "retriever", "encoders", "vectors"},
    "building": BASE | {"questions", "retriever", "encoders", "vectors", "indexes"},
    "serving": BASE | {"retriever", "indexes"},
    "serving.client": BASE | {"retriever"},
    "serving.wire": BASE | {"retriever"},
    "serving.http": set(),
}


def imported(path: Path) -> set[str]:
    """Modules of retrieval that a file names anywhere, without "thresher.retrieval."."""
    nodes = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
    modules = [f"{node.module}.{alias.name}" for node in nodes for alias in node.names]
    modules += [str(node.module) for node in nodes]
    return {name.removeprefix("thresher.retrieval.") for name in modules if name.startswith("thresher.retrieval.")}


def named(path: Path) -> str:
    return ".".join(path.relative_to(HOUSE).with_suffix("").parts)


FILES = {named(path): imported(path) for path in HOUSE.rglob("*.py") if path.name != "__init__.py"}


def test_rooms_import_one_way() -> None:
    wrong = []
    for name, modules in FILES.items():
        room = name.partition(".")[0]
        allowed = MAY.get(name, MAY[room]) | {room}
        wrong += [f"{name}: {module}" for module in modules if module.partition(".")[0] not in allowed]
    assert wrong == []


def test_no_files_import_each_other_in_a_circle() -> None:
    left = {name: {module for module in modules if module in FILES} for name, modules in FILES.items()}
    while free := [name for name, modules in left.items() if not modules & left.keys()]:
        for name in free:
            del left[name]
    assert left == {}


def test_no_room_is_crowded() -> None:
    assert {room.name: count for room in HOUSE.iterdir() if (count := len(list(room.glob("*.py")))) > 12} == {}
