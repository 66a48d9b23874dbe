"""`thresher reproduce`: run the commands of a paper's tables, in order, and write them next to the printed ones.

    out/world/ tunings/ runs/            outputs of the commands; each command is shown and run, unless it is finished
    out/evidence/ evaluations/
    out/commands/NAME/command.json       the command of an output, and the lock of the process that is running it:
        {"words": ["train", "recipes/world/recipe.toml", ..], "recipes": {"recipes/..": SHA-256 of its keys}}
    out/eviomni-T1.md, eviomni-T1.json   one table each, rewritten after every experiment
    out/eviomni-F4.html                  a figure: the training curves of its rows, overlaid, or the bars of its columns

After a kill at any moment, the same command continues; two processes share the work. Recorded words do not depend on
the spelling of --out or on where Thresher is installed. An output without a record, made by hand, is accepted.
"""

import hashlib
import itertools
import json
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from thresher.common import console
from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text, read_json_object
from thresher.common.locks import Held, lock_folder, share_work
from thresher.engine.assemble import read_run_recipe
from thresher.engine.baselines import load_baseline
from thresher.engine.episode import System, read_template
from thresher.engine.reproduce.manifest import (
    Method,
    PaperManifest,
    PaperTable,
    PublishedModel,
    read_manifest,
    switches_of,
)
from thresher.engine.reproduce.pipelines import (
    AGENT,
    Command,
    ExperimentRun,
    Scale,
    columns_of,
    experiment_runs,
    prompt_name,
    rows_in_world,
    write_prompts,
)
from thresher.engine.reproduce.tables import markdown, read_overrides, results_of
from thresher.engine.systems import load_system
from thresher.engine.world.stages import RECIPES

RECORD = "command.json"
# Keys that the commands of every row set themselves; in the world also those of its files.
OF_ROWS = ("model.path", "run.seed", "system.name", "system.template")
OF_TUNINGS = ("sft.data", "sft.format", "sft.template", "sft.transcripts")
OF_WORLD = ("data.train", "data.dev", "retrieval.index", "retrieval.passage_format")


def reproduce(
    paper: str, tables: Sequence[str], scale: Scale, out: Path, run_command: Callable[[list[str]], None]
) -> dict[str, Any]:
    """Run the tables (all if none is named) at a scale; return the contents of their JSON files, by name. run_command:
    run a command of `thresher` from its words. Raise UserError at the end if a command was refused."""
    manifest = read_manifest(paper)
    chosen = choose_tables(manifest, tables, scale.invented)
    _check_prompts(manifest, chosen, scale)
    _check_own_keys(manifest, chosen, scale)
    experiments = {name: experiment_runs(manifest, table, scale, out) for name, table in chosen.items()}
    every = [one for several in experiments.values() for one in several]
    _check_overrides(every)
    out.mkdir(parents=True, exist_ok=True)
    check_folder(every, out)
    if scale.invented:
        write_prompts(out / "world")
    _report_unread(every, scale)
    _report_lacking(every)
    refused: dict[Command, str] = {}

    def write_table(name: str) -> dict[str, Any]:
        found = results_of(manifest, manifest.tables[name], scale, experiments[name], refused)
        atomic_write_text(out / f"{paper}-{name}.md", markdown(found))
        atomic_write_text(out / f"{paper}-{name}.json", json.dumps(found, indent=2) + "\n")
        return found

    def run_one(numbered: tuple[str, int, ExperimentRun]) -> bool:
        name, number, one = numbered
        title = f"{name}, {number} of {len(experiments[name])}: {manifest.label(one.row)}, seed {one.seed}"
        if not _run(title, one, scale, out, run_command, refused):
            return False
        write_table(name)
        return True

    share_work([(name, n, one) for name, several in experiments.items() for n, one in enumerate(several, 1)], run_one)
    check_folder(every, out)
    found = {name: write_table(name) for name in chosen}
    for name, table in chosen.items():
        if table.curves:
            _write_curves(manifest, table, experiments[name], out / f"{paper}-{name}.html")
        if table.bars:
            _write_bars(manifest, table, found[name], out / f"{paper}-{name}.html")
        console.note(markdown(found[name]))
    if refused:
        (words, why), *others = [(shlex.join(command.words[:2]), why) for command, why in refused.items()]
        more = f", and {len(others)} more command{'s' * (len(others) > 1)}" if others else ""
        raise UserError(
            f"reproduce: thresher {words} .. was refused ({why}){more}; fix that, and run this command again"
        )
    return found


def _run(
    title: str,
    experiment: ExperimentRun,
    scale: Scale,
    out: Path,
    run_command: Callable[[list[str]], None],
    refused: dict[Command, str],
) -> bool:
    """Run the commands of an experiment; return False if another process is running one of them. Add a refused command
    to `refused`, with the reason, and skip the commands that read its output."""
    for command in experiment.possible():
        finished = command.finished
        check_output(command, out)  # another process may have made it since the start
        if finished or any(one in refused for one in (command, *experiment.leading_to(command))):
            continue
        with locked(command, out) as mine:
            if not mine:
                return False
            if command.finished:
                continue
            words = command.to_run(scale)
            console.note(title)
            console.note(f"$ thresher {shlex.join(words)}", style="bold")
            command.folder.parent.mkdir(parents=True, exist_ok=True)
            try:
                run_command(words)
            except (UserError, OSError, MemoryError, RuntimeError) as error:  # RuntimeError: GPU memory or CUDA
                why = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                refused[command] = why
                console.note(f"reproduce: left out: {why}")
    return True


def _check_prompts(manifest: PaperManifest, tables: Mapping[str, PaperTable], scale: Scale) -> None:
    """Raise UserError for an unused file of --prompts, and for a prompt without its system's placeholders."""
    if scale.invented:
        if scale.prompts is not None:
            raise UserError(
                "--prompts: the invented world's base knows only its own short prompts; give it with --scale paper"
            )
        return
    asked = list(_asked(manifest, tables))
    if scale.prompts is not None:
        names = sorted({name for method, model in asked if (name := prompt_name(method, model)) is not None})
        files = sorted(scale.prompts.glob("*.txt"))
        if not files or (other := next((file for file in files if file.stem not in names), None)) is not None:
            where = f"{other}: no row of these tables uses it" if files else f"{scale.prompts}: holds no prompt"
            raise UserError(
                f"{where}; name a file after the method that uses it, such as {', '.join(names)}, plus .txt"
            )
    for method, model in asked:
        for file in scale.prompt_of(method, model):
            if Path(file).is_file():
                read_template(file, passages="{passages}" in _system_of(method).template)


def _check_own_keys(manifest: PaperManifest, tables: Mapping[str, PaperTable], scale: Scale) -> None:
    """Raise UserError for an override of a key that the rows set themselves, which would make them alike."""
    rows = [row for table in tables.values() for row in table.rows]
    methods = [manifest.methods[name] for row in rows for name in (row.method, manifest.trains(row))]
    texts = [text for method in methods for text in (*switches_of(method), *method.overrides)]
    varied = [text.partition("=")[0] for text in texts if text.startswith(("system.", "data.", "grpo."))]
    own = [*OF_ROWS, *OF_TUNINGS, *varied, *(OF_WORLD if scale.invented else ())]
    for text in scale.overrides:
        key = ".".join(part.strip() for part in text.partition("=")[0].split("."))
        if any(f"{one}.".startswith(f"{key}.") for one in own):  # the key, or a table that has it
            raise UserError(
                f"--set {text}: the rows of these tables set {key} themselves; leave it out (--seeds gives their "
                "seeds, --prompts their prompts)"
            )


def _asked(manifest: PaperManifest, tables: Mapping[str, PaperTable]) -> Iterator[tuple[Method, PublishedModel]]:
    """Yield (method, model) for each prompt that these tables use. A generator is asked in the prompt of its tuning."""
    for row in (row for table in tables.values() for row in table.rows):
        method, model = manifest.methods[row.method], manifest.models[row.model]
        for one in (method, manifest.methods[manifest.trains(row)]):
            if (one.system or one.baseline) is not None and (one.generator is None or one.extract):
                yield one, model
        if method.agent is not None:
            yield AGENT, manifest.models[method.agent]


def _system_of(method: Method) -> System:
    if method.baseline is not None:
        return load_baseline(method.baseline, method.options)
    return load_system(str(method.system), method.options)


def _write_curves(manifest: PaperManifest, table: PaperTable, experiments: Sequence[ExperimentRun], page: Path) -> None:
    from thresher.engine.reports.report import write_curves  # importing matplotlib takes a second

    groups: dict[str, list[str | Path]] = {}
    for one in experiments:
        folder = one.training
        if folder is not None and (folder / "metrics.jsonl").is_file():
            groups.setdefault(manifest.label(one.row), []).append(folder)
    write_curves(f"{manifest.title}: {table.caption}", groups, page, table.curves)
    console.note(f"reproduce: curves in {page}")


def _write_bars(manifest: PaperManifest, table: PaperTable, results: Mapping[str, Any], page: Path) -> None:
    from thresher.engine.reports.report import write_bars

    def cells(row: Mapping[str, Any], measure: str) -> list[Any]:
        return [row["ours"].get(measure, {}).get(column) for column in results["columns"]]

    bars = {measure: {row["label"]: cells(row, measure) for row in results["rows"]} for measure in table.bars}
    write_bars(f"{manifest.title}: {table.caption}", list(results["columns"].values()), bars, page)
    console.note(f"reproduce: bars in {page}")


def choose_tables(manifest: PaperManifest, names: Sequence[str], invented: bool) -> dict[str, PaperTable]:
    """Return the tables with these names, or all that the scale has. Raise UserError for an unknown name."""
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


def _check_overrides(experiments: Sequence[ExperimentRun]) -> None:
    """Raise UserError for an override that a recipe of these commands does not accept."""
    for command in dict.fromkeys(command for one in experiments for command in one.every()):
        recipe = next((word for word in command.words if word.endswith(".toml") and Path(word).is_file()), None)
        if recipe is not None:
            sets = [word for flag, word in itertools.pairwise(command.words) if flag == "--set"]
            read_run_recipe(recipe, sets)


def _report_unread(experiments: Sequence[ExperimentRun], scale: Scale) -> None:
    read = read_overrides(experiments, scale)
    for text in dict.fromkeys(scale.overrides):
        if text not in read:
            console.note(f"reproduce: nothing that these tables run reads --set {text}")


def _report_lacking(experiments: Sequence[ExperimentRun]) -> None:
    lacking = {path: get for one in experiments for path, get in one.lacking().items()}
    if lacking:
        console.note("reproduce: these are absent, and what reads them is left out:")
    for path, get in lacking.items():
        console.note(f"  {path}: {get}")


# Records of commands


@contextmanager
def locked(command: Command, out: Path) -> Iterator[bool]:
    """Lock a command against other processes, and write its record if it is not finished; yield False if another
    process holds the lock. The lock ends with the process. Raise UserError for an output of another command."""
    place = _place(command, out)
    place.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = lock_folder(place)
    except Held:
        yield False
        return
    try:
        check_output(command, out)
        if not command.finished:
            atomic_write_text(place / RECORD, json.dumps(_record(command, out), indent=1) + "\n")
        yield True
    finally:
        os.close(descriptor)


def check_folder(experiments: Sequence[ExperimentRun], out: Path) -> None:
    """Raise UserError for an output that another command made."""
    for command in dict.fromkeys(command for one in experiments for command in one.every()):
        check_output(command, out)


def check_output(command: Command, out: Path) -> None:
    """Raise UserError if another command made this one's output.

    The other command may have other overrides, another paper, or a recipe that has changed. The record of a refused
    command without an output is ignored.
    """
    file = _place(command, out) / RECORD
    if not (file.is_file() and command.folder.exists()):
        return
    made, now = read_json_object(file), _record(command, out)
    words = made.get("words")
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise UserError(f"{file}: expected the words of a command; delete it if {command.folder} is to be kept")
    before, after = _keyed(words), _keyed(now["words"])
    if before != after:
        then, changed = (
            shlex.join([f"{key}={value}" if value else key for key, value in sorted(some.items() - others.items())])
            or "less"
            for some, others in ((before, after), (after, before))
        )
        raise UserError(
            f"{command.folder}: was made with {then}, but now there is {changed}; choose another --out, or the "
            "earlier flags"
        )
    other = [name for name, content in made.get("recipes", {}).items() if now["recipes"].get(name) != content]
    if other:
        raise UserError(
            f"{command.folder}: was made when {other[0]} had other keys; choose another --out, or delete {file} if "
            "it is to be kept"
        )


def _record(command: Command, out: Path) -> dict[str, Any]:
    inside = re.compile(rf"(^|=){re.escape(str(out))}/")  # a path of the folder, as a word or as an override's value
    words = [inside.sub(r"\1", word.replace(f"{RECIPES}/", "recipes/"), count=1) for word in command.words]
    recipes = [word for word in command.words if word.endswith(".toml") and Path(word).is_file()]
    return {"words": words, "recipes": {word.replace(f"{RECIPES}/", "recipes/"): _keys(word) for word in recipes}}


def _keys(recipe: str) -> str:
    with Path(recipe).open("rb") as file:
        return hashlib.sha256(json.dumps(tomllib.load(file), sort_keys=True).encode()).hexdigest()


def _keyed(words: Sequence[str]) -> dict[str, str]:
    """Return a command's words as flag or key -> value, so that order is ignored. The last override of a key counts."""
    found: dict[str, str] = {}
    flag: str | None = None  # a flag that still needs its value
    for word in words:
        if word.startswith("--"):
            flag, found[word] = word, ""
        elif flag is None or flag == "--set":
            key, _, value = word.partition("=")
            found[key] = value
            flag = None
        else:
            found[flag], flag = word, None
    return found


def _place(command: Command, out: Path) -> Path:
    return out / "commands" / "-".join(command.folder.relative_to(out).parts)
