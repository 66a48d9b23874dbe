"""The cache's tensors: a step writes its rows to their slots and nowhere else, and a copied block equals its source."""

import numpy as np
import pytest
import torch
from model_cases import make_config

from thresher.common.errors import UserError
from thresher.engine.decoding.kv_cache import DeviceKV, PagedKV, PagedStep
from thresher.kernels.attention.paged_cpu import QueryRuns
from thresher.kernels.layers import rope_table
from thresher.kernels.operands import ROW_MULTIPLE

TABLE_BP = np.array([[5, 2, 7], [3, 6, 0]])


def step_of(cache: PagedKV, *runs: tuple[int, int, int]) -> PagedStep:
    """Return a step with runs of (row of the table, first position, count)."""
    slot_N, start_N, count_N = (np.array(column, np.int64) for column in zip(*runs, strict=True))
    return PagedStep(cache, TABLE_BP, QueryRuns(slot_N, start_N, count_N, np.cumsum(count_N) - count_N))


def fed(cache: PagedKV, step: PagedStep, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Write random keys and values for every row; return them."""
    rows, (_, _, kv_heads, dim, _) = len(step.positions_T), cache.k_LPKDS.shape
    k, v = torch.randn(2, rows, kv_heads, dim, generator=torch.Generator().manual_seed(rows))
    still = rope_table(torch.zeros_like(step.positions_T), dim, 1e4, torch.float32)  # rotates nothing
    step(layer, torch.cat([torch.ones(rows, cache.shape.heads, dim), k, v], 1), still, kv_heads)
    return k, v


def test_a_step_writes_nothing_but_its_own_slots() -> None:
    cache = PagedKV(make_config(), 9, 16)
    cache.k_LPKDS.fill_(7.0)
    cache.v_LPKSD.fill_(-7.0)
    step = step_of(cache, (0, 10, 30), (1, 16, 1), (1, 17, 2))
    k, v = fed(cache, step, layer=1)
    positions = [(TABLE_BP[0, at // 16], at % 16) for at in range(10, 40)]
    positions += [(TABLE_BP[1, 1], slot) for slot in (0, 1, 2)]
    assert step.rows == len(positions) and len(step.positions_T) % ROW_MULTIPLE == 0
    mine = torch.zeros(9, 16, dtype=torch.bool)
    for row, (block, slot) in enumerate(positions):
        mine[block, slot] = True
        assert torch.equal(cache.k_LPKDS[1, block, :, :, slot], k[row])
        assert torch.equal(cache.v_LPKSD[1, block, :, slot], v[row])
    others = ~mine
    others[0] = False  # block 0 takes the padding rows
    assert (cache.k_LPKDS[1].permute(0, 3, 1, 2)[others] == 7).all()
    assert (cache.v_LPKSD[1].transpose(1, 2)[others] == -7).all()
    assert (cache.k_LPKDS[0] == 7).all() and (cache.v_LPKSD[0] == -7).all(), "another layer"


def test_rows_know_their_slot_and_position() -> None:
    step = step_of(PagedKV(make_config(), 9, 16), (1, 15, 3), (0, 0, 2))
    assert step.slot_T[:5].tolist() == [1, 1, 1, 0, 0] and step.positions_T[:5].tolist() == [15, 16, 17, 0, 1]
    assert step.block_T.tolist() == [3, 6, 6, 5, 5] + [0] * 11
    assert step.offset_T[:5].tolist() == [15, 0, 1, 0, 1] and step.rows == 5


def test_a_copied_block_is_the_same_in_every_layer() -> None:
    for cache in (PagedKV(make_config(), 5, 16), DeviceKV(make_config(), 5, 16, torch.float32, torch.device("cpu"))):
        for seed, x in enumerate(cache.tensors):
            x.normal_(generator=torch.Generator().manual_seed(seed))
        before = [x.clone() for x in cache.tensors]
        cache.copy(1, 3)
        cache.copy(4, 2)
        assert all(torch.equal(x, old[:, [0, 1, 4, 1, 4]]) for x, old in zip(cache.tensors, before, strict=True))


def test_the_memory_is_what_was_said_and_a_page_size_that_breaks_the_sums_is_refused() -> None:
    config = make_config()
    for dtype in (torch.float32, torch.bfloat16):
        cache = PagedKV(config, 7, 32, dtype)
        assert cache.k_LPKDS.nbytes + cache.v_LPKSD.nbytes == PagedKV.bytes_needed(config, 7, 32, dtype.itemsize)
    for block_size in (0, 1, 8, 24):
        with pytest.raises(UserError, match=rf"kv_block_size is {block_size}; expected a multiple of 16"):
            PagedKV(config, 5, block_size)
