"""The command line: its words are frozen, and its statuses mean what they say."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from thresher.cli import main as cli
from thresher.engine.synthetic import invent
from thresher.engine.synthetic.world import Size


def flags(parser: argparse.ArgumentParser, name: str = "") -> dict[str, list[str]]:
    """Command -> its arguments: positional ones as they are, flags with what they take."""
    found = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, sub in action.choices.items():
                found |= flags(sub, f"{name} {word}".strip())
    if not any(isinstance(action, argparse._SubParsersAction) for action in parser._actions):
        found[name] = [
            (action.option_strings or [action.dest])[0] + ("*" if action.required else "")
            for action in parser._actions
            if action.dest != "help"
        ]
    return found


def test_the_command_line_is_frozen() -> None:
    assert flags(cli.build_parser()) == {
        "init": [
            *("--config*", "--tokenizer", "--train-tokenizer", "--vocab-size", "--set", "--seed"),
            *("--embedding-std", "--zero-outputs", "--out*"),
        ],
        "sft": ["recipe*", "--set", "--device", "--out*"],
        "train": ["recipe*", "--set", "--device", "--out*", "--resume"],
        "eval": [
            *("recipe", "--set", "--device", "--model", "--best", "--system", "--baseline", "--questions", "--limit"),
            *("--index", "--url", "--k", "--noise", "--prompt", "--temperature", "--seed"),
            *("--entailment", "--judge-url", "--judge-model", "--out*"),
        ],
        "compare": ["first*", "second*", "--out"],
        "extract": [
            *("--model*", "--questions*", "--out*", "--index", "--url", "--k", "--template", "--prompt"),
            *("--loop", "--answer-model", "--answer-url", "--answer-name", "--answer-template"),
            *("--agent-model", "--agent-url", "--agent-name", "--agent-template", "--actions"),
            *("--limit", "--batch", "--key-env", "--patience", "--set", "--device"),
        ],
        "score": ["--system*", "--set", "--transcripts*", "--tokenizer", "--out*"],
        "index build": [
            "--corpus*",
            "--encoder",
            "--embed",
            "--kind",
            "--memory",
            "--recall",
            "--keep",
            "--dim",
            "--pooling",
            "--query-prefix",
            "--passage-prefix",
            "--max-length",
            "--device",
            "--chunk-words",
            "--skip-empty",
            "--out*",
        ],
        "index search": ["--index*", "--queries*", "--k", "--set", "--gpu", "--out*"],
        "index check": ["--index*", "--queries*", "--k", "--set", "--gpu"],
        "index plan": [
            *("--passages*", "--dim", "--kind", "--memory", "--encoder", "--device", "--sample", "--disk", "--out"),
        ],
        "index hybrid": ["members*", "--depth", "--out*"],
        "serve-retriever": [
            "--index*",
            "--set",
            "--gpu",
            "--host",
            "--port",
            "--k",
            "--max-k",
            "--max-queries",
            "--max-body",
            "--max-batch",
            "--max-wait-ms",
            "--max-waiting",
            "--max-connections",
            "--timeout",
        ],
        "data convert": [
            *("--format", "--in", "--mix", "--limit", "--seed", "--aliases", "--corpus", "--skipped", "--out*"),
        ],
        "data check": ["file*"],
        "data show": ["file*", "--format", "--n", "--id", "--full"],
        "data sft": [
            *("--kind*", "--questions*", "--answer", "--template", "--model", "--device", "--max-tokens", "--out*"),
        ],
        "data invent": ["--out*", "--seed", "--passage-format", "--forms", "--aware"],
        "report": ["run*", "--out"],
        "bench step": ["--steps", "--peer", "--out"],
        "bench loss": [
            *("--device", "--dtype", "--hidden", "--vocab", "--tokens", "--density", "--peers", "--chunk-rows"),
            *("--budget", "--out", "--plot"),
        ],
        "bench retrieval": [
            *("--sizes", "--dim", "--kinds", "--batches", "--corpus", "--encoder", "--questions", "--passages"),
            *("--work", "--server", "--budget", "--out", "--plot"),
        ],
        "bench compile": ["--target", "--module", "--out"],
        "study kl": ["--out", "--start", "--steps", "--seeds"],
        "study mask": ["--out", "--run", "--seed", "--limit", "--repeats", "--device"],
        "study systems": ["--out", "--system", "--seeds", "--controls", "--set"],
        "demo": ["--out", "--seed", "--set"],
    }


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["trian"],
        ["train"],
        ["train", "r.toml"],
        ["index"],
        ["init", "--config", "c", "--out", "o", "--vocab-size", "0"],
        ["init", "--config", "c", "--out", "o", "--vocab-size", "many"],
        ["eval", "r.toml", "--out", "o", "--limit", "-1"],
        ["eval", "r.toml", "--out", "o", "--temperature", "-1"],
        ["eval", "r.toml", "--out", "o", "--temperature", "nan"],
        ["eval", "r.toml", "--out", "o", "--noise", "-1"],
        ["eval", "--model", "m", "--best", "r", "--out", "o"],
        ["compare", "one"],
        ["data", "invent", "--out", "o", "--aware", "1.5"],
        ["train", "r.toml", "--out", "o", "--device", "tpu"],
        ["study"],
        ["study", "kl", "--seeds", "0", "-1"],
    ],
)
def test_a_command_that_makes_no_sense_is_status_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == 2
    assert capsys.readouterr().err.startswith("usage: thresher")
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
    assert cli.run([]) == 130 and "--resume" in capsys.readouterr().err
    ends(RuntimeError("ours"))  # leaves Python with a trace and status 1
    with pytest.raises(RuntimeError, match="ours"):
        cli.run([])


def test_invent_passes_on_what_it_was_told(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[Any] = []
    monkeypatch.setattr(invent, "invent_files", lambda *arguments: called.append(arguments) or {})
    assert cli.run(["data", "invent", "--out", "o", "--seed", "3", "--aware", "0.5", "--passage-format", "{text}"]) == 0
    assert cli.run(["data", "invent", "--out", "o"]) == 0
    assert cli.run(["data", "invent", "--out", "o", "--forms", "32"]) == 0
    plain = ("o", 0, Size(), " {text}")
    assert called == [("o", 3, Size(aware=0.5), "{text}", 0), (*plain, 0), (*plain, 32)]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["init", "--vocab-size", "many"], "--vocab-size: expected a whole number of at least 1, got many"),
        (["init", "--vocab-size", "0"], "--vocab-size: expected a whole number of at least 1, got 0"),
        (["data", "invent", "--forms", "-1"], "--forms: expected a whole number of at least 0, got -1"),
        (["data", "invent", "--aware", "nan"], "--aware: expected a number from 0 to 1, got nan"),
        (["bench", "loss", "--density", "101"], "--density: expected a whole number from 1 to 100, got 101"),
        (["bench", "loss", "--budget", "-1"], "--budget: expected a number of at least 0, got -1"),
        (["study", "kl", "--seeds", str(2**63)], "--seeds: expected a whole number from 0 to 2^63 - 1, got 9223"),
        (["eval", "--temperature", "inf"], "--temperature: expected a number of at least 0, got inf"),
        (["serve-retriever", "--port", "65536"], "--port: expected a whole number from 0 to 65535, got 65536"),
        (["serve-retriever", "--timeout", "0"], "--timeout: expected a number above 0, up to a million, got 0"),
    ],
)
def test_a_number_out_of_bounds_is_told_by_its_flag(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(arguments)
    assert left.value.code == 2 and told in capsys.readouterr().err
