"""What has to be run for a table: commands, in an order in which each finds what it reads.

    cell = (row, column, seed)  ->  (what the base takes) -> train -> eval        at paper scale
                                    data .. sft, once     -> train -> eval        in the invented world

Cells share whatever is the same: the base, the training of a method on a model with a seed, and in the world one
evaluation for all columns of the same noise, which are parts of its questions. A method that is not trained has one
seed, for its evaluation is greedy.

Every command writes one folder, which is finished when its last file is there; `train` and `eval` go on with an
unfinished one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thresher.engine.config.recipe import load_recipe
from thresher.engine.reproduction.manifest import Method, PaperManifest, PaperTable, TableRow
from thresher.engine.synthetic.shared_base import RECIPE, RECIPES, world_paths, world_stages
from thresher.engine.synthetic.warmup_transcripts import GIVEN, SEARCHING, template
from thresher.policy.files import atomic_write_text

FINISHED = {"train": "summary.json", "eval": "metrics.json"}  # command -> the file that it writes last


@dataclass(frozen=True, slots=True)
class Scale:
    """At which scale a table is run, "paper" or "world", with which seeds; overrides of every recipe, and how many
    questions an evaluation has at most."""

    name: str
    seeds: Sequence[int] = (0,)
    overrides: tuple[str, ...] = ()
    limit: int | None = None

    @property
    def invented(self) -> bool:
        return self.name == "world"

    def flags_of_eval(self) -> list[str]:
        return [] if self.limit is None else ["--limit", str(self.limit)]


@dataclass(frozen=True, slots=True)
class Command:
    """One command of `thresher`, and the folder that it writes. lacking: what it reads and nobody has put there, each
    with how to get it."""

    words: tuple[str, ...]
    folder: Path
    lacking: tuple[tuple[str, str], ...] = ()

    @property
    def finished(self) -> bool:
        last = FINISHED.get(self.words[0])
        return self.folder.exists() if last is None else (self.folder / last).is_file()

    def to_run(self) -> list[str]:
        """The words to run now: a training that was begun goes on."""
        begun = self.words[0] == "train" and self.folder.exists()
        return [*self.words, *(["--resume"] if begun else [])]


@dataclass(frozen=True, slots=True)
class Cell:
    """A row's run with one seed: the commands before its evaluations, and the evaluation of each column that it has."""

    row: TableRow
    seed: int
    before: tuple[Command, ...]
    evaluations: dict[str, Command] = field(default_factory=dict)

    def possible(self) -> Iterator[Command]:
        """The commands that can be run, in order: none behind a training whose data are absent."""
        if not any(command.lacking and not command.finished for command in self.before):
            yield from self.before
            yield from dict.fromkeys(command for command in self.evaluations.values() if not command.lacking)

    def lacking(self) -> dict[str, str]:
        """What is absent of all that the cell's commands read, and how to get it."""
        commands = (*self.before, *self.evaluations.values())
        return dict(pair for command in commands if not command.finished for pair in command.lacking)


def cells_of(manifest: PaperManifest, table: PaperTable, scale: Scale, out: Path) -> list[Cell]:
    """All cells of a table at this scale, in the order of its rows; rows and columns that it does not have there are
    left out. The invented world has one base, so of the rows of one method the last."""
    make = _world_cell if scale.invented else _paper_cell
    last = {row.method: row for row in table.rows}
    found = []
    for row in table.rows:
        method = manifest.methods[row.method]
        if scale.invented and not (in_world(method) and last[row.method] is row):
            continue
        for seed in scale.seeds if _trained(method) else scale.seeds[:1]:
            found.append(make(manifest, table, scale, row, seed, out))
    return found


def columns_of(manifest: PaperManifest, table: PaperTable, invented: bool) -> list[str]:
    """The columns that a table has at this scale."""
    return [name for name in table.columns if not invented or manifest.sets[name].world is not None]


def in_world(method: Method) -> bool:
    """Whether the invented world's base knows the form of this method."""
    return method.world and method.system in (*SEARCHING, *GIVEN)


def _trained(method: Method) -> bool:
    return method.recipe is not None


def _paper_cell(manifest: PaperManifest, table: PaperTable, scale: Scale, row: TableRow, seed: int, out: Path) -> Cell:
    method, model = manifest.methods[row.method], manifest.models[row.model]
    name, sets = f"{row.method}-{row.model}", _sets(method, scale)
    read = {model.paper: model.get}
    before: tuple[Command, ...] = ()
    asked = ["--model", model.paper, *sets]
    if method.recipe is not None:
        folder = out / "runs" / f"{name}-seed{seed}"
        words = ["train", str(RECIPES / method.recipe), *_set(f"model.path={model.paper}", f"run.seed={seed}"), *sets]
        files = {path: manifest.files[path] for path in _files_of(method.recipe)}
        before = (Command((*words, "--out", str(folder)), folder, _absent(read | files)),)
        asked, read = ["--best", str(folder)], {}
    elif method.baseline is not None:
        asked += ["--baseline", method.baseline]
    evaluations = {}
    for column in table.columns:
        questions = manifest.sets[column]
        folder = out / "evaluations" / f"{name}-{column}-seed{seed}"
        words = ["eval", *asked, "--questions", questions.paper, *_noise(questions.noise), *scale.flags_of_eval()]
        words += ["--out", str(folder)]
        evaluations[column] = Command(tuple(words), folder, _absent(read | {questions.paper: questions.get}))
    return Cell(row, seed, before, evaluations)


def _files_of(recipe: str) -> list[str]:
    """The questions and the index that a recipe names."""
    found = load_recipe(RECIPES / recipe)
    paths = [found.data and found.data.train, found.data and found.data.dev, found.retrieval and found.retrieval.index]
    return [path for path in paths if path]


def _world_cell(manifest: PaperManifest, table: PaperTable, scale: Scale, row: TableRow, seed: int, out: Path) -> Cell:
    method, world = manifest.methods[row.method], out / "world"
    assert method.system is not None  # in_world
    prompt = world / f"{method.system}.txt"
    base = [Command(tuple(words), Path(words[words.index("--out") + 1])) for words in world_stages(world)]
    name = f"{row.method}-seed{seed}"
    recipe = [
        str(RECIPE),
        *_set(*world_paths(world, method.system), f"system.template={prompt}"),
        *_sets(method, scale),
    ]
    run = out / "runs" / name
    folder = out / "evaluations" / name
    if _trained(method):
        base.append(Command(("train", *recipe, *_set(f"run.seed={seed}"), "--out", str(run)), run))
        words = ["eval", "--best", str(run)]
    else:
        words = ["eval", *recipe]
    evaluations = {}
    for column in columns_of(manifest, table, True):
        noise = manifest.sets[column].noise
        place = folder.with_name(f"{name}-noise{noise}") if noise else folder
        asked = (*words, *_noise(noise), *scale.flags_of_eval(), "--out", str(place))
        evaluations[column] = Command(asked, place)
    return Cell(row, seed, tuple(base), evaluations)


def _noise(passages: int) -> list[str]:
    return ["--noise", str(passages)] if passages else []


def write_prompts(manifest: PaperManifest, world: Path) -> None:
    """The invented world's prompt of each system that the manifest's methods have there."""
    world.mkdir(parents=True, exist_ok=True)
    for method in manifest.methods.values():
        if in_world(method) and method.system is not None:
            atomic_write_text(world / f"{method.system}.txt", template(method.system))


def _sets(method: Method, scale: Scale) -> list[str]:
    """The method's system and options, its overrides and the scale's, as flags."""
    texts = [] if method.system is None else [f"system.name={method.system}"]
    texts += [f"system.options.{name}={_toml(value)}" for name, value in method.options.items()]
    return _set(*texts, *method.overrides, *scale.overrides)


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _set(*texts: str) -> list[str]:
    return [word for text in texts for word in ("--set", text)]


def _absent(read: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((path, get) for path, get in read.items() if not Path(path).exists())
