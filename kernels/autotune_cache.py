"""Measured tilings of the head's kernel: the choice of a tiling for a head, and the file that stores it.

With THRESHER_AUTOTUNE=1 the first call of each head shape times the candidates with that call's rows, prints the
times, and stores the fastest in tiling-GPU.json of the folder THRESHER_TILINGS (default: bench/results). A stored
tiling is used for the same GPU by name, dtype, V, H and version of Triton only.

Axes: V vocabulary, H hidden width (docs/notation.md).
"""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thresher.common.files import atomic_write_text, writing
from thresher.common.locks import locked_in_turn
from thresher.kernels.head_tiling import BFLOAT16, HOPPER, Tiling, capability, choose_tiling

AUTOTUNE, FOLDER = "THRESHER_AUTOTUNE", "THRESHER_TILINGS"
RESULTS = Path(__file__).resolve().parents[1] / "bench" / "results"
POINTERS = (
    BFLOAT16,
    HOPPER,
    Tiling(rows=128, columns=128, width=64, num_warps=8, num_stages=3),
    Tiling(rows=128, columns=128, width=64, num_warps=4, num_stages=3),
    Tiling(rows=128, columns=256, width=64, num_warps=8, num_stages=4),
    Tiling(rows=256, columns=128, width=64, num_warps=8, num_stages=3),
    Tiling(rows=128, columns=256, width=32, num_warps=8, num_stages=4),
    Tiling(rows=128, columns=64, width=32, num_warps=4, num_stages=4),
)
# With 128 registers two blocks share a multiprocessor of sm_80, and the epilogue of one overlaps the product of the
# other. Registers spill only after the loop over H, never in it.
BEFORE_HOPPER = (Tiling(rows=128, columns=128, width=32, num_warps=8, num_stages=4, maxnreg=128),)


def candidates(lm_head_VH: Tensor) -> tuple[Tiling, ...]:
    """Return the tilings that are worth timing for this head on its GPU."""
    return POINTERS if 90 <= capability(lm_head_VH.device) < 100 else (*POINTERS, *BEFORE_HOPPER)


_measured: dict[tuple[str, ...], Tiling] = {}


def wants_measuring(lm_head_VH: Tensor) -> bool:
    """Return whether to time the candidates for this head: requested, on a GPU, in bfloat16, and not done yet."""
    asked = os.environ.get(AUTOTUNE) == "1" and lm_head_VH.is_cuda and lm_head_VH.dtype == torch.bfloat16
    return asked and _key(lm_head_VH) not in _measured


def tiling_for(lm_head_VH: Tensor) -> Tiling:
    """Return the tiling measured for this head in this process, else the stored one, else that of `choose_tiling`."""
    if not lm_head_VH.is_cuda or lm_head_VH.dtype != torch.bfloat16:
        return choose_tiling(lm_head_VH)
    key = _key(lm_head_VH)
    found = _measured.get(key) or read_winners(winners_path(key[0])).get(key)
    return found or choose_tiling(lm_head_VH)


def record(lm_head_VH: Tensor, rows: int, times: Mapping[Tiling, float]) -> Path:
    """Use the fastest of `times` (milliseconds, of chunks of `rows` rows) for this head from now on, and store it.

    It replaces an earlier one for the same key. Returns the file's path. Processes that measure at the same time write
    in turn. Unwritable for a folder that cannot be written, ValueError for a file of other content."""
    key = _key(lm_head_VH)
    best = min(times, key=times.__getitem__)
    _measured[key] = best
    gpu, dtype, _, _, triton = key
    vocab, hidden = lm_head_VH.shape
    row = {"gpu": gpu, "dtype": dtype, "vocab": vocab, "hidden": hidden, "rows": rows, "triton": triton}
    row |= {"torch": torch.__version__, "milliseconds": times[best], "tiling": asdict(best)}
    path = winners_path(gpu)
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    with locked_in_turn(path):
        stored = sorted([*(other for other in _rows(path) if _row_key(other) != key), row], key=_row_key)
        atomic_write_text(path, json.dumps(stored, indent=1) + "\n")
    read_winners.cache_clear()
    return path


def winners_path(gpu: str) -> Path:
    folder = os.environ.get(FOLDER)
    return (Path(folder) if folder else RESULTS) / f"tiling-{re.sub('[^a-z0-9]+', '-', gpu.lower())}.json"


@cache
def read_winners(path: Path) -> dict[tuple[str, ...], Tiling]:
    """Return the file's tilings by key; none if there is no file. Raises ValueError for any other content.

    Tilings of the persistent kernel, which earlier versions had, are left out."""
    try:
        chosen = {_row_key(row): dict(row["tiling"]) for row in _rows(path)}
        return {key: Tiling(**tiling) for key, tiling in chosen.items() if not tiling.pop("persistent", False)}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a list of tilings as {AUTOTUNE}=1 stores it ({error}); delete it") from None


def _rows(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    return rows


def _row_key(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in ("gpu", "dtype", "vocab", "hidden", "triton"))


def _key(lm_head_VH: Tensor) -> tuple[str, ...]:
    columns, width = lm_head_VH.shape
    dtype = str(lm_head_VH.dtype).removeprefix("torch.")
    return (torch.cuda.get_device_name(lm_head_VH.device), dtype, str(columns), str(width), _triton_version())


@cache
def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"
