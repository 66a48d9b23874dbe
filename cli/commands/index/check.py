"""`thresher index check`: how well an index finds what questions name as their gold passages."""

import argparse

from thresher.cli import flags
from thresher.common import console

HELP = "recall and MRR against gold_titles"
PLACE = 50
EXAMPLE = "thresher index check --index indexes/mine --queries questions.jsonl --k 5"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_index_search(parser)
    parser.add_argument("--queries", required=True, metavar="FILE", help="JSONL of questions with gold_titles")


def run(options: argparse.Namespace) -> None:
    from thresher.engine.config.overrides import parse_overrides
    from thresher.retrieval.building.commands import check

    figures = check(
        options.index, options.queries, options.k, parse_overrides(options.set), options.gpu, options.verify
    )
    console.figures(f"{options.index} against the gold titles of {options.queries}", figures)
    console.answer(figures)
