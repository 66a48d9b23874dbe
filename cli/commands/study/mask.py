"""`thresher study mask`: what to do with retrieved tokens in the loss. The study is bench/studies/mask.py."""

import argparse
from pathlib import Path

from thresher.cli import flags
from thresher.common import console

HELP = "retrieved tokens in the loss, zeroed, masked, removed: cost and gradient"
PLACE = 20
EXAMPLE = "thresher study mask --run runs/demo/grpo --out runs/masked"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="runs/study-mask", help="folder for mask.json and mask.png")
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument("--run", help="folder of `thresher train` or `demo`: its last weights and stored trajectories")
    batch.add_argument(
        "--seed", type=flags.seed, default=0, help="of a scripted batch and random weights, without --run"
    )
    parser.add_argument("--limit", type=flags.count, default=64, help="trajectories in the batch, at most")
    parser.add_argument("--repeats", type=flags.count, default=7, help="timed steps of each treatment")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where it is computed")


def run(options: argparse.Namespace) -> None:
    from thresher.bench.studies.mask import run_study
    from thresher.common.files import read_json_object

    run_study(Path(options.out), options.run, options.seed, options.repeats, options.limit, options.device)
    console.answer(read_json_object(Path(options.out) / "mask.json"))
