"""The command line. Every command announces its work, shows progress, ends with one table and can print JSON.

Exit status: 0 success; 2 a user error, in one sentence; 1 an internal error, with a trace, or in a sentence for `bench
loss` and the like; 130 interrupted by Ctrl-C, 143 by SIGTERM, with a message about what is kept and the command that
continues; 141 the output was closed. With `--json`, stdout is one object: the results, or {"error": sentence}; all
other output goes to stderr. The commands are the classes in cli/commands.
"""

import argparse
import json
import os
import pkgutil
import shlex
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout
from importlib import import_module

from thresher.cli import commands
from thresher.cli.parser import Parser, add_commands, add_version, commands_in, example
from thresher.cli.process import leave, prepare_process
from thresher.common.errors import UserError
from thresher.common.files import remedy


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the entry point of `thresher`. It prepares the process before torch is loaded."""
    prepare_process()
    try:
        status = run(arguments)
    except KeyboardInterrupt as error:  # while modules are imported
        status = getattr(error, "status", 130)
    leave(status)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status."""
    from thresher.common import console  # imports numpy, so `main` must set its thread waiting first
    from thresher.engine.config.renamed import current_words

    words = current_words(sys.argv[1:] if arguments is None else list(arguments))
    as_json = "--json" in words and not {"-h", "--help"} & set(words)
    # Read before parsing, because an error in the flags is also reported in the form that they request.
    with console.answering(quiet="--quiet" in words) as answer:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            status, wrong = _ended(words)
        found = answer.to_dict()
    try:
        if wrong is not None:
            print(f"thresher: {console.visible(wrong)}", file=sys.stderr)
            found |= {"error": wrong}
        if as_json and (wrong is not None or not _is_later_rank()):
            # A lone surrogate, as in a name that is not UTF-8, cannot be encoded; its backslash escape is valid JSON.
            line = json.dumps(found, ensure_ascii=False).encode("utf-8", "backslashreplace").decode()
            print(line, flush=True)
    except BrokenPipeError:
        return _unread()
    return status


def _is_later_rank() -> bool:
    """Return whether torchrun has started this process beside another, whose object is printed."""
    from thresher.common.signals import under_torchrun

    return under_torchrun() and os.environ.get("RANK", "0") != "0"


def _ended(words: Sequence[str]) -> tuple[int, str | None]:
    """Run a command; return its exit status and the sentence of an error."""
    from thresher.common.signals import Interrupted, handle_signals

    try:
        with handle_signals():
            _check_words(words)
            run_command(words)
    except UserError as error:
        if "--verbose" in words:
            _print_trace()
        return 2, str(error)
    except BrokenPipeError:
        return _unread(), None
    except OSError as error:
        # An OSError of a path that was not checked before. Without a path, the error is an internal one.
        path = error.filename2 or error.filename
        if path is None:
            raise
        if "--verbose" in words:
            _print_trace()
        return 2, f"{path}: {error.strerror}; {remedy(error)}"
    except KeyboardInterrupt as error:
        stopped = error if isinstance(error, Interrupted) else Interrupted()
        return stopped.status, interrupted(words, stopped.kept, stopped.flag, stopped.spent)
    except SystemExit as left:  # --help and --version, and commands that check our own work
        return (left.code or 0, None) if isinstance(left.code, int | None) else (1, str(left.code))
    except Exception as error:  # an internal error
        if "--json" not in words:
            raise
        _print_trace()
        return 1, f"{type(error).__name__}: {error}"
    return 0, None


def _check_words(words: Sequence[str]) -> None:
    """Raise UserError for a word that is not UTF-8, because recipes and records cannot store it."""
    for word in words:
        try:
            word.encode("utf-8")
        except UnicodeEncodeError:
            raise UserError(f"{word}: is not valid UTF-8; type it again, or rename the file") from None


def _print_trace() -> None:
    from thresher.common import console

    print(console.visible(traceback.format_exc()), file=sys.stderr, end="")


def interrupted(words: Sequence[str], kept: str | None, flag: str = "", spent: str = "") -> str:
    """Return the message of an interrupted command: what is kept, and what to type. kept, flag, spent: fields of
    `Interrupted`."""
    from thresher.common import signals

    again = list(words)
    for place, word in reversed(list(enumerate(again))):
        if spent and (word == spent or word.startswith(f"{spent}=")):
            del again[place : place + (2 if word == spent else 1)]
    if kept is not None and flag and flag not in again:
        again.append(flag)
    how = "with torchrun, as before" if signals.under_torchrun() else "with"
    what = "unfinished work is not kept; begin again" if kept is None else f"{kept}; go on from there"
    return f"interrupted; {what} {how}: thresher {shlex.join(again)}"


def _unread() -> int:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise the final flush reports an error
    return 141


def run_command(arguments: Sequence[str] | None = None) -> None:
    """Run one command; errors are raised."""
    from thresher.common import console

    options = build_parser().parse_args(arguments)
    options.handler(options)
    console.wrote({name: getattr(options, name, None) for name in ("out", "plot")})


def _run_within(arguments: Sequence[str]) -> None:
    """Run a command inside another one, without adding its output to the answer."""
    from thresher.common import console

    with console.answering():
        run_command(arguments)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands. The parse result has the command's function as `handler`."""
    about = "Train small open models to answer from retrieved text, with GRPO."
    parser = Parser(prog="thresher", description=about, epilog=example("thresher demo --out runs/demo"))
    parser.set_defaults(run_command=_run_within, build_parser=build_parser)
    add_version(parser)
    modules = [import_module(f"{commands.__name__}.{info.name}") for info in pkgutil.iter_modules(commands.__path__)]
    add_commands(parser, [command for module in modules for command in commands_in(module)], "COMMAND")
    return parser


if __name__ == "__main__":
    main()
