"""`thresher study systems`: does every system learn? The study is bench/studies/systems.py."""

import argparse
from pathlib import Path

from thresher.cli import flags

HELP = "every system from one base, over seeds, beside shuffled rewards"
PLACE = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="runs/study-systems", help="folder; what is finished is not done again")
    parser.add_argument("--system", action="append", metavar="NAME", help="may be repeated; default: all six")
    parser.add_argument("--seeds", type=flags.seed, nargs="+", default=[0, 1, 2], metavar="SEED")
    parser.add_argument(
        "--controls", type=flags.seed, nargs="*", default=[0], metavar="SEED", help="with shuffled rewards"
    )
    flags.add_set(parser)


def run(options: argparse.Namespace) -> None:
    from thresher.bench.studies.systems import SYSTEMS, run_study

    names = options.system or SYSTEMS
    run_study(Path(options.out), names, options.seeds, options.controls, options.set, options.run_command)
