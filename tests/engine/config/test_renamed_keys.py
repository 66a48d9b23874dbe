"""Old names of recipe keys and flags: each is read, with one line on stderr."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from recipe_cases import SMALLEST, refusal, writer

from thresher.cli import main as cli
from thresher.engine.config import renamed
from thresher.engine.config.recipe import Recipe, load_recipe, make_recipe
from thresher.engine.config.renamed import KEYS, current_words
from thresher.engine.store.run_folder import RunFolder

VALUES = {
    "rollout.max_running": "5",
    "rollout.page_size": "32",
    "rollout.speculate": "3",
    "grpo.importance": '"token"',
    "grpo.importance_rule": '"mask"',
    "grpo.importance_cap": "3.5",
    "grpo.importance_floor": "0.25",
    "optim.moments": '"8bit"',
    "run.sinks": '["wandb"]',
    "sft.gate": "0.75",
    "judge.remember": "9",
    "judge.patience": "1.5",
}
NEEDED = {"sft.transcripts": '"t.jsonl"', "grpo.old_logprobs": '"recomputed"'}


@pytest.fixture(autouse=True)
def untold() -> Iterator[None]:
    renamed._warn.cache_clear()
    yield
    renamed._warn.cache_clear()


def text_of(values: dict[str, str]) -> str:
    tables: dict[str, list[str]] = {}
    for dotted, value in values.items():
        section, _, key = dotted.partition(".")
        tables.setdefault(section, []).append(f"{key} = {value}")
    return SMALLEST + "".join(f"[{name}]\n" + "\n".join(lines) + "\n" for name, lines in tables.items())


def test_old_keys_in_a_file_and_in_set_are_read_as_the_new(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write: Any = writer(tmp_path)
    assert VALUES.keys() == KEYS.keys()
    now = load_recipe(write(text_of(NEEDED | {KEYS[old]: value for old, value in VALUES.items()})))
    assert capsys.readouterr().err == ""
    sets = [f"{key}={value}" for key, value in {**NEEDED, **VALUES}.items()]
    for text, overrides in ((text_of(NEEDED | VALUES), ()), (SMALLEST, sets)):
        recipe = load_recipe(write(text), overrides)
        assert recipe == now and recipe.digest() == now.digest()
        where = "--set" if overrides else str(tmp_path / "r.toml")
        lines = capsys.readouterr().err.splitlines()
        more = "the old name is read until the next release"
        assert sorted(lines) == sorted(f"{where}: {old} is now called {new}; {more}" for old, new in KEYS.items())
    load_recipe(write(text_of(NEEDED | VALUES)))
    assert capsys.readouterr().err == "", "once for each place"
    old = write(SMALLEST + "[rollout]\nmax_running = 5\n")
    assert load_recipe(old, ["rollout.max_num_seqs=7"]).rollout.max_num_seqs == 7
    assert load_recipe(old, ["rollout.max_running="]).rollout.max_num_seqs == 128


def test_a_preset_of_a_users_system_may_have_old_keys() -> None:
    preset = {"rollout": {"max_running": 5, "page_size": 32}}
    tables = {"model": {"path": "m"}, "system": {"name": "own.py"}, "rollout": {"kv_block_size": 64}}
    rollout = make_recipe(tables, "r.toml", preset=lambda name: preset).rollout
    assert (rollout.max_num_seqs, rollout.kv_block_size) == (5, 64)
    assert preset == {"rollout": {"max_running": 5, "page_size": 32}}


def test_a_key_under_both_names_is_refused(tmp_path: Path) -> None:
    path = writer(tmp_path)(SMALLEST + "[rollout]\nmax_num_seqs = 4\nmax_running = 4\n")
    assert refusal(path) == (
        "r.toml: [rollout] max_running is the old name of max_num_seqs, which is there too; leave one out"
    )


def test_a_run_folder_with_old_keys_goes_on(tmp_path: Path) -> None:
    path = writer(tmp_path)(text_of(NEEDED | {KEYS[old]: value for old, value in VALUES.items()}))
    recipe: Recipe = load_recipe(path)
    RunFolder.create(tmp_path / "run", recipe).close()
    stored = tmp_path / "run" / "recipe.toml"
    text = stored.read_text("utf-8")
    for old, new in KEYS.items():
        text = text.replace(f"\n{new.partition('.')[2]} =", f"\n{old.partition('.')[2]} =", 1)
    stored.write_text(text, "utf-8")
    assert "max_running = 5" in text and "max_num_seqs" not in text
    with RunFolder.resume(tmp_path / "run", recipe) as run:
        run.truncate_after(-1)
    assert load_recipe(stored) == recipe and "max_num_seqs = 5" in stored.read_text("utf-8")


def test_old_flags_are_the_new(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "r.toml", "--from=2", "--from", "3", "--", "--noise"]
    assert current_words(words) == ["train", "r.toml", "--resume-from=2", "--resume-from", "3", "--", "--noise"]
    said = "thresher: --from is now called --resume-from; the old name is read until the next release\n"
    assert capsys.readouterr().err == said
    assert cli.run(["train", "r.toml", "--out", str(tmp_path / "run"), "--from", "2"]) == 2
    assert "thresher: --resume-from is for going back" in capsys.readouterr().err
    assert cli.run(["eval", "--best", str(tmp_path / "absent"), "--noise", "1", "--out", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err
    assert "--best is now called --best-of" in told and "--noise is now called --distractors" in told
    assert str(tmp_path / "absent") in told.splitlines()[-1]
