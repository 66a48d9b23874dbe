"""`thresher data check`: what a file of questions holds. The counting is retrieval/datasets/summary.py's."""

import argparse

from thresher.common import console

HELP = "what a file of questions holds, and whether every line is sound"
PLACE = 20
EXAMPLE = "thresher data check train.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="questions as training reads them")


def run(options: argparse.Namespace) -> None:
    from thresher.retrieval.datasets.summary import summarize

    with console.counting("questions checked:") as counter:
        figures = summarize(options.file, counter.to)
    parts = ("kinds", "per question", "words")
    spreads = {f"{part}, {name}": figures[part][name] for part in parts for name in figures[part]}
    plain = {name: value for name, value in figures.items() if name not in parts}
    if not figures["passages"]:  # then whatever is said of them is 0
        plain = {name: value for name, value in plain.items() if "passage" not in name or name == "passages"}
    console.figures(options.file, {**plain, **spreads})
    console.answer(figures)
