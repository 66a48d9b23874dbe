"""Tests of the command line: a class is a command, its fields are flags; all of it is frozen; an error is one sentence.

command_line.txt lists every command and flag, with its kind and its default: `COMMAND FLAG facts`, where COMMAND means
every command, and argparse's default facts are left out. The failing test prints the line of a new flag.
"""

import argparse
import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import pytest

from thresher import recipes
from thresher.cli import main as cli
from thresher.cli.commands.looking import script
from thresher.cli.flags import Count, Natural
from thresher.cli.parser import (
    ANY_NUMBER,
    POSITIONAL,
    REPEATED,
    Command,
    Group,
    OneOf,
    Parser,
    add_commands,
    commands_of,
)
from thresher.common.errors import UserError
from thresher.engine.world import stages as demo

ROOT = Path(__file__).resolve().parents[2]
FROZEN = Path(__file__).with_name("command_line.txt")
HEAVY = {"torch", "transformers", "trl", "datasets", "faiss", "tokenizers", "matplotlib", "bm25s", "aiohttp"}


def leaves(parser: argparse.ArgumentParser, name: str = "") -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield (name, parser) of every command, in the order of --help."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    if not groups:
        yield name, parser
    for group in groups:
        for word, sub in group.choices.items():
            yield from leaves(sub, f"{name} {word}".strip())


def groups(parser: argparse.ArgumentParser) -> list[tuple[str, argparse.ArgumentParser]]:
    return [(name, below) for name, below in commands_of(parser).items() if commands_of(below)]


def spelled(action: argparse.Action) -> str:
    """Return an argument in one line: its name, and what it accepts."""
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
    """Compare "default: 5" in a help text, written by hand, with argparse's default."""
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


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "expected one of init, import-gguf, sft, plan, "),
        ("trian r.toml", "there is no command trian; did you mean train?"),
        ("convert", "there is no command convert; did you mean data convert?"),
        ("zzz", "there is no command zzz; expected one of init, import-gguf, sft, plan, "),
        ("index", "index expects one of plan, build, hybrid, search, check; thresher index --help says what they do"),
        ("train", "train needs recipe and --out; thresher train --help says what they are"),
        ("train r.toml --otu x", "train has no --otu; did you mean --out?"),
        ("train r.toml --res --out x", "train has no --res; did you mean --resume?"),  # abbreviations are not allowed
        ("train r.toml --zzzzzzz", "train has no --zzzzzzz; expected one of --help, --set, "),
        ("--jsn train", "thresher has no --jsn; "),
        ("train r.toml --out x --device cdua", "--device: expected cpu or cuda, got cdua; did you mean cuda?"),
        ("init --vocab-size many", "--vocab-size: expected a whole number of at least 1, got many"),
        ("init --vocab-size 0", "--vocab-size: expected a whole number of at least 1, got 0"),
        ("init --seed x", "--seed: expected a whole number from 0 to 2^63 - 1, got x"),
        ("data invent --forms -1", "--forms: expected a whole number of at least 0, got -1"),
        ("data invent --aware nan", "--aware: expected a number from 0 to 1, got nan"),
        ("bench loss --density 101", "--density: expected a whole number from 1 to 100, got 101"),
        ("bench loss --budget -1", "--budget: expected a number of at least 0, got -1"),
        (f"study kl --seeds {2**63}", "--seeds: expected a whole number from 0 to 2^63 - 1, got 9223"),
        ("eval --temperature inf", "--temperature: expected 0, or a number from 1e-30 to 1e30, got inf"),
        ("serve-retriever --port 65536", "--port: expected a whole number from 0 to 65535, got 65536"),
        ("serve-retriever --timeout 0", "--timeout: expected a number above 0, up to a million, got 0"),
        ("init --out", "--out: expected a value, got none"),
        ("eval --model m --best-of b --out o", "expected either --model or --best-of, got both"),
        ("data convert --out x", "data convert needs one of --in, --mix"),
        ("train r.toml --out o --resume=3", "--resume takes no value, got 3"),
        ("compare a b c", "compare: expected nothing more, got c"),
        (
            "data sft --kind qaa --questions q --out o",
            "--kind: expected direct or reasoning or qa or closed-book or filco or recomp or episode or reason-extract "
            "or extract, got qaa",
        ),
    ],
)
def test_a_mistake(words: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(words.split()) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith(f"thresher: {sentence}") and said.err.count("\n") == 1


def test_words_that_only_look_like_flags_are_values(capsys: pytest.CaptureFixture[str]) -> None:
    options = cli.build_parser().parse_args(["generate", "--model", "m", "--prompt", "--what is this", "--stop", "-1"])
    assert options.prompt == "--what is this" and options.stop == ["-1"]
    assert cli.build_parser().parse_args(["data", "check", "--", "--file"]).files == ["--file"]


def test_a_trace_is_for_who_asks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["data", "check", "absent.jsonl"]) == 2
    brief = capsys.readouterr().err
    assert cli.run(["data", "check", "absent.jsonl", "--verbose"]) == 2
    long = capsys.readouterr().err
    assert brief.count("\n") == 1 and long.startswith("Traceback") and long.endswith(brief)


@pytest.fixture(scope="module")
def completion(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "thresher.bash"
    path.write_text(script(cli.build_parser()))
    return path


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("tr", {"train", "train-encoder"}),
        ("index bu", {"build"}),
        ("index build --corp", {"--corpus"}),
        ("train r.toml --out runs/index --res", {"--resume", "--resume-from"}),  # a value is not a command
        ("train r.toml --device c", {"cpu", "cuda"}),
        ("train recipes/", set()),  # the shell completes files
    ],
)
def test_bash_completes(completion: Path, typed: str, expected: set[str]) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    words = ["thresher", *typed.split(" ")]
    asked = f'. "$0"; COMP_WORDS=("$@"); COMP_CWORD={len(words) - 1}; _thresher; printf "%s\\n" "${{COMPREPLY[@]}}"'
    done = subprocess.run([bash, "-uc", asked, str(completion), *words], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert set(done.stdout.split()) == expected


class SayHello(Command, group=Group("toys", "a group", 15, "toy toys say-hello", "ACTION"), help="say hello", place=1):
    _which = OneOf(required=True)

    words: Annotated[list[str], POSITIONAL, ANY_NUMBER, "said behind it"]
    often: Annotated[Count | None, _which, "N", "times"] = None
    at_all: Annotated[bool, _which, "--silent", "do not"] = True
    to: Annotated[list[Natural], REPEATED, "N", "numbers"] = []  # noqa: RUF012

    def __call__(self) -> None:
        print(f"hello {self.words} {self.often} {self.at_all} {self.to}")


def test_a_class_is_a_command_and_its_fields_are_flags(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="toy")
    add_commands(parser, [SayHello], "COMMAND")
    for words, said in {
        "--often 2": "hello [] 2 True []\n",
        "a b --silent --to 1 --to 0": "hello ['a', 'b'] None False [1, 0]\n",
        "--often 3": "hello [] 3 True []\n",  # a default is copied
    }.items():
        options = parser.parse_args(["toys", "say-hello", *words.split()])
        options.handler(options)
        assert capsys.readouterr().out == said
    for words, sentence in {
        "": "toys say-hello needs one of --often, --silent",
        "--silent --often 1": "expected either --silent or --often, got both",
    }.items():
        with pytest.raises(UserError, match=f"^{sentence}$"):
            parser.parse_args(["toys", "say-hello", *words.split()])


def test_help_loads_nothing_heavy() -> None:
    """`thresher --help` imports every command's file; none of them may import its heavy modules at the top."""
    check = (
        "import sys; from thresher.cli.main import build_parser; build_parser().format_help(); "
        f"print(sorted({HEAVY!r} & sys.modules.keys()))"
    )
    found = subprocess.run([sys.executable, "-P", "-c", check], check=True, cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == "[]\n"


def test_the_package_is_the_command_line() -> None:
    command = [sys.executable, "-P", "-m", "thresher.cli", "--help"]
    found = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.startswith("usage: thresher ")
    folders = ("kernels", "rewards", "policy", "retrieval", "engine", "bench", "recipes")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert [path for path in sources if re.search("^(import|from) argparse", path.read_text("utf-8"), re.M)] == []


def test_a_command_that_makes_no_sense_is_status_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in ("study", "compare one", "eval r.toml --out o --distractors -1", "study kl --seeds 0 -1"):
        with pytest.raises(SystemExit) as left:
            cli.main(words.split())
        said = capsys.readouterr().err
        assert left.value.code == 2 and said.startswith("thresher: ") and said.count("\n") == 1 and "usage" not in said
    assert list(tmp_path.iterdir()) == []


def test_statuses(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def ends(error: BaseException | None) -> None:
        def handler(options: argparse.Namespace) -> None:
            if error is not None:
                raise error

        parser = argparse.ArgumentParser()
        parser.set_defaults(handler=handler)
        monkeypatch.setattr(cli, "build_parser", lambda: parser)

    ends(None)
    with pytest.raises(SystemExit) as left:
        cli.main([])
    assert left.value.code == 0
    ends(cli.UserError("file: what is wrong"))
    assert cli.run([]) == 2 and capsys.readouterr().err == "thresher: file: what is wrong\n"
    ends(KeyboardInterrupt())
    assert cli.run([]) == 130 and capsys.readouterr().err.startswith(
        "thresher: interrupted; unfinished work is not kept"
    )
    ends(RuntimeError("ours"))  # leaves Python with a traceback and status 1
    with pytest.raises(RuntimeError, match="ours"):
        cli.run([])


def test_a_chain_of_commands_goes_through_the_parser(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`demo` and the studies get a function that runs a command from its arguments and raises its errors."""
    chains: list[Any] = []
    monkeypatch.setattr(demo, "demo", lambda out, plan, run, say: chains.append(run) or stop())

    def stop() -> None:
        raise cli.UserError("far enough")

    assert cli.run(["demo", "--out", str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err == "thresher: far enough\n"
    with pytest.raises(cli.UserError, match=r"no-run"):
        chains[0](["report", str(tmp_path / "no-run")])
    parser = cli.build_parser()
    plans = [demo.DemoPlan(set=("run.steps=1",)), demo.DemoPlan(model="m"), demo.DemoPlan(model="m", questions="q")]
    for stage in (stage for plan in plans for stage in demo.stages(tmp_path, plan)):
        assert parser.parse_args(stage).handler is not None


LAPTOP = str(Path(recipes.__file__).with_name("search_r1") / "laptop.toml")


def test_a_sentence_holds_nothing_that_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    """Escape codes in a path and in --set, and a name that is not UTF-8, are escaped; in JSON the sentence is exact."""
    evil = "x\x1b]0;title\x07\u202e"
    for words in (
        ["report", evil],
        ["recipe", "--show", LAPTOP, "--set", f"run.{evil}=1"],
        ["report", evil, "--verbose"],
    ):
        assert cli.run(words) == 2
        said = capsys.readouterr()
        assert "x␛]0;title␇\\u202e" in said.err and not {"\x1b", "\x07", "\u202e"} & set(said.out + said.err)
    assert cli.run(["report", evil, "--json"]) == 2
    assert evil in json.loads(capsys.readouterr().out)["error"]
    assert cli.run(["report", "caf\udce9"]) == 2
    assert capsys.readouterr().err == "thresher: caf\\udce9: is not valid UTF-8; type it again, or rename the file\n"
    assert cli.run(["report", "caf\udce9", "--json"]) == 2
    line = capsys.readouterr().out
    line.encode("utf-8")
    assert json.loads(line)["error"].startswith("caf\udce9: is not valid UTF-8")
