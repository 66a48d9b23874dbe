"""Going on from a checkpoint: every bit of it is what was written, or the run says where it could go back to."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from thresher.common.errors import UserError
from thresher.engine.store.checkpoint import (
    OPTIMIZER,
    checkpoint_to_resume,
    latest_checkpoint,
    read_checkpoint,
    save_checkpoint,
)
from thresher.policy.weights import write_weights


class Tiny(nn.Module):
    """What a checkpoint asks of a policy, with adapters in a folder of their own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(40, 30)

    def save(self, path: Path) -> None:
        write_weights(path, {name: param.data for name, param in self.named_parameters()})
        write_weights(path / "adapter", {"a": torch.ones(3)})
        (path / "config.json").write_text('{"width": 40}')


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Checkpoints of steps 2, 4 and 6."""
    policy = Tiny()
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


def refused(folder: Path, **asked: Any) -> str:
    with pytest.raises(UserError) as caught:
        checkpoint_to_resume(folder, **asked)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_newest_or_the_one_that_is_named(folder: Path) -> None:
    assert step_of(folder) == 6 and step_of(folder, from_step=4) == 4
    assert step_of(folder, from_step=0) is None and step_of(folder.parent / "absent") is None
    assert "no checkpoint of step 5; there are 2, 4, 6; 0 is the run's beginning" in refused(folder, from_step=5)
    assert "no checkpoint of step 5; there are none;" in refused(folder.parent / "absent", from_step=5)


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
                assert step_of(folder) == 6  # white space in the list of hashes
                assert path.name == "hashes.json" and json.loads(whole) == json.loads(path.read_bytes())
            except UserError as error:
                assert str(error).startswith(f"{path}: ")
                assert "newest whole checkpoint is step_000004: go back to it by --resume --resume-from 4" in str(error)
            path.write_bytes(whole)
    assert step_of(folder) == 6


def test_the_way_back_passes_over_what_is_damaged_too(folder: Path) -> None:
    for step in (6, 4):
        flip(folder / f"step_{step:06d}" / OPTIMIZER, 8000)
    message = refused(folder)
    assert str(folder / "step_000006" / OPTIMIZER) in message and "--resume --resume-from 2" in message
    assert str(folder / "step_000004" / OPTIMIZER) in (message := refused(folder, from_step=4))
    assert message.endswith("go back to it by --resume --resume-from 2")
    flip(folder / "step_000002" / "model.safetensors", 3000)
    assert refused(folder).endswith("No earlier checkpoint is whole: begin again by --resume --resume-from 0")


def test_a_file_of_another_checkpoint_or_none_is_found(folder: Path) -> None:
    shutil.copy(folder / "step_000004" / OPTIMIZER, folder / "step_000006" / OPTIMIZER)
    assert f"{OPTIMIZER}: damaged or changed" in refused(folder)
    assert step_of(folder, verify=False) == 6
    (folder / "step_000006" / OPTIMIZER).unlink()
    assert "--resume-from 4" in refused(folder) and "--resume-from 4" in refused(folder, verify=False)


def test_hashes_that_were_written_are_missed_and_others_not(folder: Path) -> None:
    newest = folder / "step_000006"
    (newest / "hashes.json").unlink()
    assert "hashes.json: no such file, though one was written with the folder" in refused(folder)
    assert step_of(folder, verify=False) == 6
    state = json.loads((newest / "state.json").read_text())
    del state["hashes"]
    (newest / "state.json").write_text(json.dumps(state))
    assert step_of(folder) == 6  # an earlier version's


def test_headers_alone_do_not_see_a_flipped_bit(folder: Path) -> None:
    """Why a resume asks for more than `latest_checkpoint`."""
    path = folder / "step_000006" / "model.safetensors"
    flip(path, 8 * path.stat().st_size - 9)
    newest = latest_checkpoint(folder)
    assert newest is not None and newest.step == 6
    with pytest.raises(UserError, match=r"model\.safetensors: damaged or changed, its bytes"):
        read_checkpoint(path.parent, verify=True)
