"""What every index of vectors shares: a corpus, the encoder that made the vectors, and queries turned into vectors.

A subclass says which rows are nearest to a vector (`_top`); a row is the passage's place in the corpus, and its id is
looked up only for a hit.
"""

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path

import numpy as np

from thresher.common.errors import UserError
from thresher.retrieval.data.corpus import Corpus, check_embed
from thresher.retrieval.encoders.encoder import Encoder, Vectors
from thresher.retrieval.encoders.lexical import LexicalEncoder
from thresher.retrieval.indexes.manifest import Manifest
from thresher.retrieval.retriever import Hit, Retriever, check_positive
from thresher.retrieval.vectors.exact import Found


def _load_learned(folder: Path) -> Encoder:
    # Lazily, for it imports torch.
    from thresher.retrieval.encoders.learned import LearnedEncoder

    return LearnedEncoder.load(folder)


LOADERS: dict[str, Callable[[Path], Encoder]] = {LexicalEncoder.name: LexicalEncoder.load, "learned": _load_learned}


class DenseIndex(Retriever):
    """A corpus of N passages, and vectors of `dim` numbers that `encoder` made of them. Not thread-safe."""

    def __init__(self, corpus: Corpus, encoder: Encoder, embed: str, dim: int) -> None:
        super().__init__()
        self.corpus = corpus
        self.encoder = encoder
        self.embed = embed
        self.dim = dim

    def __len__(self) -> int:
        return len(self.corpus)

    def check_k(self, k: int) -> None:
        """As Retriever has it."""
        check_positive(k, len(self))

    @abstractmethod
    def _top(self, query_QD: Vectors, k: int) -> list[Found]:
        """The rows and scores of at most `k` passages for every query, float32 [Q, D], best first."""

    def _find(self, queries: list[str], k: int) -> list[list[Hit]]:
        """All queries go to the encoder and to `_top` in one call. A query for which the encoder returns a zero vector
        (no word that a passage holds) has no hits."""
        query_QD = checked_vectors(self.encoder, self.encoder.encode_queries(queries), len(queries), self.dim)
        found = self._top(query_QD, k)
        return [
            [Hit(row, self.corpus[row], score) for row, score in best] if query_D.any() else []
            for query_D, best in zip(query_QD, found, strict=True)
        ]


def checked_vectors(encoder: Encoder, vectors_ND: Vectors, count: int, dim: int) -> Vectors:
    """`vectors_ND` in C order and float32. ValueError unless finite and [count, dim]: that is the encoder's fault."""
    if vectors_ND.shape != (count, dim) or not np.isfinite(vectors_ND).all():
        raise ValueError(f"{encoder.name}: expected finite [{count}, {dim}], got {vectors_ND.shape}")
    return np.ascontiguousarray(vectors_ND, np.float32)


def find_encoder(manifest: Manifest, folder: Path, encoder: Encoder | None) -> Encoder:
    """The encoder that the index in `folder` was built with: `encoder`, or else loaded from the folder. UserError when
    it is another one, or of a sort that does not exist."""
    check_embed(manifest.embed)
    if encoder is None:
        if manifest.encoder not in LOADERS:
            raise UserError(
                f"{folder}: built with the encoder {manifest.encoder!r}, expected one of "
                f"{', '.join(LOADERS)}; build the index again"
            )
        encoder = LOADERS[manifest.encoder](folder)
    if (encoder.dim, encoder.fingerprint) != (manifest.dim, manifest.encoder_fingerprint):
        raise UserError(
            f"{folder}: the index was built with another encoder ({manifest.encoder}, {manifest.dim} "
            f"dimensions, {manifest.encoder_fingerprint[:12]}) than this one ({encoder.name}, {encoder.dim} "
            f"dimensions, {encoder.fingerprint[:12]}); build the index again"
        )
    return encoder
