"""Result of a reward function: the number, its parts, and the answer that was judged."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A reward and what explains it: numbers and flags that fit in JSON (None for a part that nobody measured), and the
    answer, None without one."""

    reward: float
    parts: Mapping[str, float | int | bool | None]
    answer: str | None
