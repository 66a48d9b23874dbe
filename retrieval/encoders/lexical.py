"""The lexical encoder: hashed, idf-weighted, normalised words, without weights.

A text's vector is the sum over its distinct words w of  tf'(w) * idf(w) * h(w), divided by its L2 norm.
  words  lower-cased runs of letters and digits of any script
  tf'    tf * (K + 1) / (tf + K), K = 1.2: BM25's saturation, and 1 for a word that occurs once
  idf    log(1 + (N - n + .5) / (n + .5)) for a word in n of the N passages, as in BM25; other words are left out
  h(w)   +1 or -1 at four of the dim places, one in each quarter, from one BLAKE2b hash. The signs make collisions
         cancel on average (the block construction of Kane and Nelson 2014, Sparser Johnson-Lindenstrauss transforms)
"""

import hashlib
import json
import math
import re
import struct
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from thresher.common.errors import UserError
from thresher.common.files import MOST_BYTES, atomic_write_text, read_json_object
from thresher.retrieval.encoders import Vectors

FILE = "lexical.json"
DEFAULT_DIM = 2048
MIN_DIM = 16
PLACES = 4
SATURATION = 1.2
# Rows encoded at a time: bounds the float64 scratch to 256 * dim * 8 bytes (4 MiB at 2048).
CHUNK = 256

# The name of the stage of a build that counts words, and the passages between two reports of it.
COUNTING = "counting words"
PROGRESS_STEP = 1024

_WORD = re.compile(r"[^\W_]+")

# A word's four places, and the value that one occurrence adds to each: sign times idf.
_Entry = tuple[tuple[int, ...], tuple[float, ...]]


def words(text: str) -> list[str]:
    """Return the words of `text` in order: lower-cased runs of letters and digits; the underscore is neither."""
    return _WORD.findall(text.lower())


class LexicalEncoder:
    """Encoder of hashed idf-weighted words, created by `fit` or `load`. counts: word -> number of passages with it."""

    name = "lexical"

    def __init__(self, dim: int, passages: int, counts: dict[str, int]) -> None:
        if dim < MIN_DIM:
            raise UserError(f"dim is {dim}; a lexical encoder needs at least {MIN_DIM}, better {DEFAULT_DIM}")
        self.dim = dim
        self._passages = passages
        self._counts = counts
        # Only words of the corpus are kept, because the number of other words that a policy writes is unbounded.
        self._known: dict[str, _Entry] = {}

    @classmethod
    def fit(cls, texts: Iterable[str], dim: int = DEFAULT_DIM) -> "LexicalEncoder":
        """Count for each word the `texts` in which it occurs; they are the passages as they will be encoded."""
        counts: Counter[str] = Counter()
        passages = 0
        for text in texts:
            passages += 1
            counts.update(set(words(text)))
        return cls(dim, passages, dict(counts))

    @classmethod
    def load(cls, folder: Path) -> "LexicalEncoder":
        """Read the encoder that `save` wrote."""
        path = folder / FILE
        record = read_json_object(path, MOST_BYTES)  # of all words of the corpus
        dim, passages, counts = (record.get(key) for key in ("dim", "passages", "counts"))
        if not (isinstance(dim, int) and isinstance(passages, int) and isinstance(counts, dict)):
            raise UserError(f'{path}: expected "dim", "passages" and "counts"; build the index again')
        return cls(dim, passages, counts)

    def save(self, folder: Path) -> None:
        """Write `lexical.json` to `folder`: dim, number of passages, and the count of every word."""
        record = {"dim": self.dim, "passages": self._passages, "counts": dict(sorted(self._counts.items()))}
        atomic_write_text(folder / FILE, json.dumps(record, ensure_ascii=False))

    @cached_property
    def fingerprint(self) -> str:
        """Return the hash of the settings and of every word's count, in hexadecimal."""
        settings = [PLACES, SATURATION, self.dim, self._passages, sorted(self._counts.items())]
        return hashlib.sha256(json.dumps(settings).encode("ascii")).hexdigest()

    def idf(self, word: str) -> float:
        """Return log(1 + (N - n + .5) / (n + .5)), the weight of a word that n of the N passages hold; 0 for n = 0."""
        n = self._counts.get(word, 0)
        return math.log1p((self._passages - n + 0.5) / (n + 0.5)) if n else 0.0

    def encode_queries(self, queries: list[str]) -> Vectors:
        """Return float32 [len(queries), dim], rows of norm 1; a query without a known word is a zero row."""
        vectors_ND = np.zeros((len(queries), self.dim), np.float32)
        for start in range(0, len(queries), CHUNK):
            vectors_ND[start : start + CHUNK] = self._encode_chunk(queries[start : start + CHUNK])
        return vectors_ND

    def encode_passages(self, passages: list[str]) -> Vectors:
        """Return `encode_queries` of passages."""
        return self.encode_queries(passages)

    def _encode_chunk(self, texts: list[str]) -> npt.NDArray[np.float64]:
        rows: list[int] = []
        frequencies: list[int] = []
        places: list[tuple[int, ...]] = []
        values: list[tuple[float, ...]] = []
        for row, text in enumerate(texts):
            # Sorted, so that texts with the same words in another order have the same bits.
            for word, frequency in sorted(Counter(words(text)).items()):
                if word not in self._counts:
                    continue
                entry = self._known.get(word) or self._entry(word)
                rows.append(row)
                frequencies.append(frequency)
                places.append(entry[0])
                values.append(entry[1])
        if not rows:
            return np.zeros((len(texts), self.dim))
        tf_W1 = np.array(frequencies, np.float64)[:, None]
        weight_WP = np.array(values) * (tf_W1 * (SATURATION + 1) / (tf_W1 + SATURATION))
        place_WP = np.array(rows)[:, None] * self.dim + np.array(places)
        # bincount adds in order, in float64: a row is independent of batch composition.
        sums = np.bincount(place_WP.ravel(), weight_WP.ravel(), minlength=len(texts) * self.dim)
        vectors_ND = sums.astype(np.float64, copy=False).reshape(len(texts), self.dim)
        norm_N1 = np.sqrt(np.square(vectors_ND).sum(axis=1, keepdims=True))
        vectors_ND /= np.where(norm_N1 > 0, norm_N1, 1)
        return vectors_ND

    def _entry(self, word: str) -> _Entry:
        hashes = struct.unpack(f"<{PLACES}I", hashlib.blake2b(word.encode(), digest_size=4 * PLACES).digest())
        idf = self.idf(word)
        places, values = [], []
        for quarter, number in enumerate(hashes):
            low, high = quarter * self.dim // PLACES, (quarter + 1) * self.dim // PLACES
            places.append(low + (number >> 1) % (high - low))
            values.append(idf if number & 1 else -idf)
        entry = self._known[word] = tuple(places), tuple(values)
        return entry
