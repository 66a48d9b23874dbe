"""`thresher study kl`: the estimators of the KL term. The study is bench/studies/kl.py."""

import argparse
from pathlib import Path

from thresher.cli import flags
from thresher.common import console

HELP = "KL estimators: value, gradient, and training pushed off its reference"
PLACE = 10
EXAMPLE = "thresher study kl --start runs/demo --steps 10 --seeds 0"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="runs/study-kl", help="folder; what is finished in it is not done again")
    parser.add_argument(
        "--start", metavar="FOLDER", help="a folder of `thresher demo`, whose world and warm-up are used"
    )
    parser.add_argument("--steps", type=flags.count, default=30, help="of each training run")
    parser.add_argument(
        "--seeds", type=flags.seed, nargs="+", default=[0, 1], metavar="SEED", help="of the training runs"
    )


def run(options: argparse.Namespace) -> None:
    from thresher.bench.studies.kl import run_study
    from thresher.common.files import read_json_object

    run_study(Path(options.out), options.start, options.steps, options.seeds, options.run_command)
    console.answer(read_json_object(Path(options.out) / "kl.json"))
