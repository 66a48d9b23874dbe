"""A fine-tuning that was killed or interrupted resumes to the same model, to the bit, as an uninterrupted one."""

import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_cases import SAVE, Killed, Make, recipe_maker, sigkill, steps_saved

from thresher.cli.commands.training import run_sft
from thresher.common import console, signals
from thresher.common.errors import UserError
from thresher.common.locks import lock_folder
from thresher.common.records import RecordLog, write_records
from thresher.engine.config.recipe import Recipe
from thresher.engine.reports.pages import RunRecords
from thresher.engine.store.run_folder import saved_so_far, sft_folder, to_be_resumed
from thresher.engine.training.sft import SftTrainer
from thresher.engine.training.sft_run import FineTuning, load_fine_tuning
from thresher.policy.model import load_policy

STEPS, PERIOD = 5, 2
NAMES = ("Anna", "Carl", "Eva", "Gil", "Ida", "Karl", "Mia")


pytestmark = pytest.mark.usefixtures("handled")


@pytest.fixture
def make(tiny_model_folder: Path, tmp_path: Path) -> Make:
    """make(sft={..}, lora={..}, ..) -> Recipe of five steps on seven transcripts, of which one is held out."""
    write_transcripts(tmp_path, NAMES)
    size = {"steps": STEPS, "save_every": PERIOD, "batch_size": 4, "held_out": 0.1}
    rate = {"lr": 0.01, "schedule": "cosine", "warmup_ratio": 0.3}
    return recipe_maker(
        {
            "model": {"path": str(tiny_model_folder)},
            "system": {"name": "search_r1"},
            "rollout": {"max_context": 512},
            "sft": {"transcripts": str(tmp_path / "transcripts.jsonl"), **size, **rate},
        }
    )


def write_transcripts(folder: Path, names: tuple[str, ...]) -> None:
    records = [
        {"question": f"Who is {name}?", "segments": [{"source": "policy", "text": name, "copied": [[0, len(name)]]}]}
        for name in names
    ]
    (folder / "transcripts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def files(model: Path) -> dict[str, bytes]:
    """Return all files of a fine-tuning, except its seconds and the hashes."""
    found = {str(path.relative_to(model)): path.read_bytes() for path in sorted(model.rglob("*")) if path.is_file()}
    figures = json.loads(found.pop("sft.json"))
    found["figures"] = json.dumps({name: value for name, value in figures.items() if name != "seconds"}).encode()
    del found["hashes.json"]
    return found


def ended(
    error: type[BaseException], recipe: Recipe, out: Path, step: int, do: Callable[[], object], **how: Any
) -> None:
    """Fine-tune until this error, with a call of `do` where update number `step` begins."""
    whole, calls = SftTrainer._backward, [0]

    def counted(self: SftTrainer, batch: Any) -> Any:
        calls[0] += 1
        if calls[0] == step:
            do()
        return whole(self, batch)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(error):
        patch.setattr(SftTrainer, "_backward", counted)
        run_sft(recipe, out, **how)
    assert calls == [step] and not out.exists() and to_be_resumed("sft", out)


def killed(recipe: Recipe, out: Path, step: int, **how: Any) -> None:
    """End the fine-tuning, as if the process were killed, in the update after `step` updates."""
    ended(Killed, recipe, out, step + 1, raise_killed, **how)


def raise_killed(*_: object) -> None:
    raise Killed


def saved(out: Path) -> list[int]:
    return steps_saved(sft_folder(out))


KINDS: dict[str, dict[str, dict[str, Any]]] = {
    "all weights": {},
    "adapters on bfloat16": {"lora": {"rank": 8, "alpha": 16}, "model": {"dtype": "bfloat16"}},
    "8-bit moments, from bfloat16": {"optim": {"optimizer_state_dtype": "8bit"}, "model": {"dtype": "bfloat16"}},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.fast_cases(1)
def test_a_killed_fine_tuning_goes_on_to_the_same_bits(
    make: Make, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before its first checkpoint, after it, and once more after it was resumed."""
    recipe, out = make(**KINDS[kind]), tmp_path / "out"
    run_sft(recipe, tmp_path / "whole")
    killed(recipe, out, 1)
    assert saved(out) == []
    killed(recipe, out, 3, resume=True)
    assert saved(out) == [2]
    with pytest.raises(UserError, match=r"out\.training: expected a run of thresher train, got that of a thresher sft"):
        RunRecords.read(sft_folder(out))
    killed(recipe, out, 2, resume=True)
    assert saved(out) == [4]
    shown: list[int] = []
    monkeypatch.setattr(console.Line, "to", lambda line, done, text: line.total == STEPS and shown.append(done))
    run_sft(recipe, out, resume=True)
    assert shown == [4, 5], "the progress line begins behind its checkpoint"
    assert files(out) == files(tmp_path / "whole")
    assert {path.name for path in tmp_path.iterdir() if "out" in path.name} == {"out"}


def test_all_weights_begin_as_they_are_stored(make: Make, tmp_path: Path, tiny_model_folder: Path) -> None:
    """This holds even if model.dtype, in which GRPO computes, would round them."""
    recipe = make(model={"dtype": "bfloat16"}, sft={"lr": 0.0, "steps": 1})
    run_sft(recipe, tmp_path / "out")
    stored, trained = (load_file(folder / "model.safetensors") for folder in (tiny_model_folder, tmp_path / "out"))
    assert all(torch.equal(weight, trained[name]) for name, weight in stored.items())


@pytest.mark.parametrize("offload", ["none", "masters"])
def test_in_bfloat16_it_computes_so_and_moves_float32_weights(make: Make, tmp_path: Path, offload: str) -> None:
    """A step of 1e-6 is too small for bfloat16. A loss differs from float32's by the rounding of a forward."""
    rate = {"lr": 1e-6, "schedule": "constant", "warmup_ratio": 0.0}
    in_float32 = make(sft=rate)
    recipe = make(sft=rate, model={"dtype": "bfloat16"}, optim={"offload": offload})
    tuning = load_fine_tuning(recipe)
    masters = tuning.weights.master
    before = {name: value.detach().clone() for name, value in masters.named_parameters()}
    losses: list[list[float]] = [[], []]
    tuning.run(tmp_path / "out", lambda record: losses[0].append(record["loss"]))
    load_fine_tuning(in_float32).run(tmp_path / "float32", lambda record: losses[1].append(record["loss"]))
    assert losses[0] != losses[1] and losses[0] == pytest.approx(losses[1], rel=0.02)
    assert {value.dtype for value in tuning.trainer.policy.parameters()} == {torch.bfloat16}
    written = load_policy(tmp_path / "out")
    for name, value in masters.named_parameters():
        moved = (value.detach() - before[name]).abs().max()
        assert torch.equal(written.get_parameter(name), value) and 0 < moved < 1e-6 * STEPS * 1.1, name
        assert torch.equal(tuning.trainer.policy.get_parameter(name), value.bfloat16()), name


def measured_as(patch: pytest.MonkeyPatch, shares: list[float]) -> list[str]:
    """Replace the share of correctly copied names by the next of `shares` for each new state of the weights. A resumed
    run then measures the same as the whole one. Return the states that were measured."""
    seen: list[str] = []

    def copying(self: SftTrainer) -> float:
        value = repr(float(sum(p.detach().double().abs().sum() for p in self.policy.parameters())))
        if value not in seen:
            seen.append(value)
        return shares[seen.index(value)]

    patch.setattr(SftTrainer, "copying", copying)
    return seen


def test_a_fine_tuning_that_was_killed_in_its_second_attempt_goes_on_in_it(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attempt has two steps; the gate opens after those of the second attempt."""
    gate = {"stop_at_copy_accuracy": 0.7, "gate_every": 2, "max_restarts": 1}
    recipe = make(sft=gate | {"steps": 2, "save_every": 1, "batch_size": 1})
    seen = measured_as(monkeypatch, [0.1, 0.8])
    run_sft(recipe, tmp_path / "whole")
    killed(recipe, tmp_path / "out", 3)
    assert saved(tmp_path / "out") == [3]
    run_sft(recipe, tmp_path / "out", resume=True)
    assert files(tmp_path / "out") == files(tmp_path / "whole") and len(seen) == 2
    figures = json.loads((tmp_path / "out" / "sft.json").read_text())
    assert figures["restarts"] == 1 and figures["passed"] and figures["names copied right"] == 0.8


@pytest.mark.slow
def test_restarts_and_the_gate_go_on_too(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate opens in the second attempt: killed in that attempt, at its start, and just before the gate opens."""
    recipe = make(sft={"stop_at_copy_accuracy": 0.7, "gate_every": 2, "steps": 4, "save_every": 2, "max_restarts": 2})
    measured = measured_as(monkeypatch, [0.1, 0.2, 0.3, 0.8])  # at steps 2 and 4 of both attempts
    run_sft(recipe, tmp_path / "whole")
    assert json.loads((tmp_path / "whole" / "sft.json").read_text())["restarts"] == 1
    for place, step in enumerate((4, 5, 7)):
        out = tmp_path / f"out{place}"
        killed(recipe, out, step)
        assert saved(out)[-1] == step // 2 * 2
        run_sft(recipe, out, resume=True)
        assert files(out) == files(tmp_path / "whole")
    with monkeypatch.context() as patch, pytest.raises(Killed):  # the gate has opened, but the model is not written yet
        patch.setattr(FineTuning, "_save", raise_killed)
        run_sft(recipe, tmp_path / "last")
    monkeypatch.setattr(SftTrainer, "_backward", raise_killed)
    run_sft(recipe, tmp_path / "last", resume=True)
    assert files(tmp_path / "last") == files(tmp_path / "whole")
    assert len(measured) == 4


@pytest.mark.slow
def test_sigkill_while_a_checkpoint_is_written(make: Make, tmp_path: Path) -> None:
    recipe, out = make(), tmp_path / "out"
    sigkill("sft", recipe, out, *SAVE)
    names = sorted(path.name for path in (sft_folder(out) / "checkpoints").iterdir())
    assert len(names) == 2 and names[-1] == "step_000002"  # and half of the next one
    run_sft(recipe, out, resume=True)
    run_sft(recipe, tmp_path / "whole")
    assert files(out) == files(tmp_path / "whole")


@pytest.mark.parametrize("step", [1, 3, STEPS])
@pytest.mark.fast_cases(1)
def test_an_interrupt_finishes_the_update_and_saves_it(
    make: Make, tmp_path: Path, step: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """This holds in the last update too, after which only the model is left to write."""
    recipe, out = make(), tmp_path / "out"
    ended(signals.Interrupted, recipe, out, step, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert saved(out)[-1] == step
    assert saved_so_far(sft_folder(out)) == f"{out}.training is saved up to step {step}"
    with signals.handle_signals():
        run_sft(recipe, out, resume=True)
    assert f"sft: continues after step {step} of 5, from {out}.training" in capfd.readouterr().out
    run_sft(recipe, tmp_path / "whole")
    assert files(out) == files(tmp_path / "whole")


def test_what_cannot_be_resumed_is_refused(make: Make, tmp_path: Path, tiny_model_folder: Path) -> None:
    recipe, out = make(), tmp_path / "out"

    def refused(sentence: str, recipe: Recipe = recipe, resume: bool = True, from_step: int | None = None) -> None:
        with pytest.raises(UserError, match=sentence):
            run_sft(recipe, out, resume, from_step)

    refused(r"out: no fine-tuning was begun there; leave out --resume")
    killed(recipe, out, 3)
    refused(r"out\.training: a fine-tuning that is not finished; continue with --resume, or delete it", resume=False)
    refused(r"belongs to another recipe \(sft\.lr is 0\.01, not 0\.02\)", make(sft={"lr": 0.02}))
    refused(r"no checkpoint of step 3; there are 2; 0 is the run's beginning", from_step=3)

    write_transcripts(tmp_path, (*NAMES[:-1], "Otto"))
    refused(r"transcripts\.jsonl: its transcripts have other tokens than those that the run was trained on")
    write_transcripts(tmp_path, NAMES)

    weights = (tiny_model_folder / "model.safetensors").read_bytes()
    (tiny_model_folder / "model.safetensors").write_bytes(weights[:-4] + b"\0\0\0\0")
    refused(r"tiny-model: its weights are not those that the run began with")
    (tiny_model_folder / "model.safetensors").write_bytes(weights)

    newer = sft_folder(out) / "checkpoints" / "step_000004"
    with pytest.MonkeyPatch.context() as patch:  # another process saves before this one has the lock
        patch.setattr("thresher.engine.training.sft_run.need_room", lambda *_: newer.mkdir())
        refused(r"out\.training: another process has just saved step 4; run the same command again")
    newer.rmdir()

    lock = lock_folder(sft_folder(out))
    refused(rf"out\.training: process {os.getpid()} is writing to this folder")
    os.close(lock)

    metrics = sft_folder(out) / "metrics.jsonl"
    lines = metrics.read_bytes().splitlines(keepends=True)
    metrics.write_bytes(b"".join(lines[1:]))
    refused(r"metrics\.jsonl:1: does not follow from the lines before it: one was changed, lost, duplicated or moved")
    metrics.write_bytes(b"".join(lines))
    records = [record for _, record in RecordLog(metrics).recover()]
    write_records(metrics, records[1:], closed=False)
    refused(r"metrics\.jsonl: its records up to step 2 are not the 2 that the checkpoint was saved with")
    metrics.write_bytes(b"".join(lines))

    checkpoint = sft_folder(out) / "checkpoints" / "step_000002"
    moments = bytearray((checkpoint / "optimizer.safetensors").read_bytes())
    moments[-1] ^= 1
    (checkpoint / "optimizer.safetensors").write_bytes(moments)
    refused(r"optimizer\.safetensors: damaged .* begin again with --resume --resume-from 0")
    shutil.copytree(sft_folder(out), tmp_path / "lost.training")
    run_sft(recipe, out, resume=True, from_step=0)
    refused(r"out: the fine-tuning is finished; choose another --out")
    refused(r"out: exists already; choose another folder for the model", resume=False)
    run_sft(recipe, tmp_path / "whole")
    assert files(out) == files(tmp_path / "whole")

    shutil.rmtree(tmp_path / "lost.training" / "checkpoints" / "step_000002")
    log = RecordLog(tmp_path / "lost.training" / "metrics.jsonl")
    log.append({**list(log.recover())[-1][1], "step": 4})
    with pytest.raises(UserError, match=r"metrics\.jsonl has step 4: that of step 2 is lost"):
        run_sft(recipe, tmp_path / "lost", resume=True)


def test_a_resumed_fine_tuning_may_be_saved_at_other_steps(make: Make, tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed(make(), out, 2)
    killed(make(sft={"save_every": 3}), out, 2, resume=True)
    assert saved(out) == [3]
    run_sft(make(sft={"save_every": 100}), out, resume=True)
    run_sft(make(), tmp_path / "whole")
    assert files(out) == files(tmp_path / "whole")
