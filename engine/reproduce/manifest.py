"""The manifest of a paper, papers/NAME.toml: its tables, their rows and columns, and the printed numbers.

title = "..."
like            name of a manifest; models, files, sets, tunings and methods are inherited from it
world_base      base model of all rows in the invented world (engine/world/stages.py); absent: "shared"
[models.NAME]   paper: its folder at paper scale; get: how to get it; chat: prompts go through its chat template;
                served: `paper` is the name of a server's model, whose address is given by --answer-url; overrides: for
                its evaluations; prompt: for a released checkpoint, the file in [files] with its training prompt, which
                every row that prompts it uses
[files]         PATH = "how to make it": other files that recipes at paper scale read
[sets.NAME]     a column: label; paper: file of questions at paper scale; get: how to make it; relations: of its
                questions in the invented world (absent: no such column there); noise: number of irrelevant passages
[tunings.NAME]  a supervised fine-tuning shared by rows: recipe (at paper scale), overrides (at both scales), and
                either format (sft.format: questions with answers) or kind (of thresher data sft), with teacher
                (file of its transcripts at paper scale; in the invented world, the base's answers to the training
                questions) or questions (their file at paper scale, in the invented world the training questions;
                options: further flags of data sft)
[methods.NAME]  a row's chain: label; system or baseline, options, or flags of thresher extract that name a refiner,
                with encoder, its model if it is not the row's; and any of these stages, in order:
                warmup      a tuning per seed
                recipe      of a training at paper scale; trained_as: a method whose warm-up and training are used
                            instead
                extract     true: thresher extract writes evidence from every column's passages; evidence_tokens:
                            maximum length of the evidence; agent: a model that searches and sees only the evidence
                generator   a tuning, one for all seeds, that answers from the evidence or as `baseline`
                Without a generator, the last model of the chain answers. overrides: of its training, its extraction,
                and of evaluations without a run; not of tunings; world: false if the invented world has no such
                method; world_prompt: the prompt of another system to use in the world
[tables.NAME]   caption, measures (per question, as in thresher eval or tables.read_evidence, or parts of the system's
                reward), columns (names of sets), average (whether a last column has their mean), against (label of
                the row that other rows are tested against), only (count only questions for which this measure is
                1), alone (for two rows: a question counts by the amount that its value exceeds the other row's),
                curves (charts of reports/charts.py, with one curve for each row's trainings), bars (of the
                measures: drawn in groups, one for each column, with one bar for each row), rows: {method, model,
                label, printed = {measure = [one number per column, then the average]}}; same_as: a table of the
                manifest of `like` that supplies all other keys
[left_out]      WHAT = "why": rows and tables of the paper that are not reproduced
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeVar

from thresher.common.errors import UserError
from thresher.engine.assemble import read_run_recipe
from thresher.engine.config.tables import from_dict
from thresher.engine.scoring.endpoint import key_at
from thresher.engine.systems import load_system

INHERITED = ("models", "files", "sets", "tunings", "methods")  # sections inherited from the manifest `like`
T = TypeVar("T")
PAPERS = Path(str(files("thresher.engine.reproduce"))) / "papers"


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """A model at paper scale, a folder or a server's model; see the top of this file."""

    paper: str
    get: str
    chat: bool = False
    served: bool = False
    overrides: tuple[str, ...] = ()
    prompt: str | None = None


@dataclass(frozen=True, kw_only=True)
class Column:
    """A set of questions; see the top of this file."""

    label: str
    paper: str
    get: str
    relations: int | None = None
    noise: int = 0


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """A supervised fine-tuning; see the top of this file."""

    recipe: str
    overrides: tuple[str, ...] = ()
    format: Literal["qa", "closed-book"] | None = None
    kind: Literal["reason-extract", "extract", "filco", "reasoning"] | None = None
    teacher: str | None = None
    questions: str | None = None
    options: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method to train or to run; see the top of this file. options: of the system or the baseline."""

    label: str
    system: str | None = None
    baseline: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    refiner: tuple[str, ...] = ()
    encoder: str | None = None
    warmup: str | None = None
    recipe: str | None = None
    trained_as: str | None = None
    extract: bool = False
    evidence_tokens: int | None = None
    agent: str | None = None
    generator: str | None = None
    overrides: tuple[str, ...] = ()
    world: bool = True
    world_prompt: str | None = None


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One row. printed: measure -> the paper's numbers, one per column, then the average if the table has one; "-" for
    none."""

    method: str
    model: str
    label: str | None = None
    printed: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """One table; see the top of this file."""

    caption: str
    columns: tuple[str, ...]
    rows: tuple[TableRow, ...] = ()
    measures: tuple[str, ...] = ("em",)
    average: bool = False
    against: str | None = None
    only: str | None = None
    alone: bool = False
    curves: tuple[str, ...] = ()
    bars: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PaperManifest:
    """A whole paper. name: the stem of its file."""

    name: str
    title: str
    models: Mapping[str, PublishedModel]
    sets: Mapping[str, Column]
    tunings: Mapping[str, Tuning]
    methods: Mapping[str, Method]
    tables: Mapping[str, PaperTable]
    files: Mapping[str, str]
    left_out: Mapping[str, str]
    world_base: str = "shared"

    def label(self, row: TableRow) -> str:
        return row.label or self.methods[row.method].label

    def trains(self, row: TableRow) -> str:
        """Return the method whose warm-up and training this row uses, its own or the one in `trained_as`."""
        return self.methods[row.method].trained_as or row.method

    def named(self, tables: Sequence[str]) -> dict[str, PaperTable]:
        """Return these tables, or all if `tables` is empty. Raise UserError for an unknown name."""
        if unknown := [name for name in tables if name not in self.tables]:
            raise UserError(
                f"reproduce: {self.name} has no table {unknown[0]!r} here; choose from {', '.join(self.tables)}"
            )
        return {name: self.tables[name] for name in tables or self.tables}


def paper_names() -> list[str]:
    return sorted(path.stem for path in PAPERS.glob("*.toml"))


def read_manifest(name: str) -> PaperManifest:
    """Return the manifest with this name. Raise UserError for an unknown name, with a list of the known ones."""
    if name not in paper_names():
        raise UserError(f"reproduce: no paper {name!r}; choose one of {', '.join(paper_names())}")
    found = _read(name)

    def parsed(kind: type[T], section: str) -> dict[str, T]:
        return {key: from_dict(kind, value, f"[{section}.{key}]") for key, value in found.get(section, {}).items()}

    return PaperManifest(
        name=name,
        title=found["title"],
        models=parsed(PublishedModel, "models"),
        sets=parsed(Column, "sets"),
        tunings=parsed(Tuning, "tunings"),
        methods=parsed(Method, "methods"),
        tables={key: _table(key, value) for key, value in found["tables"].items()},
        files=found.get("files", {}),
        left_out=found.get("left_out", {}),
        world_base=found.get("world_base", "shared"),
    )


def _read(name: str) -> dict[str, Any]:
    with (PAPERS / f"{name}.toml").open("rb") as file:
        found = tomllib.load(file)
    if "like" not in found:
        return found
    other = _read(found["like"])
    for key in INHERITED:
        own = found.get(key, {})
        changed = {
            name: other[key][name] | value for name, value in own.items() if isinstance(other[key].get(name), dict)
        }
        found[key] = other[key] | own | changed
    for table in found["tables"].values():
        if (name := table.pop("same_as", None)) is not None:
            table |= {key: value for key, value in other["tables"][name].items() if key not in table}
    return found


def _table(key: str, value: Mapping[str, Any]) -> PaperTable:
    table = from_dict(PaperTable, {name: item for name, item in value.items() if name != "rows"}, f"[tables.{key}]")
    rows = tuple(from_dict(TableRow, row, f"[tables.{key}], a row") for row in value["rows"])
    return replace(table, rows=rows)


def switches_of(method: Method) -> list[str]:
    """Return the method's system and options, as overrides."""
    named = [] if method.system is None else [f"system.name={method.system}"]
    plain = {name: str(value).lower() if isinstance(value, bool) else value for name, value in method.options.items()}
    return [*named, *(f"system.options.{name}={value}" for name, value in plain.items())]


@lru_cache(maxsize=1024)
def files_of(recipe: str, overrides: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the paths that a recipe reads with these overrides (a tuple, so that it can be cached).

    These are the model, the questions, the index, and the entailment classifier if the system uses one; none if
    overrides conflict, which the command itself reports.
    """
    try:
        found = read_run_recipe(recipe, list(overrides))
    except UserError:
        return ()
    asked = found.system is not None and load_system(found.system.name, found.system.options).claims is not None
    paths = (
        found.model.path,
        found.data and found.data.train,
        found.data and found.data.dev,
        found.sft and found.sft.data,
        found.retrieval and not found.retrieval.url and found.retrieval.index,
        asked and found.judge and found.judge.entailment,
    )
    return tuple(str(path) for path in paths if path)


FLAGS = {  # command -> flags for the model's name, address, key
    "eval": ("--answer-model", "--answer-url", "--answer-key-env"),
    "extract": ("--agent-name", "--agent-url", "--key-env"),
}
Pair = tuple[str, str]  # a model's name in the manifest, and the value given for it


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model on a server: its address, its name there, and the environment variable with the key."""

    url: str
    model: str
    key_env: str | None = None

    def flags(self, words: Sequence[str]) -> list[str]:
        """Return the additional flags for a command, if the command uses this model."""
        if words[0] not in FLAGS:
            return []
        name, url, key = FLAGS[words[0]]
        if (name, self.model) not in pairwise(words):
            return []
        return [url, self.url, *([] if self.key_env is None else [key, self.key_env])]


def servers_of(
    manifest: PaperManifest, urls: Sequence[Pair], names: Sequence[Pair], allow_keys: Sequence[str]
) -> Mapping[str, ServedModel]:
    """Return the servers, by the names that their models have in the manifest.

    urls: (model in the manifest, address); names: (model in the manifest, its name at the server, if different);
    allow_keys: VARIABLE@HOST with the key for that host. Raise UserError for a name that is not in the manifest or has
    no address, and for two models with one name.
    """
    served = [model.paper for model in manifest.models.values() if model.served]
    for flag, given in (("--answer-url", urls), ("--answer-model", names)):
        for name, value in given:
            if name not in served:
                there = f"choose from {', '.join(served)}" if served else "it has none; leave the flag out"
                raise UserError(f"reproduce: {flag} {name}={value}: {manifest.name} has no such model here; {there}")
    if without := [name for name, _ in names if name not in dict(urls)]:
        raise UserError(f"reproduce: --answer-model {without[0]}=..: give --answer-url {without[0]}=URL with it")
    found: dict[str, ServedModel] = {}
    for name, url in urls:
        variables = (allowed.rpartition("@")[0] for allowed in allow_keys)
        key = next((variable for variable in variables if key_at(variable, url) in allow_keys), None)
        called = dict(names).get(name, name)
        for other, server in found.items():
            if server.model == called and other != name:
                raise UserError(
                    f"reproduce: --answer-model: {other} and {name} are both called {called}; run them separately"
                )
        found[name] = ServedModel(url, called, key)
    return found
