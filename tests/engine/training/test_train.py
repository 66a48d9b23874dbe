"""The training loop: a killed run goes on with the same bits, and what it writes down is what happened."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_cases import (
    DEV,
    GROUPS,
    NAMES,
    SAMPLES,
    STEPS,
    assert_same_run,
    metrics,
    single_threaded,
    untimed,
    what_happened,
)

from thresher.engine.assemble import load_parts, load_questions, load_retrieval
from thresher.engine.config.recipe import Recipe
from thresher.engine.evaluation.evaluate import evaluate, summarise
from thresher.engine.store.best_checkpoint import best_checkpoint
from thresher.engine.systems import load_system
from thresher.engine.training.train import Progress, train
from thresher.retrieval.questions import Question
from thresher.rewards.errors import UserError


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with single_threaded():
        yield


class Killed(BaseException):
    """Stands for a kill: no handler of the product catches it."""


def die_after(step: int) -> Callable[[Progress], None]:
    def watch(progress: Progress) -> None:
        if progress.step == step:
            raise Killed

    return watch


def sampled(run: Path, step: int) -> list[dict[str, Any]]:
    path = run / "trajectories" / f"step_{step:06d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_learns_something_and_writes_everything_down(whole: Path, base: dict[str, Any]) -> None:
    names = sorted(str(path.relative_to(whole)) for path in whole.rglob("*") if path.is_file())
    files = ("config.json", "generation_config.json", "model.safetensors", "optimizer.safetensors", "state.json")
    assert names == [
        ".lock",
        *(f"checkpoints/step_{step:06d}/{file}" for step in (2, 4) for file in (*files, "tokenizer.json")),
        *(f"evaluations/step_{step:06d}.jsonl" for step in (0, 2, 4)),
        "metrics.jsonl",
        "recipe.toml",
        "summary.json",
        *(f"trajectories/step_{step:06d}.jsonl" for step in (1, 2, 3, 4)),
    ]
    records = metrics(whole)
    assert [(record["step"], "eval" in record) for record in records] == [
        (0, True),
        (1, False),
        (2, False),
        (2, True),
        (3, False),
        (4, False),
        (4, True),
    ]
    start = load_file(Path(base["model"]["path"]) / "model.safetensors")
    end = load_file(whole / "checkpoints" / "step_000004" / "model.safetensors")
    assert not torch.equal(start["model.embed_tokens.weight"], end["model.embed_tokens.weight"])


def test_the_metrics_of_a_step_are_those_of_its_trajectories(whole: Path) -> None:
    for record in (record for record in metrics(whole) if "eval" not in record):
        entries = sampled(whole, record["step"])
        assert len(entries) == record["questions"] == GROUPS * SAMPLES
        said = [segment for entry in entries for segment in entry["segments"] if segment["source"] == "policy"]
        tokens = sum(len(segment["ids"]) for segment in said)
        assert record["loss_tokens"] == record["sampled_tokens"] == tokens
        assert record["response_tokens"] == pytest.approx(tokens / len(entries))
        assert record["reward"] == pytest.approx(sum(entry["reward"] for entry in entries) / len(entries))
        assert record["em"] == pytest.approx(sum(entry["parts"]["em"] for entry in entries) / len(entries))
        searches = sum(len(entry["searches"]) for entry in entries)
        assert record["searches"] == pytest.approx(searches / len(entries))
        assert sum(record["reasons"].values()) == len(entries)
        rewards = [{entry["reward"] for entry in entries if entry["group"] == group} for group in range(GROUPS)]
        assert record["zero_advantage_groups"] == sum(len(values) == 1 for values in rewards)
        signals = {entry["group"] for entry in entries if entry["advantage"] != 0}
        assert record["zero_advantage_groups"] == GROUPS - len(signals)
        assert record["lr"] == 1e-3
        assert 0 < record["grad_norm"] < 1e3
    assert any(record.get("zero_advantage_groups", GROUPS) < GROUPS for record in metrics(whole))


def test_the_first_update_is_on_policy_and_at_its_reference(whole: Path) -> None:
    first, second = (record for record in metrics(whole) if "eval" not in record and record["step"] <= 2)
    for record in (first, second):
        assert record["logprob_gap_max"] < 1e-4 and record["logprob_gap"] < 1e-5
        assert record["ratio"] == pytest.approx(1, abs=1e-5) and record["clipped"] == 0 and record["capped"] == 0
    assert first["kl_k1"] == first["kl_k2"] == first["kl_k3"] == 0
    assert second["kl_k2"] > 0 and second["kl_k3"] > 0
    assert first["kl_largest"] == first["kl_coefficient_largest"] == 0
    # k2: d squared, halved, and d, of the same token; no mean is above it.
    assert second["kl_largest"] == pytest.approx(second["kl_coefficient_largest"] ** 2 / 2)
    assert second["kl_largest"] > second["kl_k2"]


@pytest.mark.parametrize("step", [0, 4])
def test_an_evaluation_asks_every_question_once_and_greedily_of_the_weights_of_its_step(
    whole: Path, make_recipe: Callable[..., Recipe], tiny_questions: list[Question], step: int
) -> None:
    written = [json.loads(line) for line in (whole / f"evaluations/step_{step:06d}.jsonl").read_text().splitlines()]
    assert [entry["id"] for entry in written] == [question.id for question in tiny_questions[:DEV]]
    recipe = make_recipe()
    parts = load_parts(recipe, whole / f"checkpoints/step_{step:06d}" if step else None)
    scored = evaluate(parts.rollout(load_retrieval(recipe, parts.system)), load_questions(recipe, parts.system)[1])
    assert [entry.to_dict(parts.tokenizer) for entry in scored] == written
    (record,) = (record["eval"] for record in metrics(whole) if record["step"] == step and "eval" in record)
    assert untimed(record) == untimed(summarise(scored, parts.system.tags)) | {"cut_passages": 0}


def test_the_summary_has_these_keys(whole: Path) -> None:
    summary = json.loads((whole / "summary.json").read_text())
    assert list(summary) == [
        "em_before",
        "em_after",
        "f1_before",
        "f1_after",
        "questions",
        "seconds",
        "rollout_tokens_per_s",
        "train_tokens_per_s",
        "seed",
        "steps",
    ]
    evaluations = [record["eval"] for record in metrics(whole) if "eval" in record]
    steps = [record for record in metrics(whole) if "eval" not in record]
    assert (summary["em_before"], summary["em_after"]) == (evaluations[0]["em"], evaluations[-1]["em"])
    assert (summary["f1_before"], summary["f1_after"]) == (evaluations[0]["f1"], evaluations[-1]["f1"])
    assert (summary["questions"], summary["seed"], summary["steps"]) == (DEV, 3, STEPS)
    spent = sum(record["rollout_seconds"] for record in steps)
    assert summary["rollout_tokens_per_s"] == pytest.approx(sum(r["sampled_tokens"] for r in steps) / spent)
    spent = sum(record["update_seconds"] for record in steps)
    assert summary["train_tokens_per_s"] == pytest.approx(sum(r["train_tokens"] for r in steps) / spent)
    assert summary["seconds"] > spent


@pytest.mark.parametrize("step", [1, 3])
def test_a_killed_run_goes_on_to_the_same_bits(
    tmp_path: Path, make_recipe: Callable[..., Recipe], whole: Path, step: int
) -> None:
    """Killed in step 1 there is no checkpoint yet; in step 3 the records of that step have to be forgotten."""
    out = tmp_path / "run"
    with pytest.raises(Killed):
        train(make_recipe(), out, watch=die_after(step))
    assert metrics(out)[-1]["step"] == step and not (out / "summary.json").exists()
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rewa')  # and a line was cut short
    returned = train(make_recipe(), out, resume=True)
    assert_same_run(whole, out)
    assert json.loads((out / "summary.json").read_text()) == returned


def test_the_checkpoint_of_the_best_evaluation_is_kept(
    make_recipe: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saved when it was evaluated, though no save is due then, and kept beside the newest, through a resume."""
    found = iter((0.1, 0.2, 0.9, 0.3, 0.9, 0.8))

    def told(scored: list[Any], tags: Any = ()) -> dict[str, Any]:
        return summarise(scored, tags) | ({"em": next(found), "f1": 0.0} if len(scored) == DEV else {})

    assert DEV != SAMPLES * GROUPS  # how an evaluation is told from a step here
    for module in ("train", "metrics"):
        monkeypatch.setattr(f"thresher.engine.training.{module}.summarise", told)
    run = {"eval_every": 1, "save_every": 4, "keep_checkpoints": 1}
    constant = {"warmup_ratio": 0.0}
    train(make_recipe(run={**run, "steps": 4}, optim=constant), tmp_path / "run")
    kept = tmp_path / "run" / "checkpoints"
    assert sorted(path.name for path in kept.iterdir()) == ["step_000002", "step_000004"]  # as good later is no better
    train(make_recipe(run={**run, "steps": 5}, optim=constant), tmp_path / "run", resume=True)
    assert sorted(path.name for path in kept.iterdir()) == ["step_000002", "step_000005"]
    assert best_checkpoint(tmp_path / "run").step == 2


KILLED = """
import os, signal, sys
import torch
from thresher.engine.store import checkpoint
from thresher.engine.training import update as grpo
from thresher.engine.config.recipe import load_recipe
from thresher.engine.training.train import train

torch.set_num_threads(1)
where, recipe, out = sys.argv[1:]
module, name = {"update": (grpo, "grpo_loss"), "save": (checkpoint, "save_file")}[where]
wanted, calls, steps = getattr(module, name), 0, 0

def counted(progress):
    global steps
    steps = max(steps, progress.step)

def fatal(*arguments, **options):
    global calls
    calls += steps >= (2 if where == "update" else 4)
    if calls == 2 or (calls and where == "save"):
        os.kill(os.getpid(), signal.SIGKILL)
    return wanted(*arguments, **options)

setattr(module, name, fatal)
train(load_recipe(recipe), out, watch=counted)
"""


@pytest.mark.parametrize("where", ["update", "save"])
def test_sigkill(tmp_path: Path, make_recipe: Callable[..., Recipe], whole: Path, where: str) -> None:
    """In the middle of step 3's update, and in the middle of saving step 4's checkpoint."""
    recipe, out = make_recipe(), tmp_path / "run"
    recipe.write(tmp_path / "recipe.toml")
    command = [sys.executable, "-P", "-c", KILLED, where, str(tmp_path / "recipe.toml"), str(out)]
    killed = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert metrics(out)[-1]["step"] == (2 if where == "update" else 4)
    assert [path.name for path in (out / "checkpoints").glob("step_*")] == ["step_000002"]
    assert len(list((out / "checkpoints").glob(".*.tmp"))) == (where == "save")
    train(recipe, out, resume=True)
    assert_same_run(whole, out)
    assert not list(out.rglob(".*.tmp"))


def test_a_finished_run_can_go_on_for_longer_and_be_resumed_for_nothing(
    tmp_path: Path, make_recipe: Callable[..., Recipe], whole: Path
) -> None:
    out = tmp_path / "run"
    constant = {"optim": {"warmup_ratio": 0.0}}
    train(make_recipe(run={"steps": 2}, **constant), out)
    train(make_recipe(**constant), out, resume=True)
    before = what_happened(out)
    train(make_recipe(**constant), out, resume=True)
    assert what_happened(out) == before
    # One warm-up step of four reaches the full rate at once, so this is the whole run but for its recipe.
    expected = what_happened(whole)
    assert [key for key in expected if expected[key] != before[key]] == ["recipe"]


def test_a_folder_that_exists_or_is_anothers_is_refused(
    tmp_path: Path, make_recipe: Callable[..., Recipe], whole: Path
) -> None:
    before = what_happened(whole)
    with pytest.raises(UserError, match="the run folder exists already"):
        train(make_recipe(), whole)
    with pytest.raises(UserError, match=r"belongs to another recipe \(grpo.beta is 0.02, not 0.5\)"):
        train(make_recipe(grpo={"beta": 0.5}), whole, resume=True)
    with pytest.raises(UserError, match="the run folder does not exist"):
        train(make_recipe(), tmp_path / "none", resume=True)
    assert what_happened(whole) == before and list(tmp_path.iterdir()) == []


def test_a_prompt_that_does_not_fit_is_refused_before_there_is_a_folder(
    tmp_path: Path, make_recipe: Callable[..., Recipe]
) -> None:
    lines = [{"id": "short", "question": "Who?", "golden_answers": ["Anna"]}]
    lines.append({"id": "long", "question": "Who knows " * 200 + "?", "golden_answers": ["Anna"]})
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("train", "dev"):
        recipe = make_recipe(data={name: str(tmp_path / "questions.jsonl")})
        with pytest.raises(UserError, match=r"question long: its prompt of .* a context of 240"):
            train(recipe, tmp_path / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["questions.jsonl"]


def marked(path: Path, *gold_indices: list[int] | None) -> Path:
    """Questions with two passages each, of which they say that these are gold."""
    passages = [{"title": name, "text": f"{name} is the mayor."} for name in NAMES[:2]]
    asked = {"question": "Who?", "golden_answers": NAMES[:1], "passages": passages}
    path.write_text("".join(json.dumps(asked | {"gold_indices": indices}) + "\n" for indices in gold_indices))
    return path


def test_arena_is_not_trained_where_no_question_knows_its_gold_passages(
    tmp_path: Path, make_recipe: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompt.txt").write_text("{question} {passages}\n")
    arena = {"name": "arena", "template": str(tmp_path / "prompt.txt")}
    none, some = marked(tmp_path / "none.jsonl", None, None), marked(tmp_path / "some.jsonl", None, [1], [])
    with pytest.raises(UserError, match=r"none.jsonl: no question says .* arena .* give questions with passages and"):
        train(make_recipe(system=arena, data={"train": str(none), "dev": None}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    # The same reward on the same questions, but for a system that does not ask.
    load_questions(make_recipe(data={"train": str(none), "dev": str(none)}), load_system("naive_grpo", {}))
    assert capsys.readouterr().out == ""
    recipe = make_recipe(system=arena, data={"train": str(some), "dev": str(none)})
    asked = load_questions(recipe, load_system("arena", {}))
    assert [len(questions) for questions in asked] == [3, 2]
    first, second = capsys.readouterr().out.splitlines()
    assert f"{some}: 1 of 3 questions do not say" in first and f"{none}: 2 of 2 questions do not say" in second


def test_cut_passages_are_told_once_counted_and_stored_as_shown(
    tmp_path: Path, make_recipe: Callable[..., Recipe], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompt.txt").write_text("{question} {passages}\n")
    passages = [{"title": "", "text": f"{name} is the mayor. " * 8} for name in NAMES[:2]]
    asked = {"question": "Who?", "golden_answers": NAMES[:1], "passages": passages}
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(asked | {"id": str(n)}) + "\n" for n in range(2)))
    recipe = make_recipe(
        system={"name": "naive_grpo", "template": str(tmp_path / "prompt.txt")},
        data={"train": str(tmp_path / "q.jsonl"), "dev": str(tmp_path / "q.jsonl")},
        rollout={"questions_per_step": 1, "group_size": 2},
        run={"steps": 2, "eval_every": None},
    )
    train(recipe, tmp_path / "run")
    told = " ".join(capsys.readouterr().out.split())
    assert told.count("raise rollout.max_passage_tokens") == 1
    assert "train: 2 of 2 questions had passages cut to 40 tokens" in told  # of the evaluation before the first step
    assert [record.get("eval", record)["cut_passages"] for record in metrics(tmp_path / "run")] == [4, 2, 2, 4]
    for entry in sampled(tmp_path / "run", 1):
        texts = [passage["text"] for passage in entry["passages"]]
        assert entry["segments"][0]["text"] == f"Who? {texts[0]}\n{texts[1]}\n"
        assert all(whole["text"].startswith(text) for whole, text in zip(passages, texts, strict=True))


def test_a_run_does_not_go_on_with_a_system_file_that_changed(
    tmp_path: Path, make_recipe: Callable[..., Recipe]
) -> None:
    own = tmp_path / "mine.py"
    own.write_text(text := "from thresher.engine.systems.eval_rar import Options, system\n")
    make = partial(make_recipe, system={"name": str(own)}, optim={"warmup_ratio": 0.0})
    train(make(run={"steps": 1}), tmp_path / "run")
    before = what_happened(tmp_path / "run")
    own.write_text(text.replace("eval_rar", "search_r1"))
    with pytest.raises(UserError, match=r"mine.py: the file has changed since .*; put the old one back, or start"):
        train(make(run={"steps": 2}), tmp_path / "run", resume=True)
    assert what_happened(tmp_path / "run") == before
    own.write_text(text)
    train(make(run={"steps": 2}), tmp_path / "run", resume=True)
    assert [record["step"] for record in metrics(tmp_path / "run") if "eval" not in record] == [1, 2]


def test_search_r1_trains_in_two_updates_a_batch(tmp_path: Path, make_recipe: Callable[..., Recipe]) -> None:
    out = tmp_path / "run"
    recipe = make_recipe(
        system={"name": "search_r1"}, grpo={"updates_per_batch": 2, "entropy_coef": 0.1}, run={"steps": 1}
    )
    train(recipe, out)
    (record,) = (record for record in metrics(out) if "eval" not in record)
    entries = sampled(out, 1)
    assert set(entries[0]["parts"]) == {"answer", "em", "f1", "answered", "searches"}
    said = sum(len(s["ids"]) for entry in entries for s in entry["segments"] if s["source"] == "policy")
    assert record["loss_tokens"] == said  # whole groups, each of them in one of the updates
    optimizer = load_file(out / "checkpoints" / "step_000001" / "optimizer.safetensors")
    assert {float(value) for name, value in optimizer.items() if name.endswith(".step")} == {2.0}
    # The first update is on policy; the policy of the second is no longer the one that sampled.
    assert record["logprob_gap_max"] < 1e-4 < record["logprob_gap"]
    # It was at its reference in the first update, and off it in the second.
    assert 0 < record["kl_k3"] < record["kl_largest"] and record["kl_coefficient_largest"] > 0


def test_shuffled_rewards_stay_in_their_group(tmp_path: Path, make_recipe: Callable[..., Recipe]) -> None:
    shuffled, plain = tmp_path / "shuffled", tmp_path / "plain"
    one_step = {"run": {"steps": 1}, "rollout": {"group_size": 8}}
    train(make_recipe(grpo={"shuffle_rewards": True}, **one_step), shuffled)
    train(make_recipe(**one_step), plain)
    entries, honest = sampled(shuffled, 1), sampled(plain, 1)
    moved = 0
    for group in range(GROUPS):
        here = [entry for entry in entries if entry["group"] == group]
        there = [entry for entry in honest if entry["group"] == group]
        assert [entry["segments"] for entry in here] == [entry["segments"] for entry in there]
        assert [entry["reward"] for entry in here] == [entry["reward"] for entry in there]  # as they were earned
        given, earned = ([entry["advantage"] for entry in part] for part in (here, there))
        assert sorted(given) == sorted(earned)
        moved += given != earned
    assert moved


def test_without_a_signal_nothing_is_updated_if_so_asked(
    tmp_path: Path, make_recipe: Callable[..., Recipe], base: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = {"id": "1", "question": "What is the spouse of Mia Noor?", "golden_answers": ["no one can say this"]}
    (tmp_path / "questions.jsonl").write_text(json.dumps(line) + "\n")
    data = {"train": str(tmp_path / "questions.jsonl"), "dev": str(tmp_path / "questions.jsonl")}
    recipe = make_recipe(data=data, grpo={"drop_zero_advantage": True}, run={"steps": 1})
    summary = train(recipe, tmp_path / "run")
    (record,) = (record for record in metrics(tmp_path / "run") if "eval" not in record)
    assert record["zero_advantage_groups"] == GROUPS  # three times the same question is three groups
    assert (record["train_tokens"], record["loss_tokens"]) == (0, 0) and "loss" not in record
    assert summary["train_tokens_per_s"] is None
    # Sums that only rounding tells apart are one reward.
    rounded = [0.3, 0.1 + 0.2] * (GROUPS * SAMPLES // 2)
    monkeypatch.setattr("thresher.engine.training.step.shuffled_within_groups", lambda *_: rounded)
    grpo = {"drop_zero_advantage": True, "shuffle_rewards": True}
    train(make_recipe(data=data, grpo=grpo, run={"steps": 1}), tmp_path / "rounded")
    (record,) = (record for record in metrics(tmp_path / "rounded") if "eval" not in record)
    assert record["zero_advantage_groups"] == GROUPS and record["loss_tokens"] == 0
    start = load_file(Path(base["model"]["path"]) / "model.safetensors")
    end = load_file(tmp_path / "run" / "checkpoints" / "step_000001" / "model.safetensors")
    assert all(torch.equal(start[name], end[name]) for name in start)


@pytest.mark.parametrize(
    ("optim", "what"),
    [({"lr": 1e3}, "gradient"), ({"lr": 1e38, "max_grad_norm": float("inf")}, "policy")],
)
def test_a_run_that_diverges_ends_in_a_sentence(
    tmp_path: Path, make_recipe: Callable[..., Recipe], optim: dict[str, Any], what: str
) -> None:
    with pytest.raises(UserError, match=f"step 2: the {what} is not finite; start again with a lower optim.lr"):
        train(make_recipe(optim=optim), tmp_path / "run")
    assert [record["step"] for record in metrics(tmp_path / "run")] == [0, 1]


def test_bfloat16_trains_float32_weights_and_resumes(tmp_path: Path, make_recipe: Callable[..., Recipe]) -> None:
    smaller = {"questions_per_step": 1, "group_size": 2}
    run = {"steps": 2, "save_every": 1, "eval_questions": 1}
    recipe = make_recipe(model={"dtype": "bfloat16"}, optim={"lr": 1e-5}, rollout=smaller, run=run)
    train(recipe, tmp_path / "whole")
    with pytest.raises(Killed):
        train(recipe, tmp_path / "killed", watch=die_after(2))
    train(recipe, tmp_path / "killed", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "killed")
    weights = load_file(tmp_path / "killed" / "checkpoints" / "step_000002" / "model.safetensors")
    assert {value.dtype for value in weights.values()} == {torch.float32}
    embedding = weights["model.embed_tokens.weight"]
    assert not torch.equal(embedding, embedding.bfloat16().float())
