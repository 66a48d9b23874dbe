"""Drawn tokens, written to the batch and sent to the host: those are accepted that would have been drawn one by one,
and a packed row keeps every bit."""

from collections import Counter
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from decoding_cases import agree, make_decoder, play, random_world

from thresher.engine.decoding.batch_state import (
    BatchState,
    DrawnRows,
    Ints,
    StopTables,
    accept_tokens,
    count_accepted,
    drawn_width,
    pack_drawn,
)
from thresher.engine.decoding.scheduler import SamplingParams, SharedPrompt, TokenSequence
from thresher.kernels import sampling
from thresher.policy.model import Policy
from thresher.policy.tokenizer import Tokenizer

CPU = torch.device("cpu")
COUNT, KNOWN, DRAFTS = 24, 5, 3


def packed(ids_NQ: torch.Tensor, logprobs_NQ: torch.Tensor, code_N: torch.Tensor, taken_N: torch.Tensor) -> DrawnRows:
    """Return rows as a bucket's step leaves them, two rows longer than there are sequences."""
    out_NX = torch.full((len(ids_NQ), drawn_width(ids_NQ.shape[1])), -7, dtype=torch.int32)
    pack_drawn(ids_NQ, logprobs_NQ, code_N, taken_N, out_NX)
    return DrawnRows(torch.cat([out_NX, torch.full((2, out_NX.shape[1]), -7, dtype=torch.int32)]), None)


@pytest.mark.parametrize("rows", [1, 3])
def test_a_row_brings_back_every_bit(rows: int) -> None:
    bits = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31), 0x7FC00001, -0x400000], dtype=torch.int32)
    bits_NQ = torch.stack([bits.roll(n) for n in range(rows)], 1)
    ids_NQ = torch.stack([torch.tensor([0, 1, 151_664, 2**31 - 1, 5, 6, 7]).roll(n) for n in range(rows)], 1)
    code_N, taken_N = torch.tensor([0, 1, 2, 300, 0, 0, 1]), torch.tensor([1, 1, 17, 1, 2, 3, 4])
    drawn = packed(ids_NQ, bits_NQ.view(torch.float32), code_N, taken_N).read(7)
    for found, sent in zip((drawn.ids_NQ, drawn.code_N, drawn.taken_N), (ids_NQ, code_N, taken_N), strict=True):
        assert found.dtype == np.int64 and found.tolist() == sent.tolist()
    assert drawn.logprobs_NQ.dtype == np.float32 and drawn.logprobs_NQ.view(np.int32).tolist() == bits_NQ.tolist()
    some = drawn.of(np.array([False, True] * 3 + [False]))
    assert some.ids_NQ.tolist() == ids_NQ[1::2].tolist() and some.taken_N.tolist() == [1, 1, 3]
    assert some.accepted_NQ.sum(1).tolist() == [min(count, rows) for count in (1, 1, 3)]


def test_what_the_host_writes_is_sent_at_once() -> None:
    """A slot that changes owner before a send holds what was written last; what the device wrote stays."""
    batch = BatchState(3, 10, 2, CPU, mirror=True)
    first, then = (TokenSequence(SharedPrompt(ids), seed, SamplingParams()) for ids, seed in (([1, 2, 3], 7), ([9], 8)))
    slot = batch.open(first, 0, [1])
    batch.close(first)
    assert batch.open(then, 0, [1]) == slot
    batch.begin_turn(replace(then, stop_state=5, room=4))
    assert not batch.tokens_BL.any() and not batch.seeds_B.any() and not batch.state_B.any()
    batch.send()
    assert (batch.tokens_BL[slot, 0], batch.seeds_B[slot], batch.state_B[slot]) == (9, 8, 5)
    batch.tokens_BL[slot, 1] = batch.state_B[slot] = 6
    batch.known_B[slot] = 2
    batch.append(slot, [4, 5])
    batch.send()
    assert batch.tokens_BL[slot, :5].tolist() == [9, 6, 4, 5, 0] and batch.state_B[slot] == 6
    with pytest.raises(ValueError, match="11 tokens in a slot of 10"):
        batch.append(slot, [0] * 7)
    others = [each for each in range(4) if each != slot]
    assert not batch.tokens_BL[others].any() and not batch.seeds_B[others].any() and not batch.state_B[others].any()


@pytest.fixture
def stops(tiny_tokenizer: Tokenizer) -> StopTables:
    return StopTables(tiny_tokenizer, [tiny_tokenizer.added_tokens["<|endoftext|>"]], CPU)


def drafted_slots(tokenizer: Tokenizer, stops: StopTables, seed: int) -> tuple[BatchState, Ints]:
    """Return a batch whose slots know KNOWN tokens, followed by guesses, with a stop half read; and slots of it."""
    noise = torch.Generator().manual_seed(seed)
    batch = BatchState(COUNT, 40, 4, CPU)
    batch.tokens_BL[:] = torch.randint(0, tokenizer.vocab_size, batch.tokens_BL.shape, generator=noise)
    batch.known_B[:] = KNOWN
    for slot in range(COUNT):
        state_N = torch.tensor([stops.start(((), ("</search>",), ("</answer>", "</search>"))[slot % 3])])
        for token in tokenizer.encode_template("x</search>")[: -1 if slot % 2 else -2]:
            state_N, _ = stops.advance(state_N, torch.tensor([token]))
        batch.state_B[slot] = state_N[0]
    return batch, np.random.default_rng(seed).permutation(COUNT)[: COUNT - 5]


def one_by_one(
    batch: BatchState, stops: StopTables, slot: int, drafted: int, ids: list[int]
) -> tuple[list[int], int, int]:
    """Return the tokens that stand, the code of the last, and the state, as if drawn one by one without guesses."""
    kept, state_N = [], batch.state_B[slot : slot + 1]
    for column, token in enumerate(ids):
        kept.append(token)
        state_N, code_N = stops.advance(state_N, torch.tensor([token]))
        guessed = column < drafted and int(batch.tokens_BL[slot, KNOWN + column]) == token
        if code_N[0] or not guessed:
            break
    return kept, int(code_N[0]), int(state_N[0])


@pytest.mark.parametrize("drafts", [0, DRAFTS])
def test_those_stand_that_would_have_been_drawn_one_by_one(
    drafts: int, tiny_tokenizer: Tokenizer, stops: StopTables
) -> None:
    """The decoder's pass over rows agrees, and a device's pass over columns, some of which hold no draft."""
    ends = [tiny_tokenizer.encode_template("x</search>")[-1], tiny_tokenizer.added_tokens["<|endoftext|>"]]
    seen_codes, seen_taken = set(), set()
    for seed in range(8):
        batch, slot_N = drafted_slots(tiny_tokenizer, stops, seed)
        draw = np.random.default_rng(100 + seed)
        drafted_N, ids = draw.integers(0, drafts + 1, len(slot_N)), []
        for slot, count in zip(slot_N, 1 + drafted_N, strict=True):
            guessed = batch.tokens_BL[slot, KNOWN : KNOWN + count].tolist()  # right guesses, except for some
            ids.append([token if draw.random() < 0.6 else int(draw.choice([*ends, 7])) for token in guessed])
        wanted = [one_by_one(batch, stops, *row) for row in zip(slot_N.tolist(), drafted_N.tolist(), ids, strict=True)]

        in_place = deepcopy(batch)
        ids_F = torch.tensor([token for row in ids for token in row])
        logprobs_F = -torch.rand(len(ids_F), generator=torch.Generator().manual_seed(seed))
        code_N, taken_N = accept_tokens(in_place, stops, slot_N, drafted_N, ids_F, logprobs_F)
        first_N = np.cumsum(1 + drafted_N) - 1 - drafted_N
        for row, (slot, (kept, code, state)) in enumerate(zip(slot_N.tolist(), wanted, strict=True)):
            assert (taken_N[row], code_N[row], int(in_place.state_B[slot])) == (len(kept), code, state)
            there = slice(KNOWN, KNOWN + len(kept))
            assert in_place.tokens_BL[slot, there].tolist() == kept
            assert torch.equal(in_place.logprobs_BL[slot, there], logprobs_F[first_N[row] :][: len(kept)])
        others = sorted(set(range(COUNT)) - set(slot_N.tolist()))
        assert torch.equal(in_place.tokens_BL[others], batch.tokens_BL[others])
        assert torch.equal(in_place.tokens_BL[:, :KNOWN], batch.tokens_BL[:, :KNOWN])

        wide = drafts + 2  # columns after a sequence's drafts hold right guesses, which must not count
        ids_NQ, drafts_NK = torch.zeros(len(ids), 1 + wide, dtype=torch.int64), torch.zeros(len(ids), wide).long()
        for row, slot in enumerate(slot_N.tolist()):
            ids_NQ[row, : len(ids[row])] = torch.tensor(ids[row])
            drafts_NK[row, : drafted_N[row]] = batch.tokens_BL[slot, KNOWN : KNOWN + drafted_N[row]]
            drafts_NK[row, drafted_N[row] :] = ids_NQ[row, drafted_N[row] : -1]
        state_N = batch.state_B[torch.from_numpy(slot_N)]
        logprobs_NQ = -torch.ones(ids_NQ.shape)
        columns = count_accepted(stops, state_N, ids_NQ, logprobs_NQ, drafts_NK, torch.from_numpy(drafted_N))
        found = [tuple(row) for row in torch.stack(columns, 1).tolist()]
        assert found == [(state, code, len(kept)) for kept, code, state in wanted]
        seen_codes |= set(code_N.tolist())
        seen_taken |= set(taken_N.tolist())
    assert {0, 1} < seen_codes and seen_taken == set(range(1, drafts + 2)), "too little was seen"


@pytest.mark.filterwarnings("ignore:.*(encountered|All-NaN).*:RuntimeWarning")  # numpy, on what is masked
@pytest.mark.slow
def test_drawn_as_on_a_gpu_a_rollout_has_the_same_tokens(
    tiny_policy: Policy, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fused into the head's product, in Triton's interpreter; some rows have filters; turns end in every way."""
    pytest.importorskip("triton")
    from thresher.kernels import sampling_triton

    prompts, plans = random_world(Random(3), tiny_tokenizer.vocab_size, 6)
    draws = (SamplingParams(), SamplingParams(0.0), SamplingParams(0.7))
    plans = [
        replace(plan, draw=draws[number % 3], turns=tuple(replace(turn, room=min(turn.room, 6)) for turn in plan.turns))
        for number, plan in enumerate(plans)
    ]
    plans[0] = replace(plans[0], draw=SamplingParams(0.8, 5), arrive=6)
    decoder = make_decoder(tiny_policy, tiny_tokenizer)
    expected = play(decoder, prompts, plans)
    calls: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments: calls.update([name]) or function(*arguments)

    monkeypatch.setattr(sampling, "_draws_fused", lambda *_: True)
    monkeypatch.setattr(sampling_triton, "draw_fused", counted("fused", sampling_triton.draw_fused))
    monkeypatch.setattr(sampling, "sample_from_head", counted("all", sampling.sample_from_head))
    found = play(decoder, prompts, plans)
    assert 0 < calls["fused"] < calls["all"], "some steps have filters and some have none"
    agree(found, expected, gap=1e-5)
