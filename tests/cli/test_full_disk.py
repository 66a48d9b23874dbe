"""Tests of commands on a full disk, or with a limit on the size of a file: the error is one sentence, no partial output
has a final name, and the same command continues once there is space."""

import shutil
from pathlib import Path

import pytest
from cli_cases import recipe_in
from full_disk import files_of_at_most, modes_that_hold

from thresher.cli import main as cli
from thresher.engine.store.run_folder import to_be_resumed

WRITERS = {
    "init": "init --config {at}/config.json --tokenizer {at}/model --out {at}/out",
    "train": "train {at}/recipe.toml --out {at}/out",
    "sft": "sft {at}/recipe.toml --out {at}/out",
    "sft of adapters": "sft {at}/recipe.toml --set lora.rank=2 --out {at}/out",
    "eval": "eval {at}/recipe.toml --out {at}/out",
    "rollout": "rollout --recipe {at}/recipe.toml --questions {at}/questions.jsonl --out {at}/out.jsonl",
    "index build": "index build --corpus {at}/corpus.jsonl --out {at}/out",
    "index build of words": "index build --corpus {at}/corpus.jsonl --encoder bm25 --out {at}/out",
    "index build of a graph": "index build --corpus {at}/corpus.jsonl --kind HNSW8 --out {at}/out",
    "score": "score --system search_r1 --transcripts {at}/scored.jsonl --out {at}/out.jsonl",
}


@pytest.mark.parametrize("size", [0, 40, 3000])
@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.fast_cases(15)
def test_a_full_disk_ends_in_a_sentence_and_the_command_goes_on(
    finished: Path, tmp_path: Path, name: str, size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    here = shutil.copytree(finished, tmp_path / "here")
    recipe_in(here)
    command = WRITERS[name].format(at=here).split()
    capsys.readouterr()
    with files_of_at_most(size):
        status = cli.run(command)
    message = capsys.readouterr().err
    assert status in ((2,) if size == 0 else (0, 2)), message
    if status == 0:
        return  # the disk is large enough
    assert message.startswith("thresher: ") and message.count("\n") == 1, message
    assert "cannot " in message and "File too large" in message and str(here / "out") in message, message
    resumes = to_be_resumed(command[0], here / "out") or (name == "rollout" and not (here / "out").exists())
    assert cli.run([*command, *(["--resume"] if resumes else [])]) == 0
    assert not list(here.rglob("*.tmp"))


@pytest.mark.parametrize("name", WRITERS)
def test_a_folder_that_takes_no_files_ends_in_a_sentence(
    finished: Path, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = WRITERS[name].format(at=finished).split()
    locked, place = tmp_path / "locked", command.index("--out") + 1
    locked.mkdir(mode=0o555)
    command[place] = str(locked / Path(command[place]).name)
    capsys.readouterr()
    with modes_that_hold():
        status = cli.run(command)
    message = capsys.readouterr().err
    assert status == 2 and message.startswith(f"thresher: {locked}/") and message.count("\n") == 1, message
    assert "Permission denied" in message and message.endswith("; choose another path\n"), message
    assert list(locked.iterdir()) == []


NEEDED = {"init": "a model's weights", "train": "a run with"} | dict.fromkeys(
    ("sft", "sft of adapters"), "the model, with"
)


@pytest.mark.parametrize("name", NEEDED)
def test_a_disk_without_room_is_asked_first(
    finished: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = WRITERS[name].format(at=finished).split()
    command[command.index("--out") + 1] = str(tmp_path / "out")
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=9))
    capsys.readouterr()
    assert cli.run(command) == 2
    message = capsys.readouterr().err
    assert message.startswith(f"thresher: {tmp_path}/out: cannot be written ({NEEDED[name]} "), message
    assert " of disk, but 9 bytes are free); make room for it\n" in message and message.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_weights_have_the_mode_that_the_umask_gives(finished: Path) -> None:
    modes = {path.name: path.stat().st_mode & 0o777 for path in (finished / "model").iterdir()}
    assert len(set(modes.values())) == 1 and "model.safetensors" in modes, modes
