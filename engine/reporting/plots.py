"""Charts as PNG files, all in one style: drawn through matplotlib's figures, without a screen. Of few colours, so that
a page can hold them all.

A curve of many steps is drawn twice, thin as it is and thick as a moving mean; evaluations are dots and never smoothed.

Deliberately absent: pyplot and its global state, and interactive charts.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter
from PIL import Image

from thresher.common.files import atomic_path
from thresher.engine.reporting.charts import GREY, HELD_OUT, SAMPLED, Chart, Floats, Series

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
SIZE, OVERVIEW_SIZE, DPI = (5.4, 3.2), (9.8, 3.3), 150  # inches, inches, pixels an inch
COLORS, MANY = 64, 4  # of a picture: a few curves with their edges, in a third of the bytes; of more curves all 256
ENTRY, LETTER = 29.0, 4.9  # of a legend, in points: an entry's line and gaps, and a letter, about
SMOOTH_FROM = 20  # a curve of fewer steps is drawn as it is


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
        drawn = io.BytesIO()
        figure.savefig(drawn, format="png")
        with atomic_path(path) as temporary, Image.open(drawn) as picture:
            colors = COLORS if all(len(chart.series) <= MANY for chart in charts) else 256
            picture.convert("RGB").quantize(colors).save(temporary, "PNG", optimize=True)


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
    if not chart.log:
        _set_range(axes, chart)
    if chart.name == "em":
        _label_ends(axes, chart.series[-1])
    many = len(axes.get_legend_handles_labels()[1]) > 1
    if many or chart.stacked or chart.series[0].label in (SAMPLED, HELD_OUT):
        _draw_legend(axes)


def _draw_legend(axes: Axes) -> None:
    """Between the title and the curves, in as many lines as it takes."""
    assert isinstance(axes.figure, Figure)
    labels = axes.get_legend_handles_labels()[1]
    widths = [ENTRY + LETTER * len(label) for label in labels]
    room = 72 * 0.9 * axes.figure.get_figwidth() / len(axes.figure.axes)
    columns = len(labels) if sum(widths) <= room else max(1, int(room / max(widths)))
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.01), ncols=columns, borderaxespad=0.0)
    axes.set_title(axes.get_title(loc="left"), pad=STYLE["axes.titlepad"] + 12 * (-(-len(labels) // columns) - 1))


def _set_range(axes: Axes, chart: Chart) -> None:
    """From 0, unless something is negative; up to 100% for exact match, so that runs compare at a glance."""
    low, high = axes.dataLim.y0, axes.dataLim.y1
    if chart.name == "em":
        axes.set_ylim(0, 1.04)
    elif low >= 0:
        axes.set_ylim(0, 1.06 * high if high > 0 else 1.0)
    if axes.get_ylim()[1] >= 10_000:
        axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))


def _draw_line(axes: Axes, series: Series) -> None:
    if series.spread is not None:
        window = 1 if series.dots else smoothing(len(series.values))
        middle, half = smooth(series.values, window), smooth(series.spread, window)
        high = middle + half
        logarithmic = axes.get_yscale() == "log"  # there as far below by a factor, and above 0
        low = middle**2 / high if logarithmic else middle - half
        axes.fill_between(series.steps, low, high, color=series.color, alpha=0.15, lw=0)
    if series.dots:
        axes.plot(
            series.steps,
            series.values,
            color=series.color,
            lw=1.6,
            marker="o",
            ms=3.6,
            label=series.label,
            clip_on=False,
        )
        return
    window = smoothing(len(series.values))
    if window == 1:
        axes.plot(
            series.steps, series.values, color=series.color, lw=1.6, marker=".", label=series.label, clip_on=False
        )
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
    # Beside the rising curve, but above the axis.
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
    """The width, an odd number of steps, of the moving mean drawn through a curve of so many; 1 is none."""
    return 1 if count < SMOOTH_FROM else count // 50 * 2 + 3


def smooth(values: Floats, window: int) -> Floats:
    """Centred moving mean over `window` values, fewer at the ends; a gap is skipped, and nan where all are gaps."""
    known = np.isfinite(values)
    kernel = np.ones(window)
    counts = np.convolve(known, kernel, "same")
    sums = np.convolve(np.where(known, values, 0.0), kernel, "same")
    means: Floats = np.divide(sums, counts, out=np.full(len(values), np.nan), where=counts > 0.5)
    return means
