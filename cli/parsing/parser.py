"""The parser class of `thresher` and of each of its commands, and the flags that every command has.

    --json      one object on stdout; tables, progress and remarks go to stderr
    --quiet     no progress lines
    --verbose   the trace of what ends in one sentence otherwise
    --version   of Thresher, Python, torch and Triton

main.py acts on the first three.
"""

import argparse
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NoReturn

from thresher.cli.parsing.mistakes import command_of, sentence, unknown_flag
from thresher.common.errors import UserError

PACKAGES = ("thresher", "torch", "triton")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose mistakes are a UserError of one sentence. A flag must be spelt out."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **{"formatter_class": Help, "allow_abbrev": False, **options})

    def error(self, message: str) -> NoReturn:
        raise UserError(sentence(self, message))

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        words = sys.argv[1:] if args is None else list(args)
        if wrong := unknown_flag(self, words):
            raise UserError(wrong)
        found, rest = super().parse_known_args(words, namespace)
        if rest:
            raise UserError(f"{command_of(self)}: expected nothing more, got {' '.join(rest)}")
        return found, rest


class Help(argparse.HelpFormatter):
    """Help that says every default, and leaves an example's line as it is."""

    def _get_help_string(self, action: argparse.Action) -> str:
        """Where argparse looks for the text."""
        text = action.help or ""
        takes_value = action.option_strings and action.nargs != 0 and not action.required
        if not takes_value or "default" in text:
            return text
        shown = _shown(action.default).replace("%", "%%")
        return f"{text}; default: {shown}"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


def _shown(default: Any) -> str:
    """A default as it would be typed."""
    if default is None or default == [] or default == float("inf"):
        return "none"
    return " ".join(map(str, default)) if isinstance(default, list | tuple) else repr(default).strip("'")


def example(command: str) -> str:
    """What stands at the end of a command's help."""
    return f"example:\n  {command}"


def add_common(parser: argparse.ArgumentParser) -> None:
    """The flags that every command has."""
    group = parser.add_argument_group("of every command")
    group.add_argument("--json", action="store_true", help="one JSON object on stdout, all else on stderr")
    group.add_argument("--quiet", action="store_true", help="no progress lines")
    group.add_argument("--verbose", action="store_true", help="a trace, where a mistake ends in one sentence otherwise")
    add_version(group)


def add_version(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--version", action=_Version, nargs=0, help="print versions, and do nothing")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from thresher.common import console  # brings numpy: see main.py

        found = {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()}
        console.answer(found)
        print(", ".join(f"{name} {text or 'not installed'}" for name, text in found.items()))
        parser.exit()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
