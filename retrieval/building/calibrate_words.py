"""How fast this machine makes and asks a BM25 index, and what a passage costs it: measured for `thresher index plan`.

The passages are made up: 100 words each, as wiki-18's have, of a vocabulary of 200,000 by Zipf's law; a fifth of them
repeat a word of the same passage. So a passage has about 66 different words and a word of a query stands in a quarter
of the passages, as in HotpotQA's. All of it goes through the code that will build and search the real index.

Deliberately absent: languages whose words are not the `words` of `lexical`; a corpus of them should be tried on a part.
"""

import math
import tracemalloc
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from thresher.retrieval.building.timing import K, best_time, timed
from thresher.retrieval.data.corpus import Corpus
from thresher.retrieval.data.formats import Passage
from thresher.retrieval.indexes.bm25 import SCORES, build_bm25, load_bm25

# Enough that a search's fixed cost is lost in it; and as many as memory is traced for, which is slow.
SAMPLE, TRACED = 16_384, 8_192
PASSAGE_WORDS, REPEATED, QUERY_WORDS, QUERIES = 100, 20, 12, 16
VOCABULARY = 200_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Growth:
    """Bytes of N passages: each its own, and a vocabulary that grows with the root of N (Heaps' law, exponent .5)."""

    passage: float
    root: float

    def at(self, passages: int) -> int:
        return math.ceil(passages * self.passage + math.sqrt(passages) * self.root)


@dataclass(frozen=True, kw_only=True, slots=True)
class WordRates:
    """Bytes of RAM at the most while building, bytes on the disk, and, per passage, seconds to build and seconds of a
    search for 12 words (which is not faster in a batch)."""

    build_bytes: Growth
    disk_bytes: Growth
    build: float
    search: float


def measure_words(sample: int = SAMPLE, traced: int = TRACED) -> WordRates:
    """The rates, from indexes of `sample` and a quarter as many passages and, for RAM, of `traced` and a quarter."""
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        corpus, few = made_up(sample), made_up(sample // 4)
        build = timed(lambda: build_bm25(corpus, folder / "all"))
        build_bm25(few, folder / "few")
        retriever = load_bm25(folder / "all", corpus)
        # No query twice, for the second time its answer is known.
        queries = (" ".join(passage.text.split()[:QUERY_WORDS]) for passage in corpus)
        search = best_time(lambda: retriever.search(list(islice(queries, QUERIES)), K)) / QUERIES
        return WordRates(
            build_bytes=_growth(traced, *(_peak_bytes(made_up(size), folder) for size in (traced // 4, traced))),
            disk_bytes=_growth(sample, *(_bytes_in(folder / name / SCORES) for name in ("few", "all"))),
            build=build / sample,
            search=search / sample,
        )


def _growth(passages: int, of_a_quarter: float, of_all: float) -> Growth:
    """The one that gives both measurements."""
    linear = max(0.0, (of_all - 2 * of_a_quarter) / (passages / 2))
    return Growth(passage=linear, root=(of_all - linear * passages) / math.sqrt(passages))


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def _peak_bytes(corpus: Corpus, folder: Path) -> int:
    tracemalloc.start()
    try:
        build_bm25(corpus, folder / f"traced{len(corpus)}")
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def made_up(passages: int) -> Corpus:
    """So many passages, the same for the same number."""
    draw = np.random.default_rng(0)
    share_V = 1 / np.arange(1, VOCABULARY + 1)
    border_V = np.cumsum(share_V / share_V.sum())
    own_NW = np.searchsorted(border_V, draw.random((passages, PASSAGE_WORDS - REPEATED)))
    again_NW = np.take_along_axis(own_NW, draw.integers(0, own_NW.shape[1], (passages, REPEATED)), 1)
    word_NW = np.concatenate([own_NW, again_NW], axis=1)
    texts = (" ".join(f"w{word}" for word in word_W) for word_W in word_NW.tolist())
    return Corpus([Passage(str(row), "", text) for row, text in enumerate(texts)])
