"""The picture of `thresher bench loss`: time and memory of every contender, for the weightiest cases of a run.

Time stands against the floor, which is what the three matmuls alone would take at the rate that bare matmuls reached in
the same run. Bars start at 0 and carry their numbers.

Deliberately absent: other densities and lengths, which are in the rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import StrMethodFormatter

from thresher.common.files import atomic_path
from thresher.engine.reports.charts import BLUE, DPI, GREY, ORANGE, SKY, STYLE

PANELS = 4
PANEL_WIDTH, BAR_HEIGHT, LABELS_WIDTH, MARGINS = 2.75, 0.3, 1.3, 2.3  # inches
PEER = "#c9ced6"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write one PNG, whole or not at all. rows: of one run, the weightiest first, at least one."""
    shown = _weightiest(rows)
    names = [name for name in _contenders(shown[0]) if any("ms" in _contenders(row)[name] for row in shown)]
    style: dict[Any, Any] = {**STYLE, "axes.grid.axis": "x", "axes.titlesize": 10, "axes.titlepad": 8}
    with matplotlib.rc_context(style):
        size = (LABELS_WIDTH + PANEL_WIDTH * len(shown), MARGINS + 2 * BAR_HEIGHT * len(names))
        spacing = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08, hspace=0.06)
        figure = Figure(figsize=size, dpi=DPI, layout=spacing, facecolor="white")
        grid = figure.subplots(2, len(shown), squeeze=False, sharey=True)
        for column, row in enumerate(shown):
            found = _contenders(row)
            shape = row["shape"]
            grid[0, column].set_title(f"H {shape['hidden']:,} · V {shape['vocab']:,}")
            floor = row["floor_ms"]["measured"]
            _bars(grid[0, column], names, [_time(found[name], floor) for name in names], _colors(names, row))
            grid[0, column].axvline(floor, color=ORANGE, lw=1.4, ls=(0, (3, 2)), zorder=3)
            _bars(grid[1, column], names, [_memory(found[name]) for name in names], _colors(names, row))
        grid[0, 0].set_ylabel("time, ms\n(times the floor)")
        grid[1, 0].set_ylabel("memory beside\ndX and dW, MiB")
        figure.suptitle(_title(shown[0]), x=0.01, ha="left", fontsize=11, fontweight="bold")
        figure.supxlabel(_foot(shown[0]), x=0.01, ha="left", fontsize=8.5, color="#4a5058")
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format="png")


def _weightiest(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The first rows that share the first one's length and density."""
    first = rows[0]["shape"]
    same = [row for row in rows if all(row["shape"][axis] == first[axis] for axis in ("tokens", "density"))]
    return same[:PANELS]


def _contenders(row: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {**row["ours"], **row["peers"]}


def _colors(names: Sequence[str], row: dict[str, Any]) -> list[str]:
    first, *others = row["ours"]
    return [BLUE if name == first else SKY if name in others else PEER for name in names]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A length, how far it spread (None: it was counted and not timed), and what is written behind it."""

    length: float
    spread: tuple[float, float] | None
    text: str


def _time(found: dict[str, Any], floor: float) -> Bar | None:
    if "ms" not in found:
        return None
    ms = found["ms"]
    return Bar(
        length=ms["p50"], spread=(ms["p20"], ms["p80"]), text=f"{_rounded(ms['p50'])} ({ms['p50'] / floor:.2g}×)"
    )


def _memory(found: dict[str, Any]) -> Bar | None:
    if "ms" not in found:
        return None
    mib = max(found["workspace_mib"], 0.0)
    return Bar(length=mib, spread=None, text=_rounded(mib))


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _bars(axes: Axes, names: Sequence[str], bars: Sequence[Bar | None], colors: Sequence[str]) -> None:
    """One bar a contender, the first on top; a gap where it has none."""
    longest = max((bar.spread[1] if bar.spread else bar.length for bar in bars if bar is not None), default=0.0) or 1.0
    for place, (bar, color) in enumerate(zip(bars, colors, strict=True)):
        if bar is None:
            axes.text(0, place, " not here", va="center", color=GREY, fontsize=8)
            continue
        axes.barh(place, bar.length, height=0.72, color=color)
        end = bar.length
        if bar.spread is not None:
            axes.plot(bar.spread, (place, place), color="#2b3036", lw=1.0, solid_capstyle="butt")
            end = bar.spread[1]
        label = axes.text(end + 0.02 * longest, place, bar.text, va="center", fontsize=8, color="#2b3036")
        label.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.8})
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, 1.5 * longest)
    axes.tick_params(axis="y", length=0)
    axes.locator_params(axis="x", nbins=4)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))


def _title(row: dict[str, Any]) -> str:
    shape = row["shape"]
    share = "all rows active" if shape["density"] == 100 else f"{shape['density']}% of rows active"
    return f"GRPO loss from hidden states, forward and backward\n{shape['tokens']:,} tokens, {share}, {row['dtype']}"


def _foot(row: dict[str, Any]) -> str:
    where = row["gpu"] or f"{row['machine']}, {row['threads']} thread{'s' if row['threads'] > 1 else ''}"
    return (
        "Dashed: the floor, three matmuls over the active rows at the rate of bare matmuls in the same run.\n"
        f"Bars: medians; lines: p20 to p80. {where}; torch {row['torch']}; commit {row['commit']}."
    )
