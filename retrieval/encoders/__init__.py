"""Texts to vectors, and pairs of texts to classes: hashed words, models of the BERT family, their tokenizers.

May come in: policy, rewards; no other room of retrieval. Whether vectors come from hashed words (`lexical`) or from a
trained network (`learned`), an index asks its encoder for the two kinds of vector and for a fingerprint; prefixes,
pooling and normalisation are the encoder's business. Scores are inner products.
"""

from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]


class Encoder(Protocol):
    """Turns n strings into float32 [n, dim]. The vector of a string must not depend on the strings beside
    it."""

    @property
    def name(self) -> str:
        """The kind of encoder, under which an index finds its loader: "lexical"."""

    @property
    def dim(self) -> int:
        """Length of a vector."""

    @property
    def fingerprint(self) -> str:
        """Identifies all that shapes the vectors (weights, vocabulary, settings); equal fingerprints give
        equal vectors."""

    def encode_queries(self, queries: list[str]) -> Vectors:
        """Return float32 [len(queries), dim]. A zero vector says that there is nothing to search for."""

    def encode_passages(self, passages: list[str]) -> Vectors:
        """Return float32 [len(passages), dim]."""

    def save(self, folder: Path) -> None:
        """Write into the existing `folder` what the loader of this kind needs to give the encoder back."""
