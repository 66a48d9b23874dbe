"""`thresher index search`: the hits of each question, into a file."""

import argparse

from thresher.cli import flags
from thresher.engine import console

HELP = "the k nearest passages of each question"
PLACE = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_index_search(parser)
    parser.add_argument("--out", required=True)


def run(options: argparse.Namespace) -> None:
    from thresher.engine.config.overrides import parse_overrides
    from thresher.retrieval.building.commands import search_file

    parameters = parse_overrides(options.set)
    figures = search_file(
        options.index, options.queries, options.k, options.out, parameters, options.gpu, options.verify
    )
    console.figures(f"hits in {options.out}", figures)
