"""A paper's table next to our own: printed number, our mean and deviation over seeds, and a paired test.

`thresher reproduce --list`: every row, its stages, and the plan of its training. A plan needs the model's config.json
and no weights.

Means are over the questions of a column; in the invented world, over those with its number of relations. The test
compares two rows over the questions that both have (rewards/statistics.py). Its unit is the seed: one mean per seed,
paired by seed number. A row that no seed changes is paired with every seed of the other row. If each row has one seed,
the test is over questions, and says nothing about another seed.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import compress
from pathlib import Path
from statistics import mean, stdev
from types import MappingProxyType
from typing import Any

from thresher.common.files import read_json_object
from thresher.common.records import read_records
from thresher.engine.assemble import read_run_recipe
from thresher.engine.evaluation.compare import read_evaluation
from thresher.engine.extraction.records import record_measures
from thresher.engine.planning.plan import plan
from thresher.engine.planning.time import GB, Chip
from thresher.engine.reproduce.manifest import Method, PaperManifest, PaperTable, PublishedModel, TableRow, switches_of
from thresher.engine.reproduce.pipelines import Command, ExperimentRun, Scale, columns_of, rows_in_world
from thresher.engine.world.stages import RECIPES, below_gate
from thresher.policy.config import read_config
from thresher.retrieval.questions import read_questions
from thresher.rewards.statistics import RESAMPLES, compare_paired, compare_seeds, least_p

Values = dict[str, float]  # question's id -> value
LEAST_P = 1 / (1 + RESAMPLES)  # least p-value of a test by random signs
HOUR = 3600.0
Entry = tuple[str, str, str]  # a row's label, a measure, a column


def results_of(
    manifest: PaperManifest,
    table: PaperTable,
    scale: Scale,
    experiments: Sequence[ExperimentRun],
    refused: Mapping[Command, str] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the table as data: its rows, each with "printed" and "ours" by measure and column. Values of unfinished
    commands are absent; "not_run" maps each reason to the labels of its rows; "below_gate" names the fine-tuned models
    that missed their gate."""
    columns = columns_of(manifest, table, scale.invented)
    rows: dict[str, dict[str, Any]] = {}
    values: dict[Entry, dict[int, Values]] = {}  # seed -> values
    planned = Counter(manifest.label(one.row) for one in experiments)
    for one in experiments:
        label = manifest.label(one.row)
        rows.setdefault(label, {"label": label, "printed": one.row.printed, "ours": {}})
        for column, chain in one.columns.items():
            if not all(command.finished for command in chain):
                continue
            relations = manifest.sets[column].relations if scale.invented else None
            found = read_column([command.folder for command in chain], relations, table.only)
            for measure in table.measures:
                known = {id_: value for id_, row in found.items() if (value := row.get(measure)) is not None}
                values.setdefault((label, measure, column), {})[one.seed] = known
    for (label, measure, column), seeds in (alone(values) if table.alone else values).items():
        if seeds and all(seeds.values()):
            other = table.against or ""
            against = values.get((other, measure, column), {}) if label != other else {}
            cell = _figures(seeds, against, fixed=1 in (planned[label], planned[other]))
            rows[label]["ours"].setdefault(measure, {})[column] = cell
    return {
        "paper": manifest.title,
        "caption": table.caption,
        "scale": scale.name,
        "seeds": len(scale.seeds),
        "limit": scale.limit,
        "overrides": read_overrides(experiments, scale),
        "measures": list(table.measures),
        "columns": {name: manifest.sets[name].label for name in columns},
        "positions": {name: table.columns.index(name) for name in columns},
        "average": table.average and len(columns) == len(table.columns),
        "against": table.against,
        "not_run": _not_run(manifest, experiments, refused),
        "below_gate": _below_gate(experiments),
        "rows": list(rows.values()),
    }


def read_overrides(experiments: Sequence[ExperimentRun], scale: Scale) -> list[str]:
    """Return the overrides that some command of these experiments reads."""
    words = {word for one in experiments for command in one.every() for word in command.words}
    return [text for text in scale.overrides if text in words]


def _not_run(
    manifest: PaperManifest, experiments: Sequence[ExperimentRun], refused: Mapping[Command, str]
) -> dict[str, list[str]]:
    """Return reason -> labels of the rows with a command that was refused, or that lacks a file or a server."""
    found: dict[str, dict[str, None]] = {}
    for one in experiments:
        reasons = [f"{path} is absent" for path in one.lacking()]
        reasons += [f"refused, {' '.join(refused[command].split())}" for command in one.every() if command in refused]
        for why in reasons:
            found.setdefault(why, {})[manifest.label(one.row)] = None
    return {why: list(labels) for why, labels in found.items()}


def _below_gate(experiments: Sequence[ExperimentRun]) -> list[str]:
    tunings = dict.fromkeys(one for row in experiments for one in row.every() if one.words[0] == "sft")
    return [missed for one in tunings if (missed := below_gate(one.folder))]


def alone(values: Mapping[Entry, Mapping[int, Values]]) -> dict[Entry, dict[int, Values]]:
    """Return, for two rows, the amount by which each question's value exceeds the other row's, seed by seed. It is 1 if
    only one row recalls a gold. A row without the other has no values."""
    found: dict[Entry, dict[int, Values]] = {}
    for (label, measure, column), seeds in values.items():
        others = [known for (row, *rest), known in values.items() if row != label and rest == [measure, column]]
        for other in others:
            found[label, measure, column] = {
                seed: {id_: max(own[id_] - other[seed][id_], 0.0) for id_ in own if id_ in other[seed]}
                for seed, own in seeds.items()
                if seed in other
            }
    return found


def read_column(
    outputs: Sequence[Path], relations: int | None, only: str | None = None
) -> dict[str, Mapping[str, float | None]]:
    """Return the measures by question of an extraction, an evaluation or both; the later one takes precedence.

    Parts of the reward are measures too, under their own names. relations: only questions of the invented world with
    this number. only: only questions for which this measure is 1.
    """
    measures: dict[str, dict[str, float | None]] = {}
    for output in outputs:
        found = read_evidence(output) if output.suffix == ".jsonl" else _read_answers(output)
        for id_, row in found.items():
            measures.setdefault(id_, {}).update(row)
    chosen = set(measures)
    if relations is not None:
        asked = read_questions(_questions_of(outputs[-1]))
        chosen = {question.id for question in asked if question.metadata.get("hops") == relations}
    return {id_: row for id_, row in measures.items() if id_ in chosen and (only is None or row.get(only) == 1)}


def read_evidence(file: Path) -> dict[str, dict[str, float | None]]:
    """Return an extraction's measures by question, under the names that an evaluation uses."""
    found: dict[str, dict[str, float | None]] = {}
    for _, record in read_records(file):
        row: dict[str, float | None] = dict(record_measures(record))
        row["compression"] = row.pop("compression_ratio", None)
        found[record["id"]] = row
    return found


def _read_answers(folder: Path) -> dict[str, dict[str, float | None]]:
    found = read_evaluation(folder)
    return {id_: {**found.parts[id_], **row} for id_, row in found.measures.items()}


def _questions_of(output: Path) -> str:
    if output.suffix == ".jsonl":
        return str(read_json_object(output.with_suffix(".json"))["settings"]["questions"])
    return str(read_json_object(output / "settings.json")["questions"])


def _figures(seeds: Mapping[int, Values], against: Mapping[int, Values], fixed: bool = False) -> dict[str, Any]:
    """Return a cell of the table, with a test against the row `against` if it has values.

    The test adds "difference", "low", "high" (95%), "p" and "test" of this row minus that one, "over" ("seeds" or
    "questions") and "differences", one per pair of seeds. fixed: no seed changes one of the two rows, so it is paired
    with each seed of the other.
    """
    every, others = list(seeds.values()), list(against.values())
    means = [mean(values.values()) for values in every]
    figures = _over_seeds(means) | {"seeds": means, "questions": len(every[0])}
    pairs = [(theirs, ours) for seed, ours in seeds.items() for at, theirs in against.items() if fixed or seed == at]
    ids = [id_ for id_ in every[0] if all(id_ in values for values in (*every, *others))]
    if not pairs or not ids:
        return figures
    if len(pairs) == 1:
        first, second = ([values[id_] for id_ in ids] for values in pairs[0])
        found, over = compare_paired(first, second), "questions"
        assert found is not None
        differences = [found.difference]
    else:
        first, second = ([mean(pair[at][id_] for id_ in ids) for pair in pairs] for at in (0, 1))
        found, over = compare_seeds(first, second), "seeds"
        differences = [ours - theirs for theirs, ours in zip(first, second, strict=True)]
    tested = {name: getattr(found, name) for name in ("difference", "low", "high", "p", "test")}
    return figures | tested | {"over": over, "differences": differences}


def _over_seeds(means: Sequence[float]) -> dict[str, Any]:
    return {"mean": mean(means), "deviation": stdev(means) if len(means) > 1 else None}


def markdown(results: Mapping[str, Any]) -> str:
    """Return the results in Markdown, one table per measure."""
    lines = [f"# {results['paper']}: {results['caption']}", ""]
    lines.append(
        "Ours in the invented world: a column holds other questions than the printed one, so only the order of rows "
        "can be compared."
        if results["scale"] == "world"
        else "Ours at the paper's scale."
    )
    sets = "of the world's" if results["scale"] == "world" else "of every set"
    asked = "" if results["limit"] is None else f", {sets} the first {results['limit']} questions"
    changed = "".join(f", {text}" for text in results["overrides"])
    lines.append(f"Seeds: {results['seeds']}{asked}{changed}.")
    lines += _of_p(results)
    for measure in results["measures"] if results["columns"] else ():
        lines += ["", f"## `{measure}`", "", *measure_table(results, measure)]
    if results["not_run"]:
        lines += ["", "## Not run, wholly or in part", ""]
    for why, labels in results["not_run"].items():
        rows = "every row" if len(labels) == len(results["rows"]) > 1 else ", ".join(labels)
        lines.append(f"- {rows}: {why}")
    if results["below_gate"]:
        lines += ["", f"Fine-tuned models that ended below their gate: {', '.join(results['below_gate'])}."]
    return "\n".join(lines) + "\n"


def _of_p(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield sentences about the table's p-values: their test, and the smallest possible value."""
    cells = [cell for row in results["rows"] for known in row["ours"].values() for cell in known.values()]
    pairs = {len(cell["differences"]) for cell in cells if "p" in cell}
    if most := max(pairs - {1}, default=0):
        yield (
            f"p: two-sided, against {results['against']}, a sign flip test over {most} seeds in pairs; with {most} "
            f"seeds no p is below {least_p(most):.3g}."
        )
    if 1 in pairs:
        yield (
            f"†: two-sided, against {results['against']}, paired over the questions of one seed; it says nothing "
            "about another seed."
        )


def measure_table(results: Mapping[str, Any], measure: str) -> list[str]:
    """Return the lines of a measure's table: per column the printed number and p, if any row has them, and ours."""
    names = results["columns"] | ({"average": "Average"} if results["average"] else {})
    head, rows = [""], [[row["label"]] for row in results["rows"]]
    for name, label in names.items():
        position = results["positions"].get(name, -1)
        cells = [_texts(row, measure, name, position, len(results["columns"])) for row in results["rows"]]
        printed, _, tested = ({text for text in texts if text not in ("-", "")} for texts in zip(*cells, strict=True))
        head += [*([f"{label}, printed", "ours"] if printed else [label]), *(["p"] if tested else [])]
        for row, texts in zip(rows, cells, strict=True):
            row += compress(texts, (printed, True, tested))
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows)]


def _texts(row: Mapping[str, Any], measure: str, column: str, position: int, columns: int) -> tuple[str, str, str]:
    printed = row["printed"].get(measure)
    known = row["ours"].get(measure, {})
    ours = known.get(column)
    seeds = [figures["seeds"] for figures in known.values()]
    if column == "average" and len(known) == columns and len(set(map(len, seeds))) == 1:
        ours = _over_seeds([mean(of_seed) for of_seed in zip(*seeds, strict=True)])
    shown = "-" if printed is None or printed[position] == "-" else _number(printed[position])
    if ours is None:
        return shown, "-", ""
    deviation = "" if ours["deviation"] is None else f" ± {_number(ours['deviation'])}"
    return shown, _number(ours["mean"]) + deviation, "" if "p" not in ours else _p(ours)


def _p(figures: Mapping[str, Any]) -> str:
    """Return p, with ≤ at the least value of a randomised test, and a dagger if it is over questions."""
    least = figures["p"] <= LEAST_P and "draws" in figures["test"]
    return f"{'≤ ' if least else ''}{figures['p']:.3g}{' †' if figures['over'] == 'questions' else ''}"


def _number(value: float) -> str:
    return "-" if value != value else f"{value:.3f}".removeprefix("0")


def listing(
    manifest: PaperManifest, chip: Chip, tables: Sequence[str] = (), overrides: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return a record for every row of the tables (of all tables if none is named).

    A record has the columns, those available in the invented world, the stages, the training recipe, the needs that the
    recipe states, and the plan on this chip with these overrides of every training (None without a training). Raise
    UserError for a table that the manifest does not have.
    """
    records: list[dict[str, Any]] = []
    plans: dict[tuple[str, str], dict[str, Any] | None] = {}
    for name, table in manifest.named(tables).items():
        invented = rows_in_world(manifest, table)
        for row in table.rows:
            key = manifest.trains(row), row.model
            trained, model = manifest.methods[key[0]], manifest.models[row.model]
            if key not in plans:
                plans[key] = _planned(trained, model, chip, overrides)
            records.append(
                {
                    "paper": manifest.name,
                    "table": name,
                    "row": manifest.label(row),
                    "columns": list(table.columns),
                    "world": columns_of(manifest, table, True) if row in invented else [],
                    "model": model.paper,
                    "stages": list(_stages(manifest, row, asked=table.columns != ())),
                    "trained_by": trained.recipe,
                    "needs": _stated(trained.recipe, model.paper),
                    "planned": plans[key],
                }
            )
    return records


def _planned(method: Method, model: PublishedModel, chip: Chip, overrides: Sequence[str]) -> dict[str, Any] | None:
    """Return the plan of a training on one GPU with all trajectories at their limits; None for an untrained method. It
    has bytes, whether they fit, seconds per step and in all. {"absent": path, "get": how} without the model's
    config.json."""
    if method.recipe is None:
        return None
    if not (config := Path(model.paper) / "config.json").is_file():
        return {"absent": str(config), "get": model.get}
    switches = [f"model.path={model.paper}", *switches_of(method), *method.overrides, *overrides]
    recipe = read_run_recipe(RECIPES / method.recipe, switches)
    found = plan(read_config(model.paper), recipe, memory_bytes=int(chip.memory), rates=chip)
    assert found.seconds_per_step is not None
    seconds = found.seconds_per_step * recipe.run.steps
    step = {"seconds_per_step": found.seconds_per_step, "steps": recipe.run.steps, "seconds": seconds}
    return {"chip": chip.name, "bytes": found.total_bytes, "fits": found.fits} | step


def plan_in_words(found: dict[str, Any] | None, stated: str | None) -> str:
    """Return a plan in words, or the needs that the recipe states if there is no plan."""
    if found is None:
        return "no training"
    if "absent" in found:
        return f"{stated or ''} (no plan without {found['absent']})".strip()
    fits = "" if found["fits"] else ", which does not fit"
    return f"{found['bytes'] / GB:.1f} GB{fits}, {found['seconds'] / HOUR:.0f} h at most"


def _stages(manifest: PaperManifest, row: TableRow, asked: bool) -> Iterator[str]:
    """Yield the stages of a row, in words; if not `asked`, only those up to its training."""
    method = manifest.methods[row.method]
    trained = manifest.methods[manifest.trains(row)]
    if trained.warmup is not None:
        yield f"sft {manifest.tunings[trained.warmup].recipe}"
    if trained.recipe is not None:
        yield f"train {trained.recipe}"
    if not asked:
        return
    if method.extract:
        yield "extract" if method.agent is None else "extract for an agent"
    if method.generator is not None:
        yield f"sft {manifest.tunings[method.generator].recipe}"
    if method.generator is not None or not method.extract:
        yield "eval"


def _stated(recipe: str | None, model: str) -> str | None:
    """Return the memory stated at the head of a recipe, if the recipe is for a model of this size."""
    if recipe is None:
        return None
    models = (read_run_recipe(RECIPES / recipe, []).model.path, model)
    if len({Path(one).name.removesuffix("-Instruct") for one in models}) > 1:
        return None
    head = (RECIPES / recipe).read_text(encoding="utf-8").partition("\n\n")[0]
    lines = [line.removeprefix("# ") for line in head.splitlines()]
    return " ".join(lines).partition("Memory, by thresher plan: ")[2] or None
