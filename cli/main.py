"""The command line. Every command says what it is about to do, shows progress, ends with one table and writes JSON.

Exit status: 0 done; 2 the user's mistake, explained in one sentence; 1 ours, with a trace, or in a sentence where a
command checks our own work (`bench loss`, `bench compile`); 130 interrupted; 141 nobody reads the output any more.

Deliberately absent: the commands themselves, which registry.py finds in cli/commands.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from thresher.cli import commands
from thresher.cli.process import prepare_process
from thresher.cli.registry import add_commands
from thresher.policy.files import remedy
from thresher.rewards.errors import UserError


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of `thresher`; leaves by SystemExit. What a process needs is decided here, before torch is loaded."""
    prepare_process()
    sys.exit(run(arguments))


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; its exit status."""
    try:
        run_command(arguments)
    except UserError as error:
        print(f"thresher: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains when it flushes
        return 141
    except OSError as error:
        # A path that nobody looked at before. What the system says without naming one is ours to explain.
        path = error.filename2 or error.filename
        if path is None:
            raise
        print(f"thresher: {path}: {error.strerror}; {remedy(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(
            "thresher: interrupted; a training run or a rollout goes on with --resume, an index or an evaluation when "
            "begun again",
            file=sys.stderr,
        )
        return 130
    return 0


def run_command(arguments: Sequence[str] | None = None) -> None:
    """Run one command; its errors are raised. Commands that are chains of others get it as `options.run_command`."""
    options = build_parser().parse_args(arguments)
    options.handler(options)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. What it parses has the command's function as `handler`, and `run_command`."""
    parser = argparse.ArgumentParser(
        prog="thresher", description="Train small open models to answer from retrieved text, with GRPO."
    )
    parser.set_defaults(run_command=run_command)  # handed down, for no command imports what lies above it
    add_commands(parser, commands)
    return parser


if __name__ == "__main__":
    main()
