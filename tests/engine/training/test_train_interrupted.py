"""Ctrl-C and SIGTERM while a run trains: an update that has begun is finished, the last step that was learned is saved,
and the run goes on to the bits that it would have had. A disk without room ends it with its last checkpoint whole."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from train_cases import assert_same_run, metrics, single_threaded

from thresher.common import signals
from thresher.common.errors import UserError
from thresher.engine.config.recipe import Recipe
from thresher.engine.rollout.rollout import DecoderWriter
from thresher.engine.store.run_folder import saved_so_far
from thresher.engine.training import step as step_module
from thresher.engine.training import update as update_module
from thresher.engine.training.train import train
from thresher.engine.training.update import Updater


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with single_threaded():
        yield


@pytest.fixture(autouse=True)
def handled() -> Iterator[None]:
    """As in the program, whatever a shell's background job ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with signals.handle_signals():
        yield
    signal.signal(signal.SIGINT, before)


def steps_saved(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in (run / "checkpoints").iterdir())


def interrupt_in(patch: pytest.MonkeyPatch, owner: Any, name: str, number: int, update: int) -> list[bool]:
    """Have a signal come when the function is called next after this update has begun; which updates were finished."""
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
    make_recipe: Callable[..., Recipe],
    uninterrupted: Path,
    monkeypatch: pytest.MonkeyPatch,
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
    assert f"train: goes on behind step {saved[-1]} of 4, from {out}" in capfd.readouterr().out
    assert_same_run(uninterrupted, out)  # the checkpoint that was saved early is gone


def test_records_that_were_lost_are_noticed(
    tmp_path: Path, make_recipe: Callable[..., Recipe], uninterrupted: Path
) -> None:
    out = shutil.copytree(uninterrupted, tmp_path / "run")
    lines = (out / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    for left in (lines[:0], lines[:2], lines[1:]):
        (out / "metrics.jsonl").write_bytes(b"".join(left))
        with pytest.raises(UserError, match=r"metrics.jsonl:.* go back by --resume --resume-from STEP"):
            train(make_recipe(), out, resume=True)
        assert (out / "metrics.jsonl").read_bytes() == b"".join(left)
    train(make_recipe(), out, resume=True, from_step=2)  # told so
    assert [record["step"] for record in metrics(out)] == [1, 2, 2, 3, 4, 4]


@pytest.mark.slow
def test_a_disk_without_room_is_asked_before_the_run_and_before_each_checkpoint(
    tmp_path: Path, make_recipe: Callable[..., Recipe], uninterrupted: Path, monkeypatch: pytest.MonkeyPatch
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
