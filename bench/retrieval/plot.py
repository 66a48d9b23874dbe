"""The picture of `thresher bench retrieval`: recall against speed, a panel for each set of vectors.

Every point is a value of the search parameter, measured in batches of 64; the ring marks the one that is chosen. Grey
lines are the exact searches, which took turns with it. Speed is on a logarithmic scale, and so is recall, by what it
leaves to 1.

Deliberately absent: building and memory, which are in the rows.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from thresher.bench.retrieval.curve import WANTED
from thresher.common.files import atomic_path
from thresher.engine.reports.charts import DPI, PALETTE, STYLE

PANEL_WIDTH, HEIGHT, MARGIN = 3.6, 4.3, 0.6  # inches
TICKS = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99)
NEAREST = 0.005  # recall nearer to 1 is drawn as this
DARK = "#2b3036"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write one PNG, whole or not at all. rows: of one run; those with a curve are drawn, at least one."""
    shown = [row for row in rows if "curve" in row]
    sets = list(dict.fromkeys(_set(row) for row in shown))
    kinds = list(dict.fromkeys(_family(row["kind"]) for row in shown))
    with matplotlib.rc_context({**STYLE, "axes.grid.axis": "both", "axes.titlesize": 10, "axes.titlepad": 8}):
        spacing = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)
        size = (MARGIN + PANEL_WIDTH * max(2, len(sets)), HEIGHT)
        figure = Figure(figsize=size, dpi=DPI, layout=spacing, facecolor="white")
        grid = figure.subplots(1, len(sets), squeeze=False)[0]
        for axes, name in zip(grid, sets, strict=True):
            _panel(axes, name, [row for row in shown if _set(row) == name], kinds)
        grid[0].set_ylabel("queries a second")
        figure.suptitle(
            "Search in batches of 64: recall against speed", x=0.01, ha="left", fontsize=11, fontweight="bold"
        )
        figure.supxlabel(_foot(shown[0]), x=0.01, ha="left", fontsize=8.5, color="#4a5058")
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format="png")


def _panel(axes: Axes, name: str, rows: Sequence[dict[str, Any]], kinds: Sequence[str]) -> None:
    for row in rows:
        color = PALETTE[kinds.index(_family(row["kind"])) % len(PALETTE)]
        points = row["curve"]["points"]
        place = [_place(point["recall"]["5"]) for point in points]
        speed = [_speed(row, point["ms"]["p50"]) for point in points]
        axes.plot(place, speed, color=color, lw=1.6, marker="o", ms=3.2, label=row["kind"])
        for number, point in enumerate(points):
            if point["effort"] == row.get("chosen"):
                axes.plot(place[number], speed[number], "o", ms=9, mfc="none", mec=color, mew=1.6)
                text = f"{row['effort']} {point['effort']}\n{point['speedup']:.3g}× exact"
                axes.annotate(
                    text, (place[number], speed[number]), (7, 7), textcoords="offset points", fontsize=8, color=DARK
                )
    _exact(axes, rows)
    axes.axvline(_place(WANTED), color="#9aa1ab", lw=1.0, ls=(0, (3, 2)), zorder=1)
    axes.set_yscale("log")
    axes.set_xticks([_place(tick) for tick in TICKS], [f"{tick:g}" for tick in TICKS])
    axes.set_xlim(_place(0.4), _place(1) + 0.15)
    low, high = axes.get_ylim()
    axes.set_ylim(low / 1.5, high * 2)
    axes.set_xlabel("recall at 5")
    axes.set_title(name)
    axes.legend(loc="upper right")


def _exact(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """The faster of torch and FAISS, as a line."""
    found = {
        name: float(np.median([_speed(row, row["curve"]["exact_ms"][name]["p50"]) for row in rows]))
        for name in rows[0]["curve"]["exact_ms"]
    }
    if not found:
        return
    fastest = max(found, key=lambda name: found[name])
    axes.axhline(found[fastest], color="#6a717b", lw=1.4, zorder=2)
    axes.annotate(
        f"{fastest}, exact", (0.02, found[fastest]), (0, 3), xycoords=("axes fraction", "data"),
        textcoords="offset points", fontsize=8, color=DARK,
    )  # fmt: skip


def _place(recall: float) -> float:
    return -float(np.log10(max(1 - recall, NEAREST)))


def _speed(row: dict[str, Any], ms: float) -> float:
    return 1e3 * float(row["curve"]["batch"]) / ms


def _family(kind: str) -> str:
    """Lists of another number have the same colour."""
    return "".join(letter for letter in kind if not letter.isdigit())


def _set(row: dict[str, Any]) -> str:
    return "{passages:,} × {dim}, {vectors}".format(**row["shape"])


def _foot(row: dict[str, Any]) -> str:
    return (
        "Rings: the least nprobe or efSearch with recall .95, and how much faster than the line that is. Medians.\n"
        f"{row['machine']}, {row['threads']} thread{'s' if row['threads'] > 1 else ''}; torch {row['torch']},"
        f" faiss {row['faiss-cpu']}; commit {row['commit']}; load {row['load']:.1f}."
    )
