"""`thresher score`: anyone's transcripts, scored with a system's reward."""

import argparse

from thresher.cli import flags
from thresher.common import console

HELP = "score transcripts with a system's reward"
PLACE = 70
EXAMPLE = "thresher score --system eval_rar --transcripts in.jsonl --out out.jsonl"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--system", required=True, help="its name, or path/to/your_own.py")
    flags.add_set(parser, "OPTION=VALUE", "a switch of the system; may be repeated")
    parser.add_argument("--transcripts", required=True, metavar="FILE", help="JSONL of segmented transcripts")
    parser.add_argument("--tokenizer", metavar="DIR", help="count lengths in its tokens; default: in words")
    parser.add_argument("--out", required=True, metavar="FILE", help="JSONL to write, a line a transcript")
    flags.add_unverified(parser)


def run(options: argparse.Namespace) -> None:
    from thresher.engine.config.overrides import parse_overrides
    from thresher.engine.scoring.transcripts import score_file

    switches = parse_overrides(options.set)
    figures = score_file(
        options.system, switches, options.transcripts, options.out, options.tokenizer, options.unverified
    )
    console.figures(f"{options.system} rewards in {options.out}", figures)
