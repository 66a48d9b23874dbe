"""Texts to vectors, and pairs of texts to classes: hashed words, models of the BERT family, and their tokenizers.

Imports policy and rewards, and no other folder of retrieval. Scores are inner products.
"""

from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

Vectors = npt.NDArray[np.float32]


class Encoder(Protocol):
    """Converts strings to vectors. A vector must not depend on the other strings of a call."""

    @property
    def name(self) -> str:
        """Return the kind of encoder, by which an index finds its loader: "lexical"."""

    @property
    def dim(self) -> int:
        """Return the length of a vector."""

    @property
    def fingerprint(self) -> str:
        """Return a hash of weights, vocabulary and settings: equal fingerprints give equal vectors."""

    def encode_queries(self, queries: list[str]) -> Vectors:
        """Return float32 [len(queries), dim]; a zero vector finds nothing."""

    def encode_passages(self, passages: list[str]) -> Vectors:
        """Return float32 [len(passages), dim]."""

    def save(self, folder: Path) -> None:
        """Write the files that the loader of this kind reads to the existing `folder`."""
