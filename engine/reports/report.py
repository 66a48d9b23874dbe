"""Pages of runs: one run with its curves and trajectories, several runs compared, or curves of groups of runs.

    report.html           one run: results, curves, trajectories before and after, the recipe
    plots/NAME.png        one picture per chart, and overview.png for a README
    OUT.html              several runs: each curve that two of them have, last measures, paired tests against the
                          first run over the same questions, recipe differences

A page contains its pictures and needs no network and no script. It is made from run folders only, at any time, also
while a run goes on or after it was killed: the page leaves out what is missing and says so. Sampled and retrieved text
is escaped. An optional notes.md is added to the page: paragraphs separated by blank lines, in which two spaces end a
line.
"""

import base64
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from rich.padding import Padding
from rich.text import Text

from thresher.common.console import console
from thresher.common.console import shown as shown_number
from thresher.common.errors import UserError
from thresher.common.files import atomic_write_bytes, atomic_write_text, read_json_object
from thresher.engine.config.objectives import surrogate_name
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.sections import GrpoSection, RetrievalSection, RolloutSection
from thresher.engine.config.tables import shown as shown_value
from thresher.engine.evaluation.compare import Evaluation, Measures, compare, difference_rows
from thresher.engine.evaluation.metrics import NAMES, RECALLS, shown
from thresher.engine.reports.charts import (
    CAPTIONS,
    COMPARED_BY,
    PALETTE,
    PHASES,
    Chart,
    Series,
    all_charts,
    charts_of,
    draw,
    filled,
    is_chosen,
    smoothing,
)
from thresher.engine.reports.health import health_of
from thresher.engine.reports.pages import (
    ENDINGS,
    Chunk,
    Record,
    RunRecords,
    duration,
    examples_of,
    model_folders,
    open_run,
    page_template,
    step_files,
    steps_in_words,
)
from thresher.engine.store.run_folder import RunFolder
from thresher.policy.config import read_config
from thresher.policy.families import find_family
from thresher.policy.model import Policy
from thresher.retrieval.indexes.manifest import read_manifest
from thresher.rewards.reward import Source
from thresher.rewards.statistics import wilson

MEASURES = (  # measures of an evaluation
    *("em", "f1", "contains", "answered", *RECALLS, "compression", "relevance_precision", "relevance_recall"),
    *("reward", "searches", "response_tokens"),
)
SPAN_COLORS = {"think": "magenta", "search": "blue", "evaluate": "cyan", "refine": "cyan", "answer": "green"}
PAGE_CHARS, TERMINAL_CHARS = 2400, 700  # per segment; the files hold the full text
IDLE = 0.5  # share of busy slots below which the page suggests rollout.partial
OVERVIEW = ("reward", "em")
LETTERS = "ABCDEFG"


# One run


def write_report(run: str | Path, out: str | Path | None = None, unverified: bool = False) -> Path:
    """Write the report of a run folder into the folder `out` (default: the run folder); return report.html's path.

    Raise UserError if `run` is not a run folder, if a file in it is malformed or, unless `unverified`, fails
    verification, or if `out` cannot be written.
    """
    read = RunRecords.read(run, unverified)
    out = Path(out) if out is not None else read.folder.path
    page, pictures = report_page(read, out)
    try:
        (out / "plots").mkdir(parents=True, exist_ok=True)
        for name, picture in pictures.items():
            atomic_write_bytes(out / "plots" / f"{name}.png", picture)
        atomic_write_text(out / "report.html", page)
    except OSError as error:
        raise UserError(f"{out}: cannot write the report ({error.strerror}); choose another folder") from None
    return out / "report.html"


def report_page(run: RunRecords, *notes: Path) -> tuple[str, dict[str, bytes]]:
    """Return the page of a run and its pictures by name. notes: folders searched for notes.md, before the run's."""
    folder, recipe, evals = run.folder, run.recipe, run.evals
    charts = charts_of(run.records, **_of_charts(run.recipe))
    overview = [chart for chart in charts if chart.name in OVERVIEW]
    pictures = {chart.name: draw(chart) for chart in charts} | ({"overview": draw(*overview)} if overview else {})
    page = page_template("report.html").render(
        name=str(folder.path),
        recipe=recipe,
        toml=recipe.to_toml(),
        summary=run.summary,
        last_step=run.last_step,
        steps=run.expected_steps,
        health=health_of(run),
        tiles=_tiles(run.summary, evals),
        notes=_notes(*notes, folder.path),
        measures=_measures(evals),
        evals=evals,
        interval=_interval(evals[-1][1]) if evals else "",
        facts=_facts(folder, recipe),
        time=_time_sentence(run),
        charts=charts,
        overview=overview,
        picture=lambda name: _data_uri(pictures[name]),
        window=smoothing(len(run.steps)),
        endings=ENDINGS,
        examples=examples_of(folder, recipe, 3, PAGE_CHARS),
        stored=steps_in_words(list(step_files(folder.trajectories))),
    )
    return page, pictures


def _of_charts(recipe: Recipe) -> dict[str, Any]:
    """Return the recipe values that charts need."""
    return {
        "kl_value": recipe.grpo.kl_value,
        "beta": recipe.grpo.beta,
        "max_grad_norm": recipe.optim.max_grad_norm,
        "groups": recipe.rollout.questions_per_step,
    }


def _data_uri(picture: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(picture).decode('ascii')}"


def print_trajectories(run: str | Path, count: int = 2) -> None:
    """Print up to `count` trajectories of the last evaluation: tags in colour, passages dim, feedback yellow."""
    folder, recipe = open_run(run)
    for example in examples_of(folder, recipe, count, TERMINAL_CHARS):
        excerpt = example.excerpts[-1]
        console.print(Text.assemble("\n", (example.question, "bold")))
        verdict = ("right", "green") if excerpt.right else ("wrong", "red")
        searches = f"{excerpt.searches} search{'' if excerpt.searches == 1 else 'es'}"
        about = f", {searches}, reward {shown_number(excerpt.reward)}; expected: {' | '.join(example.golds)}"
        console.print(Text.assemble(verdict, (about, "dim")))
        for part in excerpt.parts:
            for line in part.lines:
                console.print(Padding(_terminal_line(part.source, line), (0, 0, 0, 2), expand=False))


def _terminal_line(source: Source, line: Sequence[Chunk]) -> Text:
    base = {Source.RETRIEVED: "dim", Source.FEEDBACK: "yellow"}.get(source, "")
    text = Text()
    for chunk in line:
        color = SPAN_COLORS.get(chunk.span, "bright_black") if chunk.is_tag else ""
        text.append(chunk.text, f"{base} {color}".strip())
    text.rstrip()
    return text


def _notes(*folders: Path) -> list[str]:
    """Return the paragraphs of the first notes.md that exists."""
    for folder in folders:
        if (folder / "notes.md").is_file():
            text = (folder / "notes.md").read_text(encoding="utf-8", errors="replace")
            return [paragraph.strip() for paragraph in re.split(r"\n\s*\n", text) if paragraph.strip()]
    return []


# Measures


def _tiles(summary: Record, evals: Sequence[tuple[int, Record]]) -> list[tuple[str, str, str]]:
    tiles = []
    for key, name in (("em", "exact match"), ("f1", "F1")):
        values = [measures.get(key) for _, measures in (*evals[:1], *evals[-1:])]
        if values and values[-1] is not None:
            before = "" if len(evals) < 2 or values[0] is None else f"from {values[0]:.1%}"
            tiles.append((f"{name}, held out", f"{values[-1]:.1%}", before))
    for key, name in (("rollout_tokens_per_s", "rollout"), ("train_tokens_per_s", "update")):
        if (value := summary.get(key)) is not None:
            tiles.append((name, f"{value:,.0f}", "tokens/s"))
    if (seconds := summary.get("seconds")) is not None:
        tiles.append(("in all", duration(seconds), f"{summary['steps']} steps" if "steps" in summary else ""))
    return tiles


def _measures(evals: Sequence[tuple[int, Record]]) -> list[tuple[str, str, str, str]]:
    """Return (name, before, after, change) of each measure of the last evaluation; before and change may be ""."""
    if not evals:
        return []
    first, last = ({**measures, **_terms(measures)} for measures in (evals[0][1], evals[-1][1]))
    rows = []
    for key in (*MEASURES, *_terms(last)):
        name, kind = NAMES.get(key, (key, "number"))
        old, new = (first.get(key) if len(evals) > 1 else None), last.get(key)
        if new is not None:
            change = "" if old is None else f"{100 * (new - old):+.1f} pts" if kind == "share" else f"{new - old:+.2f}"
            rows.append((name, "" if old is None else shown(key, old), shown(key, new), change))
    return rows


def _terms(measures: Record) -> Record:
    """Return the terms of the system's reward by display name; empty if there is a single term."""
    terms = measures.get("parts") or {}
    return {f"Reward's part: {name}": value for name, value in terms.items()} if len(terms) > 1 else {}


def _interval(measures: Record) -> str:
    share, count = measures.get("em"), measures.get("questions")
    if share is None or not count:
        return ""
    low, high = wilson(share, count)
    return f"{low:.1%} to {high:.1%}"


def _time_sentence(run: RunRecords) -> str:

    def spent(key: str) -> float:
        return sum(record.get(f"{key}_seconds") or 0.0 for record in run.steps)

    seconds = {name: spent(key) for key, (_, name) in PHASES.items()}
    seconds["evaluations"] = sum(measures.get("seconds") or 0.0 for _, measures in run.evals)
    known = sum(seconds.values())
    total = max(run.summary.get("seconds") or 0.0, known)
    if not total:
        return ""
    seconds["loading, checkpoints and files"] = total - known
    shares = sorted(((part / total, name) for name, part in seconds.items()), reverse=True)
    listed = ", ".join(f"{share:.0%} {name}" for share, name in shares if share >= 0.005)
    waited = ""
    if rollout := spent("rollout"):
        waited = f" Decoding waited for searches {spent('search') / rollout:.1%} of the rollouts' time."
    return f"Of {duration(total)}: {listed}.{waited}{_slots_sentence(run)}"


def _slots_sentence(run: RunRecords) -> str:
    found, rollout = [busy for record in run.steps if (busy := record.get("slots_busy"))], run.recipe.rollout
    if not found:
        return ""
    drew = f" In a decode step {fmean(found):.0%} of the {rollout.max_num_seqs} slots drew a token."
    if rollout.partial or fmean(found) >= IDLE:
        return drew
    return f"{drew} With rollout.partial = true later groups fill slots that wait for a step's longest samples."


def _facts(run: RunFolder, recipe: Recipe) -> list[tuple[str, str]]:
    """Return (name, value) rows about the run. Files outside the run folder may be gone by now."""
    rollout, grpo, optim = recipe.rollout, recipe.grpo, recipe.optim
    model = _model(run, recipe)
    facts = [("Model", f"{model}; {recipe.model.dtype} on {recipe.model.device}" if model else recipe.model.path)]
    if warmup := _warmup(Path(recipe.model.path) / "sft.json"):
        facts.append(("Warm-up", warmup))
    if recipe.system:
        options = "".join(f", {key} = {value}" for key, value in recipe.system.options.items())
        facts.append(("System", recipe.system.name + options))
    if recipe.data:
        facts.append(("Questions", f"{recipe.data.train} (training), {recipe.data.dev or 'none'} (held out)"))
    if recipe.retrieval:
        facts.append(("Retrieval", _retrieval(recipe.retrieval)))
    steps = grpo.updates_per_batch * grpo.epochs_per_batch
    turns = f"{rollout.max_turns} turn{'s' if rollout.max_turns > 1 else ''}"
    kl = f"KL {grpo.beta:g} × {grpo.kl_value}" if grpo.beta > 0 else "no KL"
    facts += [
        (
            "Step",
            f"{rollout.questions_per_step} questions × {rollout.group_size} samples"
            f"{f' in {rollout.trees} trees' if rollout.trees else ''} at temperature"
            f" {rollout.temperature:g}, at most {turns} and {rollout.max_context:,} tokens each",
        ),
        *([("Partial rollouts", _partial(rollout))] if rollout.partial else []),
        (
            "Objective",
            f"{_objective(grpo)}, {kl}, mean per"
            f" {grpo.aggregation}; AdamW at {optim.lr:g} ({optim.schedule}), {steps} update"
            f"{'s' if steps > 1 else ''} per batch",
        ),
        ("Seed", str(recipe.run.seed)),
    ]
    return facts


def _partial(rollout: RolloutSection) -> str:
    kept = ", whose keys and values outlive an update" if rollout.stale_cache else ""
    return f"{rollout.in_flight} groups in flight{kept}; staleness at most {rollout.max_staleness}"


def _objective(grpo: GrpoSection) -> str:
    surrogate = surrogate_name(grpo.objective)
    clips = surrogate in ("clip", "cispo", "gspo", "gmpo")
    name = "GRPO" if grpo.objective == "grpo" else f"{grpo.objective} (surrogate {surrogate})"
    name += f", ratio clipped to [{1 - grpo.clip_low:g}, {1 + grpo.clip_high:g}]" if clips else ""
    return name + (f", advantages by {grpo.advantage}" if grpo.advantage != "trajectory" else "")


def _model(run: RunFolder, recipe: Recipe) -> str:
    """Return a description of the model, from the newest checkpoint or else the initial model; "" if both are gone."""
    for folder in model_folders(run, recipe):
        try:
            config = read_config(folder)
        except UserError:
            continue
        with torch.device("meta"):
            count = Policy(config).parameter_count()
        return (
            f"{find_family(config.model_type).models}, {count:,} parameters:"
            f" {config.num_hidden_layers} layers of width {config.hidden_size},"
            f" {config.num_attention_heads} heads over {config.num_key_value_heads} of keys and values, MLP"
            f" {config.intermediate_size:,}, vocabulary {config.vocab_size:,},"
            f" {'tied' if config.tie_word_embeddings else 'untied'} head"
        )
    return ""


def _warmup(path: Path) -> str:
    try:
        record = read_json_object(path)
    except UserError:
        return ""
    text = f"{record.get('steps')} steps of supervised fine-tuning"
    if record.get("restarts"):
        text += f" after {record['restarts']} restarts"
    copied, gate = record.get("names copied right"), record.get("gate")
    if isinstance(copied, float):
        text += f"; {copied:.1%} of the held-out copied tokens right"
    if isinstance(gate, float):
        text += f" (gate {gate:.0%}, {'passed' if record.get('passed') else 'NOT passed'})"
    return text


def _retrieval(retrieval: RetrievalSection) -> str:
    order = "in an order drawn at random" if retrieval.shuffle else "best first"
    shown = f"{retrieval.k} passages a search, {order}"
    if retrieval.index is None:
        return f"the server at {retrieval.url}; {shown}"
    try:
        manifest = read_manifest(Path(retrieval.index))
    except UserError:
        return f"{retrieval.index}; {shown}"
    # An index of words and one that fuses other indexes have no vectors.
    made_of = f"{manifest.encoder} encoder, {manifest.dim:,} dimensions" if manifest.dim else manifest.kind
    return f"{manifest.passages:,} passages, {made_of}; {shown}"


# Several runs


@dataclass(frozen=True, kw_only=True)
class ComparedRun(RunRecords):
    """A run with its letter and color on the page."""

    letter: str
    color: str


def write_comparison(paths: Sequence[str | Path], out: str | Path, unverified: bool = False) -> list[dict[str, Any]]:
    """Write a page that compares these runs to the file `out`, and return the results of the paired tests.

    The tests compare the first run with each other run that shares its questions. Raise UserError if a folder is not a
    run, if its records fail verification (unless `unverified`), if the runs share neither a curve nor a question, or if
    `out` is not a .html file that can be written.
    """
    out = Path(out)
    if out.suffix != ".html":
        raise UserError(f"{out}: expected a file ending in .html for the page of several runs")
    if not 2 <= len(paths) <= len(LETTERS):
        raise UserError(f"expected from 2 to {len(LETTERS)} runs to compare, got {len(paths)}")
    runs = [
        ComparedRun(**vars(RunRecords.read(path, unverified)), letter=letter, color=color)
        for path, letter, color in zip(paths, LETTERS, PALETTE, strict=False)
    ]
    charts = overlaid([(run.letter, run.color, [run]) for run in runs], at_least=2)
    tests = list(_tests(runs))
    found = [test["result"] for test in tests if "result" in test]
    if not charts and not found:
        raise UserError(
            f"{' and '.join(str(run.folder.path) for run in runs)}: these runs share neither a metric nor a question of"
            " an evaluation; name runs that have reached their first step, or an evaluation of the same questions"
        )
    page = page_template("comparison.html").render(
        runs=runs,
        figures=list(_compared_rows(runs)),
        tests=tests,
        differences=recipe_differences(runs),
        facts=[(run, _origin(run.start)) for run in runs],
        charts=[(chart, _data_uri(draw(chart))) for chart in charts],
        window=max((smoothing(len(run.steps)) for run in runs), default=1),
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(out, page)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror}); choose another file") from None
    return found


def write_curves(
    title: str, groups: Mapping[str, Sequence[str | Path]], out: Path, chosen: Sequence[str] | None = None
) -> list[Chart]:
    """Write a page of overlaid curves, one per group of run folders, and return its charts. groups: label -> run
    folders of several seeds, drawn as mean and standard deviation. chosen: names of charts, None for all."""
    named = [
        (label, color, list(map(str, groups[label])))
        for label, color in zip(groups, itertools.cycle(PALETTE), strict=False)
    ]
    charts = overlaid([(label, color, map(RunRecords.read, paths)) for label, color, paths in named], chosen=chosen)
    reading = "Thick: a moving mean. Bands: the deviation over seeds. Dots: evaluations."
    _write_figure(out, charts, title, reading, "No training has got to its first step.", named)
    return charts


def write_bars(
    title: str, groups: Sequence[str], bars: Mapping[str, Mapping[str, Sequence[Mapping[str, Any] | None]]], out: Path
) -> list[Chart]:
    """Write a page of grouped bars, one picture per measure, and return its charts. bars: measure -> label of a bar ->
    its "mean" and "deviation" over seeds in each group, None for no bar. A measure without bars has no picture."""
    charts = []
    for number, (measure, rows) in enumerate(bars.items()):
        name, kind = NAMES.get(measure, (f"Reward's part: {measure}", "number"))
        series = [
            _bars(label, color, cells)
            for (label, cells), color in zip(rows.items(), itertools.cycle(PALETTE), strict=False)
        ]
        caption = "" if measure in NAMES else CAPTIONS["parts"]
        chart = Chart(str(number), name, caption, tuple(series), percent=kind == "share", groups=tuple(groups))
        charts.append(filled(chart))
    charts = [chart for chart in charts if chart.series]
    reading = "Means over the questions of a set, then over seeds. Lines: the deviation over seeds."
    _write_figure(out, charts, title, reading, "No evaluation is finished.")
    return charts


def _bars(label: str, color: str, cells: Sequence[Mapping[str, Any] | None]) -> Series:
    means, deviations = (
        np.array([np.nan if cell is None or cell[key] is None else cell[key] for cell in cells])
        for key in ("mean", "deviation")
    )
    return Series(label, color, np.arange(len(cells), dtype=np.float64), means, spread=deviations)


def _write_figure(
    out: Path,
    charts: Sequence[Chart],
    title: str,
    reading: str,
    nothing: str,
    groups: Sequence[tuple[str, str, list[str]]] = (),
) -> None:
    """Write the page of a figure. reading: how to read its charts. nothing: shown if there is none. groups: (label,
    color, paths) of curves."""
    pictures = [(chart, _data_uri(draw(chart))) for chart in charts]
    page = page_template("curves.html")
    atomic_write_text(out, page.render(title=title, groups=groups, reading=reading, charts=pictures, nothing=nothing))


def overlaid(
    groups: Sequence[tuple[str, str, Iterable[RunRecords]]], at_least: int = 1, chosen: Sequence[str] | None = None
) -> list[Chart]:
    """Return a chart for each curve that at least `at_least` groups have, in the order of a single run's page.

    A chart has one curve per group (label, color, runs), the mean over its runs; stacked layers are summed. chosen:
    names of charts, None for all.
    """
    read = [(label, color, list(runs)) for label, color, runs in groups]
    of_all = [record for _, _, runs in read for run in runs for record in run.records]
    curves: dict[tuple[str, str], dict[int, list[Series]]] = {}  # (chart, label) -> group -> one curve per run
    charts: dict[tuple[str, str], Chart] = {}  # taken from the first run that has it
    for number, run in ((number, run) for number, (_, _, runs) in enumerate(read) for run in runs):
        for chart in all_charts(run.records, of_all, **_of_charts(run.recipe)):
            for series in _summed(chart) if is_chosen(chart.name, chosen) else ():
                charts.setdefault((chart.name, series.label), chart)
                curves.setdefault((chart.name, series.label), {}).setdefault(number, []).append(series)
    means: dict[tuple[str, str], Chart] = {}
    for key, of_groups in curves.items():
        drawn = [replace(_mean(of), label=read[n][0], color=read[n][1]) for n, of in of_groups.items()]
        chart = filled(replace(charts[key], series=tuple(drawn), stacked=False))
        if any(np.nansum(series.values) for series in chart.series) or not charts[key].stacked:
            means[key] = chart
    labels = Counter(name for (name, _), chart in means.items() if chart.series)
    shared: list[Chart] = []
    order = list(dict.fromkeys(name for name, _ in means))
    for (name, label), chart in sorted(means.items(), key=lambda mean: order.index(mean[0][0])):
        compared, caption = COMPARED_BY.get(name, (label, chart.caption))
        if label == compared and len(chart.series) >= at_least:
            title = f"{chart.title}: {label}" if labels[name] > 1 else chart.title
            shared.append(Chart(str(len(shared)), title, caption, chart.series, chart.percent, chart.log))
    return shared


def _summed(chart: Chart) -> Sequence[Series]:
    """Return the curves of a chart; stacked layers are summed into one curve."""
    if not chart.stacked or not chart.series:
        return chart.series
    layers = np.array([series.values for series in chart.series])
    sums = np.where(np.isfinite(layers).any(0), np.nansum(layers, 0), np.nan)
    return [replace(chart.series[0], label="all", values=sums)]


def _mean(runs: Sequence[Series]) -> Series:
    """Return the mean of one curve over runs, at every step that any of them has, with the standard deviation."""
    if len(runs) == 1:
        return runs[0]
    steps = np.unique(np.concatenate([series.steps for series in runs]))
    table = np.full((len(runs), len(steps)), np.nan)
    for row, series in zip(table, runs, strict=True):
        row[np.searchsorted(steps, series.steps)] = series.values
    known = np.isfinite(table).sum(0)
    means = np.divide(np.nansum(table, 0), known, out=np.full(len(steps), np.nan), where=known > 0)
    squares = np.nansum((table - means) ** 2, 0)
    spread = np.sqrt(np.divide(squares, known - 1, out=np.zeros(len(steps)), where=known > 1))
    return replace(runs[0], steps=steps, values=means, spread=spread)


def _compared_rows(runs: Sequence[ComparedRun]) -> Iterator[tuple[str, list[str]]]:
    last = [run.evals[-1][1] if run.evals else {} for run in runs]
    terms = [measures.get("parts") or {} for measures in last]
    yield "Steps", [f"{run.last_step} of {run.expected_steps}" for run in runs]
    if any(last):
        yield "Last evaluation at step", [str(run.evals[-1][0]) if run.evals else "-" for run in runs]
        yield "Held-out questions, greedy", [shown_number(measures.get("questions")) for measures in last]
        yield "Exact match before", [shown("em", run.evals[0][1].get("em")) if run.evals else "-" for run in runs]
    rows: list[tuple[str, list[float | None], Callable[[float], str]]] = [
        (NAMES[key][0], [measures.get(key) for measures in last], partial(shown, key)) for key in MEASURES
    ]
    for key in dict.fromkeys(name for term in terms if len(term) > 1 for name in term):
        rows.append((f"Reward's part: {key}", [term.get(key) for term in terms], partial(shown, "")))
    for name, tokens, seconds in (
        ("Rollout, tokens per second", "sampled_tokens", "rollout_seconds"),
        ("Update, tokens per second", "train_tokens", "update_seconds"),
    ):
        rows.append((name, [run.rate(tokens, seconds) for run in runs], "{:,.0f}".format))
    rows.append(("In all", [run.summary.get("seconds") for run in runs], duration))
    for name, values, show in rows:
        if any(value is not None for value in values):
            yield name, ["-" if value is None else show(value) for value in values]


def _tests(runs: Sequence[ComparedRun]) -> Iterator[dict[str, Any]]:
    """Test the first run against each other run: yield that run, and rows or a sentence why there are none."""
    first = _last_evaluation(runs[0])
    for run in runs[1:]:
        other = _last_evaluation(run)
        if first is None or other is None:
            without = runs[0] if first is None else run
            yield {"run": run, "problem": f"{without.letter} has no evaluation of held-out questions yet."}
            continue
        try:
            result = compare(first, other)
        except UserError as error:
            yield {"run": run, "problem": f"{error}."}
            continue
        rows = [(NAMES[key][0], *cells) for key, *cells in difference_rows(result)]
        yield {"run": run, "rows": rows, "notes": result["notes"], "result": result}


def _last_evaluation(run: RunRecords) -> Evaluation | None:
    paths = list(step_files(run.folder.evaluations).values())
    if not paths:
        return None
    questions: dict[str, str] = {}
    measures: dict[str, Measures] = {}
    for record in run.folder.stored_trajectories(paths[-1]):
        values = {"reward": record.get("reward")} | (record.get("parts") or {})
        questions[str(record.get("id"))] = str(record.get("question"))
        measures[str(record.get("id"))] = {
            name: None if value is None else float(value) for name, value in values.items() if name in NAMES
        }
    system = run.recipe.system
    figures = {
        "system": system.name if system else None,
        "rewarded_by": f"{system.name} {dict(sorted(system.options.items()))}" if system else None,
        "model": run.recipe.model.path,
    }
    return Evaluation(run.folder.path, figures, questions, measures)


def recipe_differences(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """Return (key, one value per run) of the recipe keys, defaults included, whose values differ between runs."""
    keys = [run.recipe.keys() for run in runs]
    names = dict.fromkeys(name for table in keys for name in table)
    texts = {name: [shown_value(table.get(name), "unset") for table in keys] for name in names}
    return [(name, values) for name, values in texts.items() if len(set(values)) > 1]


def _origin(start: Record) -> list[tuple[str, str]]:
    if not start:
        return [("Commit and machine", "not recorded")]
    resumed = f", last resumed from step {start['step']}" if start.get("step") else ""
    return [
        ("Commit", str(start.get("commit") or "not from a checkout")),
        ("Machine", ", ".join(str(start[key]) for key in ("machine", "gpu") if start.get(key))),
        ("Started", f"{start.get('at')}{resumed}"),
        ("Python, torch", f"{start.get('python')}, {start.get('torch')}"),
    ]
