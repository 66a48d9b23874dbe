"""The head's kernels put together: what a chunk of rows goes through, its workspace, and the timing of tilings.

A chunk: the head's tiles (head_triton.py, or persistent_triton.py), what they left brought together (reduce_triton.py),
and, where exponentials are stored, the tiles of rows whose offset was guessed wrong once more.

Axes: R rows of a chunk, M a chunk filled up, V vocabulary (columns that exist), H hidden width (docs/notation.md).
"""

import math
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from thresher.kernels.autotune_cache import FOLDER, candidates, record, tiling_for
from thresher.kernels.head_tiling import Tiling, again_tiling
from thresher.kernels.head_triton import launch_again, launch_head
from thresher.kernels.operands import stored_columns
from thresher.kernels.persistent_triton import launch_persistent_head
from thresher.kernels.reduce_triton import launch_reduce

LOG2_E = 1 / math.log(2.0)


@dataclass(frozen=True, slots=True, eq=False)
class Exps:
    """Exponentials of a chunk, which the loss needs beside the log-probs: p = exps / e^log_normaliser, row by row."""

    exps_RV: Tensor  # the operands' dtype; all stored columns, those from V on hold 0
    log_normaliser_R: Tensor  # fp32


class TritonHead:
    """The kernels of one call with their workspace, for chunks of up to `rows` rows.

    lm_head_VH: [V, H] bf16 or fp32, the columns that exist, any strides.
    """

    def __init__(self, lm_head_VH: Tensor, temperature: float, rows: int) -> None:
        self.lm_head_VH = lm_head_VH
        self.scale = LOG2_E / temperature
        self.tiling = tiling_for(lm_head_VH)
        self.column_tiles = triton.cdiv(lm_head_VH.shape[0], self.tiling.columns)
        self.parts = lm_head_VH.new_empty(3 * self.column_tiles * rows, dtype=torch.float32)
        self.rows, self.again_rows = rows, again_tiling(lm_head_VH.dtype).rows
        self.exps_stride = stored_columns(lm_head_VH.shape[0])
        self.exps_MV: Tensor | None = None

    def logprobs(self, rows_RH: Tensor, targets_R: Tensor) -> tuple[Tensor, Tensor]:
        """(log-prob of the target, entropy) of each row, fp32. rows_RH: dense. targets_R: int64."""
        logprobs_R, entropy_R, _ = self._run(rows_RH, targets_R, None)
        return logprobs_R, entropy_R

    def exps(self, rows_RH: Tensor, targets_R: Tensor, guess_R: Tensor | None) -> tuple[Tensor, Tensor, Exps]:
        """`logprobs`, and exps. guess_R: about what the log-probs will be, None for no idea; it decides no result
        beyond its last bits. The exps are valid until the next chunk."""
        if self.exps_MV is None:
            self.exps_MV = self.lm_head_VH.new_empty((self.rows, self.exps_stride))
        z_target_R = torch.linalg.vecdot(rows_RH, self.lm_head_VH.index_select(0, targets_R)).float() * self.scale
        offsets_R = z_target_R if guess_R is None else z_target_R - guess_R * LOG2_E
        logprobs_R, entropy_R, exps = self._run(rows_RH, targets_R, offsets_R)
        assert exps is not None
        return logprobs_R, entropy_R, exps

    def _run(self, rows_RH: Tensor, targets_R: Tensor, offsets_R: Tensor | None) -> tuple[Tensor, Tensor, Exps | None]:
        count, store = rows_RH.shape[0], offsets_R is not None
        logprobs_R, entropy_R, below_target_R, log_normaliser_R = self.parts.new_empty((4, count))
        again = torch.zeros(triton.cdiv(count, self.again_rows), dtype=torch.int32, device=rows_RH.device)
        # Where nothing is stored the kernels read neither offsets nor exps; any pointer does.
        offsets_R = log_normaliser_R if offsets_R is None else offsets_R
        exps_RV = rows_RH if self.exps_MV is None else self.exps_MV[:count]
        launch = launch_persistent_head if self.tiling.persistent else launch_head
        launch(
            rows_RH,
            self.lm_head_VH,
            targets_R,
            offsets_R,
            below_target_R,
            self.parts,
            exps_RV,
            self.exps_stride,
            store,
            self.scale,
            self.tiling,
        )
        launch_reduce(
            self.parts,
            targets_R,
            below_target_R,
            offsets_R,
            again,
            logprobs_R,
            entropy_R,
            log_normaliser_R,
            self.column_tiles,
            store,
            self.tiling.columns,
            self.again_rows,
        )
        if not store:
            return logprobs_R, entropy_R, None
        # Nearly always a launch that finds nothing to do; asking the GPU whether there is would cost more.
        launch_again(rows_RH, self.lm_head_VH, again, offsets_R, exps_RV, self.scale)
        return logprobs_R, entropy_R, Exps(exps_RV, log_normaliser_R)


def measure_tilings(lm_head_VH: Tensor, rows: int) -> None:
    """Time the candidates for this head with chunks of `rows` rows, print what each takes, and store the fastest."""
    columns, width = lm_head_VH.shape
    times = {tiling: _time(lm_head_VH, rows, tiling) for tiling in candidates(lm_head_VH)}
    for tiling, milliseconds in times.items():
        print(f"head kernel, {rows} rows, head [{columns}, {width}]: {milliseconds:8.3f} ms  {tiling}", flush=True)
    try:
        print(f"stored the fastest in {record(lm_head_VH, rows, times)}", flush=True)
    except OSError as error:  # a folder of the system's, for one: the call itself has nothing to fear
        print(f"the fastest holds for this process only ({error}); {FOLDER} names a folder to store it in", flush=True)


def _time(lm_head_VH: Tensor, rows: int, tiling: Tiling) -> float:
    """Median milliseconds of one launch that stores, on random rows; infinity where the tiling does not fit."""
    columns, width = lm_head_VH.shape
    rows_RH = torch.randn(rows, width, device=lm_head_VH.device).to(lm_head_VH.dtype)
    targets_R = torch.randint(columns, (rows,), device=lm_head_VH.device)
    offsets_R, below_target_R = rows_RH.new_zeros((2, rows), dtype=torch.float32)
    parts = rows_RH.new_empty(3 * triton.cdiv(columns, tiling.columns) * rows, dtype=torch.float32)
    exps_RV = rows_RH.new_empty((rows, stored_columns(columns)))
    launch = launch_persistent_head if tiling.persistent else launch_head

    def call() -> None:
        stride = exps_RV.stride(0)
        launch(rows_RH, lm_head_VH, targets_R, offsets_R, below_target_R, parts, exps_RV, stride, True, LOG2_E, tiling)

    try:
        return float(triton.testing.do_bench(call, warmup=5, rep=50, return_mode="median"))
    except (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError):
        return math.inf
