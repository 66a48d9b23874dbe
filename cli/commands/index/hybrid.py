"""`thresher index hybrid`: indexes of one corpus, joined into one that is searched as any other."""

import argparse
from pathlib import Path

from thresher.cli import flags
from thresher.common import console

HELP = "join indexes of one corpus by reciprocal rank"
PLACE = 30
EXAMPLE = "thresher index hybrid indexes/wiki indexes/words --out indexes/both"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("members", nargs="+", metavar="INDEX", help="folders of two or more indexes of one corpus")
    parser.add_argument("--depth", type=flags.count, default=100, help="passages asked of each; default: 100")
    parser.add_argument("--out", required=True, metavar="DIR", help="index folder to write")


def run(options: argparse.Namespace) -> None:
    from thresher.retrieval.indexes.hybrid import build_hybrid
    from thresher.retrieval.indexes.load import load_retriever

    hybrid = build_hybrid([Path(member) for member in options.members], options.out, load_retriever, options.depth)
    figures = {
        "index": options.out,
        "members": ", ".join(options.members),
        "passages": len(hybrid),
        "depth": hybrid.depth,
    }
    console.figures(f"hybrid index in {options.out}", figures)
