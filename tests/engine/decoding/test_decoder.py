"""The decoder: a sequence is the same, bit for bit, whatever else runs and however much of it others computed."""

import os
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from batch_invariance import needs_invariant_policy
from decoding_cases import (
    Adversary,
    Plan,
    Record,
    TurnPlan,
    alone,
    blocks,
    make_decoder,
    nobody_owns_a_block,
    play,
    random_world,
    whole,
)
from logprob_cases import assert_logprobs_are_fresh

from thresher.engine.decoding import decoder as decoder_module
from thresher.engine.decoding.decoder import Decoder, NotFiniteDraw
from thresher.engine.decoding.decoder_cuda import DeviceDecoder
from thresher.engine.decoding.scheduler import SamplingParams
from thresher.engine.decoding.speculative import Drafter
from thresher.kernels import sampling
from thresher.kernels.attention import paged_cuda
from thresher.policy.model import Policy
from thresher.policy.tokenizer import Tokenizer

FUZZED = int(os.environ.get("THRESHER_FUZZ", "150"))  # sequences
AT_ONCE = 25  # of which this many share a decoder


@pytest.fixture
def writer(tiny_policy: Policy, tiny_tokenizer: Tokenizer) -> Policy:
    """Return the tiny policy with an end-of-text token that it writes only now and then."""
    return lasting(tiny_policy, tiny_tokenizer)


def lasting(policy: Policy, tokenizer: Tokenizer) -> Policy:
    object.__setattr__(policy.config, "eos_token_ids", tuple(tokenizer.encode("Q")))
    return policy


@pytest.fixture(scope="module")
def world(tiny_tokenizer: Tokenizer) -> tuple[list[list[int]], list[Plan]]:
    """Return sequences of all kinds, some of which begin short and grow long."""
    prompts, plans = random_world(Random(3), tiny_tokenizer.vocab_size, 30)
    return [*prompts, [5, 6, 7]], plans + [
        Plan(prompt=len(prompts), seed=seed, turns=(TurnPlan(room=70), TurnPlan(room=9, appended=((5, 6, 7),))))
        for seed in range(10)
    ]


@pytest.fixture(scope="module")
def expected(
    make_tiny_policy: Any, tiny_tokenizer: Tokenizer, world: tuple[list[list[int]], list[Plan]]
) -> list[Record]:
    return alone(lasting(make_tiny_policy(), tiny_tokenizer), tiny_tokenizer, *world)


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        ({}, 0),
        ({"max_running": 3}, 0),
        ({"max_running": 1}, 0),
        ({"reuse": False}, 0),
        ({"share_prefix": False}, 0),
        ({"reuse": False, "share_prefix": False, "max_running": 7}, 0),
        ({"speculate": 4}, 0),
        *((change, rows) for change in ({}, {"num_blocks": 0}) for rows in (1, 7, 24)),
        ({"num_blocks": 0, "reuse": False}, 0),
        ({"num_blocks": 0, "speculate": 8, "max_running": 5}, 0),
    ],
    ids=str,
)
@pytest.mark.fast_cases(2)
def test_a_sequence_is_the_same_whoever_runs_beside_it_and_in_whatever_pieces_it_is_prefilled(
    change: dict[str, Any],
    rows: int,
    writer: Policy,
    tiny_tokenizer: Tokenizer,
    world: tuple[list[list[int]], list[Plan]],
    expected: list[Record],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """num_blocks 0: the fewest that a decoder accepts, plus two, so that it preempts sequences again and again. rows:
    the limit per forward; 0: the default."""
    needs_invariant_policy(writer)
    small = change.get("num_blocks") == 0
    if small:
        change = {**change, "num_blocks": blocks(*world, spare=2)}
    if rows:
        monkeypatch.setattr(decoder_module, "FORWARD_ROWS", rows)
    decoder = make_decoder(writer, tiny_tokenizer, **change)
    assert play(decoder, *world) == expected
    clock = decoder.clock
    assert (clock.preemptions > 5) == small and (not rows or clock.forward_rows / clock.forwards < max(rows, 2 * 64))
    assert clock.shared_tokens > 500 if change.get("reuse", True) else clock.shared_tokens == 0
    assert nobody_owns_a_block(decoder)
    # Play again in another order: no state of the first time is left.
    prompts, plans = world
    assert play(decoder, prompts, plans[::-1]) == expected[::-1]


@pytest.mark.parametrize("block_size", [32, 64])
@pytest.mark.fast_cases(1)
def test_so_it_is_with_larger_pages(block_size: int, writer: Policy, tiny_tokenizer: Tokenizer) -> None:
    """All sequences need a second block at once, and there is one block too few."""
    needs_invariant_policy(writer)
    rng = Random(block_size)
    prompts = [[rng.randrange(tiny_tokenizer.vocab_size) for _ in range(block_size - 4)] for _ in range(5)]
    prompts[1][: block_size // 2] = prompts[0][: block_size // 2]
    plans = [Plan(prompt=n % 5, seed=n, turns=(TurnPlan(room=20), TurnPlan(room=9))) for n in range(8)]
    one = make_decoder(writer, tiny_tokenizer, block_size=block_size, reuse=False, max_running=1)
    many = make_decoder(writer, tiny_tokenizer, block_size=block_size, num_blocks=1 + 9)
    assert play(many, prompts, plans) == play(one, prompts, plans) and many.clock.preemptions > 0


def test_logprobs_are_those_of_a_fresh_forward(writer: Policy, tiny_tokenizer: Tokenizer) -> None:
    """Sequences have turns and appended text; some are preempted and computed again."""
    rng = Random(5)
    prompts, plans = random_world(rng, tiny_tokenizer.vocab_size, 25)
    plans = [replace(plan, draw=SamplingParams(rng.choice((0.0, 0.7, 1.0)))) for plan in plans]
    decoder = make_decoder(writer, tiny_tokenizer, num_blocks=blocks(prompts, plans, spare=2))
    records = play(decoder, prompts, plans)
    assert decoder.clock.preemptions > 0
    sequences = []
    for plan, record in zip(plans, records, strict=True):
        ids, rows, recorded = list(prompts[plan.prompt]), list[int](), list[float]()
        for turn, (written, logprobs, *_) in zip(plan.turns, record, strict=True):
            ids += [token for text in turn.appended for token in text]
            rows += range(len(ids), len(ids) + len(written))
            ids += written
            recorded += map(float.fromhex, logprobs)
        sequences.append((ids, rows, recorded, plan.draw.temperature or 1.0))
    assert_logprobs_are_fresh(writer, tiny_tokenizer.vocab_size, sequences)


@pytest.mark.parametrize("count", [AT_ONCE, pytest.param(FUZZED, marks=pytest.mark.slow)])
def test_fuzzed_sequences_are_what_they_are_alone(
    writer: Policy, tiny_tokenizer: Tokenizer, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """THRESHER_FUZZ sets the number of sequences. They vary in lengths, siblings, shared prefixes, turns, pauses,
    filters, drafts and blocks. Where there are 3 drafts, the drafter is an adversary that knows the tokens to come."""
    needs_invariant_policy(writer)
    preempted = 0
    for start in range(0, count, AT_ONCE):
        rng = Random(start)
        prompts, plans = random_world(rng, tiny_tokenizer.vocab_size, min(AT_ONCE, count - start))
        speculate: Any = (3, 0, 3, "auto")[start // AT_ONCE % 4]
        decoder = make_decoder(
            writer,
            tiny_tokenizer,
            num_blocks=blocks(prompts, plans, spare=rng.choice((0, 1, 3, 10, 300))),
            max_running=rng.choice((1, 2, 5, 30)),
            reuse=rng.random() < 0.8,
            share_prefix=rng.random() < 0.7,
            speculate=speculate,
        )
        expected = alone(writer, tiny_tokenizer, prompts, plans)
        monkeypatch.setattr(decoder_module, "Drafter", Adversary if speculate == 3 else Drafter)
        monkeypatch.setattr(Adversary, "rng", rng)
        monkeypatch.setattr(Adversary, "written", [whole(prompts, *one) for one in zip(plans, expected, strict=True)])
        for number, (found, right) in enumerate(zip(play(decoder, prompts, plans), expected, strict=True)):
            assert found == right, f"THRESHER_FUZZ={start + number + 1}: sequence {number} of the last {AT_ONCE}"
        assert nobody_owns_a_block(decoder), f"THRESHER_FUZZ={start + len(plans)}: a block is lost"
        clock = decoder.clock
        assert speculate != 3 or 0 < clock.accepted_tokens < clock.drafted_tokens
        preempted += clock.preemptions
    assert preempted >= count // (4 * AT_ONCE)


@pytest.mark.parametrize("make", [Decoder, DeviceDecoder])
@pytest.mark.parametrize(
    "draw", [SamplingParams(), SamplingParams(temperature=0.0), SamplingParams(temperature=0.5, top_p=0.9, top_k=4)]
)
@pytest.mark.parametrize(("bad", "ends"), [(np.nan, True), (np.inf, True), (-np.inf, False)])
def test_logits_that_are_not_finite_end_the_step_and_masked_columns_do_not(
    make: type[Decoder],
    draw: SamplingParams,
    bad: float,
    ends: bool,
    tiny_policy: Policy,
    tiny_tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One logit of one row, at the third of many steps, in either decoder, with every way to draw."""
    monkeypatch.setattr(paged_cuda, "_runs_triton", lambda q: False)
    real, calls = sampling.head_logits, 0

    def head_logits(*operands: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        logits_BV = real(*operands)
        if calls == 3:
            logits_BV[1, 7] = bad
        return logits_BV

    monkeypatch.setattr(sampling, "head_logits", head_logits)
    plans = [Plan(prompt=0, seed=seed, turns=(TurnPlan(room=8),), draw=draw) for seed in range(4)]
    object.__setattr__(tiny_policy.config, "eos_token_ids", ())
    decoder = make(tiny_policy, tiny_tokenizer, num_blocks=40, block_size=16, max_running=4)
    prompt = [tiny_tokenizer.encode("Who is it?")]
    if not ends:
        assert all(len(turn[0]) == 8 for record in play(decoder, prompt, plans) for turn in record)
        return
    with pytest.raises(NotFiniteDraw, match=r"^the policy: the log-prob of a token is not finite, so its logits"):
        play(decoder, prompt, plans)
    assert calls <= 4 and decoder.cache is None


def test_a_decoder_that_met_nan_decodes_again_as_one_that_never_did(
    tiny_policy: Policy, make_tiny_policy: Any, tiny_tokenizer: Tokenizer
) -> None:
    """A CPU decoder keeps its cache between calls, but not NaN in slots that attention multiplies by 0."""
    prompts = [tiny_tokenizer.encode("Who is the mayor of the town?"), tiny_tokenizer.encode("Who?")]
    plans = [Plan(prompt=number, seed=number, turns=(TurnPlan(room=5),)) for number in range(2)]
    sizes: dict[str, Any] = {"num_blocks": 40, "block_size": 64, "max_running": 4}
    decoder, whole = Decoder(tiny_policy, tiny_tokenizer, **sizes), make_tiny_policy().state_dict()
    tiny_policy.norm.mul_(torch.nan)
    tiny_policy.layers[0].qkv_weight.mul_(torch.nan)
    with pytest.raises(NotFiniteDraw):
        play(decoder, prompts[::-1], plans)
    tiny_policy.load_state_dict(whole)
    assert play(decoder, prompts, plans) == play(Decoder(make_tiny_policy(), tiny_tokenizer, **sizes), prompts, plans)
