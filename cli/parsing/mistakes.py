"""What argparse complains of, in one sentence each: what was expected, what came, and what may have been meant.

argparse writes usage lines and the names of types in front of its complaints. Its messages are read here by their text;
one that is not known is passed on as it is.
"""

import argparse
import re
from collections.abc import Collection, Iterable
from difflib import get_close_matches


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Name -> parser of what a parser has below it; empty for a command's own."""
    groups = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return next((dict(group.choices) for group in groups), {})


def command_of(parser: argparse.ArgumentParser) -> str:
    """`index build`; of the parser of all commands, `thresher`."""
    return parser.prog.partition(" ")[2] or parser.prog


def unknown_flag(parser: argparse.ArgumentParser, words: Iterable[str]) -> str | None:
    """What is wrong with the first flag that the parser does not know. argparse would first miss the flag that was
    meant."""
    for word in words:
        if word == "--" or (commands_of(parser) and not word.startswith("-")):
            return None
        flag = word.partition("=")[0]
        if flag.startswith("--") and " " not in flag and flag not in parser._option_string_actions:
            flags = [name for name in parser._option_string_actions if name.startswith("--")]
            return f"{command_of(parser)} has no {flag}; {meant(flag, flags)}"
    return None


def meant(word: str, known: Collection[str]) -> str:
    """What a mistyped word may have been, or all that it could be."""
    near = get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known)}"


def sentence(parser: argparse.ArgumentParser, message: str) -> str:
    """argparse's message as a sentence that says what to do."""
    command = command_of(parser)
    if found := re.fullmatch(r"argument (.+?): invalid choice: (.+?) \(choose from .*\)", message, re.S):
        return _no_choice(parser, found[1], found[2].strip("'\""))
    if found := re.fullmatch(r"the following arguments are required: (.+)", message):
        if below := commands_of(parser):
            who = "expected" if command == parser.prog else f"{command} expects"
            return f"{who} one of {', '.join(below)}; {parser.prog} --help says what they do"
        return f"{command} needs {' and '.join(found[1].split(', '))}; {parser.prog} --help says what they are"
    if found := re.fullmatch(r"one of the arguments (.+) is required", message):
        return f"{command} needs one of {', '.join(found[1].split())}"
    if found := re.fullmatch(r"argument (.+?): not allowed with argument (.+)", message):
        return f"expected either {found[2]} or {found[1]}, got both"
    if found := re.fullmatch(r"argument (.+?): expected (one|at least one|\d+) arguments?", message):
        return f"{found[1]}: expected a value, got none"
    if found := re.fullmatch(r"argument (.+?): ignored explicit argument '?(.*?)'?", message):
        return f"{found[1]} takes no value, got {found[2]}"
    return message.removeprefix("argument ")


def _no_choice(parser: argparse.ArgumentParser, name: str, value: str) -> str:
    below = commands_of(parser)
    if below:
        # `thresher convert`: the name of an action without its group's.
        inner = [f"{group} {value}" for group, inner in below.items() if value in commands_of(inner)]
        outer = "" if command_of(parser) == parser.prog else f"{command_of(parser)} "
        hint = f"did you mean {inner[0]}?" if inner else meant(value, below)
        return f"there is no command {outer}{value}; {hint}"
    choices = next(
        action.choices
        for action in parser._actions
        if action.choices is not None and name in ("/".join(action.option_strings), action.metavar, action.dest)
    )
    words = [str(choice) for choice in choices]
    near = get_close_matches(value, words, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{name}: expected {' or '.join(words)}, got {value}{hint}"
