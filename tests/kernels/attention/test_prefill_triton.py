"""Tests of prefill over a KV cache in Triton: results against float64 for any runs of new rows in any place.

All memory that must not be read is NaN (cached_cases.py).
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cached_cases import DEVICE, CachedCase, ints
from interpreter import bfloat16_to_nearest

pytest.importorskip("triton")

from thresher.kernels.attention import decode_triton, prefill_triton
from thresher.kernels.attention.paged_cuda import decode_attention, prefill_attention
from thresher.kernels.attention.rows import PrefillRows

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # NumPy, on masked lanes


@pytest.mark.parametrize("per_kv", range(1, 9))
@pytest.mark.parametrize("slots", [16, 64])
@pytest.mark.fast_cases(5)
def test_runs_are_right_for_any_number_of_heads(per_kv: int, slots: int, poisoned: None) -> None:
    """Runs are a prompt, a passage after history, and an empty one; D is 64 or 128. Rows of no sequence are zeros."""
    case = CachedCase((2 * per_kv, 2, 64 if per_kv % 2 else 128), slots, [65, 9, 140])
    q_TND, rows, judged = case.prefill([65, 0, 20])
    judged.holds(prefill_attention(q_TND, *case.caches(), rows))


@pytest.mark.parametrize(
    ("lengths", "counts"),
    [
        ([1, 15, 16, 17], [1, 15, 16, 17]),
        ([63, 64, 65, 130], [63, 64, 65, 130]),  # more than a tile
        ([64, 65, 128, 129], [1, 1, 1, 1]),
        ([127, 128, 129, 200], [64, 63, 65, 5]),
    ],
    ids=str,
)
def test_runs_are_right_at_any_length(lengths: list[int], counts: list[int], poisoned: None) -> None:
    case = CachedCase((3, 1, 24), 64, lengths)
    q_TND, rows, judged = case.prefill(counts)
    judged.holds(prefill_attention(q_TND, *case.caches(), rows))


@pytest.mark.parametrize("tiling", [prefill_triton.NARROW, decode_triton.FLOAT32], ids=["sm_80", "float32"])
def test_the_tilings_of_other_gpus_and_types_are_right(
    tiling: decode_triton.KeyTiling, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE == "cuda" and tiling == prefill_triton.NARROW:
        pytest.skip("compiled, float32 spills in a tiling of bfloat16")
    monkeypatch.setattr(prefill_triton, "prefill_tiling", lambda *_: tiling)
    case = CachedCase((12, 2, 128), 16, [65, 100])
    q_TND, rows, judged = case.prefill([65, 4])
    judged.holds(prefill_attention(q_TND, *case.caches(), rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_of_256(dtype: torch.dtype) -> None:
    """Qwen3.5's, whose tiling is another one. On a GPU only bfloat16 has it."""
    case = CachedCase((8, 2, 256), 64, [70, 130]).rounded()
    q_TND, rows, judged = case.prefill([65, 20])
    with bfloat16_to_nearest():
        found = prefill_attention(q_TND.to(dtype), *(x.to(dtype) for x in case.caches()), rows)
    judged.holds(found) if dtype == torch.float32 else judged.holds_in_bfloat16(found)


def test_tilings_follow_the_gpu_and_the_type() -> None:
    assert prefill_triton.prefill_tiling(False, 256, 90) == prefill_triton.prefill_tiling(False, 256, 80)
    assert prefill_triton.prefill_tiling(False, 128, 90) == prefill_triton.WIDE
    assert prefill_triton.prefill_tiling(False, 64, 80) == prefill_triton.WIDE
    assert prefill_triton.prefill_tiling(False, 128, 80) == prefill_triton.NARROW
    assert prefill_triton.prefill_tiling(True, 64, 90) == decode_triton.FLOAT32


def test_longest_may_be_more_than_any_run_and_queries_a_view() -> None:
    case = CachedCase((4, 2, 32), 16, [40, 33])
    q_TND, rows, judged = case.prefill([40, 3])
    wide = torch.full((len(q_TND), 9, 32), torch.nan, device=DEVICE)
    wide[:, 3:7] = q_TND
    judged.holds(prefill_attention(wide[:, 3:7], *case.caches(), replace(rows, longest=100)))


def test_filling_reads_nothing(poisoned: None) -> None:
    q_TND = torch.full((5, 4, 32), torch.nan, device=DEVICE)
    cache = torch.full((1, 2, 16, 32), torch.nan, device=DEVICE)
    table_NP = torch.zeros(2, 3, dtype=torch.int32, device=DEVICE)
    rows = PrefillRows(table_NP, ints([0, 1000]), ints([1000, 0]), ints([0, 0]), 5)
    assert torch.equal(prefill_attention(q_TND, cache, cache, rows), torch.zeros_like(q_TND))


def test_drafts_are_the_same_rows_as_a_decoding_step_gives() -> None:
    """Both kernels are within their error budgets on the same rows."""
    case = CachedCase((14, 2, 64), 64, [70, 129])
    q_BQND, rows, judged = case.decode([3, 3], 3)
    judged.holds(decode_attention(q_BQND, *case.caches(), rows, splits=2))
    q_TND, runs, judged = case.prefill([3, 3])
    judged.holds(prefill_attention(q_TND, *case.caches(), runs))


def small_launches() -> dict[str, Callable[[], None]]:
    def check(heads: tuple[int, int, int], lengths: list[int], counts: list[int]) -> None:
        case = CachedCase(heads, 16, lengths)
        q_TND, rows, judged = case.prefill(counts)
        judged.holds(prefill_attention(q_TND, *case.caches(), rows))

    return {
        "ragged runs": lambda: check((3, 1, 24), [20, 9], [20, 3]),
        "two tiles": lambda: check((2, 2, 32), [70, 65], [70, 0]),
    }
