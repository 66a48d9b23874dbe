"""Tests of decoding with a shared prefix that is read once, and of the merge of all parts: results against float64.

test_decode_triton.py tests the sequences' own keys. All memory that must not be read is NaN (cached_cases.py).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from cached_cases import CachedCase
from interpreter import bfloat16_to_nearest

pytest.importorskip("triton")

from thresher.kernels.attention import cascade_triton, decode_triton
from thresher.kernels.attention.paged_cuda import decode_attention

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")  # NumPy, on masked lanes

# Two groups, one of which does not start with its lowest index; sequence 2 has no prefix.
LENGTHS = [70, 130, 20, 66, 129]


def groups(length: int) -> list[tuple[int, list[int]]]:
    return [(64, [3, 0]), (length, [1, 4])]


@pytest.mark.parametrize("per_kv", [1, 4, 6, 7, 8])
@pytest.mark.parametrize("slots", [16, 64])
@pytest.mark.fast_cases(2)
def test_rows_with_shared_prefixes_are_right(per_kv: int, slots: int, poisoned: None) -> None:
    """Groups are ragged, one is empty, D is 64 or 128; a prefix of 48 keys ends within a step."""
    dim = 64 if per_kv % 2 else 128
    case = CachedCase((per_kv, 1, dim), slots, LENGTHS, groups(48 if slots == 16 else 128))
    q_BQND, rows, judged = case.decode([1] * 5, 1, share=True)
    judged.holds(decode_attention(q_BQND, *case.caches(), rows, splits=1 + per_kv % 3))


@pytest.mark.parametrize("queries", [2, 5])
@pytest.mark.parametrize("splits", [1, 2, 4])
@pytest.mark.fast_cases(1)
def test_drafts_and_absent_rows_behind_a_prefix(queries: int, splits: int, poisoned: None) -> None:
    """Two KV heads; with 5 x 7 rows for each of three members a tile ends within a member. One member is absent."""
    lengths = [70, 90, 75, 140]
    case = CachedCase((14, 2, 24), 16, lengths, [(64, [2, 0, 1])])
    q_BQND, rows, judged = case.decode([queries, 0, 1, queries - 1], queries, share=True)
    judged.holds(decode_attention(q_BQND, *case.caches(), rows, splits=splits))


def test_with_and_without_the_pass_for_prefixes_the_rows_agree() -> None:
    """Both differ from float64 by rounding alone; the launcher chooses the number of parts."""
    case = CachedCase((6, 2, 32), 64, LENGTHS, groups(128))
    for share in (False, True):
        q_BQND, rows, judged = case.decode([2, 1, 2, 1, 0], 2, share=share)
        judged.holds(decode_attention(q_BQND, *case.caches(), rows))


def test_a_prefix_is_read_once_and_not_by_its_members() -> None:
    """The members' own tables do not contain the blocks of the prefix."""
    case = CachedCase((4, 2, 32), 16, [70, 90], [(64, [0, 1])])
    q_BQND, rows, judged = case.decode([1, 1], 1, share=True)
    hidden = rows.table_BP.clone()
    hidden[:, :4] = case.spare
    judged.holds(decode_attention(q_BQND, *case.caches(), replace(rows, table_BP=hidden), splits=2))


def test_a_tile_without_a_member_leaves_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 16 slots for members and 7 heads, a group of three fills one tile of two."""
    made: list[cascade_triton.PassParts] = []
    plain = cascade_triton._new_parts

    def new_parts(*arguments: Any) -> cascade_triton.PassParts:
        made.append(plain(*arguments))
        made[-1].lse.fill_(torch.nan)
        return made[-1]

    monkeypatch.setattr(cascade_triton, "_new_parts", new_parts)
    case = CachedCase((7, 1, 32), 16, [70, 90, 75], [(64, [2, 0, 1])])
    q_BQND, rows, judged = case.decode([1] * 3, 1, share=True)
    assert rows.prefix is not None
    members_GM = torch.nn.functional.pad(rows.prefix.members_GM, (0, 16 - rows.prefix.members_GM.shape[1]), value=-1)
    wider = replace(rows, prefix=replace(rows.prefix, members_GM=members_GM))
    judged.holds(decode_attention(q_BQND, *case.caches(), wider, splits=2))
    tile = cascade_triton.PREFIX.rows
    lse_PGKR = made[1].lse
    assert lse_PGKR.shape[3] > tile and lse_PGKR[:, :, :, :tile].isfinite().any()
    assert lse_PGKR[:, :, :, tile:].isnan().all()


def test_groups_that_do_not_exist_change_nothing(poisoned: None) -> None:
    """A bucket without a shared prefix has lengths 0, and members left from earlier steps."""
    case = CachedCase((4, 2, 32), 16, [70, 90], [(64, [0, 1])])
    q_BQND, rows, judged = case.decode([1, 1], 1, share=True)
    assert rows.prefix is not None and rows.first_B is not None
    none = replace(rows.prefix, length_G=torch.zeros_like(rows.prefix.length_G))
    without = replace(rows, first_B=torch.zeros_like(rows.first_B), prefix=none)
    for splits in (1, 2):
        judged.holds(decode_attention(q_BQND, *case.caches(), without, splits=splits))
    empty = replace(none, members_GM=none.members_GM[:, :0])
    judged.holds(decode_attention(q_BQND, *case.caches(), replace(without, prefix=empty), splits=1))


def test_more_parts_than_are_merged_at_a_time() -> None:
    case = CachedCase((2, 1, 32), 64, [200], [])
    q_BQND, rows, judged = case.decode([1], 1)
    judged.holds(decode_attention(q_BQND, *case.caches(), rows, splits=2 * cascade_triton.MERGED + 3))


def test_the_tiling_of_float32_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the tiling that a GPU uses for float32; the interpreter otherwise uses those of bfloat16."""
    monkeypatch.setattr(cascade_triton, "prefix_tiling", lambda *_: decode_triton.FLOAT32)
    case = CachedCase((7, 1, 64), 64, LENGTHS[:2] + LENGTHS[3:], [(64, [0, 1, 2])])
    q_BQND, rows, judged = case.decode([1] * 4, 1, share=True)
    judged.holds(decode_attention(q_BQND, *case.caches(), rows, splits=2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("queries", [1, 9])
def test_heads_of_256(queries: int, dtype: torch.dtype) -> None:
    """Qwen3.5's, whose tilings are others. On a GPU only bfloat16 has them."""
    case = CachedCase((8, 2, 256), 64, [150, 140, 30], [(64, [0, 1])]).rounded()
    q_BQND, rows, judged = case.decode([queries] * 3, queries, share=True)
    with bfloat16_to_nearest():
        found = decode_attention(q_BQND.to(dtype), *(x.to(dtype) for x in case.caches()), rows, splits=2)
    judged.holds(found) if dtype == torch.float32 else judged.holds_in_bfloat16(found)


def small_launches() -> dict[str, Callable[[], None]]:
    def check(queries: int, splits: int) -> None:
        case = CachedCase((2, 1, 32), 16, [40, 20, 37], [(32, [2, 0])])
        q_BQND, rows, judged = case.decode([queries, 1, queries], queries, share=True)
        judged.holds(decode_attention(q_BQND, *case.caches(), rows, splits=splits))

    return {"a prefix of two": lambda: check(1, 1), "drafts, in parts": lambda: check(2, 2)}
