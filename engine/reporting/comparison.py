"""Several runs as one page: curves over each other, last figures with paired tests, and what their recipes differ in.

    run folders  ->  curves of each (charts.py)  ->  a chart for each curve that two runs have
                 ->  questions of their last evaluations, matched by id  ->  engine/evaluation/compare.py

Each run is tested against the first that is named. The page holds its pictures inside.

Deliberately absent: what a single run's page has (trajectories, all estimators of the KL, seconds by phase), and a mean
over runs, which seeds would need.
"""

import base64
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from thresher.common.console import shown as shown_number
from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text
from thresher.engine.config.recipe import Recipe
from thresher.engine.config.tables import shown as shown_value
from thresher.engine.evaluation.compare import Evaluation, Measures, compare, difference_rows
from thresher.engine.evaluation.metrics import NAMES
from thresher.engine.reporting.charts import PALETTE, Chart, Series, charts_of
from thresher.engine.reporting.pages import open_run, page_template
from thresher.engine.reporting.plots import draw, smoothing
from thresher.engine.reporting.report import MEASURES, duration
from thresher.engine.store.run_folder import RunFolder, step_of

Record = Mapping[str, Any]

# Of charts with curves that say one thing in several ways: the one to hold runs against each other by, and its caption.
CHOSEN = {
    "kl": (
        "k3",
        "Mean over sampled tokens of e^(-d) - 1 + d, d = log p - log p_ref, whatever each recipe's loss has.",
    ),
    "kl_largest": ("value", "Over a step's sampled tokens, by the estimator of each recipe (grpo.kl_value), before β."),
    "logprob_gap": ("largest", "|log p when sampled - log p when trained| of the same token under the same weights."),
}
LETTERS = "ABCDEFG"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    """A run as it is read, and what it is called on the page."""

    letter: str
    color: str
    folder: RunFolder
    recipe: Recipe
    records: list[dict[str, Any]]
    summary: Record
    start: Record  # of its last line in starts.jsonl

    @property
    def steps(self) -> list[dict[str, Any]]:
        return [record for record in self.records if "eval" not in record]

    @property
    def evals(self) -> list[tuple[int, Record]]:
        return [(record["step"], record["eval"] or {}) for record in self.records if "eval" in record]


def write_comparison(paths: Sequence[str | Path], out: str | Path, unverified: bool = False) -> list[dict[str, Any]]:
    """Write the page of these runs to the file `out`; returns what the paired tests found, the first run against each
    other whose questions it shares.

    UserError for a folder that is no run or, unless `unverified`, whose records are not as they were written, for runs
    that share neither a curve nor a question, and if `out` is no .html file that can be written.
    """
    out = Path(out)
    if out.suffix != ".html":
        raise UserError(f"{out}: expected a file ending in .html for the page of several runs")
    if not 2 <= len(paths) <= len(LETTERS):
        raise UserError(f"expected from 2 to {len(LETTERS)} runs to hold against each other, got {len(paths)}")
    runs = [
        _read(path, letter, color, unverified) for path, letter, color in zip(paths, LETTERS, PALETTE, strict=False)
    ]
    charts = overlaid(runs)
    tests = list(_tests(runs))
    found = [test["result"] for test in tests if "result" in test]
    if not charts and not found:
        raise UserError(
            f"{' and '.join(str(run.folder.path) for run in runs)}: these runs share neither a metric nor a question of"
            " an evaluation; name runs that have got to their first step, or to an evaluation of the same questions"
        )
    page = page_template("comparison.html").render(
        runs=runs,
        figures=list(_figures(runs)),
        tests=tests,
        differences=recipe_differences(runs),
        facts=[(run, _origin(run)) for run in runs],
        charts=[(chart, _picture(chart)) for chart in charts],
        window=max((smoothing(len(run.steps)) for run in runs), default=1),
    )
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        atomic_write_text(out, page)
    except OSError as error:
        raise UserError(f"{out}: cannot be written ({error.strerror}); choose another file") from None
    return found


def _read(path: str | Path, letter: str, color: str, unverified: bool = False) -> ComparedRun:
    folder, recipe = open_run(path, unverified)
    starts = folder.starts()
    return ComparedRun(
        letter=letter,
        color=color,
        folder=folder,
        recipe=recipe,
        records=folder.metrics(),
        summary=folder.summary() or {},
        start=starts[-1] if starts else {},
    )


# Curves


def overlaid(runs: Sequence[ComparedRun]) -> list[Chart]:
    """A chart for each curve that at least two runs have, a curve a run in the order of a single run's page."""
    return overlaid_groups([(run.letter, run.color, [run]) for run in runs], at_least=2)


def overlaid_groups(
    groups: Sequence[tuple[str, str, Sequence[ComparedRun]]], at_least: int = 1, chosen: Sequence[str] | None = None
) -> list[Chart]:
    """A chart for each curve that so many groups have, of the charts of these names where some are given; a curve a
    group (label, color, runs), the mean over its runs."""
    curves: dict[str, dict[str, dict[int, list[tuple[Chart, Series]]]]] = {}
    for number, (_, _, runs) in enumerate(groups):
        for chart in (chart for run in runs for chart in _charts(run)):
            for series in chart.series:
                known = chosen is None or chart.name in chosen
                if known and series.label == CHOSEN.get(chart.name, (series.label,))[0]:
                    labels = curves.setdefault(chart.name, {}).setdefault(series.label, {})
                    labels.setdefault(number, []).append((chart, series))
    charts: list[Chart] = []
    for label, found in ((label, found) for chart in curves.values() for label, found in chart.items()):
        every = [chart for group in found.values() for chart, _ in group]
        chart, many = every[0], any(len(chart.series) > 1 for chart in every)
        drawn = [
            replace(_mean([series for _, series in group]), label=groups[number][0], color=groups[number][1])
            for number, group in found.items()
        ]
        if len(drawn) >= at_least:
            charts.append(
                replace(
                    chart,
                    name=str(len(charts)),
                    caption=CHOSEN[chart.name][1] if chart.name in CHOSEN else chart.caption,
                    title=f"{chart.title}: {label}" if many else chart.title,
                    series=tuple(drawn),
                    stacked=False,
                    rule=None,
                )
            )
    return charts


def _mean(runs: Sequence[Series]) -> Series:
    """The mean of one curve over runs, at every step that one of them has, with its deviation where there are
    several."""
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


def write_curves(
    title: str, groups: Mapping[str, Sequence[str | Path]], out: Path, chosen: Sequence[str] | None = None
) -> list[Chart]:
    """Write a page of curves over each other, one a group of run folders (label -> folders: seeds, whose mean and
    deviation are drawn), of the charts of these names, all where none are given; returns them. The page holds its
    pictures inside."""
    colors = {label: PALETTE[number % len(PALETTE)] for number, label in enumerate(groups)}
    read = [(label, colors[label], [_read(path, "", "") for path in paths]) for label, paths in groups.items()]
    charts = overlaid_groups(read, chosen=chosen)
    page = page_template("curves.html").render(
        title=title,
        groups=[(label, colors[label], list(map(str, paths))) for label, paths in groups.items()],
        charts=[(chart, _picture(chart)) for chart in charts],
    )
    atomic_write_text(out, page)
    return charts


def _charts(run: ComparedRun) -> Iterator[Chart]:
    """A single run's charts; layers become their sum."""
    recipe = run.recipe
    for chart in charts_of(
        run.records,
        kl_value=recipe.grpo.kl_value,
        beta=recipe.grpo.beta,
        max_grad_norm=recipe.optim.max_grad_norm,
        groups=recipe.rollout.questions_per_step,
    ):
        if chart.stacked:
            layers = np.nansum([series.values for series in chart.series], axis=0)
            chart = replace(chart, series=(replace(chart.series[0], label="all", values=layers),))
        yield chart


def _picture(chart: Chart) -> str:
    """The chart as a data URI."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "chart.png"
        draw(chart, path)
        return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


# Figures


def _figures(runs: Sequence[ComparedRun]) -> Iterator[tuple[str, list[str]]]:
    """(name, a text for each run) of what the runs came to."""
    yield "Steps", [f"{run.steps[-1]['step'] if run.steps else 0} of {run.recipe.run.steps}" for run in runs]
    last = [run.evals[-1][1] if run.evals else {} for run in runs]
    if any(last):
        yield "Last evaluation at step", [str(run.evals[-1][0]) if run.evals else "-" for run in runs]
        yield "Held-out questions, greedy", [shown_number(measures.get("questions")) for measures in last]
        yield "Exact match before", [_shown(run.evals[0][1].get("em"), True) if run.evals else "-" for run in runs]
    for key, name, share in MEASURES:
        values = [measures.get(key) for measures in last]
        if any(value is not None for value in values):
            yield name, [_shown(value, share) for value in values]
    parts = [measures.get("parts") or {} for measures in last]
    for key in dict.fromkeys(name for part in parts if len(part) > 1 for name in part):
        yield f"Reward's part: {key}", [_shown(part.get(key), False) for part in parts]
    rates: tuple[tuple[str, Callable[[ComparedRun], float | None]], ...] = (
        ("Rollout, tokens per second", lambda run: _rate(run.steps, "sampled_tokens", "rollout_seconds")),
        ("Update, tokens per second", lambda run: _rate(run.steps, "train_tokens", "update_seconds")),
    )
    for name, rate in rates:
        values = [rate(run) for run in runs]
        if any(value is not None for value in values):
            yield name, ["-" if value is None else f"{value:,.0f}" for value in values]
    spent = [run.summary.get("seconds") for run in runs]
    if any(value is not None for value in spent):
        yield "In all", ["-" if value is None else duration(value) for value in spent]


def _shown(value: float | None, share: bool) -> str:
    return "-" if value is None else f"{value:.1%}" if share else f"{value:.2f}"


def _rate(steps: Sequence[Record], tokens: str, seconds: str) -> float | None:
    spent = sum(record.get(seconds) or 0.0 for record in steps)
    return sum(record.get(tokens) or 0 for record in steps) / spent if spent else None


def _tests(runs: Sequence[ComparedRun]) -> Iterator[dict[str, Any]]:
    """The first run against each other: its letter, and rows or the sentence that says why there are none."""
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


def _last_evaluation(run: ComparedRun) -> Evaluation | None:
    """The trajectories of the last evaluation, as `compare` wants them."""
    paths = [path for path in run.folder.evaluations.glob("step_*.jsonl") if step_of(path.stem) is not None]
    if not paths:
        return None
    questions: dict[str, str] = {}
    measures: dict[str, Measures] = {}
    for record in run.folder.stored_trajectories(max(paths)):
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


# What ran


def recipe_differences(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """(key, a value for each run) of the keys whose values are not the same in all, defaults included."""
    keys = [run.recipe.keys() for run in runs]
    names = dict.fromkeys(name for table in keys for name in table)
    texts = {name: [shown_value(table.get(name), "unset") for table in keys] for name in names}
    return [(name, values) for name, values in texts.items() if len(set(values)) > 1]


def _origin(run: ComparedRun) -> list[tuple[str, str]]:
    """Which code ran, where and when; a run of an earlier version did not say."""
    start = run.start
    if not start:
        return [("Commit and machine", "not recorded")]
    resumed = f", last resumed from step {start['step']}" if start.get("step") else ""
    return [
        ("Commit", str(start.get("commit") or "not from a checkout")),
        ("Machine", ", ".join(str(start[key]) for key in ("machine", "gpu") if start.get(key))),
        ("Started", f"{start.get('at')}{resumed}"),
        ("Python, torch", f"{start.get('python')}, {start.get('torch')}"),
    ]
