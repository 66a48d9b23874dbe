"""`thresher report`: a run folder as a page that a browser opens; a stored step's tokens; several runs."""

import argparse

from thresher.cli import flags
from thresher.common import console
from thresher.common.errors import UserError

HELP = "curves and trajectories of a run, as a page and pictures; several runs beside each other"
PLACE = 110
EXAMPLE = "thresher report runs/first"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="run folder; several are held against the first")
    parser.add_argument(
        "--tokens", metavar="STEP", help="the tokens of a stored step, coloured by their values; all: of every one"
    )
    parser.add_argument(
        "--out",
        help="folder to write into; default: the run folder. Of several runs, and with --tokens STEP, the .html file",
    )
    flags.add_unverified(parser)


def run(options: argparse.Namespace) -> None:
    if len(options.runs) > 1:
        _compare(options)
        return
    (folder,) = options.runs
    if options.tokens is not None:
        from thresher.engine.reports.token_view import write_token_view

        page = write_token_view(folder, options.tokens, options.out, options.unverified)
    else:
        from thresher.engine.reports.report import write_report

        page = write_report(folder, options.out, options.unverified)
    console.say(str(page))
    console.answer({"report": page})


def _compare(options: argparse.Namespace) -> None:
    from thresher.engine.reports.report import write_comparison

    if options.tokens is not None:
        raise UserError("report: --tokens shows one run's step; name one run")
    if options.out is None:
        raise UserError("report: expected --out with several runs; name the file, such as --out runs/compared.html")
    tests = write_comparison(options.runs, options.out, options.unverified)
    console.say(str(options.out))
    console.answer({"report": options.out, "runs": options.runs, "tests": tests})
