"""One answer to one question, with all that a reward may look at.

A reward is a pure function of a RewardInput. What takes a model to know (an entailment probability, a judge's verdict)
is found out beforehand and passed in as a number, so that a reward can be recomputed from what a run folder stores.
"""

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from thresher.common.renamed import renamed
from thresher.rewards.transcript import TextSegment

_WORD = re.compile(r"[^\W_]+")


def count_words(text: str) -> int:
    """The length of a text where there is no tokenizer: its words, which are runs of letters and digits.

    Whatever else stands between them divides them, so that no invisible character makes one word of many. Marks that
    combine with a letter (accents, vowel signs) belong to it.
    """
    if not text.isascii():
        text = "".join(c for c in unicodedata.normalize("NFC", text) if not unicodedata.category(c).startswith("M"))
    return len(_WORD.findall(text))


def hash_uniform(id_: str, pieces: Sequence[TextSegment]) -> float:
    """A number in [0, 1), uniform over questions and texts: a hash of both, so it is the same whenever it is scored."""
    text = b"\0".join([id_.encode("utf-8", "surrogatepass"), *(piece.text for piece in pieces)])
    return int.from_bytes(blake2b(text, digest_size=6).digest()) / 2**48


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardInput:
    """An attempt's transcript, and what it is judged by.

    pieces: the transcript. golds: acceptable answers. passages: (title, text), those shown with the question, in their
    order. gold_indices: which of them hold a supporting fact, from 1; None where that is unknown. branches:
    continuations that only the reward sees, by name; in each the context is PROMPT and what the policy wrote there is
    POLICY. entailment: a judge's probability in [0, 1] for the system's own claims; None if no judge was asked.
    verdict: a judge's yes or no on the answer. length: of a text, in the unit of the run (tokens, or words). chance: a
    number in [0, 1) that belongs to this attempt, for rewards with a random part.
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


if not TYPE_CHECKING:  # which would let any name pass
    __getattr__ = renamed(__name__, {"Attempt": RewardInput})
