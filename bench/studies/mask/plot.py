"""The picture of `thresher study mask`: what each treatment costs, and where its gradient points.

Four panels, from the figures that mask.json holds. Treatments that cost the same lie on one another by design; the
second of each pair is dashed, so that both are seen.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import PercentFormatter

from thresher.bench.studies.mask.steps import TREATMENTS
from thresher.common.files import atomic_path
from thresher.engine.reports.charts import BLUE, DPI, GREEN, ORANGE, PURPLE, RED, SKY, STYLE

COLORS = {"in_loss": RED, "zeroed": ORANGE, "masked": GREEN, "removed": PURPLE}
DASHES: dict[str, Any] = {"in_loss": "-", "zeroed": (0, (2.5, 2)), "masked": "-", "removed": (0, (2.5, 2))}
PARTS = (("forward", "forward", SKY), ("head", "head and loss", ORANGE), ("backward", "backward", BLUE))
MOST_LABELS = 12  # parts of a model that are named on the axis

Figures = Mapping[str, Any]


def draw_mask(figures: Figures, path: Path) -> None:
    """Write the picture as a PNG, whole or not at all."""
    with matplotlib.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12)  # inches around each panel
        figure = Figure(figsize=(10.4, 7.4), dpi=DPI, layout=layout, facecolor="white")
        (step, gradient), (time, memory) = figure.subplots(2, 2)
        _draw_step(step, figures["treatments"])
        _draw_gradient(gradient, figures)
        _draw_sweep(time, figures["sweep"], "head_ms")
        time.set_title("Time of head and loss, ms")
        _draw_sweep(memory, figures["sweep"], "head_at_once_mib")
        _draw_sweep(memory, figures["sweep"], "head_mib", faint=True)
        memory.set_title("Peak memory of head and loss, MiB")
        memory.annotate(
            "thin: logits in chunks, as Thresher makes them\nthick: the same rows with all logits at once",
            (0.03, 0.95),
            xycoords="axes fraction",
            va="top",
            fontsize=8.5,
            color="#4a5058",
        )
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format="png")


def _legend(axes: Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.01), ncols=6, borderaxespad=0.0)


def _draw_step(axes: Axes, treatments: Figures) -> None:
    """A bar a treatment, put together from the parts of a step."""
    names = list(TREATMENTS)
    left = [0.0] * len(names)
    for key, label, color in PARTS:
        values = [treatments[name][f"{key}_ms"] for name in names]
        axes.barh(names, values, left=left, height=0.62, color=color, label=label)
        left = [start + value for start, value in zip(left, values, strict=True)]
    for number, name in enumerate(names):
        axes.annotate(
            f"{treatments[name]['step_ms']:,.0f}",
            (left[number], number),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8.5,
            color="#4a5058",
        )
    labels = [
        f"{TREATMENTS[name]}\n{treatments[name]['tokens']:,} tokens, {treatments[name]['rows']:,} rows"
        for name in names
    ]
    axes.set_yticks(range(len(names)), labels, fontsize=8.5)
    axes.set_xlim(0, 1.1 * max(left))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)
    axes.set_title("One step of the same batch, ms")
    _legend(axes)


def _draw_gradient(axes: Axes, figures: Figures) -> None:
    """The cosine with the masked gradient, part by part; a dashed line is that of all parts together."""
    treatments = figures["treatments"]
    parts = list(treatments["masked"]["gradient_parts"])
    for name in ("zeroed", "removed", "in_loss"):
        cosines = [treatments[name]["gradient_parts"][part]["cosine"] for part in parts]
        axes.axvline(treatments[name]["gradient"]["cosine"], color=COLORS[name], lw=1.2, ls=(0, (4, 3)), alpha=0.7)
        axes.plot(cosines, range(len(parts)), "o", ms=7, color=COLORS[name], label=TREATMENTS[name], clip_on=False)
    every = -(-len(parts) // MOST_LABELS)
    axes.set_yticks(range(0, len(parts), every), parts[::every], fontsize=8.5)
    axes.set_ylim(len(parts) - 0.4, -0.6)
    low = min(0.0, axes.dataLim.x0)
    axes.set_xlim(low - 0.06 if low else 0.0, 1.02)
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)
    rows, retrieved = treatments["in_loss"]["rows"], treatments["in_loss"]["kinds"]["retrieved"]
    axes.set_xlabel(
        f"retrieved in the loss: {retrieved['rows'] / rows:.0%} of the rows, {retrieved['push']:.0%} of the push"
    )
    axes.set_title("Cosine with the masked gradient")
    _legend(axes)


def _draw_sweep(axes: Axes, sweep: Sequence[Figures], key: str, faint: bool = False) -> None:
    """A line a treatment against the share of retrieved tokens."""
    shares = [record["retrieved_share"] for record in sweep]
    for name, label in TREATMENTS.items():
        values = [record["treatments"][name][key] for record in sweep]
        second = DASHES[name] != "-"
        axes.plot(
            shares,
            values,
            color=COLORS[name],
            ls=DASHES[name],
            lw=(1.2 if second else 1.0) if faint else (2.0 if second else 3.2),
            alpha=0.8 if faint else 1.0,
            marker=None if faint else "o",
            ms=3.5 if second else 5.5,
            label=None if faint else label,
            zorder=3 if second else 2,
        )
    axes.set_ylim(0, 1.06 * axes.dataLim.y1)
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_xticks([0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9])
    axes.set_xlabel("retrieved share of the retrieved and sampled tokens")
    if not faint:
        _legend(axes)
