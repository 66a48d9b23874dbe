"""`thresher data judge`: a judge of entailment for the invented world. The work is engine/world/judge.py's."""

import argparse

from thresher.cli import flags
from thresher.common import console

HELP = "a judge of entailment for the invented world: a small classifier, trained"
PLACE = 60
EXAMPLE = "thresher data judge --out runs/world/judge"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", required=True, help="model folder to write, for judge.entailment")
    parser.add_argument("--seed", type=flags.integer, default=0, help="of the world, as data invent has it")
    parser.add_argument("--steps", type=flags.natural, default=0, help="of its training; 0: enough")


def run(options: argparse.Namespace) -> None:
    from thresher.engine.world.judge import STEPS, make_judge

    figures = make_judge(options.out, options.seed, options.steps or STEPS)
    console.figures(f"a judge of entailment in {options.out}", figures)
