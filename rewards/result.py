"""What a reward function hands back: the number, what it is made of, and the answer that was judged."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A reward and what explains it: numbers and flags that fit in JSON, and the answer, None without one."""

    reward: float
    parts: dict[str, float | int | bool]
    answer: str | None
