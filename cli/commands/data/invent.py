"""`thresher data invent`: the demo's invented world, as files. The work is engine/world/files.py's."""

import argparse

from thresher.cli import flags
from thresher.common import console

HELP = "an invented world: corpus, questions, warm-up transcripts"
PLACE = 50
EXAMPLE = "thresher data invent --out runs/world"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, help="folder to write")
    parser.add_argument("--seed", type=flags.integer, default=0, help="of the invented facts")
    parser.add_argument("--passage-format", default=" {text}", help="as retrieval.passage_format of the recipe")
    parser.add_argument(
        "--forms",
        type=flags.natural,
        default=0,
        help="so many warm-up transcripts for each system, with dev questions and questions that bring their passages, "
        "for `study systems` and `reproduce`",
    )
    parser.add_argument("--aware", type=flags.share, help="share of warm-up transcripts that follow their question")


def run(options: argparse.Namespace) -> None:
    from dataclasses import replace

    from thresher.engine.world.facts import Size
    from thresher.engine.world.files import invent_files

    size = Size() if options.aware is None else replace(Size(), aware=options.aware)
    figures = invent_files(options.out, options.seed, size, options.passage_format, options.forms)
    console.figures(f"an invented world in {options.out}", figures)
