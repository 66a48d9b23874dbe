"""The table of one evaluation, as JSON and Markdown: means with 95% intervals, and under what they were measured.

In JSON every mean stands under its measure's key, the reward's parts under "parts", intervals as [low, high] under
"intervals" (those of parts as "parts.NAME"), under "counted" how many questions had a value, where not all had, and
under "deviations" the standard deviations of lengths, for lengths that differ much do not fit a batch.

Deliberately absent: two runs in one table (engine/evaluation/compare.py).
"""

from collections.abc import Mapping, Sequence
from statistics import stdev
from typing import Any

from thresher.engine.evaluation.metrics import LENGTHS, NAMES, Values, means, shown
from thresher.rewards.statistics import intervals

FACTS = {  # what an evaluation says of itself, and how the table calls it
    "system": "System",
    "baseline": "Baseline",
    "switches": "Options",
    "model": "Model",
    "prompt": "Prompt",
    "lengths": "Lengths",
    "chosen": "Chosen",
    "data": "Questions",
    "retrieval": "Passages",
    "cut": "Passages cut",
    "gold": "Gold passages",
    "roomless": "Branches",
    "noise": "Irrelevant passages added",
    "temperature": "Temperature",
    "seed": "Seed",
    "entailment_judge": "Entailment judged by",
    "verdict_judge": "Answers judged by",
    "latency": "Latency",
    "ended": "Ended",
}


def figures_of(measures: Sequence[Values], parts: Sequence[Values]) -> dict[str, Any]:
    """Means, intervals and counts of the questions' measures and parts, one of each a question."""
    averages, part_averages = means(measures), means(parts)
    columns = {name: [row.get(name) for row in measures] for name in averages}
    columns |= {f"parts.{name}": [row.get(name) for row in parts] for name in part_averages}
    found = intervals(columns, shares=[name for name in columns if _is_share(name)])
    return {
        "questions": len(measures),
        **averages,
        "parts": part_averages,
        "intervals": {name: [each.low, each.high] for name, each in found.items() if each.low is not None},
        "counted": {
            name: sum(value is not None for value in column)
            for name, column in columns.items()
            if any(value is None for value in column)
        },
        "deviations": {
            name: stdev(known)
            for name in LENGTHS
            if len(known := [value for value in columns.get(name, ()) if value is not None]) > 1
        },
    }


def _is_share(name: str) -> bool:
    return NAMES.get(name.removeprefix("parts."), ("", ""))[1] == "share"


def rows_of(figures: Mapping[str, Any]) -> list[tuple[str, str, str, int]]:
    """(key, mean, interval, questions) of all that `figures_of` found, as words."""
    values = {name: figures[name] for name in figures if name in NAMES}
    values |= {f"parts.{name}": value for name, value in figures["parts"].items()}
    rows = []
    for key, value in values.items():
        interval = figures["intervals"].get(key)
        between = f"{shown(key, interval[0])} to {shown(key, interval[1])}" if interval else "-"
        rows.append((key, shown(key, value), between, figures["counted"].get(key, figures["questions"])))
    return rows


def markdown(title: str, figures: Mapping[str, Any]) -> str:
    """The table with a line on each of FACTS that is known."""
    lines = [f"# {title}", ""]
    lines += [f"- {name}: {_plain(figures[key])}" for key, name in FACTS.items() if figures.get(key) is not None]
    lines += ["", "| Measure | | Mean | 95% interval | Questions |", "|---|---|--:|:-:|--:|"]
    for key, value, between, count in rows_of(figures):
        name = NAMES[key][0] if key in NAMES else f"Reward's part: {key.removeprefix('parts.')}"
        lines.append(f"| {name} | `{key}` | {value} | {between} | {count:,} |")
    if deviations := ", ".join(f"`{key}` {value:.2f}" for key, value in figures.get("deviations", {}).items()):
        lines += ["", f"Standard deviations over questions: {deviations}."]
    lines += [
        "",
        "Intervals: Wilson's where every question counts as yes or no, else percentile bootstrap over questions, 10,000"
        " resamples; - where all questions have one value. They say nothing of training seeds.",
    ]
    return "\n".join(lines) + "\n"


def cell(text: str) -> str:
    """A text that can break out of neither its table cell nor its line."""
    return " ".join(text.replace("|", "\\|").split())


def _plain(value: object) -> str:
    return cell(f"{value:g}" if isinstance(value, float) else str(value))
