"""Flags of `thresher study`: one command for each claim. The work is in bench/studies/."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from thresher.cli import flags

Parsers = Any  # what add_subparsers returns has no public name


def study_commands(studies: Parsers, parser: Callable[[], argparse.ArgumentParser]) -> None:
    """Add every study to `studies`; `parser` makes the command line's own, for the commands that a study runs."""
    kl = _study(studies, "kl", "KL estimators: value, gradient, and training pushed off its reference")
    kl.set_defaults(handler=lambda options: _kl(options, parser()))
    kl.add_argument("--out", default="runs/study-kl", help="folder; what is finished in it is not done again")
    kl.add_argument("--start", metavar="FOLDER", help="a folder of `thresher demo`, whose world and warm-up are used")
    kl.add_argument("--steps", type=flags.count, default=30, help="of each training run")
    kl.add_argument("--seeds", type=flags.seed, nargs="+", default=[0, 1], metavar="SEED")

    mask = _study(studies, "mask", "retrieved tokens in the loss, zeroed, masked, removed: cost and gradient")
    mask.set_defaults(handler=_mask)
    mask.add_argument("--out", default="runs/study-mask", help="folder for mask.json and mask.png")
    batch = mask.add_mutually_exclusive_group()
    batch.add_argument("--run", help="folder of `thresher train` or `demo`: its last weights and stored trajectories")
    batch.add_argument(
        "--seed", type=flags.seed, default=0, help="of a scripted batch and random weights, without --run"
    )
    mask.add_argument("--limit", type=flags.count, default=64, help="trajectories in the batch, at most")
    mask.add_argument("--repeats", type=flags.count, default=7, help="timed steps of each treatment")
    mask.add_argument("--device", choices=("cpu", "cuda"), default="cpu")

    systems = _study(studies, "systems", "every system from one base, over seeds, beside shuffled rewards")
    systems.set_defaults(handler=lambda options: _systems(options, parser()))
    systems.add_argument("--out", default="runs/study-systems", help="folder; what is finished is not done again")
    systems.add_argument("--system", action="append", metavar="NAME", help="may be repeated; default: all six")
    systems.add_argument("--seeds", type=flags.seed, nargs="+", default=[0, 1, 2], metavar="SEED")
    systems.add_argument(
        "--controls", type=flags.seed, nargs="*", default=[0], metavar="SEED", help="with shuffled rewards"
    )
    systems.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override the recipe")


def _study(studies: Parsers, name: str, text: str) -> argparse.ArgumentParser:
    made: argparse.ArgumentParser = studies.add_parser(name, help=text, description=text)
    return made


def _kl(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    from thresher.bench.studies.kl.run import run_study

    run_study(Path(options.out), options.start, options.steps, options.seeds, parser)


def _mask(options: argparse.Namespace) -> None:
    from thresher.bench.studies.mask.run import run_study

    run_study(Path(options.out), options.run, options.seed, options.repeats, options.limit, options.device)


def _systems(options: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    from thresher.bench.studies.systems.run import SYSTEMS, run_study

    names = options.system or SYSTEMS
    run_study(Path(options.out), names, options.seeds, options.controls, options.set, parser)
