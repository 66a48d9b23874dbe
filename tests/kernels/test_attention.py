"""Both forms of attention against loops in float64 and each other; bits are independent of batch composition."""

from collections.abc import Iterator, Sequence
from random import Random

import pytest
import torch
from model_cases import make_config

from thresher.engine.rollout.kv_cache import BATCH_STEP, NewRows, PagedKV, PagedStep
from thresher.kernels import attention
from thresher.kernels.attention import KEY_STEP, Varlen, varlen_attention

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

# Query heads, key/value heads, head dimension: no sharing, one shared head, and the ratios of Qwen2.5's models.
HEADS = [(1, 1, 8), (4, 4, 10), (4, 2, 24), (3, 1, 64), (14, 2, 64), (7, 1, 24)]
LENGTHS = [[1], [1, 1, 1], [63, 1, 100, 17], [5, 64, 65]]


def make_qkv(heads: int, kv_heads: int, dim: int, count: int, seed: int = 0) -> QKV:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(count, heads, dim), (count, kv_heads, dim), (count, kv_heads, dim)]
    q, k, v = (torch.randn(shape, generator=generator) for shape in shapes)
    return q * 2, k, v  # sharper than uniform, so that what a row sees matters


def brute(q_TND: torch.Tensor, k_TKD: torch.Tensor, v_TKD: torch.Tensor, lengths: Sequence[int]) -> torch.Tensor:
    """The formula, row by row and head by head, in the dtype of its arguments."""
    out, start = [], 0
    shared = q_TND.shape[1] // k_TKD.shape[1]
    for length in lengths:
        for row in range(start, start + length):
            heads = []
            for head in range(q_TND.shape[1]):
                k, v = k_TKD[start : row + 1, head // shared], v_TKD[start : row + 1, head // shared]
                heads.append(torch.softmax(k @ q_TND[row, head] / q_TND.shape[2] ** 0.5, 0) @ v)
            out.append(torch.stack(heads))
        start += length
    return torch.stack(out)


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_varlen_against_float64(heads: tuple[int, int, int], lengths: list[int]) -> None:
    qkv = make_qkv(*heads, sum(lengths))
    layout = Varlen(lengths)
    truth = brute(*(x.double() for x in qkv), lengths)
    torch.testing.assert_close(varlen_attention(*(x.double() for x in qkv), layout), truth, rtol=0, atol=1e-12)
    for dtype in (torch.float32, torch.bfloat16):
        low = tuple(x.to(dtype) for x in qkv)
        truth = brute(*(x.double() for x in low), lengths)
        error, plain_error = (
            (out - truth).square().mean().sqrt() for out in (varlen_attention(*low, layout), brute(*low, lengths))
        )
        assert error <= 2 * plain_error


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_varlen_gradients(heads: tuple[int, int, int]) -> None:
    lengths = [7, 1, 20]
    qkv = make_qkv(*heads, sum(lengths))
    weights = torch.randn(qkv[0].shape, generator=torch.Generator().manual_seed(9)).double()
    grads = []
    for attend, dtype in ((brute, torch.float64), (varlen_attention, torch.float64), (varlen_attention, torch.float32)):
        leaves = [x.to(dtype).requires_grad_() for x in qkv]
        out = attend(*leaves, lengths if attend is brute else Varlen(lengths))  # type: ignore[arg-type]
        grads.append(torch.autograd.grad((out * weights.to(dtype)).sum(), leaves))
    for truth, double, single in zip(*grads, strict=True):
        torch.testing.assert_close(double, truth, rtol=0, atol=1e-10)
        torch.testing.assert_close(single.double(), truth, rtol=0, atol=1e-5)


def test_gradcheck_of_a_ragged_pack() -> None:
    leaves = [x.double().requires_grad_() for x in make_qkv(2, 1, 4, 6)]
    assert torch.autograd.gradcheck(lambda q, k, v: varlen_attention(q, k, v, Varlen([3, 1, 2])), leaves)


def test_layout_gives_places_and_positions() -> None:
    layout = Varlen([3, 1, 2])
    assert layout.positions_T.tolist() == [0, 1, 2, 0, 0, 1]
    assert layout.index_T.tolist() == [0, 1, 2, 3, 6, 7]


def test_a_pack_is_each_sequence_alone() -> None:
    """What stands in other sequences changes nothing but rounding; a poisoned one stays with its poison."""
    lengths = [9, 30, 1, 17]
    qkv = make_qkv(4, 2, 16, sum(lengths))
    packed = varlen_attention(*qkv, Varlen(lengths)).split(lengths)
    pieces = [x.split(lengths) for x in qkv]
    for number, length in enumerate(lengths):
        alone = varlen_attention(*(piece[number] for piece in pieces), Varlen([length]))
        torch.testing.assert_close(packed[number], alone, rtol=0, atol=2e-6)
    for x in qkv:
        x.split(lengths)[1].fill_(float("nan"))
    poisoned = varlen_attention(*qkv, Varlen(lengths)).split(lengths)
    assert torch.isnan(poisoned[1]).all()
    assert all(torch.equal(poisoned[number], packed[number]) for number in (0, 2, 3))


def test_a_row_sees_nothing_after_it() -> None:
    q, k, v = make_qkv(4, 2, 16, 20)
    before = varlen_attention(q, k, v, Varlen([20]))[:12]
    k[12:], v[12:] = 1e4, -1e4
    assert torch.equal(varlen_attention(q, k, v, Varlen([20]))[:12], before)


class Cache:
    """Sequences of known q, k, v fed into a real paged cache, piece by piece, on blocks dealt out at random."""

    def __init__(self, heads: tuple[int, int, int], lengths: Sequence[int], page_size: int, fill: float = 0.0) -> None:
        query_heads, kv_heads, dim = heads
        config = make_config(
            hidden_size=query_heads * dim, num_attention_heads=query_heads, num_key_value_heads=kv_heads
        )
        needs = [-(-length // page_size) for length in lengths]
        self.kv = PagedKV(config, 3 + sum(needs), page_size)
        self.kv.k_LKPSD.fill_(fill)
        self.kv.v_LKPSD.fill_(-fill)
        free = list(range(1, 3 + sum(needs)))
        Random(0).shuffle(free)
        self.blocks = [[free.pop() for _ in range(need)] for need in needs]
        self.qkv = [make_qkv(*heads, length, seed=number) for number, length in enumerate(lengths)]

    def feed(self, pieces: Sequence[tuple[int, int, int]]) -> list[torch.Tensor]:
        """Rows start .. end of sequences, as (sequence, start, end), in one forward -> their outputs, [Q, N, D] each.
        A sequence has the blocks that it needs so far, and no more."""
        size = self.kv.page_size
        items = [NewRows([7] * (end - start), start, self.blocks[n][: -(-end // size)]) for n, start, end in pieces]
        step = PagedStep(self.kv, items)
        assert len(step.ids_T) % BATCH_STEP == 0
        padding = len(step.ids_T) - sum(end - start for _, start, end in pieces)
        parts = [[x[start:end] for x in self.qkv[n]] for n, start, end in pieces]
        q, k, v = (
            torch.cat([*side, torch.full((padding, *side[0].shape[1:]), 3.0)]) for side in zip(*parts, strict=True)
        )
        return list(step(1, q, k, v).split([end - start for _, start, end in pieces] + [padding])[: len(pieces)])


@pytest.mark.parametrize("page_size", [1, 4, 16, 64])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_paged_equals_varlen_however_it_is_fed(heads: tuple[int, int, int], page_size: int) -> None:
    """Prompts whole or in two pieces, then single rows and appended pieces of several sequences in one forward, over
    the edges of blocks and of KEY_STEP; float64 is the truth for both."""
    lengths = [KEY_STEP + 6, 40, 1, KEY_STEP, 2 * KEY_STEP + 3]
    cache = Cache(heads, lengths, page_size, fill=50.0)
    cuts = [[60, 61, 62, 63, 64, 65, 70], [5, 37, 40], [1], [63, 64], [100, 129, 130, 131]]
    outputs: list[list[torch.Tensor]] = [[] for _ in lengths]
    for turn in range(7):
        pieces = [(n, ends[turn - 1] if turn else 0, ends[turn]) for n, ends in enumerate(cuts) if turn < len(ends)]
        for (n, _, _), rows in zip(pieces, cache.feed(pieces), strict=True):
            outputs[n].append(rows)
    for qkv, length, rows in zip(cache.qkv, lengths, outputs, strict=True):
        truth = brute(*(x.double() for x in qkv), [length]) if length < 60 else None
        varlen = varlen_attention(*qkv, Varlen([length]))
        torch.testing.assert_close(torch.cat(rows), varlen, rtol=0, atol=4e-6)
        if truth is not None:
            torch.testing.assert_close(torch.cat(rows).double(), truth, rtol=0, atol=4e-6)


@pytest.mark.parametrize("heads", [(4, 2, 24), (7, 1, 64)], ids=str)
def test_what_the_unseen_slots_hold_does_not_matter(heads: tuple[int, int, int]) -> None:
    pieces = [[(0, 0, 19), (1, 0, 70)], [(0, 19, 20), (1, 70, 90)], [(0, 20, 21)]]
    results = []
    for fill in (0.0, 1e4, -3.0):
        cache = Cache(heads, [21, 90], 16, fill)
        results.append([rows for step in pieces for rows in cache.feed(step)])
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_a_step_writes_nothing_but_its_own_slots() -> None:
    cache = Cache((4, 2, 8), [21, 40], 16, fill=7.0)
    cache.feed([(1, 0, 40)])
    before = cache.kv.k_LKPSD.clone()
    cache.feed([(0, 0, 21)])
    mine = torch.zeros(cache.kv.k_LKPSD.shape[2:4], dtype=torch.bool)
    for at in range(21):
        mine[cache.blocks[0][at // 16], at % 16] = True
    mine[0] = True  # where rows that pad the batch go
    changed = (cache.kv.k_LKPSD != before).any(-1).any(1)
    assert not changed[0].any(), "another layer"
    assert torch.equal(changed[1] & ~mine, torch.zeros_like(mine)) and changed[1][cache.blocks[0][0]].all()
    for position, key_KD in enumerate(cache.qkv[0][1]):
        assert torch.equal(cache.kv.k_LKPSD[1, :, cache.blocks[0][position // 16], position % 16], key_KD)


@pytest.fixture(params=[1, 2, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("at_once", [1, 1 << 26], ids=["split", "whole"])
@pytest.mark.parametrize("heads", [(7, 1, 64), (5, 1, 24), (14, 2, 64), (4, 4, 12)], ids=str)
def test_bits_are_independent_of_batch_composition(
    heads: tuple[int, int, int], at_once: int, threads: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Regression: with one key/value head one sequence was a batch of one, which torch multiplies in another way."""
    lengths = [20, 64, 65, 33, 130, 7, 40, 65, 66]
    batch, alone = Cache(heads, lengths, 16), Cache(heads, lengths, 16)
    monkeypatch.setattr(attention, "SCORE_ELEMENTS", at_once)
    for cut in (lambda n: (0, n - 3), lambda n: (n - 3, n - 1), lambda n: (n - 1, n)):
        pieces = [(n, *cut(length)) for n, length in enumerate(lengths)]
        together = batch.feed(pieces)
        monkeypatch.setattr(attention, "SCORE_ELEMENTS", 1 << 26)
        for piece, rows in zip(pieces, together, strict=True):
            assert torch.equal(alone.feed([piece])[0], rows)
        monkeypatch.setattr(attention, "SCORE_ELEMENTS", at_once)
