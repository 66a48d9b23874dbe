"""`thresher demo`: a chain of ordinary commands, each shown and run, and a table of what was learned.

The chain is engine/world/stages.py's; here its commands go through the parser like ones that were typed.
"""

import argparse
from pathlib import Path

from thresher.cli import flags
from thresher.common import console, signals

HELP = "from nothing to a model that searches, in minutes"
PLACE = 140
EXAMPLE = "thresher demo --out runs/demo --seed 1"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="runs/demo", help="folder for all that it makes; goes on if unfinished")
    parser.add_argument("--seed", type=flags.integer, default=0, help="of the world, the weights and the training")
    flags.add_set(parser)


def run(options: argparse.Namespace) -> None:
    from thresher.engine.world.stages import demo

    out = Path(options.out)

    def say(text: str) -> None:
        console.console.print(text, style="bold", markup=False, soft_wrap=True)

    with signals.keeping(lambda: f"{out} keeps what is finished" if out.exists() else None):
        demo(out, options.seed, options.set, options.run_command, say)
    from thresher.common.records import read_object
    from thresher.engine.reports.report import print_trajectories  # matplotlib takes a second

    print_trajectories(out / "grpo")
    summary = read_object(out / "summary.json")
    rows = [
        ("EM", summary["em_before"], summary["em_after"]),
        ("F1", summary["f1_before"], summary["f1_after"]),
    ]
    console.table(
        f"{summary['questions']} held-out questions, greedy, seed {options.seed}",
        ("", "after warm-up", "after GRPO"),
        rows,
    )
    console.answer(summary)
    console.console.print(f"{summary['seconds']:.0f} s in all. Look at {out / 'report.html'}")
