"""Passages that a question brings as a small index of its own: BM25 over them, with nothing on disk.

Scores are those of bm25.py's default, with the counts of these passages alone:
  sum over words w of the query of  log(1 + (N - n + .5) / (n + .5)) * tf / (tf + k1 * (1 - b + b * |d| / mean |d|))
over title and text. All passages are ranked, so that a query that shares no word with them still finds k; equal scores
stay in the order given.
"""

import math
from collections import Counter
from collections.abc import Sequence

from thresher.retrieval.data.formats import Passage
from thresher.retrieval.encoders.lexical import words
from thresher.retrieval.retriever import Hit

K1, B = 1.5, 0.75


def rank_given(passages: Sequence[Passage], query: str, k: int) -> list[Hit]:
    """The `k` passages that fit the query best, or all where there are fewer. A hit's row is its place among them."""
    counts = [Counter(words(f"{passage.title} {passage.text}")) for passage in passages]
    mean = sum(count.total() for count in counts) / max(len(counts), 1) or 1.0
    asked = words(query)
    holding = {word: sum(word in count for count in counts) for word in asked}
    scores = [
        sum(
            math.log1p((len(counts) - holding[word] + 0.5) / (holding[word] + 0.5))
            * count[word]
            / (count[word] + K1 * (1 - B + B * count.total() / mean))
            for word in asked
        )
        for count in counts
    ]
    order = sorted(range(len(passages)), key=lambda row: -scores[row])[:k]
    return [Hit(row, passages[row], scores[row]) for row in order]
