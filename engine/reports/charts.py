"""A run's curves: `charts_of` turns metrics records into charts, `draw` draws charts as a PNG.

A chart can have bars instead: one group of bars per name in `groups`, one bar per series in each group.

A missing or null value (a number that was not finite) is a gap in a curve. In stacked charts it is a layer of 0 where
other layers have a value. Curves without values and charts without curves are left out. A long curve is drawn twice: a
thin line for the raw values and a thick one for their moving mean. Evaluations are dots and are never smoothed.
matplotlib's figures need no display and no global pyplot state.
"""

import io
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter
from PIL import Image

from thresher.engine.evaluation.metrics import NAMES, RECALLS
from thresher.engine.reports.pages import ENDINGS, Record

Floats = npt.NDArray[np.float64]
Value = str | Callable[[Record], float]  # a metrics record's key, or a function of the record

BLUE, ORANGE, GREEN, PURPLE, RED = "#2f6db5", "#d9661f", "#2f9270", "#8759b0", "#c23b3b"
GREY, SKY = "#8b929c", "#8fbbe6"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY, GREY)
SAMPLED, HELD_OUT = "sampled, training questions", "greedy, held-out questions"
PHASES = {  # key of a step's seconds -> its color, its name in a sentence
    "update": (GREEN, "the update"),
    "decode": (BLUE, "decoding"),
    "prefill": (SKY, "prefill"),
    "search": (ORANGE, "searching"),
    "host": (GREY, "Python around the rollout"),
    "reward": (PURPLE, "rewards"),
    "recompute": (RED, "recomputing log-probs"),
}
CAPTIONS = {
    "reward": "Mean reward of a trajectory. The advantage of a sample is its reward minus the mean of its group.",
    "em": "Share of correct answers. Greedy answers can jump, because one flip of the most likely token changes an"
    " episode; sampled answers change gradually with the probabilities.",
    "kl": "Means over sampled tokens, with d = log p - log p_ref: k1 = d, unbiased and of either sign; k2 = d²/2;"
    " k3 = e^(-d) - 1 + d. ",
    "kl_largest": "Over a step's sampled tokens: the value that the loss adds (before β), and |dKL/d log p|, the"
    " coefficient of the token's gradient. k3's coefficient is e^(-d) - 1, which explodes for a token that has become"
    " very unlikely; k2's is d.",
    "length": "Sampled tokens of a trajectory, summed over its turns; retrieved text is not counted.",
    "searches": "Searches that had a query and returned passages.",
    "actions": "Turns that the policy wrote: searches, answers, and turns that are neither.",
    "sequence": "Tokens of a trajectory: prompt, sampled and retrieved tokens.",
    "state_tokens": "Sampled tokens in the loss of a step, over all its trajectories.",
    "token_time": "Time of a step's rollout, rewards and update, divided by the number of tokens that it sampled.",
    "loss": "Loss of a step, with its KL term; mean over its updates.",
    "entropy": "Entropy of the policy's next-token distribution, at the sampled tokens.",
    "right_logprob": "Mean log-prob, when sampled, of the tokens of a trajectory with a correct answer; mean over these"
    " trajectories. If it falls, training makes correct answers less likely (lazy likelihood displacement).",
    "parts": "Means over trajectories of the terms of the system's reward, before weighting.",
    "compression": "Length of the passages divided by that of the evidence, per question; those without evidence"
    " are left out.",
    "recall": "Share of trajectories whose text contains a gold answer. Sampled, training questions.",
    "zero_advantage": "Share of groups whose samples all have the same reward. Their advantages are 0, so they give no"
    " gradient. The share is high when no answer is correct yet, and when all are.",
    "grad_norm": "Norm of the gradient of all weights, before clipping.",
    "logprob_gap": "|log p when sampled - log p when trained| of the same token under the same weights. It should be"
    " rounding error only. If it grows, rollout and update disagree. (With several updates per batch, the mean includes"
    " the changes by earlier updates.)",
    "unanswered": "Share of trajectories that ended without an answer, by the reason for the end.",
    "tokens_per_s": "Rollout: sampled tokens per second of rollout, searches included. Update: tokens of the packed"
    " trajectories, prompts and passages included, per second of update.",
    "slots": "Share of rollout.max_num_seqs slots that sampled a token, mean over the decode steps of a rollout. It is"
    " low if a step waits for its longest samples, or has fewer samples than slots.",
    "staleness": "Updates between the weights that sampled a token and the update that trains it; the updates of one"
    " step count as one (docs/asynchrony.md).",
    "staleness_tokens": "Number of tokens of a step sampled by the weights just before its update (0), by those one"
    " step earlier (1), and so on.",
    "extra_tokens": "Additional tokens, as a share of a step's trained tokens: prefilled again for samples that began"
    " in an earlier rollout, and sampled for groups that grpo.refill set aside.",
    "time": "The rollout is decode + prefill + search + host (Python around them). Rewards and the update (reference,"
    " forward, backward, optimiser) follow.",
}
# Charts that only the figures of papers have. A run's page and a comparison leave them out.
OF_FIGURES = frozenset({"actions", "sequence", "state_tokens", "token_time", "loss"})
# Charts whose curves measure one quantity in several ways: the curve used to compare several runs, and its caption.
COMPARED_BY = {
    "kl": (
        "k3",
        "Mean over sampled tokens of e^(-d) - 1 + d, with d = log p - log p_ref, whichever KL the recipe has.",
    ),
    "kl_largest": ("value", "Over a step's sampled tokens, by the estimator of each recipe (grpo.kl_value), before β."),
    "logprob_gap": ("largest", "|log p when sampled - log p when trained| of the same token under the same weights."),
}
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 24,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9aa1ab",
    "axes.labelcolor": "#4a5058",
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "grid.color": "#e6e8eb",
    "xtick.color": "#4a5058",
    "ytick.color": "#4a5058",
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "legend.handlelength": 1.4,
    "legend.columnspacing": 1.2,
    "legend.borderpad": 0.0,
    "lines.solid_capstyle": "round",
}
SIZE, OVERVIEW_SIZE, DPI = (5.4, 3.2), (9.8, 3.3), 150  # inches, inches, pixels per inch
COLORS, MANY = 64, 4  # colors of a picture whose charts have at most MANY curves each; others have 256
ENTRY, LETTER = 29.0, 4.9  # of a legend, in points: line and gaps of an entry, and approximately one letter
SMOOTH_FROM = 20  # a curve of fewer steps is not smoothed


@dataclass(frozen=True, slots=True)
class Series:
    """One curve: steps [n] ascending, values [n] with nan for a gap. `dots` marks every point and disables smoothing.
    spread [n]: the standard deviation over runs, drawn as a band, if `values` are means over runs; None for one run."""

    label: str
    color: str
    steps: Floats
    values: Floats
    dots: bool = False
    spread: Floats | None = None


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves over steps that share an axis. name: of the file. stacked: draw filled layers. rule: a dashed horizontal
    line. groups: draw bars, in groups with these names; the `steps` of a series then count the groups from 0."""

    name: str
    title: str
    caption: str
    series: tuple[Series, ...]
    percent: bool = False
    log: bool = False
    stacked: bool = False
    rule: tuple[float, str] | None = None
    groups: tuple[str, ...] = ()


def is_chosen(name: str, chosen: Sequence[str] | None) -> bool:
    """Return whether a page has this chart. chosen: names of charts, None for all but OF_FIGURES."""
    return name not in OF_FIGURES if chosen is None else name in chosen


def charts_of(records: Sequence[Record], **recipe: Any) -> list[Chart]:
    """Return the non-empty charts of these metrics records, in display order. recipe: the options of `all_charts`."""
    charts = (chart for chart in all_charts(records, records, **recipe) if is_chosen(chart.name, None))
    return [chart for chart in map(filled, charts) if chart.series]


def all_charts(
    records: Sequence[Record],
    of_all: Sequence[Record],
    *,
    kl_value: str,
    beta: float,
    max_grad_norm: float,
    groups: int,
) -> list[Chart]:
    """Return all charts of metrics records, including empty curves.

    of_all: the records of all runs that share the charts; they decide how the parts of rewards are grouped into charts.
    kl_value, beta, max_grad_norm: from the recipe, for captions and for the line of the clipping threshold. groups:
    number of groups per step, the denominator of `zero_advantage_groups`.
    """
    steps = [record for record in records if "eval" not in record]
    evals = [{"step": record["step"], **(record["eval"] or {})} for record in records if "eval" in record]

    def lines(values: Mapping[str, Value], colors: Sequence[str] = PALETTE) -> tuple[Series, ...]:
        return tuple(
            _series(steps, value, label, color)
            for (label, value), color in zip(values.items(), itertools.cycle(colors), strict=False)
        )

    def both(value: Value) -> tuple[Series, ...]:
        return *lines({SAMPLED: value}), _series(evals, value, HELD_OUT, ORANGE, dots=True)

    def share(top: str, bottom: str | int) -> Value:
        return lambda record: _ratio(_number(record, top), _number(record, bottom))

    def ended(reason: str, record: Record) -> float:
        reasons = record.get("reasons")
        count = float(reasons.get(reason, 0)) if isinstance(reasons, Mapping) else float("nan")
        return _ratio(count, _number(record, "questions"))

    def again(record: Record) -> float:  # for partial rollouts only; otherwise it is always 0
        known = _number(record, "tokens_recomputed") if "staleness_tokens" in record else float("nan")
        return _ratio(known, _number(record, "loss_tokens"))

    def token_time(record: Record) -> float:
        seconds = np.array([_number(record, f"{phase}_seconds") for phase in PHASES])
        total = np.nansum(seconds) if np.isfinite(seconds).any() else np.nan
        return _ratio(1000 * float(total), _number(record, "sampled_tokens"))

    endings = {label: partial(ended, reason) for reason, label in ENDINGS.items()}
    in_loss = beta > 0 and kl_value != "none"
    kl = f"The recipe adds {beta:g} × {kl_value} to the loss." if in_loss else "The recipe's loss has no KL term."

    def chart(name: str, title: str, series: tuple[Series, ...], **options: Any) -> Chart:
        return Chart(name, title, CAPTIONS[name] + (kl if name == "kl" else ""), series, **options)

    return [
        chart("reward", "Reward", both("reward")),
        chart("em", "Exact match", both("em"), percent=True),
        chart("kl", "KL to the reference, by estimator", lines({"k1": "kl_k1", "k2": "kl_k2", "k3": "kl_k3"})),
        chart(
            "kl_largest",
            "KL of a single token, largest",
            lines({"value": "kl_largest", "coefficient": "kl_coefficient_largest"}),
            log=True,
        ),
        chart("length", "Response length (tokens)", both("response_tokens")),
        chart("searches", "Valid searches per trajectory", both("searches")),
        chart("actions", "Actions per trajectory", lines({"actions": "actions"})),
        chart("sequence", "Whole sequence (tokens)", lines({"tokens": "tokens"})),
        chart("state_tokens", "State tokens per step", lines({"tokens": "loss_tokens"})),
        chart("token_time", "Time per sampled token (ms)", lines({"time": token_time})),
        chart("loss", "Loss", lines({"loss": "loss"})),
        chart("entropy", "Entropy (nats per sampled token)", lines({"entropy": "entropy"})),
        chart(
            "right_logprob",
            "Log-prob of right answers (nats per sampled token)",
            lines({"right": "right_logprob"}),
        ),
        *_reward_charts(of_all, lines, both),
        chart("compression", "Compression ratio", both("compression")),
        chart(
            "recall",
            "Answer recall",
            lines({NAMES[name][0].removeprefix("Answer recall of the "): name for name in RECALLS}),
            percent=True,
        ),
        chart(
            "zero_advantage",
            "Groups without a signal",
            lines({"groups": share("zero_advantage_groups", groups)}, (PURPLE,)),
            percent=True,
        ),
        chart(
            "grad_norm",
            "Gradient norm",
            lines({"norm": "grad_norm"}),
            rule=(max_grad_norm, f"clipped to {max_grad_norm:g}") if np.isfinite(max_grad_norm) else None,
        ),
        chart(
            "logprob_gap",
            "Log-prob gap, sampling to training",
            lines({"largest": "logprob_gap_max", "mean": "logprob_gap"}, (RED, BLUE)),
            log=True,
        ),
        chart(
            "unanswered",
            "Trajectories without an answer",
            lines(endings, (BLUE, ORANGE, PURPLE, RED, GREY)),
            percent=True,
            stacked=True,
        ),
        chart(
            "tokens_per_s",
            "Tokens per second",
            (
                _series(steps, share("sampled_tokens", "rollout_seconds"), "rollout", BLUE),
                _series(steps, share("train_tokens", "update_seconds"), "update", GREEN),
            ),
        ),
        chart("slots", "Slots that draw", lines({"slots": "slots_busy"}), percent=True),
        chart("staleness", "Staleness (updates), mean over trained tokens", lines({"mean": "staleness_mean"})),
        chart("staleness_tokens", "Trained tokens by staleness", _staleness_series(steps), stacked=True),
        chart(
            "extra_tokens",
            "Tokens prefilled again, or set aside",
            lines({"prefilled again": again, "set aside": share("tokens_set_aside", "loss_tokens")}, (SKY, PURPLE)),
            percent=True,
        ),
        chart(
            "time",
            "Seconds per step",
            lines({phase: f"{phase}_seconds" for phase in PHASES}, [color for color, _ in PHASES.values()]),
            stacked=True,
        ),
    ]


def _reward_charts(
    records: Sequence[Record],
    lines: Callable[[Mapping[str, Value]], tuple[Series, ...]],
    both: Callable[[Value], tuple[Series, ...]],
) -> Iterator[Chart]:
    """Yield the charts of a system's reward terms, if there are several.

    Terms with a common prefix (answer, answer_full, answer_evidence) share a chart. A term that leaves [0, 1] (a bonus,
    a count) has its own chart. All others share one.
    """
    parts = [(record.get("eval") or record).get("parts") or {} for record in records]
    names = list(dict.fromkeys(name for own in parts for name in own))
    if len(names) < 2:
        return

    def term(name: str, record: Record) -> float:
        return _number(record.get("parts") or {}, name)

    groups: dict[str, list[str]] = {}
    for name in names:
        families = {one: [x for x in names if x == one or x.startswith(f"{one}_")] for one in names}
        alone = name if any(_number(own, name) > 1 for own in parts) else ""
        key = next((one for one, members in families.items() if len(members) > 1 and name in members), alone)
        groups.setdefault(key, []).append(name)
    for key, members in groups.items():
        several = len(members) > 1
        yield Chart(
            f"parts_{key}" if key else "parts",
            "Parts of the reward" if not key and several else f"Reward's part: {key or members[0]}",
            CAPTIONS["parts"],
            lines({name: partial(term, name) for name in members}) if several else both(partial(term, members[0])),
        )


def _staleness_series(steps: Sequence[Record]) -> tuple[Series, ...]:
    """Return one curve per staleness, from 0 to the largest that occurs: the number of tokens with it."""

    def count(staleness: int, record: Record) -> float:
        counts = record.get("staleness_tokens")
        if not counts:
            return float("nan")
        return float(counts[staleness]) if staleness < len(counts) else 0.0

    most = max((len(record.get("staleness_tokens") or ()) for record in steps), default=0)
    return tuple(
        _series(steps, partial(count, staleness), f"{staleness}", color)
        for staleness, color in zip(range(most), itertools.cycle(PALETTE), strict=False)
    )


def _series(records: Sequence[Record], value: Value, label: str, color: str, dots: bool = False) -> Series:
    read = partial(_number, key=value) if isinstance(value, str) else value
    steps, values = ([one(record) for record in records] for one in (lambda record: record["step"], read))
    return Series(label, color, np.array(steps, np.float64), np.array(values, np.float64), dots)


def filled(chart: Chart) -> Chart:
    """Return the chart without empty curves: values <= 0 on a log axis and all-zero layers count as empty."""
    drawn = []
    for series in chart.series:
        values = np.where(series.values <= 0, np.nan, series.values) if chart.log else series.values
        if np.isfinite(values).any() and not (chart.stacked and not np.nansum(values)):
            drawn.append(replace(series, values=values))
    return replace(chart, series=tuple(drawn))


def _number(record: Record, key: str | int) -> float:
    """Return the record's value of a key, or nan if it has no number. A number in place of the key is returned."""
    value = record.get(key) if isinstance(key, str) else key
    return float(value) if isinstance(value, int | float) else float("nan")


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom > 0 else float("nan")


def draw(*charts: Chart) -> bytes:
    """Return charts side by side as one PNG."""
    size = OVERVIEW_SIZE if len(charts) > 1 else SIZE
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, dpi=DPI, layout="constrained", facecolor="white")
        for axes, chart in zip(np.ravel(figure.subplots(1, len(charts), squeeze=False)), charts, strict=True):
            _draw_axes(axes, chart)
        drawn, png = io.BytesIO(), io.BytesIO()
        figure.savefig(drawn, format="png")
    colors = COLORS if all(len(chart.series) <= MANY for chart in charts) else 256
    with Image.open(drawn) as picture:
        picture.convert("RGB").quantize(colors).save(png, "PNG", optimize=True)
    return png.getvalue()


def _draw_axes(axes: Axes, chart: Chart) -> None:
    axes.set_title(chart.title)
    if not chart.groups:
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    if chart.log:
        axes.set_yscale("log")
    if chart.groups:
        _draw_bars(axes, chart)
    elif chart.stacked:
        _draw_layers(axes, chart.series)
    else:
        for series in chart.series:
            _draw_line(axes, series)
    if chart.rule and max(np.nanmax(series.values) for series in chart.series) > 0.5 * chart.rule[0]:
        axes.axhline(chart.rule[0], color=GREY, lw=1, ls=(0, (4, 3)), label=chart.rule[1])
    if chart.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    if not chart.log:
        _set_range(axes, chart)
    if chart.name == "em":
        _label_ends(axes, chart.series[-1])
    many = len(axes.get_legend_handles_labels()[1]) > 1
    if many or chart.stacked or chart.series[0].label in (SAMPLED, HELD_OUT):
        _draw_legend(axes)


def _draw_legend(axes: Axes) -> None:
    assert isinstance(axes.figure, Figure)
    labels = axes.get_legend_handles_labels()[1]
    widths = [ENTRY + LETTER * len(label) for label in labels]
    room = 72 * 0.9 * axes.figure.get_figwidth() / len(axes.figure.axes)
    columns = len(labels) if sum(widths) <= room else max(1, int(room / max(widths)))
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.01), ncols=columns, borderaxespad=0.0)
    axes.set_title(axes.get_title(loc="left"), pad=STYLE["axes.titlepad"] + 12 * (-(-len(labels) // columns) - 1))


def _set_range(axes: Axes, chart: Chart) -> None:
    """Start the axis at 0 unless a value is negative. End it at 100% for exact match, so that runs are comparable."""
    low, high = axes.dataLim.y0, axes.dataLim.y1
    if chart.name == "em":
        axes.set_ylim(0, 1.04)
    elif low >= 0:
        axes.set_ylim(0, (1.12 if chart.groups else 1.06) * high if high > 0 else 1.0)
    if axes.get_ylim()[1] >= 10_000:
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _draw_line(axes: Axes, series: Series) -> None:
    window = 1 if series.dots else smoothing(len(series.values))
    plot = partial(axes.plot, color=series.color)
    if series.spread is not None:
        middle, half = smooth(series.values, window), smooth(series.spread, window)
        high = middle + half
        logarithmic = axes.get_yscale() == "log"  # in which case the band is symmetric as a factor and stays above 0
        low = middle**2 / high if logarithmic else middle - half
        axes.fill_between(series.steps, low, high, color=series.color, alpha=0.15, lw=0)
    if window == 1:
        marker: dict[str, Any] = {"marker": "o", "ms": 3.6} if series.dots else {"marker": "."}
        plot(series.steps, series.values, lw=1.6, label=series.label, clip_on=False, **marker)
        return
    plot(series.steps, series.values, lw=0.8, alpha=0.3)
    plot(series.steps, smooth(series.values, window), lw=1.9, label=series.label)


def _draw_layers(axes: Axes, layers: Sequence[Series]) -> None:
    steps = np.unique(np.concatenate([layer.steps for layer in layers]))
    edges = np.append(steps - 0.5, steps[-1] + 0.5)
    table = np.full((len(layers), len(steps)), np.nan)
    for row, layer in zip(table, layers, strict=True):
        row[np.searchsorted(steps, layer.steps)] = layer.values
    base = np.zeros(len(steps))
    base[~np.isfinite(table).any(0)] = np.nan
    for layer, values in zip(layers, np.nan_to_num(table), strict=True):
        axes.stairs(base + values, edges, baseline=base, fill=True, color=layer.color, lw=0, label=layer.label)
        base = base + values


def _draw_bars(axes: Axes, chart: Chart) -> None:
    """Draw one bar per series in each group, with its value above and its deviation as a line; nan is no bar."""
    count, grey = len(chart.series), STYLE["xtick.color"]
    width = 0.84 / count
    for number, series in enumerate(chart.series):
        known = np.isfinite(series.values)
        at = series.steps[known] + (number - (count - 1) / 2) * width
        spread = None if series.spread is None else np.nan_to_num(series.spread[known])
        look: dict[str, Any] = {"color": series.color, "label": series.label, "error_kw": {"ecolor": grey, "lw": 1}}
        bars = axes.bar(at, series.values[known], 0.92 * width, yerr=spread, **look)
        axes.bar_label(bars, fmt="{:.0%}" if chart.percent else "{:.2f}", padding=1.5, fontsize=7, color=grey)
    axes.set_xticks(range(len(chart.groups)), chart.groups)
    axes.set_xlim(-0.5, len(chart.groups) - 0.5)
    axes.tick_params(axis="x", length=0)


def _label_ends(axes: Axes, series: Series) -> None:
    known = np.flatnonzero(np.isfinite(series.values))
    if not series.dots or len(known) < 2:
        return
    # Place the first label next to the rising curve, but above the axis.
    first = (14, -8) if series.values[known[0]] > 0.1 else (4, 8)
    for at, offset in ((known[0], first), (known[-1], (7, -3))):
        axes.annotate(
            f"{series.values[at]:.1%}",
            (series.steps[at], series.values[at]),
            xytext=offset,
            textcoords="offset points",
            annotation_clip=False,
            path_effects=[withStroke(linewidth=3, foreground="white")],
            color=series.color,
            fontweight="bold",
        )


def smoothing(count: int) -> int:
    """Return the width of the moving mean, an odd number of steps, for a curve of `count` steps; 1: no smoothing."""
    return 1 if count < SMOOTH_FROM else count // 50 * 2 + 3


def smooth(values: Floats, window: int) -> Floats:
    """Return the centred moving mean over `window` values, fewer at the ends. Gaps are skipped; nan if all are gaps."""
    known = np.isfinite(values)
    kernel = np.ones(window)
    counts = np.convolve(known, kernel, "same")
    sums = np.convolve(np.where(known, values, 0.0), kernel, "same")
    means: Floats = np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0.5)
    return means
