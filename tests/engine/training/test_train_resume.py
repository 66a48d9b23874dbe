"""A run that is killed, interrupted or extended: the bits of an uninterrupted run, or a refusal.

An update that has begun when a signal comes is finished, and the last step that was learned is saved.
"""

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from train_cases import (
    DEV,
    GROUPS,
    SAMPLES,
    SAVE,
    Killed,
    Make,
    assert_same_run,
    metrics,
    sigkill,
    steps_of,
    steps_saved,
    train_killed,
    what_happened,
)

from thresher.common import signals
from thresher.common.errors import UserError
from thresher.engine.evaluation.metrics import Measured, summary_of
from thresher.engine.rollout.rollout import DecoderWriter
from thresher.engine.store.run_folder import best_checkpoint, saved_so_far
from thresher.engine.training import step as step_module
from thresher.engine.training import update as update_module
from thresher.engine.training.train import Progress, Trainer, train
from thresher.engine.training.update import Updater


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.fast_cases(1)
def test_a_killed_run_goes_on_to_the_same_bits(
    tmp_path: Path, make_recipe: Make, uninterrupted: Path, step: int
) -> None:
    """Killed in step 1 there is no checkpoint yet; in step 3 the records of that step have to be dropped."""
    out = tmp_path / "run"
    train_killed(make_recipe(), out, step)
    assert metrics(out)[-1]["step"] == step and not (out / "summary.json").exists()
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "rewa')  # and a line was cut short
    returned = train(make_recipe(), out, resume=True)
    assert_same_run(uninterrupted, out)
    assert json.loads((out / "summary.json").read_text()).items() >= returned.items()


@pytest.mark.parametrize(("module", "name", "call"), [("training.update", "step_optimizer", 3), SAVE])
@pytest.mark.slow
def test_sigkill(tmp_path: Path, make_recipe: Make, uninterrupted: Path, module: str, name: str, call: int) -> None:
    """Killed in the middle of step 3's update, and in the middle of saving step 4's checkpoint."""
    recipe, out = make_recipe(), tmp_path / "run"
    sigkill("train", recipe, out, module, name, call)
    assert metrics(out)[-1]["step"] == (2 if call == 3 else 4)
    assert [path.name for path in (out / "checkpoints").glob("step_*")] == ["step_000002"]
    assert len(list((out / "checkpoints").glob(".*.tmp"))) == (call == 2)
    train(recipe, out, resume=True)
    assert_same_run(uninterrupted, out)
    assert not list(out.rglob(".*.tmp"))


# --- Ctrl-C and SIGTERM


def interrupt_in(patch: pytest.MonkeyPatch, owner: Any, name: str, number: int, update: int) -> list[bool]:
    """Send a signal at the function's next call after this update has begun; return the finished updates."""
    function, whole, finished, sent = getattr(owner, name), Updater.update, [], []

    def signalling(*arguments: Any, **options: Any) -> Any:
        if len(finished) == update and not sent:
            sent.append(number)
            os.kill(os.getpid(), number)
        return function(*arguments, **options)

    def counted(self: Updater, *arguments: Any) -> Any:
        finished.append(False)
        stats = whole(self, *arguments)
        finished[-1] = True
        return stats

    patch.setattr(owner, name, signalling)
    patch.setattr(Updater, "update", counted)
    return finished


WHERE = {
    "in the update of step 3": (update_module, "grpo_loss", signal.SIGINT, 3, [2, 3]),
    "in the rollout of step 2": (DecoderWriter, "begin", signal.SIGTERM, 1, [1]),
    "while step 2 is judged": (step_module, "score", signal.SIGINT, 1, [1]),
}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.fast_cases(1)
def test_an_interrupted_run_is_saved_and_goes_on_to_the_same_bits(
    tmp_path: Path,
    make_recipe: Make,
    uninterrupted: Path,
    monkeypatch: pytest.MonkeyPatch,
    handled: None,
    where: str,
    capfd: pytest.CaptureFixture[str],
) -> None:
    owner, name, number, update, saved = WHERE[where]
    out = tmp_path / "run"
    with monkeypatch.context() as patch, pytest.raises(signals.Interrupted) as stopped:
        finished = interrupt_in(patch, owner, name, number, update)
        train(make_recipe(), out)
    assert stopped.value.status == 128 + number and finished == [True] * saved[-1]
    assert steps_saved(out) == saved and metrics(out)[-1]["step"] == saved[-1]
    assert saved_so_far(out) == f"{out} is saved up to step {saved[-1]}"
    assert ("SIGINT: a step that is being learned is finished" in capfd.readouterr().err) == (update == 3)
    with signals.handle_signals():  # as in another process
        train(make_recipe(), out, resume=True)
    assert f"train: continues after step {saved[-1]} of 4, from {out}" in capfd.readouterr().out
    assert_same_run(uninterrupted, out)  # the early checkpoint is gone


# --- What else can be resumed, and from where


def test_a_finished_run_can_go_on_for_longer_and_be_resumed_for_nothing(
    tmp_path: Path, make_recipe: Make, uninterrupted: Path
) -> None:
    out = tmp_path / "run"
    constant = {"optim": {"warmup_ratio": 0.0}}
    train(make_recipe(run={"steps": 2}, **constant), out)
    train(make_recipe(**constant), out, resume=True)
    before = what_happened(out)
    train(make_recipe(**constant), out, resume=True)
    assert what_happened(out) == before
    with pytest.raises(
        UserError, match=r"step 4 is done, and run\.steps is 2; raise it, or go back with --resume-from"
    ):
        train(make_recipe(run={"steps": 2}, **constant), out, resume=True)
    assert what_happened(out) == before
    # One warm-up step of four reaches the full rate at once, so this is the whole run except for its recipe.
    expected = what_happened(uninterrupted)
    assert [key for key in expected if expected[key] != before[key]] == ["recipe"]


def test_a_damaged_checkpoint_ends_a_resume_until_it_is_told_where_to_go_back(
    tmp_path: Path, make_recipe: Make, uninterrupted: Path
) -> None:
    """This holds for a finished run too. It resumes from the named step, and from the beginning, to the same bits."""
    out = shutil.copytree(uninterrupted, tmp_path / "run")
    damaged = out / "checkpoints" / "step_000004" / "optimizer.safetensors"
    data = bytearray(damaged.read_bytes())
    data[-10] ^= 1
    damaged.write_bytes(data)
    before = what_happened(out)
    for _ in range(2):
        with pytest.raises(UserError, match=rf"{damaged}: damaged or changed.* --resume --resume-from 2"):
            train(make_recipe(), out, resume=True)
    assert what_happened(out) == before
    train(make_recipe(run={"verify": False}), out, resume=True)  # finished: nothing is trained from it
    for step in (2, 0):
        seen: list[Progress] = []
        train(make_recipe(), out, resume=True, watch=seen.append, from_step=step)
        assert min(progress.step for progress in seen) == step == seen[0].step
        assert_same_run(uninterrupted, out)
    with pytest.raises(UserError, match="no checkpoint of step 3; there are 2, 4"):
        train(make_recipe(), out, resume=True, from_step=3)


def test_what_is_behind_is_forgotten_before_a_run_begins_but_not_what_another_process_has_just_saved(
    tmp_path: Path, make_recipe: Make, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process saves between the choice of a checkpoint and the lock; `--resume-from` goes back all the same.
    A run killed before its first step resumes from the step that was named."""

    def reached(*_: Any) -> None:
        raise Killed

    out = shutil.copytree(uninterrupted, tmp_path / "run")
    before, newer = what_happened(out), out / "checkpoints" / "step_000005"
    monkeypatch.setattr(Trainer, "run", reached)
    monkeypatch.setattr("thresher.engine.training.train.check_disk", lambda *_: newer.mkdir())
    with pytest.raises(UserError, match=r"run: another process has just saved step 5; run the same command again"):
        train(make_recipe(), out, resume=True)
    assert what_happened(out) == before and newer.exists()
    newer.rmdir()
    with pytest.raises(Killed):
        train(make_recipe(), out, resume=True, from_step=2)
    left = {folder: sorted(path.stem for path in (out / folder).iterdir()) for folder in ("checkpoints", "evaluations")}
    assert left == {"checkpoints": ["step_000002"], "evaluations": ["step_000000", "step_000002"]}
    assert {path.stem for path in (out / "trajectories").iterdir()} == {"step_000001", "step_000002"}
    assert [record["step"] for record in metrics(out)] == [0, 1, 2, 2] and not (out / "summary.json").exists()


@pytest.mark.slow
def test_the_checkpoint_of_the_best_evaluation_is_kept(
    make_recipe: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is saved when evaluated, although no save is due, and kept next to the newest, through a resume."""
    found = iter((0.1, 0.2, 0.9, 0.3, 0.9, 0.8))

    def with_made_up_em(rows: list[Measured]) -> dict[str, Any]:
        return summary_of(rows) | ({"em": next(found), "f1": 0.0} if len(rows) == DEV else {})

    assert DEV != SAMPLES * GROUPS  # this is how an evaluation is recognised here
    for module in ("train", "metrics"):
        monkeypatch.setattr(f"thresher.engine.training.{module}.summary_of", with_made_up_em)
    run, out = {"eval_every": 1, "save_every": 4, "keep_checkpoints": 1}, tmp_path / "run"
    constant = {"warmup_ratio": 0.0}
    train(make_recipe(run={**run, "steps": 4}, optim=constant), out)
    assert steps_saved(out) == [2, 4]  # an equal later result is not better
    train(make_recipe(run={**run, "steps": 5}, optim=constant), out, resume=True)
    assert steps_saved(out) == [2, 5]
    assert best_checkpoint(out).step == 2


@pytest.mark.slow
def test_a_run_with_a_warm_up_goes_on_for_longer(
    make_recipe: Make, tmp_path: Path, uninterrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A share of 4 steps is the first step. Of 5 steps it would be two, and finished steps would have had other
    rates."""
    shutil.copytree(uninterrupted, tmp_path / "run")
    train(make_recipe(run={"steps": 5}), tmp_path / "run", resume=True)
    assert "its learning rate is scheduled for 4 steps, optim.schedule_steps" in capsys.readouterr().out
    train(make_recipe(run={"steps": 5}, optim={"schedule_steps": 4}), tmp_path / "whole")
    assert_same_run(tmp_path / "whole", tmp_path / "run")


# --- Refusals


def test_a_folder_that_exists_or_is_anothers_is_refused(tmp_path: Path, make_recipe: Make, uninterrupted: Path) -> None:
    before = what_happened(uninterrupted)
    for out, resume, changes, said in (
        (uninterrupted, False, {}, "the run folder exists already"),
        (uninterrupted, True, {"grpo": {"beta": 0.5}}, r"belongs to another recipe \(grpo.beta is 0.02, not 0.5\)"),
        (tmp_path / "none", True, {}, "the run folder does not exist"),
    ):
        with pytest.raises(UserError, match=said):
            train(make_recipe(**changes), out, resume)
    assert what_happened(uninterrupted) == before and list(tmp_path.iterdir()) == []


def test_records_that_were_lost_are_noticed(tmp_path: Path, make_recipe: Make, uninterrupted: Path) -> None:
    out = shutil.copytree(uninterrupted, tmp_path / "run")
    lines = (out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    for left in (lines[:0], lines[:2], lines[1:]):
        (out / "metrics.jsonl").write_bytes(b"".join(left))
        with pytest.raises(
            UserError, match=r"metrics.jsonl:.* go back to a checkpoint with --resume --resume-from STEP"
        ):
            train(make_recipe(), out, resume=True)
        assert (out / "metrics.jsonl").read_bytes() == b"".join(left)
    train(make_recipe(), out, resume=True, from_step=2)  # as requested
    assert [record["step"] for record in metrics(out)] == [1, 2, 2, 3, 4, 4]


def test_a_run_does_not_go_on_with_a_system_file_that_changed(tmp_path: Path, make_recipe: Make) -> None:
    own, out = tmp_path / "mine.py", tmp_path / "run"
    own.write_text(text := "from thresher.engine.systems.eval_rar import Options, system\n")
    make = partial(make_recipe, system={"name": str(own)}, optim={"warmup_ratio": 0.0})
    train(make(run={"steps": 1}), out)
    before = what_happened(out)
    own.write_text(text.replace("eval_rar", "search_r1"))
    with pytest.raises(UserError, match=r"mine.py: the file has changed since .*; put the old one back, or start"):
        train(make(run={"steps": 2}), out, resume=True)
    assert what_happened(out) == before
    own.write_text(text)
    train(make(run={"steps": 2}), out, resume=True)
    assert [record["step"] for record in steps_of(out)] == [1, 2]


def test_a_run_does_not_go_on_with_other_rewards_questions_templates_or_objectives(
    tmp_path: Path, make_recipe: Make
) -> None:
    out, base = tmp_path / "run", make_recipe()
    assert base.data is not None and base.data.dev is not None
    texts = {
        "reward.py": "from beside import f\n",
        "beside.py": "def f(text): return len(text) % 7\n",
        "objective.py": "def g(logprobs, old, ref, advantages, mask, sequence): return -advantages * logprobs\n",
        "prompt.txt": "{question}?\n",
        "train.jsonl": Path(base.data.train).read_text(),
        "dev.jsonl": Path(base.data.dev).read_text(),
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    recipe = make_recipe(
        data={name: str(tmp_path / f"{name}.jsonl") for name in ("train", "dev")},
        system={
            "name": "plain",
            "options": {"rewards": [f"{tmp_path}/reward.py:f"]},
            "template": str(tmp_path / "prompt.txt"),
        },
        grpo={"objective": f"{tmp_path}/objective.py:g"},
        optim={"warmup_ratio": 0.0},
        run={"steps": 1},
    )
    train(recipe, out)
    longer = replace(recipe, run=replace(recipe.run, steps=2))
    for name, text in texts.items():
        (tmp_path / name).write_text(text + "\n")
        named = tmp_path / ("reward.py" if name == "beside.py" else name)
        with pytest.raises(UserError, match=f"^{re.escape(str(named))}: the file has changed since the run's last"):
            train(longer, out, resume=True)
        (tmp_path / name).write_text(text)
    train(longer, out, resume=True)
    assert [record["step"] for record in steps_of(out)] == [1, 2]


@pytest.mark.slow
def test_a_disk_without_room_is_asked_before_the_run_and_before_each_checkpoint(
    tmp_path: Path, make_recipe: Make, uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, out = make_recipe(), tmp_path / "run"
    size = sum(path.stat().st_size for path in (uninterrupted / "checkpoints" / "step_000002").glob("*.safetensors"))
    real = shutil.disk_usage

    def has_free(times: Callable[[], float]) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=int(times() * size)))

    has_free(lambda: 3.5)
    with pytest.raises(UserError, match=r"run: cannot be written \(a run with 4 checkpoints at a time of .* needs"):
        train(recipe, out)
    assert not out.exists()
    has_free(lambda: 0.9 if out.exists() and metrics(out)[-1]["step"] == 4 else 4.1)
    with pytest.raises(UserError, match=r"step_000004: cannot be written \(the checkpoint of step 4 needs .*make room"):
        train(recipe, out)
    assert steps_saved(out) == [2] and not list(out.rglob("*.tmp"))
    monkeypatch.undo()
    train(recipe, out, resume=True)
    assert_same_run(uninterrupted, out)
