"""All pictures of the benches and studies, in the style of the report: one function per picture writes one PNG.

Bars start at 0 and show their numbers. Every panel has its own scale, because models and shapes differ. Lines are not
smoothed: an explosion is a single step, and a mean would hide it. Measuring needs no matplotlib, so benches import this
module only to draw.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import (
    EngFormatter,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullLocator,
    PercentFormatter,
    StrMethodFormatter,
)

from thresher.bench.harness import hardware
from thresher.common.files import atomic_path
from thresher.engine.reports.charts import BLUE, DPI, GREEN, GREY, ORANGE, PALETTE, PURPLE, RED, SKY, STYLE
from thresher.rewards.statistics import seed_interval

PEER, LIGHT, DARK, GREY_TEXT, AXIS = "#c9ced6", "#9db7e0", "#2b3036", "#4a5058", "#9aa1ab"
BENCH = {"axes.grid.axis": "x", "axes.titlesize": 10, "axes.titlepad": 8}
PADS = {"w_pad": 0.1, "h_pad": 0.08}  # inches around a panel
LOSS_PANELS = 4
SECONDS_SHOWN = 300  # longer trainings are shown in minutes

Row = Mapping[str, Any]
Rows = Sequence[Row]


@contextmanager
def _figure(
    path: Path,
    width: float,
    height: float,
    style: Mapping[str, Any],
    pads: Mapping[str, Any] | None = None,
    title: str | None = None,
    foot: str | None = None,
) -> Iterator[Figure]:
    """Yield a figure of this size in inches, and write it atomically at the end of the `with`."""
    rc: dict[Any, Any] = {**STYLE, **style}
    with matplotlib.rc_context(rc):
        layout: Any = "constrained" if pads is None else ConstrainedLayoutEngine(**pads)
        figure = Figure(figsize=(width, height), dpi=DPI, layout=layout, facecolor="white")
        if title is not None:
            figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
        if foot is not None:
            figure.supxlabel(foot, x=0.01, ha="left", fontsize=8.5, color=GREY_TEXT)
        yield figure
        with atomic_path(path) as temporary:
            figure.savefig(temporary, format="png")


def _note(axes: Axes, text: str, at: tuple[float, float], offset: tuple[float, float], **style: Any) -> None:
    """Write `text` next to `at`, with an offset in points."""
    axes.annotate(text, at, xytext=offset, textcoords="offset points", **{"fontsize": 8.5, **style})


@dataclass(frozen=True, slots=True)
class Bar:
    """A bar in one or more parts, each (length, colour, name in the legend). The text follows the bar; p20 and p80 are
    for timed bars."""

    parts: Sequence[tuple[float, str, str | None]]
    text: str
    spread: tuple[float, float] | None = None

    @property
    def end(self) -> float:
        return self.spread[1] if self.spread is not None else sum(length for length, _, _ in self.parts)


def _bars(
    axes: Axes,
    names: Sequence[str],
    bars: Sequence[Bar | None],
    room: float,
    bins: int,
    height: float = 0.72,
    boxed: bool = False,
) -> None:
    """Draw one bar per name, the first on top, and a gap for None. The panel is `room` times as wide as the longest
    bar."""
    longest = max((bar.end for bar in bars if bar is not None), default=0.0) or 1.0
    for place, bar in enumerate(bars):
        if bar is None:
            axes.text(0, place, " not here", va="center", color=GREY, fontsize=8)
            continue
        end = 0.0
        for length, color, label in bar.parts:
            axes.barh(place, length, height=height, left=end, color=color, label=label)
            end += length
        if bar.spread is not None:
            axes.plot(bar.spread, (place, place), color=DARK, lw=1.0, solid_capstyle="butt")
            end = bar.end
        said = axes.text(end + 0.02 * longest, place, bar.text, va="center", fontsize=8, color=DARK)
        if boxed:
            said.set_bbox({"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.8})
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlim(0, room * longest)
    axes.tick_params(axis="y", length=0)
    axes.locator_params(axis="x", nbins=bins)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,g}"))


def _threads(row: Row) -> str:
    return f"{row['threads']} thread{'s' if row['threads'] > 1 else ''}"


def _origins(rows: Iterable[Row], *packages: str) -> str:
    """Return the machines, versions and commits of the rows, each once."""
    found = list(rows)
    machines = dict.fromkeys(hardware(row) for row in found)
    names = {"torch": "torch", "trl": "TRL", "transformers": "transformers"}
    versions = dict.fromkeys(f"{names[key]} {row[key]}" for key in ("torch", *packages) for row in found)
    commits = dict.fromkeys(str(row["commit"]) for row in found)
    return "; ".join([*machines, ", ".join(versions), f"commit {', '.join(commits)}"])


# bench loss


def draw_loss(rows: Rows, path: Path) -> None:
    """Draw time and memory of every contender, for the most important cases of a run. rows: of one run, the most
    important first, at least one.

    The floor is shown next to the time: the three matmuls alone, at the rate of bare matmuls in the same run.
    """
    first = rows[0]["shape"]
    same = [row for row in rows if all(row["shape"][axis] == first[axis] for axis in ("tokens", "density"))]
    shown, found = same[:LOSS_PANELS], [{**row["ours"], **row["peers"]} for row in same[:LOSS_PANELS]]
    names = [name for name in found[0] if any("ms" in one[name] for one in found)]
    ours, *others = rows[0]["ours"]
    colors = {name: BLUE if name == ours else SKY if name in others else PEER for name in names}
    head = shown[0]
    share = "all rows active" if first["density"] == 100 else f"{first['density']}% of rows active"
    where = hardware(head) + (f", {_threads(head)}" if hardware(head) == head["machine"] else "")

    def rounded(value: float) -> str:
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

    def time(name: str, one: Row, floor: float) -> Bar | None:
        if "ms" not in one[name]:
            return None
        ms = one[name]["ms"]
        text = f"{rounded(ms['p50'])} ({ms['p50'] / floor:.2g}×)"
        return Bar([(ms["p50"], colors[name], None)], text, (ms["p20"], ms["p80"]))

    def memory(name: str, one: Row) -> Bar | None:
        if "ms" not in one[name]:
            return None
        mib = max(one[name]["workspace_mib"], 0.0)
        return Bar([(mib, colors[name], None)], rounded(mib))

    with _figure(
        path,
        1.3 + 2.75 * len(shown),
        2.3 + 0.6 * len(names),
        BENCH,
        {**PADS, "hspace": 0.06},
        f"GRPO loss from hidden states, forward and backward\n{first['tokens']:,} tokens, {share}, {head['dtype']}",
        "Dashed: the floor, three matmuls over the active rows at the rate of bare matmuls in the same run.\n"
        f"Bars: medians; lines: p20 to p80. {where}; torch {head['torch']}; commit {head['commit']}.",
    ) as figure:
        grid = figure.subplots(2, len(shown), squeeze=False, sharey=True)
        for (top, bottom), row, one in zip(grid.T, shown, found, strict=True):
            floor = row["floor_ms"]["measured"]
            top.set_title(f"H {row['shape']['hidden']:,} · V {row['shape']['vocab']:,}")
            _bars(top, names, [time(name, one, floor) for name in names], 1.5, 4, boxed=True)
            top.axvline(floor, color=ORANGE, lw=1.4, ls=(0, (3, 2)), zorder=3)
            _bars(bottom, names, [memory(name, one) for name in names], 1.5, 4, boxed=True)
        grid[0, 0].set_ylabel("time, ms\n(times the floor)")
        grid[1, 0].set_ylabel("memory beside\ndX and dW, MiB")


# bench rollout


def draw_rollout(rows: Rows, path: Path) -> None:
    """Draw sampled tokens per second, one panel per shape, one bar per side. A peer's bar is followed by the ratio of
    its time to ours in neighbouring rounds. rows: of one run, at least one."""
    panels: dict[tuple[str, int], list[Row]] = {}
    for row in rows:
        panels.setdefault((row["shape"], row["tokens"]), []).append(row)
    names = ["ours", *dict.fromkeys(row["peer"] for row in rows if row["peer"] is not None)]
    head = rows[0]

    def rate(values: Mapping[str, float], color: str, behind: str = "") -> Bar:
        text = f"{values['p50']:,.0f}{behind}"
        return Bar([(values["p50"], color, None)], text, (values["p20"], values["p80"]))

    with _figure(
        path,
        1.3 + 2.6 * max(2, len(panels)),
        1.7 + 0.42 * len(names),
        BENCH,
        PADS,
        "Rollout: sampled tokens a second",
        "Bars: medians; lines: p20 to p80; ratios: of neighbouring rounds, by wall seconds.\n"
        f"{_origins(rows, 'transformers')}; {_threads(head)}.",
    ) as figure:
        grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axes, ((shape, tokens), shown) in zip(grid, panels.items(), strict=True):
            found = {"ours": rate(shown[0]["ours_tokens_per_s"], BLUE)}
            for row in shown:
                if row["peer"] is not None and row["ratio"] is not None:
                    ratio = f" (ours {row['ratio']['p50']:.2g}×)"
                    found[row["peer"]] = rate(row["peer_tokens_per_s"], PEER, ratio)
            axes.set_title(f"{shape}, {tokens} sampled")
            _bars(axes, names, [found.get(name) for name in names], 1.7, 3)


# bench step

STEP_SIDES = {"shared": "ours", "unshared": "ours, prefixes\nunshared", "peer": "TRL"}


def _shape_of_step(row: Mapping[str, Any]) -> str:
    family = row["lengths"].get("family")  # missing in rows from before there were several
    return f"{row['shape']} (Qwen3.5)" if family == "qwen3_5_text" else str(row["shape"])


def draw_step(rows: Rows, path: Path) -> None:
    """Draw the time per thousand tokens of a whole step, one panel per shape, one bar per side. A bar has rollout and
    update, and is followed by tokens per second. The last row of each shape and family is drawn; at least one row."""
    panels = {_shape_of_step(row): row for row in rows}
    threads = ", ".join(f"{shape} {row['threads']}" for shape, row in panels.items())
    with _figure(
        path,
        1.0 + 3.2 * max(2, len(panels)),
        2.6,
        BENCH,
        PADS,
        "A whole GRPO step: milliseconds a thousand tokens",
        "Medians of steps in turn in one process. Tokens: of all trajectories, prompts and passages included.\n"
        f"{_origins(panels.values(), 'trl')}; threads: {threads}.",
    ) as figure:
        grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
        for axes, (shape, row) in zip(grid, panels.items(), strict=True):
            scale = 1e6 / row["tokens"]  # from seconds per step to ms per thousand tokens
            bars: list[Bar | None] = []
            for side in STEP_SIDES:
                if row[side] is None:
                    bars.append(None)
                    continue
                rollout, update = (scale * row[side][f"{part}_s"]["p50"] for part in ("rollout", "update"))
                named = side == "shared"
                text = f"{row[side]['tokens_per_s']['p50']:,.0f} tokens/s"
                if side == "peer":
                    text += f"\n(ours {row['ratio_step']:.2f}×)"
                parts = [(rollout, LIGHT, "rollout" if named else None), (update, BLUE, "update" if named else None)]
                bars.append(Bar(parts, text))
            lengths = row["lengths"]
            axes.set_title(f"{shape}: {lengths['questions']} x {lengths['group']} trajectories")
            _bars(axes, list(STEP_SIDES.values()), bars, 1.6, 3, height=0.66)
        figure.legend(*grid[0].get_legend_handles_labels(), loc="upper right", ncols=2, fontsize=8, frameon=False)


# bench train


def draw_train(sides: Mapping[str, Mapping[int, Rows]], peer: str, path: Path) -> None:
    """Draw F1 on held-out questions against training time, tokens sampled and questions. A run is a thin curve, a
    side's mean a thick one. sides: rows by side and step, one row per seed; the peer's is grey."""
    colors = dict(zip(sides, itertools.cycle((BLUE, ORANGE, GREEN, PURPLE, RED)), strict=False)) | {peer: GREY}
    rows = [row for steps in sides.values() for found in steps.values() for row in found]
    minutes = max(row["seconds"] for row in rows) > SECONDS_SHOWN
    with _figure(
        path,
        10.0,
        3.4,
        {"axes.titlesize": 10, "axes.titlepad": 8},
        PADS,
        "F1 of greedy answers to held-out questions, while the same task is trained",
        f"Evaluations are not in the time. {_origins(rows)}.",
    ) as figure:
        across = {
            f"{'minutes' if minutes else 'seconds'} of training": ("seconds", 60 if minutes else 1),
            "thousand tokens sampled": ("sampled_tokens", 1000),
            "questions asked": ("questions", 1),
        }
        panels = figure.subplots(1, 3, sharey=True)
        for axes, (name, (key, unit)) in zip(panels, across.items(), strict=True):
            for side, steps in sides.items():
                for seed in {row["seed"] for row in steps[0]}:
                    own = [row for found in steps.values() for row in found if row["seed"] == seed]
                    axes.plot(*_curve([[row] for row in own], key, unit), color=colors[side], linewidth=0.7, alpha=0.6)
                points = _curve(steps.values(), key, unit)
                axes.plot(*points, color=colors[side], marker="o", markersize=3.5, label=side)
            axes.set_xlabel(name)
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside upper right", ncols=len(sides))


def _curve(steps: Iterable[Rows], key: str, unit: float) -> tuple[list[float], list[float]]:
    """Return the means over each step's rows: of `key` in units, and of F1."""
    points = [(fmean(row[key] for row in rows) / unit, fmean(row["eval"]["f1"] for row in rows)) for rows in steps]
    return [x for x, _ in points], [y for _, y in points]


# bench retrieval

RECALL_TICKS = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99)
NEAREST = 0.005  # recall nearer to 1 is drawn at this distance


def draw_retrieval(rows: Rows, wanted: float, path: Path) -> None:
    """Draw recall against speed, one panel per set of vectors. rows: of one run; those with a curve are drawn, at least
    one.

    A point is a value of the search parameter, measured in batches of 64. The ring marks the least one with a recall of
    `wanted`. The grey line is the fastest exact search, timed in turn with it. Speed is on a logarithmic scale,
    and so is the distance of recall from 1.
    """
    shown = [row for row in rows if "curve" in row]

    def set_of(row: Row) -> str:
        return "{passages:,} × {dim}, {vectors}".format(**row["shape"])

    def family(kind: str) -> str:  # lists of another number have the same colour
        return "".join(letter for letter in kind if not letter.isdigit())

    sets = list(dict.fromkeys(map(set_of, shown)))
    kinds = list(dict.fromkeys(family(row["kind"]) for row in shown))
    head = shown[0]
    with _figure(
        path,
        0.6 + 3.6 * max(2, len(sets)),
        4.3,
        {**BENCH, "axes.grid.axis": "both"},
        PADS,
        "Search in batches of 64: recall against speed",
        "Rings: the least nprobe or efSearch with recall .95, and how much faster than the line that is. Medians.\n"
        f"{head['machine']}, {_threads(head)}; torch {head['torch']},"
        f" faiss {head['faiss-cpu']}; commit {head['commit']}; load {head['load']:.1f}.",
    ) as figure:
        grid = figure.subplots(1, len(sets), squeeze=False)[0]
        for axes, name in zip(grid, sets, strict=True):
            own = [row for row in shown if set_of(row) == name]
            line = _fastest_exact(axes, own)
            for row in own:
                _recall_curve(axes, row, PALETTE[kinds.index(family(row["kind"])) % len(PALETTE)], line)
            axes.axvline(_recall_place(wanted), color=AXIS, lw=1.0, ls=(0, (3, 2)), zorder=1)
            axes.set_yscale("log")
            axes.set_xticks([_recall_place(tick) for tick in RECALL_TICKS], [f"{tick:g}" for tick in RECALL_TICKS])
            axes.set_xlim(_recall_place(0.4), _recall_place(1) + 0.15)
            low, high = axes.get_ylim()
            axes.set_ylim(low / 1.5, high * 2)
            axes.set_xlabel("recall at 5")
            axes.set_title(name)
            axes.legend(loc="upper right")
        grid[0].set_ylabel("queries a second")


def _recall_place(recall: float) -> float:
    return -float(np.log10(max(1 - recall, NEAREST)))


def _queries_per_s(row: Row, ms: float) -> float:
    return 1e3 * float(row["curve"]["batch"]) / ms


def _recall_curve(axes: Axes, row: Row, color: str, line: float | None) -> None:
    points = row["curve"]["points"]
    at = [(_recall_place(point["recall"]["5"]), _queries_per_s(row, point["ms"]["p50"])) for point in points]
    axes.plot(*zip(*at, strict=True), color=color, lw=1.6, marker="o", ms=3.2, label=row["kind"])
    for here, point in zip(at, points, strict=True):
        if point["effort"] == row.get("chosen"):
            axes.plot(*here, "o", ms=9, mfc="none", mec=color, mew=1.6)
            text = f"{row['effort']} {point['effort']}" + (f"\n{here[1] / line:.3g}× exact" if line else "")
            _note(axes, text, here, (7, 7), fontsize=8, color=DARK)


def _fastest_exact(axes: Axes, rows: Rows) -> float | None:
    """Draw the fastest exact search as a line, by its median over the rows; return its queries per second."""
    found = {
        name: float(np.median([_queries_per_s(row, row["curve"]["exact_ms"][name]["p50"]) for row in rows]))
        for name in rows[0]["curve"]["exact_ms"]
    }
    if not found:
        return None
    fastest = max(found, key=lambda name: found[name])
    axes.axhline(found[fastest], color="#6a717b", lw=1.4, zorder=2)
    at = (0.02, found[fastest])
    _note(axes, f"{fastest}, exact", at, (0, 3), xycoords=("axes fraction", "data"), fontsize=8, color=DARK)
    return found[fastest]


# study kl

ESTIMATOR_COLORS = {"k1": GREY, "k2": BLUE, "k3": ORANGE, "k3_ratio": GREEN}
SAMPLED = {"on policy": BLUE, "off policy": ORANGE}
ERROR_FLOOR = 1e-17  # an error of exactly 0 is drawn here; float64 resolves 1e-16
FINDINGS = {"zero": "zero in expectation", "forward": "exactly that of KL(ref ‖ π)"}
TRAINED = {
    "kl_coefficient_largest": "Largest |dKL / d log π| of a token",
    "kl_largest": "Largest KL of a token (nats)",
    "kl_k1": "Mean KL of a token (nats)",
    "grad_norm": "Gradient norm before clipping",
}
SCORES = {"em": "Exact match, sampled", "f1": "F1, sampled"}


def draw_kl_curves(curves: Sequence[Any], path: Path) -> None:
    """Draw value and coefficient of every estimator over d, the vertical axes linear up to 1 and logarithmic beyond.
    curves: `EstimatorCurve`s of studies/kl.py."""

    def power(value: float, _: Any) -> str:  # 1, 10, 100, 1,000; beyond that powers of ten
        if abs(value) < 10_000:
            return f"{value:,.0f}".replace("-", "−")
        return rf"{'−' if value < 0 else ''}$10^{{{round(np.log10(abs(value)))}}}$"

    with _figure(path, 10.6, 4.4, {"axes.titlepad": 12}) as figure:
        left, right = figure.subplots(1, 2)
        for axes, what in ((left, "value_X"), (right, "coefficient_X")):
            for curve in curves:
                style: dict[str, Any] = {"lw": 2.0, "label": curve.name}
                if curve.ratio != 1.0:
                    style = {"lw": 0.8, "alpha": 0.6}
                elif curve.name == "k3_ratio":
                    # On policy it has k3's value and k2's coefficient: dashed, so that both are visible.
                    style |= {"ls": (0, (4, 3)), "lw": 1.5, "zorder": 3}
                axes.plot(curve.d_X, getattr(curve, what), color=ESTIMATOR_COLORS[curve.name], **style)
            axes.set_yscale("symlog", linthresh=1.0)
            axes.axhline(0, color=AXIS, lw=0.8, zorder=0)
            axes.axvline(0, color=AXIS, lw=0.8, zorder=0)
            axes.yaxis.set_major_formatter(FuncFormatter(power))
            axes.yaxis.set_minor_locator(NullLocator())
            axes.set_xlabel(r"$d = \log \pi - \log \pi_{\mathrm{ref}}$ of a sampled token (nats)")
            axes.set_xlim(float(curves[0].d_X[0]), float(curves[0].d_X[-1]))
        left.set_ylabel("linear up to 1, logarithmic beyond", color=GREY_TEXT, fontsize=8.5)
        left.set_title("Value (nats)")
        right.set_title("Coefficient of its gradient, dKL / d log π")
        handles = left.get_legend_handles_labels()[0]
        handles.append(left.plot([], [], color=GREEN, lw=0.8, alpha=0.6, label="k3_ratio at r = ½ and 2")[0])
        figure.legend(handles=handles, loc="outside upper left", ncols=len(handles))
        for name, offset in (("k2", (8, -10)), ("k3", (10, -2))):  # a dot at d = -10, with its number next to it
            curve, color = next(curve for curve in curves if curve.name == name), ESTIMATOR_COLORS[name]
            at = int((curve.d_X + 10).abs().argmin())
            point = float(curve.d_X[at]), float(curve.coefficient_X[at])
            right.plot(*point, "o", ms=5, color=color, zorder=4)
            text = f"{name} at −10: {point[1]:,.0f}".replace(": -", ": −")
            _note(right, text, point, offset, color=color, fontweight="bold", va="center", fontsize=None)


def estimator_label(row: Row) -> str:
    """Return a choice of estimators in words."""
    return str(row["value"] if row["value"] == row["gradient"] else f"{row['value']}, {row['gradient']}'s gradient")


def draw_kl_enumeration(rows: Rows, path: Path) -> None:
    """Draw the errors of expected value and gradient against KL(pi || ref): the median a dot, the range a bar."""
    names = list(dict.fromkeys(map(estimator_label, rows)))
    with _figure(path, 10.6, 3.7, {"axes.grid.axis": "x", "axes.titlepad": 12}) as figure:
        panels = (("value_error", "Expected value"), ("reverse_error", "Expected gradient"))
        for axes, (key, title) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
            axes.set_xscale("log")
            axes.axvspan(ERROR_FLOOR / 3, 1e-13, color=GREEN, alpha=0.08, lw=0)
            axes.text(ERROR_FLOOR, -0.62, "up to rounding", va="center", color=GREEN, fontsize=8.5)
            for row in rows:
                color = SAMPLED[row["sampled"]]
                height = names.index(estimator_label(row)) + (-0.16 if row["sampled"] == "on policy" else 0.16)
                low, middle, high = (max(row[key][part], ERROR_FLOOR) for part in ("smallest", "median", "largest"))
                axes.plot([low, high], [height, height], color=color, lw=5, alpha=0.3)
                axes.plot(middle, height, "o", ms=6, color=color)
                if key == "reverse_error" and row["finding"] in FINDINGS:
                    _note(axes, FINDINGS[row["finding"]], (low, height), (-8, 0), ha="right", va="center", color=color)
            axes.set_xlim(ERROR_FLOOR / 3, 1e4)
            axes.xaxis.set_major_locator(LogLocator(1000, numticks=8))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.set_title(f"{title}, relative error")
            axes.set_xlabel("against KL(π ‖ ref), by enumeration in float64")
            axes.set_yticks(range(len(names)), names)
            axes.set_ylim(len(names) - 0.5, -0.95)
        handles = [axes.plot([], [], "o", ms=6, color=color, label=name)[0] for name, color in SAMPLED.items()]
        figure.legend(handles=handles, loc="outside upper right", ncols=2)


def draw_kl_training(runs: Rows, records: Mapping[str, Rows], score: str, max_grad_norm: float, path: Path) -> None:
    """Draw a row of panels for each learning rate, with one line per run. records: steps of a run, by its name.

    score: a key of SCORES, for the last panel; on held-out questions (greedy, before and after) it is a dot there.
    """
    panels = {**TRAINED, score: SCORES[score]}
    rates = list(dict.fromkeys((run["rate"], run["lr"]) for run in runs))
    style = {"axes.titlepad": 10, "axes.titlesize": 10}
    with _figure(path, 16.4, 2.9 * len(rates) + 0.4, style) as figure:
        grid = figure.subplots(len(rates), len(panels), squeeze=False, sharex=True)
        for across, (rate, lr) in zip(grid, rates, strict=True):
            for axes, key in zip(across, panels, strict=True):
                for run in runs:
                    if run["rate"] == rate:
                        _kl_run(axes, run, records[run["name"]], key)
                axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
                if key == score:
                    axes.set_ylim(0, 1.04)
                    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
                    continue
                axes.set_yscale("log")
                axes.yaxis.set_minor_locator(NullLocator())
                if key == "grad_norm" and np.isfinite(max_grad_norm):
                    axes.axhline(max_grad_norm, color=GREY, lw=1, ls=(0, (4, 3)))
                    text, at = f"clipped above {max_grad_norm:g}", (0.02, max_grad_norm)
                    _note(axes, text, at, (0, 3), xycoords=("axes fraction", "data"), color=GREY_TEXT)
            across[0].set_ylabel(f"{rate}: learning rate {lr:g}", fontweight="bold", fontsize=10, labelpad=8)
        for axes, column, title in zip(grid[-1], grid.T, panels.values(), strict=True):
            column[0].set_title(title)
            axes.set_xlabel("step")
            limits = [one.get_ylim() for one in column]
            for one in column:
                one.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
        handles = [
            grid[0][0].plot([], [], color=ESTIMATOR_COLORS[name], lw=2, label=f"{name} (a line a seed)")[0]
            for name in dict.fromkeys(run["estimator"] for run in runs)
        ]
        handles.append(grid[0][0].plot([], [], "o", color=GREY, ms=5, label="greedy, held-out questions")[0])
        figure.legend(handles=handles, loc="outside upper left", ncols=len(handles))


def _kl_run(axes: Axes, run: Row, steps: Rows, key: str) -> None:
    values = np.array([np.nan if step.get(key) is None else step[key] for step in steps], np.float64)
    if key not in SCORES:
        values[values <= 0] = np.nan  # the first step equals its reference, and 0 cannot be shown on a log axis
    color = ESTIMATOR_COLORS[run["estimator"]]
    axes.plot([step["step"] for step in steps], values, color=color, lw=1.4, alpha=0.85)
    if key in SCORES:
        ends = [(0, run[f"{key}_before"]), (steps[-1]["step"] if steps else 0, run[f"{key}_after"])]
        shown = [(step, value) for step, value in ends if value is not None]
        axes.plot(
            [step for step, _ in shown], [value for _, value in shown], "o", color=color, ms=5, clip_on=False, zorder=4
        )


def draw_kl_run(steps: Rows, d_P: Any, path: Path) -> None:
    """Draw each estimator's mean value and largest coefficient over a run's stored steps, and a histogram of d. The
    mean has two standard errors; the histogram is over all tokens of the steps. steps, d_P: of studies/kl_run.py."""
    with _figure(path, 14.4, 4.0, {"axes.titlepad": 10, "axes.titlesize": 10}) as figure:
        value, coefficient, spread = figure.subplots(1, 3)
        numbers = [row["step"] for row in steps]
        for name, color in ESTIMATOR_COLORS.items():
            found = [row["estimators"][name] for row in steps]
            # On tokens that the policy itself sampled, k3_ratio has k3's value and k2's coefficient: dashed, to be
            # visible.
            style: dict[str, Any] = {"color": color, "marker": "o", "ms": 4, "lw": 2.2}
            style |= {"ls": (0, (4, 3)), "lw": 1.2, "ms": 2, "zorder": 3} if name == "k3_ratio" else {}
            bars = [2 * (one["standard_error"] or 0.0) for one in found]
            value.errorbar(numbers, [one["mean"] for one in found], bars, elinewidth=0.8, label=name, **style)
            largest = [one["c_largest"] or np.nan for one in found]  # 0 cannot be shown on a log axis
            coefficient.plot(numbers, largest, **style)
        value.set_yscale("symlog", linthresh=1.0)
        value.axhline(0, color=AXIS, lw=0.8, zorder=0)
        value.set_title("Mean value (nats), ± 2 standard errors; linear up to 1")
        coefficient.set_yscale("log")
        coefficient.set_title("Largest |dKL / d log π| of a token")
        for axes in (value, coefficient):
            axes.set_xlabel("step")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
        spread.hist(d_P, bins=80, color=BLUE, log=True)
        spread.set_title("Tokens by d, all steps")
        spread.set_xlabel(r"$d = \log \pi - \log \pi_{\mathrm{ref}}$ (nats)")
        figure.legend(handles=value.get_legend_handles_labels()[0], loc="outside upper left", ncols=4)


# study credit

CREDIT_COLORS = {"exact": GREEN, "scaled": BLUE, "biased": ORANGE}
CREDIT_LABELS = {
    "exact": "the policy gradient in expectation",
    "scaled": "a multiple of it",
    "biased": "another direction",
}


def draw_credit(rows: Rows, path: Path) -> None:
    """Draw the error in direction and the variance of each rule's expected gradient, over the policies. The median is a
    dot, the middle half a bar. rows: of studies/credit.py, each for its first enumerated setting."""
    with _figure(path, 10.6, 1.2 + 0.24 * len(rows), {"axes.grid.axis": "x", "axes.titlepad": 10}) as figure:
        panels = (
            ("direction", "Bias in direction", "|mean − s · truth| / |s · truth|"),
            ("variance", "Variance", "E|g − mean|² / |s · truth|²"),
        )
        for axes, (key, title, label) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
            for place, row in enumerate(rows):
                figures, color = next(iter(row["settings"].values()))[key], CREDIT_COLORS[row["finding"]]
                low, middle, high = (figures[part] for part in ("low", "median", "high"))
                axes.plot([low, high], [place, place], color=color, lw=5, alpha=0.3)
                axes.plot(middle, place, "o", ms=5, color=color, clip_on=False, zorder=4)
            axes.axhline(sum(not row["part"] for row in rows) - 0.5, color=AXIS, lw=0.8)
            axes.set_title(title)
            axes.set_xlabel(label)
            axes.set_yticks(range(len(rows)), [row["rule"] for row in rows])
            axes.set_ylim(len(rows) - 0.4, -0.6)
            axes.set_xlim(left=0)
            axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        handles = [axes.plot([], [], "o", ms=6, color=CREDIT_COLORS[k], label=v)[0] for k, v in CREDIT_LABELS.items()]
        figure.legend(handles=handles, loc="outside upper right", ncols=3, fontsize=8.5)


# study mask

TREATMENT_COLORS = {"in_loss": RED, "zeroed": ORANGE, "masked": GREEN, "removed": PURPLE}
DASHED = ("zeroed", "removed")  # each costs the same as another one, and would cover its line
STEP_PARTS = (("forward", "forward", SKY), ("head", "head and loss", ORANGE), ("backward", "backward", BLUE))
MOST_LABELS = 12  # parts of a model that are named on the axis


def draw_mask(figures: Row, labels: Mapping[str, str], path: Path) -> None:
    """Draw the cost and the gradient direction of each treatment. figures: of mask.json. labels: treatments in
    words."""
    treatments = figures["treatments"]
    with _figure(path, 10.4, 7.4, {}, {"w_pad": 0.12, "h_pad": 0.12}) as figure:
        (step, gradient), (time, memory) = figure.subplots(2, 2)
        _mask_step(step, treatments, labels)
        _mask_gradient(gradient, treatments, labels)
        _mask_sweep(time, figures["sweep"], "head_ms", labels)
        time.set_title("Time of head and loss, ms")
        _mask_sweep(memory, figures["sweep"], "head_at_once_mib", labels)
        _mask_sweep(memory, figures["sweep"], "head_mib", labels, faint=True)
        memory.set_title("Peak memory of head and loss, MiB")
        text = "thin: logits in chunks, as Thresher makes them\nthick: the same rows with all logits at once"
        memory.annotate(text, (0.03, 0.95), xycoords="axes fraction", va="top", fontsize=8.5, color=GREY_TEXT)
        for axes in (step, gradient, time, memory):
            axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.01), ncols=6, borderaxespad=0.0)


def _mask_step(axes: Axes, treatments: Row, labels: Mapping[str, str]) -> None:
    """Draw one bar per treatment, composed of the parts of a step."""
    names = list(labels)
    left = [0.0] * len(names)
    for key, label, color in STEP_PARTS:
        values = [treatments[name][f"{key}_ms"] for name in names]
        axes.barh(names, values, left=left, height=0.62, color=color, label=label)
        left = [start + value for start, value in zip(left, values, strict=True)]
    for number, name in enumerate(names):
        at = (left[number], number)
        _note(axes, f"{treatments[name]['step_ms']:,.0f}", at, (4, 0), va="center", color=GREY_TEXT)
    said = [f"{labels[n]}\n{treatments[n]['tokens']:,} tokens, {treatments[n]['rows']:,} rows" for n in names]
    axes.set_yticks(range(len(names)), said, fontsize=8.5)
    axes.set_xlim(0, 1.1 * max(left))
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x")
    axes.tick_params(axis="y", length=0)
    axes.set_title("One step of the same batch, ms")


def _mask_gradient(axes: Axes, treatments: Row, labels: Mapping[str, str]) -> None:
    """Draw the cosine with the masked gradient for each part; a dashed line is for all parts together."""
    parts = list(treatments["masked"]["gradient_parts"])
    for name in ("zeroed", "removed", "in_loss"):
        color, one = TREATMENT_COLORS[name], treatments[name]
        cosines = [one["gradient_parts"][part]["cosine"] for part in parts]
        axes.axvline(one["gradient"]["cosine"], color=color, lw=1.2, ls=(0, (4, 3)), alpha=0.7)
        axes.plot(cosines, range(len(parts)), "o", ms=7, color=color, label=labels[name], clip_on=False)
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


def _mask_sweep(axes: Axes, sweep: Rows, key: str, labels: Mapping[str, str], faint: bool = False) -> None:
    """Draw one line per treatment against the share of retrieved tokens."""
    for name, label in labels.items():
        second = name in DASHED
        axes.plot(
            [record["retrieved_share"] for record in sweep],
            [record["treatments"][name][key] for record in sweep],
            color=TREATMENT_COLORS[name],
            ls=(0, (2.5, 2)) if second else "-",
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


# study systems


def draw_systems(rows: Rows, records: Mapping[str, Rows], claims: Mapping[str, tuple[str, str]], path: Path) -> None:
    """Draw reward, exact match and a system's own claim on held-out questions over the steps, one row per system. The
    control is grey. records: metrics by run name. claims: (key, label) by system.

    Every point is a greedy evaluation of all held-out questions.
    """
    systems = list(dict.fromkeys(row["system"] for row in rows))
    with _figure(path, 9.6, 2.3 * len(systems), {"axes.titlepad": 8}) as figure:
        grid = figure.subplots(len(systems), 3, squeeze=False)
        for line, system in zip(grid, systems, strict=True):
            key, label = claims[system]
            panels = (("reward", f"{system}: reward"), ("em", "exact match"), (key, label))
            for axes, (name, title) in zip(line, panels, strict=True):
                for row in rows:
                    if row["system"] == system:
                        _system_curve(axes, records[row["name"]], name, row["control"])
                axes.set_title(title)
            line[1].set_ylim(0, 1)
        for axes in grid[-1]:
            axes.set_xlabel("step")


def _system_curve(axes: Axes, records: Rows, name: str, control: bool) -> None:
    evaluations = [(record["step"], record["eval"]) for record in records if "eval" in record]
    points = [(step, found.get(name, found["parts"].get(name))) for step, found in evaluations]
    points = [(step, value) for step, value in points if value is not None]
    if points:
        steps, values = zip(*points, strict=True)
        axes.plot(steps, values, color=GREY if control else BLUE, lw=1.6, marker="o", ms=2.5, alpha=0.9)


def draw_methods(rows: Rows, measure: str, budget: float, path: Path) -> None:
    """Draw a row of panels for each condition: the measure over computed tokens, and over seconds. A method has a
    colour, its mean over seeds and the band of Student's interval; controls are dotted, without bands.

    A curve ends where the first of its seeds ends. Between evaluations it is linear.
    """
    conditions = list(dict.fromkeys(row["condition"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    with _figure(path, 9.6, 3.4 * len(conditions), {"axes.titlepad": 8}) as figure:
        grid = figure.subplots(len(conditions), 2, squeeze=False, sharey=True)
        for line, condition in zip(grid, conditions, strict=True):
            for axes, axis in zip(line, ("tokens", "seconds"), strict=True):
                for method, control in itertools.product(methods, (False, True)):
                    own = [
                        r["curve"]
                        for r in rows
                        if (r["condition"], r["method"], r["control"]) == (condition, method, control)
                    ]
                    if own:
                        _band(axes, own, axis, measure, PALETTE[methods.index(method) % len(PALETTE)], method, control)
                axes.set_title(", ".join(filter(None, (condition, f"{measure} over {axis}"))))
                if measure != "reward":
                    axes.set_ylim(0, None)
            line[0].axvline(budget, color=GREY, lw=0.8)
            line[0].xaxis.set_major_locator(MaxNLocator(5))
            line[0].xaxis.set_major_formatter(EngFormatter(sep=""))
        if any(row["control"] for row in rows):
            grid[0][0].plot([], [], color=GREY, lw=1.2, ls=":", label="control")
        grid[0][0].legend(fontsize=8, frameon=False)
        for axes, label in zip(grid[-1], ("computed tokens", "seconds of rollouts, rewards and updates"), strict=True):
            axes.set_xlabel(label)


def _band(axes: Axes, curves: Sequence[Rows], axis: str, measure: str, color: str, method: str, control: bool) -> None:
    places = np.linspace(0, min(curve[-1][axis] for curve in curves), 50)
    values_SP = np.array(
        [np.interp(places, [at[axis] for at in curve], [at[measure] for at in curve]) for curve in curves]
    )
    axes.plot(
        places,
        values_SP.mean(0),
        color=color,
        lw=1.2 if control else 1.8,
        ls=":" if control else "-",
        label=None if control else method,
    )
    if len(curves) > 1 and not control:
        halves = np.array([seed_interval(list(column)).half or 0.0 for column in values_SP.T])
        band = values_SP.mean(0) + np.outer((-1, 1), halves)
        if measure != "reward":  # em and f1 are between 0 and 1
            band = band.clip(0, 1)
        axes.fill_between(places, *band, color=color, alpha=0.12, lw=0)
