"""`thresher reproduce`: run what a paper's tables need, in order, and write them beside the printed ones.

    out/world/ tunings/ runs/          of the commands, each shown and run; what is finished is not done again
    out/evidence/ evaluations/
    out/commands/                      which command made what
    out/eviomni-T1.md, eviomni-T1.json a table each, written anew after every cell
    out/eviomni-F4.html                a figure: its rows' trainings over each other

Killed at any moment, the same command goes on. Given again while it runs, the two share what there is to do: a cell for
which another process makes something is put off until that is there. A cell whose data or weights are absent says what
to put where, one whose command is refused says why, and the others run.
"""

import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thresher.common import console
from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text
from thresher.engine.reproduction.chains import cells_of
from thresher.engine.reproduction.commands import Cell, Command, Scale, columns_of, prompt_name, rows_in_world
from thresher.engine.reproduction.manifest import PaperManifest, PaperTable, read_manifest
from thresher.engine.reproduction.records import check_folder, locked
from thresher.engine.reproduction.tables import markdown, read_overrides, results_of
from thresher.engine.reproduction.world_prompts import write_prompts

WAIT = 5.0  # seconds until it is asked again whether another process has finished


def reproduce(
    paper: str, tables: Sequence[str], scale: Scale, out: Path, run_command: Callable[[list[str]], None]
) -> dict[str, Any]:
    """Run the tables (all of them where none is named) at a scale; returns what their JSON files hold, by
    name. `run_command` runs a command of `thresher` from its words. UserError at the end where it refused any."""
    manifest = read_manifest(paper)
    chosen = choose_tables(manifest, tables, scale.invented)
    _check_prompts(manifest, chosen, scale)
    out.mkdir(parents=True, exist_ok=True)
    cells_by_table = {name: cells_of(manifest, table, scale, out) for name, table in chosen.items()}
    every = [cell for cells in cells_by_table.values() for cell in cells]
    check_folder(every, out)
    if scale.invented:
        write_prompts(out / "world")
    _say_unread(every, scale)
    _say_lacking(every)
    runner = _Runner(scale, out, run_command)
    left = [(name, number, cell) for name, cells in cells_by_table.items() for number, cell in enumerate(cells, 1)]
    while left:
        put_off = []
        for name, number, cell in left:
            cells = cells_by_table[name]
            title = f"{name}, {number} of {len(cells)}: {manifest.label(cell.row)}, seed {cell.seed}"
            if not runner.run_cell(title, cell):
                put_off.append((name, number, cell))
                continue
            _write_table(manifest, name, scale, cells, out, runner.refused)
        if len(put_off) == len(left):
            time.sleep(WAIT)
        left = put_off
    found = {name: _write_table(manifest, name, scale, cells_by_table[name], out, runner.refused) for name in chosen}
    for name, table in chosen.items():
        if table.curves:
            _write_figure(manifest, table, cells_by_table[name], out / f"{paper}-{name}.html")
        console.console.print(markdown(found[name]), markup=False, soft_wrap=True)
    runner.check()
    return found


def _check_prompts(manifest: PaperManifest, tables: Mapping[str, PaperTable], scale: Scale) -> None:
    """UserError for a folder of prompts that nothing would read, or a file in it."""
    if scale.prompts is None:
        return
    if scale.invented:
        raise UserError("--prompts: the invented world's base knows its own short prompts; give it with --scale paper")
    rows = [row for table in tables.values() for row in table.rows]
    methods = [manifest.methods[name] for row in rows for name in (row.method, manifest.trains(row))]
    names = sorted({name for method in methods if (name := prompt_name(method)) is not None})
    files = sorted(scale.prompts.glob("*.txt"))
    if not files or (other := next((file for file in files if file.stem not in names), None)) is not None:
        where = f"{other}: nothing of these tables asks in it" if files else f"{scale.prompts}: holds no prompt"
        raise UserError(f"{where}; name a file after whose prompt it is, such as {', '.join(names)}, with .txt behind")


def _write_table(
    manifest: PaperManifest,
    name: str,
    scale: Scale,
    cells: Sequence[Cell],
    out: Path,
    refused: Mapping[Command, str],
) -> dict[str, Any]:
    """Into the folder `out`, with all that is finished; returns what its JSON file holds."""
    found = results_of(manifest, manifest.tables[name], scale, cells, refused)
    atomic_write_text(out / f"{manifest.name}-{name}.md", markdown(found))
    atomic_write_text(out / f"{manifest.name}-{name}.json", json.dumps(found, indent=2) + "\n")
    return found


def _write_figure(manifest: PaperManifest, table: PaperTable, cells: Sequence[Cell], page: Path) -> None:
    """The trainings of a table's rows over each other, seeds as one."""
    from thresher.engine.reporting.comparison import write_curves  # matplotlib takes a second

    groups: dict[str, list[str | Path]] = {}
    for cell in cells:
        folder = cell.training
        if folder is not None and (folder / "metrics.jsonl").is_file():
            groups.setdefault(manifest.label(cell.row), []).append(folder)
    write_curves(f"{manifest.title}: {table.caption}", groups, page, table.curves)
    console.console.print(f"reproduce: curves in {page}", markup=False, soft_wrap=True)


def choose_tables(manifest: PaperManifest, names: Sequence[str], invented: bool) -> dict[str, PaperTable]:
    """All that the scale has where none is named. UserError for a name that the manifest has not, or not there."""
    named = manifest.named(names)
    there = {
        name: table
        for name, table in named.items()
        if (columns_of(manifest, table, invented) or not table.columns)
        and (not invented or rows_in_world(manifest, table))
    }
    if absent := [name for name in names if name not in there]:
        raise UserError(
            f"reproduce: {absent[0]} has none of its question sets or of its rows in the invented world; "
            "--scale paper has"
        )
    return there


def _say_unread(cells: Sequence[Cell], scale: Scale) -> None:
    read = read_overrides(cells, scale)
    for text in dict.fromkeys(scale.overrides):
        if text not in read:
            console.console.print(f"reproduce: nothing that these tables run reads --set {text}", markup=False)


def _say_lacking(cells: Sequence[Cell]) -> None:
    lacking = {path: get for cell in cells for path, get in cell.lacking().items()}
    if lacking:
        console.console.print("reproduce: these are absent, and what reads them is left out:", soft_wrap=True)
    for path, get in lacking.items():
        console.console.print(f"  {path}: {get}", markup=False, soft_wrap=True)


@dataclass(frozen=True, slots=True)
class _Runner:
    """Runs the commands of cells, and notes which were refused, and why."""

    scale: Scale
    out: Path
    run_command: Callable[[list[str]], None]
    refused: dict[Command, str] = field(default_factory=dict)

    def run_cell(self, title: str, cell: Cell) -> bool:
        """Run the commands of a cell; false where another process makes what one of them would. One that is refused is
        noted, and what begins at what it makes is not run."""
        for command in cell.possible():
            if command.finished or any(one in self.refused for one in (command, *cell.leading_to(command))):
                continue
            with locked(command, self.out) as mine:
                if not mine:
                    return False
                if not command.finished:
                    self._run(title, command)
        return True

    def _run(self, title: str, command: Command) -> None:
        words = command.to_run(self.scale)
        console.console.print(title, soft_wrap=True)
        console.console.print(f"$ thresher {shlex.join(words)}", style="bold", markup=False, soft_wrap=True)
        command.folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            self.run_command(words)
        except (UserError, OSError, MemoryError, RuntimeError) as error:  # RuntimeError: a GPU's memory or CUDA
            why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            self.refused[command] = why
            console.console.print(f"reproduce: left out, for {why}", markup=False, soft_wrap=True)

    def check(self) -> None:
        """UserError where a command was refused."""
        if not self.refused:
            return
        (words, why), *others = [(shlex.join(command.words[:2]), why) for command, why in self.refused.items()]
        more = f", and {len(others)} more commands" if others else ""
        raise UserError(
            f"reproduce: thresher {words} .. was refused ({why}){more}; mend that, and give this command again"
        )
