"""`thresher recipe`, and --set that takes a key away."""

import tomllib
from pathlib import Path

import pytest

from thresher.cli import main as cli

RECIPE = """
[model]
path = "m"
[system]
name = "arena"
[rollout]
group_size = 3
[optim]
lr = 1e-4
[lora]
rank = 4
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    (tmp_path / "r.toml").write_text(RECIPE)
    return str(tmp_path / "r.toml")


def test_the_resolved_recipe_is_a_recipe(recipe: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["recipe", "--show", recipe, "--set", "run.seed=7", "--device", "cuda"]) == 0
    text = capsys.readouterr().out
    shown = tomllib.loads(text)
    assert shown["rollout"]["group_size"] == 3 and shown["rollout"]["questions_per_step"] == 256, "the file, the preset"
    assert shown["rollout"]["max_turns"] == 1 and shown["run"]["seed"] == 7 and shown["model"]["device"] == "cuda"
    (tmp_path / "again.toml").write_text(text)
    assert cli.run(["recipe", "--show", str(tmp_path / "again.toml")]) == 0
    assert capsys.readouterr().out == text


def test_a_key_is_unset(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    unset = [word for key in ("rollout.group_size", "optim.lr", "lora", "run.seed") for word in ("--set", f"{key}=")]
    assert cli.run(["recipe", "--show", recipe, *unset]) == 0
    shown = tomllib.loads(capsys.readouterr().out)
    assert shown["rollout"]["group_size"] == 7 and shown["optim"]["lr"] == 3e-6, "arena's presets"
    assert "lora" not in shown and shown["run"]["seed"] == 0
    assert cli.run(["recipe", "--show", recipe, "--set", "optim.lr=", "--set", "optim.lr=1"]) == 0
    assert tomllib.loads(capsys.readouterr().out)["optim"]["lr"] == 1
    assert cli.run(["recipe", "--show", recipe, "--set", "optim.shedule="]) == 2
    assert capsys.readouterr().err == "thresher: --set optim.shedule: unknown key; did you mean schedule?\n"


def test_a_key_is_explained(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["recipe", "--explain", "rollout.group_size"]) == 0
    said = capsys.readouterr().out
    for line in (
        "samples a question, G",
        "default: 8",
        "takes: an integer >= 1 and <= 65536",
        "preset 7: arena, naive",
    ):
        assert line in said
    for words, sentence in (
        (["--explain", "grop_size"], "--explain grop_size: a recipe has no such key; did you mean group_size?"),
        (["--explain", "lr", "--set", "a.b=1"], "recipe: --set and --device are for --show RECIPE; leave them out"),
        ([], "recipe needs one of --show, --explain, --reference"),
    ):
        assert cli.run(["recipe", *words]) == 2
        assert capsys.readouterr().err == f"thresher: {sentence}\n"
