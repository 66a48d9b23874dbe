"""The command line is frozen: every command and flag is listed in command_line.txt, with its kind and its default.

A line is `COMMAND FLAG facts`, and COMMAND stands for what every command has; the facts that argparse takes for granted
are left out. Whoever adds a flag adds its line, which the failing test spells out; a line that goes is a command
somewhere that no longer runs.
"""

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from thresher.cli import main as cli
from thresher.cli.parsing.mistakes import commands_of

FROZEN = Path(__file__).with_name("command_line.txt")


def leaves(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """(name, parser) of every command, in the order of --help."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield name, parser
    for group in groups:
        for word, sub in group.choices.items():
            yield from leaves(sub, f"{name} {word}".strip())


def groups(parser: argparse.ArgumentParser) -> list[tuple[str, argparse.ArgumentParser]]:
    return [(name, below) for name, below in commands_of(parser).items() if commands_of(below)]


def spelled(action: argparse.Action) -> str:
    """An argument in one line: its name, and what it takes."""
    facts = [(action.option_strings or [action.dest])[0]]
    if action.option_strings and facts[0] != f"--{action.dest.replace('_', '-')}":
        facts.append(f"dest={action.dest}")
    if action.required:
        facts.append("required")
    if isinstance(action, argparse._AppendAction):
        facts.append("repeatable")
    if action.nargs is not None:
        facts.append("switch" if action.nargs == 0 else f"nargs={action.nargs}")
    if action.choices is not None:
        facts.append(f"choices={','.join(map(str, action.choices))}")
    if action.default is not None and action.nargs != 0:
        facts.append(f"default={action.default!r}")
    return " ".join(facts)


def command_line() -> list[str]:
    found = {
        name: [spelled(action) for action in parser._actions if action.dest != "help"]
        for name, parser in leaves(cli.build_parser())
    }
    common = [line for line in found["train"] if all(line in lines for lines in found.values())]
    own = [f"{name} {line}" for name, lines in found.items() for line in lines if line not in common]
    return [*(f"COMMAND {line}" for line in common), *own]


def test_the_command_line_is_frozen() -> None:
    now, then = command_line(), FROZEN.read_text("utf-8").splitlines()
    gone, new = [line for line in then if line not in now], [line for line in now if line not in then]
    assert not gone, "gone, and somebody's script may hold it:\n" + "\n".join(gone)
    assert not new, f"new, to be added to {FROZEN.name}:\n" + "\n".join(new)
    assert now == then, "in another order than --help"


def test_a_rename_and_a_new_default_are_seen() -> None:
    parser = argparse.ArgumentParser()
    actions = [
        parser.add_argument("file"),
        parser.add_argument("--in", dest="files", nargs="+", default=[]),
        parser.add_argument("--k", type=int, default=3),
        parser.add_argument("--set", action="append"),
        parser.add_argument("--gpu", action="store_true"),
        parser.add_argument("--device", choices=("cpu", "cuda"), required=True),
    ]
    assert [spelled(action) for action in actions] == [
        "file required",
        "--in dest=files nargs=+ default=[]",
        "--k default=3",
        "--set repeatable",
        "--gpu switch",
        "--device required choices=cpu,cuda",
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["init", "--vocab-size", "many"], "--vocab-size: expected a whole number of at least 1, got many"),
        (["init", "--vocab-size", "0"], "--vocab-size: expected a whole number of at least 1, got 0"),
        (["data", "invent", "--forms", "-1"], "--forms: expected a whole number of at least 0, got -1"),
        (["data", "invent", "--aware", "nan"], "--aware: expected a number from 0 to 1, got nan"),
        (["bench", "loss", "--density", "101"], "--density: expected a whole number from 1 to 100, got 101"),
        (["bench", "loss", "--budget", "-1"], "--budget: expected a number of at least 0, got -1"),
        (["study", "kl", "--seeds", str(2**63)], "--seeds: expected a whole number from 0 to 2^63 - 1, got 9223"),
        (["eval", "--temperature", "inf"], "--temperature: expected 0, or a number from 1e-30 to 1e30, got inf"),
        (["serve-retriever", "--port", "65536"], "--port: expected a whole number from 0 to 65535, got 65536"),
        (["serve-retriever", "--timeout", "0"], "--timeout: expected a number above 0, up to a million, got 0"),
    ],
)
def test_a_number_out_of_bounds_is_refused_by_its_flag(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    said = capsys.readouterr().err
    assert left.value.code == 2 and said.startswith(f"thresher: {message}") and said.count("\n") == 1


def test_every_flag_says_what_it_means_and_its_default() -> None:
    for name, parser in leaves(cli.build_parser()):
        text = "".join(parser.format_help().split())
        for action in parser._actions:
            assert action.help, f"thresher {name}: {spelled(action)} has no help"
            shown = " ".join(parser.formatter_class(prog="x")._expand_help(action).split())
            assert "".join(shown.split()) in text
            if action.option_strings and action.nargs != 0 and not action.required:
                assert "default" in shown, f"thresher {name}: {spelled(action)}"


def test_a_default_that_is_spelt_out_is_the_flags_own() -> None:
    """ "default: 5" in a help text, written by hand, against what argparse takes."""
    checked = 0
    for name, parser in leaves(cli.build_parser()):
        for action in parser._actions:
            said = re.search(r"default:? ([\d,.]+\d|\d)(?=[;,) ]|$)", action.help or "")
            if said and isinstance(action.default, int | float):
                checked += 1
                assert float(said[1].replace(",", "")) == action.default, f"thresher {name}: {spelled(action)}"
    assert checked > 20


def test_the_example_of_every_help_is_a_command() -> None:
    parsers = [("", cli.build_parser()), *groups(cli.build_parser()), *leaves(cli.build_parser())]
    for name, parser in parsers:
        *_, head, example = parser.format_help().rstrip("\n").split("\n")
        words = shlex.split(example)
        assert head == "example:" and words[0] == "thresher" and " ".join(words[1:]).startswith(name)
        assert cli.build_parser().parse_args(words[1:]).handler is not None
