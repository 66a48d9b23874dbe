"""The manifest of a paper, papers/NAME.toml: which tables it has, what their rows and columns are, what was printed.

    title = "..."
    like            the name of a manifest whose models, files, sets, tunings and methods are this one's too, but for
                    what is said of them here
    world_base      the base of all rows in the invented world (engine/synthetic/shared_base.py); absent: "shared"
    [models.NAME]   paper: its folder at paper scale, get: how to get it, chat: prompts go through its chat template;
                    served: `paper` is what a server calls it, whose address is given by --answer-url; overrides: of
                    its evaluations
    [files]         PATH = "how to make it": what the recipes at paper scale read besides
    [sets.NAME]     a column: label; paper: the file of questions at paper scale, get: how to make it; relations: how
                    many its questions have in the invented world (absent: no such column there); noise: how many
                    irrelevant passages are added to each
    [tunings.NAME]  a supervised fine-tuning that rows share: recipe (at paper scale), overrides (at both scales), and
                    either format (sft.format: of questions with their answers) or kind (of thresher data sft), which is
                    of a teacher's transcripts that answer right (teacher: their file at paper scale, in the invented
                    world what its base answers to the training questions) or of questions (questions: their file at
                    paper scale, in the invented world the training questions; options: further flags of data sft)
    [methods.NAME]  a row's chain: label; system or baseline, options, or flags of thresher extract that name a refiner,
                    with encoder, the model that it is of where that is not the row's; and of these stages those that
                    it has, in order
                    warmup      a tuning, of which every seed has its own
                    recipe      of a training at paper scale; trained_as: a method whose warm-up and training it
                                shares instead
                    extract     true: thresher extract leaves evidence of every column's passages; evidence_tokens: of
                                it, at most; extract_overrides: of this command alone, at paper scale; agent: a model
                                that searches, and sees evidence alone
                    generator   a tuning, one for all seeds: who answers, from the evidence, or as `baseline` asks
                    What is left of the chain answers itself. overrides: of its training, its extraction, and the
                    evaluation of what is no run; not of tunings; world: false where the invented world has no such
                    thing; world_prompt: of a system that it asks in another's form
    [tables.NAME]   caption, measures (of a question, as thresher eval names them, or tables.read_evidence), columns
                    (names of sets), average (whether a last column has their mean), against (the label of the row that
                    others are tested against), only (a measure that is 1 of the questions that count), alone (of two
                    rows: a question counts for a row by what it has more than in the other), curves (names of charts
                    of a run's report, of all rows' trainings over each other), and
                    rows: {method, model, label, printed = {measure = [a number a column, then the average]}}
                    same_as: a table of the manifest of `like`, of which what is not said here is taken
    [left_out]      WHAT = "why": rows and tables of the paper that have no cell here

Deliberately absent: commands. commands.py makes them.
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from thresher.common.errors import UserError
from thresher.engine.config.tables import from_dict
from thresher.engine.synthetic.shared_base import BASES

INHERITED = ("models", "files", "sets", "tunings", "methods")  # of a manifest with those that are like it
PAPERS = Path(str(files("thresher.engine.reproduction"))) / "papers"


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """A model at paper scale, a folder or a server's, and how it is got."""

    paper: str
    get: str
    chat: bool = False
    served: bool = False
    overrides: tuple[str, ...] = ()


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
    """What is trained or run; see the top of this file. `options` are the system's or the baseline's."""

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
    extract_overrides: tuple[str, ...] = ()
    agent: str | None = None
    generator: str | None = None
    overrides: tuple[str, ...] = ()
    world: bool = True
    world_prompt: str | None = None


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One row; printed: measure -> the paper's numbers, a column each, then the average where the table has one; "-"
    where it has none."""

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


@dataclass(frozen=True, kw_only=True)
class PaperManifest:
    """A whole paper. name: of its file."""

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
        """The method whose warm-up and training the row's method has, its own or another's."""
        return self.methods[row.method].trained_as or row.method

    def named(self, tables: Sequence[str]) -> dict[str, PaperTable]:
        """These tables, or all of them where none is named. UserError for a name that is none."""
        if unknown := [name for name in tables if name not in self.tables]:
            raise UserError(
                f"reproduce: {self.name} has no table {unknown[0]!r} here; choose of {', '.join(self.tables)}"
            )
        return {name: self.tables[name] for name in tables or self.tables}


def paper_names() -> list[str]:
    return sorted(path.stem for path in PAPERS.glob("*.toml"))


def read_manifest(name: str) -> PaperManifest:
    """The manifest of that name. UserError for another, naming those that there are."""
    if name not in paper_names():
        raise UserError(f"reproduce: no paper {name!r}; choose one of {', '.join(paper_names())}")
    return make_manifest(name, _read(name))


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


def make_manifest(name: str, found: Mapping[str, Any]) -> PaperManifest:
    """A manifest from its parsed file. UserError where it contradicts itself."""
    tables = {key: _table(key, value) for key, value in found["tables"].items()}
    manifest = PaperManifest(
        name=name,
        title=found["title"],
        models={key: from_dict(PublishedModel, value, f"[models.{key}]") for key, value in found["models"].items()},
        sets={key: from_dict(Column, value, f"[sets.{key}]") for key, value in found["sets"].items()},
        tunings={key: from_dict(Tuning, value, f"[tunings.{key}]") for key, value in found.get("tunings", {}).items()},
        methods={key: from_dict(Method, value, f"[methods.{key}]") for key, value in found["methods"].items()},
        tables=tables,
        files=found.get("files", {}),
        left_out=found.get("left_out", {}),
        world_base=found.get("world_base", "shared"),
    )
    if manifest.world_base not in BASES:
        raise UserError(f"world_base: expected one of {', '.join(BASES)}, got {manifest.world_base!r}")
    for key, method in manifest.methods.items():
        _check_method(manifest, key, method)
    for key, table in tables.items():
        _check(manifest, key, table)
    return manifest


def _table(key: str, value: Mapping[str, Any]) -> PaperTable:
    table = from_dict(PaperTable, {name: item for name, item in value.items() if name != "rows"}, f"[tables.{key}]")
    rows = tuple(from_dict(TableRow, row, f"[tables.{key}], a row") for row in value["rows"])
    return replace(table, rows=rows)


def _check_method(manifest: PaperManifest, key: str, method: Method) -> None:
    for name, known in (
        (method.warmup, manifest.tunings),
        (method.generator, manifest.tunings),
        (method.agent, manifest.models),
        (method.encoder, manifest.models),
        (method.trained_as, manifest.methods),
    ):
        if name is not None and name not in known:
            raise UserError(f"[methods.{key}]: {name!r} is not there")
    if sum((method.system is not None, method.baseline is not None, bool(method.refiner))) != 1:
        raise UserError(f"[methods.{key}]: expected either a system or a baseline or a refiner")


def _check(manifest: PaperManifest, key: str, table: PaperTable) -> None:
    wanted = len(table.columns) + table.average
    if table.against is not None and table.against not in [manifest.label(row) for row in table.rows]:
        raise UserError(f"[tables.{key}]: against: no row is labelled {table.against!r}")
    if table.alone and len(table.rows) != 2:
        raise UserError(f"[tables.{key}]: alone: expected two rows, got {len(table.rows)}")
    for column in table.columns:
        if column not in manifest.sets:
            raise UserError(f"[tables.{key}]: column {column!r} is no set")
    for row in table.rows:
        if row.method not in manifest.methods or row.model not in manifest.models:
            raise UserError(
                f"[tables.{key}]: a row of method {row.method!r} and model {row.model!r}, which are not both there"
            )
        for measure, numbers in row.printed.items():
            if measure not in table.measures or len(numbers) != wanted:
                raise UserError(
                    f"[tables.{key}]: {manifest.label(row)}: {measure} has {len(numbers)} numbers of {wanted}"
                )
