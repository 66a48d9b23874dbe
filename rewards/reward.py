"""Input and result of a reward, which is a pure function of an answer to one question and its context.

A segment holds raw bytes, because a tag may begin inside a token and a turn may end inside a character. Results of
other models (an entailment probability, a judge's verdict) are passed in as numbers, so a reward can be recomputed from
a run folder.
"""

import re
import unicodedata
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b
from typing import Any

# End of a reply in the templates of Qwen, Llama, SmolLM2 and DeepSeek (whose bars are U+FF5C).
_END = re.compile(r"(<\|[^<>|]*\|>|<\uff5c[^<>\uff5c]*\uff5c>|</s>)+\s*$")
_WORD = re.compile(r"[^\W_]+")


class Source(StrEnum):
    """Author of a segment. Only POLICY tokens can be in the loss; `trained_contexts` of engine/protocol/trajectory.py
    lists them: no turns taken over from another sample, and branches only if they are trained."""

    PROMPT = "prompt"
    POLICY = "policy"
    RETRIEVED = "retrieved"
    FEEDBACK = "feedback"


@dataclass(frozen=True, slots=True)
class TextSegment:
    """A part of a transcript by one source, as UTF-8 bytes (possibly cut inside a character)."""

    source: Source
    text: bytes


def count_words(text: str) -> int:
    """Count runs of letters and digits: the length of a text without a tokenizer.

    Any other character separates words, including invisible ones; marks that combine with a letter (accents, vowel
    signs) belong to the letter.
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
    """A transcript and the data by which it is rewarded.

    pieces: the transcript. golds: acceptable answers. passages: (title, text) of passages shown with the question, in
    order. gold_indices: numbers, from 1, of those with a supporting fact; None: unknown. branches: transcripts of
    branches and calls, by name; their contexts are PROMPT, the generated text POLICY. entailment: a judge's probability
    in [0, 1] for the system's claims. verdict: a judge's yes or no on the answer. length: of a text, in tokens or
    words. chance: a number in [0, 1), for rewards with a random part. metadata: the question's other keys. scores:
    texts whose log-probs the episode requested, in order: `text`; `context`, the template text between the current
    context and the text (None: a separate context); `turns`, the number of POLICY segments before; `logprobs`, one per
    token of the text, in nats, under softmax(z / temperature) of the rollout (temperature 1 if greedy).
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
        """Return the policy's whole text, without the control token that ends a reply."""
        written = b"".join(piece.text for piece in self.pieces if piece.source is Source.POLICY)
        return _END.sub("", written.decode(errors="replace"))


@dataclass(frozen=True, slots=True)
class RewardResult:
    """A reward, its parts as numbers and flags that fit in JSON (None: not measured), and the answer that was judged.

    Parts named em, f1 and answered are measures of the answer, if there are any. turns: one reward per POLICY segment,
    in order, over all contexts; `reward` is added to the last. tokens: spans (start, end, value) of the policy's whole
    text, in bytes, whose tokens get `value` in addition to their advantage. `grpo.advantage` selects which of these are
    used. branches: by name, rewards of trained branches that have their own; each is compared with the branches of the
    same name in the group.
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
    """Return the reward of each attempt, by `reward`, or by `reward_group` over all attempts of a group. groups[i]: the
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
