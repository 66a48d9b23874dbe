"""`thresher bench roofline`: floors of GPUs that are not here, as predictions. The work is bench/roofline.py's."""

import argparse

from thresher.cli import flags
from thresher.common import console

HELP = "a decode step and an update on A100 to H200: floors and predictions, by arithmetic"
PLACE = 50
EXAMPLE = "thresher bench roofline --chip H100 --model 7B"

CHIPS = ("A100-40", "A100-80", "A800", "H100", "H200")
MODELS = ("0.5B", "1.5B", "3B", "7B")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--chip", nargs="+", choices=CHIPS, default=CHIPS, help="default: all of them")
    parser.add_argument(
        "--model", nargs="+", default=MODELS, help="sizes of Qwen2.5, or model folders; default: all four"
    )
    parser.add_argument("--batch", type=flags.count, default=256, help="sequences; default: 256")
    parser.add_argument("--out", help="JSON lines to append to")


def run(options: argparse.Namespace) -> None:
    from thresher.bench.roofline import run_roofline

    console.answer({"rows": run_roofline(options.chip, options.model, options.batch, options.out)})
