"""Input and result of a reward, a pure function: the answer to one question with all that a reward may look at.

A segment holds raw bytes, since a tag may begin inside a token and a turn may end inside a character. What takes a
model to know (an entailment probability, a judge's verdict) is passed in as a number, so that a reward can be computed
again from what a run folder stores.
"""

import re
import unicodedata
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any

# As the templates of Qwen, Llama, SmolLM2 and DeepSeek, whose bars are U+FF5C, end a reply.
_END = re.compile(r"(<\|[^<>|]*\|>|<\uff5c[^<>\uff5c]*\uff5c>|</s>)+\s*$")
_WORD = re.compile(r"[^\W_]+")


class Source(StrEnum):
    """Author of a segment. Only POLICY tokens can be in the loss; `trained_contexts` of engine/protocol/trajectory.py
    lists which are: not turns taken over from another sample, and branches only where they are trained."""

    PROMPT = "prompt"
    POLICY = "policy"
    RETRIEVED = "retrieved"
    FEEDBACK = "feedback"


@dataclass(frozen=True, slots=True)
class TextSegment:
    """A stretch of a transcript written by one source, as UTF-8 bytes (possibly cut inside a character)."""

    source: Source
    text: bytes


def count_words(text: str) -> int:
    """Count runs of letters and digits: the length of a text where there is no tokenizer.

    Any other character separates words, invisible ones too; marks that combine with a letter (accents, vowel signs)
    belong to it.
    """
    if not text.isascii():
        text = "".join(c for c in unicodedata.normalize("NFC", text) if not unicodedata.category(c).startswith("M"))
    return len(_WORD.findall(text))


def hash_uniform(id_: str, pieces: Sequence[TextSegment]) -> float:
    """Hash a question's id and a transcript to a number in [0, 1)."""
    text = b"\0".join([id_.encode("utf-8", "surrogatepass"), *(piece.text for piece in pieces)])
    return int.from_bytes(blake2b(text, digest_size=6).digest()) / 2**48


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardInput:
    """A transcript and what it is judged by.

    pieces: the transcript. golds: acceptable answers. passages: (title, text) of those shown with the question, in
    order. gold_indices: which of them hold a supporting fact, from 1; None: unknown. branches: what the policy wrote in
    branches and calls, by name; the context is PROMPT, what was written there POLICY. entailment: a judge's probability
    in [0, 1] for the system's own claims. verdict: a judge's yes or no on the answer. length: of a text, in tokens or
    words. chance: a number in [0, 1), for rewards with a random part. metadata: the question's other keys. scores:
    texts whose log-probs the episode asked for, in order: `text`; `context`, the template text between the present
    context and it (None: a context of its own); `turns`, the number of POLICY segments before; `logprobs`, one a token
    of the text, in nats, under softmax(z / temperature) of the rollout (1 where greedy).
    """

    pieces: Sequence[TextSegment]
    golds: Sequence[str]
    question: str = ""
    passages: Sequence[tuple[str, str]] = ()
    gold_indices: Sequence[int] | None = None
    branches: Mapping[str, Sequence[TextSegment]] = field(default_factory=dict)
    entailment: float | None = None
    verdict: bool | None = None
    length: Callable[[str], int] = count_words
    chance: float = 0.0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    scores: Sequence[Mapping[str, Any]] = ()

    @property
    def text(self) -> str:
        """All that the policy wrote, without the control token that ends a reply."""
        written = b"".join(piece.text for piece in self.pieces if piece.source is Source.POLICY)
        return _END.sub("", written.decode(errors="replace"))


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A reward, its parts as numbers and flags that fit in JSON (None: not measured), and the answer judged.

    Parts named em, f1 and answered are measures of the answer, if the reward has any. turns: a reward of each POLICY
    segment, in order, of all contexts; `reward` is added to the last. tokens: spans (start, end, value) of all that the
    policy wrote, in bytes, whose tokens get `value` beside their advantage. `grpo.advantage` says which of them train.
    branches: by name, the rewards of trained branches that are not trained by `reward`; each is compared with those of
    its name in the group.
    """

    reward: float
    parts: Mapping[str, float | int | bool | None] = field(default_factory=dict)
    answer: str | None = None
    turns: Sequence[float] | None = None
    tokens: Sequence[tuple[int, int, float]] | None = None
    branches: Mapping[str, float] | None = None


def reward_all(
    reward: Callable[[RewardInput], RewardResult],
    reward_group: Callable[[Sequence[RewardInput]], Sequence[RewardResult]] | None,
    attempts: Sequence[RewardInput],
    groups: Sequence[Hashable],
) -> list[RewardResult]:
    """Return the reward of each attempt, by `reward`, or by `reward_group` of all with the same group. groups[i]: the
    group of attempts[i]."""
    if reward_group is None:
        return list(map(reward, attempts))
    members: dict[Hashable, list[int]] = {}
    for number, group in enumerate(groups):
        members.setdefault(group, []).append(number)
    found: dict[int, RewardResult] = {}
    for numbers in members.values():
        found |= dict(zip(numbers, reward_group([attempts[number] for number in numbers]), strict=True))
    return [found[number] for number in range(len(attempts))]
