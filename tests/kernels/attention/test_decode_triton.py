"""Tests of decoding over blocks of a KV cache in Triton: results against float64 for any way to divide the keys.

Only a sequence's own keys are tested here; shared prefixes are in test_cascade_triton.py. All memory that must not be
read is NaN (cached_cases.py).
"""

from collections.abc import Callable
from random import Random

import pytest
import torch
from cached_cases import DEVICE, CachedCase, ints
from interpreter import bfloat16_to_nearest
from torch import Tensor

pytest.importorskip("triton")

from thresher.kernels.attention import decode_triton
from thresher.kernels.attention.paged_cuda import decode_attention
from thresher.kernels.attention.rows import DecodeRows

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # NumPy, on masked lanes

BORDERS = [1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 200]


@pytest.mark.parametrize("per_kv", range(1, 9))
@pytest.mark.parametrize("slots", [16, 64])
@pytest.mark.fast_cases(3)
def test_rows_are_right_for_any_number_of_heads(per_kv: int, slots: int, poisoned: None) -> None:
    """The number of parts varies too, lengths are on both sides of a block's end, and D is 64 or 128."""
    rng = Random(10 * per_kv + slots)
    case = CachedCase((2 * per_kv, 2, 64 if per_kv % 2 else 128), slots, rng.sample(BORDERS, 2))
    q_BQND, rows, judged = case.decode([1, 1], 1)
    judged.holds(decode_attention(q_BQND, *case.caches(), rows, splits=1 + per_kv % 4))


@pytest.mark.parametrize("lengths", [[1, 63, 65], [64, 128, 129], [15, 17, 200]], ids=str)
@pytest.mark.parametrize("splits", [1, 2, 3, None], ids=str)
@pytest.mark.fast_cases(4)
def test_rows_are_right_at_any_length(lengths: list[int], splits: int | None, poisoned: None) -> None:
    case = CachedCase((3, 1, 24), 64, lengths)
    q_BQND, rows, judged = case.decode([1, 1, 1], 1)
    judged.holds(decode_attention(q_BQND, *case.caches(), rows, splits=splits))


@pytest.mark.parametrize(("queries", "per_kv"), [(2, 7), (5, 6), (5, 8), (9, 8)])
@pytest.mark.parametrize("slots", [16, 64])
@pytest.mark.fast_cases(2)
def test_drafts_see_what_lies_before_them(queries: int, per_kv: int, slots: int, poisoned: None) -> None:
    """Tiles have 16, 32 and 64 rows, one tile or two; absent rows give zeros, whatever q holds there."""
    case = CachedCase((per_kv, 1, 24), slots, [66, 9, 130, 64])
    q_BQND, rows, judged = case.decode([queries, 0, 1, queries - 1], queries)
    for splits in (1, 2):
        judged.holds(decode_attention(q_BQND, *case.caches(), rows, splits=splits))


def test_a_draft_whose_part_holds_only_later_keys_adds_nothing() -> None:
    """Of three rows at 62, 63 and 64 the second part is one key, which the first two rows do not see."""
    case = CachedCase((2, 1, 32), 64, [65])
    q_BQND, rows, judged = case.decode([3], 3)
    judged.holds(decode_attention(q_BQND, *case.caches(), rows, splits=2))
    o, lse = torch.full((2, 1, 1, 6, 32), torch.nan, device=DEVICE), torch.full((2, 1, 1, 6), torch.nan, device=DEVICE)
    decode_triton.launch_decode(q_BQND, *case.caches(), rows, 2, o, lse, None)
    assert lse[0].isfinite().all() and lse[1, 0, 0].isfinite().tolist() == [False] * 4 + [True] * 2
    assert (lse[1, 0, 0, :4] == -torch.inf).all() and o.isfinite().all()


@pytest.mark.parametrize("splits", [1, 3])
def test_filling_of_a_bucket_reads_nothing(splits: int, poisoned: None) -> None:
    """A padding row has count 0, a table of zeros, and possibly the position of an earlier sequence."""
    q_BQND = torch.full((2, 2, 4, 32), torch.nan, device=DEVICE)
    cache = torch.full((1, 2, 16, 32), torch.nan, device=DEVICE)
    rows = DecodeRows(torch.zeros(2, 3, dtype=torch.int32, device=DEVICE), ints([1000, 0]), ints([0, 0]), None, None)
    assert torch.equal(decode_attention(q_BQND, cache, cache, rows, splits=splits), torch.zeros_like(q_BQND))


def test_queries_and_tables_may_be_views_of_something_wider() -> None:
    case = CachedCase((4, 2, 32), 16, [70, 33])
    q_BQND, rows, judged = case.decode([2, 2], 2)
    wide = torch.full((2, 3, 8, 32), torch.nan, device=DEVICE)
    wide[:, :2, 2:6] = q_BQND
    table = torch.full((2, 9), 2**20, dtype=torch.int32, device=DEVICE)
    table[:, 2:7] = rows.table_BP
    view = DecodeRows(table[:, 2:7], rows.start_B, rows.count_B)
    judged.holds(decode_attention(wide[:, :2, 2:6], *case.caches(), view, splits=2))


def test_keys_before_the_first_are_left_out() -> None:
    """As with a prefix pass: each row equals that of a sequence without these keys."""
    case = CachedCase((4, 2, 32), 16, [80])
    q_BQND, rows, _ = case.decode([1], 1)
    late = DecodeRows(rows.table_BP, rows.start_B, rows.count_B, ints([48]))
    alone = DecodeRows(rows.table_BP[:, 3:], rows.start_B - 48, rows.count_B)
    found, expected = (decode_attention(q_BQND, *case.caches(), which, splits=2) for which in (late, alone))
    assert torch.equal(found, expected)


def test_the_tiling_of_float32_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the tiling that a GPU uses for float32; the interpreter otherwise uses those of bfloat16."""
    monkeypatch.setattr(decode_triton, "decode_tiling", lambda *_: decode_triton.FLOAT32)
    case = CachedCase((14, 2, 64), 64, [65, 130])
    q_BQND, rows, judged = case.decode([2, 3], 3)
    judged.holds(decode_attention(q_BQND, *case.caches(), rows, splits=2))


def test_bfloat16_is_as_near_as_torch_is() -> None:
    """The error against float64 on the same rounded inputs is within 3.5 times that of torch's attention in bfloat16.
    Scores are large enough that rounding them would cost more. Stores round to nearest, as on a GPU."""
    case = CachedCase((12, 2, 128), 64, [129, 64]).rounded(4.0)
    q_BQND, rows, judged = case.decode([1, 1], 1)
    with bfloat16_to_nearest():
        found = decode_attention(q_BQND.bfloat16(), *(x.bfloat16() for x in case.caches()), rows, splits=2)
    assert found.dtype == torch.bfloat16
    torchs = torch.stack([_torch_row(case, number) for number in range(2)])
    assert (found.double().cpu() - judged.right).norm() <= 3.5 * (torchs.double() - judged.right).norm()


def _torch_row(case: CachedCase, number: int) -> Tensor:
    """Return a sequence's last row, computed by torch in bfloat16, [1, N, D]."""
    q, k, v = (x.bfloat16().transpose(0, 1)[None] for x in case.qkv[number])
    o = torch.nn.functional.scaled_dot_product_attention(q[:, :, -1:], k, v, enable_gqa=True)
    return o[0].transpose(0, 1)


def small_launches() -> dict[str, Callable[[], None]]:
    def check(heads: tuple[int, int, int], lengths: list[int], counts: list[int], splits: int) -> None:
        case = CachedCase(heads, 16, lengths)
        q_BQND, rows, judged = case.decode(counts, max(counts))
        judged.holds(decode_attention(q_BQND, *case.caches(), rows, splits=splits))

    return {
        "one part": lambda: check((3, 1, 24), [17, 1], [1, 1], 1),
        "drafts in two parts": lambda: check((2, 2, 32), [70, 9], [2, 0], 2),
    }
