"""`thresher bench step`: one whole GRPO step, timed. The measuring is bench/step.py's."""

import argparse

from thresher.cli import flags
from thresher.common import console

HELP = "one whole GRPO step, beside TRL where it is installed"
PLACE = 10
EXAMPLE = "thresher bench step --shape rag --peer none"

SHAPES = ("demo", "rag", "search", "0.5B", "1.5B", "7B-lora")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", choices=SHAPES, default="demo", help="default: demo; sizes in B take --device cuda")
    parser.add_argument("--peer", choices=("trl", "none"), default="trl", help="who is measured beside ours")
    parser.add_argument("--steps", type=flags.count, default=5, metavar="N", help="of each side; default: 5")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--threads", type=flags.count, metavar="N", help="default: as a run of this model takes")
    parser.add_argument(
        "--budget",
        type=flags.seconds,
        default=480.0,
        metavar="SECONDS",
        help="then no further step begins; default: 480",
    )
    parser.add_argument("--out", help="JSON lines to append to")
    parser.add_argument("--plot", help="PNG of what --out then holds, the last row of each shape")


def run(options: argparse.Namespace) -> None:
    from thresher.bench.step import StepBench, run_step_bench

    bench = StepBench(
        shape=options.shape,
        peer=options.peer,
        steps=options.steps,
        threads=options.threads,
        device=options.device,
        budget=options.budget,
    )
    console.answer(run_step_bench(bench, options.out, options.plot))
