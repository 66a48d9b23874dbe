"""Sampling by the Gumbel-max trick, with noise that is a function and not a stream.

    token = argmax_v ( z[v] + g(seed, position, v) )        z = logits / temperature, over the v that the filters keep
    g = -log(-log u),  u uniform in (0, 1)

`u` is a hash of (seed, position, token) (noise.py), so a sample depends on nothing else: neither on its batch nor on
earlier draws. It has 23 bits, so tokens of a probability below 1e-7 are drawn too rarely (noise.py), though their
log-probability is that of the softmax. A filter does not change the noise of the tokens that it keeps. Temperature 0 is
greedy.

    sample_from_head   hidden states -> tokens. On CUDA, rows without filters are drawn inside the head's matmul
                       (sampling_triton.py), and [B, V] is never stored
    sample             logits -> tokens. A filter needs a whole row
    draw_dense         the reference: the noise of every column; any device
    draw_in_blocks     the same bits on a CPU, in fewer passes

Axes: B sequences that draw a token, M the same padded, H hidden, V vocabulary, E columns of several rows that can still
win (docs/notation.md).
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from thresher.kernels.noise import (
    LARGEST_NOISE,
    HashBuffers,
    Keys,
    all_token_words,
    host_keys,
    minus_gumbel_,
    minus_noise,
    minus_noise_at,
    uniform_noise,
)
from thresher.kernels.operands import (
    TINY,
    compute_dtype,
    divides_in_float32,
    fill_rows,
    logits_product,
    on_device,
    resolve_backend,
)

__all__ = ["SamplingTensors", "head_logits", "head_to_multiply", "sample", "sample_from_head"]
FUSED_WIDTH = 16  # the hidden width has to be a multiple of it, for whole steps of a GPU's matrix instructions
_DTYPES = (torch.float32, torch.int64, torch.float32, torch.float32)


@dataclass(frozen=True, slots=True, eq=False)
class SamplingTensors:
    """Sampling parameters: one entry per row, on the logits' device, and what holds for all rows, on the host.

    top-k keeps the k largest logits; top-p the fewest of these, largest first, that have p of their probability; min-p
    those with at least min_p times the largest probability. The largest logit is always kept.
    """

    temperature_B: Tensor  # float32; 0: greedy
    top_k_B: Tensor  # int64; 0: off
    top_p_B: Tensor  # float32; 1: off
    min_p_B: Tensor  # float32; 0: off
    temperature: float | None  # of every row; None: they may differ
    filtered: bool  # whether any row may have a filter

    @classmethod
    def uniform(cls, temperature: float, count: int, device: torch.device | str = "cpu") -> "SamplingTensors":
        """Make `count` rows of one temperature, without filters."""
        _check_values(np.array([temperature]), np.zeros(1), np.ones(1), np.zeros(1))
        temperature_B, top_k_B, top_p_B, min_p_B = (
            torch.full((1,), value, dtype=dtype, device=device).expand(count)
            for value, dtype in zip((temperature, 0, 1, 0), _DTYPES, strict=True)
        )
        return cls(temperature_B, top_k_B, top_p_B, min_p_B, temperature=float(temperature), filtered=False)

    @classmethod
    def of(
        cls,
        temperature_B: Tensor,
        top_k_B: Tensor,
        top_p_B: Tensor,
        min_p_B: Tensor,
        host: Sequence[npt.NDArray[Any]] | None = None,
    ) -> "SamplingTensors":
        """Make rows that differ.

        host: the same four as arrays, which are checked instead of the tensors; needed unless these are on a CPU."""
        tensors = (temperature_B, top_k_B, top_p_B, min_p_B)
        if tuple(x.dtype for x in tensors) != _DTYPES:
            raise ValueError(f"rules are {list(_DTYPES)}, not {[x.dtype for x in tensors]}")
        if temperature_B.dim() != 1 or len({(x.shape, x.device) for x in tensors}) != 1:
            shapes = [f"{tuple(x.shape)} on {x.device}" for x in tensors]
            raise ValueError(f"rules are four vectors of one length on one device, not {shapes}")
        if host is None:
            if temperature_B.device.type != "cpu":
                raise ValueError(f"rules on {temperature_B.device} need `host`, the same four as arrays")
            host = [x.numpy() for x in tensors]
        if [x.shape for x in host] != [tuple(temperature_B.shape)] * 4:
            raise ValueError(f"`host` has shapes {[x.shape for x in host]}, the rules {tuple(temperature_B.shape)}")
        temperature, top_k, top_p, min_p = host
        _check_values(temperature, top_k, top_p, min_p)
        alike = len(temperature) > 0 and bool((temperature == temperature[0]).all())
        filtered = bool((top_k > 0).any() or (top_p < 1).any() or (min_p > 0).any())
        one = float(temperature[0]) if alike else None
        return cls(temperature_B, top_k_B, top_p_B, min_p_B, temperature=one, filtered=filtered)

    def __len__(self) -> int:
        return len(self.temperature_B)

    def take(self, index_B: Tensor) -> "SamplingTensors":
        """Return the rules of these rows (int64); a row may occur more than once."""
        tensors = (self.temperature_B, self.top_k_B, self.top_p_B, self.min_p_B)
        alike = self.temperature is not None and not self.filtered  # then nothing has to be gathered
        temperature_B, top_k_B, top_p_B, min_p_B = (
            x[:1].expand(len(index_B)) if alike else x.index_select(0, index_B) for x in tensors
        )
        return SamplingTensors(temperature_B, top_k_B, top_p_B, min_p_B, self.temperature, self.filtered)

    @property
    def divisor_B(self) -> Tensor | None:
        """Return the temperature, with 1 for greedy rows; None if no row's logits are divided."""
        if self.temperature is not None:
            return None if self.temperature in (0.0, 1.0) else self.temperature_B
        return torch.where(self.temperature_B > 0, self.temperature_B, 1.0)

    @property
    def filtered_B(self) -> Tensor:
        """Return which rows have a filter with an effect. Greedy rows have none: filters keep the largest logit."""
        on_B = (self.top_k_B > 0) | (self.top_p_B < 1) | (self.min_p_B > 0)
        return on_B & (self.temperature_B > 0)


def _check_values(
    temperature: npt.NDArray[Any], top_k: npt.NDArray[Any], top_p: npt.NDArray[Any], min_p: npt.NDArray[Any]
) -> None:
    divides = (temperature == 0) | divides_in_float32(temperature)
    for name, values, right, wanted in (
        ("temperature", temperature, divides, "0, or a normal float32 number whose reciprocal is one"),
        ("top_k", top_k, top_k >= 0, "0 or more"),
        ("top_p", top_p, (top_p >= TINY) & (top_p <= 1), "above 0 in float32 and at most 1"),
        ("min_p", min_p, (min_p >= 0) & (min_p <= 1), "from 0 to 1"),
    ):
        if not right.all():
            raise ValueError(f"{name} is {values[~right][0]}; it has to be {wanted}")


def sample_from_head(
    hidden_BH: Tensor,
    lm_head_VH: Tensor,
    seeds_B: Tensor,
    positions_B: Tensor,
    rules: SamplingTensors,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Draw one token per row from its hidden state: ids [B] int64, log-probabilities [B] float32, as from `sample`.

    lm_head_VH: [V, H], a row per token id that may be drawn. seeds_B, positions_B: as in `sample`. backend: "torch",
    `sample(head_logits(..))`; "triton", on CUDA or in its interpreter, bfloat16 or float32; "auto", Triton on CUDA if
    it is installed and supports the head (those dtypes, H a multiple of 16, dense rows). Rows with filters are always
    drawn from stored logits. No host sync; launches and memory depend only on shapes and on the host's fields of
    `rules`, so a CUDA graph can capture it.
    """
    if not rules.filtered and _draws_fused(backend, hidden_BH, lm_head_VH):
        from thresher.kernels.sampling_triton import draw_fused

        with on_device(hidden_BH):
            return draw_fused(hidden_BH, lm_head_VH, seeds_B, positions_B, rules.temperature_B)
    return sample(head_logits(hidden_BH, lm_head_VH), seeds_B, positions_B, rules)


def _draws_fused(backend: str, hidden_BH: Tensor, lm_head_VH: Tensor) -> bool:
    if backend != "auto":
        return resolve_backend(backend, hidden_BH) == "triton"
    dtype, width = hidden_BH.dtype, hidden_BH.shape[-1]
    suits = dtype in (torch.bfloat16, torch.float32) and width % FUSED_WIDTH == 0 and lm_head_VH.stride(-1) == 1
    return hidden_BH.is_cuda and suits and find_spec("triton") is not None


def head_to_multiply(lm_head_VH: Tensor) -> Tensor:
    """Return the head as `head_logits` multiplies it: on a CPU, a low-precision head in float32.

    A caller that draws often with the same weights copies it once. Otherwise each draw copies it, which took as long as
    the product with 64 rows."""
    return lm_head_VH if lm_head_VH.is_cuda else lm_head_VH.to(compute_dtype(lm_head_VH))


def head_logits(hidden_BH: Tensor, lm_head_VH: Tensor) -> Tensor:
    """Compute the logits [B, V] of the rows that draw a token, float32 (float64 for float64).

    They have the bits of the log-prob's torch backend; its Triton backend may add in another order, in float32.
    lm_head_VH: [V, H], a row per token id that may be drawn.
    """
    rows_MH = fill_rows(hidden_BH, lm_head_VH)
    logits_MV = rows_MH.new_empty((len(rows_MH), len(lm_head_VH)), dtype=compute_dtype(lm_head_VH))
    logits_product(rows_MH, lm_head_VH, logits_MV)
    return logits_MV[: len(hidden_BH)]


def sample(logits_BV: Tensor, seeds_B: Tensor, positions_B: Tensor, rules: SamplingTensors) -> tuple[Tensor, Tensor]:
    """Draw one token per row from logits [B, V] float32, which are only of token ids that may be drawn.

    seeds_B, positions_B: int64, a sequence's seed and the index in it of the token to be drawn, the key of the noise.
    Returns ids [B] int64 and their log-probabilities [B] float32 under the distribution drawn from: softmax of
    logits / temperature over the columns that the row's filters keep. A greedy row takes its largest logit, which no
    filter removes; its log-probability is computed over all columns at temperature 1. Of equal scores the lowest id
    wins. float64 logits, for tests, give float64 log-probabilities.
    """
    _check(logits_BV, seeds_B, positions_B, rules)
    logits_BV = logits_BV.detach()
    if logits_BV.device.type == "cpu" and logits_BV.dtype == torch.float32:
        drawn = draw_in_blocks(logits_BV, seeds_B, positions_B, rules)
        if drawn is not None:
            return drawn
    return draw_dense(logits_BV, seeds_B, positions_B, rules)


def draw_dense(z_BV: Tensor, seeds_B: Tensor, positions_B: Tensor, rules: SamplingTensors) -> tuple[Tensor, Tensor]:
    """Draw as `sample` does, computing the noise of every column, without a host sync."""
    divisor_B = rules.divisor_B
    if divisor_B is not None:
        z_BV = z_BV / divisor_B[:, None].to(z_BV.dtype)
    if rules.temperature == 0:
        ids_B = z_BV.argmax(1)
    else:
        if rules.filtered:
            cut_B = torch.where(rules.filtered_B, cutoffs(z_BV, rules), -torch.inf)
            z_BV = z_BV.masked_fill(z_BV < cut_B[:, None], -torch.inf)
        minus_g_BV = minus_gumbel_(uniform_noise(seeds_B, positions_B, z_BV.shape[1]))
        if rules.temperature is None:
            minus_g_BV.mul_(rules.temperature_B[:, None] > 0)
        ids_B = torch.sub(z_BV, minus_g_BV, out=minus_g_BV).argmax(1)
    return ids_B, z_BV.gather(1, ids_B[:, None])[:, 0] - z_BV.logsumexp(1)


def _check(logits_BV: Tensor, seeds_B: Tensor, positions_B: Tensor, rules: SamplingTensors) -> None:
    shape, dtype, device = logits_BV.shape, logits_BV.dtype, logits_BV.device
    if len(shape) != 2 or shape[1] == 0 or dtype not in (torch.float32, torch.float64):
        raise ValueError(
            f"logits are [B, V] of float32 or float64, with a column at least, not {tuple(shape)} of {dtype}"
        )
    for name, vector in (("seeds", seeds_B), ("positions", positions_B)):
        if vector.shape != shape[:1] or vector.dtype != torch.int64 or vector.device != device:
            found = f"{tuple(vector.shape)} of {vector.dtype} on {vector.device}"
            raise ValueError(f"{name} are ({shape[0]},) of torch.int64 on {device}, as the logits, not {found}")
    if len(rules) != shape[0] or rules.temperature_B.device != device:
        found = f"{len(rules)} on {rules.temperature_B.device}"
        raise ValueError(f"rules are for {shape[0]} rows on {device}, as the logits, not for {found}")


def cutoffs(z_BV: Tensor, rules: SamplingTensors) -> Tensor:
    """Return the smallest logit that each row's filters keep, [B], an element of the row, so comparisons are exact.

    z_BV: logits / temperature."""
    if z_BV.device.type == "cpu":  # sorting a row of 151,936 takes torch 20 ms and NumPy .4
        sorted_BV = torch.from_numpy(np.sort(z_BV.numpy(), axis=1)).flip(1)
    else:
        sorted_BV = z_BV.sort(dim=1, descending=True).values
    columns = z_BV.shape[1]
    k_B = torch.where(rules.top_k_B > 0, rules.top_k_B, columns).clamp(max=columns)
    kept_BV = sorted_BV >= sorted_BV.gather(1, k_B[:, None] - 1)
    weight_BV = (sorted_BV.double() - sorted_BV[:, :1].double()).exp_()  # p / the largest p
    mass_BV = (weight_BV * kept_BV).cumsum(1)
    top_p_B1 = rules.top_p_B[:, None].double()
    # A column is needed as long as those before it have not reached p; the first always is.
    kept_BV[:, 1:] &= (mass_BV[:, :-1] < top_p_B1 * mass_BV[:, -1:]) | (top_p_B1 == 1)
    kept_BV &= weight_BV >= rules.min_p_B[:, None].double()
    last_B = kept_BV.sum(1).clamp_(min=1) - 1
    return sorted_BV.gather(1, last_B[:, None])[:, 0]


# --- On a CPU: a few rows at a time, and noise only for the columns that can still win
#
#     score[v] = z[v] + g[v],    g <= LARGEST_NOISE,    so v is out where z[v] + LARGEST_NOISE < score[largest z's v]
#
# The token has the bits of `draw_dense`: scores are the same float32 sums, of equal ones the lowest id wins, and the
# bound is wider than any rounding. Of a trained model's 151,936 columns about one in a thousand remains. If many do,
# the noise of all is computed. A pass over [B, V] is limited by memory bandwidth, so all passes but the first work on a
# block that stays in the cache. NumPy is used where it is faster (unsigned shifts, argmax), torch for logarithms,
# exponentials and sums, because of their bits.

# Logits in a block, which is at least one row; its scratch takes three times as much. On a Xeon with 2 MiB of L2, one
# thread, 128 x 757 took .61 ms at 2^16 (two blocks), .48 at 2^17, .50 at 2^18; dividing a row of 151,936 took longer.
BLOCK = 1 << 17
# In a narrow vocabulary, most columns can win: of the demo's 757 a quarter, and the search for them took as long as the
# noise of all.
PRUNED_FROM = 4096
# A block in which more than this share of the columns can win computes the noise of all: a single column costs several
# times as much as within a row.
PRUNED_SHARE = 1 / 8
# Added to the exact bound, because other libraries' logarithms differ; and per score, because it is rounded.
MARGIN, MARGIN_PER_SCORE = 1e-3, 2.0**-21

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class _Scratch:
    """Buffers of a block: its z, one pass's result, the noise."""

    def __init__(self, rows: int, width: int) -> None:
        self.shape = rows, width
        with torch.inference_mode(False):  # a buffer made in inference mode could not be used in another mode
            self.z_BV, self.work_BV, noise_BV = torch.empty((3, rows, width))
            self.hashed = HashBuffers(noise_BV, self.work_BV)
        self.open_BV = np.empty((rows, width), np.bool_)


class _Kept(threading.local):
    """A thread's last scratch; allocating one costs a tenth of a small draw."""

    scratch: _Scratch | None = None

    def get(self, rows: int, width: int) -> _Scratch:
        if self.scratch is None or self.scratch.shape != (rows, width):
            self.scratch = _Scratch(rows, width)
        return self.scratch


_kept = _Kept()


@dataclass(slots=True)
class _Draws:
    """Tokens drawn so far, and the columns that can still win."""

    keys: Keys
    floor_B: Floats | None  # z below which a column cannot win; None: columns are not pruned
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
        """Draw from the remaining columns (each row has at least that of its largest logit); return all ids."""
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
    """Return sums [B] whose bits do not depend on the number of rows: torch splits a single long row among threads."""
    return x_BV.sum(1) if len(x_BV) > 1 else x_BV.expand(2, -1).sum(1)[:1]


def _cutoffs(logits_BV: Tensor, divisor_B: Tensor | None, rules: SamplingTensors) -> Tensor:
    """Return the cutoffs [B], -inf for a row without a filter; only rows with one are sorted."""
    cut_B = torch.full((len(logits_BV),), -torch.inf)
    index_B = torch.from_numpy(np.flatnonzero(rules.filtered_B.numpy()))
    if len(index_B):
        z_BV = logits_BV[index_B]
        cut_B[index_B] = cutoffs(z_BV if divisor_B is None else z_BV / divisor_B[index_B, None], rules.take(index_B))
    return cut_B


def _floors(keys: Keys, top_ids_B: Ids, top_B: Floats) -> Floats:
    """Return z [B] below which no column can win against the column of the largest logit."""
    score_B = (top_B - minus_noise_at(keys, np.arange(len(top_ids_B)), top_ids_B)).astype(np.float64)
    floor_B: Floats
    floor_B = (score_B - LARGEST_NOISE - MARGIN - MARGIN_PER_SCORE * np.abs(score_B)).astype(np.float32)
    return floor_B


def draw_in_blocks(
    logits_BV: Tensor, seeds_B: Tensor, positions_B: Tensor, rules: SamplingTensors
) -> tuple[Tensor, Tensor] | None:
    """Draw as `sample` does, for float32 on a CPU; None if a row's largest logit is not finite."""
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
