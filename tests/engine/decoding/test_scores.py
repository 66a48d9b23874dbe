"""Log-probs of given ids: those of a fresh forward, whatever else runs and wherever a step or the pool cuts them off;
and scoring changes no sample."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from batch_invariance import needs_invariant_policy
from decoding_cases import (
    SCORED,
    Plan,
    Record,
    TurnPlan,
    agree,
    alone,
    blocks,
    make_decoder,
    nobody_owns_a_block,
    play,
    random_world,
    turns_of,
)
from logprob_cases import Written, assert_logprobs_are_fresh

from thresher.engine.decoding import decoder as decoder_module
from thresher.engine.decoding.decoder import DecodeClock, Decoder, NotFiniteDraw
from thresher.engine.decoding.decoder_cuda import DeviceDecoder
from thresher.engine.decoding.scheduler import SamplingParams, SharedPrompt, TokenSequence
from thresher.kernels.attention import paged_cuda
from thresher.policy.model import Policy
from thresher.policy.tokenizer import Tokenizer


def scored_world(seed: int, vocab: int, count: int = 25) -> tuple[list[list[int]], list[Plan]]:
    """Return sequences of all kinds, some of which begin short and grow long. Most have a text of 1 to 40 tokens scored
    before each turn."""
    rng = Random(seed)
    prompts, plans = random_world(rng, vocab, count)
    turns = TurnPlan(room=60), TurnPlan(room=9, appended=((5, 6, 7),))
    prompts, plans = [*prompts, [5, 6, 7]], plans + [Plan(prompt=len(prompts), seed=n, turns=turns) for n in range(4)]
    texts = [tuple(rng.randrange(vocab) for _ in range(rng.choice((0, 1, 2, 15, 40)))) for _ in plans]
    return prompts, [replace(plan, scored=text) for plan, text in zip(plans, texts, strict=True)]


@pytest.fixture
def policy(tiny_policy: Policy) -> Policy:
    """Return the tiny policy without an end-of-text token."""
    object.__setattr__(tiny_policy.config, "eos_token_ids", ())
    return tiny_policy


def scored_in(prompts: list[list[int]], plan: Plan, record: Record) -> list[Written]:
    """Return the scored texts, each with its context before it."""
    ids, found, turn = list(prompts[plan.prompt]), list[Written](), 0
    for number, (own, logprobs, end, *_) in enumerate(record):
        if number == 0 or record[number - 1][2] != SCORED:
            ids += [token for text in plan.turns[turn].appended for token in text]
        if end == SCORED:
            places = range(len(ids), len(ids) + len(own))
            found.append(([*ids, *own], places, [float.fromhex(x) for x in logprobs], plan.draw.temperature or 1.0))
        else:
            ids, turn = [*ids, *own], turn + 1
    return found


@pytest.mark.slow
def test_no_bit_depends_on_what_runs_beside_and_no_sample_on_a_score(
    policy: Policy, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_invariant_policy(policy)
    prompts, plans = scored_world(0, tiny_tokenizer.vocab_size, 10)
    wanted = alone(policy, tiny_tokenizer, prompts, plans)
    written = [one for plan, record in zip(plans, wanted, strict=True) for one in scored_in(prompts, plan, record)]
    assert len(written) > 10
    assert_logprobs_are_fresh(policy, tiny_tokenizer.vocab_size, written)
    plain = alone(policy, tiny_tokenizer, prompts, [replace(plan, scored=()) for plan in plans])
    assert [turns_of(record) for record in wanted] == plain
    preempted = shared = 0
    for rows, spare, options in (
        (2048, 300, {"max_running": 30}),
        (2048, 1, {"max_running": 30, "speculate": 3}),
        (16, 3, {"max_running": 5}),
        (24, 5, {"max_running": 30, "reuse": False}),
    ):
        monkeypatch.setattr(decoder_module, "FORWARD_ROWS", rows)
        decoder = make_decoder(policy, tiny_tokenizer, num_blocks=blocks(prompts, plans, spare), **options)
        assert play(decoder, prompts, plans) == wanted, options
        assert nobody_owns_a_block(decoder)
        preempted, shared = preempted + decoder.clock.preemptions, shared + decoder.clock.shared_tokens
    assert preempted and shared


def test_a_gpu_s_steps_agree(policy: Policy, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are read a step after their launch; prefills run with and without buffers, are cut off and preempted."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(paged_cuda, "_runs_triton", lambda q: False)  # the interpreter would take minutes
    prompts, plans = scored_world(0, tiny_tokenizer.vocab_size, 2)
    wanted = alone(policy, tiny_tokenizer, prompts, plans)
    preempted = 0
    for spare, rows, speculate in ((0, 2048, 3), (100, 24, 0)):
        monkeypatch.setattr(decoder_module, "FORWARD_ROWS", rows)
        sizes: dict[str, Any] = {"num_blocks": blocks(prompts, plans, spare), "block_size": 16, "max_running": 8}
        decoder = DeviceDecoder(policy, tiny_tokenizer, speculate=speculate, **sizes)
        agree(play(decoder, prompts, plans), wanted)
        assert nobody_owns_a_block(decoder) and decoder.idle
        preempted += decoder.clock.preemptions
    assert preempted


def scoring(decoder: Decoder, ids: list[int], scored_from: int, temperature: float = 1.0) -> TokenSequence:
    draw = SamplingParams(temperature)
    sequence = TokenSequence(SharedPrompt(ids), 0, draw, most=len(ids), scored_from=scored_from)
    decoder.score(sequence)
    return sequence


def until_scored(decoder: Decoder, sequence: TokenSequence) -> list[float]:
    while sequence not in decoder.step():
        assert not decoder.idle
    decoder.release(sequence, keep=True)
    assert decoder.idle
    return sequence.logprobs


@pytest.mark.parametrize("make", [Decoder, DeviceDecoder])
def test_one_that_is_preempted_goes_on_where_it_was(
    make: type[Decoder], policy: Policy, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_cuda, "_runs_triton", lambda q: False)
    monkeypatch.setattr(decoder_module, "FORWARD_ROWS", 20)
    ids = [Random(1).randrange(tiny_tokenizer.vocab_size) for _ in range(120)]
    decoder = make(policy, tiny_tokenizer, num_blocks=30, block_size=16, max_running=4)
    decoder.begin(120, DecodeClock())
    wanted = until_scored(decoder, scoring(decoder, ids, 30))
    assert len(wanted) == 90 and decoder.clock.prefilled_tokens == 119
    decoder.begin(120, DecodeClock())
    sequence = scoring(decoder, ids, 30)
    while not 0 < len(sequence.logprobs) < 90:
        decoder.step()
    while decoder._give_way():  # pending results are read first
        pass
    decoder._leave(decoder.scheduler.preempt(), keep=True)
    assert not decoder.idle
    assert until_scored(decoder, sequence) == pytest.approx(wanted, abs=1e-5)
    assert decoder.clock.prefilled_tokens == 119 and len(sequence.logprobs) == 90  # no row is computed twice
    # Its context is found again, up to the row that predicts the first of the ids.
    before = decoder.clock.prefilled_tokens
    assert until_scored(decoder, scoring(decoder, ids[:35], 30)) == pytest.approx(wanted[:5], abs=1e-5)
    assert decoder.clock.prefilled_tokens - before == 5
    assert until_scored(decoder, scoring(decoder, ids[:2], 1, 0.5)) != pytest.approx(wanted[:1])


@pytest.mark.parametrize("make", [Decoder, DeviceDecoder])
def test_logits_that_are_not_finite_end_it(
    make: type[Decoder], policy: Policy, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_cuda, "_runs_triton", lambda q: False)
    policy.norm.mul_(torch.nan)
    decoder = make(policy, tiny_tokenizer, num_blocks=30, block_size=16, max_running=4)
    decoder.begin(30, DecodeClock())
    with pytest.raises(NotFiniteDraw, match="log-prob of a token is not finite"):
        until_scored(decoder, scoring(decoder, [1, 2, 3, 4], 2))
