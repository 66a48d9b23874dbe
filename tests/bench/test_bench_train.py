"""Test `thresher bench train` at small sizes: its refusals, rewards and evaluations, and, with TRL, a whole run."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from thresher.bench import train as bench_module
from thresher.bench.harness import append_rows, read_rows
from thresher.bench.train import (
    Row,
    Task,
    TrainBench,
    check_comparable,
    check_plain,
    rows_of_run,
    run_train_bench,
    show,
)
from thresher.cli.main import run
from thresher.common.errors import UserError
from thresher.engine.assemble import load_run_context, read_run_recipe
from thresher.engine.config.recipe import Recipe
from thresher.engine.store.run_folder import RunFolder, step_name
from thresher.engine.training.train import train
from thresher.policy.model import hf_views

STEPS, NAMES = 2, ("Ann", "Bob", "Cleo")
Make = Callable[..., Recipe]
# `reading` with a reward that random weights earn: the number of distinct letters of the answer.
LETTERS = """
from dataclasses import replace
from thresher.engine.systems import reading
from thresher.engine.systems.reading import Options
from thresher.rewards.measures import answer_measures
from thresher.rewards.reward import RewardResult

def reward(attempt):
    answer = reading.reply(attempt)
    return RewardResult(len(set(answer or "")) / 32, answer_measures(answer, attempt.golds), answer)

def system(options):
    return replace(reading.system(options), name="letters", reward=reward)
"""


@pytest.fixture
def recipe_file(tiny_model_folder: Path, tmp_path: Path) -> Path:
    """Write a recipe of two steps of `reading`, with two questions of three samples each."""
    for part in ("train", "dev"):
        records = [
            {
                "id": f"{part}{number}",
                "question": f"Who is the mayor of {name}?",
                "golden_answers": [name],
                "passages": [{"title": "", "text": f"The mayor is {name}."}],
            }
            for number, name in enumerate(NAMES)
        ]
        (tmp_path / f"{part}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    file = tmp_path / "read.toml"
    file.write_text(
        f'[model]\npath = "{tiny_model_folder}"\n'
        f'[data]\ntrain = "{tmp_path}/train.jsonl"\ndev = "{tmp_path}/dev.jsonl"\n'
        '[system]\nname = "reading"\n'
        "[rollout]\ngroup_size = 3\nquestions_per_step = 2\nmax_turn_tokens = 5\nmax_policy_tokens = 5\n"
        "max_context = 400\nmax_num_seqs = 8\n"
        f'[optim]\nlr = 1e-2\nschedule = "linear"\n[run]\nsteps = {STEPS}\neval_every = 1\n'
    )
    return file


@pytest.fixture
def make(recipe_file: Path) -> Make:
    return lambda *changes: read_run_recipe(recipe_file, list(changes))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["grpo.beta=0.1"], r"grpo\.beta is 0\.1, which is not passed to TRL; set it to 0\.0"),
        (["grpo.entropy_coef=0.1"], r"grpo\.entropy_coef is 0\.1, which is not passed to TRL; set it to 0\.0"),
        (["optim.optimizer_state_dtype=8bit"], r"optim\.optimizer_state_dtype is '8bit', .* set it to 'float32'"),
        (["rollout.max_turns=2"], r"rollout\.max_turns is 2, which is not passed to TRL; set it to 1"),
        (["lora.rank=4"], r"\[lora\]: TRL's adapters come from another library; leave the section out"),
        (["rollout.group_size=2"], r"--batch 3 does not divide the 4 samples of a step"),
    ],
)
def test_a_recipe_that_trl_cannot_follow_is_refused(make: Make, changes: list[str], sentence: str) -> None:
    check_comparable(make(), 3)
    with pytest.raises(UserError, match=sentence):
        check_comparable(make(*changes), 3)


def test_a_system_that_stops_at_tags_is_refused(make: Make) -> None:
    check_plain(load_run_context(make()))
    with pytest.raises(UserError, match="system naive_grpo: TRL's trainer writes one turn, up to the end of text"):
        check_plain(load_run_context(make("system.name=naive_grpo")))


def test_without_trl_it_is_said(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_module, "find_spec", lambda name: None)
    with pytest.raises(
        UserError, match=r'--peer trl: TRL is not installed; pip install "thresher\[bench\]" installs it'
    ):
        run_train_bench(TrainBench(batch=3), make())
    with pytest.raises(UserError, match="--peer none: there is nothing to show; name a run with --beside"):
        run_train_bench(TrainBench(peer="none"), make())


def test_questions_rewards_and_evaluations_are_those_of_a_run(make: Make, tmp_path: Path) -> None:
    recipe = make()
    train(recipe, tmp_path / "run")
    task = Task(load_run_context(recipe))
    folder = RunFolder.existing(tmp_path / "run")
    stored = [
        record
        for step in range(1, STEPS + 1)
        for record in folder.stored_trajectories(folder.trajectories / f"{step_name(step)}.jsonl")
    ]
    numbers = [number for number in range(STEPS * 2) for _ in range(3)]
    assert [record["id"] for record in stored] == [task.asked[number].id for number in numbers]
    segments = [record["segments"] for record in stored]
    assert [one[0]["ids"] for one in segments] == [task.prompts[number] for number in numbers]
    assert task.rewards(numbers, [one[1]["ids"] for one in segments]) == [record["reward"] for record in stored]
    right = [task.context.tokenizer.encode(task.asked[0].golds[0])]
    assert task.rewards([0], right) == [1.0]

    plot = tmp_path / "train.png"
    rows = run_train_bench(TrainBench(peer="none", beside=[str(tmp_path / "run")]), recipe, plot=plot)
    assert rows == rows_of_run(tmp_path / "run") and plot.read_bytes().startswith(b"\x89PNG")
    assert [row["step"] for row in rows] == [0, 1, 2] and {row["side"] for row in rows} == {"ours"}
    assert [row["questions"] for row in rows] == [0, 2, 4]
    assert rows[2]["sampled_tokens"] == sum(len(one[1]["ids"]) for one in segments)
    steps = [record for record in folder.metrics() if "eval" not in record]
    parts = ("rollout_seconds", "reward_seconds", "update_seconds")
    assert [one["step_s"] for one in rows[1:]] == [pytest.approx(sum(one[key] for key in parts)) for one in steps]
    assert rows[0]["seconds"] == 0 and rows[2]["seconds"] == pytest.approx(rows[1]["step_s"] + rows[2]["step_s"])
    weights = {name: view.clone() for name, view in hf_views(task.context.policy).items()}
    assert task.evaluate(weights) == rows[0]["eval"], "the weights that the run began with"


def row(side: str, minutes: float, f1: float, seed: int = 0) -> Row:
    found = {"f1": f1, "em": f1 / 2, "response_tokens": 9.0}
    return {"side": side, "seed": seed, "step": int(minutes), "seconds": 60 * minutes, "eval": found}


def test_the_table_says_how_much_longer_the_slower_took(capsys: pytest.CaptureFixture[str]) -> None:
    show([row("ours", 0, 0.1), row("ours", 2, 0.4), row("ours", 4, 0.6), row("TRL", 0, 0.1), row("TRL", 9, 0.3)])
    said = " ".join(capsys.readouterr().out.split())
    assert "F1 0.300, which both reached: ours in 2.0 minutes, TRL in 9.0, 4.5 times as long" in said


def test_the_table_compares_sides_by_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str], make: Make) -> None:
    """By hand: gaps of -.3, -.1 and -.2 have the mean -.2 and the deviation .1; 4.303 and 5.364 times .1 / sqrt(3)."""
    rows = [row(side, 2, f1, seed) for side in ("ours", "shuffled") for seed, f1 in enumerate((0.5, 0.4, 0.6))]
    for one, f1 in zip(rows[3:], (0.2, 0.3, 0.4), strict=True):
        one["eval"]["f1"] = f1
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"bench": "train", **one}) + "\n" for one in rows) + '{"bench": "step"}\n')
    assert run_train_bench(TrainBench(peer="none", beside=[str(file)]), make()) == [
        {"bench": "train", **one} for one in rows
    ]
    said = " ".join(capsys.readouterr().out.split())
    assert "step 2, F1: shuffled - ours is -0.200 ± 0.248, 3 seeds in pairs; minimum detectable effect 0.310," in said


def test_a_run_that_is_there_twice_is_no_second_seed(tmp_path: Path, make: Make) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps({"bench": "train", **row("ours", 2, 0.5)}) + "\n")
    with pytest.raises(UserError, match="step 2 of ours, seed 0: expected one row, found several"):
        run_train_bench(TrainBench(peer="none", beside=[str(tmp_path / "rows.jsonl")] * 2), make())


def test_a_row_behind_an_incomplete_line_is_not_lost(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"a": 2, "b')
    append_rows(tmp_path / "rows.jsonl", {"a": 3})
    append_rows(tmp_path / "rows.jsonl", {"a": 4})
    assert [found["a"] for found in read_rows(tmp_path / "rows.jsonl")] == [1, 3, 4]


def test_rows_without_evaluations_are_refused(tmp_path: Path, make: Make) -> None:
    (tmp_path / "rows.jsonl").write_text('{"bench": "step"}\n')
    with pytest.raises(UserError, match=r"rows\.jsonl: expected rows of bench train, found none"):
        run_train_bench(TrainBench(peer="none", beside=[str(tmp_path / "rows.jsonl")]), make())
    (tmp_path / "rows.jsonl").write_text(json.dumps({"bench": "train", "eval": None}) + "\n")
    with pytest.raises(UserError, match="--beside: none of these runs answered held-out questions"):
        run_train_bench(TrainBench(peer="none", beside=[str(tmp_path / "rows.jsonl")]), make())


def test_a_prompt_that_leaves_an_answer_no_room_is_refused(make: Make) -> None:
    task = Task(load_run_context(make()))
    longest = max(map(len, task.prompts))
    with pytest.raises(UserError, match=rf"rollout.max_context is {longest + 4}, .* may take {longest + 5}"):
        Task(load_run_context(make(f"rollout.max_context={longest + 4}")))


def test_beside_trl(recipe_file: Path, make: Make, tmp_path: Path) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("datasets")
    own = f"system.name={tmp_path}/letters.py"
    (tmp_path / "letters.py").write_text(LETTERS)
    train(make(own), tmp_path / "run")
    out, plot = tmp_path / "rows.jsonl", tmp_path / "train.png"
    words = ["bench", "train", str(recipe_file), "--set", own, "--beside", str(tmp_path / "run"), "--batch", "3"]
    words += ["--checkpointing"]
    assert run([*words, "--out", str(out), "--plot", str(plot)]) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["side"], row["step"]) for row in rows] == [
        (side, step) for side in ("ours", "TRL") for step in range(3)
    ]
    ours, theirs = rows[:3], rows[3:]
    assert theirs[0]["eval"] == ours[0]["eval"], "the same weights"
    assert all(row["eval"]["questions"] == 3 for row in theirs) and theirs[1]["eval"] != theirs[0]["eval"]
    assert 0 < theirs[1]["rollout_s"] < theirs[1]["step_s"] == theirs[1]["seconds"] < theirs[2]["seconds"]
    assert theirs[0]["logprob_gap"] <= 1e-4 and 1 <= theirs[1]["response_tokens"] <= 5
