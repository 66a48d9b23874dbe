"""Checkpoints: files from which a killed run resumes with the same bits as a run that was not killed.

    step_000010/
        config.json, model.safetensors, ..  the policy as `Policy.save` writes it, an ordinary model folder
        adapter/                            with adapters: the run resumes from these and the recipe's model
        tokenizer.json, ..                  if a tokenizer was given
        unfinished.jsonl                    with rollout.partial or run.async: groups that have begun, and are not yet
                                            trained (training/partial.py)
        optimizer.safetensors               moments and step counts, by "<parameter>.<what>": "norm.exp_avg"; moments in
                                            8 bits as their codes and scales (engine/optim/adamw.py)
        state.json                          {"step": .., "state": JSON of the trainer, "interim": whether it was saved
                                            early, "hashes": true}
        hashes.json                         of every file above, block by block (common/hashes.py), written last

A checkpoint is written under another name and renamed when it is on the disk, so a kill leaves the previous one. Files
that a copy over a network or a full disk cut short are found when the newest checkpoint is looked for: every
safetensors header must agree with its file's length, and state.json with the folder's name. All bits are checked
against the hashes when a run resumes from it (`checkpoint_to_resume`).

Deliberately absent: the optimiser's hyperparameters, which the recipe holds; generators of random numbers, because
noise is a function of seed and position; sharded states.
"""

import json
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from thresher.common import console
from thresher.common.errors import UserError
from thresher.common.files import check_file, delete_folder, need_room, read_json_object, staged_folder
from thresher.common.hashes import read_hashes, write_hashes
from thresher.common.machine import origin
from thresher.engine.config.recipe import Recipe
from thresher.engine.optim.adamw import PartwiseAdamW
from thresher.engine.store.run_folder import RunFolder, step_folders, step_name, step_of
from thresher.policy.weights import save_tensors

OPTIMIZER = "optimizer.safetensors"
STATE = "state.json"


class Savable(Protocol):
    """Interface of a tokenizer, or of anything else that writes itself into an existing folder."""

    def save(self, path: Path, /) -> None: ...


class SavablePolicy(Savable, Protocol):
    """Interface of a policy that writes its own files and names its parameters."""

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]: ...


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint on the disk: its folder, its step, and the trainer's own state. interim: as in
    `save_checkpoint`."""

    path: Path
    step: int
    state: dict[str, Any]
    interim: bool = False


def save_checkpoint(
    folder: str | Path,
    step: int,
    policy: SavablePolicy,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    *,
    beside: Sequence[Savable] = (),
    interim: bool = False,
) -> Path:
    """Write `folder`/step_XXXXXX, completely or not at all, in place of one of the same name; return its path.

    folder: the run's checkpoints folder. beside: a tokenizer, and other objects with files in the checkpoint. state:
    further state of the trainer, as JSON (tuples become lists). interim: saved because the run ends early, and not kept
    next to later ones. UserError, before anything is written, if the disk has no room. ValueError if the optimizer
    holds a parameter that is not the policy's, TypeError if `state` is not JSON.
    """
    names = _names(optimizer, policy.named_parameters())
    tensors = _optimizer_tensors(optimizer, names)
    text = json.dumps({"step": step, "state": dict(state), "interim": interim, "hashes": True}, indent=1)
    path = Path(folder) / step_name(step)
    size = sum(tensor.nbytes for tensor in (*tensors.values(), *(value for _, value in policy.named_parameters())))
    need_room(path, size, f"the checkpoint of step {step}")
    with staged_folder(path, replace=True) as staged:
        policy.save(staged)
        for each in beside:
            each.save(staged)
        save_tensors(staged / OPTIMIZER, tensors, {"parameters": json.dumps(names)})
        (staged / STATE).write_text(text, encoding="utf-8")
        write_hashes(staged)
    return path


def latest_checkpoint(folder: str | Path) -> Checkpoint | None:
    """Return the complete checkpoint of the highest step in a run's checkpoints folder, None if there is none.

    An incomplete one is skipped with a warning that names it.
    """
    for path in reversed(step_folders(Path(folder))):
        try:
            return read_checkpoint(path)
        except UserError as error:
            warnings.warn(f"checkpoint skipped: {error}", stacklevel=2)
    return None


def load_optimizer(
    path: str | Path,
    optimizer: torch.optim.Optimizer,
    named_params: Iterable[tuple[str, torch.nn.Parameter]],
    cut: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, value: value,
) -> None:
    """Load a checkpoint's moments and step counts into `optimizer`, bit for bit.

    path: one checkpoint's folder. named_params: the policy's, by the names they were saved under. cut: returns the part
    of a saved moment that belongs to the parameter here, if that is a part of the saved one. The optimizer's
    hyperparameters stay as they are. UserError for a file that is absent, cut short, or of another model.
    """
    file = Path(path) / OPTIMIZER
    names = _names(optimizer, named_params)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    saved, tensors = _read_tensors(file)
    if different := set(saved).symmetric_difference(names):
        raise UserError(f"{file}: belongs to another model (only one of them has {min(different)}); give its own")
    index_of = {name: index for index, name in enumerate(names)}
    states: dict[int, dict[str, torch.Tensor]] = {}
    for tensor_name, value in tensors.items():
        name, what = tensor_name.rsplit(".", 1)
        if name not in index_of:
            raise UserError(f"{file}: {tensor_name} belongs to no parameter; save the checkpoint again")
        value = cut(name, value)
        # A moment has its parameter's shape, a step count is a scalar. Torch would cast others silently.
        like = _state_like(optimizer, params[index_of[name]], what)
        if like is None or (value.dim() and (value.shape, value.dtype) != (like.shape, like.dtype)):
            wanted = "no such tensor" if like is None else f"{like.dtype} {list(like.shape)}"
            raise UserError(
                f"{file}: {tensor_name} is {value.dtype} {list(value.shape)}, expected {wanted} as in the model; give "
                "the model, and the optim.optimizer_state_dtype, that it was saved with"
            )
        states.setdefault(index_of[name], {})[what] = value
    optimizer.load_state_dict({"state": states, "param_groups": optimizer.state_dict()["param_groups"]})


def _state_like(optimizer: torch.optim.Optimizer, param: torch.nn.Parameter, what: str) -> torch.Tensor | None:
    """Return a tensor with the shape and dtype of an optimizer's state of this name; None if it has no such state."""
    return optimizer.state_like(param).get(what) if isinstance(optimizer, PartwiseAdamW) else param


def prune(folder: str | Path, keep: int, spare: int | None = None) -> list[Path]:
    """Delete all checkpoints except the `keep` newest complete ones and that of step `spare`, and leftovers of a kill.
    An interim one is kept while it is the newest, and not counted among the `keep`, so that an interrupted run ends
    with the same checkpoints as an uninterrupted one.

    Only the process that saves may call it, and not during a save. An incomplete checkpoint stays, to be inspected, if
    it is newer than those kept. Return the folders of the deleted checkpoints.
    """
    if keep < 1:
        raise ValueError(f"keep must be at least 1, got {keep}")
    folder = Path(folder)
    for leftover in folder.glob(".*.tmp"):
        shutil.rmtree(leftover)
    kept, newest, deleted = 0, True, []
    for path in reversed(step_folders(folder)):
        spared = step_of(path.name) == spare
        if kept == keep and spared:
            continue
        found = _whole(path) if kept < keep else None
        interim = found is not None and found.interim and not spared
        if kept == keep or (interim and not newest):
            delete_folder(path)
            deleted.append(path)
        elif found is not None:
            kept, newest = kept + (not interim), False
    return deleted


def read_checkpoint(path: Path, verify: bool = False) -> Checkpoint:
    """Return the checkpoint in a folder; UserError if it is not complete. verify: check every file against its hashes.
    For a checkpoint without hashes (of an earlier version) only the headers are checked."""
    if verify and (hashes := read_hashes(path)) is not None:
        hashes.check_all()
    content = read_json_object(path / STATE)
    step, state = content.get("step"), content.get("state")
    if not isinstance(step, int) or step != step_of(path.name) or not isinstance(state, dict):
        raise UserError(f"{path / STATE}: expected the state of {path.name}, got that of step {step}; delete it")
    if verify:
        read_hashes(path, expected=content.get("hashes") is True)
    for file in sorted({path / OPTIMIZER, *path.rglob("*.safetensors")}):
        _open(file)
    return Checkpoint(path, step, state, content.get("interim") is True)


def checkpoint_to_resume(folder: str | Path, from_step: int | None = None, verify: bool = True) -> Checkpoint | None:
    """Return the checkpoint of `from_step` in a run's checkpoints folder, or that of the highest step if it is None.
    Return None if there is none, and for step 0, the run's beginning.

    A run never goes back by itself, because later training would be lost silently. Nor does it continue if records
    are lost (`RunFolder.check_metrics`), because their measurements cannot be computed again.

    verify: check its files against their hashes, as in `read_checkpoint`. UserError if it is damaged, and for a step
    that has no checkpoint; both name the checkpoints that are left.
    """
    paths = step_folders(Path(folder))
    if from_step is not None:
        if from_step == 0:
            return None
        if not any(step_of(path.name) == from_step for path in paths):
            steps = ", ".join(str(step_of(path.name)) for path in paths) or "none"
            raise UserError(f"{folder}: no checkpoint of step {from_step}; there are {steps}; 0 is the run's beginning")
        paths = [path for path in paths if (step_of(path.name) or 0) <= from_step]
    if not paths:
        return None
    *earlier, path = paths
    try:
        return read_checkpoint(path, verify)
    except UserError as error:
        raise UserError(f"{error}. {_way_back(earlier, verify)}") from None


def check_resumed(
    command: str,
    folder: Path,
    checkpoint: Checkpoint | None,
    steps: int,
    explicit_step: bool,
    period: Callable[[Recipe], int] = lambda recipe: recipe.run.save_every,
    also: str = "",
) -> None:
    """Print where a run resumes from. UserError if checkpoints or records are lost.

    steps: of the whole run. explicit_step: whether --resume-from names the step. period: the steps between checkpoints.
    also: text added to the line.
    """
    step = checkpoint.step if checkpoint else 0
    if not explicit_step:
        RunFolder(folder).check_checkpoints(step, period)
        RunFolder(folder).check_metrics(step, checkpoint.state.get("metrics") if checkpoint else None)
    where = checkpoint.path if checkpoint else "its beginning, because it has no checkpoint"
    console.announce(f"{command}: continues after step {step} of {steps}, from {where}{also}")


def check_newest(run: RunFolder, checkpoint: Checkpoint | None) -> None:
    """Raise UserError if another process has saved a checkpoint since ours was chosen."""
    newest = max((step_of(path.name) or 0 for path in step_folders(run.checkpoints)), default=0)
    if newest > (checkpoint.step if checkpoint else 0):
        raise UserError(f"{run.path}: another process has just saved step {newest}; run the same command again")


def start_record(run: RunFolder, checkpoint: Checkpoint | None, cuda: bool, explicit_step: bool) -> dict[str, Any]:
    """Return the line of starts.jsonl for a run that starts or resumes now. explicit_step: whether --resume-from was
    given, so that the records that are left are accepted."""
    start = {"step": checkpoint.step if checkpoint else 0, **origin(cuda)}
    if explicit_step:
        start["metrics"] = run.metrics_mark()
    return start


def _way_back(paths: list[Path], verify: bool) -> str:
    for path in reversed(paths):
        try:
            step = read_checkpoint(path, verify).step
        except UserError:
            continue
        return f"The newest whole checkpoint is {step_name(step)}: go back to it with --resume --resume-from {step}"
    return "No earlier checkpoint is whole: begin again with --resume --resume-from 0"


def _whole(path: Path) -> Checkpoint | None:
    try:
        return read_checkpoint(path)
    except UserError:
        return None


def _open(file: Path) -> Any:
    """Return an open safetensors file, its header checked against its length; no tensor is read yet."""
    check_file(file)
    try:
        return safe_open(file, framework="pt")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: cannot be read ({error}); use another checkpoint") from None


def _read_tensors(file: Path) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Return the names of the optimizer's parameters, and its tensors by "<parameter>.<what>"."""
    with _open(file) as opened:
        metadata = opened.metadata() or {}
        if "parameters" not in metadata:
            raise UserError(f"{file}: it names no parameters, as an optimizer's state does; use another checkpoint")
        names = opened.keys()
        return json.loads(metadata["parameters"]), {name: opened.get_tensor(name) for name in names}


def _names(optimizer: torch.optim.Optimizer, named_params: Iterable[tuple[str, torch.nn.Parameter]]) -> list[str]:
    """Return the names of the optimizer's parameters, in its own order."""
    name_of = {id(param): name for name, param in named_params}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    unknown = sum(id(param) not in name_of for param in params)
    if unknown:
        raise ValueError(f"the optimizer has {unknown} of {len(params)} parameters that the policy does not name")
    return [name_of[id(param)] for param in params]


def _optimizer_tensors(optimizer: torch.optim.Optimizer, names: list[str]) -> dict[str, torch.Tensor]:
    """Return "<parameter>.<what>" -> tensor on the CPU; a parameter that never had a gradient has none."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {
        f"{name}.{what}": value.detach().cpu().contiguous()
        for name, param in zip(names, params, strict=True)
        for what, value in optimizer.state.get(param, {}).items()
    }
