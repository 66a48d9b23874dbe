"""The command line: its exit statuses mean what they say."""

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from thresher import recipes
from thresher.cli import main as cli
from thresher.engine.world import stages as demo


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
    assert cli.run([]) == 130 and capsys.readouterr().err.startswith("thresher: interrupted; nothing is kept")
    ends(RuntimeError("ours"))  # leaves Python with a trace and status 1
    with pytest.raises(RuntimeError, match="ours"):
        cli.run([])


def test_a_chain_of_commands_goes_through_the_parser(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`demo` and the studies get a function that runs a command from its arguments, and whose errors are raised."""
    chains: list[Any] = []
    monkeypatch.setattr(demo, "demo", lambda out, seed, overrides, run, say: chains.append(run) or stop())

    def stop() -> None:
        raise cli.UserError("far enough")

    assert cli.run(["demo", "--out", str(tmp_path / "new")]) == 2
    assert capsys.readouterr().err == "thresher: far enough\n"
    with pytest.raises(cli.UserError, match=r"no-run"):
        chains[0](["report", str(tmp_path / "no-run")])
    parser = cli.build_parser()
    for stage in demo.stages(tmp_path, 0, ["run.steps=1"]):
        assert parser.parse_args(stage).handler is not None


LAPTOP = str(Path(recipes.__file__).with_name("search_r1") / "laptop.toml")


def test_a_sentence_holds_nothing_that_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    """Escapes of a path and of --set, and a name that is not UTF-8; in the JSON the sentence is exact."""
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
