"""Tests of `thresher recipe`, and of --set that removes a key."""

import json
import tomllib
from pathlib import Path

import pytest

from thresher.cli import main as cli

RECIPES = Path(__file__).parents[2] / "recipes"
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
        "samples per question, G",
        "default: 8",
        "takes: an integer >= 1 and <= 65536",
        "preset 7: arena, naive",
    ):
        assert line in said
    for words, sentence in (
        (["--explain", "grop_size"], "--explain grop_size: a recipe has no such key; did you mean group_size?"),
        (["--explain", "lr", "--set", "a.b=1"], "recipe: --set and --device are for --show RECIPE; leave them out"),
        ([], "recipe needs one of --show, --explain, --list, --new, --reference"),
    ):
        assert cli.run(["recipe", *words]) == 2
        assert capsys.readouterr().err == f"thresher: {sentence}\n"


def test_a_recipe_that_came_with_thresher_is_named_listed_and_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder is not a checkout, as after an installation from a wheel."""
    monkeypatch.chdir(tmp_path)
    assert cli.run(["recipe", "--list", "--json"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    by_name = {row[0]: row[1:] for row in table["rows"]}
    assert set(by_name) == {f"{path.parent.name}/{path.name}" for path in RECIPES.glob("*/*.toml")}
    about = "Search-R1 on a laptop: Qwen2.5-0.5B-Instruct with adapters in place of all weights, on a CPU with 16 GB"
    assert by_name["search_r1/laptop.toml"] == ["search_r1", "models/Qwen2.5-0.5B-Instruct", about]
    assert all(cells[2] for cells in by_name.values())

    shown = []
    for name in ("search_r1/laptop.toml", "recipes/search_r1/laptop.toml", str(RECIPES / "search_r1" / "laptop.toml")):
        assert cli.run(["recipe", "--show", name]) == 0
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] == shown[2] and 'name = "search_r1"' in shown[0]
    # A file with that name below the working directory takes precedence.
    (tmp_path / "search_r1").mkdir()
    (tmp_path / "search_r1" / "laptop.toml").write_text(RECIPE)
    assert cli.run(["recipe", "--show", "search_r1/laptop.toml"]) == 0
    assert 'name = "arena"' in capsys.readouterr().out

    new = ["recipe", "--new", "search_r1/laptop.toml", "--out"]
    assert cli.run([*new, "mine/first.toml"]) == 0 and "mine/first.toml" in capsys.readouterr().out
    assert (tmp_path / "mine/first.toml").read_bytes() == (RECIPES / "search_r1" / "laptop.toml").read_bytes()
    for words, sentence in (
        ([*new, "mine/first.toml"], "--out mine/first.toml: exists already; choose another file, or remove it first"),
        (new[:-1], "recipe: --new RECIPE and --out FILE go together; give both or neither"),
        (["recipe", "--new", "search_r1/lapto.toml", "--out", "x"], "did you mean search_r1/laptop.toml?"),
        (["recipe", "--new", "../arena/sft.toml", "--out", "x"], "no recipe of this name came with Thresher"),
        (
            ["recipe", "--show", "searchr1/laptop.toml"],
            "or the name of one that came with Thresher (thresher recipe --",
        ),
    ):
        assert cli.run(words) == 2
        assert sentence in capsys.readouterr().err
