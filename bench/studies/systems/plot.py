"""The picture of `thresher study systems`: for each system its reward, its exact match and its own claim on held-out
questions, over the steps; the control in grey.

Deliberately absent: smoothing. Every point is an evaluation of all held-out questions, greedy.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from thresher.common.files import atomic_path
from thresher.engine.reports.charts import BLUE, DPI, GREY, STYLE

Records = Sequence[Mapping[str, Any]]


def draw_curves(
    rows: Records, records: Mapping[str, Records], claims: Mapping[str, tuple[str, str]], path: Path
) -> None:
    """Three panels in a row for each system. `records`: metrics by a run's name; `claims`: (key, label) by system."""
    systems = list(dict.fromkeys(row["system"] for row in rows))
    with matplotlib.rc_context(STYLE | {"axes.titlepad": 8}):
        size = (9.6, 2.3 * len(systems))
        figure = Figure(figsize=size, dpi=DPI, layout="constrained", facecolor="white")
        grid = figure.subplots(len(systems), 3, squeeze=False)
        for line, system in zip(grid, systems, strict=True):
            key, label = claims[system]
            for axes, name, title in zip(
                line, ("reward", "em", key), (f"{system}: reward", "exact match", label), strict=True
            ):
                for row in rows:
                    if row["system"] == system:
                        _curve(axes, records[row["name"]], name, row["control"])
                axes.set_title(title)
            line[1].set_ylim(0, 1)
        for axes in grid[-1]:
            axes.set_xlabel("step")
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format="png")


def _curve(axes: Axes, records: Records, name: str, control: bool) -> None:
    evaluations = [(record["step"], record["eval"]) for record in records if "eval" in record]
    points = [(step, found.get(name, found["parts"].get(name))) for step, found in evaluations]
    points = [(step, value) for step, value in points if value is not None]
    if points:
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, color=GREY if control else BLUE, lw=1.6, marker="o", ms=2.5, alpha=0.9)
