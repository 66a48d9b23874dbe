"""Test that a folder imports only from folders below it, and that there are no import cycles."""

from collections.abc import Collection, Mapping
from graphlib import CycleError, TopologicalSorter

import pytest
from layout_cases import imported_files, sources

# From low to high: a unit, a folder or a file, imports from itself and from units on earlier lines, never from
# one on the same line.
UNITS = (
    ("common",),
    ("kernels", "rewards", "recipes"),
    ("kernels/delta",),
    ("kernels/attention",),
    ("kernels/attention/backends",),
    ("policy", "rewards/papers"),
    ("retrieval/encoders", "retrieval/passages.py"),
    ("retrieval/corpus.py", "retrieval/questions.py"),
    ("retrieval/datasets", "retrieval/retriever.py"),
    ("retrieval/indexes",),
    ("retrieval/building", "retrieval/serving"),
    ("engine/config", "engine/episode.py"),
    ("engine/chat_calls.py", "engine/threads.py"),
    ("engine/optim",),
    ("engine/decoding", "engine/protocol", "engine/store", "engine/systems"),
    ("engine/baselines", "engine/packing.py", "engine/rollout", "engine/scoring", "engine/trackers.py"),
    ("engine/planning",),
    ("engine/assemble.py", "engine/parallel"),
    ("engine/compressors",),
    ("engine/evaluation", "engine/world"),
    ("engine/extraction", "engine/reports", "engine/training"),
    ("engine/progress.py",),
    ("engine/grpo.py", "engine/reproduce"),
    ("bench/harness.py", "bench/loss_cases.py", "bench/sass.py"),
    ("bench/plots.py",),
    ("bench/compile.py", "bench/gpu_tests.py", "bench/loss.py", "bench/roofline.py"),
    ("bench/gpu_check.py", "bench/retrieval_server.py", "bench/retrieval_sets.py"),
    ("bench/attention.py", "bench/decode.py", "bench/delta.py", "bench/retrieval.py"),
    ("bench/settings.py",),
    ("bench/rollout_sides.py", "bench/step_trl.py"),
    ("bench/rollout_tail.py",),
    ("bench/rollout.py",),
    ("bench/step.py",),
    ("bench/train_trl.py",),
    ("bench/train.py",),
    ("bench/studies",),
    ("cli/parser.py", "cli/process.py"),
    ("cli/flags.py",),
    ("cli/commands",),
    ("cli/main.py",),
    ("bench/gpu_smoke.py",),
    ("cli/__main__.py",),
)
LEVEL = {unit: level for level, line in enumerate(UNITS) for unit in line}
SPLIT = ("retrieval", "engine", "bench", "cli")  # packages in which each file is a unit
WHOLE = ("policy",)  # units that include their subfolders: families of models


def unit_of(path: str) -> str:
    """Return the unit of a file: itself at the top of a package in SPLIT, otherwise its folder."""
    folder = path.rpartition("/")[0]
    whole = next((unit for unit in WHOLE if f"{folder}/".startswith(f"{unit}/")), folder)
    return path if folder in SPLIT else whole


def is_package(path: str) -> bool:
    return path.endswith("/__init__.py")


def from_above(path: str, source: str) -> list[str]:
    """Return the imports of a file from units that are not below its own."""
    here = unit_of(path)
    return [
        f"{path} ({here}) imports {there}"
        for there in sorted(imported_files(path, source))
        if unit_of(there) != here and not LEVEL.get(unit_of(there), len(UNITS)) < LEVEL.get(here, 0)
    ]


def cycle(graph: Mapping[str, Collection[str]]) -> list[str]:
    """Return a cycle of a graph of imports, in order, or an empty list."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_every_unit_is_on_the_list_and_the_list_names_no_other() -> None:
    units = {unit_of(path) for path in sources() if not is_package(path) or "/" not in path}
    assert units | {"recipes"} == set(LEVEL), "a unit is new or gone: give it its place in UNITS"


def test_a_unit_imports_only_from_units_below_it() -> None:
    wrong = [line for path, source in sources().items() for line in from_above(path, source)]
    assert wrong == [], "\n".join(wrong)


@pytest.mark.parametrize(
    ("path", "source", "wrong"),
    [
        ("engine/rollout/a.py", "from thresher.engine.scoring.score import x", 1),  # on the same level
        ("engine/rollout/a.py", "def f():\n    from thresher.engine.training.train import x", 1),
        ("kernels/a.py", "from thresher.policy.config import x", 1),
        ("rewards/a.py", "if True:\n    from thresher.kernels import loss", 1),
        ("retrieval/retriever.py", "from thresher import engine", 1),
        ("bench/step.py", "from thresher.cli.main import run", 1),
        ("engine/config/a.py", "if TYPE_CHECKING:\n    from thresher.engine.episode import System", 1),
        ("retrieval/indexes/a.py", "import thresher.retrieval.building.build", 1),
        ("common/console.py", "from thresher.engine import assemble", 1),
        ("common/console.py", "from thresher.engine import TagMatcher", 1),  # only __init__ itself sees it
        ("engine/store/a.py", "from thresher.policy import files\nfrom thresher.engine.training import train", 1),
        ("rewards/a.py", "from thresher.rewards.papers.arena import x", 1),
        ("nowhere/a.py", "from thresher.common.files import x", 1),  # a unit that is not on the list
        ("rewards/__init__.py", "from thresher.rewards.papers.arena import x", 0),
        ("engine/__init__.py", "from thresher.engine.decoding.stop_tags import TagMatcher", 0),
        (
            "engine/rollout/a.py",
            "from thresher.engine.decoding.blocks import x\nfrom thresher.kernels import y",
            0,
        ),
        ("engine/assemble.py", "import json\nfrom thresher.common import console", 0),
        ("cli/commands/a.py", "from thresher.cli.commands.training import x\nfrom thresher.cli import flags", 0),
    ],
)
def test_the_test_of_rooms_can_tell(path: str, source: str, wrong: int) -> None:
    assert len(from_above(path, source)) == wrong


def test_no_file_imports_itself_by_way_of_others() -> None:
    files = sources()
    graph = {path: imported_files(path, source) for path, source in files.items()}
    assert sum(map(len, graph.values())) > 500
    found = cycle(graph)
    assert found == [], " is imported by ".join(found)


def test_the_test_of_cycles_can_tell() -> None:
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert set(cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()})) == {"b", "c"}
    lazy = {
        "policy/model.py": "def f():\n    import thresher.policy.lora",
        "policy/lora.py": "import thresher.policy.model",
    }
    assert len(set(cycle({path: imported_files(path, source) for path, source in lazy.items()}))) == 2
