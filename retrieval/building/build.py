"""Build an index folder of vectors; a killed build resumes to the same bytes (docs/retrieval.md).

`OUT.building` holds `building.json` (corpus, encoder, text, kind), `vectors.npy`, and an unfinished structure
(`structures.grow`); it is renamed to OUT when complete. RAM is the structure's size plus two slices of 64 MiB.

Shape letters: N passages, Q queries, D dimension, B a slice, F candidates.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from thresher.common.errors import UserError
from thresher.common.files import (
    atomic_write_text,
    flush,
    need_room,
    read_json_object,
    refuse_existing,
    staged_folder,
)
from thresher.common.locks import locked_file
from thresher.retrieval.corpus import Corpus, check_embed, embedded_text
from thresher.retrieval.encoders import Encoder, Vectors
from thresher.retrieval.indexes.approximate import ApproximateSearch, candidates_of
from thresher.retrieval.indexes.exact import MARGIN, ExactRows, Found, Rows, RowScores, best_of, largest_row_norm
from thresher.retrieval.indexes.faiss_library import faiss, need_faiss
from thresher.retrieval.indexes.kinds import INDEX_FILE, Kind, OnStage, estimate, parse_kind
from thresher.retrieval.indexes.load import Index, checked_vectors, load_index
from thresher.retrieval.indexes.manifest import FILE as MANIFEST
from thresher.retrieval.indexes.manifest import (
    FORMAT,
    KEPT_FILES,
    NOT_KEPT,
    Manifest,
    corpus_paths,
    read_manifest,
    write_index_hashes,
)
from thresher.retrieval.indexes.structures import SCRATCH, grow
from thresher.retrieval.indexes.vector_file import VectorFile, sample_rows

QUERIES = 200
QUERY_WORDS = 12
SEED = 4321
KS = (5, 10)
# Candidates fetched per hit, in the order tried: if the structure has whole vectors, and if it estimates their order.
WHOLE_FACTORS, CODE_FACTORS = (1,), (2, 4, 16, 64)
# If a step of the search parameter gains less recall than this, more candidates are fetched next, if possible, in place
# of a further step.
LEAST_GAIN = 0.004
BATCH = 64

Top = Callable[[Vectors, int], list[Found]]


class SampleTruth:
    """The exact answers to a sample of queries over `vectors`, found in one pass.

    Recall at k is the share of hits whose exact score is at least that of the exact k-th passage; over 200 queries a
    recall of .95 has a standard error of about .01 or less.
    """

    def __init__(self, vectors: VectorFile, query_QD: Vectors, on_stage: OnStage) -> None:
        self.query_QD = query_QD
        self.ks = sorted({min(k, vectors.rows) for k in KS})
        self._exact = RowScores(vectors.take)
        fetch = min(vectors.rows, self.ks[-1] + MARGIN)
        found: list[tuple[Vectors, Rows]] = []
        for start, part_BD in vectors.slices():
            score_QF, row_QF = faiss.knn(query_QD, part_BD, min(fetch, len(part_BD)), metric=faiss.METRIC_INNER_PRODUCT)
            found = [best_of([*found, (score_QF, start + row_QF)], fetch)]
            on_stage("exact answers", start + len(part_BD), vectors.rows)
        best = self._exact.ranked(query_QD, found[0][1], fetch)
        self._kth = {k: [ranked[k - 1][1] for ranked in best] for k in self.ks}

    def recall(self, top: Top, k: int) -> float:
        """Return the share of the exact top `k` that `top` finds, averaged over the queries."""
        good = 0
        for query_D, hits, kth in zip(self.query_QD, top(self.query_QD, k), self._kth[k], strict=True):
            rows = np.array([row for row, _ in hits], np.int64)
            good += int((self._exact.scores(query_D, rows) >= kth).sum())
        return good / (k * len(self.query_QD))

    def recalls(self, top: Top) -> dict[str, float]:
        """Return the recall at every k by name, the number of queries, and searches per second in batches of 64."""
        figures = {f"recall_at_{k}": self.recall(top, k) for k in self.ks}
        started = time.perf_counter()
        for start in range(0, len(self.query_QD), BATCH):
            top(self.query_QD[start : start + BATCH], self.ks[0])
        seconds = time.perf_counter() - started
        return {**figures, "queries": len(self.query_QD), "queries_per_second": len(self.query_QD) / seconds}


def sample_queries(corpus: Corpus, encoder: Encoder, embed: str, vectors: VectorFile) -> Vectors:
    """Return float32 [Q, D] of at most 200 queries. These are runs of words of passages drawn with a fixed seed, or the
    passages' own vectors if no run gives one."""
    rows = sample_rows(len(corpus), min(QUERIES, len(corpus)), SEED)
    draw = np.random.default_rng(SEED)
    texts = []
    for row in rows.tolist():
        words = embedded_text(corpus[row], embed).split()
        first = int(draw.integers(max(1, len(words) - QUERY_WORDS + 1)))
        texts.append(" ".join(words[first : first + QUERY_WORDS]))
    query_QD = checked_vectors(encoder, encoder.encode_queries(texts), len(texts), vectors.dim)
    query_QD = query_QD[query_QD.any(axis=1)]
    return query_QD if len(query_QD) else vectors.rows_at(rows)


def tune(
    search: ApproximateSearch, truth: SampleTruth, wanted: float, factors: tuple[int, ...], on_stage: OnStage
) -> None:
    """Set the fewest candidates and the lowest parameter of `search` with a recall of at least `wanted` at every k.
    If there are none, set the best ones tried. Time is not a criterion, because it is not reproducible."""
    best = (-1.0, search.value, search.factor)
    for factor in factors:
        before = -1.0
        search.factor = factor
        for value in values(*search.span(truth.ks[-1])):
            search.value = value
            recall = min(truth.recall(search.top, k) for k in truth.ks)
            on_stage("tuning", min(int(1000 * recall), int(1000 * wanted)), int(1000 * wanted))
            if recall > best[0]:
                best = (recall, value, factor)
            if recall >= wanted:
                return
            if factor != factors[-1] and recall - before < LEAST_GAIN:
                break
            before = recall
    _, search.value, search.factor = best


def values(least: int, most: int) -> Iterator[int]:
    """Yield 1, 2, 3, 4, 6, 8, 12, 16, 24, .. from `least` up to `most`, and `most` itself."""
    value = least
    while value < most:
        yield value
        value = max(value + 1, value * 4 // 3 if value & (value - 1) else value * 3 // 2)
    yield most


BUILD_BATCH = 1024
WORK_SUFFIX = ".building"
RECORD_FILE = "building.json"
KEEPS = (*KEPT_FILES, NOT_KEPT)


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildSettings:
    """Settings of a build; UserError if they contradict each other.

    `keep`: how an approximate index keeps the vectors for exact scores: float32, float16 or none. `recall`: the recall
    for which its search parameters are chosen. `reason` is written to the manifest.
    """

    kind: Kind
    embed: str = "text"
    keep: str = "float32"
    recall: float = 0.95
    reason: str = ""

    def __post_init__(self) -> None:
        check_embed(self.embed)
        if self.keep not in KEEPS:
            raise UserError(f"keep is {self.keep!r}; expected one of {', '.join(KEEPS)}")
        if self.kind.exact and self.keep != "float32":
            raise UserError(
                f"keep is {self.keep!r}, but {self.kind.name} keeps the vectors that it searches; leave it out"
            )
        if self.keep == NOT_KEPT and self.kind.borrows:
            raise UserError("keep is 'none', but a graph is searched over its vectors; keep them in float32 or float16")
        if self.keep == NOT_KEPT and self.kind.directions:
            raise UserError(f"keep is 'none', but {self.kind.name} finds only candidates to be scored; keep float16")
        if not 0 < self.recall <= 1:
            raise UserError(f"recall is {self.recall}; expected more than 0 and at most 1")

    @property
    def dtype(self) -> str:
        """Return the dtype in which the finished folder keeps the vectors, or none."""
        return self.kind.codes if self.kind.exact else self.keep


def build_folder(
    corpus: Corpus, encoder: Encoder, folder: str | Path, settings: BuildSettings, on_stage: OnStage
) -> Manifest:
    """Build the index `folder`, or resume it from `<folder>.building`, and return its manifest.

    UserError if `folder` exists, another process is building it, the unfinished one has another corpus, encoder or
    text, or the disk is too small. For another kind over the same vectors, the encoded vectors are kept.
    """
    folder = Path(folder)
    refuse_existing(folder)
    if not settings.kind.exact:
        need_faiss(f"an index of kind {settings.kind.name}")  # before hours of encoding
    work = work_folder(folder)
    work.mkdir(parents=True, exist_ok=True)
    with locked_file(work, "index"):
        _check_disk(work, settings, len(corpus), encoder.dim)
        manifest = fill_folder(work, folder, corpus, encoder, settings, on_stage)
        _publish(work, folder)
    return manifest


def build_index(
    corpus: Corpus,
    encoder: Encoder,
    folder: str | Path,
    embed: str = "text",
    on_stage: OnStage = lambda stage, done, total: None,
) -> Index:
    """Encode every passage and write an exact index to `folder`, completely or not at all. An interrupted build leaves
    nothing (`build_folder` resumes). UserError for a folder that exists."""
    folder = Path(folder)
    with staged_folder(folder) as staged:
        kind = parse_kind("flat", len(corpus), encoder.dim)
        fill_folder(staged, folder, corpus, encoder, BuildSettings(kind=kind, embed=embed), on_stage)
    return load_index(folder, corpus, encoder)


def work_folder(folder: Path) -> Path:
    """Return the folder in which the index `folder` is built."""
    return folder.with_name(folder.name + WORK_SUFFIX)


def fill_folder(
    work: Path, folder: Path, corpus: Corpus, encoder: Encoder, settings: BuildSettings, on_stage: OnStage
) -> Manifest:
    """Complete in `work` the index that will be at `folder`; see `build_folder`. The manifest is written last. Then the
    files that only the build needs are removed, and the hashes are written."""
    _take_up(work, corpus, encoder, settings)
    if not (work / MANIFEST).is_file():
        _fill(work, folder, corpus, encoder, settings, on_stage).write(work)
    _tidy(work, settings)
    return read_manifest(work)


def _fill(
    work: Path, folder: Path, corpus: Corpus, encoder: Encoder, settings: BuildSettings, on_stage: OnStage
) -> Manifest:
    vectors = VectorFile(work / KEPT_FILES["float32"], len(corpus), encoder.dim)
    _encode(corpus, encoder, settings.embed, vectors, on_stage)
    index = None if settings.kind.exact else grow(settings.kind, vectors, work, on_stage)
    kept = _keep(vectors, work, settings.dtype, on_stage)
    parameters, recall = _measure(corpus, encoder, settings, vectors, kept, index, on_stage)
    encoder.save(work)
    return Manifest(
        format=FORMAT,
        kind=settings.kind.family,
        factory=settings.kind.name,
        passages=len(corpus),
        dim=encoder.dim,
        embed=settings.embed,
        encoder=encoder.name,
        encoder_fingerprint=encoder.fingerprint,
        corpus_sha256=corpus.sha256,
        corpus_paths=corpus_paths(corpus, folder),
        dtype=settings.dtype,
        vectors_bytes=0 if kept is None else kept.size,
        index_bytes=0 if index is None else (work / INDEX_FILE).stat().st_size,
        largest_norm=_largest_norm(kept or vectors),
        parameters=parameters,
        recall=recall,
        reason=settings.reason,
        faiss_version="" if index is None else faiss.__version__,
        hashed=True,
    )


def _take_up(work: Path, corpus: Corpus, encoder: Encoder, settings: BuildSettings) -> None:
    """Compare the recorded settings of `work` with the present ones, and remove files that have no further use."""
    for torn in work.glob(".*.tmp"):
        torn.unlink()  # a temporary file of a killed process
    path = work / RECORD_FILE
    wanted = {
        "corpus": corpus.sha256,
        "encoder": encoder.fingerprint,
        "embed": settings.embed,
        "shape": [len(corpus), encoder.dim],
        "kind": settings.kind.name,
        "dtype": settings.dtype,
    }
    begun = read_json_object(path) if path.is_file() else _complete(work)
    if begun is not None:
        for name in ("corpus", "encoder", "embed", "shape"):
            if begun.get(name) != wanted[name]:
                raise UserError(
                    f"{work}: an unfinished index over another {name} ({_short(begun.get(name))}, now "
                    f"{_short(wanted[name])}); finish it with the command that started it, or remove the folder"
                )
        if begun.get("kind") != wanted["kind"]:
            for name in (*SCRATCH, INDEX_FILE):
                VectorFile(work / name, 0, 1).remove()
        if begun != wanted:
            (work / MANIFEST).unlink(missing_ok=True)
    if not path.is_file() or begun != wanted:
        atomic_write_text(path, json.dumps(wanted, indent=2) + "\n")


def _complete(work: Path) -> dict[str, Any] | None:
    """Return the settings of an index that is complete but for its name; None if there is none."""
    if not (work / MANIFEST).is_file():
        return None
    manifest = read_manifest(work)
    return {
        "corpus": manifest.corpus_sha256,
        "encoder": manifest.encoder_fingerprint,
        "embed": manifest.embed,
        "shape": [manifest.passages, manifest.dim],
        "kind": manifest.factory,
        "dtype": manifest.dtype,
    }


def _short(value: Any) -> str:
    return value[:12] if isinstance(value, str) else " x ".join(map(str, value)) if isinstance(value, list) else "?"


def _encode(corpus: Corpus, encoder: Encoder, embed: str, vectors: VectorFile, on_stage: OnStage) -> None:
    done = vectors.done()
    for start in range(done, len(corpus), BUILD_BATCH):
        texts = [embedded_text(passage, embed) for passage in corpus[start : start + BUILD_BATCH]]
        vectors.append(checked_vectors(encoder, encoder.encode_passages(texts), len(texts), encoder.dim))
        on_stage("encoding", start + len(texts), len(corpus))


def _keep(vectors: VectorFile, work: Path, dtype: str, on_stage: OnStage) -> VectorFile | None:
    """Return the vector file that the finished index keeps; None if it keeps none. If its dtype is not that of
    `vectors`, it is made from them."""
    if dtype == NOT_KEPT:
        return None
    if dtype == "float32":
        return vectors
    kept = VectorFile(work / KEPT_FILES[dtype], vectors.rows, vectors.dim, dtype)
    for start, part_BD in vectors.slices(kept.done()):
        with np.errstate(over="ignore"):
            rounded_BD = part_BD.astype(kept.dtype)
        if not np.isfinite(rounded_BD).all():
            raise UserError(f"{work}: vectors beyond float16's 65,504; keep them in float32 (--kind flat)")
        kept.append(rounded_BD)
        on_stage("rounding to float16", start + len(part_BD), vectors.rows)
    return kept


def _measure(
    corpus: Corpus,
    encoder: Encoder,
    settings: BuildSettings,
    vectors: VectorFile,
    kept: VectorFile | None,
    index: Any,
    on_stage: OnStage,
) -> tuple[dict[str, int], dict[str, float]]:
    """Return the search parameters, if any, and the recall on a sample; both empty for a lossless kind."""
    if settings.kind.lossless:
        return {}, {}
    truth = SampleTruth(vectors, sample_queries(corpus, encoder, settings.embed, vectors), on_stage)
    if index is None:
        assert kept is not None  # flat16 keeps its matrix
        return {}, truth.recalls(ExactRows(kept.open(), _largest_norm(kept)).top)
    exact = None if kept is None else RowScores(kept.take)
    search = ApproximateSearch(candidates_of(settings.kind, index), exact, vectors.rows, 1, 1)
    # More candidates do not help if their estimated scores are not replaced by exact ones.
    factors = CODE_FACTORS if settings.kind.estimates and exact is not None else WHOLE_FACTORS
    tune(search, truth, settings.recall, factors, on_stage)
    parameters = {search.candidates.parameter: search.value, "candidates": search.factor}
    return parameters, truth.recalls(search.top)


def _largest_norm(vectors: VectorFile) -> float:
    return max(largest_row_norm(part_BD) for _, part_BD in vectors.slices())


def _tidy(work: Path, settings: BuildSettings) -> None:
    """Write the hashes, and remove files that the finished index does not need. The manifest exists already, so a kill
    here loses nothing. The record of the settings is removed last."""
    for dtype, name in KEPT_FILES.items():
        if dtype != settings.dtype:
            VectorFile(work / name, 0, 1).remove()
    for name in SCRATCH:
        VectorFile(work / name, 0, 1).remove()
    write_index_hashes(work, (RECORD_FILE,))
    (work / RECORD_FILE).unlink()


def _publish(work: Path, folder: Path) -> None:
    """Flush the finished folder to disk, and rename it."""
    for path in (*sorted(work.rglob("*")), work):
        flush(path)
    os.rename(work, folder)
    flush(folder.parent)


def _check_disk(work: Path, settings: BuildSettings, passages: int, dim: int) -> None:
    """Raise UserError if the disk has no room for the files that are still to be written."""
    half = 2 * passages * dim if settings.dtype == "float16" else 0
    needed = estimate(settings.kind, passages, dim).disk_bytes + half
    needed = max(needed, 4 * passages * dim + half)
    present = sum(path.stat().st_size for path in work.iterdir())
    need_room(work, needed - present, f"{settings.kind.name} over {passages:,} x {dim}")
