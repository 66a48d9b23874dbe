"""`thresher report`: a run folder as a page that a browser opens, and pictures; or a stored step's tokens as one."""

import argparse

from thresher.engine import console

HELP = "curves and trajectories of a run, as a page and pictures"
PLACE = 110
EXAMPLE = "thresher report runs/first"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run folder")
    parser.add_argument(
        "--tokens", metavar="STEP", help="the tokens of a stored step, coloured by their values; all: of every one"
    )
    parser.add_argument(
        "--out", help="folder to write into; default: the run folder. With --tokens STEP the page's file"
    )


def run(options: argparse.Namespace) -> None:
    if options.tokens is not None:
        from thresher.engine.reporting.token_view import write_token_view

        page = write_token_view(options.run, options.tokens, options.out)
    else:
        from thresher.engine.reporting.report import write_report

        page = write_report(options.run, options.out)
    print(page)
    console.answer({"report": page})
