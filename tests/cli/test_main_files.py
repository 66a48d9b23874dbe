"""Tests of commands on files: their output, and that any error in a file, a folder or a recipe is one sentence and
changes nothing."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cli_cases import NAMES, recipe_in, write
from stored_cases import stored

from thresher.cli import main as cli


@pytest.fixture
def here(finished: Path, tmp_path: Path) -> Path:
    """Copy the finished folder, so that a test can damage it; the recipe names the copy."""
    return recipe_in(shutil.copytree(finished, tmp_path / "here"))


def tree(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() if path.is_file() else b"" for path in folder.rglob("*")}


@pytest.fixture
def refused(here: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return refused(*arguments) -> the error sentence, after checking status and folder."""

    def refuse(*arguments: str) -> str:
        before = tree(here)
        capsys.readouterr()
        assert cli.run(list(arguments)) == 2
        message = capsys.readouterr().err
        assert message.startswith("thresher: ") and message.endswith("\n") and message.count("\n") == 1
        assert "Traceback" not in message
        assert tree(here) == before
        return message.removeprefix("thresher: ").rstrip()

    return refuse


def commands(here: Path) -> dict[str, list[str]]:
    """Return the three commands that read a recipe, each with a new output folder."""
    return {name: [name, str(here / "recipe.toml"), "--out", str(here / "out")] for name in ("train", "eval", "sft")}


def test_the_commands_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["sft", str(here / "recipe.toml"), "--out", str(here / "warm")]) == 0
    warm = ["--set", f"model.path={here / 'warm'}"]
    assert cli.run(["train", str(here / "recipe.toml"), *warm, "--out", str(here / "run"), "--device", "cpu"]) == 0
    assert cli.run(["eval", str(here / "recipe.toml"), *warm, "--limit", "3", "--out", str(here / "answers")]) == 0
    assert json.loads((here / "warm" / "sft.json").read_text())["steps"] == 2
    assert (here / "run" / "summary.json").exists() and str(here / "warm") in (here / "run" / "recipe.toml").read_text()
    metrics = json.loads((here / "answers" / "metrics.json").read_text())
    assert metrics["questions"] == 3 and metrics["temperature"] == 0.0
    assert [record["id"] for record in stored(here / "answers" / "trajectories.jsonl")] == NAMES[:3]
    printed = capsys.readouterr().out
    for part in ("sft: 4 transcripts to train on, 0 held out", "train: 1 steps of 2 questions x 2 samples", "│ em "):
        assert part in printed
    # The trajectories can be scored, and the index searched.
    score = ["score", "--system", "search_r1", "--transcripts", str(here / "answers" / "trajectories.jsonl")]
    assert cli.run([*score, "--out", str(here / "scores.jsonl")]) == 0
    ask = ["--index", str(here / "index"), "--queries", str(here / "questions.jsonl")]
    assert cli.run(["index", "search", *ask, "--k", "1", "--out", str(here / "hits.jsonl")]) == 0
    hits = [json.loads(line) for line in (here / "hits.jsonl").read_text().splitlines()]
    assert [(entry["id"], entry["hits"][0]["id"]) for entry in hits] == [(name, name) for name in NAMES]


def test_a_run_is_announced_once_it_begins_and_can_be_resumed(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = commands(here)["train"]  # with the warm-up of a preset
    assert cli.run([*train, "--set", "data.train=absent.jsonl"]) == 2
    shown = capsys.readouterr()
    assert "absent.jsonl" in shown.err and "train:" not in shown.out and not (here / "out").exists()
    assert cli.run(train) == 0
    assert f"into {here / 'out'}; thresher watch {here / 'out'} shows it" in capsys.readouterr().out
    assert cli.run([*train, "--resume", "--set", "run.steps=2", "--quiet"]) == 0
    assert capsys.readouterr().out.startswith("train: run in")  # the table
    assert json.loads((here / "out" / "summary.json").read_text())["steps"] == 2


def test_a_flipped_bit_ends_in_status_2_and_a_way_back(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = [*commands(here)["train"], "--set", "optim.warmup_ratio=0", "--set", "run.save_every=1"]
    assert cli.run([*train, "--set", "run.steps=2"]) == 0
    weights = here / "out/checkpoints/step_000002/model.safetensors"
    flip_a_bit(weights)
    capsys.readouterr()
    longer = [*train, "--resume", "--set", "run.steps=3"]
    assert cli.run(longer) == 2
    told = capsys.readouterr().err
    assert f"{weights}: damaged or changed" in told and "go back to it with --resume --resume-from 1" in told
    assert cli.run(["eval", *train[1:2], "--set", f"model.path={weights.parent}", "--out", str(here / "answers")]) == 2
    assert f"{weights}: damaged or changed" in capsys.readouterr().err
    assert cli.run([*train, "--resume-from", "1"]) == 2
    assert "--resume-from is for going back in an existing run" in capsys.readouterr().err
    assert cli.run([*longer, "--resume-from", "1"]) == 0
    assert json.loads((here / "out" / "summary.json").read_text())["steps"] == 3
    flip_a_bit(here / "index/vectors.npy")
    ask = ["index", "search", "--index", str(here / "index"), "--queries", str(here / "questions.jsonl"), "--k", "1"]
    assert cli.run([*ask, "--out", str(here / "hits.jsonl")]) == 2
    assert f"{here / 'index/vectors.npy'}: damaged or changed" in capsys.readouterr().err
    assert cli.run([*ask, "--out", str(here / "hits.jsonl"), "--no-verify"]) == 0


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def enlarge(here: Path) -> None:
    """Give the tokenizer more tokens than the model has columns."""
    texts = [{"text": f"{a}{b}{c}" * 3} for a in "abcde" for b in "fghij" for c in "klmno"]
    write(here / "texts.jsonl", *texts)
    made = ["init", "--config", str(here / "config.json"), "--train-tokenizer", str(here / "texts.jsonl")]
    assert cli.run([*made, "--out", str(here / "larger")]) == 0
    shutil.copy(here / "larger" / "tokenizer.json", here / "model" / "tokenizer.json")


MODELS: list[tuple[Callable[[Path], None], str]] = [
    (lambda here: truncate(here / "model/model.safetensors"), "model.safetensors: "),
    (lambda here: edit(here / "model/config.json", intermediate_size=32), "[16, 24], the config specifies [16, 32]"),
    (lambda here: edit(here / "model/config.json", model_type="mistral"), "config.json: model_type is"),
    (enlarge, "the model's head only"),
    (lambda here: shutil.rmtree(here / "model"), "model"),
]


@pytest.mark.parametrize(("damage", "expected"), MODELS)
@pytest.mark.parametrize("command", ["train", "eval", "sft"])
def test_a_damaged_model(
    here: Path, refused: Callable[..., str], damage: Callable[[Path], None], expected: str, command: str
) -> None:
    (here / "model/hashes.json").unlink()  # with it, all of this is "damaged or changed"
    damage(here)
    assert expected in refused(*commands(here)[command])


@pytest.mark.parametrize(
    ("command", "line", "expected"),
    [
        *(
            (command, *case)
            for command in ("train", "eval", "eval --questions")
            for case in (
                ("{", "questions.jsonl:3: not valid JSON at column 2"),
                ('{"id": "Anna Bell", "question": "Who?", "answer": "x"}', "jsonl:3: the id 'Anna Bell' was used"),
            )
        ),
        ("train", '{"question": "Who?"}', "questions.jsonl:3: no gold answer"),  # an evaluation accepts it
    ],
)
def test_a_malformed_question(here: Path, refused: Callable[..., str], command: str, line: str, expected: str) -> None:
    lines = (here / "questions.jsonl").read_text().splitlines()
    (here / "questions.jsonl").write_text("\n".join([*lines[:2], line, *lines[2:]]) + "\n")
    questions = ["--questions", str(here / "questions.jsonl")] if command.endswith("questions") else []
    assert expected in refused(*commands(here)[command.split()[0]], *questions)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"title": "a", "text": "b"}\n{"title": "a"}\n', 'corpus.jsonl:2: no "text"'),
        ("", "corpus.jsonl: holds no passages"),
        ('{"id": "1", "contents": "b"}\n{"id": 1, "contents": "c"}\n', "corpus.jsonl:2: the id '1' was used before"),
    ],
)
def test_a_malformed_or_empty_corpus(here: Path, refused: Callable[..., str], content: str, expected: str) -> None:
    (here / "corpus.jsonl").write_text(content)
    build = ["index", "build", "--corpus", str(here / "corpus.jsonl"), "--out", str(here / "other")]
    assert expected in refused(*build)
    # The index of the file's former contents no longer matches it.
    for command in ("train", "eval"):
        message = refused(*commands(here)[command])
        assert expected in message or "another corpus" in message


def test_an_index_that_was_cut_short_and_a_malformed_transcript(here: Path, refused: Callable[..., str]) -> None:
    with (here / "transcripts.jsonl").open("a") as file:
        file.write('{"question": "Who?", "segments": []}\n')
    assert "transcripts.jsonl:5: expected" in refused(*commands(here)["sft"])
    truncate(here / "index/vectors.npy")
    for command in ("train", "eval"):
        assert "vectors.npy: expected" in refused(*commands(here)[command])


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run.stepps=3", "--set run.stepps: unknown key; did you mean steps?"),
        ("rnu.steps=3", "--set rnu.steps: unknown key; did you mean run?"),
        ("system.name=searchr1", "system 'searchr1' is unknown; did you mean search_r1?"),
        pytest.param(
            *("model.device=cuda", "model.device is cuda, but torch sees no CUDA device"),
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here"),
        ),
        ("model.prompt=chat", "has no chat template"),
        ("rollout.max_context=4000", "rollout.max_context is 4000, but the model was made for 128 positions"),
        ("rollout.max_context=10", "its prompt of"),
        ("retrieval.k=5", "k is 5, but the corpus holds 4 passages"),
        ("retrieval.index=nowhere", "nowhere: no such folder; build the index first"),
        ("retrieval.url=http://127.0.0.1:8000", "expected either index, a folder, or url, a server, got both"),
        ("system.template={here}/questions.jsonl", "a prompt template needs {question} exactly once, found 0"),
    ],
)
@pytest.mark.parametrize("command", ["train", "eval"])
def test_a_recipe_that_does_not_fit(
    here: Path, refused: Callable[..., str], command: str, override: str, expected: str
) -> None:
    override = override.replace("{here}", str(here))
    assert expected in refused(*commands(here)[command], "--set", override)


def test_a_recipe_that_is_not_there_or_lacks_what_is_needed(here: Path, refused: Callable[..., str]) -> None:
    assert "none.toml: no such file" in refused("train", str(here / "none.toml"), "--out", str(here / "out"))
    with (here / "recipe.toml").open("a") as file:
        file.write("stepps = 3\n")
    for arguments in commands(here).values():
        message = refused(*arguments)
        assert message == f"{here}/recipe.toml: [sft] stepps: unknown key; did you mean steps?"
    (here / "bare.toml").write_text(f'[model]\npath = "{here}/model"\n')
    for command in ("train", "eval", "sft"):
        assert "the recipe has no section [" in refused(command, str(here / "bare.toml"), "--out", str(here / "out"))


def test_what_exists_is_left_alone(here: Path, refused: Callable[..., str]) -> None:
    (here / "out").mkdir()
    (here / "out" / "mine.txt").write_text("mine")
    out = ["--out", str(here / "out")]
    others = [
        ["init", "--config", str(here / "config.json"), "--tokenizer", str(here / "model"), *out],
        ["index", "build", "--corpus", str(here / "corpus.jsonl"), *out],
        ["data", "invent", *out],
        ["demo", *out],
    ]
    for arguments in [*commands(here).values(), *others]:
        message = refused(*arguments)
        assert message.startswith(f"{here}/out: ") and "exists already" in message


def test_a_run_folder_of_another_recipe(here: Path, refused: Callable[..., str]) -> None:
    train = commands(here)["train"]
    assert cli.run(train) == 0
    message = refused(*train, "--resume", "--set", "optim.lr=0.5")
    assert "the run folder belongs to another recipe (optim.lr is 1e-06, not 0.5)" in message
    assert "exists already; resume it, or choose another" in refused(*train)
    other = ["train", str(here / "recipe.toml"), "--resume", "--out"]
    assert "does not exist" in refused(*other, str(here / "none"))
    assert "is not a run folder" in refused(*other, str(here / "model"))


def test_a_place_or_a_word_that_will_not_do_ends_in_one_sentence(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("x")
    for words in (
        f"data invent --out {tmp_path}/file/world",
        f"data invent --out {tmp_path}/new --passage-format {{foo}}",
        f"data invent --out {tmp_path}/new --passage-format nothing",
        f"serve-retriever --index {tmp_path} --k 200",
    ):
        status = cli.run(words.split())
        error = capfd.readouterr().err
        assert status == 2 and error.startswith("thresher: ") and error.count("\n") == 1, error
