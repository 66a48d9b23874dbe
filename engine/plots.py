"""A run's curves as PNG files: what the papers' figures show, and where the time went.

`charts_of` turns metrics records into charts, which are plain data (a title, a caption, series of numbers) that a test
can read; `draw` and `draw_overview` put them on paper, all in one style. A value that is missing or null (a number that
was not finite) is a gap in its curve; a curve without any value is left out, and so is a chart without a curve.

Deliberately absent: pyplot and its global state, interactive charts, and any choice of what a measure means.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

from thresher.policy.files import atomic_path

Floats = npt.NDArray[np.float64]
Record = Mapping[str, Any]

BLUE, ORANGE, GREEN, PURPLE, RED, GREY, SKY = (
    "#2f6db5",
    "#d9661f",
    "#2f9270",
    "#8759b0",
    "#c23b3b",
    "#8b929c",
    "#8fbbe6",
)
SAMPLED, HELD_OUT = "sampled, training questions", "greedy, held-out questions"
ENDINGS = {  # as Trajectory.reason has them
    "turns": ("turn limit", BLUE),
    "turn_tokens": ("turn too long", ORANGE),
    "tokens": ("token limit", PURPLE),
    "context": ("context full", RED),
    "ended": ("text ended", GREY),
}
STYLE = {
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
SIZE, OVERVIEW_SIZE, DPI = (5.4, 3.2), (9.8, 3.3), 150  # inches, inches, pixels an inch
SMOOTH_FROM = 20  # a curve of fewer steps is drawn as it is


@dataclass(frozen=True, slots=True)
class Series:
    """One curve: steps [n] ascending, values [n] with nan for a gap. `dots` marks every point and smooths none."""

    label: str
    color: str
    steps: Floats
    values: Floats
    dots: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """Curves over steps that share an axis. `name` is the file's, `stacked` draws filled layers, `rule` a dashed
    line."""

    name: str
    title: str
    caption: str
    series: tuple[Series, ...]
    percent: bool = False
    log: bool = False
    stacked: bool = False
    rule: tuple[float, str] | None = None


def charts_of(
    records: Sequence[Record], *, kl_value: str, beta: float, max_grad_norm: float, groups: int
) -> list[Chart]:
    """The charts that these metrics records fill, in the order of reading.

    kl_value, beta, max_grad_norm: the recipe's, for captions and for the line at which gradients are clipped.
    groups: questions of a step, of which `zero_advantage_groups` counts some.
    """
    steps = [record for record in records if "eval" not in record]
    evals = [{"step": record["step"], **(record["eval"] or {})} for record in records if "eval" in record]

    def line(key: str, label: str, color: str) -> Series:
        return _series(steps, lambda record: _number(record, key), label, color)

    def per_step(top: str, bottom: str, label: str, color: str) -> Series:
        return _series(steps, lambda record: _ratio(_number(record, top), _number(record, bottom)), label, color)

    def both(key: str) -> tuple[Series, ...]:
        held_out = _series(evals, lambda record: _number(record, key), HELD_OUT, ORANGE, dots=True)
        return line(key, SAMPLED, BLUE), held_out

    return _filled(
        [
            *_learning(line, both, kl_value, beta),
            *_health(steps, line, max_grad_norm, groups),
            *_speed(line, per_step),
        ]
    )


Line = Callable[[str, str, str], Series]


def _learning(line: Line, both: Callable[[str], tuple[Series, ...]], kl_value: str, beta: float) -> list[Chart]:
    kl = f"The recipe adds {beta:g} × {kl_value} to the loss." if beta > 0 else "The recipe's loss has no KL."
    return [
        Chart(
            name="reward",
            title="Reward",
            caption="Mean reward of a trajectory. The advantage of a sample is its reward against its group's mean.",
            series=both("reward"),
        ),
        Chart(
            name="em",
            title="Exact match",
            caption="Share of right answers. Greedy answers jump when the likeliest choice flips at one point of an"
            " episode; sampled answers show the probabilities moving underneath.",
            series=both("em"),
            percent=True,
        ),
        Chart(
            name="kl",
            title="KL to the reference, by estimator",
            caption="Means over sampled tokens, with the log-ratio d = log p_ref - log p: k1 = -d, unbiased, and of"
            f" either sign; k2 = d²/2; k3 = e^d - 1 - d. {kl}",
            series=(line("kl_k1", "k1", BLUE), line("kl_k2", "k2", ORANGE), line("kl_k3", "k3", GREEN)),
        ),
        Chart(
            name="length",
            title="Response length (tokens)",
            caption="Tokens that the policy wrote in a trajectory, all its turns together; retrieved text not counted.",
            series=both("response_tokens"),
        ),
        Chart(
            name="searches",
            title="Valid searches per trajectory",
            caption="Searches that held a query and were answered with passages.",
            series=both("searches"),
        ),
        Chart(
            name="entropy",
            title="Entropy (nats per sampled token)",
            caption="Of the policy's next-token distribution, over the tokens that it sampled.",
            series=(line("entropy", "entropy", BLUE),),
        ),
    ]


def _health(steps: Sequence[Record], line: Line, max_grad_norm: float, groups: int) -> list[Chart]:
    rule = (max_grad_norm, f"clipped to {max_grad_norm:g}") if np.isfinite(max_grad_norm) else None
    return [
        Chart(
            name="zero_advantage",
            title="Groups without a signal",
            caption="Share of groups whose samples all got the same reward: all advantages are 0, and the group teaches"
            " nothing. High at both ends: nothing right yet, or everything.",
            series=(
                _series(
                    steps, lambda record: _ratio(_number(record, "zero_advantage_groups"), groups), "groups", PURPLE
                ),
            ),
            percent=True,
        ),
        Chart(
            name="grad_norm",
            title="Gradient norm",
            caption="Before clipping, over all weights.",
            series=(line("grad_norm", "norm", BLUE),),
            rule=rule,
        ),
        Chart(
            name="logprob_gap",
            title="Log-prob gap, sampling to training",
            caption="|log p when sampled - log p when trained| of the same token under the same weights, before they"
            " change: it should be rounding and no more. If it grows, samplers and trainer disagree.",
            series=(line("logprob_gap_max", "largest", RED), line("logprob_gap", "mean", BLUE)),
            log=True,
        ),
        Chart(
            name="unanswered",
            title="Trajectories without an answer",
            caption="Share that ended otherwise than by answering, by what ended them.",
            series=tuple(
                _series(steps, lambda record, reason=reason: _reason_share(record, reason), label, color)
                for reason, (label, color) in ENDINGS.items()
                if any(_reason_share(record, reason) > 0 for record in steps)
            ),
            percent=True,
            stacked=True,
        ),
    ]


def _speed(line: Line, per_step: Callable[[str, str, str, str], Series]) -> list[Chart]:
    parts = (
        ("update", "update", GREEN),
        ("decode", "decode", BLUE),
        ("prefill", "prefill", SKY),
        ("search", "search", ORANGE),
        ("host", "host", GREY),
        ("reward", "reward", PURPLE),
    )
    return [
        Chart(
            name="tokens_per_s",
            title="Tokens per second",
            caption="Rollout: tokens sampled per second of rollout, searches included. Update: tokens of packed"
            " trajectories (prompts and passages too) per second of update.",
            series=(
                per_step("sampled_tokens", "rollout_seconds", "rollout", BLUE),
                per_step("train_tokens", "update_seconds", "update", GREEN),
            ),
        ),
        Chart(
            name="time",
            title="Seconds per step",
            caption="Rollout is decode + prefill + search + host (everything in Python around them); then the rewards"
            " and the update (reference, forward, backward, optimiser).",
            series=tuple(line(f"{key}_seconds", label, color) for key, label, color in parts),
            stacked=True,
        ),
    ]


def draw(chart: Chart, path: Path) -> None:
    """Write one chart as a PNG, whole or not at all."""
    _save([chart], SIZE, path)


def draw_overview(charts: Sequence[Chart], path: Path) -> None:
    """Write several charts side by side as one PNG, whole or not at all."""
    _save(charts, OVERVIEW_SIZE if len(charts) > 1 else SIZE, path)


def _save(charts: Sequence[Chart], size: tuple[float, float], path: Path) -> None:
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, dpi=DPI, layout="constrained", facecolor="white")
        for axes, chart in zip(np.ravel(figure.subplots(1, len(charts), squeeze=False)), charts, strict=True):
            _draw_axes(axes, chart)
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format="png")


def _draw_axes(axes: Axes, chart: Chart) -> None:
    axes.set_title(chart.title)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))
    if chart.log:
        axes.set_yscale("log")
    if chart.stacked:
        _draw_layers(axes, chart.series)
    else:
        for series in chart.series:
            _draw_line(axes, series)
    if chart.rule and max(np.nanmax(series.values) for series in chart.series) > 0.5 * chart.rule[0]:
        axes.axhline(chart.rule[0], color=GREY, lw=1, ls=(0, (4, 3)), label=chart.rule[1])
    if chart.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    elif axes.get_ylim()[1] >= 10_000:
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    if chart.percent and chart.name == "em":
        axes.set_ylim(0, 1.04)
        _label_ends(axes, chart.series[-1])
    elif not chart.log:
        low = min(float(np.nanmin(series.values)) for series in chart.series)
        axes.set_ylim(bottom=0 if low >= 0 else None)
    if len(axes.get_legend_handles_labels()[1]) > 1 or chart.series[0].label in (SAMPLED, HELD_OUT):
        axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.01), ncols=6, borderaxespad=0.0)


def _draw_line(axes: Axes, series: Series) -> None:
    if series.dots:
        axes.plot(series.steps, series.values, color=series.color, lw=1.6, marker="o", ms=3.6, label=series.label)
        return
    window = smoothing(len(series.values))
    if window == 1:
        axes.plot(series.steps, series.values, color=series.color, lw=1.6, marker=".", label=series.label)
        return
    axes.plot(series.steps, series.values, color=series.color, lw=0.8, alpha=0.3)
    axes.plot(series.steps, smooth(series.values, window), color=series.color, lw=1.9, label=series.label)


def _draw_layers(axes: Axes, layers: Sequence[Series]) -> None:
    """Filled layers, one on the other; steps that a layer lacks count as 0."""
    steps = np.unique(np.concatenate([layer.steps for layer in layers]))
    edges = np.append(steps - 0.5, steps[-1] + 0.5)
    base = np.zeros(len(steps))
    for layer in layers:
        values = np.zeros(len(steps))
        values[np.searchsorted(steps, layer.steps)] = np.nan_to_num(layer.values)
        axes.stairs(base + values, edges, baseline=base, fill=True, color=layer.color, lw=0, label=layer.label)
        base = base + values


def _label_ends(axes: Axes, series: Series) -> None:
    """Write the first and the last value of a dotted curve beside their points."""
    known = np.flatnonzero(np.isfinite(series.values))
    if not series.dots or len(known) < 2:
        return
    for at, offset in ((known[0], (14, -8)), (known[-1], (7, -3))):
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
    """The width, an odd number of steps, of the moving mean drawn through a curve of so many; 1 is none."""
    return 1 if count < SMOOTH_FROM else count // 50 * 2 + 3


def smooth(values: Floats, window: int) -> Floats:
    """Centred moving mean over `window` values, fewer at the ends; a gap is skipped, and nan where all are gaps."""
    known = np.isfinite(values)
    kernel = np.ones(window)
    counts = np.convolve(known, kernel, "same")
    sums = np.convolve(np.where(known, values, 0.0), kernel, "same")
    return np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0.5)


def _series(
    records: Sequence[Record], value: Callable[[Record], float], label: str, color: str, dots: bool = False
) -> Series:
    steps = np.array([record["step"] for record in records], np.float64)
    return Series(label, color, steps, np.array([value(record) for record in records], np.float64), dots)


def _filled(charts: Sequence[Chart]) -> list[Chart]:
    """The charts with a value in them, each without its empty curves (0 or less is empty on a log axis)."""
    kept = []
    for chart in charts:
        drawn = []
        for series in chart.series:
            hidden = series.values <= 0 if chart.log else np.zeros(len(series.values), bool)
            values = np.where(hidden, np.nan, series.values)
            if np.isfinite(values).any():
                drawn.append(replace(series, values=values))
        if drawn:
            kept.append(replace(chart, series=tuple(drawn)))
    return kept


def _number(record: Record, key: str) -> float:
    value = record.get(key)
    return float(value) if isinstance(value, int | float) else float("nan")


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom > 0 else float("nan")


def _reason_share(record: Record, reason: str) -> float:
    reasons = record.get("reasons")
    count = reasons.get(reason, 0) if isinstance(reasons, Mapping) else 0
    return _ratio(float(count), _number(record, "questions"))
