"""Which questions a step asks, and the seeds of its samples: functions of (run's seed, step), so nothing is stored."""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b
from random import Random

from thresher.retrieval.questions import Question


def seed_of(*parts: object) -> int:
    """63 bits that depend on all parts, the same on every machine."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest()) >> 1


def questions_of_step(questions: Sequence[Question], count: int, seed: int, step: int) -> list[Question]:
    """The step's questions: each pass over the data is shuffled by (seed, pass) and every question comes once in it."""
    chosen = []
    for at in range((step - 1) * count, step * count):
        number, position = divmod(at, len(questions))
        chosen.append(questions[_order(len(questions), seed, number)[position]])
    return chosen


@lru_cache(maxsize=4)
def _order(count: int, seed: int, number: int) -> list[int]:
    order = list(range(count))
    Random(seed_of("questions", seed, number)).shuffle(order)
    return order
