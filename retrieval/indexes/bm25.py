"""BM25: exact words, weighted by rarity, in its own index folder; and over the passages of one question.

The score of a passage d for a query of words w (a repeated word counts twice), with w's count tf in d and |d| words of
d, is
  sum over w of  idf(w) * tf / (tf + k1 * (1 - b + b * |d| / mean |d|))
  lucene   idf = log(1 + (N - n + .5) / (n + .5)) for a word in n of the N passages; the default
  okapi    idf = log((N - n + .5) / (n + .5)), or if that is negative, a quarter of the mean idf of all words; and the
           whole score times k1 + 1, as in the package rank_bm25
The library bm25s stores the score of every (word, passage) pair as a sparse matrix in `scores/`, which is
memory-mapped; `okapi` is its matrix with each column rescaled. `bm25.json` has the settings. There are no stop words
and no stemming. Scores are float32; a query's result is independent of batch composition.
"""

import errno
import hashlib
import importlib
import json
import math
import os
import shutil
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from thresher.common.errors import UserError
from thresher.common.files import atomic_write_text, read_json_object, staged_folder
from thresher.retrieval.corpus import Corpus, embedded_text
from thresher.retrieval.encoders.lexical import COUNTING, PROGRESS_STEP, words
from thresher.retrieval.indexes.kinds import OnStage
from thresher.retrieval.indexes.manifest import (
    Manifest,
    check_file,
    find_corpus,
    open_folder,
    write_index_hashes,
)
from thresher.retrieval.passages import Passage
from thresher.retrieval.retriever import Hit, LocalRetriever

if TYPE_CHECKING:
    import bm25s  # imported on use: a search of vectors does not need it

KIND = "bm25"
FILE = "bm25.json"
SCORES = "scores"
SCORING = "scoring words"
# Fraction of the mean idf that rank_bm25 gives a word whose idf is negative.
OKAPI_FLOOR = 0.25

TOKENS: dict[str, Callable[[str], list[str]]] = {"words": words, "split": lambda text: text.lower().split()}
# The library's names for term frequency and idf.
VARIANTS = {"lucene": ("lucene", "lucene"), "okapi": ("atire", "lucene")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Bm25Settings:
    """Settings; see the top of this file. `tokens`: "words" (lower-cased runs of letters and digits) or "split"
    (lower-cased, split at white space). `variant`: "lucene" or "okapi"."""

    tokens: str = "words"
    variant: str = "lucene"
    k1: float = 1.5
    b: float = 0.75

    def __post_init__(self) -> None:
        for name, value, known in (("tokens", self.tokens, TOKENS), ("variant", self.variant, VARIANTS)):
            if value not in known:
                raise UserError(f"bm25: {name} is {value!r}; expected one of {', '.join(known)}")
        if not (_is_number(self.k1) and 0 <= self.k1 < math.inf):
            raise UserError(f"bm25: k1 is {self.k1!r}; expected a number of at least 0")
        if not (_is_number(self.b) and 0 <= self.b <= 1):
            raise UserError(f"bm25: b is {self.b!r}; expected a number from 0 to 1")

    @property
    def fingerprint(self) -> str:
        """Return the hash of the settings, in hexadecimal; together with the corpus they determine every score."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode("ascii")).hexdigest()


def parse_bm25(encoder: str) -> Bm25Settings:
    """Return the settings of "bm25" or "bm25:tokens=split,variant=okapi,k1=1.2,b=0.75"."""
    known = {field.name: field.type for field in fields(Bm25Settings)}
    given: dict[str, Any] = {}
    for item in filter(None, encoder.partition(":")[2].split(",")):
        key, _, value = item.partition("=")
        if key not in known:
            raise UserError(f"{encoder}: no setting {key!r}; expected {', '.join(known)}, as in {KIND}:tokens=split")
        try:
            given[key] = float(value) if known[key] is float else value
        except ValueError:
            raise UserError(f"{encoder}: {key} is {value!r}; expected a number") from None
    return Bm25Settings(**given)


class Bm25Index(LocalRetriever):
    """A corpus and the scores of its words, created by `build_bm25` or `load_bm25`."""

    def __init__(self, corpus: Corpus, scores: "bm25s.BM25", settings: Bm25Settings) -> None:
        super().__init__()
        self.corpus = corpus
        self._scores = scores
        self._tokens = TOKENS[settings.tokens]

    def _find(self, queries: list[str], k: int) -> list[list[Hit]]:
        """Return hits; see Retriever. There are fewer than `k` if fewer passages share a word with a query."""
        return [self._find_one(query, k) for query in queries]

    def _find_one(self, query: str, k: int) -> list[Hit]:
        known = self._scores.get_tokens_ids(self._tokens(query))
        if not known:
            return []
        score_N = self._scores.get_scores_from_ids(known)
        has_word_N = np.zeros(len(score_N), bool)  # a score may be 0 or negative by okapi
        columns = self._scores.scores
        for word in known:
            has_word_N[columns["indices"][columns["indptr"][word] : columns["indptr"][word + 1]]] = True
        rows = np.flatnonzero(has_word_N)
        if len(rows) > k:
            # Every tie at the k-th place is kept, so that ties are broken by row and not by the partition.
            kth = np.partition(score_N[rows], len(rows) - k)[len(rows) - k]
            rows = rows[score_N[rows] >= kth]
        order = np.lexsort((rows, -score_N[rows]))[:k]
        return [Hit(row, self.corpus[row], float(score_N[row])) for row in rows[order].tolist()]


def _import_bm25s() -> Any:
    """Import bm25s without JAX. If JAX is installed, bm25s runs it once on import, for a selection that is not used
    here, and JAX then takes three quarters of the GPU's memory."""
    hidden = sys.modules.get("jax")
    sys.modules["jax"] = None  # type: ignore[assignment]  # `import jax` raises ImportError
    try:
        return importlib.import_module("bm25s")
    finally:
        if hidden is None:
            del sys.modules["jax"]
        else:
            sys.modules["jax"] = hidden


def build_bm25(
    corpus: Corpus,
    folder: str | Path,
    embed: str = "text",
    *,
    settings: Bm25Settings | None = None,
    cache: Sequence[Path] = (),
    on_stage: OnStage = lambda stage, done, total: None,
) -> Bm25Index:
    """Count and score the words of every passage and write the index to `folder`, completely or not at all. cache:
    files of the corpus's cache, which are copied there. UserError for a `folder` that exists, and for a corpus without
    a word."""
    bm25s = _import_bm25s()
    settings = settings or Bm25Settings()
    folder = Path(folder)
    with staged_folder(folder) as staged:
        vocabulary, passages = _count(corpus, embed, TOKENS[settings.tokens], on_stage)
        on_stage(SCORING, 0, 1)
        tf_method, idf_method = VARIANTS[settings.variant]
        scores = bm25s.BM25(k1=settings.k1, b=settings.b, method=tf_method, idf_method=idf_method)
        scores.index((passages, vocabulary), create_empty_token=False, show_progress=False)
        if settings.variant == "okapi":
            _rescale_to_okapi(scores.scores, len(corpus))
        scores.save(staged / SCORES, show_progress=False)
        _check_written(staged / SCORES, folder)
        files = {path.name: path.stat().st_size for path in sorted((staged / SCORES).iterdir())}
        atomic_write_text(staged / FILE, json.dumps({**asdict(settings), "files": files}, indent=2) + "\n")
        Manifest.without_vectors(
            KIND, corpus, folder, settings.fingerprint, embed=embed, index_bytes=sum(files.values())
        ).write(staged)
        for path in cache:
            shutil.copy2(path, staged / path.name)
        write_index_hashes(staged)
    on_stage(SCORING, 1, 1)
    return Bm25Index(corpus, scores, settings)


def _check_written(staged: Path, folder: Path) -> None:
    """Raise OSError for an array truncated by a full disk, because NumPy does not check that its file was flushed."""
    for path in sorted(staged.glob("*.npy")):
        try:
            np.load(path, mmap_mode="r")
        except (ValueError, EOFError):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder / SCORES / path.name)) from None


def load_bm25(folder: str | Path, corpus: Corpus | None = None, verify: bool = True) -> Bm25Index:
    """Read an index of `build_bm25`; the scores stay on disk. Arguments and errors are those of `load_index`."""
    bm25s = _import_bm25s()
    folder = Path(folder)
    manifest, hashes = open_folder(folder, verify, (KIND,))
    record = read_json_object(folder / FILE)
    files = record.pop("files", None)
    try:
        settings = Bm25Settings(**record)
    except TypeError:
        raise UserError(f"{folder / FILE}: expected tokens, variant, k1, b and files; build the index again") from None
    if settings.fingerprint != manifest.encoder_fingerprint or not isinstance(files, dict):
        raise UserError(f"{folder / FILE}: not the settings that the index was built with; build the index again")
    for name, expected in files.items():
        check_file(folder / SCORES / name, expected)
    corpus = find_corpus(manifest, folder, corpus, verify)
    try:
        scores = bm25s.BM25.load(folder / SCORES, mmap=True, show_progress=False)
        held = scores.scores["num_docs"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, MemoryError, OverflowError):
        raise UserError(f"{folder / SCORES}: the library bm25s cannot read it; build the index again") from None
    if held != len(corpus):
        raise UserError(f"{folder / SCORES}: holds {held} passages, expected {len(corpus)}; build the index again")
    if hashes is None and not _in_range(scores, len(corpus)):
        raise UserError(f"{folder / SCORES}: damaged, its arrays do not fit each other; build the index again")
    return Bm25Index(corpus, scores, settings)


def _in_range(scores: "bm25s.BM25", passages: int) -> bool:
    """Return whether every column is within the arrays and every row within the corpus."""
    data, row_M, start_V = (scores.scores[name] for name in ("data", "indices", "indptr"))
    if any(array.ndim != 1 or array.dtype.kind != kind for array, kind in ((data, "f"), (row_M, "i"), (start_V, "i"))):
        return False
    columns, words_ = len(start_V) - 1, scores.vocab_dict.values()
    return bool(
        columns >= 1
        and start_V[0] == 0
        and start_V[-1] == len(row_M) == len(data)
        and (np.diff(start_V) >= 0).all()
        and all(type(word) is int and 0 <= word < columns for word in words_)
        and (not len(row_M) or (row_M.min() >= 0 and row_M.max() < passages))
    )


def _count(
    corpus: Corpus, embed: str, tokens: Callable[[str], list[str]], on_stage: OnStage
) -> tuple[dict[str, int], list["array[int]"]]:
    """Return the number of each word, in order of first appearance, and each passage as numbers of its words."""
    vocabulary: dict[str, int] = {}
    passages = []
    for row, passage in enumerate(corpus, 1):
        found = tokens(embedded_text(passage, embed))
        passages.append(array("i", [vocabulary.setdefault(word, len(vocabulary)) for word in found]))
        if row % PROGRESS_STEP == 0 or row == len(corpus):
            on_stage(COUNTING, row, len(corpus))
    if not vocabulary:
        raise UserError(f"{corpus.path or 'the corpus'}: no passage holds a word; BM25 has nothing to search for")
    return vocabulary, passages


def _rescale_to_okapi(scores: dict[str, Any], passages: int) -> None:
    """Convert the library's columns, which have Lucene's idf, to rank_bm25's, in place."""
    n_V: npt.NDArray[np.int64] = np.diff(scores["indptr"])
    ratio_V = (passages - n_V + 0.5) / (n_V + 0.5)
    okapi_V = np.log(ratio_V)
    okapi_V = np.where(okapi_V < 0, OKAPI_FLOOR * okapi_V.mean(), okapi_V)
    scores["data"] *= np.repeat((okapi_V / np.log1p(ratio_V)).astype(np.float32), n_V)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def rank_in_context(passages: Sequence[Passage], query: str, k: int) -> list[Hit]:
    """Rank a question's passages by BM25 over title and text, with the default settings and the counts of these only.

    Return the best `k`, or all if there are fewer, including those that share no word. A hit's row is its position;
    equal scores keep their order.
    """
    settings = Bm25Settings()
    k1, b = settings.k1, settings.b
    counts = [Counter(words(f"{passage.title} {passage.text}")) for passage in passages]
    mean = sum(count.total() for count in counts) / max(len(counts), 1) or 1.0
    asked = words(query)
    holding = {word: sum(word in count for count in counts) for word in asked}
    scores = [
        sum(
            math.log1p((len(counts) - holding[word] + 0.5) / (holding[word] + 0.5))
            * count[word]
            / (count[word] + k1 * (1 - b + b * count.total() / mean))
            for word in asked
        )
        for count in counts
    ]
    order = sorted(range(len(passages)), key=lambda row: -scores[row])[:k]
    return [Hit(row, passages[row], scores[row]) for row in order]
