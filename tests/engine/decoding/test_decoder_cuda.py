"""Decoding as on a GPU: its results are the ordinary decoder's up to rounding, although a step is launched before the
last one is read; and a step is a function of its buffers, so that a CUDA graph can hold it.

Where there is a GPU, all this runs on it, with its kernels and graphs, and is compared with a CPU's results.
"""

import re
from collections.abc import Callable, Sequence
from copy import deepcopy
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from decoding_cases import (
    GAP,
    Adversary,
    TurnPlan,
    agree,
    alone,
    blocks,
    near_ties,
    nobody_owns_a_block,
    ops,
    play,
    random_world,
    whole,
)
from decoding_cases import Plan as SequencePlan

from thresher.engine.decoding import decoder as decoder_module
from thresher.engine.decoding import decoder_cuda, speculative
from thresher.engine.decoding.decoder import DecodeClock
from thresher.engine.decoding.decoder_cuda import (
    MEMBERS,
    PREFILL_EVERY,
    BucketStep,
    DeviceDecoder,
    PrefillStep,
    bucket_of,
    drafts_bucket,
    shared_prefixes,
)
from thresher.engine.decoding.scheduler import SamplingParams, SharedPrompt, TokenSequence
from thresher.engine.decoding.speculative import MOST, PATIENCE, PAUSE
from thresher.kernels.attention import paged_cuda
from thresher.kernels.attention.paged_cpu import QueryRuns
from thresher.policy.model import Policy
from thresher.policy.tokenizer import Tokenizer

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CUDA = DEVICE.type == "cuda"
PLAIN = SamplingParams()
FILTERED = (SamplingParams(top_k=5), SamplingParams(top_p=0.9), SamplingParams(temperature=0.5, min_p=0.1))
needs_cuda = pytest.mark.skipif(not CUDA, reason="graphs are captured on a GPU")


def make_device_decoder(policy: Policy, tokenizer: Tokenizer, **changes: Any) -> DeviceDecoder:
    """Return a decoder on the GPU, if there is one. Its graphs are compared with results of the policy on the CPU."""
    return DeviceDecoder(policy, tokenizer, **{"num_blocks": 400, "block_size": 16, "max_running": 64, **changes})


@pytest.fixture(autouse=True)
def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace attention's kernels by the torch reference, because the interpreter would take minutes."""
    if not CUDA:
        monkeypatch.setattr(paged_cuda, "_runs_triton", lambda q: False)


@pytest.fixture
def tiny_policy(make_tiny_policy: Callable[..., Policy]) -> Policy:
    """Return the taught policy, on the GPU if there is one. There its heads have 16 dimensions, the fewest that the
    kernels support."""
    return make_tiny_policy(**({"hidden_size": 64} if CUDA else {})).to(DEVICE)


@pytest.fixture
def endless(tiny_policy: Policy) -> Policy:
    """Return the tiny policy without an end-of-text token."""
    object.__setattr__(tiny_policy.config, "eos_token_ids", ())
    return tiny_policy


@pytest.fixture
def guessing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Random, list[list[int]]], None]:
    """Give every decoder that drafts an adversary as its drafter, which knows the tokens to come."""

    def set_up(rng: Random, written: list[list[int]]) -> None:
        monkeypatch.setattr(decoder_module, "Drafter", Adversary)
        monkeypatch.setattr(Adversary, "rng", rng)
        monkeypatch.setattr(Adversary, "written", written)

    return set_up


@pytest.fixture
def agreeing(
    tiny_policy: Policy, tiny_tokenizer: Tokenizer, guessing: Callable[..., None]
) -> Callable[..., DeviceDecoder]:
    """agreeing(prompts, plans, rng=.., **options) -> a decoder whose results are those of one sequence at a time."""

    def make(prompts: Any, plans: Any, rng: Random | None = None, **options: Any) -> DeviceDecoder:
        on_cpu = deepcopy(tiny_policy).cpu()
        wanted = alone(on_cpu, tiny_tokenizer, prompts, plans)
        guessing(rng or Random(0), [whole(prompts, plan, record) for plan, record in zip(plans, wanted, strict=True)])
        decoder = make_device_decoder(tiny_policy, tiny_tokenizer, **options)
        found = play(decoder, prompts, plans)
        # On a CPU rounding decides no draw of these tests.
        near = near_ties(on_cpu, tiny_tokenizer.vocab_size, prompts, plans, wanted) if CUDA else None
        agree(found, wanted, near=near)
        assert nobody_owns_a_block(decoder)
        assert decoder.clock.sampled_tokens == sum(len(turn[0]) for record in found for turn in record)
        return decoder

    return make


@pytest.mark.parametrize(
    ("speculate", "seed"), [*((0, seed) for seed in range(3)), *((4, 100 + seed) for seed in range(6))]
)
@pytest.mark.fast_cases(3)
def test_whatever_is_asked_and_guessed_the_results_are_those_of_one_sequence_at_a_time(
    speculate: int,
    seed: int,
    tiny_policy: Policy,
    tiny_tokenizer: Tokenizer,
    agreeing: Callable[..., DeviceDecoder],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Turns end within guesses, by a stop, the end of text or their room; some are preempted, some have filters."""
    rng, vocab = Random(seed), tiny_tokenizer.vocab_size
    if seed % 3 == 0:  # some prefills have too many new rows for a buffered step
        monkeypatch.setattr(decoder_cuda, "PREFILL_ROWS", (4, 16))
        monkeypatch.setattr(decoder_cuda, "PREFILL_RUNS", 3)
        monkeypatch.setattr(PrefillStep, "captured_at", 2)
    played = list[int]()
    play_step = PrefillStep.play
    monkeypatch.setattr(PrefillStep, "play", lambda step: played.append(len(step.inputs["rows"][0])) or play_step(step))
    prompts, plans = random_world(rng, vocab, 8)
    if seed % 2:
        object.__setattr__(tiny_policy.config, "eos_token_ids", tuple(range(0, vocab, 12)))
    full = {"num_blocks": blocks(prompts, plans, rng.randrange(4)), "max_running": 5}
    for changes in ({}, full, {"reuse": False, "share_prefix": bool(seed % 2)}):
        clock = agreeing(prompts, plans, rng, speculate=speculate, **changes).clock
        assert speculate == 0 or 0 < clock.accepted_tokens < clock.drafted_tokens
    # Which other sizes are played, and how often, depends on the tokens, which depend on the CPU.
    assert set(played) >= {4, 16} if seed % 3 == 0 else played


def test_guesses_go_before_anybody_has_to(endless: Policy, agreeing: Callable[..., DeviceDecoder]) -> None:
    """Two sequences in exactly the blocks that they fill: a draft beyond them preempts neither."""
    prompts, plans = [[1] * 15, [2] * 15], [SequencePlan(prompt=n, seed=n, turns=(TurnPlan(room=17),)) for n in (0, 1)]
    for spare, sent in ((2, False), (1, True)):
        size = blocks(prompts, plans, spare)
        clock = agreeing(prompts, plans, Random(3), speculate=8, num_blocks=size, max_running=2).clock
        assert bool(clock.preemptions) == sent and clock.accepted_tokens > 0


@pytest.mark.fast_cases(0, gpu=1)
def test_few_new_rows_wait_while_others_decode(
    endless: Policy, agreeing: Callable[..., DeviceDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []  # in which something was prefilled
    prefill = DeviceDecoder._prefill

    def noted(decoder: DeviceDecoder, runs: QueryRuns) -> None:
        steps.extend([decoder._steps_begun] * bool(len(runs.slot_N)))
        prefill(decoder, runs)

    monkeypatch.setattr(DeviceDecoder, "_prefill", noted)
    prompts = [[n + 1, *range(20, 40)] for n in range(16)]

    def coming(ticks: Sequence[int], room: int) -> list[int]:
        turns = (TurnPlan(room=room),)
        steps.clear()
        agreeing(prompts, [SequencePlan(prompt=n, seed=n, turns=turns, arrive=tick) for n, tick in enumerate(ticks)])
        return steps

    assert coming(range(16), 40) == list(range(0, 16 + PREFILL_EVERY, PREFILL_EVERY))
    assert coming((0, PREFILL_EVERY + 1), 1) == [0, PREFILL_EVERY + 1], "nobody decodes"
    monkeypatch.setattr(decoder_cuda, "FEW_ROWS", len(prompts[0]) - 2)
    assert coming(range(16), 40) == list(range(16))


def test_new_rows_that_keep_a_gpu_busy_for_longer_than_launches_fill_no_bucket(
    endless: Policy, agreeing: Callable[..., DeviceDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = [[n + 1] * 40 * (n + 1) for n in range(4)]  # 39 to 159 rows, each in one forward
    plans = [SequencePlan(prompt=n, seed=n, turns=(TurnPlan(room=2),), arrive=20 * n) for n in range(4)]
    weights = sum(weight.numel() for weight in endless.parameters())
    monkeypatch.setattr(decoder_cuda, "PREFILL_ROWS", (128, 256))
    for work, sizes in ((256 * weights, {128, 256}), (255 * weights, {128}), (127 * weights, set())):
        monkeypatch.setattr(decoder_cuda, "PREFILL_WORK", work)
        assert set(agreeing(prompts, plans)._prefills) == sizes


def test_who_has_to_go_takes_along_what_was_under_way(endless: Policy, agreeing: Callable[..., DeviceDecoder]) -> None:
    prompts = [[n + 1] * 30 for n in range(6)]
    plans = [SequencePlan(prompt=n, seed=n, turns=(TurnPlan(room=40),)) for n in range(6)]
    assert agreeing(prompts, plans, num_blocks=blocks(prompts, plans, 6)).clock.preemptions > 0


def test_a_token_too_many_is_discarded_and_counted(tiny_policy: Policy, tiny_tokenizer: Tokenizer) -> None:
    """A turn's end by its stop is detected one step late; an end by its room is not."""
    for turn in (TurnPlan(room=40, stop=("e", "a", "i")), TurnPlan(room=5)):
        plans = [SequencePlan(prompt=0, seed=n, turns=(turn,)) for n in range(8)]
        decoder = make_device_decoder(tiny_policy, tiny_tokenizer)
        late = sum(record[0][2] != "length" for record in play(decoder, [[5] * 20], plans))
        assert bool(late) == bool(turn.stop) and decoder.clock.discarded_tokens == late
        object.__setattr__(tiny_policy.config, "eos_token_ids", ())


@pytest.mark.parametrize("speculate", [0, 4])
def test_an_interrupt_reads_what_is_pending_and_the_next_run_goes_on_behind_it(
    speculate: int, endless: Policy, tiny_tokenizer: Tokenizer, guessing: Callable[..., None]
) -> None:
    """After 9 steps the first sequence's last token is pending, others are in mid-turn, and one waits."""
    rooms, left, pending = [9, 30, 40, 50], list(range(4)), 0
    prompts = [[n + 1] * 30 for n in left]
    plans = [SequencePlan(prompt=n, seed=n, turns=(TurnPlan(room=room),)) for n, room in enumerate(rooms)]
    wanted = alone(deepcopy(endless).cpu(), tiny_tokenizer, prompts, plans)
    guessing(Random(0), [whole(prompts, plan, record) for plan, record in zip(plans, wanted, strict=True)])
    decoder = make_device_decoder(endless, tiny_tokenizer, speculate=speculate, max_running=3)
    drawn: dict[int, tuple[list[int], list[float]]] = {n: ([], []) for n in left}
    while left:
        decoder.begin(90, clock := DecodeClock())
        sequences = {n: TokenSequence(SharedPrompt(list(prompts[n])), n, PLAIN) for n in left}
        for n, sequence in sequences.items():
            decoder.begin_turn(sequence, (), rooms[n], drawn=drawn[n])
        found = [sequence for _ in range(9) for sequence in decoder.step()]
        pending += decoder._pending is not None
        found += decoder.interrupt()
        assert nobody_owns_a_block(decoder)
        new = {n: (sequence.turn_ids, sequence.logprobs) for n, sequence in sequences.items()}
        assert clock.sampled_tokens == sum(len(ids) - len(drawn[n][0]) for n, (ids, _) in new.items())
        drawn |= new
        assert {n for n in left if sequences[n] in found} == {n for n in left if len(drawn[n][0]) == rooms[n]}
        left = [n for n in left if sequences[n] not in found]
        for n, ((ids, logprobs, *_),) in enumerate(wanted):
            count = len(drawn[n][0])
            assert drawn[n][0] == ids[:count]
            assert drawn[n][1] == pytest.approx([float.fromhex(x) for x in logprobs[:count]], abs=GAP)
    assert pending > 1


@pytest.mark.parametrize(("speculate", "waiting"), [(0, [1]), ("auto", [1, 2, 3, 4, 5, 16, 32]), (2, range(1, 99))])
def test_only_where_guesses_are_looked_up_is_a_step_read_before_the_next_is_launched(
    speculate: Any,
    waiting: Sequence[int],
    endless: Policy,
    tiny_tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On "auto", if no draft pays, drafts are looked up a few times and then every PAUSE steps. If drafts are
    requested, they are looked up in every step. Whatever the tokens, a draft is found only if drafts are requested."""
    assert PATIENCE == 4 and PAUSE == 16
    events: list[str] = []
    launch, read = BucketStep.launch, decoder_cuda.PendingStep.read

    def nearest(source: Any, slot_N: Any, length_N: Any, tokens_BL: Any, known_N: Any, tokens: int) -> Any:
        return np.full(len(slot_N), 0 if speculate == 2 and tokens == 3 else -1)  # 3: in its own context

    monkeypatch.setattr(speculative, "_nearest", nearest)
    monkeypatch.setattr(BucketStep, "launch", lambda step: events.append("launch") or launch(step))
    monkeypatch.setattr(decoder_cuda.PendingStep, "read", lambda pending: events.append("read") or read(pending))
    decoder = make_device_decoder(endless, tiny_tokenizer, speculate=speculate)
    play(decoder, [range(20)], [SequencePlan(prompt=0, seed=0, turns=(TurnPlan(room=40),))])
    assert bool(decoder.clock.drafted_tokens) == (speculate == 2)
    pending = [events[:at].count("launch") - events[:at].count("read") for at in range(len(events))]
    found = [before == 0 for before, event in zip(pending, events, strict=True) if event == "launch"]
    found.pop()  # there is no room for a draft then
    assert found == [step in waiting for step in range(1, len(found) + 1)]
    assert events.count("launch") == events.count("read")
    assert speculate != 0 or events == ["launch", *["launch", "read"] * 39, "read"]


def test_what_is_streamed_is_what_was_written(
    tiny_policy: Policy, tiny_tokenizer: Tokenizer, guessing: Callable[..., None]
) -> None:
    def stream(speculate: int) -> tuple[dict[int, list[int]], int]:
        decoder = make_device_decoder(tiny_policy, tiny_tokenizer, speculate=speculate)
        decoder.begin(80, DecodeClock())
        shared = SharedPrompt([7] * 20)
        sequences = [TokenSequence(shared, seed, SamplingParams()) for seed in range(5)]
        for sequence in sequences:
            decoder.begin_turn(sequence, ("ng",), 30)
        streamed: dict[int, list[int]] = {sequence.seed: [] for sequence in sequences}
        while not decoder.idle:
            ended = decoder.step()
            for sequence, ids in decoder.new_ids():
                streamed[sequence.seed] += ids
            for sequence in ended:
                decoder.release(sequence)
        assert sum(one.accepted for one in sequences) == decoder.clock.accepted_tokens
        assert streamed == {sequence.seed: sequence.turn_ids for sequence in sequences}
        return streamed, decoder.clock.accepted_tokens

    written, _ = stream(0)
    guessing(Random(0), [[7] * 20 + ids for ids in written.values()])
    again, accepted = stream(4)
    assert again == written and accepted > 0


@pytest.mark.parametrize("speculate", [0, 2])
@pytest.mark.slow
def test_on_the_kernels_themselves(
    speculate: int, agreeing: Callable[..., DeviceDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefill over history, decoding, a prefix shared by two sequences, and drafts, in Triton."""
    pytest.importorskip("triton")
    monkeypatch.setattr(paged_cuda, "_runs_triton", lambda q: True)
    monkeypatch.setattr(decoder_cuda, "prefix_pays", lambda length, members: members > 1)
    monkeypatch.setattr(decoder_cuda, "PREFILL_ROWS", (32,))
    monkeypatch.setattr(Adversary, "most", 2)
    turns = (TurnPlan(room=3), TurnPlan(room=2, appended=((7, 8, 9),)))
    plans = [SequencePlan(prompt=n // 2, seed=n, turns=turns) for n in range(3)]
    decoder = agreeing([[3] * 20, [4] * 9], plans, speculate=speculate)
    assert bool(decoder.clock.accepted_tokens) == bool(speculate) and decoder._prefills[32].uses


@pytest.mark.parametrize("count", [256 if CUDA else 24])
def test_as_sequences_end_every_bucket_takes_its_turn(
    count: int, endless: Policy, agreeing: Callable[..., DeviceDecoder]
) -> None:
    """The first sixteen sequences run longest and end one by one."""
    prompts = [[n + 1, n] for n in range(count)]
    rooms = [3 + (count - n) // 12 if n >= 16 else 3 + count // 12 + 16 - n for n in range(count)]
    plans = [SequencePlan(prompt=n, seed=n, turns=(TurnPlan(room=room),)) for n, room in enumerate(rooms)]
    decoder = agreeing(prompts, plans, max_running=count, num_blocks=1 + 4 * count)
    assert {key[0] for key in decoder._steps} == {bucket_of(n) for n in range(1, count + 1)}
    for step in decoder._steps.values():
        assert (step.graph is not None) == (CUDA and step.uses >= BucketStep.captured_at)


def test_after_an_update_the_results_are_those_of_the_new_weights(
    endless: Policy, tiny_tokenizer: Tokenizer, agreeing: Callable[..., DeviceDecoder]
) -> None:
    """Two rollouts of one decoder, and an update of the policy between them."""
    prompts = [[3] * 50, [4] * 33]
    plans = [SequencePlan(prompt=n % 2, seed=n, turns=(TurnPlan(room=20),)) for n in range(7)]
    decoder = make_device_decoder(endless, tiny_tokenizer)
    noise, records = torch.Generator().manual_seed(0), []
    for _ in range(2):
        on_cpu = deepcopy(endless).cpu()
        wanted, found = alone(on_cpu, tiny_tokenizer, prompts, plans), play(decoder, prompts, plans)
        agree(found, wanted, near=near_ties(on_cpu, tiny_tokenizer.vocab_size, prompts, plans, wanted))
        records.append(wanted)
        decoder.end()
        with torch.no_grad():
            for weight in endless.parameters():
                weight.add_((0.1 * torch.randn(weight.shape, generator=noise)).to(DEVICE))
    assert all(turn[0][0] != new[0][0] for turn, new in zip(*records, strict=True))


# --- The step as a function of buffers


@pytest.fixture
def running(endless: Policy, tiny_tokenizer: Tokenizer, guessing: Callable[..., None]) -> Callable[..., DeviceDecoder]:
    """running(count, drafts, siblings=1, draw=PLAIN) -> a decoder with `count` sequences, `siblings` to a prompt."""

    def make(count: int, drafts: int, siblings: int = 1, draw: SamplingParams = PLAIN) -> DeviceDecoder:
        guessing(Random(count), [])
        decoder = make_device_decoder(
            endless, tiny_tokenizer, speculate=drafts, max_running=max(count, 64), num_blocks=1 + 8 * max(count, 50)
        )
        decoder.begin(120, DecodeClock())
        prompts = [SharedPrompt([n + 1] * 33) for n in range(-(-count // siblings))]
        for n in range(count):
            sequence = TokenSequence(prompts[n // siblings], n, draw)
            decoder.begin_turn(sequence, ("zzzz",), 60)
        for _ in range(4):
            assert decoder.step() == []
        return decoder

    return make


@pytest.mark.parametrize("drafts", [0, 8])
@torch.inference_mode()
def test_a_step_reads_nothing_back_and_takes_nothing_from_python(
    drafts: int, running: Callable[..., DeviceDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except for the kernels, which stand-ins replace; their grids follow from shapes."""
    monkeypatch.setattr(decoder_cuda.sampling, "draw_in_blocks", lambda *_: None)
    monkeypatch.setattr(decoder_cuda, "decode_attention", lambda q_BQND, *_: q_BQND)
    monkeypatch.setattr(decoder_cuda, "rotate_and_store", lambda qkv, rope, kv_heads, *_: qkv[:, : -2 * kv_heads])
    found = []
    for count in (3, 13):
        decoder = running(count, drafts)
        step = decoder._steps[bucket_of(count), drafts, False, 1.0, False]
        assert step.size == bucket_of(count) and len(step.row_Q) == 1 + drafts
        found.append(ops(step.run))
        if CUDA:
            torch.cuda.synchronize()  # it ran on a stream other than the decoder's, whose memory may be freed from here
        # On a GPU a scalar operand of `where` is a tensor, which a launch fills.
        read_or_sent = ("_local_scalar_dense", "lift_fresh", *(() if CUDA else ("scalar_tensor",)))
        assert not [name for name in found[-1] if any(word in name for word in read_or_sent)]
    assert found[0] == found[1], "as many operations for 13 sequences as for 3"


@pytest.mark.parametrize("drafts", [0, 8])
@torch.inference_mode()
def test_the_same_buffers_give_the_same_step(drafts: int, running: Callable[..., DeviceDecoder]) -> None:
    decoder = running(5, drafts)
    step = decoder._steps[8, drafts, False, 1.0, False]
    batch, kept = decoder.batch, [decoder.batch.tokens_BL, decoder.batch.state_B, decoder.cache.k_LPKSD, step.sent]
    before = [x.clone() for x in kept]
    step.run()
    first = step.packed_BX.clone(), [x.clone() for x in kept]
    for x, old in zip(kept, before, strict=True):
        x.copy_(old)
    step.packed_BX.zero_()
    step.run()
    assert torch.equal(step.packed_BX, first[0])
    # Several rows of the spare slot may write to the same place.
    assert all(torch.equal(x[:-1], y[:-1]) for x, y in zip(kept[:2], first[1][:2], strict=True))
    unused = sorted(set(range(len(batch.known_B) - 1)) - set(slots_of(decoder)))
    assert torch.equal(batch.tokens_BL[unused], before[0][unused]), "rows that fill it up write to the spare slot alone"


def test_a_small_cache_and_its_steps_outlive_a_run(
    endless: Policy, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights may change between two runs; the second run is that of a decoder made for the new weights."""
    prompts = [[n + 1] * (20 + n) for n in range(5)]
    plans = [SequencePlan(prompt=n, seed=n, turns=(TurnPlan(room=25),)) for n in range(5)]
    kept, freed = (make_device_decoder(endless, tiny_tokenizer) for _ in range(2))
    first = play(kept, prompts, plans)
    steps, tensors = dict(kept._steps), list(kept.held())
    assert steps and not torch.equal(*(x[:, 1] for x in tensors))
    freed.keeps = False
    freed.end()
    assert not freed.held() and not freed._steps
    with torch.no_grad():
        for parameter in endless.parameters():
            parameter.mul_(1.5)
    again = play(kept, prompts[::-1], plans)
    assert kept._steps == steps and all(x is y for x, y in zip(kept.held(), tensors, strict=True))
    fresh = make_device_decoder(endless, tiny_tokenizer)
    agree(again, play(fresh, prompts[::-1], plans))
    assert [turn for record in again for turn in record] != [turn for record in first for turn in record]


def test_steps_are_made_anew_for_other_weights_rules_and_lengths(endless: Policy, tiny_tokenizer: Tokenizer) -> None:
    """A step is made anew if a tensor that its graph reads is replaced, and for another temperature."""
    decoder = make_device_decoder(endless, tiny_tokenizer)
    prompts, one = [[1] * 20], (TurnPlan(room=9),)
    play(decoder, prompts, [SequencePlan(prompt=0, seed=0, turns=one)])
    before = dict(decoder._steps)
    play(decoder, prompts, [SequencePlan(prompt=0, seed=0, turns=one, draw=SamplingParams(0.5))])
    assert before.items() < decoder._steps.items()
    assert {key[-2:] for key in decoder._steps} == {(1.0, False), (0.5, False)}
    weight = next(endless.parameters())
    weight.data = weight.data.clone()
    play(decoder, prompts, [SequencePlan(prompt=0, seed=0, turns=one)])
    assert not set(before.values()) & set(decoder._steps.values())
    before = dict(decoder._steps)
    play(decoder, [[1] * 200], [SequencePlan(prompt=0, seed=0, turns=one)])
    assert not set(before.values()) & set(decoder._steps.values())


def test_drafts_are_looked_up_in_the_arrays_of_a_longer_run_before(endless: Policy, tiny_tokenizer: Tokenizer) -> None:
    decoder = make_device_decoder(endless, tiny_tokenizer, speculate=8)
    for length in (180, 100):
        turns = (TurnPlan(room=30),)
        play(decoder, [[1, 2, 3] * (length // 3)], [SequencePlan(prompt=0, seed=0, turns=turns)])
        assert decoder.drafter.earlier_BL.shape[1] == decoder.batch.tokens_BL.shape[1]


@needs_cuda
@pytest.mark.parametrize(
    ("size", "drafts", "shares", "dtype", "draw"),
    [
        *((size, 0, False, torch.bfloat16, PLAIN) for size in sorted({bucket_of(count) for count in range(1, 257)})),
        *((size, drafts, True, torch.bfloat16, PLAIN) for size in (4, 64) for drafts in (0, 1, 2, 4, 8)),
        *((size, drafts, drafts > 0, torch.float32, PLAIN) for size in (4, 64) for drafts in (0, 4)),
        *((size, drafts, False, torch.bfloat16, draw) for size, drafts in ((4, 0), (64, 4)) for draw in FILTERED),
    ],
)
@torch.inference_mode()
def test_a_graph_has_the_bits_of_the_step_that_it_holds(
    size: int,
    drafts: int,
    shares: bool,
    dtype: torch.dtype,
    draw: SamplingParams,
    endless: Policy,
    running: Callable[..., DeviceDecoder],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The bucket has one row of padding, if there is room for it."""
    monkeypatch.setattr(decoder_cuda, "prefix_pays", lambda length, members: members > 1)
    endless.to(dtype)
    count = max(size - 1, 1)
    decoder = running(count, 0, 2 if shares else 1, draw)
    decoder._receive_pending()
    batch, slot_N, rng = decoder.batch, decoder._slot_order(), np.random.default_rng(size)
    cached_N, table_NP = batch.cached_B[slot_N], batch.table_BP[slot_N]
    prefix = shared_prefixes(table_NP, cached_N // 16, 16) if shares else None
    assert shares == (prefix is not None)
    step = decoder._step_for(size, drafts, shares)
    drafted_N = rng.integers(0, drafts + 1, count)
    step.load(slot_N, cached_N, table_NP, prefix, rng.integers(0, 100, (count, drafts)), drafted_N)
    kept = [batch.tokens_BL, batch.state_B, decoder._cache().k_LPKSD, decoder._cache().v_LPKSD]
    before, found = [x.clone() for x in kept], []
    for _ in range(BucketStep.captured_at):
        step.launch()
    assert step.graph is not None
    for run in (step.run, step.graph.replay, step.graph.replay):
        for x, old in zip(kept, before, strict=True):
            x.copy_(old)
        step.packed_BX.zero_()
        run()
        tokens_BL, state_B, k_LPKSD, v_LPKSD = (x.clone() for x in kept)
        # Several rows of the spare slot may write to the same place.
        found.append([step.packed_BX[:count].clone(), tokens_BL[:-1], state_B[:-1], k_LPKSD, v_LPKSD])
    eager, *replayed = found
    assert not torch.equal(eager[1], before[0][:-1]), "nothing was drawn"
    for one in replayed:
        for ours, theirs in zip(one, eager, strict=True):
            # Compared as bytes, because memory that was never written may be NaN.
            assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


@needs_cuda
@torch.inference_mode()
def test_a_graph_of_new_rows_has_the_bits_of_the_step_that_it_holds(endless: Policy, tiny_tokenizer: Tokenizer) -> None:
    decoder = make_device_decoder(endless, tiny_tokenizer)
    decoder.begin(120, DecodeClock())
    for n in range(3):
        decoder.begin_turn(TokenSequence(SharedPrompt([n + 1] * (20 + n)), n, PLAIN), (), 9)
    decoder._admit()
    step = PrefillStep(64, endless, decoder._cache(), decoder.batch, decoder._pool)
    step.load(decoder._schedule_rows())
    found = []
    for _ in range(PrefillStep.captured_at + 1):
        for kept in decoder.held():
            kept.zero_()
        step.play()
        found.append([kept.clone() for kept in decoder.held()])
    assert step.graph is not None and float(found[0][0].abs().max()) > 0
    for after in found[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(after, found[0], strict=True))


def slots_of(decoder: DeviceDecoder) -> list[int]:
    return [sequence.slot for sequence in decoder.scheduler.running]


def test_buckets_are_few() -> None:
    sizes = [bucket_of(count) for count in range(1, 257)]
    assert all(size >= count for count, size in enumerate(sizes, start=1)) and len(set(sizes)) == 20
    assert sizes[:5] == [1, 2, 4, 4, 8] and sizes[16] == 32 and sizes[255] == 256
    assert [drafts_bucket(count) for count in range(MOST + 1)] == [0, 1, 2, 4, 4, 8, 8, 8, 8]


def test_groups_are_those_who_hold_the_same_blocks_and_gain_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder_cuda, "prefix_pays", lambda length, members: length >= 32 and members > 1)
    table_NP = np.array([[1, 2, 9, 0], [1, 2, 8, 0], [3, 4, 5, 6], [7, 10, 0, 0], [1, 2, 11, 0], [12, 13, 0, 0]])
    found = shared_prefixes(table_NP, np.array([2, 2, 1, 0, 2, 1]), 16)
    assert found is not None
    assert found.first_N.tolist() == [32, 32, 0, 0, 32, 0] and found.length_G.tolist() == [32]
    assert found.members_GM.tolist() == [[0, 1, 4, *[-1] * (MEMBERS - 3)]] and found.table_GP[0, :2].tolist() == [1, 2]
    assert shared_prefixes(table_NP[2:4], np.array([2, 1]), 16) is None
    many = np.tile([[1, 2, 3]], (2 * MEMBERS + 1, 1))
    found = shared_prefixes(many, np.full(len(many), 3), 16)
    assert found is not None and [(row >= 0).sum() for row in found.members_GM] == [MEMBERS, MEMBERS, 1]
    assert sorted(found.members_GM[found.members_GM >= 0].tolist()) == list(range(len(many)))


def test_siblings_read_their_prompt_once(
    agreeing: Callable[..., DeviceDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder_cuda, "prefix_pays", lambda length, members: members > 1)
    shared: list[Any] = []
    attention = decoder_cuda.decode_attention
    monkeypatch.setattr(
        decoder_cuda, "decode_attention", lambda q, k, v, rows: shared.append(rows.prefix) or attention(q, k, v, rows)
    )
    agreeing([[3] * 50, [4] * 33], [SequencePlan(prompt=n % 2, seed=n, turns=(TurnPlan(room=20),)) for n in range(7)])
    assert any(prefix is not None for prefix in shared)


def test_who_holds_the_memory_is_said() -> None:
    said = decoder_cuda.memory_left(DEVICE)
    pattern = r" \(of [\d.]+ on cuda.* torch holds [\d.e-]+ here, other programs and libraries [\d.]+\)" if CUDA else ""
    assert re.fullmatch(r"[\d.]+ GiB are free" + pattern, said)
