"""`thresher study systems`: does every system learn? The study is bench/studies/systems.py."""

import argparse
from pathlib import Path

from thresher.cli import flags
from thresher.common import console, signals

HELP = "every system from a base a seed, beside shuffled rewards"
PLACE = 30
EXAMPLE = "thresher study systems --system search_r1 --seeds 0"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="runs/study-systems", help="folder; what is finished is not done again")
    parser.add_argument("--system", action="append", metavar="NAME", help="may be repeated; default: all six")
    parser.add_argument(
        "--seeds", type=flags.seed, nargs="+", default=[0, 1, 2], metavar="SEED", help="of the training runs"
    )
    parser.add_argument(
        "--controls", type=flags.seed, nargs="*", default=[0], metavar="SEED", help="with shuffled rewards"
    )
    flags.add_set(parser)
    flags.add_allow_key(parser)


def run(options: argparse.Namespace) -> None:
    from thresher.bench.studies.systems import SYSTEMS, run_study
    from thresher.common.files import read_json_object

    names = options.system or SYSTEMS
    with signals.keeping(lambda: f"{options.out} keeps what is finished"):
        run_study(
            Path(options.out),
            names,
            options.seeds,
            options.controls,
            options.set,
            options.run_command,
            options.allow_key,
        )
    console.answer(read_json_object(Path(options.out) / "systems.json"))
