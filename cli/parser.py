"""Commands and their parser: a class for each command, a field for each flag, and errors as one sentence.

    class Words(Command, help="count words", place=7, example="thresher words notes.txt"):
        file: Annotated[str, POSITIONAL, "text to count"]
        limit: Annotated[Natural | None, "N", "only the first N lines"] = None

        def __call__(self) -> None: ...

The type, default and notes of a field define the flag. `X | None` is optional, a Literal gives choices, a list takes
several values, a bool is a switch. Among the strings in the notes, the last is the help, one that starts with "--" is
the flag if it differs from the field's name, and any other is the metavar. A callable converts the text; POSITIONAL and
the like are below.
"""

import argparse
import platform
import re
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

from thresher.common.errors import UserError

PACKAGES = ("thresher", "torch", "triton")

# Notes of a field.
POSITIONAL: dict[str, Any] = {"positional": True}
REPEATED: dict[str, Any] = {"action": "append", "nargs": None}  # a list, with the flag repeated before each value
ANY_NUMBER: dict[str, Any] = {"nargs": "*"}  # a list that may be empty


@dataclass(frozen=True, eq=False)
class OneOf:
    """Note for a group of fields of which at most one is given; if `required`, exactly one."""

    required: bool = False


@dataclass(frozen=True)
class Group:
    """Commands with a common first word, as in `index build`. place, example: as those of a command."""

    word: str
    help: str
    place: int
    example: str
    metavar: str


class Command:
    """Base class of all commands. An instance has the values of its flags.

    help: the command's line in `--help`. place: its order there. example: a command line. A subclass without `help` is
    not a command; it shares fields and methods.
    """

    word = help = example = ""
    place = 0
    group: Group | None = None
    # Set by `main.build_parser`, because a command does not import higher layers.
    json: bool
    run_command: Callable[[Sequence[str]], None]  # runs another command, without adding its answer to this one's
    build_parser: Callable[[], argparse.ArgumentParser]

    def __init_subclass__(cls, help: str = "", place: int = 0, example: str = "", group: Group | None = None) -> None:
        cls.word = re.sub("(?<=[a-z])(?=[A-Z])", "-", cls.__name__).lower()
        cls.help, cls.place, cls.example, cls.group = help, place, example, group

    @classmethod
    def of(cls, options: argparse.Namespace) -> Any:
        """Return the command with the parsed values."""
        command = cls()
        vars(command).update(vars(options))
        return command

    def __call__(self) -> None:
        raise NotImplementedError


def commands_in(module: Any) -> list[type[Command]]:
    """Return the commands that a module defines."""
    found = (value for value in vars(module).values() if isinstance(value, type) and issubclass(value, Command))
    return [command for command in found if command.help and command.__module__ == module.__name__]


def add_commands(
    parser: argparse.ArgumentParser, commands: Sequence[type[Command]], metavar: str, group: Group | None = None
) -> None:
    """Add the commands of `group` to `parser`; for None, add the commands without a group, and the groups."""
    below = parser.add_subparsers(required=True, metavar=metavar)
    groups = {command.group for command in commands if command.group is not None} if group is None else set()
    inside = [command for command in commands if command.group == group]
    entries: list[Group | type[Command]] = [*inside, *groups]
    for entry in sorted(entries, key=lambda entry: (entry.place, entry.word)):
        made = below.add_parser(entry.word, help=entry.help, description=entry.help, epilog=example(entry.example))
        if isinstance(entry, Group):
            add_commands(made, commands, entry.metavar, entry)
        else:
            add_flags(made, entry)
            add_common(made)
            made.set_defaults(handler=lambda options, command=entry: command.of(options)())


def add_flags(parser: argparse.ArgumentParser, command: type[Command]) -> None:
    """Add an argument for each field of `command`, those of its base classes first."""
    bases = [base for base in reversed(command.__mro__) if base not in (Command, object)]
    names = dict.fromkeys(name for base in bases for name in vars(base).get("__annotations__", ()))
    hints = get_type_hints(command, include_extras=True)
    groups: dict[OneOf, argparse._ActionsContainer] = {}
    for name in names:
        kind, notes = _parts(hints[name])
        settings: dict[str, Any] = {"dest": name}
        if hasattr(command, name):
            settings["default"] = getattr(command, name)
        else:
            settings["required"] = True
        if get_origin(kind) in (list, Sequence):
            kind, more = _parts(get_args(kind)[0])
            notes = more + notes
            settings["nargs"] = "+"
        if get_origin(kind) is Literal:
            settings["choices"] = get_args(kind)
        if kind is bool:
            settings["action"] = "store_false" if settings["default"] else "store_true"
        into: argparse._ActionsContainer = parser
        flag = f"--{name.replace('_', '-')}"
        *texts, settings["help"] = (note for note in notes if isinstance(note, str))
        for note in notes:
            if isinstance(note, dict):
                settings |= note
            elif isinstance(note, OneOf):
                if note not in groups:
                    groups[note] = parser.add_mutually_exclusive_group(required=note.required)
                into = groups[note]
            elif callable(note):
                settings["type"] = note
        for text in texts:
            if text.startswith("--"):
                flag = text
            else:
                settings["metavar"] = text
        if settings.pop("positional", False):
            if not settings.pop("required", False) and "nargs" not in settings:
                settings["nargs"] = "?"
            into.add_argument(settings.pop("dest"), **settings)
        else:
            into.add_argument(flag, **settings)


def _parts(hint: Any) -> tuple[Any, list[Any]]:
    """Return the type inside `Annotated` and `| None`, and the notes, the outermost last."""
    notes: list[Any] = []
    while True:
        if get_origin(hint) is Annotated:
            hint, *more = get_args(hint)
            notes = more + notes
        elif get_origin(hint) in (Union, UnionType):
            (hint,) = (part for part in get_args(hint) if part is not NoneType)
        else:
            return hint, notes


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises a one-sentence UserError for a mistake. Flags cannot be abbreviated."""

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
    """A help formatter that shows every default and leaves the lines of an example unchanged."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        takes_value = action.option_strings and action.nargs != 0 and not action.required
        if not takes_value or "default" in text:
            return text
        return f"{text}; default: {_typed(action.default).replace('%', '%%')}"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


def _typed(default: Any) -> str:
    if default is None or default == [] or default == float("inf"):
        return "none"
    return " ".join(map(str, default)) if isinstance(default, list | tuple) else repr(default).strip("'")


def example(command: str) -> str:
    """Return the example at the end of a command's help."""
    return f"example:\n  {command}"


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the flags that every command has; main.py acts on them."""
    group = parser.add_argument_group("options of every command")
    group.add_argument(
        "--json", action="store_true", help="print one JSON object on stdout and everything else on stderr"
    )
    group.add_argument("--quiet", action="store_true", help="print no progress lines")
    group.add_argument(
        "--verbose", action="store_true", help="print a traceback for errors that otherwise end in one sentence"
    )
    add_version(group)


def add_version(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--version", action=_Version, nargs=0, help="print versions and exit")


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from thresher.common import console  # imports numpy: see main.py

        found = {name: _version(name) for name in PACKAGES} | {"python": platform.python_version()}
        console.answer(found)
        print(", ".join(f"{name} {text or 'not installed'}" for name, text in found.items()))
        parser.exit()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


# Errors. argparse puts usage lines and type names before its messages. The known messages are rewritten here; any other
# is passed on.


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return name -> parser of a parser's subcommands; empty for a command's parser."""
    groups = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return next((dict(group.choices) for group in groups), {})


def command_of(parser: argparse.ArgumentParser) -> str:
    """Return the command's name, such as `index build`, or `thresher` for the parser of all commands."""
    return parser.prog.partition(" ")[2] or parser.prog


def unknown_flag(parser: argparse.ArgumentParser, words: Iterable[str]) -> str | None:
    """Describe the first unknown flag; argparse would report a missing required one first."""
    for word in words:
        if word == "--" or (commands_of(parser) and not word.startswith("-")):
            return None
        flag = word.partition("=")[0]
        if flag.startswith("--") and " " not in flag and flag not in parser._option_string_actions:
            flags = [name for name in parser._option_string_actions if name.startswith("--")]
            return f"{command_of(parser)} has no {flag}; {meant(flag, flags)}"
    return None


def meant(word: str, known: Collection[str]) -> str:
    """Suggest the intended spelling of a mistyped word, or list all possible words."""
    near = get_close_matches(word, known, n=1)
    return f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known)}"


def sentence(parser: argparse.ArgumentParser, message: str) -> str:
    """Rewrite argparse's message as a sentence with advice."""
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
        # `thresher convert`: the name of a subcommand without its group.
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
