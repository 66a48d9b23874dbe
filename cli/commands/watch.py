"""`thresher watch`: a run looked at while it goes on. The work is engine/reports's."""

import argparse
import sys

from thresher.cli import flags
from thresher.common import console

HELP = "a run while it goes on: its page, live, or a view in the terminal"
PLACE = 105
EXAMPLE = "thresher watch runs/first --tty"

PORT = flags.checked(int, "a whole number from 0 to 65535", lambda value: 0 <= value <= 65_535)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", help="run folder")
    parser.add_argument("--tty", action="store_true", help="in the terminal, until the run ends, in place of a page")
    parser.add_argument("--port", type=PORT, default=8700, help="of the page on this machine; 0: any; default: 8700")
    flags.add_unverified(parser)


def run(options: argparse.Namespace) -> None:
    try:
        _watch(options)
    except KeyboardInterrupt:  # how one leaves it: nothing was interrupted that is to be gone on with
        sys.exit(130)


def _watch(options: argparse.Namespace) -> None:
    if options.tty:
        from thresher.engine.reports.watch import watch_terminal

        console.answer(watch_terminal(options.run, unverified=options.unverified).to_dict())
        return
    from thresher.engine.reports.watch import serve_page

    def say(text: str) -> None:
        console.console.print(text, markup=False, soft_wrap=True)

    serve_page(options.run, options.port, say, unverified=options.unverified)
