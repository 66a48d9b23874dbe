"""What was drawn, into the lanes and to the host: in packed rows, as from a GPU, comes what a CPU reads in place."""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from decoding_cases import make_decoder, play, random_world

from thresher.engine.decoding import verify
from thresher.engine.decoding.lanes import Lanes, StopBank
from thresher.engine.decoding.sequences import Draw
from thresher.engine.decoding.verify import Ints, keep_drawn, send_drawn
from thresher.kernels import sampling
from thresher.policy.model import Policy
from thresher.policy.tokenizer import Tokenizer

CPU = torch.device("cpu")
COUNT, KNOWN, DRAFTS = 24, 5, 3


def test_a_row_brings_back_every_bit() -> None:
    bits = torch.tensor([0, 1, -1, 2**31 - 1, -(2**31), 0x7FC00001, -0x400000], dtype=torch.int32)
    ids_N = torch.tensor([0, 1, 151_664, 2**31 - 1, 5, 6, 7])
    code_N, taken_N = torch.tensor([0, 1, 2, 300, 0, 0, 1]), torch.tensor([1, 1, 17, 1, 2, 3, 4])
    rows = send_drawn(ids_N, bits.view(torch.float32), code_N, taken_N)
    assert rows.rows_N4.shape == (7, 4) and rows.rows_N4.element_size() == 4
    drawn = rows.read()
    for found, sent in zip((drawn.ids_N, drawn.code_N, drawn.taken_N), (ids_N, code_N, taken_N), strict=True):
        assert found.dtype == np.int64 and found.tolist() == sent.tolist()
    assert drawn.logprobs_N.dtype == np.float32 and drawn.logprobs_N.view(np.int32).tolist() == bits.tolist()
    none = send_drawn(*(x[:0] for x in (ids_N, bits.view(torch.float32), code_N, taken_N))).read()
    assert [len(column) for column in none] == [0] * 4


@pytest.fixture
def stops(tiny_tokenizer: Tokenizer) -> StopBank:
    return StopBank(tiny_tokenizer, [tiny_tokenizer.added_tokens["<|endoftext|>"]], CPU)


def drafted_lanes(tokenizer: Tokenizer, stops: StopBank, seed: int) -> tuple[Lanes, Ints]:
    """Lanes that know KNOWN tokens of some text, with guesses behind them, and the bytes of a stop half read."""
    noise = torch.Generator().manual_seed(seed)
    lanes = Lanes(COUNT, 40, 4, CPU)
    lanes.tokens_BL[:] = torch.randint(0, tokenizer.vocab_size, lanes.tokens_BL.shape, generator=noise)
    lanes.known_B[:] = KNOWN
    for lane in range(COUNT):
        state_N = torch.tensor([stops.start(((), ("</search>",), ("</answer>", "</search>"))[lane % 3])])
        for token in tokenizer.encode_template("x</search>")[: -1 if lane % 2 else -2]:
            state_N, _ = stops.advance(state_N, torch.tensor([token]))
        lanes.state_B[lane] = state_N[0]
    return lanes, np.random.default_rng(seed).permutation(COUNT)[: COUNT - 5]


@pytest.mark.parametrize("drafts", [0, DRAFTS])
def test_rows_say_what_a_cpu_reads_in_place(
    drafts: int, tiny_tokenizer: Tokenizer, stops: StopBank, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = [tiny_tokenizer.encode_template("x</search>")[-1], tiny_tokenizer.added_tokens["<|endoftext|>"]]
    seen_codes, seen_taken = set(), set()
    for seed in range(8):
        lanes, lane_N = drafted_lanes(tiny_tokenizer, stops, seed)
        draw = np.random.default_rng(100 + seed)
        drafted_N = draw.integers(0, drafts + 1, len(lane_N))
        rows, ids = 1 + drafted_N, []
        for lane, count in zip(lane_N, rows, strict=True):
            guessed = lanes.tokens_BL[lane, KNOWN : KNOWN + count].tolist()  # true guesses, but for some
            ids += [token if draw.random() < 0.6 else int(draw.choice([*ends, 7])) for token in guessed]
        ids_F, logprobs_F = torch.tensor(ids), -torch.rand(len(ids), generator=torch.Generator().manual_seed(seed))
        arguments = (lane_N, drafted_N, ids_F, logprobs_F)
        in_place, in_rows = deepcopy(lanes), deepcopy(lanes)
        code_N, taken_N = keep_drawn(in_place, stops, *arguments)

        sent: list[verify.DrawnRows] = []

        def send(*columns: torch.Tensor, sent: list[verify.DrawnRows] = sent) -> verify.DrawnRows:
            sent.append(send_drawn(*columns))
            return sent[-1]

        with monkeypatch.context() as patch:
            patch.setattr(verify, "reads_rows", lambda _: True)
            patch.setattr(verify, "send_drawn", send)
            found_code_N, found_taken_N = keep_drawn(in_rows, stops, *arguments)
        assert np.array_equal(found_code_N, code_N) and np.array_equal(found_taken_N, taken_N)
        for name in ("tokens_BL", "logprobs_BL", "state_B"):
            assert torch.equal(getattr(in_rows, name), getattr(in_place, name))
        (row,) = sent  # one copy
        last_N = KNOWN + taken_N - 1
        assert np.array_equal(row.read().ids_N, in_place.tokens_BL.numpy()[lane_N, last_N])
        assert np.array_equal(row.read().logprobs_N, in_place.logprobs_BL.numpy()[lane_N, last_N])
        assert np.array_equal(row.read().code_N, code_N) and np.array_equal(row.read().taken_N, taken_N)
        seen_codes |= set(code_N.tolist())
        seen_taken |= set(taken_N.tolist())
    assert {0, 1} < seen_codes and seen_taken == set(range(1, drafts + 2)), "too little was seen"


def test_only_a_gpu_is_read_in_rows() -> None:
    assert verify.reads_rows(torch.device("cuda", 0)) and not verify.reads_rows(CPU)


@pytest.mark.filterwarnings("ignore:.*(encountered|All-NaN).*:RuntimeWarning")  # numpy, on what is masked
def test_drawn_and_read_as_on_a_gpu_a_rollout_has_the_same_tokens(
    tiny_policy: Policy, tiny_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Out of the head's product, in Triton's interpreter; rows with filters beside them, and turns of every end."""
    pytest.importorskip("triton")
    from thresher.kernels.drawing import head_draw_triton

    prompts, plans = random_world(Random(3), tiny_tokenizer.vocab_size, 6)
    draws = (Draw(), Draw(0.0), Draw(0.7))
    plans = [
        replace(plan, draw=draws[number % 3], turns=tuple(replace(turn, room=min(turn.room, 6)) for turn in plan.turns))
        for number, plan in enumerate(plans)
    ]
    plans[0] = replace(plans[0], draw=Draw(0.8, 5), arrive=6)
    decoder = make_decoder(tiny_policy, tiny_tokenizer)
    expected = play(decoder, prompts, plans)
    calls = {"fused": 0, "rows": 0}

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            calls[name] += 1
            return function(*arguments)

        return call

    monkeypatch.setattr(sampling, "_draws_fused", lambda *_: True)
    monkeypatch.setattr(verify, "reads_rows", lambda _: True)
    monkeypatch.setattr(head_draw_triton, "draw_fused", counted("fused", head_draw_triton.draw_fused))
    monkeypatch.setattr(verify, "send_drawn", counted("rows", send_drawn))
    found = play(decoder, prompts, plans)
    assert 0 < calls["fused"] < calls["rows"], "some steps have filters and some have none"
    for ours, theirs in zip(found, expected, strict=True):
        for turn, as_on_cpu in zip(ours, theirs, strict=True):
            assert (turn[0], *turn[2:]) == (as_on_cpu[0], *as_on_cpu[2:])
            values, expected_values = ([float.fromhex(x) for x in one[1]] for one in (turn, as_on_cpu))
            assert values == pytest.approx(expected_values, rel=0, abs=1e-5)
