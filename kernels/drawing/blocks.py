"""Drawing on a CPU: a few rows at a time, and noise for those columns alone that can still win.

    score[v] = z[v] + g[v],    g <= LARGEST_NOISE,    so v is out where z[v] + LARGEST_NOISE < score[largest z's v]

The token has the bits of the formula computed everywhere (`draw_dense` of kernels/sampling.py): scores are the same
float32 sums, of equal ones the lowest id wins, and the bound is drawn wider than any rounding. Of a trained model's
151,936 columns about one in a thousand is left; where many are, all get their noise.

Over [B, V] a pass costs what memory costs, so all but the first work on a block that stays in the cache. NumPy does
what it does faster (unsigned shifts, argmax); logarithms, exponentials and sums are torch's, for their bits.

Axes: B sequences that draw a token, V vocabulary, E columns of several rows that can still win (docs/notation.md).
"""

import threading
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thresher.kernels.drawing.noise import (
    LARGEST_NOISE,
    HashBuffers,
    Keys,
    all_token_words,
    host_keys,
    minus_noise,
    minus_noise_at,
)
from thresher.kernels.drawing.rules import DrawRules, cutoffs

# Logits in a block, which is at least a row; its scratch takes three times as much. On a Xeon with 2 MiB of L2, one
# thread, 128 x 757 took .61 ms at 2^16 (two blocks), .48 at 2^17, .50 at 2^18; a row of 151,936 cut up took longer.
BLOCK = 1 << 17
# Where a vocabulary is narrow, most columns are in the race: of the demo's 757 a quarter, and the search for them took
# as long as the noise of all.
PRUNED_FROM = 4096
# A block with more of its columns than this in the race computes the noise of all: a lone column costs several times
# what it costs in a row.
PRUNED_SHARE = 1 / 8
# By how much a bound is wider than arithmetic has it, for other libraries' logarithms; and per score, for its rounding.
MARGIN, MARGIN_PER_SCORE = 1e-3, 2.0**-21

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class _Scratch:
    """Memory for a block: its z, one pass's result, the noise."""

    def __init__(self, rows: int, width: int) -> None:
        self.shape = rows, width
        with torch.inference_mode(False):  # or it could be used in no other mode
            self.z_BV, self.work_BV, noise_BV = torch.empty((3, rows, width))
            self.hashed = HashBuffers(noise_BV, self.work_BV)
        self.open_BV = np.empty((rows, width), np.bool_)


class _Kept(threading.local):
    """A thread's last scratch: making one costs a tenth of a small draw."""

    scratch: _Scratch | None = None

    def get(self, rows: int, width: int) -> _Scratch:
        if self.scratch is None or self.scratch.shape != (rows, width):
            self.scratch = _Scratch(rows, width)
        return self.scratch


_kept = _Kept()


@dataclass(slots=True)
class _Draws:
    """What has been drawn, and what is still in the race."""

    keys: Keys
    floor_B: Floats | None  # z below which a column cannot win; None: not looked for
    ids_B: Ids
    rows: list[Ids] = field(default_factory=list)
    columns: list[Ids] = field(default_factory=list)
    z: list[Floats] = field(default_factory=list)

    def add(self, z_BV: Tensor, part: slice, scratch: _Scratch) -> None:
        """Draw a block's tokens, or note which of its columns can win."""
        width = z_BV.shape[1]
        if self.floor_B is not None:
            open_BV = np.greater_equal(z_BV.numpy(), self.floor_B[part, None], out=scratch.open_BV)
            if np.count_nonzero(open_BV) <= PRUNED_SHARE * open_BV.size:
                rows_E, columns_E = np.divmod(np.flatnonzero(open_BV), width)
                self.z.append(z_BV.numpy()[rows_E, columns_E])
                self.rows.append(rows_E + part.start)
                self.columns.append(columns_E)
                return
        low_B1, high_B1 = self.keys.low_B[part, None], self.keys.high_B[part, None]
        minus_g_BV = minus_noise(low_B1, high_B1, all_token_words(width), scratch.hashed)
        self.ids_B[part] = torch.sub(z_BV, minus_g_BV, out=minus_g_BV).numpy().argmax(1)

    def finish(self) -> Ids:
        """Draw from what is left, where each row has at least the column of its largest logit; all ids."""
        if not self.rows:
            return self.ids_B
        rows_E, columns_E = np.concatenate(self.rows), np.concatenate(self.columns)
        scores_E = np.concatenate(self.z) - minus_noise_at(self.keys, rows_E, columns_E)
        first = np.flatnonzero(np.diff(rows_E, prepend=-1))
        best_E = np.repeat(np.maximum.reduceat(scores_E, first), np.diff(first, append=len(rows_E)))
        winners = np.flatnonzero(scores_E == best_E)[::-1]  # of those of one row, the lowest id is written last
        self.ids_B[rows_E[winners]] = columns_E[winners]
        return self.ids_B


def _row_sums(x_BV: Tensor) -> Tensor:
    """[B], each with the bits that it has in any company: torch shares out a lone long row among its threads."""
    return x_BV.sum(1) if len(x_BV) > 1 else x_BV.expand(2, -1).sum(1)[:1]


def _cutoffs(logits_BV: Tensor, divisor_B: Tensor | None, rules: DrawRules) -> Tensor:
    """[B]: -inf where a row has no filter; only those that have one are sorted."""
    cut_B = torch.full((len(logits_BV),), -torch.inf)
    index_B = torch.from_numpy(np.flatnonzero(rules.filtered_B.numpy()))
    if len(index_B):
        z_BV = logits_BV[index_B]
        cut_B[index_B] = cutoffs(z_BV if divisor_B is None else z_BV / divisor_B[index_B, None], rules.take(index_B))
    return cut_B


def _floors(keys: Keys, top_ids_B: Ids, top_B: Floats) -> Floats:
    """z [B] below which no column can win against the column of the largest logit."""
    score_B = (top_B - minus_noise_at(keys, np.arange(len(top_ids_B)), top_ids_B)).astype(np.float64)
    floor_B: Floats
    floor_B = (score_B - LARGEST_NOISE - MARGIN - MARGIN_PER_SCORE * np.abs(score_B)).astype(np.float32)
    return floor_B


def draw_in_blocks(
    logits_BV: Tensor, seeds_B: Tensor, positions_B: Tensor, rules: DrawRules
) -> tuple[Tensor, Tensor] | None:
    """`sample` of kernels/sampling.py for float32 on a CPU; None where a row's largest logit is not finite."""
    count, width = logits_BV.shape
    every, divisor_B = np.arange(count), rules.divisor_B

    def chosen(ids_B: Ids) -> Floats:
        z_B: Floats = logits_BV.numpy()[every, ids_B]
        return z_B if divisor_B is None else (torch.from_numpy(z_B) / divisor_B).numpy()

    top_ids_B = logits_BV.numpy().argmax(1)  # torch's takes 20 times as long
    top_B = chosen(top_ids_B)
    if not np.isfinite(top_B).all():
        return None
    draws, cut_B = None, None
    if rules.temperature != 0:
        keys = host_keys(seeds_B, positions_B)
        draws = _Draws(keys, _floors(keys, top_ids_B, top_B) if width >= PRUNED_FROM else None, top_ids_B.copy())
        cut_B = _cutoffs(logits_BV, divisor_B, rules) if rules.filtered else None
    rows = max(min(BLOCK // width, count), 1)
    scratch = _kept.get(rows, width)
    sums_B, top_B1 = np.empty(count, np.float32), torch.from_numpy(top_B)[:, None]
    for start in range(0, count, rows):
        part = slice(start, start + rows)
        z_BV = logits_BV[part]
        if len(z_BV) < rows:
            scratch = _Scratch(len(z_BV), width)
        if divisor_B is not None:
            z_BV = torch.div(z_BV, divisor_B[part, None], out=scratch.z_BV)
        if cut_B is not None:
            z_BV = scratch.z_BV.copy_(z_BV).masked_fill_(z_BV < cut_B[part, None], -torch.inf)
        torch.sub(z_BV, top_B1[part], out=scratch.work_BV)
        sums_B[part] = _row_sums(scratch.work_BV.exp_()).numpy()
        if draws is not None:
            draws.add(z_BV, part, scratch)
    ids_B = top_ids_B if draws is None else draws.finish()
    if rules.temperature is None:
        ids_B = np.where(rules.temperature_B.numpy() > 0, ids_B, top_ids_B)
    log_sums_B = torch.from_numpy(sums_B).log_().numpy() + top_B
    return torch.from_numpy(ids_B), torch.from_numpy(chosen(ids_B) - log_sums_B)
