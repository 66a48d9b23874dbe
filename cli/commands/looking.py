"""Commands that look at runs and rollouts: `report`, `tokens`, `watch`; and `completion`, of the command line."""

import argparse
import sys
from collections.abc import Iterator
from typing import Annotated, Literal

from thresher.cli.flags import Count, Port, Texts, Unverified
from thresher.cli.parser import POSITIONAL, Command, commands_of
from thresher.common import console
from thresher.common.errors import UserError


class Watch(Command, help="watch a run in progress", place=105, example="thresher watch runs/first --tty"):
    run: Annotated[str, POSITIONAL, "run folder"]
    tty: Annotated[bool, "show the run in the terminal until it ends, in place of a page"] = False
    port: Annotated[Port, "port of the page on this machine; 0: any free port; default: 8700"] = 8700
    unverified: Unverified = False

    def __call__(self) -> None:
        from thresher.engine.reports.watch import read_state, serve_page, watch_terminal

        try:
            if self.tty:
                console.answer(watch_terminal(self.run, unverified=self.unverified).to_dict())
            else:
                serve_page(self.run, self.port, console.note, unverified=self.unverified)
        except KeyboardInterrupt:  # how one leaves it: nothing was interrupted that is to be gone on with
            if not self.tty:
                console.answer(read_state(self.run, self.unverified).to_dict())
            sys.exit(130)


class Report(
    Command,
    help="write a page with the curves and trajectories of one or several runs",
    place=110,
    example="thresher report runs/first",
):
    runs: Annotated[Texts, POSITIONAL, "RUN", "run folder; several are compared with the first"]
    tokens: Annotated[
        str | None, "STEP", "stored step to show token by token, coloured by the tokens' values; all: every stored step"
    ] = None
    out: Annotated[
        str | None,
        "folder to write to; default: the run folder; with several runs or --tokens STEP: the .html file to write",
    ] = None
    unverified: Unverified = False

    def __call__(self) -> None:
        if len(self.runs) > 1:
            self._compare()
            return
        (folder,) = self.runs
        if self.tokens is not None:
            from thresher.engine.reports.token_view import write_token_view

            page = write_token_view(folder, self.tokens, self.out, self.unverified)
        else:
            from thresher.engine.reports.report import write_report

            page = write_report(folder, self.out, self.unverified)
        console.say(str(page))
        console.answer({"report": page})

    def _compare(self) -> None:
        from thresher.engine.reports.report import write_comparison

        if self.tokens is not None:
            raise UserError("report: --tokens shows one run's step; name one run")
        if self.out is None:
            raise UserError("report: expected --out with several runs; name the file, such as --out runs/compared.html")
        tests = write_comparison(self.runs, self.out, self.unverified)
        console.say(self.out)
        console.answer({"report": self.out, "runs": self.runs, "tests": tests})


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


class Tokens(
    Command,
    help="write a page of rollouts from TRL, verl, prime-rl or Thresher, token by token",
    place=112,
    example="thresher tokens completions_00010.parquet --tokenizer models/Qwen2.5-0.5B-Instruct",
):
    file: Annotated[str, POSITIONAL, "file of rollouts, as JSONL or parquet"]
    out: Annotated[str | None, ".html file to write; default: next to FILE"] = None
    tokenizer: Annotated[
        str | None,
        "FOLDER",
        "tokenizer folder of the model that wrote the rollouts; default: the run's, else text is split into words",
    ] = None
    format: Annotated[
        Literal["thresher", "trl", "verl", "prime-rl"] | None,
        "program that wrote FILE; default: detected from its columns",
    ] = None
    most: Annotated[Count, "maximum number of trajectories to show, from the start of FILE"] = 512
    unverified: Unverified = False

    def __call__(self) -> None:
        from thresher.engine.reports.token_dumps import write_token_page

        page = write_token_page(
            self.file,
            self.out,
            format=self.format,
            tokenizer=self.tokenizer,
            most=self.most,
            unverified=self.unverified,
        )
        console.say(str(page))
        console.answer({"page": page})


class Completion(Command, help="print a shell completion script", place=150, example="thresher completion bash"):
    """The script is made from the parser, so that it knows what the program knows; files are the shell's."""

    shell: Annotated[Literal["bash"], POSITIONAL, "shell to write the script for"]

    def __call__(self) -> None:
        text = script(self.build_parser())
        console.say(text, end="", exact=True)
        console.answer({"shell": self.shell, "script": text})


def script(parser: argparse.ArgumentParser) -> str:
    """Return the script of a program's parser."""
    commands = dict(_commands(parser, ""))
    words, choices = [], []
    for path, command in commands.items():
        of = {flag: action for action in command._actions for flag in action.option_strings if flag.startswith("--")}
        words.append(f'        "{path}") words="{" ".join([*commands_of(command), *of])}" ;;')
        choices += [
            f'        "{path} {flag}") words="{" ".join(map(str, action.choices))}" ;;'
            for flag, action in of.items()
            if action.choices is not None
        ]
    paths = " | ".join(f'"{path}"' for path in commands if path)
    return SCRIPT % {"paths": paths, "words": "\n".join(words), "choices": "\n".join(choices)}


def _commands(parser: argparse.ArgumentParser, path: str) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield every command and group with its path, such as " index build"; the program itself is ""."""
    yield path, parser
    for name, command in commands_of(parser).items():
        yield from _commands(command, f"{path} {name}")
