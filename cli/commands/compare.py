"""`thresher compare`: two evaluations side by side. The comparing is engine/evaluation/compare.py's."""

import argparse
import json
from pathlib import Path

from thresher.cli import flags
from thresher.common import console

HELP = "two evaluations of the same questions, side by side"
PLACE = 50
EXAMPLE = "thresher compare runs/a runs/b --out runs/compared"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", help="folder of `thresher eval`")
    parser.add_argument("second", help="folder of `thresher eval`; differences are this one minus the first")
    parser.add_argument("--out", help="folder for compare.md and compare.json")
    flags.add_unverified(parser)


def run(options: argparse.Namespace) -> None:
    from thresher.common.files import atomic_write_text
    from thresher.engine.evaluation.compare import compare, difference_rows, markdown, read_evaluation, recall_rows

    first, second = (read_evaluation(path, options.unverified) for path in (options.first, options.second))
    result = compare(first, second)
    if options.out is not None:
        out = Path(options.out)
        out.mkdir(parents=True, exist_ok=True)
        atomic_write_text(out / "compare.md", markdown(result))
        atomic_write_text(out / "compare.json", json.dumps(result, indent=2) + "\n")
    console.answer(result)
    for note in result["notes"]:
        console.console.print(note, markup=False, soft_wrap=True)
    columns = ("measure", "first", "second", "difference", "95% interval", "p", "questions")
    rows = [row[: len(columns)] for row in difference_rows(result)]
    console.table(f"second - first: {second.path} - {first.path}", columns, rows)
    if result["recalled"]:
        texts = ("a gold recalled by", "both", "only the first", "only the second", "neither", "questions")
        console.table("questions whose passages hold a gold in both runs", texts, recall_rows(result))
