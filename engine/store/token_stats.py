"""Values of each sampled token in a step's update: step_000010.safetensors next to the step's trajectories.

    counts_N       int32    P of each trajectory, in the order of the JSONL's lines
    sampled_P      float32  log-prob when the token was sampled
    recomputed_P   float32  log-prob by the update's own forward; nan: the token was not in the update
    entropy_P      float16  of the policy's next-token distribution there; nan likewise
    clipped_P      bool     whether the clip left the surrogate term without a gradient
    reference_P    float32  log-prob by the reference; absent without a KL
    advantage_P    float32  the advantage times the importance weight; absent if it is one per trajectory
    gradient_P     float32  minus the loss's derivative by the token's own logit; absent in files of earlier versions
    branches_B     float32  log-prob when sampled, of the tokens of the other branches, which are in no update

All in nats, at the rollout's temperature; the file's metadata has a digest of them. The update's values are those of
the first pass over the batch, taken from the loss: no forward is run for them, and they are copied to the host once per
step.

The gradient is that of the step's loss, for any objective, with its weights and 1 / temperature: the value from which
the update's backward begins, at the token's logit before the temperature.

Deliberately absent: values that follow from these and the recipe (ratios, KL estimators), and the text (the JSONL's
ids).
Axes: N trajectories, P their concatenated sampled tokens (each one's own, then those of its trained branches), B those
of the other branches, R rows of a micro-batch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors import SafetensorError
from safetensors.numpy import load, save

from thresher.common.errors import UserError
from thresher.common.files import atomic_write_bytes, read_bytes
from thresher.common.records import REMEDY, warn_unguarded

Array = npt.NDArray[Any]
Key = tuple[int, int]  # group and sample of a trajectory

DTYPES = {
    "sampled": np.float32,
    "recomputed": np.float32,
    "entropy": np.float16,
    "clipped": np.bool_,
    "reference": np.float32,
    "advantage": np.float32,
    "gradient": np.float32,
}
DIGEST = "digest"  # its key in the metadata
ALWAYS = ("sampled", "recomputed", "entropy", "clipped")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStats:
    """Values of one trajectory: arrays [P] by the names of DTYPES, and log-probs [B] of its untrained branches."""

    key: Key
    values: dict[str, Array]
    branches: Array


@dataclass(slots=True)
class TokenRecorder:
    """Recorder of the values of each micro-batch's rows, which stay on their device."""

    _items: list[tuple[Key, int, int]] = field(default_factory=list)
    _values_R: dict[str, list[torch.Tensor]] = field(default_factory=dict)

    def add(self, items: Sequence[tuple[Key, int, int]], values_R: Mapping[str, torch.Tensor]) -> None:
        """Add a micro-batch. items: the key, the context's number and the number of rows of each sequence, in the order
        of the micro-batch's rows."""
        self._items.extend(items)
        for name, value_R in values_R.items():
            self._values_R.setdefault(name, []).append(value_R.detach())

    def found(self) -> dict[Key, dict[str, Array]]:
        """Return the values of each trajectory, its contexts in order. They are copied to the host once for each
        name."""
        ends = np.cumsum([count for _, _, count in self._items])[:-1]
        parts: dict[str, list[Array]] = {
            name: np.split(torch.cat(values_R).cpu().numpy().astype(DTYPES[name]), ends)
            for name, values_R in self._values_R.items()
        }
        places: dict[Key, list[int]] = {}
        for n in sorted(range(len(self._items)), key=lambda n: self._items[n][:2]):
            places.setdefault(self._items[n][0], []).append(n)
        return {
            key: {name: np.concatenate([of_item[n] for n in own]) for name, of_item in parts.items()}
            for key, own in places.items()
        }


def stats_of(
    sampled: Mapping[Key, Sequence[float]], branches: Mapping[Key, Sequence[float]], recorder: TokenRecorder
) -> list[TokenStats]:
    """Return the values of each trajectory's sampled tokens. sampled, branches: log-probs when sampled, of these tokens
    and of the branches that are not trained. The recorder has values of the last tokens only; those before were
    inherited."""
    found = recorder.found()
    names = [name for name in DTYPES if name in (*ALWAYS, *next(iter(found.values()), {}))]
    entries = []
    for key, logprobs in sampled.items():
        values = {name: _blank(name, len(logprobs)) for name in names}
        for name, value in found.get(key, {}).items():
            values[name][len(logprobs) - len(value) :] = value
        values["sampled"] = np.array(logprobs, np.float32)
        entries.append(TokenStats(key=key, values=values, branches=np.array(branches.get(key, ()), np.float32)))
    return entries


def _blank(name: str, count: int) -> Array:
    return np.full(count, False if DTYPES[name] is np.bool_ else np.nan, DTYPES[name])


def write_token_stats(path: Path, stats: Sequence[TokenStats], most_bytes: int) -> bool:
    """Write a step's file completely or not at all, and delete the oldest ones until all take at most `most_bytes`.
    Return whether it was written: a file that is larger by itself is not."""
    names = [name for name in DTYPES if any(name in entry.values for entry in stats)]
    counts = [len(entry.values["sampled"]) for entry in stats]
    arrays: dict[str, Array] = {"counts_N": np.array(counts, np.int32)}
    for name in names:  # a rank without sequences to train on has no reference
        columns = [entry.values.get(name, _blank(name, count)) for entry, count in zip(stats, counts, strict=True)]
        arrays[f"{name}_P"] = np.concatenate(columns)
    arrays["branches_B"] = np.concatenate([np.empty(0, np.float32), *(entry.branches for entry in stats)])
    data = save(arrays, {DIGEST: _digest(arrays)})
    if len(data) > most_bytes:
        return False
    atomic_write_bytes(path, data)
    room = most_bytes
    for file in sorted(path.parent.glob("step_*.safetensors"), reverse=True):
        room -= file.stat().st_size
        if room < 0:
            file.unlink()
    return True


def _digest(arrays: Mapping[str, Array]) -> str:
    """Return a digest of names, shapes and values."""
    return sha256(save(dict(arrays))).hexdigest()


def read_token_stats(
    path: Path, counts: Sequence[int], branches: Sequence[int], unverified: bool = False
) -> list[TokenStats] | None:
    """Return the values of each trajectory of the JSONL, keyed by their order; None if there is no file. counts,
    branches: for each trajectory, the number of sampled tokens and of tokens in branches that are not trained.
    UserError for a file that is damaged or of other trajectories and, unless `unverified`, for one whose values do not
    match its digest."""
    if not path.exists():
        return None
    data = read_bytes(path)
    try:
        arrays = load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    except (SafetensorError, ValueError, KeyError) as error:
        raise UserError(f"{path}: cannot be read ({error}); delete it to see the text without its values") from None
    if not unverified:
        digest = header.get("__metadata__", {}).get(DIGEST)
        if digest is None:
            warn_unguarded(path.parent.parent, path)
        elif digest != _digest(arrays):
            raise UserError(f"{path}: was changed since it was written, as its digest shows; {REMEDY}")
    sizes = {f"{name}_P": sum(counts) for name in DTYPES if f"{name}_P" in arrays or name in ALWAYS}
    sizes["branches_B"] = sum(branches)
    fits = all(name in arrays and arrays[name].shape == (size,) for name, size in sizes.items())
    if not fits or arrays.get("counts_N", np.empty(0)).tolist() != list(counts):
        raise UserError(
            f"{path}: does not fit the trajectories of {path.stem}.jsonl; delete it to see the text without its values"
        )
    cuts, branch_cuts = np.cumsum(counts)[:-1], np.cumsum(branches)[:-1]
    columns = {name.removesuffix("_P"): np.split(arrays[name], cuts) for name in sizes if name.endswith("_P")}
    of_branches = np.split(arrays["branches_B"], branch_cuts)
    return [
        TokenStats(key=(n, 0), values={name: columns[name][n] for name in columns}, branches=of_branches[n])
        for n in range(len(counts))
    ]
