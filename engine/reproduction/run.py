"""`thresher reproduce`: run what a paper's tables need, in order, and write them beside the printed ones.

    out/world/ runs/ evaluations/      of the commands, each shown and run; what is finished is not done again
    out/T1.md, T1.json                 a table each, written anew after every cell
    out/F4.html                        a figure: its rows' trainings over each other

Killed at any moment, the same command goes on. A cell whose data or weights are absent says what to put where, one
whose command is refused says why, and the others run.
"""

import json
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from thresher.engine import console
from thresher.engine.reproduction.commands import Cell, Command, Scale
from thresher.engine.reproduction.manifest import PaperManifest, PaperTable, read_manifest
from thresher.engine.reproduction.scales import cells_of, write_prompts
from thresher.engine.reproduction.tables import markdown, results_of
from thresher.policy.files import atomic_write_text
from thresher.rewards.errors import UserError


def reproduce(
    paper: str, tables: Sequence[str], scale: Scale, out: Path, run_command: Callable[[list[str]], None]
) -> dict[str, Any]:
    """Run the tables (all of them where none is named) at a scale; returns what their JSON files hold, by
    name. `run_command` runs a command of `thresher` from its words. UserError at the end where it refused any."""
    manifest = read_manifest(paper)
    chosen = choose_tables(manifest, tables)
    out.mkdir(parents=True, exist_ok=True)
    if scale.invented:
        write_prompts(out / "world")
    cells_by_table = {name: cells_of(manifest, table, scale, out) for name, table in chosen.items()}
    _say_lacking([cell for cells in cells_by_table.values() for cell in cells])
    found: dict[str, Any] = {}
    refused: dict[Command, str] = {}
    for name, table in chosen.items():
        cells = cells_by_table[name]
        for number, cell in enumerate(cells, 1):
            title = f"{name}, {number} of {len(cells)}: {manifest.label(cell.row)}, seed {cell.seed}"
            _run_cell(title, cell, scale, run_command, refused)
            found[name] = results_of(manifest, table, scale, cells)
            atomic_write_text(out / f"{name}.md", markdown(found[name]))
            atomic_write_text(out / f"{name}.json", json.dumps(found[name], indent=2) + "\n")
        if table.curves:
            _write_figure(manifest, table, cells, out / f"{name}.html")
        console.console.print(markdown(found[name]), markup=False)
    if refused:
        (words, why), *others = [(shlex.join(command.words[:2]), why) for command, why in refused.items()]
        more = f", and {len(others)} more commands" if others else ""
        raise UserError(
            f"reproduce: thresher {words} .. was refused ({why}){more}; mend that, and give this command again"
        )
    return found


def _write_figure(manifest: PaperManifest, table: PaperTable, cells: Sequence[Cell], out: Path) -> None:
    """The trainings of a table's rows over each other, seeds as one."""
    from thresher.engine.reporting.comparison import write_curves  # matplotlib takes a second

    groups: dict[str, list[str | Path]] = {}
    for cell in cells:
        folder = cell.training
        if folder is not None and (folder / "metrics.jsonl").is_file():
            groups.setdefault(manifest.label(cell.row), []).append(folder)
    write_curves(f"{manifest.title}: {table.caption}", groups, out, table.curves)
    console.console.print(f"reproduce: curves in {out}", markup=False, soft_wrap=True)


def choose_tables(manifest: PaperManifest, names: Sequence[str]) -> dict[str, PaperTable]:
    """UserError for a table that the manifest has not."""
    if unknown := [name for name in names if name not in manifest.tables]:
        there = ", ".join(manifest.tables)
        raise UserError(f"reproduce: {manifest.name} has no table {unknown[0]!r} here; choose of {there}")
    return {name: manifest.tables[name] for name in names or manifest.tables}


def _say_lacking(cells: Sequence[Cell]) -> None:
    lacking = {path: get for cell in cells for path, get in cell.lacking().items()}
    if lacking:
        console.console.print("reproduce: these are absent, and what reads them is left out:", soft_wrap=True)
    for path, get in lacking.items():
        console.console.print(f"  {path}: {get}", markup=False, soft_wrap=True)


def _run_cell(
    title: str, cell: Cell, scale: Scale, run_command: Callable[[list[str]], None], refused: dict[Command, str]
) -> None:
    """The commands of a cell. One that is refused is noted, and where others begin at what it makes it is the last."""
    console.console.print(title, soft_wrap=True)
    for command in cell.possible():
        if command.finished:
            continue
        if command in refused:
            if command in cell.before:
                return
            continue
        words = command.to_run(scale.allow_keys)
        console.console.print(f"$ thresher {shlex.join(words)}", style="bold", markup=False, soft_wrap=True)
        command.folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            run_command(words)
        except UserError as error:
            refused[command] = str(error)
            console.console.print(f"reproduce: left out, for {error}", markup=False, soft_wrap=True)
            if command in cell.before:
                return
