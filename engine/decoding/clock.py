"""What a decoder counts, and where its time went."""

import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch


class Lap:
    """`with Lap(device) as lap:` how long takes what is launched in it. host: seconds until all of it was launched.
    seconds(): those that it took, on CUDA by two events on its stream; to be asked once what was launched is known to
    be done, for it waits until it is."""

    __slots__ = ("_events", "host")

    def __init__(self, device: torch.device) -> None:
        self.host = 0.0
        cuda = device.type == "cuda"
        self._events = tuple(torch.cuda.Event(enable_timing=True) for _ in range(2)) if cuda else ()

    def __enter__(self) -> "Lap":
        for event in self._events[:1]:
            event.record()
        self.host -= time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.host += time.perf_counter()
        for event in self._events[1:]:
            event.record()

    def seconds(self) -> float:
        """On a CPU what is launched has been computed: the host's."""
        if not self._events:
            return self.host
        begun, ended = self._events
        ended.synchronize()
        milliseconds: float = begun.elapsed_time(ended)
        return milliseconds / 1000


@dataclass(slots=True)
class DecodeClock:
    """Where the time of decoding went, in seconds, and how much was done.

    prefill, decode: of the forwards, and of the draws under `decode`. host: in the decoder's own Python around them. On
    CUDA the first two are the GPU's own (`Lap`), which goes on meanwhile, so that the three may be more than what
    passed, `total`. rest: see there.
    prefilled_tokens: rows of prompts and of appended text, those computed a second time included; shared_tokens: those
    that another sequence had computed. discarded_tokens: drawn for a turn that had ended. drafted_tokens, of which
    accepted_tokens came true.
    """

    decode: float = 0.0
    prefill: float = 0.0
    host: float = 0.0
    total: float = 0.0
    sampled_tokens: int = 0
    prefilled_tokens: int = 0
    shared_tokens: int = 0
    forwards: int = 0
    forward_rows: int = 0
    discarded_tokens: int = 0
    preemptions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def rest(self) -> float:
        """What of `total` was spent on nothing else; on CUDA, while the GPU had nothing to do."""
        return max(self.total - self.decode - self.prefill, 0.0)

    def add(self, laps: Iterable[tuple[Lap, float]]) -> None:
        """Of forwards and draws that are known to be done, each with the share of it that was prefill."""
        for lap, prefilled in laps:
            seconds = lap.seconds()
            self.prefill += seconds * prefilled
            self.decode += seconds * (1 - prefilled)
