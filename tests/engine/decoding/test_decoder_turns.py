"""Turns of a decoder's sequences: what ends a turn, what comes between two, and when a sequence may leave. Where a test
needs to know the tokens, `script` forces the ids."""

from collections.abc import Callable

import pytest
from batch_invariance import needs_invariant_policy
from decoding_cases import Plan, TurnPlan, alone, make_decoder

from thresher.common.errors import UserError
from thresher.engine.decoding import decoder as decoder_module
from thresher.engine.decoding.decoder import DecodeClock, Decoder
from thresher.engine.decoding.scheduler import SamplingParams, SharedPrompt, TokenSequence
from thresher.policy.model import Policy
from thresher.policy.tokenizer import Tokenizer

EOS = "<|endoftext|>"
PROMPT = [30, 31, 32]


@pytest.fixture
def decoder(tiny_policy: Policy, tiny_tokenizer: Tokenizer) -> Decoder:
    decoder = make_decoder(tiny_policy, tiny_tokenizer)
    decoder.begin(200, DecodeClock())
    return decoder


def start(decoder: Decoder, seed: int, room: int = 40, stop: tuple[str, ...] = ()) -> TokenSequence:
    sequence = TokenSequence(SharedPrompt(list(PROMPT)), seed, SamplingParams())
    decoder.begin_turn(sequence, stop, room)
    return sequence


def until(decoder: Decoder, *sequences: TokenSequence) -> None:
    """Step until the turns of all these sequences have ended."""
    left = set(sequences)
    for _ in range(300):
        left -= set(decoder.step())
        if not left:
            return
    raise AssertionError(f"{len(left)} turns never end")


TEXT = f"Anna <search>Bell</search> has{EOS}"
STOPPED = "abc</search>"
# text, stops, tokens by which its room falls short of it; finish, text written, bytes after the stop
ENDS: list[tuple[str, tuple[str, ...], int, str, str, bytes]] = [
    (TEXT, ("</search>",), 0, "stop", "Anna <search>Bell</search>", b""),
    (TEXT, ("<search>", "</search>"), 0, "stop", "Anna <search>", b""),
    (TEXT, ("Bell", "Anna Q"), 0, "stop", "Anna <search>Bell", b""),
    (TEXT, (), 0, "eos", TEXT, b""),
    (TEXT, ("Eva",), 0, "eos", TEXT, b""),
    ("aaaa", (), 1, "length", "aaa", b""),
    ("<search>mayor</search><", ("</search>",), 0, "stop", "<search>mayor</search><", b"<"),
    (STOPPED, ("</search>",), 0, "stop", STOPPED, b""),  # the last token there is room for
    (STOPPED, ("</search>",), 1, "length", STOPPED[:-1], b""),
    (f"ab{EOS}", (EOS,), 0, "stop", f"ab{EOS}", b""),  # a token that is a stop and ends the text is a stop
]


def test_a_turn_ends_at_its_stop_at_the_end_of_text_or_when_its_room_is_full(
    decoder: Decoder, tiny_tokenizer: Tokenizer, script: Callable[..., None]
) -> None:
    """The sequences run side by side, each with its own stops: a stop of one does not end another."""
    script({seed: [text] for seed, (text, *_) in enumerate(ENDS)})
    ids = [tiny_tokenizer.encode_template(text) for text, *_ in ENDS]
    sequences = [start(decoder, seed, len(ids[seed]) - short, stop) for seed, (_, stop, short, *_) in enumerate(ENDS)]
    until(decoder, *sequences)
    for sequence, right, (_, stop, _, finish, written, trailing) in zip(sequences, ids, ENDS, strict=True):
        assert sequence.turn_ids == right[: len(sequence.turn_ids)] and len(sequence.logprobs) == len(sequence.turn_ids)
        assert (sequence.finish, tiny_tokenizer.decode(sequence.turn_ids)) == (finish, written)
        if finish == "stop":
            assert sequence.hit is not None and sequence.hit.trailing == trailing and sequence.hit.tag in stop
        else:
            assert sequence.hit is None


def test_a_stop_does_not_reach_from_one_turn_into_the_next(
    decoder: Decoder, tiny_tokenizer: Tokenizer, script: Callable[..., None]
) -> None:
    script({0: ["</sea", f"rch>{EOS}"], 1: ["</sea", "rch> and on"]})
    size = len(tiny_tokenizer.encode("</sea"))
    halved, whole = (start(decoder, seed, room, ("</search>",)) for seed, room in ((0, size), (1, 40)))
    until(decoder, halved)
    assert halved.finish == "length" and whole.writing
    decoder.begin_turn(halved, ("</search>",), 20)
    until(decoder, halved, whole)
    assert halved.finish == "eos" and whole.finish == "stop"


def send_back(decoder: Decoder) -> TokenSequence:
    """Preempt the youngest sequence, as if there were no blocks left."""
    sequence = decoder.scheduler.preempt()
    decoder._leave(sequence, keep=False)
    return sequence


def test_a_stop_is_found_by_one_that_was_sent_back_in_the_middle_of_it(
    decoder: Decoder, tiny_tokenizer: Tokenizer, script: Callable[..., None]
) -> None:
    text = "Eva</search>"
    size = len(tiny_tokenizer.encode(text))
    for steps in range(1, size):
        decoder.begin(200, DecodeClock())
        script({0: [text]})
        sequence = start(decoder, 0, stop=("</search>",))
        for _ in range(steps):
            assert decoder.step() == []
        assert send_back(decoder) is sequence and len(sequence.turn_ids) == len(sequence.logprobs) == steps
        until(decoder, sequence)
        assert sequence.finish == "stop" and len(sequence.turn_ids) == len(sequence.logprobs) == size
        assert sequence.prefilled == len(PROMPT) + steps, "what it wrote; its prompt is still known"


def test_a_sequence_may_be_released_at_any_time(decoder: Decoder) -> None:
    decoder.scheduler.max_running = 2
    runs, stays, waits = (start(decoder, seed) for seed in range(3))
    decoder.step()
    assert waits.slot < 0
    decoder.release(waits)
    decoder.release(runs)
    until(decoder, stays)
    assert not waits.ids[len(PROMPT) :] and not waits.finish and not runs.finish
    decoder.release(stays)
    decoder.release(stays)
    assert decoder.idle and decoder.step() == [] and not decoder.pool.ref_count_P.any()


@pytest.mark.parametrize("max_running", [1, 64])
@pytest.mark.parametrize("sent_back", [True, False], ids=["sent back", "released"])
def test_who_goes_in_the_middle_of_its_prompt_holds_nobody_up(
    sent_back: bool, max_running: int, tiny_policy: Policy, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences that waited for it compute the rest themselves: siblings, and one with the same prefix."""
    needs_invariant_policy(tiny_policy)
    monkeypatch.setattr(decoder_module, "FORWARD_ROWS", 8)
    ids = [50 + n % 30 for n in range(60)]
    plans = [Plan(prompt=n // 3, seed=n, turns=(TurnPlan(room=5),)) for n in range(4)]
    expected = [record[0] for record in alone(tiny_policy, tiny_tokenizer, [ids, ids], plans)]
    decoder = make_decoder(tiny_policy, tiny_tokenizer, max_running=max_running)
    decoder.begin(200, DecodeClock())
    shared = SharedPrompt(ids)
    prompts = (shared, shared, shared, SharedPrompt(list(ids)))
    first, *others = sequences = [TokenSequence(prompt, n, SamplingParams()) for n, prompt in enumerate(prompts)]
    for sequence in sequences:
        decoder.begin_turn(sequence, (), 5)
    for _ in range(3):
        decoder.step()
    assert decoder.scheduler.running == [first] and 16 < decoder.batch.cached_B[first.slot] < len(ids)
    if sent_back:
        send_back(decoder)
    else:
        decoder.release(first)
    for sequence in [*([first] if sent_back else []), *others]:
        if not sequence.finish:
            until(decoder, sequence)
        assert (sequence.turn_ids, [x.hex() for x in sequence.logprobs]) == expected[sequence.seed][:2]
        if max_running == 1:
            decoder.release(sequence, keep=True)
    assert decoder.clock.prefilled_tokens < 2 * len(ids), "what it had computed is used"


def test_what_is_kept_is_found_until_the_next_begin_and_what_is_not_is_not(decoder: Decoder) -> None:
    for keep in (True, False):
        decoder.begin(200, DecodeClock())
        first = start(decoder, 1, room=40)
        until(decoder, first)
        decoder.release(first, keep=keep)
        again = TokenSequence(SharedPrompt(list(first.ids)), 2, SamplingParams())
        decoder.begin_turn(again, (), 1)
        until(decoder, again)
        assert again.prefilled == (1 if keep else len(first.ids) - len(PROMPT)), "the last that was drawn was never fed"


def test_a_cache_that_could_never_hold_a_sequence_is_refused_at_once(
    tiny_policy: Policy, tiny_tokenizer: Tokenizer
) -> None:
    decoder = make_decoder(tiny_policy, tiny_tokenizer, num_blocks=1 + 3)
    decoder.begin(48, DecodeClock())
    with pytest.raises(UserError, match="KV cache of 48 tokens is too small for a sequence of 49"):
        decoder.begin(49, DecodeClock())


def test_the_clock_counts_what_was_done(
    decoder: Decoder, tiny_tokenizer: Tokenizer, script: Callable[..., None]
) -> None:
    """Three siblings of one prompt, one of them with a second turn after appended text."""
    script({seed: ["abcdefgh" * 4] for seed in range(3)})
    prompt = SharedPrompt(list(range(40, 60)))
    sequences = [TokenSequence(prompt, seed, SamplingParams()) for seed in range(3)]
    for sequence in sequences:
        decoder.begin_turn(sequence, (), 4)
    until(decoder, *sequences)
    for piece in ([1], [2, 3, 4], [5]):
        decoder.append(sequences[0], piece)
    decoder.begin_turn(sequences[0], (), 2)
    until(decoder, sequences[0])
    clock = decoder.clock
    assert (clock.sampled_tokens, clock.prefilled_tokens, clock.shared_tokens) == (3 * 4 + 2, 20 + 6, 2 * 20)
    assert clock.forwards == 1 + 3 + 1 + 1 and clock.forward_rows == 20 + 3 * 3 + 6 + 1 and clock.preemptions == 0
    assert [one.prefilled for one in sequences] == [20 + 5, 0, 0], "of its own turn's tokens none was prefilled"
    assert min(clock.decode, clock.prefill, clock.host) > 0
    assert prompt.waiting == 0 and not prompt.filling
