"""The picture of `thresher bench step`: what a thousand tokens of a whole step take, a panel a shape, a bar a side.

A bar is rollout and update, one behind the other, so that it shows where the time goes; behind it stand tokens a second
and, behind a peer's, by how much ours is faster. Bars start at 0; every panel has its own scale, since models differ.

Deliberately absent: CPU seconds, which are in the rows.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import StrMethodFormatter

from thresher.bench.step.report import SIDES
from thresher.common.files import atomic_path
from thresher.engine.reports.charts import BLUE, DPI, GREY, STYLE

PANEL_WIDTH, HEIGHT = 3.2, 2.6  # inches
LABELS = {"shared": "ours", "unshared": "ours, prefixes\nunshared", "peer": "TRL"}
LIGHT, DARK = "#9db7e0", "#2b3036"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write one PNG, whole or not at all: the last row of each shape. rows: at least one."""
    panels = {row["shape"]: row for row in rows}
    style: dict[Any, Any] = {**STYLE, "axes.grid.axis": "x", "axes.titlesize": 10, "axes.titlepad": 8}
    with matplotlib.rc_context(style):
        size = (1.0 + PANEL_WIDTH * max(2, len(panels)), HEIGHT)
        spacing = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)
        figure = Figure(figsize=size, dpi=DPI, layout=spacing, facecolor="white")
        grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axes, row in zip(grid, panels.values(), strict=True):
            lengths = row["lengths"]
            axes.set_title(f"{row['shape']}: {lengths['questions']} x {lengths['group']} trajectories")
            _panel(axes, row)
        figure.legend(*grid[0].get_legend_handles_labels(), loc="upper right", ncols=2, fontsize=8, frameon=False)
        figure.suptitle(
            "A whole GRPO step: milliseconds a thousand tokens", x=0.01, ha="left", fontsize=11, fontweight="bold"
        )
        figure.supxlabel(_foot(list(panels.values())), x=0.01, ha="left", fontsize=8.5, color="#4a5058")
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format="png")


def _panel(axes: Axes, row: dict[str, Any]) -> None:
    """One bar a side, ours on top; a gap where there is no peer."""
    scale = 1e6 / row["tokens"]  # from seconds of a step to ms a thousand tokens
    longest = scale * max(row[side]["step_s"]["p50"] for side in SIDES if row[side] is not None)
    for place, side in enumerate(SIDES):
        found = row[side]
        if found is None:
            axes.text(0, place, " not here", va="center", color=GREY, fontsize=8)
            continue
        rollout, update = (scale * found[f"{part}_s"]["p50"] for part in ("rollout", "update"))
        named = side == SIDES[0]
        axes.barh(place, rollout, height=0.66, color=LIGHT, label="rollout" if named else None)
        axes.barh(place, update, height=0.66, left=rollout, color=BLUE, label="update" if named else None)
        text = f"{found['tokens_per_s']['p50']:,.0f} tokens/s"
        if side == "peer":
            text += f"\n(ours {row['ratio_step']:.2f}×)"
        axes.text(rollout + update + 0.02 * longest, place, text, va="center", fontsize=8, color=DARK)
    axes.set_yticks(range(len(SIDES)), [LABELS[side] for side in SIDES])
    axes.set_ylim(len(SIDES) - 0.4, -0.6)
    axes.set_xlim(0, 1.6 * longest)
    axes.tick_params(axis="y", length=0)
    axes.locator_params(axis="x", nbins=3)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))


def _foot(rows: Sequence[dict[str, Any]]) -> str:
    row = rows[-1]
    threads = ", ".join(f"{one['shape']} {one['threads']}" for one in rows)
    return (
        "Medians of steps in turn in one process. Tokens: of all trajectories, prompts and passages included.\n"
        f"{row['machine']}; threads: {threads}; torch {row['torch']}, TRL {row['trl']}; commit {row['commit']}."
    )
