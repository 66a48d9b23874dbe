"""`thresher bench step`: one GRPO step, timed. The measuring is bench/step/run.py's."""

import argparse

from thresher.cli import flags

HELP = "one GRPO step of the demo's model, beside TRL where it is installed"
PLACE = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=flags.count, default=5)
    parser.add_argument("--peer", choices=("trl", "none"), default="trl")
    parser.add_argument("--out", help="JSON lines to append to")


def run(options: argparse.Namespace) -> None:
    from thresher.bench.step.run import run_step_bench

    run_step_bench(options.steps, options.out, options.peer)
