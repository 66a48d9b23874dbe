"""`thresher completion`: a script that lets a shell complete commands, flags and their choices. It is made from the
parser, so that it knows what the program knows; files are the shell's."""

import argparse
from collections.abc import Iterator

from thresher.common import console

HELP = "a script for the shell's completion of commands and flags"
PLACE = 150
EXAMPLE = "thresher completion bash"

# COMP_WORDS[i] that names a command belongs to the path; the path decides which words there are.
SCRIPT = """_thresher() {
    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD - 1]}" path="" words="" i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$path ${COMP_WORDS[i]}" in
            %(paths)s) path="$path ${COMP_WORDS[i]}" ;;
        esac
    done
    case "$path" in
%(words)s
    esac
    case "$path $before" in
%(choices)s
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o bashdefault -o default -F _thresher thresher
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=("bash",), help="whose script to print")


def run(options: argparse.Namespace) -> None:
    text = script(options.build_parser())
    console.say(text, end="", exact=True)
    console.answer({"shell": options.shell, "script": text})


def script(parser: argparse.ArgumentParser) -> str:
    """The script of a program's parser."""
    commands = dict(_commands(parser, ""))
    flags = {path: _flags(command) for path, command in commands.items()}
    words = {path: [*_names(command), *flags[path]] for path, command in commands.items()}
    choices = {
        f"{path} {flag}": action.choices
        for path in commands
        for flag, action in flags[path].items()
        if action.choices is not None
    }
    return SCRIPT % {
        "paths": " | ".join(f'"{path}"' for path in commands if path),
        "words": "\n".join(f'        "{path}") words="{" ".join(found)}" ;;' for path, found in words.items()),
        "choices": "\n".join(
            f'        "{place}") words="{" ".join(map(str, of))}" ;;' for place, of in choices.items()
        ),
    }


def _commands(parser: argparse.ArgumentParser, path: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Every command and group by its path, such as " index build"; the program itself is ""."""
    yield path, parser
    for name, command in _names(parser).items():
        yield from _commands(command, f"{path} {name}")


def _names(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands of a group, by name; of a command none."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _flags(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    return {flag: action for action in parser._actions for flag in action.option_strings if flag.startswith("--")}
