"""What is typed wrong ends in one sentence that says what was expected, and what may have been meant."""

import pytest

from thresher.cli import main as cli


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "expected one of init, sft, plan, "),
        ("trian r.toml", "there is no command trian; did you mean train?"),
        ("convert", "there is no command convert; did you mean data convert?"),
        ("zzz", "there is no command zzz; expected one of init, sft, plan, "),
        ("index", "index expects one of plan, build, hybrid, search, check; thresher index --help says what they do"),
        ("index biuld", "there is no command index biuld; did you mean build?"),
        ("train", "train needs recipe and --out; thresher train --help says what they are"),
        ("train r.toml --otu x", "train has no --otu; did you mean --out?"),
        ("train r.toml --res --out x", "train has no --res; did you mean --resume?"),  # abbreviations are none
        ("train r.toml --otu=x", "train has no --otu; did you mean --out?"),
        ("train r.toml --zzzzzzz", "train has no --zzzzzzz; expected one of --help, --set, "),
        ("--jsn train", "thresher has no --jsn; "),
        ("train r.toml --out x --device cdua", "--device: expected cpu or cuda, got cdua; did you mean cuda?"),
        ("bench loss --device tpu2", "--device: expected cpu or cuda, got tpu2"),
        ("init --seed x", "--seed: expected a whole number, got x"),
        ("init --out", "--out: expected a value, got none"),
        ("init --train-tokenizer --out x", "--train-tokenizer: expected a value, got none"),
        ("eval --model m --best-of b --out o", "expected either --model or --best-of, got both"),
        ("data convert --out x", "data convert needs one of --in, --mix"),
        ("train r.toml --out o --resume=3", "--resume takes no value, got 3"),
        ("compare a b c", "compare: expected nothing more, got c"),
        (
            "data sft --kind qaa --questions q --out o",
            "--kind: expected direct or reasoning or qa or closed-book or filco or recomp or reason-extract or extract"
            ", got qaa",
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
    assert cli.build_parser().parse_args(["data", "check", "--", "--file"]).file == "--file"


def test_a_trace_is_for_who_asks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["data", "check", "absent.jsonl"]) == 2
    brief = capsys.readouterr().err
    assert cli.run(["data", "check", "absent.jsonl", "--verbose"]) == 2
    long = capsys.readouterr().err
    assert brief.count("\n") == 1 and long.startswith("Traceback") and long.endswith(brief)
