"""The rooms: a folder is one idea, says what lives there and what comes in, and imports only from rooms below it."""

import ast
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from graphlib import CycleError, TopologicalSorter

import pytest
from layout_cases import imported_files, parsed, sources

# From low to high: a room imports from itself and from rooms on earlier lines, never from one beside it.
ROOMS = (
    ("kernels/launch", "rewards", "recipes"),
    ("kernels/drawing", "kernels/elementwise", "kernels/head"),
    ("kernels/attention",),
    ("kernels/attention/backends",),
    ("kernels",),
    ("policy", "rewards/papers"),
    ("retrieval/data", "retrieval/encoders"),
    ("retrieval/questions.py", "retrieval/retriever.py"),
    ("retrieval/datasets", "retrieval/vectors"),
    ("retrieval/indexes",),
    ("retrieval/building", "retrieval/serving"),
    ("engine/config", "engine/console.py", "engine/episode.py", "engine/interrupt.py"),
    ("engine/machine.py", "engine/threads.py"),
    ("engine/decoding/cache", "engine/optim"),
    ("engine/decoding", "engine/protocol", "engine/store", "engine/systems"),
    ("engine/baselines", "engine/packing", "engine/rollout", "engine/scoring", "engine/sinks"),
    ("engine/planning",),
    ("engine/assemble.py", "engine/parallel"),
    ("engine/refiners",),
    ("engine/evaluation", "engine/synthetic"),
    ("engine/extraction", "engine/reporting", "engine/training"),
    ("engine/reproduction", "engine/watching"),
    ("bench/machine.py", "bench/measure.py", "bench/rows.py"),
    ("bench/compile", "bench/loss", "bench/retrieval", "bench/rollout", "bench/roofline"),
    ("bench/decode", "bench/gpu_check"),
    ("bench/step",),
    ("bench/studies/kl", "bench/studies/mask", "bench/studies/systems", "bench/torture"),
    ("cli/flags.py", "cli/parsing", "cli/process.py"),
    ("cli/commands",),
    ("cli/registry.py",),
    ("cli/main.py",),
    ("cli/__main__.py",),
)
LEVEL = {room: level for level, line in enumerate(ROOMS) for room in line}
SPLIT = ("retrieval", "engine", "bench", "cli")  # packages whose own files are a room each
WHOLE = ("cli/commands", "policy")  # rooms with what lies in their folders: groups of commands, families of models

MOST_AT_THE_TOP, MOST_IN_A_ROOM = 6, 12
# Folder -> why it holds more.
LARGE = {
    "cli/commands": "a file a command, and what a person may type has no rooms",
    "engine/baselines": "a file a baseline, found by its name",
}

LONGEST_FUNCTION = 60
LONG = {
    ("kernels/drawing/head_draw_triton.py", "_draw_kernel"): "one Triton program, from the product to what is stored",
    ("kernels/attention/decode_triton.py", "_decode_kernel"): "one Triton program, an argument a line",
    ("kernels/attention/cascade_triton.py", "_prefix_kernel"): "one Triton program, an argument a line",
    ("kernels/loss.py", "grpo_loss"): "the public function: three quarters of it are its arguments and their docs",
    ("retrieval/building/commands.py", "build"): "a build from first to last, in the order in which it may be killed",
}

NAMED_TWICE = {
    "Hit": "a retrieved passage, and a tag found by TagMatcher, which README names",
    "Options": "by contract: every system's and baseline's switches, found by that name",
    "Source": "of a segment, and of a mix of questions",
}

IMPORTS = "Imports: "


def room_of(path: str) -> str:
    """The room of a file: the file itself at the top of a package in SPLIT, else its folder."""
    folder = path.rpartition("/")[0]
    whole = next((room for room in WHOLE if f"{folder}/".startswith(f"{room}/")), folder)
    return path if folder in SPLIT else whole


def is_package(path: str) -> bool:
    return path.endswith("/__init__.py")


def from_above(path: str, source: str) -> list[str]:
    """What a file imports from rooms that do not lie below its own."""
    here = room_of(path)
    return [
        f"{path} ({here}) imports {there}"
        for there in sorted(imported_files(path, source))
        if room_of(there) != here and not LEVEL.get(room_of(there), len(ROOMS)) < LEVEL.get(here, 0)
    ]


def cycle(graph: Mapping[str, Collection[str]]) -> list[str]:
    """A cycle of a graph of imports, in order; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        found: list[str] = error.args[1]
        return found
    return []


def test_every_room_is_on_the_list_and_the_list_names_no_other() -> None:
    rooms = {room_of(path) for path in sources() if not is_package(path) or "/" not in path}
    assert rooms | {"recipes"} == set(LEVEL), "a room is new or gone: give it its place in ROOMS"


def test_a_room_imports_only_from_rooms_below_it() -> None:
    wrong = [line for path, source in sources().items() for line in from_above(path, source)]
    assert wrong == [], "\n".join(wrong)


@pytest.mark.parametrize(
    ("path", "source", "wrong"),
    [
        ("engine/rollout/a.py", "from thresher.engine.scoring.score import x", 1),  # beside it
        ("engine/rollout/a.py", "def f():\n    from thresher.engine.training.train import x", 1),
        ("engine/config/a.py", "if TYPE_CHECKING:\n    from thresher.engine.episode import System", 1),
        ("retrieval/indexes/a.py", "import thresher.retrieval.building.build", 1),
        ("engine/console.py", "from thresher.engine import assemble", 1),
        ("engine/console.py", "from thresher.engine import TagMatcher", 1),  # only __init__ itself sees it
        ("engine/store/a.py", "from thresher.policy import files\nfrom thresher.engine.training import train", 1),
        ("rewards/a.py", "from thresher.rewards.papers.arena import x", 1),
        ("nowhere/a.py", "from thresher.policy.files import x", 1),  # a room that is not on the list
        ("rewards/__init__.py", "from thresher.rewards.papers.arena import x", 0),
        ("engine/__init__.py", "from thresher.engine.decoding.stop_tags import TagMatcher", 0),
        (
            "engine/rollout/a.py",
            "from thresher.engine.decoding.cache.blocks import x\nfrom thresher.kernels import y",
            0,
        ),
        ("engine/assemble.py", "import json\nfrom thresher.engine import console", 0),
        ("cli/commands/group/a.py", "from thresher.cli.commands.train import x\nfrom thresher.cli import flags", 0),
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


def test_a_folder_holds_no_more_than_one_can_survey() -> None:
    files = Counter(path.rpartition("/")[0] for path in sources() if not is_package(path))
    assert {folder: files[folder] for folder in SPLIT if files[folder] > MOST_AT_THE_TOP} == {}
    assert {folder for folder, count in files.items() if count > MOST_IN_A_ROOM} == set(LARGE)


def wanted_line(package: str, files: Mapping[str, str]) -> str:
    """What an `__init__.py` says of its folder's imports: the rooms that the files directly in it import from."""
    folder = package.rpartition("/")[0]
    rooms = {
        room_of(there)
        for path, source in files.items()
        if path.rpartition("/")[0] == folder
        for there in imported_files(path, source)
    }
    rooms -= {room_of(package)} | {room for room in rooms if room.rpartition("/")[0] == folder and room.endswith(".py")}
    return f"{IMPORTS}{', '.join(sorted(rooms)) or 'nothing'}."


def misses(package: str, docstring: str, wanted: str) -> list[str]:
    """What is wrong with the first two lines of a package's docstring."""
    first, _, second = docstring.partition("\n\n")[0].partition("\n")  # the second may be wrapped
    wrong = [] if re.fullmatch(r"\S.*\.", first) else [f'{package}: its first line is no sentence: "{first}"']
    if " ".join(second.split()) != wanted:
        wrong.append(f"{package}: its second line should be: {wanted}")
    return wrong


def test_every_package_says_what_lives_there_and_what_it_imports() -> None:
    files = sources()
    packages = {path: ast.get_docstring(parsed(source)) or "" for path, source in files.items() if is_package(path)}
    assert len(packages) > 25
    wrong = [line for path, text in packages.items() for line in misses(path, text, wanted_line(path, files))]
    assert wrong == [], "\n".join(wrong)


def test_the_test_of_packages_can_tell() -> None:
    files = {
        "policy/__init__.py": "from thresher.policy.model import Policy",
        "policy/a.py": "from thresher.kernels.loss import grpo_loss\nimport thresher.rewards.errors",
        "policy/b.py": "import torch\nfrom thresher.policy.model import Policy",
    }
    wanted = wanted_line("policy/__init__.py", files)
    assert wanted == "Imports: kernels, rewards."
    assert wanted_line("policy/__init__.py", {"policy/b.py": files["policy/b.py"]}) == "Imports: nothing."
    at_the_top = {"engine/a.py": "from thresher.engine import console\nfrom thresher.engine.store import journal"}
    assert wanted_line("engine/__init__.py", at_the_top) == "Imports: engine/store."
    for fine in (f"The model.\n{wanted}", "The model.\nImports: kernels,\nrewards.\n\nMore."):
        assert misses("a", fine, wanted) == []
    for bad in (f"The model\n{wanted}", "The model.", f"The model.\n\n{wanted}", "The model.\nImports: kernels."):
        assert len(misses("a", bad, wanted)) == 1


def test_a_class_name_is_given_once() -> None:
    places = defaultdict(list)
    for path, source in sources().items():
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(path)
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert {name: found for name, found in twice.items() if name not in NAMED_TWICE} == {}
    assert set(NAMED_TWICE) - set(twice) == set(), "take these out of NAMED_TWICE"


def long_functions(files: Mapping[str, str]) -> dict[tuple[str, str], int]:
    """(file, function) -> its lines, for functions that are longer than can be read."""
    return {
        (path, node.name): node.end_lineno - node.lineno + 1
        for path, source in files.items()
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno >= LONGEST_FUNCTION
    }


def test_no_function_is_longer_than_can_be_read() -> None:
    found = long_functions(sources())
    assert {where: lines for where, lines in found.items() if where not in LONG} == {}
    assert set(LONG) - set(found) == set(), "take these out of LONG"


def test_the_test_of_functions_can_tell() -> None:
    body = "    x = 1\n"
    source = f"def f():\n{body * 59}\nclass A:\n    async def g(self):\n{'    ' + body}" + f"    {body}" * 59
    assert long_functions({"a.py": source}) == {("a.py", "g"): 61}
