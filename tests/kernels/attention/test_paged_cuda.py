"""Tests of the torch reference of attention to a KV cache: against the formula and paged_cpu.py, and refusals."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from cached_cases import DEVICE, CachedCase, ints
from torch.utils._python_dispatch import TorchDispatchMode

from thresher.kernels.attention.paged_cpu import CacheShape, QueryRuns, paged_attention, paged_buckets
from thresher.kernels.attention.paged_cuda import decode_attention, prefill_attention, reference_cached_attention
from thresher.kernels.attention.rows import PrefillRows, decode_splits, prefix_pays, prefix_splits

LENGTHS = [1, 16, 17, 63, 64, 65, 130]
GROUPS = [(64, [2, 5]), (64, [3, 6, 4])]
HEADS = (6, 2, 16)


@pytest.mark.parametrize("slots", [16, 64])
def test_the_reference_is_right(slots: int) -> None:
    case = CachedCase(HEADS, slots, LENGTHS)
    caches = case.caches()
    for counts, queries in (([1] * 7, 1), ([1, 2, 0, 5, 3, 5, 4], 5)):
        q_BQND, rows, judged = case.decode(counts, queries)
        judged.holds(reference_cached_attention(q_BQND, *caches, rows))
    q_TND, runs, judged = case.prefill([1, 0, 17, 20, 64, 1, 70])
    judged.holds(reference_cached_attention(q_TND, *caches, runs))


def test_the_reference_with_shared_prefixes_is_right_and_in_float64_exact() -> None:
    lengths = [1, 16, 70, 129, 90, 65, 130]
    case = CachedCase(HEADS, 16, lengths, GROUPS)
    q_BQND, rows, judged = case.decode([1, 2, 2, 0, 1, 1, 2], 2, share=True)
    judged.holds(reference_cached_attention(q_BQND, *case.caches(), rows))
    doubled = reference_cached_attention(q_BQND.double(), *(x.double() for x in case.caches()), rows)
    assert (doubled.cpu() - judged.right).abs().max() < 1e-13


def test_the_reference_agrees_with_paged_attention() -> None:
    """Both compute the same rows of the same cache, each in its own layout."""
    case = CachedCase(HEADS, 16, [40, 65, 16])
    case.k_PKSD.nan_to_num_(7.0), case.v_PKSD.nan_to_num_(7.0)  # paged_cpu.py requires finite numbers
    counts, heads = [3, 65, 1], CacheShape(HEADS[0], HEADS[1], 16)
    q_TND, runs, judged = case.prefill(counts, gap=0)
    start_N, row_N = (x.cpu().numpy().astype(np.int64) for x in (runs.start_N, runs.row_N))
    pieces = QueryRuns(np.arange(3), start_N, np.array(counts), row_N)
    buckets = paged_buckets(case.table_BP.numpy().astype(np.int64), pieces, heads, torch.device("cpu"))
    k_PKDS = case.k_PKSD.transpose(2, 3).contiguous()
    judged.holds(paged_attention(q_TND.cpu(), k_PKDS, case.v_PKSD.contiguous(), buckets))
    judged.holds(reference_cached_attention(q_TND, *case.caches(), runs))


def test_the_reference_asks_the_device_for_no_value() -> None:
    class Refuse(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
            return func(*args, **(kwargs or {}))

    case = CachedCase(HEADS, 16, [70, 64, 90], [(48, [0, 2])])
    q_BQND, rows, _ = case.decode([1, 1, 1], 1, share=True)
    q_TND, runs, _ = case.prefill([3, 0, 9])
    with Refuse():
        reference_cached_attention(q_BQND, *case.caches(), rows)
        reference_cached_attention(q_TND, *case.caches(), runs)
        with pytest.raises(AssertionError):
            q_TND.sum().item()


def test_float64_takes_the_reference() -> None:
    case = CachedCase(HEADS, 16, [20])
    k_PKSD, v_PKSD = (x.double() for x in case.caches())
    q_BQND, rows, _ = case.decode([1], 1)
    expected = reference_cached_attention(q_BQND.double(), k_PKSD, v_PKSD, rows)
    assert torch.equal(decode_attention(q_BQND.double(), k_PKSD, v_PKSD, rows), expected)


def test_what_does_not_go_together_is_refused() -> None:
    case = CachedCase(HEADS, 16, [20, 30], [(16, [0, 1])])
    k, v = case.caches()
    q, rows, _ = case.decode([1, 1], 1, share=True)
    with pytest.raises(ValueError, match="q_BQND, k_PKSD and v_PKSD have shapes"):
        decode_attention(q[0], k, v, rows)
    with pytest.raises(ValueError, match="q_BQND has 9 heads of 16, the cache 2 of 16"):
        decode_attention(torch.zeros(2, 1, 9, 16, device=DEVICE), k, v, rows)
    with pytest.raises(ValueError, match="1 to 8 query heads"):
        decode_attention(torch.zeros(2, 1, 18, 16, device=DEVICE), k, v, rows)
    with pytest.raises(ValueError, match="blocks of 8 slots; expected a multiple of 16"):
        decode_attention(q, k[:, :, :8], v[:, :, :8], rows)
    with pytest.raises(ValueError, match="inner three axes contiguous"):
        decode_attention(q, k.transpose(0, 2).contiguous().transpose(0, 2), v, rows)
    with pytest.raises(ValueError, match=r"inner three axes contiguous, torch\.float64"):
        decode_attention(q.double(), k, v, rows)
    with pytest.raises(ValueError, match=r"start_B has shape \(3,\).* expected int32 \[2\]"):
        decode_attention(q, k, v, replace(rows, start_B=ints([0, 0, 0])))
    with pytest.raises(ValueError, match=r"count_B .*torch\.int64"):
        decode_attention(q, k, v, replace(rows, count_B=rows.count_B.long()))
    with pytest.raises(ValueError, match="first_B is None; expected each sequence's first own key"):
        decode_attention(q, k, v, replace(rows, first_B=None))
    with pytest.raises(ValueError, match="splits is 0; expected 1 or more"):
        decode_attention(q, k, v, rows, splits=0)
    runs = PrefillRows(rows.table_BP, rows.start_B, rows.start_B, rows.count_B, 1)
    with pytest.raises(ValueError, match="q_TND, k_PKSD and v_PKSD have shapes"):
        prefill_attention(q, k, v, runs)
    with pytest.raises(ValueError, match="row_N has shape"):
        prefill_attention(q[:, 0], k, v, replace(runs, row_N=runs.row_N[:, None]))


def test_no_rows_give_no_rows() -> None:
    case = CachedCase(HEADS, 16, [20])
    caches = case.caches()
    q, rows, _ = case.decode([1], 1)
    none = replace(rows, table_BP=rows.table_BP[:0], start_B=rows.start_B[:0], count_B=rows.count_B[:0])
    assert decode_attention(q[:0], *caches, none).shape == (0, 1, 6, 16)
    runs = PrefillRows(none.table_BP, none.start_B, none.start_B, none.count_B, 0)
    assert torch.equal(prefill_attention(q[:, 0], *caches, runs), torch.zeros_like(q[:, 0]))


@pytest.mark.parametrize(
    ("sequences", "kv_heads", "keys", "sms", "splits"),
    [
        (1, 2, 4096, 132, 64),  # no more parts than a table has steps of 64 keys
        (1, 2, 65536, 132, 198),
        (64, 2, 4096, 132, 4),
        (256, 2, 4096, 132, 1),
        (256, 8, 4096, 108, 1),
        (1, 1, 16, 1, 1),
    ],
)
def test_parts_fill_the_multiprocessors(sequences: int, kv_heads: int, keys: int, sms: int, splits: int) -> None:
    assert decode_splits(sequences, kv_heads, keys, sms) == splits


@pytest.mark.parametrize(
    ("sequences", "kv_heads", "keys", "sms", "splits"),
    [(256, 2, 4096, 132, 3), (256, 8, 4096, 132, 1), (4096, 2, 4096, 132, 1), (1, 2, 256, 132, 4), (1, 1, 16, 1, 1)],
)
def test_parts_of_prefixes_are_as_many_as_groups_need(
    sequences: int, kv_heads: int, keys: int, sms: int, splits: int
) -> None:
    assert prefix_splits(sequences, kv_heads, keys, sms) == splits


def test_a_prefix_pays_where_it_is_long_and_shared() -> None:
    assert prefix_pays(1200, 8) and prefix_pays(256, 2)
    assert not prefix_pays(255, 8) and not prefix_pays(4096, 1) and not prefix_pays(0, 0)
