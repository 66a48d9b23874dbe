"""The picture of `thresher bench rollout`: sampled tokens a second, a panel for each shape, a bar for each side.

Bars start at 0 and carry their number and, behind a peer's, by how much ours is faster in neighbouring rounds. Every
panel has its own scale, since the shapes' models differ.

Deliberately absent: prefill and CPU seconds, which are in the rows.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import StrMethodFormatter

from thresher.common.files import atomic_path
from thresher.engine.reports.charts import BLUE, DPI, GREY, STYLE

PANEL_WIDTH, BAR_HEIGHT, LABELS_WIDTH, MARGINS = 2.6, 0.42, 1.3, 1.7  # inches
PEER, DARK = "#c9ced6", "#2b3036"


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write one PNG, whole or not at all. rows: of one run, at least one."""
    panels: dict[tuple[str, int], list[dict[str, Any]]] = {}
    for row in rows:
        panels.setdefault((row["shape"], row["tokens"]), []).append(row)
    names = ["ours", *dict.fromkeys(row["peer"] for row in rows if row["peer"] is not None)]
    style: dict[Any, Any] = {**STYLE, "axes.grid.axis": "x", "axes.titlesize": 10, "axes.titlepad": 8}
    with matplotlib.rc_context(style):
        size = (LABELS_WIDTH + PANEL_WIDTH * max(2, len(panels)), MARGINS + BAR_HEIGHT * len(names))
        spacing = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08)
        figure = Figure(figsize=size, dpi=DPI, layout=spacing, facecolor="white")
        grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axes, ((shape, tokens), shown) in zip(grid, panels.items(), strict=True):
            axes.set_title(f"{shape}, {tokens} sampled")
            _panel(axes, names, shown)
        figure.suptitle("Rollout: sampled tokens a second", x=0.01, ha="left", fontsize=11, fontweight="bold")
        figure.supxlabel(_foot(rows[0]), x=0.01, ha="left", fontsize=8.5, color="#4a5058")
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format="png")


def _panel(axes: Axes, names: Sequence[str], rows: Sequence[dict[str, Any]]) -> None:
    """One bar a side, ours on top; a gap where a peer has no figure."""
    found: dict[str, tuple[dict[str, float] | None, str]] = {"ours": (rows[0]["ours_tokens_per_s"], "")}
    for row in rows:
        if row["peer"] is not None:
            ratio = "" if row["ratio"] is None else f" (ours {row['ratio']['p50']:.2g}×)"
            found[row["peer"]] = (row["peer_tokens_per_s"], ratio)
    longest = max(values["p80"] for values, _ in found.values() if values is not None)
    for place, name in enumerate(names):
        values, behind = found.get(name, (None, ""))
        if values is None:
            axes.text(0, place, " not here", va="center", color=GREY, fontsize=8)
            continue
        axes.barh(place, values["p50"], height=0.72, color=BLUE if name == "ours" else PEER)
        axes.plot((values["p20"], values["p80"]), (place, place), color=DARK, lw=1.0, solid_capstyle="butt")
        text = f"{values['p50']:,.0f}{behind}"
        axes.text(values["p80"] + 0.02 * longest, place, text, va="center", fontsize=8, color=DARK)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, 1.7 * longest)
    axes.tick_params(axis="y", length=0)
    axes.locator_params(axis="x", nbins=3)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))


def _foot(row: dict[str, Any]) -> str:
    return (
        "Bars: medians; lines: p20 to p80; ratios: of neighbouring rounds, by wall seconds.\n"
        f"{row['machine']}, {row['threads']} thread{'s' if row['threads'] > 1 else ''}; torch {row['torch']}, "
        f"transformers {row['transformers']}; commit {row['commit']}."
    )
