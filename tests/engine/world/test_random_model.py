"""`thresher init`: a model folder from a config and a tokenizer, a function of its seed, or one sentence."""

import json
from pathlib import Path

import pytest
import torch
from cli_cases import CONFIG

from thresher.cli import main as cli
from thresher.policy import load_policy, load_tokenizer
from thresher.policy.tokenizer import Tokenizer


@pytest.fixture
def here(tmp_path: Path, tiny_tokenizer: Tokenizer) -> Path:
    """Return a folder with a config, a tokenizer of 380 tokens, and texts to train another on, one file damaged."""
    tiny_tokenizer.save(tmp_path / "tokenizer")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "texts.jsonl").write_text('{"title": "Anna", "text": ["Anna lives.", {"more": "Anna, Anna!"}]}\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "x"}\n{\n')
    return tmp_path


def init(here: Path, *arguments: str, out: str = "new") -> int:
    return cli.run(["init", "--config", str(here / "config.json"), *arguments, "--out", str(here / out)])


def test_with_a_tokenizer_the_config_decides(here: Path, tiny_tokenizer: Tokenizer) -> None:
    sets = ["--set", "num_hidden_layers=3", "--set", "hidden_size=8", "--set", "tie_word_embeddings=false"]
    assert init(here, "--tokenizer", str(here / "tokenizer"), *sets) == 0
    policy, tokenizer = load_policy(here / "new"), load_tokenizer(here / "new")
    assert (policy.config.num_hidden_layers, policy.config.hidden_size) == (3, 8)
    assert policy.config.vocab_size == 999 and policy.config.eos_token_ids == (0,)
    assert policy.untied_head_VH is not None and policy.untied_head_VH.shape == (999, 8)
    text = "Anna Bell has spouse <|im_end|>"
    assert tokenizer.encode_template(text) == tiny_tokenizer.encode_template(text)


def test_a_trained_tokenizer_decides_the_vocabulary_and_its_end(here: Path) -> None:
    assert init(here, "--train-tokenizer", str(here / "texts.jsonl"), "--vocab-size", "400") == 0
    config, tokenizer = load_policy(here / "new").config, load_tokenizer(here / "new")
    assert config.vocab_size % 16 == 0 and 0 <= config.vocab_size - tokenizer.vocab_size < 16
    assert config.eos_token_ids == (tokenizer.added_tokens["<|endoftext|>"],)
    assert len(tokenizer.encode("Anna")) == 1  # every string of a record is learnt from, however deeply nested


def test_a_key_that_the_config_brings_or_that_is_known_may_be_set(here: Path) -> None:
    (here / "config.json").write_text(json.dumps(CONFIG | {"house_mark": 1}))
    sets = ["--set", "house_mark=2", "--set", "initializer_range=0.5", "--set", "bos_token_id=1"]
    assert init(here, "--tokenizer", str(here / "tokenizer"), *sets) == 0
    config = load_policy(here / "new").config
    assert (config.extra["house_mark"], config.initializer_range, config.bos_token_id) == (2, 0.5, 1)


def test_layer_types_follow_the_number_of_layers(here: Path) -> None:
    table = CONFIG | {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    (here / "config.json").write_text(json.dumps(table))
    assert init(here, "--tokenizer", str(here / "tokenizer"), "--set", "num_hidden_layers=2") == 0
    assert load_policy(here / "new").config.num_hidden_layers == 2


def test_weights_are_a_function_of_the_seed(here: Path) -> None:
    def weights(name: str, seed: int) -> bytes:
        assert init(here, "--tokenizer", str(here / "tokenizer"), "--seed", str(seed), out=name) == 0
        return (here / name / "model.safetensors").read_bytes()

    assert weights("a", 1) == weights("b", 1) != weights("c", 2)


@pytest.mark.parametrize("size", ["0.5B", "7B"])
@pytest.mark.slow
def test_init_on_a_real_config_and_tokenizer(shared_data: Path, tmp_path: Path, size: str) -> None:
    (config,) = (shared_data / "qwen2.5").glob(f"Qwen2.5-{size}-*config.json")
    small = {"num_hidden_layers": 2, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    sets = [part for key, value in {**small, "num_key_value_heads": 1}.items() for part in ("--set", f"{key}={value}")]
    made = ["init", "--config", str(config), "--tokenizer", str(shared_data / "qwen2.5"), *sets]
    assert cli.run([*made, "--out", str(tmp_path / "model")]) == 0
    policy = load_policy(tmp_path / "model")
    expected = json.loads(config.read_text())
    assert policy.config.vocab_size == expected["vocab_size"] and policy.config.num_hidden_layers == 2
    assert policy.config.tie_word_embeddings == expected["tie_word_embeddings"]
    assert policy.logits(torch.tensor([1, 2])).isfinite().all()


GIVEN = ["--tokenizer", "{here}/tokenizer"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "init: expected exactly one of --tokenizer FOLDER and --train-tokenizer FILES"),
        ([*GIVEN, "--train-tokenizer", "{here}/texts.jsonl"], "init: expected exactly one"),
        ([*GIVEN, "--config", "{here}/none.json"], "none.json: no such file"),
        (["--tokenizer", "{here}/none"], "none: no such file"),
        ([*GIVEN, "--set", "vocab_size=300"], "the tokenizer has 380 tokens, the model's head only 300"),
        ([*GIVEN, "--set", "=3"], "--set =3: expected key=value"),
        ([*GIVEN, "--set", "hidden_size"], "--set hidden_size: expected key=value"),
        ([*GIVEN, "--set", "hidden_size=wide"], 'config.json: hidden_size is "wide", expected'),
        ([*GIVEN, "--set", "num_key_value_heads=3"], "config.json: "),
        (
            [*GIVEN, "--set", "num_hidden_layer=1"],
            "config.json has no such key, and nothing reads it; did you mean num_hidden_layers?",
        ),
        ([*GIVEN, "--set", "zzz=1"], "--set zzz: "),
        ([*GIVEN, "--set", "model_type=mistral"], "config.json: model_type is"),
        ([*GIVEN, "--set", "use_sliding_window=true"], "config.json: use_sliding_window"),
        (
            ["--train-tokenizer", "{here}/texts.jsonl", "--vocab-size", "256"],
            "--vocab-size is 256; expected at least 257",
        ),
        (["--train-tokenizer", "{here}/bad.jsonl"], "bad.jsonl:2: not valid JSON"),
        (["--train-tokenizer", "{here}/texts.jsonl", "{here}/none.jsonl"], "none.jsonl: no such file"),
        ([*GIVEN, "--out", "{here}/tokenizer"], "tokenizer: exists already"),
    ],
)
def test_what_is_refused(here: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], problem: str) -> None:
    before = sorted(here.rglob("*"))
    spelled = [part.format(here=here) for part in arguments]
    # If a flag is given twice, the last one counts.
    assert cli.run(["init", "--config", str(here / "config.json"), "--out", str(here / "new"), *spelled]) == 2
    message = capsys.readouterr().err
    assert message.startswith("thresher: ") and message.count("\n") == 1 and problem in message
    assert sorted(here.rglob("*")) == before


def test_more_layers_leave_what_a_model_computes(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert init(here, "--tokenizer", str(here / "tokenizer"), "--set", "initializer_range=0.3") == 0
    higher = ["init", "--model", str(here / "new"), "--out", str(here / "higher")]
    assert cli.run([*higher, "--add-layers", "2", "--seed", "1"]) == 0
    old, new = load_policy(here / "new"), load_policy(here / "higher")
    ids_T = torch.tensor([5, 7, 300, 5])
    assert new.config.num_hidden_layers == 3 and torch.equal(old.logits(ids_T), new.logits(ids_T))
    assert any(parameter.count_nonzero() for parameter in new.layers[2].parameters() if parameter.dim() == 2)
    for flags, problem in (
        ([], "--model FOLDER and --add-layers N belong together"),
        (["--add-layers", "1", "--zero-outputs"], "--zero-outputs is for a new model; leave it out"),
    ):
        assert cli.run([*higher, *flags]) == 2
        assert problem in capsys.readouterr().err
