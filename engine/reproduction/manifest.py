"""The manifest of a paper, papers/NAME.toml: which tables it has, what their rows and columns are, what was printed.

    title = "..."
    [models.NAME]   paper: its folder at paper scale, get: how to get it
    [files]         PATH = "how to make it": what the recipes at paper scale read besides
    [sets.NAME]     a column: label; paper: the file of questions at paper scale, get: how to make it; world: how many
                    relations its questions have in the invented world (absent: no such column there); noise: how many
                    irrelevant passages are added to each
    [methods.NAME]  what a row trains or runs: label, system or baseline, options, recipe (of its training at paper
                    scale; absent: nothing is trained), overrides, world (false: the invented world has no such thing)
    [tables.NAME]   caption, measures (keys of thresher eval's metrics.json), columns (names of sets), average (whether
                    a last column has their mean), against (the label of the row that others are tested against), and
                    rows: {method, model, label, printed = {measure = [a number a column, then the average]}}
    [left_out]      WHAT = "why": rows and tables of the paper that have no cell here

Deliberately absent: commands. commands.py makes them.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from thresher.engine.config.tables import from_dict
from thresher.rewards.errors import UserError

PAPERS = Path(str(files("thresher.engine.reproduction"))) / "papers"


@dataclass(frozen=True, kw_only=True)
class PublishedModel:
    """A model folder at paper scale, and how it is got."""

    paper: str
    get: str


@dataclass(frozen=True, kw_only=True)
class Column:
    """A set of questions; see the top of this file."""

    label: str
    paper: str
    get: str
    world: int | None = None
    noise: int = 0


@dataclass(frozen=True, kw_only=True)
class Method:
    """What is trained or run; see the top of this file. `options` are the system's or the baseline's."""

    label: str
    system: str | None = None
    baseline: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    recipe: str | None = None
    overrides: tuple[str, ...] = ()
    world: bool = True


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One row; printed: measure -> the paper's numbers, a column each, then the average where the table has one."""

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


@dataclass(frozen=True, kw_only=True)
class PaperManifest:
    """A whole paper. name: of its file."""

    name: str
    title: str
    models: Mapping[str, PublishedModel]
    sets: Mapping[str, Column]
    methods: Mapping[str, Method]
    tables: Mapping[str, PaperTable]
    files: Mapping[str, str]
    left_out: Mapping[str, str]

    def label(self, row: TableRow) -> str:
        return row.label or self.methods[row.method].label


def paper_names() -> list[str]:
    return sorted(path.stem for path in PAPERS.glob("*.toml"))


def read_manifest(name: str) -> PaperManifest:
    """The manifest of that name. UserError for another, naming those that there are."""
    if name not in paper_names():
        raise UserError(f"reproduce: no paper {name!r}; choose one of {', '.join(paper_names())}")
    path = PAPERS / f"{name}.toml"
    with path.open("rb") as file:
        return make_manifest(name, tomllib.load(file))


def make_manifest(name: str, found: Mapping[str, Any]) -> PaperManifest:
    """A manifest from its parsed file. UserError where it contradicts itself."""
    tables = {key: _table(key, value) for key, value in found["tables"].items()}
    manifest = PaperManifest(
        name=name,
        title=found["title"],
        models={key: from_dict(PublishedModel, value, f"[models.{key}]") for key, value in found["models"].items()},
        sets={key: from_dict(Column, value, f"[sets.{key}]") for key, value in found["sets"].items()},
        methods={key: from_dict(Method, value, f"[methods.{key}]") for key, value in found["methods"].items()},
        tables=tables,
        files=found.get("files", {}),
        left_out=found.get("left_out", {}),
    )
    for key, table in tables.items():
        _check(manifest, key, table)
    return manifest


def _table(key: str, value: Mapping[str, Any]) -> PaperTable:
    table = from_dict(PaperTable, {name: item for name, item in value.items() if name != "rows"}, f"[tables.{key}]")
    rows = tuple(from_dict(TableRow, row, f"[tables.{key}], a row") for row in value["rows"])
    return replace(table, rows=rows)


def _check(manifest: PaperManifest, key: str, table: PaperTable) -> None:
    wanted = len(table.columns) + table.average
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
