"""Synthetic passages and questions, as vectors whose neighbours lie as far away as those of real ones.

Random vectors are no stand-in for embeddings: all of them are equally far from each other, and no list or graph can do
anything with that. Here a passage's vector is a sum of what it shares with others and what is its own,

    passage     unit(m + word_1 + word_2 + word_3 + scale noise)
    question    unit(m + the words of a passage + loose scale' noise')

with one word from each of three vocabularies, coarse to fine, some words far more frequent than others
(Zipf-Mandelbrot). A fine word brings its own coarse ones along with the probability `tied`, else they are drawn freely,
so that clusters nest and overlap and are of all sizes. Words and noise are Gaussian with one falling spectrum; m is the
mean that all embeddings of a model share; `scale` (log-normal) makes some passages ordinary and some odd.

The constants were fitted to all-MiniLM-L6-v2's vectors of 28,678 Wikipedia passages and HotpotQA's questions: to the
similarities of neighbours, and to the recall of lists by their number. docs/retrieval.md has the comparison; the bench
makes it anew for real vectors. Distances depend on the spectrum, which is kept for any width, and not on the width.

Deliberately absent: near-duplicates, of which real corpora have some (they make a search easier), and text.

Axes: N passages, Q questions, B rows of a chunk, D dimension, R ranks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from thresher.retrieval.encoders import Vectors
from thresher.retrieval.indexes.exact import Rows
from thresher.retrieval.indexes.faiss_library import faiss

CHUNK = 4096
RANKS = (1, 5, 10, 100)
PERCENTILES = (10, 50, 90)


@dataclass(frozen=True, kw_only=True, slots=True)
class Law:
    """The constants. `words` and `shares` of the vocabularies, coarse to fine (shares of a vector's variance; the rest
    is its own); `tied`, how often a fine word brings its coarse ones; `zipf`, the exponent of their frequencies;
    `mean`, squared length of m; `scale`, deviation of the logarithm of a passage's own scale; `loose`, by how much a
    question's noise is stronger; `knee`, `power`, `end` of the spectrum (1 + i / knee)^-power exp(-(i / end)^2)."""

    words: tuple[int, ...] = (35, 250, 4100)
    shares: tuple[float, ...] = (0.17, 0.09, 0.27)
    tied: float = 0.48
    zipf: float = 0.72
    mean: float = 0.027
    scale: float = 0.36
    loose: float = 1.22
    knee: float = 5.0
    power: float = 0.83
    end: float = 270.0

    def deviations(self, dim: int) -> Vectors:
        """float32 [D]: the deviation of every coordinate of a word or noise; their squares add up to 1."""
        place_D = np.arange(dim)
        variance_D = (1 + place_D / self.knee) ** -self.power * np.exp(-((place_D / self.end) ** 2))
        deviation_D: Vectors = np.sqrt(variance_D / variance_D.sum()).astype(np.float32)
        return deviation_D


class SyntheticVectors:
    """Passages and questions of `dim` dimensions. Passage i is the same whatever else is drawn."""

    def __init__(self, dim: int, law: Law | None = None, seed: int = 0) -> None:
        self.dim, self.law, self.seed = dim, law or Law(), seed
        draw = np.random.default_rng([seed, 0])
        self._deviation_D = self.law.deviations(dim)
        self._mean_D = draw.standard_normal(dim, np.float32)
        self._mean_D *= np.sqrt(self.law.mean) / np.linalg.norm(self._mean_D)
        self._words = [
            draw.standard_normal((count, dim), np.float32) * (self._deviation_D * np.float32(np.sqrt(share)))
            for count, share in zip(self.law.words, self.law.shares, strict=True)
        ]
        self._own = float(np.sqrt(1 - sum(self.law.shares)))
        # Mandelbrot's shift keeps the first words from being everywhere.
        frequencies = [(np.arange(count) + 1 + count**0.3) ** -self.law.zipf for count in self.law.words]
        self._until = [np.cumsum(each / each.sum()) for each in frequencies]
        self._tied = [self._drawn(until_V, self.law.words[-1], draw) for until_V in self._until[:-1]]

    def passages(self, rows: int) -> Iterator[Vectors]:
        """The first `rows` passages in chunks, float32 [B, D] of norm 1."""
        for start in range(0, rows, CHUNK):
            common_BD, noise_BD = self._chunk(start // CHUNK)
            yield _unit(common_BD + noise_BD)[: rows - start]

    def questions(self, count: int, rows: int) -> tuple[Vectors, Rows]:
        """`count` questions about passages among the first `rows`: float32 [Q, D] of norm 1, and those rows [Q]."""
        draw = np.random.default_rng([self.seed, 2, rows])
        gold_Q = np.sort(draw.integers(rows, size=count))
        question_QD = np.empty((count, self.dim), np.float32)
        for chunk in np.unique(gold_Q // CHUNK):
            here = np.flatnonzero(gold_Q // CHUNK == chunk)
            common_BD, _ = self._chunk(int(chunk))
            other = np.float32(self.law.loose) * self._noise(len(here), draw)
            question_QD[here] = _unit(common_BD[gold_Q[here] % CHUNK] + other)
        order = draw.permutation(count)
        return question_QD[order], gold_Q[order]

    def _chunk(self, chunk: int) -> tuple[Vectors, Vectors]:
        """What the passages of a chunk share with others, and their own noise, [B, D] each."""
        draw = np.random.default_rng([self.seed, 1, chunk])
        common_BD = np.repeat(self._mean_D[None], CHUNK, axis=0)
        finest_B = self._drawn(self._until[-1], CHUNK, draw)
        common_BD += self._words[-1][finest_B]
        for word_VD, until_V, tied_V in zip(self._words, self._until, self._tied, strict=False):
            free_B = self._drawn(until_V, CHUNK, draw)
            common_BD += word_VD[np.where(draw.random(CHUNK) < self.law.tied, tied_V[finest_B], free_B)]
        return common_BD, self._noise(CHUNK, draw)

    def _drawn(self, until_V: npt.NDArray[np.float64], count: int, draw: np.random.Generator) -> Rows:
        """`count` words of a vocabulary, by frequency."""
        word_B: Rows = np.minimum(np.searchsorted(until_V, draw.random(count)), len(until_V) - 1)
        return word_B

    def _noise(self, count: int, draw: np.random.Generator) -> Vectors:
        noise_BD = draw.standard_normal((count, self.dim), np.float32) * self._deviation_D
        # With this mean of the logarithm the mean of scale^2 is 1.
        scale_B1 = np.exp(self.law.scale * draw.standard_normal((count, 1), np.float32) - self.law.scale**2)
        noise_BD *= np.float32(self._own) * scale_B1
        return noise_BD


def neighbours(query_QD: Vectors, vectors_ND: Vectors, ranks: Sequence[int] = RANKS) -> npt.NDArray[np.float64]:
    """[R, 3]: 10th, 50th and 90th percentile, over the queries, of the similarity of the neighbour of each rank."""
    score_QF, _ = faiss.knn(query_QD, vectors_ND, max(ranks), metric=faiss.METRIC_INNER_PRODUCT)
    found: npt.NDArray[np.float64] = np.percentile(score_QF[:, np.array(ranks) - 1], PERCENTILES, axis=0).T
    return found


def _unit(rows_BD: Vectors) -> Vectors:
    rows_BD /= np.linalg.norm(rows_BD, axis=1, keepdims=True)
    return rows_BD
