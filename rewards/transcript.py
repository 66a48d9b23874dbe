"""Input of a reward: pieces of a transcript, each with its source.

A piece holds raw bytes, because a tag's boundary may fall inside a token and a turn may end in the middle of a
character. Everything that is parsed (stops, actions, answers, notes) is parsed from POLICY pieces only, so no passage
and no prompt can fake an answer. The engine's trajectories, which hold token ids, turn into this form by decoding;
there is no conversion back.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from thresher.common.renamed import renamed


class Source(StrEnum):
    """Author of a segment. The loss mask of a trajectory is `source is Source.POLICY`; there is no other mask."""

    PROMPT = "prompt"
    POLICY = "policy"
    RETRIEVED = "retrieved"
    FEEDBACK = "feedback"


@dataclass(frozen=True, slots=True)
class TextSegment:
    """A stretch of a transcript written by one source, as UTF-8 bytes (possibly cut inside a character)."""

    source: Source
    text: bytes


if not TYPE_CHECKING:  # which would let any name pass
    __getattr__ = renamed(__name__, {"Piece": TextSegment})
