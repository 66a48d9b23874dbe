"""`thresher bench gpu-check`: what `make gpu-check` runs. The work is bench/gpu_check.py's.

Status 1 where a part failed or was cut off.
"""

import argparse
import sys

from thresher.cli import flags
from thresher.common import console

HELP = "all that a GPU has to confirm, in eight minutes"
PLACE = 60
EXAMPLE = "thresher bench gpu-check --part tests loss"

PARTS = ("tests", "tuning", "loss", "decode", "rollout", "step", "racecheck")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="bench/results", metavar="DIR", help="for its rows; default: bench/results")
    parser.add_argument("--budget", type=flags.seconds, default=465.0, metavar="SECONDS", help="default: 465")
    parser.add_argument("--part", nargs="+", choices=PARTS, help="default: all of them")


def run(options: argparse.Namespace) -> None:
    from thresher.bench.gpu_check import failure, run_gpu_check

    outcomes = run_gpu_check(options.out, options.budget, options.part)
    parts = [{"part": one.part.name, "how": one.how, "why": one.why, "seconds": one.seconds} for one in outcomes]
    console.answer({"parts": parts})
    wrong = failure(outcomes)
    if wrong is not None:
        sys.exit(wrong)  # status 1
