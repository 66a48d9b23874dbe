"""Checkpoints: exact to the bit, and the newest whole one after kills, truncation or mixed-up files."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from thresher.common.errors import UserError
from thresher.engine.store import checkpoint
from thresher.engine.store.checkpoint import (
    OPTIMIZER,
    STATE,
    Checkpoint,
    checkpoint_to_resume,
    latest_checkpoint,
    load_optimizer,
    prune,
    read_checkpoint,
    save_checkpoint,
)
from thresher.policy.weights import write_weights


class Tiny(nn.Module):
    """The parts of a policy that a checkpoint needs, with 14 numbers; `unused` never has a gradient."""

    def __init__(self, seed: int = 0, width: int = 3) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layer = nn.Linear(width, 2)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.unused = nn.Parameter(torch.zeros(2))

    def save(self, path: Path) -> None:
        save_file({name: param.data for name, param in self.named_parameters()}, path / "model.safetensors")


class Words:
    def save(self, path: Path) -> None:
        (path / "tokenizer.json").write_text("{}")


def adamw(policy: Tiny, **settings: Any) -> torch.optim.AdamW:
    """Return AdamW with two groups, as in training, so that the optimizer's order differs from the policy's."""
    groups = [
        {"params": [policy.scale, policy.unused], "weight_decay": 0.0},
        {"params": policy.layer.parameters()},
    ]
    return torch.optim.AdamW(groups, lr=0.1, **settings)


def train(policy: Tiny, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 3, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        (policy.layer(x) * policy.scale).square().sum().backward()
        optimizer.step()


def load(policy: Tiny, path: Path) -> None:
    for name, value in load_file(path / "model.safetensors").items():
        policy.get_parameter(name).data.copy_(value)


def saved(folder: Path, step: int = 1, **state: Any) -> Path:
    policy = Tiny()
    optimizer = adamw(policy)
    train(policy, optimizer, range(2))
    return save_checkpoint(folder, step, policy, optimizer, state)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("settings", [{}, {"fused": True}, {"amsgrad": True}], ids=["plain", "fused", "amsgrad"])
def test_a_resumed_run_ends_in_the_same_bits(tmp_path: Path, settings: dict[str, Any]) -> None:
    straight = Tiny()
    train(straight, adamw(straight, **settings), range(6))

    first = Tiny()
    optimizer = adamw(first, **settings)
    train(first, optimizer, range(3))
    path = save_checkpoint(tmp_path, 3, first, optimizer, {"seen": 12})

    second = Tiny(seed=9)
    load(second, path)
    resumed = adamw(second, **settings)
    load_optimizer(path, resumed, second.named_parameters())
    for (a, mine), (b, theirs) in zip(
        [(p, optimizer.state[p]) for p in first.parameters()],
        [(p, resumed.state[p]) for p in second.parameters()],
        strict=True,
    ):
        assert torch.equal(a, b) and mine.keys() == theirs.keys()
        assert all(torch.equal(mine[key], theirs[key]) and mine[key].dtype == theirs[key].dtype for key in mine)
    train(second, resumed, range(3, 6))
    for (name, a), b in zip(straight.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert not torch.equal(straight.layer.weight, first.layer.weight)


def test_what_is_in_a_checkpoint(tmp_path: Path) -> None:
    policy = Tiny()
    optimizer = adamw(policy)
    train(policy, optimizer, range(2))
    state = {"seen": 12, "best": 0.1 + 0.2, "order": [3, 1, 2], "name": "é"}
    path = save_checkpoint(tmp_path / "checkpoints", 10, policy, optimizer, state, beside=[Words()])
    assert path == tmp_path / "checkpoints" / "step_000010"
    assert names(path) == ["hashes.json", "model.safetensors", OPTIMIZER, STATE, "tokenizer.json"]
    tensors = load_file(path / OPTIMIZER)
    assert sorted(tensors) == sorted(
        f"{name}.{what}"
        for name in ("layer.weight", "layer.bias", "scale")  # `unused` has no state to store
        for what in ("exp_avg", "exp_avg_sq", "step")
    )
    assert tensors["scale.step"].item() == 2.0
    assert torch.equal(tensors["layer.weight.exp_avg"], optimizer.state[policy.layer.weight]["exp_avg"])
    assert latest_checkpoint(tmp_path / "checkpoints") == Checkpoint(path, 10, state)


def test_the_optimizers_own_settings_stay(tmp_path: Path) -> None:
    path = saved(tmp_path)
    policy = Tiny()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.7, betas=(0.5, 0.6), weight_decay=0.3)
    load_optimizer(path, optimizer, policy.named_parameters())
    (group,) = optimizer.param_groups
    assert (group["lr"], group["betas"], group["weight_decay"]) == (0.7, (0.5, 0.6), 0.3)
    assert torch.equal(optimizer.state[policy.layer.bias]["exp_avg"], load_file(path / OPTIMIZER)["layer.bias.exp_avg"])


def test_an_optimizer_that_never_stepped(tmp_path: Path) -> None:
    policy = Tiny()
    path = save_checkpoint(tmp_path, 0, policy, adamw(policy), {})
    optimizer = adamw(policy)
    load_optimizer(path, optimizer, policy.named_parameters())
    assert not optimizer.state
    assert latest_checkpoint(tmp_path) == Checkpoint(path, 0, {})


def test_latest_goes_by_number_and_ignores_other_names(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "absent") is None
    assert latest_checkpoint(tmp_path) is None
    for step in (9, 1_000_000, 10):
        saved(tmp_path, step, n=step)
    for name in ("step_9999999.bak", "best", ".step_2000000.0a1b2c3d.tmp"):
        (tmp_path / name).mkdir()
    newest = latest_checkpoint(tmp_path)
    assert newest is not None and (newest.step, newest.state) == (1_000_000, {"n": 1_000_000})


def cut(name: str) -> Callable[[Path], object]:
    return lambda path: os.truncate(path / name, (path / name).stat().st_size - 1)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "no state": lambda path: (path / STATE).unlink(),
    "half a state": cut(STATE),
    "empty state": lambda path: (path / STATE).write_text(""),
    "state of another step": lambda path: (path / STATE).write_text('{"step": 1, "state": {}}'),
    "state without state": lambda path: (path / STATE).write_text('{"step": 2}'),
    "no optimizer": lambda path: (path / OPTIMIZER).unlink(),
    "half an optimizer": cut(OPTIMIZER),
    "half a model": cut("model.safetensors"),
    "empty model": lambda path: (path / "model.safetensors").write_bytes(b""),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_and_named(tmp_path: Path, damage: str) -> None:
    saved(tmp_path, 1, n=1)
    path = saved(tmp_path, 2, n=2)
    DAMAGE[damage](path)
    with pytest.warns(UserWarning, match="checkpoint skipped: .*step_000002"):
        newest = latest_checkpoint(tmp_path)
    assert newest is not None and newest.state == {"n": 1}
    # Saving that step again fixes it.
    saved(tmp_path, 2, n=3)
    newest = latest_checkpoint(tmp_path)
    assert newest is not None and newest.state == {"n": 3}
    assert names(tmp_path) == ["step_000001", "step_000002"]


@pytest.mark.parametrize("moment", ["model", "tokenizer", "optimizer", "state"])
def test_a_save_that_fails_leaves_the_one_before(tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Tiny()
    optimizer = adamw(policy)
    save_checkpoint(tmp_path, 1, policy, optimizer, {"n": 1})

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    words = Words()
    if moment == "model":
        monkeypatch.setattr(policy, "save", fail)
    elif moment == "tokenizer":
        monkeypatch.setattr(words, "save", fail)
    elif moment == "optimizer":
        monkeypatch.setattr("thresher.engine.store.checkpoint.save_tensors", fail)
    else:
        monkeypatch.setattr(Path, "write_text", fail)
    for step in (1, 2):
        with pytest.raises(UserError, match=r"cannot be written \(No space left on device\); make room for it"):
            save_checkpoint(tmp_path, step, policy, optimizer, {"n": 2}, beside=[words])
        assert names(tmp_path) == ["step_000001"]
        assert latest_checkpoint(tmp_path) == Checkpoint(tmp_path / "step_000001", 1, {"n": 1})


def test_a_save_asks_the_disk_for_room_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = Tiny()
    optimizer = adamw(policy)
    train(policy, optimizer, range(1))
    before = Checkpoint(save_checkpoint(tmp_path, 1, policy, optimizer, {}), 1, {})
    # 11 numbers of the policy, two moments of the 9 that have a gradient, and three step counts.
    needed, real = 4 * (11 + 2 * 9 + 3), shutil.disk_usage
    monkeypatch.setattr(policy, "save", lambda path: pytest.fail("written"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=needed - 1))
    with pytest.raises(UserError, match=r"step_000002: cannot be written \(the checkpoint of step 2 needs .*make room"):
        save_checkpoint(tmp_path, 2, policy, optimizer, {})
    assert names(tmp_path) == ["step_000001"] and latest_checkpoint(tmp_path) == before
    monkeypatch.undo()
    monkeypatch.setattr(shutil, "disk_usage", lambda path: real(path)._replace(free=needed))
    save_checkpoint(tmp_path, 2, policy, optimizer, {})


def test_mistakes_of_the_caller(tmp_path: Path) -> None:
    policy = Tiny()
    with pytest.raises(TypeError):
        save_checkpoint(tmp_path, 1, policy, adamw(policy), {"x": object()})
    with pytest.raises(ValueError, match="the optimizer has 4 of 4 parameters that the policy does not name"):
        save_checkpoint(tmp_path, 1, Tiny(), adamw(policy), {})
    with pytest.raises(ValueError, match="keep must be at least 1, got 0"):
        prune(tmp_path, 0)
    assert names(tmp_path) == []


def refused(path: Path, policy: nn.Module) -> str:
    optimizer = torch.optim.AdamW(policy.parameters())
    with pytest.raises(UserError) as caught:
        load_optimizer(path, optimizer, policy.named_parameters())
    assert not optimizer.state
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_another_models_optimizer_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path)
    assert "layer.weight.exp_avg is torch.float32 [2, 3], expected torch.float32 [2, 4]" in refused(path, Tiny(width=4))
    assert "expected torch.bfloat16" in refused(path, Tiny().to(torch.bfloat16))
    more = Tiny()
    more.register_parameter("more", nn.Parameter(torch.zeros(1)))
    assert "belongs to another model (only one of them has more)" in refused(path, more)
    assert "(only one of them has bias)" in refused(path, nn.Linear(3, 2))


def test_a_file_that_is_no_optimizer_is_refused(tmp_path: Path) -> None:
    assert "optimizer.safetensors: no such file" in refused(tmp_path, Tiny())
    (tmp_path / OPTIMIZER).write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{")
    assert "optimizer.safetensors: cannot be read" in refused(tmp_path, Tiny())
    save_file({"x": torch.zeros(1)}, tmp_path / OPTIMIZER)
    assert "it names no parameters" in refused(tmp_path, Tiny())


def test_prune_keeps_the_newest_whole_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        saved(tmp_path, step)
    DAMAGE["no state"](tmp_path / "step_000002")
    DAMAGE["no state"](tmp_path / "step_000005")
    for name in (".step_000006.0a1b2c3d.tmp", ".step_000001.tmp"):  # a kill in a save, a kill in a prune
        (tmp_path / name).mkdir()
        (tmp_path / name / "part").touch()
    (tmp_path / "best").mkdir()
    assert prune(tmp_path, 2) == [tmp_path / "step_000002", tmp_path / "step_000001"]
    assert names(tmp_path) == ["best", "step_000003", "step_000004", "step_000005"]
    assert prune(tmp_path, 2) == []
    assert prune(tmp_path, 1) == [tmp_path / "step_000003"]
    assert prune(tmp_path / "absent", 1) == []


def test_prune_spares_the_best_whatever_its_age(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        saved(tmp_path, step)
    assert prune(tmp_path, 2, spare=1) == [tmp_path / "step_000002"]  # besides the two newest, not in their place
    assert prune(tmp_path, 2, spare=4) == [tmp_path / "step_000001"]  # it is one of the newest itself
    assert names(tmp_path) == ["step_000003", "step_000004"]


def test_a_checkpoint_loses_its_name_before_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a kill while its files are deleted would leave a folder that looks like a checkpoint."""
    for step in (1, 2):
        saved(tmp_path, step)

    def killed(_: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(checkpoint.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            prune(tmp_path, 1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".step_000001.tmp", "step_000002"]
    assert prune(tmp_path, 1) == [] and names(tmp_path) == ["step_000002"]  # the next prune deletes it


def test_an_interim_checkpoint_is_kept_while_it_is_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        saved(tmp_path, step)
    policy = Tiny()
    save_checkpoint(tmp_path, 4, policy, adamw(policy), {}, interim=True)
    assert prune(tmp_path, 2) == [tmp_path / "step_000001"]  # it does not count among the kept ones
    newest = latest_checkpoint(tmp_path)
    assert newest is not None and newest.interim
    saved(tmp_path, 5)
    assert prune(tmp_path, 2, spare=4) == [tmp_path / "step_000003", tmp_path / "step_000002"]  # the best is kept
    assert prune(tmp_path, 2) == [tmp_path / "step_000004"]


# --- Resuming from a checkpoint: all of its bits are as written, or the error names an earlier one


class Wide(Tiny):
    """A policy with adapters, and files of some kilobytes."""

    def __init__(self) -> None:
        super().__init__(width=40)

    def save(self, path: Path) -> None:
        super().save(path)
        write_weights(path / "adapter", {"a": torch.ones(300)})
        (path / "config.json").write_text('{"width": 40}')


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write checkpoints of steps 2, 4 and 6, with adapters in folders of their own; return their folder."""
    policy = Wide()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=0.1)
    for step in (2, 4, 6):
        optimizer.zero_grad()
        policy.layer(torch.full((1, 40), float(step))).square().sum().backward()
        optimizer.step()
        save_checkpoint(tmp_path / "checkpoints", step, policy, optimizer, {"n": step})
    return tmp_path / "checkpoints"


def step_of(folder: Path, **asked: Any) -> int | None:
    checkpoint = checkpoint_to_resume(folder, **asked)
    assert checkpoint is None or checkpoint.state == {"n": checkpoint.step}
    return checkpoint and checkpoint.step


def flip(path: Path, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def not_resumed(folder: Path, **asked: Any) -> str:
    with pytest.raises(UserError) as caught:
        checkpoint_to_resume(folder, **asked)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_newest_or_the_one_that_is_named(folder: Path) -> None:
    assert step_of(folder) == 6 and step_of(folder, from_step=4) == 4
    assert step_of(folder, from_step=0) is None and step_of(folder.parent / "absent") is None
    assert "no checkpoint of step 5; there are 2, 4, 6; 0 is the run's beginning" in not_resumed(folder, from_step=5)
    assert "no checkpoint of step 5; there are none;" in not_resumed(folder.parent / "absent", from_step=5)


def test_every_flipped_bit_of_every_file_is_found_and_the_way_back_is_named(folder: Path) -> None:
    newest = folder / "step_000006"
    draw = np.random.default_rng(0)
    paths = sorted(path for path in newest.rglob("*") if path.is_file())
    names = ["adapter/model.safetensors", "config.json", "hashes.json", "model.safetensors", OPTIMIZER, "state.json"]
    assert [path.relative_to(newest).as_posix() for path in paths] == names
    for path in paths:
        whole = path.read_bytes()
        for bit in [*draw.integers(8 * len(whole), size=15).tolist(), 8 * len(whole) - 9]:
            flip(path, bit)
            try:
                assert step_of(folder) == 6  # the flipped bit is in white space of the list of hashes
                assert path.name == "hashes.json" and json.loads(whole) == json.loads(path.read_bytes())
            except UserError as error:
                assert str(error).startswith(f"{path}: ")
                assert "newest whole checkpoint is step_000004: go back to it with --resume --resume-from 4" in str(
                    error
                )
            path.write_bytes(whole)
    assert step_of(folder) == 6


def test_the_way_back_passes_over_what_is_damaged_too(folder: Path) -> None:
    for step in (6, 4):
        flip(folder / f"step_{step:06d}" / OPTIMIZER, 8000)
    message = not_resumed(folder)
    assert str(folder / "step_000006" / OPTIMIZER) in message and "--resume --resume-from 2" in message
    assert str(folder / "step_000004" / OPTIMIZER) in (message := not_resumed(folder, from_step=4))
    assert message.endswith("go back to it with --resume --resume-from 2")
    flip(folder / "step_000002" / "model.safetensors", 3000)
    assert not_resumed(folder).endswith("No earlier checkpoint is whole: begin again with --resume --resume-from 0")


def test_a_file_of_another_checkpoint_or_none_is_found(folder: Path) -> None:
    shutil.copy(folder / "step_000004" / OPTIMIZER, folder / "step_000006" / OPTIMIZER)
    assert f"{OPTIMIZER}: damaged or changed" in not_resumed(folder)
    assert step_of(folder, verify=False) == 6
    (folder / "step_000006" / OPTIMIZER).unlink()
    assert "--resume-from 4" in not_resumed(folder) and "--resume-from 4" in not_resumed(folder, verify=False)


def test_hashes_that_were_written_are_missed_and_others_not(folder: Path) -> None:
    newest = folder / "step_000006"
    (newest / "hashes.json").unlink()
    assert "hashes.json: no such file, though one was written with the folder" in not_resumed(folder)
    assert step_of(folder, verify=False) == 6
    state = json.loads((newest / "state.json").read_text())
    del state["hashes"]
    (newest / "state.json").write_text(json.dumps(state))
    assert step_of(folder) == 6  # from an earlier version


def test_headers_alone_do_not_see_a_flipped_bit(folder: Path) -> None:
    """This is why a resume checks more than `latest_checkpoint`."""
    path = folder / "step_000006" / "model.safetensors"
    flip(path, 8 * path.stat().st_size - 9)
    newest = latest_checkpoint(folder)
    assert newest is not None and newest.step == 6
    with pytest.raises(UserError, match=r"model\.safetensors: damaged or changed, its bytes"):
        read_checkpoint(path.parent, verify=True)


# --- Kills


KILLER = """
import os, signal, sys, warnings
from pathlib import Path
import torch
from safetensors.torch import load_file, save_file
from thresher.engine.store.checkpoint import latest_checkpoint, prune, save_checkpoint

class Policy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(100))
    def save(self, path):
        save_file({"w": self.w.data}, path / "model.safetensors")

def run(folder, moment):  # saves two checkpoints, unless it kills itself at a line of the code under test
    lines = 0
    def trace(frame, event, arg):
        nonlocal lines
        if not frame.f_code.co_filename.endswith(("engine/store/checkpoint.py", "common/files.py")):
            return None
        lines += event == "line"
        if lines == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace
    newest = latest_checkpoint(folder)
    policy = Policy()
    optimizer = torch.optim.AdamW(policy.parameters())
    optimizer.state[policy.w] = {key: torch.zeros(100) for key in ("exp_avg", "exp_avg_sq")}
    sys.settrace(trace)
    for step in range(newest.step + 1, newest.step + 3) if newest else (1, 2):
        for tensor in (policy.w.data, *optimizer.state[policy.w].values()):
            tensor.fill_(step)
        save_checkpoint(folder, step, policy, optimizer, {"n": step})
        prune(folder, 1)
    sys.settrace(None)

torch.set_num_threads(1)
torch.optim.AdamW(Policy().parameters())  # so that the children need not import what it does
warnings.simplefilter("error")  # no checkpoint may have to be passed over
folder, moment, reached, status = Path(sys.argv[1]), 0, 0, signal.SIGKILL
while status == signal.SIGKILL:
    moment += 3  # every third line, to save time
    child = os.fork()
    if child == 0:
        try:
            run(folder, moment)
        finally:
            os._exit(sys.exc_info()[0] is not None)
    status = os.waitpid(child, 0)[1]
    newest = latest_checkpoint(folder)
    if newest:
        assert newest.step >= reached, (newest, reached)
        reached = newest.step
        assert newest.state == {"n": reached}, newest
        for file in ("model.safetensors", "optimizer.safetensors"):
            for tensor in load_file(newest.path / file).values():
                assert torch.equal(tensor, torch.full((100,), float(reached))), (file, tensor)
        prune(folder, 2)
        left = sorted(path.name for path in folder.iterdir())
        assert left[-1] == f"step_{reached:06d}" and len(left) <= 2 and left[0].startswith("step_"), left
assert status == 0, status
print(moment, reached)
"""


@pytest.mark.slow
def test_killed_in_the_middle_a_whole_checkpoint_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    done = subprocess.run([sys.executable, "-c", KILLER, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    moments, reached = map(int, done.stdout.split())
    # The last child ran to the end, and most of those before it had saved at least once.
    assert moments > 100 and reached > 50
