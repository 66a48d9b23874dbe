"""Laps: on a CPU the host's seconds, on CUDA the time between two events, which is read once it has passed."""

from typing import Any

import pytest
import torch
from decoding_cases import Plan, TurnPlan, play

from thresher.engine.decoding import decoder as clock_module
from thresher.engine.decoding.decoder import DecodeClock, Decoder, DeviceTimer
from thresher.engine.decoding.decoder_cuda import BucketStep, DeviceDecoder, PendingStep
from thresher.kernels.attention import paged_cuda
from thresher.policy.model import Policy
from thresher.policy.tokenizer import Tokenizer


class Gpu:
    """A queue of work and events. The host runs ahead of it until it waits; then all work is done."""

    def __init__(self) -> None:
        self.now, self.reached = 0.0, 0.0  # ms: when the queue will be empty, and up to when it is known to be done

    def event(self, enable_timing: bool = False) -> "FakeEvent":
        assert enable_timing
        return FakeEvent(self)


class FakeEvent:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.at = gpu, -1.0

    def record(self) -> None:
        self.at = self.gpu.now

    def synchronize(self) -> None:
        assert 0 <= self.at <= self.gpu.reached, "the host would wait"

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert 0 <= self.at <= end.at <= self.gpu.reached, "torch would raise"
        return end.at - self.at


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", gpu.event)
    return gpu


def test_on_cuda_a_lap_is_the_gpus_own_and_on_a_cpu_the_hosts(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda")
    with DeviceTimer(cuda) as first:
        gpu.now += 30.0
    with DeviceTimer(cuda) as second:
        gpu.now += 500.0
    gpu.reached = 30.0
    assert first.seconds() == pytest.approx(0.03) and first.host < 0.02, "the host did not wait for it"
    with pytest.raises(AssertionError, match="would wait"):
        second.seconds()
    gpu.reached = gpu.now
    clock = DecodeClock()
    clock.add([(first, 1.0), (second, 0.25)])
    assert clock.prefill == pytest.approx(0.155) and clock.decode == pytest.approx(0.375)
    ticks = iter([5.0, 7.5])
    monkeypatch.setattr(clock_module.time, "perf_counter", lambda: next(ticks))
    with DeviceTimer(torch.device("cpu")) as lap:
        pass
    assert lap.seconds() == lap.host == 2.5


@pytest.mark.parametrize("kind", [Decoder, DeviceDecoder])
@pytest.mark.parametrize("speculate", [0, 3])
def test_a_decoder_asks_for_no_lap_that_may_not_have_passed(
    kind: type[Decoder],
    speculate: int,
    gpu: Gpu,
    tiny_policy: Policy,
    tiny_tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prefills of 7 ms, decode steps and draws of 2 ms, on a GPU that has done only what was read back."""
    monkeypatch.setattr(paged_cuda, "_runs_triton", lambda q: False)
    module = __import__(kind.__module__, fromlist=["DeviceTimer"])
    monkeypatch.setattr(module, "DeviceTimer", lambda device: DeviceTimer(torch.device("cuda")))
    hidden, prefills, decodes = Policy.hidden, 0, 0

    def forward(policy: Policy, ids_T: torch.Tensor, positions_T: torch.Tensor, attend: Any) -> torch.Tensor:
        nonlocal prefills, decodes
        long = len(set(positions_T.tolist())) > 8
        prefills, decodes = prefills + long, decodes + (not long)
        gpu.now += 7.0 if long else 2.0
        return hidden(policy, ids_T, positions_T, attend)

    monkeypatch.setattr(Policy, "hidden", forward)
    decoder = kind(tiny_policy, tiny_tokenizer, num_blocks=40, block_size=16, max_running=4, speculate=speculate)
    # The work that the GPU has done when a step's draws are read: with its own decoder, up to that step's launch.
    launch, read, sample, times = BucketStep.launch, PendingStep.read, Decoder._sample_rows, list[float]()

    def launched(step: BucketStep) -> Any:
        rows = launch(step)
        times.append(gpu.now)
        return rows

    def was_read(pending: PendingStep) -> Any:
        gpu.reached = times.pop(0)
        return read(pending)

    def sampled(decoder: Decoder, *rows: Any) -> Any:
        done = sample(decoder, *rows)
        gpu.reached = gpu.now
        return done

    monkeypatch.setattr(BucketStep, "launch", launched)
    monkeypatch.setattr(PendingStep, "read", was_read)
    monkeypatch.setattr(Decoder, "_sample_rows", sampled)
    turns = (TurnPlan(room=6), TurnPlan(room=5, appended=(tuple(range(30)),)))
    play(decoder, [list(range(40))], [Plan(prompt=0, seed=seed, turns=turns) for seed in range(3)])
    assert prefills and decodes
    total = (7.0 * prefills + 2.0 * decodes) / 1000
    assert decoder.clock.prefill + decoder.clock.decode == pytest.approx(total)
    if kind is DeviceDecoder:
        assert decoder.clock.prefill == pytest.approx(prefills * 0.007)
