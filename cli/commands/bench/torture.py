"""`thresher bench torture`: attacks on the program itself. They are bench/torture's, and so is what counts as wrong."""

import argparse
import sys

from thresher.cli import flags
from thresher.common import console

HELP = "kills, damaged files, malformed records, hostile requests, full disks: what survives"
PLACE = 60
EXAMPLE = "thresher bench torture --scale 0.02"

ATTACKS = (
    "kills",
    "files",
    "records",
    "requests",
    "holes",
    "stored",
    "inputs",
    "sampling",
    "mishaps",
    "answers",
    "terminal",
    "disks",
    "endurance",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=flags.seed, default=0, help="of everything that is drawn")
    share = flags.checked(float, "a number over 0, up to 1", lambda value: 0 < value <= 1)
    help = "of the attempts, which take half an hour"
    parser.add_argument("--scale", type=share, default=1.0, metavar="SHARE", help=help)
    parser.add_argument(
        "--attack", action="append", choices=ATTACKS, metavar="NAME", help="may be repeated; default: every one"
    )
    parser.add_argument("--tries", metavar="FILE", help="JSON lines to append every attempt to")
    parser.add_argument("--page", metavar="FILE", help="Markdown whose table is replaced, as in docs/reliability.md")
    parser.add_argument("--out", help="JSON lines to append the counts to")


def run(options: argparse.Namespace) -> None:
    from thresher.bench.torture.run import Campaign, run_torture, wrong_of

    campaign = Campaign(
        seed=options.seed,
        scale=options.scale,
        attacks=options.attack or ATTACKS,
        out=options.out,
        tries=options.tries,
        page=options.page,
    )
    row = run_torture(campaign, options.command_line)
    console.answer({"rows": [row]})
    if wrong := wrong_of(row):
        sys.exit(f"torture: {wrong} attempts were answered wrongly")  # status 1
