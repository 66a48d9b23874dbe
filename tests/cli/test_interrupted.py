"""Tests of Ctrl-C and SIGTERM: status 130 and 143, and one sentence with what is kept and the command to resume."""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from thresher.cli import main as cli
from thresher.cli.main import interrupted
from thresher.common import signals
from thresher.common.errors import UserError
from thresher.common.files import append_bytes, atomic_write_text
from thresher.engine.rollout.rollout import Rollout
from thresher.engine.training import train as train_module
from thresher.engine.training.sft import SftTrainer
from thresher.engine.world.stages import BEGUN, DemoPlan, demo
from thresher.retrieval.building import build as build_module


@pytest.fixture(autouse=True)
def not_ignored() -> Iterator[None]:
    """Enable Ctrl-C, which a shell's background job ignores."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


# Command -> its words, the function and the call of it with which the signal arrives, the kept output, the flag.
COMMANDS: dict[str, tuple[str, Any, str, int, str | None, str]] = {
    "rollout": (
        "rollout --recipe {at}/recipe.toml --questions {at}/questions.jsonl --max-num-seqs 1 --out {out}.jsonl",
        *(Rollout, "run", 2, "{out}.jsonl keeps what is done, 2 lines", " --resume"),
    ),
    "eval": (
        "eval {at}/recipe.toml --set rollout.max_num_seqs=1 --out {out}",
        *(Rollout, "run", 2, "{out}/generated.jsonl keeps what is done, 2 lines", ""),
    ),
    "eval, at its beginning": ("eval {at}/recipe.toml --out {out}", Rollout, "run", 1, None, ""),
    "sft": (
        "sft {at}/recipe.toml --out {out}",
        *(SftTrainer, "_backward", 1, "{out}.training is saved up to step 1", " --resume"),
    ),
    "train, before its first step": (
        "train {at}/recipe.toml --out {out}",
        *(Rollout, "run", 1, "{out} has saved no step yet", " --resume"),
    ),
    "index build": (
        "index build --corpus {at}/corpus.jsonl --out {out}",
        *(build_module, "_measure", 1, "{out}.building keeps what is done", ""),
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_what_it_keeps_and_goes_on(
    finished: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    template, owner, function, call, kept, flag = COMMANDS[name]
    words = template.format(at=finished, out=tmp_path / "out").split()
    number = signal.SIGINT if name in ("sft", "rollout") else signal.SIGTERM
    real, calls = getattr(owner, function), [0]

    def signalling(*arguments: Any, **options: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            os.kill(os.getpid(), number)
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, function, signalling)
        assert cli.run(words) == 128 + number
    what = "unfinished work is not kept; begin again"
    if kept is not None:
        what = f"{kept.format(out=tmp_path / 'out')}; go on from there"
    said = capsys.readouterr().err
    assert said == f"thresher: interrupted; {what} with: thresher {shlex.join(words)}{flag}\n"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    assert (kept is None) == (list(tmp_path.iterdir()) == [])
    again = shlex.split(said.rpartition("with: thresher ")[2])
    assert cli.run(again) == 0


def test_the_command_that_goes_on_goes_back_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["train", "r.toml", "--out", "my run", "--resume", "--resume-from", "2"]
    ended = "interrupted; kept; go on from there with: thresher train r.toml --out 'my run' --resume"
    assert interrupted(words, "kept", "--resume", "--resume-from") == ended
    assert interrupted([*words[:5], "--resume-from=2"], "kept", "--resume", "--resume-from") == ended
    assert interrupted(words, "kept", "--resume") == f"{ended} --resume-from 2"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert "go on from there with torchrun, as before: thresher train r.toml" in interrupted(words, "kept", "--resume")


def test_a_run_that_has_not_gone_back_yet_is_told_to_again(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["train", f"{finished}/recipe.toml", "--out", f"{tmp_path}/run"]) == 0
    capsys.readouterr()
    words = f"train {finished}/recipe.toml --out {tmp_path}/run --resume --resume-from 0".split()
    signalling = lambda *_, **__: os.kill(os.getpid(), signal.SIGINT)  # noqa: E731
    for owner, function, gone_back in ((train_module, "load_run_context", False), (Rollout, "run", True)):
        with monkeypatch.context() as patch:
            patch.setattr(owner, function, signalling)
            assert cli.run(words) == 130
        assert capsys.readouterr().err.endswith(f"{shlex.join(words[: -2 if gone_back else None])}\n")


SECOND = """
import sys, time
from thresher.common.signals import defer_signals, handle_signals
with handle_signals(), defer_signals("the step is finished"):
    print("here", flush=True)
    time.sleep(float(sys.argv[1]))
"""


def test_a_second_ctrl_c_ends_at_once() -> None:
    """The first Ctrl-C lets the held block finish, the second does not; two SIGTERM end as one."""
    for numbers, seconds, status in (([2, 2], 60, 130), ([15, 15], 1, 1)):
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", SECOND, str(seconds)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        assert process.stdout is not None and process.stdout.readline() == "here\n"
        assert process.stderr is not None
        process.send_signal(numbers[0])
        name = signal.Signals(numbers[0]).name
        assert process.stderr.readline() == f"{name}: the step is finished; Ctrl-C once more ends at once\n"
        process.send_signal(numbers[1])
        assert process.wait(30) == status  # 1: nothing caught Interrupted, which `held` raised when it ended
        assert ("Interrupted: SIGTERM" in process.stderr.read()) == (status == 1)
        process.stdout.close(), process.stderr.close()


def test_under_torchrun_a_second_ctrl_c_ends_nothing(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A terminal sends it to the ranks and to torchrun, which signals them a second time: they still finish."""
    ended: list[int] = []
    monkeypatch.setattr(os, "_exit", ended.append)
    for under in (True, False):
        monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
        if under:
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
        with (
            pytest.raises(signals.Interrupted, match="SIGINT"),
            signals.handle_signals(),
            signals.defer_signals("it is saved"),
        ):
            for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
                os.kill(os.getpid(), number)
        assert ended == ([] if under else [130])
        more = "" if under else "; Ctrl-C once more ends at once"
        assert capfd.readouterr().err == f"SIGINT: it is saved{more}\n"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(signals.Interrupted), signals.handle_signals(), signals.defer_signals("it is saved"):
        os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err == ""  # rank 0 has printed it


def test_a_signal_that_was_ignored_stays_so() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with signals.handle_signals():
        os.kill(os.getpid(), signal.SIGINT)
        assert signals.noted() is None
        with pytest.raises(signals.Interrupted, match="SIGTERM"):
            os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN


class SignalledElement:
    """A sequence whose `__getitem__` raises SIGINT."""

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> float:
        os.kill(os.getpid(), signal.SIGINT)
        return 1.0


def test_an_interruption_that_torch_replaces_by_an_error_is_one() -> None:
    with pytest.raises(signals.Interrupted) as stopped, signals.handle_signals():
        torch.asarray(SignalledElement())
    assert "could not determine the shape" in str(stopped.value.__cause__)
    kept = signals.on_interrupt(lambda: "one step", "--resume")
    with pytest.raises(signals.Interrupted) as stopped, signals.handle_signals(), kept:
        try:
            torch.asarray(SignalledElement())
        except ValueError as error:
            raise UserError("model.safetensors: cannot be read") from error
    assert (stopped.value.kept, stopped.value.flag, stopped.value.number) == ("one step", "--resume", signal.SIGINT)
    with pytest.raises(ValueError, match="another"), signals.handle_signals(), signals.on_interrupt(str):
        raise ValueError("another")
    with (
        pytest.raises(ValueError, match="another"),
        signals.handle_signals(),
        signals.defer_signals("the step is finished"),
    ):
        os.kill(os.getpid(), signal.SIGINT)
        raise ValueError("another")  # before the interruption was raised


def test_a_demo_goes_on_with_what_is_not_finished(tmp_path: Path, tiny_model_folder: Path) -> None:
    """Finished stages are not run again; training resumes; another seed, or a finished demo, is refused."""
    out, ran = tmp_path / "demo", []
    plan = DemoPlan(seed=3, set=("run.steps=1",))

    def run(words: list[str], stop: str | None = None) -> None:
        ran.append(words)
        into = Path(words[words.index("--out") + 1])
        into.mkdir(exist_ok=words[-1] == "--resume" or words[0] == "report")
        if words[0] == stop:
            append_bytes(into / "recipe.toml", b"")
            raise KeyboardInterrupt
        if words[0] == "train":
            atomic_write_text(into / "summary.json", "{}")

    with pytest.raises(KeyboardInterrupt):
        demo(out, plan, lambda words: run(words, "train"), lambda line: None)
    assert [words[0] for words in ran] == ["data", "init", "index", "sft", "train"]
    for other in (replace(plan, seed=4), replace(plan, set=()), replace(plan, model=str(tiny_model_folder))):
        with pytest.raises(UserError, match=r"was begun with --seed 3 --set run.steps=1; give the same"):
            demo(out, other, run, lambda line: None)
    ran.clear()
    said: list[str] = []
    demo(out, plan, run, said.append)
    assert [(words[0], words[-1] == "--resume") for words in ran] == [("train", True), ("report", False)]
    assert said[:4] == [f"{out / name} is finished" for name in ("data", "init", "index", "warmup")]
    assert (out / BEGUN).is_file() and (out / "summary.json").is_file()
    with pytest.raises(UserError, match="holds a demo that is finished"):
        demo(out, plan, run, lambda line: None)
    with pytest.raises(UserError, match=r'--set run\.steps: expected an integer >= 0, got "x"'):
        demo(out.with_name("refused"), replace(plan, set=("run.steps=x",)), run, lambda line: None)
    assert not out.with_name("refused").exists()
