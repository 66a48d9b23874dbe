"""Layers with states in a rollout: a sample has the same bits whatever runs next to it and whether it is drafted,
preempted or found again; and the block tree's record of where a prefix's states are."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from decoding_cases import Plan, TurnPlan, agree, alone, blocks, play, random_world, turns_of
from model_cases import make_config

from thresher.common.errors import UserError
from thresher.engine.decoding import decoder as decoder_module
from thresher.engine.decoding import generator as generator_file
from thresher.engine.decoding.blocks import BlockPool, Prefix
from thresher.engine.decoding.decoder import Decoder
from thresher.engine.decoding.decoder_cuda import DeviceDecoder
from thresher.engine.decoding.generator import GenerateRequest, Generator
from thresher.engine.decoding.scheduler import SamplingParams
from thresher.kernels.attention import paged_cuda
from thresher.policy.config import DeltaShape
from thresher.policy.model import Policy, init_policy
from thresher.policy.tokenizer import Tokenizer, train_bpe

SCORED_ID = 200  # in no prompt, and no sample draws it
TYPES = ("linear_attention", "full_attention", "linear_attention")


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_bpe([], 257, ["<|end|>"])


@pytest.fixture(scope="module")
def policy() -> Policy:
    """Return a policy that writes a few tokens again and again, so that drafts come true, but not always."""
    own: dict[str, Any] = {"model_type": "qwen3_5_text", "num_hidden_layers": 3, "layer_types": TYPES, "head_dim": 16}
    own |= {"partial_rotary_factor": 0.25, "delta": DeltaShape(2, 4, 8, 8, 4), "vocab_size": 272, "eos_token_ids": ()}
    policy = init_policy(make_config(**own, max_position_embeddings=512), 1)
    with torch.no_grad():
        policy.embed_VH[6:] = 0
        policy.embed_VH[:6] *= 4
    return policy.requires_grad_(False)


@pytest.fixture(autouse=True)
def _no_interpreted_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attend by torch where there is no GPU: Triton's interpreter would take minutes."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(paged_cuda, "_runs_triton", lambda q: False)


def requests() -> list[GenerateRequest]:
    """Return requests for three prompts, the third of 150 tokens, with two settings each."""
    prompts = [[0, 1, 2, 3, 4, 5] * 4, [1, 2, 3] * 7, [(7 * place * place) % 6 for place in range(150)]]
    return [
        GenerateRequest(prompt_ids=ids, max_new_tokens=80, n=3, seed=seed, temperature=temperature)
        for seed, ids in enumerate(prompts)
        for temperature in (0.0, 1.0)
    ]


def samples(generator: Generator) -> Iterator[tuple[list[int], list[float]]]:
    for found in generator.generate(requests()):
        yield from ((sample.token_ids, list(sample.logprobs)) for sample in found)


@pytest.mark.slow
def test_no_bit_depends_on_what_runs_beside_a_sample(policy: Policy, tokenizer: Tokenizer) -> None:
    alone = Generator(policy, tokenizer, max_running=1, speculate=0)
    wanted = list(samples(alone))
    assert len({tuple(ids) for ids, _ in wanted}) > 6, "samples of a seed differ"
    seen = {"preemptions": 0, "accepted_tokens": 0, "rejected": 0, "shared_tokens": 0}
    for options in (
        {"speculate": 0},
        {"speculate": 3},
        {"speculate": 8, "max_running": 5},
        {"speculate": 0, "kv_tokens": 448},
        {"speculate": 2, "kv_tokens": 448},
        {},
    ):
        generator = Generator(policy, tokenizer, **options)  # type: ignore[arg-type]
        assert list(samples(generator)) == wanted, options
        clock = generator.clock
        seen["rejected"] += clock.drafted_tokens - clock.accepted_tokens
        for name in seen.keys() - {"rejected"}:
            seen[name] += getattr(clock, name)
    assert all(seen.values()), seen


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("speculate", [0, 3])
def test_steps_that_are_launched_ahead_agree(speculate: int, policy: Policy, tokenizer: Tokenizer) -> None:
    """A GPU's decoder: drafts after the last token of a prompt whose state others take, and tokens rolled back."""
    prompts, plans = random_world(Random(3), 6, 10)
    wanted = alone(policy, tokenizer, prompts, plans)
    sizes = {"num_blocks": blocks(prompts, plans, 4), "block_size": 16, "max_running": 6, "speculate": speculate}
    decoder = DeviceDecoder(policy, tokenizer, **sizes)
    agree(play(decoder, prompts, plans), wanted)
    assert decoder.clock.shared_tokens > 0 and (decoder.clock.drafted_tokens > 0) == (speculate > 0)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("make", [Decoder, DeviceDecoder])
def test_scores_are_those_of_a_whole_forward_and_change_no_sample(
    make: type[Decoder], policy: Policy, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts are scored from kept states and cut off by a step's rows; no sample goes on from their states."""
    prompts, plans = random_world(Random(4), 6, 8)
    wanted = alone(policy, tokenizer, prompts, plans)
    texts = [tuple(Random(seed).choices(range(6), k=20)) for seed in range(8)]
    scored = [replace(plan, scored=text) for plan, text in zip(plans, texts, strict=True)]
    monkeypatch.setattr(decoder_module, "FORWARD_ROWS", 30)
    sizes = {"num_blocks": blocks(prompts, scored, 4), "block_size": 16, "max_running": 6, "speculate": 3}
    found = play(make(policy, tokenizer, **sizes), prompts, scored)
    agree([turns_of(record) for record in found], wanted)
    for plan, record in zip(plans, found, strict=True):
        scale = plan.draw.temperature or 1.0
        (first, *_) = record
        ids = torch.tensor([*prompts[plan.prompt], *first[0]])
        start = len(prompts[plan.prompt])
        logits_TV = policy.logits(ids)[start - 1 : -1, : tokenizer.vocab_size]
        expected = torch.log_softmax(logits_TV / scale, -1).gather(1, ids[start:, None])[:, 0]
        got = torch.tensor([float.fromhex(x) for x in first[1]])
        torch.testing.assert_close(got, expected, rtol=0, atol=5e-3)


@pytest.mark.parametrize("make", [Decoder, DeviceDecoder])
def test_a_turn_begins_with_the_states_before_a_text_that_was_scored(
    make: type[Decoder], policy: Policy, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Appended text is computed only once; a score costs its text, and a turn the token that it feeds first."""
    turns = TurnPlan(room=10, appended=((1, 2, 3) * 9,)), TurnPlan(room=10, appended=((4, 5) * 30,)), TurnPlan(room=10)
    prompts, plans = [[0, 1, 2, 3, 4, 5] * 4], [Plan(prompt=0, seed=seed, turns=turns) for seed in range(3)]
    prefilled = []
    kept: list[Sequence[int]] = []
    keep_state = BlockPool.keep_state

    def keeping(pool: BlockPool, ids: Sequence[int], version: int = 0) -> int | None:
        kept.append(ids)
        return keep_state(pool, ids, version)

    monkeypatch.setattr(BlockPool, "keep_state", keeping)
    for text in ((), (SCORED_ID,) * 5):
        scored = [replace(plan, scored=text) for plan in plans]
        sizes = {"num_blocks": blocks(prompts, scored, 40), "block_size": 16, "max_running": 60, "speculate": 0}
        decoder = make(policy, tokenizer, **sizes)
        play(decoder, prompts, scored)
        prefilled.append(decoder.clock.prefilled_tokens)
    plain, with_scores = prefilled
    # Three samples with three turns each. The first scores of all three begin at once, so each computes the prompt.
    assert with_scores - plain <= 9 * (len(text) + 2) + 3 * len(prompts[0])
    assert kept and not any(SCORED_ID in ids for ids in kept)  # no kept state includes a scored text


def test_a_prompt_is_kept_before_its_drafts(policy: Policy, tokenizer: Tokenizer) -> None:
    """A GPU's first step feeds a prompt's last token and three drafts; three samples then take the earlier state."""
    prompts, turn = [[0, 1, 2, 3, 4, 5] * 5], TurnPlan(room=20)
    draws = [SamplingParams(float(seed > 1)) for seed in range(1, 5)]
    plans = [Plan(prompt=0, seed=seed, turns=(turn,), draw=draw) for seed, draw in enumerate(draws)]
    wanted = alone(policy, tokenizer, prompts, plans)
    sizes = {"num_blocks": blocks(prompts, plans, 8), "block_size": 16, "max_running": 4, "speculate": 3}
    decoder = DeviceDecoder(policy, tokenizer, **sizes)
    agree(play(decoder, prompts, plans), wanted)
    assert decoder.clock.shared_tokens == 3 * (len(prompts[0]) - 1) and decoder.clock.drafted_tokens > 0


def test_recorded_log_probs_are_those_of_a_whole_forward(policy: Policy, tokenizer: Tokenizer) -> None:
    """Chunks are summed in another order than single tokens: the gap that a step's line shows, for logits up to 40."""
    generator = Generator(policy, tokenizer)
    for request, found in zip(requests(), generator.generate(requests()), strict=True):
        prompt = list(request.prompt_ids or ())
        for sample in found:
            ids = torch.tensor([*prompt, *sample.token_ids])
            logits_TV = policy.logits(ids)[len(prompt) - 1 : -1, : tokenizer.vocab_size]
            scale = request.temperature or 1.0
            expected = torch.log_softmax(logits_TV / scale, -1).gather(1, ids[len(prompt) :, None])[:, 0]
            torch.testing.assert_close(torch.tensor(sample.logprobs), expected, rtol=0, atol=5e-3)


def test_states_are_made_for_as_many_samples_as_are_asked_for(
    policy: Policy, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More are made once more are needed; a number that does not fit is refused with its size."""
    generator = Generator(policy, tokenizer, max_running=200)
    held = []
    for n in (1, 5, 3, 300):
        generator.generate([GenerateRequest(prompt_ids=[1, 2, 3], max_new_tokens=1, n=n)])
        assert generator._decoder is not None
        held.append(generator._decoder.max_running)
    assert held == [2, 8, 8, 200]
    monkeypatch.setattr(generator_file, "free_memory", lambda device: 4096)
    with pytest.raises(UserError, match=r"the states of 2 samples at once take .* GiB, .*; lower max_running"):
        Generator(policy, tokenizer).generate([GenerateRequest(prompt_ids=[1], max_new_tokens=1)])


def pool_with(ids: list[int], snapshots: int = 2) -> tuple[BlockPool, list[int]]:
    """Return a pool with pages of 4 that holds `ids`, computed, and their blocks."""
    pool = BlockPool(12, 4, snapshots)
    blocks = pool.allocate(pool.blocks_for(len(ids))).tolist()
    pool.insert(ids, blocks, pool.root, 0, ready=True)
    return pool, blocks


def test_a_beginning_is_of_use_up_to_a_snapshot() -> None:
    ids = [*range(10)]
    pool, blocks = pool_with(ids)
    assert pool.match_state(ids, 10) == Prefix([], pool.root), "keys without states"
    assert pool.keep_state(ids[:6]) == 0 and pool.keep_state(ids[:8]) == 1
    within = pool.match_state([*ids[:7], 99], 8)
    assert (within.blocks, within.tail, within.tail_tokens, within.snapshot) == (blocks[:1], blocks[1], 2, 0)
    full = pool.match_state(ids, 9)
    assert (full.blocks, full.tail, full.snapshot) == (blocks[:2], None, 1)
    assert pool.match_state(ids, 7).snapshot == 0 and pool.match_state(ids, 5).snapshot is None
    assert pool.match_state([9, *ids], 10).snapshot is None
    assert pool.keep_state(ids[:6]) == 0, "a place has one"
    # The least recently used snapshot is dropped: that of 8 tokens.
    assert pool.keep_state(ids[:3]) == 1 and pool.match_state(ids, 10).snapshot == 0
    # Keeping a snapshot again counts as a use: that of 3 tokens is dropped, and not that of 6.
    assert pool.match_state(ids, 3).snapshot == 1 and pool.keep_state(ids[:6]) == 0
    assert pool.keep_state(ids[:8]) == 1


def test_snapshots_go_with_their_blocks() -> None:
    ids = [*range(10)]
    pool, blocks = pool_with(ids)
    assert pool.keep_state(ids) == 0 and pool.keep_state([*ids, 10]) is None and pool.keep_state([]) is None
    pool.free(blocks)
    pool.allocate(11)
    assert pool.match_state(ids, 10).snapshot is None
    again = pool_with(ids, snapshots=0)[0]
    assert again.keep_state(ids) is None
