"""The host's cost of a step: between ends of turns the same for 64 sequences as for 4, with one read from the device.

Without drafts. A CPU's own way to draw (kernels/sampling.py) may read arrays as often as it likes; the limit of one
read applies to the way of every other device.
"""

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from decoding_cases import make_decoder, ops

from thresher.engine.decoding.decoder import DecodeClock, Decoder
from thresher.engine.decoding.scheduler import SamplingParams, SharedPrompt, TokenSequence
from thresher.kernels import sampling
from thresher.kernels.attention import paged_cpu
from thresher.policy.model import Policy
from thresher.policy.tokenizer import Tokenizer

DRAWS = (SamplingParams(0.9), SamplingParams(1.0, 5), SamplingParams(0.0), SamplingParams(1.0, 0, 0.9))
STOPS = (("zzzz",), (), ("qqq", "rrrrr"))
READINGS = ("cpu", "numpy", "tolist", "item", "__bool__", "__int__", "__float__", "__index__", "__array__", "__iter__")
FROM_PYTHON = ("tensor", "as_tensor", "asarray", "scalar_tensor", "frombuffer")
Counts = Counter[Any]


@pytest.fixture
def steady(tiny_policy: Policy, tiny_tokenizer: Tokenizer) -> Callable[..., Decoder]:
    """make(count, siblings, mixed): a decoder in the middle of its turns. mixed: sampling rules and stops differ."""
    object.__setattr__(tiny_policy.config, "eos_token_ids", ())

    def make(count: int, siblings: bool = False, mixed: bool = True) -> Decoder:
        decoder = make_decoder(tiny_policy, tiny_tokenizer, max_running=count)
        decoder.begin(100, DecodeClock())
        shared = SharedPrompt([7] * 40)
        for n in range(count):
            sequence = TokenSequence(shared if siblings else SharedPrompt([n + 1] * 40), n, SamplingParams())
            if mixed:
                sequence.draw = DRAWS[n % len(DRAWS)]
            decoder.begin_turn(sequence, STOPS[n % len(STOPS)] if mixed else (), 50)
        for _ in range(4):
            assert decoder.step() == []
        assert (decoder.pool.ref_count_P.max() > 1) == siblings and decoder.clock.preemptions == 0
        return decoder

    return make


def lines(step: Callable[[], Any]) -> Counts:
    """Count how often each line of Python runs, a comprehension's once per iteration. Lines of hypothesis are left out,
    because the garbage collector calls it at any time."""
    counts: Counts = Counter()

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if event in ("line", "call") and "hypothesis" not in frame.f_code.co_filename:
            counts[event, frame.f_code.co_filename, frame.f_lineno] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        step()
    finally:
        sys.settrace(before)
    return counts


@pytest.fixture(params=["as on a CPU", "as elsewhere"])
def way_to_draw(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "as elsewhere":
        monkeypatch.setattr(sampling, "draw_in_blocks", lambda *_: None)


@pytest.mark.parametrize("siblings", [False, True], ids=["apart", "siblings"])
@pytest.mark.parametrize("mixed", [False, True], ids=["alike", "mixed"])
def test_a_step_of_64_sequences_is_as_many_operations_as_one_of_4(
    siblings: bool, mixed: bool, steady: Callable[..., Decoder], way_to_draw: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if siblings:  # 64 are more than one product takes, so that a copy pays, and 4 are not: a choice, not a loop
        monkeypatch.setattr(paged_cpu, "COPY", -1)  # as if it cost nothing
    few, many = (steady(count, siblings, mixed) for count in (4, 64))
    few_ops, many_ops = ops(few.step), ops(many.step)
    assert few_ops == many_ops and len(few_ops) > 100
    assert not [name for name in few_ops if "_local_scalar_dense" in name or "scalar_tensor" in name]
    few_lines, many_lines = lines(few.step), lines(many.step)
    assert len(few_lines) > 100 and few_lines == many_lines, dict((few_lines - many_lines) + (many_lines - few_lines))
    assert len(few.scheduler.running) == 4 and len(many.scheduler.running) == 64


@pytest.mark.parametrize("siblings", [False, True], ids=["apart", "siblings"])
def test_a_step_reads_the_device_once_and_sends_no_lists(
    siblings: bool, steady: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "draw_in_blocks", lambda *_: None)
    decoder = steady(9, siblings, mixed=False)
    read: Counts = Counter()
    for name in READINGS:
        monkeypatch.setattr(torch.Tensor, name, counted(read, name, getattr(torch.Tensor, name)))
    for name in FROM_PYTHON:
        monkeypatch.setattr(torch, name, counted(read, name, getattr(torch, name)))
    decoder.step()
    monkeypatch.undo()
    assert read == {"cpu": 1, "numpy": 1}, "of what was computed the host looks at why turns end, and at nothing else"


def counted(counts: Counts, name: str, function: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        counts[name] += 1
        return function(*args, **kwargs)

    return call


def test_what_ends_is_all_that_is_looped_over(steady: Callable[..., Decoder]) -> None:
    """A step in which one turn ends costs the same few extra operations, however many sequences run."""
    extra = []
    for count in (4, 64):
        decoder = steady(count)
        plain = len(ops(decoder.step))
        decoder.batch.room_B[decoder.scheduler.running[2].slot] = 1
        ended: list[TokenSequence] = []
        extra.append(len(ops(lambda decoder=decoder, ended=ended: ended.extend(decoder.step()))) - plain)
        assert ended == [decoder.scheduler.running[2]]
    assert extra[0] == extra[1]
