"""`thresher report`: a run folder as a page that a browser opens, and pictures."""

import argparse

from thresher.engine import console

HELP = "curves and trajectories of a run, as a page and pictures"
PLACE = 110
EXAMPLE = "thresher report runs/first"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run folder")
    parser.add_argument("--out", help="folder to write into; default: the run folder")


def run(options: argparse.Namespace) -> None:
    from thresher.engine.reporting.report import write_report

    page = write_report(options.run, options.out)
    print(page)
    console.answer({"report": page})
