"""What a decoder counts, and where its time went."""

from dataclasses import dataclass


@dataclass(slots=True)
class DecodeClock:
    """Where the time of decoding went, in seconds, and how much was done.

    host: in Python around the forwards and draws. prefilled_tokens: rows of prompts and of appended text, those
    computed a second time included; shared_tokens: those that another sequence had computed. On CUDA `prefill` is the
    time to launch it; the GPU's own time is waited for in the draw, under `decode`.
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
