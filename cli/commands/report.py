"""`thresher report`: a run folder as a page that a browser opens, and pictures; several runs as one page."""

import argparse

from thresher.engine import console
from thresher.rewards.errors import UserError

HELP = "curves and trajectories of a run, as a page and pictures; several runs beside each other"
PLACE = 110
EXAMPLE = "thresher report runs/first"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder; several are held against the first")
    parser.add_argument("--out", help="folder to write into, of several runs the .html file; default: the run folder")


def run(options: argparse.Namespace) -> None:
    if len(options.runs) > 1:
        _compare(options)
        return
    from thresher.engine.reporting.report import write_report

    page = write_report(options.runs[0], options.out)
    print(page)
    console.answer({"report": page})


def _compare(options: argparse.Namespace) -> None:
    from thresher.engine.reporting.comparison import write_comparison

    if options.out is None:
        raise UserError("report: expected --out with several runs; name the file, such as --out runs/compared.html")
    tests = write_comparison(options.runs, options.out)
    print(options.out)
    console.answer({"report": options.out, "runs": options.runs, "tests": tests})
