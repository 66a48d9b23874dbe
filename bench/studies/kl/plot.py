"""The pictures of `thresher study kl`, in the style of the report's.

Deliberately absent: smoothing. An explosion is a single step, and a mean would hide it.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator, PercentFormatter

from thresher.bench.studies.kl.exact import EstimatorCurve
from thresher.common.files import atomic_path
from thresher.engine.reports.charts import BLUE, DPI, GREEN, GREY, ORANGE, STYLE

COLORS = {"k1": GREY, "k2": BLUE, "k3": ORANGE, "k3_ratio": GREEN}
GREY_TEXT = "#4a5058"
SAMPLED = {"on policy": BLUE, "off policy": ORANGE}
FLOOR = 1e-17  # where an error of exactly 0 is drawn; float64 resolves 1e-16


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), dpi=DPI, layout="constrained", facecolor="white")


def _save(figure: Figure, path: Path) -> None:
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png")


def draw_curves(curves: Sequence[EstimatorCurve], path: Path) -> None:
    """Value and coefficient of every estimator over d, the vertical axes linear up to 1 and logarithmic beyond."""
    with matplotlib.rc_context(STYLE | {"axes.titlepad": 12}):
        figure = _figure(10.6, 4.4)
        left, right = figure.subplots(1, 2)
        for axes, what in ((left, "value_X"), (right, "coefficient_X")):
            for curve in curves:
                if curve.ratio == 1.0:
                    # On policy k3_ratio has k3's value and k2's coefficient: dashed, so that both are seen.
                    dashed = curve.name == "k3_ratio"
                    style = {"ls": (0, (4, 3)), "lw": 1.5, "zorder": 3} if dashed else {"lw": 2.0}
                    axes.plot(curve.d_X, getattr(curve, what), color=COLORS[curve.name], label=curve.name, **style)
                else:
                    axes.plot(curve.d_X, getattr(curve, what), color=COLORS[curve.name], lw=0.8, alpha=0.6)
            axes.set_yscale("symlog", linthresh=1.0)
            axes.axhline(0, color="#9aa1ab", lw=0.8, zorder=0)
            axes.axvline(0, color="#9aa1ab", lw=0.8, zorder=0)
            axes.yaxis.set_major_formatter(FuncFormatter(_plain))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.set_xlabel(r"$d = \log \pi - \log \pi_{\mathrm{ref}}$ of a sampled token (nats)")
            axes.set_xlim(float(curves[0].d_X[0]), float(curves[0].d_X[-1]))
        left.set_ylabel("linear up to 1, logarithmic beyond", color=GREY_TEXT, fontsize=8.5)
        left.set_title("Value (nats)")
        right.set_title("Coefficient of its gradient, dKL / d log π")
        handles = left.get_legend_handles_labels()[0]
        handles.append(left.plot([], [], color=GREEN, lw=0.8, alpha=0.6, label="k3_ratio at r = ½ and 2")[0])
        figure.legend(handles=handles, loc="outside upper left", ncols=len(handles))
        for name, offset in (("k2", (8, -10)), ("k3", (10, -2))):
            _mark(right, next(curve for curve in curves if curve.name == name), offset)
        _save(figure, path)


def _mark(axes: Axes, curve: EstimatorCurve, offset: tuple[float, float]) -> None:
    """A dot on a coefficient's curve at d = -10, with its number beside it."""
    at = int((curve.d_X + 10).abs().argmin())
    point = float(curve.d_X[at]), float(curve.coefficient_X[at])
    axes.plot(*point, "o", ms=5, color=COLORS[curve.name], zorder=4)
    axes.annotate(
        f"{curve.name} at −10: {point[1]:,.0f}".replace(": -", ": −"),
        point,
        xytext=offset,
        textcoords="offset points",
        color=COLORS[curve.name],
        fontweight="bold",
        va="center",
    )


def _plain(value: float, _: Any) -> str:
    """1, 10, 100, 1,000; beyond that powers of ten."""
    if abs(value) < 10_000:
        return f"{value:,.0f}".replace("-", "−")
    sign = "−" if value < 0 else ""
    return rf"{sign}$10^{{{round(np.log10(abs(value)))}}}$"


NOTES = {"zero": "zero in expectation", "forward": "exactly that of KL(ref ‖ π)"}


def draw_enumeration(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """How far expected value and gradient are from those of KL(pi || ref): the median as a dot, the range as a bar."""
    names = list(dict.fromkeys(label(row) for row in rows))
    panels = (("value_error", "Expected value"), ("reverse_error", "Expected gradient"))
    with matplotlib.rc_context(STYLE | {"axes.grid.axis": "x", "axes.titlepad": 12}):
        figure = _figure(10.6, 3.7)
        for axes, (key, title) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
            axes.set_xscale("log")
            axes.axvspan(FLOOR / 3, 1e-13, color=GREEN, alpha=0.08, lw=0)
            axes.text(FLOOR, -0.62, "up to rounding", va="center", color=GREEN, fontsize=8.5)
            for row in rows:
                _draw_row(axes, row, key, names.index(label(row)))
            axes.set_xlim(FLOOR / 3, 1e4)
            axes.xaxis.set_major_locator(LogLocator(1000, numticks=8))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_title(f"{title}, relative error")
            axes.set_xlabel("against KL(π ‖ ref), by enumeration in float64")
            axes.set_yticks(range(len(names)), names)
            axes.set_ylim(len(names) - 0.5, -0.95)
        handles = [axes.plot([], [], "o", ms=6, color=color, label=name)[0] for name, color in SAMPLED.items()]
        figure.legend(handles=handles, loc="outside upper right", ncols=2)
        _save(figure, path)


def _draw_row(axes: Axes, row: Mapping[str, Any], key: str, height: float) -> None:
    color = SAMPLED[row["sampled"]]
    height += -0.16 if row["sampled"] == "on policy" else 0.16
    low, middle, high = (max(row[key][part], FLOOR) for part in ("smallest", "median", "largest"))
    axes.plot([low, high], [height, height], color=color, lw=5, alpha=0.3)
    axes.plot(middle, height, "o", ms=6, color=color)
    if key == "reverse_error" and row["finding"] in NOTES:
        axes.annotate(
            NOTES[row["finding"]],
            (low, height),
            xytext=(-8, 0),
            textcoords="offset points",
            ha="right",
            va="center",
            color=color,
            fontsize=8.5,
        )


def label(row: Mapping[str, Any]) -> str:
    """A choice of estimators in words."""
    return row["value"] if row["value"] == row["gradient"] else f"{row['value']}, {row['gradient']}'s gradient"


PANELS = (
    ("kl_coefficient_largest", "Largest |dKL / d log π| of a token"),
    ("kl_largest", "Largest KL of a token (nats)"),
    ("grad_norm", "Gradient norm before clipping"),
    ("em", "Exact match, sampled"),
)


def draw_training(
    runs: Sequence[Mapping[str, Any]],
    records: Mapping[str, Sequence[Mapping[str, Any]]],
    max_grad_norm: float,
    path: Path,
) -> None:
    """A row of panels for each learning rate, a line for each run; `records` are a run's steps, by its name.

    Greedy exact match on held-out questions, before and after, are dots in the last panel.
    """
    rates = list(dict.fromkeys((run["rate"], run["lr"]) for run in runs))
    with matplotlib.rc_context(STYLE | {"axes.titlepad": 10, "axes.titlesize": 10}):
        figure = _figure(13.4, 2.9 * len(rates) + 0.4)
        grid = figure.subplots(len(rates), len(PANELS), squeeze=False, sharex=True)
        for axes, (_, title) in zip(grid[0], PANELS, strict=True):
            axes.set_title(title)
        for across, (rate, lr) in zip(grid, rates, strict=True):
            for axes, (key, _) in zip(across, PANELS, strict=True):
                for run in runs:
                    if run["rate"] == rate:
                        _draw_run(axes, run, records[run["name"]], key)
                _finish(axes, key, max_grad_norm)
            across[0].set_ylabel(f"{rate}: learning rate {lr:g}", fontweight="bold", fontsize=10, labelpad=8)
        for axes in grid[-1]:
            axes.set_xlabel("step")
        for column in range(len(PANELS)):
            low = min(axes.get_ylim()[0] for axes in grid[:, column])
            high = max(axes.get_ylim()[1] for axes in grid[:, column])
            for axes in grid[:, column]:
                axes.set_ylim(low, high)
        handles = [
            grid[0][0].plot([], [], color=COLORS[name], lw=2, label=f"{name} (a line a seed)")[0]
            for name in dict.fromkeys(run["estimator"] for run in runs)
        ]
        handles.append(grid[0][0].plot([], [], "o", color=GREY, ms=5, label="greedy, held-out questions")[0])
        figure.legend(handles=handles, loc="outside upper left", ncols=len(handles))
        _save(figure, path)


def _draw_run(axes: Axes, run: Mapping[str, Any], steps: Sequence[Mapping[str, Any]], key: str) -> None:
    values = np.array([np.nan if step.get(key) is None else step[key] for step in steps], np.float64)
    if key != "em":
        values[values <= 0] = np.nan  # the first step stands at its reference, and 0 has no place on a log axis
    color = COLORS[run["estimator"]]
    axes.plot([step["step"] for step in steps], values, color=color, lw=1.4, alpha=0.85)
    if key == "em":
        ends = [(0, run["em_before"]), (steps[-1]["step"] if steps else 0, run["em_after"])]
        shown = [(step, em) for step, em in ends if em is not None]
        axes.plot([step for step, _ in shown], [em for _, em in shown], "o", color=color, ms=5, clip_on=False, zorder=4)


def _finish(axes: Axes, key: str, max_grad_norm: float) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    if key == "em":
        axes.set_ylim(0, 1.04)
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        return
    axes.set_yscale("log")
    axes.yaxis.set_minor_locator(NullLocator())
    if key == "grad_norm" and np.isfinite(max_grad_norm):
        axes.axhline(max_grad_norm, color=GREY, lw=1, ls=(0, (4, 3)))
        axes.annotate(
            f"clipped above {max_grad_norm:g}",
            (0.02, max_grad_norm),
            xycoords=("axes fraction", "data"),
            xytext=(0, 3),
            textcoords="offset points",
            color=GREY_TEXT,
            fontsize=8.5,
        )
